"""Trains a small net on the digits and reports the weights that all ranks share.

An ordinary Gluon script, but for its report: one line of JSON from each rank, with the
sha256 of the global weights and what the process sees of its surroundings.
"""

import argparse
import hashlib
import json
import os
import socket
import sys

import odsgd_kvstore  # Before MXNet.

# isort: split
import mxnet as mx
import numpy as np
from mxnet import autograd, gluon
from mxnet.gluon import nn
from sklearn.datasets import load_digits

BATCH = 16


def build_net():
    """Return a net of two layers, with the same weights everywhere."""
    net = nn.HybridSequential()
    net.add(nn.Dense(32, activation="relu", in_units=64), nn.Dense(10, in_units=32))
    mx.random.seed(5)
    net.initialize(mx.init.Xavier())
    return net


def batch(data, step, rank, num_workers):
    """Return the images and labels of a rank at a step."""
    images, labels = data
    start = (step * num_workers + rank) * BATCH % (len(labels) - BATCH)
    index = slice(start, start + BATCH)
    return mx.nd.array(images[index] / 16), mx.nd.array(labels[index])


def report(store, net):
    """Print what the tests compare."""
    values = [p.data().asnumpy() for p in net.collect_params().values()]
    text = b"".join(np.ascontiguousarray(value).tobytes() for value in values)
    prefixes = ("DMLC_", "ODSGD_", "MXNET_", "MINE", "PYTHON", "LD_", "OMP_", "PORT")
    env = {k: v for k, v in os.environ.items() if k.startswith(prefixes)}
    env.pop("ODSGD_KEY", None)
    seen = {
        "rank": store.rank,
        "num_workers": store.num_workers,
        "sha256": hashlib.sha256(text).hexdigest(),
        "host": socket.gethostname(),
        "executable": sys.executable,
        "argv": sys.argv[1:],
        "cwd": os.getcwd(),
        "path": sys.path,
        "env": env,
        "has_key": bool(os.environ.get("ODSGD_KEY")),
    }
    print("REPORT " + json.dumps(seen), flush=True)


def main():
    """Train, then report."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("words", nargs="*", help="only reported")
    args = parser.parse_args()
    store = mx.kv.create("dist_odsgd")
    rank, num_workers = store.rank, store.num_workers
    digits = load_digits()
    net, loss = build_net(), gluon.loss.SoftmaxCrossEntropyLoss()
    settings = {"learning_rate": 0.1, "momentum": 0.9}
    trainer = gluon.Trainer(net.collect_params(), "sgd", settings, kvstore=store)
    for step in range(args.steps):
        data, label = batch((digits.data, digits.target), step, rank, num_workers)
        with autograd.record():
            losses = loss(net(data), label)
        losses.backward()
        trainer.step(BATCH * num_workers)
        if step == 3:
            print(f"TRAINING {rank}", flush=True)
    with odsgd_kvstore.global_weights(trainer):
        report(store, net)


if __name__ == "__main__":
    main()

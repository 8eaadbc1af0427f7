"""An ordinary Gluon script: a small net on the 8x8 digits of scikit-learn.

It trains alone, or on a cluster with any KVStore type that MXNet knows::

    python benchmarks/digits.py
    odsgd-launch --stock-servers -n 3 -s 2 -- \\
        python benchmarks/digits.py --kvstore dist_sync

Each worker takes its share of every epoch; all make equally many steps. The accuracy
that each rank prints is that of the parameters it holds after its last step: with a
type whose workers hold local weights between steps, these are the local ones.
"""

import argparse
import sys
import time

import numpy as np

# MXNet 1.9.1 uses this alias of Python's bool, which is gone from NumPy 1.24.
np.bool = bool

import mxnet as mx
from mxnet import autograd, gluon
from mxnet.gluon import nn

TEST_SHARE = 0.2


def load_data(seed):
    """Return the digits, shuffled and split, the same on every rank.

    Parameters
    ----------
    seed : int
        Seed of the shuffle.

    Returns
    -------
    tuple of numpy.ndarray
        Training images (n, 1, 8, 8) from 0 to 1 and labels (n,), then those of the
        test; float32.
    """
    from sklearn.datasets import load_digits

    digits = load_digits()
    order = np.random.RandomState(seed).permutation(len(digits.target))
    images = (digits.images[order, np.newaxis] / 16).astype("float32")
    labels = digits.target[order].astype("float32")
    cut = round(len(order) * (1 - TEST_SHARE))
    return images[:cut], labels[:cut], images[cut:], labels[cut:]


def build_net(name, seed):
    """Return a new net, `name` 'conv' or 'mlp', with weights drawn from `seed`."""
    net = nn.HybridSequential()
    if name == "conv":
        net.add(
            nn.Conv2D(16, 3, padding=1, activation="relu", in_channels=1),
            nn.Conv2D(32, 3, padding=1, activation="relu", in_channels=16),
            nn.MaxPool2D(),
            nn.Dense(64, activation="relu", in_units=32 * 4 * 4),
            nn.Dense(10, in_units=64),
        )
    else:
        net.add(
            nn.Dense(128, activation="relu", in_units=64),
            nn.Dense(10, in_units=128),
        )
    mx.random.seed(seed)
    net.initialize(mx.init.Xavier())
    net.hybridize()
    return net


def count_batches(num_samples, batch_size, num_workers):
    """Return how many batches each worker takes in an epoch."""
    count = num_samples // (batch_size * num_workers)
    if count == 0:
        sys.exit(
            f"{num_workers} workers with batches of {batch_size} need more than the "
            f"{num_samples} images there are: give a smaller --batch-size"
        )
    return count


def batches(images, labels, batch_size, rank, num_workers, seed):
    """Yield this rank's batches of an epoch: as many as on any other rank.

    All ranks draw the same permutation from `seed`; each takes its own part of it,
    and what remains is dropped.
    """
    count = count_batches(len(labels), batch_size, num_workers)
    order = np.random.RandomState(seed).permutation(len(labels))
    for start in range(rank * count, (rank + 1) * count):
        index = order[start * batch_size : (start + 1) * batch_size]
        yield mx.nd.array(images[index]), mx.nd.array(labels[index])


def accuracy(net, images, labels):
    """Return the share of `images` that `net` classifies as in `labels`."""
    scores = net(mx.nd.array(images)).asnumpy()
    return float((scores.argmax(axis=1) == labels).mean())


def train_batch(net, trainer, data, label, global_batch_size):
    """Make one step and return the losses, which may still be computed."""
    with autograd.record():
        loss = gluon.loss.SoftmaxCrossEntropyLoss()(net(data), label)
    loss.backward()
    # Gradients are summed over the workers: divide by everybody's samples.
    trainer.step(global_batch_size)
    return loss


def optimizer_params(args):
    """Return the optimizer's settings; momentum only where it has one."""
    params = {"learning_rate": args.lr, "wd": args.wd}
    if args.optimizer in ("sgd", "nag", "signum"):
        params["momentum"] = args.momentum
    return params


def train(args):
    """Train as `args` say, and print what came of it."""
    # The store first: in a job it is what connects this process to the others.
    store = mx.kv.create(args.kvstore)
    rank, num_workers = store.rank, store.num_workers
    images, labels, test_images, test_labels = load_data(args.seed)
    count = count_batches(len(labels), args.batch_size, num_workers)
    net = build_net(args.net, args.seed)
    trainer = gluon.Trainer(
        net.collect_params(), args.optimizer, optimizer_params(args), kvstore=store
    )
    for epoch in range(args.epochs):
        start, total = time.perf_counter(), mx.nd.zeros(1)
        epoch_seed = args.seed + 1 + epoch
        for data, label in batches(
            images, labels, args.batch_size, rank, num_workers, epoch_seed
        ):
            global_batch_size = args.batch_size * num_workers
            loss = train_batch(net, trainer, data, label, global_batch_size)
            total += loss.mean()
        mean_loss = total.asscalar() / count
        speed = count * args.batch_size / (time.perf_counter() - start)
        report(rank, f"epoch {epoch + 1}: loss {mean_loss:.4f}, {speed:.0f} samples/s")
    correct = accuracy(net, test_images, test_labels)
    report(rank, f"test accuracy {100 * correct:.2f} %")


def report(rank, text):
    """Print a line about this rank at once."""
    print(f"[rank {rank}] {text}", flush=True)


def positive(text):
    """Return `text` as a whole number above 0, for argparse."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a whole number above 0")
    return value


def parse(argv=None):
    """Return the settings of the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--kvstore", default="device", help="KVStore type")
    add("--epochs", type=positive, default=20, help="passes over the data")
    add("--batch-size", type=positive, default=32, help="samples of a worker's step")
    add("--lr", type=float, default=0.05, help="learning rate")
    add("--momentum", type=float, default=0.9, help="of sgd, nag and signum")
    add("--wd", type=float, default=1e-4, help="weight decay")
    add("--optimizer", default="sgd", help="name of an MXNet optimizer")
    add("--seed", type=int, default=2, help="of the split, the order and the weights")
    add("--net", choices=["conv", "mlp"], default="conv", help="which net to train")
    return parser.parse_args(argv)


if __name__ == "__main__":
    train(parse())

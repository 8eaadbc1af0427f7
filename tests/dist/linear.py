"""Parameters under a loss that is linear in them, so that gradients are known.

For functions that run on the workers, and for the oracles beside them. Gradients are
dyadic, so that sums over workers have no rounding.
"""

import os

import mxnet as mx
import numpy as np
from mxnet import autograd, gluon

import odsgd_kvstore

WORKERS = 2
SHAPE = (3, 2)


def rank():
    return int(os.environ["ODSGD_LOCAL_RANK"])


def gradient(step, worker, which=0):
    """A dyadic gradient, another one for each step, worker, parameter and element."""
    rows = np.arange(6, dtype=np.float32).reshape(SHAPE)
    return ((step * 5 + worker * 3 + which * 7) % 11 - 5 + rows % 4) / 8


def total(step, which=0):
    return sum(gradient(step, worker, which) for worker in range(WORKERS))


def make_params(count=2, value=1.0):
    params = [gluon.Parameter(f"p{i}", shape=SHAPE) for i in range(count)]
    for param in params:
        param.initialize(mx.init.Constant(value))
    return params


def backward(params, step, only=None):
    with autograd.record():
        outputs = [
            param.data() * mx.nd.array(gradient(step, rank(), which))
            for which, param in enumerate(params)
            if param.grad_req != "null" and only in (None, which)
        ]
    autograd.backward(outputs)


def values(params):
    return [param.data().asnumpy() for param in params]


def global_values(trainer, params):
    with odsgd_kvstore.global_weights(trainer):
        return values(params)


def sgd_params():
    return {"learning_rate": 0.5, "momentum": 0.5}


def sgd_oracle(weight, momentum, grad):
    """MXNet's SGD with `sgd_params`, on the sum over the workers."""
    momentum = 0.5 * momentum - 0.5 * grad
    return weight + momentum, momentum

"""BatchNorm's statistics as a function of the weights alone, for evaluation."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

import mxnet as mx
import networks
from mxnet import autograd, gluon
from mxnet.gluon import nn


@contextlib.contextmanager
def population_statistics(net: gluon.HybridBlock, images: Iterable[Any]) -> Iterator:
    """BatchNorm's running statistics are those of `images` at the weights there are.

    A worker's running statistics are means over its latest batches at the weights it
    had then: its own data, and weights of the past or (with dist_odsgd) local ones. So
    the accuracy would differ between ranks, and a method's delay would show twice.
    Estimated anew, from the same images on each rank, they are a function of the
    weights alone. Training goes on with the old ones.

    Parameters
    ----------
    net : HybridBlock
    images : iterable of NDArray
        Batches of equal size, as large as in training; not read without BatchNorm.

    Raises
    ------
    ValueError
        There are no images, but BatchNorm.
    """
    norms = find_norms(net)
    old = [[s.data().copy() for s in statistics(norm)] for norm in norms]
    for norm, moments in zip(norms, mean_moments(net, norms, images)):
        for statistic, moment in zip(statistics(norm), moments):
            statistic.data()[:] = moment
    try:
        yield
    finally:
        for norm, kept in zip(norms, old):
            for statistic, values in zip(statistics(norm), kept):
                statistic.data()[:] = values


def find_norms(net: gluon.Block) -> list[nn.BatchNorm]:
    """The layers of a network that have running statistics."""
    found: list[nn.BatchNorm] = []
    net.apply(lambda block: found.append(block) if is_norm(block) else None)
    return found


def is_norm(block: gluon.Block) -> bool:
    """Whether a layer normalises by the batch in training."""
    return isinstance(block, nn.BatchNorm) and not block._kwargs["use_global_stats"]


def statistics(norm: nn.BatchNorm) -> list[gluon.Parameter]:
    """Running mean and variance."""
    return [norm.running_mean, norm.running_var]


def mean_moments(
    net: gluon.HybridBlock, norms: list[nn.BatchNorm], images: Iterable[Any]
) -> list[list[mx.nd.NDArray]]:
    """Mean and variance of what goes into each layer, averaged over the batches."""
    if not norms:
        return []
    sums = {norm: [s.data().zeros_like() for s in statistics(norm)] for norm in norms}

    def add(norm: nn.BatchNorm, inputs: tuple) -> None:
        axis = norm._kwargs["axis"] % inputs[0].ndim
        others = tuple(i for i in range(inputs[0].ndim) if i != axis)
        for total, moment in zip(sums[norm], mx.nd.moments(inputs[0], axes=others)):
            total += moment

    # MXNet updates running statistics in the backward pass, which would cost twice the
    # forward pass. What is compiled calls no hooks.
    net.hybridize(False)
    hooks = [norm.register_forward_pre_hook(add) for norm in norms]
    with autograd.train_mode():  # normalise by the batch
        count = 0
        for count, batch in enumerate(images, 1):
            net(batch)
    for hook in hooks:
        hook.detach()
    networks.compile_block(net)
    if not count:
        raise ValueError("BatchNorm's statistics need one batch of images at least.")
    return [[total / count for total in sums[norm]] for norm in norms]

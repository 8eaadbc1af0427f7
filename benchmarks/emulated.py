"""Networks as lists of shapes, and their computation emulated by sleeping.

A machine with few cores cannot compute for many workers and measure communication at
the same time. So each layer's forward and backward pass is an operation of MXNet's
engine that only sleeps: it waits for the weights that it reads, and what reads the
gradients that it writes waits for it, as with a real device.
"""

from __future__ import annotations

import ctypes
import re
import time
from dataclasses import dataclass
from typing import Any, Iterator, Tuple

Shape = Tuple[int, ...]

FORWARD_SHARE = 1 / 3  # of a step's computation; the backward pass takes twice as long
BYTES_PER_NUMBER = 4
MAX_DEBT_S = 0.01


@dataclass(frozen=True)
class Network:
    """The parameters of a network, layer by layer.

    Parameters
    ----------
    name : str
        As given to ``--network``.
    layers : tuple of tuple of shape
        Arrays in the order in which Gluon creates them.
    bigarray_bound : int, optional
        MXNET_KVSTORE_BIGARRAY_BOUND for MXNet's own stores. They put whole arrays below
        1,000,000 numbers on the server ``key % num_servers``, which gives all weights
        to one of two servers where weights and biases alternate. A lower bound is fair
        to them; None keeps the default.
    """

    name: str
    layers: tuple[tuple[Shape, ...], ...]
    bigarray_bound: int | None = None

    @property
    def shapes(self) -> list[Shape]:
        """All arrays, in order."""
        return [shape for layer in self.layers for shape in layer]

    @property
    def num_numbers(self) -> int:
        """Parameters in all arrays together."""
        return sum(_size(shape) for shape in self.shapes)

    @property
    def payload_bytes(self) -> int:
        """What a worker sends, and receives, in one step without compression."""
        return BYTES_PER_NUMBER * self.num_numbers


def dense(name: str, *widths: int, bigarray_bound: int | None = 4096) -> Network:
    """A network of fully connected layers: ``len(widths) - 1`` weights and biases."""
    layers = tuple(((out, into), (out,)) for into, out in zip(widths, widths[1:]))
    return Network(name, layers, bigarray_bound)


def lenet() -> Network:
    """LeNet for 28 x 28 grey images: 8 arrays, 431,080 numbers."""
    convolutions = (((20, 1, 5, 5), (20,)), ((50, 20, 5, 5), (50,)))
    return Network("lenet", (*convolutions, *dense("", 800, 500, 10).layers), 4096)


def resnet50() -> Network:
    """ResNet-50 for 1000 classes: 161 arrays, 25,557,032 numbers."""
    return Network(
        "resnet50", (*_resnet50_convolutions(), *dense("", 2048, 1000).layers)
    )


def _resnet50_convolutions() -> Iterator[tuple[Shape, ...]]:
    """Weight, gamma and beta of each convolution with its batch normalisation."""
    yield _convolution(3, 64, 7)
    channels = 64
    for width, num_blocks in ((64, 3), (128, 4), (256, 6), (512, 3)):
        for block in range(num_blocks):
            yield _convolution(channels, width, 1)
            yield _convolution(width, width, 3)
            yield _convolution(width, 4 * width, 1)
            if block == 0:
                yield _convolution(channels, 4 * width, 1)  # of the shortcut
            channels = 4 * width


def _convolution(into: int, out: int, kernel: int) -> tuple[Shape, ...]:
    return (out, into, kernel, kernel), (out,), (out,)


def _size(shape: Shape) -> int:
    size = 1
    for length in shape:
        size *= length
    return size


NETWORKS = {
    network.name: network
    for network in (
        dense("mlp2", 512, 512, 512),
        dense("mlp8", *[256] * 9),
        dense("mlp12", 784, *[512] * 11, 10),
        lenet(),
        resnet50(),
    )
}


def find_network(name: str) -> Network:
    """One of `NETWORKS`, or '160x256': as many layers of one array with 256 numbers."""
    if name in NETWORKS:
        return NETWORKS[name]
    match = re.match(r"([1-9]\d*)x([1-9]\d*)\Z", name)
    if not match:
        known = ", ".join(NETWORKS)
        raise ValueError(
            f"the network is {name!r}; known are {known}, and ARRAYSxNUMBERS such as "
            "160x256"
        )
    count, size = map(int, match.groups())
    return Network(name, (((size,),),) * count)


class EmulatedDevice:
    """Runs operations of MXNet's engine that sleep, on the pseudo device cpu(1).

    That device has a thread of its own, so a pass does not hold up what MXNet does for
    the weights on cpu(0). Operations that share a mutable array run in order.
    """

    def __init__(self) -> None:
        from mxnet import base

        self._lib, self._check = base._LIB, base.check_call
        self._context = (ctypes.c_int32 * 2)(1, 1)  # MXNet's struct: type CPU, number 1
        self._callback_type = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p)
        self._debt_s = 0.0  # by how much the last sleep was too long

    def operation(self, seconds: float, at_end: Any = None) -> Any:
        """An operation for `run`; keep it as long as it may run."""

        def work(_run_context: Any, _parameter: Any) -> None:
            self._sleep(seconds)
            if at_end is not None:
                at_end()

        return self._callback_type(work)

    def run(self, operation: Any, reads: list[Any], writes: list[Any]) -> None:
        """Queue an operation that reads and writes NDArrays; returns at once."""
        handles = [
            (ctypes.c_void_p * len(arrays))(*(array.handle for array in arrays))
            for arrays in (reads, writes)
        ]
        self._check(
            self._lib.MXEnginePushSyncND(
                operation,
                None,
                None,
                ctypes.byref(self._context),
                handles[0],
                len(reads),
                handles[1],
                len(writes),
                None,
                0,
                b"emulated",
            )
        )

    def _sleep(self, seconds: float) -> None:
        """Sleep; what an earlier sleep took too long is made up for."""
        end = time.perf_counter() + seconds - self._debt_s
        time.sleep(max(0.0, end - time.perf_counter()))
        self._debt_s = min(max(0.0, time.perf_counter() - end), MAX_DEBT_S)


class EmulatedNet:
    """A network's Gluon parameters on this worker, and its emulated passes.

    Parameters
    ----------
    network : Network
    compute_ms : float
        How long the forward and the backward pass take together, shared equally
        between the layers.
    seed : int
        For the gradients, which stay as they are unless a store overwrites them.

    Attributes
    ----------
    params : list of gluon.Parameter
        Initialised, for any trainer.
    ends_s : list of float
        When each backward pass ended, by `time.perf_counter`.
    """

    def __init__(self, network: Network, compute_ms: float, seed: int = 0) -> None:
        from mxnet import nd

        self.params = _make_parameters(network, seed)
        self.ends_s: list[float] = []
        self._layers = _by_layer(network, self.params)
        self._device = EmulatedDevice()
        seconds = compute_ms / 1000 / len(network.layers)
        share, device = FORWARD_SHARE, self._device
        self._forward = device.operation(seconds * share)
        self._backward = device.operation(seconds * (1 - share))
        self._last = device.operation(seconds * (1 - share), self._note_end)
        self._activation = nd.zeros((1,))
        self._pass_ends = [nd.zeros((1,)) for _ in range(2)]  # in turn
        self._num_passes = 0

    def forward_backward(self) -> None:
        """Queue both passes and mark the gradients fresh; returns at once."""
        layers = [
            ([p.list_data()[0] for p in layer], [p.list_grad()[0] for p in layer])
            for layer in self._layers
        ]
        activation, run = self._activation, self._device.run
        for weights, _ in layers:
            run(self._forward, weights, [activation])
        for weights, gradients in reversed(layers[1:]):
            run(self._backward, weights, [activation, *gradients])
        weights, gradients = layers[0]
        end = self._pass_ends[self._num_passes % 2]
        run(self._last, weights, [activation, end, *gradients])
        for weights, _ in layers:
            for weight in weights:
                weight._fresh_grad = True  # as MXNet's own backward pass does
        self._num_passes += 1

    def wait_for_earlier(self) -> None:
        """Until the backward pass before the newest has ended.

        A training loop that reads a loss or a metric is held up in this way; without
        it the host would run ahead of the device without limit.
        """
        if self._num_passes > 1:
            self._pass_ends[self._num_passes % 2].wait_to_read()

    def wait_for_newest(self) -> None:
        """Until the newest backward pass has ended."""
        self._pass_ends[(self._num_passes - 1) % 2].wait_to_read()

    def mean_ms(self, first: int, last: int) -> float:
        """Mean time from the end of pass `first` to that of pass `last`."""
        return 1000 * (self.ends_s[last] - self.ends_s[first]) / (last - first)

    def _note_end(self) -> None:
        self.ends_s.append(time.perf_counter())


def _make_parameters(network: Network, seed: int) -> list[Any]:
    """Gluon parameters with constant weights and random gradients."""
    import numpy as np
    from mxnet import gluon, init, nd

    # A deviation of a 20th of the threshold of 2-bit compression: a number is sent
    # now and then, at different steps, as in training.
    random = np.random.RandomState(seed).normal(0, 0.025, 1 << 16).astype("float32")
    params = []
    for number, shape in enumerate(network.shapes):
        param = gluon.Parameter(f"p{number:03d}", shape=shape)
        param.initialize(init.Constant(0.01))
        param.list_grad()[0][:] = nd.array(np.resize(random, shape))
        params.append(param)
    nd.waitall()
    return params


def _by_layer(network: Network, params: list[Any]) -> list[list[Any]]:
    """The parameters in groups, one for each layer."""
    remaining = iter(params)
    return [[next(remaining) for _ in layer] for layer in network.layers]

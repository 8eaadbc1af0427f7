"""Flat views of arrays, and copies that cast."""

from __future__ import annotations

from mxnet import ndarray as nd


class Views:
    """An array with flat views, made once: making one costs as much as an operator.

    Of our own arrays and of gradients only. oneDNN keeps the weights of a network that
    has made a prediction in a layout of its own, and MXNet 1.9.1 then ends the process
    when an operator meets a view of them: weights are read and written whole.
    """

    def __init__(self, array: nd.NDArray | None = None) -> None:
        self.array = array
        self._views: dict[tuple[int, int], nd.NDArray] = {}

    def follow(self, array: nd.NDArray) -> None:
        """Be of another array from now on."""
        if array is not self.array:
            self.array = array
            self._views.clear()

    def view(self, start: int, stop: int) -> nd.NDArray:
        """Numbers `start` to `stop`, which share the array's memory."""
        view = self._views.get((start, stop))
        if view is None:
            flat = self.array.reshape(-1)
            whole = (start, stop) == (0, flat.size)
            view = flat if whole else flat._slice(start, stop)
            self._views[start, stop] = view
        return view


def copy_to(source: nd.NDArray, target: nd.NDArray) -> None:
    """Copy, with a cast if need be; returns before it is done.

    MXNet casts while it copies, but not between a CPU and a GPU, nor into weights that
    oneDNN has laid out.
    """
    source.astype(target.dtype, copy=False).copyto(target)


def flat_copy(weight: nd.NDArray) -> nd.NDArray:
    """Weights as one row; a copy unless they are one row already."""
    return weight if len(weight.shape) == 1 else weight.copy().reshape(-1)

"""Flat views of arrays."""

from __future__ import annotations

from mxnet import ndarray as nd


class Views:
    """Flat views of an array, made once: making one costs as much as an operator."""

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

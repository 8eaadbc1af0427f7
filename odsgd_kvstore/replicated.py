"""A parameter as this worker keeps it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Iterable, Sequence

from mxnet import ndarray as nd

from .errors import ConfigError
from .views import Views


@dataclass(eq=False)
class Replicated:
    """One parameter as this worker keeps it.

    Counters: the store counts steps; `update` counts this parameter's, which is behind
    if it came later or paused. A server counts the same, and MXNet's `num_update`, for
    a learning-rate schedule, is the store's step.

    Attributes
    ----------
    key : int or str
        The user's key.
    shape, size : tuple, int
    index : int or str
        The parameter's index in the optimizer.
    weights : list of NDArray, float32
        The Parameter's own arrays, one per device; between steps L(i,t).
    block : Block
        Where it is updated; `place` is its number there.
    order : int
        Its place among the store's parameters.
    update : int
        Updates of this parameter so far: the t of W(t).
    base : int
        The t of the W(t) from which the local weight was made.
    step : int
        The store's step in which the newest gradient came; -1 before the first.
    is_local : bool
        Whether L may differ from W.
    gradients : list of Views
        Of the user's arrays, one per device.
    """

    key: Any
    shape: tuple[int, ...]
    size: int
    index: Any
    weights: list[nd.NDArray]
    block: Any = None
    place: int = 0
    order: int = -1
    update: int = 0
    base: int = 0
    step: int = -1
    is_local: bool = False
    gradients: list[Views] = field(default_factory=list)

    def take(
        self, gradients: Sequence[nd.NDArray], weights: Sequence[nd.NDArray]
    ) -> None:
        """Know the user's arrays of this step."""
        if self.gradients and len(gradients) != len(self.gradients):
            raise ConfigError(
                f"Parameter {self.key} came with gradients of {len(gradients)} devices; "
                f"it began with {len(self.gradients)}, and keeps that number."
            )
        self.gradients = self.gradients or [Views() for _ in gradients]
        for views, gradient in zip(self.gradients, gradients):
            dense = gradient.stype == "default"
            views.follow(gradient if dense else gradient.tostype("default"))
        self.weights = list(weights)

    def advance(self, staleness: int) -> None:
        """Count the update whose W(t+1) is on its way.

        `staleness` is that of the next gradient: 0 if L(t+1) is W(t+1).
        """
        self.update += 1
        self.base = self.update - staleness
        self.is_local = staleness > 0

    def wait(self) -> None:
        """Until W of every update that this rank has asked for is here."""
        if self.block.global_weight is not None:
            self.block.global_weight.array.wait_to_read()
        for weight in self.weights:
            weight.wait_to_read()

    def use_global(self) -> None:
        """Make L = W in every device's array; returns before the pull is done."""
        self.block.copy_out(self.block.global_weight, [self.place])
        self.base, self.is_local = self.update, False


def wait_for_pulls(records: Iterable[Replicated]) -> None:
    """Until W of every step that this rank has made is here."""
    for record in records:
        if record.update > 0:
            record.wait()

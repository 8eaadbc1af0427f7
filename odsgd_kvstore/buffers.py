"""One parameter's arrays on a worker: gradient in transit, W(t), L(i,t).

With A holding W(t) (`global_weight`) and B holding W(t-1) (`spare`): the local
update leaves B free, W(t+1) is pulled into it, and A and B change places.
Invariant: for a rule that keeps W(t-1), A - B is the servers' momentum.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Sequence

from mxnet import ndarray as nd
from mxnet.context import Context

from .errors import ConfigError


@dataclass
class Replicated:
    """One parameter as this worker keeps it.

    Counters: the store counts steps; `update` counts this parameter's, which is behind
    by `offset` if it came later or paused. A server's `count` is the same as `update`,
    and MXNet's `num_update`, for a learning-rate schedule, is the store's step.

    Attributes
    ----------
    key, native : int or str, int
        The user's key and ours.
    shape, size : tuple, int
    index : int or str
        The parameter's index in the optimizer.
    weights : list of NDArray, float32
        The Parameter's own arrays, one per device; between steps L(i,t).
    update : int
        Updates of this parameter so far: the t of W(t).
    base : int
        The t of the W(t) from which the local weight was made.
    step : int
        The store's step of the newest push; -1 before the first.
    offset : int
        Steps by which the store is ahead of `update`, as the servers know it.
    is_local : bool
        Whether L may differ from W.
    staging : NDArray, float32
        This worker's gradient of the step, summed over its devices; then in transit.
    others : list of NDArray, float32
        Where the gradients of further devices are brought to be added.
    global_weight : NDArray, float32
        A: W(t), the newest pulled or on its way. None with delay 0.
    spare : NDArray, float32
        B: W(t-1), and what W(t+1) is pulled into. None unless the rule keeps it.
    local_weight : NDArray, float32
        L(i,t+1) where the sum is made; the Parameter's own array if it lives there.
    """

    key: Any
    native: int
    shape: tuple[int, ...]
    size: int
    index: Any
    weights: list[nd.NDArray]
    update: int = 0
    base: int = 0
    step: int = -1
    offset: int = 0
    is_local: bool = False
    staging: nd.NDArray | None = None
    others: list[nd.NDArray] = field(default_factory=list)
    global_weight: nd.NDArray | None = None
    spare: nd.NDArray | None = None
    local_weight: nd.NDArray | None = None

    def allocate(self, context: Context, delayed: bool, keeps_previous: bool) -> None:
        """Make the arrays, on `context`, at the first push; W(0) is in `weights`."""
        self.staging = nd.empty(self.shape, context)
        self.others = [nd.empty(self.shape, context) for _ in self.weights[1:]]
        if delayed:
            self.global_weight = self.weights[0].copyto(context)
        if delayed and keeps_previous:
            self.spare = self.weights[0].copyto(context)

    def stage(self, gradients: Sequence[nd.NDArray], ratio: float) -> nd.NDArray:
        """The sum of the devices' gradients times `ratio`, in the staging array.

        One array per parameter, used again each step: the engine then keeps the
        steps of a parameter in order (fresh ones gave wrong sums in MXNet 1.9.1).
        """
        if len(gradients) != len(self.others) + 1:
            raise ConfigError(
                f"Parameter {self.key} came with gradients of {len(gradients)} devices; "
                f"it began with {len(self.others) + 1}, and keeps that number."
            )
        gradients[0].copyto(self.staging)
        for gradient, other in zip(gradients[1:], self.others):
            gradient.copyto(other)
            nd.elemwise_add(self.staging, other, out=self.staging)
        if ratio != 1.0:
            self.staging *= ratio
        return self.staging

    def make_local(self) -> nd.NDArray:
        """The array, beside the gradient, that the local update writes L into."""
        if self.weights[0].context == self.staging.context:
            return self.weights[0]
        if self.local_weight is None:
            self.local_weight = nd.empty(self.shape, self.staging.context)
        return self.local_weight

    def spread_local(self, local_weight: nd.NDArray) -> None:
        """Copy L to every device."""
        for weight in self.weights:
            if weight is not local_weight:
                local_weight.copyto(weight)
        self.is_local = True

    def pull_targets(self, warmup: bool) -> list[nd.NDArray]:
        """The arrays that W(t+1) is pulled into."""
        target = self.global_weight if self.spare is None else self.spare
        kept = [] if target is None else [target]
        return kept + self.weights if warmup else kept

    def advance(self, staleness: int, step: int) -> None:
        """Count the update whose W(t+1) is on its way into `pull_targets`.

        `staleness` is that of the next gradient: 0 if L(t+1) is W(t+1).
        """
        if self.spare is not None:
            self.global_weight, self.spare = self.spare, self.global_weight
        self.update += 1
        self.base = self.update - staleness
        self.step = step
        self.is_local = staleness > 0

    def use_global(self) -> None:
        """Make L = W in every device's array; returns before the pull is done."""
        for weight in self.weights:
            self.global_weight.copyto(weight)
        self.base, self.is_local = self.update, False

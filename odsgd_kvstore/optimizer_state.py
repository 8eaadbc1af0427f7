"""An MXNet optimizer applied to flat arrays, and to parts of them.

The servers' update and the `replica` rule both need this. A pack holds several
parameters side by side; those with the same multipliers and count are one run, updated
at once, which is the same for an optimizer that treats every number alike.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Hashable, Sequence

from mxnet import ndarray as nd
from mxnet import optimizer as opt

# Each number is updated by itself: only these may be cut or packed. LARS, LAMB and
# LBSGD take norms of layers; of users' optimizers nobody knows.
ELEMENTWISE = (
    *(opt.SGD, opt.ccSGD, opt.NAG, opt.Signum, opt.DCASGD, opt.FTML, opt.Ftrl),
    *(opt.Adam, opt.Adamax, opt.AdaGrad, opt.AdaDelta, opt.RMSProp),
)


def is_elementwise(optimizer: Any) -> bool:
    """Whether the optimizer's type is exactly one that treats every number alike."""
    return type(optimizer) in ELEMENTWISE


@dataclass(frozen=True)
class Run:
    """Numbers of a flat array that are updated at once.

    Attributes
    ----------
    start, stop : int
        Where they are.
    members : tuple of int
        The array's members (see `buffers.Block`) that they belong to.
    """

    start: int
    stop: int
    members: tuple[int, ...]


def runs(sizes: Sequence[int], likeness: Sequence[Hashable]) -> list[Run]:
    """Neighbours that are alike, joined.

    Parameters
    ----------
    sizes : sequence of int
        Numbers of each member, in order.
    likeness : sequence of hashable
        Equal for members that may be updated at once; None for one that is left out.
    """
    joined: list[Run] = []
    start = 0
    for i, (size, alike) in enumerate(zip(sizes, likeness)):
        stop = start + size
        if alike is not None:
            last = joined[-1] if joined else None
            if last and last.stop == start and likeness[last.members[-1]] == alike:
                joined[-1] = Run(last.start, stop, last.members + (i,))
            else:
                joined.append(Run(start, stop, (i,)))
        start = stop
    return joined


class FlatState:
    """The state of a flat array, and of runs of it.

    Parameters
    ----------
    whole : NDArray, or None, or a tuple or list of such
        The state's arrays, each of the flat array's size.
    size : int
        Of the flat array.

    Attributes
    ----------
    slots : list of NDArray
        The state's arrays.
    """

    def __init__(self, whole: Any, size: int) -> None:
        self._views: dict[tuple[int, int], Any] = {(0, size): whole}
        self._whole = whole
        self.slots = flatten(whole)

    @classmethod
    def of_optimizer(
        cls, optimizer: opt.Optimizer, index: Any, weight: nd.NDArray
    ) -> FlatState:
        """An optimizer's state of a float32 `weight`, at its first values."""
        return cls(optimizer.create_state_multi_precision(index, weight), weight.size)

    @classmethod
    def zeros(cls, whole: nd.NDArray) -> FlatState:
        """One float32 array of zeros, of another's shape and place."""
        return cls(nd.zeros(whole.shape, whole.context), whole.size)

    def of(self, run: Run) -> Any:
        """The state of a run, in the optimizer's own structure."""
        key = (run.start, run.stop)
        if key not in self._views:
            self._views[key] = _cut(self._whole, *key)
        return self._views[key]


def _cut(state: Any, start: int, stop: int) -> Any:
    """Views of the arrays of a state, of any structure."""
    if isinstance(state, (tuple, list)):
        return type(state)(_cut(part, start, stop) for part in state)
    return None if state is None else state._slice(start, stop)


def flatten(state: Any) -> list[nd.NDArray]:
    """The arrays of an optimizer's state, in order."""
    if state is None:
        return []
    if isinstance(state, (tuple, list)):
        return [array for part in state for array in flatten(part)]
    return [state]


def apply_optimizer(
    optimizer: opt.Optimizer,
    index: Any,
    count: int,
    weight: nd.NDArray,
    gradient: nd.NDArray,
    state: Any,
) -> None:
    """One update as `mxnet.optimizer.Updater` makes it; returns before it is done.

    Parameters
    ----------
    optimizer : mxnet.optimizer.Optimizer
    index : hashable
        For the multipliers.
    count : int
        Updates of these numbers so far.
    weight, gradient : NDArray, float32, same shape
        `weight` is updated in place.
    state : object
        As `create_state_multi_precision` made it.
    """
    optimizer._index_update_count[index] = optimizer.begin_num_update + count
    if type(optimizer) in (opt.SGD, opt.ccSGD):
        _apply_sgd(optimizer, index, weight, gradient, state)
    elif optimizer.aggregate_num > 0:
        optimizer.update_multi_precision([index], [weight], [gradient], [state])
    else:
        optimizer.update_multi_precision(index, weight, gradient, state)


def _apply_sgd(
    optimizer: opt.SGD,
    index: Any,
    weight: nd.NDArray,
    gradient: nd.NDArray,
    momentum: nd.NDArray | None,
) -> None:
    """What `SGD.update_multi_precision` comes to, at a fraction of its cost in Python.

    Bit for bit: `sgd_mom_update` gives what MXNet's choice, `multi_sgd_mom_update`,
    gives and is faster on one array; `sgd_update` rounds differently with decay.
    """
    optimizer._update_count(index)
    settings = operator_settings(optimizer, index)
    if optimizer.momentum > 0:
        settings.update(momentum=optimizer.momentum, out=weight)
        nd.sgd_mom_update(weight, gradient, momentum, **settings)
    else:
        lrs, wds = (settings.pop("lr"),), (settings.pop("wd"),)
        one = {"num_weights": 1, "lrs": lrs, "wds": wds, "out": [weight]}
        nd.multi_sgd_update(weight, gradient, **one, **settings)


def operator_settings(optimizer: opt.Optimizer, index: Any) -> dict[str, Any]:
    """What MXNet's operators take of an optimizer: lr, wd, rescaling and clipping."""
    settings: dict[str, Any] = {
        "lr": optimizer._get_lr(index),
        "wd": optimizer._get_wd(index),
        "rescale_grad": optimizer.rescale_grad,
    }
    if optimizer.clip_gradient:
        settings["clip_gradient"] = optimizer.clip_gradient
    return settings

"""What a local update rule is: arrays in, array out, no communication; and `none`.

After its backward pass worker i makes L(i,t+1) = Local(W(t), g(i,t)) at once, while
W(t+1) is still on its way (Xu et al., ACM TACO 17(4), 2020). Symbols: W(t) is
`global_weight`, W(t-1) is `previous`, L(i,t+1) is `local_weight`, g(i,t) is
`gradient`, scaled so that it stands for the sum over the workers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Hashable, Mapping

from mxnet import ndarray as nd
from mxnet import optimizer as opt

from .optimizer_copy import own_copy, uncounted_copy
from .optimizer_state import Run
from .views import copy_to

MULTIPLIERS = ("lr_mult", "wd_mult", "idx2name")


@dataclass(frozen=True)
class Part:
    """Which numbers a rule updates at once.

    Attributes
    ----------
    index : int or str
        Of a parameter in the optimizer, for the multipliers.
    key : hashable
        What the rule keeps their state under.
    run : Run
        Where they are in the array that `key` stands for.
    count : int
        Updates of them so far.
    whole : NDArray
        All W of that array; read once, when the rule makes its state.
    """

    index: Any
    key: Hashable
    run: Run
    count: int
    whole: nd.NDArray


class LocalUpdate:
    """`none`: L(i,t+1) = W(t), the ablation with pure staleness; base of the rules.

    Parameters
    ----------
    optimizer : mxnet.optimizer.Optimizer
        The global optimizer as this worker sees it; never changed.
    rescale : float
        What the gradient is multiplied by: the servers' `rescale_grad` times the
        number of workers.
    """

    name = "none"
    keeps_previous = False  # needs W(t-1)
    reads_local = False  # needs L(i,t)

    def __init__(self, optimizer: opt.Optimizer, rescale: float) -> None:
        self._original = optimizer
        self._optimizer = uncounted_copy(optimizer)
        self._optimizer.rescale_grad = rescale

    def follow(self, changes: Mapping[str, Any], step: int) -> None:
        """Take the global optimizer's changed hyper-parameters, from `step` on."""
        for name, value in changes.items():
            setattr(self._optimizer, name, own_copy(value))
        self._optimizer.num_update = step
        for name in MULTIPLIERS:  # set_lr_mult makes a new dict
            setattr(self._optimizer, name, getattr(self._original, name))

    def likeness(self, key: Hashable, member: int) -> Any:
        """What must be equal for members of a pack to be updated at once.

        Beside their count and multipliers of now.
        """

    def observe(
        self,
        part: Part,
        scratch: nd.NDArray,
        global_weight: nd.NDArray,
        previous: nd.NDArray | None,
        gradient: nd.NDArray,
    ) -> None:
        """See a warm-up step; `scratch` and `previous` may be overwritten."""

    def update(
        self,
        part: Part,
        local_weight: nd.NDArray,
        global_weight: nd.NDArray,
        previous: nd.NDArray | None,
        gradient: nd.NDArray,
    ) -> None:
        """Write L(i,t+1) into `local_weight`; returns before the work is done.

        Parameters
        ----------
        part : Part
            Which numbers; the arrays hold those alone.
        local_weight : NDArray, float32
            Receives L(i,t+1). For a rule with `reads_local` it holds L(i,t), at which
            the gradient was computed.
        global_weight : NDArray, float32 or as it was pulled, same shape
            W(t); not changed.
        previous : NDArray or None
            W(t-1) for a rule with `keeps_previous`; it is free, with contents
            undefined, once this has run.
        gradient : NDArray, float32, same shape
            g(i,t) before rescaling; not changed.
        """
        copy_to(global_weight, local_weight)

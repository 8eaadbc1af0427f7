"""The worker's local update rules: arrays in, array out, no communication.

After its backward pass worker i makes L(i,t+1) = Local(W(t), g(i,t)) at once, while
W(t+1) is still on its way (Xu et al., ACM TACO 17(4), 2020). Symbols: W(t) is
`global_weight`, W(t-1) is `previous`, L(i,t+1) is `local_weight`, g(i,t) is
`gradient`, scaled so that it stands for the sum over the workers.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any, Hashable, Mapping

from mxnet import ndarray as nd
from mxnet import optimizer as opt

from . import optimizer_state
from .config import RULES_WITHOUT_PARAMETERS
from .errors import ConfigError, NotSupportedYet
from .optimizer_copy import own_copy, uncounted_copy
from .optimizer_state import FlatState, Run, apply_optimizer
from .views import copy_to

_MULTIPLIERS = ("lr_mult", "wd_mult", "idx2name")


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
    keeps_previous = False

    def __init__(self, optimizer: opt.Optimizer, rescale: float) -> None:
        self._original = optimizer
        self._optimizer = uncounted_copy(optimizer)
        self._optimizer.rescale_grad = rescale

    def follow(self, changes: Mapping[str, Any], step: int) -> None:
        """Take the global optimizer's changed hyper-parameters, from `step` on."""
        for name, value in changes.items():
            setattr(self._optimizer, name, own_copy(value))
        self._optimizer.num_update = step
        for name in _MULTIPLIERS:  # set_lr_mult makes a new dict
            setattr(self._optimizer, name, getattr(self._original, name))

    def observe(
        self,
        part: Part,
        scratch: nd.NDArray,
        global_weight: nd.NDArray,
        gradient: nd.NDArray,
    ) -> None:
        """See the gradient of a warm-up step; `scratch` may be overwritten."""

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
            Receives L(i,t+1).
        global_weight : NDArray, float32 or as it was pulled, same shape
            W(t); not changed.
        previous : NDArray or None
            W(t-1) for a rule with `keeps_previous`; it is free, with contents
            undefined, once this has run.
        gradient : NDArray, float32, same shape
            g(i,t) before rescaling; not changed.
        """
        copy_to(global_weight, local_weight)


class MirrorSGD(LocalUpdate):
    """`mirror` of momentum SGD: what the servers are about to do, with own gradient.

    L(i,t+1) = W(t) + mu (W(t) - W(t-1)) - lr (g(i,t) + wd W(t))

    The mean of L over the workers is W(t+1). W(t) - W(t-1) is the servers'
    momentum, so two operators and no further memory do it (`design.md`, decision 2).
    """

    name = "mirror"

    def __init__(self, optimizer: opt.Optimizer, rescale: float) -> None:
        super().__init__(optimizer, rescale)
        self.keeps_previous = optimizer.momentum > 0

    def update(self, part, local_weight, global_weight, previous, gradient) -> None:
        rule = self._optimizer
        kwargs = {
            "lr": rule._get_lr(part.index),
            "wd": rule._get_wd(part.index),
            "rescale_grad": rule.rescale_grad,
            "out": local_weight,
        }
        if rule.clip_gradient:
            kwargs["clip_gradient"] = rule.clip_gradient
        if not self.keeps_previous:
            nd.sgd_update(global_weight, gradient, **kwargs)
            return
        momentum = nd.elemwise_sub(global_weight, previous, out=previous)
        nd.sgd_mom_update(
            global_weight, gradient, momentum, momentum=rule.momentum, **kwargs
        )


class Replica(LocalUpdate):
    """`replica`: the global optimizer's own rule, with its state kept here.

    Its state is fed this worker's gradients from the first step, warm-up included,
    and every update starts from W(t).
    """

    name = "replica"

    def __init__(self, optimizer: opt.Optimizer, rescale: float) -> None:
        super().__init__(optimizer, rescale)
        self._states: dict[Hashable, FlatState] = {}
        self._spares_gradient = _spares_gradient(type(self._optimizer))

    def observe(self, part, scratch, global_weight, gradient) -> None:
        self.update(part, scratch, global_weight, None, gradient)

    def update(self, part, local_weight, global_weight, previous, gradient) -> None:
        copy_to(global_weight, local_weight)
        if part.key not in self._states:
            whole = part.whole.astype("float32", copy=False)
            self._states[part.key] = FlatState(self._optimizer, part.index, whole)
        if not self._spares_gradient:  # it is still to be pushed
            gradient = gradient.copy()
        state = self._states[part.key].of(part.run)
        apply_optimizer(
            *(self._optimizer, part.index, part.count, local_weight, gradient, state)
        )


class NamedOptimizer(Replica):
    """A registered optimizer by name, applied to a copy of W(t): the paper's recipe.

    Learning rate, weight decay, clipping, multipliers and rescaling follow the
    global optimizer unless given; momentum is 0 unless given.

    Parameters
    ----------
    optimizer, rescale
        As for `LocalUpdate`.
    name : str
        The optimizer's registered name, such as 'sgd'.
    params : mapping
        Its parameters.
    """

    def __init__(
        self,
        optimizer: opt.Optimizer,
        rescale: float,
        name: str,
        params: Mapping[str, Any],
    ) -> None:
        super().__init__(optimizer, rescale)
        self.name = name
        self._given = set(params)
        self._global = self._optimizer
        self._optimizer = create_named(name, params)
        self._spares_gradient = _spares_gradient(type(self._optimizer))
        self._optimizer.param_dict = self._global.param_dict
        if "rescale_grad" not in params:
            self._optimizer.rescale_grad = rescale

    def follow(self, changes: Mapping[str, Any], step: int) -> None:
        for name, value in changes.items():
            setattr(self._global, name, own_copy(value))
        self._global.num_update = self._optimizer.num_update = step
        for name in _MULTIPLIERS:
            setattr(self._optimizer, name, getattr(self._original, name))
        if not self._given & {"learning_rate", "lr_scheduler"}:
            self._optimizer.lr = self._global.learning_rate
        for name in ("wd", "clip_gradient"):
            if name not in self._given:
                setattr(self._optimizer, name, getattr(self._global, name))


MIRRORS = {opt.SGD: MirrorSGD, opt.ccSGD: MirrorSGD}
_MIRRORS_TO_COME = (opt.NAG, opt.Adam)


def create(
    rule: str,
    params: Mapping[str, Any],
    optimizer: opt.Optimizer,
    rescale: float,
    exact_pulls: bool = True,
) -> LocalUpdate:
    """The local update named `rule` for a global optimizer.

    Parameters
    ----------
    rule : str
        'auto', 'mirror', 'replica', 'none', or a registered optimizer's name. 'auto'
        is 'mirror' for exactly SGD and ccSGD with exact pulls, else 'replica'.
    params : mapping
        Parameters of a rule that is an optimizer's name.
    optimizer : mxnet.optimizer.Optimizer
        The global optimizer.
    rescale : float
        The servers' `rescale_grad` times the number of workers.
    exact_pulls : bool
        Whether weights are pulled in float32.

    Raises
    ------
    ConfigError
        The rule is unknown, or does not fit the optimizer.
    NotSupportedYet
        The rule is planned and not built.
    """
    kind, chosen = type(optimizer), rule.lower()
    if chosen == "auto":
        chosen = "mirror" if kind in MIRRORS and exact_pulls else "replica"
    if chosen == "mirror":
        if kind in _MIRRORS_TO_COME:
            raise NotSupportedYet(
                f"local_optimizer 'mirror' for {kind.__name__} is not supported yet; "
                "use 'auto' or 'replica'."
            )
        if kind not in MIRRORS:
            raise ConfigError(
                f"local_optimizer 'mirror' was given with the optimizer "
                f"{kind.__name__}; it exists for "
                f"{', '.join(k.__name__ for k in MIRRORS)}. Use 'auto' or 'replica'."
            )
        return MIRRORS[kind](optimizer, rescale)
    if chosen == "replica":
        return Replica(optimizer, rescale)
    if chosen == "none":
        return LocalUpdate(optimizer, rescale)
    return NamedOptimizer(optimizer, rescale, chosen, params)


def is_elementwise(rule: str, params: Mapping[str, Any]) -> bool:
    """Whether the rule treats every number alike, if the global optimizer does."""
    if rule.lower() in RULES_WITHOUT_PARAMETERS:
        return True
    return optimizer_state.is_elementwise(create_named(rule.lower(), params))


def create_named(name: str, params: Mapping[str, Any]) -> opt.Optimizer:
    """A registered optimizer by name, with momentum 0 unless it is given."""
    if name == "dcsgd":
        raise NotSupportedYet(
            "local_optimizer 'dcsgd' is not supported yet; use 'auto' or 'sgd'."
        )
    if name not in opt.Optimizer.opt_registry:
        raise ConfigError(
            f"local_optimizer is {name!r}; allowed are 'auto', 'mirror', 'replica', "
            "'none' and the registered optimizers "
            f"{', '.join(sorted(opt.Optimizer.opt_registry))}."
        )
    accepted = inspect.signature(opt.Optimizer.opt_registry[name].__init__).parameters
    defaults = {"momentum": 0.0} if "momentum" in accepted else {}
    try:
        return opt.create(name, **{**defaults, **params})
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"local_optimizer {name!r} does not take local_optimizer_params "
            f"{dict(params)!r}: {error}. See mxnet.optimizer for what it takes."
        ) from None


def _spares_gradient(kind: type) -> bool:
    """Whether an optimizer leaves the gradient as it is; of users' ones who knows."""
    return kind.__module__.split(".")[0] == "mxnet" and kind is not opt.AdaDelta

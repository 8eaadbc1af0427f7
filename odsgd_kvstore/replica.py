"""`replica`, and the rules by name: an optimizer's own rule on a copy of W(t)."""

from __future__ import annotations

import inspect
import math
import numbers
from typing import Any, Hashable, Mapping

from mxnet import optimizer as opt

from .errors import ConfigError
from .local_rule import MULTIPLIERS, LocalUpdate
from .optimizer_copy import own_copy
from .optimizer_state import FlatState, apply_optimizer
from .views import copy_to

_NUMBERS = {"learning_rate", "wd", "momentum", "clip_gradient", "rescale_grad"}


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

    def observe(self, part, scratch, global_weight, previous, gradient) -> None:
        self.update(part, scratch, global_weight, previous, gradient)

    def update(self, part, local_weight, global_weight, previous, gradient) -> None:
        copy_to(global_weight, local_weight)
        if part.key not in self._states:
            whole = part.whole.astype("float32", copy=False)
            self._states[part.key] = FlatState.of_optimizer(
                self._optimizer, part.index, whole
            )
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
        self._optimizer = self._create(params)
        self._spares_gradient = _spares_gradient(type(self._optimizer))
        self._optimizer.param_dict = self._global.param_dict
        if "rescale_grad" not in params:
            self._optimizer.rescale_grad = rescale

    def _create(self, params: Mapping[str, Any]) -> opt.Optimizer:
        """The optimizer that the parameters describe."""
        return create_named(self.name, params)

    def follow(self, changes: Mapping[str, Any], step: int) -> None:
        for name, value in changes.items():
            setattr(self._global, name, own_copy(value))
        self._global.num_update = self._optimizer.num_update = step
        for name in MULTIPLIERS:
            setattr(self._optimizer, name, getattr(self._original, name))
        if not self._given & {"learning_rate", "lr_scheduler"}:
            self._optimizer.lr = self._global.learning_rate
        for name in ("wd", "clip_gradient"):
            if name not in self._given:
                setattr(self._optimizer, name, getattr(self._global, name))


def create_named(name: str, params: Mapping[str, Any]) -> opt.Optimizer:
    """A registered optimizer by name, with momentum 0 unless it is given."""
    if name not in opt.Optimizer.opt_registry:
        raise ConfigError(
            f"local_optimizer is {name!r}; allowed are 'auto', 'mirror', 'replica', "
            "'none', 'dcsgd' and the registered optimizers "
            f"{', '.join(sorted(opt.Optimizer.opt_registry))}."
        )
    check_numbers(name, params)
    accepted = inspect.signature(opt.Optimizer.opt_registry[name].__init__).parameters
    defaults = {"momentum": 0.0} if "momentum" in accepted else {}
    try:
        return opt.create(name, **{**defaults, **params})
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"local_optimizer {name!r} does not take local_optimizer_params "
            f"{dict(params)!r}: {error}. See mxnet.optimizer for what it takes."
        ) from None


def check_numbers(name: str, params: Mapping[str, Any]) -> None:
    """Refuse settings that are not numbers, which MXNet would use as they are.

    Raises
    ------
    ConfigError
    """
    for key in _NUMBERS & params.keys():
        value = params[key]
        is_number = isinstance(value, numbers.Real) and not isinstance(value, bool)
        is_none = value is None and key == "clip_gradient"
        if not (is_none or is_number and math.isfinite(value)):
            raise ConfigError(
                f"local_optimizer {name!r} has {key} {value!r} in local_optimizer_params; "
                "allowed is a finite number, such as 0.1. Leave it out to follow the "
                "global optimizer."
            )


def _spares_gradient(kind: type) -> bool:
    """Whether an optimizer leaves the gradient as it is; of users' ones who knows."""
    return kind.__module__.split(".")[0] == "mxnet" and kind is not opt.AdaDelta

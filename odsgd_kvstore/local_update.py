"""The worker's local update rules by name; what a rule is: `local_rule.py`."""

from __future__ import annotations

from typing import Any, Mapping

from mxnet import optimizer as opt

from . import optimizer_state
from .config import RULES_WITHOUT_PARAMETERS
from .delay_compensation import DelayCompensation, create_settings
from .errors import ConfigError
from .local_rule import LocalUpdate, Part
from .mirrors import MIRRORS
from .replica import NamedOptimizer, Replica, create_named

__all__ = ["LocalUpdate", "Part", "create", "is_elementwise", "optimizer_of"]

DCSGD = "dcsgd"


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
        'auto', 'mirror', 'replica', 'none', 'dcsgd', or a registered optimizer's name.
        'auto' is 'mirror' for exactly the types in `MIRRORS` with exact pulls, else
        'replica'.
    params : mapping
        Parameters of 'dcsgd', or of a rule that is an optimizer's name.
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
    """
    kind, chosen = type(optimizer), rule.lower()
    if chosen == "auto":
        chosen = "mirror" if kind in MIRRORS and exact_pulls else "replica"
    if chosen == "mirror":
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
    kind = DelayCompensation if chosen == DCSGD else NamedOptimizer
    return kind(optimizer, rescale, chosen, params)


def optimizer_of(rule: str, params: Mapping[str, Any]) -> opt.Optimizer:
    """The local optimizer of a rule that takes parameters.

    Raises
    ------
    ConfigError
        The rule, or one of the parameters, is unknown.
    """
    name = rule.lower()
    return create_settings(params) if name == DCSGD else create_named(name, params)


def is_elementwise(rule: str, params: Mapping[str, Any]) -> bool:
    """Whether the rule treats every number alike, if the global optimizer does."""
    if rule.lower() in (*RULES_WITHOUT_PARAMETERS, DCSGD):
        return True
    return optimizer_state.is_elementwise(create_named(rule.lower(), params))

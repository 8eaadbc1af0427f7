"""`dcsgd`: plain SGD on a copy of W(t), its gradient compensated for the delay."""

from __future__ import annotations

import numbers
from typing import Any, Mapping

import numpy as np
from mxnet import ndarray as nd
from mxnet import optimizer as opt

from .errors import ConfigError
from .local_rule import Part
from .optimizer_state import FlatState, operator_settings
from .replica import NamedOptimizer, check_numbers

_ACCEPTED = ("lamda", "adaptive", "learning_rate", "lr_scheduler", "wd")
_ACCEPTED += ("clip_gradient", "rescale_grad")
_LAMDA, _ADAPTIVE_LAMDA = 0.04, 2.0  # MXNet's DCASGD; Zheng et al. for CIFAR-10
_DECAY, _EPSILON = 0.95, 1e-7  # of the mean square


class DelayCompensatedSGD(opt.Optimizer):
    """The settings of `dcsgd`; it makes no updates itself.

    Parameters
    ----------
    lamda : float, optional
        Scale of the compensation, >= 0: default 0.04, adaptive 2.0.
    adaptive : bool
        Whether lamda is divided by the root of the gradient's mean square.
    **kwargs
        learning_rate, lr_scheduler, wd, clip_gradient, rescale_grad.
    """

    def __init__(
        self, *, lamda: float | None = None, adaptive: bool = False, **kwargs: Any
    ) -> None:
        super().__init__(**kwargs)
        default = _ADAPTIVE_LAMDA if adaptive else _LAMDA
        self.lamda = default if lamda is None else float(lamda)
        self.adaptive = adaptive


class DelayCompensation(NamedOptimizer):
    """`dcsgd` and its adaptive variant.

    L(i,t+1) = W(t) - lr (g + wd W(t) + lamda g g (W(t) - L(i,t)))

    g is this worker's gradient at L(i,t); with `adaptive`, lamda is divided by
    sqrt(M + 1e-7) for each number, with M the moving mean of g g (0.95 of the one before),
    warm-up included.

    Notes
    -----
    Taylor's formula brings the gradient from where it was computed to W(t), with g g for
    the Hessian (Zheng et al., Asynchronous Stochastic Gradient Descent with Delay
    Compensation, ICML 2017, arXiv 1609.08326). The authors' MXNet fork of OD-SGD takes
    W(t-1) in place of L(i,t), where no gradient was computed. There is no momentum.
    """

    reads_local = True

    def _create(self, params: Mapping[str, Any]) -> opt.Optimizer:
        return create_settings(params)

    def observe(self, part, scratch, global_weight, previous, gradient) -> None:
        if self._optimizer.adaptive:
            self._note_square(part, nd.square(self._scaled(gradient)))

    def update(self, part, local_weight, global_weight, previous, gradient) -> None:
        settings = operator_settings(self._optimizer, part.index)
        global_weight = global_weight.astype("float32", copy=False)
        gradient = self._scaled(gradient)
        scale = nd.square(gradient)
        if self._optimizer.adaptive:
            mean_square = self._note_square(part, scale)
            scale = scale / nd.sqrt(mean_square + _EPSILON)
        scale *= global_weight - local_weight
        gradient += self._optimizer.lamda * scale
        taken = {"lr": settings["lr"], "wd": settings["wd"], "out": local_weight}
        nd.sgd_update(global_weight, gradient, **taken)

    def _scaled(self, gradient: nd.NDArray) -> nd.NDArray:
        """A copy, which stands for the sum over the workers, clipped."""
        limit = self._optimizer.clip_gradient
        scaled = gradient * self._optimizer.rescale_grad
        # A negative limit is none, as for MXNet's operators.
        return nd.clip(scaled, -limit, limit) if limit and limit > 0 else scaled

    def _note_square(self, part: Part, square: nd.NDArray) -> nd.NDArray:
        """The moving mean of the square, with this one in it."""
        if part.key not in self._states:
            self._states[part.key] = FlatState.zeros(part.whole)
        mean = self._states[part.key].of(part.run)
        mean *= _DECAY
        # What is not a number would stay, also after weights are assigned.
        finite = nd.contrib.isfinite(square)
        mean += (1 - _DECAY) * nd.where(finite, square, nd.zeros_like(square))
        return mean


def create_settings(params: Mapping[str, Any]) -> DelayCompensatedSGD:
    """The settings from `local_optimizer_params`.

    Raises
    ------
    ConfigError
        A parameter is unknown, or its value is not allowed.
    """
    unknown = sorted(map(str, params.keys() - set(_ACCEPTED)))
    if unknown:
        raise ConfigError(
            f"local_optimizer 'dcsgd' does not take {', '.join(unknown)}; allowed in "
            f"local_optimizer_params are {', '.join(_ACCEPTED)}."
        )
    check_numbers("dcsgd", params)
    lamda, adaptive = params.get("lamda"), params.get("adaptive", False)
    is_number = isinstance(lamda, numbers.Real) and not isinstance(lamda, bool)
    if lamda is not None and not (is_number and 0 <= lamda < float("inf")):
        raise ConfigError(
            f"local_optimizer 'dcsgd' has lamda {lamda!r}; allowed is a number from 0, "
            "such as 0.04 (adaptive: 2)."
        )
    if not isinstance(adaptive, (bool, np.bool_)):
        raise ConfigError(
            f"local_optimizer 'dcsgd' has adaptive {adaptive!r}; allowed are True and "
            "False."
        )
    return DelayCompensatedSGD(**params)

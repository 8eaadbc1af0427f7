"""The local update rules in numpy, for `oracle.py`: L(i,t+1) from W(t) and g(i,t).

g stands for the sum over the workers: it is multiplied by `rescale`. What a rule knows
of the servers is W(t), W(t-1) and the hyper-parameters of each update.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from oracle_rules import NAG, RULES, SGD, Adam, Hyper, adam_rate, f32, plain_sgd


class MirrorSGD:
    """The servers' momentum is the displacement D = W(t) - W(t-1)."""

    def __init__(self, weight: np.ndarray) -> None:
        self._zero = np.zeros_like(weight)

    def __call__(self, hyper, weight, before, gradient, rescale):
        if hyper.mu == 0:
            return plain_sgd(hyper, weight, gradient, rescale)
        rule = SGD(self._zero)
        rule.first = weight - before
        return rule(hyper, weight, gradient, rescale)


class MirrorNAG:
    """m := (D + mu m) / (1 + mu) - lr wd D, by the values of the update that made D."""

    def __init__(self, weight: np.ndarray) -> None:
        self._momentum = np.zeros_like(weight)
        self._made: Hyper | None = None

    def __call__(self, hyper, weight, before, gradient, rescale):
        made, self._made = self._made, hyper
        if made is not None:
            moved = weight - before
            followed = (moved + made.mu * self._momentum) / (f32(1) + made.mu)
            self._momentum = followed - made.lr * made.wd * moved
        rule = NAG(weight)
        rule.first = self._momentum
        return rule(hyper, weight, gradient, rescale)


class MirrorAdam:
    """m = -D (sqrt(v) + eps) / c(t), with c of the update that made D, and the own v.

    After c = 0, D = 0 says nothing of m, which is taken as 0.
    """

    def __init__(self, weight: np.ndarray) -> None:
        self._own = Adam(weight)  # its second moment and its count
        self._made: Hyper | None = None

    def __call__(self, hyper, weight, before, gradient, rescale):
        own, made, self._made = self._own, self._made, hyper
        own.first = np.zeros_like(weight)
        if made is not None and made.lr != 0:
            epsilon = f32(made.get("epsilon", 1e-8))
            rate = f32(adam_rate(made, own.updates))
            own.first = -(weight - before) * (np.sqrt(own.second) + epsilon) / rate
        return own(hyper, weight, gradient, rescale)


class DelayCompensated:
    """W(t) - lr (g + wd W(t) + lamda g g (W(t) - L(i,t))).

    Adaptive: lamda / sqrt(MS + 1e-7), MS = 0.95 MS + 0.05 g g.
    """

    def __init__(self, weight: np.ndarray) -> None:
        self._mean_square = np.zeros_like(weight)

    def __call__(self, hyper, weight, beneath, gradient, rescale):
        scaled = hyper.clip(f32(rescale) * gradient)
        square = scaled * scaled
        self._mean_square = f32(0.95) * self._mean_square + f32(0.05) * square
        if hyper.get("adaptive", False):
            lamda = f32(hyper.get("lamda", 2.0)) / np.sqrt(
                self._mean_square + f32(1e-7)
            )
        else:
            lamda = f32(hyper.get("lamda", 0.04))
        compensation = lamda * square * (weight - beneath)
        return weight - hyper.lr * (scaled + hyper.wd * weight + compensation)


MIRRORS = {"sgd": MirrorSGD, "nag": MirrorNAG, "adam": MirrorAdam}


class Local:
    """The local update of one parameter on one rank.

    Called at every update, warm-up included: the rules' state takes note of it.

    Parameters
    ----------
    case : oracle.Case
    weight : ndarray
        W(0).
    """

    def __init__(self, case: Any, weight: np.ndarray) -> None:
        name = case.rule
        if name == "auto":
            name = "mirror" if case.optimizer in MIRRORS else "replica"
        self._case, self.name = case, name
        self._before = weight  # W(t-1)
        kinds = {
            "none": lambda weight: None,
            "mirror": MIRRORS.get(case.optimizer),
            "replica": RULES[case.optimizer],
            "dcsgd": DelayCompensated,
            **RULES,
        }
        self._rule = kinds[name](weight)

    def __call__(
        self,
        key: int,
        step: int,
        weight: np.ndarray,
        gradient: np.ndarray,
        rescale: float,
        beneath: np.ndarray | None = None,
    ) -> np.ndarray:
        """L(i,t+1) from W(t), g(i,t) and the weights L(i,t) beneath it."""
        values = self._case.values(step)
        if self.name not in ("mirror", "replica"):
            values = {**values, "momentum": 0.0, **self._case.rule_params}
            rescale = values.get("rescale_grad", rescale)
        hyper = self._case.multiplied(values, step, key)
        before, self._before = self._before, weight
        if self.name == "none":
            return weight
        if self.name == "mirror":
            return self._rule(hyper, weight, before, gradient, rescale)
        if self.name == "dcsgd":
            return self._rule(hyper, weight, beneath, gradient, rescale)
        return self._rule(hyper, weight, gradient, rescale)

    def assign(self, old: np.ndarray, new: np.ndarray) -> None:
        """W(t) was `old` and is `new` from outside; W(t) - W(t-1) stays."""
        self._before = new - (old - self._before)

"""MXNet 1.9.1's optimizers in numpy, for `oracle.py`.

They compute in float32, in the order of the operators (optimizer_op-inl.h), and are
written down once more instead of called, so that they can disagree.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

f32 = np.float32


class Hyper:
    """An optimizer's numbers for one parameter at one step, as float32."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self._values = values
        self.lr, self.wd = f32(values["learning_rate"]), f32(values["wd"])
        self.mu = f32(values.get("momentum", 0.0))

    def get(self, name: str, default: float) -> float:
        return self._values.get(name, default)

    def clip(self, gradient: np.ndarray) -> np.ndarray:
        """Clipped by value if the optimizer clips."""
        bound = self._values.get("clip_gradient")
        return gradient if bound is None else np.clip(gradient, f32(-bound), f32(bound))


class Rule:
    """An optimizer of one parameter, with its state: `rule(hyper, W, g, rescale)`."""

    def __init__(self, weight: np.ndarray) -> None:
        self.first, self.second = np.zeros_like(weight), np.zeros_like(weight)
        self.updates = 0

    def __call__(
        self, hyper: Hyper, weight: np.ndarray, gradient: np.ndarray, rescale: float
    ) -> np.ndarray:
        self.updates += 1
        return self.update(hyper, weight, gradient, f32(rescale))


class SGD(Rule):
    """m = mu m - lr wd W - lr g; W += m."""

    def update(self, hyper, weight, gradient, rescale):
        self.first = (
            hyper.mu * self.first
            - hyper.lr * hyper.wd * weight
            - _sgd_step(hyper, gradient, rescale)
        )
        return weight + self.first


class NAG(Rule):
    """m' = mu m; W += mu m' - (1 + mu) lr (g + wd W); m = m' - lr (g + wd W).

    The operator works in place, so that the last W is the new one.
    """

    def update(self, hyper, weight, gradient, rescale):
        held = hyper.mu * self.first
        scaled = hyper.clip(rescale * gradient)
        ahead = held - hyper.lr * (scaled + hyper.wd * weight)
        if hyper.mu == 0:
            weight = plain_sgd(hyper, weight, gradient, rescale)
        else:
            weight = weight - held + (hyper.mu + f32(1)) * ahead
        self.first = held - hyper.lr * (scaled + hyper.wd * weight)
        return weight


def adam_rate(hyper: Hyper, updates: int) -> float:
    """c(t) = lr sqrt(1 - beta2^t) / (1 - beta1^t)."""
    beta1, beta2 = hyper.get("beta1", 0.9), hyper.get("beta2", 0.999)
    return float(hyper.lr) * math.sqrt(1 - beta2**updates) / (1 - beta1**updates)


class Adam(Rule):
    """Kingma and Ba; the decay is part of the clipped gradient."""

    def update(self, hyper, weight, gradient, rescale):
        beta1, beta2 = hyper.get("beta1", 0.9), hyper.get("beta2", 0.999)
        scaled = hyper.clip(gradient * rescale + weight * hyper.wd)
        b1, b2, one = f32(beta1), f32(beta2), f32(1)
        self.first = b1 * self.first + (one - b1) * scaled
        self.second = b2 * self.second + (one - b2) * scaled * scaled
        step = f32(adam_rate(hyper, self.updates))
        epsilon = f32(hyper.get("epsilon", 1e-8))
        return weight - step * self.first / (np.sqrt(self.second) + epsilon)


class RMSProp(Rule):
    """Tieleman and Hinton; the decay is part of the clipped gradient."""

    def update(self, hyper, weight, gradient, rescale):
        gamma, one = f32(hyper.get("gamma1", 0.9)), f32(1)
        scaled = hyper.clip(rescale * gradient + hyper.wd * weight)
        self.first = (one - gamma) * (scaled * scaled) + gamma * self.first
        epsilon = f32(hyper.get("epsilon", 1e-8))
        return weight - hyper.lr * (scaled / np.sqrt(self.first + epsilon))


class AdaDelta(Rule):
    """Zeiler; MXNet's has no learning rate, and adds `wd W` to the step."""

    def update(self, hyper, weight, gradient, rescale):
        rho, epsilon = hyper.get("rho", 0.9), f32(hyper.get("epsilon", 1e-5))
        keep, new = f32(rho), f32(1.0 - rho)
        scaled = hyper.clip(gradient * rescale)
        self.first = keep * self.first + new * scaled * scaled
        ratio = np.sqrt(self.second + epsilon) / np.sqrt(self.first + epsilon)
        step = ratio * scaled
        self.second = keep * self.second + new * step * step
        return weight - (step + hyper.wd * weight)


RULES = {
    "sgd": SGD,
    "nag": NAG,
    "adam": Adam,
    "rmsprop": RMSProp,
    "adadelta": AdaDelta,
}


def _sgd_step(hyper: Hyper, gradient: np.ndarray, rescale: np.float32) -> np.ndarray:
    if hyper.get("clip_gradient", None) is None:
        return hyper.lr * rescale * gradient
    return hyper.lr * hyper.clip(rescale * gradient)


def plain_sgd(
    hyper: Hyper, weight: np.ndarray, gradient: np.ndarray, rescale: float
) -> np.ndarray:
    """(1 - lr wd) W - lr g, as `sgd_update` orders it."""
    kept = (f32(1) - hyper.lr * hyper.wd) * weight
    return kept - _sgd_step(hyper, gradient, f32(rescale))

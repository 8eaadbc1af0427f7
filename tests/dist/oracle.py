"""The recurrences of One-step Delay SGD in numpy, fed with recorded gradients.

    W(t+1)   = Opt(W(t), sum_i g(i,t))
    L(i,t+1) = W(t+1)               for the first K steps (warm-up)
             = Local(W(t), g(i,t))  after them

(Xu et al., ACM TACO 17(4), 2020.) Nothing here knows MXNet or the package. The rules
compute in float32, in the order of MXNet 1.9.1's operators (optimizer_op-inl.h), and
are written down once more instead of called, so that they can disagree.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

f32 = np.float32
_ATTRIBUTES = {"lr": "learning_rate"}


def scheduled_lr(name: str, params: Mapping[str, Any], step: int) -> float:
    """The learning rate of MXNet's schedule `name` at a step, from 1, as documented."""
    base, final = params["base_lr"], params.get("final_lr", 0)
    if name == "FactorScheduler":
        return base * params["factor"] ** ((step - 1) // params["step"])
    if name == "MultiFactorScheduler":
        return base * params["factor"] ** sum(step > s for s in params["step"])
    left = min(step, params["max_update"]) / params["max_update"]
    if name == "PolyScheduler":
        return final + (base - final) * (1 - left) ** params["pwr"]
    return final + (base - final) * (1 + math.cos(math.pi * left)) / 2


@dataclass(frozen=True)
class Case:
    """One training run: what the trainer is told, for the worker and for the oracle.

    Attributes
    ----------
    optimizer, params : str, mapping
        The global optimizer.
    rule, rule_params : str, mapping
        The local optimizer.
    warmup : int
        K.
    schedule : (str, mapping), optional
        An lr_scheduler's class and arguments.
    changes : mapping
        Step (from 1) to what changes before it: 'learning_rate' by the trainer's
        set_learning_rate, any other name as the optimizer's attribute.
    multipliers : mapping
        Step (from 1) to {parameter: (lr_mult, wd_mult)} that hold from it on.
    batches : mapping
        Step to a batch size for each rank (cycled); `batch` elsewhere.
    batch : int
        The batch size; 1 divides by nothing.
    paused : mapping
        Parameter to the steps that leave it out.
    model : str
        What is trained.
    """

    optimizer: str = "sgd"
    params: Mapping[str, Any] = field(default_factory=dict)
    rule: str = "auto"
    rule_params: Mapping[str, Any] = field(default_factory=dict)
    warmup: int = 0
    schedule: tuple[str, Mapping[str, Any]] | None = None
    changes: Mapping[int, Mapping[str, float]] = field(default_factory=dict)
    multipliers: Mapping[int, Mapping[int, tuple[float, float]]] = field(
        default_factory=dict
    )
    batches: Mapping[int, Sequence[int]] = field(default_factory=dict)
    batch: int = 1
    paused: Mapping[int, Sequence[int]] = field(default_factory=dict)
    model: str = "quadratic"

    def batch_size(self, step: int, rank: int) -> int:
        """This rank's batch size at a step."""
        sizes = self.batches.get(step, [self.batch])
        return sizes[rank % len(sizes)]

    def is_paused(self, step: int, key: int) -> bool:
        """Whether the step leaves the parameter out."""
        return step in self.paused.get(key, ())

    def values(self, step: int) -> dict[str, Any]:
        """The global optimizer's hyper-parameters at a step, without multipliers."""
        values = dict(self.params)
        if self.schedule is not None:
            values["learning_rate"] = scheduled_lr(*self.schedule, step)
        for since, changed in self.changes.items():
            if since <= step:
                values.update({_ATTRIBUTES.get(k, k): v for k, v in changed.items()})
        return values

    def multiplied(self, values: Mapping[str, Any], step: int, key: int) -> Hyper:
        """`values` for one parameter."""
        lr_mult, wd_mult = 1.0, 1.0
        for since, changed in self.multipliers.items():
            if since <= step and key in changed:
                lr_mult, wd_mult = changed[key]
        values = {"wd": 0.0, **values}
        return Hyper({
            **values, "learning_rate": values["learning_rate"] * lr_mult,
            "wd": values["wd"] * wd_mult,
        })


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
            hyper.mu * self.first - hyper.lr * hyper.wd * weight
            - _sgd_step(hyper, gradient, rescale)
        )
        return weight + self.first


class NAG(Rule):
    """m' = mu m; W += mu m' - (1 + mu) lr (g + wd W); m = m' - lr (g + wd W).

    The operator works in place, so that the last W is the new one.
    """

    def update(self, hyper, weight, gradient, rescale):
        if hyper.mu == 0:
            return plain_sgd(hyper, weight, gradient, rescale)
        held = hyper.mu * self.first
        scaled = hyper.clip(rescale * gradient)
        ahead = held - hyper.lr * (scaled + hyper.wd * weight)
        weight = weight - held + (hyper.mu + f32(1)) * ahead
        self.first = held - hyper.lr * (scaled + hyper.wd * weight)
        return weight


class Adam(Rule):
    """Kingma and Ba; the decay is part of the clipped gradient."""

    def update(self, hyper, weight, gradient, rescale):
        beta1, beta2 = hyper.get("beta1", 0.9), hyper.get("beta2", 0.999)
        correction = math.sqrt(1 - beta2**self.updates) / (1 - beta1**self.updates)
        scaled = hyper.clip(gradient * rescale + weight * hyper.wd)
        b1, b2, one = f32(beta1), f32(beta2), f32(1)
        self.first = b1 * self.first + (one - b1) * scaled
        self.second = b2 * self.second + (one - b2) * scaled * scaled
        step = f32(float(hyper.lr) * correction)
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


@dataclass(frozen=True)
class Quadratic:
    """Per rank and step sum_k h (w - x)^2 / 2, another optimum x each time.

    `simple`: one number, h = 1, and x = 1 on rank 0, 3 on rank 1 at every step.
    """

    shapes: tuple[tuple[int, ...], ...] = ((7,), (10, 13))
    simple: bool = False

    def curvature(self, key: int) -> np.ndarray:
        """h of a parameter."""
        if self.simple:
            return np.ones(self.shapes[key], f32)
        size = int(np.prod(self.shapes[key]))
        return np.linspace(0.25, 1.5, size, dtype=f32).reshape(self.shapes[key])

    def optimum(self, key: int, rank: int, step: int) -> np.ndarray:
        """x of a parameter."""
        if self.simple:
            return np.full(self.shapes[key], 1 + 2 * rank, f32)
        random = np.random.RandomState(1000 * step + 10 * rank + key)
        return random.normal(rank, 1, self.shapes[key]).astype(f32)


QUADRATICS = {"quadratic": Quadratic(), "by hand": Quadratic(((1,),), simple=True)}
RULES = {
    "sgd": SGD, "nag": NAG, "adam": Adam, "rmsprop": RMSProp, "adadelta": AdaDelta,
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


class Local:
    """The local update of one parameter on one rank."""

    def __init__(self, case: Case, weight: np.ndarray) -> None:
        name = case.rule
        if name == "auto":
            name = "mirror" if case.optimizer == "sgd" else "replica"
        self._case, self.name = case, name
        kind = RULES.get(case.optimizer if name == "replica" else name)
        self._rule = None if kind is None else kind(weight)
        self._before = weight  # W(t-1)

    def __call__(
        self, key: int, step: int, weight: np.ndarray, gradient: np.ndarray,
        rescale: float,
    ) -> np.ndarray:
        """L(i,t+1) from W(t) and g(i,t); `rescale` brings g to the workers' sum."""
        values = self._case.values(step)
        if self.name not in ("mirror", "replica"):
            values = {**values, "momentum": 0.0, **self._case.rule_params}
        hyper = self._case.multiplied(values, step, key)
        before, self._before = self._before, weight
        if self.name == "none":
            return weight
        if self.name != "mirror":
            return self._rule(hyper, weight, gradient, rescale)
        if hyper.mu == 0:
            return plain_sgd(hyper, weight, gradient, rescale)
        momentum = (
            hyper.mu * (weight - before) - hyper.lr * hyper.wd * weight
            - _sgd_step(hyper, gradient, f32(rescale))
        )
        return weight + momentum


@dataclass
class Trajectory:
    """Weights after each step: W by step, L by rank and step."""

    global_weights: list[dict[int, np.ndarray]]
    local_weights: list[list[dict[int, np.ndarray]]]


def replay(
    case: Case,
    start: Mapping[int, np.ndarray],
    gradients: Sequence[Sequence[Mapping[int, np.ndarray]]],
) -> Trajectory:
    """The recurrences from `start`, fed with gradients[rank][step][parameter]."""
    ranks, steps = range(len(gradients)), range(1, len(gradients[0]) + 1)
    rescale = 1.0 / case.batch_size(1, 0)  # the servers keep rank 0's first one
    rules = {key: RULES[case.optimizer](value) for key, value in start.items()}
    local = [{key: Local(case, v) for key, v in start.items()} for _ in ranks]
    weights = dict(start)
    result = Trajectory([], [[] for _ in ranks])
    for step in steps:
        new = dict(weights)
        made = [dict(weights) for _ in ranks]
        for key, weight in weights.items():
            if case.is_paused(step, key):
                continue
            staged = [
                _staged(gradients[rank][step - 1][key],
                        1.0 / case.batch_size(step, rank) / rescale) for rank in ranks
            ]
            hyper = case.multiplied(case.values(step), step, key)
            new[key] = rules[key](hyper, weight, sum(staged[1:], staged[0]), rescale)
            for rank in ranks:
                made[rank][key] = local[rank][key](
                    key, step, weight, staged[rank], rescale * len(ranks)
                )
                if rules[key].updates <= case.warmup:
                    made[rank][key] = new[key]
        weights = new
        result.global_weights.append(new)
        for rank in ranks:
            result.local_weights[rank].append(made[rank])
    return result


def _staged(gradient: np.ndarray, ratio: float) -> np.ndarray:
    """What is pushed: scaled only where the batch is not the first one's size."""
    return gradient if ratio == 1.0 else gradient * f32(ratio)

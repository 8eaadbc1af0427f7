"""The recurrences of One-step Delay SGD in numpy, fed with recorded gradients.

    W(t+1)   = Opt(W(t), sum_i g(i,t))
    L(i,t+1) = W(t+1)               for the first K steps (warm-up)
             = Local(W(t), g(i,t))  after them

(Xu et al., ACM TACO 17(4), 2020.) Nothing here knows MXNet or the package. Opt is in
`oracle_rules.py`, Local in `oracle_local.py`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from oracle_local import Local
from oracle_rules import RULES, Hyper, f32

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
        return Hyper(
            {
                **values,
                "learning_rate": values["learning_rate"] * lr_mult,
                "wd": values["wd"] * wd_mult,
            }
        )


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


@dataclass
class Trajectory:
    """Weights after each step: W by step, L by rank and step."""

    global_weights: list[dict[int, np.ndarray]]
    local_weights: list[list[dict[int, np.ndarray]]]


def replay(
    case: Case,
    start: Mapping[int, np.ndarray],
    gradients: Sequence[Sequence[Mapping[int, np.ndarray]]],
    assigned: Sequence[tuple[int, int, float]] = (),
) -> Trajectory:
    """The recurrences from `start`, fed with gradients[rank][step][parameter].

    `assigned` has (step, parameter, value) of weights that are given before a step.
    """
    ranks, steps = range(len(gradients)), range(1, len(gradients[0]) + 1)
    rescale = 1.0 / case.batch_size(1, 0)  # the servers keep rank 0's first one
    rules = {key: RULES[case.optimizer](value) for key, value in start.items()}
    local = [{key: Local(case, v) for key, v in start.items()} for _ in ranks]
    weights, beneath = dict(start), [dict(start) for _ in ranks]
    result = Trajectory([], [[] for _ in ranks])
    for step in steps:
        for key, value in ((k, v) for at, k, v in assigned if at == step):
            given = np.full_like(weights[key], value)
            for rank in ranks:
                local[rank][key].assign(weights[key], given)
                beneath[rank][key] = given
            weights[key] = given
        new = dict(weights)
        made = [dict(weights) for _ in ranks]
        for key, weight in weights.items():
            if case.is_paused(step, key):
                continue
            staged = [
                _staged(
                    gradients[rank][step - 1][key],
                    1.0 / case.batch_size(step, rank) / rescale,
                )
                for rank in ranks
            ]
            hyper = case.multiplied(case.values(step), step, key)
            new[key] = rules[key](hyper, weight, sum(staged[1:], staged[0]), rescale)
            for rank in ranks:
                made[rank][key] = local[rank][key](
                    key,
                    step,
                    weight,
                    staged[rank],
                    rescale * len(ranks),
                    beneath[rank][key],
                )
                if rules[key].updates <= case.warmup:
                    made[rank][key] = new[key]
        weights, beneath = dict(new), [dict(m) for m in made]
        result.global_weights.append(new)
        for rank in ranks:
            result.local_weights[rank].append(made[rank])
    return result


def _staged(gradient: np.ndarray, ratio: float) -> np.ndarray:
    """What is pushed: scaled only where the batch is not the first one's size."""
    return gradient if ratio == 1.0 else gradient * f32(ratio)

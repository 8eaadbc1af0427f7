"""`mirror`: what the servers are about to do, with this worker's own gradient.

The part of W(t+1) that comes from the servers' momentum is known exactly from the last
displacement D = W(t) - W(t-1); only the new gradient's part needs the worker's own.
"""

from __future__ import annotations

import math
from typing import Hashable, Tuple

from mxnet import ndarray as nd
from mxnet import optimizer as opt

from .local_rule import LocalUpdate, Part
from .optimizer_state import FlatState, operator_settings

_Used = Tuple[float, float]

# D is c(t) m(t) to the rounding of W, 6e-8: if c rises by more in one step, as after a
# learning rate of 0, what D says of m is noise.
LARGEST_RISE = 100


class MirrorSGD(LocalUpdate):
    """`mirror` of momentum SGD.

    L(i,t+1) = W(t) + mu (W(t) - W(t-1)) - lr (g(i,t) + wd W(t))

    The mean of L over the workers is W(t+1). D is the servers' momentum, so two
    operators and no further memory do it (`design.md`, decision 2).
    """

    name = "mirror"

    def __init__(self, optimizer: opt.Optimizer, rescale: float) -> None:
        super().__init__(optimizer, rescale)
        self.keeps_previous = optimizer.momentum > 0

    def update(self, part, local_weight, global_weight, previous, gradient) -> None:
        settings = operator_settings(self._optimizer, part.index)
        if not self.keeps_previous:
            nd.sgd_update(global_weight, gradient, out=local_weight, **settings)
            return
        momentum = nd.elemwise_sub(global_weight, previous, out=previous)
        settings["momentum"] = self._optimizer.momentum
        nd.sgd_mom_update(
            global_weight, gradient, momentum, out=local_weight, **settings
        )


class _WithState(LocalUpdate):
    """A mirror that keeps an array, and what the servers used in the last update."""

    name = "mirror"

    def __init__(self, optimizer: opt.Optimizer, rescale: float) -> None:
        super().__init__(optimizer, rescale)
        self._states: dict[Hashable, FlatState] = {}
        self._used: dict[tuple[Hashable, int], _Used] = {}

    def likeness(self, key: Hashable, member: int) -> _Used | None:
        return self._used.get((key, member))

    def observe(self, part, scratch, global_weight, previous, gradient) -> None:
        self.update(part, scratch, global_weight, previous, gradient)

    def _state(self, part: Part) -> nd.NDArray:
        """The array of these numbers; zeros at first."""
        if part.key not in self._states:
            self._states[part.key] = FlatState(
                nd.zeros_like(part.whole), part.whole.size
            )
        return self._states[part.key].of(part.run)

    def _last_used(self, part: Part) -> _Used | None:
        return self._used.get((part.key, part.run.members[0]))

    def _note_used(self, part: Part, used: _Used) -> None:
        self._used.update({(part.key, member): used for member in part.run.members})


class MirrorNAG(_WithState):
    """`mirror` of Nesterov's accelerated gradient.

    With m the servers' momentum, MXNet's operator makes

        q = mu m - lr (g + wd W(t)),   W(t+1) = W(t) + (1 + mu) q - mu m,
        m' = mu m - lr (g + wd W(t+1)) = q - lr wd D,

    (its output is its input, so m' decays with W(t+1)), and D = (1 + mu) q - mu m is
    known. So the worker follows m from displacements alone,

        m' = (D + mu m) / (1 + mu) - lr wd D,

    where errors shrink by mu / (1 + mu) each step, and gives the operator W(t), m and
    its own gradient. The mean of L over the workers is W(t+1). One array of state.
    """

    def __init__(self, optimizer: opt.Optimizer, rescale: float) -> None:
        super().__init__(optimizer, rescale)
        self.keeps_previous = optimizer.momentum > 0

    def update(self, part, local_weight, global_weight, previous, gradient) -> None:
        settings = operator_settings(self._optimizer, part.index)
        if not self.keeps_previous:  # what MXNet's NAG does then
            nd.sgd_update(global_weight, gradient, out=local_weight, **settings)
            return
        followed = self._follow_momentum(part, global_weight, previous)
        followed.copyto(previous)  # the operator changes what it is given
        settings["momentum"] = self._optimizer.momentum
        nd.nag_mom_update(
            global_weight, gradient, previous, out=local_weight, **settings
        )
        self._note_used(part, (settings["momentum"], settings["lr"] * settings["wd"]))

    def _follow_momentum(
        self, part: Part, global_weight: nd.NDArray, previous: nd.NDArray
    ) -> nd.NDArray:
        """The servers' momentum after the update that made W(t)."""
        momentum = self._state(part)
        used = self._last_used(part)
        if used is not None:
            mu, decay = used
            displacement = nd.elemwise_sub(global_weight, previous, out=previous)
            displacement *= 1 / (1 + mu) - decay
            momentum *= mu / (1 + mu)
            momentum += displacement
        return momentum


class MirrorAdam(_WithState):
    """`mirror` of Adam.

    With c(t) = lr sqrt(1 - beta2^t) / (1 - beta1^t), MXNet's operator makes

        m(t+1) = beta1 m(t) + (1 - beta1) g,   v(t+1) = beta2 v(t) + (1 - beta2) g g,
        W(t+1) = W(t) - c(t+1) m(t+1) / (sqrt(v(t+1)) + eps),

    so D = -c(t) m(t) / (sqrt(v(t)) + eps), and m(t) = -D (sqrt(v(t)) + eps) / c(t),
    with this worker's own second moment for v, whose scale cancels: of m(t), only the
    change of v in one step is the worker's own. The operator is given W(t), this m(t),
    v and the worker's own gradient. One worker is Adam itself. With N, the gradient's
    part, a tenth of the step, is short by up to 1 / sqrt(N), as the own v is larger.
    v is fed since the first step, warm-up included. One array of state. In the step
    after c was 0, or 100 times smaller, D does not tell m, and it is taken as 0.
    """

    keeps_previous = True

    def update(self, part, local_weight, global_weight, previous, gradient) -> None:
        rule, variance = self._optimizer, self._state(part)
        settings = operator_settings(rule, part.index)
        t = rule.begin_num_update + part.count + 1
        settings["lr"] *= math.sqrt(1 - rule.beta2**t) / (1 - rule.beta1**t)
        mean = nd.elemwise_sub(previous, global_weight, out=previous)
        rate, epsilon = self._last_used(part) or (0.0, 0.0)
        if 0 < abs(settings["lr"]) <= LARGEST_RISE * abs(rate):
            scale = nd.sqrt(variance, out=local_weight)
            scale += epsilon
            mean *= scale
            mean *= 1 / rate
        else:
            mean[:] = 0
        settings.update(beta1=rule.beta1, beta2=rule.beta2, epsilon=rule.epsilon)
        nd.adam_update(
            *(global_weight, gradient, mean, variance), out=local_weight, **settings
        )
        self._note_used(part, (settings["lr"], rule.epsilon))


MIRRORS = {
    opt.SGD: MirrorSGD,
    opt.ccSGD: MirrorSGD,
    opt.NAG: MirrorNAG,
    opt.Adam: MirrorAdam,
}

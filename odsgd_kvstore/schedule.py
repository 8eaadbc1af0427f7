"""Which updates are synchronous, and how old the weights beneath one are: integers.

The delay is one step (the recurrences of Xu et al., ACM TACO 17(4), 2020); the one
place where warm-up is decided.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Schedule:
    """Warm-up and delay of one store.

    Parameters
    ----------
    warmup_steps : int
        K >= 0: updates 0 to K-1 of a key are synchronous SGD, L(t+1) = W(t+1).
    delay : int
        0: every update is synchronous. 1: One-step Delay SGD after the warm-up.
    full_every : int
        With compression, of so many pushes one is whole; 0: none but the first ones.
    """

    warmup_steps: int
    delay: int
    full_every: int = 0

    def is_warmup(self, update: int) -> bool:
        """Whether update number `update` (from 0) of a key is synchronous."""
        return self.delay == 0 or update < self.warmup_steps

    def staleness(self, update: int) -> int:
        """Age, in steps, of the global weights beneath the gradient of `update`.

        The gradient of `update` is computed on local weights that were made
        before it: from W(update) itself, or, once the update before was not
        warm-up, from W(update - 1).
        """
        return 0 if update == 0 or self.is_warmup(update - 1) else self.delay

    def is_whole(self, push: int) -> bool:
        """Whether push number `push` (from 0) of a key is sent whole, if any is not.

        The first is, and those of the warm-up: it is synchronous SGD.
        """
        if push == 0 or self.delay and push < self.warmup_steps:
            return True
        return bool(self.full_every) and push % self.full_every == 0

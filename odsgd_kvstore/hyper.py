"""What the servers know of rank 0's optimizer, and what has changed since."""

from __future__ import annotations

import copy
import logging
from typing import Any, Iterable, Mapping

from mxnet import optimizer as opt

from . import commands
from .blocks import Block
from .errors import ConfigError
from .optimizer_copy import hyper_parameters

_HAND_CHANGES = 10
_MUST_AGREE = ("lr", "wd", "momentum", "clip_gradient", "beta1", "beta2", "gamma1")

_logger = logging.getLogger(__name__)


class HyperParameters:
    """Watches the user's optimizer between steps, and words the servers' orders.

    Parameters
    ----------
    optimizer : mxnet.optimizer.Optimizer
        The user's own object; only read.
    store : int
        The store's number.
    """

    def __init__(self, optimizer: opt.Optimizer, store: int) -> None:
        self._optimizer, self._store = optimizer, store
        self._seen = hyper_parameters(optimizer)
        self._servers_schedule = copy.deepcopy(optimizer.lr_scheduler)
        self._told: dict[Block, list[list[float]]] = {}
        self._steps_changed = 0

    def changed(self) -> dict[str, Any]:
        """Attributes that differ from those that `changes` returned last, by name."""
        now = vars(self._optimizer)  # the hot path: the very same objects as then
        if all(now.get(name) is value for name, value in self._seen.items()):
            return {}
        return {
            name: value
            for name, value in hyper_parameters(self._optimizer).items()
            if name in self._seen  # a new one is the user's own, and means nothing
            and self._seen[name] is not value
            and self._seen[name] != value
        }

    def changes(self, step: int) -> dict[str, Any]:
        """As `changed`, with a schedule that was changed in place; now they are known.

        Parameters
        ----------
        step : int
            From which they will hold.

        Raises
        ------
        ConfigError
            Momentum was switched on, which needs what nobody has kept; or an
            attribute is not plain any more.
        """
        changed = self.changed()
        if self._schedule_drifted(step):
            changed["lr_scheduler"] = self._optimizer.lr_scheduler
        if "lr_scheduler" in changed:
            self._servers_schedule = copy.deepcopy(changed["lr_scheduler"])
        lost = self._seen.keys() - hyper_parameters(self._optimizer).keys()
        if lost:
            name = min(lost)
            raise ConfigError(
                f"The optimizer's {name} was set to {getattr(self._optimizer, name)!r}; "
                "allowed is a plain number, such as 0.1."
            )
        if changed.get("momentum") and not self._seen["momentum"]:
            raise ConfigError(
                f"momentum was changed from 0 to {changed['momentum']} during training, "
                "and neither the servers nor the local update have kept any while it "
                "was 0. Start with the momentum you need, and change it to a small "
                "value instead of 0, such as 0.01; or make a new store."
            )
        self._seen = {name: vars(self._optimizer)[name] for name in self._seen}
        self._warn_if_changed_by_hand(bool(changed))
        return changed

    def _schedule_drifted(self, step: int) -> bool:
        """Whether the user's schedule gives another value than the servers' copy."""
        schedule = self._optimizer.lr_scheduler
        if schedule is None or self._servers_schedule is None:
            return False
        return schedule(step) != self._servers_schedule(step)

    def begin(
        self, step: int, blocks: Iterable[Block], **settings: Any
    ) -> dict[str, Any]:
        """The message that gives the servers the optimizer, all keys and `settings`.

        `settings` has rescale (the servers' `rescale_grad`) and what
        `server.Server._on_begin` wants beside it.
        """
        encoded = commands.encode_optimizer(self._optimizer, settings["rescale"])
        message = self._message("begin", step, keys=self._new_keys(blocks))
        return {**message, **encoded, **settings}

    def change(
        self,
        step: int,
        blocks: Iterable[Block],
        changes: Mapping[str, Any],
        offsets: Mapping[int, list[int]],
    ) -> dict[str, Any] | None:
        """The message for what is new since the last step; None for nothing.

        `offsets` has, by native key, [count, offset]: from that count of the key on it
        is so many updates behind the store's steps.
        """
        keys = self._new_keys(blocks)
        if not (changes or keys or offsets):
            return None
        return self._message(
            "change", step, values=_encode_values(changes), keys=keys, offsets=offsets
        )

    def _message(self, op: str, step: int, **parts: Any) -> dict[str, Any]:
        empty: dict[str, Any] = {"values": {}, "keys": {}, "offsets": {}}
        return {**empty, **parts, "op": op, "store": self._store, "step": step}

    def _new_keys(self, blocks: Iterable[Block]) -> dict[int, dict[str, Any]]:
        """What the servers must know of the native keys for which it is new.

        [size, lr_mult, wd_mult] of each parameter in it, and the key of compressed
        pushes. The size counts in packs only: a slice is smaller.
        """
        new = {}
        for block in blocks:
            members = [
                [r.size, *multipliers_of(self._optimizer, r.index)]
                for r in block.records
            ]
            if self._told.get(block) != members:
                self._told[block] = members
                for slice_ in block.slices:
                    told = {"members": members, "words": slice_.words_key}
                    new[slice_.native] = told
        return new

    def summary(self) -> dict[str, Any]:
        """The values that ranks should agree on."""
        return {name: self._seen[name] for name in _MUST_AGREE if name in self._seen}

    def _warn_if_changed_by_hand(self, changed: bool) -> None:
        self._steps_changed = self._steps_changed + 1 if changed else 0
        if self._steps_changed == _HAND_CHANGES:
            _logger.warning(
                "The optimizer was changed by hand at each of the last %d steps. Each "
                "change waits until every server has it; use an lr_scheduler, which "
                "the servers evaluate themselves.",
                _HAND_CHANGES,
            )


def _encode_values(changes: Mapping[str, Any]) -> dict[str, Any]:
    """Changed attributes as JSON."""
    values = {name: commands.as_plain(value) for name, value in changes.items()}
    if values.get("lr_scheduler") is not None:
        values["lr_scheduler"] = commands.encode_schedule(changes["lr_scheduler"])
    return values


def index_of(optimizer: opt.Optimizer, key: Any) -> Any:
    """A key's index in the optimizer: itself, or, for a name, as Module numbered it."""
    if isinstance(key, int):
        return key
    return {name: index for index, name in optimizer.idx2name.items()}.get(key, key)


def multipliers_of(optimizer: opt.Optimizer, index: Any) -> list[float]:
    """[lr_mult, wd_mult], looked up in the order of `Optimizer._get_lrs`."""
    if index in optimizer.param_dict:
        parameter = optimizer.param_dict[index]
        return [float(parameter.lr_mult), float(parameter.wd_mult)]
    name = optimizer.idx2name.get(index)
    return [
        float(table[index] if index in table else table.get(name, 1.0))
        for table in (optimizer.lr_mult, optimizer.wd_mult)
    ]

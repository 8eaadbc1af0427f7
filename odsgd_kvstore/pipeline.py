"""The steps of one store on this worker, in the algorithm's words.

Who holds what: `buffers.py`. When a step is warm-up: `schedule.py`. How L is made:
`local_update.py`. What travels: `wire.py`. Here they meet; no arithmetic.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import time
from typing import Any, Callable, Iterator, Sequence

import mxnet as mx
from mxnet import ndarray as nd
from mxnet import optimizer as opt

from . import local_update
from .blocks import Block
from .config import Config
from .errors import ConfigError, JobError
from .give_assigned import Assignment
from .hyper import multipliers_of
from .keys import UserKeys
from .optimizer_state import Run, runs
from .orders import Orders
from .placement import Placement, is_trained
from .replicated import Replicated, wait_for_pulls
from .schedule import Schedule
from .transport import Connection
from .wire import Wire

_logger = logging.getLogger(__name__)


class Pipeline:
    """One store's parameters, step by step.

    Parameters
    ----------
    config : Config
    connection : Connection
    number : int
        The store's number in this process, the same on every rank.
    sum_on_device : bool
        Where the gradients of several devices are summed.

    Attributes
    ----------
    records : UserKeys of Replicated
        The parameters, by the user's key.
    assignment : Assignment
        Weights that the user assigned since the last step.
    find_assigned : callable
        Set by the host object (`Trainer`), which alone can know of new weights: notes
        them in `assignment`. Called before each step and evaluation.
    """

    def __init__(
        self, config: Config, connection: Connection, number: int, sum_on_device: bool
    ) -> None:
        self.records: UserKeys[Replicated] = UserKeys()
        rule = config.local_optimizer, config.local_optimizer_params
        is_elementwise = functools.partial(local_update.is_elementwise, *rule)
        self.placement = Placement(connection.keys, is_elementwise)
        self._config, self._connection = config, connection
        self._number, self._sum_on_device = number, sum_on_device
        self._schedule = Schedule(config.warmup_steps, config.delay, config.full_every)
        self.wire = Wire(config, connection, self._schedule)
        self._orders = Orders(
            connection, number, self.records, self.wire, self.placement
        )
        self._optimizer: opt.Optimizer | None = None
        self._rule: local_update.LocalUpdate | None = None  # from the first step on
        self._newest = -1  # order of the parameter that came last
        self.assignment = Assignment(connection, self.records, number, self.wire)
        self.find_assigned: Callable[[], None] = lambda: None
        self._holds_global = False
        self._stats = dict.fromkeys(("steps", "staleness", "max_staleness"), 0)
        self._stats.update(wait_s=0.0)

    def set_optimizer(self, optimizer: opt.Optimizer) -> None:
        """The global optimizer; the servers get it with the first step."""
        if self._optimizer is not None:
            raise ConfigError(
                "This store has an optimizer already, with its state on the servers. "
                "Change that optimizer's attributes, or make a new store."
            )
        self._optimizer = optimizer

    def starts_step(self, record: Replicated) -> bool:
        """Whether a push of `record` begins a new step.

        It does when it is the parameter's second in this step, when a parameter that
        paused comes before the one that was pushed last (MXNet pushes in the order of
        creation), or when the optimizer was changed, or when a pack did not wait for
        it: packs know who comes in a step.
        """
        if self._rule is None or record.step == self._orders.step:
            return True
        if record.block.is_pack and record not in record.block.waits_for:
            return True
        paused = 0 <= record.step < self._orders.step - 1
        return paused and record.order < self._newest or self._orders.is_changed()

    def begin_step(self, records: Sequence[Replicated] | None = None) -> None:
        """Start a step on this rank; at the first, the servers get the optimizer.

        Parameters
        ----------
        records : sequence of Replicated
            The parameters that will be stepped; if left out, those of the Gluon
            Trainer that have a gradient.

        Notes
        -----
        Waits only at the first step; for this rank's pulls and the servers' obedience
        when the optimizer was changed or a parameter is new or comes back after a
        pause; and, collectively, when weights were assigned.
        """
        self.check()
        self._check_packs()
        coming = set(records if records is not None else self._known_to_come())
        if self._rule is None:
            self._begin(self._optimizer)
        else:
            self._rule.follow(self._orders.follow(coming), self._orders.step)
        self.find_assigned()
        if self.assignment.is_due:
            self._wait()
            self.assignment.give()
        self._optimizer.num_update = max(self._optimizer.num_update, self._orders.step)
        self._stats["steps"] += 1
        for block in self._orders.packs:
            block.expect(coming)

    def check(self, what: str = "A step was made") -> None:
        """Raise unless weights may be changed now, as `what` says; never waits."""
        self._connection.check()
        if self._holds_global:
            raise JobError(
                f"{what} inside global_weights(), where the parameters hold global "
                "weights only for evaluation. Leave the context first."
            )

    def stage(
        self,
        record: Replicated,
        gradients: Sequence[nd.NDArray],
        weights: Sequence[nd.NDArray],
    ) -> list[Block]:
        """g(i,t): this worker's gradient, summed over its devices, in staging.

        The native store overwrites the array that is pushed, so gradients are copied.
        They are scaled by this rank's rescale_grad over the servers': 1 in every
        ordinary step.

        Returns
        -------
        list of Block
            Whose gradients are all here: the parameter's own, or the pack that it
            completes; empty while others of its pack are still to come.
        """
        record.take(gradients, weights)
        record.step, self._newest = self._orders.step, record.order
        block = record.block
        if not block.come(record):
            return []
        if block.update == 0:
            context = weights[0].context
            several = len(weights) > 1 and not self._sum_on_device
            if several or self.wire.is_compressed:
                context = mx.cpu()
            delayed, previous = self._config.delay > 0, self._rule.keeps_previous
            block.allocate(context, delayed, previous, self.wire.dtype)
        block.stage(self._optimizer.rescale_grad / self._orders.rescale)
        return [block]

    def local_update(self, block: Block) -> None:
        """L(i,t+1) = Local(W(t), g(i,t)), at once; returns before it is done.

        During warm-up L(i,t+1) will be W(t+1), and only the rule's state takes note.
        """
        if self._config.delay == 0:
            return
        local, places = block.make_local(), []
        if self._rule.reads_local:
            block.bring_local()
        for run in self._runs(block):
            part = self._part(block, run)
            new, old = block.cut(local, run), block.cut(block.global_weight, run)
            gradient = block.gradient
            if block.is_pack:
                gradient = gradient._slice(run.start, run.stop)
            previous = None if block.spare is None else block.cut(block.spare, run)
            if self._schedule.is_warmup(part.count):
                self._rule.observe(part, new, old, previous, gradient)
                continue
            self._rule.update(part, new, old, previous, gradient)
            places += run.members
        if places:
            block.copy_out(local, places)

    def global_update(self, block: Block) -> None:
        """W(t+1) = Opt(W(t), sum_i g(i,t)): push the gradient, pull W(t+1).

        Returns before it is done. During warm-up the weights receive W(t+1), and the
        next forward pass waits for it; later the next step's local update does.
        """
        self._orders.note_pause(block)
        stepped = [block.records[place] for place in block.present]
        warm = [r.place for r in stepped if self._schedule.is_warmup(r.update)]
        self.wire.pushpull(block, warm)
        for record in stepped:
            self._advance(record)

    def _advance(self, record: Replicated) -> None:
        """Count an update of a parameter, all of whose numbers are on their way."""
        staleness = record.update - record.base
        self._stats["staleness"] = staleness
        self._stats["max_staleness"] = max(self._stats["max_staleness"], staleness)
        record.advance(self._schedule.staleness(record.update + 1))

    def _runs(self, block: Block) -> list[Run]:
        """The numbers of a block that are updated at once, side by side."""
        if not block.is_pack:
            return [Run(0, block.size, (0,))]
        alike: list[Any] = [None] * len(block.records)
        for place in block.present:
            record = block.records[place]
            multipliers = multipliers_of(self._optimizer, record.index)
            kept = self._rule.likeness(block, place)
            alike[place] = (record.update, *multipliers, kept)
        return runs([record.size for record in block.records], alike)

    def _part(self, block: Block, run: Run) -> local_update.Part:
        record = block.records[run.members[0]]
        whole = block.cut(block.global_weight, Run(0, block.size, ()))
        return local_update.Part(record.index, block, run, record.update, whole)

    def settle(self) -> None:
        """L = W for every parameter that was not stepped in this step."""
        for record in self.records:
            if record.is_local and record.step < self._orders.step:
                record.use_global()

    def synchronize(self) -> None:
        """Make every stepped parameter W; waits for this rank's pending pulls only.

        Not collective.
        """
        start = time.perf_counter()
        for record in self._local():
            record.use_global()
        self._wait()
        self._stats["wait_s"] += time.perf_counter() - start

    @contextlib.contextmanager
    def global_weights(self) -> Iterator[None]:
        """Parameters hold W inside the context, and L again after it.

        Waits for this rank's pending pulls only; not collective. Holds one more copy
        of the parameters meanwhile.
        """
        kept = [
            (record, [weight.copy() for weight in record.weights], record.base)
            for record in self._local()
        ]
        self.synchronize()
        outer, self._holds_global = self._holds_global, True
        try:
            yield
        finally:
            self._holds_global = outer
            for record, local_weights, base in kept:
                for weight, local_weight in zip(record.weights, local_weights):
                    local_weight.copyto(weight)
                record.base, record.is_local = base, True

    def stats(self) -> dict[str, Any]:
        """Counters of this store on this rank; see `Trainer.stats`."""
        return {**self._stats, **self.wire.stats()}

    def _local(self) -> list[Replicated]:
        """The parameters whose W is not in the user's arrays, nor was put there."""
        self.find_assigned()
        return [
            record
            for record in self.records
            if record.is_local and not self.assignment.holds(record)
        ]

    def _known_to_come(self) -> Iterator[Replicated]:
        return (r for r in self.records if is_trained(r, self._optimizer))

    def _check_packs(self) -> None:
        """Raise if a parameter of a pack did not come in the last step."""
        for block in self._orders.packs:
            came = [r for r in block.records if r.step == self._orders.step]
            if block.waits_for and came:
                missing = sorted(str(record.key) for record in block.waits_for)
                raise JobError(
                    f"Parameter {', '.join(missing)} did not come in the last step, "
                    f"and {came[0].key} did. With gluon.Trainer's store every parameter "
                    "with a grad_req other than 'null' must be pushed in each step: "
                    "leave that to Trainer.step."
                )

    def _wait(self) -> None:
        """Until this rank's pulls are here; raise what a server reported."""
        wait_for_pulls(self.records)
        self._connection.check_now()

    def _begin(self, optimizer: opt.Optimizer | None) -> None:
        """The first step: agree on it, give the servers the optimizer, make the rule."""
        if optimizer is None:
            raise ConfigError(
                "A step was made without an optimizer: dist_odsgd updates weights on "
                "the servers. Call set_optimizer first; with a Trainer or Module leave "
                "update_on_kvstore out (or True), and unset MXNET_UPDATE_ON_KVSTORE."
            )
        self._orders.begin(optimizer, self._config.threshold)
        self._rule = local_update.create(
            self._config.local_optimizer,
            self._config.local_optimizer_params,
            optimizer,
            self._orders.rescale * self._connection.num_workers,
            self.wire.is_exact,
        )
        self._rule.follow({}, self._orders.step)
        self.wire.warn_if_useless(self.records)
        self._log_start()

    def _log_start(self) -> None:
        """One line, from rank 0, on what is trained and what parameters hold."""
        if self._connection.rank == 0 and self._config.delay:
            _logger.warning(
                "dist_odsgd trains with %d worker(s), local update %r, %d warm-up steps. "
                "Between steps parameters hold this worker's local weights: evaluate "
                "and save inside odsgd_kvstore.global_weights(...), or after "
                "odsgd_kvstore.synchronize(...).",
                self._connection.num_workers,
                self._rule.name,
                self._config.warmup_steps,
            )

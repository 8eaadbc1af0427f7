"""The steps of one store on this worker, in the algorithm's words.

Who holds what: `buffers.py`. When a step is warm-up: `schedule.py`. How L is made:
`local_update.py`. What travels: `transport.py`. Here they meet; no arithmetic.
"""

from __future__ import annotations

import contextlib
import logging
import time
from typing import Any, Callable, Iterator, Sequence

import mxnet as mx
from mxnet import ndarray as nd
from mxnet import optimizer as opt

from . import local_update
from .buffers import Replicated
from .config import Config
from .errors import ConfigError, JobError
from .give_assigned import Assignment
from .hyper import HyperParameters
from .keys import UserKeys
from .schedule import Schedule
from .transport import Connection, check_equal

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
        self._config, self._connection = config, connection
        self._number, self._sum_on_device = number, sum_on_device
        self._schedule = Schedule(config.warmup_steps, config.delay)
        self._optimizer: opt.Optimizer | None = None
        self._hyper: HyperParameters | None = None  # from the first step on
        self._rule: local_update.LocalUpdate | None = None  # likewise
        self._rescale = 1.0
        self._step = 0
        self._newest = -1  # native key of the newest push
        self.assignment = Assignment(connection, self.records, number)
        self.find_assigned: Callable[[], None] = lambda: None
        self._holds_global = False
        self._stats = dict.fromkeys(("steps", "staleness", "max_staleness"), 0)
        self._stats.update(pushed_bytes=0, pulled_bytes=0, wait_s=0.0)

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
        creation, in which native keys rise), or when the optimizer was changed.
        """
        if self._hyper is None or record.step == self._step:
            return True
        paused = 0 <= record.step < self._step - 1
        return paused and record.native < self._newest or bool(self._hyper.changed())

    def begin_step(self, records: Sequence[Replicated] = ()) -> None:
        """Start a step on this rank; at the first, the servers get the optimizer.

        Parameters
        ----------
        records : sequence of Replicated
            The parameters that will be stepped, as far as they are known.

        Notes
        -----
        Waits only at the first step; for this rank's pulls and the servers' obedience
        when the optimizer was changed or a parameter is new or comes back after a
        pause; and, collectively, when weights were assigned.
        """
        self.check()
        if self._hyper is None:
            self._begin()
        else:
            self._follow_changes(records)
        self.find_assigned()
        if self.assignment.is_due:
            self._wait()
            self.assignment.give()
        self._optimizer.num_update = max(self._optimizer.num_update, self._step)
        self._stats["steps"] += 1

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
    ) -> nd.NDArray:
        """g(i,t): this worker's gradient, summed over its devices, in staging.

        The native store overwrites the array that is pushed, so the user's gradient
        is copied, and may be changed as soon as this returns. It is scaled by this
        rank's rescale_grad over the servers': 1 in every ordinary step.
        """
        record.weights = list(weights)
        if record.staging is None:
            delayed = self._config.delay > 0
            context = weights[0].context
            if len(weights) > 1 and not self._sum_on_device:
                context = mx.cpu()
            record.allocate(context, delayed, self._rule.keeps_previous)
        return record.stage(gradients, self._optimizer.rescale_grad / self._rescale)

    def local_update(self, record: Replicated, gradient: nd.NDArray) -> None:
        """L(i,t+1) = Local(W(t), g(i,t)), at once; returns before it is done.

        During warm-up L(i,t+1) will be W(t+1), and only the rule's state takes note.
        """
        if self._config.delay == 0:
            return
        local_weight = record.make_local()
        if self._schedule.is_warmup(record.update):
            self._rule.observe(
                record.index, local_weight, record.global_weight, gradient
            )
            return
        self._rule.update(
            record.index, local_weight, record.global_weight, record.spare, gradient
        )
        record.spread_local(local_weight)

    def global_update(self, record: Replicated, gradient: nd.NDArray) -> None:
        """W(t+1) = Opt(W(t), sum_i g(i,t)): push `gradient`, pull W(t+1).

        Returns before it is done. During warm-up the weights receive W(t+1), and the
        next forward pass waits for it; later the next step's local update does.
        """
        if self._offset(record) != record.offset:
            self._tell({}, [record])
        warmup = self._schedule.is_warmup(record.update)
        targets = record.pull_targets(warmup)
        self._connection.pushpull(record.native, gradient, targets)
        self._newest = record.native
        staleness = record.update - record.base
        self._stats["staleness"] = staleness
        self._stats["max_staleness"] = max(self._stats["max_staleness"], staleness)
        self._stats["pushed_bytes"] += 4 * record.size
        self._stats["pulled_bytes"] += 4 * record.size
        record.advance(self._schedule.staleness(record.update + 1), self._step)

    def settle(self) -> None:
        """L = W for every parameter that was not stepped in this step."""
        for record in self.records:
            if record.is_local and record.step < self._step:
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
        return dict(self._stats)

    def _local(self) -> list[Replicated]:
        """The parameters whose W is not in the user's arrays, nor was put there."""
        self.find_assigned()
        return [
            record
            for record in self.records
            if record.is_local and not self.assignment.holds(record)
        ]

    def _stepped(self) -> list[Replicated]:
        return [r for r in self.records if r.update > 0]

    def _wait(self) -> None:
        """Until this rank's pulls are here; raise what a server reported."""
        self._wait_for_pulls()
        self._connection.check_now()

    def _wait_for_pulls(self) -> None:
        """Until W of every step that this rank has made is here."""
        for record in self._stepped():
            for array in [record.global_weight, *record.weights]:
                if array is not None:
                    array.wait_to_read()

    def _begin(self) -> None:
        """The first step: agree on it, and give the servers the optimizer."""
        optimizer = self._optimizer
        if optimizer is None:
            raise ConfigError(
                "A step was made without an optimizer: dist_odsgd updates weights on "
                "the servers. Call set_optimizer first; with a Trainer or Module leave "
                "update_on_kvstore out (or True), and unset MXNET_UPDATE_ON_KVSTORE."
            )
        self._hyper = HyperParameters(optimizer, self._number)
        self._rescale = self._agree_on_start(optimizer)
        self._rule = local_update.create(
            self._config.local_optimizer,
            self._config.local_optimizer_params,
            optimizer,
            self._rescale * self._connection.num_workers,
        )
        self._step = optimizer.begin_num_update + 1
        self._rule.follow({}, self._step)
        if self._connection.rank == 0:
            self._connection.command(
                self._hyper.begin(self._step, self.records, self._rescale)
            )
        self._log_start()

    def _agree_on_start(self, optimizer: opt.Optimizer) -> float:
        """Compare the ranks' optimizers; rank 0's rescale_grad, which the servers use."""
        rows = self._connection.exchange(
            {
                "op": f"first step of store {self._number}",
                "keys": [f"{r.key!r} {r.shape}" for r in self.records],
                "optimizer": type(optimizer).__name__,
                "rescale_grad": optimizer.rescale_grad,
                "hyper": repr(self._hyper.summary()),
            }
        )
        check_equal(rows, "keys", "parameters", "Build the same network on every rank.")
        check_equal(rows, "optimizer", "optimizers", "Use the same one on every rank.")
        mine, theirs = rows[self._connection.rank]["hyper"], rows[0]["hyper"]
        if mine != theirs:
            _logger.warning(
                "Rank %d's optimizer has %s. The servers use rank 0's, %s; only this "
                "rank's local updates use its own. Use the same values on every rank.",
                self._connection.rank,
                mine,
                theirs,
            )
        return rows[0]["rescale_grad"]

    def _follow_changes(self, records: Sequence[Replicated]) -> None:
        """A later step: the rule and the servers get what was changed since the last."""
        changes = self._hyper.changes(self._step + 1)
        self._step += 1
        self._rule.follow(changes, self._step)
        self._tell(changes, records)

    def _tell(self, changes: dict[str, Any], records: Sequence[Replicated]) -> None:
        """Rank 0: send the servers what is new, to hold from this step on.

        Its own pulls are waited for first: all earlier updates are done then, so that
        none can take what is sent for its own.
        """
        offsets = {}
        for record in records:
            offset = self._offset(record)
            if offset != record.offset:
                offsets[record.native] = [record.update + 1, offset]
                record.offset = offset
        if self._connection.rank != 0:
            return
        message = self._hyper.change(self._step, self.records, changes, offsets)
        if message:
            self._wait_for_pulls()
            self._connection.command(message)

    def _offset(self, record: Replicated) -> int:
        """By how many steps a parameter came later, or paused."""
        return self._step - self._optimizer.begin_num_update - record.update - 1

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

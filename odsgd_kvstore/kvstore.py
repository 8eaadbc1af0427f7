"""`dist_odsgd`: push, pull and pushpull with a one-step delay; no arithmetic here."""

from __future__ import annotations

import dataclasses
from typing import Any, Mapping, NoReturn

import mxnet as mx
from mxnet import ndarray as nd
from mxnet import optimizer as opt

from . import checks
from .config import Config
from .connection import connect
from .errors import ConfigError, NotSupportedYet
from .hyper import index_of
from .keys import UserKey, grouped
from .pipeline import Pipeline
from .replicated import Replicated
from .transport import check_equal


class ODSGDStore(mx.kvstore.KVStore):
    """A distributed store that trains with One-step Delay SGD.

    Made by `mx.kv.create('dist_odsgd')` (gradients of a worker's devices are summed on
    the CPU) or `'dist_device_odsgd'` (summed on the first device).

    Parameters
    ----------
    config : Config, optional
        From the ODSGD_* variables when left out.
    sum_on_device : bool
        Where the gradients of several devices are summed.

    Raises
    ------
    ConfigError, HandshakeError, MismatchError

    Notes
    -----
    Blocks until all workers, servers and the scheduler have joined. Collective: every
    rank makes its stores, and each store's keys and steps, in the same order.

    References
    ----------
    Y. Xu, D. Dong, Y. Zhao, W. Xu, X. Liao, OD-SGD: One-Step Delay Stochastic Gradient
    Descent for Distributed Training, ACM TACO 17(4), 2020.
    """

    def __init__(
        self, config: Config | None = None, sum_on_device: bool = False
    ) -> None:
        self.config = config or Config.from_environment()
        self._sum_on_device = sum_on_device
        self._connection = connect()
        self.handle = self._connection.handle
        self._updater = None
        self._number = self._connection.num_stores
        self._connection.num_stores += 1
        self._optimizer: opt.Optimizer | None = None
        self._begin_pipeline("create")

    def __del__(self) -> None:
        """Nothing: the native store belongs to the process."""

    @property
    def type(self) -> str:
        """'dist_odsgd_sync': MXNet takes its synchronous branches on '_sync'."""
        return "dist_device_odsgd_sync" if self._sum_on_device else "dist_odsgd_sync"

    @property
    def rank(self) -> int:
        """This worker's rank, from 0."""
        return self._connection.rank

    @property
    def num_workers(self) -> int:
        """Workers in the job."""
        return self._connection.num_workers

    def is_capable(self, capability: str) -> bool:
        """Whether the store can do something.

        Parameters
        ----------
        capability : str
            'optimizer': True, as updates run on the servers. No other is known.
        """
        if capability.lower() != mx.kvstore.KVStoreBase.OPTIMIZER:
            raise ConfigError(f"Unknown capability {capability!r}; known: 'optimizer'.")
        return True

    def set_optimizer(self, optimizer: opt.Optimizer) -> None:
        """The global optimizer; the servers get it with the first step.

        Later changes of its attributes reach the servers and hold from the next step.

        Parameters
        ----------
        optimizer : mxnet.optimizer.Optimizer
            The user's own object; only its `num_update` is written.

        Raises
        ------
        ConfigError
            The optimizer cannot run on servers, or the local update does not fit it.
        """
        job = self._connection
        num_servers = 0 if job.is_standalone else job.num_servers
        checks.check_optimizer(optimizer, self.config, num_servers)
        for record in self.pipeline.records:
            self._check_slice(optimizer, record.key, record.size)
        self.pipeline.set_optimizer(optimizer)
        self._optimizer = optimizer

    def init(self, key: Any, value: Any) -> None:
        """Make keys known with rank 0's values; collective, returns when it is done.

        Parameters
        ----------
        key, value
            As for `broadcast`.
        """
        self.broadcast(key, value, None)

    def broadcast(self, key: Any, value: Any, out: Any, priority: int = 0) -> None:
        """Make keys known and give every rank rank 0's values; collective.

        Parameters
        ----------
        key : int, str, or list of them
        value : NDArray or list of NDArray
            One value per key, float32 and dense; not changed.
        out : NDArray, list of NDArray, or list of lists
            The arrays, one per device, that receive the value.
        priority : int
            Not used.

        Raises
        ------
        ConfigError
            A key is known already, or a value's type is not allowed.
        MismatchError
            Names, shapes or types differ between ranks.

        Notes
        -----
        The servers have the values when it returns; a wait on `out` ends the pull.
        """
        self._connection.check()
        triples = grouped(key, value, out)
        for user_key, values, _ in triples:
            self.pipeline.records.check_new(user_key)
            self._check_array(user_key, values[0])
        with self._connection.keys.given_back_on_error():
            added = [(self._place(k, v[0], outs), v[0]) for k, v, outs in triples]
            records = {self._name(record.key): record for record, _ in added}
            checks.check_same_everywhere(self._connection, records)
        for record, _ in added:
            record.order = len(self.pipeline.records)
            self.pipeline.records.add(record.key, record)
        self.pipeline.wire.broadcast(added)

    def pushpull(
        self, key: Any, value: Any, out: Any = None, priority: int = 0
    ) -> None:
        """One step of each key: push gradients, make the local weights in `out`.

        During warm-up `out` receives W(t+1), as with `dist_sync`. After it, `out`
        receives L(i,t+1) = Local(W(t), g(i,t)) at once, while W(t+1) is on its way.

        Parameters
        ----------
        key : int, str, or list of them
        value : NDArray, list of NDArray, or list of lists
            Gradients, one per device; not changed, and free as soon as this returns.
        out : NDArray, list of NDArray, or list of lists
            The parameter's arrays, one per device.
        priority : int
            Not used: MXNet's CPU engine ignores it.

        Raises
        ------
        ServerError
            A server failed in an earlier step.

        Notes
        -----
        Returns before the work is done; a wait on `out` ends the local update. It
        waits for the network only at the first step, when the optimizer was changed, a
        parameter comes back after a pause, or weights were assigned. Every rank must
        push the same keys.
        """
        if out is None:
            raise ConfigError(
                "pushpull came without out: dist_odsgd updates weights on the servers. "
                "Leave update_on_kvstore out (or True), and unset "
                "MXNET_UPDATE_ON_KVSTORE."
            )
        pipeline = self.pipeline
        for user_key, gradients, weights in grouped(key, value, out):
            record = pipeline.records[user_key]
            checks.check_shapes(user_key, record.shape, [*gradients, *weights])
            if pipeline.starts_step(record):
                pipeline.settle()
                pipeline.begin_step()
            for block in pipeline.stage(record, gradients, weights):
                pipeline.local_update(block)
                pipeline.global_update(block)

    def pull(
        self, key: Any, out: Any = None, priority: int = 0, ignore_sparse: bool = True
    ) -> None:
        """Copy the global weights that this rank's newest step leads to into `out`.

        Parameters
        ----------
        key : int, str, or list of them
        out : NDArray, list of NDArray, or list of lists
            Arrays of the parameter's shape.
        priority, ignore_sparse
            Not used.

        Notes
        -----
        Returns before it is done, but for a key that was never stepped; a wait on
        `out` ends it.
        """
        self._connection.check()
        for user_key, outs, _ in grouped(key, out, None):
            record = self.pipeline.records[user_key]
            checks.check_shapes(user_key, record.shape, outs)
            self.pipeline.wire.read(record, outs)
            for array in outs if record.update == 0 else ():
                array.wait_to_read()  # a push must not overtake the pull

    # What it does not do

    def push(self, key: Any, value: Any, priority: int = 0) -> NoReturn:
        """Refused: a push without a pull is what sparse gradients need."""
        raise NotSupportedYet(
            f"push without pull (key {key!r}) is not supported yet with dist_odsgd; MXNet "
            "does it for row_sparse gradients, such as Embedding(sparse_grad=True). Use "
            "dense gradients, or kvstore='dist_sync'."
        )

    def row_sparse_pull(
        self, key: Any, out: Any = None, priority: int = 0, row_ids: Any = None
    ) -> NoReturn:
        """Refused."""
        raise NotSupportedYet(
            f"row_sparse weights (key {key!r}) are not supported yet with dist_odsgd. Use "
            "dense weights, or kvstore='dist_sync'."
        )

    def set_gradient_compression(self, compression_params: Mapping[str, Any]) -> None:
        """How gradients are compressed; before the first key, on every rank.

        Parameters
        ----------
        compression_params : mapping
            See `Config`.

        Raises
        ------
        ConfigError
            The parameters are not allowed, or the store has keys already.
        """
        config = dataclasses.replace(self.config, compression_params=compression_params)
        if config == self.config or not compression_params:
            return
        if len(self.pipeline.records):
            raise ConfigError(
                "set_gradient_compression came after the first key. Call it before "
                "init and broadcast; with a Trainer pass compression_params."
            )
        self.config = config
        optimizer = self._optimizer
        self._begin_pipeline("compress")
        if optimizer is not None:
            self.set_optimizer(optimizer)

    def save_optimizer_states(
        self, fname: str, dump_optimizer: bool = False
    ) -> NoReturn:
        """Refused."""
        raise NotSupportedYet(
            "Saving the optimizer's state from the servers is not supported yet. Save "
            "the weights inside odsgd_kvstore.global_weights(...)."
        )

    def load_optimizer_states(self, fname: str) -> NoReturn:
        """Refused."""
        raise NotSupportedYet(
            "Loading the optimizer's state to the servers is not supported yet. Load "
            "the weights before the first step."
        )

    def _set_updater(self, updater: Any) -> NoReturn:
        raise NotSupportedYet("dist_odsgd updates on the servers: use set_optimizer.")

    def _send_command_to_servers(self, head: int, body: str) -> NoReturn:
        raise NotSupportedYet("The servers of dist_odsgd obey only its own commands.")

    def _barrier(self) -> None:
        """Wait until every worker is here; collective."""
        self._connection.barrier()

    def _begin_pipeline(self, what: str) -> None:
        """Start with the settings, which must be the same on every rank."""
        self.pipeline = Pipeline(
            self.config, self._connection, self._number, self._sum_on_device
        )
        rows = self._connection.exchange(
            {"op": f"{what} store {self._number}", "config": repr(self.config)}
        )
        check_equal(
            rows,
            "config",
            "settings",
            "Give every rank the same arguments and ODSGD_* variables.",
        )

    def _place(
        self, key: UserKey, value: nd.NDArray, outs: list[nd.NDArray]
    ) -> Replicated:
        """A record for a new key, with its place on the servers."""
        index = key if self._optimizer is None else index_of(self._optimizer, key)
        record = Replicated(key, value.shape, value.size, index, list(outs))
        self.pipeline.placement.place(record, self._optimizer)
        return record

    def _check_array(self, key: UserKey, value: nd.NDArray) -> None:
        """Refuse what the servers could not update rightly."""
        name = self._name(key)
        checks.check_type(name, value.dtype, value.stype)
        checks.check_size(name, value.shape, value.size)
        self._check_slice(self._optimizer, key, value.size)

    def _check_slice(self, optimizer: Any, key: UserKey, size: int) -> None:
        job = self._connection
        name, bound = self._name(key), job.bigarray_bound
        checks.check_slice(optimizer, name, size, bound, job.num_servers)

    def _name(self, key: UserKey) -> str:
        """The key, with its Gluon parameter's name if there is one."""
        params = {} if self._optimizer is None else self._optimizer.param_dict
        return f"{key} ({params[key].name})" if key in params else str(key)

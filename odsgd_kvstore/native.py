"""The job's transport: MXNet's native ps-lite store, with handshake and status."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import json
import logging
import os
import sys
import threading
import time
import zlib
from typing import Any, Iterator, Mapping, Sequence

import mxnet as mx
import numpy as np
from mxnet import ndarray as nd
from mxnet.base import _LIB, KVStoreHandle, c_str, check_call

from . import process_exit, resolve, status
from .commands import PROTOCOL, Sealer
from .config import Cluster, job_key
from .errors import EnvironmentNotSupported, HandshakeError, JobError, ServerError
from .transport import Connection
from .watchdog import StatusWatch

_WAIT_NOTE_S = 10.0
_MULTI_PRECISION = 1  # a command of MXNet's; unset, its flag is uninitialised memory
_ROW = 2048  # numbers of one rank in an exchange: a length, then one byte each

_logger = logging.getLogger(__name__)


class Native(Connection):
    """MXNet's native ps-lite store, with our handshake, status and exchange.

    Parameters
    ----------
    cluster : Cluster
        The job that this process belongs to.
    """

    def __init__(self, cluster: Cluster) -> None:
        if not mx.runtime.Features().is_enabled("DIST_KVSTORE"):
            raise EnvironmentNotSupported(
                "This MXNet was built without USE_DIST_KVSTORE. Install a build with "
                "it, such as: pip install mxnet==1.9.1"
            )
        self._pid = os.getpid()
        self._exit = process_exit.install()
        self._lock = threading.RLock()  # MXNet's store maps are not thread-safe
        self._error, self._told = "", threading.Event()
        self._watch: StatusWatch | None = None
        self._native = _create_native(cluster)
        self.handle = self._native.handle
        atexit.register(self.close)
        self.rank = self._native.rank
        self.num_workers = self._native.num_workers
        self.num_servers = cluster.num_servers
        self.bigarray_bound = cluster.bigarray_bound
        super().__init__()
        self._check_rank(cluster)
        self._sealer = Sealer(self._job_key(), cluster.job, self.rank)
        self._handshake(cluster.require_own_server)
        self._watch = StatusWatch(self._read_error, self._report)

    def init(self, keys: Sequence[int], values: Sequence[nd.NDArray]) -> None:
        with self._lock:
            self._native.init(list(keys), list(values))

    def pushpull(self, key: int, value: nd.NDArray, outs: Sequence[nd.NDArray]) -> None:
        with self._lock:
            self._native.pushpull(key, value, out=list(outs))

    def push(self, key: int, value: nd.NDArray) -> None:
        with self._lock:
            self._native.push(key, value)

    def use_float16(self) -> None:
        if self.rank == 0:
            with self._lock:
                self._native._send_command_to_servers(_MULTI_PRECISION, "")

    def pull(self, keys: Sequence[int], outs: Sequence[nd.NDArray]) -> None:
        with self._lock:
            self._native.pull(list(keys), out=list(outs))

    def command(self, body: Mapping[str, Any]) -> None:
        with self._lock:
            self._native._send_command_to_servers(
                0, self._sealer.seal(body, self._nonces)
            )
        self.check_now()

    def check(self) -> None:
        if self._native is None:
            raise JobError("This process has left its job; no store can be used now.")
        if self._error:
            self._told.set()
            raise ServerError(self._error)

    def check_now(self) -> None:
        self._error = self._error or self._read_error()
        self.check()

    def barrier(self) -> None:
        with self._lock:
            self._native._barrier()

    def close(self) -> None:
        """Leave the job: waits for all pending work and for all other workers.

        Runs at the end of the process. After `sys.exit` with a status that is not 0,
        or a server's failure that the program was not told of, the process ends at
        once instead, with a status that is not 0.
        """
        if self._native is None or os.getpid() != self._pid:
            return
        if self._exit.code:
            process_exit.end_now(self._exit.code)
        if self._watch is not None:
            self._watch.stop()
        nd.waitall()
        error = self._error or self._read_error()
        if error and not self._told.is_set():
            print(f"odsgd_kvstore: {error}", file=sys.stderr)
            process_exit.end_now(1)
        native, self._native = self._native, None
        with _said_while_waiting(
            f"Rank {self.rank} has ended its program and waits for all other workers to "
            "end theirs. Did every rank make the same number of steps?"
        ):
            native.free()

    def _gather(self, row: Mapping[str, Any]) -> list[dict[str, Any]]:
        mine = zlib.compress(json.dumps(row).encode())
        texts, longest, start = [b""] * self.num_workers, 1, 0
        while start < longest:
            part = mine[start : start + _ROW - 1]
            rows = self._gather_part(len(mine), part, row["op"])
            longest = max(int(part[0]) for part in rows)
            for rank, part in enumerate(rows):
                size = min(max(int(part[0]) - start, 0), _ROW - 1)
                texts[rank] += part[1 : 1 + size].astype(np.uint8).tobytes()
            start += _ROW - 1
        return [json.loads(zlib.decompress(text)) for text in texts]

    def _gather_part(self, length: int, part: bytes, what: str) -> np.ndarray:
        """One round trip: per rank the length of its text, and a part of it."""
        rows = np.zeros((self.num_workers, _ROW), np.float32)
        rows[self.rank, 0] = length
        rows[self.rank, 1 : 1 + len(part)] = list(part)
        table = nd.zeros(rows.size)
        self.pushpull(self._exchange_key, nd.array(rows.reshape(-1)), [table])
        with _said_while_waiting(
            f"Rank {self.rank} waits for the other ranks in: {what}. Every rank must do "
            "this, in the same order."
        ):
            return table.asnumpy().reshape(rows.shape)

    def _check_rank(self, cluster: Cluster) -> None:
        """The launcher numbered its workers; the job must have the same order."""
        if cluster.worker_id is not None and cluster.worker_id != self.rank:
            raise HandshakeError(
                f"The launcher started this process as worker {cluster.worker_id}, and "
                f"it became rank {self.rank}: another process took its port. Start the "
                "job again."
            )

    def _job_key(self) -> bytes:
        key = job_key()
        if not key and self.rank == 0:
            _logger.warning(
                "This job has no ODSGD_KEY, so its servers obey anyone who reaches "
                "their ports; they accept MXNet's own optimizers only. odsgd-launch "
                "makes a key by itself."
            )
        return key

    def _handshake(self, require_own_server: bool) -> None:
        """Prove by value that every server runs our updater, of our version."""
        size = status.length(self.bigarray_bound)
        self._status_keys = [self.keys.on_server(s) for s in range(self.num_servers)]
        self._exchange_key = self.keys.on_server(0)
        self._nonces: list[str] = []
        if self.rank == 0:
            hello = {
                "op": "hello",
                "status_keys": self._status_keys,
                "exchange_key": self._exchange_key,
            }
            self._native._send_command_to_servers(0, self._sealer.seal(hello, []))
        table = nd.zeros(self.num_workers * _ROW)
        statuses = [nd.zeros(size) for _ in self._status_keys]
        self.init([*self._status_keys, self._exchange_key], [*statuses, table])
        for key, array in zip(self._status_keys, statuses):
            self.pushpull(key, nd.zeros(size), [array])
        read = [status.decode(array.asnumpy()) for array in statuses]
        for server, said in enumerate(read):
            if said.protocol != PROTOCOL:
                raise HandshakeError(_not_ours(server, said.protocol))
        self._nonces = [said.nonce for said in read]
        stock = [server for server, said in enumerate(read) if said.is_stock]
        if stock and require_own_server:
            raise HandshakeError(
                f"ODSGD_REQUIRE_OWN_SERVER is set. {_are_stock(stock)}"
            )
        if stock and self.rank == 0:
            _logger.warning(
                "%s ODSGD_REQUIRE_OWN_SERVER=1 makes this an error.", _are_stock(stock)
            )

    def _read_error(self) -> str:
        """The first error in the servers' status; waits for one round trip."""
        size = status.length(self.bigarray_bound)
        arrays = [nd.zeros(size) for _ in self._status_keys]
        self.pull(self._status_keys, arrays)
        errors = [status.decode(array.asnumpy()).error for array in arrays]
        return next((error for error in errors if error), "")

    def _report(self, error: str) -> threading.Event:
        self._error = self._error or error
        return self._told


class _NativeStore(mx.kvstore.KVStore):
    """MXNet's own store object, freed when we say so and not by the collector."""

    def __del__(self) -> None:
        pass

    def free(self) -> None:
        """Wait for all other workers, then leave the job."""
        check_call(_LIB.MXKVStoreFree(self.handle))


def _create_native(cluster: Cluster) -> _NativeStore:
    """Join the job; the ipc sockets that this makes are this user's alone."""
    scheduler = resolve.settle_addresses(cluster.role)
    handle = KVStoreHandle()
    umask = os.umask(0o077)
    try:
        with _said_while_waiting(
            f"Waiting for the whole job to join: {cluster.num_workers} workers, "
            f"{cluster.num_servers} servers and the scheduler ({scheduler}). "
            "Is every role running, and does every worker create its store?"
        ):
            check_call(_LIB.MXKVStoreCreate(c_str("dist_sync"), ctypes.byref(handle)))
    finally:
        os.umask(umask)
    mx.profiler.set_kvstore_handle(handle)
    return _NativeStore(handle)


@contextlib.contextmanager
def _said_while_waiting(message: str) -> Iterator[None]:
    """Say every few seconds what a worker that hears nothing is waiting for."""
    done, start = threading.Event(), time.monotonic()

    def say() -> None:
        while not done.wait(_WAIT_NOTE_S):
            _logger.warning("%s (since %.0f s)", message, time.monotonic() - start)

    with contextlib.suppress(RuntimeError):  # Python 3.12 starts none at its end
        threading.Thread(target=say, daemon=True).start()
    try:
        yield
    finally:
        done.set()


def _not_ours(server: int, protocol: int) -> str:
    found = (
        "does not run odsgd_kvstore's updater: the package cannot be imported there "
        "(a stock MXNet server's output has the reason)"
        if protocol < 0
        else f"speaks version {protocol} of the protocol, this worker {PROTOCOL}"
    )
    return (
        f"Server {server} {found}. With it, weights would silently become gradient "
        "sums. Start servers with 'python -m odsgd_kvstore.server' and the same version "
        "of the package on every host, or start the job with odsgd-launch (without "
        "--stock-servers)."
    )


def _are_stock(servers: Sequence[int]) -> str:
    return (
        f"Server {', '.join(map(str, servers))}: MXNet's own server loop (a stock "
        "server) runs odsgd_kvstore's updater there, as its script imports mxnet "
        "first. Weights are the same; but on a stock server anyone who reaches its port "
        "can run code. To get our own, put 'import odsgd_kvstore' before 'import mxnet' in "
        "the script, or start servers with 'python -m odsgd_kvstore.server'."
    )

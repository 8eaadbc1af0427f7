"""The server and scheduler process, and the server's part of a stand-alone job.

In a server's or scheduler's role `import odsgd_kvstore` (so also `python -m
odsgd_kvstore.server`) hides the role, imports MXNet whole, then calls `serve`. In a
script that imports MXNet first MXNet's own loop runs, and messages call `apply`.
"""

from __future__ import annotations

import ctypes
import faulthandler
import functools
import os
import secrets
import signal
import sys
import traceback
from typing import Any, Callable, Mapping, NoReturn

from mxnet import kvstore
from mxnet import ndarray as nd
from mxnet.base import _LIB, check_call, py_str

from . import commands, resolve, status, stock_server
from .config import Cluster, job_key
from .global_update import GlobalUpdate

_REFUSED = (
    "This server runs odsgd_kvstore and obeys only its sealed commands, but {error}. "
    "For a baseline such as --kvstore dist_sync start the job with 'odsgd-launch "
    "--stock-servers'. If the script meant dist_odsgd it may have forgotten 'import "
    "odsgd_kvstore': without it MXNet silently makes a plain dist_sync store under "
    "that name; start it with 'python -m odsgd_kvstore SCRIPT'."
)


_IMPORT_US_FIRST = (
    "This server runs inside 'import mxnet' of the script, where parts of MXNet cannot "
    "be imported. Import odsgd_kvstore before mxnet there, or start every role with "
    "'python -m odsgd_kvstore SCRIPT'"
)


class Server:
    """One server's state: an optimizer per store, the status, the exchange.

    Parameters
    ----------
    rank : int
        This server's rank.
    job : str
        The job's name.
    key : bytes
        The job's secret.
    on_refused : callable
        Called with a message when a command is not this job's.
    is_stock : bool
        Whether MXNet's own server loop runs it.
    """

    def __init__(
        self,
        rank: int,
        job: str,
        key: bytes,
        on_refused: Callable[[str], None],
        *,
        is_stock: bool = False,
    ) -> None:
        self._rank = rank
        self._on_refused = on_refused
        self._is_stock = is_stock
        self.nonce = secrets.token_hex(16)
        self._opener = commands.Opener(key, job, self.nonce)
        self._stores: dict[int, GlobalUpdate] = {}
        self._updates: dict[int, Callable[[int, nd.NDArray, nd.NDArray], None]] = {}
        self._status: nd.NDArray | None = None
        self.error = ""

    def command(self, envelope: str) -> None:
        """Obey a message; a failure is published, never raised."""
        try:
            body = self._opener.open(envelope)
        except commands.SealError as error:
            self._on_refused(_REFUSED.format(error=error))
            return
        try:
            getattr(self, "_on_" + body["op"])(body)
        except Exception:
            self._fail()

    def update(self, key: int, stored: nd.NDArray, gradient: nd.NDArray) -> None:
        """Apply an aggregated push to `stored`; after a failure, nothing any more."""
        try:
            if not self.error:
                self._updates[key](key, stored, gradient)
        except Exception:
            self._fail()

    def _on_hello(self, body: Mapping[str, Any]) -> None:
        """Keys of the status of each server and of the ranks' exchange."""
        self._updates[body["status_keys"][self._rank]] = self._capture_status
        self._updates[body["exchange_key"]] = _assign

    def _on_begin(self, body: Mapping[str, Any]) -> None:
        """A store's optimizer; a store begins once."""
        optimizer = commands.decode_optimizer(body, bool(self._opener.key))
        settings = body["num_workers"], body["threshold"]
        self._stores[body["store"]] = GlobalUpdate(optimizer, *settings)
        self._on_change(body)

    def _on_change(self, body: Mapping[str, Any]) -> None:
        """Hyper-parameters, and keys with their members, that hold from a step."""
        store, values = self._stores[body["store"]], dict(body["values"])
        if values.get("lr_scheduler"):
            values["lr_scheduler"] = commands.decode_schedule(
                values["lr_scheduler"], bool(self._opener.key)
            )
        keys = {int(k): v for k, v in body["keys"].items()}
        offsets = {int(k): v for k, v in body["offsets"].items()}
        members = {key: new["members"] for key, new in keys.items()}
        store.change(body["step"], values, members, offsets)
        for key, new in keys.items():
            self._updates[key] = store
            if new["words"] is not None:
                self._updates[new["words"]] = functools.partial(store.restore, key)

    def _on_assign(self, body: Mapping[str, Any]) -> None:
        """The next push of these keys is their new weights, not a gradient."""
        for key in body["keys"]:
            self._updates[key] = functools.partial(
                self._assign_once, self._updates[key]
            )

    def _assign_once(
        self, store: GlobalUpdate, key: int, stored: nd.NDArray, value: nd.NDArray
    ) -> None:
        store.assign(key, stored, value)
        self._updates[key] = store

    def _capture_status(self, key: int, stored: nd.NDArray, _: nd.NDArray) -> None:
        self._status = stored
        self._publish()

    def _publish(self) -> None:
        """Write the status; a pull does not wait, so the writing must be done."""
        if self._status is not None:
            said = status.Status(self.nonce, self.error, is_stock=self._is_stock)
            self._status[:] = nd.array(status.encode(said, self._status.size))
            self._status.wait_to_read()

    def _fail(self) -> None:
        """Publish the exception being handled: its last line first."""
        text = traceback.format_exc()
        last = text.strip().splitlines()[-1]
        if "partially initialized module 'mxnet" in last:
            last += f". {_IMPORT_US_FIRST}"
        self.error = self.error or f"server {self._rank}: {last}\n{text}"
        print(self.error, file=sys.stderr, flush=True)
        self._publish()


def _assign(key: int, stored: nd.NDArray, value: nd.NDArray) -> None:
    value.copyto(stored)


def apply(text: str) -> stock_server.Delegate:
    """Run our updater on a stock server, whose `pickle.loads` of a message calls this.

    Parameters
    ----------
    text : str
        What is inside the envelope; all later messages come as envelopes.

    Returns
    -------
    Delegate
        The optimizer for MXNet to install, at this message and at every later one.

    Notes
    -----
    Ends the process when the message is not this job's: MXNet would ignore an
    exception, and train on.
    """
    try:
        key, rank = job_key(), stock_server.rank()
        cluster = Cluster.from_environment()
        server = Server(rank, cluster.job, key, _end_process, is_stock=True)
        stock_server.lend_names()
        delegate = stock_server.take_over(server.command, server.update)
    except Exception:
        _end_process(traceback.format_exc())
    server.command(commands.envelope(text))
    return delegate


def serve() -> None:
    """Run this process's server or scheduler until the job ends; blocks."""
    faulthandler.register(signal.SIGUSR1, all_threads=False)
    cluster = Cluster.from_environment()
    key = job_key()
    resolve.settle_addresses(cluster.role)
    umask = os.umask(0o077)
    store = kvstore.create("dist")
    servers = []

    def server() -> Server:
        if not servers:  # the rank is known only once the job has come together
            servers.append(Server(store.rank, cluster.job, key, _end_process))
        return servers[0]

    @ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)
    def controller(head: int, body: bytes, _: Any) -> None:
        if not servers:
            os.umask(umask)
            store._set_updater(
                lambda key, grad, stored: server().update(key, stored, grad)
            )
        server().command(py_str(body))

    check_call(_LIB.MXKVStoreRunServer(store.handle, controller, None))


def _end_process(message: str) -> NoReturn:
    """End this server, and with it the job: no exception leaves a C callback."""
    print(message, file=sys.stderr, flush=True)
    os._exit(1)

"""Messages from rank 0 to the servers, sealed with the job's key.

A message travels in MXNet's controller command, which carries text only. Its
envelope is the pickle of a call of `odsgd_kvstore.server.apply`, so that a stock
server's `pickle.loads` finds us; our own server compares the envelope's constant
bytes and never unpickles it, and a stock one does so with the first message only.
Inside is JSON with an HMAC-SHA256 over job, the servers' nonces, sender rank and that
rank's increasing number, so that nothing can be replayed.

What stays open: ps-lite's data plane and its own control messages are not sealed.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import pickle
from typing import Any, Mapping, Sequence

import numpy as np
from mxnet import lr_scheduler as schedules
from mxnet import optimizer as opt

from .errors import ConfigError, JobError
from .optimizer_copy import uncounted_copy

PROTOCOL = 2
_HEAD = "codsgd_kvstore.server\napply\n(V"
_TAIL = "\ntR."
_MALFORMED = (ValueError, LookupError, TypeError, AttributeError, RecursionError)
_WORKER_ONLY = {
    "param_dict": {},
    "idx2name": {},
    "sym_info": (),
    "lr_mult": {},
    "wd_mult": {},
    "_all_index_update_counts": {},
    "_index_update_count": {},
    "num_update": 0,
}


class SealError(JobError):
    """A message was not sealed by a worker of this job, or came a second time."""


class Sealer:
    """Makes one rank's messages.

    Parameters
    ----------
    key : bytes
        The job's secret; empty to send unsealed JSON.
    job : str
        The job's name.
    rank : int
        The sender.
    """

    def __init__(self, key: bytes, job: str, rank: int) -> None:
        self._key, self._job, self._rank = key, job, rank
        self._number = 0

    def seal(self, body: Mapping[str, Any], nonces: Sequence[str]) -> str:
        """The envelope for `body`; `nonces` are the servers', by rank ([] for hello)."""
        self._number += 1
        text = json.dumps(
            {
                "body": body,
                "job": self._job,
                "nonces": list(nonces),
                "rank": self._rank,
                "number": self._number,
            }
        )
        sealed = json.dumps({"text": text, "seal": _mac(self._key, text)})
        return envelope(base64.b64encode(sealed.encode()).decode())


class Opener:
    """Opens and checks messages on one server.

    Parameters
    ----------
    key : bytes
        The job's secret; empty to obey unsealed JSON.
    job : str
        The job's name.
    nonce : str
        This server's random nonce.
    """

    def __init__(self, key: bytes, job: str, nonce: str) -> None:
        self.key, self._job, self._nonce = key, job, nonce
        self._last: dict[int, int] = {}

    def open(self, envelope: str) -> dict[str, Any]:
        """The body of a message.

        Raises
        ------
        SealError
            It is not one of this job's, or a replay.
        """
        if not (envelope.startswith(_HEAD) and envelope.endswith(_TAIL)):
            raise SealError("a command without this package's seal arrived")
        try:
            inside = envelope[len(_HEAD) : -len(_TAIL)]
            outer = json.loads(base64.b64decode(inside, validate=True))
            text, seal = outer["text"], outer["seal"]
            if self.key and not hmac.compare_digest(_mac(self.key, text), seal):
                raise SealError(
                    "a command with a wrong seal arrived (another ODSGD_KEY?)"
                )
            if seal and not self.key:
                raise SealError(
                    "a sealed command arrived, and this server has no ODSGD_KEY to "
                    "check it with"
                )
            message = json.loads(text)
            return self._check(message)
        except _MALFORMED as error:
            raise SealError(f"a malformed command arrived ({error!r})") from None

    def _check(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """The body, unless job, nonce or number say that it is not meant for now."""
        body, rank, number = message["body"], message["rank"], message["number"]
        if message["job"] != self._job:
            raise SealError(f"a command of another job, {message['job']!r}, arrived")
        if body["op"] != "hello" and self._nonce not in message["nonces"]:
            raise SealError("a command of an earlier start of this job arrived")
        if number <= self._last.get(rank, 0):
            raise SealError(f"command {number} of rank {rank} arrived a second time")
        self._last[rank] = number
        return body


def envelope(inside: str) -> str:
    """The pickle of a call of `odsgd_kvstore.server.apply` with a message."""
    return _HEAD + inside + _TAIL


def _mac(key: bytes, text: str) -> str:
    return hmac.new(key, text.encode(), hashlib.sha256).hexdigest() if key else ""


def encode_optimizer(optimizer: opt.Optimizer, rescale: float = 1.0) -> dict[str, Any]:
    """An optimizer as JSON: MXNet's own by attributes, any other pickled.

    What belongs to the worker alone is left out: parameters, symbols, names and
    counters. Multipliers travel by key, and `rescale` takes the place of rescale_grad.

    Raises
    ------
    ConfigError
        Its class, or its schedule's, cannot be imported by a server.
    """
    twin = uncounted_copy(optimizer)
    schedule, twin.lr_scheduler = twin.lr_scheduler, None
    twin.rescale_grad = rescale
    for name, empty in _WORKER_ONLY.items():
        setattr(twin, name, type(empty)(empty))
    return {
        "optimizer": _encode(twin, skip=tuple(_WORKER_ONLY)),
        "lr_scheduler": encode_schedule(schedule),
    }


def encode_schedule(schedule: Any) -> Any:
    """A learning-rate schedule as JSON; None stays None."""
    return None if schedule is None else _encode(schedule, skip=())


def decode_optimizer(encoded: Mapping[str, Any], sealed: bool) -> opt.Optimizer:
    """The optimizer on a server; a pickled one only when the message was sealed."""
    optimizer = _decode(encoded["optimizer"], sealed)
    for name, empty in _WORKER_ONLY.items():
        setattr(optimizer, name, type(empty)(empty))
    optimizer._all_index_update_counts = {0: {}}
    optimizer._index_update_count = optimizer._all_index_update_counts[0]
    optimizer.num_update = optimizer.begin_num_update
    optimizer.lr_scheduler = decode_schedule(encoded["lr_scheduler"], sealed)
    return optimizer


def decode_schedule(encoded: Any, sealed: bool) -> Any:
    """The schedule on a server."""
    return None if encoded is None else _decode(encoded, sealed)


def _encode(thing: Any, skip: Sequence[str]) -> dict[str, Any]:
    """By class name and attributes if it is one of MXNet's own, else pickled."""
    kind = type(thing)
    state = {k: as_plain(v) for k, v in vars(thing).items() if k not in skip}
    if _own_classes().get(kind.__name__) is kind and _is_plain(state):
        return {"class": kind.__name__, "state": state}
    if kind.__module__ == "__main__":
        raise ConfigError(
            f"{kind.__name__} is defined in the script itself (__main__), so no server "
            "can import it. Move the class into a module that every host can import."
        )
    try:
        pickled = pickle.dumps(thing)
    except Exception as error:
        raise ConfigError(
            f"{kind.__name__} cannot be sent to the servers: {error!r}. Keep only "
            "plain values in its attributes."
        ) from error
    return {"pickle": base64.b64encode(pickled).decode()}


def _decode(encoded: Mapping[str, Any], sealed: bool) -> Any:
    if "class" in encoded:
        kind = _own_classes().get(encoded["class"])
        if kind is None:
            raise ConfigError(
                f"{encoded['class']!r} is not an optimizer or schedule of MXNet."
            )
        thing = object.__new__(kind)
        thing.__dict__.update(encoded["state"])
        return thing
    if not sealed:
        raise ConfigError(
            "An optimizer or schedule that is not MXNet's own arrived, and this job "
            "has no key. Set ODSGD_KEY (or ODSGD_KEY_FILE) to the same secret for "
            "every role, or start the job with odsgd-launch."
        )
    return pickle.loads(base64.b64decode(encoded["pickle"]))


def _own_classes() -> dict[str, type]:
    """MXNet's optimizers and schedules by class name; not those of users."""
    optimizers = opt.Optimizer.opt_registry.values()
    return {
        kind.__name__: kind
        for kind in [*optimizers, *vars(schedules).values()]
        if isinstance(kind, type)
        and issubclass(kind, (opt.Optimizer, schedules.LRScheduler))
        and kind.__module__.split(".")[0] == "mxnet"
    }


def as_plain(value: Any) -> Any:
    """NumPy's scalars as Python's, of the same value; anything else as it is."""
    return value.item() if isinstance(value, np.generic) else value


def _is_plain(value: Any) -> bool:
    """Whether JSON brings `value` back unchanged (but for tuples)."""
    if isinstance(value, dict):
        return all(isinstance(k, str) and _is_plain(v) for k, v in value.items())
    if isinstance(value, list):
        return all(_is_plain(v) for v in value)
    return value is None or type(value) in (bool, int, float, str)

"""What can be trained with dist_odsgd, checked before any process starts."""

from __future__ import annotations

import os
from typing import Any, Iterable, Mapping

import numpy as np
from mxnet import gluon
from mxnet import optimizer as opt

from . import commands, local_update
from .config import RULES_WITHOUT_PARAMETERS, Config
from .errors import ConfigError, NotSupportedYet
from .replicated import Replicated
from .transport import Connection, check_equal

_LARGEST_SIZE = 2**31 - 1
_NORM_BASED = ("LARS", "LAMB", "LBSGD")


def check_optimizer(optimizer: opt.Optimizer, config: Config, num_servers: int) -> None:
    """Refuse an optimizer that the servers or the local update cannot run.

    Parameters
    ----------
    optimizer : mxnet.optimizer.Optimizer
        The global optimizer.
    config : Config
    num_servers : int
        0 when stand-alone.

    Raises
    ------
    ConfigError, NotSupportedYet
    """
    if not isinstance(optimizer, opt.Optimizer):
        raise ConfigError(f"{optimizer!r} is not an mxnet.optimizer.Optimizer.")
    if optimizer.allow_np_array:
        raise NotSupportedYet(
            "MXNet's NumPy arrays (mx.npx.set_np) are not supported yet with dist_odsgd. "
            "Leave set_np out."
        )
    _check_kind(optimizer, num_servers)
    commands.encode_optimizer(optimizer)
    rule, params = config.local_optimizer, config.local_optimizer_params
    local_update.create(rule, params, optimizer, 1.0, config.compression != "fp16")
    if rule.lower() not in RULES_WITHOUT_PARAMETERS:
        _check_kind(local_update.optimizer_of(rule, params), 0)


def check_type(name: Any, dtype: Any, stype: str) -> None:
    """Refuse a parameter that is not dense float32.

    Parameters
    ----------
    name : int or str
        For the message.
    dtype, stype : numpy dtype or its name, str
        Of the parameter's array.

    Raises
    ------
    ConfigError, NotSupportedYet
    """
    dtype = np.dtype(dtype)
    if stype != "default":
        raise NotSupportedYet(
            f"Parameter {name} is {stype}: sparse weights are not supported yet with "
            "dist_odsgd. Use dense weights, or kvstore='dist_sync'."
        )
    if dtype == np.float16:
        raise NotSupportedYet(
            f"Parameter {name} is float16, which is not supported yet with dist_odsgd; "
            "allowed is float32."
        )
    if dtype != np.float32:
        raise ConfigError(
            f"Parameter {name} is {dtype}; allowed is float32 (MXNet's servers compute "
            "in float32 whatever they are given). Cast it: net.cast('float32')."
        )


def check_size(name: Any, shape: tuple[int, ...], size: int) -> None:
    """Refuse an array that is empty or larger than MXNet can count.

    Parameters
    ----------
    name : int or str
        For the message.
    shape, size : tuple, int
        Of the parameter.

    Raises
    ------
    ConfigError
    """
    if not 0 < size <= _LARGEST_SIZE:
        raise ConfigError(
            f"Parameter {name} has shape {shape}; allowed are 1 to {_LARGEST_SIZE} "
            "numbers."
        )


def _check_kind(optimizer: opt.Optimizer, num_servers: int) -> None:
    """Refuse an optimizer that would train wrongly on the servers."""
    name, reason = type(optimizer).__name__, None
    if name == "SGLD":
        reason = "it draws random numbers, which no worker can mirror"
    elif name == "GroupAdaGrad":
        reason = "it needs a matrix's rows, and servers hold vectors"
    elif name == "DCASGD" and optimizer.momentum != 0:
        reason = "its update with momentum fails in MXNet 1.9.1"
    elif name == "LARS" and optimizer.momentum and optimizer.momentum_correction:
        if optimizer.lr_scheduler is not None:
            reason = (
                "its momentum correction follows a changing learning rate for the "
                "first key only; pass momentum_correction=False"
            )
    elif name == "Nadam" and num_servers > 0:
        reason = (
            "its momentum schedule advances with every key, in the order in which keys "
            "happen to arrive at a server"
        )
    if reason:
        raise ConfigError(
            f"The optimizer {name} is not allowed with dist_odsgd: {reason}. Choose "
            "another optimizer, or kvstore='dist_sync'."
        )


def check_shapes(name: Any, shape: tuple[int, ...], arrays: Iterable[Any]) -> None:
    """Refuse arrays that have not the parameter's shape.

    Parameters
    ----------
    name : int or str
        For the message.
    shape : tuple
        The parameter's, as it was broadcast.
    arrays : iterable of NDArray

    Raises
    ------
    ConfigError
    """
    for array in arrays:
        if array.shape != shape:
            raise ConfigError(
                f"Parameter {name} came with an array of shape {array.shape}; it was "
                f"broadcast with shape {shape}, and keeps it."
            )


def check_same_everywhere(
    connection: Connection, records: Mapping[str, Replicated]
) -> None:
    """Refuse new parameters, or their places, that are not the same on every rank.

    Collective.

    Parameters
    ----------
    connection : Connection
    records : mapping
        New parameters, placed, by their names in messages.

    Raises
    ------
    MismatchError
    """
    rows = connection.exchange(
        {
            "op": "broadcast",
            "parameters": [f"{n} {r.shape}" for n, r in records.items()],
            "places": [f"{n} {r.block.keys()}" for n, r in records.items()],
        }
    )
    remedy = "Build the same network, with the same shapes, on every rank."
    check_equal(rows, "parameters", "parameters", remedy)
    remedy = "Use the same optimizer, grad_req and MXNET_KVSTORE_BIGARRAY_BOUND on every rank."
    check_equal(rows, "places", "keys for their parameters", remedy)


def check_slice(
    optimizer: opt.Optimizer | None,
    name: Any,
    size: int,
    bigarray_bound: int,
    num_servers: int,
) -> None:
    """Refuse a layer-wise optimizer for an array that several servers would share.

    Parameters
    ----------
    optimizer : mxnet.optimizer.Optimizer
    name : int or str
        The parameter, for the message.
    size : int
        Its numbers.
    bigarray_bound : int
        MXNET_KVSTORE_BIGARRAY_BOUND.
    num_servers : int

    Raises
    ------
    ConfigError
        Names the parameter, and what to set.
    """
    kind = type(optimizer).__name__
    if kind in _NORM_BASED and size >= bigarray_bound and num_servers > 1:
        raise ConfigError(
            f"The optimizer {kind} needs each layer's norm, and parameter {name} with "
            f"{size} numbers would be cut over {num_servers} servers. Use 1 server, or "
            f"set MXNET_KVSTORE_BIGARRAY_BOUND above {size} for every role."
        )


def check_update_on_kvstore(update_on_kvstore: bool | None) -> None:
    """Refuse updates on the worker, asked for by argument or by variable.

    Parameters
    ----------
    update_on_kvstore : bool or None
        A Trainer's argument; None leaves it to MXNET_UPDATE_ON_KVSTORE.

    Raises
    ------
    ConfigError
    """
    remedy = "dist_odsgd updates weights on the servers"
    if update_on_kvstore is False:
        raise ConfigError(
            f"update_on_kvstore is False; {remedy}. Leave it out (or True)."
        )
    if update_on_kvstore is None and os.environ.get("MXNET_UPDATE_ON_KVSTORE") == "0":
        raise ConfigError(f"MXNET_UPDATE_ON_KVSTORE is 0; {remedy}: unset it.")


def check_parameter(param: gluon.Parameter) -> None:
    """Refuse a Gluon parameter that the servers could not train.

    Parameters
    ----------
    param : gluon.Parameter
        Its shape may not be known yet.

    Raises
    ------
    ConfigError, NotSupportedYet
    """
    if param._grad_stype != "default":
        raise NotSupportedYet(
            f"Parameter {param.name} has {param._grad_stype} gradients, which are not "
            "supported yet with dist_odsgd. Use dense ones (sparse_grad=False), or "
            "kvstore='dist_sync' with mxnet.gluon.Trainer."
        )
    check_type(param.name, param.dtype, param._stype)

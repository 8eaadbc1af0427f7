"""The global weights in the user's parameters, for evaluation and saving."""

from __future__ import annotations

import contextlib
import os
from typing import Any, Callable, Iterator

import mxnet as mx
from mxnet import gluon

from .errors import ConfigError, NotSupportedYet
from .kvstore import ODSGDStore
from .pipeline import Pipeline


def is_active(kvstore: Any) -> bool:
    """Whether a store is ours: MXNet makes a plain one of any name with 'dist'.

    Parameters
    ----------
    kvstore : object
        A store, such as `mx.kv.create` returned.
    """
    return isinstance(kvstore, ODSGDStore)


def synchronize(x: Any) -> None:
    """Make parameters the global weights, equal on every rank.

    Parameters
    ----------
    x : gluon.Trainer, Module or ODSGDStore
        Whose parameters. Before the first step nothing is done.

    Raises
    ------
    ConfigError
        `x` has no store of ours.

    Notes
    -----
    Returns when they hold them: waits for this rank's pending pulls. Not collective.
    """
    pipeline = _pipeline_of(x)
    if pipeline is not None:
        pipeline.synchronize()
        _mark_dirty(x)


@contextlib.contextmanager
def global_weights(x: Any) -> Iterator[None]:
    """A context in which parameters hold the global weights; puts L back at its end.

    Parameters
    ----------
    x : gluon.Trainer, Module or ODSGDStore
        Whose parameters. Before the first step nothing is done.

    Raises
    ------
    ConfigError
        `x` has no store of ours.

    Notes
    -----
    Waits for this rank's pending pulls. Not collective.
    """
    pipeline = _pipeline_of(x)
    with pipeline.global_weights() if pipeline else contextlib.nullcontext():
        _mark_dirty(x)
        try:
            yield
        finally:
            _mark_dirty(x)


def end_earlier_trainers(params: Any) -> None:
    """Put the global weights of earlier Trainers into the parameters they share.

    Parameters
    ----------
    params : ParameterDict, dict or list of gluon.Parameter
        Those of a new Trainer, which begins at what they hold.
    """
    listed = params.values() if hasattr(params, "values") else params
    earlier = {getattr(param, "_trainer", None) for param in listed or ()}
    for trainer in earlier - {None}:
        if isinstance(getattr(trainer, "_kvstore", None), ODSGDStore):
            synchronize(trainer)


def module_checkpoint(
    mod: mx.mod.BaseModule,
    prefix: str,
    period: int = 1,
    save_optimizer_states: bool = False,
) -> Callable[..., None]:
    """An epoch-end callback of `Module.fit` that saves the global weights.

    Parameters
    ----------
    mod : Module
    prefix : str
        Files are PREFIX-symbol.json and PREFIX-EPOCH.params, as of
        `mx.callback.module_checkpoint`; rank 0 writes them.
    period : int
        Epochs from one file to the next, >= 1.
    save_optimizer_states : bool
        Not supported yet.

    Returns
    -------
    callable
        For `epoch_end_callback`. A file is there whole, or not at all.
    """
    if save_optimizer_states:
        raise NotSupportedYet("save_optimizer_states is not supported yet.")
    if type(period) is not int or period < 1:
        raise ConfigError(f"period is {period!r}; allowed is a whole number from 1.")

    def save(epoch: int, *_: Any) -> None:
        store = _store_of(mod)
        if (epoch + 1) % period or (store and store.rank):
            return
        with global_weights(mod):
            arg_params, aux_params = mod.get_params()
            named = {f"arg:{k}": v for k, v in arg_params.items()}
            named.update({f"aux:{k}": v for k, v in aux_params.items()})
            _write(f"{prefix}-symbol.json", mod.symbol.save)
            _write(f"{prefix}-{epoch + 1:04d}.params", lambda p: mx.nd.save(p, named))

    return save


def _write(path: str, save: Callable[[str], None]) -> None:
    """Save beside `path`, then put in its place at once."""
    partial = f"{path}.{os.getpid()}.partial"
    try:
        save(partial)
        os.replace(partial, path)
    finally:
        if os.path.exists(partial):
            os.remove(partial)


def _store_of(x: Any) -> ODSGDStore | None:
    """The store behind `x`; None before it is made."""
    if isinstance(x, mx.mod.BucketingModule):
        x = x._curr_module
    store = x if isinstance(x, mx.kvstore.KVStoreBase) else getattr(x, "_kvstore", x)
    if store is None and isinstance(x, (gluon.Trainer, mx.mod.BaseModule)):
        return None
    if not isinstance(store, ODSGDStore):
        kind = getattr(store, "type", type(store).__name__)
        raise ConfigError(
            f"{type(x).__name__} trains with {kind!r}, which has no global weights of "
            "ours; allowed is a Trainer, Module or store with kvstore='dist_odsgd'. Was "
            "odsgd_kvstore imported before the store was made?"
        )
    return store


def _pipeline_of(x: Any) -> Pipeline | None:
    store = _store_of(x)
    return None if store is None else store.pipeline


def _mark_dirty(x: Any) -> None:
    """Make a Module read its parameters from the devices next time."""
    if isinstance(x, mx.mod.BucketingModule):
        x._params_dirty = x._curr_module._params_dirty = True
    elif isinstance(x, mx.mod.Module):
        x._params_dirty = True

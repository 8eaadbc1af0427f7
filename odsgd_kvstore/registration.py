"""What is changed in MXNet itself: our types, one native store, assigned weights."""

from __future__ import annotations

import functools
from typing import Any, Callable

from mxnet import kvstore as mxnet_kvstore
from mxnet.module import Module

from .connection import is_native_open, note_native
from .errors import ConfigError
from .kvstore import ODSGDStore
from .notice_assigned import marks_assigned

STORE_TYPES = {
    "dist_odsgd": ODSGDStore,
    "dist_device_odsgd": functools.partial(ODSGDStore, sum_on_device=True),
}


def register() -> None:
    """Register the types; a second call changes nothing."""
    if "dist_odsgd" in mxnet_kvstore.KVStoreBase.kv_registry:
        return
    mxnet_kvstore.KVStoreBase.kv_registry.update(STORE_TYPES)
    guarded = _guarded(mxnet_kvstore.create)
    mxnet_kvstore.create = mxnet_kvstore.base.create = guarded
    for name in ("set_params", "init_params"):
        setattr(Module, name, marks_assigned(getattr(Module, name)))


def _guarded(create: Callable[..., Any]) -> Callable[..., Any]:
    """`create` that raises where a second native distributed store would hang."""

    @functools.wraps(create)
    def guarded(name: str = "local") -> Any:
        kind = name.lower() if isinstance(name, str) else ""
        is_native = "dist" in kind and kind not in STORE_TYPES
        if is_native and is_native_open():
            raise ConfigError(
                f"A store of type {name!r} was asked for in a process that has a "
                "dist_odsgd store. MXNet can have one distributed connection per "
                "process and would hang. Use dist_odsgd for both (each create gives a "
                "store with its own keys and optimizer), or run two jobs."
            )
        store = create(name)
        if is_native and isinstance(store, mxnet_kvstore.KVStore):
            note_native(kind)
        return store

    return guarded

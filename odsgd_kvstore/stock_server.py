"""Our updater inside MXNet's own server loop, where a script imported MXNet first.

MXNet serves in the middle of its own import there and never returns to the script, so
it is imported in part only: `mxnet.nd`, `mxnet.lr_scheduler` and others are missing.
At every command it unpickles an optimizer and installs it with a new, empty state. So
it gets an optimizer that has no state and passes each update on.
"""

from __future__ import annotations

import ctypes
import importlib
import sys
import types
from typing import Any, Callable

from mxnet import ndarray as nd
from mxnet import optimizer as opt
from mxnet.base import py_str

_SHORT_NAMES = {
    "nd": "ndarray",
    "sym": "symbol",
    "np": "numpy",
    "npx": "numpy_extension",
    "init": "initializer",
    "rnd": "random",
    "mod": "module",
}


class Delegate(opt.Optimizer):
    """What MXNet's server takes for its optimizer.

    Parameters
    ----------
    update : callable
        Takes key, weight and gradient, and updates the weight in place.
    """

    def __init__(self, update: Callable[[int, nd.NDArray, nd.NDArray], None]) -> None:
        super().__init__()
        self._update = update

    def create_state_multi_precision(self, index: int, weight: nd.NDArray) -> None:
        """None: the state is not MXNet's to keep."""

    def update_multi_precision(
        self, index: int, weight: nd.NDArray, grad: nd.NDArray, state: None
    ) -> None:
        """Pass an update on."""
        self._update(index, weight, grad)


def rank() -> int:
    """This server's rank: ps-lite sets a variable that `os.environ` does not show."""
    getenv = ctypes.CDLL(None).getenv
    getenv.restype = ctypes.c_char_p
    return int(getenv(b"DMLC_RANK"))


def take_over(
    command: Callable[[str], None],
    update: Callable[[int, nd.NDArray, nd.NDArray], None],
) -> Delegate:
    """Have MXNet's loop hand all messages to `command` from now on, unopened.

    Parameters
    ----------
    command : callable
        Takes an envelope.
    update : callable
        See `Delegate`.

    Returns
    -------
    Delegate
        What the loop gets in place of each unpickled message.

    Notes
    -----
    Nothing is unpickled after that. Before it, anyone who reaches the server's port
    can run code: that is MXNet's loop, and we are not there yet.
    """
    delegate = Delegate(update)

    def loads(body: bytes) -> Delegate:
        command(py_str(body))
        return delegate

    loop = sys.modules["mxnet.kvstore.kvstore_server"]
    loop.pickle = types.SimpleNamespace(loads=loads)
    return delegate


def lend_names() -> None:
    """Give the half-imported MXNet the names that users' optimizers look up."""
    sys.modules["mxnet"].__getattr__ = _submodule


def _submodule(name: str) -> Any:
    """A submodule of MXNet, by its own or its short name."""
    try:
        return importlib.import_module("mxnet." + _SHORT_NAMES.get(name, name))
    except ModuleNotFoundError:
        raise AttributeError(f"module 'mxnet' has no attribute {name!r}") from None

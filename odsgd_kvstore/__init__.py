"""One-step Delay SGD for Apache MXNet 1.9.1: the KVStore type `dist_odsgd`.

Importing this package registers `dist_odsgd` and `dist_device_odsgd`. In a server's or
scheduler's process (DMLC_ROLE) it serves until the job ends, and does not return. In a
server whose script has imported MXNet first, MXNet serves, and imports us to update:
MXNet is there in part only, so nothing is imported here but what `server` needs.
"""

import sys as _sys

from . import environment as _environment
from ._version import __version__

__all__ = [
    "ODSGDStore",
    "Trainer",
    "__version__",
    "global_weights",
    "is_active",
    "module_checkpoint",
    "synchronize",
]

_environment.check_python()
if not _environment.is_launcher() and not _environment.is_inside_stock_server():
    _environment.prepare()
    if _environment.takes_server_role():
        _environment.import_mxnet_without_role()
        from .server import serve as _serve

        _serve()
        _sys.exit(0)
    from .evaluation import global_weights, is_active, module_checkpoint, synchronize
    from .kvstore import ODSGDStore
    from .registration import register as _register
    from .trainer import Trainer

    _register()

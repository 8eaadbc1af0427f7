"""Imports MXNet in half the time: without SciPy and scikit-learn.

MXNet imports both where they are installed, and needs neither to train; that takes as
long as all the rest, in each of many short jobs. Later imports of the two are not
affected.
"""

import sys

_hidden = [name for name in ("scipy", "sklearn") if name not in sys.modules]
sys.modules.update(dict.fromkeys(_hidden))  # None: an import raises ImportError

import odsgd_kvstore  # noqa: F401  before MXNet: prepares NumPy for it

import mxnet  # noqa: F401  # isort: skip

for _name in _hidden:
    del sys.modules[_name]

"""Whether this Python, NumPy and MXNet can run the package, and in which role.

Imported before MXNet, which this module must not import at its top. It, `errors.py`
and `__init__.py` keep to syntax that Python 3.6 can read, so that an old Python gets a
message and not a SyntaxError.
"""

import importlib.util
import os
import sys
from typing import List

from .errors import ConfigError, EnvironmentNotSupported

OLDEST_PYTHON, NEWEST_PYTHON = (3, 8), (3, 12)
HOW_TO_START = (
    "Start the job with 'odsgd-launch -n WORKERS -s SERVERS -- python train.py', or "
    "unset every DMLC_* variable to run stand-alone in this process."
)
_ROLES = ("worker", "server", "scheduler")
_EXTRAS = (
    "Install MXNet 1.9.1: 'pip install odsgd-kvstore[cpu]' brings the CPU wheel; for "
    "a GPU install the build for your CUDA instead, such as 'pip install mxnet-cu112'. "
    "Further extras: gluoncv, demo, test."
)


def check_python() -> None:
    """Raise EnvironmentNotSupported unless this is Python 3.8 to 3.12."""
    found = sys.version_info[:2]
    if not OLDEST_PYTHON <= found <= NEWEST_PYTHON:
        raise EnvironmentNotSupported(
            f"This is Python {found[0]}.{found[1]}; MXNet 1.9.1 and odsgd_kvstore run on "
            "3.8 to 3.12. Make a virtual environment with one of these."
        )


def prepare() -> None:
    """Make ready for `import mxnet`.

    Raises
    ------
    EnvironmentNotSupported
        Says what was found, what is allowed and what to do.
    """
    if "mxnet" in sys.modules:
        return
    if os.environ.get("DMLC_ROLE"):
        check_role(os.environ["DMLC_ROLE"])
    if importlib.util.find_spec("mxnet") is None:
        raise EnvironmentNotSupported(f"MXNet is not installed. {_EXTRAS}")
    _prepare_numpy()


def _prepare_numpy() -> None:
    """Give NumPy the alias that MXNet 1.9.1 needs and NumPy 1.24 removed."""
    try:
        import numpy
    except ImportError as error:
        raise EnvironmentNotSupported(
            f"NumPy cannot be imported ({error}). Install it: pip install 'numpy<1.24' "
            "on Python 3.8 to 3.11, 'numpy>=1.26,<2' on 3.12."
        ) from None
    if int(numpy.__version__.split(".")[0]) >= 2:
        raise EnvironmentNotSupported(
            f"This is NumPy {numpy.__version__}, and MXNet 1.9.1 cannot work with NumPy "
            "2. Run: pip install 'numpy<1.24' on Python 3.8 to 3.11, 'numpy>=1.26,<2' "
            "on 3.12."
        )
    if "bool" not in vars(numpy):
        numpy.bool = bool


def is_launcher() -> bool:
    """Whether this is the launcher, or its agent on a host: no MXNet, and no role."""
    program = sys.argv[0] if sys.argv else ""
    if program == "-m":  # the module's name is not in sys.argv at this time
        words = _command_line()
        return ("-m", "odsgd_kvstore.launch") in zip(words, words[1:])
    checkout = os.path.dirname(os.path.dirname(os.path.realpath(__file__)))
    script = os.path.join(checkout, "scripts", "launch.py")
    return (
        os.path.basename(program) in ("odsgd-launch", "odsgd-agent")
        or os.path.realpath(program) == script
    )


def check_role(role: str) -> None:
    """Raise ConfigError unless `role` is one; MXNet takes any other for a server's."""
    if role not in _ROLES:
        raise ConfigError(
            f"DMLC_ROLE is {role!r}; allowed are {', '.join(_ROLES)}. {HOW_TO_START}"
        )


def takes_server_role() -> bool:
    """Whether this process was started as a server or scheduler, before MXNet."""
    return (
        os.environ.get("DMLC_ROLE") in ("server", "scheduler")
        and "mxnet" not in sys.modules
    )


def is_inside_stock_server() -> bool:
    """Whether MXNet, still being imported, serves here: a script imported it first."""
    mxnet = sys.modules.get("mxnet")
    is_server = os.environ.get("DMLC_ROLE") == "server"
    return is_server and mxnet is not None and not hasattr(mxnet, "kv")


def import_mxnet_without_role() -> None:
    """Import MXNet whole; in a server's role it would serve and never return."""
    role = os.environ.pop("DMLC_ROLE")
    try:
        import mxnet  # noqa: F401
    finally:
        os.environ["DMLC_ROLE"] = role


def _command_line() -> List[str]:
    """The interpreter with all its arguments."""
    if hasattr(sys, "orig_argv"):  # Python 3.10
        return sys.orig_argv
    try:
        with open("/proc/self/cmdline", "rb") as file:
            return os.fsdecode(file.read()).split("\0")[:-1]
    except OSError:
        return [sys.executable, *sys.argv]

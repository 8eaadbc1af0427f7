"""What holds for every test: a clean environment, no process left, strict warnings."""

import contextlib
import ctypes
import os
import signal
import time
import warnings
from pathlib import Path

import pytest
from watch import command

with warnings.catch_warnings():  # MXNet's own; it needs an alias on Python 3.12
    warnings.simplefilter("ignore")
    import odsgd_kvstore

PREFIXES = ("DMLC_", "MXNET_", "ODSGD_", "PS_")
BENCHMARKS = Path(odsgd_kvstore.__file__).absolute().parents[1] / "benchmarks"
LIMIT_S = 10
STRICT = (
    "error",
    # MXNet 1.9.1's own, on the newer of the Pythons and NumPys that it runs on.
    "ignore::DeprecationWarning:mxnet",
    "ignore::FutureWarning:mxnet",
    "ignore::SyntaxWarning:mxnet",
    "ignore::SyntaxWarning:<unknown>",
    "ignore:.*distutils.*:DeprecationWarning",
    "ignore:.*np.bool.*",
    "ignore:.*os.fork.*:DeprecationWarning",
)


def pytest_configure(config):
    """Take this process out of any job, and become the parent of all orphans."""
    for name in _settings():
        del os.environ[name]
    for line in STRICT:
        config.addinivalue_line("filterwarnings", line)
    pr_set_child_subreaper = 36
    with contextlib.suppress(AttributeError, OSError):  # Linux only.
        ctypes.CDLL(None).prctl(pr_set_child_subreaper, 1, 0, 0, 0)


@pytest.fixture(autouse=True)
def clean_environment():
    """No variable of a job or of MXNet before a test, and none left by it."""
    for name in _settings():
        del os.environ[name]
    yield
    for name in _settings():
        del os.environ[name]


@pytest.fixture(autouse=True)
def no_process_left():
    """End, by pid, the children that a test left behind, and make it fail."""
    before = set(_children())
    yield
    deadline = time.monotonic() + LIMIT_S
    left = {}
    while time.monotonic() < deadline:
        left = {p: c for p, c in _children().items() if p not in before}
        if not left:
            return
        os.sched_yield()  # The last of them may be on their way out.
    for pid in left:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    pytest.fail(f"processes were left behind, and are ended now: {left}")


@pytest.fixture
def modules(monkeypatch):
    """Import from the benchmarks' folder."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return __import__


def _settings():
    """Names of the variables that a job, MXNet or this package reads."""
    return [name for name in os.environ if name.startswith(PREFIXES)]


def _children():
    """Pid and command of this process's living children.

    Zombies have ended. The resource tracker of multiprocessing serves the process.
    """
    found = {}
    for path in Path("/proc/self/task").glob("*/children"):
        with contextlib.suppress(OSError):  # A thread that ended meanwhile.
            for pid in map(int, path.read_text().split()):
                text = command(pid)
                if text and "resource_tracker" not in text:
                    found[pid] = text
    return found

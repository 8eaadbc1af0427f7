"""Local multi-process test mode: run a function on every worker of a real job.

>>> from odsgd_kvstore.testing import run_local
>>> run_local(lambda: __import__('mxnet').kv.create('dist_odsgd').rank)
[0, 1]
"""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import os
import pickle
import signal
import sys
import tempfile
import traceback
from typing import Any, Callable, Iterator, Mapping

from .errors import JobError, JobTimeout
from .launch import JobResult
from .launch.commands import Job
from .launch.local import new_job
from .launch.processes import run_roles

_LAST_LINES = 15


class RemoteTraceback(Exception):
    """The cause of an exception that a rank raised: its traceback there."""


def run_local(
    fn: Callable[[], Any],
    num_workers: int = 2,
    num_servers: int = 1,
    timeout: float = 60,
    env: Mapping[str, str] | None = None,
    *,
    stock_servers: bool = False,
    bandwidth: str | None = None,
) -> list[Any]:
    """Run `fn` on every worker of a job on this machine.

    Parameters
    ----------
    fn : callable
        Called with no argument on each rank. May be a lambda or a local function; it
        travels by value (cloudpickle), with the module that defines it.
    num_workers, num_servers : int
        Processes, >= 1 each; one scheduler is added.
    timeout : float
        Seconds for the whole job.
    env : mapping, optional
        Further environment variables of every role.
    stock_servers : bool
        Run MXNet's own servers, for a baseline such as 'dist_sync'.
    bandwidth : str, optional
        Limit each role's network in each direction, such as '200mbit' (Linux; the
        functions reach the other roles and nothing else).

    Returns
    -------
    list
        What `fn` returned, by rank. Must be picklable.

    Raises
    ------
    Exception
        What `fn` raised on the first rank that failed, caused by a `RemoteTraceback`
        with that rank's traceback.
    JobTimeout
        The time limit; says what each role was doing.
    JobError
        A role died otherwise.
    LaunchError
        A setting is wrong, or this machine cannot limit the bandwidth.

    Notes
    -----
    Blocks; no process or socket is left when it returns or raises.
    """
    with tempfile.TemporaryDirectory(prefix="odsgd-") as folder:
        with open(os.path.join(folder, "fn"), "wb") as file:
            file.write(_by_value(fn))
        command = (sys.executable, "-m", "odsgd_kvstore.testing", folder)
        job = Job(
            num_workers,
            num_servers,
            command,
            stock_servers,
            env=dict(env or {}),
            env_worker={
                "PYTHONPATH": os.pathsep.join(p or os.getcwd() for p in sys.path)
            },
            bandwidth=bandwidth,
        )
        roles, sockets = new_job(job, os.environ)
        result = run_roles(
            roles,
            timeout=timeout,
            sockets=sockets,
            dump_signal=signal.SIGUSR1,
            dump_kinds=("worker", "server", "scheduler"),
        )
        return _returned(result, folder, num_workers, timeout)


def _by_value(fn: Callable[[], Any]) -> bytes:
    """`fn` pickled with the functions of its module, which a worker cannot import."""
    import cloudpickle

    function = fn
    while isinstance(function, functools.partial):
        function = function.func
    with contextlib.ExitStack() as stack:
        module = sys.modules.get(getattr(function, "__module__", None) or "")
        own = module is not None and not module.__name__.startswith("odsgd_kvstore")
        if own and module.__name__ != "__main__":
            cloudpickle.register_pickle_by_value(module)
            stack.callback(cloudpickle.unregister_pickle_by_value, module)
        return cloudpickle.dumps(fn)


def _returned(
    result: JobResult, folder: str, num_workers: int, timeout: float
) -> list[Any]:
    """The ranks' values, or the exception that ended the job."""
    if result.timed_out:
        raise JobTimeout(
            f"The job did not end within {timeout:g} s (timeout=). What each role was "
            f"doing:\n{_doing(result)}"
        )
    outcomes = [_load(os.path.join(folder, str(rank))) for rank in range(num_workers)]
    failure = result.first_failure
    if failure is not None:
        kind, _, rank = failure.role.partition(" ")
        error = outcomes[int(rank)] if kind == "worker" else None
        if isinstance(error, _Raised):
            raise error.exception from RemoteTraceback(f"{failure.role}:\n{error.text}")
    if result.exit_code or not all(isinstance(o, _Returned) for o in outcomes):
        raise JobError(
            f"{result.message or 'A worker returned nothing.'}\n{_doing(result)}"
        )
    return [outcome.value for outcome in outcomes]


def _doing(result: JobResult) -> str:
    """The end of each role's output, where the time limit's stacks are."""
    return "\n".join(
        "\n  ".join([f"{name}:", *(lines[-_LAST_LINES:] or ["(printed nothing)"])])
        for name, lines in result.last_lines.items()
    )


class _Returned:
    """What `fn` returned on a rank."""

    def __init__(self, value: Any) -> None:
        self.value = value


class _Raised:
    """What `fn` raised on a rank, with its traceback there."""

    def __init__(self, exception: BaseException, text: str) -> None:
        self.exception, self.text = exception, text


def _load(path: str) -> Any:
    """A rank's outcome; None if it left none."""
    if not os.path.exists(path):
        return None
    with open(path, "rb") as file:
        return pickle.load(file)


def _save(path: str, outcome: Any) -> None:
    """Write a rank's outcome whole or not at all."""
    import cloudpickle

    with open(path + ".partial", "wb") as file:
        file.write(cloudpickle.dumps(outcome))
    os.replace(path + ".partial", path)


def _work(folder: str) -> None:
    """The worker's side: call the function, leave the outcome in `folder`."""
    path = os.path.join(folder, os.environ["DMLC_WORKER_ID"])
    try:
        with open(os.path.join(folder, "fn"), "rb") as file:
            value = pickle.load(file)()
        _save(path, _Returned(value))
    except BaseException as error:
        text = traceback.format_exc()
        try:
            _save(path, _Raised(error, text))
        except Exception:  # an exception that cannot travel
            _save(path, _Raised(JobError(f"{type(error).__name__}: {error}"), text))
        raise


@contextlib.contextmanager
def stacks_on_signal() -> Iterator[None]:
    """Inside, SIGUSR1 prints the main thread's stack and the program goes on."""
    faulthandler.register(signal.SIGUSR1, all_threads=False)
    try:
        yield
    finally:
        faulthandler.unregister(signal.SIGUSR1)


if __name__ == "__main__":
    # The classes that are pickled must be the package's, not this script's.
    from odsgd_kvstore import testing

    with testing.stacks_on_signal():
        testing._work(sys.argv[1])

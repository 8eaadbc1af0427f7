"""`run_local` itself: what comes back, and what every kind of end looks like."""

import os
import select
import signal
import sys
import threading
import uuid

import mxnet as mx
import pytest
from watch import environments, marked

import odsgd_kvstore  # noqa: F401 (registers the type)
from odsgd_kvstore.errors import JobError, JobTimeout, ODSGDError
from odsgd_kvstore.testing import RemoteTraceback, run_local

LIMIT_S = 120
FACTOR = 10  # a global of this module, which no worker can import


def rank():
    return int(os.environ["ODSGD_LOCAL_RANK"])


def helper(number):
    """Used on the workers by functions that travel."""
    return FACTOR * number


def module_level():
    return helper(mx.kv.create("dist_odsgd").rank)


class OwnError(ValueError):
    """Lives in this test file only."""


class Unpicklable(Exception):
    """An exception that cannot travel."""

    def __init__(self, text):
        super().__init__(text)
        self.lock = threading.Lock()


def join_and_wait():
    """Be a rank of a job, then do nothing for ever."""
    mx.kv.create("dist_odsgd")
    wait_for_nothing()


def wait_for_nothing():
    threading.Event().wait()


@pytest.fixture
def marker():
    """Put into the environment of a job; nothing that has it may be left."""
    text = uuid.uuid4().hex
    yield text
    assert marked("TEST_MARKER", text) == {}


def run(fn, marker, timeout=LIMIT_S, **kwargs):
    return run_local(fn, timeout=timeout, env={"TEST_MARKER": marker}, **kwargs)


def fail(fn, marker, **kwargs):
    """The exception that a job raises here."""
    with pytest.raises(Exception) as caught:
        run(fn, marker, **kwargs)
    return caught.value


def on_rank_1(end):
    """A function that calls `end` on rank 1 while rank 0 waits for ever."""

    def fn():
        mx.kv.create("dist_odsgd")
        if rank() == 1:
            end()
        wait_for_nothing()

    return fn


def test_results_come_by_rank_from_a_function_with_helpers(marker):
    assert run(module_level, marker, num_workers=3) == [0, 10, 20]


def test_a_lambda_and_a_closure_travel(marker):
    inside = [uuid.uuid4().hex]

    def closure():
        return helper(2), inside

    fn = lambda: (rank(), closure())
    assert run(fn, marker) == [(i, (20, inside)) for i in (0, 1)]


def test_an_exception_keeps_its_type_and_brings_its_traceback(marker):
    def raise_own():
        raise OwnError(f"rank {rank()} has {helper(4)}")

    error = fail(on_rank_1(raise_own), marker)
    assert type(error) is OwnError and str(error) == "rank 1 has 40"
    assert isinstance(error.__cause__, RemoteTraceback)
    text = str(error.__cause__)
    assert text.startswith("worker 1:\nTraceback") and "in raise_own" in text
    assert text.rstrip().endswith("OwnError: rank 1 has 40")


def test_an_exception_that_cannot_travel_is_named(marker):
    def raise_it():
        raise Unpicklable("with a lock")

    error = fail(on_rank_1(raise_it), marker)
    assert type(error) is JobError and str(error) == "Unpicklable: with a lock"
    assert "in raise_it" in str(error.__cause__)


def test_a_result_that_cannot_travel_is_an_error_of_its_rank(marker):
    error = fail(threading.Lock, marker, num_workers=1)
    assert isinstance(error, TypeError) and "pickle" in str(error)
    assert str(error.__cause__).startswith("worker 0:")


@pytest.mark.parametrize("end, reason", [
    (lambda: os._exit(7), "exit code 7"),
    (lambda: os.kill(os.getpid(), signal.SIGKILL), "signal 9 (SIGKILL)"),
], ids=["os._exit", "SIGKILL"])  # fmt: skip
def test_a_rank_that_dies_is_named_with_its_reason(marker, end, reason):
    error = fail(on_rank_1(end), marker)
    assert type(error) is JobError
    assert "worker 1" in str(error) and reason in str(error)


def test_sys_exit_of_a_rank_is_raised_as_it_is(marker):
    with pytest.raises(SystemExit) as caught:
        run(on_rank_1(lambda: sys.exit(5)), marker)
    assert caught.value.code == 5
    assert str(caught.value.__cause__).startswith("worker 1:")


def test_a_server_that_is_killed_ends_the_job_and_is_named(marker, tmp_path):
    # What rank 0 writes into the fifo says that the job has come together.
    os.mkfifo(tmp_path / "fifo")
    fifo, errors = os.open(tmp_path / "fifo", os.O_RDWR), []

    def fn():
        mx.kv.create("dist_odsgd")._barrier()
        if rank() == 0:
            (tmp_path / "fifo").write_text("here")
        wait_for_nothing()

    thread = threading.Thread(target=lambda: errors.append(fail(fn, marker)))
    thread.start()
    assert select.select([fifo], [], [], LIMIT_S)[0], "the job did not start"
    os.close(fifo)
    servers = [
        pid
        for pid, env in environments("TEST_MARKER", marker).items()
        if env["DMLC_ROLE"] == "server"
    ]
    assert len(servers) == 1
    os.kill(servers[0], signal.SIGKILL)
    thread.join(LIMIT_S)
    assert type(errors[0]) is JobError
    assert f"server 0 (pid {servers[0]}) was ended by signal 9" in str(errors[0])


def test_the_time_limit_says_what_each_role_did_and_leaves_nothing(marker, tmp_path):
    def fn():
        mx.kv.create("dist_odsgd")._barrier()
        ports = f"{os.environ['DMLC_PS_ROOT_PORT']} {os.environ['PORT']}"
        (tmp_path / f"ports-{rank()}").write_text(ports)
        wait_for_nothing() if rank() else mx.kv.create("dist_odsgd")

    error = fail(fn, marker, timeout=30, num_servers=2)
    assert type(error) is JobTimeout and isinstance(error, TimeoutError)
    text = str(error)
    assert "within 30 s (timeout=)" in text
    roles = ["scheduler", "server 0", "server 1", "worker 0", "worker 1"]
    starts = [text.index(f"\n{role}:\n") for role in roles]
    assert starts == sorted(starts)
    did = dict(zip(roles, (text[a:b] for a, b in zip(starts, [*starts[1:], None]))))
    assert "in wait_for_nothing" in did["worker 1"]
    assert "in exchange" in did["worker 0"]  # waits for rank 1's second store
    for role in roles[:3]:
        assert "in serve" in did[role]
    assert [p.name for p in sorted(tmp_path.iterdir())] == ["ports-0", "ports-1"]
    first = int((tmp_path / "ports-0").read_text().split()[0])
    last = int((tmp_path / "ports-1").read_text().split()[1])
    assert last - first == len(roles) - 1
    assert not [n for n in range(first, last + 1) if os.path.lexists(f"/tmp/{n}")]


def test_variables_reach_all_roles(marker, tmp_path):
    def fn():
        store = mx.kv.create("dist_odsgd")
        store._barrier()
        seen = {}
        for env in environments("TEST_MARKER", marker).values():
            place = env["DMLC_ROLE"], env["TEST_MARKER"]
            seen[place] = seen.get(place, 0) + 1
        store._barrier()
        return seen

    expected = {("worker", marker): 2, ("server", marker): 2, ("scheduler", marker): 1}
    assert run(fn, marker, num_servers=2) == [expected] * 2


@pytest.mark.parametrize("counts", [
    {"num_workers": 0}, {"num_servers": 0}, {"num_workers": -1}, {"num_workers": "2"},
])  # fmt: skip
def test_counts_below_one_are_refused(marker, counts):
    error = fail(lambda: None, marker, **counts)
    assert isinstance(error, ODSGDError)
    assert "give an integer of at least 1" in str(error)

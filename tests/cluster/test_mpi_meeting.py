"""Ranks under the real mpirun find rank 0, whatever strangers do."""

import contextlib
import json
import shutil
import socket
import sys
import threading
from pathlib import Path

import pytest
from bed_sshd import free_port
from cluster_jobs import environment

MEET = (sys.executable, str(Path(__file__).with_name("meet.py")), "mpi")
NONSENSE = (b"", b"GET / HTTP/1.1\r\n\r\n", b"\0\0\0\x20" + b"n" * 32)
LIBRARY = {"openmpi": "libmpich.so.12", "mpich": "libmpi.so.40"}  # Of the other one.


@pytest.fixture(params=["openmpi", "mpich"])
def mpirun(request, start, tmp_path):
    """Start four ranks that meet."""
    program = shutil.which(f"mpirun.{request.param}")
    if program is None:
        pytest.skip(
            f"not installed: mpirun.{request.param} (see scripts/setup-cluster)"
        )
    env = environment(TMPDIR=str(tmp_path))
    command = [program, "-n", "4"]
    if request.param == "openmpi":
        command.append("--oversubscribe")
        # It refuses root otherwise, who alone is in a container.
        env.update(OMPI_ALLOW_RUN_AS_ROOT="1", OMPI_ALLOW_RUN_AS_ROOT_CONFIRM="1")

    def run(*args, **variables):
        return start(*command, *MEET, *args, env={**env, **variables}, limit_s=90)

    run.other_library = LIBRARY[request.param]
    return run


@contextlib.contextmanager
def strangers(port):
    """Connect to a port of this machine, again and again, and say nonsense."""
    stop, held = threading.Event(), []

    def call():
        while not stop.wait(0.01):
            with contextlib.suppress(OSError):
                held.append(socket.create_connection(("127.0.0.1", port), 1))
                held[-1].sendall(NONSENSE[len(held) % len(NONSENSE)])

    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    yield held
    stop.set()
    thread.join(30)
    for sock in held:
        sock.close()


def test_ranks_meet(mpirun):
    result = mpirun("60").finish()
    met = {"size": 4, "heard": [1, 2, 3], "nodes": 1}
    assert (result.code, result.output) == (0, f"met {json.dumps(met)}\n"), result


def test_exit_code_of_rank_0_comes_through(mpirun):
    result = mpirun("60", MEET_EXIT="3").finish()
    assert (result.code, '"heard": [1, 2, 3]' in result.output) == (3, True), result


def test_strangers_hold_nobody_up(mpirun):
    port = free_port()
    with strangers(port) as held:
        result = mpirun("60", f"{port}-{port}").finish()
    assert (result.code, '"heard": [1, 2, 3]' in result.output) == (0, True), result
    assert held


def test_a_rank_that_does_not_come_ends_it_in_time(mpirun):
    result = mpirun("8", MEET_ABSENT="2").finish()
    # mpirun itself may go first, and with it what the ranks say.
    assert result.code not in (0, -9), result  # -9: the limit's.


def test_the_library_of_another_mpi_is_told(mpirun):
    result = mpirun("60", ODSGD_MPI_LIBRARY=mpirun.other_library).finish()
    assert result.code != 0, result
    if "cannot open shared object" not in result.errors:  # Not installed: told, too.
        assert "is of another MPI" in result.errors, result
    assert "Set ODSGD_MPI_LIBRARY to the libmpi.so of the mpirun" in result.errors

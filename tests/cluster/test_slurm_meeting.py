"""Tasks of a step of the real Slurm find rank 0, and trust nobody else."""

import contextlib
import json
import shutil
import socket
import sys
import threading
from pathlib import Path

import pytest
from cluster_jobs import environment

MEET = (sys.executable, str(Path(__file__).with_name("meet.py")), "slurm")
MET = f"met {json.dumps({'size': 4, 'heard': [1, 2, 3], 'nodes': 1})}\n"


@pytest.fixture
def srun(slurm, start):
    """Start four tasks that meet."""
    program = shutil.which("srun")

    def run(*args, **variables):
        env = environment(**slurm.env, **variables)
        return start(program, "--ntasks=4", *MEET, *args, env=env, limit_s=90)

    return run


@contextlib.contextmanager
def squatters(count):
    """Half of a range of ports is taken by somebody who answers nonsense."""
    with contextlib.ExitStack() as stack:
        for first in range(20000, 32000, 100):
            with contextlib.suppress(OSError), contextlib.ExitStack() as attempt:
                socks = [attempt.enter_context(socket.socket()) for _ in range(count)]
                for i, sock in enumerate(socks):
                    sock.bind(("0.0.0.0", first + 2 * i))
                    sock.listen()
                stack.push(attempt.pop_all())
                break
        for sock in socks:
            threading.Thread(target=answer, args=(sock,), daemon=True).start()
        yield f"{first}-{first + 2 * count - 1}"
        for sock in socks:
            sock.shutdown(socket.SHUT_RDWR)


def answer(listener):
    """Send every caller something as long as a rank's answer."""
    with contextlib.suppress(OSError):
        while True:
            with listener.accept()[0] as sock:
                sock.sendall(b"\0\0\0\x40" + b"x" * 64)


@pytest.mark.parametrize("secret", ["munge", "key"])
def test_ranks_meet(srun, secret):
    more = {"ODSGD_KEY": "a secret of the user"} if secret == "key" else {}
    result = srun("60", **more).finish()
    assert (result.code, result.output) == (0, MET), result


def test_exit_code_of_rank_0_comes_through(srun):
    result = srun("60", MEET_EXIT="3").finish()
    assert (result.code, result.output) == (3, MET), result


@pytest.mark.parametrize("secret", ["munge", "key"])
def test_squatters_are_not_trusted(srun, secret):
    more = {"ODSGD_KEY": "a secret of the user"} if secret == "key" else {}
    with squatters(4) as ports:
        result = srun("60", ports, **more).finish()
    assert (result.code, result.output) == (0, MET), result


def test_who_does_not_come_is_named(srun):
    result = srun("8", MEET_ABSENT="2").finish()
    assert result.code != 0, result
    assert "rank 2 of 4 did not connect to rank 0; connected: 1 (" in result.errors
    assert "rank 0 ended the job: rank 2 of 4 did not connect" in result.errors


def test_without_key_and_munge_the_remedies_are_said(srun):
    result = srun("60", PATH="/nowhere").finish()
    assert result.code != 0, result
    assert "ODSGD_KEY is not set, and munge" in result.errors
    assert "export ODSGD_KEY=$(openssl rand -hex 32)" in result.errors


def test_two_jobs_in_one_range_of_ports_do_not_mix(srun):
    ports = "29000-29003"
    jobs = [srun("60", ports) for _ in range(2)]
    for job in jobs:
        result = job.finish()
        assert (result.code, result.output) == (0, MET), result

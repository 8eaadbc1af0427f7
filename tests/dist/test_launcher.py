"""The launcher with real processes: it ends them all, whatever happens."""

import os
import re
import select
import signal
import subprocess
import sys
import threading
import time
import uuid
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from watch import marked, wait_until, wait_until_none

from odsgd_kvstore.launch import processes
from odsgd_kvstore.launch.commands import Role
from odsgd_kvstore.launch.processes import run_roles

ROOT = Path(processes.__file__).absolute().parents[2]
LIMIT_S = 60
STAY = ("sleep", "1000")
SIGNALS = [signal.SIGINT, signal.SIGTERM, signal.SIGHUP]
RANKS = """
import os
import numpy; numpy.bool = bool  # MXNet needs it on Python 3.12
import mxnet as mx
store = mx.kv.create("dist_sync")
store.init(3, mx.nd.zeros(2))
store.push(3, mx.nd.ones(2) * (store.rank + 1))
out = mx.nd.zeros(2)
store.pull(3, out=out)
print("ranks", store.rank, os.environ["DMLC_WORKER_ID"], out.asnumpy().tolist())
"""


class Launcher:
    """`odsgd-launch` as a process; all that it starts carries a marker."""

    def __init__(self, *args, start=("-m", "odsgd_kvstore.launch"), stdout=-1):
        self.marker, self.lines = uuid.uuid4().hex, []
        env = {k: v for k, v in os.environ.items() if not k.startswith("DMLC_")}
        env.update(LAUNCH_TEST=self.marker, PYTHONPATH=str(ROOT))
        command = [sys.executable, *start, *args]
        self.popen = subprocess.Popen(
            command, env=env, bufsize=0, stdout=stdout, stderr=subprocess.PIPE
        )
        self.timer = threading.Timer(LIMIT_S, self.popen.kill)
        self.timer.start()

    def processes(self):
        """Pid and command of what still runs of it."""
        return marked("LAUNCH_TEST", self.marker)

    def wait_for(self, pattern):
        """Read the output up to a line that matches."""
        match = None
        while match is None:
            self.lines.append(self.popen.stdout.readline().decode().rstrip("\n"))
            assert self.popen.poll() is None, f"no {pattern!r} in {self.lines}"
            match = re.search(pattern, self.lines[-1])
        return match

    def finish(self):
        """Wait for the end; return exit code, output lines, and standard error."""
        output, errors = self.popen.communicate(timeout=LIMIT_S)
        self.timer.cancel()
        self.lines += (output or b"").decode().splitlines()
        return self.popen.returncode, self.lines, errors.decode()


@pytest.fixture
def launch():
    """Start launchers; at the end none of their processes may be left."""
    started = []

    def start(*args, **kwargs):
        started.append(Launcher(*args, **kwargs))
        return started[-1]

    yield start
    left = [launcher.processes() for launcher in started]
    for pid in set().union(*left):
        os.kill(pid, signal.SIGKILL)
    assert not any(left)


def sockets_of(port):
    """The sockets of a small job that still exist."""
    return [i for i in range(8) if os.path.lexists(f"/tmp/{int(port) + i}")]


def roles(*workers, server=STAY, scheduler=STAY):
    """Roles of a job without MXNet."""
    argvs = [("scheduler", scheduler), ("server", server)]
    argvs += [("worker", argv) for argv in workers]
    ranks, env = [0, 0, *range(len(workers))], dict(os.environ)
    return [Role(kind, rank, env, argv) for rank, (kind, argv) in zip(ranks, argvs)]


def shell(text):
    return ("sh", "-c", text)


def run(*workers, server=STAY, jobs=None, **kwargs):
    """Run a job without MXNet; return its result, lines and pids."""
    lines, pids = [], {}
    kwargs.setdefault("on_line", lambda role, text: lines.append((role.name, text)))
    kwargs = {"timeout": LIMIT_S, "grace_s": 0.3, "on_started": pids.update, **kwargs}
    try:
        result = run_roles(jobs or roles(*workers, server=server), **kwargs)
    finally:
        assert not any(os.path.exists(f"/proc/{pid}") for pid in pids.values())
    return result, lines, pids


@pytest.mark.parametrize("repeat", range(3))
def test_ranks_follow_the_launcher(launch, repeat):
    job = launch("-n3", "-s2", "--stock-servers", sys.executable, "-c", RANKS)
    code, lines, errors = job.finish()
    assert code == 0, errors
    # Each worker pushes rank + 1: 1 + 2 + 3 = 6.
    said = sorted(line for line in lines if "] ranks" in line)
    assert said == [f"[worker {i}] ranks {i} {i} [6.0, 6.0]" for i in range(3)]
    assert re.fullmatch(r"odsgd-launch: done in \d+\.\d s", lines[-1])


def test_two_jobs_at_once_do_not_meet(launch):
    args = ("-n2", "-s1", "--stock-servers", sys.executable, "-c", RANKS)
    for job in [launch(*args), launch(*args)]:
        code, lines, errors = job.finish()
        assert code == 0, errors
        assert sum("[3.0, 3.0]" in line for line in lines) == 2


def test_the_table_comes_first_and_a_failure_is_named(launch):
    script = "echo port $DMLC_PS_ROOT_PORT; exit 3"
    file = Path(__file__).parents[2] / "scripts/launch.py"
    job = launch("-n1", "--stock-servers", *shell(script), start=[str(file)])
    code, lines, errors = job.finish()
    assert code == 3
    assert lines[1].split() == ["role", "rank", "pid", "command"]
    assert [line[:6] for line in lines[2:5]] == ["schedu", "server", "worker"]
    port = re.fullmatch(r"\[worker 0\] port (\d+)", lines[5]).group(1)
    pid = lines[4].split()[2]
    assert errors == (
        f"odsgd-launch: worker 0 (pid {pid}) failed with exit code 3; "
        f"its last lines were:\n    port {port}\n"
    )
    assert sockets_of(port) == []


@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_ends_a_running_job(launch, number):
    port = "print('port', os.environ['DMLC_PS_ROOT_PORT'])\n"
    script = f"import os\n{port}{RANKS}import time; time.sleep(1000)"
    job = launch("-n1", "--stock-servers", sys.executable, "-c", script)
    port = job.wait_for(r"\] port (\d+)").group(1)
    job.wait_for("] ranks")
    assert len(sockets_of(port)) == 3
    job.popen.send_signal(number)
    code, _, errors = job.finish()
    assert code == 128 + number
    assert errors == f"odsgd-launch: the job was ended by {number.name}\n"
    assert sockets_of(port) == []


@pytest.mark.parametrize("number", SIGNALS)
@pytest.mark.parametrize("others", [1, 3, 5])
def test_a_signal_ends_a_starting_job(launch, number, others):
    job = launch("-n4", "--stock-servers", *STAY)
    is_started = lambda: len(job.processes()) > others
    wait_until(is_started, "the first processes", pause_s=0)  # Before the others.
    job.popen.send_signal(number)
    code, _, errors = job.finish()
    assert code == 128 + number, errors


def test_a_second_signal_kills_at_once(launch):
    job = launch("-n1", "--stock-servers", *shell("trap '' TERM; echo on; sleep 1000"))
    job.wait_for("] on$")
    job.popen.terminate()
    # The scheduler is gone when the first signal has done its work.
    path = f"/proc/{job.lines[2].split()[2]}"
    wait_until(lambda: not os.path.exists(path), "the first signal's work")
    started = time.monotonic()
    job.popen.terminate()
    assert job.finish()[0] == 143
    assert time.monotonic() - started < 3  # The grace would have been 5.


def test_kill_of_the_launcher_leaves_no_process_and_no_socket(launch):
    script = "echo port $DMLC_PS_ROOT_PORT; sleep 1000; true"
    job = launch("-n2", "--stock-servers", *shell(script))
    port = job.wait_for(r"\] port (\d+)").group(1)
    wait_until(lambda: sockets_of(port), "the scheduler's socket")
    job.popen.kill()
    wait_until_none(job.processes, "(all roles)")
    assert job.finish()[0] == -signal.SIGKILL
    assert sockets_of(port) == []


@pytest.mark.parametrize("code", [141, 143])
def test_output_that_is_closed_or_blocked(launch, code):
    reader, writer = os.pipe()
    command = shell("while :; do echo a; done")
    job = launch("-n1", "--stock-servers", *command, stdout=writer)
    wait_until(lambda: not select.select([], [writer], [], 0)[1], "a full pipe")
    os.close(writer)
    if code == 143:
        job.popen.terminate()
        job.popen.wait(LIMIT_S)
    os.close(reader)
    assert job.finish()[0] == code


def test_command_without_a_store_succeeds(launch):
    started = time.monotonic()
    code, _, errors = launch("-n2", "-s1", "--stock-servers", "true").finish()
    assert (code, errors) == (0, "")
    assert time.monotonic() - started < 15


@pytest.mark.parametrize("command, code", [("/no/command", 127), ("/etc/passwd", 126)])
def test_a_command_that_cannot_start_is_named(command, code):
    result, _, _ = run((command,))
    assert result.exit_code == code
    assert f"cannot start '{command}': " in result.message


def test_timeout_names_the_option(launch):
    args = ("-n1", "--timeout", "1.5", "--stock-servers", *STAY)
    code, _, errors = launch(*args).finish()
    assert code == 124
    names = r"scheduler \(pid \d+\), server 0 \(pid \d+\), worker 0 \(pid \d+\)"
    assert re.search(rf"within 1.5 s \(--timeout\); still running: {names}$", errors)


def test_long_lines_stay_whole():
    script = "import sys\nfor i in range(300): print(sys.argv[1] * 10000, flush=True)"
    workers = [(sys.executable, "-c", script, letter) for letter in "ab"]
    result, lines, _ = run(*workers)
    assert result.exit_code == 0
    expected = [("worker 0", "a" * 10000)] * 300 + [("worker 1", "b" * 10000)] * 300
    assert sorted(lines) == expected


def test_last_lines_of_the_first_role_to_fail_are_given():
    script = "for i in $(seq 50); do echo $i; done; printf end; exit 3"
    result, _, pids = run(STAY, shell(script))
    assert (result.exit_code, result.timed_out) == (3, False)
    last = tuple(str(i) for i in range(22, 51)) + ("end",)
    assert result.first_failure.last_lines == result.last_lines["worker 1"] == last
    assert result.first_failure.pid == pids["worker 1"]
    assert result.last_lines["worker 0"] == ()


def test_first_of_two_failures_is_named(tmp_path):
    # Worker 1 fails as soon as worker 0 is gone.
    follow = "read pid < {0}; while kill -0 $pid; do :; done 2>/dev/null; exit 5"
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    for _ in range(5):
        result, _, _ = run(
            shell(f"echo $$ > {fifo}; exit 4"), shell(follow.format(fifo))
        )
        assert (result.first_failure.role, result.exit_code) == ("worker 0", 4)


EARLY = {
    "kill -KILL $$": "was ended by signal 9 (SIGKILL)",
    "exit 3": "failed with exit code 3",
    "exit 0": "ended (exit code 0) before the workers were done",
}


@pytest.mark.parametrize("script", EARLY)
def test_a_server_that_ends_too_early_fails_the_job(script):
    result, _, pids = run(STAY, server=shell(script))
    name = f"server 0 (pid {pids['server 0']})"
    assert result.message == f"{name} {EARLY[script]}; it wrote nothing"
    assert result.exit_code == result.first_failure.exit_code > 0


def test_a_server_that_fails_after_the_workers_fails_the_job(tmp_path):
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    server = shell(f"read line < {fifo}; exit 6")
    result, _, _ = run(shell(f"echo > {fifo}"), server=server, grace_s=30)
    assert (result.first_failure.role, result.exit_code) == ("server 0", 6)


def test_workers_may_go_on_when_all_servers_ended_well():
    # MXNet's servers end with the last store, and the script may evaluate on.
    jobs = roles(shell("sleep 2.5; echo on"), scheduler=("true",), server=("true",))
    result, lines, _ = run(jobs=jobs, grace_s=2)
    assert (result.exit_code, lines) == (0, [("worker 0", "on")])


def test_a_worker_that_ignores_term_is_killed_with_its_children(monkeypatch):
    marker = uuid.uuid4().hex
    monkeypatch.setenv("LAUNCH_TEST", marker)
    result, _, _ = run(shell("trap '' TERM; sleep 1000 & wait"), timeout=1)
    assert (result.exit_code, result.timed_out) == (124, True)
    assert "worker 0" in result.message and not marked("LAUNCH_TEST", marker)


def test_a_child_outside_the_group_does_not_hold_up_the_end():
    result, lines, _ = run(shell("setsid sleep 1000 & echo $!"))
    assert result.exit_code == 0 and result.seconds < 5
    os.kill(int(lines[0][1]), signal.SIGKILL)


def test_stacks_are_asked_for_before_the_end():
    script = "import faulthandler, time; faulthandler.register(10); time.sleep(1000)"
    worker = (sys.executable, "-c", script)
    result, _, _ = run(worker, timeout=1, dump_signal=signal.SIGUSR1)
    assert result.timed_out
    assert "<string>" in result.last_lines["worker 0"][-1]


def test_run_roles_works_in_another_thread():
    with ThreadPoolExecutor() as pool:
        result, _, _ = pool.submit(run, shell("exit 3")).result(LIMIT_S)
    assert result.exit_code == 3


def test_an_error_of_the_callers_function_ends_the_job():
    def fail(role, text):
        raise KeyError(text)

    with pytest.raises(KeyError, match="hello"):
        run(shell("echo hello; sleep 1000"), on_line=fail)

"""Jobs over ssh, with a program in place of ssh that starts a shell on this machine.

Agents, roles and their ends are real; ssh itself, with an sshd, is in tests/cluster.
"""

import contextlib
import hashlib
import os
import re
import signal
import subprocess
import sys
import threading
import uuid
from pathlib import Path

import pytest
from watch import marked, wait_until_none

import odsgd_kvstore

ROOT = Path(odsgd_kvstore.__file__).absolute().parents[1]
TESTS = str(Path(__file__).absolute().parents[1])
LIMIT_S = 90
# Like ssh it drops the caller's environment and folder, and a login shell says hello.
SSH = """#!/bin/sh
while [ "$1" != -- ]; do shift; done
host=$2
if [ "$host" = down ]; then
    echo "ssh: connect to host down port 22: Connection refused" >&2
    exit 255
fi
echo "Welcome to $host"
cd /
exec env -i HOME="$HOME" PATH=/usr/bin:/bin SSH_TEST="$host" sh -c "$3"
"""
TRAIN = """
import odsgd_kvstore
import hashlib, os, sys
import mxnet as mx
store = mx.kv.create("dist_odsgd")
optimizer = mx.optimizer.SGD(learning_rate=0.1, momentum=0.9)
store.set_optimizer(optimizer)
store.init(0, mx.nd.arange(6))
weight = mx.nd.zeros(6)
for step in range(5):
    gradient = (step + store.rank + 1) * mx.nd.arange(6) ** 0.5
    store.pushpull(0, gradient, out=weight)
with odsgd_kvstore.global_weights(store):
    pass
store.pull(0, out=weight)
digest = hashlib.sha256(weight.asnumpy().tobytes()).hexdigest()
place = os.environ["ODSGD_LOCAL_RANK"] + "/" + os.environ["ODSGD_LOCAL_SIZE"]
print("weights", store.rank, digest)
print("place", store.rank, place, os.environ["SSH_TEST"], os.getcwd())
print("seen", store.rank, sys.executable, os.environ.get("MXNET_TEST"), sys.argv[1:])
"""
STAY = """
import os, subprocess, sys, time
child = subprocess.Popen(["sleep", "1000"])
print("stays", os.getpid(), flush=True)
time.sleep(1000)
"""


@pytest.fixture
def place(tmp_path):
    """A folder with `ssh`, two host files and scripts."""
    bin_folder = tmp_path / "bin"
    bin_folder.mkdir()
    (bin_folder / "ssh").write_text(SSH)
    (bin_folder / "ssh").chmod(0o755)
    (tmp_path / "hosts").write_text("alpha # the first\r\n\r\nbeta\n")
    (tmp_path / "down").write_text("alpha\ndown\n")
    (tmp_path / "train it.py").write_text(TRAIN)
    (tmp_path / "stay.py").write_text(STAY)
    return tmp_path


def environment(place, **more):
    """The launcher's environment, with our ssh first."""
    path = os.pathsep.join([str(place / "bin"), os.environ["PATH"]])
    return {**os.environ, "PATH": path, "PYTHONPATH": str(ROOT), **more}


@contextlib.contextmanager
def start(place, *args, **more):
    """Start the launcher; it is killed after a time limit, and in the end."""
    with subprocess.Popen(
        [sys.executable, "-m", "odsgd_kvstore.launch", *args],
        cwd=place,
        env=environment(place, **more),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        timer = threading.Timer(LIMIT_S, process.kill)
        timer.start()
        try:
            yield process
        finally:
            timer.cancel()
            process.kill()


def run(place, *args, **more):
    """Exit code and output of the launcher."""
    with start(place, *args, **more) as process:
        output, _ = process.communicate()
    return process.returncode, output


def over_ssh(*args, n=2, hosts="hosts"):
    return ["-n", str(n), "-s", "2", "-H", hosts, *args]


def lines(output, word):
    """What each worker printed after `word`, by rank."""
    return re.findall(rf"^\[worker \d\] {word} (.*)$", output, re.MULTILINE)


def test_weights_and_surroundings_are_those_of_the_local_launcher(place):
    command = [sys.executable, "train it.py", "a b", "it's", "$HOME"]
    local = ["-n", "2", "-s", "2", "--env", "SSH_TEST=local"]
    code, here = run(place, *local, *command, MXNET_TEST="1")
    assert code == 0, here
    code, there = run(place, *over_ssh(), *command, MXNET_TEST="1")
    assert code == 0, there
    assert len(set(lines(there, "weights"))) == 2
    assert sorted(lines(there, "weights")) == sorted(lines(here, "weights"))
    assert sorted(lines(there, "seen")) == sorted(lines(here, "seen"))
    assert "1 ['a b', \"it's\", '$HOME']" in lines(there, "seen")[0]
    assert sorted(lines(there, "place")) == [
        f"0 0/2 alpha {place}",
        f"1 1/2 beta {place}",
    ]
    assert "alpha  ok  Python" in there and "beta   ok  Python" in there
    assert re.search(r"^worker +1 +beta +\d+ ", there, re.MULTILINE)


@pytest.mark.parametrize(
    "number, code",
    [(signal.SIGKILL, -9), (signal.SIGTERM, 143), (signal.SIGINT, 130)],
)
def test_nothing_stays_when_the_launcher_ends(place, number, code):
    marker = uuid.uuid4().hex
    options = [*over_ssh(), "--env", f"MARKER={marker}"]
    with start(place, *options, sys.executable, "stay.py") as process:
        seen = []
        while sum("stays" in line for line in seen) < 2:
            line = process.stdout.readline()
            assert line, seen
            seen.append(line)
        # Three roles that serve, two with a child.
        assert len(marked("MARKER", marker)) >= 7
        process.send_signal(number)
        assert process.wait(LIMIT_S) == code
    wait_until_none(lambda: marked("MARKER", marker), "(all roles)")


def test_the_key_is_in_no_command_line(place):
    script = (
        "import os, sys; sys.path.append(sys.argv[1]); import watch\n"
        "key, found = os.environ['ODSGD_KEY'], map(watch.command, watch.pids())\n"
        "print('key', len(key), sum(key in text for text in found))"
    )
    code, output = run(place, *over_ssh(), sys.executable, "-c", script, TESTS)
    assert code == 0, output
    assert lines(output, "key") == ["64 0", "64 0"]


def test_a_key_of_the_users_own_reaches_the_roles(place):
    show = "import hashlib, os; k = os.environ['ODSGD_KEY'].encode(); "
    show += "print('key', hashlib.sha256(k).hexdigest())"
    command = [sys.executable, "-c", show]
    code, output = run(place, *over_ssh(), *command, ODSGD_KEY="my own secret")
    assert code == 0, output
    assert lines(output, "key") == [hashlib.sha256(b"my own secret").hexdigest()] * 2
    assert "my own secret" not in output


def test_a_role_that_fails_is_named_with_its_host(place):
    script = "import os, sys; sys.exit(3 if os.environ['SSH_TEST'] == 'beta' else 0)"
    code, output = run(place, *over_ssh(), sys.executable, "-c", script)
    assert code == 3
    assert re.search(r"worker 1 \(pid \d+ on beta\) failed with exit code 3", output)


def test_a_role_that_is_killed_is_named_with_its_host(place):
    script = "import os; os.kill(os.getpid(), 9)"
    code, output = run(place, *over_ssh(n=1), sys.executable, "-c", script)
    assert code == 137
    assert re.search(r"worker 0 \(pid \d+ on alpha\) was ended by signal 9", output)


def test_a_host_whose_agent_dies_ends_the_job(place):
    script = "import os, time; os.kill(os.getppid(), 9); time.sleep(100)"
    code, output = run(place, *over_ssh(n=1), sys.executable, "-c", script)
    assert code == 255
    assert re.search(r"\(pid \d+ on alpha\) was lost: the connection ended", output)


def test_a_host_that_is_down_ends_it_before_anything_starts(place):
    marker = place / "started"
    command = [sys.executable, "-c", f"open({str(marker)!r}, 'w')"]
    code, output = run(place, *over_ssh(hosts="down"), *command)
    assert code == 1
    assert "down: the connection ended (ssh exit code 255)" in output
    assert "no sshd listens there: check the port in the host file" in output
    assert not marker.exists()


def test_a_missing_program_is_said_before_anything_starts(place):
    code, output = run(place, *over_ssh(), "no-such-program")
    assert code == 1
    assert "alpha  FAILED  the program 'no-such-program' is not found" in output


def test_logs_have_the_same_lines_and_quiet_shows_none(place):
    script = "print('one\\n  two, worker', flush=True)"
    options = ["--log-dir", "logs", "--quiet"]
    command = [sys.executable, "-c", script]
    for times in (1, 2):  # An earlier job's lines are kept.
        code, output = run(place, *over_ssh(*options), *command)
        assert (code, output) == (0, "")
        for rank in (0, 1):
            text = (place / "logs" / f"worker-{rank}.log").read_text()
            assert text == "one\n  two, worker\n" * times
    names = sorted(path.name for path in (place / "logs").iterdir())
    roles = ["scheduler", "server-0", "server-1", "worker-0", "worker-1"]
    assert names == [f"{name}.log" for name in roles]


def test_long_output_keeps_its_lines_whole(place):
    script = "import os\nfor i in range(3000): print(str(i) + 'x' * 500)"
    code, output = run(place, *over_ssh(), sys.executable, "-c", script)
    assert code == 0, output[-2000:]
    for rank in (0, 1):
        found = re.findall(rf"^\[worker {rank}\] (\d+)x{{500}}$", output, re.MULTILINE)
        assert found == [str(i) for i in range(3000)]


def test_the_time_limit_names_who_still_runs(place):
    options = over_ssh("--timeout", "3", n=1)
    code, output = run(place, *options, sys.executable, "stay.py")
    assert code == 124
    assert re.search(r"worker 0 \(pid \d+ on alpha\)", output.split("still running")[1])

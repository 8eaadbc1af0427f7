"""Jobs on emulated links: the same numbers, real limits, and nothing left behind."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from linear import backward, global_values, make_params, rank, sgd_params, values
from test_launcher import Launcher
from watch import marked, wait_until

import odsgd_kvstore
from odsgd_kvstore.errors import LaunchError
from odsgd_kvstore.launch import bandwidth, local
from odsgd_kvstore.launch.commands import Role
from odsgd_kvstore.launch.network import Network
from odsgd_kvstore.launch.processes import run_roles
from odsgd_kvstore.testing import run_local

LIMIT_S = 120
PLACES = os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/sbin"])
TC = shutil.which("tc", path=PLACES)
# 40 Mbit/s as `tc -j` has it: bytes per second, bytes.
LIMITS = {"rate": 5_000_000, "burst": 12_000}
# Runs a program as a user without rights: number 1234 in a namespace of its own, in
# which the files of the one who runs the tests are this user's. The arguments are
# settings of the kernel, for this user alone, and the program.
AS_USER = """
import ctypes, os, sys
user, group = os.geteuid(), os.getegid()
if ctypes.CDLL(None).unshare(0x10000000) != 0:
    sys.exit(77)
for name, text in (
    ("setgroups", "deny"), ("uid_map", f"1234 {user} 1"), ("gid_map", f"1234 {group} 1")
):
    with open(f"/proc/self/{name}", "w") as file:
        file.write(text)
for name in filter(None, sys.argv[1].split(",")):
    with open(f"/proc/sys/user/{name}", "w") as file:
        file.write("0")
os.execv(sys.argv[2], sys.argv[2:])
"""
SHOW = """
import json, os, pathlib, socket
print(json.dumps({
    "user": os.getuid(),
    "rights": int(pathlib.Path("/proc/self/status").read_text().split("CapEff:")[1]
                  .split()[0], 16),
    "network": os.readlink("/proc/self/ns/net"),
    "folder": os.getcwd(),
    "inherited": os.environ["LAUNCH_TEST"],
    "files": len(os.listdir("/proc/self/fd")),
}))
pathlib.Path(os.environ["DMLC_WORKER_ID"]).touch()
"""

ANSWER = """
import socket
connection, _ = socket.create_server(("", 5000)).accept()
print(connection.recv(9).decode())
connection.sendall(b"pong")
connection.recv(9)
"""
ASK = """
import contextlib, socket
connection = None
while connection is None:
    with contextlib.suppress(OSError):
        connection = socket.create_connection(("198.18.0.254", 5000))
connection.sendall(b"ping")
print(connection.recv(9).decode())
"""


@pytest.fixture(autouse=True)
def able():
    """Skip where links can't be made, and see that no namespace is kept open."""
    try:
        Network([bandwidth.Link("198.18.0.254", 10**9)]).close()
    except LaunchError as error:
        pytest.skip(f"this machine emulates no links: {error}")
    before = open_namespaces()
    yield
    assert open_namespaces() == before


@pytest.fixture
def launch():
    """Start launchers; at the end none of their processes may be left."""
    started = []

    def start(*args, **kwargs):
        started.append(Launcher("--emulate-bandwidth", "40mbit", *args, **kwargs))
        return started[-1]

    yield start
    left = [marked("LAUNCH_TEST", launcher.marker) for launcher in started]
    for pid in set().union(*left):
        os.kill(pid, signal.SIGKILL)
    assert not any(left)


def open_namespaces():
    """How many files of this process are namespaces."""
    links = [f"/proc/self/fd/{fd}" for fd in os.listdir("/proc/self/fd")]
    return sum(
        os.readlink(link).startswith(("net:", "user:"))
        for link in links
        if os.path.islink(link)
    )


def as_user(settings=""):
    """How to start a launcher as another user than root, or skip."""
    start = ("-I", "-S", "-c", AS_USER, settings, sys.executable)
    done = subprocess.run(
        [sys.executable, *start, "-c", ""], timeout=LIMIT_S, check=False
    )
    if done.returncode == 77:
        pytest.skip("the kernel allows no user namespaces")
    return (*start, "-m", "odsgd_kvstore.launch")


def limits(command, **kwargs):
    """The filters in force, by interface, as ``tc`` shows them."""
    done = subprocess.run(
        [*command, TC, "-j", "qdisc", "show"],
        stdout=subprocess.PIPE,
        timeout=LIMIT_S,
        check=True,
        **kwargs,
    )
    return {
        item["dev"]: {name: item["options"][name] for name in LIMITS}
        for item in json.loads(done.stdout)
        if item["kind"] == "tbf"
    }


def train():
    """Rank, local and global weights of 6 steps, 3 of them with delayed weights."""
    params = make_params()
    trainer = odsgd_kvstore.Trainer(params, "sgd", sgd_params(), warmup_steps=3)
    seen = []
    for step in range(6):
        backward(params, step)
        trainer.step(1)
        seen += [values(params), global_values(trainer, params)]
    return trainer._kvstore.rank, rank(), np.array(seen)


def test_job_on_links_has_ranks_in_order_and_the_weights_of_one_without():
    plain = run_local(train, 3, 2, timeout=LIMIT_S)
    linked = run_local(train, 3, 2, timeout=LIMIT_S, bandwidth="100mbit")
    assert [ranks for *ranks, _ in linked] == [[0, 0], [1, 1], [2, 2]]
    assert plain[0][2].std() > 0.1
    for (*_, expected), (*_, got) in zip(plain, linked):
        assert got.tobytes() == expected.tobytes()


def surroundings():
    """What a role can see of its network."""
    import socket

    names = ("DMLC_LOCAL", "DMLC_NODE_HOST", "DMLC_PS_ROOT_URI")
    counters = Path("/proc/self/net/dev").read_text()
    return {
        "limits": limits([]),
        "network": os.readlink("/proc/self/ns/net"),
        "host": socket.gethostbyname(socket.gethostname()),
        "env": [os.environ.get(name) for name in names],
        "interfaces": re.findall(r"^ *(\w+):", counters, re.MULTILINE),
    }


def test_each_role_has_its_own_network_with_limits_in_force():
    # Of an outer job, which must not matter.
    stale = {"DMLC_LOCAL": "1", "DMLC_NODE_HOST": "1.2.3.4", "DMLC_INTERFACE": "lo"}
    seen = run_local(surroundings, 3, 1, LIMIT_S, stale, bandwidth="40mbit")
    own = os.readlink("/proc/self/ns/net")
    assert len({own, *(s["network"] for s in seen)}) == 4
    for worker, role in enumerate(seen):
        address = f"198.18.0.{252 - worker}"
        assert role["limits"] == {bandwidth.INTERFACE: LIMITS}
        assert role["host"] == address
        assert role["env"] == [None, address, "198.18.0.254"]
        assert sorted(role["interfaces"]) == ["eth0", "lo"]


def test_switch_limits_what_each_role_receives():
    links = [bandwidth.Link(a, 40_000_000) for a in bandwidth.link_addresses(3)]
    network = Network(links)
    try:
        entry, files = network.switch_entry()
        seen = limits(entry, pass_fds=files)
    finally:
        network.close()
    assert seen == {f"port{i}": LIMITS for i in range(3)}


def test_any_roles_reach_each_other_and_keep_their_pids():
    tell = "\nimport os; print(os.getpid(), os.readlink('/proc/self/ns/net'), "
    tell += "'eth0:' in open('/proc/self/net/dev').read())"
    roles = [
        Role("worker", i, dict(os.environ), (sys.executable, "-c", code + tell))
        for i, code in enumerate([ANSWER, ASK])
    ]
    lines, pids = {"worker 0": [], "worker 1": []}, {}
    result = run_roles(
        local.on_links(roles, "1gbit"),
        on_line=lambda role, text: lines[role.name].append(text),
        on_started=pids.update,
        timeout=LIMIT_S,
    )
    assert (result.exit_code, result.message) == (0, "")
    assert [lines[name][0] for name in sorted(lines)] == ["ping", "pong"]
    told = {name: said[1].split() for name, said in lines.items()}
    assert {name: int(pid) for name, (pid, _, _) in told.items()} == pids
    inside = [network for _, network, _ in told.values()]
    assert len({*inside, os.readlink("/proc/self/ns/net")}) == 3
    assert [has for _, _, has in told.values()] == ["True", "True"]


@pytest.mark.parametrize("user", ["caller", "other"])
def test_roles_have_the_callers_user_files_and_environment(
    launch, user, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    start = as_user() if user == "other" else ("-m", "odsgd_kvstore.launch")
    args = ("-n2", "-s1", "--stock-servers", sys.executable, "-c", SHOW)
    job = launch(*args, start=start)
    code, lines, errors = job.finish()
    assert (code, errors) == (0, "")
    seen = [json.loads(x.split("] ")[1]) for x in lines if x.startswith("[worker")]
    assert len({s.pop("network") for s in seen}) == 2
    expected = {"user": 1234 if user == "other" else os.getuid()}
    expected.update(folder=str(tmp_path), inherited=job.marker)
    if user == "other" or os.getuid() != 0:
        expected["rights"] = 0
    assert [{**s, **expected} for s in seen] == seen
    assert {s["files"] for s in seen} == {4}  # The standard ones, and the folder.
    for name in "01":
        stat = (tmp_path / name).stat()
        assert (stat.st_uid, stat.st_gid) == (os.geteuid(), os.getegid())


@pytest.mark.parametrize("user", ["caller", "other"])
def test_kill_of_the_launcher_leaves_nothing(launch, user):
    start = as_user() if user == "other" else ("-m", "odsgd_kvstore.launch")
    job = launch(
        "-n2", "-s1", "--stock-servers", "sh", "-c", "echo on; sleep 1000; :",
        start=start,
    )  # fmt: skip
    job.wait_for("] on$")
    wait_until(
        lambda: len(marked("LAUNCH_TEST", job.marker)) >= 7,
        "launcher, guard, roles, child",
    )
    job.popen.kill()
    wait_until(lambda: not marked("LAUNCH_TEST", job.marker), "the end of all roles")
    assert job.finish()[0] == -signal.SIGKILL


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("others", [1, 3])
def test_a_signal_ends_a_starting_job(launch, number, others):
    job = launch("-n4", "--stock-servers", "sleep", "1000")
    wait_until(
        lambda: len(marked("LAUNCH_TEST", job.marker)) > others, "the first processes"
    )
    job.popen.send_signal(number)
    assert job.finish()[0] == 128 + number


def test_a_failure_is_named_with_its_pid_and_exit_code(launch):
    code, lines, errors = launch(
        "-n1", "--stock-servers", "sh", "-c", "exit 3"
    ).finish()
    assert code == 3
    assert lines[5] == "Network of each role: 40 Mbit/s in each direction"
    pid = lines[4].split()[2]
    failed = f"odsgd-launch: worker 0 (pid {pid}) failed with exit code 3; it wrote"
    assert errors.startswith(failed)


def test_a_refusal_of_the_kernel_is_reported_before_any_role_starts(launch):
    start = as_user("max_user_namespaces")
    code, lines, errors = launch("-n1", "--stock-servers", "true", start=start).finish()
    assert (code, lines) == (1, [])
    assert "the kernel refuses it ([Errno 28] unshare: No space left" in errors
    assert "'sysctl -w user.max_user_namespaces=10000' as root" in errors

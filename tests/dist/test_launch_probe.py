"""What a host says of itself, and whether it reaches others: on this machine."""

import ast
import json
import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

import odsgd_kvstore
from odsgd_kvstore.launch import addresses, interpreter, ports, probe
from odsgd_kvstore.launch.addresses import Address, Seat, number
from odsgd_kvstore.launch.commands import STOCK_SERVER, Role
from odsgd_kvstore.launch.processes import run_roles

LIMIT_S = 120
ROOT = str(Path(odsgd_kvstore.__file__).absolute().parents[1])
# A range of ports below those that the kernel gives to connections.
FIRST, LAST = 15_200, 15_299
NAMESPACE_REFUSED = 77
# Runs in a network of its own: two interfaces, of which one has two addresses and an
# alias, and one that is down. What is sent to 10.9.0.2 goes to nobody.
IN_NETWORK = """
import ctypes, json, os, subprocess, sys
user = os.geteuid()
if ctypes.CDLL(None).unshare(0x40000000 | (0x10000000 if user else 0)) != 0:
    sys.exit(77)
if user:
    open("/proc/self/setgroups", "w").write("deny")
    open("/proc/self/uid_map", "w").write(f"0 {user} 1")
commands = '''
link set lo up
link add big0 type veth peer name far0
link add down0 type veth peer name far1
addr add 10.9.0.1/24 dev big0
addr add 10.9.0.7/24 dev big0
addr add 10.8.0.1/16 label big0:1 dev big0
addr add 10.7.0.1/24 dev down0
link set big0 up
link set far0 up
neigh add 10.9.0.2 lladdr 02:00:00:00:00:01 dev big0
route add unreachable 10.6.0.0/24
route add prohibit 10.5.0.0/24
'''
if subprocess.run(["ip", "-batch", "-"], input=commands, text=True).returncode:
    sys.exit(77)
while "state UP" not in subprocess.check_output(["ip", "link", "show", "big0"], text=True):
    os.sched_yield()
sys.argv[0] = "odsgd-launch"
from odsgd_kvstore.launch import ports, probe
request = json.loads(sys.argv[1])
targets = [[ip, 4000] for ip in ("10.9.0.2", "10.6.0.2", "10.4.0.2", "10.5.0.2", "10.9.0.7")]
found = ports.reach({"targets": targets, "timeout": 0.2})
print(json.dumps([probe.report(request), found]))
"""
WORKER = """
import numpy; numpy.bool = bool  # MXNet needs it on Python 3.12
import mxnet as mx
print("rank", mx.kv.create("dist_sync").rank)
"""


def request(**changes):
    """What the launcher asks of a host; the interpreter is one that fails at once."""
    base = {"python": "/nosuch", "env": {}, "cwd": None, "program": None}
    base.update(ports=2, range=[FIRST, LAST], peers=[], resolve="localhost")
    return json.loads(json.dumps({**base, **changes}))


def report(**changes):
    """A report, through JSON as it will be."""
    found = probe.OPERATIONS["report"](request(**changes))
    return json.loads(json.dumps(found))


def script(folder, text):
    """An executable file."""
    path = folder / "python"
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return str(path)


def test_report_describes_this_machine(monkeypatch):
    monkeypatch.setattr(interpreter, "LIMIT_S", LIMIT_S)
    monkeypatch.setenv("DMLC_ROLE", "server")  # It would serve, and never answer.
    monkeypatch.setenv("DMLC_PS_ROOT_URI", "nosuch")
    monkeypatch.setenv("SSH_CONNECTION", "10.0.0.1 50000 10.0.0.2 22")
    env = {"PYTHONPATH": ROOT, "DMLC_ROLE": "scheduler"}
    found = report(
        python=sys.executable, env=env, cwd=ROOT, program="sh", peers=["::1"]
    )
    features = {k: found.pop(k) for k in ("python", "mxnet", "package", "dist_kvstore")}
    assert features == {
        "python": "{}.{}.{}".format(*sys.version_info),
        "mxnet": "1.9.1",
        "package": odsgd_kvstore.__version__,
        "dist_kvstore": True,
    }
    errors = {k: v for k, v in found.items() if k.endswith("error")}
    assert sorted(errors) == [
        *("cwd_error", "mxnet_error", "package_error", "ports_error"),
        *("program_error", "python_error"),
    ]
    assert set(errors.values()) == {""}
    assert (found["host"], found["ssh_address"]) == (socket.gethostname(), "10.0.0.2")
    assert (found["resolved"], found["routes"]) == ({"localhost": "127.0.0.1"}, {})
    assert found["cores"] == len(os.sched_getaffinity(0))
    assert found["executable"] == sys.executable
    assert found["started"] <= found["time"]
    assert found["machine"] == report()["machine"]


def test_network_of_a_host(tmp_path):
    peers = ["10.9.0.2", "10.8.3.3", "10.77.0.1", "127.0.0.1"]
    text = json.dumps(request(peers=peers))
    done = subprocess.run(
        [sys.executable, "-c", IN_NETWORK, text],
        env={**os.environ, "PYTHONPATH": ROOT, "PATH": os.environ["PATH"] + ":/sbin"},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    if done.returncode == NAMESPACE_REFUSED:
        pytest.skip(f"no network of its own can be made here: {done.stderr.strip()}")
    assert done.returncode == 0, done.stderr
    found, reached = json.loads(done.stdout)
    assert sorted(found["interfaces"]) == [
        ["big0", "10.9.0.1", 24],
        ["big0", "10.9.0.7", 24],
        ["big0:1", "10.8.0.1", 16],
        ["lo", "127.0.0.1", 8],
    ]
    assert found["down"] == [["down0", "10.7.0.1", 24]]
    assert found["routes"] == {
        "10.9.0.2": "10.9.0.1",
        "10.8.3.3": "10.8.0.1",
        "127.0.0.1": "127.0.0.1",
    }
    assert found["machine"] != report()["machine"]
    assert reached["failed"] == [
        ["10.9.0.2", 4000, "timed out: a firewall?"],
        ["10.6.0.2", 4000, "no route, or a firewall rejects it"],
        ["10.4.0.2", 4000, "no route"],
        ["10.5.0.2", 4000, "forbidden: a firewall on this host?"],
        ["10.9.0.7", 4000, "refused"],
    ]
    both = [found, dict(report(), machine="other", interfaces=[["x", "10.9.0.2", 24]])]
    assert addresses.choose_addresses(both, ["a", "b"], None) == [
        Address("10.9.0.1", "route to 10.9.0.2"),
        Address("10.9.0.2", "its only address"),
    ]


@pytest.mark.parametrize(
    "connection, address",
    [
        ("", ""),
        ("10.0.0.1 5 10.0.0.2 22", "10.0.0.2"),
        ("fd00::1 5 fd00::2 22", ""),
        ("::ffff:10.0.0.1 5 ::ffff:10.0.0.2 22", "10.0.0.2"),
        ("UNKNOWN 65535 UNKNOWN 65535", ""),
    ],
)
def test_address_that_ssh_reached(monkeypatch, connection, address):
    monkeypatch.setenv("SSH_CONNECTION", connection)
    assert report()["ssh_address"] == address


SHIMS = [
    ("echo Python 2.7.18", "2.7.18", "ended with exit code 0 in place of .* 'Python 2"),
    ("echo oops >&2; exit 3", "", "ended with exit code 3 in place of .* 'oops'"),
    ("kill -ILL $$", "", r"ended with signal 4 \(SIGILL\) in place of its versions"),
]


@pytest.mark.parametrize("text, version, words", SHIMS)
def test_interpreter_that_gives_no_versions_is_explained(
    tmp_path, text, version, words
):
    path = script(tmp_path, text)
    found = report(python=path)
    assert found["python"] == version
    assert re.match(f"{path} {words}", found["python_error"])


def test_interpreter_that_cannot_be_run_is_named(tmp_path):
    assert report()["python_error"] == (
        "/nosuch cannot be run: No such file or directory"
    )
    path = tmp_path / "python"
    path.write_text("")
    words = f"{path} cannot be run: Permission denied"
    assert report(python=str(path))["python_error"] == words


def test_interpreter_that_hangs_is_ended(tmp_path, monkeypatch):
    monkeypatch.setattr(interpreter, "LIMIT_S", 0.2)
    path = script(tmp_path, "exec sleep 100")
    words = f"{path} did not import MXNet within 0.2 s"
    assert report(python=path)["python_error"] == words


def test_interpreter_says_what_it_cannot_import(tmp_path):
    def facts(**files):
        for name, text in files.items():
            (tmp_path / f"{name}.py").write_text(text)
        env = {"PYTHONPATH": str(tmp_path)}
        found = report(python=sys.executable, env=env, cwd=str(tmp_path))
        names = ("package", "package_error", "mxnet", "mxnet_error", "numpy")
        return [found[name] for name in names] + [found["dist_kvstore"]]

    mxnet = "__version__ = '1.8.0'\nclass runtime:\n class Features:\n"
    mxnet += "  def is_enabled(self, name):\n   return name != 'DIST_KVSTORE'\n"
    files = {"odsgd_kvstore": "__version__ = '9.9'", "mxnet": mxnet}
    files["numpy"] = "print('noise')\n__version__ = '1.2.3'"
    assert facts(**files) == ["9.9", "", "1.8.0", "", "1.2.3", False]
    bad = {"odsgd_kvstore": "import nosuch", "mxnet": "raise OSError('libx.so')"}
    assert facts(**bad) == [
        *("", "ModuleNotFoundError: No module named 'nosuch'"),
        *("", "OSError: libx.so", "1.2.3", False),
    ]


def test_folder_and_program_are_looked_for(tmp_path):
    script(tmp_path, "true")
    (tmp_path / "file").write_text("")
    cwd, env = str(tmp_path), {"PATH": str(tmp_path)}

    def errors(**changes):
        found = report(**changes)
        return found["cwd_error"], found["program_error"]

    assert errors(cwd=cwd, env=env, program="python") == ("", "")
    assert errors(cwd=cwd, program="./python") == ("", "")
    assert errors(env=env, program="nosuch") == (
        "",
        f"the program 'nosuch' is not found in PATH, {cwd}",
    )
    assert errors(cwd=cwd, program="./nosuch") == (
        "",
        f"the program {cwd}/./nosuch does not exist",
    )
    for program in (f"{cwd}/file", "/"):
        words = f"the program {program} is not an executable file"
        assert errors(program=program) == ("", words)
    assert errors(cwd=f"{cwd}/no")[0] == f"the folder {cwd}/no does not exist"
    assert errors(cwd=f"{cwd}/file")[0] == f"{cwd}/file is not a folder"


@pytest.mark.parametrize("module", [probe, ports, interpreter])
def test_modules_can_be_read_by_an_old_python(module):
    text = Path(module.__file__).read_text(encoding="utf-8")
    assert "from __future__" not in text
    ast.parse(text, feature_version=(3, 6))
    own = re.findall(r"^from odsgd_kvstore\.(\S+) import", text, re.MULTILINE)
    assert set(own) <= {"launch.interpreter", "launch.ports", "launch.shims"}


def job(places, num_workers, num_servers):
    """The places as roles of MXNet's own."""
    env = {**os.environ, "DMLC_PS_ROOT_URI": places[0].ip, "PS_VERBOSE": "1"}
    env.update(DMLC_PS_ROOT_PORT=str(places[0].port), PYTHONUNBUFFERED="1")
    env.update(DMLC_NUM_WORKER=str(num_workers), DMLC_NUM_SERVER=str(num_servers))
    for place in places:
        own = {"DMLC_ROLE": place.kind, "DMLC_NODE_HOST": place.ip}
        own["PORT"] = str(place.port)
        code = WORKER if place.kind == "worker" else STOCK_SERVER
        argv = (sys.executable, "-c", code)
        yield Role(place.kind, place.rank, {**env, **own}, argv)


def test_ps_lite_gives_the_planned_ranks():
    """'127.0.0.2' > '127.0.0.10' as strings; 9xxx < 15xxx as numbers."""
    low = ports.find_ports({"ports": 2, "range": [9_300, 9_399]})["ports"]
    high = ports.find_ports({"ports": 9, "range": [FIRST, LAST]})["ports"]
    hosts = [Address("127.0.0.10", ""), Address("127.0.0.2", "")]
    seats = [Seat("scheduler", 0), Seat("server", 0), Seat("server", 1)]
    seats += [Seat("worker", 0), Seat("worker", 0), Seat("worker", 1)]
    places = number(seats, hosts, [low + high[:2], high[2:]])
    lines = []
    result = run_roles(
        list(job(places, 3, 2)),
        timeout=LIMIT_S,
        on_line=lambda role, text: lines.append((role.name, text)),
    )
    assert result.exit_code == 0, result.message
    said = sorted((name, text) for name, text in lines if text.startswith("rank "))
    assert said == [(f"worker {i}", f"rank {i}") for i in range(3)]
    # The scheduler's own words; servers are 8, 10 ..., workers 9, 11 ...
    node = r"assign rank=(\d+) to node .*role=(\w+).* ip=([\d.]+), port=(\d+)"
    assigned = [re.search(node, t) for name, t in lines if name == "scheduler"]
    ranks = {
        (kind, (int(number) - 8) // 2, ip, int(port))
        for number, kind, ip, port in (m.groups() for m in assigned if m)
    }
    assert ranks == {(p.kind, p.rank, p.ip, p.port) for p in places[1:]}
    assert [p.host for p in places[1:]] == [1, 0, 1, 0, 0]

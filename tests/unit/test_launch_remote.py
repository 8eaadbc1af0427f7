"""Command lines for other hosts, and the controller's side of an agent."""

import json
import os
import queue
import shlex
from multiprocessing import Pipe

import pytest

from odsgd_kvstore import __version__
from odsgd_kvstore.errors import LaunchError
from odsgd_kvstore.launch import Failure, ssh, variables
from odsgd_kvstore.launch.cluster import in_parallel
from odsgd_kvstore.launch.commands import Role
from odsgd_kvstore.launch.hosts import Host
from odsgd_kvstore.launch.logs import Logs
from odsgd_kvstore.launch.remote import RemoteAgent
from odsgd_kvstore.launch.signals import Stopped, StopSignals

LIMIT_S = 20


def options_of(argv):
    """The values of -o in a command, in order."""
    return [after for word, after in zip(argv, argv[1:]) if word == "-o"]


def test_ssh_never_asks_and_the_users_options_come_first():
    argv = ssh.ssh_argv(Host("node", "me", 2222), ("-F", "file"), "/a b/python")
    assert argv[:3] == ["ssh", "-F", "file"]
    assert "BatchMode=yes" in options_of(argv)
    end = argv.index("--")
    assert argv[end - 4 : end] == ["-p", "2222", "-l", "me"]
    start = 'exec(open(0,"rb",0,closefd=False).readline())'
    assert argv[end + 1 :] == ["node", f"exec '/a b/python' -c '{start}'"]


def test_ssh_leaves_user_and_port_to_its_own_configuration():
    argv = ssh.ssh_argv(Host("alias"), (), "python")
    assert "-p" not in argv and "-l" not in argv


@pytest.mark.parametrize(
    "name, target", [("node", "node:/d e/"), ("fe80::1", "[fe80::1]:/d e/")]
)
def test_rsync_copies_the_content_by_the_same_ssh(name, target):
    argv = ssh.rsync_argv(Host(name, port=22), ("-i", "my key"), "/here/", "/d e")
    assert argv[-3:] == ["--", "/here/", target]
    shell = shlex.split(argv[argv.index("-e") + 1])
    assert shell[:3] == ["ssh", "-i", "my key"] and "BatchMode=yes" in shell


def test_other_hosts_get_the_variables_of_the_job_and_not_the_key():
    given = ["PYTHONPATH", "LD_LIBRARY_PATH", "VIRTUAL_ENV", "MXNET_A", "DMLC_B"]
    given += ["PS_C", "OMP_NUM_THREADS", "ODSGD_DELAY"]
    kept = ["HOME", "PATH", "SECRET", "ODSGD_KEY", "ODSGD_KEY_FILE", "PORT"]
    kept += ["DMLC_WORKER_ID", "DMLC_LOCAL", "DMLC_INTERFACE", "ODSGD_LOCAL_RANK"]
    assert sorted(variables.forwarded(dict.fromkeys(given + kept, "1"))) == sorted(
        given
    )


@pytest.fixture
def host():
    """A host, and the agent's end of its connection."""
    ours, theirs = Pipe()
    remote = RemoteAgent("node", ours, ours, LIMIT_S, lambda: "it is gone")
    yield remote, theirs
    theirs.close()
    remote.close(LIMIT_S)


def say(connection, **message):
    connection.send_bytes(json.dumps(message).encode())


def hear(connection, op):
    """The next message that is not one of those between."""
    while connection.poll(LIMIT_S):
        message = json.loads(connection.recv_bytes())
        if message["op"] == op:
            return message
    raise AssertionError(f"no {op}")


def test_a_host_with_another_version_is_refused(host):
    remote, agent = host
    say(agent, op="hello", version="0.0.1", pid=1)
    with pytest.raises(LaunchError, match="version 0.0.1 there, and " + __version__):
        remote.greet(LIMIT_S)


def test_a_host_without_the_package_is_refused(host):
    remote, agent = host
    say(agent, op="fatal", error="ModuleNotFoundError: x", python="3.6.9")
    with pytest.raises(LaunchError, match="node: .*Python 3.6.9 .*PYTHONPATH"):
        remote.greet(LIMIT_S)


def test_a_lost_host_ends_every_wait_with_the_reason(host):
    remote, agent = host
    agent.close()
    for wait in (lambda: remote.greet(LIMIT_S), lambda: remote.ask("report", LIMIT_S)):
        with pytest.raises(LaunchError, match="node: it is gone"):
            wait()


def test_a_silent_host_counts_as_lost():
    ours, theirs = Pipe()
    remote = RemoteAgent("node", ours, ours, 0.1)
    say(theirs, op="hello", version=__version__, pid=1)
    remote.greet(LIMIT_S)
    say(theirs, op="alive")
    with pytest.raises(LaunchError, match="nothing was heard of this host for 0.1 s"):
        remote.ask("report", LIMIT_S)
    theirs.close()


def test_what_the_agent_cannot_do_is_an_error(host):
    remote, agent = host
    answers = queue.SimpleQueue()

    def ask(_):
        with pytest.raises(LaunchError) as error:
            remote.ask("report", LIMIT_S)
        answers.put(str(error.value))

    def answer(_):
        number = hear(agent, "report")["id"]
        say(agent, op="answer", id=number, error="no such thing", is_missing=False)

    in_parallel(lambda function: function(None), [ask, answer])
    assert answers.get() == "node: no such thing"


def test_a_role_is_started_heard_and_lost(host):
    remote, agent = host
    events, lines = queue.SimpleQueue(), []
    role = Role("worker", 1, {"ODSGD_KEY": "k"}, ("a", "b"), host="node", cwd="/d")

    def serve(_):
        request = hear(agent, "start")
        say(agent, op="answer", id=request["id"], value={"pid": 12})
        say(agent, op="output", role="worker 1", data="aGkK")
        return request["request"]

    process, request = in_parallel(
        lambda function: function(None), [lambda _: remote.start(role, events), serve]
    )
    assert (request["argv"], request["cwd"]) == (["a", "b"], "/d")
    assert request["env"] == {"ODSGD_KEY": "k"}
    assert {"ODSGD_KEY_FILE", "DMLC_WORKER_ID", "PORT"} <= set(request["unset"])
    assert process.pid == 12 and process.lives()
    process.send(15)
    signal = hear(agent, "signal")
    assert (signal["number"], signal["group"], signal["role"]) == (15, True, "worker 1")
    agent.close()
    process.read(-1, lines.append)
    assert lines == [b"hi\n"]
    assert events.get(timeout=LIMIT_S) == ("exit", (process, 255))
    assert process.loss == "it is gone" and not process.lives()


def test_first_error_of_parallel_calls_ends_the_wait():
    never = queue.SimpleQueue()

    def call(item):
        if item == 2:
            raise LaunchError("two")
        never.get()

    with pytest.raises(LaunchError, match="two"):
        in_parallel(call, [1, 2, 3])
    for _ in range(2):
        never.put(None)


def test_a_signal_ends_the_wait_for_parallel_calls():
    stop, never = StopSignals(), queue.SimpleQueue()
    stop.ask(15)
    with pytest.raises(Stopped):
        in_parallel(lambda item: never.get(), [1], stop)
    assert stop.number == 15
    never.put(None)


def test_failures_name_the_host():
    lost = Failure.of_loss("worker 1", 12, "it is gone", [], "node")
    assert lost.exit_code == 255
    assert str(lost) == (
        "worker 1 (pid 12 on node) was lost: it is gone; it wrote nothing"
    )


def test_logs_that_cannot_be_written_are_refused(tmp_path):
    (tmp_path / "file").write_text("")
    roles = [Role("worker", 0, {}, ("a",))]
    with pytest.raises(LaunchError, match="--log-dir .*give a folder that you can"):
        Logs(str(tmp_path / "file" / "logs"), roles, print)


def test_logs_keep_what_is_no_unicode(tmp_path):
    role, seen = Role("worker", 0, {}, ("a",)), []
    folder = os.path.join(tmp_path, "logs")
    with Logs(folder, [role], lambda role, text: seen.append(text)) as logs:
        logs.write(role, "a\udcffb")
        path = logs.paths["worker 0"]
    with open(path) as file:
        assert file.read() == "a\\udcffb\n"
    assert seen == ["a\udcffb"]


def test_what_a_shell_says_before_the_mark_is_kept_apart():
    read, write = os.pipe()
    stream = ssh._Stream(read, b"\nmark\n")
    text = b"x" * 100_000 + b"\nhello"
    os.write(write, text[:60_000])
    os.write(write, text[60_000:] + b"\nma")
    os.write(write, b"rk\nfirst")
    os.close(write)
    with open(stream.fd, "rb") as file:
        assert file.read() == b"first"
    assert stream.before.endswith(b"hello") and len(stream.before) <= ssh.MOST_BEFORE
    os.close(read)

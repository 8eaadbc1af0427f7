"""However a job over ssh ends, nothing of it is left on a host, and its exit tells."""

import os
import re
import signal
import uuid

import pytest
from cluster_jobs import LAUNCH, MARK, environment, train, workers
from test_ssh_training import TWO
from watch import wait_until, wait_until_none

LONG = ("--steps", "1000000")
BOTH = ["alpha", "beta"]
# All roles end within 30 s after the launcher, says the page; here they start to look
# for it, and are looked for, on a busy machine.
GONE_S = 30 + 10


def long_job(over_ssh):
    """A job that trains, and would do so for hours."""
    mark = uuid.uuid4().hex
    job = over_ssh(BOTH, *TWO, *train(*LONG), env=environment(**{MARK: mark}))
    job.mark = mark
    job.wait_for("TRAINING 0")
    job.wait_for("TRAINING 1")
    return job


@pytest.mark.parametrize("name", ["SIGKILL", "SIGINT", "SIGTERM", "SIGHUP"])
def test_a_signal_to_the_launcher(over_ssh, hosts, name):
    script = "sh -c 'trap \"\" TERM INT HUP; sleep 1000; :' & echo on; wait"
    job = over_ssh(BOTH, *TWO, "--", "sh", "-c", script)  # A child that won't go.
    job.wait_for(r"^\[worker 0.*\] on$")
    job.wait_for(r"^\[worker 1.*\] on$")
    assert len(hosts.processes()) >= 7
    number = getattr(signal, name)
    job.popen.send_signal(number)
    result = job.finish()
    assert result.code == (-9 if name == "SIGKILL" else 128 + number), result
    wait_until_none(hosts.processes, "on the hosts", GONE_S)


def test_kill_of_the_launcher_on_loopback(loopback, start, tmp_path):
    path = tmp_path / "hostfile"
    path.write_text(f"127.0.0.1:{loopback.port}\n")
    ssh = ("-H", path, "--ssh-opts", loopback.ssh_opts)
    job = start(*LAUNCH, *ssh, *TWO, "--", "sh", "-c", "echo on; sleep 1000; :")
    job.wait_for(r"^\[worker 1.*\] on$")
    assert len(loopback.processes()) >= 5
    job.popen.kill()
    job.finish()
    wait_until_none(loopback.processes, "on loopback", GONE_S)


def test_a_signal_while_the_hosts_are_asked(over_ssh, hosts):
    job = over_ssh([*BOTH], *TWO, *train(*LONG))
    wait_until(hosts.processes, "the first agent")
    job.popen.send_signal(signal.SIGINT)
    assert job.finish().code == 130


def test_a_killed_worker_is_named_with_its_host(over_ssh, hosts):
    job = long_job(over_ssh)
    os.kill(workers(job.mark)[1], signal.SIGKILL)
    result = job.finish()
    assert result.code == 137, result
    named = re.search(r"odsgd-launch: (.*)", result.errors)[1]
    for text in ("worker 1", "beta", "signal 9 (SIGKILL)"):
        assert text in named


def test_the_exit_status_is_that_of_the_first_role_to_fail(over_ssh):
    script = 'test "$DMLC_WORKER_ID" = 0 && { sleep 1000; :; }; echo last words; exit 7'
    result = over_ssh(BOTH, *TWO, "--", "sh", "-c", script).finish()
    assert result.code == 7, result
    for text in ("worker 1", "beta", "failed with exit code 7", "last words"):
        assert text in result.errors


def test_the_time_limit(over_ssh):
    options = ("--timeout", "8")
    result = over_ssh(BOTH, *TWO, *options, "--", "sleep", "1000").finish()
    assert result.code == 124, result
    assert "--timeout" in result.errors


def test_a_host_that_disappears(over_ssh, hosts):
    job = long_job(over_ssh)
    with hosts["beta"].vanished():
        result = job.finish()
        assert result.code not in (0, -9), result
        assert "beta" in result.errors
        wait_until_none(hosts.processes, "on the hosts", GONE_S)


def test_of_two_jobs_one_is_stopped_and_the_other_survives(over_ssh, hosts, expected):
    first = long_job(over_ssh)
    second = over_ssh(BOTH, *TWO, *train())
    second.wait_for("TRAINING 0")
    first.popen.send_signal(signal.SIGTERM)
    assert first.finish().code == 143
    second.finish().check(expected)

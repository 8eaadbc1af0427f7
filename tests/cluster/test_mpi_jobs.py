"""Whole trainings under Open MPI and MPICH: inside of mpirun, and by calling it."""

import os
import re
import signal
import uuid

import pytest
from bed_tools import need, or_skip, run, which
from cluster_jobs import LAUNCH, LIMIT_S, MARK, environment, train, workers
from watch import marked, wait_until_none

MPI = (*LAUNCH, "--launcher", "mpi", "-n", "2", "-s", "1")
LONG = ("--steps", "1000000")
SOON = {"limit_s": 100}


class Mpi:
    """One of the two systems."""

    def __init__(self, name, folder):
        self.name = name
        need(f"mpirun.{name}")
        self.program = which(f"mpirun.{name}")
        self.mark = uuid.uuid4().hex
        self.env = environment(**{MARK: self.mark}, TMPDIR=str(folder))
        self.run = [self.program]
        if name == "openmpi":
            self.run.append("--oversubscribe")
            # It refuses root otherwise, who alone is in a container.
            self.env.update(OMPI_ALLOW_RUN_AS_ROOT="1")
            self.env.update(OMPI_ALLOW_RUN_AS_ROOT_CONFIRM="1")
            self.env.update(OMPI_MCA_rmaps_base_oversubscribe="1")
        # Found as plain 'mpirun', whichever of the two the machine prefers. No link:
        # MPICH's looks for its other programs beside itself.
        (folder / "bin").mkdir()
        script = folder / "bin/mpirun"
        script.write_text(f'#!/bin/sh\nexec {self.program} "$@"\n')
        script.chmod(0o755)
        self.env["PATH"] = f"{folder / 'bin'}:{self.env['PATH']}"
        with or_skip(self.program, folder / "no log"):
            run(*self.ranks(2, "true"), env=self.env)

    def processes(self):
        """What runs here of its jobs."""
        return marked(MARK, self.mark)

    def ranks(self, count, *command):
        """The command of `count` ranks."""
        return [*self.run, "-n", str(count), *command]


@pytest.fixture(params=["openmpi", "mpich"])
def mpi(request, tmp_path):
    """A system; at the end of the test no process of it is left."""
    system = Mpi(request.param, tmp_path)
    yield system
    wait_until_none(system.processes, "here", LIMIT_S)


def test_inside_of_mpirun(mpi, start, expected):
    job = start(*mpi.ranks(4, *MPI, *train()), env=mpi.env)
    reports = job.finish().check(expected)
    assert [reports[rank]["env"]["ODSGD_LOCAL_RANK"] for rank in (0, 1)] == ["0", "1"]


def test_the_launcher_calls_mpirun(mpi, start, expected):
    job = start(*MPI, *train(), env={**mpi.env, "ODSGD_KEY": "k" * 40})
    assert not job.shows("k" * 40)
    job.finish().check(expected)


def test_two_servers_and_the_arguments_as_given(mpi, start, expected):
    words = ["two words", "it's", '"', "$HOME", "*", ""]
    argv = [*MPI[:-1], "2", *train("--", *words)]
    reports = start(*mpi.ranks(5, *argv), env=mpi.env).finish().check(expected)
    assert [report["argv"][1:] for report in reports.values()] == [words] * 2


@pytest.mark.parametrize("count", [1, 3, 5])
def test_a_wrong_number_of_ranks(mpi, start, count):
    result = start(*mpi.ranks(count, *MPI, *train()), env=mpi.env, **SOON).finish()
    assert result.code not in (0, -9), result
    assert result.reports() == {}
    assert re.search(r"mpirun -n 4 .*--launcher mpi", result.output + result.errors)


def test_the_exit_status_is_that_of_the_first_role_to_fail(mpi, start):
    argv = [*MPI, "--", "sh", "-c", "echo last words; exit 7"]
    result = start(*mpi.ranks(4, *argv), env=mpi.env).finish()
    assert result.code == 7, result
    assert "failed with exit code 7" in result.errors
    assert "last words" in result.errors


def test_a_killed_worker(mpi, start):
    job = start(*mpi.ranks(4, *MPI, *train(*LONG)), env=mpi.env)
    job.wait_for("TRAINING 1")
    os.kill(workers(mpi.mark)[1], signal.SIGKILL)
    result = job.finish()
    assert result.code not in (0, -9), result
    text = result.output + result.errors
    assert re.search(r"odsgd-launch: .*worker 1.*signal 9 \(SIGKILL\)", text), result


@pytest.mark.parametrize("name", ["SIGKILL", "SIGTERM", "SIGINT"])
def test_a_signal_to_mpirun(mpi, start, name):
    job = start(*mpi.ranks(4, *MPI, *train(*LONG)), env=mpi.env)
    job.wait_for("TRAINING 1")
    job.popen.send_signal(getattr(signal, name))
    result = job.finish()
    assert result.code != 0, result
    wait_until_none(mpi.processes, "here", LIMIT_S)


def test_kill_of_the_launcher_that_called_mpirun(mpi, start):
    job = start(*MPI, *train(*LONG), env=mpi.env)
    job.wait_for("TRAINING 1")
    job.popen.kill()
    job.finish()
    wait_until_none(mpi.processes, "here", LIMIT_S)


def test_two_hosts_by_a_host_file(mpi, start, hosts, expected, tmp_path):
    lines = {"openmpi": "{} slots=2\n", "mpich": "{}:2\n"}[mpi.name]
    path = tmp_path / "hostfile"
    addresses = [hosts[name].address for name in ("alpha", "beta")]
    path.write_text("".join(lines.format(address) for address in addresses))
    # How the two programs take options for their own ssh, and the network to use.
    options = f"-F {hosts.config}"
    env = {**mpi.env, "OMPI_MCA_plm_rsh_args": options}
    env.update(HYDRA_LAUNCHER_EXTRA_ARGS=options, HYDRA_IFACE=hosts.bridge)
    reports = start(*MPI, "-H", path, *train(), env=env).finish().check(expected)
    # Ranks 0 and 1 are on alpha, the two workers on beta.
    assert [reports[rank]["host"] for rank in (0, 1)] == ["beta", "beta"]
    assert reports[0]["env"]["DMLC_PS_ROOT_URI"] == hosts["alpha"].address
    assert reports[0]["env"]["DMLC_NODE_HOST"] == hosts["beta"].address
    wait_until_none(hosts.processes, "on the hosts", LIMIT_S)

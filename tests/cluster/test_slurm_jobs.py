"""Whole trainings under Slurm: native srun, inside of salloc, in a batch script."""

import os
import re
import shlex
import signal
import uuid

import pytest
from cluster_jobs import LAUNCH, LIMIT_S, MARK, environment, train, workers
from watch import wait_until_none

SLURM = (*LAUNCH, "--launcher", "slurm", "-n", "2", "-s", "1")
LONG = ("--steps", "1000000")
SOON = {"limit_s": 100}


@pytest.fixture
def run(slurm, start):
    """Start programs of Slurm's; at the end no job is left."""
    mark = uuid.uuid4().hex
    env = environment(**{MARK: mark}, **slurm.env)

    def start_job(*argv, key="", **options):
        more = {"ODSGD_KEY": key} if key else {}
        return start(*argv, env={**env, **more}, **options)

    start_job.mark = mark
    yield start_job
    start.close()
    wait_until_none(slurm.processes, "in Slurm", LIMIT_S)


def test_native_srun(run, expected):
    job = run("srun", "--ntasks=4", *SLURM, *train())
    reports = job.finish().check(expected)
    assert [reports[rank]["env"]["ODSGD_LOCAL_RANK"] for rank in (0, 1)] == ["0", "1"]


def test_inside_of_salloc(run, expected):
    job = run("salloc", "--ntasks=4", *SLURM, *train(), key="k" * 40)
    assert not job.shows("k" * 40)
    job.finish().check(expected)


def test_a_batch_script(run, slurm, expected, tmp_path):
    script, output = tmp_path / "job.sh", tmp_path / "output"
    lines = ["#!/bin/sh", "#SBATCH --ntasks=4", f"#SBATCH --output={output}"]
    script.write_text("\n".join([*lines, shlex.join([*SLURM, *train()])]) + "\n")
    result = run("sbatch", "--wait", script).finish()
    result.output += output.read_text()
    result.check(expected)


def test_a_wrong_number_of_tasks(run):
    result = run("srun", "--ntasks=3", *SLURM, *train(), **SOON).finish()
    assert result.code not in (0, -9), result
    assert result.reports() == {}
    assert re.search(
        r"srun --ntasks=4 .*--launcher slurm", result.output + result.errors
    )


def test_the_exit_status_is_that_of_the_first_role_to_fail(run):
    argv = [*SLURM, "--", "sh", "-c", "echo last words; exit 7"]
    result = run("srun", "--ntasks=4", *argv).finish()
    assert result.code == 7, result
    assert "failed with exit code 7" in result.errors
    assert "last words" in result.errors


def test_a_killed_worker(run):
    job = run("srun", "--ntasks=4", *SLURM, *train(*LONG))
    job.wait_for("TRAINING 1")
    os.kill(workers(run.mark)[1], signal.SIGKILL)
    result = job.finish()
    assert result.code not in (0, -9), result
    text = result.output + result.errors
    assert re.search(r"odsgd-launch: .*worker 1.*signal 9 \(SIGKILL\)", text), result


def test_scancel(run, slurm):
    job = run("srun", "--ntasks=4", *SLURM, *train(*LONG))
    job.wait_for("TRAINING 1")
    slurm.run("scancel", "--state=RUNNING")
    assert job.finish().code != 0
    wait_until_none(slurm.processes, "in Slurm", LIMIT_S)


def test_kill_of_srun(run, slurm):
    job = run("srun", "--ntasks=4", *SLURM, *train(*LONG))
    job.wait_for("TRAINING 1")
    job.popen.send_signal(signal.SIGKILL)
    job.finish()
    wait_until_none(slurm.processes, "in Slurm", LIMIT_S)


def test_two_nodes(slurm_of_two, start, hosts, expected):
    env = environment(**slurm_of_two.env)
    job = start("srun", "--ntasks=4", "--ntasks-per-node=2", *SLURM, *train(), env=env)
    reports = job.finish().check(expected)
    # Tasks 0 and 1 are on alpha, the two workers on beta.
    assert [reports[rank]["host"] for rank in (0, 1)] == ["beta", "beta"]
    env = reports[0]["env"]
    assert env["DMLC_PS_ROOT_URI"] == hosts["alpha"].address
    assert env["DMLC_NODE_HOST"] == hosts["beta"].address

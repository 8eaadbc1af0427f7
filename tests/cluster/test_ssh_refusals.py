"""What cannot work over ssh is an error before anything starts, and is said once."""

import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from bed_tools import need
from cluster_jobs import LAUNCH, ROOT, environment, train
from test_ssh_training import TWO

# Long enough for busy machines, too short for a prompt or a wait without an end.
SOON = {"limit_s": 100}


def refuse(job, *texts):
    """The job ended with an error that has the texts; no role was started."""
    result = job.finish()
    assert result.code not in (0, -9), result
    assert result.reports() == {} and "[worker" not in result.output
    for text in texts:
        assert text in result.errors, result
    assert "Traceback" not in result.errors
    return result


@pytest.mark.parametrize(
    "alias, reason, advice",
    [
        ("changed-key", "Host key verification failed", "by hand (ssh changed-key)"),
        ("unknown-key", "Host key verification failed", "by hand (ssh unknown-key)"),
        ("no-key", "Permission denied", "ssh-copy-id no-key"),
        ("absent", "No route to host", "check with ssh absent true"),
        ("no-such-name.invalid", "Could not resolve hostname", "check the name in the"),
        ("alpha:2223", "Connection refused", "check the port in the host file"),
    ],
)
def test_no_connection(over_ssh, alias, reason, advice):
    job = over_ssh(["alpha", alias], *TWO, *train(), **SOON)
    refuse(job, f"{alias}: the connection ended", reason, advice)


def test_a_host_that_swallows_packets(over_ssh, hosts):
    with hosts["beta"].firewall("meta l4proto tcp"):
        job = over_ssh(["alpha", "beta"], *TWO, *train(), **SOON)
        refuse(
            job, "beta: the connection ended", "timed out", "check with ssh beta true"
        )


def test_an_old_version_on_a_host(over_ssh, hosts, tmp_path):
    old = tmp_path / "_version.py"
    old.write_text('"""Old."""\n\n__version__ = "0.0.1"\n')
    with hosts["beta"].covered(ROOT / "odsgd_kvstore/_version.py", old):
        job = over_ssh(["alpha", "beta"], *TWO, *train(), **SOON)
        refuse(job, "beta", "0.0.1", "the same version")


def test_no_package_on_a_host(over_ssh, hosts):
    with hosts["beta"].covered(ROOT / "odsgd_kvstore"):
        job = over_ssh(["alpha", "beta"], *TWO, *train(), **SOON)
        refuse(job, "beta", "odsgd_kvstore", "install the same version")


def test_no_mxnet_on_a_host(over_ssh, hosts):
    folder = Path(find_spec("mxnet").origin).parent
    with hosts["beta"].covered(folder):
        job = over_ssh(["alpha", "beta"], *TWO, *train(), **SOON)
        result = refuse(job, "beta", "MXNet")
    assert "alpha  ok" in result.output
    assert "beta   FAILED" in result.output


def test_no_interpreter_on_a_host(over_ssh, hosts):
    with hosts["beta"].covered(Path(sys.executable).parent):
        job = over_ssh(["alpha", "beta"], *TWO, *train(), **SOON)
        refuse(job, "beta", sys.executable, "same path")


def test_another_mxnet_on_a_host(over_ssh, hosts, tmp_path):
    real = Path(find_spec("mxnet").origin).with_name("libinfo.py")
    other = tmp_path / "libinfo.py"
    other.write_text(real.read_text().replace('"1.9.1"', '"1.8.0"'))
    with hosts["beta"].covered(real, other):
        job = over_ssh(["alpha", "beta"], *TWO, *train(), **SOON)
        refuse(job, "beta", "MXNet 1.8.0", "1.9.1", "the same version")


def test_another_python_on_a_host(over_ssh, hosts, tmp_path):
    here, there = tmp_path / "sitecustomize.py", tmp_path / "there.py"
    here.touch()
    there.write_text("import sys\nsys.version_info = (3, 6, 9, 'final', 0)\n")
    env = environment()
    env["PYTHONPATH"] += f":{tmp_path}"
    with hosts["beta"].covered(here, there):
        job = over_ssh(["alpha", "beta"], *TWO, *train(), env=env, **SOON)
        refuse(job, "beta", "Python 3.6.9", "3.8 to 3.12")


def test_no_working_folder_on_a_host(over_ssh, hosts, tmp_path):
    folder = tmp_path / "only here"
    folder.mkdir()
    with hosts["beta"].covered(tmp_path):
        job = over_ssh(["alpha", "beta"], *TWO, *train(), cwd=folder, **SOON)
        refuse(job, "beta", str(folder), "--sync-dst-dir")


def test_no_program_on_a_host(over_ssh, hosts, tmp_path):
    program = tmp_path / "mine" / "train"
    program.parent.mkdir()
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    with hosts["beta"].covered(program.parent):
        job = over_ssh(["alpha", "beta"], *TWO, "--", program, **SOON)
        refuse(job, "beta", str(program))


def test_a_folder_that_cannot_be_copied_to(over_ssh, hosts, tmp_path):
    need("rsync")
    (tmp_path / "train.py").touch()
    sync = ("--sync-dst-dir", "/proc/no folder")
    job = over_ssh(["alpha", "beta"], *TWO, *sync, *train(), cwd=tmp_path, **SOON)
    refuse(job, "/proc/no folder", "alpha", "rsync")


def test_a_host_file_that_is_not_there(start, tmp_path):
    job = start(*LAUNCH, "-H", "no such file", *TWO, *train(), cwd=tmp_path, **SOON)
    refuse(job, str(tmp_path / "no such file"))

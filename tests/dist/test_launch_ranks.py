"""Ranks from the variables that mpirun and srun set, and the commands that set them."""

import os
import shutil
import signal
import socket
import subprocess
import sys

import pytest

from odsgd_kvstore.errors import LaunchError
from odsgd_kvstore.launch import mpi, mpi_broadcast, ranks, slurm
from odsgd_kvstore.launch.ranks import Rank, check_size, of_environment

LIMIT_S = 60
HERE = socket.gethostname()
# Recorded, shortened: Open MPI 4.1.4, MPICH 4.0.2 and Slurm 22.05.8.
OPEN_MPI = (
    "OMPI_COMMAND=python OMPI_COMM_WORLD_LOCAL_RANK=1 OMPI_COMM_WORLD_LOCAL_SIZE=3 "
    "OMPI_COMM_WORLD_NODE_RANK=1 OMPI_COMM_WORLD_RANK=2 OMPI_COMM_WORLD_SIZE=3 "
    "OMPI_UNIVERSE_SIZE=2 PMIX_RANK=2 PMIX_NAMESPACE=2146304001"
)
MPICH = (
    "HYDI_CONTROL_FD=7 MPIR_CVAR_CH3_INTERFACE_HOSTNAME=vm MPI_LOCALNRANKS=3 "
    "MPI_LOCALRANKID=1 PMI_FD=8 PMI_RANK=1 PMI_SIZE=3"
)
JOB = "SLURM_JOB_ID=1 SLURM_JOBID=1 SLURM_JOB_NODELIST=n[1-3] SLURM_NODELIST=n[1-3] "
SRUN = JOB + (
    "SLURMD_NODENAME=n2 SLURM_LOCALID=1 SLURM_NODEID=1 SLURM_NPROCS=4 SLURM_NTASKS=4 "
    "SLURM_PROCID=3 SLURM_STEPID=0 SLURM_STEP_ID=0 SLURM_STEP_NODELIST=n[2-3] "
    "SLURM_STEP_NUM_NODES=2 SLURM_STEP_NUM_TASKS=4 SLURM_STEP_TASKS_PER_NODE=2(x2)"
)
SALLOC = JOB + "SLURM_NPROCS=3 SLURM_NTASKS=3 SLURM_TASKS_PER_NODE=3"
SBATCH = SALLOC + " SLURM_PROCID=0 SLURM_LOCALID=0 SLURM_NODEID=0 SLURM_GTIDS=0"
# The shell that salloc gives with LaunchParameters=use_interactive_step.
INTERACTIVE = SBATCH + (
    " SLURM_PTY_PORT=35933 SLURM_STEP_ID=4294967290 SLURM_STEP_NUM_TASKS=1 "
    "SLURM_STEP_NODELIST=n1 SLURM_STEP_NUM_NODES=1"
)
PTY = JOB + (  # srun --pty bash
    "SLURM_NTASKS=1 SLURM_NPROCS=1 SLURM_PROCID=0 SLURM_PTY_PORT=44833 SLURM_STEP_ID=0 "
    "SLURM_STEP_NUM_TASKS=1 SLURM_STEP_NODELIST=n1"
)
# A script that was given to sbatch inside of a step of two tasks.
NESTED = SBATCH + " SLURM_STEP_ID=0 SLURM_STEP_NUM_TASKS=2 SLURM_STEP_NODELIST=n1"
PMI2 = SRUN + " PMI_FD=13 PMI_JOBID=4.0 PMI_RANK=3 PMI_SIZE=4"  # srun --mpi=pmi2
# Hydra and Open MPI start one process per node by srun.
HYDRA_BY_SRUN = SRUN + " PMI_RANK=5 PMI_SIZE=6 MPI_LOCALRANKID=2"
ORTED_BY_SRUN = SRUN + " " + OPEN_MPI


def env(text, **more):
    """Variables from 'NAME=VALUE ...'."""
    return {**dict(pair.split("=", 1) for pair in text.split()), **more}


@pytest.mark.parametrize(
    ("launcher", "text", "expected"),
    [
        ("mpi", OPEN_MPI, Rank(2, 3, HERE, "Open MPI", 1)),
        ("mpi", MPICH, Rank(1, 3, HERE, "MPICH", 1)),
        ("mpi", PMI2, Rank(3, 4, HERE, "MPICH", 0)),
        ("mpi", HYDRA_BY_SRUN, Rank(5, 6, HERE, "MPICH", 2)),
        ("mpi", ORTED_BY_SRUN, Rank(2, 3, HERE, "Open MPI", 1)),
        ("mpi", SRUN + " PMIX_RANK=3", Rank(3, 4, HERE, "Open MPI", 1)),
        ("slurm", SRUN, Rank(3, 4, "n2", "Slurm", 1)),
        ("slurm", PMI2, Rank(3, 4, "n2", "Slurm", 1)),
    ],
)
def test_rank_is_what_the_named_launcher_says(launcher, text, expected):
    assert of_environment(launcher, env(text)) == expected


@pytest.mark.parametrize("launcher", ["mpi", "slurm"])
@pytest.mark.parametrize(
    "text", ["HOME=/h", SALLOC, SBATCH, INTERACTIVE, PTY, NESTED, SBATCH + " PMI_RANK="]
)
def test_there_is_no_rank_in_a_shell_or_a_script(launcher, text):
    assert of_environment(launcher, env(text)) is None


@pytest.mark.parametrize("text", [OPEN_MPI, MPICH, HYDRA_BY_SRUN, ORTED_BY_SRUN])
def test_slurm_refuses_what_mpirun_started(text):
    with pytest.raises(LaunchError, match="was started by mpirun; give --launcher mpi"):
        of_environment("slurm", env(text))


def test_mpi_refuses_a_step_without_mpi():
    with pytest.raises(
        LaunchError, match="started by srun without MPI; give --launcher"
    ):
        of_environment("mpi", env(SRUN))


@pytest.mark.parametrize(
    ("launcher", "text", "message"),
    [
        ("mpi", "OMPI_COMM_WORLD_RANK=x OMPI_COMM_WORLD_SIZE=2", "_RANK is 'x'"),
        ("mpi", "OMPI_COMM_WORLD_RANK=0", "OMPI_COMM_WORLD_SIZE is not"),
        ("mpi", "PMI_RANK=-1 PMI_SIZE=2", "PMI_RANK is '-1'.*at least 0"),
        ("mpi", "PMI_RANK=2 PMI_SIZE=2", "PMI_RANK is 2 and PMI_SIZE is 2"),
        ("mpi", "PMI_RANK=1 PMI_SIZE=2 MPI_LOCALRANKID=²", "MPI_LOCALRANKID is '²'"),
        ("slurm", SRUN + " SLURM_STEP_ID=a", "SLURM_STEP_ID is 'a'"),
        ("slurm", SRUN + " SLURM_PROCID=9", "SLURM_PROCID is 9"),
    ],
)
def test_malformed_variables_are_named(launcher, text, message):
    with pytest.raises(LaunchError, match=message):
        of_environment(launcher, env(text))


@pytest.mark.parametrize(
    ("system", "message"),
    [
        (
            "Slurm",
            r"srun started 1 rank, .* Type: srun --ntasks=4 odsgd-launch -n 2 'a b'$",
        ),
        (
            "MPICH",
            "mpirun started 1 rank, .* Type: mpirun -n 4 odsgd-launch -n 2 'a b'",
        ),
    ],
)
def test_wrong_size_gives_the_command_to_type(system, message):
    argv = ["odsgd-launch", "-n", "2", "a b"]
    check_size(Rank(0, 4, HERE, system), 2, 1, argv)
    with pytest.raises(LaunchError, match=message):
        check_size(Rank(0, 1, HERE, system), 2, 1, argv)


def test_mpirun_command_of_open_mpi_has_names_and_no_values():
    argv = mpi.mpirun_argv(
        "/o/mpirun", "Open MPI", 4, ["odsgd-launch", "x"],
        names=["ODSGD_KEY", "MXNET_A"], hostfile="h", oversubscribe=True,
    )  # fmt: skip
    expected = (
        "/o/mpirun -n 4 --bind-to none --hostfile h --oversubscribe -x MXNET_A "
        "-x ODSGD_KEY odsgd-launch x"
    )
    assert " ".join(argv) == expected


def test_mpirun_command_of_mpich():
    argv = mpi.mpirun_argv("m", "MPICH", 4, ["x"], names=["ODSGD_KEY"], hostfile="h")
    assert argv == ["m", "-n", "4", "-f", "h", "x"]
    assert mpi.mpirun_argv("m", "MPICH", 4, ["x"]) == ["m", "-n", "4", "x"]


@pytest.mark.parametrize(
    ("hostfile", "text", "cores", "expected"),
    [
        (None, "A=", 2, True),
        (None, "A=", 4, False),
        ("hosts", "A=", 2, False),
        (None, SALLOC, 2, False),
    ],
)
def test_oversubscribe_only_where_nobody_set_a_limit(hostfile, text, cores, expected):
    assert mpi.needs_oversubscribe(4, hostfile, env(text), cores) is expected


def test_srun_command():
    common = ["srun", "--ntasks=4", "--export=ALL", "--kill-on-bad-exit=1"]
    common += ["--mpi=none"]
    assert slurm.srun_argv(4, ["x"]) == [*common, "x"]
    cpus = env(SALLOC, SLURM_CPUS_PER_TASK="3")
    assert slurm.srun_argv(4, ["x"], cpus) == [*common, "--cpus-per-task=3", "x"]
    assert slurm.srun_argv(4, ["x"], env(PTY)) == [*common, "--overlap", "x"]


@pytest.mark.parametrize(
    ("says", "kind"),
    [
        ("mpirun.openmpi (OpenRTE) 4.1.4", "Open MPI"),
        ("mpirun (Open MPI) 5.0.3", "Open MPI"),
        ("HYDRA build details:\n    Version: 4.0.2", "MPICH"),
        ("Intel(R) MPI Library for Linux* OS, Version 2021.9", "MPICH"),
    ],
)
def test_mpirun_is_told_by_its_version(tmp_path, says, kind):
    program = script(tmp_path / "mpirun", f"cat <<'END'\n{says}\nEND")
    path = f"{tmp_path}:{os.defpath}"
    assert mpi.find_mpirun({"PATH": path}) == (str(program), kind)


def test_mpirun_that_is_missing_or_unknown(tmp_path):
    with pytest.raises(LaunchError, match="neither mpirun nor mpiexec is in PATH"):
        mpi.find_mpirun({"PATH": str(tmp_path)})
    script(tmp_path / "mpiexec", "echo MyMPI 3")
    with pytest.raises(LaunchError, match="says 'MyMPI 3'; known are Open MPI and"):
        mpi.find_mpirun({"PATH": f"{tmp_path}"})


def test_libraries_of_the_mpirun_in_path_come_before_those_of_the_system(tmp_path):
    for name in ("bin/mpirun", "lib/libmpi.so.40", "lib64/libmpich.so.12"):
        (tmp_path / name).parent.mkdir()
        script(tmp_path / name, "true")
    environ = {"PATH": str(tmp_path / "bin")}
    found = mpi.find_libraries("Open MPI", environ)
    assert str(tmp_path / "lib/libmpi.so.40") in found
    assert found[-4:] == ["libmpi.so.40", "libmpi.so.20", "libmpi.so.12", "libmpi.so"]
    found = mpi.find_libraries("MPICH", environ)
    assert str(tmp_path / "lib64/libmpich.so.12") in found
    environ["ODSGD_MPI_LIBRARY"] = "/mine/libmpi.so"
    assert mpi.find_libraries("MPICH", environ) == ["/mine/libmpi.so"]


def test_broadcast_without_a_library_says_what_to_do(capfd):
    rank = Rank(1, 3, "node1", "Open MPI")
    way = mpi.ByBroadcast(rank, {"ODSGD_MPI_LIBRARY": "/no/libmpi.so"})
    message = (
        "rank 1 on node1: Open MPI failed with exit code 3; it may say why above. Set "
        "ODSGD_MPI_LIBRARY to the libmpi.so of the mpirun that you use"
    )
    with pytest.raises(LaunchError, match=message):
        ranks.meet_as_agent(rank, way, timeout=LIMIT_S)
    assert "can be used: /no/libmpi.so: cannot open shared" in capfd.readouterr().err


def test_broadcast_refuses_libraries_that_are_not_of_mpi(capsys):
    assert mpi_broadcast.load(True, ["libc.so.6", "/no/libmpi.so"]) == (None, "")
    said = capsys.readouterr().err
    assert "libc.so.6 is no MPI library; /no/libmpi.so: cannot open" in said


def test_own_addresses_end_with_loopback():
    found = mpi.own_addresses()
    assert found[-1] == "127.0.0.1"
    assert not [ip for ip in found[:-1] if ip.startswith("127.")]


@pytest.mark.skipif(shutil.which("sh") is None, reason="there is no shell")
def test_watch_notices_the_end_of_mpirun_behind_a_shell(tmp_path):
    code = (
        "import sys; sys.argv[0] = 'odsgd-launch'\n"
        "from odsgd_kvstore.launch import ranks\n"
        "import os, threading\n"
        "lost = threading.Event(); ranks.parent_watch(lost.set)\n"
        f"print(len(ranks.ancestors()), flush=True); print(lost.wait({LIMIT_S}))\n"
    )
    program = tmp_path / "mpirun"
    program.symlink_to(shutil.which("sh"))
    shell = f"sh -c '{sys.executable} -c \"$CODE\"; true'; true"
    with subprocess.Popen(
        [program, "-c", shell], stdout=subprocess.PIPE, text=True,
        env={**os.environ, "CODE": code, "PYTHONPATH": os.pathsep.join(sys.path)},
    ) as popen:  # fmt: skip
        assert popen.stdout.readline() == "2\n"  # The shell and mpirun.
        popen.send_signal(signal.SIGKILL)
        assert popen.stdout.readline() == "True\n"


def script(path, text):
    """A program of the shell's."""
    path.write_text(f"#!/bin/sh\nPATH={os.defpath}\n{text}\n")
    path.chmod(0o755)
    return path

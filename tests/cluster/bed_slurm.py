"""Test bed: Slurm with daemons and a configuration of its own, on one node or more."""

from __future__ import annotations

import contextlib
import getpass
import os
import secrets
import shutil
import signal
import socket
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest
from bed_hosts import HERE, Hosts
from bed_sshd import free_port
from bed_tools import PLACES, need, or_skip
from watch import command, environments, pids, wait_until, wait_until_none

from odsgd_kvstore.launch.shims import shim_argv

PROGRAMS = ("munged", "slurmctld", "slurmd", "sinfo", "srun", "salloc", "sbatch")
# Eight processors are claimed: srun gives each task one of its own.
CONFIG = """
ClusterName=odsgdtest
SlurmctldHost={host}({address})
SlurmctldPort={controller_port}
SlurmdPort={node_port}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CryptoType=crypto/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
ReturnToService=2
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
KillWait=5
InactiveLimit=0
SchedulerParameters=sched_interval=1,batch_sched_delay=0
PartitionName=main Nodes=ALL Default=YES MaxTime=10 State=UP
"""
NODE = "NodeName={} NodeAddr={} CPUs=8 RealMemory=1000 State=UNKNOWN\n"


class Slurm:
    """Context manager: munged, slurmctld and slurmd; ready when the node is idle.

    Parameters
    ----------
    folder : pathlib.Path
        Empty, for keys, sockets, state and logs.
    hosts : bed_hosts.Hosts, optional
        These become the nodes; without them this machine does.
    """

    def __init__(self, folder: Path, hosts: Hosts | None = None) -> None:
        self.folder, self.config = folder, folder / "slurm.conf"
        self._hosts = hosts
        self._stack = contextlib.ExitStack()

    @property
    def env(self) -> dict[str, str]:
        """Variables for those who use it."""
        return {"SLURM_CONF": str(self.config)}

    def __enter__(self) -> Slurm:  # noqa: PYI034 (Self is of Python 3.11)
        need(*PROGRAMS)
        if os.geteuid() != 0:
            pytest.skip("slurmd has to be started by root")
        with contextlib.ExitStack() as stack:
            self._files()
            socket_path = self.folder / "munge.socket"
            names = ("log-file", "pid-file", "seed-file")
            flags = [f"--{name}={self.folder}/munge.{name}" for name in names]
            flags += [f"--key-file={self.folder}/munge.key", f"--socket={socket_path}"]
            self._start(stack, "munged", "--foreground", "--force", *flags)
            with or_skip("munged", self.folder / "munged.out"):
                wait_until(socket_path.is_socket, "the socket of munged", 20)
            self._start(stack, "slurmctld", "-D", "-i", "-f", str(self.config))
            for enter in self._entries():
                self._start(stack, "slurmd", "-D", "-f", str(self.config), enter=enter)
            with or_skip("Slurm", self.folder / "slurmd.out"):
                wait_until(self._is_idle, "an idle node of Slurm", 60)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self.run("scancel", "--user", getpass.getuser())
        wait_until_none(self.processes, "in Slurm", 30)
        self._stack.close()

    def run(self, *argv: str, limit_s: float = 30) -> str:
        """Run one of Slurm's commands; return its output."""
        env = {**os.environ, **self.env}
        done = subprocess.run(
            argv,
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            timeout=limit_s,
            check=False,
        )
        return done.stdout

    def processes(self) -> dict[int, str]:
        """What runs inside of jobs, by pid, with the steps' own helpers."""
        ours = environments("SLURM_CONF", str(self.config))
        found = {
            pid: command(pid) for pid, env in ours.items() if "SLURM_JOB_ID" in env
        }
        texts = {pid: command(pid) for pid in pids()}
        steps = {p: text for p, text in texts.items() if text.startswith("slurmstepd")}
        return {**found, **steps}

    def _files(self) -> None:
        (self.folder / "state").mkdir()
        self.folder.chmod(0o755)  # munged refuses to work in others' folders.
        key = self.folder / "munge.key"
        key.touch(mode=0o600)
        key.write_bytes(secrets.token_bytes(128))
        host, address = socket.gethostname().split(".")[0], "127.0.0.1"
        nodes = [(host, address)]
        if self._hosts is not None:
            address = self._hosts.ip(HERE)
            nodes = [(node.name, node.address) for node in self._hosts.hosts.values()]
        text = CONFIG.format(
            host=host, address=address, folder=self.folder,
            controller_port=free_port(), node_port=free_port(),
            user=getpass.getuser(),
        )  # fmt: skip
        self.config.write_text(text + "".join(NODE.format(*node) for node in nodes))

    def _entries(self) -> list[list[str]]:
        """What goes before the command of each node's daemon."""
        if self._hosts is None:
            return [[]]
        return [host.entry for host in self._hosts.hosts.values()]

    def _start(
        self,
        stack: contextlib.ExitStack,
        name: str,
        *args: str,
        enter: Sequence[str] = (),
    ) -> None:
        """Start a daemon in the foreground; it ends with this process."""
        argv = [*enter, shutil.which(name, path=PLACES), *args]
        log = stack.enter_context((self.folder / f"{name}.out").open("wb"))
        popen = subprocess.Popen(
            shim_argv(os.getpid(), argv), stdin=subprocess.DEVNULL, stdout=log,
            stderr=log, env={**os.environ, **self.env}, start_new_session=True,
        )  # fmt: skip
        stack.callback(popen.wait, 30)
        stack.callback(_terminate, popen)

    def _is_idle(self) -> bool:
        return self.run("sinfo", "-h", "-o", "%T").split() == ["idle"]


def _terminate(popen: subprocess.Popen) -> None:
    """End a daemon, or the one that `nsenter` has started on a host."""
    if popen.poll() is not None:
        return
    children = Path(f"/proc/{popen.pid}/task/{popen.pid}/children").read_text()
    is_entry = os.path.basename(os.readlink(f"/proc/{popen.pid}/exe")) == "nsenter"
    for pid in map(int, children.split() if is_entry else [popen.pid]):
        os.kill(pid, signal.SIGTERM)

"""Test bed: an sshd of the bed's own, and one on loopback that needs no rights."""

from __future__ import annotations

import contextlib
import getpass
import os
import shutil
import socket
import subprocess
import uuid
from collections.abc import Sequence
from pathlib import Path

from bed_tools import need, or_skip, run, which
from watch import marked, wait_until

from odsgd_kvstore.launch.shims import shim_argv

START_S = 60


def key_pair(path: Path) -> None:
    """Make a key without a pass phrase, and its public half beside it."""
    run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "test", "-f", str(path))


def sshd_config(folder: Path, ports: Sequence[int], mark: str = "") -> str:
    """Configuration of an sshd that takes one key and nothing else."""
    lines = [f"Port {port}" for port in ports]
    lines += [
        f"HostKey {folder}/host_key",
        f"AuthorizedKeysFile {folder}/authorized_keys",
        "PermitRootLogin prohibit-password",
        "PasswordAuthentication no",
        "KbdInteractiveAuthentication no",
        "StrictModes no",
        "UsePAM no",
        "UseDNS no",
        "PrintMotd no",
        "PidFile none",
    ]
    lines += [f"SetEnv ODTEST_MARK={mark}"] if mark else []
    return "\n".join(lines) + "\n"


def free_port() -> int:
    """A TCP port that nobody has now."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


class LoopbackSshd:
    """Context manager: an sshd on this machine, for this user.

    Parameters
    ----------
    folder : pathlib.Path
        Empty, for keys and configurations.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self.port = folder, free_port()
        self.config = folder / "ssh_config"
        self.mark = uuid.uuid4().hex
        self._stack = contextlib.ExitStack()

    @property
    def ssh_opts(self) -> str:
        """For ``odsgd-launch --ssh-opts``."""
        return f"-F {self.config}"

    def __enter__(self) -> LoopbackSshd:  # noqa: PYI034 (Self is of Python 3.11)
        need("sshd", "ssh", "ssh-keygen")
        with contextlib.ExitStack() as stack:
            self._privileges(stack)
            with or_skip("ssh-keygen", self.folder / "no log"):
                self._files()
            argv = [which("sshd"), "-D", "-e", "-f", str(self.folder / "sshd_config")]
            log = stack.enter_context((self.folder / "sshd.log").open("wb"))
            popen = subprocess.Popen(
                shim_argv(os.getpid(), argv), stdin=subprocess.DEVNULL, stderr=log,
                start_new_session=True,
            )  # fmt: skip
            stack.callback(popen.wait, 20)
            stack.callback(popen.terminate)
            with or_skip("sshd", self.folder / "sshd.log"):
                wait_until(self._answers, "the sshd on loopback", START_S)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def processes(self) -> dict[int, str]:
        """What runs for those who came in through this sshd."""
        return marked("ODTEST_MARK", self.mark)

    @staticmethod
    def _privileges(stack: contextlib.ExitStack) -> None:
        """Root's sshd wants an empty folder at a fixed place."""
        path = Path("/run/sshd")
        if os.geteuid() == 0 and not path.exists():
            path.mkdir(mode=0o755)
            stack.callback(path.rmdir)

    def _files(self) -> None:
        folder = self.folder
        for name in ("user_key", "host_key"):
            key_pair(folder / name)
        shutil.copy(folder / "user_key.pub", folder / "authorized_keys")
        public = " ".join((folder / "host_key.pub").read_text().split()[:2])
        (folder / "known_hosts").write_text(f"* {public}\n")
        text = sshd_config(folder, [self.port], self.mark)
        (folder / "sshd_config").write_text(text + "ListenAddress 127.0.0.1\n")
        self.config.write_text(
            f"Host *\n  IdentityFile {folder}/user_key\n  IdentitiesOnly yes\n"
            f"  UserKnownHostsFile {folder}/known_hosts\n"
            f"  GlobalKnownHostsFile /dev/null\n  User {getpass.getuser()}\n"
        )

    def _answers(self) -> bool:
        argv = ["ssh", "-F", str(self.config), "-p", str(self.port)]
        argv += ["-o", "BatchMode=yes", "127.0.0.1", "echo on"]
        done = subprocess.run(argv, capture_output=True, timeout=20, check=False)
        return done.stdout == b"on\n"

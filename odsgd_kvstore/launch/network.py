"""The networks that limit the bandwidth of roles, while a job runs."""

from __future__ import annotations

import array
import errno
import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from odsgd_kvstore.errors import LaunchError
from odsgd_kvstore.launch.bandwidth import Link, role_commands, switch_commands
from odsgd_kvstore.launch.namespaces import FORBIDDEN

LIMIT_S = 60
PROGRAM = str(Path(os.path.abspath(__file__)).with_name("namespaces.py"))
SYSTEM_PATH = "/usr/sbin:/sbin:/usr/bin:/bin"  # Users' own often lacks the first.
SETTINGS = Path("/proc/sys")
OFF = (  # Setting of the kernel, and its value if users may make no namespaces.
    ("kernel.apparmor_restrict_unprivileged_userns", "1", "0"),
    ("kernel.unprivileged_userns_clone", "0", "1"),
    ("user.max_user_namespaces", "0", "10000"),
    ("user.max_net_namespaces", "0", "10000"),
)


class Network:
    """The roles' own networks, and the one between them.

    Nothing of them has a name: the kernel removes them with the last process inside
    and the last open file, so they end with the launcher, however it ends.

    Parameters
    ----------
    links : sequence of Link
        One for each role; none, and nothing is made.

    Raises
    ------
    LaunchError
        A tool is missing, or the kernel forbids it.
    """

    def __init__(self, links: Sequence[Link]) -> None:
        # Open files of the namespaces: of each role, of the switch, of the user if any.
        self._files = _make(links) if links else []
        self._links = list(links)

    def entry(self, link: Link | None) -> tuple[list[str], list[int]]:
        """What goes before a role's arguments, and the files that it inherits."""
        if link is None:
            return [], []
        return self._entry(self._files[self._links.index(link)], link.address)

    def switch_entry(self) -> tuple[list[str], list[int]]:
        """The same for a program in the network between the roles, for tests."""
        return self._entry(self._files[len(self._links)], "switch")

    def _entry(self, network: int, host: str) -> tuple[list[str], list[int]]:
        user = self._files[len(self._links) + 1 :]
        argv = [sys.executable, "-I", "-S", PROGRAM, "enter"]
        numbers = [str(user[0] if user else -1), str(network)]
        return [*argv, *numbers, host], [network, *user]

    def close(self) -> None:
        """Let go of the networks; those with a process stay."""
        for file in self._files:
            os.close(file)
        self._files = []


def _make(links: Sequence[Link]) -> list[int]:
    """Files of the roles' networks, the switch's, and of the user namespace if any."""
    plan = {
        "tools": {name: _find(name) for name in ("ip", "tc")},
        "switch": switch_commands(links),
        "roles": [role_commands(link) for link in links],
    }
    ours, its = socket.socketpair()
    argv = [sys.executable, "-I", "-S", PROGRAM, "make", str(os.getpid())]
    # In its own session an interrupt from the terminal does not reach it.
    with ours, its, subprocess.Popen(
        argv, stdin=its, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
        start_new_session=True,
    ) as process:  # fmt: skip
        its.close()
        try:
            files = _exchange(ours, json.dumps(plan).encode())
            _, errors = process.communicate(timeout=LIMIT_S)
        except (OSError, subprocess.TimeoutExpired) as error:
            raise LaunchError(f"--emulate-bandwidth: no links: {error}") from error
        finally:
            process.kill()  # It has ended, unless something went wrong.
    if not files:
        raise LaunchError(explain(process.returncode, errors.decode(errors="replace")))
    return files


def _exchange(connection: socket.socket, plan: bytes) -> list[int]:
    """Send the plan; return the files that come back, none after an error."""
    connection.settimeout(LIMIT_S)
    connection.sendall(plan)
    connection.shutdown(socket.SHUT_WR)
    files = array.array("i")
    room = socket.CMSG_SPACE(253 * files.itemsize)  # The most that the kernel takes.
    _, messages, _, _ = connection.recvmsg(1, room, socket.MSG_CMSG_CLOEXEC)
    for _, _, data in messages:
        files.frombytes(data[: len(data) - len(data) % files.itemsize])
    return list(files)


def _find(name: str) -> str:
    """The path of a tool."""
    if not sys.platform.startswith("linux"):
        raise LaunchError("--emulate-bandwidth needs Linux; leave it out")
    places = os.pathsep.join([os.environ.get("PATH", ""), SYSTEM_PATH])
    path = shutil.which(name, path=places)
    if path is None:
        raise LaunchError(
            f"--emulate-bandwidth needs the program {name!r}, which is not installed; "
            "install iproute2 (Debian and Ubuntu: apt-get install iproute2; Fedora: "
            "dnf install iproute iproute-tc), or leave --emulate-bandwidth out"
        )
    return path


def explain(code: int, error: str) -> str:
    """What went wrong, and what to do."""
    error = error.strip() or f"exit code {code}"
    if os.strerror(errno.EMFILE) in error:
        return (
            f"--emulate-bandwidth could not make the links: {error}; raise the limit, "
            "such as with ulimit -n 4096"
        )
    if code != FORBIDDEN:
        return (
            f"--emulate-bandwidth could not make the links: {error}; the kernel needs "
            "veth, bridge and sch_tbf (on a small kernel: modprobe veth bridge sch_tbf)"
        )
    return (
        "--emulate-bandwidth needs a network namespace for each role, and the kernel "
        f"refuses it ({error}); {_advice()}, or leave --emulate-bandwidth out"
    )


def _advice() -> str:
    """The setting that forbids it, as far as it can be read."""
    for name, refused, allowed in OFF:
        try:
            value = (SETTINGS / name.replace(".", "/")).read_text().strip()
        except OSError:
            continue
        if value == refused:
            return f"allow it with 'sysctl -w {name}={allowed}' as root"
    return "start as root; in a container, give it the rights (Docker: --privileged)"

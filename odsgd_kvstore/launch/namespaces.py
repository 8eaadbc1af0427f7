"""Makes the networks of roles, and moves a role into its own: a program of its own.

It changes the process that runs it, so it is started by path, and imports nothing
of the package: ``python namespaces.py make PARENT`` and ``python namespaces.py enter
USER NETWORK HOSTNAME PROGRAM ARGS``.
"""

from __future__ import annotations

import array
import ctypes
import json
import os
import signal
import socket
import struct
import subprocess
import sys
from collections.abc import Mapping, Sequence

CLONE_NEWUTS, CLONE_NEWUSER, CLONE_NEWNET = 0x04000000, 0x10000000, 0x40000000
PR_SET_PDEATHSIG, PR_CAP_AMBIENT, PR_CAP_AMBIENT_RAISE = 1, 47, 2
CAP_NET_ADMIN, CAP_SYS_ADMIN = 12, 21
CAPABILITY_VERSION_3 = 0x20080522
FORBIDDEN, FAILED = 3, 1  # Exit codes: of namespaces; of the commands inside.


def call(name: str, *args: object) -> None:
    """Call a function of the C library; errors are exceptions."""
    libc = ctypes.CDLL(None, use_errno=True)
    if getattr(libc, name)(*args) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")


def keep_rights() -> None:
    """Let `ip` and `tc` inherit the rights, which a user other than root loses."""
    header = struct.pack("Ii", CAPABILITY_VERSION_3, 0)
    data = ctypes.create_string_buffer(24)
    call("capget", header, data)
    sets = list(struct.unpack("6I", data.raw))  # Effective, permitted, inheritable.
    sets[2], sets[5] = sets[1], sets[4]
    call("capset", header, struct.pack("6I", *sets))
    for capability in (CAP_NET_ADMIN, CAP_SYS_ADMIN):
        call("prctl", PR_CAP_AMBIENT, PR_CAP_AMBIENT_RAISE, capability, 0, 0)


def become_able() -> bool:
    """Enter a network that we may change; return whether it took a user namespace.

    The caller's user and group keep their numbers in that, so that files belong to
    them as before.
    """
    try:
        call("unshare", CLONE_NEWNET)
        keep_rights()
        return False
    except OSError:  # Not root, or root in a container that may do one of the two.
        user, group = os.geteuid(), os.getegid()
    call("unshare", CLONE_NEWUSER)
    for name, text in (
        ("setgroups", "deny"),
        ("uid_map", f"{user} {user} 1"),
        ("gid_map", f"{group} {group} 1"),
    ):
        with open(f"/proc/self/{name}", "w") as file:
            file.write(text)
    call("unshare", CLONE_NEWNET)
    keep_rights()
    return True


def this_namespace(kind: str) -> int:
    """Open the namespace that this process is in; it lasts as long as the file."""
    return os.open(f"/proc/self/ns/{kind}", os.O_RDONLY)


def run_commands(
    tools: Mapping[str, str], texts: Sequence[str], pass_fds: Sequence[int] = ()
) -> None:
    """Run the lines of `texts` with ``ip`` and ``tc``."""
    for tool, text in zip(("ip", "tc"), texts):
        done = subprocess.run(
            [tools[tool], "-batch", "-"],
            input=text,
            pass_fds=pass_fds,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        if done.returncode:
            sys.stderr.write(f"{tool}: {done.stdout.strip()}")
            sys.exit(FAILED)


def make(parent: int) -> None:
    """Make the networks that standard input, a socket, describes; send them to it."""
    connection = socket.socket(fileno=os.dup(0))
    with connection.makefile("r") as file:
        plan = json.load(file)
    try:
        users = [this_namespace("user")] if become_able() else []
        switch, networks = this_namespace("net"), []
        for _ in plan["roles"]:
            call("unshare", CLONE_NEWNET)
            networks.append(this_namespace("net"))
    except OSError as error:
        sys.stderr.write(str(error))
        sys.exit(FORBIDDEN)
    # A change of rights cancels this request, so it comes after them.
    call("prctl", PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        sys.exit(FAILED)
    call("setns", switch, CLONE_NEWNET)
    ip, tc = plan["switch"]
    paths = [f"/proc/self/fd/{network}" for network in networks]
    run_commands(plan["tools"], (ip.format(*paths), tc), networks)
    for network, texts in zip(networks, plan["roles"]):
        call("setns", network, CLONE_NEWNET)
        run_commands(plan["tools"], texts)
    files = array.array("i", [*networks, switch, *users])
    connection.sendmsg([b"-"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, files)])


def enter(user: int, network: int, host: str, argv: Sequence[str]) -> None:
    """Become `argv` in a network; the files are those of the namespaces, or -1."""
    if user >= 0:
        call("setns", user, CLONE_NEWUSER)
        os.close(user)
    call("setns", network, CLONE_NEWNET)
    os.close(network)
    # Programs look their own address up by the host name.
    call("unshare", CLONE_NEWUTS)
    socket.sethostname(host)
    os.execv(argv[0], list(argv))


if __name__ == "__main__":
    if sys.argv[1] == "make":
        make(int(sys.argv[2]))
    else:
        enter(int(sys.argv[2]), int(sys.argv[3]), sys.argv[4], sys.argv[5:])

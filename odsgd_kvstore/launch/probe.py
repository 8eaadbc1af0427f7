"""What one host says of itself, and whether it reaches the others.

It runs on each host, inside the agent, and imports nothing else of the package than
`interpreter` and `ports`, its parts. All three need the standard library only, and
syntax that Python 3.6 can read, so that an old Python gets a message and not a
SyntaxError. Each operation takes and gives what JSON can carry.
"""

import contextlib
import fcntl
import os
import pwd
import re
import shutil
import socket
import struct
import sys
import threading
import time

from odsgd_kvstore.launch.interpreter import Facts
from odsgd_kvstore.launch.ports import close, find_ports, listen, reach

NAMES_LIMIT_S = 5
LINK_LIMIT_S = 1.5
SIOCGIFFLAGS, UP, RUNNING = 0x8913, 0x1, 0x40


def report(request: dict) -> dict:
    """Describe this host.

    Parameters
    ----------
    request : dict
        'python', 'env', 'cwd', 'program': what the roles will be run with. 'peers':
        names or addresses of all hosts. 'resolve': this host's name, as the host file
        has it. 'ports': how many to look for in 'range' (first, last); 'least_ports':
        fewer are an error (default: 'ports').

    Returns
    -------
    dict
        'started' and 'time' (seconds since 1970, by this host's clock); 'host',
        'user', 'machine' (equal for all that share a network), 'cores'; 'interfaces'
        and 'down' (name, IPv4 address, prefix length); 'ssh_address'; 'resolved'
        (name: address); 'routes' (peer: the address of this host on the way there);
        'ports' (ascending), 'ports_error'; 'cwd_error', 'program_error'; of the
        interpreter 'python', 'executable', 'package', 'mxnet', 'numpy' (versions),
        'dist_kvstore', and 'python_error', 'package_error', 'mxnet_error'. What is
        unknown, and what is no error, is empty.
    """
    started = time.time()
    env = dict(os.environ, **request["env"])
    facts = Facts(request["python"], env, request.get("cwd"))
    with contextlib.closing(facts):
        names = {*request["peers"], *filter(None, [request.get("resolve")])}
        resolved = _resolve(names)
        routes = {p: _route(resolved[p]) for p in request["peers"] if p in resolved}
        up, down = _interfaces()
        found = {
            "host": socket.gethostname(),
            "user": _user(),
            "machine": _machine(),
            "cores": len(place({})["cpus"]),
            "interfaces": up,
            "down": down,
            "ssh_address": _ssh_address(os.environ.get("SSH_CONNECTION", "")),
            "resolved": resolved,
            "routes": {peer: ip for peer, ip in routes.items() if ip},
            "cwd_error": _cwd_error(request.get("cwd")),
            "program_error": _program_error(request, env),
        }
        found.update(find_ports(request), **facts.read())
    return dict(found, started=started, time=time.time())


def _user() -> str:
    """The user's name, or number."""
    try:
        return pwd.getpwuid(os.getuid()).pw_name
    except KeyError:
        return str(os.getuid())


def _machine() -> str:
    """What is equal for processes that reach each other by 127.0.0.1."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return "{}/{}".format(
                file.read().strip(), os.stat("/proc/self/ns/net").st_ino
            )
    except OSError:
        return socket.gethostname()


def place(_request: dict) -> dict:
    """Say which machine this is, and which processors its roles may use.

    Returns
    -------
    dict
        'machine' (equal for all that share a network), 'cpus' (numbers).
    """
    if hasattr(os, "sched_getaffinity"):
        return {"machine": _machine(), "cpus": sorted(os.sched_getaffinity(0))}
    return {"machine": _machine(), "cpus": list(range(os.cpu_count() or 1))}


def with_interpreter(path: str) -> str:
    """PATH with this interpreter's folder in front, so that `python` is the same."""
    folder = os.path.dirname(sys.executable)
    return path if path.split(os.pathsep)[0] == folder else folder + os.pathsep + path


def _ssh_address(connection: str) -> str:
    """The address that ssh reached: the third word of SSH_CONNECTION, if IPv4."""
    words = connection.split()
    ip = words[2] if len(words) == 4 else ""
    if ip.startswith("::ffff:"):
        ip = ip[len("::ffff:") :]
    return ip if re.match(r"[0-9.]+\Z", ip) else ""


def _interfaces() -> tuple:
    """(name, IPv4 address, prefix length) of what is up, and of what is down."""
    deadline = time.monotonic() + LINK_LIMIT_S
    while True:
        found = _with_flags()
        # The kernel takes a moment from 'up' to 'running'; without a cable, for ever.
        starting = [flags for _, flags in found if flags & UP and not flags & RUNNING]
        if not starting or time.monotonic() > deadline:
            break
        time.sleep(0.1)
    up = [of for of, flags in found if flags & UP and flags & RUNNING]
    return up, [of for of, _ in found if of not in up]


def _with_flags() -> list:
    """Each address (name, IPv4 address, prefix length) with its interface's flags."""
    found = []
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET) as probe:
        for name, ip, bits in _addresses():  # Without netlink nothing is known.
            request = struct.pack("16sH14x", name.partition(":")[0].encode(), 0)
            flags = 0
            with contextlib.suppress(OSError):  # Removed meanwhile.
                answer = fcntl.ioctl(probe, SIOCGIFFLAGS, request)
                _, flags = struct.unpack_from("16sH", answer)
            found.append(([name, ip, bits], flags))
    return found


def _addresses():
    """Ask the kernel (RTM_GETADDR) for all IPv4 addresses, aliases included."""
    dump = struct.pack("=IHHII", 24, 22, 0x301, 1, 0)
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0) as kernel:
        kernel.settimeout(5)
        kernel.sendall(dump + struct.pack("=BBBBI", socket.AF_INET, 0, 0, 0, 0))
        while True:
            data = kernel.recv(1 << 17)
            while data:
                size, kind = struct.unpack_from("=IH", data)
                if kind in (2, 3):  # NLMSG_ERROR, NLMSG_DONE
                    return
                yield _address(data[16:size])
                data = data[(size + 3) & ~3 :]


def _address(message: bytes) -> list:
    """Name, address and prefix length of one message."""
    _, bits, _, _, index = struct.unpack_from("=BBBBI", message)
    values, rest = {}, message[8:]
    while rest:
        size, kind = struct.unpack_from("=HH", rest)
        values[kind] = rest[4:size]
        rest = rest[(size + 3) & ~3 :]
    label = values.get(3, b"").rstrip(b"\0").decode()  # IFA_LABEL
    local = values.get(2) or values.get(1)  # IFA_LOCAL, IFA_ADDRESS
    return [label or socket.if_indextoname(index), socket.inet_ntoa(local), bits]


def _resolve(names: set) -> dict:
    """The IPv4 address of each name that has one, within `NAMES_LIMIT_S`."""
    found = {}

    def look_up(name: str) -> None:
        with contextlib.suppress(OSError, UnicodeError):
            answers = socket.getaddrinfo(name, None, socket.AF_INET, socket.SOCK_STREAM)
            # Debian names the host itself 127.0.1.1, beside what else there is.
            found[name] = min((a[4][0] for a in answers), key=_is_loopback)

    threads = [threading.Thread(target=look_up, args=(n,), daemon=True) for n in names]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + NAMES_LIMIT_S
    for thread in threads:
        thread.join(max(0, deadline - time.monotonic()))
    return dict(found)


def _is_loopback(ip: str) -> bool:
    """Whether only this host reaches it."""
    return ip.startswith("127.")


def _route(ip: str) -> str:
    """This host's address on the way to another; nothing is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((ip, 9))
            return probe.getsockname()[0]
        except OSError:
            return ""


def _cwd_error(cwd: str) -> str:
    """Why the roles can't work in a folder."""
    if not cwd or (os.path.isdir(cwd) and os.access(cwd, os.X_OK)):
        return ""
    if not os.path.lexists(cwd):
        return f"the folder {cwd} does not exist"
    if not os.path.isdir(cwd):
        return f"{cwd} is not a folder"
    return f"user {_user()} may not enter the folder {cwd}"


def _program_error(request: dict, env: dict) -> str:
    """Why the workers' program can't be run."""
    program = request.get("program")
    if not program:
        return ""
    if os.sep not in program:
        path = request["env"].get("PATH")
        path = path or with_interpreter(env.get("PATH", os.defpath))
        if shutil.which(program, path=path):
            return ""
        return f"the program {program!r} is not found in PATH, {path}"
    full = os.path.join(request.get("cwd") or "", program)
    if not os.path.exists(full):
        return f"the program {full} does not exist"
    if os.path.isdir(full) or not os.access(full, os.X_OK):
        return f"the program {full} is not an executable file"
    return ""


OPERATIONS = {
    "place": place,
    "report": report,
    "find_ports": find_ports,
    "listen": listen,
    "reach": reach,
    "close": close,
}

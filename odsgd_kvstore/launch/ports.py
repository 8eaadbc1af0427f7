"""Free ports of a host, who holds the others, and which it reaches on other hosts.

Runs on each host, see `probe`.
"""

import contextlib
import errno
import glob
import os
import random
import selectors
import socket
import struct
import threading
import time
from typing import Optional

REACH_LIMIT_S = 5
TAKEN_BY_A_JOB = "another job of odsgd-launch is about to use it"
BATCH = 500  # Connections at a time; a process may often have 1024 files.
ATTEMPTS = 3  # Another process on this host may be looking, too.
_LISTEN = "0A"  # In /proc/net/tcp
_stops: list = []  # One for each `listen` since the last `close`; they are requests.
# Ports of this process's job, for as long as the process lives: between `close` and
# the start of the roles no other job on this machine may take them.
_reserved: dict = {}


def find_ports(request: dict) -> dict:
    """Find free ports in a range, from a random one on.

    Parameters
    ----------
    request : dict
        See `probe.report`.

    Returns
    -------
    dict
        'ports', ascending, and 'ports_error'. A port is free if it is on all
        addresses. Those that the kernel gives to outgoing connections come last.
    """
    first, last = request["range"]
    wanted, found = request["ports"], []
    for attempt in range(ATTEMPTS):
        if attempt and len(found) < wanted:
            time.sleep(0.05)
        for port in _in_order(first, last):
            if len(found) == wanted:
                break
            if port not in found and _is_free(port):
                found.append(port)
    least = request.get("least_ports", wanted)
    error = ""
    if len(found) < least:
        error = (
            f"of the ports {first}-{last} only {len(found)} are free, and this host "
            f"needs {least}"
        )
    return {"ports": sorted(found), "ports_error": error}


def _in_order(first: int, last: int) -> list:
    """The ports of a range as they are tried."""
    start = random.randrange(first, last + 1)
    ports = [*range(start, last + 1), *range(first, start)]
    low, high = _kernels_own()
    return sorted(ports, key=lambda port: low <= port <= high)


def _kernels_own() -> tuple:
    """First and last port of outgoing connections."""
    try:
        with open("/proc/sys/net/ipv4/ip_local_port_range") as file:
            low, high = file.read().split()
            return int(low), int(high)
    except (OSError, ValueError):
        return 32768, 60999


def _is_free(port: int) -> bool:
    """Whether no socket has a port, on any address."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        try:
            # As ps-lite will bind it: a port whose last connection ended a moment ago
            # is free, and one where anybody listens is not.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(("", port))
            probe.listen(1)
        except OSError:
            return False
    if port in _reserved:
        return True
    reservation = _reserve(port)
    if reservation is not None:
        reservation.close()
    return reservation is not None


def _reserve(port: int) -> Optional[socket.socket]:
    """Mark a port as this job's; None if it is another job's.

    The mark is a socket with a name that only its network namespace sees, and that
    vanishes with the process.
    """
    mark = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    try:
        mark.bind(f"\0odsgd-launch-port-{port}")  # Linux has such names.
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            mark.close()
            return None
    return mark


def listen(request: dict) -> dict:
    """Listen on ports, until `close`, and take and drop what connects.

    Parameters
    ----------
    request : dict
        'ip', 'ports'.

    Returns
    -------
    dict
        'failed': by port (a string, as JSON has it) why it can't, with the program
        that holds it if this user may see that. The others are this process's until
        its end: no other one's `find_ports` finds them.
    """
    sockets, failed = [], {}
    for port in request["ports"]:
        try:
            mark = _reserved.get(port) or _reserve(port)
            if mark is None:
                failed[str(port)] = TAKEN_BY_A_JOB
                continue
            _reserved[port] = mark
            sockets.append(_listener(request["ip"], port))
        except OSError as error:
            failed[str(port)] = _why_not(request["ip"], port, error)
    ours, its = socket.socketpair()
    thread = threading.Thread(target=_accept, args=(sockets, its), daemon=True)
    thread.start()
    _stops.append((ours, thread))
    return {"failed": failed}


def close(request: dict) -> dict:
    """Close what `listen` opened; it is closed when this returns.

    With 'release' the ports are no longer this job's.
    """
    while _stops:
        ours, thread = _stops.pop()
        ours.close()
        thread.join()
    while request.get("release") and _reserved:
        _reserved.popitem()[1].close()
    return {}


def _listener(ip: str, port: int) -> socket.socket:
    """A socket that listens, as ps-lite's will."""
    found = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        found.bind((ip, port))
        found.listen(128)
        found.setblocking(False)
        return found
    except OSError:
        found.close()
        raise


def _why_not(ip: str, port: int, error: OSError) -> str:
    """Why a host can't listen."""
    if error.errno == errno.EADDRINUSE:
        return "taken by {}".format(holder(port) or "another program")
    if error.errno == errno.EADDRNOTAVAIL:
        return f"{ip} is not an address of this host"
    if error.errno == errno.EACCES:
        return "forbidden: ports below 1024 need root"
    return error.strerror


def _accept(sockets: list, stop: socket.socket) -> None:
    """Take connections until the other end of `stop` is closed."""
    with contextlib.ExitStack() as stack:
        selector = stack.enter_context(selectors.DefaultSelector())
        for found in [stop, *sockets]:
            stack.enter_context(found)
            selector.register(found, selectors.EVENT_READ)
        while True:
            for key, _ in selector.select():
                if key.fileobj is stop:
                    return
                with contextlib.suppress(OSError):  # It ended meanwhile.
                    key.fileobj.accept()[0].close()


def holder(port: int) -> str:
    """Return the program with a port, as 'python3 (pid 12)'; '' if it is not seen."""
    inodes = _inodes(port)
    for path in glob.iglob("/proc/[0-9]*/fd/*"):
        try:
            target = os.readlink(path)
            if target.startswith("socket:[") and target[8:-1] in inodes:
                pid = path.split("/")[2]
                with open(f"/proc/{pid}/comm") as file:
                    return f"{file.read().strip()} (pid {pid})"
        except OSError:  # Ended meanwhile, or another user's.
            continue
    return ""


def _inodes(port: int) -> set:
    """The sockets that have a port; those that listen, if any does."""
    found = {}
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        with contextlib.suppress(OSError), open(table) as file:
            for line in list(file)[1:]:
                words = line.split()
                if int(words[1].rpartition(":")[2], 16) == port:
                    found[words[9]] = words[3]
    listening = {inode for inode, state in found.items() if state == _LISTEN}
    return (listening or set(found)) - {"0"}


def reach(request: dict) -> dict:
    """Connect to ports of other hosts, at the same time.

    Parameters
    ----------
    request : dict
        'targets': (IPv4 address, port) each. 'timeout': seconds (default 5).

    Returns
    -------
    dict
        'failed': (address, port, reason) each, in the order of the targets.
    """
    targets, limit = request["targets"], request.get("timeout", REACH_LIMIT_S)
    failed = []
    for start in range(0, len(targets), BATCH):
        failed += _reach(targets[start : start + BATCH], limit)
    return {"failed": failed}


def _reach(targets: list, limit: float) -> list:
    """Connect to as many as the process may have files."""
    reasons = ["timed out: a firewall?"] * len(targets)
    deadline = time.monotonic() + limit
    with contextlib.ExitStack() as stack:
        selector = stack.enter_context(selectors.DefaultSelector())
        for index, (ip, port) in enumerate(targets):
            found = stack.enter_context(socket.socket())
            # Closed with a reset, so that no port is left waiting (TIME_WAIT).
            found.setsockopt(
                socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0)
            )
            found.setblocking(False)
            code = found.connect_ex((ip, port))
            if code == errno.EINPROGRESS:
                selector.register(found, selectors.EVENT_WRITE, index)
            else:
                reasons[index] = _reason(code)
        while selector.get_map() and time.monotonic() < deadline:
            for key, _ in selector.select(max(0, deadline - time.monotonic())):
                selector.unregister(key.fileobj)
                code = key.fileobj.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
                reasons[key.data] = _reason(code)
    return [
        [ip, port, reason] for (ip, port), reason in zip(targets, reasons) if reason
    ]


def _reason(code: int) -> str:
    """Why a connection failed, in plain words; '' if it did not."""
    if code in (0, errno.ECONNREFUSED):
        return "refused" if code else ""
    if code == errno.ETIMEDOUT:
        return "timed out: a firewall?"
    if code == errno.EHOSTUNREACH:
        return "no route, or a firewall rejects it"
    if code == errno.ENETUNREACH:
        return "no route"
    if code in (errno.EACCES, errno.EPERM):
        return "forbidden: a firewall on this host?"
    return os.strerror(code)

"""The addresses of this role, made numeric and checked before ps-lite reads them.

ps-lite binds, and tells others, numeric IPv4 addresses only; where it cannot bind it
aborts without a reason. The scheduler listens on DMLC_PS_ROOT_URI; any other role
listens on DMLC_NODE_HOST and connects to the scheduler.
"""

from __future__ import annotations

import contextlib
import errno
import glob
import ipaddress
import logging
import math
import os
import re
import socket
import struct
import time
from typing import Iterator, MutableMapping

from .errors import ConfigError, LaunchError

_ROOT, _PORT, _NODE = "DMLC_PS_ROOT_URI", "DMLC_PS_ROOT_PORT", "DMLC_NODE_HOST"
_NOTE_S = 10.0
_RETRY_S = 1.0
_OWN_NAME_S = 5.0  # for a name that must be this machine's
_NAME = re.compile(r"[^\s/:@\[\]]+\Z")
_NUMBERS = re.compile(r"[0-9.]+\Z")
_BYTE = r"(25[0-5]|2[0-4][0-9]|1[0-9][0-9]|[1-9]?[0-9])"  # 010 could be octal.
_IPV4 = re.compile(rf"{_BYTE}(\.{_BYTE}){{3}}\Z")
_LISTEN = "0A"
_SIOCGIFADDR = 0x8915

_logger = logging.getLogger(__name__)


def settle_addresses(role: str, environ: MutableMapping[str, str] | None = None) -> str:
    """Make the addresses of a role numeric, in its environment.

    Parameters
    ----------
    role : str
        'worker', 'server' or 'scheduler'.
    environ : mapping, optional
        The variables, which are changed; `os.environ` when left out.

    Returns
    -------
    str
        The scheduler's place, as a person reads it.

    Raises
    ------
    ConfigError, LaunchError
        An address is no IPv4 address, or not this machine's where it has to be; the
        scheduler cannot listen on its port.

    Notes
    -----
    A worker or server waits until the scheduler's name resolves, and says so. Without
    DMLC_NODE_HOST and DMLC_INTERFACE it gets its address that faces the scheduler.
    With DMLC_USE_KUBERNETES the name stays: it may be that of an earlier pod for some
    seconds, and ps-lite looks it up again each time that it connects.
    """
    environ = os.environ if environ is None else environ
    name, shown = environ[_ROOT], f"{environ[_ROOT]} port {environ[_PORT]}"
    if _is_on(environ, "DMLC_LOCAL"):  # sockets in a folder: no address is used
        return shown
    port, is_scheduler = _port(environ, _PORT), role == "scheduler"
    if is_scheduler and _is_on(environ, "DMLC_USE_KUBERNETES"):
        _check_name(_ROOT, name)  # It may resolve only once its pod is ready.
        _check_listen("0.0.0.0", name, port)
        return shown
    address = _numeric(_ROOT, name, must_be_own=is_scheduler)
    if not _is_on(environ, "DMLC_USE_KUBERNETES"):
        environ[_ROOT] = address
    if _is_loopback(address) and name not in (address, "localhost"):
        _warn_of_loopback(name, address, is_scheduler)
    if is_scheduler:
        _check_listen(address, name, port)
    else:
        _settle_own(environ, address, role)
    return shown if name == address else f"{shown}, {address}"


def _settle_own(environ: MutableMapping[str, str], scheduler: str, role: str) -> None:
    """The address and port that a worker or server listens on."""
    port = _port(environ, "PORT") if "PORT" in environ else 0
    name, interface = environ.get(_NODE), environ.get("DMLC_INTERFACE")
    if name:
        environ[_NODE] = _numeric(_NODE, name, must_be_own=True)
        _check_own(name, environ[_NODE], scheduler)
    elif interface:
        if interface not in dict(_interfaces()):
            raise ConfigError(
                f"DMLC_INTERFACE is {interface!r}, and this machine has no such "
                "network interface with an IPv4 address. It has: "
                f"{_shown_interfaces()}."
            )
    else:
        with contextlib.suppress(OSError), _udp() as facing:
            facing.connect((scheduler, 9))  # sends nothing; chooses the route
            environ[_NODE] = facing.getsockname()[0]
    if port and environ.get(_NODE):
        _check_own_port(role, environ[_NODE], port)


def _check_own_port(role: str, address: str, port: int) -> None:
    """The port is free: in place of a taken one ps-lite takes any other."""
    try:
        _bind(address, port)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise LaunchError(
                f"This {role} cannot listen on {address} port {port} (PORT): it is held "
                f"by {_holder(port)}. Give it another PORT, or none for any free one."
            ) from None


def _numeric(variable: str, name: str, must_be_own: bool) -> str:
    """The IPv4 address of a name; waits for it, for ever unless it must be our own."""
    _check_name(variable, name)
    patience_s = _OWN_NAME_S if must_be_own else math.inf
    found = sorted(
        map(ipaddress.IPv4Address, _resolved(variable, name, patience_s)),
        key=lambda a: (must_be_own and not _is_here(str(a)), a.is_loopback, a),
    )
    if len(found) > 1:
        _logger.warning(
            "%s is %r, which has several addresses: %s. Using %s; if that is not the "
            "right network, give the number in place of the name, to every role.",
            *(variable, name, ", ".join(map(str, found)), found[0]),
        )
    return str(found[0])


def _check_name(variable: str, name: str) -> None:
    """It looks like a name or an IPv4 address that others can connect to."""
    if not _NAME.match(name):
        is_6 = name.count(":") > 1
        reason = "ps-lite knows IPv4 only" if is_6 else "scheme and port stay out"
        raise _wrong(variable, name, reason)
    if _NUMBERS.match(name) and not _IPV4.match(name):
        raise _wrong(variable, name, "it is no IPv4 address")
    if name == "0.0.0.0":
        raise _wrong(variable, name, "the other roles cannot connect to it")


def _resolved(variable: str, name: str, patience_s: float) -> set[str]:
    """All IPv4 addresses of a name."""
    start = said = time.monotonic()
    while True:
        try:
            return _lookup(name, socket.AF_INET)
        except (OSError, UnicodeError) as error:
            now = time.monotonic()
            with contextlib.suppress(OSError, UnicodeError):
                _lookup(name, socket.AF_INET6)
                raise _wrong(variable, name, "it has IPv6 addresses only") from None
            if now - start >= patience_s:
                reason = f"it does not resolve on this machine ({error})"
                raise _wrong(variable, name, reason) from None
            if now - said >= _NOTE_S:
                said = now
                _logger.warning(
                    "Waiting until the name in %s, %r, resolves on this machine (since "
                    "%.0f s; %s). Is it spelled right, and does its host run?",
                    *(variable, name, now - start, error),
                )
        time.sleep(_RETRY_S)


def _lookup(name: str, family: int) -> set[str]:
    found = socket.getaddrinfo(name, None, family, socket.SOCK_STREAM)
    return {str(address[0]) for *_, address in found}


def _check_own(name: str, address: str, scheduler: str) -> None:
    """A role's own address is this machine's, and others can reach it."""
    if not _is_here(address):
        raise ConfigError(
            f"{_NODE} is {_both(name, address)}, which is no address of this machine; "
            f"it has {_shown_interfaces()}. Set {_NODE} to one that the other roles "
            "reach, or leave it out."
        )
    if _is_loopback(address) and not _is_here(scheduler):
        raise ConfigError(
            f"{_NODE} is {_both(name, address)}, which only this machine reaches, and "
            f"the scheduler is on another one ({scheduler}). Set {_NODE} to one of "
            f"{_shown_interfaces()}, or leave it out."
        )


def _check_listen(address: str, name: str, port: int) -> None:
    """The scheduler can listen; checked as ZeroMQ will do it."""
    try:
        _bind(address, port)
    except OSError as error:
        if error.errno == errno.EADDRNOTAVAIL:
            raise ConfigError(
                f"{_ROOT} is {_both(name, address)}, which is no address of this "
                f"machine; it has {_shown_interfaces()}. The scheduler listens there: "
                "start it on the machine with that address, or give all roles an "
                "address of this one. Where others reach it by an address that it does "
                "not have, such as a Kubernetes service, set DMLC_USE_KUBERNETES=1."
            ) from None
        holder = (
            f" It is held by {_holder(port)}."
            if error.errno == errno.EADDRINUSE
            else ""
        )
        raise LaunchError(
            f"The scheduler cannot listen on {address} port {port} ({_PORT}): "
            f"{error.strerror}.{holder} Give all roles another port, or end what "
            "holds this one, by its pid."
        ) from None


def _warn_of_loopback(name: str, address: str, is_scheduler: bool) -> None:
    """A host's own name often leads to itself only; we cannot know other hosts."""
    what = (
        "the scheduler listens where only roles on this machine reach it"
        if is_scheduler
        else "this role looks for the scheduler on its own machine"
    )
    _logger.warning(
        "%s is %r, and on this machine that is %s (see /etc/hosts; Debian gives a "
        "machine's own name 127.0.1.1): %s. If roles on other machines take part, set "
        "%s to the number that they reach, for every role, or correct /etc/hosts. This "
        "machine has: %s.",
        *(_ROOT, name, address, what, _ROOT, _shown_interfaces()),
    )


def _port(environ: MutableMapping[str, str], variable: str) -> int:
    text = environ[variable]
    if not (text.isdigit() and 0 < int(text) < 65536):
        raise ConfigError(
            f"{variable} is {text!r}; ps-lite takes it for a port: allowed is a whole "
            "number from 1 to 65535."
        )
    return int(text)


def _wrong(variable: str, name: str, reason: str) -> ConfigError:
    return ConfigError(
        f"{variable} is {name!r}; {reason}. Allowed is an IPv4 address, such as "
        "10.0.0.2, or the name of a host that has one."
    )


def _both(name: str, address: str) -> str:
    return repr(name) if name == address else f"{name!r} ({address})"


def _is_on(environ: MutableMapping[str, str], name: str) -> bool:
    """Whether a switch is on for ps-lite, which reads it with C's `atoi`."""
    number = re.match(r"\s*[+-]?\d+", environ.get(name, ""))
    return number is not None and int(number.group()) > 0


def _is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address).is_loopback


def _is_here(address: str) -> bool:
    """Whether an address is one of this machine's: then it can be bound."""
    try:
        _bind(address, 0)
    except OSError:
        return False
    return True


def _bind(address: str, port: int) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind((address, port))


def _udp() -> socket.socket:
    return socket.socket(socket.AF_INET, socket.SOCK_DGRAM)


def _interfaces() -> Iterator[tuple[str, str]]:
    """(name, IPv4 address) of this machine's interfaces; Linux only."""
    try:
        import fcntl

        with _udp() as asking:
            for _, name in socket.if_nameindex():
                with contextlib.suppress(OSError):  # it has no IPv4 address
                    request = struct.pack("256s", name.encode()[:15])
                    answer = fcntl.ioctl(asking.fileno(), _SIOCGIFADDR, request)
                    yield name, socket.inet_ntoa(answer[20:24])
    except (ImportError, OSError):
        return


def _shown_interfaces() -> str:
    found = [f"{ip} ({name})" for name, ip in _interfaces() if not _is_loopback(ip)]
    return ", ".join(found) or "127.0.0.1 only"


def _holder(port: int) -> str:
    """Who listens on a port, as far as this user may see it."""
    sockets = set()
    for path in ("/proc/net/tcp", "/proc/net/tcp6"):
        with contextlib.suppress(OSError), open(path) as file:
            rows = [line.split() for line in file][1:]
            ends = [(row[1].rpartition(":")[2], row[3], row[9]) for row in rows]
            sockets |= {
                f"socket:[{inode}]"
                for end, state, inode in ends
                if int(end, 16) == port and state == _LISTEN
            }
    for path in glob.glob("/proc/[0-9]*/fd/*"):
        with contextlib.suppress(OSError):
            if os.readlink(path) in sockets:
                pid = path.split("/")[2]
                with open(f"/proc/{pid}/comm") as file:
                    return f"pid {pid} ({file.read().strip()})"
    return "a process that this user may not see"

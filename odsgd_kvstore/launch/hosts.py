"""Host files: which hosts a job may use, and how many workers each takes."""

from __future__ import annotations

import ipaddress
import os
import re
from dataclasses import dataclass, replace
from typing import NoReturn

from odsgd_kvstore.errors import LaunchError

LEAST_PORT, MOST_PORT = 22, 65_535
MOST_SLOTS = 10_000
MOST_BYTES = 1 << 20
FORM = (
    "a line is [USER@]HOST[:PORT] [slots=N], where PORT is that of ssh, such as "
    "'node1', 'me@node2:2222 slots=4' or '[fd00::1]:2222'"
)
# What ssh, rsync or a shell could read in another way is left out.
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,252}\Z")
_USER = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.+@-]{0,252}\Z")
_ZONE = re.compile(r"%[A-Za-z0-9_.-]{1,32}\Z")
_BRACKETS = re.compile(r"\[([^\[\]]*)\](?::(.*))?\Z")
_NUMBER = re.compile(r"[0-9]{1,9}\Z")


@dataclass(frozen=True)
class Host:
    """One host, as ssh takes it.

    Parameters
    ----------
    name : str
        Its name, an alias of ssh's configuration, or its IPv4 or IPv6 address
        (without brackets).
    user : str
        Empty: ssh's own choice.
    port : int or None
        Of ssh; None: ssh's own choice.
    slots : int
        Workers that it takes at a time.
    """

    name: str
    user: str = ""
    port: int | None = None
    slots: int = 1

    @property
    def label(self) -> str:
        """As a person reads it: 'user@name:port', without what is not given."""
        user = f"{self.user}@" if self.user else ""
        if self.port is None:
            return user + self.name
        name = f"[{self.name}]" if ":" in self.name else self.name
        return f"{user}{name}:{self.port}"


@dataclass(frozen=True)
class HostFile:
    """The hosts of a job.

    Parameters
    ----------
    hosts : tuple of Host
        In the order in which they first appear.
    is_limited : bool
        Some line has ``slots=``: more workers than slots are an error.
    """

    hosts: tuple[Host, ...]
    is_limited: bool


def read_hosts(path: str) -> HostFile:
    """Read a host file.

    Raises
    ------
    LaunchError
        It cannot be read, is no text, or a line is wrong.
    """
    full = os.path.abspath(os.path.expanduser(path)) if path else repr(path)
    try:
        with open(full, "rb") as file:
            data = file.read(MOST_BYTES + 1)
    except OSError as error:
        reason = error.strerror or str(error)
        raise LaunchError(
            f"-H/--hostfile: {full} cannot be read ({reason}); give a text file with "
            f"one host a line: {FORM}"
        ) from error
    try:
        if len(data) > MOST_BYTES or b"\0" in data:
            raise ValueError
        text = data.decode("utf-8")
    except ValueError:
        raise LaunchError(
            f"-H/--hostfile: {full} is not a text file in UTF-8 of at most "
            f"{MOST_BYTES >> 20} MiB; give one with one host a line: {FORM}"
        ) from None
    return parse_hosts(text, full)


def parse_hosts(text: str, source: str) -> HostFile:
    """Parse the lines of a host file.

    Parameters
    ----------
    text : str
        One host a line. '#' starts a comment; lines with the same user, name and
        port add their slots up, as a line without ``slots=`` has one.
    source : str
        Where it comes from, for messages.

    Raises
    ------
    LaunchError
        Names the line, what it has, and what is allowed.
    """
    hosts: dict[Host, int] = {}  # Host with one slot -> its slots.
    is_limited = False
    lines = re.split(r"\r\n|\r|\n", text[1:] if text[:1] == "\ufeff" else text)
    for number, line in enumerate(lines, 1):
        words = re.sub(r"\s*=\s*", "=", line.partition("#")[0]).split()
        if not words:
            continue
        try:
            host, slots = _host(words[0]), _slots(words[1:])
        except ValueError as error:
            raise LaunchError(f"{source}, line {number}: {error}; {FORM}") from None
        is_limited |= slots is not None
        hosts[host] = hosts.get(host, 0) + (slots or 1)
    if not hosts:
        raise LaunchError(f"{source} has no host; {FORM}")
    found = tuple(replace(host, slots=slots) for host, slots in hosts.items())
    return HostFile(found, is_limited)


def _host(word: str) -> Host:
    """Parse ``user@name:port``."""
    user, at, place = word.rpartition("@")
    if at and not _USER.match(user):
        _refuse(word, f"has {user!r} as the user", "letters, digits and _ . + - in it")
    brackets = _BRACKETS.match(place)
    if brackets:
        (name, port), is_ipv6 = brackets.groups(), True
    elif place.count(":") > 1:
        name, port, is_ipv6 = place, None, True
    else:
        name, colon, port = place.partition(":")
        port, is_ipv6 = (port if colon else None), False
    _check_name(word, name, is_ipv6)
    return Host(name, user, None if port is None else _port(word, name, port))


def _check_name(word: str, name: str, is_ipv6: bool) -> None:
    """Refuse what is neither a name nor an address."""
    if is_ipv6:
        _check_address(word, _ZONE.sub("", name), ipaddress.IPv6Address, "IPv6")
    elif not _NAME.match(name):
        start = ", and no '-' first" if name.startswith("-") else ""
        allowed = f"letters, digits and _ . - in it{start}"
        _refuse(word, f"has {name!r} as the host", allowed)
    elif re.match(r"[0-9.]+\Z", name):
        _check_address(word, name, ipaddress.IPv4Address, "IPv4")


def _check_address(word: str, name: str, kind: type, family: str) -> None:
    """Refuse what is not an address, though it looks like one."""
    try:
        kind(name)
    except ValueError:
        _refuse(word, f"is not an {family} address", "a whole one, or a name")


def _port(word: str, name: str, text: str) -> int:
    """Parse the port of ssh; a few workers in its place are refused."""
    port = int(text) if _NUMBER.match(text) else 0
    if LEAST_PORT <= port <= MOST_PORT:
        return port
    what = f"has {text!r} after ':', where the port of ssh goes"
    if 0 < port < LEAST_PORT:  # As MPICH's machine files have it.
        what += f", not a number of processes: for {port} write '{name} slots={port}'"
    _refuse(word, what, f"{LEAST_PORT} to {MOST_PORT}, or no ':' for ssh's own choice")


def _slots(words: list[str]) -> int | None:
    """Parse what comes after the host; None without ``slots=``."""
    found: dict[str, int] = {}
    for word in words:
        name, equals, text = word.partition("=")
        name = name.replace("-", "_")
        if not equals or name not in ("slots", "max_slots") or name in found:
            _refuse(word, "after a host means nothing here", "one slots=N")
        number = int(text) if _NUMBER.match(text) else 0
        if not 1 <= number <= MOST_SLOTS:
            _refuse(word, f"has {text!r} as a number", f"1 to {MOST_SLOTS}")
        found[name] = number
    # Open MPI's max_slots is a limit above slots; here slots is the limit.
    if found.get("max_slots", MOST_SLOTS) < found.get("slots", MOST_SLOTS):
        _refuse(" ".join(words), "has no slots=N that fits", "slots=N, alone")
    return found.get("slots")


def _refuse(word: str, what: str, allowed: str) -> NoReturn:
    """Raise what `parse_hosts` completes."""
    shown = word if len(word) <= 80 else word[:77] + "..."
    raise ValueError(f"{shown!r} {what}; allowed: {allowed}")

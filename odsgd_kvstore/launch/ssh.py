"""Hosts that are reached by ssh: one connection each, with the agent at its other end."""

from __future__ import annotations

import contextlib
import io
import os
import secrets
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Iterable, Sequence
from multiprocessing.connection import Connection

from odsgd_kvstore.errors import LaunchError
from odsgd_kvstore.launch.hosts import Host
from odsgd_kvstore.launch.remote import RemoteAgent
from odsgd_kvstore.launch.shims import shim_argv
from odsgd_kvstore.launch.signals import StopSignals

# Never asks; notices within 20 s that a host is gone; no forwarding, no terminal.
OPTIONS = (
    "BatchMode=yes",
    "ConnectTimeout=10",
    "ServerAliveInterval=5",
    "ServerAliveCountMax=3",
    "ControlPath=none",
    "ClearAllForwardings=yes",
    "RemoteCommand=none",
    "RequestTTY=no",
    "LogLevel=ERROR",
)
# Constant: all else, the key too, comes through standard input. Every shell takes it.
START = """exec {python} -c 'exec(open(0,"rb",0,closefd=False).readline())'"""
# The first line that it reads, in front of which a login shell may print anything.
_PROGRAM = """
import json, os, struct, sys
sys.argv[:] = ["odsgd-agent"]
sys.path[:0] = {paths!r}
os.write(1, {mark!r})
try:
    from odsgd_kvstore.launch.agent import main
except Exception as error:
    text = "%s: %s" % (type(error).__name__, error)
    message = {{"op": "fatal", "error": text, "python": sys.version.split()[0]}}
    data = json.dumps(message).encode()
    os.write(1, struct.pack("!i", len(data)) + data)
    sys.exit(1)
main({silence_s!r})
"""
MOST_BEFORE, MOST_SAID = 4096, 3
SYNC_SILENCE_S = 60
ADVICE = {
    "Permission denied (publickey": "no key of yours is accepted there, and ssh must "
    "not ask for a password: put your public key there (ssh-copy-id HOST), or start an "
    "ssh-agent",
    "Host key verification failed": "the host's key is not known, or has changed: "
    "connect once by hand (ssh HOST), or add it with ssh-keyscan",
    "Could not resolve hostname": "check the name in the host file and in ~/.ssh/config",
    "Connection refused": "no sshd listens there: check the port in the host file",
    "timed out": "the host is down, or a firewall is between: check with ssh HOST true",
    "No route to host": "the host is down, or on a network that is not reached from "
    "here: check with ssh HOST true",
    "not found": "make the same virtual environment there, at the same path, or start "
    "from one that is on a file system which all hosts share",
    "No such file": "make the same virtual environment there, at the same path, or "
    "start from one that is on a file system which all hosts share",
}


def ssh_argv(host: Host, options: Sequence[str], python: str) -> list[str]:
    """The command that starts the agent on a host.

    Parameters
    ----------
    options : sequence of str
        The user's own (``--ssh-opts``); of an option given twice ssh takes the first.
    python : str
        Path of the interpreter there.
    """
    argv = _ssh_words(host, options)
    return [*argv, "--", host.name, START.format(python=shlex.quote(python))]


def rsync_argv(
    host: Host, options: Sequence[str], source: str, target: str
) -> list[str]:
    """The command that makes a host's folder `target` like `source`.

    What is only in `target` stays there.
    """
    name = f"[{host.name}]" if ":" in host.name else host.name
    # Without --protect-args the shell there would take blanks for separators.
    argv = ["rsync", "-az", "--protect-args", f"--timeout={SYNC_SILENCE_S}"]
    argv += ["-e", shlex.join(_ssh_words(host, options))]
    return [*argv, "--", source.rstrip("/") + "/", f"{name}:{target}/"]


def _ssh_words(host: Host, options: Sequence[str]) -> list[str]:
    """ssh with its options for a host, without the host's name."""
    words = ["ssh", *options]
    for option in OPTIONS:
        words += ["-o", option]
    if host.port is not None:
        words += ["-p", str(host.port)]
    if host.user:
        words += ["-l", host.user]
    return words


def connect(
    host: Host,
    options: Sequence[str],
    paths: Sequence[str],
    silence_s: float,
    python: str = sys.executable,
) -> RemoteAgent:
    """Start the agent on a host; returns at once, see `RemoteAgent.greet`.

    Parameters
    ----------
    paths : sequence of str
        Where Python looks for this package there, before its own places.
    silence_s : float
        After which host and controller count each other as lost.

    Raises
    ------
    LaunchError
        There is no ssh here.
    """
    if shutil.which("ssh") is None:
        raise LaunchError(
            "the program 'ssh' is not installed; install it (Debian and Ubuntu: "
            "apt-get install openssh-client; Fedora: dnf install openssh-clients)"
        )
    try:
        return _Session(host, options, paths, silence_s, python).remote
    except OSError as error:
        raise LaunchError(
            f"{host.label}: ssh cannot be started here: {error}; with many hosts raise "
            "the limit of open files, such as with ulimit -n 4096"
        ) from error


class _Session:
    """An ssh process, and what it says in its own name."""

    def __init__(
        self,
        host: Host,
        options: Sequence[str],
        paths: Sequence[str],
        silence_s: float,
        python: str,
    ) -> None:
        self._host, self._python = host, python
        # In a session of its own it survives an interrupt from the terminal, which the
        # roles are to hear of in an orderly way; it ends when we close its input.
        self._popen = subprocess.Popen(
            ssh_argv(host, options, python),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        self._said: deque[str] = deque(maxlen=20)
        self._listener = threading.Thread(target=self._listen, daemon=True)
        self._listener.start()
        mark = b"\nodsgd-agent " + secrets.token_hex(8).encode() + b"\n"
        program = _PROGRAM.format(paths=list(paths), mark=mark, silence_s=silence_s)
        with contextlib.suppress(OSError):  # It ended already: `_why` says so.
            os.write(self._popen.stdin.fileno(), f"exec({program!r})\n".encode())
        self._stream = _Stream(self._popen.stdout.fileno(), mark)
        self.remote = RemoteAgent(
            host.label,
            Connection(self._stream.fd, writable=False),
            Connection(os.dup(self._popen.stdin.fileno()), readable=False),
            silence_s,
            self._why,
            self._close,
        )
        self._popen.stdin.close()

    def _listen(self) -> None:
        """Keep the last lines that ssh or the program there wrote as errors."""
        with self._popen.stderr as errors:
            for line in errors:
                self._said.append(line.decode(errors="replace").rstrip())

    def _why(self) -> str:
        """Why the connection ended."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._popen.wait(5.0)
        self._listener.join(1.0)
        # Its own errors are last; a shell that refuses may have written elsewhere.
        before = self._stream.before.decode(errors="replace").split("\n")
        said = "; ".join(_last(self._said) or _last(before))
        text = f"the connection ended (ssh exit code {self._popen.returncode})"
        text += f": {said}" if said else ""
        return text + _advice(said, self._host)

    def _close(self) -> None:
        """End ssh if it has not ended by itself."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._popen.wait(2.0)
        end_soon(self._popen)
        self._popen.stdout.close()


def _last(lines: Iterable[str]) -> list[str]:
    """The last few that say something."""
    return [line.strip().rstrip(".") for line in lines if line.strip()][-MOST_SAID:]


def _advice(said: str, host: Host) -> str:
    """What to do about an error of ssh, if it is a known one."""
    known = [advice for part, advice in ADVICE.items() if part in said]
    return f"; {known[0].replace('HOST', host.name)}" if known else ""


def end_soon(process: subprocess.Popen) -> None:
    """TERM, and KILL after two seconds; returns when it has ended."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        if process.poll() is None:
            process.send_signal(number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(2.0)


class _Stream:
    """What comes from a host after a mark, as a file of its own.

    Whatever a login shell says before is kept for the message of a failure.
    """

    def __init__(self, source: int, mark: bytes) -> None:
        self.fd, self._sink = os.pipe()
        self.before = b""
        threading.Thread(target=self._copy, args=(source, mark), daemon=True).start()

    def _copy(self, source: int, mark: bytes) -> None:
        """Copy to our pipe until the source ends, or nobody reads any more."""
        is_marked = False
        with contextlib.suppress(OSError), open(self._sink, "wb", 0) as sink:
            for data in iter(lambda: os.read(source, 1 << 16), b""):
                if is_marked:
                    _write(sink, data)
                    continue
                start, is_marked, rest = (self.before + data).partition(mark)
                self.before = start[-MOST_BEFORE:]
                if is_marked:
                    _write(sink, rest)


def _write(sink: io.FileIO, data: bytes) -> None:
    """Write all of it."""
    view = memoryview(data)
    while view:
        view = view[sink.write(view) :]


def copy_folder(
    hosts: Sequence[Host],
    options: Sequence[str],
    source: str,
    target: str,
    stop: StopSignals,
) -> None:
    """Copy a folder to all hosts, at the same time; returns when it is there.

    Parameters
    ----------
    stop : StopSignals
        Ends the wait.

    Raises
    ------
    LaunchError
        There is no rsync here, or a copy failed: names the host.
    """
    if shutil.which("rsync") is None:
        raise LaunchError(
            "--sync-dst-dir needs the program 'rsync' here and on every host; install "
            "it (Debian and Ubuntu: apt-get install rsync), or leave the option out"
        )
    with contextlib.ExitStack() as stack:
        copies = [
            _Copy(host, rsync_argv(host, options, source, target), stack)
            for host in hosts
        ]
        while any(copy.popen.poll() is None for copy in copies):
            if stop.requested:
                return
            time.sleep(0.05)
        failures = [copy.failure() for copy in copies if copy.popen.returncode]
    if failures:
        raise LaunchError(
            f"--sync-dst-dir {target}: not all hosts have the folder now. "
            + " | ".join(failures)
        )


class _Copy:
    """A running rsync, ended with `stack`."""

    def __init__(
        self, host: Host, argv: Sequence[str], stack: contextlib.ExitStack
    ) -> None:
        self._host = host
        self._errors = stack.enter_context(tempfile.TemporaryFile())
        self.popen = subprocess.Popen(
            shim_argv(os.getpid(), argv),  # It ends with the launcher.
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=self._errors,
            start_new_session=True,
        )
        stack.callback(end_soon, self.popen)

    def failure(self) -> str:
        """What went wrong."""
        self._errors.seek(0)
        said = "; ".join(self._errors.read().decode(errors="replace").split("\n"))
        code, said = self.popen.returncode, said.strip("; ")
        text = f"{self._host.label}: rsync ended with code {code}: {said}"
        # What rsync itself does not find is no program.
        return text + _advice(said.replace("No such file", ""), self._host)

"""mpirun: how it is called, and how its ranks learn where rank 0 is."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import random
import re
import secrets
import shutil
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence

from odsgd_kvstore.errors import LaunchError
from odsgd_kvstore.launch import mpi_broadcast
from odsgd_kvstore.launch.meeting import listen
from odsgd_kvstore.launch.ranks import DEFAULT_PORTS, Rank, Way, ancestors
from odsgd_kvstore.launch.shims import shim_argv

MOST_PORTS, MOST_ADDRESSES, VERSION_S, CHECK_S = 100, 64, 30.0, 0.2
_SONAMES = {
    "Open MPI": ("libmpi.so.40", "libmpi.so.20", "libmpi.so.12", "libmpi.so"),
    "MPICH": ("libmpi.so.12", "libmpich.so.12", "libmpi.so"),
}
_KINDS = (
    ("Open MPI", re.compile(r"Open MPI|OpenRTE|PRRTE|PRTE|Spectrum MPI")),
    ("MPICH", re.compile(r"HYDRA|MPICH|Intel\(R\) MPI|MVAPICH", re.IGNORECASE)),
)
# With these, mpirun knows from the cluster how many processes each host takes.
_ALLOCATIONS = ("SLURM_JOB_ID", "PBS_NODEFILE", "LSB_JOBID", "PE_HOSTFILE")


class ByBroadcast(Way):
    """Rank 0 chooses a port and a token, and MPI broadcasts them.

    Parameters
    ----------
    rank : Rank
        Of this process.
    environ : mapping of str to str
        Its environment; `ODSGD_MPI_LIBRARY` may name MPI's library.
    ports : tuple of int
        First and last port where rank 0 may listen.
    """

    def __init__(
        self,
        rank: Rank,
        environ: Mapping[str, str],
        ports: tuple[int, int] = DEFAULT_PORTS,
    ) -> None:
        self._rank, self._environ, self._ports = rank, environ, ports
        self._token = b""

    def listen(
        self, deadline: float, check: Callable[[], None] = lambda: None
    ) -> socket.socket:
        """Listen at a random free port of the range, and broadcast it."""
        ports = range(self._ports[0], self._ports[1] + 1)
        listener = listen(random.sample(ports, min(len(ports), MOST_PORTS)))
        self._token = secrets.token_bytes(32)
        port, token = listener.getsockname()[1], self._token.hex()
        said = {"addresses": own_addresses(), "port": port, "token": token}
        try:
            self._broadcast(json.dumps(said), deadline, check)
        except BaseException:
            listener.close()
            raise
        return listener

    def seal(self) -> tuple[bytes, bytes]:
        """The token; MPI has given it to the callers."""
        return self._token, b""

    def targets(self, deadline: float) -> list[tuple[str, int]]:
        """All addresses of rank 0's host, as it broadcast them."""
        said = json.loads(self._broadcast("", deadline))
        self._token = bytes.fromhex(said["token"])
        return [(address, said["port"]) for address in said["addresses"]]

    def open_credential(self, credential: bytes) -> bytes:
        """The token; MPI has given it to us."""
        return self._token

    def _broadcast(
        self, text: str, deadline: float, check: Callable[[], None] = lambda: None
    ) -> str:
        """Rank 0's text, by way of a process that calls MPI."""
        rank = self._rank
        kind = "1" if rank.system == "Open MPI" else "0"
        libraries = find_libraries(rank.system, self._environ)
        script = [sys.executable, "-I", "-S", mpi_broadcast.__file__]
        argv = shim_argv(os.getpid(), [*script, kind, str(rank.size), *libraries])
        limit_s = max(1.0, deadline - time.monotonic())
        # Its errors are not kept: where MPI aborts, nobody is left to show them.
        with subprocess.Popen(
            argv,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=dict(self._environ),
            pass_fds=list(_mpi_files(self._environ)),
        ) as process:
            try:
                output = _communicate(process, text.encode(), deadline, check)
            except subprocess.TimeoutExpired:
                raise LaunchError(
                    self._advise(f"did not answer in {limit_s:.0f} s")
                ) from None
            finally:
                process.kill()
        mark = "\n" + mpi_broadcast.MARK
        answer = output.decode(errors="replace").rpartition(mark)[2]
        if process.returncode != 0 or not answer.strip():
            if process.returncode < 0:  # mpirun ends the job.
                raise LaunchError(
                    f"rank {rank.rank} on {rank.node} was ended while it waited for MPI"
                )
            what = f"failed with exit code {process.returncode}; it may say why above"
            raise LaunchError(self._advise(what))
        return answer.strip()

    def _advise(self, what: str) -> str:
        """What to do about an MPI that cannot be used."""
        return (
            f"rank {self._rank.rank} on {self._rank.node}: {self._rank.system} {what}. "
            "Set ODSGD_MPI_LIBRARY to the libmpi.so of the mpirun that you use, as a "
            "full path on every host (and load its module, if the cluster has such), "
            "or give --launcher ssh with a host file"
        )


def _communicate(
    process: subprocess.Popen, text: bytes, deadline: float, check: Callable[[], None]
) -> bytes:
    """The output of a process that reads `text`; looks at `check` meanwhile."""
    given: bytes | None = text
    while True:
        check()
        try:
            return process.communicate(given, timeout=CHECK_S)[0]
        except subprocess.TimeoutExpired:
            given = None  # It has it already.
            if time.monotonic() > deadline:
                raise


def _mpi_files(environ: Mapping[str, str]) -> Iterator[int]:
    """Open files by which MPICH's library talks to its mpirun."""
    for name in ("PMI_FD", "HYDI_CONTROL_FD"):
        with contextlib.suppress(ValueError, OSError):
            number = int(environ.get(name, ""))
            os.fstat(number)
            yield number


def own_addresses() -> list[str]:
    """The IPv4 addresses of this host, 127.0.0.1 last."""
    found = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode()[:15])
            with contextlib.suppress(OSError):  # It has no IPv4 address.
                siocgifaddr = 0x8915
                answer = fcntl.ioctl(probe, siocgifaddr, request)
                found.append(socket.inet_ntoa(answer[20:24]))
    others = [ip for ip in dict.fromkeys(found) if not ip.startswith("127.")]
    return [*others[:MOST_ADDRESSES], "127.0.0.1"]


def find_libraries(system: str, environ: Mapping[str, str]) -> list[str]:
    """Return names and paths of libmpi to try, the likeliest first.

    A host may have several MPIs; the mpirun that started us is the one that counts,
    so what that process has loaded, and where it lies, come first.
    """
    if environ.get("ODSGD_MPI_LIBRARY"):
        return [environ["ODSGD_MPI_LIBRARY"]]
    names, folders = _SONAMES[system], []
    for pid in reversed(ancestors()):
        folders += _loaded_from(pid)
        with contextlib.suppress(OSError):
            folders += _library_folders(os.readlink(f"/proc/{pid}/exe"))
    for prefix in filter(None, map(environ.get, ("OPAL_PREFIX", "I_MPI_ROOT"))):
        folders += _library_folders(os.path.join(prefix, "bin", "mpirun"))
    program = shutil.which("mpirun", path=environ.get("PATH"))
    if program:
        folders += _library_folders(os.path.realpath(program))
    paths = [os.path.join(folder, name) for folder in folders for name in names]
    there = [path for path in dict.fromkeys(paths) if os.path.exists(path)]
    return [*there, *names]


def _loaded_from(pid: int) -> list[str]:
    """Folders of the Open MPI libraries that a process has loaded."""
    found: list[str] = []
    with contextlib.suppress(OSError), open(f"/proc/{pid}/maps") as maps:
        for line in maps:
            path = line.rstrip("\n").partition("/")[2]
            name = os.path.basename(path)
            if re.match(r"lib(open-pal|open-rte|mpi)\.so", name):
                found.append("/" + os.path.dirname(path))
    return list(dict.fromkeys(found))


def _library_folders(program: str) -> list[str]:
    """Where an installation has its libraries, from the path of its program."""
    prefix = os.path.dirname(os.path.dirname(program))
    return [os.path.join(prefix, folder) for folder in ("lib", "lib64", "lib/release")]


def find_mpirun(environ: Mapping[str, str]) -> tuple[str, str]:
    """Return the path of mpirun and its kind, 'Open MPI' or 'MPICH'.

    Raises
    ------
    LaunchError
        There is none, or it is of no known kind.
    """
    search = environ.get("PATH", os.defpath)
    found = [shutil.which(name, path=search) for name in ("mpirun", "mpiexec")]
    program = next(filter(None, found), None)
    if program is None:
        raise LaunchError(
            "neither mpirun nor mpiexec is in PATH; install Open MPI or MPICH, load "
            "its module, or give --launcher ssh with a host file"
        )
    try:
        done = subprocess.run(
            [program, "--version"], stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL, timeout=VERSION_S, env=dict(environ), check=False,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired) as error:
        raise LaunchError(f"{program} --version failed: {error}") from None
    text = done.stdout.decode(errors="replace")
    for kind, pattern in _KINDS:
        if pattern.search(text):
            return program, kind
    line = (text.strip().splitlines() or ["nothing"])[0]
    raise LaunchError(
        f"{program} --version says {line!r}; known are Open MPI and MPICH (with Intel "
        "MPI and MVAPICH). Start the ranks yourself: mpirun -n N odsgd-launch "
        "--launcher mpi ..."
    )


def mpirun_argv(
    program: str,
    kind: str,
    size: int,
    argv: Sequence[str],
    *,
    names: Sequence[str] = (),
    hostfile: str | None = None,
    oversubscribe: bool = False,
) -> list[str]:
    """Return the mpirun command that starts `size` ranks of `argv`.

    Parameters
    ----------
    program, kind : str
        See `find_mpirun`.
    names : sequence of str
        Variables that the ranks get. Never a value: other users can read command
        lines. MPICH gives its ranks all variables.
    hostfile : str, optional
        In the form that this mpirun takes.
    oversubscribe : bool
        More ranks than cores are right, see `needs_oversubscribe`.
    """
    command = [program, "-n", str(size)]
    if kind == "MPICH":
        return [*command, *(["-f", hostfile] if hostfile else []), *argv]
    # Bound to one core, as is the default for few ranks, a worker would use no other.
    command += ["--bind-to", "none"]
    if hostfile:
        command += ["--hostfile", hostfile]
    if oversubscribe:
        command.append("--oversubscribe")
    for name in sorted(names):
        command += ["-x", name]
    return [*command, *argv]


def needs_oversubscribe(
    size: int, hostfile: str | None, environ: Mapping[str, str], cores: int
) -> bool:
    """Whether Open MPI would refuse more ranks than this machine's cores.

    The limits of a host file or of the cluster's own allocation stay as they are.
    """
    is_local = not hostfile and not any(environ.get(name) for name in _ALLOCATIONS)
    return is_local and size > cores

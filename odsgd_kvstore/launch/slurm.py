"""srun: how it is called, and how the tasks of a step find and trust rank 0.

Nobody has to say where rank 0 is: it is on the step's first node, at one of a few
ports that follow from the numbers of job and step. Any user of that node may listen
there, too. So both sides prove that they know a token, see `handshake`: it follows
from the user's ODSGD_KEY, or else rank 0 sends it as a credential of munge's that only
the same user can open, and whose maker the receiver checks.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import os
import re
import secrets
import shutil
import socket
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence

from odsgd_kvstore.config import job_key
from odsgd_kvstore.errors import LaunchError
from odsgd_kvstore.launch.meeting import listen
from odsgd_kvstore.launch.ranks import DEFAULT_PORTS, Rank, Way

NUM_PORTS, PROGRAM_S = 16, 8.0
_MAGIC = b"odsgd_kvstore"
_UID = re.compile(rb"UID:.*\((\d+)\)\Z")


class ByNodeList(Way):
    """Rank 0 is where the step's list of nodes and its number say.

    Parameters
    ----------
    rank : Rank
        Of this process.
    environ : mapping of str to str
        Its environment.
    ports : tuple of int
        First and last port where rank 0 may listen; the same on every rank.

    Raises
    ------
    LaunchError
        There is neither a key nor munge.
    ConfigError
        ODSGD_KEY_FILE can't be used.
    """

    def __init__(
        self,
        rank: Rank,
        environ: Mapping[str, str],
        ports: tuple[int, int] = DEFAULT_PORTS,
    ) -> None:
        self._rank, self._environ = rank, environ
        self._step = f"{environ['SLURM_JOB_ID']}.{environ['SLURM_STEP_ID']}"
        self._ports = candidate_ports(self._step, *ports)
        key = job_key(environ)
        self._has_key = bool(key)
        if key:
            text = f"odsgd_kvstore step {self._step}".encode()
            self._token = hmac.digest(key, text, "sha256")
        else:
            self._token = secrets.token_bytes(32)
            self._munge_flags = _munge_flags()
            self._check_munge()

    def listen(
        self, deadline: float, check: Callable[[], None] = lambda: None
    ) -> socket.socket:
        """Listen at the first candidate that is free."""
        first = first_node(_node_list(self._environ))
        if self._rank.node != first:
            raise LaunchError(
                f"rank 0 runs on {self._rank.node}, and the other ranks look for it "
                f"on the step's first node, {first}; give srun --distribution=block "
                "or --distribution=cyclic"
            )
        return listen(self._ports)

    def seal(self) -> tuple[bytes, bytes]:
        """The token, and if the others have no key a new credential that holds it."""
        if self._has_key:
            return self._token, b""
        text = b" ".join([_MAGIC, self._step.encode(), self._token.hex().encode()])
        flags = [f"--restrict-uid={os.geteuid()}", *self._munge_flags]
        return self._token, _run(["munge", *flags], text)

    def targets(self, deadline: float) -> list[tuple[str, int]]:
        """The candidates on each address of the first node."""
        node = first_node(_node_list(self._environ))
        if self._environ.get("SLURM_STEP_NUM_NODES") == "1":
            addresses = ["127.0.0.1"]
        else:
            addresses = list(dict.fromkeys(_addresses(node)))
        if not addresses:
            raise LaunchError(
                f"rank {self._rank.rank} on {self._rank.node} found no IPv4 address of "
                f"{node}, where rank 0 is; neither the name service nor scontrol "
                "knows one"
            )
        return [(address, port) for port in self._ports for address in addresses]

    def open_credential(self, credential: bytes) -> bytes:
        """The token: our own, or the one in a credential that our own user made."""
        if self._has_key:
            return self._token
        if not credential:
            raise LaunchError(
                "it sent no credential of munge's; if rank 0 has ODSGD_KEY, set it for "
                "all ranks (srun --export=ALL)"
            )
        answer = _run(["unmunge", "--keys=UID", *self._munge_flags], credential)
        head, _, payload = answer.partition(b"\n\n")
        maker = _UID.match(head.strip())
        magic, step, token = payload.split()
        if maker is None or int(maker.group(1)) != os.geteuid():
            raise LaunchError("its credential was made by another user")
        if magic != _MAGIC or step != self._step.encode():
            raise LaunchError(f"its credential is for step {step.decode()!r}")
        return bytes.fromhex(token.decode())

    def _check_munge(self) -> None:
        """Refuse to go on without a way to prove who we are."""
        try:
            self.seal()
        except LaunchError as error:
            raise LaunchError(
                f"rank {self._rank.rank} on {self._rank.node} cannot prove to the "
                "others that it is yours: ODSGD_KEY is not set, and munge, which "
                f"comes with most Slurms, does not work here ({error}). Set "
                "ODSGD_KEY before srun, to a random secret (export ODSGD_KEY=$(openssl "
                "rand -hex 32)), or have munge repaired"
            ) from None


def _run(argv: Sequence[str], text: bytes) -> bytes:
    """The output of a program of munge's; texts go through pipes only."""
    if shutil.which(argv[0]) is None:
        raise LaunchError(f"{argv[0]}: no such program in PATH")
    try:
        done = subprocess.run(
            argv, input=text, capture_output=True, timeout=PROGRAM_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise LaunchError(f"{argv[0]}: {error}") from None
    if done.returncode != 0:
        why = done.stderr.decode(errors="replace").strip()
        raise LaunchError(why or f"{argv[0]} failed with exit code {done.returncode}")
    return done.stdout.strip()


def _munge_flags() -> list[str]:
    """Where munge listens, if Slurm is configured to use another place than usual."""
    with contextlib.suppress(LaunchError):
        text = _run(["scontrol", "show", "config"], b"").decode(errors="replace")
        found = re.search(r"^AuthInfo\s*=.*\bsocket=([^\s,]+)", text, re.MULTILINE)
        if found:
            return [f"--socket={found.group(1)}"]
    return []


def candidate_ports(step: str, first: int, last: int) -> list[int]:
    """Return the ports where rank 0 of this step may listen, in order.

    Parameters
    ----------
    step : str
        'JOB.STEP'.
    first, last : int
        The range to choose from.
    """
    count = last - first + 1
    digest = hashlib.sha256(step.encode()).digest()
    start = int.from_bytes(digest[:8], "big")
    return [first + (start + i) % count for i in range(min(NUM_PORTS, count))]


def first_node(nodes: str) -> str:
    """Return the first name in a list as Slurm writes it, 'node[01-04,7],x'.

    Raises
    ------
    LaunchError
        The list is empty.
    """
    name = re.sub(r"\[([^\],-]+)[^\]]*\]", r"\1", nodes).partition(",")[0].strip()
    if not name:
        raise LaunchError("Slurm gave no list of nodes (SLURM_STEP_NODELIST is empty)")
    return name


def _node_list(environ: Mapping[str, str]) -> str:
    """The nodes of the step."""
    return environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_NODELIST", "")


def _addresses(node: str) -> Iterator[str]:
    """IPv4 addresses of a node of Slurm's, whose name need not be that of a host."""
    for name in (node, *_names_of(node)):
        with contextlib.suppress(OSError):
            yield from socket.gethostbyname_ex(name)[2]


def _names_of(node: str) -> Iterator[str]:
    """What Slurm's own configuration says of a node."""
    with contextlib.suppress(LaunchError):
        text = _run(["scontrol", "--oneliner", "show", "node", node], b"").decode()
        for key in ("NodeAddr", "NodeHostName"):
            found = re.search(rf"\b{key}=(\S+)", text)
            if found:
                yield found.group(1)


def srun_argv(
    size: int, argv: Sequence[str], environ: Mapping[str, str] | None = None
) -> list[str]:
    """Return the srun command that starts `size` ranks of `argv`.

    Parameters
    ----------
    environ : mapping of str to str, optional
        The environment of srun, all of which the ranks get; `ODSGD_KEY` goes there.
    """
    environ = environ or {}
    command = ["srun", f"--ntasks={size}", "--export=ALL", "--kill-on-bad-exit=1"]
    command.append("--mpi=none")  # The ranks call no MPI.
    if environ.get("SLURM_CPUS_PER_TASK"):  # Of sbatch; srun itself ignores it.
        command.append(f"--cpus-per-task={environ['SLURM_CPUS_PER_TASK']}")
    if "SLURM_PTY_PORT" in environ:  # A shell of srun's: its step holds the cores.
        command.append("--overlap")
    return [*command, *argv]

"""Which rank this process is under mpirun or srun, and how it meets rank 0."""

from __future__ import annotations

import contextlib
import os
import shlex
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection

from odsgd_kvstore.errors import LaunchError
from odsgd_kvstore.launch.handshake import Guest
from odsgd_kvstore.launch.meeting import dial, receive

MEET_S = 120.0
DEFAULT_PORTS = (20000, 32767)  # Below the ports that Linux gives to callers.
# Slurm's names for steps that run no tasks of ours: a batch script, a shell of salloc.
_FIRST_SPECIAL_STEP = 0xFFFFFFF0
_STARTERS = ("mpirun", "mpiexec", "orte", "prte", "hydra", "slurmstepd")


@dataclass(frozen=True)
class Rank:
    """The place of this process among those that one mpirun or srun started.

    Parameters
    ----------
    rank, size : int
        0 <= rank < size.
    node : str
        The name of this host.
    system : str
        'Open MPI', 'MPICH' (and all that are like it: Intel MPI, MVAPICH) or 'Slurm'.
    local_rank : int
        Among the ranks of this host.
    """

    rank: int
    size: int
    node: str
    system: str
    local_rank: int = 0


class Way:
    """How the ranks learn where rank 0 is, and a token that strangers do not know.

    `mpi.ByBroadcast` and `slurm.ByNodeList` are the two.
    """

    def listen(
        self, deadline: float, check: Callable[[], None] = lambda: None
    ) -> socket.socket:
        """Rank 0: listen, and see to it that the others can know where.

        `check` is called while it waits, and may raise.
        """
        raise NotImplementedError

    def seal(self) -> tuple[bytes, bytes]:
        """Rank 0: the token, and what to send to a caller so that it knows it."""
        raise NotImplementedError

    def targets(self, deadline: float) -> list[tuple[str, int]]:
        """The others: hosts and ports where rank 0 may be."""
        raise NotImplementedError

    def open_credential(self, credential: bytes) -> bytes:
        """The others: the token, from what rank 0 sent."""
        raise NotImplementedError


def of_environment(launcher: str, environ: Mapping[str, str]) -> Rank | None:
    """Return this process's rank, or None if mpirun or srun did not start it.

    Parameters
    ----------
    launcher : str
        'mpi' or 'slurm'. Under srun an MPI job has the variables of both.
    environ : mapping of str to str

    Raises
    ------
    LaunchError
        The variables make no sense, or are those of the other launcher.
    """
    environ = {name: value for name, value in environ.items() if value}
    if launcher == "slurm":
        return _of_slurm(environ)
    node, step = socket.gethostname(), _step(environ)
    if "OMPI_COMM_WORLD_RANK" in environ:
        names = [f"OMPI_COMM_WORLD_{what}" for what in ("RANK", "SIZE", "LOCAL_RANK")]
        return _rank(environ, *names, node, "Open MPI")
    if "PMI_RANK" in environ:
        names = ["PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID"]
        return _rank(environ, *names, node, "MPICH")
    if step and "PMIX_RANK" in environ:  # srun --mpi=pmix
        names = ["PMIX_RANK", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID"]
        return _rank(environ, *names, node, "Open MPI")
    if step:
        raise LaunchError(
            "--launcher mpi was started by srun without MPI; give --launcher slurm, "
            "or start it with mpirun or with srun --mpi=pmix"
        )
    return None


def _of_slurm(environ: Mapping[str, str]) -> Rank | None:
    """The rank in a step of Slurm's."""
    step, tasks = _step(environ), environ.get("SLURM_STEP_NUM_TASKS")
    # Hydra starts one proxy per node by srun; srun --mpi=pmi2 sets PMI_SIZE, too.
    if "OMPI_COMM_WORLD_RANK" in environ or (
        "PMI_RANK" in environ and not (step and environ.get("PMI_SIZE") == tasks)
    ):
        raise LaunchError(
            "--launcher slurm was started by mpirun; give --launcher mpi, or start it "
            "with srun"
        )
    if not step:
        return None
    node = environ.get("SLURMD_NODENAME") or socket.gethostname()
    names = ["SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID"]
    return _rank(environ, *names, node, "Slurm")


def _step(environ: Mapping[str, str]) -> str:
    """The step of Slurm's whose task we are; empty in a script or in a shell."""
    step, tasks = environ.get("SLURM_STEP_ID", ""), environ.get("SLURM_STEP_NUM_TASKS")
    is_shell = "SLURM_PTY_PORT" in environ and tasks == "1"
    # A script that sbatch got inside of a step has the variables of that one, still.
    is_old = environ.get("SLURM_NTASKS", tasks) != tasks
    if not step or is_shell or is_old:
        return ""
    is_special = _number(environ, "SLURM_STEP_ID", None) >= _FIRST_SPECIAL_STEP
    return "" if is_special else step


def _rank(
    environ: Mapping[str, str], rank: str, size: str, local: str, node: str, system: str
) -> Rank:
    """A rank from the variables of these names."""
    if size not in environ:
        raise LaunchError(f"{rank} is set, but {size} is not; start it all with mpirun")
    found = Rank(
        _number(environ, rank, None),
        _number(environ, size, None),
        node,
        system,
        _number(environ, local, 0),
    )
    if found.rank >= found.size:
        raise LaunchError(
            f"{rank} is {found.rank} and {size} is {found.size}; a rank is below the "
            "size. Does another program set these variables?"
        )
    return found


def _number(environ: Mapping[str, str], name: str, default: int | None) -> int:
    """An integer of at least 0."""
    text = environ.get(name, "") if default is None else environ.get(name, str(default))
    if not (text.isascii() and text.isdigit()):
        raise LaunchError(
            f"{name} is {text!r}; mpirun and srun set it to an integer of at least 0. "
            "Does another program set it? Then unset it"
        )
    return int(text)


def check_size(
    rank: Rank, num_workers: int, num_servers: int, argv: Sequence[str]
) -> None:
    """Refuse a number of ranks that is not that of the job's roles.

    Parameters
    ----------
    argv : sequence of str
        What each rank runs, for the message.

    Raises
    ------
    LaunchError
        With the command to type.
    """
    needed = 1 + num_servers + num_workers
    if rank.size == needed:
        return
    is_slurm = rank.system == "Slurm"
    start = (
        ["srun", f"--ntasks={needed}"] if is_slurm else ["mpirun", "-n", f"{needed}"]
    )
    raise LaunchError(
        f"{start[0]} started {rank.size} rank{'s' * (rank.size != 1)}, and the job "
        f"needs {needed}: 1 for the scheduler, {num_servers} for servers, "
        f"{num_workers} for workers. Type: {shlex.join([*start, *argv])}"
    )


def meet_as_controller(
    rank: Rank,
    way: Way,
    *,
    timeout: float = MEET_S,
    on_wait: Callable[[str], None] = lambda text: None,
    check: Callable[[], None] = lambda: None,
) -> list[Guest]:
    """Return the ranks 1 to size - 1, in order, once all have proved themselves.

    Parameters
    ----------
    rank : Rank
        Ours: 0.
    timeout : float
        Seconds for the whole meeting.
    on_wait : callable
        Gets a line every ten seconds that says who is missing.
    check : callable
        Called several times a second; what it raises ends the meeting.

    Returns
    -------
    list of Guest
        Each with rank, node and ``connection``.

    Raises
    ------
    LaunchError
        Somebody did not come in time; says who, and tells those who came.
    """
    deadline = time.monotonic() + timeout
    with contextlib.closing(way.listen(deadline, check)) as listener:
        return receive(listener, rank.size, way.seal, deadline, on_wait, check)


def meet_as_agent(rank: Rank, way: Way, *, timeout: float = MEET_S) -> Connection:
    """Return the connection to rank 0, once it has proved itself and all have met.

    Raises
    ------
    LaunchError
        Rank 0 was not found in time, or somebody else did not come.
    """
    deadline = time.monotonic() + timeout
    targets = way.targets(deadline)
    return dial(targets, rank.rank, rank.node, way.open_credential, deadline)


def ancestors() -> list[int]:
    """Pids from our parent up to the nearest process of mpirun's or srun's.

    Only the parent, if there is none such: a rank may run under a shell script.
    """
    pids = [os.getppid()]
    while pids[-1] > 1:
        name, parent = _process(pids[-1])
        if any(starter in name for starter in _STARTERS):
            return pids
        pids.append(parent)
    return pids[:1]


def _process(pid: int) -> tuple[str, int]:
    """Name and parent of a process; ('', 0) when it is gone."""
    with contextlib.suppress(OSError, ValueError), open(f"/proc/{pid}/stat") as file:
        start, _, rest = file.read().rpartition(")")
        return start.partition("(")[2], int(rest.split()[1])
    return "", 0


def parent_watch(on_lost: Callable[[], None]) -> None:
    """Call `on_lost` in a thread, once, when mpirun's or srun's process here is gone.

    Looks once a second whether we, and the shells between, still have the same parent.
    """
    chain = ancestors()
    links = list(zip(chain, chain[1:]))

    def watch() -> None:
        while os.getppid() == chain[0] and all(_process(a)[1] == b for a, b in links):
            time.sleep(1.0)
        on_lost()

    threading.Thread(target=watch, daemon=True).start()

"""Runs one job of benchmark_step_cost.py, and says what each of its roles used."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Mapping, Sequence

from emulated import BYTES_PER_NUMBER, Network
from step_cost_worker import BEGIN, END, PREFIX, READY, WorkerSettings, network_of
from systems import SYSTEMS
from usage import Usage

from odsgd_kvstore.errors import LaunchError
from odsgd_kvstore.keys import server_of
from odsgd_kvstore.launch import bandwidth, commands, local, network, processes

HERE = Path(__file__).resolve().parent
BIGARRAY_BOUND = 1_000_000  # MXNet's default
IDLE_S, MOST_IDLE_WAIT_S = 0.2, 20.0


@dataclass(frozen=True)
class Job:
    """One job; the other settings are `WorkerSettings`'.

    Parameters
    ----------
    rate : str
        Of each role's link in each direction; '' for none, and ipc.
    repetition : int
        Number of this job among equal ones.
    """

    system: str
    network: str
    optimizer: str = "sgd"
    num_workers: int = 2
    num_servers: int = 2
    rate: str = ""
    num_untimed_iters: int = 3
    num_timed_iters: int = 20
    timeout_s: float = 300.0
    repetition: int = 0

    def command(self, folder: str) -> tuple[str, ...]:
        """What every worker runs."""
        names = [field.name for field in dataclasses.fields(WorkerSettings)]
        settings = json.dumps({name: getattr(self, name) for name in names})
        return sys.executable, str(HERE / "step_cost_worker.py"), settings, folder


class _Observer:
    """Lets the workers of a job through its gates, and reads the usage there."""

    def __init__(self, job: Job, folder: str) -> None:
        self._num_workers = job.num_workers
        self._pids: dict[str, int] = {}
        self._num_waiting = 0
        self._fifos = []
        for rank in range(job.num_workers):
            path = os.path.join(folder, str(rank))
            os.mkfifo(path)
            # Open at both ends: neither opening nor writing waits for the worker.
            self._fifos.append(os.open(path, os.O_RDWR))
        self.samples: dict[str, dict[str, Usage]] = {}
        self.peak_bytes: dict[str, int] = {}
        self.results: list[dict[str, Any]] = []

    def close(self) -> None:
        for fifo in self._fifos:
            os.close(fifo)

    def on_started(self, pids: Mapping[str, int]) -> None:
        self._pids = dict(pids)

    def on_line(self, _role: Any, text: str) -> None:
        if not text.startswith(PREFIX):
            return
        said = json.loads(text[len(PREFIX) :])
        event = said.pop("event")
        if event == "result":
            self.results.append(said)
            return
        self._num_waiting += 1
        if self._num_waiting == self._num_workers:
            self._num_waiting = 0
            with contextlib.suppress(OSError):  # A role has died; the job will fail.
                self._at_gate(said["name"])
            for fifo in self._fifos:
                os.write(fifo, b".")

    def _at_gate(self, gate: str) -> None:
        """All workers wait, and nothing is under way."""
        if gate == READY:
            self._wait_until_idle()
        self.samples[gate] = self._read()
        if gate == END:
            self.peak_bytes = {n: peak_bytes(pid) for n, pid in self._pids.items()}

    def _read(self) -> dict[str, Usage]:
        return {name: Usage.of(pid) for name, pid in self._pids.items()}

    def _wait_until_idle(self) -> None:
        """Until the servers have imported all, which no handshake should pay for."""
        deadline = time.monotonic() + MOST_IDLE_WAIT_S
        used, before = self._used_s(), -1.0
        while used != before and time.monotonic() < deadline:
            time.sleep(IDLE_S)
            used, before = self._used_s(), used

    def _used_s(self) -> float:
        return sum(usage.cpu_s for usage in self._read().values())


def peak_bytes(pid: int) -> int:
    """The most memory that a process has had resident."""
    status = Path("/proc", str(pid), "status").read_text()
    return 1024 * int(status.partition("VmHWM:")[2].split()[0])


def links_work() -> bool:
    """Whether this machine lets us make links."""
    link = bandwidth.Link(bandwidth.link_addresses(1)[0], 10**6)
    try:
        network.Network([link]).close()
    except LaunchError:
        return False
    return True


def stock_bytes(net: Network, num_servers: int) -> list[int]:
    """What MXNet's own store pushes to each server in a step, by its rule."""
    loads = [0] * num_servers
    for key, shape in enumerate(net.shapes):
        size = Network("", ((shape,),)).num_numbers
        if size < BIGARRAY_BOUND:
            loads[server_of(key, num_servers)] += size * BYTES_PER_NUMBER
            continue
        for server in range(num_servers):
            loads[server] += size * BYTES_PER_NUMBER // num_servers
    return loads


def run_job(job: Job) -> dict[str, Any]:
    """Run a job and measure it.

    Returns
    -------
    dict
        job: the settings. status: 'ok', or 'failed' with a reason. load: of the
        machine before. For 'ok' also figures, see `figures_of`, and roles: of each
        role cpu_ms, sent_bytes and received_bytes per step, and peak_bytes.
    """
    outcome = {"job": dataclasses.asdict(job), "load": os.getloadavg()[0]}
    with tempfile.TemporaryDirectory(prefix="odsgd-") as folder:
        observer = _Observer(job, folder)
        with contextlib.closing(observer):
            result = _run(job, folder, observer)
    if result.exit_code or len(observer.results) != job.num_workers:
        reason = result.message or "a worker ended without a result"
        return {**outcome, "status": "failed", "reason": reason}
    roles = _roles(job, observer)
    figures = figures_of(job, observer.results, roles)
    return {**outcome, "status": "ok", "figures": figures, "roles": roles}


def _run(job: Job, folder: str, observer: _Observer) -> Any:
    system = SYSTEMS[job.system]
    planned = commands.Job(
        job.num_workers,
        job.num_servers,
        job.command(folder),
        stock_servers=system.servers != "own",
        env=dict(system.env),
        bandwidth=job.rate or None,
    )
    roles, sockets = local.new_job(planned, os.environ)
    return processes.run_roles(
        roles,
        on_line=observer.on_line,
        on_started=observer.on_started,
        timeout=job.timeout_s,
        sockets=sockets,
    )


def _roles(job: Job, observer: _Observer) -> dict[str, dict[str, float]]:
    """What each role used per step, and its peak memory."""
    roles, steps = {}, job.num_timed_iters
    for name, begin in observer.samples[BEGIN].items():
        end = observer.samples[END][name]
        roles[name] = {
            "cpu_ms": 1000 * (end.cpu_s - begin.cpu_s) / steps,
            "peak_bytes": observer.peak_bytes[name],
        }
        if job.rate:
            sent = end.sent_bytes - begin.sent_bytes
            received = end.received_bytes - begin.received_bytes
            roles[name].update(sent_bytes=sent / steps, received_bytes=received / steps)
    return roles


def figures_of(
    job: Job,
    results: Sequence[Mapping[str, Any]],
    roles: Mapping[str, Mapping[str, float]],
) -> dict[str, Any]:
    """The figures of a job.

    Returns
    -------
    dict
        Means over the workers: host_ms (processor time of the main thread in a step's
        call), host_wall_ms, step_ms, and what the start took: handshake_s,
        broadcast_s, first_step_s. Of a mean worker or server: worker_cpu_ms,
        server_cpu_ms, worker_peak_bytes, server_peak_bytes. cpu_ms: of all of them
        together. server_bytes: each server's, per step, received and sent together on
        links, otherwise what should be pushed and pulled. unevenness: the most of
        them over their mean.
    """
    names = [name for name in results[0] if name != "layout_bytes"]
    figures = {n: statistics.mean([result[n] for result in results]) for n in names}
    for kind in ("worker", "server"):
        own = [used for name, used in roles.items() if name.split()[0] == kind]
        for what in ("cpu_ms", "peak_bytes"):
            figures[f"{kind}_{what}"] = statistics.mean([used[what] for used in own])
    counts = {"worker": job.num_workers, "server": job.num_servers}
    figures["cpu_ms"] = sum(n * figures[f"{kind}_cpu_ms"] for kind, n in counts.items())
    carried = _carried(job, results[0]["layout_bytes"], roles)
    mean = statistics.mean(carried)
    return {**figures, "server_bytes": carried, "unevenness": max(carried) / mean}


def _carried(
    job: Job, layout: Sequence[int] | None, roles: Mapping[str, Mapping[str, float]]
) -> list[float]:
    """Bytes of each server per step, both ways and for all workers together."""
    if job.rate:
        servers = [used for name, used in roles.items() if name.startswith("server")]
        return [used["sent_bytes"] + used["received_bytes"] for used in servers]
    layout = layout or stock_bytes(network_of(job.network), job.num_servers)
    return [2.0 * job.num_workers * load for load in layout]

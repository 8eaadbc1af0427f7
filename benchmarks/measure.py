"""Runs one job of one system on links of one rate, and says what it took."""

from __future__ import annotations

import dataclasses
import json
import os
import socket
import statistics
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Mapping

from emulated import Network, find_network
from overlap_worker import PREFIX, WorkerSettings
from systems import SYSTEMS
from usage import Window

from odsgd_kvstore.launch import commands, local, processes
from odsgd_kvstore.launch.bandwidth import parse_rate

HERE = Path(__file__).resolve().parent
FRAMING = 1.06  # TCP, IP and Ethernet headers and acknowledgements over the payload


@dataclass(frozen=True)
class Launch:
    """One job; the other settings are `WorkerSettings`'.

    Parameters
    ----------
    rate : str
        Of each role's link in each direction, such as '200mbit'; '' for no limit.
    repetition : int
        Number of this launch among equal ones.
    """

    system: str
    network: str
    num_workers: int
    num_servers: int
    rate: str
    compute_ms: float
    num_untimed_iters: int
    num_timed_iters: int
    num_compute_iters: int
    timeout_s: float = 300.0
    repetition: int = 0

    @property
    def command(self) -> tuple[str, ...]:
        """What every worker runs."""
        names = [field.name for field in dataclasses.fields(WorkerSettings)]
        settings = json.dumps({name: getattr(self, name) for name in names})
        return sys.executable, str(HERE / "overlap_worker.py"), settings


def link_ms(network: Network, num_workers: int, num_servers: int, rate: str) -> float:
    """Milliseconds that a step's payload takes on the busiest link, framing included.

    A worker sends, and receives, all M bytes; of N workers' bytes each of S servers
    receives, and sends, a share of N M / S.
    """
    if not rate:
        return 0.0
    busiest = network.payload_bytes * max(1.0, num_workers / num_servers)
    return 1000 * 8 * busiest * FRAMING / parse_rate(rate)


def bound_ms(launch: Launch, compute_ms: float) -> float:
    """The least time of a step: of the computation, or of the uncompressed payload."""
    network = find_network(launch.network)
    link = link_ms(network, launch.num_workers, launch.num_servers, launch.rate)
    return max(compute_ms, link)


def plan(launch: Launch) -> tuple[list[commands.Role], list[str]]:
    """The roles of a job, and the sockets that they will make."""
    system = SYSTEMS[launch.system]
    job = commands.Job(
        launch.num_workers,
        1 if system.servers == "none" else launch.num_servers,
        launch.command,
        stock_servers=system.servers != "own",
        env=system.environment(find_network(launch.network)),
        bandwidth=launch.rate or None,
    )
    roles, sockets = local.new_job(job, os.environ)
    if system.servers == "none":
        roles = _peer_to_peer(roles)
    return roles, sockets


def _peer_to_peer(roles: list[commands.Role]) -> list[commands.Role]:
    """Horovod's roles: a rendezvous in the scheduler's place, and no servers."""
    rendezvous = next(role for role in roles if role.kind == "scheduler")
    workers = [role for role in roles if role.kind == "worker"]
    port, count = _free_port(), str(len(workers))
    hosts = [f"rank{role.rank}" for role in workers]
    argv = (sys.executable, str(HERE / "rendezvous.py"), str(port), *hosts)
    planned = [dataclasses.replace(rendezvous, argv=argv)]
    for role in workers:
        env = {
            **role.env,
            "HOROVOD_HOSTNAME": hosts[role.rank],
            "HOROVOD_RANK": str(role.rank),
            "HOROVOD_SIZE": count,
            "HOROVOD_LOCAL_RANK": "0",
            "HOROVOD_LOCAL_SIZE": "1",
            "HOROVOD_CROSS_RANK": str(role.rank),
            "HOROVOD_CROSS_SIZE": count,
            "HOROVOD_CONTROLLER": "gloo",
            "HOROVOD_CPU_OPERATIONS": "gloo",
            "HOROVOD_GLOO_RENDEZVOUS_ADDR": role.env["DMLC_PS_ROOT_URI"],
            "HOROVOD_GLOO_RENDEZVOUS_PORT": str(port),
        }
        planned.append(dataclasses.replace(role, env=env))
    return planned


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("", 0))
        return listener.getsockname()[1]


class _Reports:
    """What the workers of a running job say; samples usage in the steady state."""

    def __init__(self, launch: Launch) -> None:
        self._launch = launch
        self._window: Window | None = None
        self._begun = 0
        self._ended = False
        self.results: list[dict[str, Any]] = []
        self.unavailable = ""

    def on_started(self, pids: Mapping[str, int]) -> None:
        self._window = Window(pids, has_links=bool(self._launch.rate))

    def on_line(self, _role: Any, text: str) -> None:
        """The window is the time in which all workers are in the timed block."""
        if not text.startswith(PREFIX):
            return
        report = json.loads(text[len(PREFIX) :])
        event = report.pop("event")
        if event == "begin":
            self._begun += 1
            if self._begun == self._launch.num_workers:
                self._window.begin()
        elif event == "end" and not self._ended:
            self._ended = True
            self._window.end()
        elif event == "result":
            self.results.append(report)
        elif event == "unavailable":
            self.unavailable = report["reason"]

    def measured(self) -> dict[str, Any]:
        """The figures of a job that went well."""
        slowest = max(self.results, key=lambda result: result["step_ms"])
        compute_ms = statistics.mean(result["compute_ms"] for result in self.results)
        bound = bound_ms(self._launch, compute_ms)
        return {
            "step_ms": slowest["step_ms"],
            "compute_ms": compute_ms,
            "bound_ms": bound,
            "ratio_to_bound": slowest["step_ms"] / bound,
            "host_step_ms": _worst(self.results, "host_step_ms"),
            "start_s": _worst(self.results, "start_s"),
            "usage": self._window.per_step(slowest["step_ms"]),
            "step_ms_each": slowest["step_ms_each"],
        }


def _worst(results: list[dict[str, Any]], name: str) -> float:
    return max(result[name] for result in results)


def run_launch(launch: Launch) -> dict[str, Any]:
    """Run a job and measure it.

    Returns
    -------
    dict
        launch: the settings. status: 'ok', 'not available' or 'failed', the last two
        with a reason. For 'ok' the figures of the slowest worker: step_ms, compute_ms
        (the workers' mean), bound_ms, ratio_to_bound, host_step_ms (the median inside
        the step's call), usage (see `Window.per_step`) and more; load, of the machine
        before the job.
    """
    outcome = {"launch": dataclasses.asdict(launch), "load": os.getloadavg()[0]}
    missing = SYSTEMS[launch.system].missing
    if missing:
        return {**outcome, "status": "not available", "reason": missing}
    reports = _Reports(launch)
    roles, sockets = plan(launch)
    result = processes.run_roles(
        roles,
        on_line=reports.on_line,
        on_started=reports.on_started,
        timeout=launch.timeout_s,
        grace_s=1.0 if SYSTEMS[launch.system].servers == "none" else 5.0,
        sockets=sockets,
    )
    outcome["seconds"] = result.seconds
    if reports.unavailable:
        reason = reports.unavailable
        return {**outcome, "status": "not available", "reason": reason}
    if result.exit_code or len(reports.results) != launch.num_workers:
        reason = result.message or "a worker ended without a result"
        return {**outcome, "status": "failed", "reason": reason}
    return {**outcome, "status": "ok", **reports.measured()}

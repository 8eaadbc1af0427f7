"""A job over several hosts, from the first word with them to its roles."""

from __future__ import annotations

import contextlib
import math
import queue
import secrets
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from odsgd_kvstore.errors import LaunchError
from odsgd_kvstore.launch import preflight
from odsgd_kvstore.launch.addresses import (
    FIRST_PORT,
    LAST_PORT,
    Address,
    Place,
    Seat,
    choose_addresses,
    number,
)
from odsgd_kvstore.launch.commands import Job, Role, plan_cluster
from odsgd_kvstore.launch.remote import RemoteAgent
from odsgd_kvstore.launch.signals import StopSignals

HEAR_S, REPORT_S, REACH_S = 40.0, 90.0, 5.0
LAST_CALL_S, ATTEMPTS = 2.0, 4


@dataclass(frozen=True)
class Machine:
    """A host of a job.

    Parameters
    ----------
    label : str
        Its name in messages.
    name : str
        What the user calls it: a name or an address.
    agents : tuple of RemoteAgent
        Of several, each starts one role.
    """

    label: str
    name: str
    agents: tuple[RemoteAgent, ...]


@dataclass(frozen=True)
class Settings:
    """What the roles of a job over several hosts have in common.

    Parameters
    ----------
    env : mapping of str to str
        See `variables.forwarded`.
    python : str
        The interpreter on every host.
    cwd : str
        The working folder on every host.
    key : str
        Seals the messages to the servers.
    interface : str or None
        Name of the network interface to use on every host.
    port_range : tuple of int
        First and last TCP port.
    """

    env: Mapping[str, str] = field(repr=False)
    python: str
    cwd: str
    key: str = field(repr=False)
    interface: str | None = None
    port_range: tuple[int, int] = (FIRST_PORT, LAST_PORT)


def prepare(
    job: Job,
    machines: Sequence[Machine],
    seats: Sequence[Seat],
    settings: Settings,
    say: Callable[[str], None],
    stop: StopSignals | None = None,
) -> list[Role]:
    """Check all hosts, choose addresses and ports, and return the roles.

    Nothing is started. Waits for the hosts, all of them at the same time; the first
    failure ends it.

    Parameters
    ----------
    job : Job
        What the user wants.
    machines : sequence of Machine
        Their agents were started already.
    seats : sequence of Seat
        Of every role; scheduler, servers, workers.
    settings : Settings
        What the roles have in common.
    say : callable
        Takes lines for the user: one per host, and its address.
    stop : StopSignals, optional
        Asks for the end.

    Returns
    -------
    list of Role
        For `run_roles`.

    Raises
    ------
    LaunchError
        Names the host, what is wrong there, and what to do.
    Stopped
        A signal came.
    """
    labels = [machine.label for machine in machines]
    found = _ask_for_reports(job, machines, seats, settings, stop)
    # Hosts that had not answered when another one failed are not judged.
    heard = [(label, *pair) for label, pair in zip(labels, found) if pair is not None]
    names, reports, sent = zip(*heard)
    lines, error = preflight.judge(reports, names, sent, job.stock_servers)
    for line in lines:
        say(line)
    if error:
        raise LaunchError(error)
    names = [machine.name for machine in machines]
    addresses = choose_addresses(reports, names, settings.interface)
    ports = [report["ports"] for report in reports]
    places = number(seats, addresses, ports)
    for attempt in range(ATTEMPTS):
        try:
            _check_network(machines, addresses, places, stop)
            break
        except _PortTaken:  # By a job that starts at the same time.
            if attempt == ATTEMPTS - 1:
                raise
            _close_listeners(machines, stop, release=True)
            ports = _find_ports(machines, seats, settings, stop)
            places = number(seats, addresses, ports)
    for label, address in zip(labels, addresses):
        say(f"{label}: advertising {address.ip} (from {address.origin})")
    cores = [report["cores"] for report in reports]
    env, job_id = settings.env, secrets.token_hex(4)
    return plan_cluster(
        job, env, places, labels, cores, settings.key, job_id, settings.cwd
    )


def _ask_for_reports(
    job: Job,
    machines: Sequence[Machine],
    seats: Sequence[Seat],
    settings: Settings,
    stop: StopSignals | None,
) -> list[tuple[dict[str, Any], tuple[float, float]] | None]:
    """What each host says of itself, and when it was asked and had answered.

    {'error': why} in place of a report; None if another host failed before it came.
    """
    env = {**settings.env, **job.env}

    def ask(index: int) -> tuple[dict[str, Any], tuple[float, float]]:
        machine = machines[index]
        before = time.time()
        try:
            cpus = {cpu for agent in machine.agents for cpu in _cpus(agent, stop)}
            before = time.time()
            report = machine.agents[0].ask(
                "report", REPORT_S, stop=stop, **request(index)
            )
        except LaunchError as error:
            text = str(error)
            prefix = f"{machine.label}: "
            text = text[len(prefix) :] if text.startswith(prefix) else text
            return {"error": text}, (before, time.time())
        # mpirun and Slurm may give each of a host's ranks cores of its own.
        return {**report, "cores": len(cpus)}, (before, time.time())

    def request(index: int) -> dict[str, Any]:
        machine = machines[index]
        return {
            "python": settings.python,
            "env": env,
            "cwd": settings.cwd,
            "program": job.command[0],
            "ports": len(seats),
            "least_ports": sum(seat.host == index for seat in seats),
            "range": list(settings.port_range),
            "peers": [m.name for m in machines if m is not machine],
            "resolve": machine.name,
        }

    def is_bad(answer: tuple[dict[str, Any], tuple[float, float]]) -> bool:
        return "error" in answer[0]

    return in_parallel(ask, range(len(machines)), stop, is_bad)


def _cpus(agent: RemoteAgent, stop: StopSignals | None) -> list[int]:
    """The processors that an agent's roles may use, once it runs."""
    agent.greet(HEAR_S, stop)
    return agent.ask("place", HEAR_S, stop=stop)["cpus"]


class _PortTaken(LaunchError):
    """Somebody took a port between the search for it and its use."""


def _find_ports(
    machines: Sequence[Machine],
    seats: Sequence[Seat],
    settings: Settings,
    stop: StopSignals | None,
) -> list[list[int]]:
    """Free ports of each host, anew."""

    def find(index: int) -> list[int]:
        least = sum(seat.host == index for seat in seats)
        request = {"ports": len(seats), "least_ports": least}
        request["range"] = list(settings.port_range)
        agent = machines[index].agents[0]
        found = agent.ask("find_ports", HEAR_S, stop=stop, **request)
        if found["ports_error"]:
            raise LaunchError(f"{machines[index].label}: {found['ports_error']}")
        return found["ports"]

    return in_parallel(find, range(len(machines)), stop)


def _check_network(
    machines: Sequence[Machine],
    addresses: Sequence[Address],
    places: Sequence[Place],
    stop: StopSignals | None,
) -> None:
    """Listen on each role's port, and connect to it from every other host."""
    hosts = range(len(machines))

    def listen(host: int) -> None:
        ports = [place.port for place in places if place.host == host]
        agent, ip = machines[host].agents[0], addresses[host].ip
        failed = agent.ask("listen", HEAR_S, ip=ip, ports=ports)["failed"]
        if failed:
            causes = "; ".join(f"port {port}: {why}" for port, why in failed.items())
            raise _PortTaken(
                f"{machines[host].label}: cannot listen on {ip}: {causes}. Start the "
                "job again, or give other ports with --port-range"
            )

    def reach(host: int) -> None:
        targets = [(p.ip, p.port) for p in places if p.host != host]
        agent, label = machines[host].agents[0], machines[host].label
        answer = agent.ask("reach", HEAR_S, targets=targets, timeout=REACH_S)
        for ip, port, why in answer["failed"]:
            place = next(p for p in places if (p.ip, p.port) == (ip, port))
            kind, target = place.kind, machines[place.host].label
            raise LaunchError(
                f"{label} does not reach {target} at {ip} port {port} (for the {kind} "
                f"there): {why}. Open the ports in the firewall, choose ones that are "
                "open with --port-range A-B, or a network that all hosts share with "
                "--interface NAME or with addresses in the host file"
            )

    for step in (listen, reach):
        in_parallel(step, hosts, stop)
    _close_listeners(machines, stop)


def _close_listeners(
    machines: Sequence[Machine], stop: StopSignals | None, *, release: bool = False
) -> None:
    """End what `_check_network` listens with; `release` gives the ports back, too."""
    agents = [machine.agents[0] for machine in machines]
    in_parallel(lambda agent: agent.ask("close", HEAR_S, release=release), agents, stop)


def in_parallel(
    function: Callable[[Any], Any],
    items: Sequence[Any],
    stop: StopSignals | None = None,
    is_bad: Callable[[Any], bool] = lambda result: False,
) -> list[Any]:
    """Call `function` with each item, all at the same time; the results in order.

    After a result that `is_bad`, the others have `LAST_CALL_S`; then they are None.

    Raises
    ------
    Stopped
        `stop` was asked for meanwhile.
    Exception
        The first that any call raised; the others are not waited for.
    """
    done: queue.SimpleQueue = queue.SimpleQueue()

    def call(index: int, item: Any) -> None:
        try:
            done.put((index, function(item), None))
        except Exception as error:
            done.put((index, None, error))

    for index, item in enumerate(items):
        threading.Thread(target=call, args=(index, item), daemon=True).start()
    results: dict[int, Any] = {}
    deadline = math.inf
    while len(results) < len(items) and time.monotonic() < deadline:
        if stop is not None:
            stop.check()
        with contextlib.suppress(queue.Empty):
            index, result, error = done.get(timeout=0.1)
            if error is not None:
                raise error
            results[index] = result
            if is_bad(result):
                deadline = min(deadline, time.monotonic() + LAST_CALL_S)
    return [results.get(index) for index in range(len(items))]


def close_all(agents: Sequence[RemoteAgent]) -> None:
    """End all agents, with what they started; returns when they have ended."""
    with contextlib.suppress(LaunchError):
        in_parallel(lambda agent: agent.close(), agents)

"""The goals that the benchmark of a step's cost checks, with their limits."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Callable, Mapping

from emulated import NETWORKS
from overlap_goals import Goal
from step_cost_fit import Line
from step_cost_presets import CONSTANT, HOST, KEYS, LAYOUT, SERVERS, SIZES, SMALL, TINY
from step_cost_rows import Results
from step_cost_worker import GLUON
from systems import BASELINE, OURS

RESNET = "resnet50"
NOISE_COPIES = 0.05  # of the parameters, by which peak memory varies
MOST_OFF_LINE = 0.1


@dataclass(frozen=True)
class Measured:
    """All that the goals look at.

    Parameters
    ----------
    rows : Results
    imports : mapping
        As `measure_imports` returns it.
    fits : mapping of str to mapping of str to Line
        By sweep and system.
    """

    rows: Results
    imports: Mapping[str, Any] = field(default_factory=dict)
    fits: Mapping[str, Mapping[str, Line]] = field(default_factory=dict)


Measure = Callable[[Measured], float]


def _unevenness(network: str) -> Measure:
    """Of the worst number of servers."""

    def measure(measured: Measured) -> float:
        sections = [f"{LAYOUT} {network} {count} servers" for count in (2, 3, 4)]
        return max(measured.rows[section][OURS]["unevenness"] for section in sections)

    return measure


def _host(system: str) -> Measure:
    return lambda measured: measured.rows[f"{HOST} {RESNET}"][system]["host_ms"]


def _of_sync(section: str, figure: str) -> Measure:
    def measure(measured: Measured) -> float:
        rows = measured.rows[section]
        return rows[OURS][figure] / rows[BASELINE][figure]

    return measure


def extra_copies(measured: Measured, kind: str, network: str, count: int) -> float:
    """Peak memory beyond dist_sync's, in copies of the parameters.

    Before, a job with next to no parameters is subtracted from each: our servers
    import the whole of MXNet, MXNet's own do not.

    Parameters
    ----------
    kind : str
        'worker' or 'server'.
    network : str
    count : int
        Processes that share one copy: 1, or the number of servers.
    """
    figure = f"{kind}_peak_bytes"
    rows, constant = measured.rows[f"{SERVERS} {network}"], measured.rows[_TINY]
    ours, sync = (
        rows[system][figure] - constant[system][figure] for system in (OURS, BASELINE)
    )
    return (ours - sync) * count / NETWORKS[network].payload_bytes


_TINY = f"{CONSTANT} {TINY}"


def _handshake(measured: Measured) -> float:
    rows = measured.rows[f"{SERVERS} {RESNET}"]
    return rows[OURS]["handshake_s"] - rows[BASELINE]["handshake_s"]


def _added_by_import(measured: Measured) -> float:
    """No less than its processor time: a busy machine must not make it look shorter."""
    return max(measured.imports["added_s"], measured.imports["added_cpu_s"])


def _residual(sweep: str) -> Measure:
    return lambda measured: measured.fits[sweep][OURS].residual


_RESNET_JOB = f"{SERVERS} {RESNET}"
GOALS = (
    Goal(3, "ResNet-50: busiest server over mean", 1.10, _unevenness(RESNET)),
    Goal(3, "LeNet: busiest server over mean", 1.10, _unevenness("lenet")),
    Goal(3, "12-layer MLP: busiest server over mean", 1.10, _unevenness("mlp12")),
    Goal(4, "ResNet-50: CPU ms in step(), our Trainer", 15, _host(OURS)),
    Goal(4, "ResNet-50: CPU ms in step(), gluon.Trainer", 40, _host(GLUON)),
    Goal(
        4,
        "ResNet-50: server CPU, of dist_sync",
        1.3,
        _of_sync(_RESNET_JOB, "server_cpu_ms"),
    ),
    Goal(
        4,
        "160 keys of 256: server CPU, of dist_sync",
        0.8,
        _of_sync(f"{SERVERS} {SMALL}", "server_cpu_ms"),
    ),
    Goal(
        6,
        "worker's peak beyond dist_sync, copies",
        3,
        lambda measured: extra_copies(measured, "worker", RESNET, 1),
    ),
    Goal(
        6,
        "servers' peak beyond dist_sync, copies",
        NOISE_COPIES,
        lambda measured: extra_copies(measured, "server", RESNET, 2),
    ),
    Goal(
        7,
        "import odsgd_kvstore beyond import mxnet, s",
        0.3,
        _added_by_import,
        strict=True,
    ),
    Goal(7, "handshake beyond dist_sync's, s", 1, _handshake, strict=True),
    Goal(
        7,
        "ResNet-50: initial broadcast, of dist_sync",
        1.5,
        _of_sync(_RESNET_JOB, "broadcast_s"),
        strict=True,
    ),
    Goal(8, "cost over parameters: off a line by", MOST_OFF_LINE, _residual(SIZES)),
    Goal(8, "cost over keys: off a line by", MOST_OFF_LINE, _residual(KEYS)),
)


def check_goals(measured: Measured) -> list[dict[str, Any]]:
    """All goals; see `Goal.check`."""
    return [goal.check(measured) for goal in GOALS]

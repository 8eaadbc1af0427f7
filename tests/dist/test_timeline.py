"""timeline.py: every role's operations in one trace, on one clock, and a picture."""

import json
import os
import struct
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import pytest
from test_benchmark_overlap import links_work

import odsgd_kvstore

ROOT = Path(odsgd_kvstore.__file__).absolute().parents[1]
BENCHMARKS = ROOT / "benchmarks"
LIMIT_S = 240
SYSTEMS = ("dist_sync", "dist_odsgd")
ROLES = ("worker 0", "worker 1", "server 0", "server 1")
LAYERS, STEPS = 8, 10  # of the smoke preset


@pytest.fixture(scope="module")
def result(tmp_path_factory):
    """What the smoke preset printed and wrote, run in an empty folder."""
    if not links_work():
        pytest.skip("this machine emulates no links")
    folder = tmp_path_factory.mktemp("timeline")
    done = subprocess.run(
        [sys.executable, str(BENCHMARKS / "timeline.py"), "--preset", "smoke"],
        cwd=folder, capture_output=True, text=True, timeout=LIMIT_S, check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert [path.name for path in folder.iterdir()] == ["benchmark-results"]
    return folder / "benchmark-results", done.stdout


@pytest.fixture(scope="module")
def events(result):
    """The trace's events by role of both systems, such as 'dist_sync: worker 0'."""
    content = json.loads((result[0] / "timeline-smoke.trace.json").read_text())
    all_events = content["traceEvents"]
    names = {
        event["pid"]: event["args"]["name"]
        for event in all_events
        if event["name"] == "process_name"
    }
    by_role = {name: [] for name in names.values()}
    for event in all_events:
        by_role[names[event["pid"]]].append(event)
    return by_role


def spans(events, category=None):
    """Complete events, of one category."""
    return [e for e in events if e["ph"] == "X" and category in (None, e["cat"])]


def test_each_role_of_each_system_is_a_process(events):
    assert list(events) == [f"{s}: {role}" for s in SYSTEMS for role in ROLES]


def test_workers_compute_push_and_pull_and_only_dist_odsgd_updates_locally(events):
    for system in SYSTEMS:
        for worker in ROLES[:2]:
            mine = events[f"{system}: {worker}"]
            for kind in ("forward", "backward"):
                passes = spans(mine, kind)
                assert len(passes) == LAYERS * STEPS
                layers = [kind + f" {layer}" for layer in range(LAYERS)]
                names = [event["name"] for event in passes[:LAYERS]]
                assert names == (layers if kind == "forward" else layers[::-1])
                steps = [event["args"]["step"] for event in passes]
                assert steps == sorted(list(range(STEPS)) * LAYERS)
            assert len(spans(mine, "push and pull")) >= LAYERS * STEPS
            updates = len(spans(mine, "local update"))
            # Eight weights, and all biases in one pack, in each step.
            assert updates >= 9 * STEPS if system == "dist_odsgd" else updates == 0


def test_servers_make_the_global_update(events):
    for system in SYSTEMS:
        of_servers = [spans(events[f"{system}: {role}"]) for role in ROLES[2:]]
        for mine in of_servers:
            assert {event["cat"] for event in mine} <= {"global update", "copies"}
        updates = [e for mine in of_servers for e in mine if "sgd" in e["name"]]
        assert len(updates) >= 9 * STEPS


def test_spans_are_ordered_and_none_in_a_lane_overlaps_another(events):
    for mine in events.values():
        ends = defaultdict(float)
        for event in spans(mine):
            assert event["dur"] >= 0
            assert event["ts"] >= ends[event["tid"]] or event["ts"] < 0
            ends[event["tid"]] = event["ts"] + event["dur"]
        lanes = {e["tid"] for e in mine if e["name"] == "thread_name"}
        assert set(ends) <= lanes


def test_all_roles_share_one_clock(events):
    """A server updates after the first backward pass and before the last pull ends."""
    for system in SYSTEMS:
        workers = [events[f"{system}: {role}"] for role in ROLES[:2]]
        first = min(e["ts"] for mine in workers for e in spans(mine, "backward"))
        pulls = [e for mine in workers for e in spans(mine, "push and pull")]
        last = max(e["ts"] + e["dur"] for e in pulls)
        for role in ROLES[2:]:
            updates = spans(events[f"{system}: {role}"], "global update")
            assert first < min(e["ts"] for e in updates)
            assert max(e["ts"] + e["dur"] for e in updates) < last


def test_the_links_carry_the_gradients_and_the_weights(events):
    payload = 4 * LAYERS * (256 * 256 + 256)
    for system in SYSTEMS:
        for worker in ROLES[:2]:
            rates = [e for e in events[f"{system}: {worker}"] if e["ph"] == "C"]
            for name in ("push", "pull"):
                assert all(event["args"][name] >= 0 for event in rates)
                ends = zip(rates, rates[1:])
                moved = sum(a["args"][name] * (b["ts"] - a["ts"]) for a, b in ends) / 8
                assert moved > 0.9 * payload * (STEPS - 1)


def test_the_picture_is_as_wide_as_two_screens_of_a_readme(result):
    data = (result[0] / "timeline-smoke.png").read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    width, height = struct.unpack(">II", data[16:24])
    assert width == 1600
    assert 800 < height < 1600
    assert 40_000 < len(data) < 1_000_000


def test_the_figures_are_printed_and_written(result):
    folder, text = result
    content = json.loads((folder / "timeline-smoke.json").read_text())
    assert "timeline.py --preset smoke" in content["command"]
    assert list(content["figures"]) == list(SYSTEMS)
    for system, row in content["figures"].items():
        assert 0 < row["hidden_share"] <= 1
        share = f"{100 * row['hidden_share']:.0f} %"
        line = next(line for line in text.splitlines() if line.startswith(system))
        assert line.split(None, 2)[1:] == [f"{row['step_ms']:.1f}", share]
    for suffix in (".trace.json", ".png"):
        assert str(folder / f"timeline-smoke{suffix}") in text


def make_timeline(trace, links):
    """Two workers' four steps of 100 ms: 60 ms of computation, then waiting."""
    passes = [
        trace.Span(kind, "", start, start + 30_000, step)
        for step in range(4)
        for kind, start in (
            ("forward", 100_000 * (step + 1)),
            ("backward", 100_000 * (step + 1) + 30_000),
        )
    ]
    samples = [links.Sample(90_000 + 1000 * i, 100 * i, 50 * i) for i in range(450)]
    workers = ("worker 0", "worker 1")
    spans_of, links_of = ({name: x for name in workers} for x in (passes, samples))
    return trace.Timeline("x", 10**6, spans_of, links_of)


def test_the_hidden_share_is_that_of_the_bytes_beneath_computation(modules):
    trace, links = modules("timeline_trace"), modules("timeline_links")
    timeline = make_timeline(trace, links)
    # Bytes flow evenly, and computation takes 60 of every 100 ms from the second
    # step's start to the last one's.
    assert timeline.hidden_share() == pytest.approx(0.6, abs=0.005)
    assert timeline.step_starts_us() == [100_000, 200_000, 300_000, 400_000]
    assert timeline.typical_pair() == (200_000, 300_000, 400_000)
    assert timeline.step_ms() == 100


def test_a_profile_by_another_clock_is_refused(modules):
    trace, links = modules("timeline_trace"), modules("timeline_links")
    timeline = make_timeline(trace, links)
    trace.check_clocks(timeline, 100_000, 460_000)
    with pytest.raises(RuntimeError, match="clock of worker 0's profile"):
        trace.check_clocks(timeline, 100_000 + 10**6, 460_000 + 10**6)


def test_overlapping_operations_come_in_lanes_of_their_own(modules):
    trace = modules("timeline_trace")
    pushes = [trace.Span("push and pull", "", *ends) for ends in ((0, 5), (3, 9))]
    pushes.append(trace.Span("push and pull", "", 5, 6))
    lanes = [e["tid"] for e in trace._span_events(pushes, 1, 0) if e["ph"] == "X"]
    assert lanes == [lanes[0], lanes[0] + 1, lanes[0]]


@pytest.mark.parametrize("text", ["200", "fast"])
def test_a_wrong_rate_is_explained(modules, capsys, text):
    with pytest.raises(SystemExit):
        modules("timeline").parse(["--rate", text])
    assert f"--rate is '{text}'; give a number" in capsys.readouterr().err


def test_links_that_the_kernel_forbids_are_explained_in_own_words(modules):
    error = odsgd_kvstore.errors.LaunchError(
        "--emulate-bandwidth needs a network namespace for each role; start as root, "
        "or leave --emulate-bandwidth out"
    )
    assert modules("timeline").as_ours(error) == (
        "--rate needs a network namespace for each role; start as root"
    )

"""benchmark_scaling.py measures what it says: sweeps, saturation, rows, goals."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import odsgd_kvstore
from odsgd_kvstore.errors import LaunchError
from odsgd_kvstore.launch.bandwidth import Link, link_addresses
from odsgd_kvstore.launch.network import Network

ROOT = Path(odsgd_kvstore.__file__).absolute().parents[1]
BENCHMARKS = ROOT / "benchmarks"
MLP8_BYTES = 8 * (256 * 256 + 256) * 4
COMPUTE_MS = 60.0
LIMIT_S = 300
PROGRAM = f"""
import sys
from pathlib import Path
from benchmark_scaling import main
from scaling_sweeps import Sweep
few = dict(num_untimed_iters=1, num_timed_iters=4, num_compute_iters=2)
saturating = Sweep("saturating", "100mbit", {COMPUTE_MS}, (1, 2), **few)
free = Sweep("free", "800mbit", {COMPUTE_MS}, (1, 2), 1, 0, **few)
sys.exit(main((saturating, free), Path(sys.argv[1]), resume=False, show_goals=True))
"""


@pytest.fixture(scope="module")
def result(tmp_path_factory):
    """What a tiny run wrote."""
    try:
        Network([Link(link_addresses(1)[0], 10**6)]).close()
    except LaunchError as error:
        pytest.skip(f"this machine cannot limit the rate of links: {error}")
    path = tmp_path_factory.mktemp("scaling") / "results" / "scaling"
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(path)],
        capture_output=True, text=True, timeout=LIMIT_S, check=False,
        env={**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{BENCHMARKS}"},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return path, json.loads(path.with_suffix(".json").read_text())


def test_it_writes_a_row_for_each_point_and_system(result):
    path, content = result
    assert content["versions"]["mxnet"] == "1.9.1"
    rows = content["rows"]
    assert list(rows) == ["saturating", "free"]
    for name, systems in (
        ("saturating", ["dist_odsgd", "dist_sync"]),
        ("free", ["dist_odsgd"]),
    ):
        assert list(rows[name]) == ["1", "2"]
        for point in rows[name].values():
            assert list(point) == systems
            for row in point.values():
                assert (row["status"], row["num_launches"]) == ("ok", 1)
                # A sleep may end late, which the next one makes up for, never early.
                assert row["step_ms"] > 0.99 * COMPUTE_MS
    lines = path.with_suffix(".jsonl").read_text().splitlines()
    assert len(lines) == 6
    assert path.with_suffix(".png").read_bytes().startswith(b"\x89PNG")


def test_a_saturated_step_is_no_shorter_than_the_payload_on_its_link(result):
    content = result[1]
    link_ms = 1000 * 8 * MLP8_BYTES / 100e6  # 1 or 2 workers: M on a worker's link
    for point, row in content["rows"]["saturating"].items():
        assert content["sweeps"]["saturating"]["link_ms"][point] == pytest.approx(
            1.06 * link_ms
        )
        # What passes at once after a pause is small.
        assert row["dist_odsgd"]["step_ms"] > 0.95 * link_ms
        assert row["dist_odsgd"]["bound_ms"] == pytest.approx(1.06 * link_ms)


def test_the_goals_are_measured_from_the_rows(result):
    content = result[1]
    flat, before, proportional, of_link = content["goals"]
    free = [p["dist_odsgd"]["step_ms"] for p in content["rows"]["free"].values()]
    full = [p["dist_odsgd"]["step_ms"] for p in content["rows"]["saturating"].values()]
    link_ms = content["sweeps"]["saturating"]["link_ms"]["1"]
    assert flat["measured"] == max(free) / min(free)
    assert before["measured"] is before["met"] is None  # all points are saturated
    assert proportional["measured"] == pytest.approx(max(full) / min(full))
    assert of_link["measured"] == pytest.approx(max(full) / link_ms)


@pytest.mark.parametrize("preset", ["goals", "full"])
def test_the_presets_saturate_links_where_they_say(modules, preset):
    saturating, free = modules("scaling_sweeps").PRESETS[preset]
    full = [n for n in saturating.num_workers if saturating.is_saturated(n)]
    assert {6, 8} <= set(full) and not {1, 2, 4} & set(full)
    assert not any(free.is_saturated(n) for n in free.num_workers)
    assert {1, 2, 4, 8} <= set(saturating.num_workers) & set(free.num_workers)
    assert saturating.link_ms(8) == pytest.approx(2 * saturating.link_ms(4))


def test_points_and_systems_are_interleaved(modules):
    sweep = modules("scaling_sweeps").Sweep("free", "1gbit", 50.0, (1, 4), 2, 1)
    launches = list(modules("interleave").interleaved(sweep.counts, sweep.launch))
    order = [(one.num_workers, one.system, one.repetition) for one in launches]
    assert order == [
        (1, "dist_odsgd", 0), (1, "dist_sync", 0), (4, "dist_odsgd", 0),
        (4, "dist_sync", 0), (4, "dist_odsgd", 1), (1, "dist_odsgd", 1),
    ]  # fmt: skip
    assert {(one.compute_ms, one.rate) for one in launches} == {(50.0, "1gbit")}


def test_flat_proportional_and_speedup_on_made_up_steps(modules):
    row, rows = modules("overlap_rows").Row, modules("scaling_rows")
    sweep = modules("scaling_sweeps").Sweep("saturating", "200mbit", 224.0)
    link = {n: sweep.link_ms(n) for n in (1, 2, 4, 6, 8)}
    steps = {1: 225.0, 2: 230.0, 4: 240.0, 6: 1.05 * link[6], 8: 1.1 * link[8]}
    points = {n: {"dist_odsgd": row("ok", step_ms=ms)} for n, ms in steps.items()}
    assert rows.flatness(sweep, points) == 240 / 225
    assert rows.proportionality(sweep, points) == pytest.approx(1.1 / 1.05)
    assert rows.of_link(sweep, points) == pytest.approx(1.1)
    speedup = rows.speedups(sweep, points)
    assert speedup["dist_odsgd"] == {n: n * 224.0 / ms for n, ms in steps.items()}
    assert speedup["dist_sync"] == {}
    with pytest.raises(ValueError, match="1 points; a comparison needs 2"):
        rows.flatness(sweep, {1: points[1]})
    lines = rows.table_of(sweep, points).splitlines()
    assert lines[3].split()[:6] == ["4", "dist_odsgd", "240.0", "-", "-", "1.07"]

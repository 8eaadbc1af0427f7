"""benchmark_step_cost.py measures what it says: bytes, costs, memory, lines, goals."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import odsgd_kvstore

ROOT = Path(odsgd_kvstore.__file__).absolute().parents[1]
BENCHMARKS = ROOT / "benchmarks"
LIMIT_S = 300
SYSTEMS = ["dist_odsgd", "dist_sync"]
LENET_BYTES = 431_080 * 4


@pytest.fixture(scope="module")
def result(tmp_path_factory):
    """What a tiny run printed and wrote."""
    folder = tmp_path_factory.mktemp("step-cost") / "results"
    args = ["--preset", "smoke", "--output", str(folder)]
    for kind in ("layout", "host", "import"):
        args += ["--only", kind]
    done = subprocess.run(
        [sys.executable, str(BENCHMARKS / "benchmark_step_cost.py"), *args],
        capture_output=True, text=True, timeout=LIMIT_S, check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    content = json.loads((folder / "step-cost-smoke.json").read_text())
    return folder, done.stdout, content


def test_it_writes_a_row_for_each_section_and_system_with_its_origin(result):
    folder, text, content = result
    assert "benchmark_step_cost.py --preset smoke" in content["command"]
    assert content["versions"]["mxnet"] == "1.9.1"
    assert list(content["rows"]) == ["layout lenet 2 servers", "host lenet"]
    for section, rows in content["rows"].items():
        assert section in text
        assert list(rows) == SYSTEMS
        assert content["sections"][section]["payload_bytes"] == LENET_BYTES
        for row in rows.values():
            assert (row["num_jobs"], row["reason"], row["spread"]) == (1, "", {})
    assert (folder / "step-cost-smoke.png").read_bytes().startswith(b"\x89PNG")
    assert "NOT met" not in text  # smoke is not about the goals
    assert len(content["imports"]["seconds"]["odsgd_kvstore"]) == 1
    assert content["imports"]["cpu_s"]["mxnet"][0] > 0


def test_our_servers_carry_the_same_and_mxnets_do_not(result, modules):
    rows = result[2]["rows"]["layout lenet 2 servers"]
    ours, stock = rows["dist_odsgd"], rows["dist_sync"]
    assert ours["figures"]["unevenness"] <= 1.10
    assert stock["figures"]["unevenness"] > 1.9
    for row in (ours, stock):
        carried = row["server_bytes"]
        assert len(carried) == 2
        # Both ways; headers, acknowledgements and commands come on top.
        assert 1 <= sum(carried) / (2 * LENET_BYTES) < 1.1
        mean = sum(carried) / 2
        assert row["figures"]["unevenness"] == pytest.approx(max(carried) / mean)
    job = modules("step_cost_job")
    lenet = modules("emulated").NETWORKS["lenet"]
    planned = job.stock_bytes(lenet, 2)
    assert sum(planned) == LENET_BYTES
    assert planned[1] == 4 * (20 + 50 + 500 + 10)  # the biases have odd keys
    assert stock["server_bytes"][0] == pytest.approx(2 * planned[0], rel=0.02)


def test_what_a_step_costs_is_measured_at_every_role(result):
    for job in result[2]["jobs"]["host lenet"]:
        figures, steps = job["figures"], job["job"]["num_timed_iters"]
        assert steps == 10
        assert 0 < figures["host_ms"] <= 1.1 * figures["host_wall_ms"]
        assert figures["host_wall_ms"] <= figures["step_ms"]
        for name in ("handshake_s", "broadcast_s", "first_step_s"):
            assert figures[name] > 0
        roles = job["roles"]
        assert sorted(roles) == ["scheduler", "server 0", "server 1", "worker 0"]
        for role in roles.values():
            assert role["peak_bytes"] > 50e6  # an interpreter with MXNet
        servers = [roles["server 0"]["cpu_ms"], roles["server 1"]["cpu_ms"]]
        assert figures["server_cpu_ms"] == pytest.approx(sum(servers) / 2)
        total = roles["worker 0"]["cpu_ms"] + sum(servers)
        assert figures["cpu_ms"] == pytest.approx(total) and total > 0


def test_mxnets_rule_cuts_only_large_arrays_over_the_servers(modules):
    job, emulated = modules("step_cost_job"), modules("emulated")
    network = emulated.Network("", (((10,), (1_000_000,)), ((6,),)))
    assert job.stock_bytes(network, 2) == [4 * (10 + 500_000 + 6), 4 * 500_000]
    assert job.stock_bytes(network, 4)[2] == 4 * (250_000 + 6)  # 2 * 9973 % 4


def test_a_network_may_be_a_number_of_equal_arrays(modules):
    network_of = modules("step_cost_worker").network_of
    assert network_of("160x256").shapes == [(256,)] * 160
    assert network_of("lenet").payload_bytes == LENET_BYTES


def test_a_line_is_fitted_exactly_and_a_point_beside_it_is_told(modules):
    line = modules("step_cost_fit").Line
    exact = line.through([1, 2, 4, 8], [5, 7, 11, 19])  # 3 + 2 x
    assert (exact.slope, exact.intercept) == pytest.approx((2, 3))
    assert exact.residual == pytest.approx(0, abs=1e-12)
    # The mean is 2 at every slope, by symmetry: off by 1, 2 and 1 of at most 4.
    bent = line.through([-1, 0, 1], [1, 4, 1])
    assert (bent.slope, bent.intercept) == pytest.approx((0, 2))
    assert bent.residual == pytest.approx(2 / 4)
    with pytest.raises(ValueError, match="2 points; a fit needs at least 3"):
        line.through([1, 2], [3, 4])


def outcome(system, repetition, **figures):
    job = {"system": system, "repetition": repetition}
    figures["server_bytes"] = [1, 2]
    return {"job": job, "status": "ok", "figures": figures}


def test_a_row_is_the_median_with_its_spread_and_says_what_failed(modules):
    rows_of = modules("step_cost_rows").rows_of
    jobs = [outcome("dist_odsgd", i, host_ms=ms) for i, ms in enumerate((11, 10, 14))]
    failed = {"status": "failed", "reason": "server 0 died\nits lines"}
    jobs.append({"job": {"system": "dist_sync"}, **failed})
    rows = rows_of(jobs)
    ours = rows["dist_odsgd"]
    assert (ours["host_ms"], ours.spread["host_ms"], ours.num_jobs) == (11, 4 / 11, 3)
    assert (rows["dist_sync"].figures, rows["dist_sync"].num_jobs) == ({}, 0)
    results = {"host lenet": rows}
    assert modules("step_cost_rows").failures(results) == [
        "host lenet, dist_sync: server 0 died"
    ]
    lines = modules("step_cost_rows").cost_table(results).splitlines()
    assert lines[1].split()[:6] == ["host", "lenet", "dist_odsgd", "11.00", "36", "%"]


def test_a_sweep_is_fitted_for_each_system_over_its_points(modules):
    rows_of = modules("step_cost_rows").rows_of
    points = {"keys 1x1": 1, "keys 2x1": 2, "keys 4x1": 4}
    results = {
        name: rows_of([outcome("dist_odsgd", 0, cpu_ms=1 + 3 * x)])
        for name, x in points.items()
    }
    fits = modules("step_cost_fit").fit_sweep(points, results, "cpu_ms")
    assert list(fits) == ["dist_odsgd"]
    assert fits["dist_odsgd"].slope == pytest.approx(3)
    assert fits["dist_odsgd"].ys == (4, 7, 13)


def test_extra_memory_leaves_out_the_interpreters(modules):
    goals, rows_of = modules("step_cost_goals"), modules("step_cost_rows").rows_of
    copy = modules("emulated").NETWORKS["resnet50"].payload_bytes

    def rows(**peaks):
        return rows_of(
            [
                outcome(system, 0, worker_peak_bytes=worker, server_peak_bytes=server)
                for system, (worker, server) in peaks.items()
            ]
        )

    tiny = rows(dist_odsgd=(210e6, 200e6), dist_sync=(200e6, 130e6))
    ours, sync = (210e6 + 5 * copy, 200e6 + 2 * copy), (200e6 + 3 * copy, 130e6 + copy)
    full = rows(dist_odsgd=ours, dist_sync=sync)
    measured = goals.Measured({"constant 1x16": tiny, "servers resnet50": full})
    assert goals.extra_copies(measured, "worker", "resnet50", 1) == pytest.approx(2)
    # A copy more on each of two servers, which share one copy of the parameters.
    assert goals.extra_copies(measured, "server", "resnet50", 2) == pytest.approx(2)
    by_text = {check["what"]: check for check in goals.check_goals(measured)}
    assert by_text["worker's peak beyond dist_sync, copies"]["met"] is True
    assert by_text["servers' peak beyond dist_sync, copies"]["met"] is False
    assert by_text["handshake beyond dist_sync's, s"]["met"] is None


def test_every_goal_has_its_section_in_the_preset(modules):
    presets, goals = modules("step_cost_presets"), modules("step_cost_goals")
    figures = {
        "unevenness": 1.05, "host_ms": 12.0, "server_cpu_ms": 6.0, "handshake_s": 0.5,
        "broadcast_s": 0.4, "worker_peak_bytes": 1e9, "server_peak_bytes": 1e9,
    }  # fmt: skip
    sections = presets.PRESETS["goals"].sections()
    rows_of = modules("step_cost_rows").rows_of
    rows = {
        section.name: rows_of([outcome(s, 0, **figures) for s in section.systems])
        for section in sections
    }
    assert len(rows) == len(sections)  # no name twice
    line = modules("step_cost_fit").Line((1, 2, 3), (1, 2, 3), 1.0, 0.0, 0.02)
    fits = {sweep: {"dist_odsgd": line} for sweep in ("sizes", "keys")}
    imports = {"added_s": -0.1, "added_cpu_s": 0.35}  # on a busy machine
    measured = goals.Measured(rows, imports, fits)
    checks = goals.check_goals(measured)
    assert {check["goal"] for check in checks} == {3, 4, 6, 7, 8}
    unmet = [check["what"] for check in checks if not check["met"]]
    assert all(check["measured"] is not None for check in checks)
    assert unmet == [
        "160 keys of 256: server CPU, of dist_sync",  # 1.0, with equal figures
        "import odsgd_kvstore beyond import mxnet, s",
    ]


def test_a_wrong_option_is_explained(modules, capsys):
    with pytest.raises(SystemExit):
        modules("benchmark_step_cost").parse(["--only", "network"])
    assert "invalid choice: 'network'" in " ".join(capsys.readouterr().err.split())

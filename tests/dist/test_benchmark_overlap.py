"""benchmark_overlap.py measures what it says: networks, bounds, bytes, rows."""

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
LIMIT_S = 120
SYSTEMS = ("dist_odsgd", "dist_sync")
MLP8_BYTES = 8 * (256 * 256 + 256) * 4


@pytest.fixture
def modules(monkeypatch):
    """Import from the benchmarks' folder."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return __import__


@pytest.fixture(scope="module")
def result(tmp_path_factory):
    """What a tiny run printed and wrote."""
    folder = tmp_path_factory.mktemp("overlap") / "results"
    args = ["--preset", "smoke", "--output", str(folder)]
    args += [] if links_work() else ["--rate", "none"]
    done = subprocess.run(
        [sys.executable, str(BENCHMARKS / "benchmark_overlap.py"), *args],
        capture_output=True, text=True, timeout=LIMIT_S, check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return folder, done.stdout, json.loads((folder / "overlap-smoke.json").read_text())


def links_work():
    """Whether this machine lets us limit the rate of links."""
    try:
        Network([Link(link_addresses(1)[0], 10**6)]).close()
    except LaunchError:
        return False
    return True


def test_it_writes_a_row_for_each_system_with_its_origin(result):
    folder, text, content = result
    assert "benchmark_overlap.py --preset smoke" in content["command"]
    assert content["versions"]["mxnet"] == "1.9.1"
    assert content["machine"]["cores"] >= 1
    ((setting, rows),) = content["rows"].items()
    assert tuple(rows) == SYSTEMS
    for name, row in rows.items():
        assert (row["status"], row["num_launches"]) == ("ok", 1)
        assert name in text
    assert rows["dist_sync"]["ratio_to_sync"] == 1
    settings = content["settings"][setting]
    assert settings["payload_bytes"] == MLP8_BYTES
    assert settings["num_timed_iters"] == 10
    lines = (folder / "overlap-smoke.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == content["launches"][setting]
    assert (folder / "overlap-smoke.png").read_bytes().startswith(b"\x89PNG")


def test_the_step_is_no_shorter_than_its_sleeps_nor_the_bound_than_its_parts(result):
    ((setting, launches),) = result[2]["launches"].items()
    settings = result[2]["settings"][setting]
    for launch in launches:
        assert len(launch["step_ms_each"]) == settings["num_timed_iters"]
        # A sleep may end late, which the next one makes up for, but never early.
        assert launch["step_ms"] > 0.99 * settings["compute_ms"]
        assert launch["compute_ms"] > 0.99 * settings["compute_ms"]
        link = 1000 * 8 * MLP8_BYTES * 1.06 / 200e6 if settings["rate"] else 0
        assert launch["bound_ms"] == max(launch["compute_ms"], link)
        assert launch["ratio_to_bound"] == launch["step_ms"] / launch["bound_ms"]
        assert launch["host_step_ms"] > 0
        for kind in ("worker", "server"):
            assert launch["usage"][kind]["cpu_ms"] > 0
            assert launch["usage"][kind]["peak_rss_bytes"] > 2 * MLP8_BYTES


def test_every_role_sends_and_receives_the_payload_in_each_step(result):
    ((setting, launches),) = result[2]["launches"].items()
    for launch in launches:
        usage = launch["usage"]
        if not result[2]["settings"][setting]["rate"]:
            assert "sent_bytes" not in usage["worker"]
            continue
        for kind in ("worker", "server"):
            for way in ("sent_bytes", "received_bytes"):
                # The ends of the window fall within steps, of which there are ten.
                assert 0.8 < usage[kind][way] / MLP8_BYTES < 1.3
        assert usage["scheduler"]["sent_bytes"] < 0.01 * MLP8_BYTES


def test_networks_have_the_arrays_of_the_originals(modules):
    networks = modules("emulated").NETWORKS
    sizes = {n: (len(w.shapes), w.num_numbers) for n, w in networks.items()}
    assert sizes["resnet50"] == (161, 25_557_032)
    assert sizes["lenet"] == (8, 431_080)
    assert sizes["mlp8"] == (16, 8 * (256 * 256 + 256))
    assert sizes["mlp2"] == (4, 2 * (512 * 512 + 512))
    assert sizes["mlp12"][0] == 24
    cost = modules("emulated").find_network("160x256")
    assert cost.shapes == [(256,)] * 160
    with pytest.raises(ValueError, match="known are mlp2, mlp8, .* such as 160x256"):
        modules("emulated").find_network("resnet51")
    resnet = networks["resnet50"].shapes
    assert resnet[:6] == [
        (64, 3, 7, 7), (64,), (64,), (64, 64, 1, 1), (64,), (64,),
    ]  # fmt: skip
    assert resnet[-2:] == [(1000, 2048), (1000,)]
    assert sum(len(shape) == 4 for shape in resnet) == 53


def test_the_link_takes_the_payload_of_its_busiest_end(modules):
    link_ms = modules("measure").link_ms
    network = modules("emulated").NETWORKS["mlp8"]
    once = 1000 * 8 * MLP8_BYTES * 1.06 / 200e6  # M over 200 Mbit/s
    assert link_ms(network, 2, 2, "200mbit") == pytest.approx(once)
    assert link_ms(network, 2, 1, "200mbit") == pytest.approx(2 * once)
    assert link_ms(network, 4, 2, "200mbit") == pytest.approx(2 * once)
    assert link_ms(network, 8, 2, "400mbit") == pytest.approx(2 * once)
    assert link_ms(network, 2, 4, "200mbit") == pytest.approx(once)  # the worker's
    assert link_ms(network, 2, 2, "") == 0


def test_launches_are_interleaved_and_every_other_round_is_reversed(modules):
    interleaved = modules("interleave").interleaved
    order = interleaved([("a", 3), ("b", 1), ("c", 3)], lambda *launch: launch)
    assert list(order) == [
        ("a", 0), ("b", 0), ("c", 0), ("c", 1), ("a", 1), ("a", 2), ("c", 2),
    ]  # fmt: skip


def outcome(system, repetition, step_ms, **changes):
    launch = {"system": system, "repetition": repetition}
    figures = {"compute_ms": 8.0, "bound_ms": 10.0, "ratio_to_bound": step_ms / 10}
    usage = {"worker": {"cpu_ms": step_ms / 2}}
    return {
        "launch": launch, "status": "ok", "step_ms": step_ms, "host_step_ms": 1.0,
        "usage": usage, **figures, **changes,
    }  # fmt: skip


def test_a_row_is_the_median_with_its_spread_and_its_ratios(modules):
    rows_of = modules("overlap_rows").rows_of
    launches = [outcome("dist_sync", 0, 20.0)]
    launches += [outcome("dist_odsgd", i, ms) for i, ms in enumerate((11, 10, 14))]
    missing = {"status": "not available", "reason": "not installed: horovod"}
    launches.append({"launch": {"system": "horovod"}, **missing})
    rows = rows_of(launches)
    ours = rows["dist_odsgd"]
    assert (ours.step_ms, ours.spread) == (11, 4 / 11)
    assert (ours.ratio_to_sync, ours.ratio_to_bound) == (0.55, 1.1)
    assert ours.usage == {"worker": {"cpu_ms": 5.5}}
    assert rows["dist_sync"].spread is None
    assert (rows["horovod"].status, rows["horovod"].step_ms) == ("not available", None)
    table = modules("overlap_rows").table_of(rows)
    assert "horovod: not available: not installed: horovod" in table


def test_a_goal_is_met_not_met_or_not_measured(modules):
    rows_of = modules("overlap_rows").rows_of
    launches = [outcome("dist_odsgd", 0, 10.5), outcome("dist_sync", 0, 13.9)]
    goals = modules("overlap_goals")
    checks = goals.check_goals({"mlp8-2w-r1": rows_of(launches)})
    by_text = {check["what"]: check for check in checks}
    bound = by_text["mlp8, 2 workers: of the bound"]
    assert (bound["measured"], bound["met"]) == (1.05, True)
    sync = by_text["mlp8, 2 workers: of dist_sync"]
    assert (sync["measured"], sync["met"]) == (10.5 / 13.9, False)
    assert by_text["ResNet-50: of the bound"]["met"] is None
    lines = goals.table_of_goals(checks).splitlines()
    assert lines[1].split()[-1] == "met" and lines[4].endswith("not measured")


def test_a_launch_in_the_journal_is_not_run_again_but_a_failure_is(
    modules, monkeypatch, tmp_path
):
    interleave, measure = modules("interleave"), modules("measure")
    ran = []

    def run_launch(launch):
        ran.append(launch.system)
        status = "failed" if launch.system == "p3" else "ok"
        return {"launch": vars(launch).copy(), "status": status}

    monkeypatch.setattr(interleave, "run_launch", run_launch)
    figures = ("mlp8", 2, 2, "", 50.0, 1, 1, 1)
    launches = [measure.Launch(name, *figures) for name in ("dist_sync", "p3")]
    path = tmp_path / "journal"
    for _ in range(2):
        journal = interleave.Journal(path, resume=True)
        assert [journal.run(launch)["status"] for launch in launches] == [
            "ok",
            "failed",
        ]
    assert ran == ["dist_sync", "p3", "p3"] and journal.num_resumed == 1
    with path.open("a") as file:
        file.write('{"launch": {"sys')  # cut off by an interruption
    interleave.Journal(path, resume=True).run(launches[0])
    interleave.Journal(path, resume=False).run(launches[0])
    assert ran == ["dist_sync", "p3", "p3", "dist_sync"]


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--rate", "fast"], "give a number and one of the units"),
        (["--network", "lenet"], "has no setting with this --network"),
        (["--repetitions", "0"], "is not an integer of at least 1"),
    ],
)
def test_a_wrong_option_is_explained(modules, capsys, args, message):
    with pytest.raises(SystemExit):
        modules("benchmark_overlap").parse(args)
    assert message in " ".join(capsys.readouterr().err.split())

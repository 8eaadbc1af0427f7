"""The benchmarks that the README shows, run as it says, train as well as it says."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from test_benchmark_overlap import links_work

import odsgd_kvstore
from odsgd_kvstore.errors import LaunchError

ROOT = Path(odsgd_kvstore.__file__).absolute().parents[1]
LIMIT_S = 180
WORKERS = 3
ROW = r"^(dist_\w+) +([\d.]+) % +(\S+) +(\d+) +(\d+) +([\d.]+)$"
ACCURACY = r"^\[worker (\d)\] \[rank (\d)\] test accuracy ([\d.]+) %$"
LOSS = r"\[rank (\d)\] epoch (\d+): loss ([\d.]+), \d+ samples/s"
STEPS_ON_LINK = 10 * (1438 // 96)
POINT = r"^(dist_\w+) +\[[#-]+\] +(\d+)/(\d+) steps +([\d.]+) s  accuracy +([\d.]+) %"
CURVES = {
    "dist_odsgd": [(1.0, 0.5), (2.0, 0.975), (3.0, 0.9926)],
    "dist_sync": [(2.0, 0.5), (4.0, 0.96), (6.0, 0.98)],
}
DIGITS = str(ROOT / "benchmarks" / "digits.py")


def run(folder, *args):
    """Run Python on `args` in `folder`; the output, if all went well."""
    done = subprocess.run(
        [sys.executable, *args], cwd=folder, capture_output=True, text=True,
        timeout=LIMIT_S, env={**os.environ, "PYTHONPATH": str(ROOT)}, check=False,
    )  # fmt: skip
    assert done.returncode == 0, f"{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    assert "Traceback" not in done.stdout + done.stderr
    return done.stdout


def test_demo_trains_with_one_step_of_delay_and_shows_dist_sync_beside_it(tmp_path):
    out = run(tmp_path, str(ROOT / "benchmarks" / "demo.py"))
    rows = {kvstore: row for kvstore, *row in re.findall(ROW, out, re.MULTILINE)}
    assert list(rows) == ["dist_odsgd", "dist_sync"]
    for accuracy, difference, _, steps, seconds in rows.values():
        assert 97 <= float(accuracy) <= 100
        assert difference == "0"
        # 20 epochs of 1438 images (of 1797, a fifth is left for the test), 2 times 32
        assert int(steps) == 20 * (1438 // 64)
        assert 0 < float(seconds) < LIMIT_S
    assert {kvstore: row[2] for kvstore, row in rows.items()} == {
        "dist_odsgd": "1",
        "dist_sync": "0",
    }
    assert "Next:" in out
    assert list(tmp_path.iterdir()) == []


def test_demo_shows_accuracy_against_time_on_links(tmp_path):
    if not links_work():
        pytest.skip("this machine emulates no links")
    args = ["--network", "1gbit", "--epochs", "10"]
    out = run(tmp_path, str(ROOT / "benchmarks" / "demo.py"), *args)
    rows = {kvstore: row for kvstore, *row in re.findall(ROW, out, re.MULTILINE)}
    assert list(rows) == ["dist_odsgd", "dist_sync"]
    points = re.findall(POINT, out, re.MULTILINE)
    for kvstore, (accuracy, difference, _, steps, seconds) in rows.items():
        assert 97 <= float(accuracy) <= 100
        assert difference == "0"
        assert int(steps) == STEPS_ON_LINK
        mine = [[float(x) for x in row] for name, *row in points if name == kvstore]
        assert len(mine) >= 5
        assert [row[2] for row in mine] == sorted(row[2] for row in mine)
        step, steps, *last = mine[-1]
        assert step == steps == STEPS_ON_LINK
        assert last == [float(seconds), round(float(accuracy), 1)]
    assert rows["dist_odsgd"][2] == "1"
    assert "o dist_odsgd, x dist_sync" in out
    assert re.search(
        r"^dist_odsgd made all steps in \d\.\d\d x the time", out, re.MULTILINE
    )
    assert re.search(
        r"^dist_odsgd reached 97 % in \d\.\d\d x the time", out, re.MULTILINE
    )
    assert list(tmp_path.iterdir()) == []


def test_the_chart_has_a_mark_for_each_point(modules):
    # The last column is second 6; a point is drawn at the level that it has reached.
    lines = modules("demo_curves").chart(CURVES).splitlines()
    assert lines == [
        "   99 % |" + " " * 30 + "o",
        "   98 % |" + " " * 59 + "x",
        "   97 % |" + " " * 20 + "o",
        "   95 % |" + " " * 39 + "x",
        "   90 % |",
        "   80 % |",
        "   60 % |",
        "   40 % |" + " " * 10 + "o" + " " * 9 + "x",
        " " * 8 + "+" + "-" * 60,
        " " * 9 + "0 s" + " " * 49 + "   6.0 s",
        "o dist_odsgd, x dist_sync",
    ]


@pytest.mark.parametrize(
    "accuracy, text",
    [
        (
            0.97,
            "dist_odsgd reached 97 % in 0.33 x the time of dist_sync (2.0 s, 6.0 s).",
        ),
        (0.99, "99 % was not reached by dist_sync."),
        (0.995, "99.5 % was not reached by dist_odsgd and dist_sync."),
    ],
)
def test_the_comparison_is_of_the_first_points_that_reach_it(modules, accuracy, text):
    lines = modules("demo_curves").comparison(CURVES, accuracy).splitlines()
    assert lines == ["dist_odsgd made all steps in 0.50 x the time of dist_sync.", text]


def test_the_demo_needs_a_rate_with_a_unit(modules, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["demo.py", "--network", "200"])
    with pytest.raises(SystemExit):
        modules("demo").parse()
    assert "--network is '200'; give a number and one of" in capsys.readouterr().err


def test_the_demo_says_what_to_do_where_the_kernel_forbids_links(modules):
    text = "--emulate-bandwidth needs a right, or leave --emulate-bandwidth out"
    assert modules("demo").as_ours(LaunchError(text)) == (
        "--network needs a right, or leave --network out"
    )


@pytest.mark.parametrize(
    "options, how, kvstore",
    [
        ([], ["-m", "odsgd_kvstore"], "dist_odsgd"),
        (["--stock-servers"], [], "dist_sync"),
    ],
    ids=["dist_odsgd", "dist_sync"],
)
def test_digits_trains_on_three_workers_and_two_servers(
    tmp_path, options, how, kvstore
):
    out = run(
        tmp_path,
        str(ROOT / "scripts" / "launch.py"), "-n", str(WORKERS), "-s", "2", *options,
        "--", sys.executable, *how, DIGITS, "--kvstore", kvstore,
    )  # fmt: skip
    found = re.findall(ACCURACY, out, re.MULTILINE)
    assert sorted(worker for worker, _, _ in found) == ["0", "1", "2"]
    for worker, rank, accuracy in found:
        assert worker == rank
        assert 96 <= float(accuracy) <= 100
    losses = {(rank, int(n)): float(loss) for rank, n, loss in re.findall(LOSS, out)}
    assert len(losses) == WORKERS * 20
    for rank in "012":
        assert losses[rank, 20] < 0.1 < losses[rank, 1]
    assert list(tmp_path.iterdir()) == []

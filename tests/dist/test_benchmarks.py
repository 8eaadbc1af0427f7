"""The benchmarks that the README shows, run as it says, train as well as it says."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import odsgd_kvstore

ROOT = Path(odsgd_kvstore.__file__).absolute().parents[1]
LIMIT_S = 120
WORKERS = 3
ROW = r"^(dist_\w+) +([\d.]+) % +(\S+) +(\d+) +(\d+) +([\d.]+)$"
ACCURACY = r"^\[worker (\d)\] \[rank (\d)\] test accuracy ([\d.]+) %$"
LOSS = r"\[rank (\d)\] epoch (\d+): loss ([\d.]+), \d+ samples/s"
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

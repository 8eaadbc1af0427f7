"""benchmark_convergence.py trains, goes on where it was interrupted, and reports."""

import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from pictures import write_records

import odsgd_kvstore

ROOT = Path(odsgd_kvstore.__file__).absolute().parents[1]
PROGRAM = ROOT / "benchmarks" / "benchmark_convergence.py"
LIMIT_S = 180
FEW = ("--seeds", "1", "--epochs", "2", "--num-evaluations", "2", "--warmup-steps", "9")
PAIR = ("--preset", "smoke", "--method", "dist_sync", "--method", "mirror", *FEW)


def start(folder, *args):
    """Start the program; what it prints is text of a pipe."""
    return subprocess.Popen(
        [sys.executable, str(PROGRAM), "--output", str(folder), *args],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip


def run(folder, *args):
    """Run the program; return its exit code and what it printed."""
    with start(folder, *args) as process:
        try:
            text, _ = process.communicate(timeout=LIMIT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            raise
    return process.returncode, text


def results(folder):
    """The files of results, by name."""
    paths = sorted((folder / "convergence").glob("*.json"))
    return {path.name: path.read_bytes() for path in paths}


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    """A folder; what a program left that was ended; what another made of it."""
    folder = tmp_path_factory.mktemp("convergence")
    with start(folder, *PAIR) as process:
        timer = threading.Timer(LIMIT_S, process.kill)
        timer.start()
        lines = []
        for line in process.stdout:
            lines.append(line)
            if line.startswith("[1/2]"):
                process.send_signal(signal.SIGTERM)
        timer.cancel()
        assert process.wait(LIMIT_S) == 128 + signal.SIGTERM, "".join(lines)
    left = results(folder)
    code, text = run(folder, *PAIR)
    assert code == 0, text
    return folder, left, text


def test_what_is_done_is_kept_and_only_the_rest_is_run(done):
    folder, left, text = done
    ((name, content),) = left.items()
    assert name.startswith("digits-conv-sgd-lr0.05-w2-dist_sync-seed1-")
    now = results(folder)
    assert len(now) == 2 and now[name] == content
    assert "1 of 2 runs are stored already" in text
    assert "[1/2]" not in text and "mirror, seed 1: " in text


def test_a_result_has_its_figures_and_its_origin(done):
    for name, text in results(done[0]).items():
        content = json.loads(text)
        assert content["status"] == "ok" and content["run"]["method"] in name
        # 1,438 training images, 2 workers with batches of 32: 22 steps in an epoch.
        assert content["num_steps"] == 44
        assert [point[0] for point in content["evaluations"]] == [22, 44]
        assert 0.2 < content["accuracy"] <= 1
        assert len(content["data"]) == 64
        origin = content["provenance"]
        assert "--preset smoke" in origin["command"]
        assert origin["versions"]["mxnet"] == "1.9.1"


def test_the_report_is_rebuilt_from_what_is_stored(done):
    folder, _, text = done
    page = folder / "convergence" / "report.md"
    before, stored = page.read_bytes(), results(folder)
    pictures = list(page.parent.glob("small-*.png"))
    assert len(pictures) == 3  # none with seconds
    for path in [page, *pictures]:
        path.unlink()
    code, printed = run(folder, "--report")
    assert code == 0, printed
    assert page.read_bytes() == before and results(folder) == stored
    assert list(page.parent.glob("small-*.png")) == pictures
    start = "\nSmall runs\n==========\n"
    assert printed[printed.index(start) :] == text[text.index(start) :]
    assert b"| mirror | 1 |" in before


def test_a_second_call_runs_nothing(done):
    folder = done[0]
    stored = results(folder)
    code, text = run(folder, *PAIR)
    assert code == 0 and "2 of 2 runs are stored already" in text
    assert "[" not in text and results(folder) == stored
    code, text = run(folder, *PAIR, "--method", "none", "--list")
    assert code == 0
    marks = [line.split()[0] for line in text.splitlines()[:3]]
    assert marks == ["stored", "stored", "to"]


def test_a_job_that_breaks_is_kept_beside_and_makes_the_program_fail(tmp_path):
    code, text = run(tmp_path, *PAIR[:4], *FEW, "--timeout", "0.5")
    assert code == 1
    ((name, content),) = results(tmp_path).items()
    assert name.endswith("-failed-1.json")
    assert json.loads(content)["status"] == "failed"
    assert "dist_sync, seed 1: the job broke: " in text
    *_, said, why = text.splitlines()
    assert said == f"Nothing in {tmp_path}/convergence is the result of a run:"
    assert why.startswith(f"{name[: -len('-failed-1.json')]}: the job broke: ")
    assert "run a preset first" not in text
    assert run(tmp_path, "--report")[1].splitlines()[-2:] == [said, why]


def test_the_imagenet_preset_trains_from_images(tmp_path):
    write_records(tmp_path / "train.rec", [i % 3 for i in range(9)])
    write_records(tmp_path / "val.rec", [i % 3 for i in range(4)])
    code, text = run(
        tmp_path, "--preset", "imagenet", "--data", str(tmp_path), "--network",
        "lenet5", "--method", "mirror", "--num-workers", "2", "--num-servers", "1",
        "--epochs", "1", "--batch-size", "2", "--num-evaluations", "1",
        "--lr-warmup-epochs", "0.5", "--warmup-steps", "0",
    )  # fmt: skip
    assert code == 0, text
    (content,) = map(json.loads, results(tmp_path).values())
    assert content["num_steps"] == 2  # 9 images, 2 workers with batches of 2
    assert content["run"]["learning_rate"] == 0.1 * 4 / 256
    assert (content["run"]["schedule"], content["max_staleness"]) == ("cosine", 1)
    assert "\nImageNet\n========\n" in text

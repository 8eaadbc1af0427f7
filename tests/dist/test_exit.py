"""How workers end, through `scripts/launch.py`: no end hangs, none is covered up.

Where one worker ends, the other trains on for ever, and the launcher must end it.
"""

import os
import re
import subprocess
import sys
import uuid
from pathlib import Path

import pytest
from watch import marked

ROOT = Path(__file__).absolute().parents[2]
LIMIT_S = 120
TRAIN = """
import os, sys, time
{imports}
import mxnet as mx
from mxnet import autograd, gluon

rank = int(os.environ["ODSGD_LOCAL_RANK"])
param = gluon.Parameter("w", shape=(3,))
param.initialize(mx.init.One())
trainer = gluon.Trainer([param], "sgd", {{"learning_rate": 0.5}}, kvstore="dist_odsgd")
factor = float(os.environ.get("FACTOR", "0.25"))

def train(steps):
    for _ in range(steps):
        with autograd.record():
            out = param.data() * factor
        out.backward()
        trainer.step(1)

def show():
    out = mx.nd.zeros(3)
    trainer._kvstore.pull(0, out=out)
    print("rank", rank, "has", *out.asnumpy(), flush=True)

print("port", os.environ["DMLC_PS_ROOT_PORT"], flush=True)
train(20)
"""
FAIL = """
if rank == 1:
    {end}
while True:
    train(1)
    param.data().asnumpy()
"""
AS_SCRIPT, AS_MODULE = [], ["-m", "odsgd_kvstore"]


class Job:
    """A launcher of 2 workers and 1 server; all that it starts carries a marker."""

    def __init__(self, folder, text, how=AS_SCRIPT, **env):
        self.marker = uuid.uuid4().hex
        script = folder / f"script-{self.marker}.py"
        imports = "import odsgd_kvstore" if how == AS_SCRIPT else ""
        script.write_text(TRAIN.format(imports=imports) + text)
        env.setdefault("ODSGD_WARMUP_STEPS", "2")
        self.popen = subprocess.Popen(
            [sys.executable, str(ROOT / "scripts" / "launch.py"), "-n", "2", "-s", "1",
             "--", sys.executable, *how, str(script)],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            env={**os.environ, "PYTHONPATH": str(ROOT), "MARKER": self.marker, **env},
        )  # fmt: skip

    def finish(self):
        """Wait for the end; return exit code, output and errors. Nothing is left."""
        try:
            out, errors = self.popen.communicate(timeout=LIMIT_S)
        except subprocess.TimeoutExpired:
            self.popen.terminate()  # the launcher ends its roles
            out, errors = self.popen.communicate(timeout=LIMIT_S)
            pytest.fail(f"the job hung: {out[-2000:]} {errors[-2000:]}")
        assert marked("MARKER", self.marker) == {}
        first = int(re.search(r"\] port (\d+)", out).group(1))
        assert not [i for i in range(4) if os.path.lexists(f"/tmp/{first + i}")]
        return self.popen.returncode, out, errors


@pytest.fixture
def start(tmp_path):
    """Start jobs in a folder of their own."""
    return lambda *args, **kwargs: Job(tmp_path, *args, **kwargs)


def weights(out):
    """The global weight that each rank printed: three equal numbers."""
    lines = re.findall(r"rank (\d) has (\S+) (\S+) (\S+)", out)
    assert all(len(set(numbers)) == 1 for _, *numbers in lines)
    return {int(rank): float(numbers[0]) for rank, *numbers in lines}


def expected(steps, factor=0.25):
    """W after plain SGD steps of two workers at rate 0.5, from 1."""
    return {rank: 1 - steps * 2 * 0.5 * factor for rank in (0, 1)}


@pytest.mark.parametrize("how, end, code, said", [
    (AS_SCRIPT, "raise ValueError('oh no')", 1, "ValueError: oh no"),
    (AS_MODULE, "raise ValueError('oh no')", 1, "ValueError: oh no"),
    (AS_SCRIPT, "sys.exit(3)", 3, ""),
    (AS_MODULE, "sys.exit(3)", 3, ""),
    (AS_SCRIPT, "exit(4)", 4, ""),
    (AS_MODULE, "sys.exit('out of data')", 1, "out of data"),
    (AS_MODULE, "raise SystemExit(5)", 5, ""),
    (AS_SCRIPT, "raise KeyboardInterrupt", 130, "KeyboardInterrupt"),
], ids=str)  # fmt: skip
def test_a_worker_that_fails_ends_at_once_and_the_job_with_it(
    start, how, end, code, said
):
    status, out, errors = start(FAIL.format(end=end), how).finish()
    assert status == code
    assert f"failed with exit code {code}" in errors and "worker 1 (pid" in errors
    assert "worker 0 (pid" not in errors and "server" not in errors
    lines = [line for line in out.splitlines() if line.startswith("[worker 1]")]
    if said:
        assert lines[-1] == f"[worker 1] {said}"
    has_traceback = any("Traceback" in line for line in lines)
    assert has_traceback == end.startswith(("raise ValueError", "raise Keyboard"))


def test_a_script_may_just_end(start):
    # Without waitall: what was pushed is finished first. Rank 0's print comes last.
    text = "if rank == 0: show()"
    status, out, errors = start(text).finish()
    assert (status, errors) == (0, "")
    assert weights(out) == {0: expected(20)[0]}


@pytest.mark.parametrize("late", [0, 1])
def test_a_rank_may_end_later_than_the_other(start, late):
    # The sleep is the user's own work, such as an evaluation on one rank.
    text = f"show()\nif rank == {late}: time.sleep(2); show()\n"
    status, out, errors = start(text).finish()
    assert (status, errors) == (0, "")
    assert weights(out) == expected(20)
    assert out.count(f"rank {late} has") == 2


def test_two_jobs_at_the_same_time_do_not_meet(start):
    jobs = {factor: start("show()", FACTOR=str(factor)) for factor in (0.25, 0.5)}
    for factor, job in jobs.items():
        status, out, errors = job.finish()
        assert (status, errors) == (0, "")
        assert weights(out) == expected(20, factor)


@pytest.mark.parametrize("how, code", [(AS_SCRIPT, 3), (AS_MODULE, 0)], ids=str)
def test_a_script_goes_on_after_an_exit_that_it_catches(start, how, code):
    text = f"try: sys.exit({code})\nexcept SystemExit: pass\ntrain(5)\nshow()\n"
    status, out, errors = start(text, how).finish()
    assert (status, errors) == (0, "")
    assert weights(out) == expected(25)


def test_an_exit_that_was_caught_is_not_the_status_of_the_end(start):
    text = "show()\ntry: sys.exit(3)\nexcept SystemExit: pass\n"
    status, out, errors = start(text).finish()
    assert (status, errors) == (0, "")
    assert weights(out) == expected(20)


def run_module(*args):
    """`python -m odsgd_kvstore` without a job."""
    return subprocess.run(
        [sys.executable, *AS_MODULE, *args], capture_output=True, text=True,
        timeout=LIMIT_S, env={**os.environ, "PYTHONPATH": str(ROOT)}, check=False,
    )  # fmt: skip


def test_a_missing_script_is_named_with_its_whole_path(tmp_path):
    path = tmp_path / "no-such.py"
    result = run_module(str(path))
    assert (result.returncode, result.stdout) == (2, "")
    assert f"the script {path} does not exist" in result.stderr
    assert "Traceback" not in result.stderr


def test_a_script_gets_its_own_arguments_and_folder(tmp_path):
    (tmp_path / "beside.py").write_text("number = 42")
    script = tmp_path / "script.py"
    script.write_text("import sys, beside\nprint(sys.argv, beside.number, __name__)")
    result = run_module(str(script), "--lr", "0.1")
    assert result.returncode == 0, result.stderr
    assert result.stdout == f"{[str(script), '--lr', '0.1']} 42 __main__\n"

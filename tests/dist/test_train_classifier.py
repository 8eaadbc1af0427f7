"""The classifier example in real jobs: weights, learning rate and resume by value."""

import functools
import os
import re
import subprocess
import sys
from pathlib import Path

import mxnet as mx
import numpy as np
import pytest
from pictures import write_records

import odsgd_kvstore
from odsgd_kvstore.testing import run_local

ROOT = Path(odsgd_kvstore.__file__).absolute().parents[1]
EXAMPLES = ROOT / "benchmarks" / "examples"
LIMIT_S = 180
NUM_BATCHES = 3  # of 13 images, 7 for rank 0 and 6 for rank 1, in batches of 2
COMMON = (
    *("--model", "mobilenet0.25", "--num-classes", "3", "--input-size", "32"),
    *("--batch-size", "2", "--num-data-workers", "1", "--num-epochs", "2"),
    *("--lr", "0.1", "--lr-mode", "cosine", "--log-interval", "1"),
)
# Without momentum, which is not saved, a resume is exact.
EXACT = ("--momentum", "0", "--save-frequency", "1", "--no-wd")
STEP = r"epoch (\d) step (\d)/(\d): [\d.]+ samples/s, accuracy [\d.]+, lr ([-\d.e]+)$"
ERROR = r"validation: top-1 error ([\d.]+), top-5 error ([\d.]+)$"


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """The flags of small record files: 13 images to train, 7 to validate."""
    folder = tmp_path_factory.mktemp("records")
    write_records(folder / "train.rec", [i % 3 for i in range(13)])
    write_records(folder / "val.rec", [i % 3 for i in range(7)], seed=1)
    names = "--rec-train", str(folder / "train.rec"), "--rec-val"
    return (*names, str(folder / "val.rec"))


@pytest.fixture(scope="module")
def importable():
    """The example's modules, here and in the workers of `run_local`."""
    sys.path.insert(0, str(EXAMPLES))
    yield
    sys.path.remove(str(EXAMPLES))


def run_job(kvstore, words, *, stock_servers=False):
    """The script under the launcher, on 2 workers and 1 server; code and output."""
    command = [sys.executable, "-m", "odsgd_kvstore.launch", "-n", "2", "-s", "1"]
    command += ["--stock-servers"] if stock_servers else []
    command += ["--timeout", str(LIMIT_S), "--", sys.executable, "-m", "odsgd_kvstore"]
    command += [str(EXAMPLES / "train_classifier.py"), "--kvstore", kvstore]
    done = subprocess.run(
        [*command, *COMMON, *words], capture_output=True, text=True, check=False,
        timeout=LIMIT_S + 10, env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    return done.returncode, done.stdout + done.stderr


def planned(update):
    """Learning rate of an update, from 1: half a cosine over two epochs."""
    return 0.1 * (1 + np.cos(np.pi * update / (2 * NUM_BATCHES))) / 2


def check_log(text, epochs):
    """Each step once, with its learning rate, from rank 0 only; returns the errors."""
    steps = re.findall(r"\[worker 0\] " + STEP, text, re.MULTILINE)
    assert len(steps) == len(re.findall(STEP, text, re.MULTILINE))
    wanted = [(e, s) for e in epochs for s in range(1, NUM_BATCHES + 1)]
    assert [(int(e), int(s)) for e, s, _, _ in steps] == wanted
    for epoch, step, num, rate in steps:
        update = (int(epoch) - 1) * NUM_BATCHES + int(step)
        assert int(num) == NUM_BATCHES
        assert float(rate) == pytest.approx(planned(update), rel=1e-6, abs=1e-12)
    errors = re.findall(ERROR, text, re.MULTILINE)
    assert len(errors) == len(epochs)
    return errors


def load(folder, epoch):
    """A checkpoint's weights, by name."""
    path = Path(folder) / f"mobilenet0.25-{epoch:04d}.params"
    return {name: value.asnumpy() for name, value in mx.nd.load(str(path)).items()}


def assert_same(one, other):
    assert one.keys() == other.keys()
    different = [name for name in one if (one[name] != other[name]).any()]
    assert not different


def weights(net, trained_only):
    return {
        name: param.data().asnumpy()
        for name, param in net._collect_params_with_prefix().items()
        if param.grad_req != "null" or not trained_only
    }


def train(argv):
    """Train on this rank; what its parameters hold, and the global weights."""
    import classifier_flags
    import classifier_training

    training = classifier_training.Training(classifier_flags.parse(argv))
    training.run()
    local = weights(training.net, trained_only=True)
    with training.at_global_weights():
        return local, weights(training.net, trained_only=True)


def rates(argv, updates_done):
    """Learning rates that the servers and the local update really used.

    A weight whose gradient is 1 on every rank falls by the learning rate of a step.
    """
    import classifier_flags
    from classifier_job import make_store
    from classifier_schedule import make_optimizer, make_schedule
    from mxnet import autograd, gluon

    args = classifier_flags.parse(argv)
    param = gluon.Parameter("weight", shape=(3,))
    param.initialize(mx.init.Zero())
    schedule = make_schedule(args, num_batches=4)
    optimizer = make_optimizer(args, [param], schedule, updates_done)
    store = make_store(args)
    is_ours = odsgd_kvstore.is_active(store)
    kind = odsgd_kvstore.Trainer if is_ours else gluon.Trainer
    trainer = kind([param], optimizer, kvstore=store)
    before, used = np.zeros(3), []
    for _ in range(args.num_epochs * 4 - updates_done):
        with autograd.record():
            loss = param.data().sum()
        loss.backward()
        trainer.step(store.num_workers)
        local = param.data().asnumpy()
        if is_ours:
            trainer.synchronize()
        after = param.data().asnumpy()
        used.append(((before - after).tolist(), (before - local).tolist()))
        before = after
    return used


def plan(argv):
    """What the schedule says, update by update, for 4 batches in an epoch."""
    import classifier_flags
    from classifier_schedule import PlannedRate, make_schedule

    args = classifier_flags.parse(argv)
    rate = PlannedRate(make_schedule(args, num_batches=4))
    return [rate(update) for update in range(1, args.num_epochs * 4 + 1)]


def check_rates(used, wanted):
    for servers, local in used:
        assert np.ptp(servers) == np.ptp(local) == 0
    assert [s[0] for s, _ in used] == pytest.approx(wanted, abs=2e-7)
    assert [l[0] for _, l in used] == pytest.approx(wanted, abs=2e-7)


CASES = {
    "cosine": ("--lr-mode cosine --num-epochs 3 --warmup-epochs 1 --optimizer sgd", 0),
    "cosine resumed": (
        "--lr-mode cosine --num-epochs 3 --warmup-epochs 1 --warmup-lr 0.02",
        4,
    ),
    "poly resumed in the warm-up": (
        "--lr-mode poly --num-epochs 4 --warmup-epochs 2 --warmup-lr 0.02",
        4,
    ),
    "step": ("--lr-mode step --lr-decay-epoch 1,2 --lr-decay 0.5 --num-epochs 3", 0),
    "step resumed": (
        "--lr-mode step --lr-decay-epoch 1,2 --lr-decay 0.5 --num-epochs 3",
        8,
    ),
}
NO_MOMENTUM = ("--momentum", "0", "--wd", "0", "--lr", "0.1")


def everything(exact, again, delayed, cases):
    """All that one job of dist_odsgd can show, on one rank."""
    import classifier_flags
    from classifier_training import Training

    train(exact)
    store = mx.kv.create("dist_odsgd")  # waits until rank 0 has saved
    train(again)
    mine = [
        *again,
        "--save-dir",
        again[again.index("--save-dir") + 1] + "x" * store.rank,
    ]
    try:
        Training(classifier_flags.parse(mine))
        refusal = ""
    except classifier_flags.Refused as error:
        refusal = str(error)
    return {
        "refusal": refusal,
        "delayed": train(delayed),
        "rates": [rates(argv, done) for argv, done in cases],
    }


@pytest.fixture(scope="module")
def odsgd(files, importable, tmp_path_factory):
    """What each rank of a dist_odsgd job returned, and its folders of checkpoints."""
    exact, delayed = (str(tmp_path_factory.mktemp(n)) for n in ("exact", "delayed"))
    argv = [*COMMON, *files, "--kvstore", "dist_odsgd"]
    first = [*argv, *EXACT, "--warmup-steps", "100", "--save-dir", exact]
    second = [*argv, "--warmup-steps", "1", "--save-dir", delayed]
    second += ["--lr-mode", "constant"]  # with a last rate of 0 all ranks' L were equal
    again = [*first, "--resume", "auto", "--logging-file", f"{exact}/log"]
    zero = [*argv, *NO_MOMENTUM, "--warmup-steps", "0"]
    cases = [([*zero, *words.split()], done) for words, done in CASES.values()]
    fn = functools.partial(everything, first, again, second, cases)
    return run_local(fn, timeout=LIMIT_S), exact, delayed


def test_servers_and_local_update_use_the_planned_rate(odsgd, files, importable):
    ranks, _, _ = odsgd
    for i, (name, (words, done)) in enumerate(CASES.items()):
        argv = [*COMMON, *files, *NO_MOMENTUM, *words.split()]
        wanted = plan(argv)[done:]
        assert len(wanted) >= 4, name
        for rank in ranks:
            check_rates(rank["rates"][i], wanted)


def test_rank_0_saves_the_global_weights(odsgd):
    ranks, _, folder = odsgd
    (local_0, global_0), (local_1, global_1) = (rank["delayed"] for rank in ranks)
    assert_same(global_0, global_1)
    saved = load(folder, 2)
    assert_same(global_0, {name: saved[name] for name in global_0})
    # with a delay the ranks' own weights differ, from each other and from these
    assert any((local_0[name] != local_1[name]).any() for name in local_0)
    assert any((local_0[name] != global_0[name]).any() for name in local_0)
    assert sorted(p.name for p in Path(folder).iterdir()) == [
        "mobilenet0.25-0002.json",
        "mobilenet0.25-0002.params",
    ]


def test_a_rank_that_sees_other_checkpoints_is_refused(odsgd):
    ranks, _, _ = odsgd
    assert ranks[0]["refusal"] == ""
    assert "Rank 1 finds 0 epochs done, and rank 0 2." in ranks[1]["refusal"]


def test_dist_sync_ends_with_the_weights_of_a_warmup_that_never_ends(
    odsgd, files, tmp_path
):
    _, exact, _ = odsgd
    words = (*files, *EXACT, "--save-dir", str(tmp_path))
    code, text = run_job("dist_sync", words, stock_servers=True)
    assert code == 0, text
    check_log(text, epochs=[1, 2])
    for epoch in (1, 2):
        assert_same(load(tmp_path, epoch), load(exact, epoch))
    first, last = load(exact, 1), load(exact, 2)
    assert any((first[name] != last[name]).any() for name in first)


def test_a_resumed_job_ends_like_one_that_was_not_stopped(odsgd, files, tmp_path):
    _, exact, _ = odsgd
    for path in Path(exact).glob("*0001.*"):
        (tmp_path / path.name).write_bytes(path.read_bytes())
    words = (*files, *EXACT, "--save-dir", str(tmp_path), "--resume", "auto")
    code, text = run_job("dist_odsgd", (*words, "--warmup-steps", "100"))
    assert code == 0, text
    assert f"1 epochs are done, update {NUM_BATCHES + 1} is next" in text
    assert "warm-up of dist_odsgd runs again" in text
    errors = check_log(text, epochs=[2])
    assert_same(load(tmp_path, 2), load(exact, 2))
    assert len(list(tmp_path.iterdir())) == 4
    # what is evaluated after the end is what was evaluated and saved at the end
    log = Path(exact, "log").read_text()
    assert "Nothing is left to train" in log
    assert re.findall(ERROR, log, re.MULTILINE) == errors


def test_stock_servers_use_the_planned_rate_after_a_resume(files, importable):
    argv = [*COMMON, *files, *NO_MOMENTUM, *CASES["cosine resumed"][0].split()]
    fn = functools.partial(rates, [*argv, "--kvstore", "dist_sync"], 4)
    for used in run_local(fn, timeout=LIMIT_S, stock_servers=True):
        check_rates(used, plan(argv)[4:])


@pytest.mark.parametrize(
    "words, message",
    [
        ("--batch-size 14", "A step of one worker takes 14 images"),
        ("--kvstore dist_odsgd --local-optimizer ada", "local_optimizer is 'ada'"),
    ],
)
def test_a_refusal_ends_the_script_with_status_2(files, tmp_path, words, message):
    command = [sys.executable, str(EXAMPLES / "train_classifier.py"), *COMMON, *files]
    done = subprocess.run(
        [*command, *words.split(), "--save-dir", str(tmp_path)],
        capture_output=True, text=True, check=False, timeout=LIMIT_S,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert done.returncode == 2
    assert f"train_classifier: {message}" in done.stderr
    assert "Traceback" not in done.stderr
    assert list(tmp_path.iterdir()) == []

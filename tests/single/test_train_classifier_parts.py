"""The classifier example: its flags, schedule, data and labels."""

import argparse
import json
import math
from pathlib import Path

import mxnet as mx
import numpy as np
import pytest
from mxnet.gluon import nn
from pictures import write_records

import odsgd_kvstore
from odsgd_kvstore import commands

ROOT = Path(odsgd_kvstore.__file__).absolute().parents[1]
NUM_CLASSES = 3
GLUONCVS_FLAGS = {
    "batch_size": 32,
    "dtype": "float32",
    "num_gpus": 0,
    "num_data_workers": 4,
    "num_epochs": 3,
    "lr": 0.1,
    "momentum": 0.9,
    "wd": 1e-4,
    "lr_mode": "step",
    "lr_decay": 0.1,
    "lr_decay_period": 0,
    "lr_decay_epoch": "40,60",
    "warmup_lr": 0.0,
    "warmup_epochs": 0,
    "last_gamma": False,
    "input_size": 224,
    "crop_ratio": 0.875,
    "use_pretrained": False,
    "use_se": False,
    "mixup": False,
    "mixup_alpha": 0.2,
    "mixup_off_epoch": 0,
    "label_smoothing": False,
    "no_wd": False,
    "batch_norm": False,
    "log_interval": 50,
    "save_frequency": 10,
    "save_dir": "params",
    "resume_epoch": 0,
    "resume_params": "",
    "resume_states": "",
    "use_gn": False,
    "num_classes": 1000,
    "optimizer": "nag",
    "decay_epochs": [40, 60],
}


@pytest.fixture
def example(monkeypatch):
    """Import from the example's folder."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks" / "examples"))
    return __import__


@pytest.fixture
def flags(example):
    return example("classifier_flags")


@pytest.fixture
def argv(tmp_path):
    """A command line that is complete; 23 images to train, 7 to validate."""
    write_records(tmp_path / "train.rec", [i % NUM_CLASSES for i in range(23)])
    write_records(tmp_path / "val.rec", [i % NUM_CLASSES for i in range(7)], seed=1)
    return [
        *("--model", "mobilenet0.25", "--num-classes", "3", "--input-size", "32"),
        *("--rec-train", str(tmp_path / "train.rec"), "--batch-size", "2"),
        *("--rec-val", str(tmp_path / "val.rec"), "--num-data-workers", "1"),
        *("--save-dir", str(tmp_path / "saved")),
    ]


def test_flags_and_defaults_are_gluoncvs(flags, argv, tmp_path):
    files = argv[6:8] + argv[10:12]
    args = flags.parse(["--model", "resnet50_v1b", "--use-rec", "-j", "4", *files])
    values = vars(args)
    assert {name: values[name] for name in GLUONCVS_FLAGS} == GLUONCVS_FLAGS
    assert args.kvstore == "device"
    assert args.mode == "hybrid"
    assert args.rec_train_idx == str(tmp_path / "train.idx")
    assert args.rec_val_idx == str(tmp_path / "val.idx")


@pytest.mark.parametrize(
    "words, message",
    [
        ("--teacher resnet152_v1", "--teacher: distillation is not supported"),
        ("--resume-states a.states", "--resume-states is not supported yet.*momentum"),
        ("--dtype bfloat16", "--dtype bfloat16; allowed are float32 and float16"),
        ("--dtype float16", "--dtype float16 needs a GPU"),
        (
            "--dtype float16 --num-gpus 1 --kvstore dist_odsgd",
            "--dtype float16 is not supported yet with --kvstore dist_odsgd",
        ),
        ("--resume auto --resume-epoch 1", "--resume auto came with --resume-epoch"),
        ("--warmup-steps 3", "--warmup-steps and --local-optimizer are of dist_odsgd"),
        ("--kvstore dist_sync", "odsgd-launch --stock-servers -n WORKERS -s SERVERS"),
        ("--lr 0", "--lr is 0.0"),
        ("--lr nan", "--lr is nan"),
        ("--lr 0.1 --warmup-lr 0.2", "--warmup-lr 0.2; --lr is above 0"),
        ("--wd -1", "--wd is -1.0"),
        ("--momentum 1", "--momentum is 1.0; allowed are numbers from 0, below 1"),
        ("--crop-ratio 0", "--crop-ratio is 0.0; allowed is above 0, up to 1"),
        ("--lr-decay 2", "--lr-decay is 2.0"),
        ("--mixup --mixup-alpha 0", "--mixup-alpha is 0"),
        ("--warmup-epochs 3", "--warmup-epochs is 3 and --num-epochs 3"),
        ("--lr-decay-epoch 40,x", "--lr-decay-epoch is '40,x'; allowed are rising"),
        ("--lr-decay-epoch 60,40", "--lr-decay-epoch is '60,40'"),
        ("--logging-file /nowhere/log", "the folder /nowhere does not exist"),
        ("--rec-val /nowhere/v.rec", "--rec-val: the file /nowhere/v.rec does not"),
        ("--rec-train-idx /nowhere/t.idx", "--rec-train-idx: the file .*im2rec"),
    ],
)
def test_what_cannot_be_done_is_refused_at_once(flags, argv, words, message):
    with pytest.raises(flags.Refused, match=message):
        flags.parse([*argv, *words.split()])


@pytest.mark.parametrize("content, start", [(b"", "nothing"), (b"PK12", "504b3132")])
@pytest.mark.parametrize("name", ["train", "val"])
def test_files_without_records_are_named(flags, argv, tmp_path, name, content, start):
    path = tmp_path / f"{name}.rec"
    path.write_bytes(content)
    message = f"--rec-{name}: {path} is no RecordIO file: it begins with {start}, not"
    with pytest.raises(flags.Refused, match=message):
        flags.parse(argv)


@pytest.mark.parametrize("words", ["--batch-size 0", "--kvstore dist_async", "-j x"])
def test_values_that_are_not_allowed_end_with_usage(flags, argv, words, capsys):
    with pytest.raises(SystemExit):
        flags.parse([*argv, *words.split()])
    assert words.split()[0] in capsys.readouterr().err


def test_decay_period_gives_the_epochs(flags, argv):
    words = ["--lr-decay-period", "3", "--num-epochs", "10"]
    assert flags.parse([*argv, *words]).decay_epochs == [3, 6, 9]


def planned(example, args, num_batches, first=1):
    """Learning rate of each update from `first` on."""
    schedule = example("classifier_schedule").make_schedule(args, num_batches)
    rate = example("classifier_schedule").PlannedRate(schedule)
    return [rate(u) for u in range(first, args.num_epochs * num_batches + 1)]


def by_formula(mode, update):
    """5 epochs of 4 updates, one of them warm-up from 0.02 to 0.1."""
    if update < 4:
        return 0.02 + 0.08 * update / 4
    done = (update - 4) / (20 - 4)
    if mode == "cosine":
        return 0.1 * (1 + math.cos(math.pi * done)) / 2
    if mode == "poly":
        return 0.1 * (1 - done) ** 2
    if mode == "step":  # after epochs 2 and 3, that is, from updates 9 and 13 on
        return 0.1 * 0.5 ** ((update > 8) + (update > 12))
    return 0.1


@pytest.mark.parametrize("mode", ["cosine", "poly", "step", "constant"])
def test_learning_rate_is_as_planned_from_any_update(example, flags, argv, mode):
    words = f"--lr-mode {mode} --num-epochs 5 --warmup-epochs 1 --warmup-lr 0.02"
    words += " --lr-decay 0.5 --lr-decay-epoch 2,3"
    args = flags.parse([*argv, *words.split()])
    wanted = [by_formula(mode, update) for update in range(1, 21)]
    assert planned(example, args, 4) == pytest.approx(wanted, abs=1e-12)
    for first in (2, 5, 9, 10, 20):
        resumed = planned(example, args, 4, first)
        assert resumed == pytest.approx(wanted[first - 1 :], abs=1e-12)


@pytest.mark.parametrize("mode", ["cosine", "poly", "step", "constant"])
def test_servers_can_rebuild_the_schedule(example, flags, argv, mode):
    args = flags.parse([*argv, "--lr-mode", mode, "--lr-decay-epoch", "1"])
    schedule = example("classifier_schedule").make_schedule(args, 4)
    encoded = json.loads(json.dumps(commands.encode_schedule(schedule)))
    assert "class" in encoded  # not a pickle, which a server without a key refuses
    served = commands.decode_schedule(encoded, False)
    assert [served(u) for u in range(1, 13)] == planned(example, args, 4)


def test_optimizer_counts_from_where_the_training_stands(example, flags, argv):
    args = flags.parse([*argv, "--lr-mode", "cosine", "--no-wd"])
    net = nn.HybridSequential()
    net.add(nn.Dense(2, in_units=2), nn.BatchNorm(in_channels=2))
    params = list(net.collect_params().values())
    module = example("classifier_schedule")
    schedule = module.make_schedule(args, 4)
    optimizer = module.make_optimizer(args, params, schedule, 5)
    assert isinstance(optimizer, mx.optimizer.NAG)
    assert (optimizer.begin_num_update, optimizer.num_update) == (5, 5)
    optimizer._update_count(0)
    wanted = 0.05 * (1 + math.cos(math.pi * 6 / 12))
    assert optimizer.learning_rate == pytest.approx(wanted)
    decayed = [p.name.endswith(("weight", "mean", "var")) for p in params]
    assert [optimizer._get_wd(i) > 0 for i in range(len(params))] == decayed
    assert [p.wd_mult > 0 for p in params] == decayed
    assert sum(decayed) == 3


def epoch_labels(example, args, epoch, num_workers):
    """Labels by rank and batch, and the first pixels, of one epoch."""
    data = example("classifier_data")
    num = data.count_batches(23, num_workers, args.batch_size)
    return [
        [
            (label.asnumpy().tolist(), image[0, 0, 0, :4].asnumpy().tolist())
            for image, label in data.training_batches(
                args, epoch, rank, num_workers, args.batch_size, num
            )
        ]
        for rank in range(num_workers)
    ]


@pytest.mark.parametrize("num_workers, num_batches", [(1, 11), (2, 5), (3, 3), (5, 1)])
def test_ranks_have_equally_many_different_images(
    example, flags, argv, tmp_path, num_workers, num_batches
):
    write_records(tmp_path / "train.rec", range(23))  # the label is the image's number
    args = flags.parse([*argv, "--num-classes", "23"])
    ranks = epoch_labels(example, args, 0, num_workers)
    assert [len(batches) for batches in ranks] == [num_batches] * num_workers
    seen = [n for batches in ranks for labels, _ in batches for n in labels]
    assert len(set(seen)) == len(seen) == num_workers * num_batches * 2


def test_order_and_augmentation_follow_seed_and_epoch(example, flags, argv, tmp_path):
    write_records(tmp_path / "train.rec", range(23))
    args = flags.parse([*argv, "--num-classes", "23"])
    first, again = (epoch_labels(example, args, 0, 2) for _ in range(2))
    assert first == again
    other = epoch_labels(example, args, 1, 2)
    order = [[labels for labels, _ in rank] for rank in first]
    assert order != [[labels for labels, _ in rank] for rank in other]
    pixels = {label: p for rank in first for labels, p in rank for label in labels[:1]}
    others = {label: p for rank in other for labels, p in rank for label in labels[:1]}
    common = pixels.keys() & others.keys()
    assert common
    assert all(pixels[label] != others[label] for label in common)
    args.seed = 1
    assert epoch_labels(example, args, 0, 2) != first


@pytest.mark.parametrize("batch_size", [3, 7, 50])
def test_validation_shows_each_image_once(example, flags, argv, batch_size):
    args = flags.parse(argv)
    validation = example("classifier_data").validation_batches(args, batch_size, 7)
    labels = []
    for image, label in validation:
        assert image.shape[1:] == (3, 32, 32)
        assert len(image) == len(label)
        labels += label.asnumpy().tolist()
    assert labels == [0, 1, 2, 0, 1, 2, 0]


def test_colours_are_normalised_in_order_red_green_blue(
    example, flags, argv, tmp_path, monkeypatch
):
    write_records(tmp_path / "val.rec", [0] * 4)
    args = flags.parse(argv)
    data = example("classifier_data")
    ((image, _),) = data.validation_batches(args, 4, 4)
    means = image.mean(axis=(0, 2, 3)).asnumpy()
    # pixels are 0 to 99, evenly, and 150 more in red
    wanted = [(199.5 - 123.68) / 58.393, (49.5 - 116.779) / 57.12]
    wanted += [(49.5 - 103.939) / 57.375]
    assert means == pytest.approx(wanted, abs=0.05)


def test_bad_data_is_refused(example, flags, argv, tmp_path):
    data = example("classifier_data")
    text = "step of one worker takes 8 images .* one of 3 workers is 7 of the 23 images"
    with pytest.raises(flags.Refused, match=text):
        data.count_batches(23, 3, 8)
    with pytest.raises(flags.Refused, match="one of 8 workers is 2 of the 23"):
        data.count_batches(23, 8, 3)  # 3 each, and 2 for the last one
    with pytest.raises(flags.Refused, match="one of 16 workers is 0 of"):
        data.count_batches(23, 16, 1)  # 2 each, and no more for the last five
    args = flags.parse([*argv, "--num-classes", "2"])
    with pytest.raises(flags.Refused, match="has the label 2; with --num-classes 2"):
        epoch_labels(example, args, 0, 1)
    (tmp_path / "empty.idx").write_text("")
    with pytest.raises(flags.Refused, match="lists no records"):
        data.count_records(str(tmp_path / "empty.idx"))
    with pytest.raises(flags.Refused, match="is not an index of a RecordIO file"):
        data.count_records(args.rec_train)
    assert data.count_records(args.rec_train_idx) == 23


def targets_of(example, **given):
    settings = {"num_classes": 4, "num_epochs": 3, "seed": 3, "mixup": False}
    settings.update(label_smoothing=False, mixup_alpha=0.2, mixup_off_epoch=1)
    settings.update({"dtype": "float32", **given})
    args = argparse.Namespace(**settings)
    return example("classifier_labels").Targets(args, epoch=0, rank=0)


def test_labels_are_smoothed_and_mixed(example):
    images = [mx.nd.array([[1.0], [3.0], [5.0]])]
    labels = [mx.nd.array([0, 1, 3])]
    plain = targets_of(example)
    assert not plain.are_shares
    assert plain(images, labels) == (images, labels)

    smooth = targets_of(example, label_smoothing=True)
    same, (shares,) = smooth(images, labels)
    assert same is images
    wanted = 0.9 * np.eye(4)[[0, 1, 3]] + 0.1 / 4
    assert shares.asnumpy() == pytest.approx(wanted, abs=1e-6)

    _, (half,) = targets_of(example, label_smoothing=True, dtype="float16")(
        images, labels
    )
    assert half.dtype == np.float16  # as the scores are

    for off, is_mixed in ((1, True), (3, False)):  # 3: the last 3 of 3 epochs
        targets = targets_of(example, mixup=True, mixup_off_epoch=off)
        (mixed,), (shares,) = targets(images, labels)
        part = (5 - float(mixed[0].asscalar())) / 4  # part * 1 + (1 - part) * 5
        assert (0 < part < 1) == is_mixed
        assert mixed.asnumpy()[:, 0] == pytest.approx([5 - 4 * part, 3, 1 + 4 * part])
        wanted = part * np.eye(4)[[0, 1, 3]] + (1 - part) * np.eye(4)[[3, 1, 0]]
        assert shares.asnumpy() == pytest.approx(wanted, abs=1e-6)

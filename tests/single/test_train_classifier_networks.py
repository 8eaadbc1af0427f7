"""The classifier example: networks, checkpoints, a training of one process."""

import importlib.util
from pathlib import Path

import mxnet as mx
import pytest
from pictures import write_records

import odsgd_kvstore

ROOT = Path(odsgd_kvstore.__file__).absolute().parents[1]
HAS_GLUONCV = importlib.util.find_spec("gluoncv") is not None
needs_gluoncv = pytest.mark.skipif(not HAS_GLUONCV, reason="GluonCV is not installed")


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
    write_records(tmp_path / "train.rec", [i % 3 for i in range(23)])
    write_records(tmp_path / "val.rec", [i % 3 for i in range(7)], seed=1)
    return [
        *("--model", "mobilenet0.25", "--num-classes", "3", "--input-size", "32"),
        *("--rec-train", str(tmp_path / "train.rec"), "--batch-size", "2"),
        *("--rec-val", str(tmp_path / "val.rec"), "--num-data-workers", "1"),
        *("--save-dir", str(tmp_path / "saved")),
    ]


def build(example, flags, argv, *words):
    args = flags.parse([*argv, *words])
    return example("classifier_model").build(args, [mx.cpu()])


def weights(net, kinds=("null", "write")):
    """What the first device holds, by name."""
    return {
        name: param.list_data()[0].asnumpy()
        for name, param in net._collect_params_with_prefix().items()
        if param.grad_req in kinds
    }


def test_networks_have_the_same_weights_for_a_seed(example, flags, argv):
    nets = [build(example, flags, argv, "--seed", s) for s in ("1", "1", "2")]
    first, same, other = map(weights, nets)
    assert all((first[name] == same[name]).all() for name in first)
    assert any((first[name] != other[name]).any() for name in first)
    assert nets[0](mx.nd.zeros((2, 3, 32, 32))).shape == (2, 3)


def test_unknown_networks_are_refused_with_names_like_it(
    example, flags, argv, monkeypatch
):
    model = example("classifier_model")
    with pytest.raises(flags.Refused, match=r"Close: .*mobilenet1\.0"):
        model.finder("mobilnet1.0")
    with pytest.raises(flags.Refused, match="not a classification network"):
        model.finder("ssd_512_resnet50_v1_voc")
    monkeypatch.setattr(model, "has_gluoncv", lambda: False)
    with pytest.raises(flags.Refused, match=r"pip install '\.\[gluoncv\]'"):
        model.finder("cifar_resnet20_v1")
    make, name = model.finder("MobileNet0.25")
    assert name == "mobilenet0.25"
    assert make is mx.gluon.model_zoo.vision.get_model
    for name in ("resnet18_v1", "squeezenet1.0", "alexnet"):
        model.finder(name)


@pytest.mark.parametrize(
    "words, message",
    [
        ("--use_se", "--use_se is for resnext networks; --model is mobilenet0.25"),
        ("--batch-norm", "--batch-norm is for vgg networks"),
        ("--use-pretrained", "has 1000 classes; --num-classes is 3"),
        ("--last-gamma", "does not take --last-gamma"),
        ("--model alexnet", "alexnet does not work with images of 32 pixels"),
    ],
)
def test_flags_that_do_not_fit_the_network_are_refused(
    example, flags, argv, words, message
):
    with pytest.raises(flags.Refused, match=message):
        build(example, flags, argv, *words.split())


@needs_gluoncv
def test_networks_of_gluoncv(example, flags, argv):
    net = build(example, flags, argv, "--model", "cifar_resnet20_v1")
    assert "gluoncv" in type(net).__module__
    assert net(mx.nd.zeros((2, 3, 32, 32))).shape == (2, 3)
    words = ["--model", "resnet18_v1", "--last-gamma", "--use-gn"]
    named = weights(build(example, flags, argv, *words))
    assert (named["features.4.0.body.4.gamma"] == 0).all()
    assert (named["features.4.0.body.1.gamma"] == 1).all()
    assert not any("running" in name for name in named)
    with pytest.raises(flags.Refused, match="takes --last-gamma and does not heed it"):
        build(example, flags, argv, "--model", "resnet18_v1b", "--last-gamma")
    words = ["--model", "cifar_resnet20_v1", "--use-gn"]  # 16 channels, 32 groups
    with pytest.raises(flags.Refused, match="32 pixels .* and --use-gn: .*num_groups"):
        build(example, flags, argv, *words)


@pytest.fixture
def saved(example, flags, argv):
    """Arguments, network, and a function that saves it."""
    args = flags.parse([*argv, "--lr", "0.2"])
    net = example("classifier_model").build(args, [mx.cpu()])
    checkpoint = example("classifier_checkpoint")
    checkpoint.prepare(args)
    return args, net, lambda epoch: checkpoint.save(net, args, epoch, {"updates": 5})


def test_checkpoints_are_found_and_loaded(example, flags, argv, saved):
    checkpoint = example("classifier_checkpoint")
    args, net, save = saved
    assert checkpoint.find(flags.parse([*argv, "--resume", "auto"])).epoch == 0
    paths = [save(epoch) for epoch in (2, 10)]
    assert [path.name for path in paths] == [
        "mobilenet0.25-0002.params",
        "mobilenet0.25-0010.params",
    ]
    folder = Path(args.save_dir)
    assert len(list(folder.iterdir())) == 4
    (folder / "mobilenet0.25-0011.params").write_bytes(b"interrupted: no JSON yet")
    (folder / "mobilenet0.5-0012.json").write_text("another model")
    (folder / "mobilenet0.25-0013.json").write_text("{}")  # weights were removed
    start = checkpoint.find(flags.parse([*argv, "--resume", "auto"]))
    assert (start.epoch, start.params) == (10, paths[1])
    assert (start.record["epoch"], start.record["updates"]) == (10, 5)

    fresh = build(example, flags, argv, "--seed", "9")
    checkpoint.load(fresh, start, [mx.cpu()])
    before, after = weights(net), weights(fresh)
    assert all((before[name] == after[name]).all() for name in before)

    start = checkpoint.find(flags.parse([*argv, "--resume-epoch", "2"]))
    assert (start.epoch, start.params) == (2, paths[0])
    words = ["--resume-params", str(paths[1]), "--resume-epoch", "7"]
    start = checkpoint.find(flags.parse([*argv, *words]))
    assert (start.epoch, start.params) == (7, paths[1])
    assert checkpoint.find(args) == checkpoint.Start()


def test_other_flags_of_a_checkpoint_are_named(example, flags, argv, saved):
    checkpoint, (_, _, save) = example("classifier_checkpoint"), saved
    save(1)
    args = flags.parse(
        [*argv, "--resume", "auto", "--log-interval", "7", "--batch-size", "3"]
    )
    changed = checkpoint.changed_flags(args, checkpoint.find(args))
    assert changed == ["--batch-size: 2, now 3", "--lr: 0.2, now 0.1"]


def test_checkpoints_that_do_not_fit_are_refused(example, flags, argv, saved):
    checkpoint, (_, _, save) = example("classifier_checkpoint"), saved
    other = ["--resume-epoch", "3"]
    with pytest.raises(flags.Refused, match="mobilenet0.25-0003.params does not exist"):
        checkpoint.find(flags.parse([*argv, *other]))
    with pytest.raises(
        flags.Refused, match="the file /nowhere/w.params does not exist"
    ):
        checkpoint.find(flags.parse([*argv, "--resume-params", "/nowhere/w.params"]))
    path = save(3)
    start = checkpoint.find(flags.parse([*argv, *other]))
    for words in (["--num-classes", "5"], ["--model", "mobilenet0.5"]):
        net = build(example, flags, argv, *words)
        with pytest.raises(
            flags.Refused, match="does not hold the weights of this net"
        ):
            checkpoint.load(net, start, [mx.cpu()])
    path.with_suffix(".json").write_text("{")
    with pytest.raises(flags.Refused, match="0003.json is not JSON"):
        checkpoint.find(flags.parse([*argv, *other]))


@pytest.mark.parametrize("content", [None, b"", b"foreign" * 9])
@pytest.mark.parametrize("epochs", [(3,), (1, 2, 3)])
def test_spoilt_weights_are_named_and_those_before(
    example, flags, argv, saved, content, epochs
):
    checkpoint, (_, net, save) = example("classifier_checkpoint"), saved
    *_, before, path = [None, *map(save, epochs)]
    path.write_bytes(path.read_bytes()[:1000] if content is None else content)
    start = checkpoint.find(flags.parse([*argv, "--resume", "auto"]))
    assert (start.epoch, start.before) == (3, before)
    with pytest.raises(flags.Refused) as caught:
        checkpoint.load(net, start, [mx.cpu()])
    text = str(caught.value)
    assert text.startswith(f"{path} does not hold the weights of this network: MXNetE")
    assert "Invalid NDArray file format" in text and "Traceback" not in text
    advice = f" To go on from {before}, move this file away." if before else ""
    assert text.endswith(f"--input-size, or truncated?{advice}")
    path.rename(path.with_suffix(".away"))
    start = checkpoint.find(flags.parse([*argv, "--resume", "auto"]))
    assert start.params == before


def test_a_save_removes_what_a_killed_one_left(saved):
    args, _, save = saved
    folder = Path(args.save_dir)
    left = [
        ".mobilenet0.25-0001.params.77.partial",
        ".mobilenet0.25-0001.json.5.partial",
    ]
    others = [".mobilenet0.5-0001.params.77.partial", ".mobilenet0.25-0001.txt"]
    for name in (*left, *others):
        (folder / name).write_text("")
    path = save(2)
    names = {each.name for each in folder.iterdir()}
    assert names == {path.name, path.with_suffix(".json").name, *others}


def test_a_folder_that_cannot_be_made_is_refused(example, flags, argv, tmp_path):
    (tmp_path / "file").write_text("")
    args = flags.parse([*argv, "--save-dir", str(tmp_path / "file" / "params")])
    with pytest.raises(flags.Refused, match="file/params cannot be made"):
        example("classifier_checkpoint").prepare(args)
    args.save_frequency = 0
    example("classifier_checkpoint").prepare(args)


def test_pretrained_weights_are_announced_and_not_needed_for_a_resume(
    example, flags, argv, monkeypatch, capsys
):
    model = example("classifier_model")
    argv = [*argv, "--use-pretrained", "--num-classes", "1000"]
    args = flags.parse(argv)
    asked = []

    def get_model(name, pretrained=False, **keywords):
        asked.append(pretrained)
        if pretrained:
            raise OSError("no network")
        return real(name, **keywords)

    real = mx.gluon.model_zoo.vision.get_model
    monkeypatch.setattr(model, "finder", lambda name: (get_model, name))
    text = "--use-pretrained: no weights of mobilenet0.25: no network"
    with pytest.raises(flags.Refused, match=text):
        model.build(args, [mx.cpu()])
    assert "are downloaded into ~/.mxnet/models" in capsys.readouterr().out
    model.build(args, [mx.cpu()], is_new=False)
    assert asked == [True, False]
    assert capsys.readouterr().out == ""


def test_a_failed_save_leaves_the_one_before(example, saved, monkeypatch):
    args, net, save = saved
    path = save(1)
    before = path.read_bytes()

    def fail(name):
        Path(name).write_bytes(b"half")
        raise OSError("disk full")

    monkeypatch.setattr(net, "save_parameters", fail)
    with pytest.raises(OSError, match="disk full"):
        save(1)
    assert path.read_bytes() == before
    assert sorted(p.name for p in Path(args.save_dir).iterdir()) == [
        "mobilenet0.25-0001.json",
        "mobilenet0.25-0001.params",
    ]


def test_places_of_the_right_classes(example):
    before = example("classifier_training").classes_before
    nan = float("nan")
    scores = [[3, 1, 2], [1, 3, 2], [0, 0, 0], [nan, nan, nan], [9, nan, 5]]
    places = before(mx.nd.array(scores), mx.nd.array([0, 0, 1, 2, 0]))
    # the best, the worst, even with two others, not numbers (two): not among five
    assert places.tolist() == [0, 2, 2, 5, 5]


def test_a_worker_of_a_job_does_not_train_alone(example, flags, monkeypatch):
    job = example("classifier_job")
    assert [job.expected_workers(k) for k in ("device", "dist_odsgd")] == [1, 1]
    variables = {"DMLC_ROLE": "worker", "DMLC_PS_ROOT_URI": "127.0.0.1"}
    variables.update(DMLC_PS_ROOT_PORT="9000", DMLC_NUM_WORKER="3", DMLC_NUM_SERVER="2")
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    for kvstore in ("dist_odsgd", "dist_sync"):
        assert job.expected_workers(kvstore) == 3
    with pytest.raises(flags.Refused, match="one of 3 workers .* --kvstore is device"):
        job.expected_workers("device")


def test_workers_of_a_machine_share_its_gpus(example, flags, monkeypatch):
    job = example("classifier_job")
    assert job.devices(0) == [mx.cpu()]
    monkeypatch.setattr(mx.context, "num_gpus", lambda: 4)
    assert job.devices(2) == [mx.gpu(0), mx.gpu(1)]
    monkeypatch.setenv("ODSGD_LOCAL_RANK", "1")
    assert job.devices(2) == [mx.gpu(2), mx.gpu(3)]
    with pytest.raises(flags.Refused, match="finds 4 GPU.* the first 3 are other"):
        job.devices(3)


@pytest.mark.parametrize(
    "words, num_devices", [("", 1), ("--mixup --label-smoothing", 2)]
)
def test_training_alone_trains_evaluates_saves(
    example, flags, argv, tmp_path, monkeypatch, words, num_devices
):
    contexts = [mx.cpu(i) for i in range(num_devices)]
    module = example("classifier_training")
    monkeypatch.setattr(module, "devices", lambda num_gpus: contexts)
    text = "--lr 0.02 --num-epochs 4 --save-frequency 2 --log-interval 2"
    text += f" --batch-size {4 // num_devices}"
    log = str(tmp_path / "log")
    words = [*text.split(), *words.split(), "--logging-file", log]
    training = module.Training(flags.parse([*argv, *words]))
    before = weights(training.net)
    training.run()
    lines = Path(log).read_text().splitlines()
    assert sum("/5: " in line for line in lines) == 4 * 2
    assert [line.split()[1] for line in lines if "validation" in line] == list("1234")
    saved = sorted((tmp_path / "saved").glob("*.params"))
    assert [p.name for p in saved] == [
        "mobilenet0.25-0002.params",
        "mobilenet0.25-0004.params",
    ]
    after = {name: a.asnumpy() for name, a in mx.nd.load(str(saved[1])).items()}
    now = weights(training.net, kinds=["write"])  # the rest is averaged over devices
    assert all((after[name] == now[name]).all() for name in now)
    assert any((after[name] != before[name]).any() for name in now)

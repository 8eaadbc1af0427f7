"""The command line and the presets of benchmark_convergence.py."""

import functools

import pytest
from convergence_results import make_run

ORDER = ("dist_sync", "dist_async scaled", "none", "sgd", "mirror", "replica")


@pytest.fixture
def new_run(modules):
    """Make a run, by default a short one of the mnist preset."""
    return functools.partial(make_run, modules("convergence_run").Run)


def parse(modules, *args):
    return modules("convergence_options").parse(list(args))


def test_presets_have_the_runs_that_they_are_named_for(modules):
    presets = modules("convergence_presets").presets()
    counts = {name: len(preset.runs()) for name, preset in presets.items()}
    assert counts == {
        "smoke": 12, "mnist": 72, "optimizers": 96, "compensation": 24, "noniid": 36,
        "stragglers": 8, "many": 36, "time": 6, "cifar": 28, "cifar-resnet": 14,
        "imagenet": 4,
    }  # fmt: skip
    for preset in presets.values():
        runs = preset.runs()
        assert len({run.name for run in runs}) == len(runs)
        assert set(preset.methods) <= set(modules("convergence_run").METHODS)
    mnist, compensation = (
        set(presets[name].runs()) for name in ("mnist", "compensation")
    )
    assert (
        len(mnist & compensation) == 12
    )  # dist_sync and sgd are trained once for both
    adam = {
        r.learning_rate for r in presets["optimizers"].runs() if r.optimizer == "adam"
    }
    assert adam == {0.001, 0.004}
    assert {preset.is_timed for preset in presets.values()} == {True, False}


def test_the_links_of_the_time_preset_are_as_slow_as_its_computation(modules):
    (run, *_) = modules("convergence_presets").presets()["time"].runs()
    lenet5 = modules("emulated").find_network("1x44426")
    setting = run.num_workers, run.num_servers, run.rate
    assert setting == (4, 2, "70mbit")
    link_ms = modules("measure").link_ms(lenet5, *setting)
    # 4 x 4 x 44,426 / 2 bytes in bits, with framing
    assert link_ms == pytest.approx(355_408 * 8 * 1.06 / 70e3)
    assert link_ms == pytest.approx(run.compute_ms + 15, abs=3)


def test_methods_of_a_setting_and_seed_follow_each_other(modules):
    runs = modules("convergence_presets").presets()["mnist"].runs()
    first = [(r.seed, r.num_workers, r.learning_rate, r.method) for r in runs[:7]]
    assert first == [(1, 2, 0.01, m) for m in ORDER] + [(1, 2, 0.04, "dist_sync")]
    assert [run.seed for run in runs] == sorted(run.seed for run in runs)


def test_options_narrow_replace_and_change_a_preset(modules, tmp_path):
    options = parse(
        modules, "--preset", "mnist", "--data", str(tmp_path), "--method", "mirror",
        "--method", "dist_sync", "--num-workers", "8", "--seeds", "4,7", "--epochs",
        "5", "--learning-rate", "1", "--wd", "0", "--output", str(tmp_path / "out"),
    )  # fmt: skip
    found = [(r.seed, r.method, r.num_workers, r.learning_rate) for r in options.runs]
    assert found == [
        (seed, method, 8, 1.0)
        for seed in (4, 7)
        for method in ("mirror", "dist_sync")
    ]  # fmt: skip
    assert {(run.epochs, run.wd, run.batch_size) for run in options.runs} == {
        (5, 0, 32)
    }
    assert isinstance(options.runs[0].wd, float)  # 0 and 0.0 have different names
    assert options.data == tmp_path and options.folder == tmp_path / "out/convergence"
    assert not options.is_timed


def test_a_method_can_be_given_without_its_space(modules):
    runs = parse(modules, "--method", "dist_async-scaled", "--method", "none").runs
    assert {run.method for run in runs} == {"dist_async scaled", "none"}


def test_an_optimizer_beside_a_preset_brings_its_usual_rates(modules):
    def pairs(*args):
        runs = parse(modules, *args, "--list").runs
        return {(run.optimizer, run.learning_rate) for run in runs}

    assert pairs("--preset", "optimizers", "--optimizer", "adam") == {
        ("adam", 0.001), ("adam", 0.004)
    }  # fmt: skip
    assert pairs("--preset", "mnist", "--optimizer", "nag") == {
        ("nag", 0.01), ("nag", 0.02)
    }  # fmt: skip
    assert pairs("--preset", "optimizers", "--learning-rate", "0.1") == {
        ("nag", 0.1), ("adam", 0.1)
    }  # fmt: skip
    assert pairs("--preset", "mnist", "--optimizer", "ftrl") == {("ftrl", 0.01)}


def test_imagenets_rate_grows_with_the_samples_of_a_step(modules):
    def rates(*args):
        runs = parse(modules, "--preset", "imagenet", "--list", *args).runs
        return {run.learning_rate for run in runs}

    assert rates() == {0.1}
    assert rates("--num-workers", "8", "--batch-size", "128") == {0.4}
    assert rates("--num-workers", "8", "--learning-rate", "0.3") == {0.3}


def test_without_a_preset_a_data_set_starts_runs_of_ones_own(modules):
    (first, second) = parse(modules, "--dataset", "mnist", "--list").runs
    assert (first.network, first.method, second.method) == (
        "lenet5", "dist_sync", "mirror",
    )  # fmt: skip
    assert (first.num_workers, first.seed, first.learning_rate) == (2, 1, 0.01)
    assert len(parse(modules).runs) == 12  # smoke
    assert (
        parse(modules, "--seeds", "1", "--method", "none").runs[0].dataset == "digits"
    )


@pytest.mark.parametrize(
    ("text", "numbers"), [("3", (1, 2, 3)), ("4,2,4", (4, 2)), ("5,", (5,))]
)
def test_seeds_are_a_number_or_a_list(modules, text, numbers):
    assert modules("convergence_options").seeds(text) == numbers


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ("--preset mnist", "mnist is read from files: add --data FOLDER with train-im"),
        ("--preset all", "choose from 'smoke', 'mnist', "),
        ("--method ssgd", "choose from 'dist_sync', "),
        ("--dataset cifar100", "choose from 'digits', 'mnist'"),
        ("--partition half", "choose from 'iid', 'classes'"),
        ("--seeds 0", "neither a number of seeds nor a list such as 1,2,3"),
        ("--seeds 1,x", "neither a number of seeds nor a list such as 1,2,3"),
        ("--epochs 0", "is not an integer of at least 1"),
        ("--warmup-steps -1", "is not an integer of at least 0"),
        ("--learning-rate nan", "is not a number above 0"),
        ("--straggler-ms -1", "is not a number of at least 0"),
        ("--rate fast", "--rate is 'fast'; give a number and one of the units"),
        ("--report --list", "give one of them"),
        ("--report --epochs 3", "--report without --preset takes all runs"),
        ("--lr 1", "unrecognized arguments: --lr"),
    ],
)
def test_a_wrong_option_is_explained(modules, capsys, args, message):
    with pytest.raises(SystemExit):
        parse(modules, *args.split())
    assert message in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"network": "lenet6"}, "network is 'lenet6'; allowed are 'lenet5', |GluonCV"),
        ({"optimizer": "adamw"}, "optimizer is 'adamw'; allowed are .*nag, "),
        ({"optimizer": "rmsprop"}, "'mirror' was given with the optimizer RMSProp"),
        ({"batch_size": 1000}, "need 4000 at least"),
        (
            {"epochs": 5, "lr_warmup_epochs": 5.0},
            "lr_warmup_epochs is 5 and epochs is 5: .* Give a --lr-warmup-epochs below",
        ),
    ],
)
def test_a_run_that_cannot_be_made_is_refused_before_any_starts(
    modules, new_run, tmp_path, fields, message
):
    check = modules("convergence_check")
    run = new_run(**{"dataset": "digits", "network": "conv", **fields})
    good = new_run("dist_sync", dataset="digits", network="conv")
    check.check_runs([good], None, tmp_path)
    with pytest.raises(ValueError, match=message):
        check.check_runs([good, run], None, tmp_path)

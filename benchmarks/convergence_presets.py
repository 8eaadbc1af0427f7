"""Which runs benchmark_convergence.py makes: presets, and the user's own."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any, Mapping

from convergence_run import Run

# Learning rates by data set and optimizer: the usual one, and a high one. NAG's is not
# higher because at 0.04 dist_sync itself ends between 83 and 96 % (seeds 1 and 2, 4 and
# 8 workers): differences would be chance.
RATES = {
    ("digits", "sgd"): (0.05,),
    ("mnist", "sgd"): (0.01, 0.04),
    ("mnist", "nag"): (0.01, 0.02),
    ("mnist", "adam"): (0.001, 0.004),
    ("cifar10", "sgd"): (0.02, 0.1),
    ("imagenet", "sgd"): (0.1,),
}
NETWORKS = {
    "digits": "conv",
    "mnist": "lenet5",
    "cifar10": "bn_cnn",
    "imagenet": "resnet50_v1b",
}
CORE = ("dist_sync", "dist_async scaled", "none", "sgd", "mirror", "replica")
DAY_S = 24 * 3600.0
# Fields of a run of which a preset has several values, and their names there.
SEVERAL = {"method": "methods", "num_workers": "num_workers", "seed": "seeds"}


@dataclass(frozen=True)
class Preset:
    """Runs that are compared: every method in every setting with every seed.

    Parameters
    ----------
    about : str
        What it is for.
    base : mapping
        What its runs have in common: fields of `Run`, 'dataset' and 'network' at least.
    methods : tuple of str
        Names in `METHODS`.
    num_workers, seeds : tuple of int
        Of each method.
    learning_rates : mapping of str to tuple of float
        By optimizer.
    samples_per_rate : int, optional
        If given, a learning rate is that for so many samples in a step of all
        workers, and grows with the number of samples that a step has.
    is_timed : bool
        Whether its seconds are a result, so that the machine must be idle.
    timeout_s : float
        Of one run.
    """

    about: str
    base: Mapping[str, Any]
    methods: tuple[str, ...] = CORE
    num_workers: tuple[int, ...] = (4,)
    seeds: tuple[int, ...] = (1, 2, 3)
    learning_rates: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    samples_per_rate: int | None = None
    is_timed: bool = False
    timeout_s: float = 3600.0

    def runs(self) -> list[Run]:
        """All of them; the methods of one setting and seed follow each other.

        So what is there after an interruption can be compared already.
        """
        pairs = [(name, lr) for name, lrs in self.learning_rates.items() for lr in lrs]
        return [
            self._run(
                method=method,
                num_workers=num_workers,
                optimizer=optimizer,
                learning_rate=rate,
                seed=seed,
            )
            for seed in self.seeds
            for num_workers in self.num_workers
            for optimizer, rate in pairs
            for method in self.methods
        ]

    def _run(self, **values: Any) -> Run:
        run = Run(**self.base, **values)
        if self.samples_per_rate:
            samples = run.batch_size * run.num_workers
            rate = run.learning_rate * samples / self.samples_per_rate
            run = dataclasses.replace(run, learning_rate=rate)
        return run

    def changed(self, given: Mapping[str, Any]) -> Preset:
        """Return a preset with what the user asked for.

        Parameters
        ----------
        given : mapping
            Fields of `Run`; several values of method, num_workers, learning_rate and
            seed, which take the place of the preset's.
        """
        own = dict(given)
        change: dict[str, Any] = {"learning_rates": self._rates(given)}
        if "learning_rate" in own:
            change["samples_per_rate"] = None
        for name, ours in SEVERAL.items():
            if name in own:
                change[ours] = tuple(dict.fromkeys(own.pop(name)))
        for name in ("optimizer", "learning_rate"):
            own.pop(name, None)
        return dataclasses.replace(self, base={**self.base, **own}, **change)

    def _rates(self, given: Mapping[str, Any]) -> dict[str, tuple[float, ...]]:
        """Optimizers with their learning rates, as far as `given` leaves them."""
        rates = dict(self.learning_rates)
        if "optimizer" in given:
            name = given["optimizer"]
            usual = RATES.get((self.base["dataset"], name), (Run.learning_rate,))
            rates = {name: rates.get(name, usual)}
        if "learning_rate" in given:
            chosen = tuple(dict.fromkeys(given["learning_rate"]))
            rates = dict.fromkeys(rates, chosen)
        return rates


def _rates(dataset: str, *optimizers: str) -> dict[str, tuple[float, ...]]:
    return {name: RATES[dataset, name] for name in optimizers or ("sgd",)}


def _first(rates: Mapping[str, tuple[float, ...]]) -> dict[str, tuple[float, ...]]:
    return {name: values[:1] for name, values in rates.items()}


def own_preset(dataset: str) -> Preset:
    """The start of runs of the user's own on a data set; see `Preset.changed`."""
    return Preset(
        "the runs asked for",
        {"dataset": dataset, "network": NETWORKS.get(dataset, "")},
        ("dist_sync", "mirror"),
        (Run.num_workers,),
        (Run.seed,),
        _first(_rates(dataset)),
        timeout_s=DAY_S,
    )


def presets() -> dict[str, Preset]:
    """All presets by name."""
    return {"smoke": _smoke(), **_mnist(), **_cifar(), "imagenet": _imagenet()}


def _smoke() -> Preset:
    base = {"dataset": "digits", "network": "conv", "epochs": 6, "num_evaluations": 6}
    about = "that everything works, on the digits in two minutes"
    return Preset(about, base, CORE, (2,), (1, 2), _rates("digits"), timeout_s=300)


def _mnist() -> dict[str, Preset]:
    base = {"dataset": "mnist", "network": "lenet5", "epochs": 2}
    short = {**base, "epochs": 1}
    sgd, usual = _rates("mnist"), _first(_rates("mnist"))
    slow = {**short, "straggler_ms": 20.0}
    classes = {**short, "partition": "classes"}
    delayed = ("dist_sync", "none", "replica", "mirror")
    compensated = ("dist_sync", "sgd", "dcsgd", "dcsgd adaptive")
    several = {"learning_rates": sgd}
    return {
        "mnist": Preset("LeNet-5 on MNIST", base, num_workers=(2, 4), **several),
        "optimizers": Preset(
            "NAG and Adam",
            short,
            delayed,
            (4, 8),
            learning_rates=_rates("mnist", "nag", "adam"),
        ),
        "compensation": Preset("delay compensation", base, compensated, **several),
        "noniid": Preset("each worker has some classes only", classes, **several),
        "stragglers": Preset(
            "one slow worker",
            slow,
            ("dist_sync", "dist_async scaled", "mirror", "replica"),
            seeds=(1, 2),
            learning_rates=usual,
            is_timed=True,
        ),
        "many": Preset("8 workers", short, num_workers=(8,), **several),
        "time": _time(base, usual),
    }


def _time(base: Mapping[str, Any], usual: Mapping[str, tuple[float, ...]]) -> Preset:
    """Accuracy against time."""
    # LeNet-5 has 44,426 numbers of 4 bytes: 178 kB. With 4 workers and 2 servers each
    # server takes in, and gives out, 4 x 178 kB / 2 = 355 kB a step: 43 ms at 70mbit
    # with framing (measure.link_ms). The computation is as long: 30 ms of sleep, and
    # LeNet's own, about 15 ms with 4 workers on two cores.
    links = {"compute_ms": 30.0, "rate": "70mbit", "num_servers": 2}
    return Preset(
        "accuracy against time, on links as slow as the computation",
        {**base, **links, "num_evaluations": 40},
        ("dist_sync", "dist_async scaled", "mirror"),
        seeds=(1, 2),
        learning_rates=usual,
        is_timed=True,
    )


def _cifar() -> dict[str, Preset]:
    base = {"dataset": "cifar10", "epochs": 2, "schedule": "step"}
    methods = (*CORE[:4], "dcsgd", *CORE[4:])
    rest: dict[str, Any] = {"learning_rates": _rates("cifar10")}
    small, deep = ({**base, "network": n} for n in ("bn_cnn", "cifar_resnet20_v1"))
    return {
        "cifar": Preset(
            "a small BatchNorm network on CIFAR-10",
            small,
            methods,
            seeds=(1, 2),
            **rest,
        ),
        "cifar-resnet": Preset(
            "ResNet-20 on CIFAR-10, for as long as --epochs says",
            deep,
            methods,
            seeds=(1,),
            timeout_s=DAY_S,
            **rest,
        ),
    }


def _imagenet() -> Preset:
    base = {
        "dataset": "imagenet",
        "network": "resnet50_v1b",
        "num_servers": 4,
        "epochs": 90,
        "batch_size": 64,
        "schedule": "cosine",
        "lr_warmup_epochs": 5.0,
        "warmup_steps": 200,
        "num_evaluations": 90,
    }
    return Preset(
        "ResNet-50 on ImageNet; for a cluster",
        base,
        ("dist_sync", "dist_async scaled", "sgd", "mirror"),
        (4,),
        (1,),
        _rates("imagenet"),
        samples_per_rate=256,
        is_timed=True,
        timeout_s=60 * DAY_S,
    )

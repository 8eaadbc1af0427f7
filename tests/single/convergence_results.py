"""Runs and results that nobody trained, for the tests of the convergence report."""

import dataclasses

NETWORKS = {"cifar10": "bn_cnn", "digits": "conv", "imagenet": "resnet50_v1b"}


def make_run(run_type, method="mirror", seed=1, dataset="mnist", **fields):
    """A `convergence_run.Run`; what is not given is as in the mnist preset."""
    own = {"num_workers": 4, "epochs": 2, "network": NETWORKS.get(dataset, "lenet5")}
    return run_type(dataset=dataset, method=method, seed=seed, **{**own, **fields})


def outcome(run, accuracy=97.0, seconds=10.0, status="ok"):
    """What a job returns: a straight line to its accuracy."""
    return {
        "run": dataclasses.asdict(run), "status": status, "reason": "a\nwhy",
        "num_steps": 100, "num_parameters": 9, "accuracy": accuracy / 100,
        "losses": [[10, 2.0], [25, 1.5], [50, 1.0], [100, 0.5]],
        "evaluations": [
            [s, s * seconds / 100, s * accuracy / 1e4, 0.1] for s in (50, 100)
        ],
        "seconds": seconds, "max_staleness": 1, "wall_s": seconds + 5,
    }  # fmt: skip

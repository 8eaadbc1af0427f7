"""The convergence benchmark's networks, evaluation and schedules, in one process."""

import sys

import mxnet as mx
import numpy as np
import pytest
from mxnet import autograd


def weights(net):
    """All trained numbers as one vector."""
    params = [p for p in net.collect_params().values() if p.grad_req != "null"]
    return np.concatenate([param.data().asnumpy().ravel() for param in params])


@pytest.mark.parametrize(
    ("name", "shape", "count"),
    [
        # 156 + 2,416 + 30,840 + 10,164 + 850
        ("lenet5", (1, 28, 28), 44_426),
        # 216 + 1,152 + 4,608 without biases, 2 * 56 of BatchNorm, 5,130
        ("bn_cnn", (3, 32, 32), 11_218),
        ("mlp", (1, 8, 8), 64 * 128 + 128 + 1290),
        ("conv", (1, 8, 8), 38_282),
    ],
)
def test_networks_have_their_size_and_the_seeds_weights(modules, name, shape, count):
    networks = modules("networks")
    nets = [networks.build(name, shape, 10, seed) for seed in (1, 1, 2)]
    assert networks.num_parameters(nets[0]) == count == len(weights(nets[0]))
    assert (weights(nets[0]) == weights(nets[1])).all()
    assert (weights(nets[0]) != weights(nets[2])).any()
    assert nets[0](mx.nd.zeros((2, *shape))).shape == (2, 10)


def test_lenet_starts_as_he_et_al_say(modules):
    net = modules("networks").build("lenet5", (1, 28, 28), 10, 1)
    dense = net[4].weight.data().asnumpy()  # 120 x 256
    assert dense.std() == pytest.approx((2 / 256) ** 0.5, rel=0.02)
    assert not net[4].bias.data().asnumpy().any()


def test_gluoncv_networks_are_found_by_name(modules):
    pytest.importorskip("gluoncv", reason="needs GluonCV, an extra")
    networks = modules("networks")
    nets = [networks.build("cifar_resnet20_v1", (3, 32, 32), 10, 3) for _ in range(2)]
    assert (weights(nets[0]) == weights(nets[1])).all()
    assert 0.26e6 < networks.num_parameters(nets[0]) < 0.28e6


def test_unknown_networks_and_unfit_images_are_refused(modules, monkeypatch):
    build = modules("networks").build
    with pytest.raises(ValueError, match="'conv' takes the 1 x 8 x 8 digits"):
        build("conv", (3, 32, 32), 10, 1)
    with pytest.raises(ValueError, match="'lenet5' does not fit images of"):
        build("lenet5", (1, 8, 8), 10, 1)
    monkeypatch.setitem(sys.modules, "gluoncv", None)
    monkeypatch.setitem(sys.modules, "gluoncv.model_zoo", None)
    with pytest.raises(ImportError) as caught:
        build("lenet6", (1, 28, 28), 10, 1)
    text = str(caught.value)
    assert "'lenet6': allowed are 'lenet5', 'bn_cnn', 'mlp', 'conv'" in text
    assert "pip install '.[gluoncv]'" in text


def test_statistics_are_those_of_the_images_and_are_put_back(modules):
    statistics = modules("population_statistics")
    net = modules("networks").build("bn_cnn", (3, 32, 32), 10, 1)
    mx.random.seed(5)
    batches = [mx.nd.random.normal(1, 2, shape=(8, 3, 32, 32)) for _ in range(3)]
    norms = statistics.find_norms(net)
    assert len(norms) == 3

    def running():
        found = [s.data().asnumpy() for n in norms for s in statistics.statistics(n)]
        return np.concatenate(found)

    # MXNet's own update, in the backward pass: running = 0.9 running + 0.1 batch
    expected = 0
    for batch in batches:
        before = running()
        with autograd.record():
            total = net(batch).sum()
        total.backward()
        mx.nd.waitall()
        expected = expected + (running() - 0.9 * before) / 0.1 / 3
    before = running()
    old = net(batches[0]).asnumpy()
    with statistics.population_statistics(net, iter(batches)):
        np.testing.assert_allclose(running(), expected, rtol=1e-3, atol=1e-4)
        assert np.abs(net(batches[0]).asnumpy() - old).max() > 0.01
    assert (running() == before).all()
    np.testing.assert_array_equal(net(batches[0]).asnumpy(), old)
    nothing = statistics.population_statistics(net, iter([]))
    with pytest.raises(ValueError, match="need one batch of images"), nothing:
        pass


def test_networks_without_batchnorm_need_no_images(modules):
    worker = modules("convergence_worker")
    net = modules("networks").build("mlp", (1, 8, 8), 10, 1)
    statistics = modules("population_statistics")
    with statistics.population_statistics(net, iter([None])):
        right, total, count = worker.evaluate(
            net, [(mx.nd.zeros((3, 1, 8, 8)), mx.nd.zeros(3)) for _ in range(2)]
        )
    # No bias at the start: all scores 0, so the first class and log(10) each.
    assert (right, count) == (6, 6)
    assert total == pytest.approx(6 * np.log(10), rel=1e-5)


def rates(modules, updates, **values):
    """Learning rate of some updates, counted from 1, of 40 steps of 2 workers."""
    run = modules("convergence_run").Run(
        "digits", "mlp", **{"method": "dist_sync", "learning_rate": 0.4, **values}
    )
    settings = modules("convergence_trainer").optimizer_params(run, 40, 10)
    optimizer = mx.optimizer.create(run.optimizer, **settings)
    found = []
    for update in updates:
        optimizer.num_update = update
        found.append(optimizer.learning_rate)
    return found


@pytest.mark.parametrize(
    ("method", "scale", "per_step"),
    [("dist_sync", 1, 1), ("dist_async", 1, 2), ("dist_async scaled", 0.5, 2)],
)
def test_schedules_follow_the_servers_count_of_updates(
    modules, method, scale, per_step
):
    def of(steps, **values):
        updates = [per_step * step for step in steps]
        found = rates(modules, updates, method=method, **values)
        return [rate / scale for rate in found]

    assert of([1, 40]) == pytest.approx([0.4, 0.4])
    assert of([30, 31], schedule="step") == pytest.approx([0.4, 0.04])
    assert of([20, 40], schedule="cosine") == pytest.approx([0.2, 0.0], abs=1e-9)
    warm = {"lr_warmup_epochs": 1}
    assert of([5, 10, 40], **warm) == pytest.approx([0.2, 0.4, 0.4])
    found = of([5, 10, 25, 40], schedule="cosine", **warm)
    assert found == pytest.approx([0.2, 0.4, 0.2, 0.0], abs=1e-9)


def test_momentum_is_only_for_those_that_have_it(modules):
    trainer, run = modules("convergence_trainer"), modules("convergence_run").Run
    for optimizer, has_it in (("sgd", True), ("nag", True), ("adam", False)):
        settings = trainer.optimizer_params(
            run("digits", "mlp", "mirror", optimizer=optimizer), 10, 10
        )
        assert ("momentum" in settings) == has_it
    with pytest.raises(ValueError, match="'linear'; allowed are 'constant'"):
        rates(modules, [1], schedule="linear")


def test_points_are_even_end_with_the_last_step_and_denser_at_the_start(modules):
    worker = modules("convergence_worker")
    assert worker.even_steps(10, 4) == [3, 5, 8, 10]
    assert worker.even_steps(2, 4) == [1, 2]
    points = sorted(worker.loss_points(400))
    assert points[:5] == [5, 10, 20, 30, 40] and points[-1] == 400
    assert len(points) == 41

"""What is compared: ways to train data-parallel with MXNet, as a step on a worker.

MXNet and Horovod are imported in the workers only.
"""

from __future__ import annotations

import functools
import importlib.util
from dataclasses import dataclass, field
from typing import Any, Callable, List, Mapping

from emulated import Network

WARMUP_STEPS = 2  # of dist_odsgd, before the delay begins
BATCH_SIZE = 32
THRESHOLD = 0.5  # of 2-bit compression, MXNet's default
SGD = {"learning_rate": 0.001, "momentum": 0.9}

Step = Callable[[], None]
MakeStep = Callable[[List[Any]], Step]


@dataclass(frozen=True)
class System:
    """One way to train.

    Parameters
    ----------
    name : str
        As given to ``--system``, and the row in the table.
    make_step : callable
        Takes a list of gluon.Parameter on a worker whose `env` is set, and returns the
        function that makes a step of training of them.
    servers : str
        'own': this package's servers; 'stock': MXNet's; 'none': peer to peer, with a
        rendezvous in the scheduler's place.
    env : mapping of str to str
        Variables of all roles.
    needs : str
        A module without which the system is not available.
    """

    name: str
    make_step: MakeStep
    servers: str = "stock"
    env: Mapping[str, str] = field(default_factory=dict)
    needs: str = "mxnet"

    def environment(self, network: Network) -> dict[str, str]:
        """The variables of all roles in a job that trains `network`."""
        bound = network.bigarray_bound
        if self.servers != "stock" or bound is None:
            return dict(self.env)
        return {"MXNET_KVSTORE_BIGARRAY_BOUND": str(bound), **self.env}

    @property
    def missing(self) -> str:
        """Why it is not available in this interpreter; empty if it is."""
        if importlib.util.find_spec(self.needs) is None:
            return f"not installed: {self.needs}"
        return ""


def _odsgd(params: list[Any], **controls: Any) -> Step:
    """This package's own Trainer."""
    import odsgd_kvstore

    trainer = odsgd_kvstore.Trainer(
        params, "sgd", SGD, warmup_steps=WARMUP_STEPS, **controls
    )
    return lambda: trainer.step(BATCH_SIZE)


def _gluon(params: list[Any], **arguments: Any) -> Step:
    """MXNet's Trainer: for each key a pushpull from the gradient to the weight."""
    from mxnet import gluon

    trainer = gluon.Trainer(params, "sgd", SGD, **arguments)
    return lambda: trainer.step(BATCH_SIZE)


def _stock_2bit(params: list[Any]) -> Step:
    """MXNet's compression: push, then pull, as its Trainer dies with compression."""
    import mxnet as mx

    store = mx.kv.create("dist_sync")
    store.set_gradient_compression({"type": "2bit", "threshold": THRESHOLD})
    store.set_optimizer(mx.optimizer.SGD(rescale_grad=1 / BATCH_SIZE, **SGD))
    weights = [param.list_data()[0] for param in params]
    gradients = [param.list_grad()[0] for param in params]
    for key, weight in enumerate(weights):
        store.init(key, weight)
        store.pull(key, out=weight)

    def step() -> None:
        for key, (gradient, weight) in enumerate(zip(gradients, weights)):
            store.push(key, gradient, priority=-key)
            store.pull(key, out=weight, priority=-key)

    return step


def _horovod(params: list[Any]) -> Step:
    """Horovod: allreduce of the gradients with Gloo, the update on the workers."""
    import horovod.mxnet as hvd

    hvd.init()
    named = {param.name: param for param in params}
    hvd.broadcast_parameters(named, root_rank=0)
    trainer = hvd.DistributedTrainer(named, "sgd", SGD)
    return lambda: trainer.step(BATCH_SIZE)


def _compressed(**params: Any) -> MakeStep:
    return functools.partial(_odsgd, compression_params=params)


def _stock(kvstore: str, **arguments: Any) -> MakeStep:
    return functools.partial(_gluon, kvstore=kvstore, **arguments)


OURS = "dist_odsgd"
BASELINE = "dist_sync"
_ODSGD_ENV = {"ODSGD_WARMUP_STEPS": str(WARMUP_STEPS)}
_P3_ENV = {"DMLC_PS_VAN_TYPE": "p3"}

SYSTEMS = {
    system.name: system
    for system in (
        System(OURS, _odsgd, "own"),
        System("dist_odsgd-gluon", _stock("dist_odsgd"), "own", _ODSGD_ENV),
        System("dist_odsgd-fp16", _compressed(type="fp16"), "own"),
        System("dist_odsgd-2bit", _compressed(type="2bit", threshold=THRESHOLD), "own"),
        System(BASELINE, _stock("dist_sync")),
        System("dist_async", _stock("dist_async")),
        System("p3", _stock("dist_sync", update_on_kvstore=False), env=_P3_ENV),
        System("mxnet-2bit", _stock_2bit),
        System("horovod", _horovod, "none", needs="horovod"),
    )
}
PEERS = ("dist_sync", "dist_async", "p3", "mxnet-2bit", "horovod")

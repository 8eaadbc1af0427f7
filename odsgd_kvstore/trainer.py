"""`Trainer`: a `gluon.Trainer` whose `step` is One-step Delay SGD."""

from __future__ import annotations

import logging
import math
import numbers
from typing import Any, Iterator, Mapping, NoReturn

from mxnet import gluon
from mxnet import ndarray as nd
from mxnet import optimizer as opt

from .checks import check_optimizer, check_parameter, check_update_on_kvstore
from .config import Cluster, Config
from .errors import ConfigError, NotSupportedYet
from .evaluation import end_earlier_trainers, global_weights, synchronize
from .kvstore import ODSGDStore
from .notice_assigned import AssignedParameters
from .pipeline import Pipeline
from .replicated import Replicated

_DIFFERENT_START = (
    "Rank %d's first weights differ from rank 0's, which all ranks have from now on; this "
    "rank's first gradient was computed at its own. Seed every rank alike "
    "(mx.random.seed) before net.initialize."
)
_STALE = (
    "Rank {}: the gradient of parameter {} was not updated by backward since the last "
    "step. If this iteration is meant to use only some parameters, the same ones on "
    "every rank, call step with ignore_stale_grad=True."
)
_LATE = "Not trained so far, as no forward pass has reached them: %s."
_NO_STATES = (
    "Trainer.{} is not supported yet with dist_odsgd: the optimizer's state is on the "
    "servers. Save weights inside trainer.global_weights()."
)
_STORE_NAMES = ("dist_odsgd", "dist_device_odsgd")

_logger = logging.getLogger(__name__)


class Trainer(gluon.Trainer):
    """Trains a set of parameters with One-step Delay SGD.

    Differs from `gluon.Trainer` in this: `step` is one-step delayed, takes a smaller
    last batch, and steps no parameter whose gradient is stale; parameters that are
    still deferred are left out; weights assigned by `set_data` or `load_parameters`
    after the first step reach the servers.

    Parameters
    ----------
    params : ParameterDict, dict or list of gluon.Parameter
        Dense, float32, the same on every rank.
    optimizer : str or mxnet.optimizer.Optimizer
        The global optimizer, which the servers run.
    optimizer_params : dict, optional
        Its parameters.
    kvstore : str or ODSGDStore
        'dist_odsgd' (gradients of several devices are summed on the CPU),
        'dist_device_odsgd' (on the first device), or a store.
    local_optimizer : str, optional
        Local update rule; default 'auto': `mirror` for SGD, NAG and Adam, else
        `replica`. An optimizer's name is the paper's recipe, 'none' its ablation.
    local_optimizer_params : dict, optional
        Parameters of `dcsgd`, or of a rule that is an optimizer's name.
    warmup_steps : int, optional
        Synchronous updates of each parameter before the delay, >= 0; default 200.
    delay : int, optional
        1 (default), or 0: synchronous, the same as `dist_sync` bit for bit.
    compression_params : dict, optional
        {'type': 'fp16'}, or {'type': '2bit', 'threshold': 0.5, 'full_every': 10}.
    update_on_kvstore : bool, optional
        None or True.

    Raises
    ------
    ConfigError, NotSupportedYet

    Notes
    -----
    The store is made at the first `step`, which waits for all roles of the job. Left
    out, an argument is taken from its ODSGD_* variable.

    References
    ----------
    Y. Xu, D. Dong, Y. Zhao, W. Xu, X. Liao, OD-SGD: One-Step Delay Stochastic Gradient
    Descent for Distributed Training, ACM TACO 17(4), 2020.
    """

    def __init__(
        self,
        params: Any,
        optimizer: str | opt.Optimizer,
        optimizer_params: Mapping[str, Any] | None = None,
        kvstore: str | ODSGDStore = "dist_odsgd",
        *,
        local_optimizer: str | None = None,
        local_optimizer_params: Mapping[str, Any] | None = None,
        warmup_steps: int | None = None,
        delay: int | None = None,
        compression_params: Mapping[str, Any] | None = None,
        update_on_kvstore: bool | None = None,
    ) -> None:
        check_update_on_kvstore(update_on_kvstore)
        controls = {
            "local_optimizer": local_optimizer,
            "local_optimizer_params": local_optimizer_params,
            "warmup_steps": warmup_steps,
            "delay": delay,
            "compression_params": compression_params,
        }
        self._config = _config_of(kvstore, controls)
        self._assigned = AssignedParameters()
        end_earlier_trainers(params)
        super().__init__(
            params,
            optimizer,
            dict(optimizer_params or {}),
            kvstore=kvstore,
            update_on_kvstore=True,
        )
        for param in self._params:
            check_parameter(param)
        cluster = Cluster.from_environment()
        num_servers = cluster.num_servers if cluster else 0
        check_optimizer(self._optimizer, self._config, num_servers)

    def step(self, batch_size: int, ignore_stale_grad: bool = False) -> None:
        """Make step t: the local update at once, the global update on its way.

        1. g(i,t), computed at L(i,t), is copied for the push.
        2. L(i,t+1) = Local(W(t), g(i,t)). (Warm-up: L(i,t+1) = W(t+1).)
        3. W(t+1) = Opt(W(t), sum_i g(i,t)) on the servers, pushed and pulled while
           step t+1 computes on L(i,t+1).

        Parameters
        ----------
        batch_size : int
            Samples that this rank's gradient sums over. As with `dist_sync`, the sum
            over the workers is divided by it.
        ignore_stale_grad : bool
            Leave out parameters that backward did not reach since the last step,
            the same ones on every rank, instead of raising.

        Raises
        ------
        UserWarning
            A gradient is stale.
        ServerError
            A server failed in an earlier step.

        Notes
        -----
        Returns before the work is done; reading a parameter ends the local update,
        `synchronize` the pull. It waits for the network only at the first step, when
        the optimizer was changed, a parameter comes back after a pause, or weights
        were assigned.
        """
        pipeline = self._ready(batch_size)
        stepped = self._gradients(ignore_stale_grad)
        pipeline.begin_step([record for record, _, _ in stepped])
        for record, gradients, weights in stepped:
            _mark_used(weights)
            for block in pipeline.stage(record, gradients, weights):
                pipeline.local_update(block)
                pipeline.global_update(block)
        pipeline.settle()

    def synchronize(self) -> None:
        """Make the parameters the global weights: see `odsgd_kvstore.synchronize`."""
        synchronize(self)

    def global_weights(self) -> Any:
        """A context for evaluation and saving: see `odsgd_kvstore.global_weights`.

        Examples
        --------
        >>> with trainer.global_weights():
        ...     net.save_parameters('model.params')
        """
        return global_weights(self)

    def stats(self) -> dict[str, Any]:
        """What this rank has done so far.

        Returns
        -------
        dict
            steps; staleness and max_staleness (in steps, of the weights beneath a
            gradient); pushed_bytes and pulled_bytes; wait_s (seconds spent waiting in
            `synchronize` and `global_weights`).
        """
        return {} if self._kvstore is None else self._kvstore.pipeline.stats()

    def save_states(self, fname: str) -> NoReturn:
        """Not supported yet."""
        raise NotSupportedYet(
            "Trainer.save_states is not supported yet with dist_odsgd: the optimizer's "
            "state is on the servers. Save weights inside trainer.global_weights()."
        )

    def load_states(self, fname: str) -> NoReturn:
        """Not supported yet."""
        raise NotSupportedYet(
            "Trainer.load_states is not supported yet with dist_odsgd."
        )

    def allreduce(self, value: Any) -> NoReturn:
        """Not supported yet."""
        raise NotSupportedYet("Trainer.allreduce is not supported yet.")

    def sync_aux(self) -> NoReturn:
        """Not supported yet."""
        raise NotSupportedYet("Trainer.sync_aux is not supported yet.")

    def join(self) -> NoReturn:
        """Not supported yet."""
        raise NotSupportedYet(
            "Trainer.join is not supported yet: give every rank the same number of "
            "batches."
        )

    def allreduce_grads(self) -> NoReturn:
        """Refused: the aggregate exists on the servers only."""
        raise ConfigError(
            "allreduce_grads is not possible: dist_odsgd sums gradients on the servers "
            "and updates there. To clip, pass clip_gradient to the optimizer, or clip "
            "this worker's own gradients before step."
        )

    def update(self, batch_size: int, ignore_stale_grad: bool = False) -> NoReturn:
        """Refused: call `step`."""
        raise ConfigError("update is not possible with dist_odsgd. Call step.")

    def _ready(self, batch_size: int) -> Pipeline:
        """Join the job, give new parameters to the servers, take the batch size."""
        is_number = isinstance(batch_size, numbers.Real)
        if not is_number or not 0 < batch_size < math.inf:
            raise ConfigError(
                f"batch_size is {batch_size!r}; allowed is a number above 0: the "
                "samples that this rank's gradient sums over."
            )
        if getattr(self, "_amp_loss_scaler", None) is not None:
            raise NotSupportedYet("AMP's loss scaling is not supported yet.")
        self._optimizer.rescale_grad = self._scale / batch_size
        if not self._kv_initialized:
            self._init_kvstore()
        self._kvstore.pipeline.check()
        if self._params_to_init:
            self._init_params()
        return self._kvstore.pipeline

    def _init_kvstore(self) -> None:
        kvstore = self._kvstore_params["kvstore"]
        if not isinstance(kvstore, ODSGDStore):
            kvstore = ODSGDStore(self._config, "device" in kvstore.lower())
        kvstore.set_optimizer(self._optimizer)
        kvstore.pipeline.find_assigned = self._find_assigned
        self._kvstore = kvstore
        self._distributed = self._update_on_kvstore = self._kv_initialized = True

    def _init_params(self) -> None:
        """Broadcast, in one go, the parameters that have their shape by now."""
        ready = [param for param in self._params_to_init if not param._deferred_init]
        late = [param for param in self._params_to_init if param._deferred_init]
        if not ready:
            return
        nd.waitall()  # of the first backward pass, which may still write statistics
        arrays = [param.list_data() for param in ready]
        own, rank = [weights[0] for weights in arrays], self._kvstore.rank
        if rank != 0:  # to compare
            own = [weight.copy() for weight in own]
        self._kvstore.broadcast([self._param2idx[p.name] for p in ready], own, arrays)
        rounded = self._kvstore.pipeline.wire.rounded
        if rank != 0 and any(
            param._differentiable and (rounded(mine) != data[0].asnumpy()).any()
            for param, mine, data in zip(ready, own, arrays)
        ):
            _logger.warning(_DIFFERENT_START, rank)
        if late:
            _logger.warning(_LATE, ", ".join(param.name for param in late))
        self._params_to_init = late

    def _gradients(
        self, ignore_stale_grad: bool
    ) -> list[tuple[Replicated, list[nd.NDArray], list[nd.NDArray]]]:
        """(record, gradients, weights) of the parameters of this step."""
        records = self._kvstore.pipeline.records
        late = {param.name for param in self._params_to_init}
        stepped = []
        for key, param in enumerate(self._params):
            if param.grad_req == "null" or param.name in late:
                continue
            weights = param.list_data()
            if all(weight._fresh_grad for weight in weights):
                stepped.append((records[key], param.list_grad(), weights))
            elif not ignore_stale_grad:
                raise UserWarning(_STALE.format(self._kvstore.rank, param.name))
        return stepped

    def _reset_kvstore(self) -> None:
        """Called by a Parameter that is about to be assigned new data."""
        if self._kvstore is None:
            super()._reset_kvstore()
        else:
            self._kvstore.pipeline.check("Weights were assigned")
            self._assigned.expect(self._known())

    def _find_assigned(self) -> None:
        """Note the weights that the user assigned since this was last asked."""
        pipeline = self._kvstore.pipeline
        touched, keys = self._assigned.take(self._known(), pipeline.records)
        if touched:
            pipeline.assignment.note(pipeline.records[key] for key in keys)

    def _known(self) -> Iterator[tuple[int, gluon.Parameter]]:
        """The parameters that the servers hold and that training may change."""
        late = {param.name for param in self._params_to_init}
        return (
            (key, param)
            for key, param in enumerate(self._params)
            if param.name not in late and param._differentiable
        )


def _mark_used(weights: list[nd.NDArray]) -> None:
    """Their gradients are stale from now on."""
    for weight in weights:
        weight._fresh_grad = False


def _config_of(kvstore: Any, controls: Mapping[str, Any]) -> Config:
    """The settings of a store by name, or of a store that exists."""
    if isinstance(kvstore, ODSGDStore):
        given = [name for name, value in controls.items() if value is not None]
        if given:
            raise ConfigError(
                f"{', '.join(given)} came with a store that exists and has its own "
                "settings. Give them to the store, as ODSGDStore(odsgd_kvstore.config."
                "Config(...)), or pass kvstore='dist_odsgd'."
            )
        return kvstore.config
    if not isinstance(kvstore, str) or kvstore.lower() not in _STORE_NAMES:
        raise ConfigError(
            f"kvstore is {kvstore!r}; odsgd_kvstore.Trainer takes "
            f"{' or '.join(repr(n) for n in _STORE_NAMES)}, or a store of theirs. For "
            "any other type use mxnet.gluon.Trainer."
        )
    return Config.from_environment(**controls)

"""Who holds which array on a worker: parameters, and the blocks that travel.

A parameter (`Replicated`) is what the user knows. A block is what one native key
carries: a whole parameter, a slice of one, or a pack of several small ones, flat.

With A holding W(t) (`global_weight`) and B holding W(t-1) (`spare`): the local update
leaves B free, W(t+1) is pulled into it, and A and B change places. Invariant: for a rule
that keeps W(t-1), A - B is the servers' momentum.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Iterable, Sequence

from mxnet import ndarray as nd
from mxnet.context import Context

from .errors import ConfigError
from .layout import PACK_NUMBERS
from .views import Views


@dataclass(eq=False)
class Replicated:
    """One parameter as this worker keeps it.

    Counters: the store counts steps; `update` counts this parameter's, which is behind
    if it came later or paused. A server counts the same, and MXNet's `num_update`, for
    a learning-rate schedule, is the store's step.

    Attributes
    ----------
    key : int or str
        The user's key.
    order : int
        Its place among the store's parameters.
    shape, size : tuple, int
    index : int or str
        The parameter's index in the optimizer.
    weights : list of NDArray, float32
        The Parameter's own arrays, one per device; between steps L(i,t).
    blocks : list of (Block, Member)
        Where its numbers travel, in order.
    update : int
        Updates of this parameter so far: the t of W(t).
    base : int
        The t of the W(t) from which the local weight was made.
    step : int
        The store's step in which the newest gradient came; -1 before the first.
    is_local : bool
        Whether L may differ from W.
    gradients, flat_weights : list of Views
        Of the user's arrays, one per device.
    """

    key: Any
    order: int
    shape: tuple[int, ...]
    size: int
    index: Any
    weights: list[nd.NDArray]
    blocks: list[tuple[Block, Member]] = field(default_factory=list)
    update: int = 0
    base: int = 0
    step: int = -1
    is_local: bool = False
    gradients: list[Views] = field(default_factory=list)
    flat_weights: list[Views] = field(default_factory=list)

    def take(
        self, gradients: Sequence[nd.NDArray], weights: Sequence[nd.NDArray]
    ) -> None:
        """Know the user's arrays of this step."""
        if self.gradients and len(gradients) != len(self.gradients):
            raise ConfigError(
                f"Parameter {self.key} came with gradients of {len(gradients)} devices; "
                f"it began with {len(self.gradients)}, and keeps that number."
            )
        self.gradients = self.gradients or [Views() for _ in gradients]
        for views, gradient in zip(self.gradients, gradients):
            dense = gradient.stype == "default"
            views.follow(gradient if dense else gradient.tostype("default"))
        self.weights = list(weights)

    def weight(self, device: int, start: int, stop: int) -> nd.NDArray:
        """A flat view of the user's array on a device."""
        while len(self.flat_weights) < len(self.weights):
            self.flat_weights.append(Views())
        self.flat_weights[device].follow(self.weights[device])
        return self.flat_weights[device].view(start, stop)

    @property
    def is_stepped(self) -> bool:
        """Whether W is kept here, or on its way."""
        return self.update > 0

    def advance(self, staleness: int) -> None:
        """Count the update whose W(t+1) is on its way.

        `staleness` is that of the next gradient: 0 if L(t+1) is W(t+1).
        """
        self.update += 1
        self.base = self.update - staleness
        self.is_local = staleness > 0

    def wait(self) -> None:
        """Until W of every update that this rank has asked for is here."""
        for block, _ in self.blocks:
            if block.global_weight is not None:
                block.global_weight.array.wait_to_read()
        for weight in self.weights:
            weight.wait_to_read()

    def use_global(self) -> None:
        """Make L = W in every device's array; returns before the pull is done."""
        for block, member in self.blocks:
            for device in range(len(self.weights)):
                weight = self.weight(device, member.start, member.stop)
                block.global_of(member).copyto(weight)
        self.base, self.is_local = self.update, False


@dataclass(eq=False)
class Member:
    """A parameter's numbers `start` to `stop`, which a block holds from `at` on."""

    record: Replicated
    start: int
    stop: int
    at: int = 0

    @property
    def size(self) -> int:
        """How many numbers."""
        return self.stop - self.start

    def gradient(self, device: int) -> nd.NDArray:
        """A view of the user's gradient of this step."""
        return self.record.gradients[device].view(self.start, self.stop)

    def weight(self, device: int) -> nd.NDArray:
        """A view of the user's weights."""
        return self.record.weight(device, self.start, self.stop)


class Block:
    """What one native key carries: members side by side, and of a pack who came.

    Parameters
    ----------
    native : int
        Our key.
    members : list of Member

    Attributes
    ----------
    size, length : int
        Numbers of the members; and of the key, which in a pack has one more per member:
        1 if this worker has stepped it. So the servers leave out the others.
    words_key : int
        The native key of compressed pushes, if there are any.
    update, offset : int
        Pushes so far, and the steps by which the store is ahead, as the servers know.
    waits_for : set of Replicated
        Of a pack: parameters that will come in this step and have not.
    present : list of int
        Members that came in this step.
    staging : Views, float32
        This worker's gradient of the step, summed over its devices; then in transit.
    others : list of Views, float32
        Where the gradients of further devices are brought to be added.
    global_weight : Views
        A: W(t), the newest pulled or on its way. None with delay 0, but in packs.
    spare : Views
        B: W(t-1), and what W(t+1) is pulled into. None unless the rule keeps it.
    local_weight : Views, float32
        L(i,t+1) where it cannot be made in the user's own array.
    """

    def __init__(self, native: int, members: list[Member]) -> None:
        self.native, self.members = native, members
        self.size = 0
        for member in members:
            member.at = self.size
            self.size += member.size
        self.is_pack = len(members) > 1
        self.length = self.size + (len(members) if self.is_pack else 0)
        self.words_key: int | None = None
        self.update = self.offset = 0
        self.waits_for: set[Replicated] = set()
        self.present = [] if self.is_pack else [0]
        self.staging: Views | None = None
        self.others: list[Views] = []
        self.global_weight: Views | None = None
        self.spare: Views | None = None
        self.local_weight: Views | None = None
        self._own = Views()
        self._marks: dict[tuple[int, ...], nd.NDArray] = {}

    def allocate(
        self, context: Context, delayed: bool, keeps_previous: bool, dtype: str
    ) -> None:
        """Make the arrays, on `context`, at the first push; W(0) is in the weights."""
        first = self.members[0].record
        self.staging = Views(nd.empty(self.length, context))
        self.others = [Views(nd.empty(self.size, context)) for _ in first.gradients[1:]]
        if delayed or self.is_pack or dtype != "float32":
            self.global_weight = Views(self.first_weights(context, dtype))
        if delayed and keeps_previous:
            self.spare = Views(self.global_weight.array.copy())
        if self.is_pack or first.weights[0].context != context:
            self.local_weight = Views(nd.empty(self.size, context))

    def first_weights(self, context: Context, dtype: str) -> nd.NDArray:
        """W(0) as the key carries it, from the user's arrays."""
        weights = nd.zeros(self.length, context, dtype)
        for i, member in enumerate(self.members):
            member.weight(0).copyto(weights._slice(*self.span(i)))
        return weights

    def expect(self, records: set[Replicated]) -> None:
        """Begin a step in which `records` come."""
        if self.is_pack:
            self.present = []
            self.waits_for = {m.record for m in self.members if m.record in records}

    def come(self, record: Replicated) -> bool:
        """Note a parameter that came; whether it was the last that was waited for."""
        if not self.is_pack:
            return True
        if record not in self.waits_for:
            raise ConfigError(
                f"Parameter {record.key} was pushed, and its grad_req was 'null' when the "
                "step began. Set grad_req between steps, on every rank."
            )
        self.waits_for.discard(record)
        if not self.waits_for:
            self.present = [
                i for i, m in enumerate(self.members) if m.record.step == record.step
            ]
        return not self.waits_for

    def stage(self, ratio: float) -> nd.NDArray:
        """The sum of the devices' gradients times `ratio`, in the staging array.

        One array per block, used again each step: the engine then keeps the steps of a
        block in order (fresh ones gave wrong sums in MXNet 1.9.1).
        """
        summed = self.staging.view(0, self.size)
        self._gather(0, summed)
        for device, other in enumerate(self.others, start=1):
            self._gather(device, other.array)
            nd.elemwise_add(summed, other.array, out=summed)
        if ratio != 1.0:
            summed *= ratio
        if self.is_pack:
            self.mark(self.present).copyto(self.staging.view(self.size, self.length))
        return summed

    def _gather(self, device: int, target: nd.NDArray) -> None:
        """The members' gradients of one device, side by side; zeros for the absent."""
        gradients = [self.members[i].gradient(device) for i in self.present]
        if not self.is_pack:
            gradients[0].copyto(target)
        elif len(gradients) < len(self.members):
            target[:] = 0
            for i, gradient in zip(self.present, gradients):
                gradient.copyto(target._slice(*self.span(i)))
        elif gradients[0].context == target.context:
            nd.concat(*gradients, dim=0, out=target)
        else:
            nd.concat(*gradients, dim=0).copyto(target)

    def mark(self, present: Sequence[int]) -> nd.NDArray:
        """1 for each member that is `present`, else 0."""
        key = tuple(present)
        if key not in self._marks:
            marks = [float(i in present) for i in range(len(self.members))]
            context = self.staging.array.context if self.staging else None
            self._marks = {key: nd.array(marks, context)}
        return self._marks[key]

    def make_local(self) -> Views:
        """What the local update writes L into: the user's own array if it can."""
        if self.local_weight is not None:
            return self.local_weight
        self._own.follow(self.members[0].weight(0))
        return self._own

    def spread(self, source: Views, members: Sequence[int]) -> None:
        """Copy numbers of these members to the user's arrays on every device."""
        for device, weight in enumerate(self.members[0].record.weights):
            if not self.is_pack:
                target = self.members[0].weight(device)
                if source.array is not target:
                    source.view(0, self.size).copyto(target)
                continue
            flat = source.view(0, self.size).as_in_context(weight.context)
            flat = flat.astype("float32", copy=False)
            targets = [self.members[i].weight(device) for i in members]
            if len(members) == len(self.members):
                starts = tuple(member.at for member in self.members)
                nd._internal._split_v2(flat, indices=starts, axis=0, out=targets)
                continue
            for i, target in zip(members, targets):
                flat._slice(*self.span(i)).copyto(target)

    def target(self) -> Views | None:
        """The array of ours that W(t+1) is pulled into."""
        return self.global_weight if self.spare is None else self.spare

    def advance(self) -> None:
        """Count a push whose W(t+1) is on its way into `target`."""
        self.update += 1
        if self.spare is not None:
            self.global_weight, self.spare = self.spare, self.global_weight

    def keep_absent(self) -> None:
        """Let A - B stay, over the coming pull, for members that are not stepped."""
        if self.spare is not None and len(self.present) < len(self.members):
            for i in set(range(len(self.members))) - set(self.present):
                span = self.span(i)
                self.spare.view(*span).copyto(self.global_weight.view(*span))

    def subtract_spare(self, members: Iterable[int]) -> None:
        """B := A - B: done twice, with another A in between, A - B is as it was."""
        if self.spare is not None:
            for span in map(self.span, members):
                spare = self.spare.view(*span)
                nd.elemwise_sub(self.global_weight.view(*span), spare, out=spare)

    def span(self, i: int) -> tuple[int, int]:
        """Where member number `i` begins and ends."""
        return self.members[i].at, self.members[i].at + self.members[i].size

    def is_large(self, bigarray_bound: int) -> bool:
        """Whether compression is worth while; ps-lite must not have cut the array."""
        is_large = self.members[0].record.size > PACK_NUMBERS  # not the slice alone
        return not self.is_pack and is_large and self.size < bigarray_bound

    def global_of(self, member: Member) -> nd.NDArray:
        """W of one member: a view."""
        return self.global_weight.view(member.at, member.at + member.size)

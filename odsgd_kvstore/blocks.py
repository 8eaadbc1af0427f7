"""What is updated at once on a worker, and its arrays: blocks and their slices.

A parameter (`Replicated`) is what the user knows. A block is what is updated at once: a
parameter, or a pack of several small ones. A slice is what one native key carries: a
block, or a part of a large one.

With A holding W(t) (`global_weight`) and B holding W(t-1) (`spare`): the local update
leaves B free, W(t+1) is pulled into it, and A and B change places. Invariant: for a
rule that keeps W(t-1), A - B is the servers' momentum.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Iterable, Sequence

from mxnet import ndarray as nd
from mxnet.context import Context

from .errors import ConfigError
from .layout import PACK_NUMBERS
from .optimizer_state import Run
from .replicated import Replicated
from .views import Views, copy_to, flat_copy


@dataclass(eq=False)
class Slice:
    """What one native key carries: numbers `start` to `stop` of a block.

    Attributes
    ----------
    native : int
        Our key.
    words_key : int
        The native key of compressed pushes, if there are any.
    staging : Views, float32
        This worker's gradient of the step, summed over its devices; then in transit.
        One array per key, used again each step: the engine then keeps the steps of a
        key in order (fresh ones gave wrong sums in MXNet 1.9.1).
    """

    native: int
    start: int
    stop: int
    words_key: int | None = None
    staging: Views | None = None

    @property
    def size(self) -> int:
        """How many numbers."""
        return self.stop - self.start


class Block:
    """What is updated at once: a parameter, or a pack of small ones.

    Parameters
    ----------
    records : list of Replicated
        The members; of a pack several.
    slices : list of (int, int)
        Native key and numbers of each slice, in order; a pack has one.

    Attributes
    ----------
    size, length : int
        Numbers of the members; and of the keys, which in a pack has one more per
        member: 1 if this worker has stepped it. So the servers leave out the others.
    update, offset : int
        Pushes so far, and the steps by which the store is ahead, as the servers know.
    waits_for : set of Replicated
        Of a pack: parameters that will come in this step and have not.
    present : list of int
        Members that came in this step.
    gradient : NDArray, float32
        This worker's gradient of the step, summed over its devices.
    global_weight : Views
        A: W(t), the newest pulled or on its way. Not always there with delay 0.
    spare : Views
        B: W(t-1), and what W(t+1) is pulled into. None unless the rule keeps it.
    local_weight : Views, float32
        L(i,t+1) where it cannot be made in the user's own array.
    """

    def __init__(
        self, records: Sequence[Replicated], slices: Iterable[tuple[int, int]]
    ) -> None:
        self.records = list(records)
        self.starts, self.size = [], 0
        for place, record in enumerate(self.records):
            record.block, record.place = self, place
            self.starts.append(self.size)
            self.size += record.size
        self.is_pack = len(self.records) > 1
        self.length = self.size + (len(self.records) if self.is_pack else 0)
        self.shape = (self.length,) if self.is_pack else self.records[0].shape
        self.slices: list[Slice] = []
        start = 0
        for native, size in slices:
            self.slices.append(Slice(native, start, start + size))
            start += size
        self.update = self.offset = 0
        self.waits_for: set[Replicated] = set()
        self.present = [] if self.is_pack else [0]
        self.gradient: nd.NDArray | None = None
        self.global_weight: Views | None = None
        self.spare: Views | None = None
        self.local_weight: Views | None = None
        self._others: list[nd.NDArray] = []  # gradients of further devices
        self._summed: nd.NDArray | None = None  # of several slices
        self._own = Views()
        self._marks: dict[tuple[int, ...], nd.NDArray] = {}

    @property
    def is_sliced(self) -> bool:
        """Whether several keys carry it."""
        return len(self.slices) > 1

    def keys(self) -> list[tuple[int, int]]:
        """Native key and numbers of each slice: the same on every rank."""
        return [(slice_.native, slice_.size) for slice_ in self.slices]

    def span(self, place: int) -> tuple[int, int]:
        """Where a member begins and ends."""
        start = self.starts[place]
        return start, start + self.records[place].size

    def part(self, views: Views, slice_: Slice) -> nd.NDArray:
        """What a slice carries of an array of this block's shape."""
        if self.is_sliced:
            return views.view(slice_.start, slice_.stop)
        return views.array

    def cut(self, views: Views, run: Run) -> nd.NDArray:
        """A run of an array of this block: of a single member all of it."""
        return views.view(run.start, run.stop) if self.is_pack else views.array

    def allocate(
        self, context: Context, delayed: bool, keeps_previous: bool, dtype: str
    ) -> None:
        """Make the arrays, on `context`, at the first push; W(0) is in the weights."""
        first = self.records[0]
        for slice_ in self.slices:
            shape = (slice_.size,) if self.is_sliced else self.shape
            slice_.staging = Views(nd.empty(shape, context))
        shape = (self.size,) if self.is_pack else self.shape
        self._others = [nd.empty(shape, context) for _ in first.weights[1:]]
        if self.is_sliced and (self._others or first.weights[0].context != context):
            self._summed = nd.empty(shape, context)
        if delayed or self.is_pack or self.is_sliced or dtype != "float32":
            self.global_weight = Views(self.first_weights(context, dtype))
        if delayed and keeps_previous:
            self.spare = Views(self.global_weight.array.copy())
        if self.is_pack or first.weights[0].context != context:
            self.local_weight = Views(nd.empty(shape, context))

    def first_weights(self, context: Context, dtype: str) -> nd.NDArray:
        """W(0) as the keys carry it, from the user's arrays."""
        weights = nd.zeros(self.shape, context, dtype)
        self._bring_weights(weights)
        return weights

    def _bring_weights(self, target: nd.NDArray) -> None:
        """Copy the numbers of the user's arrays, of the first device, side by side."""
        if not self.is_pack:
            copy_to(self.records[0].weights[0], target)
            return
        for place, record in enumerate(self.records):
            copy_to(flat_copy(record.weights[0]), target._slice(*self.span(place)))

    def expect(self, records: set[Replicated]) -> None:
        """Begin a step in which `records` come."""
        if self.is_pack:
            self.present = []
            self.waits_for = records.intersection(self.records)

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
                place for place, r in enumerate(self.records) if r.step == record.step
            ]
        return not self.waits_for

    def stage(self, ratio: float) -> None:
        """Bring the devices' gradients, summed and times `ratio`, into the staging."""
        if self.is_sliced:
            self._stage_slices(ratio)
            return
        staging = self.slices[0].staging
        self.gradient = staging.view(0, self.size) if self.is_pack else staging.array
        self._sum_into(self.gradient, ratio)
        if self.is_pack:
            self.mark(self.present).copyto(staging.view(self.size, self.length))

    def _stage_slices(self, ratio: float) -> None:
        """Each slice's part; the user's own gradient serves as the sum if it can."""
        source = self.records[0].gradients[0]
        self.gradient = source.array
        if self._summed is None and ratio != 1.0:
            self._summed = nd.empty(self.shape, source.array.context)
        if self._summed is not None:
            self._sum_into(self._summed, ratio)
            self.gradient, source = self._summed, Views(self._summed)
        for slice_ in self.slices:
            part = source.view(slice_.start, slice_.stop)
            part.copyto(slice_.staging.array)

    def _sum_into(self, target: nd.NDArray, ratio: float) -> None:
        self._gather(0, target)
        for device, other in enumerate(self._others, start=1):
            self._gather(device, other)
            nd.elemwise_add(target, other, out=target)
        if ratio != 1.0:
            target *= ratio

    def _gather(self, device: int, target: nd.NDArray) -> None:
        """The members' gradients of one device, side by side; zeros for the absent."""
        if not self.is_pack:
            self.records[0].gradients[device].array.copyto(target)
            return
        records = [self.records[place] for place in self.present]
        gradients = [r.gradients[device].view(0, r.size) for r in records]
        if len(gradients) < len(self.records):
            target[:] = 0
            for place, gradient in zip(self.present, gradients):
                gradient.copyto(target._slice(*self.span(place)))
        elif gradients[0].context == target.context:
            nd.concat(*gradients, dim=0, out=target)
        else:
            nd.concat(*gradients, dim=0).copyto(target)

    def mark(self, present: Sequence[int]) -> nd.NDArray:
        """1 for each member that is `present`, else 0."""
        key = tuple(present)
        if key not in self._marks:
            marks = [float(place in present) for place in range(len(self.records))]
            staging = self.slices[0].staging
            context = staging.array.context if staging else None
            self._marks = {key: nd.array(marks, context)}
        return self._marks[key]

    def make_local(self) -> Views:
        """What the local update writes L into: the user's own array if it can."""
        if self.local_weight is not None:
            return self.local_weight
        self._own.follow(self.records[0].weights[0])
        return self._own

    def bring_local(self) -> None:
        """Bring L(i,t), which the user's arrays hold, to where L(i,t+1) is made."""
        if self.local_weight is not None:
            self._bring_weights(self.local_weight.array)

    def copy_out(self, source: Views, places: Sequence[int]) -> None:
        """Copy an array's numbers to the user's arrays of these members, everywhere."""
        for device, weight in enumerate(self.records[0].weights):
            if self.is_pack:
                self._split(source, places, device)
            elif weight is not source.array:
                copy_to(source.array, weight)

    def _split(self, source: Views, places: Sequence[int], device: int) -> None:
        """`copy_out` of a pack to one device."""
        weights = [self.records[place].weights[device] for place in places]
        flat = source.view(0, self.size).astype("float32", copy=False)
        flat = flat.as_in_context(weights[0].context)
        if len(places) == len(self.records):
            parts = [
                w if len(w.shape) == 1 else nd.empty(w.size, w.context) for w in weights
            ]
            starts = tuple(self.starts)
            nd._internal._split_v2(flat, indices=starts, axis=0, out=parts)
        else:
            parts = [flat._slice(*self.span(place)) for place in places]
        for part, weight in zip(parts, weights):
            if part is not weight:
                part.reshape(weight.shape).copyto(weight)

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
        if self.spare is not None and len(self.present) < len(self.records):
            for place in set(range(len(self.records))).difference(self.present):
                span = self.span(place)
                self.spare.view(*span).copyto(self.global_weight.view(*span))

    def subtract_spare(self, places: Iterable[int]) -> None:
        """B := A - B: done twice, with another A in between, A - B is as it was."""
        if self.spare is not None:
            for span in map(self.span, places):
                spare = self.spare.view(*span)
                nd.elemwise_sub(self.global_weight.view(*span), spare, out=spare)

    def is_large(self, bigarray_bound: int) -> bool:
        """Whether compression is worth while; ps-lite must not have cut the array."""
        whole = self.slices[0].size < bigarray_bound
        return not self.is_pack and PACK_NUMBERS < self.size and whole

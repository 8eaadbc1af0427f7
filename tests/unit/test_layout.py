"""Slices and packs: how even the servers' loads are, and that every number is carried."""

import random
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from mxnet import optimizer as opt

from odsgd_kvstore import layout, placement
from odsgd_kvstore.keys import NativeKeys, server_of
from odsgd_kvstore.layout import (
    LEAST_SLICE,
    PACK_NUMBERS,
    SLICE_NUMBERS,
    slice_size,
    spread,
)
from odsgd_kvstore.replicated import Replicated

ROOT = Path(layout.__file__).absolute().parents[1]
UNEVEN = 1.10  # the busiest server over the mean, at most
BOUND = 1000 * 1000  # MXNET_KVSTORE_BIGARRAY_BOUND's default


def shapes(name):
    """The arrays of a network of the benchmarks."""
    sys.path.insert(0, str(ROOT / "benchmarks"))
    try:
        from emulated import NETWORKS
    finally:
        sys.path.pop(0)
    return NETWORKS[name].shapes


def size_of(shape):
    """Numbers of an array."""
    size = 1
    for length in shape:
        size *= length
    return size


NETWORKS = {
    name: [size_of(shape) for shape in shapes(name)]
    for name in ("resnet50", "lenet", "mlp12")
}
SEVERAL = pytest.mark.parametrize("num_servers", [2, 3, 4])
EACH = pytest.mark.parametrize("name", NETWORKS)


def unevenness(loads):
    """The busiest server's load over the mean."""
    return max(loads) * len(loads) / sum(loads)


@EACH
@SEVERAL
def test_spread_is_even_and_carries_every_number_once(name, num_servers):
    sizes, loads = NETWORKS[name], [0] * num_servers
    plan = spread(sizes, loads)
    assert [sum(size for _, size in slices) for slices in plan] == sizes
    carried = [0] * num_servers
    for slices in plan:
        for server, size in slices:
            assert 1 <= size <= SLICE_NUMBERS
            carried[server] += size
    assert loads == carried
    assert unevenness(loads) <= UNEVEN


@EACH
def test_spread_cuts_no_array_of_a_few_numbers(name):
    for size, slices in zip(NETWORKS[name], spread(NETWORKS[name], [0] * 3)):
        assert len(slices) == 1 or size > PACK_NUMBERS


@pytest.mark.parametrize("num_servers", [1, 2, 3, 7])
def test_spread_takes_any_sizes_and_what_the_servers_carry_already(num_servers):
    chance = random.Random(num_servers)
    for _ in range(30):
        sizes = [
            int(10 ** chance.uniform(0, 6.5)) for _ in range(chance.randint(1, 30))
        ]
        before = [chance.randrange(10**5) for _ in range(num_servers)]
        loads, again, largest = list(before), list(before), chance.choice([9000, 10**5])
        plan = spread(sizes, loads, largest)
        assert plan == spread(sizes, again, largest)
        assert [sum(size for _, size in slices) for slices in plan] == sizes
        assert all(1 <= size <= largest for slices in plan for _, size in slices)
        for server in range(num_servers):
            added = sum(n for slices in plan for where, n in slices if where == server)
            assert loads[server] == before[server] + added


def test_one_server_gets_everything_in_as_few_slices_as_possible():
    plan = spread([SLICE_NUMBERS, SLICE_NUMBERS + 1, 5], [0])
    half = (SLICE_NUMBERS + 1) // 2
    assert plan == [[(0, SLICE_NUMBERS)], [(0, half), (0, half + 1)], [(0, 5)]]


@pytest.mark.parametrize("num_servers", [1, 2, 3, 16])
def test_slices_are_neither_too_small_nor_too_large(num_servers):
    sizes = [slice_size(10**power, num_servers) for power in range(10)]
    assert sizes == sorted(sizes)
    assert (sizes[0], sizes[-1]) == (LEAST_SLICE, SLICE_NUMBERS)
    in_between = 20 * LEAST_SLICE * num_servers
    assert LEAST_SLICE < slice_size(in_between, num_servers) < SLICE_NUMBERS


def placed(sizes, num_servers, kind=opt.SGD, bound=BOUND, frozen=(), at_once=True):
    """(records, packs, keys) of a Gluon Trainer's parameters, told one by one."""
    table = {
        i: SimpleNamespace(shape=(size,), grad_req="null" if i in frozen else "write")
        for i, size in enumerate(sizes)
    }
    optimizer = kind(param_dict=table if at_once else {})
    keys = NativeKeys(num_servers, bound)
    place = placement.Placement(keys, lambda: True)
    records = [
        Replicated(i, (size,), size, i, [SimpleNamespace(context="cpu(0)")], order=i)
        for i, size in enumerate(sizes)
    ]
    for record in records:
        place.place(record, optimizer)
    return records, place.pack(records, optimizer), keys


def blocks_of(records):
    return {record.block for record in records}


def carried(records, num_servers):
    """Numbers that travel to each server in a step."""
    loads = [0] * num_servers
    for block in blocks_of(records):
        for slice_ in block.slices:
            size = slice_.size - len(block.records) * block.is_pack  # less the marks
            loads[server_of(slice_.native, num_servers)] += size
    return loads


@EACH
@SEVERAL
def test_parameters_told_one_by_one_are_spread_evenly(name, num_servers):
    records, packs, keys = placed(NETWORKS[name], num_servers)
    loads = carried(records, num_servers)
    assert sum(loads) == sum(NETWORKS[name])
    assert unevenness(loads) <= UNEVEN
    assert keys.loads == loads
    for slice_ in (s for block in blocks_of(records) for s in block.slices):
        assert slice_.size < BOUND  # ps-lite would cut it
        assert slice_.size <= SLICE_NUMBERS + PACK_NUMBERS
    few = [r for r in records if r.size <= PACK_NUMBERS]
    assert packs and {r.order for r in few} == {
        record.order for pack in packs for record in pack.records
    }


@pytest.mark.parametrize("num_servers", [1, 2, 3])
def test_blocks_carry_each_number_of_each_parameter_once_and_in_order(num_servers):
    sizes = [5, SLICE_NUMBERS + 1, 70000, 1, 4096, 4097, 3 * SLICE_NUMBERS - 2, 12, 7]
    records, packs, _ = placed(sizes, num_servers, frozen=(7,))
    for record in records:
        assert record.block.records[record.place] is record
    blocks = blocks_of(records)
    natives = [slice_.native for block in blocks for slice_ in block.slices]
    assert len(natives) == len(set(natives))
    for block in blocks:
        places = [block.span(place) for place in range(len(block.records))]
        assert [start for start, _ in places] == [0, *(stop for _, stop in places[:-1])]
        assert block.size == places[-1][1] == sum(r.size for r in block.records)
        assert block.length == block.size + (block in packs) * len(block.records)
        starts = [slice_.start for slice_ in block.slices]
        assert starts == [0, *(slice_.stop for slice_ in block.slices[:-1])]
        assert block.slices[-1].stop == block.length
    packed = {record.order for pack in packs for record in pack.records}
    assert packed == {0, 3, 4, 8}  # 7 is frozen


def test_every_rank_deals_the_same_keys():
    def layout_of():
        records, _, _ = placed(NETWORKS["resnet50"], 3)
        return [(record.place, record.block.keys()) for record in records]

    assert layout_of() == layout_of()


@pytest.mark.parametrize(
    "settings",
    [
        {"kind": opt.LAMB},  # takes norms of whole layers
        {"kind": type("Own", (opt.SGD,), {})},
        {"bound": 2 * PACK_NUMBERS},
    ],
)
def test_what_must_stay_whole_is_neither_cut_nor_packed(settings):
    sizes = [SLICE_NUMBERS + 1, 5, 70000, 6]
    records, packs, _ = placed(sizes, 2, **settings)
    assert packs == []
    for record in records:
        assert record.block.records == [record]
        assert [size for _, size in record.block.keys()] == [record.size]


def test_a_low_bigarray_bound_makes_smaller_slices():
    bound = 3 * PACK_NUMBERS
    records, packs, _ = placed([100000, 8, 9], 2, bound=bound)
    sizes = [size for _, size in records[0].block.keys()]
    assert max(sizes) < bound
    assert len(packs) == 1
    assert sum(sizes) == 100000


@pytest.mark.parametrize("num_servers", [3, 4])
def test_slices_of_a_large_array_are_compressed_however_small(num_servers):
    sizes = [8500, 5600, 24000, 8000, 8000, 12, 4096, 7]
    records, packs, _ = placed(sizes, num_servers)
    sizes = [size for b in blocks_of(records) - set(packs) for _, size in b.keys()]
    assert min(sizes) <= PACK_NUMBERS
    for record in records:
        block = record.block
        assert block.is_large(BOUND) == (record.size > PACK_NUMBERS)
        assert not block.is_large(block.slices[0].size)  # ps-lite cuts it


def test_nothing_is_packed_where_nobody_knows_what_comes():
    # A bare store or a Module tells the optimizer nothing of parameters.
    records, packs, _ = placed([10, 20, SLICE_NUMBERS + 1], 2, at_once=False)
    assert packs == []
    assert [record.block.is_sliced for record in records] == [False, False, True]


def test_one_small_parameter_alone_is_no_pack():
    _, packs, keys = placed([5, 70000], 2)
    assert packs == []
    assert sum(keys.loads) >= 70000


def test_several_small_parameters_share_few_keys():
    _, packs, _ = placed([100] * 50, 2)
    assert [len(pack.records) for pack in packs] == [25, 25]


@pytest.mark.parametrize("bound", [8194, 10000, 30000])
@pytest.mark.parametrize(
    "sizes", [[4096] * 5, [4096, 4096, 1806, 4096, 4096, 1808], [1] * 9000]
)
def test_no_pack_is_cut_by_ps_lite(sizes, bound):
    records, packs, _ = placed(sizes, 2, bound=bound)
    assert packs or (bound, sizes) == (8194, [4096] * 5)  # no two fit
    assert all(pack.length < bound for pack in packs)
    assert sum(block.size for block in blocks_of(records)) == sum(sizes)

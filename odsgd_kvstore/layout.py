"""How parameters are cut or packed for the wire: integers only.

An array below MXNET_KVSTORE_BIGARRAY_BOUND lives whole on one server, and its pull begins
when its push has ended: alone on its link it would take twice the link's time. So a
large one is cut into slices, of which one is pulled while another is pushed, and which
are spread so that every server carries the same. Arrays of a few numbers cost as much as
large ones per key, so they travel together, in packs.
"""

from __future__ import annotations

from typing import Sequence

PACK_NUMBERS = 4096  # arrays up to this size are packed, and never cut
SLICE_NUMBERS = 256 * 1024  # of a slice, at most: 1 MiB
LEAST_SLICE = 32 * 1024  # smaller ones cost more CPU time than they save on the link
_PER_SERVER = 16  # slices that keep a link busy in both directions
_UNEVEN = 1.08  # the busiest server's load over the mean, at most
_ROUNDS = 64


def slice_size(total: int, num_servers: int) -> int:
    """Numbers of a slice, at most, for `total` numbers on so many servers."""
    wanted = total // (_PER_SERVER * num_servers)
    return max(LEAST_SLICE, min(SLICE_NUMBERS, wanted))


def spread(
    sizes: Sequence[int], loads: list[int], largest: int = SLICE_NUMBERS
) -> list[list[tuple[int, int]]]:
    """Cut arrays into slices and give each slice a server, evenly.

    Arrays are cut only where they exceed `largest` or the servers would be uneven.

    Parameters
    ----------
    sizes : sequence of int
        Numbers of each array.
    loads : list of int
        Numbers that each server holds already; brought up to date.
    largest : int
        Numbers of a slice, at most.

    Returns
    -------
    list of list of (int, int)
        Of each array the slices in order: server, numbers.
    """
    counts = [-(-size // largest) for size in sizes]
    for _ in range(_ROUNDS):
        plan, after = _assign(sizes, counts, loads)
        uneven = max(after) > _UNEVEN * sum(after) / len(after)
        culprit = _largest_on(after.index(max(after)), plan) if uneven else None
        if culprit is None:
            break
        counts[culprit] += len(loads) - counts[culprit] % len(loads)
    loads[:] = after
    return plan


def _assign(
    sizes: Sequence[int], counts: Sequence[int], loads: Sequence[int]
) -> tuple[list[list[tuple[int, int]]], list[int]]:
    """Slices to servers, the largest first, each to the least loaded."""
    plan = [[(0, part) for part in _parts(s, c)] for s, c in zip(sizes, counts)]
    order = sorted(
        ((array, i) for array, slices in enumerate(plan) for i in range(len(slices))),
        key=lambda place: -plan[place[0]][place[1]][1],
    )
    after = list(loads)
    for array, i in order:
        server = after.index(min(after))
        size = plan[array][i][1]
        plan[array][i] = (server, size)
        after[server] += size
    return plan, after


def _parts(size: int, count: int) -> list[int]:
    """`size` in `count` parts that differ by one at most."""
    return [size * (i + 1) // count - size * i // count for i in range(count)]


def _largest_on(server: int, plan: Sequence[Sequence[tuple[int, int]]]) -> int | None:
    """The array with the largest slice there, if it may be cut further."""
    found = [
        (size, -array)
        for array, slices in enumerate(plan)
        for where, size in slices
        if where == server and size > PACK_NUMBERS
    ]
    return -max(found)[1] if found else None

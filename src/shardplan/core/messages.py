"""Who sends which box to whom, vectorised over devices.

The *general move* from a type `s` to a type `t`, on the same mesh or another, sends each device of `t` what it lacks of
its box: a receiver never gets what it holds, and who sends what several devices hold is said in `core.holders`, or,
where one end is a table of boxes, in `core.parcels`. All functions work on any tiling; those that take even types only
say so.

Arrays over devices have a row a place of the mesh that is meant: senders are places of `s`, receivers places of `t`.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from shardplan.core.digits import tile_bounds
from shardplan.core.holders import choose
from shardplan.core.parcels import Parcels, Rows, parcels_of
from shardplan.core.tensor import TensorType, counter, live_reduction

MOST_MESSAGES = 2**21  # more than these (three numbers each, 50 MB in all) are not listed only to decide what types
RECENT = 16  # results kept: the facets of one op ask for the same pair several times, and then no more
_BLOCK = 1 << 18  # pairs of a receiver and a tile that are looked at together: some arrays of 2 MB
FIGURES = 1 << 13  # results kept that are a few numbers: a batch of thousands of tensors asks for all of them again


class Packed(NamedTuple):
    """The elements that the busiest device packs for a move, on either side; a contiguous side needs no buffer."""

    sent: int
    received: int
    sent_contiguous: bool
    received_contiguous: bool
    buffers: int = 0  # of the lowering's own, beside both


def tiles(t: TensorType, dim: int) -> np.ndarray:
    """Return the (start, stop) of every tile of a dim, int64 [tiles, 2], in order of the tiles' numbers.

    A tile's number is the mixed-radix index of its coordinates over the axes of the dim, major first.
    """
    return tile_bounds(t.shape[dim], [t.mesh.span(name).size for name in t.layout.dims[dim]])


def own_places(s: TensorType, t: TensorType) -> np.ndarray:
    """Return, for every device of `t`, its place in the mesh of `s`, or -1 where it has none: int64 [t.mesh.size]."""
    if s.mesh is t.mesh or s.mesh.devices == t.mesh.devices:
        return np.arange(t.mesh.size)
    table = {i: place for place, i in enumerate(s.mesh.devices)}
    return np.array([table.get(i, -1) for i in t.mesh.devices], dtype=np.int64)


def at_root(t: TensorType) -> np.ndarray:
    """Return which devices hold the value (coordinate 0 of every root axis), bool [devices]."""
    held = np.ones(t.mesh.size, dtype=bool)
    for name in t.layout.root:
        held &= t.mesh.coordinate(name) == 0
    return held


def has_box_table(s: TensorType, t: TensorType) -> bool:
    """Say whether either type lies in a table of boxes."""
    return s.layout.boxes is not None or t.layout.boxes is not None


def _rows(t: TensorType, axes: tuple[str, ...]) -> Rows:
    """What the devices of a type hold, in groups over `axes`."""
    table, order, group = t.layout.boxes, np.argsort(t.mesh.ids), _number_groups(t, axes)
    if table is not None:
        places = order[np.searchsorted(t.mesh.ids, table.ids, sorter=order)]
        return Rows(places, table.ids, table.boxes, table.offsets, table.strides, group[places])
    places = order[(at_root(t) & (t.elements() > 0))[order]]
    boxes = t.boxes()[places]
    inner = np.cumprod((boxes[..., 1] - boxes[..., 0])[:, ::-1], axis=1)[:, ::-1]
    strides = np.concatenate([inner[:, 1:], np.ones_like(inner[:, :1])], axis=1)
    return Rows(places, t.mesh.ids[places], boxes, np.zeros_like(places), strides, group[places])


@lru_cache(maxsize=RECENT)
def parcels(s: TensorType, t: TensorType, near: tuple[int, ...] = (), axes: tuple[str, ...] = ()) -> Parcels:
    """Return the boxes of which the general move consists where either type lies in a table; the rest as `messages`."""
    return parcels_of(_rows(s, axes), _rows(t, axes), near)


@lru_cache(maxsize=RECENT)
def overlap_elements(s: TensorType, t: TensorType) -> np.ndarray:
    """Return the elements of its `t` box that each device of `t` already holds under `s`: int64 [t.mesh.size]."""
    if has_box_table(s, t):
        found = parcels(s, t, (), ())  # said out, so that it is remembered as what `messages` asks for
        out = np.zeros(t.mesh.size, dtype=counter(t))
        np.add.at(out, found.ends[1][found.stay_mask], found.sizes[found.stay_mask])
        return out
    a, b, held = s.boxes(), t.boxes(), at_root(s)
    if s.mesh is not t.mesh and s.mesh.devices != t.mesh.devices:
        places = own_places(s, t)
        a, held = a[places], (places >= 0) & held[places]  # a place of -1 reads some row, which is dropped below
    out = held.astype(np.int64).astype(counter(t))
    for d in range(t.ndim):
        overlap = np.minimum(a[:, d, 1], b[:, d, 1])
        overlap -= np.maximum(a[:, d, 0], b[:, d, 0])
        out *= np.maximum(overlap, 0, out=overlap)
    return out


def lacking(s: TensorType, t: TensorType) -> np.ndarray:
    """Return the bytes of its `t` box that each device of `t` does not hold under `s`: int64 [t.mesh.size].

    Root axes count: a device away from the root of `t` needs nothing, one away from the root of `s` holds nothing.
    """
    return np.where(at_root(t), t.elements() - overlap_elements(s, t), 0) * t.itemsize


def _ranges(s: TensorType, t: TensorType) -> list[tuple[np.ndarray, np.ndarray]]:
    """Per dim, the first and one-past-last source tile that each receiver's box meets.

    Tiles that a box meets are neighbours, and a box meets the product of its dims' ranges.
    """
    out: list[tuple[np.ndarray, np.ndarray]] = []
    for d in range(t.ndim):
        cuts, own, number = tiles(s, d), tiles(t, d), t.mesh.index(t.layout.dims[d])
        first = np.searchsorted(cuts[:, 1], own[:, 0], side="right")
        out.append((first[number], np.searchsorted(cuts[:, 0], own[:, 1], side="left")[number]))
    return out


def _number_groups(t: TensorType, axes: tuple[str, ...]) -> np.ndarray:
    """Number the groups over `axes` (none: one group) and, in each, the addends: int64 [devices], by place."""
    busy = set(t.mesh.expand(axes or t.mesh.axes)) - set(t.mesh.expand(t.layout.partial))
    fixed = tuple(t.mesh.atoms[k].name for k in range(len(t.mesh.atoms)) if k not in busy)
    return t.mesh.index(fixed)


@lru_cache(maxsize=RECENT)
def messages(
    s: TensorType, t: TensorType, near: tuple[int, ...] = (), axes: tuple[str, ...] = ()
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return all messages of the general move: senders, receivers, elements; int64 arrays [M].

    What a device holds already is not sent. The box of a message is the intersection of the sender's box under `s` with
    the receiver's under `t`. Who sends is said in `core.holders`; `axes` are those of the groups, () for the whole
    mesh. A sender is -1 where the group does not hold what is wanted.
    """
    if has_box_table(s, t):
        found = parcels(s, t, near, axes)
        away = [ends[~found.stay_mask] for ends in found.ends]
        pairs, number = np.unique(away[0] * t.mesh.size + away[1], return_inverse=True)
        size = np.zeros(len(pairs), dtype=counter(t))
        np.add.at(size, number, found.sizes[~found.stay_mask])
        return pairs // t.mesh.size, pairs % t.mesh.size, size
    ranges = _ranges(s, t)
    cuts = [tiles(s, d) for d in range(s.ndim)]
    boxes, own = t.boxes(), own_places(s, t)
    # Tiles are numbered over all dims; with partial axes, or groups, those of each addend and group by themselves.
    apart = bool(axes or s.layout.partial)
    have = _number_groups(s, axes) if apart else np.zeros(s.mesh.size, dtype=np.int64)
    want = np.where(own >= 0, have[own], -1) if apart else np.zeros(t.mesh.size, dtype=np.int64)
    for names, along in zip(s.layout.dims, cuts, strict=True):
        have = have * len(along) + s.mesh.index(names)
    held = np.where((own >= 0) & at_root(s)[own], have[own], -1)
    wanted = at_root(t) & (t.elements() > 0)
    counts = [int(max(1, (last - first).max(initial=0))) for first, last in ranges]
    receivers: list[np.ndarray] = []
    numbers: list[np.ndarray] = []
    sizes: list[np.ndarray] = []
    # Of all receivers the k-th tile along every dim that a box meets, some k at a time: arrays [k, receivers].
    total, block = math.prod(counts), max(1, _BLOCK // t.mesh.size)
    for begin in range(0, total, block):
        nth = np.unravel_index(np.arange(begin, min(total, begin + block)), counts) if counts else ()
        live, number = np.tile(wanted, (min(total - begin, block), 1)), want[None]
        size = np.ones(live.shape, dtype=counter(t))
        for d, k in enumerate(nth):
            first, last = ranges[d]
            met = first + k[:, None]
            tile = np.minimum(met, len(cuts[d]) - 1)
            live &= met < last  # this receiver's range may be shorter than the longest
            overlap = np.minimum(cuts[d][tile, 1], boxes[:, d, 1]) - np.maximum(cuts[d][tile, 0], boxes[:, d, 0])
            size *= np.maximum(overlap, 0)
            number = number * len(cuts[d]) + tile
        live &= (size > 0) & (number != held)
        receivers.append(np.nonzero(live)[1])
        numbers.append(np.broadcast_to(number, live.shape)[live])
        sizes.append(size[live])
    receiver, number = np.concatenate(receivers), np.concatenate(numbers)
    holders = np.flatnonzero(at_root(s) & (s.elements() > 0))
    chosen = choose(number, t.mesh.ids[receiver], have[holders], s.mesh.ids[holders], near)
    return np.where(chosen >= 0, holders[chosen], -1), receiver, np.concatenate(sizes)


@lru_cache(maxsize=FIGURES)
def most_senders(s: TensorType, t: TensorType) -> int:
    """Return the largest number of distinct senders that a receiver of the general move hears from."""
    if has_box_table(s, t):
        return int(np.bincount(messages(s, t)[1]).max(initial=0))
    return int(sender_counts(s, t).max(initial=0))


def sender_counts(s: TensorType, t: TensorType) -> np.ndarray:
    """Return how many senders each receiver of the general move hears from, [t.mesh.size]; of no table of boxes."""
    count = np.ones(t.mesh.size, dtype=np.int64)
    for d, (first, last) in enumerate(_ranges(s, t)):
        cuts = tiles(s, d)
        full = np.concatenate([[0], np.cumsum(cuts[:, 1] > cuts[:, 0])])  # empty tiles send nothing
        count *= np.maximum(full[np.maximum(last, first)] - full[first], 0)
    count -= overlap_elements(s, t) > 0  # a receiver that holds a part is among the holders, and sends itself nothing
    return np.where(at_root(t) & (t.elements() > 0), count, 0)


def message_count(s: TensorType, t: TensorType) -> int:
    """Return an upper bound of the number of messages of the general move."""
    if has_box_table(s, t):
        return len(messages(s, t)[0])
    return t.mesh.size * math.prod(int(max(1, (last - first).max(initial=0))) for first, last in _ranges(s, t))


def stays(s: TensorType, t: TensorType, axes: tuple[str, ...]) -> bool:
    """Say whether groups over `axes` hold all that their members need.

    One mesh. Even types are decided by their atoms, small moves by their messages; of large uneven moves some that are
    covered are not recognised.
    """
    free = set(s.mesh.expand(axes))
    if s.all_even and t.all_even:
        return moved_atoms(s, t) <= free
    if has_box_table(s, t):
        return parcels(s, t, (), axes).complete
    if message_count(s, t) <= MOST_MESSAGES:
        return bool((messages(s, t, (), axes)[0] >= 0).all())
    # Without the messages: on an axis that no group is over, all tiles that a box meets must have the coordinate of the
    # box's device. The first and the last tile tell, as the range of tiles is contiguous.
    wanted = at_root(t) & (t.elements() > 0)
    for d, (first, last) in enumerate(_ranges(s, t)):
        inner = 1
        for name in reversed(s.layout.dims[d]):
            span = s.mesh.span(name)
            if not set(span.atoms) <= free:
                low, high = first // inner, np.maximum(last - 1, first) // inner
                if np.any(wanted & ((low != high) | (low % span.size != s.mesh.coordinate(name)))):
                    return False
            inner *= span.size
    return True


class SenderLoads(NamedTuple):
    """What senders have to do in a general move."""

    elements: np.ndarray  # that each device sends to others, int64 [devices]
    counts: np.ndarray  # the messages in which it does, int64 [devices]
    listed: bool  # whether the messages had to be listed

    @property
    def receivers(self) -> int:
        """Those of the busiest sender, at least 1."""
        return max(1, int(self.counts.max(initial=0)))


@lru_cache(maxsize=RECENT)
def sent_in_general(
    s: TensorType, t: TensorType, near: tuple[int, ...] = (), axes: tuple[str, ...] = ()
) -> SenderLoads:
    """Return what every device sends in the general move; arguments as for `messages`.

    Where all receivers of a tile take equal parts of it, and all tiles of a group are wanted, their holders' shares are
    counted: the messages of large meshes are too many to list.
    """
    if not _tiles_nest(s, t, near, axes):
        senders, _, sizes = messages(s, t, near, axes)
        sent = np.zeros(s.mesh.size, dtype=counter(s))
        np.add.at(sent, senders, sizes)
        return SenderLoads(sent, np.bincount(senders, minlength=s.mesh.size), True)
    cuts = [(math.prod(s.mesh.atoms[a].size for a in x), math.prod(s.mesh.atoms[a].size for a in y))
            for x, y in zip(s.atoms, t.atoms, strict=True)]  # fmt: skip
    part = math.prod(n // max(x, y) for n, (x, y) in zip(s.shape, cuts, strict=True))
    number = _number_groups(s, axes)
    for names, (count, _) in zip(s.layout.dims, cuts, strict=True):
        number = number * count + s.mesh.index(names)
    live = np.flatnonzero(at_root(s))
    order = live[np.lexsort((s.mesh.ids[live], number[live]))]
    # Holders of one tile stand side by side, all as many.
    held = overlap_elements(s, t)[order] > 0
    holders = len(order) // (1 + int(np.count_nonzero(np.diff(number[order]))))
    wanting = holders * math.prod(max(1, x // y) for x, y in cuts) - held.reshape(-1, holders).sum(axis=1)
    turn = wanting[:, None] // holders + (np.arange(holders) < wanting[:, None] % holders)
    counts = np.zeros(s.mesh.size, dtype=np.int64)
    counts[order] = turn.reshape(-1)
    return SenderLoads(counts.astype(counter(s)) * part, counts, False)


def _tiles_nest(s: TensorType, t: TensorType, near: tuple[int, ...], axes: tuple[str, ...]) -> bool:
    """Say whether tiles of one side nest in those of the other in every dim, and groups want all that they hold."""
    if near or s.mesh != t.mesh or not (s.all_even and t.all_even):
        return False
    size = [a.size for a in s.mesh.atoms]
    counts = [[math.prod(size[a] for a in run) for run in x.atoms] for x in (s, t)]
    inside = not axes or sharing_atoms(s, t) <= set(s.mesh.expand(axes))
    return inside and all(max(x, y) % min(x, y) == 0 for x, y in zip(*counts, strict=True))


@lru_cache(maxsize=FIGURES)
def traffic(s: TensorType, t: TensorType, near: tuple[int, ...] = (), axes: tuple[str, ...] = ()) -> Packed:
    """Return what the busiest device sends and receives in the general move; arguments as for `messages`.

    A side is contiguous where every message is the sender's whole tile, or the receiver's whole box.
    """
    got = int((lacking(s, t) // t.itemsize).max(initial=0))
    if not got:
        return Packed(0, 0, True, True)
    sent = int(sent_in_general(s, t, near, axes).elements.max())
    if s.mesh == t.mesh and s.all_even and t.all_even:
        inside = [bool(np.all(b - a == 1)) for a, b in _ranges(s, t)]
        around = [bool(np.all(b - a == 1)) for a, b in _ranges(t, s)]
        return Packed(sent, got, all(around), all(inside))
    senders, receivers, sizes = messages(s, t, near, axes)
    alone = not has_box_table(s, t)  # a message of several boxes is packed
    return Packed(
        sent,
        got,
        alone and bool(np.all(sizes == s.elements()[senders])),
        alone and bool(np.all(sizes == t.elements()[receivers])),
    )


def moved_atoms(s: TensorType, t: TensorType) -> set[int]:
    """Return the atoms over which the boxes of `t` reach beyond the tiles of `s` (even types on one mesh).

    An atom of a source dim stays put when it stands in the same dim of `t` behind the same product of sizes; a group
    over all other source atoms then covers every destination box, and no smaller group does.
    """
    moved: set[int] = set()
    size = [a.size for a in s.mesh.atoms]
    for ours, theirs in zip(s.atoms, t.atoms, strict=True):
        standing = {(math.prod(size[b] for b in theirs[:k]), a) for k, a in enumerate(theirs)}
        moved |= {a for k, a in enumerate(ours) if (math.prod(size[b] for b in ours[:k]), a) not in standing}
    return moved


def sharing_atoms(s: TensorType, t: TensorType) -> set[int]:
    """Return the atoms of the smallest groups that hold what is wanted, and want all tiles that they hold.

    Even types on one mesh. Beside those that move they are the atoms that the source does not use and whose coordinate
    decides in `t` which tiles of `s` a box meets: without one, only some of the tiles of a group are wanted, or some by
    more devices. That is where what stands before it cuts the dim into no multiple of the tiles of `s`.
    """
    size = [a.size for a in s.mesh.atoms]
    used = {a for run in s.atoms for a in run}
    found = moved_atoms(s, t)
    for ours, theirs in zip(s.atoms, t.atoms, strict=True):
        tiles = math.prod(size[a] for a in ours)
        found |= {a for k, a in enumerate(theirs) if a not in used and math.prod(size[b] for b in theirs[:k]) % tiles}
    return found


@lru_cache(maxsize=RECENT)
def permutation(s: TensorType, t: TensorType) -> tuple[np.ndarray, np.ndarray] | None:
    """Return the one-to-one pairs (sender place, receiver place) of a permute from `s` to `t`, or None.

    Every `t` box must lie inside one tile of `s`. A device that holds its own box keeps it; of the rest, holders and
    wanters of each tile (box and addend) are matched in order of place. One mesh; int64 arrays [M].
    """
    if s.mesh is not t.mesh and s.mesh != t.mesh:
        return None
    n = s.mesh.size
    have, want = np.zeros(n, dtype=np.int64), np.zeros(n, dtype=np.int64)  # numbers of tiles (with addends), by place
    for d, names in enumerate(s.layout.dims):
        cuts, own = tiles(s, d), tiles(t, d)
        first = np.minimum(np.searchsorted(cuts[:, 1], own[:, 0], side="right"), len(cuts) - 1)
        if np.any((cuts[first, 1] < own[:, 1]) & (own[:, 0] < own[:, 1])):
            return None  # a box reaches beyond one tile
        have, want = have * len(cuts) + s.mesh.index(names), want * len(cuts) + first[t.mesh.index(t.layout.dims[d])]
    # The partial axes may change names, not their number of addends: which addend it is belongs to a tile's number.
    addends, renamed = (math.prod(s.mesh.span(x).size for x in u.layout.partial) for u in (s, t))
    if addends != renamed or live_reduction(s) != live_reduction(t):
        return None
    have, want = have * addends + s.mesh.index(s.layout.partial), want * addends + t.mesh.index(t.layout.partial)
    holds, wants = at_root(s) & (s.elements() > 0), at_root(t) & (t.elements() > 0)
    home = holds & wants & (have == want)
    senders, receivers = np.flatnonzero(holds & ~home), np.flatnonzero(wants & ~home)
    if len(receivers) == 0:
        return receivers, receivers
    senders = senders[np.argsort(have[senders], kind="stable")]
    receivers = receivers[np.argsort(want[receivers], kind="stable")]
    keys, starts = np.unique(have[senders], return_index=True)
    wanted = want[receivers]
    slot = np.searchsorted(keys, wanted)
    if np.any(slot >= len(keys)) or np.any(keys[np.minimum(slot, len(keys) - 1)] != wanted):
        return None  # nobody holds what somebody wants
    # The n-th of those that want a tile gets it from the n-th of those that hold it.
    _, first = np.unique(wanted, return_index=True)
    nth = np.arange(len(wanted)) - np.repeat(first, np.diff(np.append(first, len(wanted))))
    chosen = starts[slot] + nth
    ends = np.append(starts[1:], len(senders))
    if np.any(chosen >= ends[slot]):
        return None  # more want a tile than hold it
    return senders[chosen], receivers

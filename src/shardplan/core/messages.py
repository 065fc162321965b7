"""Who sends which box to whom, vectorised over devices.

The *general move* from a type `s` to a type `t`, on the same mesh or another, sends each device of `t` what it lacks of
its box. The holder rule: of the replicas of a source tile, the sender is the device with the tile's coordinates on the
source's axes and the receiver's own coordinates elsewhere. A receiver never gets what it holds, and replicas share the
load. All functions work on any tiling; those that take even types only say so. Where one end is a table of boxes,
`core.parcels` says who sends.

Arrays over devices have a row a place of the mesh that is meant: senders are places of `s`, receivers places of `t`.
"""

from __future__ import annotations

import itertools
import math
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from shardplan.core.parcels import Parcels, Rows, parcels_of
from shardplan.core.tensor import TensorType, counter, live_reduction

MOST_MESSAGES = 2**21  # more than these (three numbers each, 50 MB in all) are bounded, not listed
RECENT = 16  # results kept: the facets of one op ask for the same pair several times, and then no more


class Packed(NamedTuple):
    """The elements that the busiest device packs for a move, on either side; a contiguous side needs no buffer."""

    sent: int
    received: int
    sent_contiguous: bool
    received_contiguous: bool


def tiles(t: TensorType, dim: int) -> np.ndarray:
    """Return the (start, stop) of every tile of a dim, int64 [tiles, 2], in order of the tiles' numbers.

    A tile's number is the mixed-radix index of its coordinates over the axes of the dim, major first.
    """
    lo = np.zeros(1, dtype=np.int64)
    hi = np.full(1, t.shape[dim], dtype=np.int64)
    for name in t.layout.dims[dim]:
        size = t.mesh.span(name).size
        chunk = -(-(hi - lo) // size)
        start = lo[:, None] + np.arange(size) * chunk[:, None]
        stop = np.minimum(start + chunk[:, None], hi[:, None])
        # What is left over is empty and stands at the end of its chunk: starts and stops ascend, and can be searched.
        lo, hi = np.minimum(start, hi[:, None]).reshape(-1), stop.reshape(-1)
    return np.stack([lo, hi], axis=1)


def _offsets(t: TensorType, dim: int) -> np.ndarray:
    """What the number of a tile of a dim adds to the place of its holder: int64 [tiles]."""
    out = np.zeros(1, dtype=np.int64)
    for name in t.layout.dims[dim]:
        span = t.mesh.span(name)
        out = (out[:, None] + np.arange(span.size) * span.stride).reshape(-1)
    return out


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


def tabled(s: TensorType, t: TensorType) -> bool:
    """Say whether either type lies in a table of boxes."""
    return s.layout.boxes is not None or t.layout.boxes is not None


def _rows(t: TensorType, share: np.ndarray) -> Rows:
    """What the devices of a type hold, `share` by place."""
    table, order = t.layout.boxes, np.argsort(t.mesh.ids)
    if table is not None:
        places = order[np.searchsorted(t.mesh.ids, table.ids, sorter=order)]
        return Rows(places, table.ids, table.boxes, table.offsets, table.strides, share[places])
    places = order[(at_root(t) & (t.elements() > 0))[order]]
    boxes = t.boxes()[places]
    inner = np.cumprod((boxes[..., 1] - boxes[..., 0])[:, ::-1], axis=1)[:, ::-1]
    strides = np.concatenate([inner[:, 1:], np.ones_like(inner[:, :1])], axis=1)
    return Rows(places, t.mesh.ids[places], boxes, np.zeros_like(places), strides, share[places])


@lru_cache(maxsize=RECENT)
def parcels(s: TensorType, t: TensorType) -> Parcels:
    """Return the boxes of which the general move consists where either type lies in a table.

    Of a source with a layout the holder rule leaves one replica of each tile for each receiver.
    """
    if s.layout.boxes is not None:
        return parcels_of(_rows(s, np.zeros(s.mesh.size)), _rows(t, np.zeros(t.mesh.size)))
    return parcels_of(_rows(s, _bases(s, s)), _rows(t, _bases(s, t)))


@lru_cache(maxsize=RECENT)
def kept(s: TensorType, t: TensorType) -> np.ndarray:
    """Return the elements of its `t` box that each device of `t` already holds under `s`: int64 [t.mesh.size]."""
    if tabled(s, t):
        found = parcels(s, t)
        out = np.zeros(t.mesh.size, dtype=counter(t))
        np.add.at(out, found.ends[1][found.kept], found.sizes[found.kept])
        return out
    places = own_places(s, t)
    a, b = s.boxes()[places], t.boxes()  # a place of -1 reads some row, which is dropped below
    overlap = np.minimum(a[:, :, 1], b[:, :, 1]) - np.maximum(a[:, :, 0], b[:, :, 0])
    held = (places >= 0) & at_root(s)[places]
    return np.where(held, np.prod(np.maximum(overlap, 0), axis=1, dtype=counter(t)), 0)


def lacking(s: TensorType, t: TensorType) -> np.ndarray:
    """Return the bytes of its `t` box that each device of `t` does not hold under `s`: int64 [t.mesh.size].

    Root axes count: a device away from the root of `t` needs nothing, one away from the root of `s` holds nothing.
    """
    return np.where(at_root(t), t.elements() - kept(s, t), 0) * t.itemsize


def _bases(s: TensorType, t: TensorType) -> np.ndarray:
    """The place, for each receiver, of the holder of the source's first tile: what `_offsets` are added to."""
    places = own_places(s, t)
    # A receiver that is not on the mesh of `s` stands in for one that is, in turn: so replicas share the load.
    bases = np.where(places >= 0, places, np.arange(t.mesh.size) % s.mesh.size)
    for name in (*(n for d in s.layout.dims for n in d), *s.layout.root):
        span = s.mesh.span(name)
        bases = bases - bases // span.stride % span.size * span.stride
    return bases


def _ranges(s: TensorType, t: TensorType) -> list[tuple[np.ndarray, np.ndarray]]:
    """Per dim, the first and one-past-last source tile that each receiver's box meets.

    Tiles that a box meets are neighbours, and a box meets the product of its dims' ranges.
    """
    boxes = t.boxes()
    out: list[tuple[np.ndarray, np.ndarray]] = []
    for d in range(t.ndim):
        cuts = tiles(s, d)
        out.append(
            (
                np.searchsorted(cuts[:, 1], boxes[:, d, 0], side="right"),
                np.searchsorted(cuts[:, 0], boxes[:, d, 1], side="left"),
            )
        )
    return out


@lru_cache(maxsize=RECENT)
def messages(s: TensorType, t: TensorType) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return all messages of the general move: senders, receivers, elements; int64 arrays [M].

    What a device holds already is not sent. The box of a message is the intersection of the sender's box under `s` with
    the receiver's under `t`.
    """
    if tabled(s, t):
        found = parcels(s, t)
        away = [ends[~found.kept] for ends in found.ends]
        pairs, number = np.unique(away[0] * t.mesh.size + away[1], return_inverse=True)
        size = np.zeros(len(pairs), dtype=counter(t))
        np.add.at(size, number, found.sizes[~found.kept])
        return pairs // t.mesh.size, pairs % t.mesh.size, size
    ranges = _ranges(s, t)
    cuts = [tiles(s, d) for d in range(s.ndim)]
    offsets = [_offsets(s, d) for d in range(s.ndim)]
    bases, boxes, own = _bases(s, t), t.boxes(), own_places(s, t)
    wanted = at_root(t) & (t.elements() > 0)
    counts = [int(max(1, (last - first).max(initial=0))) for first, last in ranges]
    senders: list[np.ndarray] = []
    receivers: list[np.ndarray] = []
    sizes: list[np.ndarray] = []
    everyone = np.arange(t.mesh.size)
    # The loop runs over what is few, the tiles that one box meets (its k-th along every dim); receivers are an array.
    for nth in itertools.product(*(range(c) for c in counts)):
        live = wanted.copy()
        sender = bases.copy()
        size = np.ones(t.mesh.size, dtype=counter(t))
        for d, k in enumerate(nth):
            first, last = ranges[d]
            tile = np.minimum(first + k, len(cuts[d]) - 1)
            live &= first + k < last  # this receiver's range may be shorter than the longest
            overlap = np.minimum(cuts[d][tile, 1], boxes[:, d, 1]) - np.maximum(cuts[d][tile, 0], boxes[:, d, 0])
            size *= np.maximum(overlap, 0)
            sender += offsets[d][tile]
        live &= (size > 0) & (sender != own)
        senders.append(sender[live])
        receivers.append(everyone[live])
        sizes.append(size[live])
    return np.concatenate(senders), np.concatenate(receivers), np.concatenate(sizes)


@lru_cache(maxsize=RECENT)
def most_senders(s: TensorType, t: TensorType) -> int:
    """Return the largest number of distinct senders that a receiver of the general move hears from."""
    if tabled(s, t):
        return int(np.bincount(messages(s, t)[1]).max(initial=0))
    count = np.ones(t.mesh.size, dtype=np.int64)
    for d, (first, last) in enumerate(_ranges(s, t)):
        cuts = tiles(s, d)
        full = np.concatenate([[0], np.cumsum(cuts[:, 1] > cuts[:, 0])])  # empty tiles send nothing
        count *= np.maximum(full[np.maximum(last, first)] - full[first], 0)
    count -= kept(s, t) > 0  # a receiver that holds a part of its box is among the holders, and hears not from itself
    return int(np.where(at_root(t) & (t.elements() > 0), count, 0).max(initial=0))


def most_receivers(s: TensorType, t: TensorType) -> int:
    """Return an upper bound of the number of receivers that a device of the general move sends to, at least 1."""
    count = np.ones(s.mesh.size, dtype=np.int64)
    for first, last in _ranges(t, s):  # backwards: the tiles of `t` that a source box meets
        count *= np.maximum(last - first, 0)
    return max(1, min(t.mesh.size, int(count.max(initial=0)) * _copies(s, t)))


def message_count(s: TensorType, t: TensorType) -> int:
    """Return an upper bound of the number of messages of the general move."""
    if tabled(s, t):
        return len(messages(s, t)[0])
    return t.mesh.size * math.prod(int(max(1, (last - first).max(initial=0))) for first, last in _ranges(s, t))


def stays(s: TensorType, t: TensorType, axes: tuple[str, ...]) -> bool:
    """Say whether groups over `axes` hold all that their members need: every sender is its receiver but for those axes.

    One mesh. Even types are decided by their atoms, small moves by their messages; of large uneven moves some that are
    covered are not recognised.
    """
    free = set(s.mesh.expand(axes))
    if s.all_even and t.all_even:
        return moved_atoms(s, t) <= free
    if message_count(s, t) <= MOST_MESSAGES:
        senders, receivers, _ = messages(s, t)
        fixed = [a for k, a in enumerate(s.mesh.atoms) if k not in free]
        return all(np.array_equal(senders // a.stride % a.size, receivers // a.stride % a.size) for a in fixed)
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


@lru_cache(maxsize=RECENT)
def traffic(s: TensorType, t: TensorType) -> Packed:
    """Return what the busiest device sends and receives in the general move.

    A side is contiguous where every message is the sender's whole tile, or the receiver's whole box. Even types on one
    mesh are counted in closed form (the messages of large meshes are too many to list).
    """
    got = int((lacking(s, t) // t.itemsize).max(initial=0))
    if not got:
        return Packed(0, 0, True, True)
    if s.mesh == t.mesh and s.all_even and t.all_even:
        inside = [bool(np.all(b - a == 1)) for a, b in _ranges(s, t)]
        around = [bool(np.all(b - a == 1)) for a, b in _ranges(t, s)]
        return Packed(int(_sent(s, t).max()), got, all(around), all(inside))
    if message_count(s, t) > MOST_MESSAGES:
        return Packed(int(s.elements().max()) * _copies(s, t), got, False, False)
    senders, receivers, sizes = messages(s, t)
    alone = not tabled(s, t)  # a message of several boxes is packed
    return Packed(
        int(np.bincount(senders, sizes.astype(np.float64)).max()),
        got,
        alone and bool(np.all(sizes == s.elements()[senders])),
        alone and bool(np.all(sizes == t.elements()[receivers])),
    )


def _copies(s: TensorType, t: TensorType) -> int:
    """Return how many receivers of one tile a device may serve at most."""
    if s.mesh != t.mesh:  # all replicas of the destination tile
        return t.mesh.size // math.prod(t.mesh.span(n).size for d in t.layout.dims for n in d)
    # On the axes that the source does not use, every receiver has a holder of its own; on those it uses and the
    # destination does not, replicas of the destination share one.
    used = {a for run in s.atoms for a in run}
    return math.prod(s.mesh.atoms[a].size for a in used - {a for run in t.atoms for a in run})


def _sent(s: TensorType, t: TensorType) -> np.ndarray:
    """Elements that each device sends to others, for even types on one mesh: int64 [devices].

    The receivers that a device serves share its coordinates on the axes that `s` does not use. Over their other
    coordinates the destination tiles of a dim form a comb; what they take of the device's tile is a difference of the
    comb's cumulative length, and every combination of tiles is held by equally many receivers.
    """
    used = {a for run in s.atoms for a in run}
    atoms = s.mesh.atoms
    places = np.arange(s.mesh.size)
    boxes = s.boxes()
    taken = np.ones(s.mesh.size, dtype=counter(s))
    copies = math.prod(atoms[a].size for a in used)
    for d, run in enumerate(t.atoms):
        copies //= math.prod(atoms[a].size for a in run if a in used)
        comb = [_comb_length(boxes[:, d, k], t.shape[d], run, used, s, places) for k in (0, 1)]
        taken *= comb[1] - comb[0]
    return np.where(at_root(s), taken * copies - kept(s, t), 0)


def _comb_length(
    position: np.ndarray, n: int, run: tuple[int, ...], free: set[int], s: TensorType, places: np.ndarray
) -> np.ndarray:
    """Length of [0, position) inside the tiles of `run` whose digits outside `free` are the device's own: [devices].

    Digit by digit, major first, as one counts the numbers below a given one that have certain digits: what lies in
    chunks before the one that `position` is in counts in full, then that chunk is entered.
    """
    atoms = s.mesh.atoms
    length = np.zeros_like(position)
    rest = position.copy()
    alive = np.ones(position.shape, dtype=bool)  # the chunks entered so far all belong to the comb
    chunk = n
    inside = n // math.prod(atoms[a].size for a in run if a not in free)  # matching length in one chunk
    for a in run:
        chunk //= atoms[a].size
        digit = rest // chunk
        rest = rest - digit * chunk
        if a in free:
            inside //= atoms[a].size
            length += np.where(alive, digit * inside, 0)
        else:
            own = places // atoms[a].stride % atoms[a].size
            length += np.where(alive & (digit > own), inside, 0)
            alive &= digit == own
    return length + np.where(alive, rest, 0)


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
    boxes = t.boxes()
    for d, names in enumerate(s.layout.dims):
        cuts = tiles(s, d)
        first = np.minimum(np.searchsorted(cuts[:, 1], boxes[:, d, 0], side="right"), len(cuts) - 1)
        if np.any((cuts[first, 1] < boxes[:, d, 1]) & (boxes[:, d, 0] < boxes[:, d, 1])):
            return None  # a box reaches beyond one tile
        have, want = have * len(cuts) + s.mesh.index(names), want * len(cuts) + first
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

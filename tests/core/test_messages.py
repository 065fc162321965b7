"""Who sends what to whom, against boxes written out device by device."""

import itertools
import random
from collections import Counter

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import oracle
import strategies as some
from shardplan.core import messages as module
from shardplan.core.holders import choose
from shardplan.core.mesh import Mesh
from shardplan.core.messages import (
    at_root,
    lacking,
    messages,
    most_senders,
    moved_atoms,
    overlap_elements,
    own_places,
    permutation,
    sent_in_general,
    stays,
    tiles,
    traffic,
)
from shardplan.core.tensor import TensorType

Pair = tuple[TensorType, TensorType]
Box = tuple[tuple[int, int], ...]
PLAIN = st.one_of(some.pairs(("even", "uneven")), some.cross_pairs(marked=False))
ROOTED = st.one_of(some.pairs(("rooted",)), some.pairs(("even", "uneven")))


@settings(max_examples=300, deadline=None)
@given(PLAIN)
def test_every_missing_element_arrives_once(pair: Pair) -> None:
    s, t = pair
    senders, receivers, sizes = messages(s, t)
    home = {d: k for k, d in enumerate(s.mesh.devices)}
    count = [np.zeros(t.shape, dtype=int) for _ in range(t.mesh.size)]
    for k, d in enumerate(t.mesh.devices):
        if d in home:
            count[k][oracle.index(oracle.box(s, home[d]))] += 1
    for a, b, n in zip(senders.tolist(), receivers.tolist(), sizes.tolist(), strict=True):
        assert n == oracle.overlap(oracle.box(s, a), oracle.box(t, b)) > 0
        assert s.mesh.devices[a] != t.mesh.devices[b]
        meet = tuple((max(x[0], y[0]), min(x[1], y[1])) for x, y in
                     zip(oracle.box(s, a), oracle.box(t, b), strict=True))  # fmt: skip
        count[b][oracle.index(meet)] += 1
    for k, c in enumerate(count):
        assert np.all(c[oracle.index(oracle.box(t, k))] == 1)
    arrived = Counter(receivers.tolist())
    assert most_senders(s, t) == max(arrived.values(), default=0)


@settings(max_examples=200, deadline=None)
@given(ROOTED)
def test_a_device_lacks_its_box_minus_what_it_holds(pair: Pair) -> None:
    s, t = pair
    least = oracle.lower_bound(s, t)
    assert lacking(s, t).tolist() == [least[d] for d in t.mesh.devices]
    assert overlap_elements(s, t).tolist() == [
        oracle.overlap(oracle.box(s, k), oracle.box(t, k)) if oracle.at_root(s, k) else 0 for k in range(s.mesh.size)
    ]
    assert at_root(t).tolist() == [oracle.at_root(t, k) for k in range(t.mesh.size)]


@given(some.cross_pairs(marked=False))
def test_own_places_go_by_device_id(pair: Pair) -> None:
    s, t = pair
    home = {d: k for k, d in enumerate(s.mesh.devices)}
    assert own_places(s, t).tolist() == [home.get(d, -1) for d in t.mesh.devices]


@given(some.types())
def test_tiles_and_the_index_name_every_box(t: TensorType) -> None:
    index = [t.mesh.index(names) for names in t.layout.dims]
    for d in range(t.ndim):
        cuts = tiles(t, d)
        for k in range(t.mesh.size):
            assert tuple(cuts[index[d][k]]) == oracle.box(t, k)[d]


def test_what_is_held_by_hand() -> None:
    rooted, whole = (TensorType.parse(text, Mesh(a=2)) for text in ("i32[4]{root:a}", "i32[4]"))
    assert at_root(rooted).tolist() == [True, False]
    assert overlap_elements(rooted, whole).tolist() == [4, 0]
    here, there = (TensorType("i32", (4,), (None,), Mesh({"a": 2}, devices=ids)) for ids in ((2, 3), (3, 4)))
    assert own_places(here, there).tolist() == [1, -1]
    # In the other order each sub-axis stands behind another product of sizes, and tiles 1 and 2 change places.
    s, t = (TensorType.parse(text, Mesh(a=2, b=2)) for text in ("i32[4@(a,b)]", "i32[4@(b,a)]"))
    assert moved_atoms(s, t) == {0, 1}


def test_messages_by_hand() -> None:
    # Of two rows of devices each exchanges its halves among itself: nobody is sent what it has.
    s, t = (TensorType.parse(text, Mesh(a=2, b=2)) for text in ("i32[4@b]", "i32[4]"))
    assert sorted(zip(*(x.tolist() for x in messages(s, t)), strict=True)) == [
        (0, 1, 2),
        (1, 0, 2),
        (2, 3, 2),
        (3, 2, 2),
    ]


def test_peers_and_receivers_by_hand() -> None:
    # Nested tiles of 5 elements: 1, 1, 1, 0 and 1, 1, 0, 0. Who has none hears from the five that have one.
    mesh = Mesh(a=2, b=4)
    s, t = (TensorType.parse(text, mesh) for text in ("i32[5@(a,b)]", "i32[5]"))
    assert most_senders(s, t) == 5
    # Where all have one, everybody hears from all but itself.
    s, t = (TensorType.parse(text, mesh) for text in ("i32[8@(a,b)]", "i32[8]"))
    assert most_senders(s, t) == 7
    # Each tile is wanted by all others.
    assert sent_in_general(s, t).receivers == 7
    # Replicas share in sending: of eight that want the other half four ask each of two.
    s, t = (TensorType.parse(text, mesh) for text in ("i32[8@a]", "i32[8]"))
    assert sent_in_general(s, t).receivers == 1 and sent_in_general(s, t).elements.tolist() == [4] * 8


# Halves do not nest in thirds.
UNNESTED = (TensorType.parse("i32[6@a]", "a=2, b=3"), TensorType.parse("i32[6@b]", "a=2, b=3"))


@settings(max_examples=300, deadline=None)
@given(PLAIN, some.rngs())
@example(UNNESTED, random.Random(0))
def test_what_is_served_is_the_sum_of_the_messages(pair: Pair, rng: random.Random) -> None:
    """Also where it is counted without listing them, and in groups that hold what their members want."""
    s, t = pair
    axes = tuple(rng.sample(s.mesh.axes, rng.randrange(1 + len(s.mesh.axes)))) if s.mesh == t.mesh else ()
    if axes and not stays(s, t, axes):
        axes = ()
    senders, _, sizes = messages(s, t, (), axes)
    found = sent_in_general(s, t, (), axes)
    assert found.elements.tolist() == [int(sizes[senders == k].sum()) for k in range(s.mesh.size)]
    assert found.receivers == max(Counter(senders.tolist()).values(), default=1)


@pytest.mark.parametrize(
    ("mesh", "source", "target", "axes"),
    [
        # Of one value of a, boxes 0, 2, 4 of six lie two in the first half and one in the second.
        ("a=2, b=3, c=2", "i32[24@c]", "i32[24@(b,a)]", ("b", "c")),
        ("a=2, b=3, c=2", "i32[24@c]", "i32[24@(b,a)]", ("a", "b", "c")),
        # Of one value of b all want one half.
        ("b=2, c=2", "i32[8@c]", "i32[8@b]", ("c",)),
    ],
)
def test_groups_in_which_some_tiles_are_wanted_more(mesh: str, source: str, target: str, axes: tuple[str, ...]) -> None:
    s, t = (TensorType.parse(text, mesh) for text in (source, target))
    assert stays(s, t, axes)
    senders, _, sizes = messages(s, t, (), axes)
    assert sent_in_general(s, t, (), axes).elements.tolist() == [
        int(sizes[senders == k].sum()) for k in range(s.mesh.size)
    ]


@settings(max_examples=100, deadline=None)
@given(some.pairs(("even",)))
def test_traffic_in_closed_form_is_that_of_the_messages(pair: Pair) -> None:
    s, t = pair
    senders, places, sizes = messages(s, t)
    sent, got, whole_tiles, whole_boxes, _ = traffic(s, t)
    assert (sent, got) == tuple(int(np.bincount(x, sizes, 1).max()) for x in (senders, places))
    assert not whole_tiles or np.array_equal(sizes, s.elements()[senders])
    assert not whole_boxes or np.array_equal(sizes, t.elements()[places])


@pytest.mark.parametrize(
    ("source", "target", "expected"),
    [
        # Three others want each tile of 2, whole, and are sent three tiles: of a box of 8 none is all.
        ("i32[8@a]", "i32[8]", (6, 6, True, False)),
        # Tile and box are one: two of four take the tile of 4 that stands at the other coordinate.
        ("i32[8@b]", "i32[8@c]", (4, 4, True, True)),
        # The box of 2 x 2 is half of the tile of 2 x 4 that it lies in.
        ("i32[4@b, 4]", "i32[4@c, 4@d]", (4, 4, False, True)),
        # Of a tile of 2 x 4 a half goes to the other device, and is half of its box of 4 x 2.
        ("i32[4@b, 4]", "i32[4, 4@b]", (4, 4, False, False)),
        ("i32[8]", "i32[8@a]", (0, 0, True, True)),
    ],
)
def test_traffic_by_hand(source: str, target: str, expected: tuple[int, int, bool, bool]) -> None:
    mesh = Mesh(a=4, b=2, c=2, d=2)
    s, t = (TensorType.parse(text, mesh) for text in (source, target))
    assert traffic(s, t) == (*expected, 0)


NEAR = st.sampled_from([(), (2,), (3,), (2, 4), (2, 6), (4, 8)])


def holders_by_hand(s: TensorType, t: TensorType, near: tuple[int, ...]) -> dict[tuple[int, Box], int]:
    """By receiver and box of the tile, both as ids and written out, the id of who sends: the rule, device by device."""

    def addend(k: int) -> tuple[int, ...]:
        return tuple(oracle.coordinate(s.mesh, a, k) for a in s.layout.partial)

    holders: dict[tuple[Box, tuple[int, ...]], list[int]] = {}
    for k, d in enumerate(s.mesh.devices):
        if oracle.volume(oracle.box(s, k)) and oracle.at_root(s, k):
            holders.setdefault((oracle.box(s, k), addend(k)), []).append(d)
    asking: dict[tuple[Box, tuple[int, ...]], list[int]] = {}
    for k, r in enumerate(t.mesh.devices):
        for (tile, which), held in holders.items():
            if (
                (s.layout.partial and which != addend(k))
                or r in held
                or not oracle.overlap(tile, oracle.box(t, k))
                or not oracle.at_root(t, k)
            ):
                continue
            for size in (*near, 10**6):
                candidates = [d for d in held if d // size == r // size]
                if candidates:
                    ends = [1, *(n for n in near if n < size), size]
                    # The outermost digit of an id is the fastest.
                    candidates.sort(key=lambda d: [d % b // a for a, b in itertools.pairwise(ends)])
                    asking.setdefault((tile, tuple(candidates)), []).append(r)
                    break
    return {
        (r, tile): candidates[n % len(candidates)]
        for (tile, candidates), all_of in asking.items()
        for n, r in enumerate(sorted(all_of))
    }


@settings(max_examples=400, deadline=None)
@given(st.one_of(PLAIN, ROOTED), NEAR)
def test_near_holders_share_in_sending(pair: Pair, near: tuple[int, ...]) -> None:
    s, t = pair
    found = {
        (t.mesh.devices[b], oracle.box(s, a)): s.mesh.devices[a]
        for a, b, _ in zip(*(x.tolist() for x in messages(s, t, near)), strict=True)
    }
    assert found == holders_by_hand(s, t, near)


def test_the_same_candidates_are_shared_from_near_and_from_far() -> None:
    """The only holders, 0 and 1, are in the block of 2, and far from 5."""
    for receivers, senders in (([2, 5], [0, 1]), ([2, 3, 5], [0, 1, 0]), ([4, 5], [0, 1])):
        want = np.zeros(len(receivers), dtype=int)
        assert choose(want, np.array(receivers), np.zeros(2, int), np.array([0, 1]), (4,)).tolist() == senders


@settings(max_examples=200, deadline=None)
@given(some.cross_pairs(marked=False), NEAR, some.rngs())
def test_who_sends_does_not_depend_on_how_a_mesh_is_written(
    pair: Pair, near: tuple[int, ...], rng: random.Random
) -> None:
    """The same boxes on the same devices under other axes, in another order of mesh: the same messages."""
    s, t = pair

    def sent(s: TensorType, t: TensorType) -> set[tuple[int, int, int]]:
        senders, receivers, sizes = messages(s, t, near)
        return set(zip(s.mesh.ids[senders].tolist(), t.mesh.ids[receivers].tolist(), sizes.tolist(), strict=True))

    def turned(x: TensorType) -> TensorType:
        order = rng.sample(range(len(x.mesh.axes)), len(x.mesh.axes))
        ids = x.mesh.ids.reshape(x.mesh.sizes).transpose(order).reshape(-1)
        mesh = Mesh({x.mesh.axes[k]: x.mesh.sizes[k] for k in order}, devices=ids.tolist())
        return x.with_layout(x.layout, mesh)

    assert sent(s, t) == sent(turned(s), turned(t))


@settings(max_examples=200, deadline=None)
@given(some.pairs(("even",)))
def test_messages_stay_inside_groups_of_the_moved_atoms(pair: Pair) -> None:
    s, t = pair
    moved = moved_atoms(s, t)
    fixed = [a for k, a in enumerate(s.mesh.atoms) if k not in moved]
    names = tuple(s.mesh.atoms[k].name for k in sorted(moved))
    senders, receivers, _ = messages(s, t, (), names)
    assert not moved or stays(s, t, names)
    for a in fixed if moved else ():
        assert np.array_equal(senders // a.stride % a.size, receivers // a.stride % a.size)
    for group in s.mesh.group_places(names).tolist():
        held = {oracle.box(s, k) for k in group}
        for k in group:
            got = sum(oracle.overlap(b, oracle.box(t, k)) for b in held)
            assert got == oracle.volume(oracle.box(t, k))


# Only the devices with a = 0 want something, both elements: their tile is the first, and they lack the second.
BOTH_TILES = tuple(TensorType.parse(text, Mesh(a=2, b=2)) for text in ("i32[1, 2@a]", "i32[1@a, 2]"))


@settings(max_examples=100, deadline=None)
@given(some.pairs(("uneven",)), some.rngs())
@example(BOTH_TILES, random.Random(0))
def test_moves_of_too_many_messages_are_not_said_to_stay_where_they_do_not(pair: Pair, rng: random.Random) -> None:
    s, t = pair
    for count in range(len(s.mesh.axes)):
        axes = tuple(rng.sample(s.mesh.axes, count))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(module, "MOST_MESSAGES", 0)
            claimed = stays(s, t, axes)
        assert not claimed or stays(s, t, axes)


@settings(max_examples=300, deadline=None)
@given(some.pairs(("even", "even", "uneven", "partial", "rooted")))
def test_a_permutation_is_one_to_one_and_keeps_the_most_devices_still(pair: Pair) -> None:
    s, t = pair
    pairs = permutation(s, t)
    if pairs is None:
        return
    senders, receivers = (x.tolist() for x in pairs)
    assert len(set(senders)) == len(senders) and len(set(receivers)) == len(receivers)
    assert all(a != b for a, b in zip(senders, receivers, strict=True)) or s.layout.root or t.layout.root
    source = dict(zip(receivers, senders, strict=True))

    def addend(x: TensorType, k: int) -> tuple[int, ...]:
        return tuple(oracle.coordinate(x.mesh, a, k) for a in x.layout.partial)

    radix = [[x.mesh.span(a).size for a in x.layout.partial] for x in (s, t)]

    def rank(x: TensorType, k: int, sizes: list[int]) -> int:
        out = 0
        for c, n in zip(addend(x, k), sizes, strict=True):
            out = out * n + c
        return out

    for k in range(t.mesh.size):
        if not oracle.at_root(t, k) or not oracle.volume(oracle.box(t, k)):
            continue
        a = source.get(k, k)
        assert oracle.overlap(oracle.box(s, a), oracle.box(t, k)) == oracle.volume(oracle.box(t, k))
        assert rank(s, a, radix[0]) == rank(t, k, radix[1]) and oracle.at_root(s, a)


def test_a_permutation_with_replicas_moves_only_who_must() -> None:
    """Pitfall 5: without the bijection that keeps devices still the volume doubles."""
    mesh = Mesh(a=2, b=2)
    for x, y in itertools.permutations(("a", "b"), 2):
        s, t = TensorType("f32", (4,), (x,), mesh), TensorType("f32", (4,), (y,), mesh)
        found = permutation(s, t)
        assert found is not None and len(found[0]) == 2

"""Who sends what to whom, against boxes written out device by device."""

import itertools
from collections import Counter

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

import oracle
import strategies as some
from shardplan.core.messages import (
    at_root,
    kept,
    lacking,
    messages,
    most_senders,
    moved_atoms,
    own_places,
    permutation,
    tiles,
)
from shardplan.core.tensor import TensorType

Pair = tuple[TensorType, TensorType]
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
    assert kept(s, t).tolist() == [
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


@settings(max_examples=200, deadline=None)
@given(some.pairs(("even",)))
def test_load_is_spread_over_replicas(pair: Pair) -> None:
    """The holder rule: the receiver's own coordinates on the axes that the source does not use."""
    s, t = pair
    used = {a for d in s.layout.dims for a in s.mesh.expand(d)}
    free = [a for k, a in enumerate(s.mesh.atoms) if k not in used]
    for a, b, _ in zip(*(x.tolist() for x in messages(s, t)), strict=True):
        assert all(a // x.stride % x.size == b // x.stride % x.size for x in free)


@settings(max_examples=200, deadline=None)
@given(some.pairs(("even",)))
def test_messages_stay_inside_groups_of_the_moved_atoms(pair: Pair) -> None:
    s, t = pair
    moved = moved_atoms(s, t)
    fixed = [a for k, a in enumerate(s.mesh.atoms) if k not in moved]
    senders, receivers, _ = messages(s, t)
    for a in fixed:
        assert np.array_equal(senders // a.stride % a.size, receivers // a.stride % a.size)
    names = tuple(s.mesh.atoms[k].name for k in sorted(moved))
    for group in s.mesh.group_places(names).tolist():
        held = {oracle.box(s, k) for k in group}
        for k in group:
            got = sum(oracle.overlap(b, oracle.box(t, k)) for b in held)
            assert got == oracle.volume(oracle.box(t, k))


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
    from shardplan.core.mesh import Mesh

    mesh = Mesh(a=2, b=2)
    for x, y in itertools.permutations(("a", "b"), 2):
        s, t = TensorType("f32", (4,), (x,), mesh), TensorType("f32", (4,), (y,), mesh)
        found = permutation(s, t)
        assert found is not None and len(found[0]) == 2

"""The lowering of every movement op, interpreted, is what the op means; its bytes are those that the op counts."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st
from tests import strategies

import shardplan as sp
from shardplan.core.dtypes import numpy_dtype
from shardplan.core.group_rounds import FILLED
from shardplan.core.interpret import interpret
from shardplan.core.lowering import SEGMENT, Boxes, Copy, Group, Put, Round, Take
from shardplan.core.messages import at_root
from shardplan.core.ops import AllGather, AllReduce, AllToAll, Broadcast, Reduce, ReduceScatter, Send, Together
from shardplan.core.ops.collective import Collective
from shardplan.core.ops.movement import with_dims, without_suffix
from shardplan.core.part import Part, run_part
from shardplan.core.pattern import Messages
from shardplan.core.program import Program
from shardplan.core.reference import distribute
from shardplan.core.step import Step
from shardplan.core.tensor import TensorType


def shards_of(t: TensorType, first: int = 0) -> list[np.ndarray]:
    array = first + np.arange(int(np.prod(t.shape)), dtype=np.int64)
    return distribute(array.reshape(t.shape).astype(numpy_dtype(t.dtype)), t)


def run(op: Collective, types: Sequence[TensorType], algorithm: str) -> tuple[list[list[np.ndarray]], np.ndarray]:
    """What the lowering leaves on the devices of the results, and the bytes that each of these receives."""
    results = op.infer(*types)
    ids = np.array(sorted({d for t in (*types, *results) for d in t.mesh.devices}))
    rows = {d: k for k, d in enumerate(ids.tolist())}
    lowering = op.lowering(types, ids, algorithm)
    arrays: dict[str, list[np.ndarray]] = {}
    for k, (t, u) in enumerate(zip(types, results, strict=True)):
        arrays[f"x{k}"] = [np.zeros(0, numpy_dtype(t.dtype)) for _ in ids]
        arrays[f"y{k}"] = [np.zeros(0, numpy_dtype(u.dtype)) for _ in ids]
        for d, x in zip(t.mesh.devices, shards_of(t, k), strict=True):
            arrays[f"x{k}"][rows[d]] = x
        for place, d in enumerate(u.mesh.devices):
            arrays[f"y{k}"][rows[d]] = np.full(u.local_shape(place), 77).astype(numpy_dtype(u.dtype))
    interpret(lowering, arrays, op.name)
    received = np.zeros(len(ids), dtype=np.int64)
    for one in lowering.rounds():
        for take in one.takes:
            received += take.target.elements() * types[int(take.target.buffer[-1])].itemsize
    outs = [[arrays[f"y{k}"][rows[d]] for d in u.mesh.devices] for k, u in enumerate(results)]
    return outs, received[[rows[d] for d in results[0].mesh.devices]]


def check(op: Collective, types: Sequence[TensorType]) -> None:
    results = op.infer(*types)
    expected = op.reference([shards_of(t, k) for k, t in enumerate(types)], types)
    for algorithm in op.algorithms:
        outs, received = run(op, types, algorithm)
        for u, found, want in zip(results, outs, expected, strict=True):
            held = at_root(u)
            for place in np.flatnonzero(held):
                assert np.array_equal(found[place], want[place]), (op, algorithm, [str(t) for t in types], place)
        # In slots of one size padding travels, too.
        counted = (replace(op, algorithm=algorithm) if algorithm == "padded" else op).received_bytes(*types)
        assert received.sum() == counted.sum(), (op, algorithm, [str(t) for t in types])
        if algorithm in (op.algorithms[0], "padded"):  # in a ring the parts of uneven shards meet others
            assert received.tolist() == counted.tolist(), (op, [str(t) for t in types])


@given(strategies.applied(), st.integers(1, 3))
@example(
    (AllToAll(0, 1, ("x",)), TensorType.parse("i32[7@x, 5]", sp.Mesh(x=3))), 1
)  # the last one's slots are all short
def test_a_lowering_does_what_the_op_means(applied: tuple[Collective, TensorType], chunks: int) -> None:
    op, t = applied
    check(op.in_chunks(chunks), [t])


@dataclass(frozen=True, slots=True)
class GatherToFirst(Collective):
    """An op from outside: the first member of every group gets the tiles of `dim`."""

    name: ClassVar[str] = "gather_to_first"
    dim: int
    axes: tuple[str, ...]

    def result(self, t: TensorType) -> TensorType:
        left = without_suffix(self.name, t, self.dim, self.axes)
        layout = with_dims(t.layout, t.mesh, {self.dim: left})
        return t.with_layout(replace(layout, root=(*layout.root, *self.axes)))

    def lower(self, t: TensorType, u: TensorType, devices: np.ndarray, algorithm: str) -> Iterator[Round]:
        group, (before, after) = Group(t, self.axes, devices), Boxes.ends(t, u, devices)
        own, first = before.whole_region("x"), group.me == 0
        actions: list[Put | Take | Copy] = [Copy(own.restrict(first), after.part("y", before))]
        actions.append(group.put(0, own.restrict(~first)))
        actions += [group.take(k, after.part("y", Boxes(t, group.place(k)))) for k in range(1, group.size)]
        yield Round.of(actions)


def test_an_op_that_says_its_type_and_its_lowering_has_every_facet() -> None:
    mesh = sp.Mesh(x=2, y=3)
    t = TensorType("i32", (5, 12), ("x", "y"), mesh)
    op = GatherToFirst(1, ("y",))
    (u,) = op.infer(t)
    assert str(u) == "i32[5@x, 12]{root:y}"
    check(op, [t])
    (out,) = op.reference([shards_of(t)], [t])
    assert np.array_equal(sp.collect(out, u), np.arange(60, dtype=np.int32).reshape(5, 12))
    assert op.received_bytes(t).tolist() == [96, 0, 0, 64, 0, 0]  # 3 or 2 rows of 8 numbers from the two others
    assert (op.rounds(t), op.members(t)) == (2, ())
    assert op.staging(t) == 3 * 8 * 4  # a shard is sent whole, from where it lies
    pattern = op.pattern(t)
    assert isinstance(pattern, Messages)
    found = zip(pattern.sender.tolist(), pattern.receiver.tolist(), pattern.nbytes.tolist(), strict=True)
    assert sorted(found) == [(1, 0, 48.0), (2, 0, 48.0), (4, 3, 32.0), (5, 3, 32.0)]


@pytest.mark.parametrize("missing", ["result", "lower"])
def test_an_op_without_a_type_or_a_lowering_is_refused_when_it_is_made(missing: str) -> None:
    cls = type("Half", (GatherToFirst,), {missing: getattr(Collective, missing), "__slots__": ()})
    with pytest.raises(TypeError, match=missing):
        cls(1, ("y",))


@dataclass(frozen=True, slots=True)
class Careless(GatherToFirst):
    """As above, but that the first member takes one tile too few."""

    def lower(self, t: TensorType, u: TensorType, devices: np.ndarray, algorithm: str) -> Iterator[Round]:
        for one in GatherToFirst.lower(self, t, u, devices, algorithm):
            yield one._replace(takes=one.takes[:-1])


def test_a_lowering_that_does_not_match_is_refused() -> None:
    t = TensorType("i32", (6,), ("x",), sp.Mesh(x=3))
    with pytest.raises(sp.TypingError, match=r"^gather_to_first: device 2 puts what device 0 does not take$"):
        Careless(0, ("x",)).reference([shards_of(t)], [t])


@given(strategies.cross_pairs(), st.integers(1, 3))
def test_a_send_between_meshes_does_what_it_means(pair: tuple[TensorType, TensorType], chunks: int) -> None:
    s, t = pair
    op = Send(t.layout, t.mesh, chunks=chunks)
    assume(not s.layout.partial and not t.layout.partial and not t.layout.root)
    check(op, [s])


@given(strategies.applied(), st.sampled_from(["i32", "u8"]))
def test_operands_go_side_by_side(applied: tuple[Collective, TensorType], dtype: str) -> None:
    op, t = applied
    assume(t.layout.reduction in (None, "sum", "max"))
    check(op, [t, TensorType(dtype, t.shape, t.layout, t.mesh)])


def test_what_an_op_from_outside_moves_is_run_in_parts() -> None:
    t = TensorType("i32", (5, 12), ("x", "y"), sp.Mesh(x=2, y=3))
    program = Program({"0": t}, [Step(GatherToFirst(1, ("y",)), ("0",), ("1",))], ("1",))
    positions = np.array([0, 4]), np.array([1, 5, 6, 11])
    whole = np.arange(60, dtype=np.int32).reshape(5, 12)
    part = whole[np.ix_(*positions)]
    boxes = Part(t, positions).boxes()
    shards = [part[tuple(slice(a, b) for a, b in box)] for box in boxes]
    out = run_part(program, "0", shards, positions)["1"]
    assert np.array_equal(out[0], part[:1])
    assert np.array_equal(out[3], part[1:])


@given(st.integers(1, 2**21), st.sampled_from(("i8", "i32", "c128")), st.integers(1, 9), st.integers(2, 5))
def test_segments_are_as_few_as_they_may_be(n: int, dtype: str, chunks: int, members: int) -> None:
    """They cover all elements; there are no more than the chunks ask for, or than segments of one size fill a chain."""
    t = TensorType(dtype, (n,), (), sp.Mesh(x=members), root=("x",))
    lowering = Broadcast(("x",), chunks).lowering([t], np.array([0]))
    found = [put.source.box[0, 0].tolist() for one in lowering.rounds() for put in one.puts]
    assert [a for a, _ in found] == [0, *(b for _, b in found[:-1])]
    assert found[-1][1] == n
    assert max(b - a for a, b in found) - min(b - a for a, b in found) <= 1
    assert len(found) == min(n, max(chunks, min(-(-n * t.itemsize // SEGMENT), FILLED * members)))


@pytest.mark.parametrize("members", range(2, 10))
@pytest.mark.parametrize("chunks", [1, 3])
def test_groups_of_every_size(members: int, chunks: int) -> None:
    for text, op in (
        ("i32[13, 3]{+x}", AllReduce(("x",), chunks=chunks)),
        ("i32[13, 3]{max:x}", AllReduce(("x",), "max", chunks)),
        ("i32[13, 3]{+x}", Reduce(("x",), chunks=chunks)),
        ("i32[13, 3]{root:x}", Broadcast(("x",), chunks)),
        ("i32[13, 3]{+x}", ReduceScatter(0, ("x",), chunks=chunks)),
        ("i32[13@x, 3]", AllGather(0, ("x",), chunks)),
        ("i32[13@x, 3]", AllToAll(0, 1, ("x",), chunks=chunks)),
    ):
        check(op, [TensorType.parse(text, sp.Mesh(x=members))])


def test_the_moves_of_a_together_are_posted_at_once() -> None:
    """Both halves of a swap between two meshes, and an all-gather on one of them, begin in one round."""
    here, there = sp.Mesh(x=3), sp.Mesh({"x": 3}, devices=(2, 3, 4))
    a, b = TensorType("i32", (6, 2), ("x",), here), TensorType("u8", (6, 2), (None, "x"), there)
    steps = [
        Step(Send(a.layout, there), ("a",), ("c",)),
        Step(Send(b.layout, here), ("b",), ("d",)),
        Step(AllGather(0, ("x",)), ("a",), ("e",)),
    ]
    op = Together(Program({"b": b, "a": a}, steps, ("e", "d", "c")))
    ids = np.arange(5)
    lowering = op.lowering([b, a], ids)
    first = next(lowering.rounds())
    senders = {(d, int(put.peer[d]), put.source.buffer) for put in first.puts for d in np.flatnonzero(put.peer >= 0)}
    assert {(0, 2, "x1"), (3, 1, "x0"), (0, 1, "x1")} <= senders
    results = op.infer(b, a)
    given = [shards_of(b, 5), shards_of(a)]
    arrays = {
        f"{letter}{k}": [np.zeros(0)] * 5 for letter, side in (("x", (b, a)), ("y", results)) for k in range(len(side))
    }
    for k, t in enumerate((b, a)):
        for d, x in zip(t.mesh.devices, given[k], strict=True):
            arrays[f"x{k}"][d] = x
    for k, u in enumerate(results):
        for place, d in enumerate(u.mesh.devices):
            arrays[f"y{k}"][d] = np.zeros(u.local_shape(place), numpy_dtype(u.dtype))
    interpret(lowering, arrays, op.name)
    for k, (u, want) in enumerate(zip(results, op.reference(given, [b, a]), strict=True)):
        assert all(np.array_equal(arrays[f"y{k}"][d], x) for d, x in zip(u.mesh.devices, want, strict=True))


def test_an_unknown_algorithm_is_refused() -> None:
    t = TensorType("i32", (6,), ("x",), sp.Mesh(x=3))
    with pytest.raises(sp.TypingError, match=r"^all_gather: the algorithm 'rnig' is unknown; legal are direct, ring, "):
        AllGather(0, ("x",)).lowering([t], np.arange(3), "rnig")
    assert len(list(AllGather(0, ("x",)).lowering([t], np.arange(3), "chain").rounds())) == 1  # its first: direct


def test_an_op_without_a_tree_goes_round_a_ring() -> None:
    """As libraries do: everybody's parts to everybody at once would fill the links of a node with small messages."""
    t = sp.TensorType.parse("i32[8@a, 3]", "a=8")
    devices = np.arange(8)
    for op in (AllGather(0, ("a",)), AllToAll(0, 1, ("a",))):
        tree, ring = (list(op.lower_operand(t, op.result(t), devices, name).rounds()) for name in ("tree", "ring"))
        assert len(tree) == len(ring) > 2
    assert len(list(AllGather(0, ("a",)).lower_operand(t, AllGather(0, ("a",)).result(t), devices).rounds())) == 1

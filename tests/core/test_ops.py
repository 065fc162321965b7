"""Each op alone: a random legal op on a random type, against an independent numpy oracle (T1), and its bytes."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import oracle
import strategies as some
from shardplan.core.layout import Layout
from shardplan.core.mesh import Mesh
from shardplan.core.ops import (
    AllGather,
    AllReduce,
    AllToAll,
    Broadcast,
    Exchange,
    Op,
    Permute,
    Reduce,
    ReduceScatter,
    Send,
    Slice,
    ToPartial,
)
from shardplan.core.ops.collective import lowering_counts, moving
from shardplan.core.pattern import Groups, Local, Messages
from shardplan.core.program import Program
from shardplan.core.reference import distribute
from shardplan.core.step import Step
from shardplan.core.tensor import TensorType
from shardplan.core.text import op_text
from shardplan.errors import ShardplanError, TypingError

MESH = Mesh(a=2, b=3, c=2)


def T(text: str, mesh: Mesh = MESH) -> TensorType:
    return TensorType.parse(text, mesh)


def after(op: Op, t: TensorType, seed: int = 0) -> str | None:
    """Why the op does not keep the array, or None: what goes in and comes out is judged by the oracle alone."""
    rng = np.random.default_rng(seed)
    array = oracle.content(t)
    (u,) = op.infer(t)
    (shards,) = op.reference([oracle.spread(array, t, rng)], [t])
    return oracle.wrong(shards, u, array)


def expected(op: Op, t: TensorType, u: TensorType) -> list[int]:
    """Bytes that every device receives, by the table of section 2."""
    size = [oracle.volume(oracle.box(t, k)) * t.itemsize for k in range(t.mesh.size)]
    lacks = [
        (oracle.volume(oracle.box(u, k)) - oracle.overlap(oracle.box(t, k), oracle.box(u, k))) * t.itemsize
        for k in range(t.mesh.size)
    ]
    names = oracle.digits(t.mesh)

    def member(k: int, axes: tuple[str, ...]) -> int:
        out = 0
        for a in axes:
            out = out * names[a][0] + k // names[a][1] % names[a][0]
        return out

    def live(x: TensorType, k: int) -> bool:
        return oracle.at_root(x, k)

    match op:
        case Slice() | ToPartial():
            return [0] * t.mesh.size
        case AllGather() | AllToAll() | Exchange():
            return [n if live(t, k) else 0 for k, n in enumerate(lacks)]
        case ReduceScatter(_, axes):
            q = math.prod(names[a][0] for a in axes)
            return [
                oracle.volume(oracle.box(u, k)) * t.itemsize * (q - 1) if live(t, k) else 0 for k in range(t.mesh.size)
            ]
        case AllReduce(axes):
            q = math.prod(names[a][0] for a in axes)
            out: list[int] = []
            for k, n in enumerate(size):
                elements = n // t.itemsize
                chunk = -(-elements // q)
                i = member(k, axes)
                part = (min(elements, (i + 1) * chunk) - min(elements, i * chunk)) * t.itemsize
                out.append((q - 1) * part + n - part if live(t, k) else 0)
            return out
        case Reduce(axes):
            q = math.prod(names[a][0] for a in axes)
            return [n if live(t, k) and member(k, axes) < q - 1 else 0 for k, n in enumerate(size)]
        case Broadcast(axes):
            return [n if live(u, k) and member(k, axes) > 0 else 0 for k, n in enumerate(size)]
        case _:
            raise AssertionError(op)


@settings(max_examples=400, deadline=None)
@given(some.applied(), st.integers(0, 1000))
def test_an_op_keeps_the_array(case: tuple[Op, TensorType], seed: int) -> None:
    op, t = case
    assert after(op, t, seed) is None


@settings(max_examples=300, deadline=None)
@given(some.applied())
def test_an_op_receives_what_the_table_says(case: tuple[Op, TensorType]) -> None:
    op, t = case
    (u,) = op.infer(t)
    got = op.received_bytes(t)
    assert got.shape == (t.mesh.size,)
    if isinstance(op, Permute):
        whole = [oracle.volume(oracle.box(u, k)) * t.itemsize for k in range(t.mesh.size)]
        assert all(g in (0, w) for g, w in zip(got.tolist(), whole, strict=True))
        # the bijection keeps still every device that can hold its own tile: no more moves than homes are missing
        home = [
            oracle.overlap(oracle.box(t, k), oracle.box(u, k)) == oracle.volume(oracle.box(u, k))
            for k in range(t.mesh.size)
        ]
        if t.layout.partial == u.layout.partial and t.layout.root == u.layout.root and not t.layout.root:
            assert all(g == 0 for g, h in zip(got.tolist(), home, strict=True) if h)
        return
    assert got.tolist() == expected(op, t, u)


@settings(max_examples=300, deadline=None)
@given(some.applied())
def test_what_is_sent_is_what_is_received(case: tuple[Op, TensorType]) -> None:
    """In all, and on every device what the messages of the op's lowering say."""
    op, t = case
    (u,) = op.infer(t)
    ids, sent = op.sent_bytes(t)
    assert ids.tolist() == list(t.mesh.devices) and sent.sum() == op.received_bytes(t).sum()
    move = moving(op)
    assert move is not None
    assert sent.tolist() == (lowering_counts(move, t, u).sent_by(t) * t.itemsize).tolist()


@given(some.applied())
def test_the_pattern_of_an_op_carries_what_it_receives(case: tuple[Op, TensorType]) -> None:
    op, t = case
    got = dict(zip(t.mesh.devices, op.received_bytes(t).tolist(), strict=True))
    match op.pattern(t):
        case Local():
            assert not any(got.values())
        case Messages(sender=sender, receiver=receiver, nbytes=nbytes):
            assert not np.any(sender == receiver)
            arrived = dict.fromkeys(got, 0.0)
            for r, n in zip(receiver.tolist(), nbytes.tolist(), strict=True):
                arrived[r] += n
            assert arrived == got
            heard = np.unique(np.stack([sender, receiver]), axis=1)[1]
            assert op.rounds(t) == np.bincount(heard).max()
        case Groups(_, members, nbytes):
            assert len(members) == len(nbytes)
            assert len(set(members.reshape(-1).tolist())) == members.size
            assert {d for d, n in got.items() if n} <= set(members.reshape(-1).tolist())


@settings(max_examples=200, deadline=None)
@given(some.applied())
def test_an_op_survives_its_text(case: tuple[Op, TensorType]) -> None:
    op, t = case
    program = Program({"0": t}, [Step(op, ("0",), ("1",))], ("1",))
    again = Program.parse(str(program))
    assert again == program and str(again) == str(program)
    assert op_text(op, ("0",)) in str(program)


@settings(max_examples=200, deadline=None)
@given(some.cross_pairs(marked=False))
def test_send_delivers_and_receives_the_least(case: tuple[TensorType, TensorType]) -> None:
    s, t = case
    op = Send(t.layout, t.mesh)
    array = oracle.content(s)
    (shards,) = op.reference([oracle.spread(array, s, np.random.default_rng(0))], [s])
    assert oracle.wrong(shards, t, array) is None
    least = oracle.lower_bound(s, t)
    assert op.received_bytes(s).tolist() == [least[d] for d in t.mesh.devices]
    pattern = op.pattern(s)
    if isinstance(pattern, Messages):
        assert set(pattern.sender.tolist()) <= set(s.mesh.devices)
        assert not np.any(pattern.sender == pattern.receiver)


@settings(max_examples=150, deadline=None)
@given(some.applied(("even", "uneven")), st.integers(2, 5))
def test_chunks_change_neither_type_nor_bytes(case: tuple[Op, TensorType], chunks: int) -> None:
    op, t = case
    cut = op.in_chunks(chunks)
    assert cut.chunks == (chunks if op.cuttable else 1)
    assert cut.infer(t) == op.infer(t)
    assert cut.received_bytes(t).tolist() == op.received_bytes(t).tolist()
    finer = op.in_chunks(2 * chunks)
    assert finer.staging(t) <= cut.staging(t), "staging falls with the number of chunks, once there are several"


@settings(max_examples=200, deadline=None)
@given(some.pairs(("even",)))
def test_no_smaller_group_covers_an_exchange(pair: tuple[TensorType, TensorType]) -> None:
    """`moved_atoms` is the smallest group: legality over every single axis left out is judged by boxes."""
    s, t = pair
    boxes = [[oracle.box(x, k) for k in range(s.mesh.size)] for x in (s, t)]
    for axis in s.mesh.axes:
        rest = tuple(a for a in s.mesh.axes if a != axis)
        if not rest:
            continue
        covered = True
        for group in s.mesh.group_places(rest).tolist():
            held = {boxes[0][k] for k in group}
            for k in group:
                covered &= sum(oracle.overlap(b, boxes[1][k]) for b in held) == oracle.volume(boxes[1][k])
        try:
            Exchange(t.layout, rest).infer(s)
            legal = True
        except TypingError:
            legal = False
        assert legal == covered, f"groups over {rest}"


@settings(max_examples=200, deadline=None)
@given(some.pairs(("even",)))
def test_a_permute_is_refused_only_where_there_is_none(pair: tuple[TensorType, TensorType]) -> None:
    s, t = pair
    boxes = [[oracle.box(x, k) for k in range(s.mesh.size)] for x in (s, t)]
    have: dict[oracle.Box, int] = {}
    want: dict[oracle.Box, int] = {}
    inside = True
    for b in boxes[0]:
        have[b] = have.get(b, 0) + 1
    for b in boxes[1]:
        home = [h for h in have if oracle.overlap(h, b) == oracle.volume(b)]
        inside &= len(home) == 1
        for h in home:
            want[h] = want.get(h, 0) + 1
    possible = inside and all(have[h] >= n for h, n in want.items())
    try:
        Permute(t.layout).infer(s)
    except TypingError:
        assert not possible
    else:
        assert possible


REFUSED: list[tuple[Op, str, str]] = [
    (Slice(2, ("a",)), "f32[4, 6]", "slice: f32[4, 6] has no dim 2; legal are 0 to 1"),
    (Slice(0, ("a",)), "f32[4@a, 6]", "slice: the axes a are not all unused in f32[4@a, 6]"),
    (AllGather(0, ("a",)), "f32[12@(a,c), 6]",
     "all_gather: a is not a suffix of dim 0 of f32[12@(a,c), 6]; legal are minor runs of (a,c)"),
    (AllGather(1, ("a",)), "f32[12@(a,c), 6]",
     "all_gather: a is not a suffix of dim 1 of f32[12@(a,c), 6]; legal are minor runs of no axes"),
    (AllGather((0, 1), ("a",)), "f32[12@a, 6]",
     "all_gather: 2 dims for 1 axes; give one dim, or one dim per axis"),
    (AllGather(0, ("a",), chunks=0), "f32[12@a, 6]", "all_gather: chunks=0; an op runs in at least 1 part"),
    (AllToAll(0, 0, ("a",)), "f32[12@a, 6]", "all_to_all: source and destination are both dim 0; they must differ"),
    (AllToAll(0, 1, ("a", "c"), ("c", "b")), "f32[12@(a,c), 12]",
     "all_to_all: order (c,b) does not permute (a,c)"),
    (Permute(Layout((("b",), ()))), "f32[12@a, 6]",
     "permute: the tiles of f32[12@b, 6] are not one to one inside the tiles of f32[12@a, 6]"),
    (Exchange(Layout(((), ()), ("a",), "sum")), "f32[12, 6]",
     "exchange: f32[12, 6] and f32[12, 6]{+a} differ in their partial or root axes; those must be equal"),
    (Exchange(Layout(((), ()), root=("a",))), "f32[12, 6]",
     "exchange: f32[12, 6] and f32[12, 6]{root:a} differ in their partial or root axes; those must be equal"),
    (Exchange(Layout(((), ("a",))), ("b",)), "f32[12@a, 6]",
     "exchange: groups over b do not hold all of f32[12, 6@a] under f32[12@a, 6]"),
    (Send(Layout(((), ())), Mesh(z=2)), "f32[12, 6]{+a}", "send: f32[12, 6]{+a} is partial; reduce it first"),
    (AllReduce(("a",)), "f32[12, 6]", "all_reduce(sum) over a: f32[12, 6] is not partial"),
    (AllReduce(("a",)), "f32[12, 6]{max:a}", "all_reduce(sum) over a: f32[12, 6]{max:a} is partial over a with max"),
    (ReduceScatter(0, ("b",)), "f32[12, 6]{+a}",
     "reduce_scatter(sum) over b: f32[12, 6]{+a} is partial over a with sum"),
    (Broadcast(("a",)), "f32[12, 6]{root:b}",
     "broadcast over a: each must be root or unused, one root, in f32[12, 6]{root:b}"),
    (Broadcast(("a", "b")), "f32[12@b, 6]{root:a}",
     "broadcast over (a,b): each must be root or unused, one root, in f32[12@b, 6]{root:a}"),
    (ToPartial(("a",), "mean"), "f32[12, 6]", "to_partial: unknown reduction 'mean'; legal are sum, max, min, product, band, bor, bxor, root"),  # noqa: E501
    (ToPartial(("a",), "root"), "f32[12@a, 6]", "to_partial(root) over a: they must be unused in f32[12@a, 6]"),
    (ToPartial(("a",), "sum"), "f32[12, 6]{max:b}",
     "to_partial(sum): f32[12, 6]{max:b} is already partial with max"),
]  # fmt: skip


SPLIT = Mesh(a=8).split("a", node=2, gpu=4)


@pytest.mark.parametrize(
    ("op", "text"),
    [
        (Slice(0, ("a.gpu",)), "i32[2@a.node, 4]"), (AllToAll(1, 0, ("a.gpu",)), "i32[2@a.node, 4@a.gpu]"),
        (AllGather(0, ("a.gpu",)), "i32[2@a, 4]"), (AllToAll(0, 1, ("a.gpu",)), "i32[2@a, 4]"),
        (ReduceScatter(0, ("a.gpu",)), "i32[2@a.node, 4]{+a.gpu}"), (ToPartial(("a.gpu",)), "i32[2@a, 4]"),
    ],
)  # fmt: skip
def test_a_sub_axis_may_not_complete_an_uneven_axis(op: Op, text: str) -> None:
    """2 elements over 8 in one ceiling are not 2 elements over 2 and then over 4."""
    with pytest.raises(TypingError) as error:
        op.infer(T(text, SPLIT))
    assert str(error.value).endswith("no parts of those over other sub-axes; legal there are whole axes")


@pytest.mark.parametrize(("op", "text", "message"), REFUSED, ids=lambda x: str(x)[:40])
def test_what_an_op_refuses(op: Op, text: str, message: str) -> None:
    with pytest.raises(ShardplanError) as error:
        op.infer(T(text))
    assert str(error.value) == message


def test_ops_need_operands_of_one_mesh() -> None:
    with pytest.raises(TypingError, match="all_gather needs at least one operand"):
        AllGather(0, ("a",)).infer()
    with pytest.raises(TypingError, match="all_gather packs operands of one mesh; got "):
        AllGather(0, ("a",)).infer(T("f32[12@a]"), T("f32[12@a]", Mesh(a=2)))


def test_several_operands_are_one_transfer() -> None:
    x, y = T("f32[12@a, 6]"), T("f32[24@a, 4]")
    op = AllGather(0, ("a",))
    assert op.received_bytes(x, y).tolist() == (op.received_bytes(x) + op.received_bytes(y)).tolist()
    assert op.rounds(x, y) == op.rounds(x)
    pattern = op.pattern(x, y)
    assert isinstance(pattern, Groups) and pattern.nbytes.tolist() == [6 * 6 * 4 + 12 * 4 * 4] * 6
    # of several operands none is contiguous in the packed buffer, so both sides are staged
    assert op.staging(x, y) == (36 + 72 + 48 + 96) * 4


PRICED: list[tuple[Op, str, int, int]] = [
    (Slice(0, ("a",)), "f32[12, 6]", 0, 0),
    (AllGather(0, ("a", "c")), "f32[12@(a,c), 6]", 3 * 3 * 6 * 4, 2),
    (AllToAll(0, 1, ("b",)), "f32[12@b, 6]", 2 * 4 * 2 * 4, 2),
    (Permute(Layout((("c",), ()))), "f32[12@a, 6]", 36 * 4, 1),
    (Exchange(Layout(((), ("b",)))), "f32[12@b, 6]", 2 * 4 * 2 * 4, 2),
    (ReduceScatter(0, ("b",)), "f32[12, 6]{+b}", 2 * 24 * 4, 2),
    (AllReduce(("b",)), "f32[12, 6]{+b}", 2 * 2 * 24 * 4, 2),
    (Reduce(("b",)), "f32[12, 6]{+b}", 72 * 4, 2),
    (Broadcast(("b",)), "f32[12, 6]{root:b}", 72 * 4, 2),
]


@pytest.mark.parametrize(("op", "text", "nbytes", "rounds"), PRICED, ids=lambda x: str(x)[:30])
def test_bytes_and_rounds_by_hand(op: Op, text: str, nbytes: int, rounds: int) -> None:
    t = T(text)
    assert int(op.received_bytes(t).max()) == nbytes
    assert op.rounds(t) == rounds


STAGED: list[tuple[Op, str, int]] = [
    # A tile of 1 x 12 is cut into runs of 3, which are sent as they stand, and arrive as rows.
    (AllToAll(0, 1, ("a", "c")), "f32[4@(a,c), 12]", 0),
    # In the other order the runs do not stand in the order of the devices: all 12 elements are packed.
    (AllToAll(0, 1, ("a", "c"), ("c", "a")), "f32[4@(a,c), 12]", 12 * 4),
    # Of a tile of 6 x 6 the rows that are sent are one run, the columns are not: 6 x 3 elements are packed.
    (Permute(Layout((("c", "a"), ()))), "f32[12@a, 6]", 0),
    (Permute(Layout((("c",), ("a",)))), "f32[12@a, 6]", 6 * 3 * 4),
]


@pytest.mark.parametrize(("op", "text", "nbytes"), STAGED, ids=lambda x: str(x)[:60])
def test_what_is_not_contiguous_is_staged(op: Op, text: str, nbytes: int) -> None:
    assert op.staging(T(text)) == nbytes


def test_an_all_reduce_counts_the_part_that_each_member_owns() -> None:
    # Of 7 elements three members own 3, 3 and 1: two addends of each of these, and the rest reduced.
    got = AllReduce(("b",)).received_bytes(T("f32[7]{+b}", Mesh(b=3)))
    assert got.tolist() == [(2 * 3 + 4) * 4, (2 * 3 + 4) * 4, (2 * 1 + 6) * 4]


def test_partial_and_root_axes_are_renamed_by_permute_alone() -> None:
    t, u = T("f32[12]{+a}"), T("f32[12]{+c}")
    assert Permute(u.layout).infer(t) == (u,)
    assert after(Permute(u.layout), t) is None
    with pytest.raises(TypingError):
        Exchange(u.layout).infer(t)


@pytest.mark.parametrize(("source", "target", "named"), [
    ("f32[8@(a,b),6]", "f32[8@a,6]", "all_gather"), ("f32[8,6@(a,b)]", "f32[8,6]", "all_gather"),
    ("f32[8@(a,b),6]", "f32[8@b,6]", None), ("f32[8@a,6@b]", "f32[8,6]", None), ("f32[8@a,6]", "f32[8,6@a]", None),
])  # fmt: skip
def test_an_exchange_that_gathers_a_dim_has_the_name_of_what_does(source: str, target: str, named: str | None) -> None:
    mesh = Mesh(a=2, b=2)
    t, u = TensorType.parse(source, mesh), TensorType.parse(target, mesh)
    exchange = Exchange(u.layout)
    found = exchange.named_collective(t)
    assert (found.name if found is not None else None) == named
    if found is not None:
        shards = distribute(np.arange(48, dtype=np.float32).reshape(8, 6), t)
        assert found.infer(t) == exchange.infer(t)
        for mine, theirs in zip(*(op.reference([shards], [t])[0] for op in (found, exchange)), strict=True):
            np.testing.assert_array_equal(mine, theirs)

"""Tables of boxes: what is refused, and that types, moves, bytes and texts follow them."""

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests import oracle, strategies

import shardplan as sp
from shardplan.core.accounting import account
from shardplan.core.box_table import BoxRow, BoxTable
from shardplan.core.layout import Layout
from shardplan.core.messages import messages
from shardplan.core.ops import AllGather, Elementwise, Exchange, Iota, Permute, Repeat, Send, Slice, ToPartial
from shardplan.core.parcels import Rows, parcels_of
from shardplan.core.program import Program
from shardplan.core.reference import run_reference
from shardplan.core.step import Step
from shardplan.core.tensor import TensorType, same
from shardplan.errors import LayoutError, ParseError, ShardplanError, TypingError
from shardplan.execution.verify import run_index_data, verify

MESH = sp.Mesh(x=2, y=2)
# Rows 0 to 3 on device 0, row 3 and a copy of row 0 on device 1, the rest on device 3 in columns that interleave.
ROWS = [
    (0, ((0, 3), (0, 5)), 0, (5, 1)),
    (1, ((3, 4), (0, 5)), 0, (5, 1)),
    (1, ((0, 1), (0, 5)), 5, (5, 1)),
    (3, ((4, 7), (0, 2)), 0, (5, 1)),
    (3, ((4, 7), (2, 5)), 2, (5, 1)),
]
TABLE = BoxTable(ROWS)
BOXED = TensorType("i32", (7, 5), TABLE, MESH)
CUT = TensorType("i32", (7, 5), ("x", "y"), MESH)
ARRAY = np.arange(35, dtype=np.int32).reshape(7, 5)


def elements(t: TensorType, place: int) -> dict[int, tuple[int, ...]]:
    """By position in a device's shard the index in the array, element by element, from what the user wrote."""
    if t.layout.boxes is None:
        boxes = [(oracle.box(t, place), 0, None)]
    else:
        device = t.mesh.devices[place]
        boxes = [(row.box, row.offset, row.strides) for row in t.layout.boxes.rows if row.device == device]
    out: dict[int, tuple[int, ...]] = {}
    for box, offset, strides in boxes:
        sizes = strategies.sizes_of(box)
        strides = strides or tuple(math.prod(sizes[d + 1 :]) for d in range(len(sizes)))
        for index in itertools.product(*(range(*pair) for pair in box)):
            at = offset + sum((i - lo) * n for i, (lo, _), n in zip(index, box, strides, strict=True))
            assert at not in out
            out[at] = index
    return out


def truth(t: TensorType, array: np.ndarray) -> list[np.ndarray]:
    """What every device holds of an array, made flat."""
    found = [elements(t, place) for place in range(t.mesh.size)]
    return [np.array([array[held[k]] for k in range(len(held))], array.dtype) for held in found]


def direct(s: TensorType, t: TensorType, chunks: int = 1) -> Program:
    op = Exchange(t.layout, chunks=chunks) if s.mesh == t.mesh else Send(t.layout, t.mesh, chunks)
    return Program({"0": s}, [Step(op, ("0",), ("1",))], ("1",))


def test_a_type_of_a_table_by_hand() -> None:
    assert str(BOXED) == f"i32[7, 5]{{{TABLE}}}" and str(TABLE).startswith("boxes#")
    assert [BOXED.local_shape(k) for k in range(4)] == [(15,), (10,), (0,), (15,)]
    assert BOXED.elements().tolist() == [15, 10, 0, 15] and BOXED.local_bytes() == 60 and not BOXED.all_even
    assert sp.distribute(ARRAY, BOXED)[1].tolist() == [15, 16, 17, 18, 19, 0, 1, 2, 3, 4]
    assert sp.distribute(ARRAY, BOXED)[3].tolist() == list(range(20, 35))
    assert TensorType("i32", (7, 5), BoxTable(reversed(ROWS)), MESH) == BOXED and hash(TABLE) == hash(BoxTable(ROWS))
    assert TensorType("i32", (7, 5), (), MESH) != BOXED and BoxTable(ROWS[:1]) != TABLE and TABLE != "boxes"
    moved = TensorType("i32", (7, 5), TABLE, sp.Mesh({"z": 4}, devices=(3, 1, 0, 2)))
    assert same(BOXED, moved) and not same(BOXED, CUT) and not same(CUT, BOXED) and moved.local_shape(0) == (15,)


@given(strategies.boxed_pairs(), st.integers(1, 3))
def test_moves_bring_every_element_and_no_more(pair: tuple[TensorType, TensorType], chunks: int) -> None:
    """Between layouts and tables, on one mesh or two: the shards, the bytes, the messages, and the text."""
    s, t = pair
    array = np.arange(math.prod(s.shape), dtype=np.int32).reshape(s.shape)
    shards = sp.distribute(array, s)
    assert [x.reshape(-1).tolist() for x in shards] == [x.tolist() for x in truth(s, array)]
    assert np.array_equal(sp.collect(shards, s), array)
    program = direct(s, t, chunks)
    (got,) = run_reference(program, [shards])
    assert [x.reshape(-1).tolist() for x in got] == [x.tolist() for x in truth(t, array)]
    assert all(x.shape == t.local_shape(k) for k, x in enumerate(got))
    before = {d: set(elements(s, k).values()) for k, d in enumerate(s.mesh.devices)}
    lack = [set(elements(t, k).values()) - before.get(d, set()) for k, d in enumerate(t.mesh.devices)]
    op = program.steps[0].op
    assert (op.received_bytes(s) / 4).tolist() == [len(x) for x in lack]
    senders, receivers, sizes = messages(s, t)
    assert all(s.mesh.devices[a] != t.mesh.devices[b] for a, b in zip(senders, receivers, strict=True))
    assert np.bincount(receivers, sizes, t.mesh.size).tolist() == [len(x) for x in lack]
    assert op.rounds(s) == max(np.bincount(receivers, minlength=1))
    assert Program.parse(str(program)) == program and str(Program.parse(str(program))) == str(program)
    assert account(program).received.sum() == 4 * sum(map(len, lack))


@given(strategies.boxed_pairs())
def test_plans(pair: tuple[TensorType, TensorType]) -> None:
    """One step, proved to move no byte too much, also under a limit; from a plan file as it was."""
    plan = sp.redistribute(*pair)
    plan.certificate.check()
    assert verify(plan).complete and run_index_data(plan.program)[1] is True
    if any(t.layout.boxes is not None for t in pair):
        assert len(plan.program.steps) == (pair[0] != pair[1]) and plan.certificate.gap == 1
        least = plan.certificate.workspace_bytes - 1
        try:
            tight = sp.redistribute(*pair, memory_limit=least)
        except sp.Infeasible:
            return
        tight.certificate.check()
        assert verify(tight).complete and tight.certificate.workspace_bytes <= least


def test_of_several_holders_one_that_has_it_keeps_it_and_the_others_take_turns() -> None:
    """Devices 0 to 3 hold the array, 2 to 9 want it: 2 and 3 keep theirs, and each of the four sends to one or two."""
    mesh, whole = sp.Mesh(x=10), ((0, 6),)
    source = TensorType("f32", (6,), BoxTable([(d, whole, 0, (1,)) for d in range(4)]), mesh)
    target = TensorType("f32", (6,), BoxTable([(d, whole, 0, (1,)) for d in range(2, 10)]), mesh)
    senders, receivers, sizes = messages(source, target)
    assert sorted(zip(receivers.tolist(), senders.tolist(), strict=True)) == [
        (4, 0), (5, 1), (6, 2), (7, 3), (8, 0), (9, 1),
    ]  # fmt: skip
    assert sizes.tolist() == [6] * 6


def test_replicas_of_a_layout_take_turns_near_first() -> None:
    mesh = sp.Mesh(a=2, b=3)
    whole = BoxTable([(d, ((0, 4),), 0, (1,)) for d in (1, 2, 4, 5)])
    source, target = (TensorType("f32", (4,), end, mesh) for end in (("a",), whole))
    senders, receivers, _ = messages(source, target)
    assert dict(zip(receivers.tolist(), senders.tolist(), strict=True)) == {1: 3, 2: 4, 4: 0, 5: 1}
    # In blocks of 4 devices 1 and 2 find half of the array at 3, and 4 and 5 none of theirs.
    senders, receivers, _ = messages(source, target, (4,))
    assert dict(zip(receivers.tolist(), senders.tolist(), strict=True)) == {1: 3, 2: 3, 4: 0, 5: 1}


def test_who_sends_depends_on_ids_and_not_on_the_mesh() -> None:
    """The same rows on a mesh in another order: the same devices send."""
    found: list[set[tuple[int, int]]] = []
    for devices in ((0, 1, 2, 3), (2, 0, 3, 1)):
        mesh = sp.Mesh({"x": 4}, devices=devices)
        source = TensorType("f32", (6,), BoxTable([(d, ((0, 6),), 0, (1,)) for d in (1, 2)]), mesh)
        target = TensorType("f32", (6,), (), mesh)
        senders, receivers, _ = messages(source, target)
        found.append({(mesh.devices[a], mesh.devices[b]) for a, b in zip(senders, receivers, strict=True)})
    assert found[0] == found[1] == {(1, 0), (2, 3)}


def test_groups_of_an_exchange() -> None:
    """A table may be reached inside groups that hold all of it."""
    t = TensorType("f32", (4, 4), ("x", "y"), MESH)
    rows = [(d, ((d // 2 * 2, d // 2 * 2 + 2), (0, 4)), 0, (4, 1)) for d in range(4)]
    (u,) = Exchange(axes=("y",), boxes=BoxTable(rows)).infer(t)
    assert u.layout.boxes == BoxTable(rows)
    with pytest.raises(TypingError, match="groups over x do not hold all of"):
        Exchange(axes=("x",), boxes=BoxTable(rows)).infer(t)


def rows(*found: tuple[tuple[tuple[int, int], ...], int, tuple[int, ...]]) -> list[BoxRow]:
    return [BoxRow(0, *row) for row in found]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ([], "a table of boxes has no rows; legal is at least one row, and boxes of one tensor"),
        ([(0, ((0, 1),), 0, (1,)), (1, (), 0, ())], "a table of boxes has boxes of 0 and 1 dims"),
        ([(0, ((0, 1),), 0)], "row 0 of a table of boxes is (0, ((0, 1),), 0); legal is a tuple (device, box, offset"),
        ([(0, ((0, 1, 2),), 0, (1,))], "dim 0 of the box of row 0 of a table of boxes is (0, 1, 2); legal is a pair"),
        ([(-1, ((0, 1),), 0, (1,))], "the device of row 0 of a table of boxes is -1; legal is a whole number of at le"),
        (rows((((2, 2),), 0, (1,))), "the stop of dim 0 of row 0 of a table of boxes is 2; legal is a whole number of"),
        (rows((((0, 2),), -1, (1,))), "the offset of row 0 of a table of boxes is -1"),
        (rows((((0, 2),), 0, (0,))), "a stride of row 0 of a table of boxes is 0; legal is a whole number of at leas"),
        (rows((((0, 2),), 0, (1, 1))), "row 0 of a table of boxes has 2 strides for a box of 1 dims; give one a dim"),
        (
            rows((((0, 3), (0, 2)), 0, (2, 1)), (((2, 4), (1, 3)), 6, (2, 1))),
            "device 0 holds the element (2, 1) twice: in the rows 0 [0:3, 0:2] at 0 by (2, 1), and 0 [2:4, 1:3] at 6",
        ),
        (rows((((0, 2),), 1, (1,))), "device 0: element 0 of its storage is in no row; the rows of a device fill its"),
        (rows((((0, 2),), 0, (2,))), "device 0: element 1 of its storage is in no row"),
        (rows((((0, 2),), 0, (1,)), (((4, 6),), 1, (1,))), "device 0: element 1 of its storage is in two rows"),
        (rows((((0, 2), (0, 2)), 0, (1, 1))), "device 0: element 1 of its storage is in two rows"),
    ],
)
def test_what_is_no_table(given: list[BoxRow], message: str) -> None:
    with pytest.raises(LayoutError) as error:
        BoxTable(given)
    assert str(error.value).startswith(message) and "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("given", "shape", "message"),
    [
        (ROWS, (7,), f"{TABLE} has boxes of 2 dims, but the tensor has 1"),
        (ROWS, (6, 5), f"the row 3 [4:7, 0:2] at 0 by (5, 1) of {TABLE} reaches beyond the shape (6, 5)"),
        (ROWS, (7, 6), f"no row of {TABLE} holds the element (0, 5) of the shape (7, 6)"),
        (ROWS[1:], (7, 5), f"no row of {BoxTable(ROWS[1:])} holds the element (1, 0) of the shape (7, 5)"),
        ([(4, *row[1:]) for row in ROWS[:1]], (3, 5), "has rows of device 4, which is not on the mesh x=2, y=2"),
    ],
)
def test_what_is_no_type(given: list[BoxRow], shape: tuple[int, ...], message: str) -> None:
    with pytest.raises(LayoutError) as error:
        TensorType("f32", shape, BoxTable(given), MESH)
    assert message in str(error.value) and "\n" not in str(error.value)


def test_nothing_takes_a_table_for_a_layout() -> None:
    """What asks for one box a device, for axes beside a table, or for a table of another op, gets one line."""
    for ask in (BOXED.boxes, lambda: BOXED.box(0)):
        with pytest.raises(LayoutError, match="lies in rows of boxes, not in one box a device"):
            ask()
    for axes in ({"dims": (("x",), ())}, {"partial": ("x",), "reduction": "sum"}, {"root": ("x",)}):
        with pytest.raises(LayoutError, match="lies in a table of boxes, so it names no axes"):
            replace(BOXED.layout, **axes)
    inner = Program({"a": BOXED}, [], ("a",))
    for op in (AllGather(0, ()), Slice(0, ("x",)), ToPartial(("x",), "sum"), Elementwise("-a"), Permute(CUT.layout)):
        with pytest.raises(TypingError, match=rf"{op.name}: .* lies in a table of boxes; of such exchange and send"):
            Program({"0": BOXED}, [Step(op, ("0",), ("1",))], ("1",))
    with pytest.raises(TypingError, match=r"iota: .* lies in a table of boxes"):
        Program({}, [Step(Iota("i32", (7, 5), 0, BOXED.layout, MESH), (), ("1",))], ("1",))
    with pytest.raises(TypingError, match="has no rows to stack or to slice"):
        Program({"0": BOXED}, [Step(Repeat(2, inner), ("0",), ("1",))], ("1",))
    for s, t in ((TensorType("i32", (7, 5), (), MESH, {"x": "sum"}), BOXED), (BOXED, replace_root(CUT))):
        with pytest.raises(LayoutError, match="beside a table of boxes nothing is partial or at a root"):
            sp.redistribute(s, t)
    with pytest.raises(TypingError, match="differ in their partial or root axes"):
        Exchange(boxes=TABLE).infer(TensorType("i32", (7, 5), (), MESH, {"x": "sum"}))


def replace_root(t: TensorType) -> TensorType:
    return TensorType(t.dtype, t.shape, (), t.mesh, root=("x",))


def test_a_body_carries_a_value_in_a_table() -> None:
    """The header lists the tables of bodies too."""
    other = BoxTable([(d, ((0, 7), (0, 5)), 0, (1, 7)) for d in range(4)])
    steps = [Step(Exchange(boxes=other), ("a",), ("b",)), Step(Exchange(boxes=TABLE), ("b",), ("c",))]
    body = Program({"a": BOXED}, steps, ("c",))
    program = Program({"0": BOXED}, [Step(Repeat(3, body, carried=1), ("0",), ("1",))], ("1",))
    assert program.tables == (TABLE, other)
    assert Program.parse(str(program)) == program
    (got,) = run_reference(program, [sp.distribute(ARRAY, BOXED)])
    assert np.array_equal(sp.collect(got, BOXED), ARRAY)


def test_the_end_of_a_move_is_a_layout_or_a_table() -> None:
    assert Exchange(BOXED.layout) == Exchange(boxes=TABLE) and Send(BOXED.layout, MESH) == Send(None, MESH, boxes=TABLE)
    for make in (Exchange, lambda: Send(None, MESH)):
        with pytest.raises(TypingError, match="takes either a layout or boxes=; got none"):
            make()
    with pytest.raises(TypingError, match="takes either a layout or boxes=; got both"):
        Exchange(Layout(((), ())), boxes=TABLE)
    for near, message in (
        ((1,), r"a block of near is 1; legal is a whole number of at least 2"),
        ((4, 6), "multiples"),
        (8, "near is 8; legal is a list"),
    ):
        with pytest.raises(TypingError, match=message):
            Exchange(boxes=TABLE, near=near)
    assert hash(Exchange(boxes=TABLE, near=[4, 8])) == hash(Exchange(boxes=TABLE, near=(4, 8)))  # pyright: ignore
    assert "near" not in str(direct(CUT, BOXED))


TEXT = str(direct(CUT, BOXED))


@pytest.mark.parametrize(
    ("old", "new", "message", "at"),
    [
        (
            f"boxes={TABLE}",
            "boxes=boxes#00000000",
            f"unknown table boxes#00000000; legal are {TABLE}",
            "boxes#00000000",
        ),
        (f"boxes={TABLE}", "boxes=7", "exchange: boxes=7 is no BoxTable | None", "boxes=7"),
        (f"{{{TABLE}}}", "{boxes#12}", "expected boxes# and 8 hexadecimal digits", "boxes#12}"),
        ("i32[7, 5]{", "i32[7, 6]{", f"no row of {TABLE} holds the element (0, 5) of the shape (7, 6)", "{boxes"),
        ("0 [0:3", "0 [0:2", "these are the rows of boxes#", "boxes#"),
        ("1 [3:4", "2 [3:4", "device 1: element 0 of its storage is in no row", "boxes#"),
        ("at 2 by", "at x by", "expected an offset", "x by"),
        ("(5, 1)\n    1", "(5, 1\n    1", "expected ',' or ')' in the strides of a row", "\n    1"),
        (f"  {TABLE}\n", f"  {TABLE} 0\n", "a table of boxes has no rows", "boxes#"),
        ("  input", f"  {TABLE}\n" + "".join(f"  {row}\n" for row in TABLE.rows) + "  input", "is listed twice", None),
    ],
)
def test_texts_that_are_refused(old: str, new: str, message: str, at: str | None) -> None:
    assert TEXT.count(old) >= 1
    text = TEXT.replace(old, new, 1)
    with pytest.raises(ParseError) as error:
        Program.parse(text)
    assert message in str(error.value)
    if at is not None:
        assert error.value.text[error.value.position :].startswith(at)


def test_a_types_text_needs_its_table() -> None:
    assert TensorType.parse(str(BOXED), MESH, [TABLE]) == BOXED
    with pytest.raises(ParseError, match=r"unknown table boxes#.*; legal are those that a program lists"):
        TensorType.parse(str(BOXED), MESH)


def test_comments_stand_behind_tables() -> None:
    assert Program.parse(TEXT.replace("\n", "  # boxes #1\n")) == direct(CUT, BOXED)


def test_replicas_that_differ_are_refused() -> None:
    shards = sp.distribute(ARRAY, BOXED)
    torn = [*shards[:1], np.where(np.arange(10) == 6, -1, shards[1]).astype(np.int32), *shards[2:]]
    with pytest.raises(LayoutError, match=r"device 1 holds other values than its replica"):
        sp.collect(torn, BOXED)
    with pytest.raises(LayoutError, match=r"device 2: shard of shape \(7, 5\), but .* has \(0,\)"):
        sp.collect([*shards[:2], ARRAY, shards[3]], BOXED)


def test_a_wrong_certificate_is_found() -> None:
    """The claims follow from the rows: those of a program that moves to other rows are others."""
    plan = sp.redistribute(CUT, BOXED)
    for field, value in (("received_bytes", (0, 24, 0, 36)), ("workspace_bytes", 1), ("peak_bytes", 0)):
        with pytest.raises(ShardplanError, match=field):
            replace(plan.certificate, **{field: value}).check()


def test_parcels_by_hand() -> None:
    """A box that two rows hold in parts is cut where they meet, and nothing comes twice."""
    side = lambda ids, boxes: Rows(  # noqa: E731
        np.array(ids), np.array(ids), np.array(boxes).reshape(len(ids), 1, 2), np.zeros(len(ids), int),
        np.ones((len(ids), 1), int), np.zeros(len(ids), int),
    )  # fmt: skip
    found = parcels_of(side([0, 1, 2], [(0, 6), (4, 10), (2, 5)]), side([2, 3], [(1, 9), (4, 6)]))
    said = zip(found.source.ids[found.given], found.target.ids[found.taken], found.boxes[:, 0].tolist(), strict=True)
    assert [(int(a), int(b), box) for a, b, box in said] == [
        (2, 2, [2, 5]), (0, 2, [1, 2]), (0, 2, [5, 6]), (1, 2, [6, 9]), (2, 3, [4, 5]), (0, 3, [5, 6]),
    ]  # fmt: skip

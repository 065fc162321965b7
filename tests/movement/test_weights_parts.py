"""What weights are planned with, each part beside plain enumeration: cuts, pieces, runs, shares, fed receivers."""

from __future__ import annotations

import math
from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardplan.movement.weights.form import StoredForm
from shardplan.movement.weights.lowering import DimDigits, run_rows
from shardplan.movement.weights.pieces import DigitBox, FormContext, HeldPiece, local_pieces
from shardplan.movement.weights.probe import origin
from shardplan.movement.weights.regions import _progressions
from shardplan.movement.weights.relays import relay_within_node
from shardplan.movement.weights.spreading import SMALL, spread


@pytest.mark.parametrize(
    ("text", "axes"),
    [("k: g@a*b~ d", ("a", "b")), ("k: g@a*b.ceil d", ("a", "b")), ("k: g@a*b d@c", ("a", "b", "c")), ("g@c~", ("c",))],
)
def test_a_cut_over_several_axes_is_over_all_of_them(text: str, axes: tuple[str, ...]) -> None:
    form = StoredForm.parse(f"({text})")
    assert str(form) == f"({text})" or str(form) == text
    assert form.axes == axes


@given(st.lists(st.integers(1, 4), min_size=1, max_size=3), st.integers(1, 5), st.data())
def test_pieces_of_a_cut_product_are_its_digits_in_order(sizes: list[int], owners: int, data: st.DataObject) -> None:
    """Position by position, for every owner of a product of digits that is cut by torch.chunk's rule."""
    names = "abc"[: len(sizes)]
    order = data.draw(st.permutations(range(len(sizes))))
    text = f"({' '.join(names[k] for k in order)})@t.ceil"
    (factors,) = StoredForm.parse(text).dims
    every = list(product(*(range(sizes[k]) for k in order)))
    chunk = -(-len(every) // owners)
    for owner in range(owners):
        scenery = FormContext(dict(zip(names, sizes, strict=True)), {"t": owners}, {}, {"t": owner})
        size, pieces = local_pieces(factors, scenery)
        wanted = every[owner * chunk : (owner + 1) * chunk]
        found: dict[int, tuple[int, ...]] = {}
        for piece in pieces:
            assert [box.atom for box in piece.digits] == [names[k] for k in order]
            for values in product(*(range(box.count) for box in piece.digits)):
                at = piece.base + sum(v * box.weight for v, box in zip(values, piece.digits, strict=True))
                assert at not in found
                found[at] = tuple(box.first + v for v, box in zip(values, piece.digits, strict=True))
        assert size == len(wanted)
        assert found == dict(enumerate(wanted))


@given(*[st.integers(1, 3)] * 4)
def test_pieces_of_a_sum_times_a_digit_are_those_of_its_tensors_in_order(a: int, b: int, c: int, owners: int) -> None:
    """The digit is minor: every value of the sum, of whichever tensor, has all of the digit's behind it."""
    (factors,) = StoredForm.parse("((q: a | k: b) c)@t.ceil").dims
    every = [(tensor, v, w) for tensor, n in (("q", a), ("k", b)) for v in range(n) for w in range(c)]
    chunk = -(-len(every) // owners)
    for owner in range(owners):
        size, pieces = local_pieces(factors, FormContext({"a": a, "b": b, "c": c}, {"t": owners}, {}, {"t": owner}))
        wanted = every[owner * chunk : (owner + 1) * chunk]
        found: dict[int, tuple[str | None, int, int]] = {}
        for piece in pieces:
            for v, w in product(*(range(box.count) for box in piece.digits)):
                major, minor = piece.digits
                found[piece.base + v * major.weight + w * minor.weight] = piece.tensor, major.first + v, minor.first + w
        assert size == len(wanted) and found == dict(enumerate(wanted))


@given(st.lists(st.tuples(st.integers(1, 4), st.integers(1, 3), st.integers(0, 3)), min_size=1, max_size=4))
def test_runs_of_a_dim_are_its_elements_one_by_one(boxes: list[tuple[int, int, int]]) -> None:
    """Boxes of one digit behind each other, each of a count, a local weight and a gap before it."""
    pieces: list[HeldPiece] = []
    wanted: dict[int, int] = {}
    base = first = 0
    for count, weight, gap in boxes:
        base += gap
        pieces.append(HeldPiece(base, (DigitBox("n", first, count, weight),)))
        wanted |= {first + i: base + i * weight for i in range(count)}
        base, first = base + count * weight, first + count
    rows = run_rows(DimDigits({"n": 1}, range(first)), 1, None, [(0, pieces)])
    found = [(start + i, at + i * step) for start, length, _, _, at, step in rows for i in range(length)]
    assert found == sorted(wanted.items())
    same = [(count, weight) for count, weight, gap in boxes if not gap and count > 1]
    if len(same) == len(boxes) and len({weight for _, weight in same}) == 1:
        assert len(rows) == 1, "what goes on at one step is one run"


@given(st.integers(1, 6), st.integers(1, 6), st.integers(0, 5))
def test_every_receiver_gets_every_part_of_its_copy_once(receivers: int, owners: int, turn: int) -> None:
    """Of one block that is large enough to be cut; owners give equally much."""
    whole = math.lcm(receivers, owners) * 8
    combos, length = np.zeros(1, np.int64), np.array([[whole]])
    to, by = np.arange(receivers)[None], 10 + np.arange(owners)[None]
    given_by = dict.fromkeys(range(10, 10 + owners), 0)
    taken: dict[int, list[int]] = {r: [] for r in range(receivers)}
    for shares in spread(combos, to, by, length, np.array([owners * SMALL]), turn):
        for _, receiver, owner, _, first, last, parts in zip(*(c.tolist() for c in shares), strict=True):
            assert 0 <= first < last <= parts
            mine = range(first * whole // parts, last * whole // parts)
            taken[receiver] += mine
            given_by[owner] += len(mine)
    assert all(sorted(each) == list(range(whole)) for each in taken.values())
    assert set(given_by.values()) == {receivers * whole // owners}


@pytest.mark.parametrize(
    ("node", "served"),
    [([0, 0, 1, 1], True), ([0, 1, 0, 1], True), ([0, 0, 1, 1, 1, 1], False), ([0, 1, 2, 3], False),
     ([0, 0, 0, 1], False), ([0, 0, 0, 0], True), ([0, 0, 1, 1, 2, 3], False)],
)  # fmt: skip
def test_nodes_with_equally_many_receivers_are_fed_once(node: list[int], served: bool) -> None:
    """What leaves owners comes to every node once, whichever of its receivers takes it."""
    d, whole = len(node), 96
    to, by = np.arange(d)[None], np.array([[20, 21]])
    given = np.zeros(1, np.int64), to, by, np.array([node]), np.array([[whole]]), np.array([SMALL * 1000])
    outside, inside, found = relay_within_node(*given, 0)
    assert found.tolist() == [served]
    came: dict[int, list[int]] = {}
    for _, receiver, _, _, first, last, parts in zip(*(c.tolist() for c in outside), strict=True):
        came.setdefault(node[receiver], []).extend(range(first * whole // parts, last * whole // parts))
    assert {k: sorted(each) for k, each in came.items()} == (
        {k: list(range(whole)) for k in set(node)} if served else {}
    )
    assert all(node[a] == node[b] for _, a, b, *_ in zip(*(c.tolist() for c in inside), strict=True))


def test_blocks_go_forward_on_both_ends() -> None:
    """Rows (length, steps, names, offsets): every element is where its row has it, and no step goes back."""
    for rows in (
        [(2, 1, 1, 0, 0, 0, 40), (2, 1, 1, 0, 0, 10, 20), (2, 1, 1, 0, 0, 20, 0)],
        [(2, 1, 1, 0, 0, 0, 0), (2, 1, 1, 0, 0, 10, 20), (2, 1, 1, 0, 0, 20, 40), (1, 1, 1, 0, 0, 30, 60)],
        [(3, 1, 4, 0, 1, 5, 9), (3, 1, 4, 0, 1, 5, 8)],
    ):
        wanted = [
            (t_name, s_name, t + i * t_step, s + i * s_step)
            for length, t_step, s_step, t_name, s_name, t, s in rows
            for i in range(length)
        ]
        found = []
        for levels, (t_name, s_name, t, s) in _progressions(np.array(rows)):
            assert all(t_far > 0 and s_far > 0 for _, t_far, s_far in levels)
            for at in product(*(range(count) for count, _, _ in levels)):
                moved = [sum(i * level[k] for i, level in zip(at, levels, strict=True)) for k in (1, 2)]
                found.append((t_name, s_name, t + moved[0], s + moved[1]))
        assert found == wanted


def test_every_number_of_a_checkpoint_is_of_the_tensor_that_has_it() -> None:
    numbers = {"a": np.arange(1, 7).reshape(2, 3), "none": np.zeros((0, 2), np.int64), "b": np.arange(7, 9)}
    said = [f"a[{i}, {j}]" for i in range(2) for j in range(3)] + ["b[0]", "b[1]"]
    assert [origin(number, numbers) for number in range(1, 9)] == said
    assert origin(0, numbers) == "padding" and origin(9, numbers) == "no element of the checkpoint (9)"

"""Parts of distributed values: what runs on a part is the part of what runs on the whole, and a wrong op is found."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import shardplan as sp
import strategies as some
from shardplan.core.ops import AllGather
from shardplan.core.part import Part, blocks, corners, descent, numbers, run_part
from shardplan.core.reference import run_reference, spread_addends
from shardplan.execution import verify


@st.composite
def parts(draw):
    """A plan, and some positions of each dim."""
    s, t = draw(st.one_of(some.pairs(("even", "uneven", "partial", "rooted")), some.cross_pairs(marked=False)))
    try:
        plan = sp.redistribute(s, t)
    except sp.Infeasible:
        plan = sp.redistribute(s, s)
    keep = [draw(st.lists(st.integers(0, n - 1), unique=True, max_size=5)) for n in s.shape]
    return plan, tuple(np.array(sorted(k), dtype=np.int64) for k in keep)


@settings(max_examples=300, deadline=None)
@given(parts())
def test_a_part_of_the_run_is_the_run_of_the_part(drawn):
    plan, positions = drawn
    (name, s), (output,) = plan.program.inputs[0], plan.program.outputs
    array = verify.index_data(s)
    (whole,) = run_reference(plan.program, [sp.distribute(array, s)])
    at = np.ix_(*positions) if positions else ()
    flat = np.arange(array.size).reshape(array.shape)[at]
    found = run_part(plan.program, name, spread_addends(array[at], s, Part(s, positions).boxes(), flat), positions)[
        output
    ]
    u = plan.program.types[output]
    wanted = [
        shard[np.ix_(*(p[(a <= p) & (p < b)] - a for p, (a, b) in zip(positions, box, strict=True)))]
        if positions
        else shard
        for shard, box in zip(whole, u.boxes(), strict=True)
    ]
    if not u.layout.partial:  # addends are cut where they are made; their sum is compared below
        assert all(np.array_equal(a, b) for a, b in zip(found, wanted, strict=True))
    verify.compare(found, u, array[at], plan.certificate.destinations[0], "a part", positions)


@given(st.lists(st.integers(1, 6), max_size=4).map(tuple), st.integers(1, 40))
def test_blocks_are_the_array_in_row_major_order(shape, most):
    flat = np.arange(math.prod(shape)).reshape(shape)
    found = [flat[np.ix_(*b)] if shape else flat for b in blocks(shape, most)]
    assert np.array_equal(np.concatenate([x.ravel() for x in found]), flat.ravel())
    assert all(x.size <= most for x in found)


@given(st.lists(st.integers(1, 6), min_size=1, max_size=4).map(tuple), st.integers(1, 40))
def test_numbers_are_row_major_places(shape, modulo):
    positions = tuple(np.arange(0, n, 2) for n in shape)
    flat = np.arange(math.prod(shape)).reshape(shape)
    assert np.array_equal(numbers(shape, positions, modulo), flat[np.ix_(*positions)] % modulo)


@given(some.pairs(("even", "uneven")))
def test_corners_are_both_ends_of_every_run(pair):
    for d, at in enumerate(corners(pair)):
        cut = {int(c) for t in pair for c in t.boxes()[:, d].ravel()}
        runs = np.split(np.arange(pair[0].shape[d]), sorted(c for c in cut if 0 < c < pair[0].shape[d]))
        assert set(at.tolist()) == {int(k) for run in runs if len(run) for k in (run[0], run[-1])}


@pytest.mark.parametrize("most", [2**34, 40000])
def test_by_blocks_and_by_ends_a_wrong_op_is_found(monkeypatch, most):
    """By either way the right plan passes, and one whose gather exchanges two elements of a device does not."""
    monkeypatch.setattr(verify, "LARGEST_ARRAY", 1)
    monkeypatch.setattr(verify, "BLOCK", 4096)
    monkeypatch.setattr(verify, "LARGEST_RUN", most)
    plan = sp.redistribute("f32[60@x, 50]{+y}", "f32[60, 50]", mesh="x=4,y=2")
    assert "all_gather" in {s.op.name for s in plan.program.steps}
    right = verify.verify(plan)
    assert right.runs == ("index",) and right.complete == (most == 2**34) and right.blocks >= 1 + right.complete
    assert right.total == 8 * 3000 and right.elements == (right.total if right.complete else right.elements) > 0
    move = AllGather.move

    def wrong(self, shards, t, u):
        out = move(self, shards, t, u)
        if out[5].size:
            out[5].reshape(-1)[-1] += 1
        return out

    monkeypatch.setattr(AllGather, "move", wrong)
    with pytest.raises(sp.BackendError, match=r"output 0 on index data: device 5 holds .* at index \(\d+, \d+\), not "):
        verify.verify(plan)


def test_shards_are_compared_by_device_and_not_by_place():
    """Two meshes list the same devices in another order, and their types give every device the same part."""
    found = sp.TensorType("i32", (8,), (("x", "y"),), sp.Mesh({"y": 2, "x": 2}, devices=(0, 2, 1, 3)))
    asked = sp.TensorType("i32", (8,), (("a", "b"),), sp.Mesh(a=2, b=2))
    array = verify.index_data(asked)
    shards = sp.distribute(array, found)
    assert [s.tolist() for s in shards] == [[0, 1], [4, 5], [2, 3], [6, 7]]
    verify.compare(shards, found, array, asked, "output 0")
    shards[1][0] = 9
    with pytest.raises(sp.BackendError, match=r"^output 0: device 2 holds 9 at index \(4,\), not 4$"):
        verify.compare(shards, found, array, asked, "output 0")


def test_a_computed_output_is_no_descendant():
    program = sp.Program.parse(
        "program\n  mesh x=2\n  input %a: f32[4@x]\n  input %b: f32[4@x]\n"
        '  %c = elementwise(%a, %b; expr="a+b")\n  %d = all_gather(%a; dim=0, axes=(x))\n  output %c, %d\n'
    )
    assert list(descent(program, "a")) == ["a", "d"]

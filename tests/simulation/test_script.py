"""The messages of engines: what arrives in a step is what its op says, in rings between neighbours, and gloo's own."""

import numpy as np
import pytest

import shardplan as sp
from conformance import cases
from shardplan.core.lowering import SEGMENT, Put, Round, Take, run_of
from shardplan.core.ops import AllGather, AllReduce, Broadcast, Exchange, Op, Reduce, ReduceScatter
from shardplan.core.program import Program
from shardplan.core.step import Step
from shardplan.core.walk import posted_steps
from shardplan.simulation.script import ScriptError
from shardplan.simulation.scripts import _messages, script_of

RINGS = (AllGather, AllReduce, ReduceScatter)


@pytest.mark.parametrize("devices", [3, 4, 6, 8])
def test_every_step_receives_what_its_op_says(devices: int) -> None:
    """Summed over the devices of a step; of even rings, and of all else, on each device."""
    for case in cases(23, 60, devices):
        program = case.program
        found = script_of(program).received()
        for number, step in enumerate(program.steps):
            operands, results = program.step_types(step)
            want = step.op.received_bytes(*operands)
            got = np.array([found.get((d, number), 0) for d in step.op.devices(*results).tolist()])
            ops = [s.op for s in posted_steps(step)]
            assert got.sum() == want.sum(), (case.name, number, str(program))
            # a ring's last piece may be short even on an even type: all_reduce cuts the flat shard
            exact = not any(isinstance(op, RINGS) for op in ops) or all(t.all_even for t in (*operands, *results))
            if exact and not any(isinstance(op, AllReduce) for op in ops):
                assert got.tolist() == want.tolist(), (case.name, number)


def one(text: str, op: Op, mesh: sp.Mesh) -> Program:
    return Program({"0": sp.TensorType.parse(text, mesh)}, [Step(op, ("0",), ("1",))], ("1",))


def test_rings_and_chains_go_in_member_order() -> None:
    """The mesh's devices stand in another order than their numbers; two axes are major to minor as asked."""
    x = sp.Mesh({"x": 4}, devices=(2, 0, 3, 1))
    around = {(2, 0): 12, (0, 3): 12, (3, 1): 12, (1, 2): 12}
    assert script_of(one("i8[16]{+x}", ReduceScatter(0, ("x",)), x)).payload() == dict(sorted(around.items()))
    assert script_of(one("i8[16@x]", AllGather(0, ("x",)), x)).payload() == dict(sorted(around.items()))
    assert script_of(one("i8[16]{+x}", Reduce(("x",)), x)).payload() == {(0, 2): 16, (1, 3): 16, (3, 0): 16}
    assert script_of(one("i8[16]{root:x}", Broadcast(("x",)), x)).payload() == {(0, 3): 16, (2, 0): 16, (3, 1): 16}
    ab = sp.Mesh(a=2, b=2)
    for axes, pairs in ((("a", "b"), [(0, 1), (1, 2), (2, 3), (3, 0)]), (("b", "a"), [(0, 2), (1, 3), (2, 1), (3, 0)])):
        assert list(script_of(one("i8[16]{+a,+b}", AllReduce(axes), ab)).payload()) == pairs


def test_rounds_of_a_ring() -> None:
    """A member passes on what it received in the round before: parts of 3, 3, 3 and 1 element."""
    (stage,) = script_of(one("i16[10@x]", AllGather(0, ("x",)), sp.Mesh(x=4))).stages
    found = [[(s, r, n) for s, r, n in zip(*(x.tolist() for x in (one.sender, one.receiver, one.nbytes)), strict=True)]
             for one in stage.rounds]  # fmt: skip
    assert found == [
        [(0, 1, 6), (1, 2, 6), (2, 3, 6), (3, 0, 2)],
        [(0, 1, 2), (1, 2, 6), (2, 3, 6), (3, 0, 6)],
        [(0, 1, 6), (1, 2, 2), (2, 3, 6), (3, 0, 6)],
    ]


def test_segments_of_a_chain() -> None:
    """As few as the bound on a segment's bytes allows, or as many as chunks are asked for."""
    mesh = sp.Mesh(x=3)

    def sizes(text: str, chunks: int = 1) -> list[int]:
        ((_, first),), ((_, second),) = (
            script_of(one(text, Broadcast(("x",), chunks), mesh)).rounds_of(d) for d in (0, 1)
        )
        assert [len(sends) + len(takes) for sends, takes in second] == [1, *[2] * (len(first) - 1), 1]
        return [n for sends, _ in first for _, n in sends]

    assert sizes(f"i8[{SEGMENT}]{{root:x}}") == [SEGMENT]
    assert sizes(f"i8[{SEGMENT + 1}]{{root:x}}") == [SEGMENT // 2, SEGMENT // 2 + 1]
    assert sizes("f32[10]{root:x}", 3) == [12, 12, 16]
    assert sizes("i8[2]{root:x}", 5) == [1, 1]


def test_what_is_put_is_taken() -> None:
    """A lowering that takes more than is put, or from somebody else, is refused."""
    ids = np.arange(2)
    put = Put(np.array([1, -1]), run_of("x0", np.zeros(2, np.int64), np.array([2, 0])))
    for peer, count in ((0, 3), (1, 2)):
        take = Take(np.array([-1, peer]), run_of("y0", np.zeros(2, np.int64), np.array([0, count])))
        with pytest.raises(ScriptError, match=r"^device 0 sends \[8\] bytes to device 1, which waits for"):
            _messages(Round((put,), (), (take,)), ids, {"x0": 4, "y0": 4})


ORDER = sp.Mesh({"x": 4}, devices=(2, 0, 3, 1))


def test_gloo_has_its_own_messages_for_what_it_runs_itself() -> None:
    """In member order; a reduce_scatter is an all_reduce; two groups, in two chunks, side by side."""
    after = {(2, 0): 12, (0, 3): 12, (3, 1): 12, (1, 2): 12}
    gathered = script_of(one("i8[16@x]", AllGather(0, ("x",)), ORDER), engine="gloo")
    assert gathered.payload() == dict(sorted(after.items()))
    assert [(len(stage.rounds), stage.in_flight) for stage in gathered.stages] == [(6, 2)]
    before = {(b, a): 24 for a, b in after}
    for op in (ReduceScatter(0, ("x",)), AllReduce(("x",))):
        assert script_of(one("i8[16]{+x}", op, ORDER), engine="gloo").payload() == dict(sorted(before.items()))
    ab = sp.Mesh(a=2, b=2)
    pairs = script_of(one("i32[8@(a,b)]", AllGather(0, ("b",), chunks=2), ab), engine="gloo")
    assert pairs.payload() == {(0, 1): 8, (1, 0): 8, (2, 3): 8, (3, 2): 8}
    assert [[len(r.nbytes) for r in stage.rounds] for stage in pairs.stages] == [[4, 4], [4, 4]]
    assert {stage.in_flight for stage in pairs.stages} == {2}
    rooted = one("i32[4]{root:a,b}", Broadcast(("b",)), ab)  # of one of two groups nobody has anything
    assert script_of(rooted, engine="gloo").payload() == {(0, 1): 16}


@pytest.mark.parametrize(
    ("text", "op"),
    [
        ("i32[7@x]", AllGather(0, ("x",))),  # members of unlike size
        ("u16[8]{+x}", AllReduce(("x",))),  # a dtype that it does not add
        ("i32[8]{band:x}", AllReduce(("x",), "band")),
        ("i32[8@x]", Exchange(sp.TensorType.parse("i32[8]", ORDER).layout)),
    ],
)
def test_all_else_gloo_leaves_to_messages(text: str, op: Op) -> None:
    program = one(text, op, ORDER)
    ours, direct = (script_of(program, engine=engine).stages for engine in ("gloo", "direct"))
    assert [[r.nbytes.tolist() for r in stage.rounds] for stage in ours] == [
        [r.nbytes.tolist() for r in stage.rounds] for stage in direct
    ]


def test_a_step_with_groups_of_unlike_members_is_messages() -> None:
    """Of 11 elements the groups have 4, 4 and 3, of which the members have 2 and 2, or 2 and 1."""
    program = one("i32[11@(a,b)]", AllGather(0, ("b",)), sp.Mesh(a=3, b=2))
    found = script_of(program, engine="gloo")
    assert found.payload() == {(0, 1): 8, (1, 0): 8, (2, 3): 8, (3, 2): 8, (4, 5): 8, (5, 4): 4}
    assert [[r.nbytes.tolist() for r in stage.rounds] for stage in found.stages] == [[[8, 8, 8, 8, 8, 4]]]

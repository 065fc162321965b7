"""`repeat` and `together`: meaning, bytes and price against the program written out, text, and what is refused."""

import random
import tracemalloc
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import shardplan as sp
import strategies as some
from shardplan.core.accounting import account, storages
from shardplan.core.nested import stacked_type
from shardplan.core.op import Array, Op, Shards
from shardplan.core.ops import (
    AllGather,
    AllReduce,
    Einsum,
    Elementwise,
    Exchange,
    Repeat,
    Reshape,
    Send,
    Sgd,
    Together,
    Write,
)
from shardplan.core.pattern import Local, Pattern
from shardplan.core.program import Program
from shardplan.core.reference import distribute, run_reference
from shardplan.core.step import Step
from shardplan.core.tensor import TensorType
from shardplan.core.walk import open_together, posted_steps, program_leaves, turns
from shardplan.execution.async_executor import Hands, drive_steps, finish, wrap_blocking
from shardplan.plans.certificate import derive
from shardplan.plans.pricing import fabric_of, price_program
from shardplan.simulation.predict import predict


@dataclass(frozen=True, slots=True)
class Rearranged(Op):
    """An op that only a program written out needs: it moves nothing."""

    def received_bytes(self, *operands: TensorType) -> np.ndarray:
        return np.zeros(self.infer(*operands)[0].mesh.size, dtype=np.int64)

    def sent_bytes(self, *operands: TensorType) -> tuple[np.ndarray, np.ndarray]:
        ids = operands[0].mesh.ids
        return ids, np.zeros(len(ids), dtype=np.int64)

    def rounds(self, *operands: TensorType) -> int:
        return 0

    def staging(self, *operands: TensorType) -> int:
        return 0

    def pattern(self, *operands: TensorType) -> Pattern:
        return Local(0.0)


@dataclass(frozen=True, slots=True)
class Row(Rearranged):
    """The k-th of the values in a stack."""

    name: ClassVar[str] = "row"
    k: int

    def infer(self, *operands: TensorType) -> tuple[TensorType, ...]:
        (t,) = operands
        partial = dict.fromkeys(t.layout.partial, t.layout.reduction or "sum")
        return (TensorType(t.dtype, t.shape[1:], t.layout.dims[1:], t.mesh, partial, t.layout.root),)

    def reference(self, operands: Sequence[Shards], types: Sequence[TensorType]) -> list[list[Array]]:
        return [[x[self.k, ...].copy() for x in operands[0]]]


@dataclass(frozen=True, slots=True)
class Stack(Rearranged):
    """Values under one another."""

    name: ClassVar[str] = "stack"

    def infer(self, *operands: TensorType) -> tuple[TensorType, ...]:
        return (stacked_type(operands[0], len(operands)),)

    def reference(self, operands: Sequence[Shards], types: Sequence[TensorType]) -> list[list[Array]]:
        return [[np.stack(shards) for shards in zip(*operands, strict=True)]]


def unrolled(program: Program) -> Program:
    """The program with every body written out as often as it runs."""
    steps: list[Step] = []

    def emit(op: Op, operands: Sequence[str], count: int) -> tuple[str, ...]:
        names = tuple(f"new{len(steps)}.{k}" for k in range(count))
        steps.append(Step(op, tuple(operands), names))
        return names

    def play(part: Program, known: dict[str, str]) -> list[str]:
        for step in part.steps:
            operands = [known[o] for o in step.operands]
            results = (
                written_out(step.op, operands)
                if isinstance(step.op, Repeat)
                else emit(step.op, operands, len(step.results))
            )
            known |= zip(step.results, results, strict=True)
        return [known[o] for o in part.outputs]

    def written_out(op: Repeat, operands: list[str]) -> list[str]:
        state, fixed = operands[: op.carried], operands[op.carried : len(operands) - op.sliced]
        stacks: list[list[str]] = [[] for _ in op.body.outputs[op.carried :]]
        for k in reversed(range(op.n)) if op.reverse else range(op.n):
            cut = [emit(Row(k), [o], 1)[0] for o in operands[len(operands) - op.sliced :]]
            found = play(op.body, dict(zip((n for n, _ in op.body.inputs), [*state, *fixed, *cut], strict=True)))
            state = found[: op.carried]
            for stack, row in zip(stacks, found[op.carried :], strict=True):
                stack.insert(0 if op.reverse else len(stack), row)
        return [*state, *(emit(Stack(), stack, 1)[0] for stack in stacks)]

    outputs = play(program, {n: n for n, _ in program.inputs})
    return Program(program.inputs, steps, outputs)


def arrays(program: Program, seed: int = 0) -> list[list[np.ndarray]]:
    rng = np.random.default_rng(seed)
    return [distribute(rng.integers(0, 1000, t.shape).astype("i4"), t) for t in program.input_types]


@settings(max_examples=80, deadline=None)
@given(some.repeats())
def test_a_repeat_means_its_body_written_out(program: Program) -> None:
    data = arrays(program)
    want, got = run_reference(unrolled(program), data), run_reference(program, data)
    assert all(np.array_equal(x, y) for a, b in zip(want, got, strict=True) for x, y in zip(a, b, strict=True))
    assert unrolled(program).output_types == program.output_types


@settings(max_examples=80, deadline=None)
@given(some.repeats())
def test_a_repeat_costs_what_its_body_written_out_costs(program: Program) -> None:
    whole = unrolled(program)
    books, want = account(program), account(whole)
    assert books.devices == want.devices and books.received.tolist() == want.received.tolist()
    for name in ("rounds", "latencies", "step_received"):
        assert sum(getattr(books, name)) == sum(getattr(want, name))
    assert predict(program).seconds == pytest.approx(predict(whole).seconds)
    topology = sp.Topology.load("dgx-a100", nodes=2)
    fabric = fabric_of(topology, program.meshes)
    seconds, transfer, levels = price_program(program, fabric)
    assert (seconds, transfer, *levels) == pytest.approx((sum_of := price_program(whole, fabric))[:2] + sum_of[2])
    assert predict(program, topology).seconds == pytest.approx(seconds)
    assert sum(leaf.times for leaf in program_leaves(program)) == sum(
        len(posted_steps(v.step)) for _, v in turns(program)
    )


def depth(program: Program) -> int:
    """How many repeats lie inside each other: each keeps operands of its own."""
    bodies = [step.op.body for step in program.steps if isinstance(step.op, Repeat)]
    return max((1 + depth(body) for body in bodies), default=0)


@settings(max_examples=80, deadline=None)
@given(some.repeats())
def test_what_a_repeat_holds(program: Program) -> None:
    """Beside what the program written out holds, it keeps its operands to its end; its rows are no copies.

    From the third run on, the runs between the first and the last hold what the account says; what is carried in is
    held beside it. With slices and stacks, whose rows a program written out copies, only the upper side is comparable.
    """
    op, whole = program.steps[0].op, unrolled(program)
    assert isinstance(op, Repeat)
    books, want = account(program), account(whole)
    ends = sum(t.local_bytes() for t in (*program.input_types, *program.output_types))
    assert books.workspace_bytes <= want.workspace_bytes + depth(program) * ends
    if (
        op.n > 2
        and len(program.inputs) == 1
        and op.body.steps
        and not any("repeat" in s.op.name for s in op.body.steps)
    ):
        carried = program.input_types[0].local_bytes()
        # A repeat's staging is that of its worst device; with uneven results another one may hold most around it.
        uneven = sum(int(np.ptp(t.elements())) * t.itemsize for t in program.output_types)
        assert want.workspace_bytes <= books.workspace_bytes <= want.workspace_bytes + carried + uneven


@settings(max_examples=80, deadline=None)
@given(some.repeats())
def test_text_is_read_back(program: Program) -> None:
    assert Program.parse(str(program)) == program
    assert str(Program.parse(program.text(lambda number, step: f"{number} {step.op.name}"))) == str(program)


STAGED = AllReduce(("t",)).staging(TensorType.parse("f32[4, 8]{+t}", "t=2"))
REPEAT = """program
  mesh t=2
  input %x: f32[4, 8]
  input %w: f32[3, 8@t, 8]
  %y, %s = repeat(%x, %w; n=3, carried=1, sliced=1) {
    input %a: f32[4, 8]
    input %b: f32[8@t, 8]
    %0 = slice(%a; dim=1, axes=(t)): f32[4, 8@t]
    %1 = einsum(%0, %b; spec="bi,io->bo"): f32[4, 8]{+t}
    %2 = all_reduce(%1; axes=(t)): f32[4, 8]
    output %2, %0
  }: f32[4, 8]; f32[3, 4, 8@t]
  output %y, %s"""


def test_a_stack_is_as_its_rows_are() -> None:
    mesh = sp.Mesh(a=2, b=2, c=2)
    row = TensorType.parse("f32[4@b, 3]{+a}{root:c}", mesh)
    assert stacked_type(row, 5) == TensorType.parse("f32[5, 4@b, 3]{+a}{root:c}", mesh)


def test_the_text_of_a_repeat() -> None:
    program = Program.parse(REPEAT)
    assert str(program) == REPEAT
    noted = program.text(lambda number, step: f"step {number}").splitlines()[4]
    assert noted == "  %y, %s = repeat(%x, %w; n=3, carried=1, sliced=1) {  # step 0"
    # Slices and their stack live outside; inside, what is carried (128 B), a product (128 B) and a slice of it (64 B)
    # lie beside the all-reduce's result (128 B), which is the carried result itself once the last run is over.
    operands, results = 128 + 3 * 8 * 8 // 2 * 4, 128 + 3 * 4 * 8 // 2 * 4
    assert account(program).workspace_bytes == operands + results + 64 + 128 + STAGED


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("n=3", "n=2", r"step 0 \(repeat\): repeat: operands f32\[4, 8\], f32\[3, 8@t, 8\]; the body takes"),
        ("n=3", "n=-1", r"repeat: repeat: n is -1; legal is a whole number of at least 0\n.*\n +\^"),
        ("n=3", "n=0", r"repeat: repeat: n=0 with sliced operands or stacked results; legal is n of at least 1 row"),
        ("carried=1", "carried=3", r"repeat: carried is 3; legal is a whole number from 0 to 2"),
        ("sliced=1", "sliced=1, ahead=4", r"repeat: ahead is 4; legal is a whole number from 0 to 3"),
        (
            "sliced=1",
            "sliced=1, ahead=1",
            r"step 0 \(slice\) of ahead=1 reads %a, which is carried; legal are rows, inv",
        ),
        ("sliced=1", "sliced=2", r"repeat: sliced is 2; legal is a whole number from 0 to 1"),
        ("n=3", "body=3", r"repeat has no attribute 'body'; legal are n, carried, sliced"),
        ("output %2, %0", "output %0, %2", r"carried value 0 enters as f32\[4, 8\] and leaves as f32\[4, 8@t\]"),
        ("output %2, %0", "", r"repeat: carried is 1; legal is a whole number from 0 to 0"),
        ("    output %2, %0\n  }", "    output %2, %0\n", r"expected 'input', 'output' or a step"),
        ("slice(%a; dim=1", "slice(%a; dim=2", r"the body of repeat: step 0 \(slice\): slice: .* has no dim 2"),
        ("axes=(t)): f32[4, 8@t]", "axes=(t)): f32[4, 8]", r"%0 has the type f32\[4, 8@t\], not f32\[4, 8\]"),
        ("    input %a", "    mesh t=2\n    input %a", r"expected 'input', 'output' or a step"),
        (") {", ")", r"expected '{' in the op repeat, before its body"),
    ],
)
def test_what_a_repeat_refuses(old: str, new: str, says: str) -> None:
    with pytest.raises(sp.ShardplanError, match=says):
        Program.parse(REPEAT.replace(old, new, 1))


def test_bodies_lie_at_most_so_deep() -> None:
    t = TensorType("f32", (2,), (), sp.Mesh(x=1))
    body = Program({"x": t}, [], ("x",))
    for _ in range(16):
        op = Repeat(2, body, 1)
        body = Program({"x": t}, [Step(op, ("x",), ("y",))], ("y",))
    assert Program.parse(str(body)) == body
    with pytest.raises(sp.TypingError, match=r"^repeat: bodies inside each other, 17 deep; legal are 16$"):
        Repeat(2, body, 1)
    text = "program\n mesh x=1\n" + " %y = repeat(%x; n=1) {\n" * 20000
    with pytest.raises(sp.ParseError, match=r"^bodies inside each other, more than 16 deep\n"):
        Program.parse(text)


ONE, TWO = sp.Mesh(x=2), sp.Mesh({"y": 3}, devices=[2, 3, 1])
A, B = TensorType("i32", (12,), ("x",), ONE), TensorType("i32", (12,), ("y",), TWO)
MOVES = [Step(Send(B.layout, TWO), ("a",), ("c",)), Step(Send(A.layout, ONE), ("b",), ("d",))]


def together(steps: Sequence[Step] = MOVES, outputs: Sequence[str] = ("c", "d")) -> Program:
    op = Together(Program({"a": A, "b": B}, steps, outputs))
    return Program({"0": A, "1": B}, [Step(op, ("0", "1"), ("2", "3"))], ("3", "2"))


def test_a_swap_over_two_meshes() -> None:
    program = together()
    apart = Program({"0": A, "1": B}, [Step(s.op, (str(k),), (str(k + 2),)) for k, s in enumerate(MOVES)], ("3", "2"))
    crossed = open_together(together(outputs=("d", "c")))[0]
    assert [(s.operands, s.results) for s in crossed.steps] == [(("0",), ("3",)), (("1",), ("2",))]
    assert open_together(program) == (apart, (0, 0)) and open_together(apart) == (apart, (0, 1))
    assert Program.parse(str(program)) == program and program.devices == (0, 1, 2, 3)
    books, want = account(program), account(apart)
    assert books.received.tolist() == want.received.tolist() == [24, 8, 16, 16]
    assert books.rounds == (2,) and want.rounds == (2, 2)
    # Both operands and both results are there at once, and the buffers of both moves.
    staged = sum(s.op.staging(t) for s, t in zip(MOVES, (A, B), strict=True))
    assert books.workspace_bytes == 4 * (6 + 6 + 4 + 4) + staged
    data = arrays(program)
    for x, y in zip(run_reference(program, data), run_reference(apart, data), strict=True):
        assert all(np.array_equal(a, b) for a, b in zip(x, y, strict=True))


def test_moves_together_come_in_chunks() -> None:
    """Each in so many, so that buffers shrink and latencies count as often."""
    program = together()
    (step,) = program.steps
    assert step.op.cuttable and step.op.chunks == 1 and step.op.in_chunks(1) == step.op
    cut = Program(program.inputs, [Step(step.op.in_chunks(2), step.operands, step.results)], program.outputs)
    body = cut.steps[0].op.body  # pyright: ignore[reportAttributeAccessIssue]
    assert [inner.op.chunks for inner in body.steps] == [2, 2] and cut.steps[0].op.chunks == 2
    assert Program.parse(str(cut)) == cut
    whole, books = account(program), account(cut)
    assert (
        step.op.staging_by_chunks(A, B)(2)
        == cut.steps[0].op.staging(A, B)
        < step.op.staging(A, B)
        == step.op.staging_by_chunks(A, B)(1)
    )
    assert books.workspace_bytes < whole.workspace_bytes
    assert books.latencies == (2 * whole.latencies[0],) and books.received.tolist() == whole.received.tolist()
    data = arrays(program)
    for x, y in zip(run_reference(program, data), run_reference(cut, data), strict=True):
        assert all(np.array_equal(a, b) for a, b in zip(x, y, strict=True))


def test_moves_together_are_priced_on_the_same_links() -> None:
    """Loads add up on each port; the latencies of messages between other pairs do not."""
    topology = sp.Topology.load("nominal", devices=4)
    (x,), (y,) = ([sp.Mesh({"z": 1}, devices=[k])] for k in (0, 1))
    s, t = TensorType("f32", (1 << 20,), (), x), TensorType("f32", (1 << 20,), (), y)
    alone = Program({"0": s}, [Step(Send(t.layout, y), ("0",), ("1",))], ("1",))

    def pair(*ends: tuple[TensorType, TensorType]) -> Program:
        names = [str(k) for k in range(len(ends))]
        steps = [Step(Send(b.layout, b.mesh), (k,), (f"{k}.to",)) for k, (_, b) in zip(names, ends, strict=True)]
        results = tuple(f"{k}.to" for k in names)
        op = Together(Program(dict(zip(names, (a for a, _ in ends), strict=True)), steps, results))
        return Program(op.body.inputs, [Step(op, tuple(names), results)], results)

    def cost(p: Program) -> float:
        return price_program(p, fabric_of(topology, p.meshes)).seconds

    one = cost(alone)
    assert cost(pair((s, t))) == one
    assert cost(pair((s, t), (t, s))) == one  # each way has its own wire
    assert cost(pair((s, t), (s, t))) == pytest.approx(2 * one, rel=0.05)
    groups = [Step(AllGather(0, ("x",)), ("a",), ("c",)), Step(AllGather(0, ("y",)), ("b",), ("d",))]
    # Two hops of the ring of three, whose edges carry twice 16 bytes each; device 1 sends on both rings.
    assert cost(together(groups)) == pytest.approx(2 * 5e-6 + (24 + 32) / 50e9)


@pytest.mark.parametrize(
    ("steps", "outputs", "says"),
    [
        ([Step(Elementwise("-a"), ("a",), ("c",))], ("c",), r"^together: step 0 \(elementwise\) computes; legal are"),
        ([MOVES[0], Step(Send(A.layout, ONE), ("c",), ("d",))], ("c", "d"), r"reads %c, which another step makes"),
        (MOVES, ("c",), r"^together: the outputs are not what the moves make; legal is each of them once$"),
        (MOVES, ("c", "d", "a"), r"^together: the outputs are not what the moves make"),
        ([], ("a",), r"^together: the outputs are not what the moves make"),
    ],
)  # fmt: skip
def test_what_together_refuses(steps: list[Step], outputs: tuple[str, ...], says: str) -> None:
    with pytest.raises(sp.TypingError, match=says):
        together(steps, outputs)


def test_a_repeat_of_swaps_is_certified() -> None:
    """`together` inside `repeat`, on two meshes: a certificate derives its claims, n times those of a run."""
    swap = Step(Together(Program({"a": A, "b": B}, MOVES, ("c", "d"))), ("a", "b"), ("c", "d"))
    back = [Step(Send(t.layout, t.mesh), (o,), (r,)) for o, r, t in (("c", "e", A), ("d", "f", B))]
    body = Program({"a": A, "b": B}, [swap, *back], ("e", "f"))
    program = Program({"0": A, "1": B}, [Step(Repeat(5, body, 2), ("0", "1"), ("2", "3"))], ("2", "3"))
    assert Program.parse(str(program)) == program
    claims = derive(program, (A, B), (A, B), None).claims
    assert claims["received_bytes"] == tuple(5 * n for n in account(body).received.tolist()) != (0, 0, 0, 0)
    assert claims["rounds"] == 5 * (2 + 2 + 2) and claims["types"] == (A, B)
    data = arrays(program)
    for x, y in zip(run_reference(program, data), data, strict=True):
        assert all(np.array_equal(a, b) for a, b in zip(x, y, strict=True))


Values = dict[str, list[np.ndarray]]  # by name the shards


def shared_in(program: Program, fixed: Sequence[str] = ()) -> dict[str, str]:
    """By value whose storage it is in, where a kernel or a loop put it there; on programs of one mesh, or two."""
    sizes = {name: t.elements() * t.itemsize for name, t in program.types.items()}
    return storages(program, sizes, fixed, relabel=False).of


def play(program: Program, values: Values, fixed: Sequence[str] = ()) -> list[list[np.ndarray]]:
    """Run a program in place: what shares storage is written over what was there."""
    of = shared_in(program, fixed)
    for step in program.steps:
        operands = [values[o] for o in step.operands]
        taken = {k: [of[o] for o in step.operands].index(of[r]) for k, r in enumerate(step.results) if of[r] != r}
        if isinstance(step.op, Repeat):
            found = repeated(step.op, operands, taken)
        else:
            found = [list(x) for x in step.op.reference(operands, program.step_types(step)[0])]
            for k, j in taken.items():
                for n, (old, new) in enumerate(zip(operands[j], found[k], strict=True)):
                    found[k][n] = old.reshape(new.shape)
                    found[k][n][...] = new
        values |= zip(step.results, found, strict=True)
    return [values[name] for name in program.outputs]


def repeated(op: Repeat, operands: list[list[np.ndarray]], taken: dict[int, int]) -> list[list[np.ndarray]]:
    """Run a body again and again: what shares an operand's storage must be found there after every run."""
    names, whole = [name for name, _ in op.body.inputs], len(operands) - op.cut
    mine = {j: [x if j in taken.values() else x.copy() for x in shards] for j, shards in enumerate(operands)}
    state = [mine[j] for j in range(op.carried_count)]
    stacks = [
        mine[taken[k]] if k in taken else [np.empty((op.n, *t.local_shape(d)), "f4") for d in range(t.mesh.size)]
        for k, t in enumerate(op.body.output_types)
    ]
    for k in op.order:
        given = [
            *state,
            *operands[op.carried_count : whole],
            *([x[k, ...] for x in mine[j]] for j in range(whole, len(names))),
        ]
        ends = play(op.body, dict(zip(names, given, strict=True)), names[op.carried_count : whole])
        for number, shards in enumerate(ends):
            for n, x in enumerate(shards):
                home = stacks[number][n] if number < op.carried_count else stacks[number][n][k, ...]
                if number in taken:
                    assert not x.size or np.shares_memory(home, x)
                elif number >= op.carried_count:
                    home[...] = x
        state = [ends[j] if j in taken else [x.copy() for x in ends[j]] for j in range(op.carried_count)]
    return [*state, *stacks[op.carried_count :]]


@settings(max_examples=200, deadline=None)
@given(st.one_of(some.sharing_repeats(), some.sharing()))
def test_what_shares_storage_may_be_written_in_place(program: Program) -> None:
    rng = np.random.default_rng(0)
    data = [
        [rng.integers(1, 4, t.local_shape(d)).astype("i4" if t.dtype == "i32" else "f4") for d in range(t.mesh.size)]
        for t in program.input_types
    ]
    names = [name for name, _ in program.inputs]
    with np.errstate(all="ignore"):
        want = run_reference(program, data)
        got = play(program, {n: [x.copy() for x in shards] for n, shards in zip(names, data, strict=True)})
    for shards, others in zip(want, got, strict=True):
        for x, y in zip(shards, others, strict=True):
            np.testing.assert_array_equal(x, y)


T = TensorType("f32", (2, 4), (None, "x"), ONE)
NEW, IDS = TensorType("f32", (1, 4), (None, "x"), ONE), TensorType("i32", (1,), (), ONE)
WRITE = Step(Write(0), ("s", "new", "ids"), ("cache",))
SUM = Step(Elementwise("a+b"), ("c", "s"), ("sum",))
THERE = Send(TensorType("f32", (2, 4), (None, "y"), OTHER := sp.Mesh(y=2)).layout, OTHER)


@pytest.mark.parametrize(
    ("steps", "outputs", "shared"),
    [
        ([WRITE], ("c", "cache"), ((0, 0), (1, 3))),  # what is carried as it is, and a cache
        ([WRITE, Step(Sgd(0.5), ("cache", "s"), ("1",))], ("c", "cache"), ((0, 0),)),  # a row that is read again
        ([WRITE, Step(Sgd(0.5), ("cache", "c"), ("1",))], ("c", "1"), ((0, 0), (1, 3))),  # two steps
        ([WRITE], ("c", "cache", "cache"), ((0, 0),)),  # two stacks of one row
        ([WRITE], ("cache", "cache"), ()),  # carried on, and stacked
        ([SUM], ("sum",), ((0, 0),)),  # an accumulation
        ([SUM], ("c", "sum"), ((0, 0), (1, 3))),  # what it is added to is carried, so that the row goes
        ([], ("c", "s"), ((0, 0),)),  # no kernel leaves the row where it is, so that it is copied
        ([Step(THERE, ("s",), ("1",)), Step(Send(T.layout, ONE), ("1",), ("2",))], ("c", "2"), ((0, 0),)),
        ([Step(Elementwise("-a"), ("v",), ("1",))], ("c", "1"), ((0, 0),)),  # an invariant lives on
        ([Step(Elementwise("a+b"), ("v", "s"), ("1",))], ("c", "1"), ((0, 0), (1, 2))),  # so that the row goes
        ([Step(Elementwise("-a"), ("c",), ("1",))], ("s", "1"), ()),  # what enters carried, and leaves in a stack
        ([Step(Einsum("ab->ab"), ("c",), ("1",))], ("1",), ()),  # a kernel that is not in place
    ],
)
@pytest.mark.parametrize("reverse", [False, True])
def test_what_a_repeat_leaves_where_it_was(
    steps: list[Step], outputs: tuple[str, ...], shared: tuple[tuple[int, int], ...], reverse: bool
) -> None:
    given = {"c": T, "new": NEW, "ids": IDS, "s": T}
    if any("v" in step.operands for step in steps):
        given = {"c": T, "v": T, "s": T}
    op = Repeat(3, Program(given, steps, outputs), 1, 1, reverse)
    assert op.aliases == shared
    results = [f"r{k}" for k in range(len(outputs))]
    outside = dict(zip(given, some.operand_types(op), strict=True))
    program = Program(outside, [Step(op, tuple(given), results)], results)
    apart = sum(op.infer(*outside.values())[k].local_bytes() for k in range(len(outputs)) if k not in dict(shared))
    ends = sum(t.local_bytes() for t in outside.values()) + apart
    assert account(program).workspace_bytes == ends + op.staging(*outside.values())


class CountingWire:
    received = 0


def measured(program: Program) -> tuple[int, dict[str, np.ndarray]]:
    """The most bytes that one device holds on the way, inputs of 3 included; every kernel makes a new array."""

    def bind(op: Op, operands: Any, results: Any) -> Any:
        return wrap_blocking(lambda arrays, wire: [np.multiply(arrays[0], arrays[-1])])

    hands = Hands(0, bind, lambda u: lambda wire: np.empty(u.shape))  # type: ignore[var-annotated]
    bound = hands.steps(program)
    data = {name: np.full(u.shape, 3.0) for name, u in program.inputs}
    tracemalloc.start()
    try:
        got = finish(drive_steps(bound, dict(data), program.outputs, CountingWire()))
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    want = run_reference(program, [[np.full(u.shape, 3.0)] for u in program.input_types])
    assert all(np.array_equal(x, y) for x, (y,) in zip(got, want, strict=True))
    assert all((x == 3).all() for x in data.values())  # the caller's
    return most + sum(x.nbytes for x in data.values()), dict(zip(program.outputs, got, strict=True))


def near(found: int, said: int) -> bool:
    return abs(found - said) <= 1 << 16


def test_a_driver_holds_what_the_account_says() -> None:
    """One device, arrays of megabytes: the most that is allocated is the workspace, beside what the caller holds."""
    t = TensorType("f64", (1 << 17,), (), sp.Mesh(x=1))
    steps = [
        Step(Einsum("i,i->i"), ("x", "w"), ("0",)),
        Step(Einsum("i,i->i"), ("0", "v"), ("1",)),
        Step(Einsum("i,i->i"), ("1", "v"), ("2",)),
    ]
    body = Program({"x": t, "v": t, "w": t}, steps, ("2", "0"))
    given = {"x": t, "v": t, "w": stacked_type(t, 4)}
    program = Program(given, [Step(Repeat(4, body, 1, 1), ("x", "v", "w"), ("y", "s"))], ("y", "s"))
    assert account(program).workspace_bytes == (1 + 1 + 4 + 1 + 4 + 3 - 1) << 20
    assert near(measured(program)[0], account(program).workspace_bytes)


def test_what_enters_a_loop_is_let_go_by_its_first_run() -> None:
    """Of a carried value that nobody else reads there is never one more than the body makes, in the reference too."""
    t = TensorType("f64", (1 << 17,), (), sp.Mesh(x=1))
    body = Program({"x": t, "v": t}, [Step(Einsum("i,i->i"), ("x", "v"), ("0",))], ("0",))
    steps = [Step(Einsum("i,i->i"), ("v", "v"), ("x",)), Step(Repeat(4, body, 1, 0), ("x", "v"), ("y",))]
    program = Program({"v": t}, steps, ("y",))
    assert near(measured(program)[0], 3 << 20)  # v, what a run is given and what it makes
    given = np.full(t.shape, 3.0)
    tracemalloc.start()
    try:
        run_reference(program, [[given]])
        assert near(tracemalloc.get_traced_memory()[1], 2 << 20)
    finally:
        tracemalloc.stop()


def test_a_driver_writes_rows_where_they_were() -> None:
    """Of a stack that a step made; not of one that the caller holds, whose bytes are there twice."""
    t = TensorType("f64", (1 << 17,), (), sp.Mesh(x=1))
    body = Program({"v": t, "s": t}, [Step(Elementwise("a*b"), ("s", "v"), ("0",))], ("0",))
    loops = [Step(Repeat(8, body, 0, 1), ("v", a), (b,)) for a, b in (("w", "s"), ("s", "r"))]
    program = Program({"v": t, "w": stacked_type(t, 8)}, loops, ("r",))
    assert account(program).step_workspaces == ((1 + 8 + 1) << 20,) * 2
    assert near(measured(program)[0], (1 + 8 + 8 + 1) << 20)


def check_driven(program: Program) -> None:
    """The driver on one device: the results are the reference's, and the inputs as they were."""

    def bind(op: Op, operands: Any, results: Any) -> Any:
        return wrap_blocking(lambda arrays, wire: [x.copy() for (x,) in op.reference([[x] for x in arrays], operands)])

    hands = Hands(*program.devices, bind, lambda u: lambda wire: np.empty(u.shape, "f4"))  # type: ignore[var-annotated]
    given = {n: np.full(t.shape, k + 1, "i4" if t.dtype == "i32" else "f4") for k, (n, t) in enumerate(program.inputs)}
    before = [[x.copy()] for x in given.values()]
    with np.errstate(all="ignore"):
        got = finish(drive_steps(hands.steps(program), dict(given), program.outputs, CountingWire()))
        want = run_reference(program, before)
    for x, (y,) in zip([*given.values(), *got], [*before, *want], strict=True):
        np.testing.assert_array_equal(x, y)


@settings(max_examples=200, deadline=None)
@given(some.sharing_repeats(most=1), some.rngs())
def test_a_driver_writes_over_nothing_that_is_read_again(program: Program, rng: random.Random) -> None:
    """Loops after one another, on values of those before: what leaves one in place may be what another reads."""
    steps, types = list(program.steps), dict(program.types)
    for k in range(2):
        (step,) = program.steps
        operands = [rng.choice([n for n in types if types[n] == types[o]]) for o in step.operands]
        steps.append(Step(step.op, tuple(operands), tuple(f"{r}.{k}" for r in step.results)))
        types |= {f"{r}.{k}": types[r] for r in step.results}
    outputs = [*steps[-1].results, *rng.sample(list(types), rng.randint(0, 3))]
    program = Program(program.inputs, steps, outputs)
    check_driven(program)


THERE_AND_BACK = [Step(Reshape("a -> a b=1"), ("s",), ("1",)), Step(Reshape("a b=1 -> a"), ("1",), ("2",))]


@pytest.mark.parametrize("steps", [[], THERE_AND_BACK])
def test_what_a_loop_carries_out_is_its_own(steps: list[Step]) -> None:
    """The last row of a stack leaves carried, and then the stack's place is taken."""
    t = TensorType("f32", (3,), (), sp.Mesh(x=1))
    double = Repeat(2, Program({"s": t}, [Step(Elementwise("2*a"), ("s",), ("0",))], ("0",)), 0, 1)
    last = Repeat(2, Program({"c": t, "s": t}, steps, ("2" if steps else "s",)), 1, 1)
    loops = [Step(double, ("w",), ("a",)), Step(last, ("x", "a"), ("y",)), Step(double, ("a",), ("b",))]
    check_driven(Program({"x": t, "w": stacked_type(t, 2)}, loops, ("y", "b")))


@pytest.mark.parametrize("n", [1, 3])
def test_what_runs_ahead_does_so_a_run_early(n: int) -> None:
    """Nothing is gathered beyond the last row; and beside what a run gathered there is what the next one will read."""
    x, w = (TensorType.parse(text, "t=1") for text in ("f64[1048576]", "f64[1048576]"))
    product = Einsum("i,i->i")
    steps = [Step(product, ("w", "w"), ("v",)), Step(product, ("x", "v"), ("y",))]
    bodies = [Repeat(n, Program({"x": x, "w": w}, steps, ("y",)), 1, 1, ahead=k) for k in (0, 1)]
    plain, early = (Program({"x": x, "w": stacked_type(w, n)}, [Step(op, ("x", "w"), ("z",))], ("z",)) for op in bodies)
    assert Program.parse(str(early)) == early
    order = [visit.step.results[0] for _, visit in turns(early)]
    assert order == ["v", *["v", "y"] * (n - 1), "y"]
    assert account(early).workspace_bytes - account(plain).workspace_bytes == (x.local_bytes() if n > 1 else 0)
    assert account(early).received.tolist() == account(plain).received.tolist()
    most, _ = measured(early)
    assert n == 1 or near(most, account(early).workspace_bytes)


def test_a_driver_copies_no_view() -> None:
    t = TensorType("f64", (1 << 17,), (), sp.Mesh(x=1))
    steps = [Step(Reshape("(a=2 b) -> a b"), ("x",), ("v",)), Step(Einsum("ab,ab->ab"), ("v", "v"), ("y",))]
    program = Program({"x": t}, steps, ("y", "v", "x"))
    assert account(program).workspace_bytes == 2 << 20
    most, got = measured(program)
    assert near(most, 2 << 20) and np.shares_memory(got["v"], got["x"])


def test_ninety_six_layers_cost_what_one_does() -> None:
    """Nothing that reads a program goes through the runs of a body: a repeat of a billion layers is read at once."""
    x = TensorType("f32", (8, 8), ("x",), ONE)
    steps = [Step(AllGather(0, ("x",)), ("x",), ("0",)), Step(Exchange(x.layout), ("0",), ("1",))]
    op = Repeat(10**9, Program({"x": x}, steps, ("1",)), 1)
    program = Program({"x": x}, [Step(op, ("x",), ("y",))], ("y",))
    assert account(program).received.tolist() == [10**9 * 128] * 2
    assert Program.parse(str(program)) == program
    topology = sp.Topology.load("nominal", devices=2)
    assert predict(program, topology).seconds == price_program(program, fabric_of(topology, program.meshes)).seconds > 1

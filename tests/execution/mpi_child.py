"""Run under mpiexec; rank 0 prints a JSON object.

`cases` compares with the reference, `messages` does so without all-to-alls, `memory` traces allocations.
"""

import json
import random
import sys
import tracemalloc
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

import numpy as np  # noqa: E402
from mpi4py import MPI  # noqa: E402

import shardplan as sp  # noqa: E402
from conformance import Case, bodies, cases, data, differences  # noqa: E402
from shardplan.core.accounting import account  # noqa: E402
from shardplan.core.layout import make_layout  # noqa: E402
from shardplan.core.ops import AllGather, AllReduce, AllToAll, Broadcast, Reduce, ReduceScatter, Send, Slice  # noqa: E402
from shardplan.core.program import Program  # noqa: E402
from shardplan.core.step import Step  # noqa: E402
from shardplan.execution.mpi import agreed_programs as mpi_agreed  # noqa: E402
from shardplan.execution.mpi import run as mpi  # noqa: E402
from shardplan.execution.mpi import steps  # noqa: E402
from shardplan.execution.mpi import steps as mpi_steps  # noqa: E402
from shardplan.execution.record import Record  # noqa: E402

WORLD = MPI.COMM_WORLD
RANK, SIZE = WORLD.Get_rank(), WORLD.Get_size()


def places(mesh):
    return [k for k, d in enumerate(mesh.devices) if d == RANK]


def mine(case: Case):
    return [[x[k] for k in places(t.mesh)] for x, t in zip(case.inputs(), case.program.input_types, strict=True)]


def compare(seed: int, count: int) -> None:
    """Run the cases; every output equals the reference, every step receives what its op says."""
    wrong: list[str] = []
    seen: Counter[str] = Counter()
    mpi.REMEMBERED = mpi_agreed.MOST_AGREED = 8  # so that some are forgotten
    received = 0
    for number, case in enumerate((*cases(seed, count, SIZE), *(bodies(seed, 5, SIZE) if SIZE >= 4 else ()))):
        record = Record()
        inputs = mine(case)
        before = [[x.copy() for x in shards] for shards in inputs]
        got = mpi.run_program(case.program, inputs, timeout=60.0, record=record)
        wrong += differences(case, places, got, case.expected())
        for shards, kept in zip(inputs, before, strict=True):
            if not all(x.tobytes() == y.tobytes() for x, y in zip(shards, kept, strict=True)):
                wrong.append(f"{case.name}: an input was written to")
        wrong += counted(case, record)
        received += sum(span.received for span in record.spans)
        seen.update(step.op.name for step in case.program.steps)
        if RANK == 0 and (number + 1) % 200 == 0:
            print(f"cases: {number + 1} of {count}", file=sys.stderr, flush=True)
    bound = list(mpi._executables.values())
    mpi.forget()
    if any(len(x.binding.types) for x in bound):
        wrong.append(f"rank {RANK} keeps datatypes after forgetting")
    gathered = WORLD.gather((wrong, received), root=0)
    if gathered is not None:
        report = {
            "cases": count,
            "ranks": SIZE,
            "ops": dict(sorted(seen.items())),
            "received": sum(n for _, n in gathered),
            "communicators": sum(
                len(one.communicators) for made in mpi_agreed.agreed_programs()._made.values() for one in made
            ),
            "bound programs": len(bound),
            "library": MPI.Get_library_version().splitlines()[0].split(":")[-1].strip(),
            "wrong": [x for part, _ in gathered for x in part],
        }
        print(json.dumps(report))


def counted(case: Case, record: Record) -> list[str]:
    """Say where a span's bytes are not those of the op."""
    wrong = []
    if RANK in case.program.devices and [s.step for s in record.spans] != list(range(len(case.program.steps))):
        wrong.append(f"{case.name}: spans of the steps {[s.step for s in record.spans]}")
    for span in record.spans:
        step = case.program.steps[span.step]
        operands, results = case.program.step_types(step)
        here = np.flatnonzero(step.op.devices(*results) == RANK)
        want = int(step.op.received_bytes(*operands)[here[0]]) if len(here) else 0
        if span.received != want:
            wrong.append(f"{case.name}: {step.op}: rank {RANK} received {span.received}, the op says {want}")
    return wrong


def plans():
    """Programs of about a megabyte a device."""
    m = sp.Mesh(a=2, b=2)
    kind = lambda text: sp.TensorType.parse(text, m)  # noqa: E731
    for source, target in (
        ("f32[512@a, 1024@b]", "f32[512, 1024@(a,b)]"),
        ("f32[512@(a,b), 1024]", "f32[512@(b,a), 1024]"),
        ("bf16[1030@a, 1023@b]", "bf16[1030@b, 1023@a]"),
        ("f32[512, 512]{+a,+b}", "f32[512@b, 512@a]"),
        ("f32[512@a, 1024@b]", "f32[512, 1024]"),
    ):
        free = sp.redistribute(kind(source), kind(target)).program
        yield f"{source} -> {target}", free
        try:
            sp.redistribute(kind(source), kind(target), memory_limit=1)
        except sp.Infeasible as error:
            assert error.least_bytes is not None
            limit = error.least_bytes * 21 // 20
            plan = sp.redistribute(kind(source), kind(target), memory_limit=limit)
            if plan.program != free:
                yield f"{source} -> {target} in {limit} bytes", plan.program
    t = kind("f32[512@a, 1024@b]")
    partial, root = kind("f32[512, 512]{+a,+b}"), kind("f32[512, 512]{root:a,b}")
    for op, x in (
        (AllGather(1, ("b",), 4), t),
        (AllGather(1, ("b",), 257), kind("f32[32@a, 64@b]")),  # a message to and one from the other, every round
        (AllToAll(1, 0, ("b",), chunks=3), t),
        (AllReduce(("a", "b")), partial),
        (AllReduce(("a", "b"), chunks=4), partial),
        (ReduceScatter(1, ("a", "b")), partial),
        (ReduceScatter(0, ("b", "a"), chunks=5), partial),
        (Reduce(("a", "b")), partial),
        (Broadcast(("a", "b")), root),
    ):
        yield str(op), Program({"0": x}, [Step(op, ("0",), ("1",))], ("1",))
    mesh, other = sp.Mesh(x=4), sp.Mesh(c=2, d=2)
    idle = sp.TensorType("i32", (5, 2), ("x",), mesh)  # device 3 has no row, and then no column
    steps = [Step(AllToAll(0, 1, ("x",), chunks=2), ("0",), ("1",)), Step(AllGather(1, ("x",)), ("1",), ("2",))]
    yield "a member with nothing", Program({"0": idle}, steps, ("2",))
    steps = [Step(AllGather(1, ("b",)), ("0",), ("1",)), Step(Slice(1, ("b",)), ("1",), ("2",))]
    steps.append(Step(AllGather(0, ("a",)), ("2",), ("3",)))
    yield "values that die", Program({"0": t}, steps, ("0", "3"))
    yield (
        "a new name",
        Program({"0": t}, [Step(Send(make_layout(2, ("c", "d"), other), other), ("0",), ("1",))], ("1",)),
    )
    rooted = kind("i32[32, 64]{+b}{root:a}")
    yield "a rooted value", Program({"0": rooted}, [Step(AllReduce(("b",)), ("0",), ("1",))], ("1",))
    for chunks in (1, 4):
        ins = {f"x{k}": x for k, x in enumerate((t, kind("i8[1024@a, 512@b]"), kind("f64[300, 512@b]")))}
        outs = ("y0", "y1", "y2")
        yield f"packed in {chunks}", Program(ins, [Step(AllGather(1, ("b",), chunks), tuple(ins), outs)], outs)


def allowed(program: Program) -> int:
    """The workspace of the certificate; of ops that only move, without staging: they pack nothing."""
    books = account(program)
    spared = [
        step.op.staging(*program.step_types(step)[0]) if not hasattr(step.op, "reduction") else 0
        for step in program.steps
    ]
    return max(n - k for n, k in zip(books.step_workspaces, spared, strict=True))


def order() -> list[str]:
    """Say which sums of floats are not taken in the order of the reference."""
    t = sp.TensorType.parse("f32[8, 12]{+a,+b}", sp.Mesh(a=2, b=2))
    addends = [np.random.default_rng(k).normal(size=(8, 12)).astype(np.float32) for k in range(4)]
    wrong = []
    for op in (AllReduce(("b", "a")), ReduceScatter(1, ("b", "a"), chunks=2), ReduceScatter(0, ("a", "b"))):
        program = Program({"0": t}, [Step(op, ("0",), ("1",))], ("1",))
        (got,) = mpi.run_program(program, [[addends[RANK]]], timeout=60.0)
        if not np.array_equal(got[0], sp.run(program, addends)[RANK]):
            wrong.append(f"{op}: rank {RANK} adds in another order")
    return wrong


def memory() -> None:
    """Compare each plan with the reference, and trace a second run: the inputs and all that it allocates."""
    rows: list[tuple[str, int, int]] = []
    wrong: list[str] = []
    rng = random.Random(5)
    mpi_steps.MOST_KEPT = 512
    wrong += order()
    for name, program in plans():
        case = Case(name, program, tuple(data(rng, t) for t in program.input_types))
        inputs = mine(case)
        held = sum(x.nbytes for shards in inputs for x in shards)
        record = Record()
        got = mpi.run_program(program, inputs, timeout=60.0, record=record)
        wrong += differences(case, places, got, case.expected()) + counted(case, record)
        del got
        tracemalloc.start()
        out = mpi.run_program(program, inputs, timeout=60.0)
        rows.append((name, held + tracemalloc.get_traced_memory()[1], allowed(program)))
        tracemalloc.stop()
        del out
    gathered = WORLD.gather((rows, wrong), root=0)
    if gathered is not None:
        rows = [row for part, _ in gathered for row in part]
        print(json.dumps({"rows": rows, "wrong": [x for _, part in gathered for x in part]}))


def main() -> None:
    match sys.argv[1:]:
        case "cases", seed, count:
            compare(int(seed), int(count))
        case "messages", seed, count:
            steps.NATIVE.clear()
            compare(int(seed), int(count))
        case ("memory",):
            memory()
        case other:
            raise SystemExit(f"what is {other}?")


if __name__ == "__main__":
    main()

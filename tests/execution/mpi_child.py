"""Run under mpiexec: `cases` compares with the reference, `memory` traces allocations, `fault` breaks a rank.

Rank 0 prints one JSON object, where the job comes that far.
"""

import json
import os
import signal
import sys
import time
import tracemalloc
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

import numpy as np  # noqa: E402
from conformance import Case, cases, differences  # noqa: E402
from mpi4py import MPI  # noqa: E402

import shardplan as sp  # noqa: E402
from shardplan.core.accounting import account  # noqa: E402
from shardplan.core.messages import at_root  # noqa: E402
from shardplan.core.ops import AllGather, AllReduce, AllToAll, Broadcast, Reduce, ReduceScatter  # noqa: E402
from shardplan.core.program import Program, Step  # noqa: E402
from shardplan.execution import mpi, mpi_steps, mpi_wire  # noqa: E402
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
    received = 0
    for number, case in enumerate(cases(seed, count, SIZE)):
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
    gathered = WORLD.gather((wrong, received), root=0)
    if gathered is not None:
        report = {
            "cases": count,
            "ranks": SIZE,
            "ops": dict(sorted(seen.items())),
            "received": sum(n for _, n in gathered),
            "communicators": len(mpi_wire._communicators),
            "bound programs": len(mpi._executables),
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
        here = places(results[0].mesh)
        want = int(step.op.received(*operands)[here[0]]) if here else 0
        if span.received != want:
            wrong.append(f"{case.name}: {step.op}: rank {RANK} received {span.received}, the op says {want}")
    return wrong


def plans():
    """Programs of a few megabytes, each with the most that a device may allocate beside its inputs."""
    m = sp.Mesh(a=2, b=2)
    kind = lambda text: sp.TensorType.parse(text, m)  # noqa: E731
    for source, target in (
        ("f32[1024@a, 1024@b]", "f32[1024, 1024@(a,b)]"),
        ("f32[1024@(a,b), 1024]", "f32[1024@(b,a), 1024]"),
        ("bf16[1030@a, 1023@b]", "bf16[1030@b, 1023@a]"),
        ("f32[1024, 1024]{+a,+b}", "f32[1024@b, 1024@a]"),
        ("f32[512@a, 1024@b]", "f32[512, 1024]"),
    ):
        for limit in (None, 1):
            try:
                plan = sp.redistribute(kind(source), kind(target), memory_limit=limit)
            except sp.Infeasible as error:
                plan = sp.redistribute(kind(source), kind(target), memory_limit=error.least_bytes)
            yield f"{source} -> {target} limit {limit}", plan.program, plan.certificate.workspace_bytes
    t = kind("f32[512@a, 1024@b]")
    partial, root = kind("f32[512, 1024]{+a,+b}"), kind("f32[512, 1024]{root:a,b}")
    for op, x in (
        (AllGather(1, ("b",), 4), t),
        (AllToAll(1, 0, ("b",), chunks=3), t),
        (AllReduce(("a", "b")), partial),
        (AllReduce(("a", "b"), chunks=4), partial),
        (ReduceScatter(1, ("a", "b")), partial),
        (ReduceScatter(0, ("b", "a"), chunks=5), partial),
        (Reduce(("a", "b")), partial),
        (Broadcast(("a", "b")), root),
    ):
        program = Program({"0": x}, [Step(op, ("0",), ("1",))], ("1",))
        yield str(op), program, account(program).workspace_bytes
    for chunks in (1, 4):
        ins = {f"x{k}": x for k, x in enumerate((t, kind("i8[1024@a, 512@b]"), kind("f64[300, 512@b]")))}
        program = Program(ins, [Step(AllGather(1, ("b",), chunks), tuple(ins), ("y0", "y1", "y2"))], ("y0", "y1", "y2"))
        yield f"packed in {chunks}", program, account(program).workspace_bytes


def memory() -> None:
    """Trace a second run of each plan: arrays allocated, beside the inputs, stay within the workspace."""
    rows: list[tuple[str, int, int]] = []
    for name, program, workspace in plans():
        inputs = [[np.zeros(t.local_shape(k), t_dtype(t)) for k in places(t.mesh)] for t in program.input_types]
        held = sum(x.nbytes for shards in inputs for x in shards)
        mpi.run_program(program, inputs, timeout=60.0)
        tracemalloc.start()
        out = mpi.run_program(program, inputs, timeout=60.0)
        peak = held + tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        del out
        rows.append((name, peak, workspace))
    gathered = WORLD.gather(rows, root=0)
    if gathered is not None:
        print(json.dumps({"rows": [r for part in gathered for r in part]}))


def t_dtype(t):
    from shardplan.core.dtypes import numpy_dtype

    return numpy_dtype(t.dtype)


def program_of(text: str) -> Program:
    mesh = sp.Mesh(x=4)
    t = sp.TensorType.parse(text, mesh)
    steps = [Step(AllGather(0, ("x",)), ("0",), ("1",)), Step(AllGather(1, ("x",)), ("2",), ("3",))]
    return Program({"0": t, "2": sp.TensorType("i32", (4, 8), (None, "x"), mesh)}, steps, ("1", "3"))


def chain() -> Program:
    t = sp.TensorType.parse("i32[2**16]{+x}".replace("2**16", str(2**16)), sp.Mesh(x=4))
    return Program({"0": t}, [Step(Reduce(("x",)), ("0",), ("1",))], ("1",))


def fault(kind: str, timeout: float) -> None:
    """Run on four ranks of which rank 2 does something wrong."""
    program = program_of("i32[8@x, 4]")
    odd = RANK == 2
    if kind == "killed":
        mpi.run_program(program, inputs_of(program), timeout=timeout)
        if odd:
            os.kill(os.getpid(), signal.SIGKILL)
    if kind == "other" and odd:
        program = program_of("i32[16@x, 4]")
    if kind == "late" and odd:
        time.sleep(1.0)
    if kind == "never" and odd:
        time.sleep(120.0)
    if kind == "stuck" and odd:  # comes, but not as far as the second step
        slow(1)
    if kind == "chain":  # of the chain 3, 2, 1, 0 a member hangs: the last in line waits for it over another
        program = chain()
        if odd:
            slow(0)
    if kind == "creation" and odd:  # agrees, and then does not make its communicators
        mpi.connect = lambda *_: time.sleep(120.0)
    if kind == "raising" and odd:
        broken(1)
    if kind == "shards" and odd:
        inputs = [x[:0] for x in inputs_of(program)]
        try:
            mpi.run_program(program, inputs, timeout=timeout)
        except sp.LayoutError as error:
            print(f"caught: {error}", file=sys.stderr, flush=True)
    expected = sp.run(program, [[x] * 4 for (x,) in inputs_of(program)])
    got = mpi.run_program(program, inputs_of(program), timeout=timeout)
    same = all(
        np.array_equal(x[0], want[RANK])
        for x, want, t in zip(got, listed(expected, program), program.output_types, strict=True)
        if at_root(t)[RANK]
    )
    gathered = WORLD.gather(same, root=0)
    if gathered is not None:
        print(json.dumps({"same": all(gathered)}))


def listed(got, program):
    return [got] if len(program.outputs) == 1 else got


def inputs_of(program):
    return [[np.ones(t.local_shape(k), np.int32) for k in places(t.mesh)] for t in program.input_types]


def slow(number: int) -> None:
    replace_step(number, lambda step: lambda arrays, wire: (time.sleep(120.0), step(arrays, wire))[1])


def broken(number: int) -> None:
    def fail(arrays, wire):
        raise ZeroDivisionError("made to fail")

    replace_step(number, lambda step: fail)


def replace_step(number: int, make) -> None:
    bind, count = mpi_steps.bind, iter(range(100))
    mpi.bind = lambda *args: make(bind(*args)) if next(count) == number else bind(*args)


def main() -> None:
    match sys.argv[1:]:
        case "cases", seed, count:
            compare(int(seed), int(count))
        case ("memory",):
            memory()
        case "fault", kind, timeout:
            fault(kind, float(timeout))
        case other:
            raise SystemExit(f"what is {other}?")


if __name__ == "__main__":
    main()

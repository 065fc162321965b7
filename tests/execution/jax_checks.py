"""The checks of `test_jax.py` that need eight devices: run as a child process, `python jax_checks.py`, JSON out.

Every check is a function that returns what the test compares; one that raises is reported by its text.
"""

from __future__ import annotations

import itertools
import traceback
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, replace
from typing import Any, ClassVar
from unittest.mock import patch

import numpy as np
from benchmarks.peers.hlo import largest_bytes, received_bytes

import conformance
import shardplan as sp
from benchmarks import suites
from core.test_fused import BAGS, EXPERTS, GATHER, GEMV, SCATTER, all_fused
from execution.jax_child import main, told
from shardplan.core.accounting import account
from shardplan.core.box_table import BoxTable
from shardplan.core.dtypes import NAMES, numpy_dtype, reduces
from shardplan.core.group_rounds import addends, scatter_sums
from shardplan.core.layout import REDUCTIONS
from shardplan.core.lowering import Boxes, Buffer, Copy, Group, Ints, Region, Round
from shardplan.core.messages import at_root
from shardplan.core.nested import as_nested
from shardplan.core.op import Op
from shardplan.core.ops import (
    AllGather,
    AllReduce,
    AllToAll,
    Broadcast,
    Cast,
    Constant,
    Crop,
    Einsum,
    Elementwise,
    Exchange,
    Gather,
    Iota,
    Pad,
    Permute,
    Reduce,
    ReduceDims,
    ReduceScatter,
    Repeat,
    Reshape,
    ScatterAdd,
    Send,
    Slice,
    Together,
    ToPartial,
)
from shardplan.core.ops.collective import Collective
from shardplan.core.ops.movement import with_dims, without_suffix
from shardplan.core.pattern import Local
from shardplan.core.program import Program
from shardplan.core.reference import distribute, run_reference
from shardplan.core.step import Step
from shardplan.core.tensor import TensorType
from shardplan.execution.jax.cache import BoundedCache
from shardplan.execution.record import Record
from shardplan.interop.hlo import parse_hlo

SAMPLE = 30
FOLDED = ("i8", "u16", "i32", "bool", "f32")
HLO_SAMPLE = {"U": 16, "s8": 12}
MESH = sp.Mesh(a=2, b=2, c=2)
OTHER_ORDER = sp.Mesh({"p": 4, "q": 2}, devices=[3, 1, 0, 2, 7, 6, 5, 4])
OVERLAP = sp.Mesh({"p": 4}, devices=[6, 7, 0, 1])
HALF = sp.Mesh({"p": 4}, devices=[4, 5, 6, 7])
THREE = sp.Mesh({"p": 3}, devices=[2, 0, 7])


def typed(text: str, mesh: sp.Mesh = MESH) -> TensorType:
    return TensorType.parse(text, mesh)


def layer() -> Program:
    """A product whose sum is taken over devices; what it is made of is stacked."""
    inputs = {"x": typed("i32[4@a, 6]"), "w": typed("i32[6, 6@b]")}
    steps = [Step(Einsum("bi,io->bo"), ("x", "w"), ("y",)), Step(AllGather(1, ("b",)), ("y",), ("z",))]
    return Program(inputs, steps, ("z", "y"))


def alone() -> list[tuple[Any, list[TensorType]]]:
    """Every op, in every form that is lowered by other code."""
    layout = lambda text, mesh=MESH: typed(text, mesh).layout  # noqa: E731
    partial, two = typed("i32[8, 4@b]{+a,+c}"), typed("f32[8@(a,b), 4@c]")
    six = sp.Mesh(a=2, b=3)
    out: list[tuple[Any, list[TensorType]]] = [
        (Slice(0, ("c", "a")), [typed("i32[8@b, 3]")]),
        (AllGather(1, ("c",)), [two]),
        (AllGather(0, ("a", "b"), chunks=3), [two]),
        (AllGather((1, 0, 0), ("c", "a", "b")), [two]),
        (AllGather((1, 0), ("c", "b"), chunks=4), [two]),
        (AllGather((0, 1, 0), ("b", "c", "a"), chunks=2), [typed("i32[8@(b,a), 4@c]")]),
        (AllGather(0, ("b",)), [two, typed("i8[6@b]"), typed("f32[4@(c,b), 3]")]),
        (AllGather(0, ("b",), chunks=2), [two, typed("i8[6@b]"), typed("f32[4@(c,b), 3]")]),
        (AllToAll(0, 1, ("b",)), [two]),
        (AllToAll(0, 1, ("a", "b"), ("b", "a")), [typed("i32[8@(c,a,b), 8, 3]")]),
        (AllToAll(2, 0, ("a", "b"), ("b", "a"), chunks=3), [typed("i32[8, 3, 8@(a,b)]")]),
        (AllToAll(0, 1, ("b",)), [two, typed("i16[4@b, 6]")]),
        (Permute(layout("f32[8@c, 4@b]")), [typed("f32[8@b, 4@a]")]),
        (Permute(layout("f32[8@(b,a), 4@c]"), chunks=3), [two]),
        (Permute(layout("i32[8@(b,a)]")), [typed("i32[8@a]")]),
        (Permute(layout("i32[8@(b,a), 4]"), chunks=2), [typed("i32[8@a, 4]")]),
        (Permute(layout("f32[8@c, 4]{+b}")), [typed("f32[8@c, 4]{+a}")]),
        (Permute(layout("f32[4@b, 4]{root:c}")), [typed("f32[4@a, 4]{root:c}")]),
        (Exchange(layout("f32[8@c, 4@(b,a)]")), [two]),
        (Exchange(layout("f32[8@(a,c), 4@b]"), ("b", "c")), [two]),
        (Exchange(typed("i32[6@b, 6@a]", six).layout), [typed("i32[6@a, 6@b]", six)]),
        (Exchange(typed("i32[12@(b,a)]", six).layout, chunks=3), [typed("i32[12@(a,b)]", six)]),
        (Exchange(typed("i32[12@b, 5]", six).layout), [typed("i32[12@a, 5]", six)]),
        (Exchange(layout("f32[]")), [typed("f32[]")]),
        (Exchange(layout("f32[8@c, 4]{root:b}")), [typed("f32[8@a, 4]{root:b}")]),
        (Send(layout("f32[8@q, 4@p]", OTHER_ORDER), OTHER_ORDER), [two]),
        (Send(layout("f32[8, 4@p]", OVERLAP), OVERLAP, chunks=2), [two]),
        (Send(layout("f32[8@p, 4]", HALF), HALF), [typed("f32[8@p, 4]", sp.Mesh(p=4))]),
        (Send(layout("f32[24@p]", THREE), THREE), [typed("f32[24@(a,b,c)]")]),
        (Send(layout("i32[24]", THREE), THREE), [typed("i32[24@(c,b)]{root:a}")]),
        (Send(typed("f32[]", THREE).layout, THREE), [typed("f32[]"), typed("f32[]{root:c}")]),
        (ReduceScatter(0, ("a",)), [partial]),
        (ReduceScatter((1, 0), ("a", "c")), [typed("i32[8, 4@b]{+a,+c}")]),
        (ReduceScatter(0, ("c", "a"), chunks=3), [partial]),
        (ReduceScatter(0, ("c", "a"), "max"), [typed("i8[8, 2]{max:a,c}")]),
        (ReduceScatter(0, ("c",), "min", chunks=2), [typed("f32[8, 2]{min:a,c}")]),
        (ReduceScatter(0, ("a",)), [partial, typed("i64[4]{+a}")]),
        (AllReduce(("c", "a")), [partial]),
        (AllReduce(("c",), chunks=3), [partial, typed("f64[3]{+c}")]),
        (AllReduce(("a",), "max"), [typed("u16[4@b]{max:a}")]),
        (AllReduce(("a",), "min"), [typed("bool[16]{min:a}")]),
        (AllReduce(("a",), "min"), [typed("f32[16]{min:a}")]),
        (ReduceScatter((1, 0), ("c", "a"), "product", chunks=2), [typed("i16[8, 4@b]{product:a,c}")]),
        (ReduceScatter(0, ("a", "c"), "max"), [typed("bf16[8, 4@b]{max:a,c}")]),
        (ReduceScatter(0, ("a",), "bxor"), [typed("u16[8, 4@b]{bxor:a,c}")]),
        (AllReduce(("c", "a"), "product"), [typed("f32[7, 3]{product:a,c}"), typed("i8[5]{product:a,c}")]),
        (AllReduce(("a",), "product"), [typed("bf16[5, 4@b]{product:a}")]),
        (AllReduce(("b", "c"), "band"), [typed("u8[13]{band:b,c}")]),
        (AllReduce(("c",), "bor", chunks=3), [typed("i64[7]{bor:c}")]),
        (AllReduce(("a", "b", "c"), "bxor", chunks=2), [typed("i32[11]{bxor:a,b,c}")]),
        (AllReduce(("a",), "bxor"), [typed("bool[16]{bxor:a}")]),
        (Reduce(("a",), "product"), [typed("c64[6]{product:a}")]),
        (Reduce(("c", "b"), "bxor"), [typed("u32[3, 3]{bxor:b,c}")]),
        (Reduce(("a",), "band", chunks=2), [typed("i8[9]{band:a,b}")]),
        (ToPartial(("b",), "product"), [typed("f32[8@b, 4@c]")]),
        (ToPartial(("b", "a"), "band"), [typed("u8[8@c, 4]")]),
        (ToPartial(("c",), "bxor"), [typed("i32[8, 4@b]")]),
        (Reduce(("a",)), [partial]),
        (Reduce(("a", "c"), chunks=2), [partial]),
        (Reduce(("a",), "max"), [typed("bf16[4@b, 5]{max:a}")]),
        (Broadcast(("a",)), [typed("f32[4@c]{root:a}")]),
        (Broadcast(("a", "b"), chunks=2), [typed("c64[4@c]{root:a}")]),
        (AllGather(0, ("a", "b"), algorithm="ring"), [two]),
        (AllGather(0, ("a", "b"), chunks=2, algorithm="doubling"), [two]),
        (AllToAll(0, 1, ("b",), algorithm="direct"), [two]),
        (ReduceScatter(0, ("c", "a"), algorithm="doubling"), [partial]),
        (AllReduce(("c", "a"), algorithm="tree"), [partial]),
        (Reduce(("a", "c"), algorithm="tree"), [partial]),
        (Broadcast(("a",), algorithm="chain"), [typed("f32[4@c]{root:a}")]),
        (ToPartial(("a",)), [two.with_layout(layout("f32[8@b, 4@c]"))]),
        (ToPartial(("b",)), [two]),
        (ToPartial(("b", "a"), "max"), [typed("i32[8, 4@c]")]),
        (ToPartial(("c",), "min"), [typed("f8e4m3[8, 4@c]")]),
        (ToPartial(("b",), "root"), [typed("bool[4@c]")]),
        (Einsum("ik,kj->ij"), [typed("bf16[8@a, 8@b]"), typed("bf16[8@b, 4@c]")]),
        (Einsum("ij->ji"), [typed("i8[8@a, 4]")]),
        (Elementwise("where(a > b, a*b + 1, relu(-a))"), [typed("i32[8@a, 4]"), typed("i32[4]")]),
        (Elementwise("where(a, b**2, abs(b))"), [typed("bool[8@a]"), typed("f32[8@a]")]),
        (ReduceDims((0,), "max"), [typed("f8e5m2[8@a, 4@b]")]),
        (ReduceDims((1,), "mean", keep=True), [typed("f32[8@a, 4@b]")]),
        (ReduceDims((0, 1)), [typed("u8[8@(a,c), 4@b]")]),
        (Reshape("(i=4 j) k -> i j k"), [typed("f32[8@(a,c), 4@b]")]),
        (Pad((0, 1), (0, 2), 3), [typed("i8[8@(a,c), 4]")]),
        (Crop((0, 1), (8, 3)), [typed("f32[8@(a,c), 4]")]),
        (Cast("bf16"), [typed("f32[8@(a,c), 4]{root:b}")]),
        (Gather(), [typed("f32[8@(a,c), 4@b]"), typed("i32[6]")]),
        (ScatterAdd(8, layout("f32[8@b]")), [typed("f32[6@a, 4@c]"), typed("i32[6@a]")]),
        (Iota("i32", (8, 4), 0, layout("i32[8@(a,c), 4@b]"), MESH), []),
        (Constant(2, "f32", (8, 4), layout("f32[8@(a,c), 4@b]"), MESH), []),
        (Repeat(3, layer(), 1, 1), [typed("i32[4@a, 6]"), typed("i32[3, 6, 6@b]")]),
        (Repeat(3, layer(), 1, 1, reverse=True), [typed("i32[4@a, 6]"), typed("i32[3, 6, 6@b]")]),
        (Repeat(0, Program({"x": two}, [], ("x",)), 1), [two]),
        (Together(Program({"x": two, "y": partial}, [
            Step(AllGather(0, ("b",)), ("x",), ("0",)), Step(AllReduce(("a",)), ("y",), ("1",))
        ], ("1", "0"))), [two, partial]),
        *fused_ops(),
    ]  # fmt: skip
    return out


def fused_ops() -> Iterator[tuple[Op, list[TensorType]]]:
    """What can be fused of five programs, with the types of its operands; every table has seven rows."""
    for text in (EXPERTS, GEMV, GATHER, SCATTER, BAGS.replace("f32[5,", "f32[7,")):
        program = all_fused(Program.parse(text))
        step = program.steps[-1]
        yield step.op, list(program.step_types(step)[0])


def single(op: Any, types: list[TensorType]) -> Program:
    names = [f"x{k}" for k in range(len(types))]
    count = len(op.infer(*types))
    results = tuple(f"y{k}" for k in range(count))
    return Program(dict(zip(names, types, strict=True)), [Step(op, tuple(names), results)], results)


def jax_run(program: Program, inputs: Any, record: Record | None = None) -> Any:
    from shardplan.execution.jax.run import run_program

    return run_program(program, inputs, timeout=10, record=record)


def arrays(program: Program) -> tuple[np.ndarray, ...]:
    rng = np.random.default_rng(0)
    return tuple(
        rng.integers(0, 2 if t.dtype in ("bool", "f8e4m3", "f8e5m2") else 7, t.shape).astype(numpy_dtype(t.dtype))
        for t in program.input_types
    )


def compare(name: str, program: Program) -> list[str]:
    """Differences to the reference, on the values that are held."""
    case = conformance.Case(name, program, arrays(program))
    return conformance.differences(case, lambda m: range(m.size), jax_run(program, case.inputs()), case.expected())


def every_op(kinds: Collection[type] = (Op,)) -> Any:
    out: dict[str, list[str]] = {}
    seen = set()
    for k, (op, types) in enumerate(alone()):
        if not isinstance(op, tuple(kinds)):
            continue
        seen.add(op.name)
        try:
            found = compare(f"{op}", single(op, types))
        except Exception:
            found = [traceback.format_exc()[-600:]]
        if found:
            out[f"{k} {op}"] = found[:2]
    return {"differences": out, "names": sorted(seen)}


def reductions() -> Any:
    """Every reduction in every op that reduces, on shards of random values: addends that are not the identity."""
    wrong: list[str] = []
    rng = np.random.default_rng(5)
    ways = [(ReduceScatter, (0,)), (AllReduce, ()), (Reduce, ())]
    for reduction, dtype in itertools.product(REDUCTIONS, FOLDED):
        if not reduces(reduction, dtype) or (dtype == "bool" and reduction == "sum"):
            continue
        t = typed(f"{dtype}[12, 6@b]{{{'+a,+c' if reduction == 'sum' else f'{reduction}:a,c'}}}")
        ops = [kind(*more, ("c", "a"), reduction, chunks) for (kind, more), chunks in itertools.product(ways, (1, 3))]
        names, results = [f"x{k}" for k in range(len(ops))], [f"y{k}" for k in range(len(ops))]
        steps = [Step(op, (x,), (y,)) for op, x, y in zip(ops, names, results, strict=True)]
        program = Program(dict.fromkeys(names, t), steps, results)  # compiled as one: each costs a tenth of a second
        most = 2 if dtype == "bool" else 6
        shards = [[rng.integers(0, most, t.local_shape()).astype(numpy_dtype(dtype)) for _ in range(8)] for _ in ops]
        found = zip(ops, program.output_types, run_reference(program, shards), jax_run(program, shards), strict=True)
        for op, result, expected, got in found:
            for x, y, here in zip(got, expected, at_root(result), strict=True):
                if here and not np.array_equal(np.asarray(x), y):
                    wrong.append(f"{reduction} of {dtype}, {op.name}, {op.chunks} chunks: {np.asarray(x)}, not {y}")
    return wrong[:5]


def sample(seed: int = 7, count: int = SAMPLE) -> Any:
    """Random programs of the conformance suite, by chance of every kind."""
    out: list[str] = []
    for case in conformance.cases(seed, count, 8, even=True):
        try:
            got = jax_run(case.program, case.inputs())
            out += conformance.differences(case, lambda m: range(m.size), got, case.expected())
        except Exception:
            out.append(f"{case.name}: {traceback.format_exc()[-600:]}")
    return out[:5]


def bodies() -> Any:
    """Repeats inside each other, swaps, and a body that JAX cannot compile as a whole."""
    out: list[str] = []
    for case in conformance.bodies(7, 12, 8, even=True):
        got = jax_run(case.program, case.inputs())
        out += conformance.differences(case, lambda m: range(m.size), got, case.expected())
    record, swap = Record(), next(conformance.bodies(7, 1, 8, even=True))
    jax_run(swap.program, swap.inputs(), record)
    return {
        "differences": out[:5],
        "refused": told(lambda: jax_run(single(sends(2), [typed("f32[8@a, 4]")]), [])),
        "spans": sorted((s.step, s.device, s.received) for s in record.spans),
    }


def every_dtype() -> Any:
    out: dict[str, list[str]] = {}
    for dtype in NAMES:
        t = TensorType(dtype, (4, 8), (("a", "b"), "c"), MESH)
        steps = [AllToAll(0, 1, ("a", "b")), ToPartial(("c", "a", "b")), AllReduce(("a", "b", "c"))]
        program = Program(
            {"0": t}, [Step(o, (str(k),), (str(k + 1),)) for k, o in enumerate(steps)], (f"{len(steps)}",)
        )
        found = compare(dtype, program)
        if found:
            out[dtype] = found
    return out


def exact_bits() -> Any:
    """What a sum would not bring through: -0.0 and NaNs with a payload, by a broadcast and by moves."""
    out: list[str] = []
    for dtype in ("f32", "bf16", "f64", "f8e5m2", "c64"):
        d = numpy_dtype(dtype)
        raw = np.arange(8 * d.itemsize, dtype=np.uint8).reshape(8, -1)
        raw[:, -1] = [0x80, 0x7F, 0xFF, 0x7D, 1, 0x80, 0x7F, 0xFD]  # 0x7d and 0xfd: signalling NaNs of f8e5m2
        raw[0, :-1] = 0
        values = raw.reshape(-1).view(d)
        for op, text in (
            (Broadcast(("a", "b")), "[8@c]{root:a,b}"),
            (AllToAll(0, 1, ("c",)), "[8@c, 2]"),
            (Permute(typed("f32[8@a]").layout), "[8@c]"),
            (Exchange(typed("f32[8@(c,a)]").layout), "[8@(a,c)]"),
            (Send(typed("f32[8@q]", OTHER_ORDER).layout, OTHER_ORDER), "[8@(a,c)]"),
            (Send(typed("f32[8@p]", OVERLAP).layout, OVERLAP, chunks=2), "[8]"),
        ):
            t = typed(dtype + text)
            program = single(op, [t])
            array = np.broadcast_to(values[:, None], t.shape).copy() if t.ndim == 2 else values
            expected = run_reference(program, [distribute(array, t)])[0]
            got = jax_run(program, [distribute(array, t)])[0]
            for x, y, here in zip(got, expected, at_root(program.output_types[0]), strict=True):
                if here and np.asarray(x).tobytes() != y.tobytes():
                    out.append(f"{dtype} {op.name}: {np.asarray(x)!r}, not {y!r}")
    return out[:5]


def moved(program: Program) -> tuple[list[tuple[str, int, int]], dict[int, int], int]:
    """The collectives of the compiled program (kind, bytes in, bytes out), bytes received by id, largest array."""
    from shardplan.execution.jax.run import compile_program, compiled_text

    got: dict[int, int] = dict.fromkeys(program.devices, 0)
    kinds: list[tuple[str, int, int]] = []
    largest = 0
    texts = compiled_text(program)
    parts = [p for p in compile_program(program) if p.executable is not None]
    for text, part in zip(texts, parts, strict=True):
        largest = max(largest, largest_bytes(text))
        for c in parse_hlo(text, len(part.devices)):
            kinds.append((c.kind, c.operand_bytes, c.output_bytes))
            for place, n in enumerate(received_bytes(c, len(part.devices))):
                got[part.devices[place]] += n
    return kinds, got, largest


KINDS = {
    "all_gather": "all-gather",
    "all_to_all": "all-to-all",
    "permute": "collective-permute",
    "reduce_scatter": "reduce-scatter",
    "all_reduce": "all-reduce",
    "reduce": "all-reduce",
    "broadcast": "all-reduce",
}


def hlo() -> Any:
    """Plans of two suites, compiled: their collectives, bytes and largest arrays beside what the program says."""
    from shardplan.execution.jax.lower import moved_bytes
    from shardplan.execution.jax.run import compiled_memory
    from shardplan.execution.rounds import permute_rounds
    from shardplan.interop.jax import plan_of

    wrong: list[str] = []
    checked = padded = 0
    memory: list[tuple[int, int]] = []
    for suite, count in HLO_SAMPLE.items():
        for s, t, _ in suites.problems(suite, 3, count, most_devices=8):
            assert isinstance(s, TensorType) and isinstance(t, TensorType)
            plan = plan_of(s, t)
            program = plan.program
            kinds, got, largest = moved(program)
            wanted: list[str] = []
            says = dict.fromkeys(program.devices, 0)
            exact = True
            for step in program.steps:
                operands, _ = program.step_types(step)
                for d, n in moved_bytes(step.op, *operands).items():
                    says[d] += n
                if step.op.name == "exchange":
                    exact = False
                    for one in itertools.chain(*permute_rounds(step.op, operands).batches):
                        wanted += ["collective-permute"] if one.travels else []
                elif step.op.name in KINDS and step.op.rounds(*operands):
                    wanted.append(KINDS[step.op.name])
            name = f"{suite}: {s} -> {t} on {s.mesh}"
            if [k for k, _, _ in kinds] != wanted:
                wrong.append(f"{name}: the collectives {kinds}, not {wanted}")
            if got != says:
                wrong.append(f"{name}: {got} bytes received, not {says}")
            received = dict(zip(program.devices, (int(n) for n in account(program).received), strict=True))
            if exact and got != received:
                wrong.append(f"{name}: {got} bytes received, but the certificate has {received}")
            padded += not exact and got != received
            tables = 4 * len(program.devices) * max(1, s.ndim)  # constants: where every device cuts
            if largest > max(plan.certificate.bound_bytes, tables):
                wrong.append(f"{name}: an array of {largest} bytes, over the bound of {plan.certificate.bound_bytes}")
            found = compiled_memory(program)
            memory.append((found.temporary_bytes, plan.certificate.workspace_bytes))
            if program.steps and (found.argument_bytes, found.output_bytes) != (s.local_bytes(), t.local_bytes()):
                wrong.append(f"{name}: {found}")
            checked += 1
    return {"wrong": wrong[:6], "checked": checked, "padded": padded, "memory": memory}


def bytes_of_ops(kinds: Collection[type] = (Op,)) -> Any:
    """Each op alone, compiled: bytes received against `moved_bytes`, which is what the op says but where it differs."""
    from shardplan.execution.jax.lower import moved_bytes
    from shardplan.execution.jax.native import NATIVE

    wrong: list[str] = []
    more: dict[str, int] = {}
    for op, types in alone():
        if as_nested(op) or not isinstance(op, tuple(kinds)):  # the text of a body counts its bytes once
            continue
        program = single(op, types)
        kinds_moved, got, _ = moved(program)
        says = moved_bytes(op, *types)
        if op.algorithm and {kind for kind, _, _ in kinds_moved} != {"collective-permute"}:
            wrong.append(f"{op} of {', '.join(map(str, types))}: {kinds_moved}, not the messages that it says")
        added = op.name in ("reduce", "all_reduce") and op.reduction in ("sum", "max", "min")
        widened = added and type(op) in NATIVE and any(t.dtype == "bf16" for t in types)
        if got != ({d: 2 * n for d, n in says.items()} if widened else says):  # XLA:CPU adds bf16 in f32
            wrong.append(f"{op} of {', '.join(map(str, types))}: {got} bytes received, not {says}")
        received = dict(zip(program.output_types[0].mesh.devices, map(int, op.received_bytes(*types)), strict=True))
        if any(says[d] != n for d, n in received.items()):
            more[op.name] = more.get(op.name, 0) + 1
        if any(says[d] < n for d, n in received.items()):
            wrong.append(f"{op}: {says} bytes, less than {received}")
    return {"wrong": wrong, "more": more}


def chunks() -> Any:
    """How many collectives of how many bytes an all-to-all in parts compiles to."""
    out = {}
    for count in (1, 3, 4):
        program = single(AllToAll(0, 1, ("a", "b"), (), count), [typed("f32[48@(a,b), 8, 5]")])
        kinds, got, _ = moved(program)
        out[count] = [len(kinds), got[0], sorted({n for _, n, _ in kinds})]
    program = single(AllReduce(("a",), "sum", 2), [typed("f32[4, 4]{+a}"), typed("f32[6]{+a}"), typed("i32[6]{+a}")])
    out["packed"] = sorted(k[1] for k in moved(program)[0])
    program = single(Permute(typed("f32[16@b]").layout, 4), [typed("f32[16@a]")])
    out["permute"] = moved(program)[0]
    out["barriers"] = barriers(single(AllToAll(0, 1, ("a", "b"), (), 4), [typed("f32[48@(a,b), 8, 5]")]))
    return out


def barriers(program: Program) -> int:
    """How often a program of one step makes a part wait for the one before; else some XLAs merge them."""
    import jax

    from shardplan.execution.jax.executables import jax_mesh, lower_steps

    (name, t), mesh = program.inputs[0], jax_mesh(program.meshes[0])
    axes = tuple(mesh.axis_names)
    body = lower_steps(program, program.steps, [name], program.outputs, t.mesh, axes, True)
    spec = jax.sharding.PartitionSpec(axes)
    shape = jax.ShapeDtypeStruct((t.local_shape()[0] * t.mesh.size, *t.local_shape()[1:]), np.float32)
    mapped = jax.shard_map(body, mesh=mesh, in_specs=spec, out_specs=(spec,))
    return str(jax.make_jaxpr(mapped)(shape)).count("optimization_barrier")


def sends(n: int) -> Repeat:
    """A body that leaves its mesh and comes back."""
    t, to = typed("f32[8@a, 4]"), typed("f32[8@p, 4]", HALF)
    steps = [Step(Send(to.layout, HALF), ("x",), ("y",)), Step(Send(t.layout, MESH), ("y",), ("z",))]
    return Repeat(n, Program({"x": t}, steps, ("z",)), 1)


def errors() -> Any:
    class Unknown(Op):
        name = "unknown"

        def infer(self, *operands: TensorType) -> tuple[TensorType, ...]:
            return operands

        def reference(self, operands: Any, types: Any) -> Any:
            return [list(x) for x in operands]

        def received_bytes(self, *operands: TensorType) -> np.ndarray:
            return np.zeros(8, np.int64)

        def sent_bytes(self, *operands: TensorType) -> tuple[np.ndarray, np.ndarray]:
            return np.arange(8), np.zeros(8, np.int64)

        def rounds(self, *operands: TensorType) -> int:
            return 0

        def staging(self, *operands: TensorType) -> int:
            return 0

        def pattern(self, *operands: TensorType) -> Local:
            return Local(0.0)

    t = typed("f32[8@a, 4]")
    uneven = sp.redistribute(typed("i32[7@a]"), typed("i32[7]")).program
    rows = BoxTable([(0, ((0, 7),), 0, (1,))])
    boxed = sp.redistribute(typed("i32[7]"), sp.TensorType("i32", (7,), rows, typed("i32[7]").mesh)).program
    far = sp.Mesh({"z": 2}, devices=[7, 8])
    good = single(AllGather(0, ("a",)), [t])
    shards = distribute(np.zeros((8, 4), np.float32), t)
    return {
        "uneven": told(lambda: jax_run(uneven, [])),
        "boxes": told(lambda: jax_run(boxed, [])),
        "complex": told(lambda: jax_run(single(AllReduce(("a",), "max"), [typed("c64[2]{max:a}")]), [])),
        "unknown": told(lambda: jax_run(single(Unknown(), [t]), [shards])),
        "device": told(lambda: jax_run(single(AllGather(0, ("z",)), [typed("f32[4@z]", far)]), [])),
        "inputs": told(lambda: jax_run(good, [])),
        "count": told(lambda: jax_run(good, [shards[:3]])),
        "shape": told(lambda: jax_run(good, [[*shards[:7], shards[7][:2]]])),
        "dtype": told(lambda: jax_run(good, [[x.astype(np.int32) for x in shards]])),
    }


def records() -> Any:
    """Spans of a program of three steps on two meshes."""
    t = typed("f32[8@a, 4@b]")
    to = typed("f32[8, 4@p]", HALF)
    ops = [AllGather(0, ("a",)), Send(to.layout, HALF), AllGather(1, ("p",))]
    program = Program({"0": t}, [Step(o, (str(k),), (str(k + 1),)) for k, o in enumerate(ops)], ("3",))
    record = Record()
    array = np.arange(32, dtype=np.float32).reshape(8, 4)
    out = jax_run(program, [distribute(array, t)], record)
    ordered = sorted(record.spans, key=lambda s: (s.step, s.device))
    return {
        "equal": bool(np.array_equal(sp.collect([np.asarray(x) for x in out[0]], program.output_types[0]), array)),
        "spans": [(s.step, s.device, s.received) for s in ordered],
        "times": all(0 <= s.start < s.end < 60 + s.start for s in ordered)
        and max(s.end for s in ordered if s.step == 0) <= min(s.start for s in ordered if s.step == 1),
        "on": sorted({next(iter(x.devices())).id for x in out[0]}),
    }


def kept() -> Any:
    """Equal programs are compiled once; results of jax arrays go in again; a program of nothing runs."""
    from shardplan.execution.jax.run import compile_program

    one, two = (single(AllGather(0, ("a",)), [typed("f32[8@a, 4]")]) for _ in range(2))
    array = np.arange(32, dtype=np.float32).reshape(8, 4)
    first = jax_run(one, [distribute(array, one.input_types[0])])
    again = jax_run(single(Slice(0, ("a",)), [typed("f32[8, 4]")]), first)
    back = sp.collect([np.asarray(x) for x in again[0]], typed("f32[8@a, 4]"))
    nothing = Program({"0": one.input_types[0]}, (), ("0",))
    same = jax_run(nothing, [distribute(array, one.input_types[0])])
    by_run = sp.run(one, distribute(array, one.input_types[0]), backend="jax")
    return [
        compile_program(one) is compile_program(two),
        bool(np.array_equal(back, array)),
        bool(np.array_equal(np.asarray(same[0][7]), array[4:])),
        bool(np.array_equal(np.asarray(by_run[3]), array)),
    ]


def interpreted() -> Any:
    """The ops of the table of native collectives, and random programs, with that table empty."""
    from shardplan.execution.jax import executables
    from shardplan.execution.jax.native import NATIVE

    kinds = tuple(NATIVE)
    with patch.dict(NATIVE, clear=True), patch.object(executables, "EXECUTABLES", BoundedCache(2**28)):
        wrong = bytes_of_ops(kinds)["wrong"]
        return {"every_op": every_op(kinds)["differences"], "bytes": wrong, "sample": sample(9, 20)}


@dataclass(frozen=True, slots=True)
class GatherToFirst(Collective):
    """The first member of every group over `axes`, a suffix of `dim`, gets the tiles of all."""

    name: ClassVar[str] = "gather_to_first"
    dim: int
    axes: tuple[str, ...]
    backwards: bool = False  # the last member's tile first

    def result(self, t: TensorType) -> TensorType:
        layout = with_dims(t.layout, t.mesh, {self.dim: without_suffix(self.name, t, self.dim, self.axes)})
        return t.with_layout(replace(layout, root=(*layout.root, *self.axes)))

    def lower(self, t: TensorType, u: TensorType, devices: Ints, algorithm: str) -> Iterator[Round]:
        group, (before, after) = Group(t, self.axes, devices), Boxes.ends(t, u, devices)
        own, first = before.whole_region("x"), group.me == 0

        def tile(k: int) -> Region:
            return after.part("y", Boxes(t, group.place(group.size - 1 - k if self.backwards else k))).restrict(first)

        takes = [group.take(k, tile(k)) for k in range(1, group.size)]
        yield Round.of([Copy(own.restrict(first), tile(0)), group.put(0, own.restrict(~first)), *takes])


@dataclass(frozen=True, slots=True)
class RingScatter(ReduceScatter):
    """A reduce-scatter that itself cuts boxes into parts of rows, and sends them round a ring."""

    name: ClassVar[str] = "ring_scatter"
    algorithms: ClassVar[tuple[str, ...]] = ("ring",)

    def lower(self, t: TensorType, u: TensorType, devices: Ints, algorithm: str) -> Iterator[Round]:
        yield from scatter_sums(*self._parts(t, u, devices), self.reduction, 3, algorithm)

    def buffers(self, t: TensorType, u: TensorType, devices: Ints, algorithm: str) -> dict[str, Buffer]:
        return addends(*self._parts(t, u, devices), t.dtype, 3, algorithm)


def outside() -> Any:
    """Ops that shardplan does not have, beside what their lowerings mean: values and bytes; the order of a gather."""
    t, out, wrong = typed("i32[8@(b,a), 4@c]"), dict[str, Any](), list[str]()
    for name, op in (("gather", GatherToFirst(0, ("b", "a"))), ("backwards", GatherToFirst(0, ("b", "a"), True))):
        program = single(op, [t])
        (shards,) = jax_run(program, [distribute(np.repeat(np.arange(4, dtype=np.int32), 8).reshape(8, 4), t)])
        out[name] = np.asarray(shards[0])[::2, 0].tolist()
    cases: list[tuple[Any, TensorType]] = [
        (GatherToFirst(0, ("b", "a")), t),
        (GatherToFirst(1, ("c",), True), t),
        (RingScatter(1, ("c", "a")), typed("i32[3, 40@b]{+a,+c}")),
        (RingScatter(0, ("a", "c"), "max"), typed("bf16[8, 5@b, 3]{max:a,c}", sp.Mesh(a=2, b=1, c=4))),
    ]
    for op, s in cases:
        program = single(op, [s])
        wrong += compare(str(op), program)
        received = dict(zip(s.mesh.devices, op.received_bytes(s).tolist(), strict=True))
        _, got, _ = moved(program)
        if got != received:
            wrong.append(f"{op}: {got} bytes received, not {received}")
    return out | {"wrong": wrong}


def donated() -> Any:
    """An input that two steps in a row need, and one whose storage a Send that moves nothing hands on, given up."""
    from shardplan.execution.jax.run import _place_shards, run_placed

    t = typed("f32[8@(a,b,c), 4]")
    renamed = sp.Mesh({"p": 8})
    send = Send(typed("f32[8@p, 4]", renamed).layout, renamed)
    twice = [Step(AllGather(0, ("c",)), ("0",), ("1",)), Step(AllGather(0, ("b", "c")), ("0",), ("2",))]
    handed = [Step(send, ("0",), ("1",)), Step(AllGather(0, ("p",)), ("1",), ("2",))]
    array, wrong = np.arange(32, dtype=np.float32).reshape(8, 4), []
    for name, steps, outputs in (("twice", twice, ("1", "2")), ("handed on", handed, ("2",))):
        program = Program({"0": t}, steps, outputs)
        shards = _place_shards("0", t, distribute(array, t))
        got = run_placed(program, [shards], donated=("0",))
        expected = run_reference(program, [distribute(array, t)])
        if not all(np.array_equal(x, y) for a, b in zip(got, expected, strict=True) for x, y in zip(a, b, strict=True)):
            wrong.append(f"{name}: other values")
        if [x.is_deleted() for x in shards] != [name == "twice"] * 8:
            wrong.append(f"{name}: deleted {[x.is_deleted() for x in shards]}")
    return wrong


CHECKS: tuple[Callable[[], Any], ...] = (
    every_op, bytes_of_ops, reductions, donated, sample, bodies, every_dtype, exact_bits, hlo, chunks, errors, records,
    kept, interpreted, outside,
)  # fmt: skip


if __name__ == "__main__":
    main(CHECKS)

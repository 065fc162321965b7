"""The conformance suite of every backend: each op alone, random chains of ops, redistributions, batches, computations.

A case is a program with its global inputs; every process of a launch draws the same ones. `expected` is the numpy
reference, the only oracle. Data are integers small enough that sums of them are exact in the dtype.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

import shardplan as sp
from benchmarks import suites
from shardplan.core import walk
from shardplan.core.dtypes import numpy_dtype
from shardplan.core.messages import at_root
from shardplan.core.ops import (
    AllGather,
    AllReduce,
    Einsum,
    Elementwise,
    Exchange,
    Op,
    ReduceDims,
    ReduceScatter,
    Repeat,
    Send,
    Slice,
    Together,
)
from shardplan.core.program import Program
from shardplan.core.reference import distribute, run_reference
from shardplan.core.step import Step
from shardplan.core.tensor import TensorType
from shardplan.errors import Infeasible, LayoutError, ShardplanError
from strategies import draw_type, legal_ops, operand_types, random_end, repeat_of

SIZES = {
    1: ((1,),),
    2: ((2,), (2, 1)),
    3: ((3,),),
    4: ((4,), (2, 2), (2, 1, 2)),
    5: ((5,),),
    6: ((6,), (2, 3), (3, 2)),
    7: ((7,),),
    8: ((8,), (4, 2), (2, 4), (2, 2, 2)),
}
MOST = {"bool": 2, "i8": 11, "u8": 11, "f8e4m3": 3, "bf16": 15, "f16": 100}  # integers below are drawn
DTYPES = ("i32", "i32", "f32", "i64", "bf16", "i8", "f64", "f16", "u16", "bool", "c64")
EXPRESSIONS = ("a+b", "2*a-b", "maximum(a,b)", "where(a>b,a,b)", "relu(a)*b", "-a", "abs(a)+1", "a**2")


@dataclass(frozen=True, slots=True)
class Case:
    """A program and the global arrays of its inputs."""

    name: str
    program: Program
    arrays: tuple[np.ndarray, ...]

    def inputs(self) -> list[list[np.ndarray]]:
        """The shards of every input on all devices, in mesh order."""
        return [distribute(a, t) for a, t in zip(self.arrays, self.program.input_types, strict=True)]

    def expected(self) -> list[list[np.ndarray]]:
        """The shards of every output on all devices, by the reference."""
        return run_reference(self.program, self.inputs())


def mesh_of(rng: random.Random, devices: int) -> sp.Mesh:
    """A mesh of at most `devices` devices, mostly of all, at times split, in another order or offset."""
    count = devices if rng.random() < 0.8 else rng.randint(1, devices)
    ids = list(range(count))
    how = rng.random()
    if how < 0.2:
        rng.shuffle(ids)
    elif how < 0.4:
        ids = [k + devices - count for k in range(count)]
    mesh = suites.make_mesh(rng.choice(SIZES[count]), ids)
    wide = [a for a, n in mesh.shape.items() if n in (4, 6, 8)]
    if wide and rng.random() < 0.3:
        axis = rng.choice(wide)
        mesh = mesh.split(axis, node=mesh.shape[axis] // 2, gpu=2)
    return mesh


def data(rng: random.Random, t: TensorType) -> np.ndarray:
    """Each element its own global index where the dtype can hold that, else (and half the time) random integers."""
    count = int(np.prod(t.shape))
    most = MOST.get(t.dtype, 1000)
    if rng.random() < 0.5 and count <= most:
        flat = np.arange(count)
    else:
        flat = np.random.default_rng(rng.getrandbits(32)).integers(0, most, count)
    return flat.reshape(t.shape).astype(numpy_dtype(t.dtype))


def random_type(rng: random.Random, mesh: sp.Mesh, kind: str, dtypes: Sequence[str] = DTYPES) -> TensorType:
    """A type on `mesh`: even, uneven, partial or rooted, of 0 to 3 dims."""
    while True:
        names, partial, root, reduction = draw_type(rng, mesh, rng.randint(0, 3), kind)
        shape = (
            suites.uneven_shape(rng, (mesh,), [names]) if kind == "uneven" else suites.even_shape(rng, mesh, [names], 3)
        )
        dtype = rng.choice([d for d in dtypes if not partial or d not in ("bool", "c64")])
        try:
            return TensorType(dtype, shape, names, mesh, partial=dict.fromkeys(partial, reduction), root=root)
        except ShardplanError:
            continue


def _ends(x: Any) -> list[TensorType]:
    return x if isinstance(x, list) else [x]


def chain(rng: random.Random, devices: int, kinds: Sequence[str], steps: int) -> Case | None:
    """A random walk of legal ops, at times cut into chunks."""
    t = random_type(rng, mesh_of(rng, devices), rng.choice(kinds))
    ops: list[Op] = []
    here = t
    for _ in range(steps):
        legal = legal_ops(rng, here)
        if not legal:
            break
        op: Any = rng.choice(legal)
        if op.cuttable and rng.random() < 0.3:
            op = replace(op, chunks=rng.randint(2, 5))
        if not suitable(op, here):
            continue
        if "padded" in getattr(op, "algorithms", ()) and random.Random(f"{here} {op}").random() < 0.4:
            op = replace(op, algorithm="padded")
        ops.append(op)
        here = op.infer(here)[0]
        if "even" not in kinds[0] or here.all_even:
            continue
        return None
    if not ops:
        return None
    program = Program({"0": t}, [Step(op, (str(k),), (str(k + 1),)) for k, op in enumerate(ops)], (str(len(ops)),))
    return Case("chain " + " ".join(op.name for op in ops), program, (data(rng, t),))


def suitable(op: Op, t: TensorType) -> bool:
    """Whether the reference defines the op on this dtype: sums of bool and orders of complex numbers it does not."""
    reduction = getattr(op, "reduction", None)
    if reduction is None:
        return True
    return not (t.dtype == "bool" and reduction == "sum") and not (t.dtype.startswith("c") and reduction != "sum")


def redistribution(rng: random.Random, devices: int, kinds: Sequence[str]) -> Case | None:
    """A plan of the planner: one tensor or a batch, on one mesh or to another, at times portable or under a limit."""
    mesh = mesh_of(rng, devices)
    kind = rng.choice(kinds)
    ndim = rng.randint(1, 3)
    what = rng.random()
    keywords: dict[str, Any] = {}
    s: Any
    t: Any
    if what < 0.15:
        s, t = suites.batch(rng, mesh, rng.randint(2, 5), 2)
    elif what < 0.35:
        count = rng.randint(1, devices)
        ids = rng.sample(range(devices), count)
        other = suites.make_mesh(rng.choice(SIZES[count]), ids)
        s, t = suites.cross_pair(rng, mesh, other, ndim, even=kind != "uneven")
    elif what < 0.45:  # the same boxes under other names, or in another order
        s, _ = suites.cross_pair(rng, mesh, mesh, ndim, even=kind != "uneven", marked=kind in ("partial", "rooted"))
        t = suites.renamed(rng, s)
    elif kind == "uneven":
        s, t = suites.uneven_pair(rng, mesh, ndim)
    elif kind in ("partial", "rooted"):
        s, t = suites.partial_pair(rng, mesh, ndim)
    else:
        s, t = suites.even_pair(
            rng, mesh, ndim, dtype=rng.choice(("f32", "bf16", "i64", "c128")), axes=suites.atoms(mesh)
        )
    if rng.random() < 0.3:
        keywords["portable"] = True
    if rng.random() < 0.3:
        keywords["memory_limit"] = sum(x.local_bytes() for x in (*_ends(s), *_ends(t))) * 5 // 4
    try:
        plan = sp.redistribute(s, t, **keywords)
    except (Infeasible, LayoutError):  # impossible, or one axis partial with two reductions
        return None
    arrays = tuple(data(rng, x) for x in plan.program.input_types)
    return Case(f"redistribution {kind} {keywords}", plan.program, arrays)


def computation(rng: random.Random, devices: int, kinds: Sequence[str]) -> Case | None:
    """A product, a sum or an expression of sharded operands, then the collective that its type asks for."""
    mesh = mesh_of(rng, devices)
    what = rng.choice(("einsum", "elementwise", "reduce"))
    uneven = "uneven" in kinds and rng.random() < 0.3
    axes = list(mesh.axes)
    rng.shuffle(axes)
    deal = {c: tuple(axes[k::3]) for k, c in enumerate("mkn")}
    size = {
        c: max(1, suites.cuts(mesh, names) * rng.randint(1, 2) + (rng.randint(-1, 1) if uneven else 0))
        for c, names in deal.items()
    }
    dtype = rng.choice(("f32", "f64", "i32", "i64", "bf16"))

    def typed(letters: str, own: str = dtype) -> TensorType:
        return TensorType(own, [size[c] for c in letters], [deal[c] for c in letters], mesh)

    match what:
        case "einsum":
            operands, op = [typed("mk"), typed("kn")], Einsum("mk,kn->mn")
        case "elementwise":
            text = rng.choice(EXPRESSIONS)
            op = Elementwise(text)
            operands = [typed("mn")] * op.expression.arity
        case _:
            operands = [typed("mkn")]
            op = ReduceDims((1,), rng.choice(("sum", "max", "min")), rng.random() < 0.5)
    names = tuple(f"x{k}" for k in range(len(operands)))
    steps = [Step(op, names, ("y",))]
    (here,) = op.infer(*operands)
    last = "y"
    if here.layout.partial and rng.random() < 0.8:
        after: Op = AllReduce(here.layout.partial, here.layout.reduction or "sum")
        if rng.random() < 0.5 and _fits(ReduceScatter(0, here.layout.partial, here.layout.reduction or "sum"), here):
            after = ReduceScatter(0, here.layout.partial, here.layout.reduction or "sum")
        steps.append(Step(after, ("y",), ("z",)))
        last = "z"
    program = Program(dict(zip(names, operands, strict=True)), steps, (last,))
    arrays = tuple(np.asarray(data(rng, t) % 7).astype(numpy_dtype(t.dtype)) for t in operands)
    return Case(f"computation {op}", program, arrays)


def _fits(op: Op, t: TensorType) -> bool:
    try:
        op.infer(t)
    except ShardplanError:
        return False
    return True


def packed(rng: random.Random, devices: int) -> Case:
    """One collective that packs tensors of different shapes and widths."""
    mesh = suites.make_mesh((devices,))
    kinds = ("i8", "f64", "i16", "i8", "c64")
    types = [TensorType(d, (devices * rng.randint(1, 3), rng.randint(1, 4)), ("a",), mesh) for d in kinds]
    ins, outs = [f"x{k}" for k in range(5)], [f"y{k}" for k in range(5)]
    chunks = rng.choice((1, 3))
    program = Program(
        dict(zip(ins, types, strict=True)), [Step(AllGather(0, ("a",), chunks), tuple(ins), tuple(outs))], outs
    )
    return Case("packed all_gather", program, tuple(data(rng, t) for t in types))


def cases(seed: int, count: int, devices: int, even: bool = False) -> Iterator[Case]:
    """Yield `count` random cases for launches of `devices` devices (ids below it); `even`: types that divide only."""
    rng = random.Random(f"conformance {seed} {devices} {even}")
    kinds = ("even", "even", "partial", "rooted") if even else ("any even", "uneven", "partial", "rooted")
    found = 0
    while found < count:
        what = rng.random()
        if what < 0.45:
            case = chain(rng, devices, kinds, rng.choice((1, 1, 2, 3, 5)))
        elif what < 0.8:
            case = redistribution(rng, devices, [k.removeprefix("any ") for k in kinds])
        elif what < 0.95:
            case = computation(rng, devices, kinds)
        else:
            case = packed(rng, devices)
        if case is None or (even and not all(t.all_even for t in case.program.types.values())):
            continue
        found += 1
        yield case


def bodies(seed: int, count: int, devices: int, even: bool = False) -> Iterator[Case]:
    """Yield `count` bodies: a swap over two meshes, alone and again and again, layers from the last to the first, and
    random repeats, some inside others.
    """
    rng = random.Random(f"bodies {seed} {devices} {even}")
    here, there = sp.Mesh(x=2), sp.Mesh({"y": 3}, devices=[2, 3, 1])
    ends = {"a": TensorType("i32", (12,), ("x",), here), "b": TensorType("i32", (12,), ("y",), there)}
    sends = [Step(Send(ends[t].layout, ends[t].mesh), (o,), (r,)) for o, r, t in (("a", "c", "b"), ("b", "d", "a"))]
    swap = Step(Together(Program(ends, sends, ("c", "d"))), ("a", "b"), ("c", "d"))
    back = [Step(Send(ends[t].layout, ends[t].mesh), (o,), (r,)) for o, r, t in (("c", "e", "a"), ("d", "f", "b"))]
    cut = Step(swap.op.in_chunks(2), swap.operands, swap.results)
    programs = [Program(ends, [step], ("d", "c")) for step in (swap, cut)]
    programs += [backwards(here), counted(here)]
    if not even:  # on JAX a body that is compiled as a whole stays on one mesh
        twice = Repeat(2, Program(ends, [swap, *back], ("e", "f")), 2)
        programs.append(Program(ends, [Step(twice, ("a", "b"), ("c", "d"))], ("d", "c")))
    while len(programs) < count:
        t = random_type(rng, mesh_of(rng, devices), "even" if even else rng.choice(("even", "uneven")), ("i32",))
        op = repeat_of(rng, t, 2)
        given, results = (
            {f"i{k}": u for k, u in enumerate(operand_types(op))},
            tuple(f"r{k}" for k in range(len(op.body.outputs))),
        )
        program = Program(given, [Step(op, tuple(given), results)], results)
        if not even or all(u.all_even for p in walk.programs(program) for u in p.types.values()):
            programs.append(program)
    for k, program in enumerate(programs):
        yield Case(f"body {k}", program, tuple(data(rng, t) for t in program.input_types))


def backwards(mesh: sp.Mesh) -> Program:
    """Layers from the last to the first, as those of a gradient: all that they make hangs on the order."""
    x, w = (TensorType.parse(text, mesh) for text in ("i32[12@x]", "i32[12]"))
    steps = [
        Step(Slice(0, ("x",)), ("w",), ("v",)),
        Step(Elementwise("2 * a + b"), ("x", "v"), ("y",)),
        Step(AllGather(0, ("x",)), ("y",), ("z",)),
    ]
    layers = Repeat(3, Program({"x": x, "w": w}, steps, ("y", "z")), 1, 1, reverse=True, ahead=1)
    stack = TensorType.parse("i32[3, 12]", mesh)
    return Program({"x": x, "w": stack}, [Step(layers, ("x", "w"), ("y", "z"))], ("y", "z"))


def counted(mesh: sp.Mesh) -> Program:
    """A repeat without rows: what it makes hangs on how often it runs."""
    x = TensorType.parse("i32[12@x]", mesh)
    body = Program({"x": x}, [Step(Elementwise("2 * a + 1"), ("x",), ("y",))], ("y",))
    return Program({"x": x}, [Step(Repeat(3, body, 1), ("x",), ("y",))], ("y",))


def boxed(seed: int, count: int, devices: int) -> Iterator[Case]:
    """Yield `count` random walks between tables of boxes and layouts, on one mesh or several, at times in chunks."""
    rng = random.Random(f"boxed {seed} {devices}")
    for number in range(count):
        mesh, dtype = mesh_of(rng, devices), rng.choice(DTYPES)
        shape = [rng.randint(1, 9) for _ in range(rng.randint(0, 3))]
        types = [random_end(rng, shape, mesh, dtype)]
        steps: list[Step] = []
        for k in range(rng.randint(1, 3)):
            types.append(random_end(rng, shape, rng.choice((mesh, mesh, mesh_of(rng, devices))), dtype))
            chunks = rng.choice((1, 1, 3))
            s, t = types[-2:]
            op = Exchange(t.layout, chunks=chunks) if s.mesh == t.mesh else Send(t.layout, t.mesh, chunks)
            steps.append(Step(op, (str(k),), (str(k + 1),)))
        program = Program({"0": types[0]}, steps, (str(len(steps)),))
        yield Case(f"boxed {number}", program, (data(rng, types[0]),))


def differences(
    case: Case, place_of: Any, got: Sequence[Sequence[np.ndarray]], expected: Sequence[Sequence[np.ndarray]]
) -> list[str]:
    """Say where the shards `got` of this process differ from the reference, one line each.

    `place_of(mesh)` lists the places in the mesh that this process holds, in mesh order: `got[k]` has a shard for each.
    """
    out: list[str] = []
    for k, (name, t) in enumerate(zip(case.program.outputs, case.program.output_types, strict=True)):
        held = at_root(t)
        places = list(place_of(t.mesh))
        if len(places) != len(got[k]):
            out.append(f"{case.name}: output %{name}: {len(got[k])} shards for the places {places}")
            continue
        for place, shard in zip(places, got[k], strict=True):
            want = expected[k][place]
            if not held[place]:
                continue
            shard = np.asarray(shard)
            where = f"{case.name}: output %{name}, place {place}"
            if shard.shape != want.shape or shard.dtype != want.dtype:
                out.append(f"{where}: {shard.dtype}{shard.shape}, not {want.dtype}{want.shape}")
            elif not np.array_equal(shard, want):
                index = tuple(int(i) for i in np.argwhere(shard != want)[0])
                out.append(f"{where}, index {index}: {shard[index]}, not {want[index]}")
    return out

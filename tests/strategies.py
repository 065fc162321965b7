"""Hypothesis generators shared by the property tests: meshes, types, pairs, pairs across meshes, batches, ops.

The draws of layouts are those of `benchmarks/suites.py`, with choices that Hypothesis can shrink.
"""

import itertools
import math
import random
from collections.abc import Sequence
from typing import Any

from hypothesis import strategies as st

from benchmarks import suites
from shardplan.core.box_table import Box, BoxRow, BoxTable
from shardplan.core.mesh import Mesh
from shardplan.core.nested import stacked_type
from shardplan.core.ops import (
    AdamW,
    AllGather,
    AllReduce,
    AllToAll,
    Broadcast,
    Einsum,
    Elementwise,
    Exchange,
    Op,
    Permute,
    Reduce,
    ReduceScatter,
    Repeat,
    Reshape,
    Send,
    Sgd,
    Slice,
    Together,
    ToPartial,
    Write,
)
from shardplan.core.program import Program
from shardplan.core.step import Step
from shardplan.core.tensor import TensorType
from shardplan.errors import LayoutError, ShardplanError

SIZES = (1, 2, 3, 4, 5, 6, 7, 8, 12)
DTYPES = ("i32", "f32", "i64", "bf16", "i8", "bool")


@st.composite
def meshes(draw: st.DrawFn, most: int = 24, split: bool = True, least: int = 1) -> Mesh:
    """Meshes of 1 to 4 axes, sizes 1, 3, 5, 6, 7 and 12 among them; at times split, reordered or offset."""
    sizes = draw(st.lists(st.sampled_from(SIZES), min_size=1, max_size=4).filter(lambda x: math.prod(x) <= most))
    while math.prod(sizes) < least:
        sizes.append(2)
    count = math.prod(sizes)
    devices = draw(st.sampled_from(("default", "default", "offset", "shuffled")))
    ids = None
    if devices == "offset":
        first = draw(st.integers(1, 5))
        ids = range(first, first + count)
    elif devices == "shuffled":
        ids = draw(st.permutations(range(count)))
    mesh = suites.make_mesh(sizes, ids)
    wide = [a for a, n in mesh.shape.items() if len(suites.atoms(Mesh(x=n))) > 1]
    if split and wide and draw(st.booleans()):
        axis = draw(st.sampled_from(wide))
        n = mesh.shape[axis]
        p = draw(st.sampled_from([k for k in range(2, n) if n % k == 0]))
        mesh = mesh.split(axis, node=p, gpu=n // p)
    return mesh


def rngs() -> st.SearchStrategy[random.Random]:
    """Random objects whose choices Hypothesis shrinks."""
    return st.randoms(use_true_random=False)


def names_of(mesh: Mesh, rng: random.Random, even: bool) -> list[str]:
    """Axes to lay out: whole ones, or (even types) at times their parts or prime sub-axes."""
    if not even:
        return list(mesh.axes)
    out: list[str] = []
    for axis, parts in zip(mesh.axes, mesh.parts, strict=True):
        fine = rng.choice(("whole", "whole", "parts", "primes"))
        primes = [a.name for a in mesh.atoms if a.name == axis or a.name.startswith(f"{axis}.")]
        out += [n for n, _ in parts] if parts and fine == "parts" else primes if fine == "primes" else [axis]
    return out


def draw_type(rng: random.Random, mesh: Mesh, ndim: int, kind: str) -> tuple[suites.Names, list[str], list[str], str]:
    """Dims, partial axes, root axes, reduction; `kind` is even, uneven, partial or rooted."""
    axes = names_of(mesh, rng, kind != "uneven")
    marks = suites.mark(rng, mesh, axes, *{"partial": (0.4, 0.0), "rooted": (0.25, 0.3)}.get(kind, (0.0, 0.0)))
    return suites.pick_names(rng, marks[0], ndim), marks[1], marks[2], rng.choice(suites.REDUCTIONS)


KINDS = ("even", "even", "uneven", "partial", "rooted")


@st.composite
def types(
    draw: st.DrawFn, kinds: tuple[str, ...] = KINDS, most: int = 16, dtypes: tuple[str, ...] = ("i32",)
) -> TensorType:
    """Types of 0 to 3 dims: even, uneven, partial, rooted."""
    mesh, rng = draw(meshes(most)), draw(rngs())
    kind, ndim = draw(st.sampled_from(kinds)), draw(st.integers(0, 3))
    names, partial, root, reduction = draw_type(rng, mesh, ndim, kind)
    if kind == "uneven":
        shape = suites.uneven_shape(rng, (mesh,), [names])
    else:
        shape = suites.even_shape(rng, mesh, [names], 2)
    dtype = draw(st.sampled_from(dtypes))
    return TensorType(dtype, shape, names, mesh, partial=dict.fromkeys(partial, reduction), root=root)


@st.composite
def pairs(
    draw: st.DrawFn, kinds: tuple[str, ...] = ("even", "even", "uneven"), most: int = 24, least: int = 1
) -> tuple[TensorType, TensorType]:
    """Two types of one array on one mesh; partial or rooted kinds have a destination of either kind."""
    mesh, rng = draw(meshes(most, least=least)), draw(rngs())
    kind, ndim = draw(st.sampled_from(kinds)), draw(st.integers(1, 3))
    second = kind if kind in ("even", "uneven") else draw(st.sampled_from(("even", "partial", "rooted")))
    drawn = [draw_type(rng, mesh, ndim, k) for k in (kind, second)]
    names = [d[0] for d in drawn]
    uneven = kind == "uneven"
    shape = suites.uneven_shape(rng, (mesh, mesh), names) if uneven else suites.even_shape(rng, mesh, names, 2)
    reduction = drawn[0][3]
    s, t = (TensorType("i32", shape, n, mesh, partial=dict.fromkeys(p, reduction), root=r) for n, p, r, _ in drawn)
    return s, t


@st.composite
def cross_pairs(draw: st.DrawFn, most: int = 12, marked: bool = True) -> tuple[TensorType, TensorType]:
    """Types on two meshes: reordered, disjoint, overlapping, of unequal counts; even or uneven, at times partial."""
    rng, mesh = draw(rngs()), draw(meshes(most, split=False))
    other = suites.other_mesh(rng, mesh, most)
    ndim, even, marks = draw(st.integers(1, 3)), draw(st.booleans()), marked and draw(st.booleans())
    return suites.cross_pair(rng, mesh, other, ndim, even=even, marked=marks)


@st.composite
def batches(draw: st.DrawFn, most: int = 12, tensors: int = 6) -> tuple[list[TensorType], list[TensorType]]:
    """Batches of 1 to `tensors` pairs on one mesh or between two."""
    rng, mesh = draw(rngs()), draw(meshes(most, split=False))
    other = suites.other_mesh(rng, mesh, most) if draw(st.integers(0, 4)) == 0 else None
    return suites.batch(rng, mesh, draw(st.integers(1, tensors)), 2, other)


@st.composite
def marked_batches(draw: st.DrawFn, most: int = 8, tensors: int = 3) -> tuple[list[TensorType], list[TensorType]]:
    """Batches, on one mesh or between two, of which tensors may be partial or at a root."""
    rng, mesh = draw(rngs()), draw(meshes(most, split=False))
    other = suites.other_mesh(rng, mesh, most) if draw(st.booleans()) else mesh
    found = [
        suites.cross_pair(rng, mesh, other, rng.randint(1, 2), even=draw(st.booleans()), marked=draw(st.booleans()))
        for _ in range(draw(st.integers(1, tensors)))
    ]
    return [s for s, _ in found], [t for _, t in found]


def legal_ops(rng: random.Random, t: TensorType) -> list[Op]:
    """One random try at every kind of op that could be legal on `t`; those that are."""
    used = set(t.layout.used_axes)
    busy = set(t.mesh.expand(t.layout.used_axes))
    free = [a for a in t.mesh.axes if a not in used and not busy & set(t.mesh.span(a).atoms)]
    some = rng.sample(free, rng.randint(1, len(free))) if free else []
    found: list[Op] = []
    cut = [d for d in range(t.ndim) if t.layout.dims[d]]
    if t.ndim and some:
        found.append(Slice(rng.randrange(t.ndim), tuple(some)))
        found.append(ToPartial(tuple(some), rng.choice((t.layout.reduction or "sum", "root"))))
    if cut:
        d = rng.choice(cut)
        names = t.layout.dims[d]
        run = names[rng.randrange(len(names)) :]
        found.append(AllGather(d, run))
        several = {d: t.layout.dims[d] for d in rng.sample(cut, rng.randint(1, len(cut)))}
        dims = tuple(d for d, names in several.items() for _ in names)
        found.append(AllGather(dims, tuple(a for names in several.values() for a in names)))
        found.append(ToPartial(run, t.layout.reduction or "sum"))
        if t.ndim > 1:
            order = rng.sample(run, len(run))
            found.append(AllToAll(d, rng.choice([x for x in range(t.ndim) if x != d]), run, tuple(order)))
    if t.layout.partial:
        run = tuple(rng.sample(t.layout.partial, rng.randint(1, len(t.layout.partial))))
        kind = t.layout.reduction or "sum"
        found += [AllReduce(run, kind), Reduce(run, kind)]
        if t.ndim:
            found.append(ReduceScatter(rng.randrange(t.ndim), run, kind))
            found.append(ReduceScatter(tuple(rng.randrange(t.ndim) for _ in run), run, kind))
    if t.layout.root:
        found.append(Broadcast((*rng.sample(t.layout.root, rng.randint(1, len(t.layout.root))), *some[:1])))
    for op in (Exchange, Permute):
        layout = _other_layout(rng, t, free)
        if layout is not None:
            found.append(op(layout))
    return [op for op in found if _types(op, t)]


def _other_layout(rng: random.Random, t: TensorType, free: list[str]) -> Any:
    names = suites.pick_names(rng, [*(a for d in t.layout.dims for a in d), *free], t.ndim)
    kind = dict.fromkeys(t.layout.partial, t.layout.reduction or "sum")
    try:
        return TensorType(t.dtype, t.shape, names, t.mesh, partial=kind, root=t.layout.root).layout
    except LayoutError:
        return None


def _types(op: Op, t: TensorType) -> bool:
    try:
        op.infer(t)
    except ShardplanError:
        return False
    return True


@st.composite
def applied(draw: st.DrawFn, kinds: tuple[str, ...] = KINDS) -> tuple[Op, TensorType]:
    """A random op on a random type on which it is legal."""
    t, rng = draw(types(kinds)), draw(rngs())
    ops = legal_ops(rng, t)
    if not ops:
        return Slice(0, ()), TensorType("i32", (2,), (None,), t.mesh)
    return draw(st.sampled_from(ops)), t


def chain_back(rng: random.Random, t: TensorType, steps: int) -> list[Op]:
    """Legal ops that lead from a type through others and back to it; none where these do not."""
    ops: list[Op] = []
    here = t
    for _ in range(steps):
        if legal := legal_ops(rng, here):
            ops.append(rng.choice(legal))
            (here,) = ops[-1].infer(here)
    if here.layout.partial:
        ops.append(AllReduce(here.layout.partial, here.layout.reduction or "sum"))
        (here,) = ops[-1].infer(here)
    last = Broadcast(here.layout.root) if here.layout.root else Exchange(t.layout)
    if here != t and _types(last, here):
        ops.append(last)
        (here,) = last.infer(here)
    return ops if here == t else []


def repeat_of(rng: random.Random, t: TensorType, depth: int) -> Repeat:
    """A repeat that carries `t`, of it alone or with invariants and a slice; at times with another inside it."""
    n = rng.randint(0, 4)
    inputs = {"x": t}
    steps: list[Step] = []
    here = "x"

    def add(op: Op, operands: list[str], results: int = 1) -> str:
        names = tuple(f"{len(steps)}.{k}" for k in range(results))
        steps.append(Step(op, tuple(operands), names))
        return names[0]

    for op in chain_back(rng, t, rng.randint(0, 2)):
        here = add(op, [here])
    if depth and rng.random() < 0.7:
        inner = repeat_of(rng, t, depth - 1)
        operands = [here]
        for u in operand_types(inner)[1:]:
            operands.append(rng.choice([here, "x"]) if u == t else f"w{len(inputs)}")
            inputs |= {} if u == t else {operands[-1]: u}
        here = add(inner, operands, len(inner.body.outputs))
    if not n or rng.random() < 0.3:
        return Repeat(n, Program(inputs, steps, (here,)), 1)
    here = add(Elementwise("a+2*b-c"), [here, "v", "s"])
    stacked = rng.choice(((), ("x",), (here,), ("s",)))
    return Repeat(n, Program(inputs | {"v": t, "s": t}, steps, (here, *stacked)), 1, 1, reverse=rng.random() < 0.3)


def operand_types(op: Repeat) -> list[TensorType]:
    """The types of the operands that a repeat takes."""
    whole = len(op.body.inputs) - op.sliced
    return [u if k < whole else stacked_type(u, op.n) for k, u in enumerate(op.body.input_types)]


@st.composite
def repeats(draw: st.DrawFn, most: int = 8, kinds: tuple[str, ...] = ("even", "uneven")) -> Program:
    """Programs around one repeat, whose inputs are its operands and at times kept."""
    rng = draw(rngs())
    t = draw(types(kinds, most))
    op = repeat_of(rng, t, draw(st.integers(0, 2)))
    given = {f"i{k}": u for k, u in enumerate(operand_types(op))}
    results = tuple(f"r{k}" for k in range(len(op.body.outputs)))
    kept = draw(st.sampled_from(((), ("i0",))))
    return Program(given, [Step(op, tuple(given), results)], (*results, *kept))


def sharing_steps(rng: random.Random, t: TensorType, inputs: dict[str, TensorType], count: int) -> list[Step]:
    """Steps on inputs of type `t`, f32, and some more that are added; of most a result may share storage."""
    types, steps = dict(inputs), list[Step]()
    there = Mesh({"line": t.mesh.size}, devices=t.mesh.devices)
    whole = TensorType(t.dtype, t.shape, (), there)  # renames what is replicated
    letters = "abcdefgh"[: t.ndim]
    longer = Reshape(f"{' '.join(letters)} -> {' '.join(letters)} z=1")

    def given(u: TensorType) -> str:
        name = f"i{len(inputs)}"
        inputs[name] = types[name] = u
        return name

    def add(op: Op, *operands: str) -> None:
        found = op.infer(*(types[o] for o in operands))
        steps.append(Step(op, operands, tuple(f"{len(steps)}.{k}" for k in range(len(found)))))
        types.update(zip(steps[-1].results, found, strict=True))

    for _ in range(count):
        x = rng.choice(list(dict.fromkeys(s.results[0] for s in steps)) or [n for n in types if types[n] == t])
        alike = [n for n, u in types.items() if (u.dtype, u.shape[: t.ndim]) == (t.dtype, t.shape)]
        x = x if rng.random() < 0.6 else rng.choice(alike)
        y, z, w = rng.choices([n for n in types if types[n] == types[x]], k=3)
        match rng.randrange(9):
            case 0 | 1:
                add(Elementwise("a+b"), x, y)
            case 2:
                add(Elementwise("2*a"), x)
            case 3:
                add(Elementwise("a*b"), given(TensorType(t.dtype, (), (), types[x].mesh)), x)
            case 4:
                add(Sgd(0.5), x, y)
            case 5:
                add(AdamW(0.5), x, y, z, w, given(TensorType("i32", (), (), types[x].mesh)))
            case 6 if types[x].ndim == t.ndim:
                add(longer, x)
            case 7 if types[x] == t and not t.layout.used_axes:
                add(Send(whole.layout, there), x)
            case 8 if types[x] == t and t.ndim:
                values = TensorType(t.dtype, (1, *t.shape[1:]), (None, *t.layout.dims[1:]), t.mesh)
                add(Write(0), x, given(values), given(TensorType("i32", (1,), (), t.mesh)))
            case _:
                dims = "abcdefghi"[: types[x].ndim]
                add(Einsum(f"{dims}->{dims}"), x)
    return steps


@st.composite
def sharing(draw: st.DrawFn, most: int = 6) -> Program:
    """Programs of which many results may share storage: with operands listed twice, kept inputs, views, renames."""
    rng, t = draw(rngs()), draw(types(("even", "uneven"), most, ("f32",)))
    inputs = dict.fromkeys(("x", "y", "z", "w"), t)
    steps = sharing_steps(rng, t, inputs, rng.randint(1, 9))
    values = [*(r for step in steps for r in step.results), *inputs]
    return Program(inputs, steps, [steps[-1].results[0], *rng.sample(values, rng.randint(0, 3))])


@st.composite
def sharing_repeats(draw: st.DrawFn, most: int = 4) -> Program:
    """Programs around a repeat of which results may share storage; an operand may be listed twice, or kept."""
    rng, t = draw(rngs()), draw(types(("even", "uneven"), most, ("f32",)))
    extra = dict.fromkeys(("c", "d", "v", "s", "r"), t)
    steps = sharing_steps(rng, t, extra, rng.randint(1, 6))
    cut, fixed = ("s", "r"), [n for n in extra if n not in ("c", "d", "s", "r")]
    fitting = ["c", "d", "s", "r", *(r for s in steps for r in s.results if t == _type_in(steps, extra, r))]
    fitting += fitting[4:] * 2  # mostly what a step made
    outputs = rng.choices(fitting, k=2 + rng.randint(0, 2))
    n = rng.randint(1, 3)
    body = Program([(k, extra[k]) for k in ("c", "d", *fixed, *cut)], steps, outputs)
    early = next((k for k, s in enumerate(steps) if {"c", "d"} & {*s.operands}), len(steps))
    op = Repeat(n, body, 2, 2, reverse=rng.random() < 0.5, ahead=rng.randint(0, early))
    given = {f"i{k}": u for k, u in enumerate(operand_types(op))}
    operands = list(given)
    if rng.random() < 0.3:
        operands[-1] = operands[-2]
    results = [f"r{k}" for k in range(len(outputs))]
    return Program(
        given, [Step(op, tuple(operands), tuple(results))], [*results, *rng.sample(operands, rng.randint(0, 1))]
    )


def _type_in(steps: Sequence[Step], inputs: dict[str, TensorType], name: str) -> TensorType:
    return Program(inputs, steps, [name]).types[name]


def random_program(rng: random.Random, devices: int, together: bool, repeat: bool) -> Program:
    """Up to 10 steps on values of two meshes: moves, some across, some at once; kernels; repeats."""
    sizes = rng.choice(((2,), (3,), (4,), (2, 2), (2, 3), (2, 4), (2, 2, 2)))
    ids, count = rng.sample(range(devices), devices), math.prod(sizes)
    first = rng.choice((count, rng.randint(0, devices - count)))  # mostly disjoint, so that steps overlap
    home, away = (
        Mesh(dict(zip(names, sizes, strict=False)), devices=mine)
        for names, mine in (("abcde", ids[:count]), ("pqrst", ids[first : first + count]))
    )
    inputs: dict[str, TensorType] = {}
    steps: list[Step] = []

    def given(t: TensorType) -> str:
        inputs[f"i{len(inputs)}"] = t
        return f"i{len(inputs) - 1}"

    def fresh() -> str:
        mesh = rng.choice((home, away))
        names, partial, root, reduction = draw_type(rng, mesh, 2, rng.choice(("even", "even", "partial", "rooted")))
        n = rng.choice((1, 3, 500))
        shape = tuple(n * d for d in suites.even_shape(rng, mesh, [names], 2))
        return given(TensorType("f32", shape, names, mesh, partial=dict.fromkeys(partial, reduction), root=root))

    def move(t: TensorType) -> Op | None:
        if rng.random() < 0.25 and not (t.layout.partial or t.layout.root):
            other = away if t.mesh == home else home
            names = suites.pick_names(rng, list(other.axes), t.ndim)
            ops = [Send(TensorType(t.dtype, t.shape, names, other).layout, other)]
        else:
            ops = [op for op in legal_ops(rng, t) if op.name not in ("slice", "to_partial")]
        ops = [op for op in ops if _types(op, t)]
        return rng.choice(ops) if ops else None

    def add(op: Op, operands: Sequence[str], count: int = 1) -> None:
        results = tuple(f"{len(steps)}.{k}" for k in range(count))
        steps.append(Step(op, tuple(operands), results))
        types.update(zip(results, op.infer(*(types[o] for o in operands)), strict=True))

    for _ in range(rng.randint(2, 5)):
        fresh()
    types = dict(inputs)
    for _ in range(rng.randint(1, 10)):
        name = rng.choice(list(types))
        t = types[name]
        how = rng.random()
        if together and how < 0.3:
            names = rng.sample(list(types), min(len(types), rng.randint(2, 4)))
            moves = [(n, op) for n in names if (op := move(types[n]))]
            body = [Step(op, (n,), (f"{n}.to",)) for n, op in moves]
            if body:
                ends = tuple(f"{n}.to" for n, _ in moves)
                add(Together(Program({n: types[n] for n, _ in moves}, body, ends)), [n for n, _ in moves], len(moves))
        elif repeat and how < 0.5 and not t.layout.partial:
            op = repeat_of(rng, t, 1)
            extra = [given(u) for u in operand_types(op)[1:]]
            types.update(inputs)
            add(op, [name, *extra], len(op.body.outputs))
        elif how < 0.6 and not t.layout.partial and not t.layout.root:
            add(Elementwise("2*a"), [name])
        elif op := move(t):
            add(op, [name])
    return Program(inputs, steps, tuple(r for step in steps for r in step.results)[-3:])


def dense(shape: Sequence[int], rng: random.Random) -> tuple[int, ...]:
    """Strides of an array of `shape`, its dims in any order."""
    strides, step = [0] * len(shape), 1
    for d in rng.sample(range(len(shape)), len(shape)):
        strides[d], step = step, step * shape[d]
    return tuple(strides)


def sizes_of(box: Box) -> tuple[int, ...]:
    return tuple(hi - lo for lo, hi in box)


def flat_boxes(shape: Sequence[int], start: int, stop: int) -> list[tuple[Box, int]]:
    """Boxes that hold the elements `start` to `stop` of an array in row-major order, and the number of the first."""
    if not shape or stop <= start:
        return [((), start)] if start < stop else []
    inner = math.prod(shape[1:])
    found: list[tuple[Box, int]] = []
    while start < stop:
        row, rest = divmod(start, inner)
        if rest or stop - start < inner:  # a part of a row
            end = min(stop, (row + 1) * inner)
            parts = flat_boxes(shape[1:], rest, rest + end - start)
            found += [(((row, row + 1), *box), row * inner + first) for box, first in parts]
        else:
            end = start + (stop - start) // inner * inner
            found.append((((row, end // inner), *((0, n) for n in shape[1:])), start))
        start = end
    return found


def flat_rows(rng: random.Random, shape: Sequence[int], devices: Sequence[int]) -> list[BoxRow]:
    """Flat shards, as an optimizer has them: runs of any lengths of the row-major array, at times on two devices."""
    n = math.prod(shape)
    cuts = sorted([0, n, *(rng.randint(0, n) for _ in devices[1:])])
    strides = tuple(math.prod(shape[d + 1 :]) for d in range(len(shape)))
    rows = [
        BoxRow(device, box, first - start, strides)
        for device, (start, stop) in zip(devices, itertools.pairwise(cuts), strict=True)
        for box, first in flat_boxes(shape, start, stop)
    ]
    twin = {a: b for a, b in itertools.pairwise(devices) if rng.random() < 0.2}
    held = {row.device for row in rows}
    copies = [row._replace(device=twin[row.device]) for row in rows if twin.get(row.device, row.device) not in held]
    return rows + copies


def strided_rows(rng: random.Random, shape: Sequence[int], devices: Sequence[int]) -> list[BoxRow]:
    """Uneven strided shards: runs of one dim, dealt to devices (some to two), each device's in one array."""
    d = rng.randrange(len(shape))
    cuts = sorted({0, shape[d], *(rng.randint(0, shape[d]) for _ in range(2 * len(devices)))})
    mine: dict[int, list[tuple[int, int]]] = {}
    for run in itertools.pairwise(cuts):
        for device in rng.sample(devices, rng.choice((1, 1, min(2, len(devices))))):
            mine.setdefault(device, []).append(run)
    rows: list[BoxRow] = []
    for device, runs in mine.items():
        local = [sum(hi - lo for lo, hi in runs) if k == d else n for k, n in enumerate(shape)]
        strides, at = dense(local, rng), 0
        for lo, hi in runs:
            box = tuple((lo, hi) if k == d else (0, n) for k, n in enumerate(shape))
            rows.append(BoxRow(device, box, at * strides[d], strides))
            at += hi - lo
    return rows


def scattered_rows(rng: random.Random, shape: Sequence[int], devices: Sequence[int]) -> list[BoxRow]:
    """Boxes of any sizes on any devices, at times on several, stored one after another, each in its own order."""
    boxes: list[Box] = [tuple((0, n) for n in shape)]
    for _ in range(rng.randint(0, 6)):
        box = boxes.pop(rng.randrange(len(boxes)))
        wide = [d for d, (lo, hi) in enumerate(box) if hi - lo > 1]
        if not wide:
            boxes.append(box)
            continue
        d = rng.choice(wide)
        cut = rng.randint(box[d][0] + 1, box[d][1] - 1)
        boxes += [(*box[:d], (box[d][0], cut), *box[d + 1 :]), (*box[:d], (cut, box[d][1]), *box[d + 1 :])]
    used = dict.fromkeys(devices, 0)
    rows: list[BoxRow] = []
    for box in boxes:
        for device in rng.sample(devices, rng.choice((1, 1, len(devices)))):
            rows.append(BoxRow(device, box, used[device], dense(sizes_of(box), rng)))
            used[device] += math.prod(sizes_of(box))
    return rows


def random_table(rng: random.Random, shape: Sequence[int], mesh: Mesh) -> BoxTable:
    """A table of flat shards, of strided shards, or of any boxes."""
    makers = [flat_rows, scattered_rows] + ([strided_rows] if shape else [])
    return BoxTable(rng.choice(makers)(rng, shape, rng.sample(mesh.devices, mesh.size)))


def random_end(rng: random.Random, shape: Sequence[int], mesh: Mesh, dtype: str = "i32") -> TensorType:
    """A type of a table, or of a layout, even or uneven."""
    if rng.random() < 0.6:
        return TensorType(dtype, shape, random_table(rng, shape, mesh), mesh)
    names = suites.pick_names(rng, list(mesh.axes), len(shape))
    return TensorType(dtype, shape, names if shape else (), mesh)


@st.composite
def boxed_pairs(draw: st.DrawFn, most: int = 8) -> tuple[TensorType, TensorType]:
    """Two types of one array, of layouts or tables, on one mesh or two; mostly one at least has a table."""
    rng, mesh = draw(rngs()), draw(meshes(most, split=False))
    other = draw(st.sampled_from((mesh, mesh, suites.other_mesh(rng, mesh, most))))
    shape = [rng.randint(1, 7) for _ in range(draw(st.integers(0, 3)))]
    return random_end(rng, shape, mesh), random_end(rng, shape, other)

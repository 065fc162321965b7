"""What types and moves mean, written once more from the text of the specification: the oracle of the laws.

Uses of the package only the fields that a user wrote (axes, sizes, parts, layout, shape), never its boxes or messages.
"""

import math
from collections.abc import Sequence

import numpy as np

from shardplan.core.dtypes import numpy_dtype
from shardplan.core.mesh import Mesh
from shardplan.core.ops import Exchange, Op
from shardplan.core.program import Program
from shardplan.core.tensor import TensorType

Box = tuple[tuple[int, int], ...]
COMBINE = {
    "sum": np.add, "max": np.maximum, "min": np.minimum, "product": np.multiply,
    "band": lambda a, b: a & b, "bor": lambda a, b: a | b, "bxor": lambda a, b: a ^ b,
}  # fmt: skip
ROUND_CHARGE = 0.002


def factors(n: int) -> list[int]:
    """Prime factors, ascending."""
    p = next((p for p in range(2, n + 1) if n % p == 0), None)
    return [] if p is None else [p, *factors(n // p)]


def digits(mesh: Mesh) -> dict[str, tuple[int, int]]:
    """Every name of a mesh (axis, part, prime sub-axis) as (size, stride)."""
    out: dict[str, tuple[int, int]] = {}
    stride = mesh.size
    for axis, size, parts in zip(mesh.axes, mesh.sizes, mesh.parts, strict=True):
        whole = stride
        for part, part_size in parts or ((axis, size),):
            start = stride
            primes = factors(part_size)
            for k, p in enumerate(primes):
                stride //= p
                if len(primes) > 1:
                    out[f"{part}.{k}"] = p, stride
            out[part] = part_size, start // part_size
        out[axis] = size, whole // size
    return out


def coordinate(mesh: Mesh, name: str, place: int) -> int:
    """The coordinate of a device along a name."""
    size, stride = digits(mesh)[name]
    return place // stride % size


def box(t: TensorType, place: int) -> Box:
    """Section 1: nested ceilings, major to minor."""
    names = digits(t.mesh)
    out: list[tuple[int, int]] = []
    for n, axes in zip(t.shape, t.layout.dims, strict=True):
        lo, hi = 0, n
        for name in axes:
            size, stride = names[name]
            c = math.ceil((hi - lo) / size)
            i = place // stride % size
            lo, hi = min(lo + i * c, hi), min(lo + i * c + c, hi)
        out.append((lo, hi))
    return tuple(out)


def index(b: Box) -> tuple[slice, ...]:
    """A box as an index."""
    return tuple(slice(lo, hi) for lo, hi in b)


def volume(b: Box) -> int:
    """Elements of a box."""
    return math.prod(max(0, hi - lo) for lo, hi in b)


def overlap(a: Box, b: Box) -> int:
    """Elements of an intersection."""
    return volume(tuple((max(x[0], y[0]), min(x[1], y[1])) for x, y in zip(a, b, strict=True)))


def at_root(t: TensorType, place: int) -> bool:
    """Whether a device holds the value."""
    return all(coordinate(t.mesh, r, place) == 0 for r in t.layout.root)


def partial_groups(t: TensorType) -> list[list[int]]:
    """Devices that differ only in their coordinates on the partial axes."""
    names = digits(t.mesh)
    groups: dict[int, list[int]] = {}
    for k in range(t.mesh.size):
        base = k
        for name in t.layout.partial:
            size, stride = names[name]
            base -= k // stride % size * stride
        groups.setdefault(base, []).append(k)
    return list(groups.values())


def content(t: TensorType) -> np.ndarray:
    """The array whose elements are their global index, or as much of it as the dtype can tell apart."""
    dtype = numpy_dtype(t.dtype)
    wide = {"i8": 100, "u8": 200, "f16": 2000, "bf16": 250, "bool": 2}.get(t.dtype, 1 << 22)
    if t.dtype in ("i16", "u16"):
        wide = 30000
    return (np.arange(math.prod(t.shape)) % wide).reshape(t.shape).astype(dtype)


def spread(array: np.ndarray, t: TensorType, rng: np.random.Generator) -> list[np.ndarray]:
    """Shards of `array`: partial ones are random addends, and what nobody may read is noise."""
    out: list[np.ndarray] = [np.empty(0)] * t.mesh.size
    for group in partial_groups(t):
        part = array[index(box(t, group[0]))]
        shards = [part.copy() for _ in group]
        if len(group) > 1:
            noise = [rng.integers(-9, 10, part.shape).astype(part.dtype) for _ in group]
            keep = rng.integers(0, len(group), part.shape)
            if t.layout.reduction == "sum":
                total = sum(noise[1:], np.zeros(part.shape, part.dtype))
                shards = [(part - total).astype(part.dtype), *noise[1:]]
            else:  # one member, drawn for every element, has the value; the others are on the losing side of it
                sign = -1 if t.layout.reduction == "max" else 1
                shards = [np.where(keep == k, part, part + sign * abs(x)) for k, x in enumerate(noise)]
        for k, shard in zip(group, shards, strict=True):
            blank = rng.integers(0, 99, part.shape).astype(part.dtype)
            out[k] = shard.astype(part.dtype) if at_root(t, k) else blank
    # replicas are equal: groups that hold the same box under the same addends get the values of the first
    seen: dict[tuple[object, ...], np.ndarray] = {}
    for k in range(t.mesh.size):
        if at_root(t, k):
            key = (box(t, k), tuple(coordinate(t.mesh, p, k) for p in t.layout.partial))
            out[k] = seen.setdefault(key, out[k]).copy()
    return out


def wrong(shards: Sequence[np.ndarray], t: TensorType, array: np.ndarray, tolerance: float = 0) -> str | None:
    """Why the shards are not `array` under `t`, or None; with a tolerance, relative to the largest element."""
    if len(shards) != t.mesh.size:
        return f"{len(shards)} shards for {t.mesh.size} devices"
    for k, shard in enumerate(shards):
        want = array[index(box(t, k))].shape
        if shard.shape != want or shard.dtype != array.dtype:
            return f"device {k} has {shard.dtype}{list(shard.shape)}, not {array.dtype}{list(want)}"
    for group in partial_groups(t):
        if not at_root(t, group[0]):
            continue
        total = shards[group[0]]
        for k in group[1:]:
            total = COMBINE[t.layout.reduction or "sum"](total, shards[k]).astype(total.dtype)
        want = array[index(box(t, group[0]))]
        near = tolerance and np.abs(total - want).max(initial=0) <= tolerance * max(1, np.abs(array).max(initial=0))
        if not near and not np.array_equal(total, want):
            return f"device {group[0]} of {t} holds other values"
    return None


def run(program: Program, arrays: Sequence[np.ndarray], rng: np.random.Generator) -> list[list[np.ndarray]]:
    """The shards after a program, by the ops' reference semantics, from random addends."""
    values = {n: spread(a, t, rng) for (n, t), a in zip(program.inputs, arrays, strict=True)}
    for step in program.steps:
        types = [program.types[o] for o in step.operands]
        values.update(zip(step.results, step.op.reference([values[o] for o in step.operands], types), strict=True))
    return [values[o] for o in program.outputs]


def uncovered(program: Program) -> str | None:
    """Which exchange has a group that does not hold what its members want, or None."""
    for step in program.steps:
        if not isinstance(step.op, Exchange) or not step.op.axes:
            continue
        for name, result in zip(step.operands, step.results, strict=True):
            t, u = program.types[name], program.types[result]
            names = [digits(t.mesh)[a] for a in step.op.axes]
            groups: dict[int, set[Box]] = {}
            base = [k - sum(k // stride % size * stride for size, stride in names) for k in range(t.mesh.size)]
            for k, b in enumerate(base):
                groups.setdefault(b, set()).add(box(t, k))
            for k, b in enumerate(base):
                if sum(overlap(x, box(u, k)) for x in groups[b]) < volume(box(u, k)):
                    return f"{step.op}: the group of device {k} does not hold {box(u, k)} under {t}"
    return None


def unsound(program: Program, destinations: Sequence[TensorType], seed: int = 0) -> str | None:
    """T1: why a program does not deliver every destination box on every device, or None.

    The types of the outputs are those of the destinations, mesh and order of devices included. Beside that they are not
    trusted: what counts is what the destination says, shard by shard. Outputs behind those of the inputs are inputs
    that are kept, and `destinations` names their types too.
    """
    if reason := uncovered(program):
        return reason
    rng = np.random.default_rng(seed)
    arrays = [content(t) for _, t in program.inputs]
    kept = [dict(program.inputs)[name] for name in program.outputs[len(arrays) :]]
    wanted = [*arrays, *map(content, kept)]
    for shards, t, array, name in zip(run(program, arrays, rng), destinations, wanted, program.outputs, strict=True):
        found = program.types[name]
        if (str(found), str(found.mesh)) != (str(t), str(t.mesh)):
            return f"%{name} is {found} on {found.mesh}, not {t} on {t.mesh}"
        if reason := wrong(shards, t, array):
            return f"%{name}: {reason}"
    return None


def held_bytes(t: TensorType, device: int) -> int:
    """Bytes that a device, by its id, holds of a value."""
    if device not in t.mesh.devices:
        return 0
    return volume(box(t, t.mesh.devices.index(device))) * t.itemsize


def lower_bound(s: TensorType, t: TensorType) -> dict[int, int]:
    """Section 6, by device id of the destination; equal partial parts or a plain source only."""
    home = {d: k for k, d in enumerate(s.mesh.devices)}
    out: dict[int, int] = {}
    for k, d in enumerate(t.mesh.devices):
        if not at_root(t, k):
            out[d] = 0
            continue
        have = overlap(box(s, home[d]), box(t, k)) if d in home and at_root(s, home[d]) else 0
        out[d] = (volume(box(t, k)) - have) * t.itemsize
    return out


def least_crossing(s: TensorType, t: TensorType, node: int) -> int:
    """Bytes of what is wanted on so many devices in a row and not held there, each element once."""
    total = 0
    for k in {d // node for d in t.mesh.devices}:
        held, wanted = (np.zeros(x.shape, dtype=bool) for x in (s, t))
        for x, mask in ((s, held), (t, wanted)):
            for place, device in enumerate(x.mesh.devices):
                if device // node == k:
                    mask[index(box(x, place))] = True
        total += int((wanted & ~held).sum())
    return total * s.itemsize


def bound(s: TensorType, t: TensorType) -> int:
    """The largest shard of source and destination."""
    return max(volume(box(x, k)) for x in (s, t) for k in range(x.mesh.size)) * s.itemsize


def cost(program: Program, bound_bytes: int) -> float:
    """The objective of a chain without a topology: what the worst device of a step sends or receives, and its rounds.

    A chunk is a round.
    """
    total = 0.0
    for step in program.steps:
        types = [program.types[o] for o in step.operands]
        rounds = step.op.rounds(*types) * step.op.chunks
        total += moved(step.op, *types) + ROUND_CHARGE * bound_bytes * rounds
    return total


def moved(op: Op, *types: TensorType) -> int:
    """The larger of the bytes that a device sends and receives."""
    return max(int(op.sent_bytes(*types)[1].max(initial=0)), int(op.received_bytes(*types).max(initial=0)))


def live_peak(program: Program) -> int:
    """Largest sum of live shards between steps, device by device: a value lives to its last use, outputs to the end."""
    last = {o: len(program.steps) for o in program.outputs}
    for k, step in reversed(list(enumerate(program.steps))):
        for o in step.operands:
            last.setdefault(o, k)
    born = {n: -1 for n, _ in program.inputs}
    born |= {r: k for k, step in enumerate(program.steps) for r in step.results}
    worst = 0
    for moment in range(-1, len(program.steps)):
        held: dict[int, int] = {}
        for name, k in born.items():
            if k <= moment < last.get(name, k) or (k == moment == -1):
                t = program.types[name]
                for place, device in enumerate(t.mesh.devices):
                    held[device] = held.get(device, 0) + volume(box(t, place)) * t.itemsize
        worst = max(worst, *held.values()) if held else worst
    return worst

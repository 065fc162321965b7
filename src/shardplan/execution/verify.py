"""A plan on trial: its certificate without the planner, and its program on the reference, shard by shard."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from shardplan.core.dtypes import numpy_dtype
from shardplan.core.messages import at_root
from shardplan.core.op import Array, Shards
from shardplan.core.part import Part, Positions, blocks, corners, descent, moved_values, numbers, run_part
from shardplan.core.program import Program
from shardplan.core.reference import collect, distribute, gather, spread_addends
from shardplan.core.tensor import TensorType
from shardplan.errors import BackendError, Infeasible, LayoutError
from shardplan.execution.run import run
from shardplan.plans.plan import Plan

LARGEST_ARRAY = 64 * 2**20  # bytes of a global array that is run as a whole
LARGEST_SHARDS = 2**30  # bytes of all shards of a value, on all devices, that are held at once
BLOCK = 64 * 2**20  # bytes of all shards of a value when an array is run by blocks
LARGEST_RUN = 16 * 2**30  # bytes of all shards of all values of a program that is run by blocks
SEED = 20211201  # any: one, so that a run can be repeated
DIGITS = 16  # hexadecimal, of a checksum: 64 bits, which no two outputs share by chance
# Integers below these are exact in the dtype. Each is the largest prime for which that holds: data that counts modulo a
# prime has no period that a box shares.
_EXACT = {
    "f8e4m3": 13,
    "f8e5m2": 7,
    "bf16": 251,
    "f16": 2039,
    "i8": 127,
    "u8": 251,
    "bool": 2,
    "i16": 32749,
    "u16": 65521,
}
_WIDE_EXACT = 2**24 - 3  # of all others, f32 first
_RANDOM = 2**20  # random integers are below it: a few of them add up exactly in f32


@dataclass(frozen=True, slots=True)
class TrialVerdict:
    """What `verify` found."""

    runs: tuple[str, ...]  # names of the data that were run
    shards: int  # of the destinations
    elements: int  # of their shards that were compared
    total: int  # of their shards in all
    blocks: int  # parts in which the program was run, at least 1

    @property
    def complete(self) -> bool:
        """Whether every element was compared."""
        return self.elements == self.total


def index_data(t: TensorType) -> Array:
    """Return the global array whose elements are their row-major numbers, modulo what the dtype holds exactly.

    >>> from shardplan.core.mesh import Mesh
    >>> index_data(TensorType.parse("i32[2, 3]", Mesh(x=1))).tolist()
    [[0, 1, 2], [3, 4, 5]]
    """
    return index_part(t, tuple(map(np.arange, t.shape)))


def index_part(t: TensorType, positions: Positions) -> Array:
    """Return what `index_data` has at some positions of each dim."""
    return numbers(t.shape, positions, _EXACT.get(t.dtype, _WIDE_EXACT)).astype(numpy_dtype(t.dtype))


def random_data(t: TensorType, number: int) -> Array:
    """Return random integers, exact in the dtype; `number` varies the seed."""
    top = min(_EXACT.get(t.dtype, _RANDOM), _RANDOM)
    return np.random.default_rng(SEED + number).integers(0, top, t.shape).astype(numpy_dtype(t.dtype))


def too_large(types: Sequence[TensorType]) -> str:
    """Say why values of these types are not run as a whole, or return an empty text."""
    for t in types:
        if t.nbytes >= LARGEST_ARRAY:
            return f"{t} has {t.nbytes} bytes; arrays of {LARGEST_ARRAY} bytes and more are not run"
    shards = sum(shard_bytes(t) for t in types)
    if shards >= LARGEST_SHARDS:
        return f"the shards of all devices take {shards} bytes together; {LARGEST_SHARDS} and more are not run"
    return ""


def shard_bytes(t: TensorType) -> int:
    """Return the bytes of the shards on all devices."""
    return int(t.elements().sum()) * t.itemsize


def verify(plan: Plan) -> TrialVerdict:
    """Check the certificate, then run the program on data, and compare the shards with the destinations'.

    Small arrays are run as a whole, on index data and on random integers; larger ones by blocks, on index data. Where
    all shards of all values are above `LARGEST_RUN` bytes, what is run of an array is the first and the last index of
    every run that no step cuts, along each dim: an op treats the elements between alike.

    Raises:
        CertificateError: A claim does not follow from the program.
        BackendError: A shard differs from the destination's; it names the first device, index and values.
        Infeasible: Even of the ends of the runs there are too many.
    """
    plan.certificate.check()
    program, sources, destinations = plan.program, plan.certificate.sources, plan.certificate.destinations
    shards, total = sum(t.mesh.size for t in destinations), sum(int(t.elements().sum()) for t in destinations)
    if too_large((*sources, *destinations)):
        parts = [_verify_parts(program, k, s, t) for k, (s, t) in enumerate(zip(sources, destinations, strict=True))]
        return TrialVerdict(("index",), shards, sum(n for n, _ in parts), total, sum(b for _, b in parts))
    for name in ("index", "random"):
        arrays = [index_data(t) if name == "index" else random_data(t, k) for k, t in enumerate(sources)]
        results = _run_shards(program, [distribute(a, t) for a, t in zip(arrays, sources, strict=True)])
        arrived = results[: len(destinations)]  # behind them are inputs that the caller keeps
        for k, (array, found, t) in enumerate(zip(arrays, arrived, destinations, strict=True)):
            compare(found, program.output_types[k], array, t, f"output {k} on {name} data")
    return TrialVerdict(("index", "random"), shards, total, total, 1)


def _verify_parts(program: Program, number: int, s: TensorType, t: TensorType) -> tuple[int, int]:
    """Run one tensor of a plan by blocks; return the elements of shards that were compared, and the blocks."""
    name, output = program.inputs[number][0], program.outputs[number]
    found, count = 0, 0
    for positions in _parts(program, name):
        array = index_part(s, positions)
        results = run_part(program, name, _spread(array, s, positions), positions)
        compare(results[output], program.types[output], array, t, f"output {number} on index data", positions)
        boxes = Part(t, positions).boxes()
        found += int(np.prod(boxes[:, :, 1] - boxes[:, :, 0], axis=1).sum())
        count += 1
    return found, count


def _spread(array: Array, t: TensorType, positions: Positions) -> list[Array]:
    """The shards of a part of an array; under a partial type each element is in one addend, the next one in another."""
    addends = math.prod(t.mesh.span(name).size for name in t.layout.partial)
    owner = numbers(t.shape, positions, addends) if addends > 1 else np.empty(array.shape, dtype=np.bool_)
    return spread_addends(array, t, Part(t, positions).boxes(), owner)


def _parts(program: Program, name: str) -> Iterator[Positions]:
    """Yield all blocks of an input in row-major order, or the ends of its runs where that is too much to run."""
    types = list(descent(program, name).values())
    for boxed in (t for t in types if t.layout.boxes is not None):
        raise Infeasible(f"{boxed} lies in a table of boxes, which is run as a whole only, and {too_large(types)}")
    t, most = types[0], max(map(shard_bytes, types))
    if sum(map(shard_bytes, types)) <= LARGEST_RUN:
        yield from blocks(t.shape, max(1, BLOCK * math.prod(t.shape) // most))
        return
    ends = corners(types)
    size = sum(_part_bytes(u, ends) for u in types)
    if size > LARGEST_RUN:
        raise Infeasible(
            f"{t} by the ends of its runs takes {size} bytes of shards; more than {LARGEST_RUN} are not run"
        )
    sizes = tuple(map(len, ends))
    for block in blocks(sizes, max(1, BLOCK * math.prod(sizes) // max(_part_bytes(u, ends) for u in types))):
        yield tuple(at[here] for at, here in zip(ends, block, strict=True))


def _part_bytes(t: TensorType, positions: Positions) -> int:
    boxes = Part(t, positions).boxes().astype(object)
    return int(np.prod(boxes[:, :, 1] - boxes[:, :, 0], axis=1).sum()) * t.itemsize


def _run_shards(program: Program, inputs: Sequence[Shards]) -> list[list[Array]]:
    """Run a program with a list of shards for each input, and return one for each output."""
    single = len(program.inputs) == 1
    results: Any = run(program, inputs[0] if single else inputs)
    return [results] if single and len(program.outputs) == 1 else results


def run_index_data(program: Program) -> tuple[list[str], bool | None]:
    """Run a program on index data, every device in this process.

    Returns the checksum of each output's global array, and whether every output that was only moved equals the input
    it comes from; None where all outputs are computed.

    Raises:
        Infeasible: The arrays are too large to be run here: all shards of all values, where data only moves, and each
            array where something is computed.
        BackendError: Replicas of an output differ.
    """
    if too_large((*program.input_types, *program.output_types)):
        return _run_index_parts(program)
    arrays = {name: index_data(t) for name, t in program.inputs}
    results = _run_shards(program, [distribute(arrays[name], t) for name, t in program.inputs])
    origin = {name: name for name, _ in program.inputs}
    for step in program.steps:
        origin |= {result: origin[operand] for operand, result in moved_values(step) if operand in origin}
    sums: list[str] = []
    equal: list[bool] = []
    for name, shards, t in zip(program.outputs, results, program.output_types, strict=True):
        try:
            array = collect(shards, t)
        except LayoutError as error:
            raise BackendError(f"output %{name}: {error}") from None
        sums.append(checksum(array))
        if name in origin:
            equal.append(np.array_equal(array, arrays[origin[name]]))
    return sums, all(equal) if equal else None


def _run_index_parts(program: Program) -> tuple[list[str], bool | None]:
    """Run a program that only moves data by blocks; as `run_index_data`."""
    sources = {out: name for name, _ in program.inputs for out in descent(program, name)}
    computed = [out for out in program.outputs if out not in sources]
    if computed:
        raise Infeasible(
            f"output %{computed[0]} is computed, and {too_large((*program.input_types, *program.output_types))}"
        )
    work = sum(shard_bytes(t) for name, _ in program.inputs for t in descent(program, name).values())
    if work > LARGEST_RUN:
        raise Infeasible(
            f"the shards of all values take {work} bytes together; more than {LARGEST_RUN} are not run: "
            "`shardplan check` of a plan runs a part of them"
        )
    sums, equal = {out: hashlib.sha256() for out in program.outputs}, True
    for name, t in program.inputs:
        for positions in _parts(program, name):
            array = index_part(t, positions)
            for out, shards in run_part(program, name, _spread(array, t, positions), positions).items():
                u = program.types[out]
                try:
                    found = gather(shards, u, Part(u, positions).boxes(), array.shape)
                except LayoutError as error:
                    raise BackendError(f"output %{out}: {error}") from None
                sums[out].update(np.ascontiguousarray(found).tobytes())
                equal = equal and np.array_equal(found, array)
    return [sums[out].hexdigest()[:DIGITS] for out in program.outputs], equal


def compare(
    shards: Shards, found: TensorType, array: Array, asked: TensorType, what: str, positions: Positions | None = None
) -> None:
    """Raise `BackendError` at the first device whose shard, of type `found`, is not its part of `array` under `asked`.

    The two types hold the same data on every device. Addends are compared by their sum: any that add up are right.
    With `positions` of each dim, `array` and the shards hold those alone.
    """
    at = tuple(map(np.arange, asked.shape)) if positions is None else positions
    if asked.layout.partial:
        total = gather(shards, found, Part(found, at).boxes(), array.shape)
        if not np.array_equal(total, array):
            here = tuple(int(k) for k in np.argwhere(total != array)[0])
            index = tuple(int(p[k]) for p, k in zip(at, here, strict=True))
            raise BackendError(f"{what}: the addends at index {index} reduce to {total[here]}, not {array[here]}")
        return
    places = {d: k for k, d in enumerate(found.mesh.devices)}
    if asked.layout.boxes is not None:
        boxes = np.zeros((asked.mesh.size, 1, 2), dtype=np.int64)  # an index is one of the storage
        at, wanted = (np.arange(asked.elements().max()),), distribute(array, asked)
    else:
        boxes = Part(asked, at).boxes()
        wanted = (array[tuple(slice(int(a), int(b)) for a, b in box)] for box in boxes)
    roots = at_root(asked)
    for place, (device, want) in enumerate(zip(asked.mesh.devices, wanted, strict=True)):
        if not roots[place]:
            continue
        got = shards[places[device]]
        if got.shape != want.shape:
            raise BackendError(f"{what}: device {device} holds a shard of shape {got.shape}, not {want.shape}")
        if not np.array_equal(got, want):
            local = tuple(int(k) for k in np.argwhere(got != want)[0])
            index = tuple(int(p[k + a]) for p, k, (a, _) in zip(at, local, boxes[place], strict=True))
            raise BackendError(f"{what}: device {device} holds {got[local]} at index {index}, not {want[local]}")


def checksum(array: Array) -> str:
    """Return the first `DIGITS` hexadecimal digits of the SHA-256 of an array's bytes in C order."""
    return hashlib.sha256(np.ascontiguousarray(array).tobytes()).hexdigest()[:DIGITS]

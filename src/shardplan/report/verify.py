"""A plan on trial: its certificate without the planner, and its program on the reference, shard by shard."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from shardplan.core.dtypes import numpy_dtype
from shardplan.core.messages import at_root
from shardplan.core.ops.base import Array, Collective, Shards
from shardplan.core.program import Program
from shardplan.core.reference import collect, distribute
from shardplan.core.tensor import TensorType
from shardplan.errors import BackendError, Infeasible, LayoutError
from shardplan.execution.run import run
from shardplan.hardware.plan import Plan

LARGEST_ARRAY = 64 * 2**20  # bytes of a global array that is run
LARGEST_SHARDS = 2**30  # bytes of all shards of a value, on all devices
SEED = 20211201
# Integers up to here are exact in the dtype, and small enough that a few of them add up exactly.
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


@dataclass(frozen=True, slots=True)
class Verdict:
    """What `verify` found: `runs` names the data that were run, none where the arrays are too large (`skipped`)."""

    runs: tuple[str, ...]
    shards: int
    elements: int
    skipped: str


def index_data(t: TensorType) -> Array:
    """Return the global array whose elements are their row-major numbers, modulo what the dtype holds exactly.

    >>> from shardplan.core.mesh import Mesh
    >>> index_data(TensorType.parse("i32[2, 3]", Mesh(x=1))).tolist()
    [[0, 1, 2], [3, 4, 5]]
    """
    count = np.arange(math.prod(t.shape)) % _EXACT.get(t.dtype, 2**24 - 3)
    return count.reshape(t.shape).astype(numpy_dtype(t.dtype))


def random_data(t: TensorType, number: int) -> Array:
    """Return random integers, exact in the dtype; `number` varies the seed."""
    top = min(_EXACT.get(t.dtype, 2**20), 2**20)
    return np.random.default_rng(SEED + number).integers(0, top, t.shape).astype(numpy_dtype(t.dtype))


def too_large(types: Sequence[TensorType]) -> str:
    """Say why values of these types are not run here, or return an empty text."""
    for t in types:
        if t.nbytes >= LARGEST_ARRAY:
            return f"{t} has {t.nbytes} bytes; arrays of {LARGEST_ARRAY} bytes and more are not run"
    shards = sum(int(t.elements().sum()) * t.itemsize for t in types)
    if shards >= LARGEST_SHARDS:
        return f"the shards of all devices take {shards} bytes together; {LARGEST_SHARDS} and more are not run"
    return ""


def verify(plan: Plan) -> Verdict:
    """Check the certificate, then run the program on index data and on random integers, and compare every shard.

    Args:
        plan: The plan.

    Returns:
        What was run and compared.

    Raises:
        CertificateError: A claim does not follow from the program.
        BackendError: A shard differs from the destination's; it names the first device, index and values.
    """
    plan.certificate.check()
    sources, destinations = plan.certificate.sources, plan.certificate.destinations
    skipped = too_large((*sources, *destinations))
    if skipped:
        return Verdict((), 0, 0, skipped)
    for name in ("index", "random"):
        arrays = [index_data(t) if name == "index" else random_data(t, k) for k, t in enumerate(sources)]
        results = execute(plan.program, [distribute(a, t) for a, t in zip(arrays, sources, strict=True)])
        moved = results[: len(destinations)]  # behind them are inputs that the caller keeps
        for k, (array, shards, t) in enumerate(zip(arrays, moved, destinations, strict=True)):
            compare(shards, plan.program.output_types[k], array, t, f"output {k} on {name} data")
    shards = sum(t.mesh.size for t in destinations)
    return Verdict(("index", "random"), shards, sum(int(t.elements().sum()) for t in destinations), "")


def execute(program: Program, inputs: Sequence[Shards], backend: str = "reference") -> list[list[Array]]:
    """Run a program with a list of shards for each input, and return one for each output."""
    single = len(program.inputs) == 1
    results: Any = run(program, inputs[0] if single else inputs, backend)
    return [results] if single and len(program.outputs) == 1 else results


def trial(program: Program, backend: str) -> tuple[list[str], bool | None]:
    """Run a program on index data.

    Args:
        program: The program.
        backend: A key of the table of backends.

    Returns:
        The checksum of each output's global array, and whether every output that was only moved equals the input it
        comes from; None where all outputs are computed.

    Raises:
        Infeasible: The arrays are too large to be run here.
        BackendError: Replicas of an output differ.
    """
    skipped = too_large((*program.input_types, *program.output_types))
    if skipped:
        raise Infeasible(skipped)
    arrays = {name: index_data(t) for name, t in program.inputs}
    results = execute(program, [distribute(arrays[name], t) for name, t in program.inputs], backend)
    origin = {name: name for name, _ in program.inputs}
    for step in program.steps:
        if isinstance(step.op, Collective):
            origin |= {r: origin[o] for r, o in zip(step.results, step.operands, strict=True) if o in origin}
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


def compare(shards: Shards, found: TensorType, array: Array, asked: TensorType, what: str) -> None:
    """Raise `BackendError` at the first device whose shard, of type `found`, is not its part of `array` under `asked`.

    The two types hold the same data on every device. Addends are compared by their sum: any that add up are right.
    """
    if asked.layout.partial:
        total = collect(shards, found)
        if not np.array_equal(total, array):
            index = tuple(int(k) for k in np.argwhere(total != array)[0])
            raise BackendError(f"{what}: the addends at index {index} reduce to {total[index]}, not {array[index]}")
        return
    places = {d: k for k, d in enumerate(found.mesh.devices)}
    roots = at_root(asked)
    wanted = distribute(array, asked)
    for place, device in enumerate(asked.mesh.devices):
        if not roots[place]:
            continue
        got, want = shards[places[device]], wanted[place]
        if got.shape != want.shape:
            raise BackendError(f"{what}: device {device} holds a shard of shape {got.shape}, not {want.shape}")
        if not np.array_equal(got, want):
            local = tuple(int(k) for k in np.argwhere(got != want)[0])
            index = tuple(k + start for k, (start, _) in zip(local, asked.box(place), strict=True))
            raise BackendError(f"{what}: device {device} holds {got[local]} at index {index}, not {want[local]}")


def checksum(array: Array) -> str:
    """Return the first 16 hexadecimal digits of the SHA-256 of an array's bytes in C order."""
    return hashlib.sha256(np.ascontiguousarray(array).tobytes()).hexdigest()[:16]

"""A program on trial under a launcher: this process's shards on a real backend, compared with the reference's."""

from __future__ import annotations

import os
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from shardplan.core.messages import at_root
from shardplan.core.ops.compute import computing
from shardplan.core.program import Program
from shardplan.core.reference import collect, distribute, run_reference
from shardplan.core.walk import program_leaves
from shardplan.errors import BackendError, Infeasible, ShardplanError
from shardplan.execution.measure import measure, own_devices
from shardplan.execution.run import require_backend
from shardplan.execution.verify import checksum, index_data, too_large
from shardplan.simulation.timeline import Timeline


@dataclass(frozen=True, slots=True)
class Trial:
    """What a launched run found."""

    sums: list[str]  # checksums of the outputs
    shards: int  # of this process that were compared
    timeline: Timeline  # as measured
    first: bool  # whether this process is the one that reports


@contextmanager
def join_launcher(backend: str) -> Generator[None]:
    """Join the processes of a launcher for a command; raises `ShardplanError` where there is none to join."""
    require_backend(backend)
    if backend != "torch":  # JAX and MPI join by themselves, on first use
        yield
        return
    import torch.distributed as dist

    if "RANK" not in os.environ:
        raise ShardplanError(
            "the backend torch runs one process a device: torchrun --nproc-per-node N --no-python shardplan run ..."
        )
    dist.init_process_group("gloo")
    try:
        yield  # to the command, which runs with the process group
    finally:
        dist.destroy_process_group()


def trial(program: Program, backend: str, timeout: float) -> Trial:
    """Run a program on index data and compare this process's shards with the reference's.

    They must be equal bit for bit, but for results of floats computed, which may differ by rounding. The program's
    device ids are those of the launch; any wait takes `timeout` seconds at most.

    Raises:
        Infeasible: The arrays are too large to be run here.
        BackendError: A shard differs; it names the first device, index and values.
    """
    skipped = too_large((*program.input_types, *program.output_types))
    if skipped:
        raise Infeasible(skipped)
    inputs = [distribute(index_data(t), t) for t in program.input_types]
    here = set(own_devices(backend))
    mine: Any = [
        [x for d, x in zip(t.mesh.devices, shards, strict=True) if d in here]
        for t, shards in zip(program.input_types, inputs, strict=True)
    ]
    single = len(program.inputs) == 1
    given = mine[0] if single else mine
    results, _ = measure(program, given, backend, timeout)
    _, timeline = measure(program, given, backend, timeout)  # the first run also connects and compiles
    if single and len(program.outputs) == 1 and not (results and isinstance(results[0], list)):
        results = [results]
    expected = run_reference(program, inputs)
    count = 0
    for name, t, got, want in zip(program.outputs, program.output_types, results, expected, strict=True):
        held = at_root(t)
        places = [k for k, d in enumerate(t.mesh.devices) if d in here]
        for place, shard in zip(places, got, strict=True):
            if held[place]:
                box = t.box(place) if t.layout.boxes is None else ((0, 0),)  # of a table an index is one of the storage
                _compare(f"output %{name}, device {t.mesh.devices[place]}", _array(shard), want[place], box)
                count += 1
    sums = [checksum(collect(x, t)) for x, t in zip(expected, program.output_types, strict=True)]
    return Trial(sums, count, timeline, min(program.devices) in here)


def _array(shard: Any) -> np.ndarray:
    if type(shard).__module__.partition(".")[0] == "torch":
        from shardplan.execution.torch.dtypes import to_numpy

        return to_numpy(shard)
    return np.asarray(shard)


def _compare(what: str, got: np.ndarray, want: np.ndarray, box: Any) -> None:
    """Raise `BackendError` at the first element that differs; results of floats computed may differ by rounding."""
    if got.shape != want.shape or got.dtype != want.dtype:
        raise BackendError(f"{what}: {got.dtype} of shape {got.shape}, the reference has {want.dtype} {want.shape}")
    if (local := first_difference(got, want, rounded=True)) is None:
        return
    index = tuple(k + start for k, (start, _) in zip(local, box, strict=True))
    raise BackendError(f"{what}: {got[local]} at index {index}, the reference has {want[local]}")


# Results that are computed in floats may differ from the reference's by the order of additions: by some units in the
# last place of dtypes of 4 bytes and more, and of narrower ones (bf16 has 8 bits) by about one.
TOLERANCE, NARROW_TOLERANCE = 1e-6, 1e-2


def first_difference(got: np.ndarray, want: np.ndarray, rounded: bool) -> tuple[int, ...] | None:
    """Return the index of the first element that differs (of what is `rounded`, by more than that), or None.

    Both are of one shape and dtype.
    """
    if np.array_equal(got, want, equal_nan=want.dtype.kind in "fcV"):
        return None
    unequal = ~np.asarray(got == want)
    if rounded and want.dtype.kind in "fcV":
        wide = np.complex128 if want.dtype.kind == "c" else np.float64
        tolerance = TOLERANCE if want.dtype.itemsize >= 4 else NARROW_TOLERANCE
        unequal = ~np.isclose(got.astype(wide), want.astype(wide), rtol=tolerance, atol=tolerance, equal_nan=True)
    return tuple(int(k) for k in np.argwhere(unequal)[0]) if unequal.any() else None


def computes(program: Program) -> bool:
    """Say whether a program does more than move and reduce."""
    return any(computing(leaf.op) is not None for leaf in program_leaves(program))

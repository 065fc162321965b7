"""Runs programs on JAX's devices: `shard_map` over a mesh with one named axis per prime sub-axis, compiled by `jit`.

A device id of a shardplan mesh is the id of a device of `jax.devices()`.

A program is compiled as a whole while it stays on one mesh. A `Send`, whose meshes may have other devices or another
order of them, is a part of its own: one flat axis over the devices of both meshes, on which it runs as permutes like
an `Exchange` does; devices off the source mesh put in zeros, those off the other mesh drop what they get. A Send that
leaves every byte where it is only renames. Uneven types, whose shards differ in size, are refused.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax  # pyright: ignore[reportMissingImports]
import numpy as np

from shardplan.core.dtypes import numpy_dtype
from shardplan.core.nested import as_nested
from shardplan.core.program import Program
from shardplan.core.tensor import TensorType
from shardplan.core.walk import leaves, open_together, programs
from shardplan.errors import BackendError, LayoutError
from shardplan.execution.async_executor import Running
from shardplan.execution.jax.agree import agree, refuse, refusing
from shardplan.execution.jax.executables import (
    CompiledPart,
    Kinds,
    at_once,
    compile_program,
    local_devices,
    program_context,
)
from shardplan.execution.jax.lower import moved_bytes, refusal
from shardplan.execution.job_backend import JobBackend, JobLaunch, Shards
from shardplan.execution.record import Record, StepSpan


def run_program(
    program: Program, inputs: Sequence[Sequence[Any]], *, timeout: float, record: Record | None = None
) -> list[list[Any]]:
    """Run a program on the shards of this process's devices.

    Args:
        program: Of even types.
        inputs: Per input the shards of this process's devices, in mesh order; numpy or jax arrays.
        timeout: Seconds to wait for the other processes before the start; JAX bounds later waits itself.
        record: Takes the start and end of every step, each then compiled by itself and waited for.

    Returns:
        Per output the shards of this process's devices, jax arrays on them.

    Raises:
        BackendError: An op or a type that JAX cannot run, unknown devices, another program in another process.
        LayoutError: Wrong shards.
        TimedOut: Another process did not arrive.
    """
    with refusing(program.devices):
        check(program)
        shards = [_place_shards(name, t, given) for (name, t), given in _pair_inputs(program, inputs)]
    agree(program, timeout)
    return run_placed(program, shards, record)


def decline(program: Program, error: BaseException) -> None:
    """Tell the other processes of a program that this one raises instead of running it."""
    refuse(program.devices, error)


def join_launch(offered: JobLaunch, timeout: float) -> JobBackend:
    """Return what runs a step of a job in this process, which has all devices; what JAX cannot run is refused first."""
    if offered.problem is not None:
        raise offered.problem
    if jax.process_count() > 1:
        raise BackendError(
            f"jax: {offered.name} in one of {jax.process_count()} processes; legal is one with all devices"
        )
    for program in offered.programs(False):
        check(program)

    def start(program: Program, inputs: Sequence[Shards], turn: int, record: Record | None) -> Running:
        yield from ()
        return run_program(program, inputs, timeout=timeout, record=record)

    return JobBackend(start, join=jax.numpy.concatenate)


def check(program: Program, placed: bool = True) -> None:
    """Raise `BackendError` for what JAX cannot run, before anything moves; `placed`: on devices that must exist."""
    for name, t in (pair for p in programs(program) for pair in p.types.items()):
        if not t.all_even:
            how = "is unevenly tiled" if t.layout.boxes is None else "lies in a table of boxes"
            raise BackendError(
                f"jax: %{name} has the type {t} on {t.mesh}, which {how}; JAX gives every device a shard "
                f"of one size: legal are dims that the product of their axes divides"
            )
    for number, step in enumerate(program.steps):
        inside = list(leaves(step.op, program.step_types(step)[0]))
        found = [refusal(op, types) for _, op, types in inside]
        body = as_nested(step.op)
        if body is not None and not body.at_once and len(body.meshes) > 1:
            found.append("its body sends between meshes; legal is a body on one, which JAX compiles as a whole")
        if reason := next(filter(None, found), None):
            raise BackendError(f"jax: step {number} ({step.op.name}): {reason}")
    if not placed:
        return
    known = {d.id for d in jax.devices()}
    missing = [d for d in program.devices if d not in known]
    if missing:
        raise BackendError(
            f"jax: the program is on device {missing[0]}, but jax.devices() has the ids "
            f"{', '.join(map(str, sorted(known)))}"
        )


def run_placed(
    program: Program,
    inputs: Sequence[Sequence[Any]],
    record: Record | None = None,
    kinds: Kinds | None = None,
    donated: Collection[str] = (),
) -> list[list[Any]]:
    """Run a checked program on shards that lie on their devices: per value one jax array for each local device.

    `kinds` are the dtypes of inputs whose bits the program's types carry. The inputs named in `donated` are deleted as
    soon as no step needs them; the steps are then compiled and waited for one by one, so that their memory is free.
    """
    stepwise = record is not None or bool(donated)
    values: dict[str, list[Any]] = {n: list(x) for (n, _), x in zip(program.inputs, inputs, strict=True)}
    with program_context(program):
        for part in compile_program(program, stepwise, kinds):
            started = time.monotonic()
            try:
                with at_once():
                    found = part.run([values[name] for name in part.inputs])
                if stepwise:
                    jax.block_until_ready(found)
            except Exception as error:
                raise BackendError(f"jax: {part.where} failed: {type(error).__name__}: {error}") from error
            if record is not None:
                _note(record, program, part, started, time.monotonic())
            values.update(zip(part.outputs, found, strict=True))
            for name in part.freed:
                held = values.pop(name)
                if name in donated and part.executable is not None:  # else its storage is the result's
                    for shard in held:
                        shard.delete()
    return [values[name] for name in program.outputs]


def _note(record: Record, program: Program, part: CompiledPart, start: float, end: float) -> None:
    steps, numbers = open_together(program)
    for k in part.steps:
        got: Counter[int] = Counter()
        for times, op, operands in leaves(steps.steps[k].op, steps.step_types(steps.steps[k])[0]):
            got.update({d: times * n for d, n in moved_bytes(op, *operands).items()})
        for device in sorted(set(got) & {d.id for d in local_devices(part.devices)}):
            record.spans.append(StepSpan(device, numbers[k], start, end, got[device]))


def _pair_inputs(
    program: Program, inputs: Sequence[Sequence[Any]]
) -> Iterator[tuple[tuple[str, TensorType], Sequence[Any]]]:
    if len(inputs) != len(program.inputs):
        raise LayoutError(f"{len(inputs)} inputs given, but the program has {len(program.inputs)}")
    return zip(program.inputs, inputs, strict=True)


def _place_shards(name: str, t: TensorType, shards: Sequence[Any]) -> list[Any]:
    """Put the shards on their devices, after checking them against the type."""
    devices = local_devices(t.mesh.devices)
    if len(shards) != len(devices):
        raise LayoutError(f"input %{name}: {len(shards)} shards for the {len(devices)} devices of {t} in this process")
    shape, dtype = t.local_shape(), numpy_dtype(t.dtype)
    arrays = [x if isinstance(x, jax.Array) else np.asarray(x) for x in shards]
    for d, x in zip(devices, arrays, strict=True):
        if x.shape != shape or x.dtype != dtype:
            raise LayoutError(
                f"input %{name}, device {d.id}: a shard of dtype {x.dtype} and shape {x.shape}, but {t} needs "
                f"{t.dtype} and {shape}"
            )
    with jax.enable_x64(True):
        return list(jax.device_put(arrays, devices))


@dataclass(frozen=True, slots=True)
class CompiledMemory:
    """What XLA says of a compiled program, in bytes a device; of several executables the largest of each.

    A certificate's `workspace_bytes` is operands + results + staging of the worst step; XLA chooses its own buffers.
    """

    argument_bytes: int
    output_bytes: int
    temporary_bytes: int


def compiled_memory(program: Program) -> CompiledMemory:
    """Return the bytes that XLA's executables of a program take on a device, to be shown beside its certificate."""
    check(program)
    found = [p.executable.memory_analysis() for p in compile_program(program) if p.executable is not None]
    names = ("argument", "output", "temp")
    return CompiledMemory(*(max((getattr(m, f"{n}_size_in_bytes") for m in found), default=0) for n in names))


def compiled_text(program: Program) -> list[str]:
    """Return the optimised HLO of every executable of a program, in the order in which they run."""
    check(program)
    return [p.executable.as_text() for p in compile_program(program) if p.executable is not None]

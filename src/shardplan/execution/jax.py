"""Runs programs on JAX's devices: `shard_map` over a mesh with one named axis per prime sub-axis, compiled by `jit`.

A device id of a shardplan mesh is the id of a device of `jax.devices()`. A value is handed from one compiled part to
the next as one array a device; to JAX it is a global array, the shards of all devices one after the other along dim 0.
So partial and rooted values need no words that JAX lacks, every result differs on every device, and `check_vma` is on.

A program is compiled as a whole while it stays on one mesh. A `Send`, whose meshes may have other devices or another
order of them, is a part of its own: one flat axis over the devices of both meshes, on which it runs as permutes like
an `Exchange` does; devices off the source mesh put in zeros, those off the other mesh drop what they get. A Send that
leaves every byte where it is only renames. Uneven types, whose shards differ in size, are refused.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from shardplan.core.dtypes import itemsize, numpy_dtype
from shardplan.core.mesh import Mesh
from shardplan.core.ops import Send
from shardplan.core.program import Program, Step
from shardplan.core.tensor import TensorType, same
from shardplan.errors import BackendError, LayoutError
from shardplan.execution.jax_lower import lower, refusal
from shardplan.execution.jax_rounds import general_move
from shardplan.execution.jax_wire import Wire
from shardplan.execution.record import Record, Span
from shardplan.execution.rounds import moved_bytes

MOST_PROGRAMS = 128  # compiled and kept
FLAT = "device"


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
    import jax  # pyright: ignore[reportMissingImports]

    check(program)
    shards = [_placed(name, t, given) for (name, t), given in _named(program, inputs)]
    if jax.process_count() > 1:
        from shardplan.execution.jax_agree import agree

        agree(program, timeout)
    return run_placed(program, shards, record)


def check(program: Program, placed: bool = True) -> None:
    """Raise `BackendError` for what JAX cannot run, before anything moves; `placed`: on devices that must exist."""
    import jax  # pyright: ignore[reportMissingImports]

    for name, t in program.types.items():
        if not t.all_even:
            raise BackendError(
                f"jax: %{name} has the type {t} on {t.mesh}, which is unevenly tiled; JAX gives every device a shard "
                f"of one size: legal are dims that the product of their axes divides"
            )
    for number, step in enumerate(program.steps):
        reason = refusal(step.op, program.step_types(step)[0])
        if reason:
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


def run_placed(program: Program, inputs: Sequence[Sequence[Any]], record: Record | None = None) -> list[list[Any]]:
    """Run a checked program on shards that lie on their devices: per value one jax array for each local device."""
    import jax  # pyright: ignore[reportMissingImports]

    values: dict[str, list[Any]] = {n: list(x) for (n, _), x in zip(program.inputs, inputs, strict=True)}
    with alone(program):
        for part in compiled(program, record is not None):
            started = time.monotonic()
            try:
                with jax.ensure_compile_time_eval():  # a function being traced may hold arrays: they move now
                    found = part.run([values[name] for name in part.inputs])
                if record is not None:
                    jax.block_until_ready(found)
            except Exception as error:
                raise BackendError(f"jax: {part.where} failed: {type(error).__name__}: {error}") from error
            if record is not None:
                _note(record, program, part, started, time.monotonic())
            values.update(zip(part.outputs, found, strict=True))
            for name in part.freed:
                values.pop(name, None)
    return [values[name] for name in program.outputs]


def _note(record: Record, program: Program, part: Part, start: float, end: float) -> None:
    for number in part.steps:
        step = program.steps[number]
        got = moved_bytes(step.op, *program.step_types(step)[0])
        for device in sorted(set(got) & {d.id for d in _local(part.devices)}):
            record.spans.append(Span(device, number, start, end, got[device]))


@contextlib.contextmanager
def alone(program: Program) -> Generator[None]:
    """A context for one program: its 64-bit dtypes are kept, and a mesh that the caller set is set aside."""
    import jax  # pyright: ignore[reportMissingImports]

    parts = (itemsize(t.dtype) // (2 if t.dtype.startswith("c") else 1) for t in program.types.values())
    wide = max(parts, default=0) == 8
    with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), ())):
        with jax.enable_x64(True) if wide else contextlib.nullcontext():
            yield


def _named(program: Program, inputs: Sequence[Sequence[Any]]) -> Iterator[tuple[tuple[str, TensorType], Sequence[Any]]]:
    if len(inputs) != len(program.inputs):
        raise LayoutError(f"{len(inputs)} inputs given, but the program has {len(program.inputs)}")
    return zip(program.inputs, inputs, strict=True)


def _placed(name: str, t: TensorType, shards: Sequence[Any]) -> list[Any]:
    """Put the shards on their devices, after checking them against the type."""
    import jax  # pyright: ignore[reportMissingImports]

    devices = _local(t.mesh.devices)
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


def _local(ids: Sequence[int]) -> list[Any]:
    """The devices of this process among `ids`, in their order."""
    import jax  # pyright: ignore[reportMissingImports]

    found = {d.id: d for d in jax.local_devices()}
    return [found[k] for k in ids if k in found]


def jax_mesh(mesh: Mesh) -> Any:
    """Return the jax mesh of a mesh: one axis per prime sub-axis, or one of size 1 where there is none."""
    import jax  # pyright: ignore[reportMissingImports]

    axes = {a.name: a.size for a in mesh.atoms} or {"one": 1}
    return _grid(tuple(axes), tuple(axes.values()), mesh.devices, jax)


def _grid(names: tuple[str, ...], sizes: tuple[int, ...], ids: Sequence[int], jax: Any) -> Any:
    by_id = {d.id: d for d in jax.devices()}
    grid = np.empty(len(ids), dtype=object)
    grid[:] = [by_id[k] for k in ids]
    return jax.sharding.Mesh(grid.reshape(sizes), names)


@dataclass(frozen=True, slots=True, eq=False)
class Part:
    """A run of steps that is one executable (None where bytes stay where they are), and the values it takes and gives.

    `devices` are those of the executable, in the order of its shards; operands and results are on the devices of
    `sources` and `targets`, in those orders.
    """

    steps: tuple[int, ...]
    where: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    freed: frozenset[str]
    devices: tuple[int, ...]
    sources: tuple[TensorType, ...]
    targets: tuple[TensorType, ...]
    sharding: Any
    executable: Any

    def run(self, inputs: list[list[Any]]) -> list[list[Any]]:
        """Return the shards of the outputs on the local devices, given those of the inputs."""
        import jax  # pyright: ignore[reportMissingImports]

        if self.executable is None:
            return [_renamed(x, t, u) for x, t, u in zip(inputs, self.sources, self.targets, strict=True)]
        stacked: list[Any] = []
        for shards, t in zip(inputs, self.sources, strict=True):
            shape = t.local_shape() or (1,)
            mine = [x.reshape(shape) for x in shards] if t.ndim == 0 else shards
            if t.mesh.devices != self.devices:
                held = dict(zip((d.id for d in _local(t.mesh.devices)), mine, strict=True))
                mine = [
                    held[d.id] if d.id in held else jax.device_put(np.zeros(shape, numpy_dtype(t.dtype)), d)
                    for d in _local(self.devices)
                ]
            whole = (shape[0] * len(self.devices), *shape[1:])
            stacked.append(jax.make_array_from_single_device_arrays(whole, self.sharding, mine))
        found = self.executable(*stacked)
        return [self._unstacked(x, u) for x, u in zip(found, self.targets, strict=True)]

    def _unstacked(self, x: Any, u: TensorType) -> list[Any]:
        by_id = {s.device.id: s.data for s in x.addressable_shards}
        shards = [by_id[d.id] for d in _local(u.mesh.devices)]
        return [s.reshape(()) for s in shards] if u.ndim == 0 else shards


def _renamed(shards: list[Any], t: TensorType, u: TensorType) -> list[Any]:
    held = dict(zip((d.id for d in _local(t.mesh.devices)), shards, strict=True))
    return [held[d.id] for d in _local(u.mesh.devices)]


def compiled(program: Program, stepwise: bool = False) -> tuple[Part, ...]:
    """Return the executables of a checked program, one for each run of steps on a mesh, or for each step; kept."""
    return _compiled(program, stepwise)


@lru_cache(maxsize=MOST_PROGRAMS)
def _compiled(program: Program, stepwise: bool) -> tuple[Part, ...]:
    runs: list[list[int]] = []
    for number, step in enumerate(program.steps):
        t = program.types[step.operands[0]]
        before = program.steps[number - 1] if number else None
        joins = (
            before is not None
            and not stepwise
            and not isinstance(step.op, Send)
            and not isinstance(before.op, Send)
            and program.types[before.operands[0]].mesh == t.mesh
        )
        if joins:
            runs[-1].append(number)
        else:
            runs.append([number])
    last: dict[str, int] = {o: number for number, step in enumerate(program.steps) for o in step.operands}
    last |= dict.fromkeys(program.outputs, len(program.steps))
    with alone(program):
        return tuple(_part(program, tuple(run), last) for run in runs)


def _part(program: Program, numbers: tuple[int, ...], last: dict[str, int]) -> Part:
    import jax  # pyright: ignore[reportMissingImports]

    steps = [program.steps[k] for k in numbers]
    made = [r for step in steps for r in step.results]
    inputs = tuple(dict.fromkeys(o for step in steps for o in step.operands if o not in made))
    outputs = tuple(r for r in made if last.get(r, -1) > numbers[-1])
    sources, targets = (tuple(program.types[n] for n in names) for names in (inputs, outputs))
    freed = frozenset(n for n in inputs if last[n] <= numbers[-1])
    names = " ".join(step.op.name for step in steps)
    where = f"step {numbers[0]} ({names})" if len(numbers) == 1 else f"steps {numbers[0]} to {numbers[-1]} ({names})"
    (first,) = {program.types[step.operands[0]].mesh for step in steps}
    if isinstance(steps[0].op, Send):
        moves = list(zip(*program.step_types(steps[0]), strict=True))
        devices = tuple(sorted({*first.devices, *steps[0].op.mesh.devices}))
        if all(same(t, u) for t, u in moves):
            ends = tuple(t for t, _ in moves), tuple(u for _, u in moves)
            return Part(numbers, where, steps[0].operands, steps[0].results, freed, devices, *ends, None, None)
        target = _grid((FLAT,), (len(devices),), devices, jax)
    else:
        devices, target = first.devices, jax_mesh(first)
    body = lower_steps(program, steps, inputs, outputs, first, tuple(target.axis_names), checked=True)
    sharding = jax.sharding.NamedSharding(target, jax.sharding.PartitionSpec(tuple(target.axis_names)))
    mapped = jax.shard_map(
        body, mesh=target, in_specs=(sharding.spec,) * len(inputs), out_specs=(sharding.spec,) * len(outputs)
    )
    shapes = [
        jax.ShapeDtypeStruct(_stacked_shape(t, len(devices)), numpy_dtype(t.dtype), sharding=sharding) for t in sources
    ]
    try:
        with jax.sharding.use_abstract_mesh(target.abstract_mesh):
            executable = jax.jit(mapped).lower(*shapes).compile()
    except jax.errors.JaxRuntimeError as error:  # the platform's XLA lacks a collective for this dtype, say
        raise BackendError(f"jax: {where} cannot be compiled on {jax.default_backend()}: {error}") from error
    return Part(numbers, where, inputs, outputs, freed, devices, sources, targets, sharding, executable)


def _stacked_shape(t: TensorType, count: int) -> tuple[int, ...]:
    shape = t.local_shape() or (1,)
    return shape[0] * count, *shape[1:]


def lower_steps(
    program: Program,
    steps: Sequence[Step],
    inputs: Sequence[str],
    outputs: Sequence[str],
    mesh: Mesh,
    axes: tuple[str, ...],
    checked: bool,
    by_atom: bool = True,
) -> Callable[..., tuple[Any, ...]]:
    """Return what one device does for some steps: the shards of `inputs` in, those of `outputs` out, 0-dim ones [1]."""
    wire = Wire(mesh, axes, by_atom, checked)

    def body(*shards: Any) -> tuple[Any, ...]:
        values = {n: x.reshape(program.types[n].local_shape()) for n, x in zip(inputs, shards, strict=True)}
        for step in steps:
            types, results = program.step_types(step)
            operands = [values[o] for o in step.operands]
            if isinstance(step.op, Send):
                moves = zip(operands, types, results, strict=True)
                found = [general_move(x, t, u, step.op.chunks, wire) for x, t, u in moves]
            else:
                found = lower(step.op, operands, types, wire)  # type: ignore[arg-type]
            values.update(zip(step.results, found, strict=True))
        return tuple(values[n].reshape(program.types[n].local_shape() or (1,)) for n in outputs)

    return body


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
    found = [p.executable.memory_analysis() for p in compiled(program) if p.executable is not None]
    names = ("argument", "output", "temp")
    return CompiledMemory(*(max((getattr(m, f"{n}_size_in_bytes") for m in found), default=0) for n in names))


def compiled_text(program: Program) -> list[str]:
    """Return the optimised HLO of every executable of a program, in the order in which they run."""
    check(program)
    return [p.executable.as_text() for p in compiled(program) if p.executable is not None]

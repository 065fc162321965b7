"""The executables of a program: one for each run of steps on one mesh, over shards that lie on their devices.

A value is handed from one executable to the next as one array a device; to JAX it is a global array, the shards of all
devices one after the other along dim 0. So partial and rooted values need no words that JAX lacks, every result differs
on every device, and `check_vma` is on.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import jax  # pyright: ignore[reportMissingImports]
import jax.numpy as jnp  # pyright: ignore[reportMissingImports]
import numpy as np
from jax import lax  # pyright: ignore[reportMissingImports]
from jax._src.core import trace_state_clean  # pyright: ignore[reportMissingImports]

from shardplan.core.dtypes import itemsize, numpy_dtype
from shardplan.core.mesh import Mesh
from shardplan.core.nested import Nested, as_nested
from shardplan.core.program import Program
from shardplan.core.step import Step
from shardplan.core.tensor import TensorType, same
from shardplan.core.walk import open_together, programs
from shardplan.errors import BackendError
from shardplan.execution.jax.agree import processes_of
from shardplan.execution.jax.bits import from_bits, is_narrow, to_bits
from shardplan.execution.jax.cache import EXECUTABLES, code_bytes
from shardplan.execution.jax.lower import lower
from shardplan.execution.jax.wire import JaxWire

FLAT = "device"  # the one axis on which a move from one mesh to another runs, over the devices of both meshes
WIDE_BYTES = 8  # of a number, or of a half of a complex one: of this width JAX has none unless it is told so


@contextlib.contextmanager
def program_context(program: Program) -> Generator[None]:
    """A context for one program: its 64-bit dtypes are kept, and a mesh that the caller set is set aside."""
    parts = (
        itemsize(t.dtype) // (2 if t.dtype.startswith("c") else 1) for p in programs(program) for t in p.types.values()
    )
    wide = max(parts, default=0) == WIDE_BYTES
    with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), ())):
        with jax.enable_x64(True) if wide else contextlib.nullcontext():
            yield  # to what compiles, or runs, the program


def at_once() -> AbstractContextManager[Any]:
    """A context in which arrays move now, also where a function that is being traced holds them."""
    return _NOTHING if trace_state_clean() else jax.ensure_compile_time_eval()


_NOTHING = contextlib.nullcontext()


def local_devices(ids: Sequence[int]) -> list[Any]:
    """The devices of this process among `ids`, in their order."""
    found = {d.id: d for d in jax.local_devices()}
    return [found[k] for k in ids if k in found]


def jax_mesh(mesh: Mesh) -> Any:
    """Return the jax mesh of a mesh: one axis per prime sub-axis, or one of size 1 where there is none."""
    axes = {a.name: a.size for a in mesh.atoms} or {"one": 1}
    return _mesh_over(tuple(axes), tuple(axes.values()), mesh.devices)


def _mesh_over(names: tuple[str, ...], sizes: tuple[int, ...], ids: Sequence[int]) -> Any:
    by_id = {d.id: d for d in jax.devices()}
    devices = np.empty(len(ids), dtype=object)
    devices[:] = [by_id[k] for k in ids]
    return jax.sharding.Mesh(devices.reshape(sizes), names)


@dataclass(frozen=True, slots=True, eq=False)
class CompiledPart:
    """A run of steps that is one executable, and the values it takes and gives."""

    steps: tuple[int, ...]  # their numbers, in the program opened
    where: str  # which these are, for messages
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    freed: frozenset[str]  # inputs that no later step needs
    devices: tuple[int, ...]  # ids, in the order of the executable's shards
    sources: tuple[TensorType, ...]  # of the inputs, whose shards lie on the devices of these types, in their order
    targets: tuple[TensorType, ...]  # of the outputs, likewise
    kinds: tuple[np.dtype[Any], ...]  # of the operands' elements; their types say in what they are carried
    sharding: Any  # of every operand and result, as JAX sees them
    executable: Any  # None where bytes stay where they are
    call: Any  # what runs it; see `compile_for`

    def run(self, inputs: list[list[Any]]) -> list[list[Any]]:
        """Return the shards of the outputs on the local devices, given those of the inputs."""
        if self.executable is None:
            return [_reorder_shards(x, t, u) for x, t, u in zip(inputs, self.sources, self.targets, strict=True)]
        stacked: list[Any] = []
        for shards, t, kind in zip(inputs, self.sources, self.kinds, strict=True):
            shape = t.local_shape() or (1,)
            mine = [x.reshape(shape) for x in shards] if t.ndim == 0 else shards
            if t.mesh.devices != self.devices:  # of a move to another: devices off the source's mesh put in zeros
                held = dict(zip((d.id for d in local_devices(t.mesh.devices)), mine, strict=True))
                mine = [
                    held[d.id] if d.id in held else jax.device_put(np.zeros(shape, kind), d)
                    for d in local_devices(self.devices)
                ]
            whole = (shape[0] * len(self.devices), *shape[1:])
            stacked.append(jax.make_array_from_single_device_arrays(whole, self.sharding, mine))
        found = self.call(*stacked)
        return [self._unstack_shards(x, u) for x, u in zip(found, self.targets, strict=True)]

    def _unstack_shards(self, x: Any, u: TensorType) -> list[Any]:
        by_id = {s.device.id: s.data for s in x.addressable_shards}
        shards = [by_id[d.id] for d in local_devices(u.mesh.devices)]
        return [s.reshape(()) for s in shards] if u.ndim == 0 else shards


def _reorder_shards(shards: list[Any], t: TensorType, u: TensorType) -> list[Any]:
    """The shards in the order of another type, which has the same boxes on the same devices."""
    held = dict(zip((d.id for d in local_devices(t.mesh.devices)), shards, strict=True))
    return [held[d.id] for d in local_devices(u.mesh.devices)]


Kinds = tuple[np.dtype[Any], ...]


def compile_program(program: Program, stepwise: bool = False, kinds: Kinds | None = None) -> tuple[CompiledPart, ...]:
    """Return the executables of a checked program, one for each run of steps on a mesh, or for each step; kept.

    `kinds` are the dtypes of the inputs where the program's types only carry their bits (see `bits.carrier`).
    """
    given = kinds or tuple(numpy_dtype(t.dtype) for t in program.input_types)
    return EXECUTABLES.get((program, stepwise, given), lambda: _compile_parts(program, stepwise, given))


def _compile_parts(program: Program, stepwise: bool, given: Kinds) -> tuple[tuple[CompiledPart, ...], int]:
    program, _ = open_together(program)
    runs: list[list[int]] = []
    for number, step in enumerate(program.steps):
        mesh = _mesh_of(program, step)
        before = program.steps[number - 1] if number else None
        joins = (
            before is not None
            and not stepwise
            and not _crosses(program, step)
            and not _crosses(program, before)
            and _mesh_of(program, before) == mesh
        )
        if joins:
            runs[-1].append(number)
        else:
            runs.append([number])
    last: dict[str, int] = {o: number for number, step in enumerate(program.steps) for o in step.operands}
    last |= dict.fromkeys(program.outputs, len(program.steps))
    kinds = {name: numpy_dtype(t.dtype) for name, t in program.types.items()}
    typed = dict(kinds)
    kinds |= zip((name for name, _ in program.inputs), given, strict=True)
    for step in program.steps:  # what carries bits is moved only: one result for an operand
        kinds |= {r: kinds[o] for o, r in zip(step.operands, step.results, strict=False) if kinds[o] != typed[o]}
    with program_context(program):
        parts = tuple(_part(program, tuple(run), last, kinds) for run in runs)
    return parts, sum(code_bytes(p.executable) for p in parts if p.executable is not None)


def _mesh_of(program: Program, step: Step) -> Mesh:
    """The mesh on which a step starts; one without operands, where its results are."""
    return program.types[(*step.operands, *step.results)[0]].mesh


def _crosses(program: Program, step: Step) -> bool:
    """Whether a step moves to another mesh; it is then a part of its own."""
    return len({program.types[name].mesh for name in (*step.operands, *step.results)}) > 1


def _part(
    program: Program, numbers: tuple[int, ...], last: dict[str, int], kinds: dict[str, np.dtype[Any]]
) -> CompiledPart:
    steps = [program.steps[k] for k in numbers]
    made = [r for step in steps for r in step.results]
    inputs = tuple(dict.fromkeys(o for step in steps for o in step.operands if o not in made))
    outputs = tuple(r for r in made if last.get(r, -1) > numbers[-1])
    sources, targets = (tuple(program.types[n] for n in names) for names in (inputs, outputs))
    freed = frozenset(n for n in inputs if last[n] <= numbers[-1])
    held = tuple(kinds[n] for n in inputs)
    names = " ".join(step.op.name for step in steps)
    where = f"step {numbers[0]} ({names})" if len(numbers) == 1 else f"steps {numbers[0]} to {numbers[-1]} ({names})"
    (first,) = {_mesh_of(program, step) for step in steps}
    if _crosses(program, steps[0]):
        moves = list(zip(*program.step_types(steps[0]), strict=True))
        devices = tuple(sorted({d for move in moves for t in move for d in t.mesh.devices}))
        if all(same(t, u) for t, u in moves):
            ends = tuple(t for t, _ in moves), tuple(u for _, u in moves)
            return CompiledPart(
                numbers, where, steps[0].operands, steps[0].results, freed, devices, *ends, held, None, None, None
            )
        target = _mesh_over((FLAT,), (len(devices),), devices)
    else:
        devices, target = first.devices, jax_mesh(first)
    moved = lower_steps(program, steps, inputs, outputs, first, tuple(target.axis_names), checked=True,
                        header=len(processes_of(devices)) > 1)  # fmt: skip

    def body(*shards: Any) -> tuple[Any, ...]:
        found = moved(*(_as(x, t) for x, t in zip(shards, sources, strict=True)))
        return tuple(from_bits(y, kinds[n]) if y.dtype != kinds[n] else y for y, n in zip(found, outputs, strict=True))

    sharding = jax.sharding.NamedSharding(target, jax.sharding.PartitionSpec(tuple(target.axis_names)))
    mapped = jax.shard_map(
        body, mesh=target, in_specs=(sharding.spec,) * len(inputs), out_specs=(sharding.spec,) * len(outputs)
    )
    shapes = [
        jax.ShapeDtypeStruct(_stacked_shape(t, len(devices)), kind, sharding=sharding)
        for t, kind in zip(sources, held, strict=True)
    ]
    try:
        executable, call = compile_for(
            jax.jit(mapped), shapes, lambda: jax.sharding.use_abstract_mesh(target.abstract_mesh)
        )
    except jax.errors.JaxRuntimeError as error:  # the platform's XLA lacks a collective for this dtype, say
        raise BackendError(f"jax: {where} cannot be compiled on {jax.default_backend()}: {error}") from error
    return CompiledPart(
        numbers, where, inputs, outputs, freed, devices, sources, targets, held, sharding, executable, call
    )


def compile_for(jitted: Any, shapes: Sequence[Any], context: Callable[[], AbstractContextManager[Any]]) -> Any:
    """Return the executable of a jitted function on arguments of these shapes, and what to call.

    Both are made in `context`. The executable is itself what to call, but for elements of less than 8 bits: an
    executable checks the layouts of its arguments, and jax.device_put says of such an array another one than the
    compiler. The function then finds it compiled.
    """
    with context():
        executable = jitted.lower(*shapes).compile()
    if not any(is_narrow(x.dtype) for x in shapes):
        return executable, executable

    def call(*arrays: Any) -> Any:
        with context():
            return jitted(*arrays)

    return executable, call


def _as(x: Any, t: TensorType) -> Any:
    return x if x.dtype == numpy_dtype(t.dtype) else to_bits(x)


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
    header: bool = False,
) -> Callable[..., tuple[Any, ...]]:
    """Return what one device does for some steps: the shards of `inputs` in, those of `outputs` out, 0-dim ones [1].

    It runs inside a `shard_map` over the `axes` of a jax mesh, which has one an atom of `mesh`, or (not `by_atom`) the
    mesh's own; `checked` says that `check_vma` is on. With a `header` the devices first make sure that all run these
    steps.
    """
    wire = JaxWire(mesh, axes, by_atom, checked)

    def body(*shards: Any) -> tuple[Any, ...]:
        values = {n: x.reshape(program.types[n].local_shape()) for n, x in zip(inputs, shards, strict=True)}
        _trace(program, steps, values, wire)
        return tuple(values[n].reshape(program.types[n].local_shape() or (1,)) for n in outputs)

    return guard_with_header(body, program, outputs, wire) if header else body


def _trace(program: Program, steps: Sequence[Step], values: dict[str, Any], wire: JaxWire) -> None:
    """Add to `values`, this device's shards by name, what the steps of a program make of them."""
    for step in steps:
        types, _ = program.step_types(step)
        arrays, inner = [values[o] for o in step.operands], as_nested(step.op)
        found = lower(step.op, arrays, types, wire) if inner is None else _trace_loop(inner, arrays, wire)
        values.update(zip(step.results, found, strict=True))


def _trace_loop(op: Nested, arrays: list[Any], wire: JaxWire) -> Sequence[Any]:
    """Return this device's shards of the results of an op with a body, which is traced once.

    What is run ahead XLA orders as it does all else: values are the same.
    """
    names = [name for name, _ in op.body.inputs]
    whole = len(names) - op.cut

    def run(state: Sequence[Any], rows: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        values = dict(zip(names, (*state, *arrays[op.carried_count : whole], *rows), strict=True))
        _trace(op.body, op.body.steps, values, wire)
        found = [wire.varying(values[n]) for n in op.body.outputs]
        return found[: op.carried_count], found[op.carried_count :]

    if op.at_once:
        return run((), ())[1]
    if op.overlaps:
        return run(arrays[: op.carried_count], ())[0]
    state = [wire.varying(x) for x in arrays[: op.carried_count]]
    state, stacks = lax.scan(run, state, arrays[whole:], length=op.times, reverse=op.backwards)
    return [*state, *stacks]


WORDS = 4  # int32: two of the digest, and their complements, whose maximum tells the minimum
Run = Callable[..., tuple[Any, ...]]


def guard_with_header(run: Run, program: Program, outputs: Sequence[str], wire: JaxWire) -> Run:
    """Return what one device does for some steps of a program, only where all devices do the same.

    `run` is the steps, inside a `shard_map` over `wire.axes`, which are all devices that run them; it returns the
    values `outputs` of the program. What is returned takes and gives what `run` does.
    """
    mine = digest_words(program, outputs)

    def body(*shards: Any) -> tuple[Any, ...]:
        most = lax.pmax(wire.varying(jnp.asarray(np.concatenate([mine, ~mine]))), wire.axes)
        high, low = most[: mine.size], ~most[mine.size :]

        def other(*_: Any) -> tuple[Any, ...]:
            kind = jax.ShapeDtypeStruct((), np.int32)  # of what never comes back, but keeps the call in the program
            never = wire.varying(jax.pure_callback(lambda *found: refuse(program, mine, found), kind, high, low))
            types = (program.types[n] for n in outputs)
            return tuple(jnp.full(t.local_shape() or (1,), never).astype(numpy_dtype(t.dtype)) for t in types)

        def alike(*held: Any) -> tuple[Any, ...]:
            return tuple(wire.varying(x) for x in run(*held))

        return lax.cond((high == low).all(), alike, other, *shards)

    return body


def digest_words(program: Program, outputs: Sequence[str]) -> np.ndarray:
    """Return the digest of the part of a program that makes `outputs`, int32 [WORDS / 2]."""
    text = f"{program}\n{' '.join(outputs)}"
    return np.frombuffer(hashlib.sha256(text.encode()).digest(), np.int32, WORDS // 2)


def refuse(program: Program, mine: np.ndarray, found: Sequence[Any]) -> None:
    """Raise the error of a run whose devices run several programs; `found` are the largest and the least digest word.

    Each is int32 [WORDS / 2], of all devices word by word.
    """
    here, *others = (x.tobytes().hex() for x in (mine, *map(np.asarray, found)))
    raise BackendError(
        f"jax: this process runs the program {here} ({' '.join(s.op.name for s in program.steps)}), another process "
        f"{' or '.join(sorted({*others} - {here}))}; nothing was moved: all must run their programs in one order"
    )

"""The move of arrays outside `jit`: one by one, or many as one plan under one limit.

Where both shardings list the same devices in the same order, one executable takes the array and gives the result, as a
call of `jit` does. Else the plan runs on the array's shards, as `execution.jax.run` runs any program.

Between CPU devices of this process a device's memory is the host's, and collectives are copies with a thread woken for
each device. There `jax.device_put`, which cuts one copy of the array, takes less of the processor than any plan whose
devices meet more than once, and than any of an array of at most `SMALL_BYTES`: it moves these where no limit is said.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import jax  # pyright: ignore[reportMissingImports]
from jax.extend.core.primitives import convert_element_type_p  # pyright: ignore[reportMissingImports]
from jax.sharding import AbstractMesh  # pyright: ignore[reportMissingImports]

from shardplan.core.program import Program
from shardplan.errors import BackendError
from shardplan.execution.jax.agree import agree, processes_of, refusing
from shardplan.execution.jax.cache import EXECUTABLES, code_bytes
from shardplan.execution.jax.executables import at_once, compile_for, program_context
from shardplan.execution.jax.run import check, run_placed
from shardplan.execution.run import TIMEOUT
from shardplan.interop.jax.plans import MOST_PLANS, check_ends, ends, program_within
from shardplan.interop.jax.traced_move import map_program

LEAVES_TO_HOST = True  # whether `device_put` moves what it moves best on CPU devices; what checks plans turns it off
SMALL_BYTES = 2**16  # of the global array; see the module
ONE_COPY = frozenset({"slice", "permute"})  # steps in which every device copies what it gets once, and stages nothing
MOST_MARKS = 256  # shardings for which a function that marks weak types is remembered


@dataclass(frozen=True, slots=True)
class JaxMove:
    """One array on its way: where to, and whether its owner gives it up."""

    array: Any
    sharding: Any
    donate: bool = False


def reshard_array(array: Any, sharding: Any, memory_limit: int | None = None, donate: bool = False) -> Any:
    """Return one array under another sharding, with exactly that sharding; `array` itself where it has it."""
    source = array.sharding
    if source == sharding and array.committed:
        return array
    way = _choose_way(array.shape, array.dtype, source, sharding, memory_limit, donate)
    if way is None:
        return jax.device_put(array, sharding, donate=donate)
    if not way.direct or (donate and memory_limit is not None):
        return _on_shards([JaxMove(array, sharding, donate)], way.program, memory_limit)[0]
    executable = EXECUTABLES.get(way, lambda: _compile_way(way))
    with at_once():
        found = executable(array)
    if donate:
        array.delete()
    return _weak(sharding)(found) if array.weak_type else found


def move_together(moves: Sequence[JaxMove], memory_limit: int) -> list[Any]:
    """Return several arrays under other shardings, by one plan within one limit on their sum."""
    devices = [d.id for m in moves for end in (m.array.sharding, m.sharding) for d in end.device_set]
    with refusing(devices):
        program = _joint_program(moves, memory_limit)
    agree(program, TIMEOUT)
    return _on_shards(moves, program, memory_limit)


def _joint_program(moves: Sequence[JaxMove], memory_limit: int) -> Program:
    """The program of several moves within one limit, planned and checked."""
    sources, targets = zip(*(ends(m.array.shape, m.array.dtype, m.array.sharding, m.sharding) for m in moves),
                           strict=True)  # fmt: skip
    program = program_within(sources, targets, memory_limit, tuple(not m.donate for m in moves))
    check(program)
    return program


@dataclass(frozen=True, slots=True, eq=False)  # one object a key of `_choose_way`, and quickly hashed
class ShardingMove:
    """How arrays of one kind go from one sharding to another."""

    shape: tuple[int, ...]  # the global one
    dtype: Any
    source: Any
    sharding: Any
    program: Program
    direct: bool  # whether one executable takes the array and gives the result


@lru_cache(maxsize=MOST_PLANS)
def _choose_way(
    shape: tuple[int, ...], dtype: Any, source: Any, sharding: Any, memory_limit: int | None, donate: bool
) -> ShardingMove | None:
    """The way, planned, checked and agreed upon; None for `jax.device_put`."""
    _check_concrete(sharding)
    with refusing([d.id for end in (source, sharding) for d in end.device_set]):
        way = _planned_way(shape, dtype, source, sharding, memory_limit, donate)
    if way is not None:
        agree(way.program, TIMEOUT)
    return way


def _planned_way(
    shape: tuple[int, ...], dtype: Any, source: Any, sharding: Any, memory_limit: int | None, donate: bool
) -> ShardingMove | None:
    """The way, planned and checked."""
    check_ends(source, sharding)
    if 0 in shape:
        return None
    s, t = ends(shape, dtype, source, sharding)
    on_host = LEAVES_TO_HOST and memory_limit is None and _is_local_cpu(source) and _is_local_cpu(sharding)
    direct = s.mesh == t.mesh and not any(_explicit(x) for x in (source, sharding))
    if on_host and (s.nbytes <= SMALL_BYTES or not direct):
        return None
    program = program_within((s,), (t,), memory_limit, (not donate,))
    if not program.steps or (on_host and not {step.op.name for step in program.steps} <= ONE_COPY):
        return None
    check(program)
    return ShardingMove(shape, dtype, source, sharding, program, direct)


def _check_concrete(sharding: Any) -> None:
    if isinstance(getattr(sharding, "mesh", None), AbstractMesh):
        raise BackendError(
            f"reshard: {sharding.spec} is on an AbstractMesh, which names no devices; outside jit legal is a "
            f"NamedSharding on a Mesh"
        )


def _is_local_cpu(sharding: Any) -> bool:
    """Whether all devices are CPUs of this process."""
    return sharding.is_fully_addressable and all(d.platform == "cpu" for d in sharding.device_set)


def _explicit(sharding: Any) -> bool:
    """Whether an array's type carries this sharding: JAX then takes no `shard_map` over sub-axes."""
    mesh = getattr(sharding, "mesh", None)
    return mesh is not None and not mesh.are_all_axes_auto


def _compile_way(way: ShardingMove) -> tuple[Any, int]:
    """What runs a direct way, and the bytes that it takes, for the cache of executables."""
    several = len(processes_of(way.program.devices)) > 1

    def function(x: Any) -> Any:
        return map_program(way.program, header=several)(x)

    # JAX keeps what it compiled for as long as the function lives: a new one goes with its executable.
    shape = jax.ShapeDtypeStruct(way.shape, way.dtype, sharding=way.source)
    with program_context(way.program):
        move = jax.jit(function, in_shardings=way.source, out_shardings=way.sharding)
    try:
        executable, call = compile_for(move, [shape], lambda: program_context(way.program))
    except jax.errors.JaxRuntimeError as error:  # the platform's XLA lacks a collective for this dtype, say
        raise BackendError(f"reshard: no executable on {jax.default_backend()}: {error}") from error
    return call, code_bytes(executable)


def _on_shards(moves: Sequence[JaxMove], program: Program, memory_limit: int | None) -> list[Any]:
    """Run a program on the shards of arrays; donated arrays are deleted, under a limit as soon as they can be."""
    inputs: list[list[Any]] = []
    for m, t in zip(moves, program.input_types, strict=True):
        shards = {s.device.id: s.data for s in m.array.addressable_shards}
        inputs.append([shards[k] for k in t.mesh.devices if k in shards])
    donated = [name for (name, _), m in zip(program.inputs, moves, strict=True) if m.donate]
    found = run_placed(
        program, inputs, kinds=tuple(m.array.dtype for m in moves), donated=donated if memory_limit is not None else ()
    )
    results: list[Any] = []
    for m, given, shards in zip(moves, inputs, found, strict=True):
        shared = any(x is y for x in given for y in shards)
        result = jax.make_array_from_single_device_arrays(m.array.shape, m.sharding, shards)
        if m.donate and not shared:
            m.array.delete()
        results.append(_weak(m.sharding)(result) if m.array.weak_type else result)
    return results


@lru_cache(maxsize=MOST_MARKS)
def _weak(sharding: Any) -> Any:
    """What marks an array as of a weak type, as a Python number is."""

    def mark(x: Any) -> Any:
        return convert_element_type_p.bind(x, new_dtype=x.dtype, weak_type=True, sharding=None)

    return jax.jit(mark, out_shardings=sharding)

"""Which plan moves JAX arrays between shardings, within a limit that counts what the caller keeps."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Any

import jax  # pyright: ignore[reportMissingImports]

from shardplan.core.dtypes import numpy_dtype
from shardplan.core.program import Program
from shardplan.core.shardings import types_between
from shardplan.core.tensor import TensorType
from shardplan.errors import BackendError, Infeasible
from shardplan.execution.jax.bits import carrier
from shardplan.execution.jax.executables import at_once
from shardplan.execution.jax.lower import moved_bytes
from shardplan.hardware.units import format_bytes, limit_of
from shardplan.interop.hlo import parse_hlo
from shardplan.movement.redistribute import plan_kept
from shardplan.plans.plan import Plan

MOST_PLANS = 4096  # remembered


@lru_cache(maxsize=MOST_PLANS)
def plan_of(source: TensorType, destination: TensorType, memory_limit: int | None = None) -> Plan:
    """Return the plan that `reshard` runs: a portable one, else any."""
    return _plan((source,), (destination,), memory_limit)


Types = tuple[TensorType, ...]


@lru_cache(maxsize=MOST_PLANS)
def program_within(sources: Types, targets: Types, memory_limit: int | None, kept: tuple[bool, ...]) -> Program:
    """Return the program that moves some arrays from types to types.

    `memory_limit` is in bytes that a device may hold: arrays, results and staging. `kept` says of each array whether it
    outlives the move, since its owner keeps it; its bytes then count to the end. Raises `Infeasible` where no plan was
    found that keeps the limit.
    """
    if memory_limit is None or not any(kept):
        return _plan(sources, targets, memory_limit).program
    try:
        program = _plan(sources, targets, memory_limit, kept).program
    except Infeasible as error:
        if error.least_bytes is None or error.least_bytes == _least_limit(sources, targets):
            raise  # to donate would not help
        raise _too_much(sources, targets, memory_limit, error.least_bytes) from None
    return Program(program.inputs, program.steps, program.outputs[: len(targets)])


def _least_limit(sources: Types, targets: Types) -> int | None:
    """The least limit that works where nothing is kept."""
    try:
        return _plan(sources, targets, 1).certificate.workspace_bytes
    except Infeasible as error:
        return error.least_bytes


def _too_much(sources: Types, targets: Types, limit: int, least: int) -> Infeasible:
    what = f"{sources[0]} to {targets[0]}" if len(sources) == 1 else f"{len(sources)} arrays"
    return Infeasible(
        f"reshard {what} within {limit} bytes a device, where the source is kept: the least found is {least} bytes; "
        f"legal is a larger limit, or donate=True",
        least,
    )


def _plan(sources: Types, targets: Types, limit: int | None, kept: tuple[bool, ...] | bool = False) -> Plan:
    """The plan of one array or of a batch: a portable one, else any."""
    ends = (sources[0], targets[0]) if len(sources) == 1 else (sources, targets)
    try:
        return plan_kept(*ends, None, limit, True, keep=kept, even=True)
    except Infeasible:
        return plan_kept(*ends, None, limit, keep=kept, even=True)


def ends(shape: tuple[int, ...], dtype: Any, source: Any, sharding: Any) -> tuple[TensorType, TensorType]:
    """Return the types of an array under two shardings, on one mesh if there is one that refines theirs."""
    return types_between(shape, carrier(dtype), source, sharding)


def check_ends(source: Any, sharding: Any) -> None:
    """Raise `BackendError` for shardings that no plan is made between."""
    kinds = [getattr(x, "memory_kind", None) for x in (source, sharding)]
    if None not in kinds and kinds[0] != kinds[1]:
        raise BackendError(
            f"reshard: from memory {kinds[0]!r} to {kinds[1]!r}; legal is one kind of memory: use jax.device_put"
        )
    for x in (source, sharding):
        unreduced = sorted(getattr(getattr(x, "spec", None), "unreduced", ()))
        if unreduced:
            raise BackendError(f"reshard: {x.spec} is unreduced over {', '.join(unreduced)}; legal is a reduced array")


def compare_with_xla(
    source: Any, sharding: Any, shape: Sequence[int], dtype: object, memory_limit: int | str | None = None
) -> str:
    """Return a line: what all devices receive by the plan of `reshard`, and by XLA's own move inside `jit`.

    Args:
        source: The `NamedSharding` of an array, on devices.
        sharding: Where it goes, on the same devices in the same order: XLA moves within one jit only.
        shape: Of the whole array.
        dtype: Of its elements.
        memory_limit: Of the plan, in bytes a device, or their text; XLA takes none.

    Nothing is moved: XLA compiles a jitted identity, and its collectives are read from what it prints. Raises as
    `reshard` does, and `BackendError` for ends that no jit takes.

    >>> import jax
    >>> from jax.sharding import NamedSharding, PartitionSpec
    >>> mesh = jax.make_mesh((1,), ("x",))
    >>> print(compare_with_xla(*[NamedSharding(mesh, PartitionSpec("x"))] * 2, (4, 4), "f32"))
    f32[4@x, 4] to f32[4@x, 4]: all devices receive 0 B by the plan (nothing), 0 B by XLA (nothing)
    """
    check_ends(source, sharding)
    s, t = types_between(shape, dtype, source, sharding)
    if s.mesh != t.mesh:
        raise BackendError(
            f"compare_with_xla: {s} on the mesh {s.mesh} and {t} on {t.mesh} meet in no jit; legal are shardings of "
            "the same devices in the same order, on meshes that one mesh refines"
        )
    program = plan_of(s, t, limit_of("memory limit", memory_limit)).program
    ours = sum(sum(moved_bytes(step.op, *program.step_types(step)[0]).values()) for step in program.steps)
    with at_once(), jax.enable_x64(True):
        given = jax.ShapeDtypeStruct(s.shape, numpy_dtype(s.dtype), sharding=source)
        try:
            text = jax.jit(lambda x: x, out_shardings=sharding).lower(given).compile().as_text()
        except (ValueError, jax.errors.JaxRuntimeError) as error:
            raise BackendError(f"compare_with_xla: XLA does not compile {s} to {t}: {error}") from error
    theirs = parse_hlo(text or "", s.mesh.size)
    steps = _count_names(x.op.name for x in program.steps)
    return (
        f"{s} to {t}: all devices receive {format_bytes(ours)} by the plan ({steps}), "
        f"{format_bytes(sum(c.moved_bytes for c in theirs))} by XLA ({_count_names(c.kind for c in theirs)})"
    )


def _count_names(names: Iterable[str]) -> str:
    """Names, each once, in order."""
    return ", ".join(name if n == 1 else f"{n} {name}" for name, n in Counter(names).items()) or "nothing"

"""Which plan moves JAX arrays between shardings, within a limit that counts what the caller keeps."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from shardplan.core.program import Program
from shardplan.core.shardings import types_between
from shardplan.core.tensor import TensorType
from shardplan.errors import BackendError, Infeasible
from shardplan.execution.jax.bits import carrier
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

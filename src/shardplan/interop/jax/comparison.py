"""What a plan sends beside what XLA sends for the same move, in a line: `compare_with_xla`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import jax  # pyright: ignore[reportMissingImports]

from shardplan.core.dtypes import numpy_dtype
from shardplan.core.shardings import types_between
from shardplan.errors import BackendError
from shardplan.execution.jax.executables import at_once
from shardplan.execution.jax.lower import moved_bytes
from shardplan.hardware.units import format_bytes, limit_of
from shardplan.interop.hlo import parse_hlo
from shardplan.interop.jax.plans import check_ends, plan_of


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

"""The one table by which text names ops: those of this package, and those that other packages bring.

A package brings an op by an entry point of the group `shardplan.ops`, whose name is the op's. Entry points are read
once, when a name is looked up that is not in the table, or when all ops are asked for.
"""

from __future__ import annotations

from functools import cache
from importlib import metadata
from typing import Any

from shardplan.core.op import Op
from shardplan.errors import ShardplanError, excerpt, line

OPS: dict[str, type[Op]] = {}  # by name; `core.ops` fills it
GROUP = "shardplan.ops"


@cache
def entry_points_of(group: str) -> dict[str, Any]:
    """Return what the installed packages bring to a group of entry points, by name.

    Raises `ShardplanError` for an entry point that cannot be loaded, or a name that two packages bring.
    """
    found: dict[str, Any] = {}
    for point in metadata.entry_points(group=group):
        if point.name in found:
            raise ShardplanError(f"two installed packages bring {point.name!r} to {group}; names are unique")
        try:
            found[point.name] = point.load()
        except Exception as error:  # whatever another package's module raises
            raise ShardplanError(
                f"the entry point {point.name} = {point.value} of {group} cannot be loaded: "
                f"{type(error).__name__}: {line(error)}"
            ) from error
    return found


@cache
def outside_ops() -> dict[str, type[Op]]:
    """Return the ops that other packages bring, by name; raises `ShardplanError` for what is no op, or no new one."""
    found: dict[str, type[Op]] = {}
    for name, op in entry_points_of(GROUP).items():
        wrong = f"the entry point {name} of {GROUP} is {excerpt(op)}"
        if not isinstance(op, type) or not issubclass(op, Op):
            raise ShardplanError(f"{wrong}; legal is a class of ops")
        if getattr(op, "name", None) != name:
            raise ShardplanError(f"{wrong}, whose name is {excerpt(getattr(op, 'name', None))}; legal is one name")
        if name in OPS:
            raise ShardplanError(f"{wrong}; shardplan itself has an op of that name, legal is a new one")
        found[name] = op
    return found


def op_named(name: str) -> type[Op] | None:
    """Return the op of a name, or None where there is none; errors as of `outside_ops`."""
    return OPS.get(name) or outside_ops().get(name)


def every_op() -> dict[str, type[Op]]:
    """Return all ops by name; errors as of `outside_ops`."""
    return {**OPS, **outside_ops()}

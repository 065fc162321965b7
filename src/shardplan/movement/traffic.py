"""The traffic of a job: which collectives run over which mesh axes, with how many bytes, how often a step."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from shardplan.core.mesh import Mesh
from shardplan.core.ops import AllGather, AllReduce, AllToAll, Broadcast, Reduce, ReduceScatter
from shardplan.core.pattern import Groups, Local, Pattern
from shardplan.core.program import Program
from shardplan.errors import LayoutError

# Of each op the letters of every factor before and after (see `reduction_space`); None where it is no reduction.
OPS: dict[str, tuple[str, str] | None] = {
    "all_reduce": ("P", "U"),
    "reduce_scatter": ("P", "S"),
    "all_gather": ("S", "U"),
    "reduce": ("P", "R"),
    "broadcast": ("R", "U"),
    "all_to_all": None,
    "permute": None,
}
Entries = float | Sequence[tuple[str, float, float]]
Traffic = Mapping[tuple[str, ...] | str, Entries]


@dataclass(frozen=True, slots=True)
class Entry:
    """A collective of every step.

    Args:
        axes: Mesh axes of its groups, in mesh order.
        op: all_reduce, reduce_scatter, all_gather, reduce, broadcast, all_to_all or permute (to the next member).
        nbytes: Bytes that a member holds before.
        count: How often a step.
    """

    axes: tuple[str, ...]
    op: str
    nbytes: float
    count: float = 1.0

    def __str__(self) -> str:
        """Say the entry in a line."""
        times = f" x {self.count:g}" if self.count != 1 else ""
        return f"{self.op} over {','.join(self.axes)}, {self.nbytes:g} bytes{times}"

    def payload(self, members: int) -> float:
        """Return the bytes of the payload that the op is a part of: of an all-gather those held after."""
        return self.nbytes * (members if self.op == "all_gather" else 1)


def entries(mesh: Mesh, traffic: Traffic) -> tuple[Entry, ...]:
    """Read the traffic of a job.

    Args:
        mesh: Its axes.
        traffic: For a tuple of axes the bytes of an all-reduce a step, or a list of (op, bytes, count).

    Returns:
        The entries, in order.

    Raises:
        LayoutError: An axis, an op or a number is illegal, or there is no traffic.

    >>> [str(e) for e in entries(Mesh(data=4, tensor=2), {("data",): 2e9, "tensor": [("all_gather", 1e6, 48)]})]
    ['all_reduce over data, 2e+09 bytes', 'all_gather over tensor, 1e+06 bytes x 48']
    """
    found: list[Entry] = []
    for key, value in traffic.items():
        axes = (key,) if isinstance(key, str) else tuple(key)
        for axis in axes:
            if axis not in mesh.axes or axes.count(axis) > 1:
                wrong = "is named twice" if axis in mesh.axes else "is unknown"
                raise LayoutError(f"traffic over {list(axes)}: {axis!r} {wrong}; {mesh.legal()}")
        ordered = tuple(a for a in mesh.axes if a in axes)
        rows = [("all_reduce", value, 1.0)] if isinstance(value, (int, float)) else value
        for op, nbytes, count in rows:
            if op not in OPS:
                raise LayoutError(f"traffic over {list(axes)}: op {op!r} is unknown; legal are {', '.join(OPS)}")
            if not (math.isfinite(nbytes) and nbytes >= 0 and math.isfinite(count) and count >= 0):
                raise LayoutError(
                    f"traffic over {list(axes)}: {op} of {nbytes} bytes, {count} times; legal is 0 or more"
                )
            if nbytes > 0 and count > 0:
                found.append(Entry(ordered, op, float(nbytes), float(count)))
    if not found:
        raise LayoutError("there is no traffic to place: give bytes above 0 for at least one tuple of axes")
    return tuple(found)


def program_traffic(program: Program) -> tuple[Mesh, tuple[Entry, ...], tuple[Pattern, ...]]:
    """Fold over a program's collectives.

    Returns:
        Its mesh, the collectives over whole mesh axes as entries, and the patterns of all other communication.

    Raises:
        LayoutError: The program has several meshes.
    """
    meshes = program.meshes
    if len(meshes) != 1:
        raise LayoutError(f"place needs a program on one mesh; this one has {len(meshes)}")
    mesh = meshes[0]
    found: dict[tuple[tuple[str, ...], str, float], float] = {}
    others: list[Pattern] = []
    for step in program.steps:
        operands = program.step_types(step)[0]
        pattern = step.op.pattern(*operands)
        if isinstance(pattern, Local):
            continue
        axes: tuple[str, ...] = getattr(step.op, "axes", ())
        plain = isinstance(step.op, (AllReduce, ReduceScatter, AllGather, Reduce, Broadcast, AllToAll))
        whole = plain and all(a in mesh.axes for a in axes) and not any(t.layout.root for t in operands)
        if whole and isinstance(pattern, Groups) and len(set(pattern.nbytes.tolist())) == 1:
            key = tuple(a for a in mesh.axes if a in axes), pattern.kind, float(pattern.nbytes[0])
            found[key] = found.get(key, 0.0) + 1
        else:
            others.append(pattern)
    return mesh, tuple(Entry(axes, op, nbytes, n) for (axes, op, nbytes), n in found.items()), tuple(others)

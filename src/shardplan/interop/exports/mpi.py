"""Reduction programs for MPI: bound to communicators, and as text to paste.

Both make the calls of `mpi_calls`: the library's own Allreduce, Reduce_scatter_block, Allgather, Reduce and
Bcast on communicators that `Split(color, key=position)` makes. Device ids are ranks of the world. Unlike
`execution.mpi.run`, which moves parts itself so that every sum comes out in one order, this leaves the algorithm
to MPI.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np

from shardplan.core.program import Program
from shardplan.errors import BackendError
from shardplan.execution.mpi.world import start
from shardplan.hardware.placement import Placement
from shardplan.interop.exports.recipe import Recipe, RecipeStep, heading, pasted, recipe, shape_text, turn_text

CALLS = Path(__file__).with_name("mpi_calls.py")


class MpiReduction:
    """A reduction program on communicators (`recipe` says which); call it with each rank's payload.

    Its device ids are ranks of `world`, a communicator, `MPI.COMM_WORLD` if none is given. Every rank of `world` makes
    it, with the same program; `free` gives the communicators back. Raises `BackendError` for a program that cannot be
    exported, too few ranks, and no mpi4py or MPI library.
    """

    def __init__(self, program: Program, world: Any = None) -> None:
        """Split the world."""
        start()
        from mpi4py import MPI

        from shardplan.interop.exports import mpi_calls

        self.recipe = r = recipe(program)
        world = MPI.COMM_WORLD if world is None else world
        if max(r.ranks) >= world.Get_size():
            raise BackendError(
                f"the program runs on device {max(r.ranks)}, but there are {world.Get_size()} ranks; device ids are "
                f"ranks"
            )
        self.calls = mpi_calls
        self.groups = mpi_calls.make_groups(_digits(r), list(r.sizes), list(r.ranks), world)

    def __call__(self, payload: np.ndarray) -> np.ndarray:
        """Return the reduced payload, flat; the payload itself is left as it is.

        The payload may have any shape, has a dtype that MPI knows, and one size on all ranks; the result has as many
        elements. Where the program ends in shards, it is this rank's, padded; where it ends at a root, what other ranks
        return has no meaning.
        """
        r, calls = self.recipe, self.calls
        x = calls.padded(payload, math.prod(r.chunks)).reshape(*r.chunks, -1)
        for move in r.moves:
            group = self.groups.get(move.label)
            if group is None:
                x = np.zeros((*move.result, x.shape[-1]), x.dtype)
            elif move.kind == "reduce_scatter":
                parts = x.reshape(*move.split, -1).transpose(*move.turn, len(move.turn))
                x = calls.reduce_scatter(parts.reshape(move.size, -1), group).reshape(*move.result, -1)
            elif move.kind == "all_gather":
                parts = calls.all_gather(x, group).reshape(*move.turned, -1)
                x = parts.transpose(*move.back, len(move.back)).reshape(*move.result, -1)
            else:
                x = getattr(calls, move.kind)(x, group)
        return x.reshape(-1)[: payload.size] if r.result == r.chunks else x.reshape(-1)

    def free(self) -> None:
        """Free the communicators; every rank of the world calls it, and the object is of no use after."""
        for group in self.groups.values():
            group.Free()
        self.groups = {}


def bind(program: Program, world: Any = None) -> MpiReduction:
    """Return a reduction program on communicators, to be called with each rank's payload: see `MpiReduction`."""
    return MpiReduction(program, world)


def mpi_text(program: Program, placement: Placement | None = None) -> str:
    """Return Python source that runs a reduction program with mpi4py alone; device ids are ranks.

    It is a module: `make_groups(MOVES, SIZES, RANKS, world)` once on each rank, then `reduce_payload(payload, groups)`.
    `placement` is where the program lies, for a comment. Raises `BackendError` for one that cannot be exported.

    >>> from shardplan.core.mesh import Mesh
    >>> from shardplan.core.ops import AllReduce
    >>> from shardplan.core.step import Step
    >>> from shardplan.core.tensor import TensorType
    >>> t = TensorType("f32", (4, 5), (), Mesh(data=4), partial={"data": "sum"})
    >>> text = mpi_text(Program({"0": t}, [Step(AllReduce(("data",)), ("0",), ("1",))], ("1",)))
    >>> print(text[text.index("def reduce_payload"):])
    def reduce_payload(payload: np.ndarray, groups: dict[str, Any]) -> np.ndarray:
        x = padded(payload, 4).reshape(4, -1)
        # all_reduce over data: f32[4, 5]
        x = all_reduce(x, groups["data"])
        return x.reshape(-1)[: payload.size]
    <BLANKLINE>
    """
    r = recipe(program)
    lines = ['"""A reduction with MPI, exported by shardplan. Ranks are those of the world.', ""]
    lines += [*heading(program, placement), ""]
    lines += [
        "Every rank calls `groups = make_groups(MOVES, SIZES, RANKS, MPI.COMM_WORLD)` once, and then",
        "`reduce_payload(payload, groups)` with its own payload, all of one size.",
        '"""',
        "",
        *pasted(CALLS),
        "",
        f"SIZES = {list(r.sizes)}  # of {', '.join(r.names)}",
        f"RANKS = {_ranks(r.ranks)}  # of the mesh, row-major over these",
        "# By move: the digits of a place that vary in a group, and those that are 0 in a group that takes part.",
        "MOVES = {",
        *(f'    "{label}": {digits},' for label, digits in _digits(r).items()),
        "}",
        "",
        "",
        "def reduce_payload(payload: np.ndarray, groups: dict[str, Any]) -> np.ndarray:",
        f"    x = padded(payload, {math.prod(r.chunks)}).reshape({shape_text(r.chunks)})",
    ]
    before = r.chunks
    for move in r.moves:
        lines.append(f"    # {move.kind} over {', '.join(move.axes)}: {move.note}")
        indent = "    "
        if move.masters:
            lines.append(f'    if "{move.label}" in groups:')
            indent = " " * 8
        lines += [indent + line for line in _lines(move)]
        if move.masters and move.result != before:
            lines += ["    else:", f"        x = np.zeros(({shape_text(move.result, 'x.shape[-1]')}), x.dtype)"]
        before = move.result
    lines.append(f"    return x.reshape(-1){'[: payload.size]' if r.result == r.chunks else ''}")
    return "\n".join(lines) + "\n"


def _lines(move: RecipeStep) -> list[str]:
    """Return the statements of a move."""
    group = f'groups["{move.label}"]'
    if move.kind == "reduce_scatter":
        parts = "x" if move.straight else f"x.reshape({shape_text(move.split)}).transpose({turn_text(move.turn)})"
        end = f"reshape({shape_text(move.result)})"
        return [f"parts = {parts}.reshape({move.size}, -1)", f"x = reduce_scatter(parts, {group}).{end}"]
    if move.kind == "all_gather":
        turned = f".reshape({shape_text(move.turned)}).transpose({turn_text(move.back)})"
        end = f"reshape({shape_text(move.result)})"
        return [f"parts = all_gather(x, {group})", f"x = parts{'' if move.straight else turned}.{end}"]
    return [f"x = {move.kind}(x, {group})"]


def _digits(r: Recipe) -> dict[str, tuple[list[int], list[int]]]:
    """By the label of a move, the digits of a place that vary in a group, and those that are 0 where it takes part."""
    at = r.names.index
    return {move.label: ([at(name) for name in move.axes], [at(name) for name in move.masters]) for move in r.moves}


def _ranks(ranks: tuple[int, ...]) -> str:
    start, count = ranks[0], len(ranks)
    return f"list(range({start}, {start + count}))" if ranks == tuple(range(start, start + count)) else str(list(ranks))

"""Reduction programs for torch.distributed: bound to process groups, and as text to paste.

Both make the calls of `torch_calls`: the framework's own collectives on one process group for each group of the
program. Device ids are global ranks. Unlike `execution.torch.run`, which moves parts itself so that every sum comes out
in one order, this leaves the algorithm of a collective to the backend (nccl, gloo), as a training script would.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardplan.core.program import Program
from shardplan.errors import BackendError, optional
from shardplan.hardware.placement import Placement
from shardplan.interop.exports.recipe import Recipe, RecipeStep, heading, pasted, recipe, shape_text, turn_text

if TYPE_CHECKING:
    import torch

CALLS = Path(__file__).with_name("torch_calls.py")


class TorchReduction:
    """A reduction program on process groups (`recipe` says which); call it with each rank's payload.

    Its device ids are global ranks. `groups` are process groups by the ranks of their members; those missing are made
    and kept there, so several programs that are given one dict share their groups. Every rank of the world makes it,
    with the same program and equal `groups`: torch makes a group on all ranks together.

    Raises `BackendError` for a program that cannot be exported, torch.distributed not initialised, and too few ranks.
    """

    def __init__(self, program: Program, groups: dict[tuple[int, ...], Any] | None = None) -> None:
        """Make the process groups."""
        optional("torch", "torch")
        import torch.distributed as dist

        from shardplan.interop.exports import torch_calls

        self.recipe = recipe(program)
        if not dist.is_available() or not dist.is_initialized():
            raise BackendError(
                "torch.distributed is not initialised: launch with torchrun and call "
                "torch.distributed.init_process_group"
            )
        if max(self.recipe.ranks) >= dist.get_world_size():
            raise BackendError(
                f"the program runs on device {max(self.recipe.ranks)}, but there are {dist.get_world_size()} ranks; "
                f"device ids are global ranks"
            )
        self.calls = torch_calls
        self.groups = torch_calls.make_groups(_members(self.recipe), {} if groups is None else groups)

    def __call__(self, payload: torch.Tensor) -> torch.Tensor:
        """Return the reduced payload, flat; the payload itself is left as it is.

        The payload may have any shape, and has one size on all ranks; the result has as many elements. Where the
        program ends in shards, it is this rank's, padded; where it ends at a root, what other ranks return has no
        meaning.
        """
        r, calls = self.recipe, self.calls
        x = calls.padded(payload, math.prod(r.chunks)).reshape(*r.chunks, -1)
        for move in r.moves:
            group = self.groups.get(move.label)
            if group is None:
                x = x.new_zeros(*move.result, x.shape[-1])
            elif move.kind == "reduce_scatter":
                parts = x.reshape(*move.split, -1).permute(*move.turn, len(move.turn))
                x = calls.reduce_scatter(parts.reshape(move.size, -1), group).reshape(*move.result, -1)
            elif move.kind == "all_gather":
                parts = calls.all_gather(x.reshape(-1), group).reshape(*move.turned, -1)
                x = parts.permute(*move.back, len(move.back)).reshape(*move.result, -1)
            else:
                x = getattr(calls, move.kind)(x, group)
        return x.reshape(-1)[: payload.numel()] if r.result == r.chunks else x.reshape(-1)


def bind(program: Program, groups: dict[tuple[int, ...], Any] | None = None) -> TorchReduction:
    """Return a reduction program on process groups, to be called with each rank's payload: see `TorchReduction`."""
    return TorchReduction(program, groups)


def torch_text(program: Program, placement: Placement | None = None) -> str:
    """Return Python source that runs a reduction program with torch.distributed alone; device ids are global ranks.

    It is a module: `make_groups(GROUPS, {})` once on every rank, then `reduce_payload(payload, groups)`. `placement` is
    where the program lies, for a comment. Raises `BackendError` for one that cannot be exported.

    >>> from shardplan.core.mesh import Mesh
    >>> from shardplan.core.ops import AllReduce
    >>> from shardplan.core.step import Step
    >>> from shardplan.core.tensor import TensorType
    >>> t = TensorType("f32", (4, 5), (), Mesh(data=4), partial={"data": "sum"})
    >>> text = torch_text(Program({"0": t}, [Step(AllReduce(("data",)), ("0",), ("1",))], ("1",)))
    >>> print(text[text.index("def reduce_payload"):])
    def reduce_payload(payload: torch.Tensor, groups: dict[str, Group]) -> torch.Tensor:
        x = padded(payload, 4).reshape(4, -1)
        # all_reduce over data: f32[4, 5]
        x = all_reduce(x, groups["data"])
        return x.reshape(-1)[: payload.numel()]
    <BLANKLINE>
    """
    r = recipe(program)
    lines = ['"""A reduction with torch.distributed, exported by shardplan. Ranks are global ranks.', ""]
    lines += [*heading(program, placement), ""]
    lines += [
        "Every rank of the world calls `groups = make_groups(GROUPS, {})` once, after init_process_group, and then",
        "`reduce_payload(payload, groups)` with its own payload, all of one size.",
        '"""',
        "",
        *pasted(CALLS),
        "",
        "# The groups of every move, members in the order of the program.",
        "GROUPS = {",
    ]
    for label, groups in _members(r).items():
        lines += [f'    "{label}": [', *(f"        {members}," for members in groups), "    ],"]
    lines += ["}", "", "", "def reduce_payload(payload: torch.Tensor, groups: dict[str, Group]) -> torch.Tensor:"]
    lines.append(f"    x = padded(payload, {math.prod(r.chunks)}).reshape({shape_text(r.chunks)})")
    before = r.chunks
    for move in r.moves:
        lines.append(f"    # {move.kind} over {', '.join(move.axes)}: {move.note}")
        indent = "    "
        if move.masters:
            lines.append(f'    if "{move.label}" in groups:')
            indent = " " * 8
        lines += [indent + line for line in _lines(move)]
        if move.masters and move.result != before:
            lines += ["    else:", f"        x = x.new_zeros({shape_text(move.result, 'x.shape[-1]')})"]
        before = move.result
    lines.append(f"    return x.reshape(-1){'[: payload.numel()]' if r.result == r.chunks else ''}")
    return "\n".join(lines) + "\n"


def _lines(move: RecipeStep) -> list[str]:
    """Return the statements of a move."""
    group = f'groups["{move.label}"]'
    if move.kind == "reduce_scatter":
        parts = "x" if move.straight else f"x.reshape({shape_text(move.split)}).permute({turn_text(move.turn)})"
        end = f"reshape({shape_text(move.result)})"
        return [f"parts = {parts}.reshape({move.size}, -1)", f"x = reduce_scatter(parts, {group}).{end}"]
    if move.kind == "all_gather":
        turned = f".reshape({shape_text(move.turned)}).permute({turn_text(move.back)})"
        end = f"reshape({shape_text(move.result)})"
        return [f"parts = all_gather(x.reshape(-1), {group})", f"x = parts{'' if move.straight else turned}.{end}"]
    return [f"x = {move.kind}(x, {group})"]


def _members(r: Recipe) -> dict[str, list[tuple[int, ...]]]:
    return {move.label: r.groups(move) for move in r.moves}

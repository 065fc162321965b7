"""The calls of torch.distributed that an exported reduction makes; their source is pasted into the exported text.

Nothing but torch is imported. A group keeps the order of its members where torch can (`sort_ranks=False`); elsewhere
torch sorts, and the parts are reordered here.
"""

import inspect
from typing import Any

import torch
import torch.distributed as dist

# A process group, the ranks of its members in the program's order, and for each rank in it which member that is.
Group = tuple[Any, tuple[int, ...], list[int]]


def make_groups(moves: dict[str, list[tuple[int, ...]]], made: dict[tuple[int, ...], Any]) -> dict[str, Group]:
    """Return this process's group of every move it takes part in; `made` keeps one group for each tuple of ranks.

    A group is made by all ranks together: every rank of the world calls this, with the same moves in the same order.
    """
    options: dict[str, Any] = (
        {"sort_ranks": False} if "sort_ranks" in inspect.signature(dist.new_group).parameters else {}
    )
    mine: dict[str, Group] = {}
    for name, groups in moves.items():
        for members in groups:
            if members not in made:
                made[members] = dist.new_group(list(members), **options)
            if dist.get_rank() in members:
                group = made[members]
                at = {dist.get_group_rank(group, rank): k for k, rank in enumerate(members)}
                mine[name] = (group, members, [at[k] for k in range(len(members))])
    return mine


def all_reduce(x: torch.Tensor, group: Group) -> torch.Tensor:
    """Sum."""
    x = x.contiguous()
    dist.all_reduce(x, group=group[0])
    return x


def reduce(x: torch.Tensor, group: Group) -> torch.Tensor:
    """Sum at the first member; the others' values are lost."""
    x = x.contiguous()
    dist.reduce(x, dst=group[1][0], group=group[0])  # a root is a global rank
    return x


def broadcast(x: torch.Tensor, group: Group) -> torch.Tensor:
    """Copy the first member's value."""
    x = x.contiguous()
    dist.broadcast(x, src=group[1][0], group=group[0])
    return x


def reduce_scatter(parts: torch.Tensor, group: Group) -> torch.Tensor:
    """Sum `parts` [members, n]; member k gets the k-th."""
    scatter = _call("reduce_scatter_single", "reduce_scatter_tensor")
    out = torch.empty_like(parts[0])
    scatter(out, _reorder_rows(parts, group[2]).reshape(-1), group=group[0])
    return out


def all_gather(part: torch.Tensor, group: Group) -> torch.Tensor:
    """Return the parts [n] of all members, [members, n]."""
    gather = _call("all_gather_single", "all_gather_into_tensor")
    out = part.new_empty(len(group[1]) * part.numel())
    gather(out, part.reshape(-1), group=group[0])
    return _reorder_rows(out.reshape(len(group[1]), -1), [group[2].index(k) for k in range(len(group[1]))])


def _call(name: str, older: str) -> Any:
    """Return a collective of torch.distributed by the name that it has in this torch."""
    return getattr(dist, name, None) or getattr(dist, older)


def _reorder_rows(rows: torch.Tensor, order: list[int]) -> torch.Tensor:
    return rows if order == sorted(order) else rows[order]


def pad_payload(payload: torch.Tensor, chunks: int) -> torch.Tensor:
    """Return a flat copy of the payload, with zeros up to a multiple of the chunks."""
    rows = -(-payload.numel() // chunks)
    x = payload.new_zeros(chunks * rows)
    x[: payload.numel()] = payload.reshape(-1)
    return x

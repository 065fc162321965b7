"""The calls of MPI that an exported reduction makes; their source is pasted into the exported text.

Nothing but numpy and mpi4py is imported. Arrays are contiguous, of dtypes that MPI knows (not bf16).
"""

from typing import Any

import numpy as np


def make_groups(
    moves: dict[str, tuple[list[int], list[int]]], sizes: list[int], ranks: list[int], world: Any
) -> dict[str, Any]:
    """Split the world into the groups of every move: those digits of a rank's place that vary, most significant first.

    `moves` holds, by name, the digits of a place in the mesh (`sizes`, row-major; `ranks` in that order) that vary in a
    group, and those that must be 0 for a rank to take part. Every rank of the world calls this; it returns the
    communicators of this rank, whose order of ranks is that of the members.
    """
    from mpi4py import MPI

    me = world.Get_rank()
    place = np.unravel_index(ranks.index(me), sizes) if me in ranks else None
    mine: dict[str, Any] = {}
    for name, (digits, zeros) in moves.items():
        color, position = MPI.UNDEFINED, 0
        if place is not None and not any(place[k] for k in zeros):
            color = 0
            for k, digit in enumerate(place):
                color = color if k in digits else color * sizes[k] + int(digit)
            for k in digits:
                position = position * sizes[k] + int(place[k])
        group = world.Split(color, key=position)
        if group != MPI.COMM_NULL:
            mine[name] = group
    return mine


def all_reduce(x: np.ndarray, group: Any) -> np.ndarray:
    """Sum."""
    x = np.ascontiguousarray(x)
    out = np.empty_like(x)
    group.Allreduce(x, out)
    return out


def reduce(x: np.ndarray, group: Any) -> np.ndarray:
    """Sum at the first member; the others keep what they have, which is of no use."""
    x = np.ascontiguousarray(x)
    if group.Get_rank():
        group.Reduce(x, None, root=0)
        return x
    out = np.empty_like(x)
    group.Reduce(x, out, root=0)
    return out


def broadcast(x: np.ndarray, group: Any) -> np.ndarray:
    """Copy the first member's value."""
    x = np.ascontiguousarray(x)
    group.Bcast(x, root=0)
    return x


def reduce_scatter(parts: np.ndarray, group: Any) -> np.ndarray:
    """Sum `parts` [members, n]; member k gets the k-th."""
    parts = np.ascontiguousarray(parts)
    out = np.empty_like(parts[0])
    group.Reduce_scatter_block(parts, out)
    return out


def all_gather(part: np.ndarray, group: Any) -> np.ndarray:
    """Return the parts [n] of all members, [members, n]."""
    part = np.ascontiguousarray(part)
    out = np.empty((group.Get_size(), part.size), part.dtype)
    group.Allgather(part, out)
    return out


def pad_payload(payload: np.ndarray, chunks: int) -> np.ndarray:
    """Return a flat copy of the payload, with zeros up to a multiple of the chunks."""
    rows = -(-payload.size // chunks)
    x = np.zeros(chunks * rows, payload.dtype)
    x[: payload.size] = payload.reshape(-1)
    return x

"""What axes are called, which of a value's dims they cut, and how experts are dealt out to devices."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache
from typing import Literal

from shardplan.strategy.model import Model
from shardplan.strategy.partition.tables import LAYER, Axes

ExpertFrom = Literal["data", "context", "tensor"]
TENSOR = ("kv_heads", "ffn", "vocab")
EXPERTS = ("experts", "embedding")
# Axes by what they deal out: sequences, positions, key-value heads and what is alike, query heads of one group.
BATCH, SEQUENCE = ("replica", "data", "expert"), ("context", "expert_context")
HEADS, RATIO = ("tensor", "expert_tensor"), ("group", "expert_group")
SHARING = {"data": "expert", "context": "expert_context", "tensor": "expert_tensor", "group": "expert_group"}
AXES = BATCH + SEQUENCE + HEADS + RATIO  # of a stage, outermost first
# Whose devices share experts: by the first of them the axes in the order in which they are taken. In the order of
# neighbours experts take `tensor` first, as Megatron with one device of `tensor` an expert and torchtitan do, or
# `context`, as Megatron does where `tensor` cuts experts as it cuts the rest (Liu et al., arXiv 2504.14960, section 3).
EXPERTS_FROM: Mapping[str, tuple[str, ...]] = {
    "data": ("data", "context", "tensor", "group"),
    "context": ("context", "data", "tensor", "group"),
    "tensor": ("group", "tensor", "context", "data"),
}


def deal_experts(sizes: Mapping[str, int], expert: int, first: str) -> dict[str, int]:
    """Return the parts of axes of these sizes that so many devices, which share experts, take of each.

    >>> deal_experts({"data": 4, "context": 2, "tensor": 2, "group": 1}, 8, "tensor")
    {'data': 2, 'context': 2, 'tensor': 2, 'group': 1}
    """
    parts: dict[str, int] = {}
    for axis in EXPERTS_FROM[first]:
        parts[axis] = math.gcd(expert, sizes[axis])
        expert //= parts[axis]
    return {axis: parts[axis] for axis in sizes}


def sizes_of_dims(model: Model, name: str) -> dict[str, int]:
    """Return the dims of a value but for layers, of which those longer than 1 can be cut."""
    sizes = zip(model.dims[name], model.program.types[name].shape, strict=True)
    return {dim: n for dim, n in sizes if dim != LAYER}


def cut_dims(dims: Mapping[str, int], axes: Iterable[str]) -> Iterator[tuple[str, Axes]]:
    """Yield how tensor axes cut the dims of a value, each at most once."""
    first = next((d for d in TENSOR if d in dims), None)
    heads, ratio = (tuple(a for a in axes if a in these) for these in (HEADS, RATIO))
    if first == "kv_heads":
        parts = ((first, heads), ("ratio", ratio))
        yield from ((dim, cut) for dim, cut in parts if cut and dims.get(dim, 1) > 1)
    elif first is not None and heads + ratio and dims[first] > 1:
        yield first, heads + ratio


@lru_cache(maxsize=1 << 12)  # asked of every value of a model, for every strategy
def expert_dim(dims: tuple[str, ...]) -> str | None:
    """Return the dim of a value that experts are: themselves, or the embeddings of tables; None where there is none."""
    mine = [d for d in dims if d != LAYER]
    if mine and mine[0] == "experts":
        return "experts"
    return "embedding" if mine and mine[-1] == "embedding" and mine[0] == "rows" else None


def held_cuts(model: Model, name: str, axes: Mapping[str, int]) -> Iterator[tuple[str, Axes]]:
    """Yield how a parameter is held: experts one by one, and what tensor axes cut."""
    sizes = sizes_of_dims(model, name)
    shared, sharing = expert_dim(tuple(sizes)), tuple(a for a in axes if a in SHARING.values())
    if shared and sharing and sizes[shared] > 1:
        yield shared, sharing
    yield from cut_dims(sizes, [a for a in axes if not (shared and a in sharing)])


def axis_dim_pairs(cuts: tuple[tuple[str, Axes], ...]) -> Iterator[tuple[str, str]]:
    """Return the axes of cuts, each with the dim that it cuts."""
    return ((a, dim) for dim, axes in cuts for a in axes)

"""Descriptors of a refit for transports that are not ours: contiguous runs of bytes between named parameters.

A transport that reads and writes remote memory (RDMA, NIXL, CUDA IPC) registers the parameters by name, and moves each
run from its offset at one end to its offset at the other. Runs that go on where the one before ends, at both ends, are
joined.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from shardplan.errors import LayoutError, excerpt
from shardplan.movement.weights.refit import RefitPlan
from shardplan.movement.weights.regions import RefitRegions


class RefitDescriptor(NamedTuple):
    """One run of bytes: at `offset` of the own parameter `name`, to or from `peer_offset` of the peer's `peer_name`.

    `peer` is a rank, which is the own one where the run stays; such a run is listed once, as received.
    """

    sends: bool
    peer: int
    name: str
    offset: int
    length: int
    peer_name: str
    peer_offset: int


def descriptors(plan: RefitPlan, rank: int, peer: int | None = None) -> Iterator[RefitDescriptor]:
    """Yield the runs of bytes that a rank sends and receives, lazily: there can be 100 million.

    Both ends list what goes between them in the same order, so that the k-th run of one is the k-th of the other.

    Args:
        plan: what `shardplan.refit` returns; source and target have one dtype.
        rank: a device id of either side.
        peer: only what goes to and comes from this rank; None for all.

    Raises:
        LayoutError: a rank on neither side, a plan with relays, or a parameter whose dtype or constant changes on the
            way.

    >>> from shardplan.movement.weights.refit import refit
    >>> from shardplan.movement.weights.weights import Weights
    >>> config = {"hidden_size": 8, "intermediate_size": 12, "num_attention_heads": 4, "num_key_value_heads": 2,
    ...           "num_hidden_layers": 2, "vocab_size": 64}
    >>> a, b = Weights.load("hf-llama", config), Weights.load("vllm-llama", config, tensor=2, devices=[1, 2])
    >>> next(d for d in descriptors(refit(a, b), 2) if "down" in d.name)
    RefitDescriptor(sends=False, peer=0, name='model.layers.0.mlp.down_proj.weight', offset=0, length=12, \
peer_name='model.layers.0.mlp.down_proj.weight', peer_offset=12)
    """
    if plan.relays:
        raise LayoutError(
            "descriptors of a plan with relays; legal is one of refit(..., relay=False), where none passes on, or Refit"
        )
    found = plan.regions(rank)
    if peer is not None:
        found = found.select_regions(found.peer(rank) == peer)
    for m in np.unique(found.move).tolist():
        move = plan.moves[m]
        ends = plan.source.families[move.source_family], plan.target.families[move.target_family]
        if ends[0].dtype != ends[1].dtype or ends[0].entry.plus != ends[1].entry.plus:
            raise LayoutError(
                f"descriptors of {excerpt(ends[1].entry.name)}: {ends[0].dtype} becomes {ends[1].dtype}"
                f"{'' if ends[0].dtype != ends[1].dtype else ' with another constant'}, which bytes alone do not say; "
                "legal are equal dtypes and constants, or Refit, which casts"
            )
    names = _NamesByRank(plan)
    held: RefitDescriptor | None = None
    for run in _runs(plan, found, rank, names):
        if held is not None and _goes_on(held, run):
            held = held._replace(length=held.length + run.length)
            continue
        if held is not None:
            yield held
        held = run
    if held is not None:
        yield held


class _NamesByRank:
    """The names of parameters of both sides by rank and number, made when they are asked for."""

    def __init__(self, plan: RefitPlan) -> None:
        self.plan = plan
        self.known: dict[tuple[bool, int], list[str]] = {}

    def __call__(self, source: bool, rank: int, number: int) -> str:
        if (source, rank) not in self.known:
            self.known[source, rank] = (self.plan.source if source else self.plan.target).names(rank)
        return self.known[source, rank][number]


def _goes_on(a: RefitDescriptor, b: RefitDescriptor) -> bool:
    same = (a.sends, a.peer, a.name, a.peer_name) == (b.sends, b.peer, b.name, b.peer_name)
    return same and a.offset + a.length == b.offset and a.peer_offset + a.length == b.peer_offset


def _runs(plan: RefitPlan, found: RefitRegions, rank: int, names: _NamesByRank) -> Iterator[RefitDescriptor]:
    for k in range(len(found)):
        source, target = int(found.source[k]), int(found.target[k])
        width = plan.itemsizes(int(found.move[k]))[2]
        ends = (
            names(True, source, int(found.source_parameter[k])),
            names(False, target, int(found.target_parameter[k])),
        )
        sends = source == rank and target != rank
        for offsets, length in _blocks_of(found, k):
            for s, t in offsets:
                here, there = (s, t) if sends else (t, s)
                name, other = ends if sends else ends[::-1]
                peer = target if sends else source
                yield RefitDescriptor(sends, peer, name, here * width, length * width, other, there * width)


def _blocks_of(found: RefitRegions, k: int) -> Iterator[tuple[list[tuple[int, int]], int]]:
    """Yield the starts of a region's runs at both ends, a part at a time, and the elements of each."""
    sizes, s, t = (a[k].tolist() for a in (found.sizes, found.source_strides, found.target_strides))
    length = 1
    while sizes and (sizes[-1] == 1 or (s[-1] == length and t[-1] == length)):
        length *= sizes.pop()
    outer, inner = sizes[:-1], sizes[-1:]
    along = np.arange(inner[0] if inner else 1, dtype=np.int64)
    last = len(outer)
    steps = (s[last], t[last]) if inner else (0, 0)
    for at in np.ndindex(*outer):
        start = int(found.source_offset[k]) + sum(i * x for i, x in zip(at, s, strict=False))
        stop = int(found.target_offset[k]) + sum(i * x for i, x in zip(at, t, strict=False))
        both = np.stack([start + along * steps[0], stop + along * steps[1]], axis=1)
        yield [(a, b) for a, b in both.tolist()], length

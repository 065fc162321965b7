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
from shardplan.movement.weights.refit import RefitPlan, region_runs
from shardplan.movement.weights.regions import RefitRegions
from shardplan.movement.weights.weights import names_of


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
    held: RefitDescriptor | None = None
    for run in _runs(plan, found, rank):
        if held is not None and _goes_on(held, run):
            held = held._replace(length=held.length + run.length)
            continue
        if held is not None:
            yield held
        held = run
    if held is not None:
        yield held


def _goes_on(a: RefitDescriptor, b: RefitDescriptor) -> bool:
    same = (a.sends, a.peer, a.name, a.peer_name) == (b.sends, b.peer, b.name, b.peer_name)
    return same and a.offset + a.length == b.offset and a.peer_offset + a.length == b.peer_offset


def _runs(plan: RefitPlan, found: RefitRegions, rank: int) -> Iterator[RefitDescriptor]:
    for k in range(len(found)):
        width = plan.itemsizes(int(found.move[k]))[2]
        for source, target, source_number, target_number, s, t, length in region_runs(found, k):
            ends = (
                (names_of(plan.source, source)[source_number], s),
                (names_of(plan.target, target)[target_number], t),
            )
            sends = source == rank and target != rank
            (name, here), (other, there) = ends if sends else ends[::-1]
            peer = target if sends else source
            yield RefitDescriptor(sends, peer, name, here * width, length * width, other, there * width)

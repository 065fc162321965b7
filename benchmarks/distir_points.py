"""The grids of DistIR's two searches, in the order in which it goes through them.

Worlds by batches by models by degrees of data, tensor and pipeline, powers of two whose product is the world; a
pipeline has 2, 4, ..., 128 microbatches, where a replica's batch has so many rows. The GPT grid leaves out tensor
degrees above the heads.

Source: microsoft/dist-ir 7cfa1b0, `examples/grid_search.py`, `gpt2_grid_search.py`, `mlp_grid_search.py`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product

from shardplan.simulation.parity import DistirPoint

GPT = ("gpt3", "gpt3-medium", "gpt3-large", "gpt3-xl", "gpt3-2.7b", "gpt3-6.7b", "gpt3-13b")
MLP = ("mlp-small", "mlp-medium", "mlp-large")
MICROBATCHES = tuple(2**k for k in range(1, 8))


def _degrees(world: int) -> Iterator[tuple[int, int, int]]:
    """Powers of two whose product is the world, which is one too."""
    powers = [2**k for k in range(world.bit_length())]
    for data, tensor in product(powers, powers):
        if data * tensor <= world:
            yield data, tensor, world // (data * tensor)


def _grid(worlds: Sequence[int], batches: Sequence[int], models: Sequence[str]) -> Iterator[DistirPoint]:
    for world, batch, model in product(worlds, batches, models):
        heads = DistirPoint(model).sizes.heads
        for data, tensor, pipeline in _degrees(world):
            if heads and tensor > heads:
                continue
            for microbatches in MICROBATCHES if pipeline > 1 else (1,):
                if batch // data // microbatches:
                    yield DistirPoint(model, data, tensor, pipeline, microbatches, batch)


def gpt_grid() -> tuple[DistirPoint, ...]:
    """Return the GPT grid, forward passes of gpt3 to gpt3-13b on 4, 8 and 16 devices, batches of 64 and 256.

    Source: microsoft/dist-ir 7cfa1b0, `examples/gpt2_grid_search.py`.
    """
    return tuple(_grid((4, 8, 16), (64, 256), GPT))


def mlp_grid() -> tuple[DistirPoint, ...]:
    """Return the MLP grid, training steps of mlp-small to mlp-large on 1, 2 and 4 devices, batches of 1 to 32,768.

    Source: microsoft/dist-ir 7cfa1b0, `examples/mlp_grid_search.py`.
    """
    return tuple(_grid((1, 2, 4), [2**k for k in range(16)], MLP))

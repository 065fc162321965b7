"""Send an actor's weights in verl by its checkpoint engine "shardplan"; importing this file registers it.

    rollout.checkpoint_engine: {backend: shardplan, custom_backend_module: verl_engine}

`set_actor` says once, on every actor rank, which model it has and how it is stored (`Weights`, devices 0, 1, ...), and
`set_rollout` on every rollout rank how a server loads it: whole tensors of Hugging Face, one replica a rank. The
generator of gathered tensors that verl passes to `send_weights` is not asked for: each rank sends the pieces of its own
parameters. Signatures of verl.checkpoint_engine.base, CheckpointEngine and CheckpointEngineRegistry.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Generator
from typing import Any

import torch
from verl.checkpoint_engine.base import CheckpointEngine, CheckpointEngineRegistry

import shardplan as sp
from shardplan.execution.torch.dtypes import torch_dtype
from shardplan.interop.torch.refit.engine import TransferEngine, transfer_info

_SIDE: dict[str, Any] = {}


def set_actor(model: Any, weights: sp.Weights, store: str) -> None:
    """Say how this actor rank's model is stored, and where all ranks meet."""
    _SIDE.update(model=model, said=str(weights), store=store)


def set_rollout(weights: sp.Weights) -> None:
    """Say what a rollout rank takes: a side of one replica a rollout rank, on devices after the actor's."""
    _SIDE.update(model=None, said=str(weights), store=None)


@CheckpointEngineRegistry.register("shardplan")
class ShardplanCheckpointEngine(CheckpointEngine):
    """A rank's end, of an actor or of a rollout."""

    def __init__(self, bucket_size: int = 0, is_master: bool = False) -> None:
        """Take verl's arguments, and what `set_actor` or `set_rollout` said in this process."""
        del bucket_size, is_master
        self.side, self.transfer, self.held = dict(_SIDE), None, None

    def prepare(self) -> dict[str, Any]:
        """Return what the others must know of this rank: how it stores the model, and where all meet."""
        return {"said": self.side["said"], "store": self.side["store"]}

    @classmethod
    def build_topology(
        cls, actor_wg_world_size: int, rollout_world_size: int, metadata: list[dict[str, Any]]
    ) -> tuple[dict[str, list[Any]], dict[str, list[Any]]]:
        """Return rank and both sides, for every rank of either."""
        actor, rollout = metadata[0], metadata[actor_wg_world_size]
        info = transfer_info(sp.Weights.parse(actor["said"]), sp.Weights.parse(rollout["said"]), actor["store"])
        ends = (0, actor_wg_world_size), (actor_wg_world_size, rollout_world_size)
        actors, rollouts = ({"rank": [*range(at, at + n)], "info": [info] * n} for at, n in ends)
        return actors, rollouts

    def init_process_group(self, rank: int, info: dict[str, Any]) -> None:
        """Bind this rank's tensors; a rollout's are made here, and stay."""
        if self.transfer is not None:
            return
        if self.side["model"] is None:
            named = sp.Weights.parse(info["target"]).parameters(rank)
            self.held = {name: torch.zeros(shape, dtype=torch_dtype(dtype)) for name, shape, dtype in named}
        self.transfer = TransferEngine(self.side["model"] if self.held is None else self.held, rank)
        self.transfer.init(info)

    async def send_weights(
        self, weights: Generator[tuple[str, torch.Tensor], None, None] | None, global_steps: int | None = None
    ) -> None:
        """Move the weights of this step."""
        del weights
        await asyncio.to_thread(self.transfer.update_weights, None, global_steps)

    async def receive_weights(self, global_steps: int | None = None) -> AsyncGenerator[tuple[str, torch.Tensor]]:
        """Yield the weights of this step by name, once all have come."""
        await asyncio.to_thread(self.transfer.update_weights, None, global_steps)
        self.transfer.finish()
        for name, tensor in self.held.items():
            yield name, tensor

    def finalize(self) -> None:
        """Nothing: groups and plans are kept for the next step."""

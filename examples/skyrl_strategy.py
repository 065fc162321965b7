"""Send a trainer's weights in SkyRL by its weight-sync strategy: `ShardplanStrategy` in place of its broadcast.

The servers receive by `examples/vllm_engine.py`, whose backend they name. SkyRL calls `send_chunks` on all training
ranks; the chunks, which are gathered whole tensors, are not asked for: every rank sends the pieces of its own
parameters. `set_trainer` says once, on each training rank, which those are; `info` is what `transfer_info` returns.
Signatures of skyrl.backends.skyrl_train.weight_sync.transfer_strategy, with `create_init_info(ie_cfg, ...)`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from skyrl.backends.skyrl_train.weight_sync.transfer_strategy import (
    WeightSyncInitInfo,
    WeightTransferSender,
    WeightTransferStrategy,
)

from shardplan.interop.torch.refit.engine import TransferEngine

_TRAINER: dict[str, Any] = {}


def set_trainer(model: Any, rank: int, info: Mapping[str, Any]) -> None:
    """Say which model this training rank has, its device id, and what both sides are."""
    _TRAINER.update(model=model, rank=rank, info=dict(info))


@dataclass
class ShardplanInitInfo(WeightSyncInitInfo):
    """What the servers' engines are initialised with."""

    info: dict[str, Any]

    def to_api_payload(self) -> dict[str, Any]:
        """Return it as the control plane carries it."""
        return {"info": self.info}


class ShardplanSender(WeightTransferSender):
    """A training rank's end."""

    def __init__(self, client: Any, model: Any, rank: int, info: Mapping[str, Any]) -> None:
        """Take the servers' client, which is asked by the first rank alone."""
        self.client, self.leads = client, rank == 0
        self.transfer = TransferEngine(model, rank)
        self.transfer.init(info)

    async def send_chunks(self, chunks: Iterable[Any], weight_metadata: dict[str, list[Any]] | None = None) -> None:
        """Move the weights, while the servers' workers receive."""
        del chunks, weight_metadata
        moved = asyncio.to_thread(self.transfer.update_weights)
        if self.leads:
            await asyncio.gather(moved, self.client.update_named_weights({"names": None, "version": None}))
        else:
            await moved
        self.transfer.finish()

    def teardown(self) -> None:
        """End the process groups."""
        self.transfer.close()


class ShardplanStrategy(WeightTransferStrategy):
    """Makes both ends."""

    @staticmethod
    def create_init_info(ie_cfg: Any, inference_world_size: int | None = None) -> ShardplanInitInfo:
        """Return what `set_trainer` said."""
        del inference_world_size
        return ShardplanInitInfo(getattr(ie_cfg, "override_existing_update_group", True), _TRAINER["info"])

    @staticmethod
    def get_vllm_transfer_engine() -> type:
        """Return the servers' engine."""
        from vllm_engine import ShardplanEngine

        return ShardplanEngine

    @staticmethod
    def create_sender(init_info: ShardplanInitInfo, inference_client: Any) -> ShardplanSender:
        """Return this training rank's end."""
        return ShardplanSender(inference_client, _TRAINER["model"], _TRAINER["rank"], init_info.info)

"""Take a trainer's weights in vLLM (0.33) as its weight-transfer engine "shardplan"; importing this file registers it.

    LLM(..., weight_transfer_config=WeightTransferConfig(backend="shardplan"))

The trainer makes the dict of `init_weight_transfer_engine` with `transfer_info`, and each of its ranks has a
`TransferEngine` of its own; `update_weights` is called on all ranks of both sides. Nothing is gathered: every worker
gets the pieces of its own parameters, in place. `python -m benchmarks.weights_loaders` runs this file on the models of
real workers, and compares them with what vLLM's own loader makes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from vllm.distributed.weight_transfer import WeightTransferEngineFactory
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)

import shardplan as sp
from shardplan.interop.torch.refit.engine import TransferEngine


@dataclass
class ShardplanInit(WeightTransferInitInfo):
    """What `transfer_info` returns."""

    info: dict[str, Any]


@dataclass
class ShardplanUpdate(WeightTransferUpdateInfo):
    """Which weights come: patterns of names, None for all; and the version that they are."""

    names: list[str] | None = None
    version: int | None = None


class ShardplanEngine(WeightTransferEngine[ShardplanInit, ShardplanUpdate]):
    """A worker's end: its model's parameters are the target, as vLLM stores them before any processing."""

    init_info_cls = ShardplanInit
    update_info_cls = ShardplanUpdate
    supports_draft_weight_update = False
    transfer: TransferEngine | None = None

    def init_transfer_engine(self, init_info: ShardplanInit) -> None:
        """Say which of the target's devices this worker is; the first update plans and meets the others."""
        devices = sp.Weights.parse(init_info.info["target"]).devices
        rank = devices[torch.distributed.get_rank()]
        self.transfer = TransferEngine(dict(self.model.named_parameters()), rank)
        self.transfer.init(init_info.info)

    def start_weight_update(self) -> None:
        """Nothing: weights are written in place."""

    def receive_weights(self, update_info: ShardplanUpdate) -> None:
        """Move, with all ranks of both sides."""
        assert self.transfer is not None, "update_weights before init_weight_transfer_engine"
        self.transfer.update_weights(update_info.names, update_info.version)

    def finish_weight_update(self) -> None:
        """Let the version be served; raises where an update failed."""
        assert self.transfer is not None, "finish_weight_update before init_weight_transfer_engine"
        self.transfer.finish()

    def shutdown(self) -> None:
        """End the process groups."""
        if self.transfer is not None:
            self.transfer.close()


WeightTransferEngineFactory.register_engine("shardplan", ShardplanEngine)

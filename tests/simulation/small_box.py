"""A GPT and a mixture of four layers, and a box of eight devices of which the memory may be said."""

from dataclasses import replace
from typing import Any

from shardplan import Model, Topology

SIZES: dict[str, Any] = {"layers": 4, "hidden": 256, "heads": 4, "seq": 64, "vocab": 512, "precision": "bf16"}
GPT = Model.load("gpt", positions=64, **SIZES)
MOE = Model.load("moe", kv_heads=2, ffn=128, experts=4, experts_per_token=2, dense_layers=0, **SIZES)
BOX = Topology.load("dgx-a100-80g", nodes=1)


def box_with(memory: float) -> Topology:
    """The box with so many bytes a device."""
    return replace(BOX, device=replace(BOX.device, memory=memory))

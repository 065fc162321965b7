"""Two hosts, as namespaces of the lab, whose sides join at an address of the first: who listened where.

Either side comes first once.
"""

import json
import subprocess
import sys
import time
from typing import Any

from tests.fused.forked import Exchange, forked

import shardplan as sp
from interop.refit_child import CONFIG, Model
from shardplan.execution.lab import Cluster, network
from shardplan.interop.torch.refit.handle import Refit
from shardplan.movement.weights.weights import Weights
from strangers import listening

STORE = "tcp://of both@10.0.0.1:29517"


def on_host(rank: int, exchange: Exchange, cluster: Cluster, first: int) -> dict[str, Any]:
    network.enter(cluster.home(rank))
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)  # over which a host reaches its own addresses
    trainer = Weights.load("megatron-llama", CONFIG, divisible=4, dtype="f32")
    server = Weights.load("vllm-llama", CONFIG, devices=[1], dtype="bf16")
    model = Model(sp.refit(trainer, server), rank)
    exchange(b"ready")
    if rank != first:
        time.sleep(1.0)
    mine: Any = model.source or model.target
    with Refit.join(
        (trainer, server)[rank], mine, side=("source", "target")[rank], rank=rank, store=STORE, timeout=30
    ) as sync:
        for seed in (1, 2):
            model.set(seed)
            sync()
            model.check(seed)
        during = sorted((address, port) for port, address in listening().items())
        exchange(b"looked")
    until = time.monotonic() + 10
    while listening() and time.monotonic() < until:
        time.sleep(0.05)
    return {"during": during, "after": sorted(listening())}


if __name__ == "__main__":
    cluster = Cluster.of("2x1", (400.0, 1000.0))
    network.build(cluster)
    found = [
        forked(2, lambda rank, exchange, first=first: on_host(rank, exchange, cluster, first), 90.0) for first in (0, 1)
    ]
    if not all(isinstance(each, dict) for both in found for each in both):
        sys.exit(f"{found}")
    print(json.dumps(found))

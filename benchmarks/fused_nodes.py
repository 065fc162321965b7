"""Embedding bags and their all-to-all between two nodes of two ranks each, on shaped links of the lab.

`python -m benchmarks.fused_nodes [--count 15]`, about two minutes. Runs on Linux with the privileges that `shardplan
lab` needs. Heaps are `net`: ranks of a node share memory, what goes to the other node leaves over TCP by one thread a
rank, while the rank computes. The machine has fewer cores than the cluster has ranks, so the computation of a tile is
slept, before it is really computed and stored (which takes a few percent of it): C seconds for all of a rank's bags,
as long as its node's uplink takes for what both of its ranks send to the other node. *Unfused* is the same transport:
all computed (slept in one piece), then an all-to-all on the heap. *Fused* puts tiles as soon as they are there, n a
destination, the other node's first. Every result is compared with what was to come. Variants take turns, in random
order in every repetition; a time is the slowest rank's, from a barrier on.

The prediction is that of `hardware.prices.fused`, with W = 4, no tax, no copy, the latency fixed for the lab, and the
uplink's payload rate in place of a rank's bandwidth. Its X counts what a rank sends to three others; here only two of
them are behind the uplink, which two ranks share, so that X = 4 blocks over the uplink.
"""

from __future__ import annotations

import fcntl
import os
import random
import socket
import statistics
import struct
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from benchmarks.common import arguments, record, table, write
from benchmarks.fused_pairs import BagsPair, Sizes, away, heap_bytes
from tests.fused.forked import Exchange, forked

from shardplan.execution.lab import Cluster, missing, network
from shardplan.execution.lab.cluster import CONSTANTS
from shardplan.execution.lab.needs import namespace_command
from shardplan.fused.calls import instance
from shardplan.fused.heap.symmetric import SymmetricHeap
from shardplan.fused.operators.call_context import CallContext
from shardplan.fused.tiles.schedule import TileSchedule
from shardplan.hardware.prices.fused import FusedConstants, FusedWork, fused_seconds, unfused_seconds

SIZES = Sizes("embedding", (8, 4096, 1, 64))  # tables of a rank, batch of all, bag, dim
RANKS, PER_NODE = 4, 2
UPLINK, LINK = 200.0, 1000.0  # Mbit/s: of a node, of a rank
ORDER = (2, 1, 3, 0)  # offsets: every rank serves the other node early, and at every step all serve different ranks
TILES = (1, 2, 4, 8)
RATIO, PRICE = 0.8, 1.15  # bars: fused over unfused, and measured over predicted, either way round
GIFADDR = 0x8915


def address(interface: str) -> str:
    """Return the IPv4 address of an interface of this namespace."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        said = fcntl.ioctl(probe, GIFADDR, struct.pack("256s", interface.encode()))
    return socket.inet_ntoa(said[20:24])


def slept(seconds: float, whole: float) -> Any:
    """Make every put of a run sleep first, its share of `seconds`; returns what undoes it."""
    plain = instance.FusedInstance.run

    def run(self: Any, call: Any, put: Any, *rest: Any, **more: Any) -> Any:
        def slow(step: Any) -> None:
            time.sleep(seconds * step.view.numel() / whole)
            put(step)

        return plain(self, call, slow if seconds and "backward" not in self.op else put, *rest, **more)

    instance.FusedInstance.run = run  # type: ignore[method-assign]
    return lambda: setattr(instance.FusedInstance, "run", plain)


def order_instances() -> None:
    """Have every instance of this process serve in `ORDER`: operators of their own accord begin with the next rank."""
    plain = instance.FusedInstance.__init__

    def begin(self: Any, heap: SymmetricHeap, op: str, schedule: TileSchedule, *rest: Any) -> None:
        plain(self, heap, op, replace(schedule, order=ORDER), *rest)

    instance.FusedInstance.__init__ = begin  # type: ignore[method-assign]


def on_rank(rank: int, exchange: Exchange, cluster: Cluster, seconds: float, count: int) -> dict[str, Any]:
    """Every variant so often, in turns."""
    network.enter(cluster.home(rank))
    torch.set_num_threads(1)
    order_instances()
    pair = BagsPair(SIZES, rank, RANKS)
    backend = f"net:{address(cluster.interface())}@{rank // PER_NODE}"
    times: dict[str, list[float]] = {"unfused": [], **{f"fused n={n}": [] for n in TILES}}
    wrong = 0.0
    with SymmetricHeap.create(heap_bytes([SIZES], 2 * (len(TILES) + 1)), backend, exchange, "nodes") as heap:
        draw = random.Random(20)
        for turn in range(count + 2):
            names = list(times)
            draw.shuffle(names)
            for name in names:
                heap.barrier()
                exchange(b"")
                began = time.perf_counter()
                if name == "unfused":
                    time.sleep(seconds)
                    found = pair.run_unfused(CallContext(heap, 1))
                else:
                    undo = slept(seconds, pair.out.numel())
                    found = pair.run_fused(CallContext(heap, int(name.split("=")[1])), name)
                    undo()
                took = time.perf_counter() - began
                wrong = max(wrong, away(found, pair.wanted))
                if turn >= 2:
                    times[name].append(took)
    return {"times": times, "wrong": wrong}


def measured(file: Path, count: int) -> None:
    """Inside the namespaces: build the links, run the ranks, write what they said."""
    import json

    cluster = Cluster.of("2x2", (UPLINK, LINK))
    network.build(cluster)
    found = forked(RANKS, lambda rank, exchange: on_rank(rank, exchange, cluster, wire_seconds(), count), 400.0)
    file.write_text(json.dumps(found), encoding="utf-8")


def payload() -> float:
    """Bytes per second of payload that a node's uplink carries."""
    return UPLINK * 1e6 / 8 * CONSTANTS.payload_share


def block() -> float:
    """Bytes that a rank has for another one."""
    return SIZES.nbytes / RANKS


def wire_seconds() -> float:
    """What a node sends to the other one, over its uplink."""
    return PER_NODE * (RANKS - PER_NODE) * block() / payload()


def main() -> None:
    """Measure, predict, print, write."""
    if sys.argv[1:2] == ["--inside"]:
        measured(Path(sys.argv[2]), int(sys.argv[3]))
        return
    given = arguments("fused_nodes", "Embedding and all-to-all between nodes.", 15, of="repetitions").parse_args()
    if lacking := missing():
        raise SystemExit(lacking)
    import json
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "found.json"
        command = [
            *namespace_command(),
            sys.executable,
            "-m",
            "benchmarks.fused_nodes",
            "--inside",
            str(file),
            str(given.count),
        ]
        subprocess.run(command, check=True, timeout=600, env=os.environ | {"OMP_NUM_THREADS": "1"})
        said = json.loads(file.read_text(encoding="utf-8"))
    if any(not isinstance(each, dict) for each in said):
        raise SystemExit(f"a rank failed: {said}")
    names = list(said[0]["times"])
    slowest = {name: [max(each) for each in zip(*(s["times"][name] for s in said), strict=True)] for name in names}
    x = wire_seconds()
    remote = (RANKS - 1) * block()
    constants = FusedConstants("net", CONSTANTS.latency, remote / x, float("inf"), 0.0, source="the lab's uplink")
    work = FusedWork(x, RANKS * block(), RANKS)
    rows: list[dict[str, Any]] = []
    for name in names:
        tiles = int(name.split("=")[1]) if "=" in name else 0
        predicted = float(fused_seconds(work, tiles, constants) if tiles else unfused_seconds(work, constants))
        ratios = [a / b for a, b in zip(slowest[name], slowest["unfused"], strict=True)]
        median = statistics.median(slowest[name])
        off = max(median / predicted, predicted / median)
        rows.append({
            "variant": name, "median": median, "predicted": predicted, "over prediction": median / predicted,
            "over unfused": statistics.median(ratios), "within price": off <= PRICE, "seconds": slowest[name],
        })  # fmt: skip
    heads = ("variant", "median", "predicted", "over prediction", "over unfused")
    print(table(heads, [[r[h] for h in heads] for r in rows]))
    best = min(rows[1:], key=lambda r: r["over unfused"])
    summary = {
        "compute and wire seconds": x, "best": best["variant"], "over unfused": best["over unfused"],
        "holds": best["over unfused"] <= RATIO and all(r["within price"] for r in rows),
        "largest error of a result": max(s["wrong"] for s in said), "load": os.getloadavg()[0],
    }  # fmt: skip
    print(summary)
    parameters = {"count": given.count, "sizes": SIZES.name, "uplink": UPLINK, "link": LINK, "order": ORDER}
    write(given.out, record(parameters, {"summary": summary, "rows": rows}))


if __name__ == "__main__":
    main()

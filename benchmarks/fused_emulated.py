"""Fused pairs on an emulated link: computation is real, the wire is a model, so that overlap shows on few cores.

Two processes share a heap. Each rank's clock is the processor time of its own thread. Tiles are really computed and
really stored in the peer's memory; then each reserves the rank's one egress port: `free = max(free, now) +
bytes / bandwidth; arrival = free + latency`. The time of a variant is the largest over ranks of its own end and of the
arrivals. Unfused: compute all, copy each destination's part to the peer, send it through the same port. Bandwidth is
chosen so that the wire takes a given part of the computation, which is measured first.

Not modelled: contention at the receiver, and memory traffic of one rank that slows the other. Fused over unfused are
medians over repetitions, with their range between the tenth and ninetieth percentile.
"""

from __future__ import annotations

import os
import random
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from benchmarks.common import arguments, record, table, write
from benchmarks.fused_pairs import RankPair, Sizes, away, pair_of, shape_of
from tests.fused.forked import Exchange, forked

from shardplan.fused.heap.symmetric import SymmetricHeap
from shardplan.fused.tiles.events import TilePut
from shardplan.fused.tiles.schedule import TileSchedule
from shardplan.fused.tiles.shapes import starts, tile_sizes

RANKS = 2
RATIOS = (0.25, 0.5, 1.0, 2.0)
LATENCY = 2e-6
CASES = (Sizes("gemm", (1024, 1024, 512)), Sizes("embedding", (8, 1024, 16, 64)))
WAYS = tuple((order, n) for order in ("remote_first", "natural") for n in (1, 2, 4, 8, 16))
TARGETS = {"gemm": 0.62, "embedding": 0.70}  # at comm = compute, remote tiles first


class EgressPort:
    """What leaves a rank, one after another; times in seconds of the rank's own clock."""

    def __init__(self, bandwidth: float) -> None:
        self.bandwidth, self.free, self.last = bandwidth, 0.0, 0.0

    def put(self, now: float, nbytes: int) -> None:
        self.free = max(self.free, now) + nbytes / self.bandwidth
        self.last = max(self.last, self.free + LATENCY)


def spent(work: Callable[[], Any]) -> float:
    """Processor seconds of this thread."""
    started = time.thread_time_ns()
    work()
    return (time.thread_time_ns() - started) * 1e-9


class EmulatedRank:
    """A pair on a rank, and the memory of all ranks for its result."""

    def __init__(self, sizes: Sizes, heap: SymmetricHeap) -> None:
        self.rank, self.heap = heap.rank, heap
        self.pair: RankPair = pair_of(sizes, heap.rank, RANKS)
        whole = self.pair.compute()
        self.whole = whole
        self.cuts = starts(tile_sizes(self.pair.rows(), RANKS))
        rows = max(self.cuts[d + 1] - self.cuts[d] for d in range(RANKS))
        self.memory = heap.alloc((RANKS, rows, *whole.shape[1:]), "f32", sizes.name)
        self.row_bytes = whole[0].numel() * 4

    def view(self, to: int, first: int, last: int) -> torch.Tensor:
        """Where own rows of a destination's block go in its memory."""
        return self.memory.peer(to)[self.rank, first:last]

    def unfused(self, port: EgressPort) -> float:
        started = time.thread_time_ns()
        self.pair.compute()
        for to in TileSchedule().destinations(self.rank, RANKS):
            own = self.whole[self.cuts[to] : self.cuts[to + 1]]
            self.view(to, 0, len(own)).copy_(own)
            if to != self.rank:
                port.put((time.thread_time_ns() - started) * 1e-9, len(own) * self.row_bytes)
        return (time.thread_time_ns() - started) * 1e-9

    def tiles(self, puts: Sequence[TilePut]) -> list[tuple[Callable[[], Any], int]]:
        """Per put what computes and stores it, and the bytes that leave the rank."""
        found: list[tuple[Callable[[], Any], int]] = []
        for put in puts:
            begin = self.rank * (self.cuts[put.to + 1] - self.cuts[put.to])
            first, last = (x - begin for x in put.box[0])
            at = self.cuts[put.to]
            run = self.pair.ready(at + first, at + last, self.view(put.to, first, last))
            found.append((run, (last - first) * self.row_bytes if put.to != self.rank else 0))
        return found

    def fused(self, port: EgressPort, tiles: Sequence[tuple[Callable[[], Any], int]]) -> float:
        started = time.thread_time_ns()
        for run, nbytes in tiles:
            run()
            if nbytes:
                port.put((time.thread_time_ns() - started) * 1e-9, nbytes)
        return (time.thread_time_ns() - started) * 1e-9

    def right(self) -> float:
        """How far what came is from what was wanted."""
        came = self.memory.local
        parts = [came[s, : self.cuts[self.rank + 1] - self.cuts[self.rank]] for s in range(RANKS)]
        return away(torch.cat(parts, 1 if came.dim() == 4 else 0), self.pair.wanted)


def measured(rank: int, exchange: Exchange, sizes: Sizes, count: int) -> dict[str, Any]:
    """Times of a rank: per ratio, way and repetition the own end or the last arrival, whichever is later."""
    torch.set_num_threads(1)
    nbytes = int(sizes.nbytes * 3) + (1 << 20)
    with SymmetricHeap.create(nbytes, "shm", exchange, "emulated") as heap:
        one = EmulatedRank(sizes, heap)
        shape = shape_of(one.pair, RANKS)
        tiles: dict[Any, Any] = {}
        for order, n in WAYS:
            found = TileSchedule(order=order, tiles=n).check(RANKS, shape)  # type: ignore[arg-type]
            tiles[order, n] = one.tiles([e for e in found.of(rank) if isinstance(e, TilePut)])
        compute = statistics.median(spent(one.pair.compute) for _ in range(max(5, count)))
        remote = one.pair.rows() * one.row_bytes * (RANKS - 1) // RANKS
        times: dict[str, list[float]] = {}
        worst = 0.0
        for repetition in range(count + 1):
            order = [(ratio, way) for ratio in RATIOS for way in ("unfused", *WAYS)]
            random.Random(repetition).shuffle(order)
            for ratio, way in order:
                port = EgressPort(remote / (ratio * compute))
                end = one.unfused(port) if way == "unfused" else one.fused(port, tiles[way])
                if repetition:
                    name = way if isinstance(way, str) else f"{way[0]} {way[1]}"
                    times.setdefault(f"{ratio} {name}", []).append(max(end, port.last))
                if ratio == RATIOS[0] and repetition == count:
                    heap.barrier()
                    worst = max(worst, one.right())
                    heap.barrier()
    return {"compute": compute, "times": times, "away": worst}


def self_bytes(one: EmulatedRank) -> int:
    return one.pair.rows() * one.row_bytes


def row(sizes: Sizes, found: Sequence[dict[str, Any]], ratio: float, order: str, n: int) -> dict[str, Any]:
    """Fused over unfused, per repetition with the same on all ranks."""

    def whole(name: str) -> list[float]:
        return [max(each) for each in zip(*(f["times"][f"{ratio} {name}"] for f in found), strict=True)]

    unfused, fused = whole("unfused"), whole(f"{order} {n}")
    each = sorted(a / b for a, b in zip(fused, unfused, strict=True))
    compute = max(f["compute"] for f in found)
    return {
        "kind": sizes.kind, "shape": sizes.name, "comm/compute": ratio, "order": order, "n": n,
        "ratio": statistics.median(each), "p10": each[len(each) // 10], "p90": each[-1 - len(each) // 10],
        "unfused seconds": statistics.median(unfused), "fused seconds": statistics.median(fused),
        "compute seconds": compute,
    }  # fmt: skip


def main() -> None:
    parser = arguments("fused_emulated", __doc__ or "", 20, of="repetitions of each variant")
    options = parser.parse_args()
    torch.set_num_threads(1)
    load = os.getloadavg()[0]
    rows: list[dict[str, Any]] = []
    for sizes in CASES:
        found = forked(RANKS, lambda rank, exchange, s=sizes: measured(rank, exchange, s, options.count), 240.0)
        if any(not isinstance(f, dict) or f["away"] > 1e-4 for f in found):
            raise SystemExit(f"{sizes.name}: {[f if isinstance(f, str) else f['away'] for f in found]}")
        rows += [row(sizes, found, ratio, order, n) for order, n in WAYS for ratio in RATIOS]
        lines = [
            [order, n, *(f"{r['ratio']:.2f}" for r in rows
                         if r["kind"] == sizes.kind and r["order"] == order and r["n"] == n)]
            for order, n in WAYS
        ]  # fmt: skip
        title = f"emulated link: {sizes.kind} {sizes.name}, fused / unfused by wire over computation (load {load:.1f})"
        print(table(("order", "n", *map(str, RATIOS)), lines, title))
    best = {
        kind: min(r["ratio"] for r in rows
                  if r["kind"] == kind and r["comm/compute"] == 1 and r["order"] == "remote_first")
        for kind in TARGETS
    }  # fmt: skip
    for kind, target in TARGETS.items():
        print(f"{kind}, wire = computation, remote first: {best[kind]:.3f}, asked {target} at most")
    load_after = os.getloadavg()[0]
    parameters = {"count": options.count, "latency": LATENCY, "load before": load, "load after": load_after}
    write(options.out, record(parameters, {"best": best, "targets": TARGETS, "rows": rows}))


if __name__ == "__main__":
    main()

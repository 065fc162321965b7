"""Fused operators on CPUs beside gloo, gloo in chunks, the same transport unfused, and the computation alone.

Two forked ranks with a thread each; all variants of a shape in random order in every repetition, the same on both
ranks, which meet before each. A time is the larger of the two ranks'; a ratio is of two times of one repetition, and
its median and 20th percentile are told. Results are compared with what each rank works out beforehand.

- `gloo`: compute all, then torch's `all_to_all_single` or `all_reduce`
- `gloo_chunked`: four parts, each sent asynchronously while the next is computed
- `unfused`: compute all, then put the parts into the peers' memory on the same heap, signal, and wait for theirs
- `unfused_barrier`: the same with a barrier of all ranks in place of signals, as the spec has it
- `fused n`: the operator with n tiles a destination; of the vector's product `one_shot`, and `two_shot` with n tiles
- `unfused_out`, `fused_out n`: the same two where the result stays in the heap (the operators' `_out` forms); all
  others copy it into new memory, which takes as long as to compute it where there is little to compute
- `compute_only`

*Transport gain* is unfused over gloo, *fusion gain* fused over unfused; they are never mixed. Before the grid
`fused.calibrate` measures the constants of `hardware.prices.fused` on other shapes, by which the decision then chooses
for each shape of the grid among the measured variants. Its regret is the time of the choice over that of the variant
that was fastest, less 1, as a median over repetitions. Here pairs run the same kernels unfused; what users get unfused
is the library's, which `fused_regret` measures.
"""

from __future__ import annotations

import os
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from benchmarks.common import arguments, geomean, record, table, write
from benchmarks.fused_pairs import KINDS, BagsPair, GemmPair, Sizes, VectorPair, away, heap_bytes, pair_of
from tests.fused.forked import Exchange, forked
from torch import distributed as dist

from shardplan.fused.deciding.calibrate import calibrate, pair_work
from shardplan.fused.deciding.trials import shape_work
from shardplan.fused.heap.symmetric import SymmetricHeap
from shardplan.fused.operators.call_context import CallContext
from shardplan.fused.tiles.shapes import tile_sizes
from shardplan.hardware.prices.fused import LEAST_GAIN, FusedConstants, FusedVariant, variant_seconds

RANKS, CHUNKS = 2, 4
COUNTS = (1, 2, 4, 8)
BOLD = ("2048x2048x64", "T8 B2048 L1 D128", "1024x512")  # the spec's communication-heavy shapes
GRID = tuple(
    [Sizes("gemm", s) for s in (
        (256, 1024, 256), (2048, 2048, 64), (256, 256, 64), (512, 512, 32), (1024, 1024, 32), (1024, 512, 128),
        (512, 2048, 64), (2048, 512, 64), (1024, 1024, 128), (2048, 1024, 32), (512, 256, 512), (256, 512, 1024),
        (128, 2048, 128), (1024, 256, 256), (64, 1024, 64), (512, 1024, 256))]
    + [Sizes("embedding", s) for s in (
        (8, 2048, 1, 128), (8, 2048, 64, 128), (8, 512, 1, 64), (8, 1024, 4, 64), (4, 2048, 1, 128), (4, 1024, 8, 128),
        (16, 512, 2, 64), (16, 1024, 1, 128), (2, 4096, 4, 64), (8, 1024, 16, 64), (4, 512, 32, 128), (26, 512, 1, 64))]
    + [Sizes("gemv", s) for s in (
        (1024, 512), (256, 256), (512, 1024), (1024, 2048), (2048, 512), (4096, 512), (4096, 1024), (8192, 256),
        (16384, 64), (16384, 256), (512, 4096), (32768, 128))]
)  # fmt: skip


def variants(kind: str) -> tuple[str, ...]:
    """What is measured of a kind, by name."""
    if kind == "gemv":
        fused = ("one_shot", *(f"two_shot {n}" for n in COUNTS[:3]))
    else:
        fused = (*(f"fused {n}" for n in COUNTS), "unfused_out", *(f"fused_out {n}" for n in COUNTS))
    return ("gloo", "gloo_chunked", "unfused_barrier", "unfused", *fused, "compute_only")


class GridRank:
    """A shape on a rank: its variants by name."""

    def __init__(self, sizes: Sizes, heap: SymmetricHeap) -> None:
        self.sizes, self.heap = sizes, heap
        self.pair = pair_of(sizes, heap.rank, heap.ranks)
        self.run: dict[str, Callable[[], torch.Tensor]] = {
            name: self._fused(name)
            for name in variants(sizes.kind)
            if name.split()[0] in ("fused", "fused_out", "one_shot", "two_shot")
        }
        if sizes.kind != "gemv":
            self.stays = heap.alloc(self.pair.wanted.shape, "f32", "out").local
            self.sent = heap.alloc(self.pair.wanted.shape, "f32", "sent").local
            self.run["unfused_out"] = lambda: self.pair.run_unfused(CallContext(heap), self.sent)
        self.run |= {"unfused": lambda: self.pair.run_unfused(CallContext(heap)), "compute_only": self.pair.compute}
        self.run["unfused_barrier"] = self._barrier
        whole = self.pair.out[None] if sizes.kind == "gemv" else self.pair.out[: len(self.pair.out) // heap.ranks]
        self.memory = heap.alloc((2, heap.ranks, *whole.shape), "f32", "barrier")
        self.epoch = 0
        self.run |= {"gloo": self._gloo, "gloo_chunked": self._chunked}

    def _fused(self, name: str) -> Callable[[], torch.Tensor]:
        variant, _, n = name.partition(" ")
        asked = CallContext(self.heap, int(n or 1))
        if variant == "fused_out":
            return lambda: self.pair.run_fused(asked, variant, self.stays)
        return lambda: self.pair.run_fused(asked, variant)

    def _barrier(self) -> torch.Tensor:
        """Slots in turn: who passes a barrier has read what was put before the one ahead of it."""
        out, ranks, slot = self.pair.compute(), self.heap.ranks, self.epoch % 2
        self.epoch += 1
        rows = len(out) // ranks
        for d in range(ranks):
            part = out[None] if isinstance(self.pair, VectorPair) else out[d * rows : (d + 1) * rows]
            self.memory.peer(d)[slot, self.heap.rank].copy_(part)
        self.heap.barrier()
        came = self.memory.local[slot]
        if isinstance(self.pair, VectorPair):
            return came.sum(0)[0, :, 0]
        return torch.cat(list(came), 0 if isinstance(self.pair, GemmPair) else 1)

    def _gloo(self) -> torch.Tensor:
        out = self.pair.compute()
        if isinstance(self.pair, VectorPair):
            dist.all_reduce(out)
            return out[:, 0]
        return self._joined(self._sent(out))

    def _sent(self, out: torch.Tensor) -> torch.Tensor:
        came = torch.empty(self.heap.ranks * (len(out) // self.heap.ranks), *out.shape[1:])
        dist.all_to_all_single(came, out)
        return came

    def _joined(self, came: torch.Tensor) -> torch.Tensor:
        """Blocks of sources as the result has them: rows under each other, or tables beside each other."""
        if isinstance(self.pair, GemmPair):
            return came
        return torch.cat(came.chunk(self.heap.ranks), 1)

    def _chunked(self) -> torch.Tensor:
        """Parts of all destinations, each computed, then sent while the next is computed."""
        pair, ranks = self.pair, self.heap.ranks
        works: list[Any] = []
        if isinstance(pair, VectorPair):
            at = 0
            for n in tile_sizes(pair.rows(), CHUNKS):
                part = pair.out[at : at + n]
                pair.tile(at, at + n, part)
                works.append(dist.all_reduce(part, async_op=True))
                at += n
            for work in works:
                work.wait()
            return pair.out[:, 0]
        rows = pair.rows() // ranks
        came = torch.empty(CHUNKS, ranks, rows // CHUNKS, *pair.out.shape[1:])
        parts = torch.empty_like(came)
        for c in range(CHUNKS):
            first, step = c * rows // CHUNKS, rows // CHUNKS
            for d in range(ranks):
                pair.tile(d * rows + first, d * rows + first + step, parts[c, d])
            works.append(dist.all_to_all_single(came[c].flatten(0, 1), parts[c].flatten(0, 1), async_op=True))
        for work in works:
            work.wait()
        return self._joined(came.transpose(0, 1).flatten(0, 2))

    def checked(self) -> float:
        """The largest difference of a variant from what is wanted."""
        worst = 0.0
        for name, run in self.run.items():
            found = run()
            if name != "compute_only":
                worst = max(worst, away(found, self.pair.wanted))
        return worst

    def times(self, names: Sequence[str], count: int, seed: int) -> dict[str, list[float]]:
        """Seconds of every variant in every repetition."""
        found: dict[str, list[float]] = {name: [] for name in names}
        for repetition in range(count):
            order = list(names)
            random.Random(seed * 1000 + repetition).shuffle(order)
            for name in order:
                self.heap.barrier()
                started = time.perf_counter()
                self.run[name]()
                found[name].append(time.perf_counter() - started)
        return found


def on_rank(rank: int, exchange: Exchange, shapes: Sequence[Sizes], count: int, meeting: str) -> Any:
    """Times of a rank, shape by shape."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=RANKS)
    found: list[dict[str, Any]] = []
    for k, sizes in enumerate(shapes):
        with SymmetricHeap.create(heap_bytes([sizes], 10), "shm", exchange, f"grid {k}") as heap:
            one = GridRank(sizes, heap)
            names = variants(sizes.kind)
            worst = one.checked()
            one.times(names, 2, -1)
            found.append({"times": one.times(names, count, k), "away": worst})
            heap.barrier()
    dist.destroy_process_group()
    return found


def measured(shapes: Sequence[Sizes], count: int) -> list[dict[str, list[float]]]:
    """By shape and variant, in every repetition the larger of the ranks' seconds; wrong results are an error."""
    with tempfile.TemporaryDirectory() as folder:
        found = forked(RANKS, lambda rank, exchange: on_rank(rank, exchange, shapes, count, f"{folder}/meet"), 600.0)
    if any(isinstance(f, str) for f in found):
        raise SystemExit(f"a rank failed: {found}")
    for sizes, each in zip(shapes, zip(*found, strict=True), strict=True):
        if max(f["away"] for f in each) > 1e-4:
            raise SystemExit(f"{sizes.name}: a result is wrong by {max(f['away'] for f in each)}")
    return [
        {name: [max(t) for t in zip(*(f["times"][name] for f in each), strict=True)] for name in each[0]["times"]}
        for each in zip(*found, strict=True)
    ]


def ratio(times: dict[str, list[float]], a: str, b: str) -> tuple[float, float]:
    """Median and 20th percentile of a ratio of two variants, repetition by repetition."""
    each = sorted(x / y for x, y in zip(times[a], times[b], strict=True))
    return statistics.median(each), each[len(each) // 5]


def variant_of(name: str) -> FusedVariant:
    """The variant that a measured one is: `fused 2`, `one_shot`, `two_shot 4`, `unfused`."""
    kind, _, n = name.partition(" ")
    return FusedVariant(kind, int(n or (kind == "one_shot")))


def chosen(sizes: Sizes, names: Sequence[str], constants: FusedConstants) -> tuple[str, dict[str, float]]:
    """The variant to run, unfused unless another saves enough, and what each is said to take by the same kernels."""
    kind = sizes.shape[0]
    kernel = constants.kernel(kind)
    assert kernel is not None
    seconds = kernel.fused.seconds(*shape_work(sizes.shape))
    work, own = pair_work(sizes.shape, (seconds, seconds), RANKS), constants.of_kind(kind)
    said = {name: float(variant_seconds(work, variant_of(name), own)) for name in names}
    best = min((n for n in names if n != "unfused"), key=lambda n: said[n])
    return (best if said[best] <= (1 - LEAST_GAIN) * said["unfused"] else "unfused"), said


def tile_taxes() -> dict[str, list[tuple[int, float]]]:
    """How many times longer a computation takes in so many tiles, e(n): of a product's rows, and of bags."""
    torch.set_num_threads(1)
    found: dict[str, list[tuple[int, float]]] = {}
    pairs = (GemmPair(Sizes("gemm", (2048, 512, 256)), 0, 1), BagsPair(Sizes("embedding", (2, 65536, 4, 32)), 0, 1))
    for kind, pair, most in zip(("gemm", "embedding"), pairs, (64, 1024), strict=True):
        rows = pair.rows()
        counts = [1 << k for k in range(most.bit_length())]
        times: dict[int, list[float]] = {n: [] for n in counts}
        for _ in range(5):
            for n in counts:
                cuts = [(k * rows // n, (k + 1) * rows // n) for k in range(n)]
                started = time.perf_counter()
                pair.tiles(cuts)
                times[n].append(time.perf_counter() - started)
        whole = min(times[1])
        found[kind] = [(n, 1.0 if n == 1 else min(times[n]) / whole) for n in counts]
    return found


def row(sizes: Sizes, times: dict[str, list[float]], constants: FusedConstants) -> dict[str, Any]:
    """A shape: medians, ratios, what was chosen and what that costs."""
    median = {name: statistics.median(each) for name, each in times.items()}
    fused = [n for n in median if n.split()[0] in ("fused", "one_shot", "two_shot")]
    beside = {n: ratio(times, n, "unfused")[0] for n in fused} | {"unfused": 1.0}
    best = min(fused, key=lambda n: beside[n])
    choice, said = chosen(sizes, ["unfused", *fused], constants)
    fastest = min(beside, key=lambda n: beside[n])
    told: dict[str, Any] = {"kind": sizes.kind, "shape": sizes.name, "bold": sizes.name in BOLD, "best": best}
    told |= {"seconds": median, "predicted": said, "chosen": choice}
    told["regret"] = max(0.0, ratio(times, choice, fastest)[0] - 1)
    pairs = {"transport gain": ("unfused", "gloo"), "fusion gain": (best, "unfused"), "decided": (choice, "unfused")}
    pairs["beside a barrier"] = best, "unfused_barrier"
    if stays := [n for n in median if n.startswith("fused_out")]:
        best_out = min(stays, key=lambda n: ratio(times, n, "unfused_out")[0])
        told["best in the heap"] = best_out
        pairs |= {"fusion gain in the heap": (best_out, "unfused_out"), "in the heap/gloo": (best_out, "gloo")}
    pairs |= {"best/gloo": (best, "gloo"), "gloo_chunked/gloo": ("gloo_chunked", "gloo")}
    pairs["compute/gloo"] = "compute_only", "gloo"
    for name, (a, b) in pairs.items():
        told[name], told[f"{name} p20"] = ratio(times, a, b)
    return told


def summary(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The targets."""
    bold = [r for r in rows if r["bold"]]
    return {
        "fusion gain, communication-heavy (asked 0.75)": {r["kind"]: r["fusion gain"] for r in bold},
        "the same beside copy and barrier": {r["kind"]: r["beside a barrier"] for r in bold},
        "fused / gloo, communication-heavy (asked 0.6)": {r["kind"]: r["best/gloo"] for r in bold},
        "fusion gain where results stay in the heap": {
            r["kind"]: r["fusion gain in the heap"] for r in bold if "fusion gain in the heap" in r
        },
        "fused / gloo where results stay in the heap": {
            r["kind"]: r["in the heap/gloo"] for r in bold if "in the heap/gloo" in r
        },
        "decided / unfused, all shapes (asked 1.05)": geomean(r["decided"] for r in rows),
        "worst decided / unfused (asked 1.15)": max(r["decided"] for r in rows),
        "median regret (asked 0.05)": statistics.median(r["regret"] for r in rows),
        "mean regret": statistics.fmean(r["regret"] for r in rows),
        "worst regret": max(r["regret"] for r in rows),
        "shapes where fused was chosen": sum(r["chosen"] != "unfused" for r in rows),
    }


def main() -> None:
    parser = arguments("fused_grid", __doc__ or "", 30, of="repetitions of each variant")
    parser.add_argument("--every", type=int, default=1, help="only every so manieth shape of a kind, for a trial")
    options = parser.parse_args()
    torch.set_num_threads(1)
    load, started = os.getloadavg()[0], time.monotonic()
    constants = calibrate()
    calibration = time.monotonic() - started
    shapes = [s for kind in KINDS for k, s in enumerate(g for g in GRID if g.kind == kind) if k % options.every == 0]
    rows = [row(sizes, times, constants) for sizes, times in zip(shapes, measured(shapes, options.count), strict=True)]
    taxes = tile_taxes()
    seconds = time.monotonic() - started
    heads = ("shape", "gloo us", "chunked", "unfused", "fused", "compute", "best", "transport gain", "p20")
    heads = (*heads, "fusion gain", "p20", "to barrier", "chosen", "regret %")
    for kind in KINDS:
        lines = [
            [r["shape"] + " *" * r["bold"], r["seconds"]["gloo"] * 1e6, r["gloo_chunked/gloo"], r["transport gain"],
             r["best/gloo"], r["compute/gloo"], r["best"], r["transport gain"], r["transport gain p20"],
             r["fusion gain"], r["fusion gain p20"], r["beside a barrier"], r["chosen"], 100 * r["regret"]]
            for r in rows if r["kind"] == kind
        ]  # fmt: skip
        print(table(heads, lines, f"{kind}: beside gloo = 1 (load {load:.1f})"))
    told = summary(rows)
    print()
    for name, value in told.items():
        print(f"{name}: {value}")
    after = os.getloadavg()[0]
    print(f"{seconds:.0f} s, of which {calibration:.0f} s of calibration; load {load:.1f} before, {after:.1f} after")
    parameters = {"count": options.count, "every": options.every, "load before": load, "load after": after,
                  "seconds": seconds, "calibration seconds": calibration}  # fmt: skip
    found = {"summary": told, "constants": str(constants), "tile_tax": taxes, "rows": rows}
    write(options.out, record(parameters, found))


if __name__ == "__main__":
    main()

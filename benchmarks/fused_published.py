"""The decision whether to fuse, tried on published times of fused kernels beside the unfused pair.

Rows are those of `tests/data/fused_pairs.jsonl`, each with the thread that published it. Of every table a third, chosen
by a hash, gives the constants of `hardware.prices.fused`: seconds of a computation of no size, its rate, bandwidth,
latency, signal and the tax of tiles, by least squares of the logarithms of both arms' seconds, held near usual values
where rows say nothing. The other rows are predicted: both arms' seconds, and which arm is chosen; what that costs is
its time over the better arm's. Where a table measures computation and collective alone, those are given, as a
calibration would measure them. No rule knows the number of rows of a product but by its FLOPs and bytes.

Beside it stands what no prediction has: always one arm, and the best single threshold on the rows, chosen with all
answers in view.
"""

from __future__ import annotations

import hashlib
import json
import math
import statistics
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from benchmarks.common import ROOT, arguments, record, table, write

from shardplan.fused.deciding.calibrate import fit_logarithms
from shardplan.hardware.prices.fused import LEAST_GAIN, FusedConstants, FusedWork, fused_seconds, unfused_seconds

ROWS = ROOT / "tests" / "data" / "fused_pairs.jsonl"
MEAN, WORST = 0.05, 0.15  # what is asked of the rows that were left out
# Usual values: seconds, FLOP/s, B/s, B/s, seconds, seconds, a share; of rows a second where a table says no sizes.
USUAL = {"launch": 1e-5, "rate": 1e15, "bandwidth": 5e11, "copy": 2e12, "latency": 1e-5, "signal": 1e-6, "tax": 1e-2}
MISSING = (
    {
        "table": "vllm-project/vllm issue 55261",
        "why": "stored excerpts hold its conclusions and one table of ablations (M=16, 128, 256 at TP8), two of whose "
        "three rows the thread corrects without giving new ones there; the table of both arms was not among them",
        "queries": [
            "vllm fused gemm all-reduce symm mem M <= 64 speedup slower at large M 8k 55261",
            "CUTLASS Lamport GEMM + AllReduce vLLM results table TP8 M Lamport existing GEMM-AR two-shot",
            "CUTLASS Lamport GEMM AllReduce correction follow-up launch extent clipped to 16-row units M=8-32 TP8 TP4",
            "Lamport GEMM AllReduce B200 Kimi-K3 harness M 16 32 64 128 256 1024 8192 existing GEMM-AR Lamport us",
            "Lamport GEMM+AR corrected 128-row padding re-measured M=8 16 32 64 cuBLAS + FlashInfer two-shot allreduce",
            "vllm 55261 microbenchmark B200 TP8 K=1536 torch.mm + all-reduce existing GEMM-AR Lamport ratio",
            "Microbenchmark results TP4 TP8 K=1536 o_proj Lamport (padded) vs gemm_rs_ar median us 1024 2048 4096 8192",
            "Follow-up: padding fix clipped launch extent one-shot Lamport GEMM-AR M=8 M=16 M=32 M=64 before after",
            "Benchmark and integrate CUTLASS Lamport GEMM + AllReduce into vLLM issue 55261 (among pages)",
            "vllm 55261 full Lamport corrected M=8 M=16 M=32 M=64 M=128 clipped us existing multimem kernel TP8",
        ],
        "instead": "vllm-53053, the fused kernel of that thread beside torch.mm and NCCL",
    },
    {
        "table": "pytorch/pytorch issue 179770, M above 384",
        "why": "the stored excerpt ends there",
        "queries": [
            "symm_mem small-M FP8 fused_scaled_matmul_reduce_scatter fp8 448 512 768 1024 2048 4096 8192 16384",
            "fused_scaled_matmul_reduce_scatter B300 fp8 speedup 1024 2048 4096 8192 16384 large M expected behavior",
        ],
        "instead": "pytorch-183509 and pytorch-184116, the same operator up to M=65537",
    },
)


@dataclass(frozen=True, slots=True)
class Pair:
    """A row: sizes, and the seconds of both arms."""

    row: dict[str, Any]

    @property
    def name(self) -> str:
        return " ".join(f"{key}={self.row[key]}" for key in ("m", "k", "stripes") if key in self.row)

    @property
    def measured(self) -> tuple[float, float]:
        return self.row["unfused"], self.row["fused"]

    def predicted(self, constants: dict[str, float]) -> tuple[float, float]:
        """Seconds of the unfused and of the fused arm."""
        row, tiles, ranks = self.row, self.row["tiles"], self.row["ranks"]
        flops = 2.0 * row["m"] * row.get("k", 1) * row.get("n", 1)
        seconds = row.get("compute", constants["launch"] + flops / constants["rate"])
        nbytes = float(row["m"] * row.get("n", 1) * row.get("itemsize", 2))
        bandwidth, latency = constants["bandwidth"], constants["latency"]
        if "collective" in row:
            bandwidth, latency = nbytes * (ranks - 1) / ranks / row["collective"], 0.0
        made = FusedConstants("published", latency, bandwidth, constants["copy"], constants["signal"],
                              ((1, 1.0), (2, 1.0 + constants["tax"])))  # fmt: skip
        reduces = row["op"].endswith("all-reduce")
        work = FusedWork(seconds, nbytes, ranks, reduces, nbytes if reduces else 0.0)
        extra = constants["latency"] if "collective" in row else 0.0
        return float(unfused_seconds(work, made)), float(fused_seconds(work, tiles, made)) + extra


def hashed(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def split(pairs: Sequence[Pair], seed: int) -> tuple[list[Pair], list[Pair]]:
    """A third by a hash of table and sizes, and the rest."""
    order = sorted(pairs, key=lambda p: hashed(f"{seed} {p.row['table']} {p.name}"))
    count = math.ceil(len(order) / 3)
    return order[:count], sorted(order[count:], key=pairs.index)


def usual(pairs: Sequence[Pair]) -> dict[str, float]:
    """Usual values; of a table without sizes rates are of rows, so that they are of the size of its seconds."""
    found = dict(USUAL)
    if "n" not in pairs[0].row or "k" not in pairs[0].row:
        scale = statistics.median(p.row["unfused"] for p in pairs) / statistics.median(p.row["m"] for p in pairs)
        found |= {"rate": 4 / scale} | ({} if "n" in pairs[0].row else {"bandwidth": 4 / scale, "copy": 16 / scale})
    return found


def fit(pairs: Sequence[Pair]) -> dict[str, float]:
    """Constants that say both arms' seconds of some rows, by damped least squares on logarithms."""
    start = usual(pairs)
    names = list(start)
    origin = np.log([start[n] for n in names])

    def errors(x: np.ndarray) -> list[float]:
        constants = dict(zip(names, np.exp(x), strict=True))
        return [math.log(a / b) for p in pairs for a, b in zip(p.predicted(constants), p.measured, strict=True)]

    best = fit_logarithms(errors, origin)
    return dict(zip(names, np.exp(best).tolist(), strict=True))


def over_hashes(pairs: Sequence[Pair], count: int) -> dict[str, float]:
    """The same by other hashes: the median of the mean regret, and how often both targets are met."""
    found: list[dict[str, float]] = []
    for seed in range(count):
        learnt, rest = split(pairs, seed)
        constants = fit(learnt)
        found.append(regrets(rest, [choice(p.predicted(constants)) for p in rest]))
    met = [r["mean"] <= MEAN and r["worst"] <= WORST for r in found]
    return {"hashes": count, "median of means": statistics.median(r["mean"] for r in found), "met": sum(met) / count}


def choice(said: tuple[float, float]) -> bool:
    """Whether the fused arm is chosen."""
    return said[1] <= (1 - LEAST_GAIN) * said[0]


def regrets(pairs: Sequence[Pair], fused: Sequence[bool]) -> dict[str, float]:
    """Mean and largest time of the chosen arm over the better one's, less 1."""
    each = [p.measured[f] / min(p.measured) - 1 for p, f in zip(pairs, fused, strict=True)]
    return {"mean": statistics.fmean(each), "worst": max(each)}


def hindsight(pairs: Sequence[Pair]) -> dict[str, float]:
    """The best single threshold on rows of the product, either way round, with all answers in view."""
    sizes = sorted({p.row["m"] for p in pairs})
    tried = [[(p.row["m"] >= at) == way for p in pairs] for at in [*sizes, math.inf] for way in (True, False)]
    return min((regrets(pairs, each) for each in tried), key=lambda r: r["mean"])


def tried(name: str, pairs: Sequence[Pair], seed: int, hashes: int) -> dict[str, Any]:
    """A table: constants from a third, predictions of the rest."""
    learnt, rest = split(pairs, seed)
    constants = fit(learnt)
    said = [p.predicted(constants) for p in rest]
    chosen = [choice(each) for each in said]
    away = [abs(math.log(a / b)) for p, s in zip(rest, said, strict=True) for a, b in zip(s, p.measured, strict=True)]
    return {
        "table": name,
        "source": pairs[0].row["source"],
        "op": pairs[0].row["op"],
        "fitted on": [p.name for p in learnt],
        "constants": constants,
        "regret": regrets(rest, chosen),
        "always unfused": regrets(rest, [False] * len(rest)),
        "always fused": regrets(rest, [True] * len(rest)),
        "best threshold, in hindsight": hindsight(rest),
        "by other hashes": over_hashes(pairs, hashes),
        "mean error of seconds": math.expm1(statistics.fmean(away)),
        "rows": [
            {"row": p.name, "unfused": p.measured[0], "fused": p.measured[1], "predicted unfused": u,
             "predicted fused": f, "chosen": "fused" if c else "unfused", "regret": p.measured[c] / min(p.measured) - 1}
            for p, (u, f), c in zip(rest, said, chosen, strict=True)
        ],
    }  # fmt: skip


def read(path: Path = ROWS) -> dict[str, list[Pair]]:
    """The rows by table."""
    found: dict[str, list[Pair]] = defaultdict(list)
    for line in path.read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        found[row["table"]].append(Pair(row))
    return found


def main() -> None:
    parser = arguments("fused_published", __doc__ or "", 20, of="other hashes that choose a third")
    parser.add_argument("--seed", type=int, default=20, help="of the hash that chooses the third")
    options = parser.parse_args()
    found = [tried(name, pairs, options.seed, options.count) for name, pairs in read().items()]
    for each in found:
        heads = ("row", "unfused us", "fused us", "said unfused", "said fused", "chosen", "regret %")
        lines = [
            [r["row"], *(r[k] * 1e6 for k in ("unfused", "fused", "predicted unfused", "predicted fused")),
             r["chosen"], 100 * r["regret"]] for r in each["rows"]
        ]  # fmt: skip
        print(table(heads, lines, f"{each['table']}: {each['op']} ({each['source']})"))
    keys = ("regret", "always unfused", "always fused", "best threshold, in hindsight")
    lines = [
        [t["table"], len(t["fitted on"]), len(t["rows"]), *(100 * t[k][w] for k in keys for w in ("mean", "worst")),
         100 * t["mean error of seconds"], 100 * t["by other hashes"]["median of means"],
         100 * t["by other hashes"]["met"],
         "met" if t["regret"]["mean"] <= MEAN and t["regret"]["worst"] <= WORST else "missed"]
        for t in found
    ]  # fmt: skip
    heads = (
        "table",
        "fitted",
        "left",
        "mean %",
        "worst %",
        "unfused",
        "",
        "fused",
        "",
        "threshold",
        "",
        "error %",
        "hashes: mean %",
        "met %",
        "",
    )
    print(table(heads, lines, f"regret on rows left out; asked: mean {100 * MEAN:g}, worst {100 * WORST:g}"))
    for each in MISSING:
        print(
            f"\nnot found: {each['table']}: {each['why']}; {len(each['queries'])} queries; instead: {each['instead']}"
        )
    write(options.out, record({"seed": options.seed}, {"tables": found, "not found": MISSING}))


if __name__ == "__main__":
    main()

"""The price of kernels by shape beside measured ones: shares fitted to one half, errors on the other.

Rows of `rows/kernels.jsonl` (A100, B200: SimuMax's tables) and of `results/gpu.json` (H200, ours). A row is held out by
a hash of its id. Of each device and class one share of the peak is fitted, with what all have alike; a clock adds what
is said. `waves` is what was tried beside: tiles of 128 x 128 on so many processors, with products cut along what is
summed over where there are too few.
"""

from __future__ import annotations

import argparse
import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from benchmarks.common import RESULTS, record, table, write

from shardplan.core.pattern import Work
from shardplan.hardware.level import DeviceSpec, KernelShares
from shardplan.hardware.prices.kernels import kernel_seconds
from shardplan.hardware.topology import Topology

ROWS = Path(__file__).parent / "rows" / "kernels.jsonl"
# By machine: the preset whose devices they are, and the rates at which the tables count (the PCIe card has 1.935 TB/s).
PRESETS: Mapping[str, tuple[str, float, float]] = {
    "a100-pcie-80g": ("dgx-a100-80g", 312e12, 1.935e12),
    "dgx-b200": ("dgx-b200", 2250e12, 7.7e12),
    "dgx-h200": ("dgx-h200", 989.4e12, 4.8e12),
}
# Seconds that a measurement has beside the kernel: events and a launch (`do_bench`), or a part of a loop.
CLOCKS = {"a100-pcie-80g": 2.5e-6, "dgx-b200": 2.5e-6, "dgx-h200": 6e-6}
STREAM = 0.75  # of the bandwidth, for which hardly any of these kernels waits
QUERIES = {"cudnn": 256.0}
HALVES = np.geomspace(20, 250, 12)  # elements, of which the best is taken
SHARES = np.geomspace(0.1, 1.0, 60)


class Shape(NamedTuple):
    """A kernel, its work and the seconds it took; `group` is what has one share."""

    id: str
    machine: str
    group: str
    work: Work
    seconds: float


def held_out(name: str) -> bool:
    """Say whether a row is held out: one of two, by a hash of its id."""
    return int.from_bytes(hashlib.sha256(f"1 {name}".encode()).digest()[:8], "big") % 2 == 0


def _table_shape(row: Mapping[str, Any]) -> Shape:
    """A row of SimuMax's tables: efficiencies of a peak, attention counted as if nothing was masked."""
    s, kernel, machine = row["shape"], row["kernel"], row["machine"]
    rate = row["efficiency"] * row["of_tflops"] * 1e12
    if kernel.startswith("sdp"):
        back, d, e = kernel == "sdp_bwd", s["qk_head_dim"], s["v_head_dim"]
        heads, n = s["batch"] * s["head_num"], s["seq_len"]
        flops = 2.0 * heads * n * n * (3 * d + 2 * e if back else d + e)
        sides = tuple(map(float, (heads, n, n, d, e, 0.5, 5 if back else 2)))
        library = "cudnn" if machine == "dgx-b200" else "flash2"
        return Shape(row["id"], machine, library, Work(flops / 2, "bf16", 0.0, "scores", sides), flops / rate)
    if kernel == "group_matmul":
        groups, m, n, k = s["ng"], s["M"], s["N"], s["K"]
        wide = s["stage"] == "bwd_grad_w"
        m, n, k = (k, n, m) if wide else (m, k, n) if s["stage"] == "bwd_grad_act" else (m, n, k)
        out = 4 if wide else 2
    else:
        groups, m, n, k, out = s["b"], s["m"], s["n"], s["k"], 4 if s["out_dtype"] == "fp32" else 2
    flops = 2.0 * groups * m * n * k
    nbytes = groups * (2.0 * (m * k + k * n) + m * n * out * (1 + s["accumulate"]))
    group = "grouped" if kernel == "group_matmul" else "product"
    work = Work(flops, "bf16", nbytes, "product", (float(m), float(n), float(k)))
    return Shape(row["id"], machine, group, work, flops / rate)


def _own_shape(number: int, row: Mapping[str, Any]) -> Shape | None:
    """A row of ours: a product of 16 bits, or attention; None for what is neither."""
    name, kernel = f"gpu/{number}", row["kernel"]
    if kernel in ("product", "grouped product") and row["dtype"] in ("bf16", "f16"):
        sides = tuple(float(row[x]) for x in "mnk")
        work = Work(row["flops"], "bf16", row["bytes"], "product", sides)
        return Shape(name, "dgx-h200", "grouped" if kernel == "grouped product" else "product", work, row["seconds"])
    if kernel in ("attention", "attention backward"):
        heads, n, d = row["batch"] * row["heads"], row["seq"], row["head_dim"]
        sides = tuple(map(float, (heads, n, n, d, d, 0.5, 5 if kernel.endswith("backward") else 2)))
        library = "cudnn" if row["library"] == "cudnn" else "flash2"
        return Shape(name, "dgx-h200", library, Work(row["flops"], "bf16", 0.0, "scores", sides), row["seconds"])
    return None


def shapes() -> list[Shape]:
    """Read them."""
    found = [_table_shape(json.loads(text)) for text in ROWS.read_text().splitlines()]
    cases = json.loads((RESULTS / "gpu.json").read_text())["cases"]
    rows = next(case["rows"] for case in cases if case["case"] == "kernels by shape")
    mine = [_own_shape(k, row) for k, row in enumerate(rows) if "seconds" in row]
    return found + [one for one in mine if one is not None]


@cache
def device(machine: str) -> DeviceSpec:
    """The device of a machine, at the rates that its table counts by."""
    preset, peak, bandwidth = PRESETS[machine]
    spec = Topology.load(preset).device
    return replace(spec, flops=(("bf16", peak), ("f8", 2 * peak)), memory_bandwidth=bandwidth)


def priced(one: Shape, share: float, half: float) -> float:
    """What `hardware` prices it at."""
    shares = KernelShares(share, share, STREAM, half, QUERIES.get(one.group, 128.0))
    return float(kernel_seconds(one.work, replace(device(one.machine), kernels=shares)))


def by_share(one: Shape, share: float, half: float) -> float:
    """Attention at one share of the peak, as it was priced before."""
    return priced(one._replace(work=replace(one.work, sides=())), share, half)


def by_waves(one: Shape, share: float, half: float) -> float:
    """A product by whole waves of tiles; `half` is what a tile takes to begin and end, along what is summed over."""
    m, n, k = map(float, one.work.sides)
    _, peak, bandwidth = PRESETS[one.machine]
    processors = device(one.machine).processors
    groups = float(one.work.flops) / (2 * m * n * k)
    tiles = groups * np.ceil(m / 128) * np.ceil(n / 128)
    cuts = max(1.0, min(processors // tiles, k // 512))
    busy = np.ceil(tiles * cuts / processors) * 2 * 128 * 128 * (k / cuts + half) / (peak * share / processors)
    added = 8 * m * n * groups * cuts / (bandwidth * STREAM) * (cuts > 1)
    return float(max(busy + added, one.work.nbytes / (bandwidth * STREAM)))


Law = Callable[[Shape, float, float], float]


def errors(logs: np.ndarray) -> dict[str, float]:
    """Errors of some logarithms of price over measurement, in percent."""
    off = 100 * np.abs(np.expm1(logs))
    return {"count": len(off), "mean": float(off.mean()), "median": float(np.median(off)),
            "p90": float(np.quantile(off, 0.9)), "signed": float(100 * logs.mean())}  # fmt: skip


def fitted(rows: Sequence[Shape], law: Law, halves: Sequence[float]) -> dict[str, Any]:
    """Fit shares, what a clock adds and one `half` to the rows that are not held out; judge the others."""
    groups = sorted({(one.machine, one.group) for one in rows})
    seconds = np.array([one.seconds for one in rows])
    apart = np.array([held_out(one.id) for one in rows])
    best: dict[str, Any] | None = None
    for half in halves:
        logs, shares, total = np.zeros(len(rows)), dict[str, float](), 0.0
        for machine, group in groups:
            at = np.array([(one.machine, one.group) == (machine, group) for one in rows])
            mine = [one for one, here in zip(rows, at, strict=True) if here]
            clock = CLOCKS[machine]
            grid = np.array([[law(one, share, half) for one in mine] for share in SHARES])
            cost = np.abs(np.log((grid + clock) / seconds[at]))
            known = cost[:, ~apart[at]] if (~apart[at]).any() else cost * 0
            k = int(known.mean(axis=1).argmin())
            shares[f"{machine}, {group}"] = float(SHARES[k])
            logs[at] = np.log((grid[k] + clock) / seconds[at])
            total += float(known.mean(axis=1)[k])
        if best is None or total < best["total"]:
            per = {f"{m}, {g}": errors(logs[[one.machine == m and one.group == g and held_out(one.id) for one in rows]])
                   for m, g in groups
                   if any(one.machine == m and one.group == g and held_out(one.id) for one in rows)}  # fmt: skip
            best = {"total": total, "half": float(half), "shares": shares, "fitted": errors(logs[~apart]),
                    "held out": errors(logs[apart]), "held out by group": per}  # fmt: skip
    assert best is not None
    del best["total"]
    return best


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.kernel_shapes", description=__doc__)
    parser.add_argument("--out", type=Path, default=RESULTS / "kernel_shapes.json", help="the result file")
    options = parser.parse_args()
    every = shapes()
    products = [one for one in every if one.work.kind == "product"]
    # One share a device: grouped products are products.
    products = [one._replace(group="product") for one in products]
    scores = [one for one in every if one.work.kind == "scores"]
    found = {
        "products: by their sides, half of 60": fitted(products, priced, [60.0]),
        "products: by their sides": fitted(products, priced, HALVES.tolist()),
        "products: by waves": fitted(products, by_waves, HALVES.tolist()),
        "attention: one share": fitted(scores, by_share, [0.0]),
        "attention: by blocks": fitted(scores, priced, [0.0]),
    }
    columns = ("count", "mean", "median", "p90", "signed")
    lines = [[name, *(one["held out"][c] for c in columns), one["fitted"]["mean"]] for name, one in found.items()]
    print(table(["law", *columns, "mean, fitted"], lines, "kernels held out, percent"))
    write(options.out, record({"rows": len(every)}, found))


if __name__ == "__main__":
    main()

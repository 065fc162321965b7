"""Tiles of the products' kernels, timed by shape on the GPU that is there; the best of each goes into the table.

A shape is eight blocks of rows times a matrix, as a rank of eight computes them: `gemm_kernel` with one program a
processor, which keeps its results. What was best is a `[[timed]]` row of `product_tiles.toml`, which `choose_tile`
reads before it counts; the rows that were there go. `--dry` does the same in Triton's interpreter (TRITON_INTERPRET=1)
on a tiny shape, whose times mean nothing, and writes only where `--out` says. On a GPU: compiled, not run.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from benchmarks.common import ROOT
from benchmarks.gpu_timing import OwnMemory

from shardplan.fused.triton import KernelOptions, ProductTile, TileMemory
from shardplan.fused.triton.gemm import gemm_prepared
from shardplan.fused.triton.gemm_kernel import gemm_kernel
from shardplan.fused.triton.memory import bump_allocator
from shardplan.fused.triton.product_tiles import TABLE, power_of_two, tiles_of

PATH = ROOT / "src" / "shardplan" / "fused" / "triton" / TABLE
BLOCKS, REPETITIONS = 8, 30
SHAPES = [
    (m, n, k) for m in (16, 128, 1024, 4096) for n, k in ((2048, 2048), (4096, 2048), (4096, 14336), (7168, 2048))
]
HEAD = "\n# Timed on {device}, Triton {triton}.\n"


def seconds_of(tile: ProductTile, shape: tuple[int, int, int], dtype: torch.dtype, programs: int, device: str) -> float:
    """Median seconds of the kernel with a tile, of one rank of `BLOCKS` with as many blocks of rows."""
    m, n, k = shape
    nbytes = BLOCKS * m * n * dtype.itemsize
    room = 4 * nbytes + (1 << 20)
    memory = TileMemory(TileMemory.virtual(1, room, device).parts * BLOCKS, 0, 1, bump_allocator(room))
    a, b = (torch.randn(s, device=device).to(dtype) for s in ((BLOCKS * m, k), (1, k, n)))
    given = (memory, a, b, None, [[m] * BLOCKS] * BLOCKS, 0, "none", tile, KernelOptions(programs))
    made, call, (arguments, constants, _) = gemm_prepared(*given)
    own = OwnMemory(memory, made.local_start, nbytes)
    took: list[float] = []
    for _ in range(REPETITIONS if device != "cpu" else 1):
        begun = time.perf_counter()
        made.launch_local(gemm_kernel, call, own.table, *arguments, **constants)
        if device != "cpu":
            torch.cuda.synchronize()
        took.append(time.perf_counter() - begun)
    error = (own.view(dtype).view(BLOCKS * m, n).float() - a.float() @ b[0].float()).abs().max()
    if not error <= 0.05 * k**0.5:
        raise SystemExit(f"{tile} of {shape}: off by {float(error)}")
    return statistics.median(took)


def timed_rows(target: str, shapes: list[tuple[int, int, int]], programs: int, device: str) -> list[dict[str, Any]]:
    """What was best for each shape and dtype, of the tiles of a target: described ones and others apart."""
    rows: list[dict[str, Any]] = []
    for dtype in (torch.bfloat16, torch.float32):
        for shape in shapes:
            for described in (True, False):
                tiles = [tile for tile in tiles_of(target, dtype.itemsize) if tile.described == described]
                took = {tile: seconds_of(tile, shape, dtype, programs, device) for tile in tiles}
                if took:
                    best = min(took, key=lambda tile: took[tile])
                    rows.append({
                        "target": target, "bytes": dtype.itemsize, "described": described, "blocks": BLOCKS,
                        "shape": [power_of_two(n) for n in shape], "block": [*best.block], "warps": best.warps,
                        "stages": best.stages, "seconds": took[best],
                    })  # fmt: skip
    return rows


def with_rows(text: str, rows: list[dict[str, Any]], head: str) -> str:
    r"""A table with these timed rows in place of those that it has.

    >>> print(with_rows("[[tile]]\nbytes = 2\n", [{"target": "hip", "described": True}], "\n# Timed.\n"), end="")
    [[tile]]
    bytes = 2
    <BLANKLINE>
    # Timed.
    <BLANKLINE>
    [[timed]]
    target = "hip"
    described = true
    """
    kept = text.partition("\n# Timed")[0].rstrip("\n") + "\n"
    said = ["\n[[timed]]\n" + "".join(f"{key} = {json.dumps(value)}\n" for key, value in row.items()) for row in rows]
    return kept + head + "".join(said)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.fused_tuning", description=__doc__)
    parser.add_argument("--dry", action="store_true", help="in the interpreter, a tiny shape")
    parser.add_argument("--out", type=Path, default=PATH, help="the table that is written")
    options = parser.parse_args()
    import triton

    if options.dry == (options.out == PATH):
        raise SystemExit("fused_tuning: --dry writes no table that is used; legal is --dry with --out, or neither")
    if not options.dry and not torch.cuda.is_available():
        raise SystemExit("fused_tuning: torch sees no GPU; legal without one is --dry")
    if options.dry:
        target, shapes, programs, device, name = "cpu", [(8, 16, 32)], 2, "cpu", "nothing: the interpreter"
    else:
        target, shapes, device = "cuda" if torch.version.hip is None else "hip", SHAPES, "cuda"
        programs = torch.cuda.get_device_properties(0).multi_processor_count
        name = torch.cuda.get_device_name(0)
    rows = timed_rows(target, shapes, programs, device)
    options.out.write_text(with_rows(PATH.read_text(), rows, HEAD.format(device=name, triton=triton.__version__)))
    print(f"{len(rows)} rows: {options.out}")


if __name__ == "__main__":
    main()

"""What jobs hold beside their certificates: twenty jobs, sequences of 1,024 to 8,192, each in processes of its own.

    python -m benchmarks.memory_runs [--only NAME] [--out FILE]

On the reference the peak is that of tracemalloc (numpy tells it of every array), of three steps of a live job on one
device. On torch it is the resident set of each gloo rank (VmHWM, reset once everything is imported) above what it was,
which counts pages and whatever torch's kernels take as workspace; glibc maps blocks of 4 MiB and more, so that what is
let go is given back. The certificate is `certify`'s, of our own executors.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tracemalloc
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from benchmarks.common import arguments, record, write
from benchmarks.live_memory import resident

STEPS = 3


class MemoryJob(NamedTuple):
    """A job and where it runs: `ranks` processes of torch, or (0) the reference."""

    model: str
    sizes: dict[str, Any]
    strategy: dict[str, Any]
    ranks: int = 0


def _llama(seq: int, layers: int, hidden: int, vocab: int = 4096, **more: Any) -> dict[str, Any]:
    heads = hidden // 64
    return {"layers": layers, "hidden": hidden, "heads": heads, "kv_heads": heads, "ffn": 3 * hidden, "seq": seq,
            "vocab": vocab, "batch": 1, **more}  # fmt: skip


def _gpt(seq: int, layers: int, hidden: int, vocab: int = 4096) -> dict[str, Any]:
    return {"layers": layers, "hidden": hidden, "heads": hidden // 64, "seq": seq, "vocab": vocab}


JOBS = {
    "reference llama 1k": MemoryJob("llama", _llama(1024, 4, 512), {}),
    "reference llama 2k, vocabulary 32k": MemoryJob("llama", _llama(2048, 2, 256, 32768), {}),
    "reference llama 4k": MemoryJob("llama", _llama(4096, 2, 256), {}),
    "reference llama 8k": MemoryJob("llama", _llama(8192, 2, 128), {}),
    "reference gpt 1k": MemoryJob("gpt", _gpt(1024, 4, 512), {}),
    "reference gpt 4k": MemoryJob("gpt", _gpt(4096, 2, 256), {}),
    "reference llama 2k, recomputed": MemoryJob("llama", _llama(2048, 6, 256), {"recompute": "full"}),
    "reference llama 2k, loss fused": MemoryJob("llama", _llama(2048, 2, 256, 32768), {"loss": "fused"}),
    "reference llama 2k, loss in 8 parts": MemoryJob(
        "llama", _llama(2048, 2, 256, 32768), {"loss": "chunked", "loss_chunks": 8}
    ),
    "reference llama 1k, 4 microbatches": MemoryJob("llama", _llama(1024, 4, 512), {"global_batch": 4}),
    "torch llama 1k": MemoryJob("llama", _llama(1024, 4, 1024), {}, 1),
    "torch llama 2k, vocabulary 32k": MemoryJob("llama", _llama(2048, 2, 512, 32768), {}, 1),
    "torch llama 4k": MemoryJob("llama", _llama(4096, 4, 512), {}, 1),
    "torch gpt 8k": MemoryJob("gpt", _gpt(8192, 2, 256), {}, 1),
    "torch llama 2k, recomputed": MemoryJob("llama", _llama(2048, 8, 512), {"recompute": "full"}, 1),
    "torch llama 2k, loss in 8 parts": MemoryJob(
        "llama", _llama(2048, 2, 512, 32768), {"loss": "chunked", "loss_chunks": 8}, 1
    ),
    "torch llama 1k, data 2, fsdp": MemoryJob(
        "llama", _llama(1024, 4, 1024), {"data": 2, "fsdp": True, "global_batch": 2}, 2
    ),
    "torch llama 2k, tensor 2": MemoryJob("llama", _llama(2048, 4, 1024), {"tensor": 2}, 2),
    "torch llama 1k, pipeline 2, 4 microbatches": MemoryJob(
        "llama", _llama(1024, 4, 1024), {"pipeline": 2, "global_batch": 4}, 2
    ),
    "torch llama 4k, context 2": MemoryJob("llama", _llama(4096, 4, 512), {"context": 2}, 2),
}


def _child(name: str) -> None:
    """Run a job in this process, or as one of its ranks, and print what it held."""
    import shardplan as sp
    from shardplan.execution.job_arrays import batch_dim
    from shardplan.execution.live import Live
    from shardplan.interop.checkpoint.job_state import write_state
    from shardplan.strategy.partition.memory import certify

    one = JOBS[name]
    if one.ranks:
        import torch.distributed as dist

        dist.init_process_group("gloo")
    sizes = {k: v for k, v in one.sizes.items() if k != "batch"}
    model = sp.Model.load(one.model, **sizes, optimizer="adamw")
    job = sp.partition(model, sp.Strategy(**one.strategy))
    certificate = certify(job)

    def source(given: str, t: sp.TensorType, box: tuple[tuple[int, int], ...]) -> np.ndarray:
        shape = [b - a for a, b in box]
        if given not in model.parameters:
            return np.zeros(shape, t.dtype.replace("f", "float").replace("i", "int"))
        found = np.random.default_rng(len(given)).standard_normal(shape, dtype=np.float32)
        found *= np.float32(0.02)
        return found

    live = Live(job, "torch" if one.ranks else "reference", write_state, 600)
    if one.ranks:
        Path("/proc/self/clear_refs").write_text("5")
        base = resident("VmRSS")
    else:
        base = 0
        tracemalloc.start()
    live.lay_out(lambda: source)
    rng = np.random.default_rng(0)
    shapes = {n: list(model.program.types[n].shape) for n in job.batch if n in model.dims}
    for n, shape in shapes.items():
        shape[batch_dim(job, n)] = job.strategy.sequences
    for _ in range(STEPS):
        live.step({n: rng.integers(0, sizes["vocab"], shape).astype(np.int32) for n, shape in shapes.items()})
    peak = resident("VmHWM") - base if one.ranks else tracemalloc.get_traced_memory()[1]
    mine: tuple[int, int] = (peak, max(certificate.peak_bytes))
    if one.ranks:
        every: list[Any] = [None] * one.ranks
        # A rank of a pipeline has a bound of its own.
        own = certificate.peak_bytes[dist.get_rank()] if job.strategy.pipeline > 1 else mine[1]
        dist.all_gather_object(every, (peak, own))
        mine = max(every)
        if dist.get_rank():
            dist.destroy_process_group()
            return
        dist.destroy_process_group()
    print(json.dumps({"measured": mine[0], "certified": mine[1]}))


def _run(name: str, most: int) -> dict[str, Any]:
    """A job in processes of its own: bytes measured and certified at the worst rank, and what the second is of it."""
    ranks = JOBS[name].ranks
    module = ["-m", "benchmarks.memory_runs", "--child", name]
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)] if ranks else []
    env = os.environ | {"OMP_NUM_THREADS": "1", "MALLOC_MMAP_THRESHOLD_": str(2**22)}
    done = subprocess.run([sys.executable, *launch, *module], capture_output=True, text=True, timeout=most, env=env,
                          cwd=Path(__file__).parents[1])  # fmt: skip
    if done.returncode:
        raise SystemExit(f"{name}: {done.stderr[-2000:]}")
    found = json.loads(done.stdout.strip().splitlines()[-1])
    return {"job": name, **found, "ratio": round(found["certified"] / found["measured"], 4)}


def main() -> None:
    if "--child" in sys.argv:
        return _child(sys.argv[sys.argv.index("--child") + 1])
    parser = arguments("memory_runs", "What jobs hold beside their certificates.", len(JOBS))
    parser.add_argument("--only", default="", help="the jobs whose names contain this; nothing is written")
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for name in [name for name in JOBS if options.only in name][: options.count]:
        row = _run(name, 900)
        rows.append(row)
        print(f"{name:<45} {row['measured'] / 2**20:9.1f} MiB  certified {row['ratio']:.3f} of it", flush=True)
    ratios = [row["ratio"] for row in rows]
    within = sum(abs(r - 1) <= 0.1 for r in ratios)
    print(f"within 10 %: {within} of {len(rows)}; median {statistics.median(ratios):.3f}")
    if not options.only:
        write(options.out, record({"steps": STEPS}, {"rows": rows, "within_10_percent": within}))


if __name__ == "__main__":
    main()

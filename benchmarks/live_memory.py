"""A live job's memory and bytes beside its certificate: FSDP on four gloo ranks, a hundred steps, from a folder or not.

`python -m benchmarks.live_memory [--count 100]`: each rank reads its own peak (VmHWM, reset after everything is
imported) above what it had then, and the bytes that came a step; rank 0 writes them beside the certificate and the
account. The law: at most 1.15 of the certificate and 64 MiB. It holds where glibc maps large blocks
(`MALLOC_MMAP_THRESHOLD_`, set here unless it is said): else holes of its heap come on top.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import numpy as np
from benchmarks.common import arguments, record, table, write

from shardplan.strategy.partition.memory import JobCertificate, certify

RANKS, STEPS = 4, 100
SIZES = {"layers": 6, "hidden": 1280, "heads": 10, "kv_heads": 10, "ffn": 3456, "seq": 256, "vocab": 8192}
SHARE, BESIDE = 1.15, 64 * 2**20


def resident(what: str) -> int:
    """Bytes of this process by a line of its status: VmRSS, or the peak VmHWM."""
    line = next(row for row in Path("/proc/self/status").read_text().splitlines() if row.startswith(what))
    return int(line.split()[1]) * 1024


def child(steps: int, out: Path) -> None:
    import torch.distributed as dist

    import shardplan as sp
    from shardplan.execution.live import Live
    from shardplan.execution.record import Record
    from shardplan.interop.checkpoint.job_state import write_state

    dist.init_process_group("gloo")
    rank = dist.get_rank()
    model = sp.Model.load("llama", **SIZES, optimizer="adamw")
    job = sp.partition(model, sp.Strategy(data=RANKS, fsdp=True, global_batch=RANKS))
    certificate = certify(job)
    dist.barrier()
    Path("/proc/self/clear_refs").write_text("5")
    base = resident("VmRSS")

    def source(name: str, t: sp.TensorType, box: tuple[tuple[int, int], ...]) -> np.ndarray:
        shape = [b - a for a, b in box]
        if name not in model.parameters:
            return np.zeros(shape, t.dtype.replace("f", "float").replace("i", "int"))
        return np.random.default_rng(box[0][0]).standard_normal(shape, dtype=np.float32) * np.float32(0.02)

    live = Live(job, "torch", write_state, 300)
    live.lay_out(lambda: source)
    rng = np.random.default_rng(rank)
    losses, got = [], 0
    for step in range(steps):
        live.record = Record() if step == 1 else None
        batch = {name: rng.integers(0, SIZES["vocab"], [len(x) for x in live.part(name)]).astype(np.int32)
                 for name in job.batch if name in job.model.dims}  # fmt: skip
        losses.append(float(live.step(batch)))
        if live.record is not None:
            got = sum(span.received for _, run in live.record.runs for span in run.spans)
    peak = resident("VmHWM") - base
    told: list[dict[str, float]] = [{}] * RANKS
    dist.all_gather_object(told, {"rank": rank, "peak bytes": peak, "received bytes": got})
    if rank == 0:
        summarize(steps, out, certificate, told, losses)
    dist.destroy_process_group()


def summarize(
    steps: int, out: Path, certificate: JobCertificate, told: list[dict[str, float]], losses: list[float]
) -> None:
    """Print, and write, what the ranks told beside what was certified, and whether the law holds."""
    most, account = max(certificate.peak_bytes), sum(certificate.axis_bytes.values())
    for row in told:
        row["share of the certificate"] = (row["peak bytes"] - BESIDE) / most
        row["received of the account"] = row["received bytes"] / account
    heads = tuple(told[0])
    print(table(heads, [[row[h] for h in heads] for row in told], f"{RANKS} ranks of gloo, {steps} steps"))
    result = {
        "certificate bytes": most, "state bytes": max(certificate.state_bytes), "account bytes a step": account,
        "ranks": told, "law holds": max(row["share of the certificate"] for row in told) <= SHARE,
        "losses, first and last": [losses[0], losses[-1]],
    }  # fmt: skip
    write(out, record({"count": steps, "ranks": RANKS, **SIZES}, result))


def main() -> None:
    parser = arguments("live_memory", "A live job's memory and bytes beside its certificate.", STEPS, of="steps")
    options = parser.parse_args()
    if "RANK" in os.environ:
        return child(options.count, options.out)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    # glibc raises this by itself as large blocks are freed, and then keeps the holes between those that live
    os.environ.setdefault("MALLOC_MMAP_THRESHOLD_", str(2**20))
    os.execv(sys.executable, [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node",
                              str(RANKS), "-m", "benchmarks.live_memory", "--count", str(options.count),
                              "--out", str(options.out)])  # fmt: skip


if __name__ == "__main__":
    main()

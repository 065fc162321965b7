"""Our plans on torch and on MPI beside one MPI Alltoallw, interleaved in the same four processes.

`python -m benchmarks.alltoallw [--count 20] [--repeats 9] [--seed 0]` starts 4 processes with mpiexec; they also form a
gloo group. Problems are drawn on meshes of 4 devices and scaled to shards of about 1 MiB. `alltoallw` is the direct
exchange as one `MPI_Ialltoallw` on derived datatypes over the whole mesh, nothing packed; `mpi` is our plan on the
same library; `torch` is our plan over gloo. MPICH moves through shared memory and polls, gloo goes through TCP on the
loopback device and sleeps: on two cores for four processes the times say which plan a library runs faster, and nothing
of gloo against MPI.
"""

from __future__ import annotations

import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.common import ROOT, arguments, geomean, record, spread, table, told, write

RANKS = 4
WAYS = ("torch", "mpi", "alltoallw")


def child(count: int, repeats: int, seed: int, store: str) -> None:
    """Run the problems on this rank; rank 0 prints the rows."""
    import numpy as np
    import torch
    import torch.distributed as dist
    from benchmarks.torch_vs_dtensor import scaled
    from mpi4py import MPI

    import shardplan as sp
    from benchmarks import suites
    from shardplan.core.ops import Exchange
    from shardplan.core.program import Program
    from shardplan.core.step import Step
    from shardplan.execution.torch.dtypes import to_numpy

    torch.set_num_threads(1)
    rank = MPI.COMM_WORLD.Get_rank()
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=RANKS)
    rng = random.Random(f"alltoallw {seed}")
    rows: list[dict[str, Any]] = []
    while len(rows) < count:
        mesh = suites.make_mesh(rng.choice(((4,), (2, 2))))
        s, t = suites.even_pair(rng, mesh, rng.choice((2, 3)), least=4, keep=suites.KEEP)
        if s == t:
            continue
        s, t = scaled(s, t)
        plan = sp.redistribute(s, t)
        if not any(plan.certificate.received_bytes):
            continue
        one = Program({"0": s}, [Step(Exchange(t.layout), ("0",), ("1",))], ("1",))
        full = np.arange(s.nbytes // s.itemsize, dtype=np.float32).reshape(s.shape)
        mine, want = (full[tuple(slice(a, b) for a, b in x.box(rank))].copy() for x in (s, t))
        ways = {"torch": (plan.program, "torch"), "mpi": (plan.program, "mpi"), "alltoallw": (one, "mpi")}
        seconds: dict[str, list[float]] = {name: [] for name in ways}
        for turn in range(repeats + 1):
            for name, (program, backend) in ways.items():
                MPI.COMM_WORLD.Barrier()
                started = time.perf_counter()
                (out,) = sp.run(program, [mine], backend=backend)
                taken = MPI.COMM_WORLD.allreduce(time.perf_counter() - started, MPI.MAX)
                if turn:
                    seconds[name].append(taken)
                elif not np.array_equal(to_numpy(out) if backend == "torch" else out, want):
                    raise SystemExit(f"{told(s, t)}: {name} is wrong")
        steps = [step.op.name for step in plan.program.steps]
        medians = {name: statistics.median(values) for name, values in seconds.items()}
        rows.append({"problem": told(s, t), "steps": steps, **medians})
    if rank == 0:
        print(json.dumps({"rows": rows}), flush=True)
    MPI.COMM_WORLD.Barrier()


def main() -> None:
    parser = arguments("alltoallw", "Our plans beside one MPI Alltoallw.", 20, of="problems")
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        command = [str(Path(sys.executable).with_name("mpiexec")), "-n", str(RANKS), sys.executable, __file__]
        parameters = map(str, (options.count, options.repeats, options.seed, Path(folder) / "store"))
        environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}"}
        done = subprocess.run([*command, *parameters], capture_output=True, text=True, env=environment, timeout=900)
    if done.returncode:
        raise SystemExit(done.stderr[-3000:])
    rows = json.loads(done.stdout[done.stdout.index('{"rows"') :])["rows"]
    ratios = {name: [row[name] / row["mpi"] for row in rows] for name in WAYS}
    several = [row["alltoallw"] / row["mpi"] for row in rows if row["steps"] != ["exchange"]]
    summary = {f"{name} / mpi": spread(values) | {"geomean": geomean(values)} for name, values in ratios.items()}
    summary["alltoallw / mpi, where our plan is another"] = spread(several) | {"geomean": geomean(several)}
    heads = ("count", "geomean", "median", "p90", "max")
    print(table(("seconds", *heads), [[n, *(v[h] for h in heads)] for n, v in summary.items()], f"{RANKS} ranks"))
    parameters_told = {"count": options.count, "repeats": options.repeats, "seed": options.seed, "ranks": RANKS}
    write(options.out, record(parameters_told, {"summary": summary, "rows": rows}))


if __name__ == "__main__":
    if len(sys.argv) == 5 and not sys.argv[1].startswith("-"):
        child(*map(int, sys.argv[1:4]), sys.argv[4])
    else:
        main()

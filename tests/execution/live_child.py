"""One rank of a live job; rank 0 prints one JSON object. Arguments: the backend, the file of a case, a folder.

It trains under one strategy on parts of batches, saves, goes on under others in memory and from disk. With torch, rank
3 then ends within a step.
"""

import json
import os
import pickle
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

import numpy as np  # noqa: E402

import execution.job_cases  # noqa: E402, F401 - which says how jobs are pickled
import shardplan as sp  # noqa: E402
from shardplan.execution.jobs import JobRun  # noqa: E402

LOST = 3


def part_of(live: Any, batch: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """This process's part of a batch."""
    return {name: x[np.ix_(*live.part(name))] for name, x in batch.items()}


def lose(live: Any, batch: dict[str, np.ndarray], rank: int) -> str:
    """What this rank is told where another ends within a step."""
    action = JobRun.action

    def hit(self: JobRun, place: int, stage: int, kind: str, microbatch: int) -> None:
        if kind == "B" and rank == LOST:
            os._exit(9)
        action(self, place, stage, kind, microbatch)

    JobRun.action = hit  # type: ignore[method-assign]
    try:
        live.step(batch)
    except sp.ShardplanError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def main() -> None:
    backend, path, folder = sys.argv[1:4]
    jobs, state, batch = pickle.loads(Path(path).read_bytes())
    rank = 0
    if backend == "torch":
        import torch.distributed as dist

        dist.init_process_group("gloo")
        rank = dist.get_rank()
    elif backend == "mpi":
        from mpi4py import MPI

        rank = MPI.COMM_WORLD.Get_rank()
    report: dict[str, Any] = {"memory": [], "disk": []}
    with sp.start(jobs[0], state, backend, 60) as live:
        rows = live.part("inputs")[0].tolist()
        report["memory"] += [live.step(part_of(live, batch)), live.step(batch)]
        live.save(f"{folder}/two")
        for job in jobs[1:]:
            live.reshard(job)
            report["memory"].append(live.step(batch))
        whole = live.collect()
    with sp.start(jobs[-1], f"{folder}/two", backend, 60) as live:
        report["disk"] = [live.step(batch) for _ in jobs[1:]]
        again = live.collect(list(whole))
        try:
            if backend == "mpi":  # which ends all processes then
                raise sp.LayoutError
            live.step({**batch, "inputs": batch["inputs"][: 1 if rank == 1 else None]})
        except sp.ShardplanError as error:
            report["wrong"] = f"{type(error).__name__}: {error}"
        report["after"] = live.step(batch)  # the state is as it was
        report["apart"] = max(float(np.abs(whole[n] - again[n]).max()) for n in whole)
        report["rows"] = rows
        if backend == "torch":
            report["lost"] = lose(live, batch, rank)
    if rank == 0:
        print(json.dumps(report))
    sys.stdout.flush()
    if backend == "torch":
        os._exit(0)  # the group is broken


if __name__ == "__main__":
    main()

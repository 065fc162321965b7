"""One rank of a launch that runs jobs; rank 0 prints one JSON object. Arguments: the backend, the file of the cases.

Then, with one case: a rank comes with a wrong array, and with another job, and after each all is well again.
"""

import json
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

import shardplan as sp  # noqa: E402
from execution.job_cases import MPI as CHOSEN  # noqa: E402
from execution.job_cases import Case, read, wrong  # noqa: E402

ODD = 2


def refused(one: Case, other: Case, backend: str, rank: int, timeout: float) -> list[str]:
    """What a rank is told of a wrong array on rank `ODD`, then of another job there (torch only)."""
    said: list[str] = []
    if backend == "torch":  # all was well with the job before; MPI would end all ranks then
        sp.run(one.job, one.given, backend=backend, timeout=timeout)
    name = next(iter(one.given))
    short = {**one.given, name: one.given[name][:0]}
    tries = [(one.job, short), *([(other.job, other.given)] if backend == "torch" else [])]
    for job, given in tries:
        try:
            sp.run(*((job, given) if rank == ODD else (one.job, one.given)), backend=backend, timeout=timeout)
            said.append("")
        except sp.ShardplanError as error:
            said.append(f"{type(error).__name__}: {error}")
    return said


def main() -> None:
    backend, path = sys.argv[1:3]
    if backend == "torch":
        import torch.distributed as dist

        dist.init_process_group("gloo")
        rank, world = dist.get_rank(), dist.get_world_size()
        cases = read(path)
    else:
        from mpi4py import MPI

        rank, world = MPI.COMM_WORLD.Get_rank(), MPI.COMM_WORLD.Get_size()
        cases = read(path, CHOSEN)
    first, last = cases[0], cases[-1]
    said = refused(last, first, backend, rank, 60.0)
    found = {one.name: wrong(one, backend, {rank}) for one in cases}
    mine: Any = ([line for lines, _ in found.values() for line in lines], {n: k for n, (_, k) in found.items()}, said)
    every: list[Any] | None = [None] * world
    if backend == "torch":
        dist.all_gather_object(every, mine)
        dist.destroy_process_group()
    else:
        every = MPI.COMM_WORLD.gather(mine, root=0)
    if rank == 0 and every is not None:
        report = {
            "wrong": [line for lines, _, _ in every for line in lines][:20],
            "received": {name: sum(more[name] for _, more, _ in every) for name in found},
            "said": [told for _, _, told in every],
        }
        print(json.dumps(report))


if __name__ == "__main__":
    main()

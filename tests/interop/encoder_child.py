"""One rank of a launch that runs the jobs of examples/encoder.py; rank 0 prints what every rank saw, as JSON, and
the seconds predicted and measured.

Argument: a file with the jobs by name, the inputs but for weights, and the embeddings that they shall make.
"""

import json
import pickle
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "examples"), str(ROOT), str(ROOT / "tests")]

import torch.distributed as dist  # noqa: E402
from encoder import ran, these_processes, timed, weights  # noqa: E402

from execution import job_cases  # noqa: E402, F401  # pickles what jobs are made of


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    with Path(sys.argv[1]).open("rb") as file:
        jobs, given, wanted = pickle.load(file)
    model = next(iter(jobs.values())).model
    given |= model.pack(weights(model))
    rows = {name: ran(job, given, wanted, rank) for name, job in jobs.items()}
    where = these_processes(given["input_ids"].size)
    issue, seconds = timed(jobs, given, where, steps=1)
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, rows)
    dist.destroy_process_group()
    if rank == 0:
        told: dict[str, Any] = {name: [mine[name]._asdict() for mine in every] for name in rows}
        print(json.dumps(told | {"issue": issue, "seconds": seconds}))


if __name__ == "__main__":
    main()

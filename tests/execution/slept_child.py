"""One rank of two that run steps whose compute is slept; rank 0 prints one JSON object, a row a case and rank."""

import json
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

import torch.distributed as dist  # noqa: E402

from execution.slept_cases import CASES, TOPOLOGY, job_of  # noqa: E402
from shardplan.execution.job_arrays import zeros  # noqa: E402
from shardplan.execution.record import Record  # noqa: E402
from shardplan.execution.run import run_recorded  # noqa: E402
from shardplan.execution.torch.emulated_compute import SleptStep  # noqa: E402


def received(record: Record, of: list[str]) -> int:
    """The bytes that came in the programs of a step: those that give every rank all results are run behind them."""
    return sum(s.received for program, r in record.runs for s in r.spans if str(program) in of)


def main() -> None:
    dist.init_process_group("gloo")
    mine: dict[str, Any] = {}
    for name in CASES:
        job = job_of(name)
        step = SleptStep(job, TOPOLOGY, 60.0)
        took, early = [], []
        record = Record()
        for _ in range(3):  # the first binds and connects
            record = Record()
            step.ready(record)
            dist.barrier()
            start = time.monotonic()
            step.go()
            took.append(time.monotonic() - start)
            early.append(step.clock.until - time.monotonic())
        programs = [str(program) for program, _ in record.runs]
        real = Record()
        names = {name for name, _ in job.model.program.inputs}  # what programs are told besides is not given
        given = {name: array for name, array in zeros(job).items() if name in names}
        run_recorded(job, given, "torch", 60.0, real)
        mine[name] = {
            "busy": step.clock.busy,
            "took": min(took[1:]),
            "early": max(early),
            "received": received(record, programs),
            "really": received(real, programs),
        }
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, mine)
    if dist.get_rank() == 0:
        print(json.dumps({name: [each[name] for each in every] for name in CASES}))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

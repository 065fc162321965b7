"""One rank of a launch of a job in which rank `VICTIM` dies, stops or hangs in its second backward pass.

Arguments: the backend, the file of the cases, the fault, the timeout. The others print `FAULT {json}`, and exit with 4.
"""

import json
import os
import signal
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

import shardplan as sp  # noqa: E402
from execution.job_cases import read  # noqa: E402
from shardplan.execution.jobs import JobRun  # noqa: E402

VICTIM, LONG = 3, 600.0


def main() -> int:
    backend, path, fault, timeout = *sys.argv[1:4], float(sys.argv[4])
    if backend == "torch":
        import torch.distributed as dist

        dist.init_process_group("gloo")
        rank = dist.get_rank()
    else:
        from mpi4py import MPI

        rank = MPI.COMM_WORLD.Get_rank()
    [one] = read(path, ["llama 1f1b"])
    sp.run(one.job, one.given, backend, timeout=60.0)
    action = JobRun.action

    def hit(self: JobRun, place: int, stage: int, kind: str, microbatch: int) -> None:
        if (stage, kind, microbatch) == (1, "B", 1):
            if fault == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            if fault == "stopped":
                os.kill(os.getpid(), signal.SIGSTOP)
            time.sleep(LONG)
        action(self, place, stage, kind, microbatch)

    if rank == VICTIM:
        JobRun.action = hit
    started = time.monotonic()
    try:
        sp.run(one.job, one.given, backend, timeout=timeout)
    except sp.ShardplanError as error:
        told = {"rank": rank, "said": f"{type(error).__name__}: {error}", "seconds": time.monotonic() - started}
        print("FAULT " + json.dumps(told), flush=True)
        return 4
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""One rank of a launch in which something goes wrong; prints what it saw as `FAULT {json}` and exits 0, 4 or 9.

Arguments: the fault, the rank it befalls, the timeout in seconds. The other ranks must fail with one clear error. The
timeout grows with what a good run takes here and now: a loaded machine is no fault.
"""

import json
import os
import signal
import sys
import time
from datetime import timedelta

import numpy as np
import torch
import torch.distributed as dist

import shardplan as sp
from shardplan.core.ops import Elementwise
from shardplan.core.program import Program
from shardplan.core.step import Step
from shardplan.execution.torch import run as backend

MESH = sp.Mesh(a=4)
A, B, C = (sp.TensorType.parse(f"f32[{x}]", MESH) for x in ("1024@a, 2048", "1024, 2048@a", "1024, 2048"))


def program(other: bool = False) -> Program:
    """Three moves with a computation between, so that a fault may come in the middle."""
    from shardplan.core.ops import AllGather, AllToAll

    steps = [
        Step(AllToAll(0, 1, ("a",)), ("0",), ("1",)),
        Step(Elementwise("2*a" if not other else "3*a"), ("1",), ("2",)),
        Step(AllGather(1, ("a",)), ("2",), ("3",)),
    ]
    return Program({"0": A}, steps, ("3",))


def main() -> int:
    fault, victim, timeout = sys.argv[1], int(sys.argv[2]), float(sys.argv[3])
    dist.init_process_group("gloo", timeout=timedelta(seconds=600))
    rank = dist.get_rank()
    shard = sp.distribute(np.zeros(A.shape, np.float32), A)[rank]
    sp.run(program(), [shard], backend="torch", timeout=300)  # all well once, then again to see how long it takes
    dist.barrier()
    started = time.monotonic()
    sp.run(program(), [shard], backend="torch", timeout=300)
    took = torch.tensor(time.monotonic() - started)
    dist.all_reduce(took, dist.ReduceOp.MAX)
    timeout = float(f"{max(timeout, 20 * float(took)):.3g}")
    dist.barrier()
    if rank == victim:
        watch_at = backend.TorchWatch.begin_step

        def at(self, step):
            watch_at(self, step)
            if step != 1:
                return
            if fault == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            if fault == "stopped":
                os.kill(os.getpid(), signal.SIGSTOP)
            if fault == "raising":
                raise MemoryError("no room for the computation")
            if fault == "late":
                time.sleep(timeout / 2)

        backend.TorchWatch.begin_step = at
    if fault == "late start" and rank == victim:
        time.sleep(timeout / 2)
    if fault == "absent" and rank == victim:
        time.sleep(3 * timeout)
        return 9
    started = time.monotonic()
    try:
        sp.run(program(fault == "other program" and rank == victim), [shard], backend="torch", timeout=timeout)
    except Exception as error:
        seconds = time.monotonic() - started
        told = {"kind": type(error).__name__, "text": str(error), "seconds": seconds}
        print("FAULT " + json.dumps(told | {"rank": rank, "timeout": timeout}), flush=True)
        return 4
    told = {"kind": "", "text": "", "seconds": time.monotonic() - started}
    print("FAULT " + json.dumps(told | {"rank": rank, "timeout": timeout}), flush=True)
    return 0


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    if dist.is_initialized() and status == 0:
        dist.destroy_process_group()
    sys.exit(status)

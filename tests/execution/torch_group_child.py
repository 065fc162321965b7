"""Run on 4 ranks: moves on process groups of their own, ended in unlike orders; rank 0 prints JSON."""

import json
import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

import numpy as np  # noqa: E402
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

import shardplan as sp  # noqa: E402
from shardplan.errors import BackendError  # noqa: E402
from shardplan.execution.async_executor import finish  # noqa: E402
from shardplan.execution.torch.run import executable, launch  # noqa: E402
from shardplan.interop.torch import process_group  # noqa: E402


def gather(devices, rows):
    text = f"program\nmesh a={len(devices)} devices={list(devices)}\ninput %0: i32[{rows}@a]\n"
    return sp.Program.parse(text + "%1 = all_gather(%0; dim=0, axes=(a))\noutput %1")


def main():
    os.environ["SHARDPLAN_NATIVE"] = sys.argv[1]
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    wrong = []

    def shard(program):
        t = program.input_types[0]
        return torch.from_numpy(sp.distribute(np.arange(t.shape[0], dtype=np.int32), t)[t.mesh.devices.index(rank)])

    def equal(name, program, got):
        if got.tolist() != list(range(program.input_types[0].shape[0])):
            wrong.append(f"rank {rank}, {name}: {got.tolist()}")

    first, second = gather((0, 1, 2, 3), 8), gather((0, 1, 2, 3), 12)
    with process_group() as own:
        equal("first", first, sp.run(first, [shard(first)], "torch")[0])
    equal("second", second, sp.run(second, [shard(second)], "torch")[0])
    # Both are agreed on: all ranks start them in one order, and each ends them in one of its own.
    for turn in range(8):
        running = [launch(executable(p, rank), {"0": shard(p)}, 60.0) for p in (first, second)]
        for k in (0, 1) if turn % 2 else (1, 0):
            if k:
                next(running[1])
            else:
                with process_group(own):
                    next(running[0])
        for k in (0, 1) if rank < 2 else (1, 0):
            equal(f"turn {turn}", (first, second)[k], finish(running[k])[0])
    # A group of some ranks, in an order of its own, and a program on them.
    pair = dist.new_group([3, 1], sort_ranks=False)
    if rank in (1, 3):
        some = gather((1, 3), 6)
        with process_group(pair):
            equal("pair", some, sp.run(some, [shard(some)], "torch")[0])
            try:
                sp.run(first, [shard(first)], "torch")
                wrong.append("a program on ranks that its group lacks was run")
            except BackendError as error:
                if "lacks; legal are [3, 1]" not in str(error):
                    wrong.append(str(error))
    else:
        try:
            with process_group(pair):
                wrong.append("a group of other ranks was taken")
        except BackendError as error:
            if "legal is a process group that this rank is in" not in str(error):
                wrong.append(str(error))
    gathered = [None] * 4
    dist.all_gather_object(gathered, wrong)
    if rank == 0:
        print(json.dumps({"wrong": [x for part in gathered for x in part]}))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

"""Run on every rank: bytes that the kernel counted for every op against what the op says; prints JSON."""

import json
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

import torch.distributed as dist  # noqa: E402

import shardplan as sp  # noqa: E402
from shardplan.core.ops import (  # noqa: E402
    AllGather,
    AllReduce,
    AllToAll,
    Broadcast,
    Exchange,
    Permute,
    Reduce,
    ReduceScatter,
)
from shardplan.core.program import Program  # noqa: E402
from shardplan.core.step import Step  # noqa: E402
from sockets import on_the_wire  # noqa: E402

MESH = sp.Mesh(a=2, b=2)
OPS = [
    ("f32[1024@a, 1024@b]", AllGather(0, ("a",))),
    ("f32[1024, 1024@(a,b)]", AllGather(1, ("a", "b"))),
    ("f32[1024@(a,b), 1024]", AllToAll(0, 1, ("a", "b"))),
    ("f32[1024@(a,b), 1024]", AllToAll(0, 1, ("b",), chunks=3)),
    ("f32[1023@(a,b), 1021]", Exchange(sp.Layout(((), ("a", "b"))))),
    ("f32[1024@a, 1024@b]", Permute(sp.Layout((("b",), ("a",))))),
    ("f32[1024, 1024]{+a,+b}", ReduceScatter(1, ("a", "b"))),
    ("f32[1024, 1024]{+a}", ReduceScatter(0, ("a",))),
    ("f32[1024, 1024]{+a,+b}", AllReduce(("a", "b"))),
    ("f32[1024, 512]{max:b}", AllReduce(("b",), "max", chunks=2)),
    ("f32[1024, 1024]{+a,+b}", Reduce(("a", "b"))),
    ("f32[1024, 1024]{root:a,b}", Broadcast(("a", "b"))),
]


def main():
    dist.init_process_group("gloo")
    rank, rows = dist.get_rank(), []
    for text, op in OPS:
        t = sp.TensorType.parse(text, MESH)
        program = Program({"0": t}, [Step(op, ("0",), ("1",))], ("1",))
        import numpy as np

        shard = sp.distribute(np.zeros(t.shape, np.float32), t)[rank]
        sp.run(program, [shard], backend="torch", timeout=60)
        dist.barrier()
        before = on_the_wire()[1]
        for _ in range(2):
            sp.run(program, [shard], backend="torch", timeout=60)
        dist.barrier()
        after = on_the_wire()[1]
        said = 2 * int(op.received_bytes(t)[rank])
        totals = [None] * dist.get_world_size()
        dist.all_gather_object(totals, (said, after - before))
        rows.append({"op": f"{op.name} {text}", "said": [a for a, _ in totals], "counted": [b for _, b in totals]})
    if rank == 0:
        print(json.dumps(rows))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

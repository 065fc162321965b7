"""Run on four ranks: rank 2 raises in a call that all of them make; prints, by case, what each rank was told.

After every case all ranks run something together: the process group is as good as before.
"""

import json
import sys
from collections import UserDict
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

import numpy as np  # noqa: E402
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torch.distributed.device_mesh import init_device_mesh  # noqa: E402
from torch.distributed.tensor import Replicate, Shard, distribute_tensor  # noqa: E402

import shardplan as sp  # noqa: E402
from shardplan.interop.torch import redistribute, redistribute_state  # noqa: E402

ODD, LONG = 2, 60.0


def gathers(rows: int) -> sp.Program:
    mesh = sp.Mesh(x=4)
    return sp.redistribute(f"i32[{rows}@x, 4]", f"i32[{rows}, 4]", mesh=mesh).program


def ran(program: sp.Program, rank: int, odd: bool, **wrong) -> object:
    t = program.input_types[0]
    shards = [sp.distribute(np.arange(np.prod(t.shape), dtype=np.int32).reshape(t.shape), t)[rank]]
    asked = {"shards": shards, "timeout": LONG} | (wrong if odd else {})
    return sp.run(program, asked["shards"], "torch", asked["timeout"])


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    odd = rank == ODD
    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("d",))
    whole = torch.arange(256 * 8, dtype=torch.float32).reshape(256, 8)
    x = distribute_tensor(whole, mesh, [Shard(0)])
    to = [Replicate()]
    known = gathers(64)
    ran(known, rank, False)
    redistribute(x, [Shard(1)])

    class Other(UserDict):
        pass

    cases = {
        "shards, new": lambda: ran(gathers(8), rank, odd, shards=5),
        "shards, known": lambda: ran(known, rank, odd, shards=5),
        "seconds, new": lambda: ran(gathers(16), rank, odd, timeout=-1),
        "limit, new": lambda: redistribute(x, to, memory_limit=1 if odd else None, timeout=LONG),
        "limit, known": lambda: redistribute(x, [Shard(1)], memory_limit=1 if odd else None, timeout=LONG),
        "placements": lambda: redistribute(x, [Shard(7)] if odd else to, timeout=LONG),
        "state": lambda: redistribute_state(
            Other(w=x) if odd else {"w": x}, {"w": to}, donate=True, group=dist.group.WORLD, timeout=LONG
        ),
        "limit, all": lambda: redistribute(x, to, memory_limit=1, timeout=LONG),
    }
    told = {}
    for name, call in cases.items():
        try:
            call()
            told[name] = "nothing"
        except Exception as error:
            told[name] = f"{type(error).__name__}: {error}"
        found = ran(known, rank, False)
        assert np.array_equal(found[0].numpy(), np.arange(256).reshape(64, 4)), name
        y = redistribute(x, to, timeout=LONG)
        assert torch.equal(y.to_local(), whole), name
    gathered: list = [None] * 4
    dist.all_gather_object(gathered, told)
    if rank == 0:
        print(json.dumps({name: [one[name] for one in gathered] for name in cases}))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

"""Run on every rank: what ranks do to the store, and what each says when one has a wrong shard or another order.

Every case is on one process group, one after another: a run that is refused, or whose program fails on a living rank,
leaves the group as it was. Rank 0 prints one JSON object. With the argument `batched` (the way of nccl, over gloo) only
another order, which ends the launch; every rank prints `RANK {json}`.
"""

import json
import os
import sys
import time
from dataclasses import replace
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "tests" / "execution")]

import numpy as np  # noqa: E402
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from stores import Counting  # noqa: E402
from torch.distributed.device_mesh import init_device_mesh  # noqa: E402
from torch.distributed.tensor import DTensor, Replicate, Shard  # noqa: E402

import shardplan as sp  # noqa: E402
from shardplan.execution.torch import run as backend  # noqa: E402
from shardplan.execution.torch.group_state import group_state  # noqa: E402
from shardplan.execution.torch.wire import TorchWire  # noqa: E402
from shardplan.interop.torch import redistribute  # noqa: E402

VICTIM, TIMEOUT = 2, 120.0
TEXTS = [("f32[16@a, 8]", "f32[16, 8@a]"), ("f32[8@a, 16]", "f32[8, 16@a]")]  # messages of one size


def seen(call):
    """The kind, the text and the seconds of what a call raises."""
    dist.barrier()
    started = time.monotonic()
    try:
        call()
    except Exception as error:
        return {"kind": type(error).__name__, "text": str(error), "seconds": time.monotonic() - started}
    return {"kind": "", "text": "", "seconds": time.monotonic() - started}


def short(x):
    """The tensor with a storage of half its bytes."""
    y = x.clone()
    y.untyped_storage().resize_(x.nbytes // 2)
    return y


WRONG = {
    "shape": lambda x: x[:2],
    "dtype": lambda x: x.double(),
    "ndim": lambda x: x.reshape(-1),
    "storage": short,
    "layout": lambda x: x.to_sparse(),
    "meta": lambda x: x.to("meta"),
}


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    store = group_state().store = Counting(group_state().store)
    mesh = sp.Mesh(a=world)
    programs, shards, wanted = [], [], []
    for s, t in TEXTS:
        s, t = sp.TensorType.parse(s, mesh), sp.TensorType.parse(t, mesh)
        full = len(shards) + np.arange(s.nbytes // 4, dtype=np.float32).reshape(s.shape)
        programs.append(sp.redistribute(s, t).program)
        shards.append(sp.distribute(full, s)[rank])
        wanted.append(sp.distribute(full, t)[rank])

    def run(k, shard=None, timeout=TIMEOUT):
        [out] = sp.run(programs[k], [shards[k] if shard is None else shard], backend="torch", timeout=timeout)
        assert np.array_equal(np.asarray(out), wanted[k])

    if sys.argv[1:] == ["batched"]:
        plain_wire = TorchWire.of
        TorchWire.of = staticmethod(lambda *a: replace(plain_wire(*a), batched=True))
        for k in (0, 1, 1, 0):
            run(k)
        store.calls.clear()
        swapped = seen(lambda: [run(k) for k in ((1, 0) if rank == VICTIM else (0, 1))])
        print("RANK " + json.dumps(swapped | {"rank": rank}), flush=True)
        os._exit(0)

    found, operations = {}, []
    mine = torch.from_numpy(shards[0])
    found["first call"] = seen(lambda: run(0, mine.double() if rank == VICTIM else None))
    for call in (lambda: run(0), lambda: run(0), lambda: run(1), lambda: run(1)):
        store.calls.clear()
        call()
        operations.append(store.calls.total())
    for name, wrong in WRONG.items():
        found[name] = seen(lambda wrong=wrong: run(0, wrong(mine) if rank == VICTIM else None))
        run(0)

    device_mesh = init_device_mesh("cpu", (world,))

    def drop_in(local):
        x = DTensor.from_local(local, device_mesh, [Shard(0)], run_check=False, shape=(16, 8), stride=(8, 1))
        return redistribute(x, [Replicate()], timeout=TIMEOUT).to_local()

    found["drop-in, first call"] = seen(lambda: drop_in(mine[:1] if rank == VICTIM else mine))
    whole = drop_in(mine)
    found["drop-in"] = seen(lambda: drop_in(short(mine) if rank == VICTIM else mine))
    assert torch.equal(drop_in(mine), whole)
    store.calls.clear()
    drop_in(mine)
    operations.append(store.calls.total())

    plain = backend.TorchWatch.begin_step

    def at(self, step):
        plain(self, step)
        raise MemoryError("no room")

    if rank == VICTIM:
        backend.TorchWatch.begin_step = at
    found["raises and lives"] = seen(lambda: run(0))
    backend.TorchWatch.begin_step = plain
    run(0)

    order = (1, 0) if rank == VICTIM else (0, 1)
    found["another order"] = seen(lambda: [run(k, timeout=60.0) for k in order])
    dist.barrier()  # the group is as it was
    told = [None] * world
    dist.all_gather_object(told, {"found": found, "operations": operations})
    if rank == 0:
        print(json.dumps(told))
    dist.barrier()
    sys.stdout.flush()
    dist.destroy_process_group()


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()

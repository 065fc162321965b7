"""Run on every rank: programs with the library's own collectives, every call that reaches a process group recorded.

Argument: `gloo` or `nccl` (a GPU a rank). Rank 0 prints, for each program, what the ranks called and whether results
equal the reference.
"""

import json
import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

import numpy as np  # noqa: E402
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402
from torch.utils._pytree import tree_leaves  # noqa: E402

import shardplan as sp  # noqa: E402
from shardplan.core.dtypes import numpy_dtype  # noqa: E402
from shardplan.execution.torch.dtypes import to_numpy, to_torch  # noqa: E402


class Recorder(TorchDispatchMode):
    """What reaches process groups: the op of c10d, its ranks in member order, and the bytes of its first input."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[list] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "c10d":
            flat = tree_leaves((args, kwargs))
            group = next(dist.ProcessGroup.unbox(x) for x in flat if isinstance(x, torch.ScriptObject))
            tensors = [x for x in flat if isinstance(x, torch.Tensor)]
            base = func._schema.name.removeprefix("c10d::").strip("_")
            given = tensors[-1] if base in ("allgather_base", "allgather", "reduce_scatter_base") else tensors[0]
            given = tensors[1] if base == "alltoall_base" else given
            self.calls.append([base, dist.get_process_group_ranks(group), given.nbytes])
        return func(*args, **(kwargs or {}))


PROGRAMS = {
    "gather": "mesh a=2, b=2\ninput %0: i32[8@(a,b), 3]\n%1 = all_gather(%0; dim=0, axes=(b))\noutput %1",
    "gather of a minor dim, in two chunks": (
        "mesh a=2, b=2\ninput %0: i64[4, 8@b]\n%1 = all_gather(%0; dim=1, axes=(b), chunks=2)\noutput %1"
    ),
    "exchange of dims": (
        "mesh a=2, b=2\ninput %0: i16[8@(b,a), 4]\n%1 = all_to_all(%0; src_dim=0, dst_dim=1, axes=(b,a), "
        "order=(a,b))\noutput %1"
    ),
    "padded gather, padding behind the result": (
        "mesh a=4\ninput %0: i32[63@a, 5]\n%1 = all_gather(%0; dim=0, axes=(a), algorithm=padded)\noutput %1"
    ),
    "padded gather, padding inside": (
        "mesh a=2, b=2\ninput %0: f32[9@(a,b), 3]\n%1 = all_gather(%0; dim=0, axes=(a,b), algorithm=padded)\noutput %1"
    ),
    "padded scatter": (
        "mesh a=4\ninput %0: i32[13, 5]{+a}\n%1 = reduce_scatter(%0; dim=0, axes=(a), algorithm=padded)\noutput %1"
    ),
    "padded exchange of dims": (
        "mesh a=2, b=2\ninput %0: i16[7@(b,a), 5]\n%1 = all_to_all(%0; src_dim=0, dst_dim=1, axes=(b,a), "
        "algorithm=padded)\noutput %1"
    ),
    "scatter": "mesh a=4\ninput %0: i32[8, 5]{+a}\n%1 = reduce_scatter(%0; dim=0, axes=(a))\noutput %1",
    "reduce": "mesh a=2, b=2\ninput %0: i64[6]{max:a}\n%1 = all_reduce(%0; axes=(a), reduction=max)\noutput %1",
    "to a root and back": (
        "mesh a=4\ninput %0: i32[6]{+a}\n%1 = reduce(%0; axes=(a))\n%2 = broadcast(%1; axes=(a))\noutput %2"
    ),
    "packed, two widths": (
        "mesh a=4\ninput %0: i32[8@a]\ninput %1: f32[4@a, 2]\ninput %2: i8[4@a]\n"
        "%3, %4, %5 = all_gather(%0, %1, %2; dim=0, axes=(a))\noutput %3, %4, %5"
    ),
    "packed, in place": (
        "mesh a=2, b=2\ninput %0: i32[4@b]{+a}\ninput %1: i32[6]{+a}\ninput %2: i64[3]{+a}\n"
        "%3, %4, %5 = all_reduce(%0, %1, %2; axes=(a))\n%6, %7 = to_partial(%3, %4; axes=(a), reduction=root)\n"
        "%8, %9 = broadcast(%6, %7; axes=(a))\noutput %8, %9, %5"
    ),
    "beside another reduction": (
        "mesh a=2, b=2\ninput %0: i32[8@a]{band:b}\n%1 = all_gather(%0; dim=0, axes=(a))\noutput %1"
    ),
    "an order of ranks": (
        "mesh a=4 devices=[2,0,3,1]\ninput %0: i32[8@a]\n%1 = all_gather(%0; dim=0, axes=(a))\noutput %1"
    ),
    "uneven": "mesh a=4\ninput %0: i32[7@a]\n%1 = all_gather(%0; dim=0, axes=(a))\noutput %1",
    "uneven, in a ring": (
        "mesh a=4\ninput %0: i32[7@a]\n%1 = all_gather(%0; dim=0, axes=(a), algorithm=ring)\noutput %1"
    ),
    "even, by doubling": (
        "mesh a=4\ninput %0: i32[8, 2]{+a}\n%1 = reduce_scatter(%0; dim=0, axes=(a), algorithm=doubling)\noutput %1"
    ),
    "of no library": "mesh a=4\ninput %0: u16[8]{+a}\n%1 = all_reduce(%0; axes=(a))\noutput %1",
}


def main() -> None:
    way = sys.argv[1]
    os.environ["SHARDPLAN_NATIVE"] = way
    dist.init_process_group(way)
    rank = dist.get_rank()
    device = torch.device("cuda", rank) if way == "nccl" else torch.device("cpu")
    if way == "nccl":
        torch.cuda.set_device(device)
    told: dict = {}
    for name, text in PROGRAMS.items():
        program = sp.Program.parse("program\n" + text)
        arrays = []
        for k, t in enumerate(program.input_types):
            rng = np.random.default_rng(k)
            whole = rng.integers(0, 50, t.shape).astype(numpy_dtype(t.dtype))
            shards = sp.distribute(whole, t)
            if t.layout.partial:  # every device an addend of its own
                shards = [(x + d).astype(x.dtype) for d, x in enumerate(shards)]
            arrays.append(shards)
        single = len(program.inputs) == 1
        want = sp.run(program, arrays[0] if single else arrays)
        places = [[k for k, d in enumerate(t.mesh.devices) if d == rank] for t in program.input_types]
        mine = [[to_torch(x[k].copy()).to(device) for k in own] for x, own in zip(arrays, places, strict=True)]
        mine = mine[0] if single else mine
        sp.run(program, mine, "torch")
        with Recorder() as seen:
            got = sp.run(program, mine, "torch")
        want, got = ([x] if single else x for x in (want, got))
        right = all(
            np.array_equal(to_numpy(x), y[program.output_types[n].mesh.devices.index(rank)])
            for n, (own, y) in enumerate(zip(got, want, strict=True))
            for x in own
        )
        told[name] = [right, seen.calls]
    gathered: list = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, told)
    if rank == 0:
        print(json.dumps({name: [one[name] for one in gathered] for name in PROGRAMS}))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

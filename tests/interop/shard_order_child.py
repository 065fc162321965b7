"""Run on every rank: orders of sharding (`DTensorSpec.shard_order`) through our drop-in; rank 0 prints a JSON object.

Arguments: how many pairs of each mesh (0 for all), and a seed. The shards are cut by `torch.chunk`, one mesh dim after
the other; the orders are PyTorch's own generator's. What DTensor itself makes of a pair is compared where it can.
"""

import ast
import itertools
import json
import random
import sys
import warnings
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
warnings.filterwarnings("ignore")

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torch.distributed.device_mesh import init_device_mesh  # noqa: E402
from torch.distributed.tensor import DTensor, Replicate, Shard  # noqa: E402
from torch.distributed.tensor._dtensor_spec import DTensorSpec, ShardOrderEntry, TensorMeta  # noqa: E402
from torch.distributed.tensor._redistribute import redistribute_local_tensor  # noqa: E402

from shardplan.interop.torch import redistribute  # noqa: E402

MESHES = {4: ((2, 2),), 6: ((2, 3), (3, 2)), 8: ((2, 2, 2),)}
SHAPES = ((8, 24, 8), (7, 5, 3))  # even and uneven on all of them


def generator():
    """PyTorch's `generate_shard_orders`, read off its source: the module imports what only its own tests need."""
    path = Path(torch.__file__).parent / "testing/_internal/distributed/_tensor/common_dtensor.py"
    names = "generate_shard_orders", "_convert_shard_order_dict_to_ShardOrder"
    found = [n for n in ast.parse(path.read_text()).body if isinstance(n, ast.FunctionDef) and n.name in names]
    here = {"itertools": itertools, "ShardOrderEntry": ShardOrderEntry}
    exec(compile(ast.Module(found, []), str(path), "exec"), here)
    return here["generate_shard_orders"]


def spec_of(full, mesh, order):
    """The spec of `full` in an order of sharding."""
    placements = [Replicate()] * mesh.ndim
    for d, dims in order:
        for k in dims:
            placements[k] = Shard(d)
    meta = TensorMeta(full.shape, full.stride(), full.dtype)
    return DTensorSpec(mesh, tuple(placements), tensor_meta=meta, shard_order=order)


def shard(full, mesh, order):
    """This rank's shard, one chunk after the other; behind the last chunk there is nothing."""
    here = mesh.get_coordinate()
    for d, dims in order:
        for k in dims:
            parts = full.chunk(mesh.size(k), d)
            full = parts[here[k]] if here[k] < len(parts) else full.narrow(d, 0, 0)
    return full.contiguous()


def compare(count, seed):
    """Every order to every order, or `count` random pairs of a mesh; what came out, the same on all ranks."""
    world = dist.get_world_size()
    wrong, kinds = [], Counter()
    for sizes in MESHES[world]:
        mesh = init_device_mesh("cpu", sizes)
        orders = [*dict.fromkeys(generator()(mesh, 3)), ()]
        pairs = [(s, t, shape) for s in orders for t in orders for shape in SHAPES]
        if count:
            random.Random(seed).shuffle(pairs)
        for s, t, shape in pairs[: count or len(pairs)]:
            n = torch.Size(shape).numel()
            full = torch.arange(n, dtype=torch.float32).reshape(shape)
            source, target = spec_of(full, mesh, s), spec_of(full, mesh, t)
            x = DTensor(shard(full, mesh, s), source, requires_grad=True)
            what = f"{sizes} {shape} {s} -> {t}"
            want = shard(full, mesh, t)
            y = redistribute(x, target.placements, shard_order=t)
            if y._spec != target or not torch.equal(y._local_tensor, want):
                wrong.append(f"{what}: {y._spec}")
            kinds["moved"] += 1
            kinds["in another order than the default"] += not DTensorSpec.is_default_device_order(s)
            plain = redistribute(x, target.placements)
            default = DTensorSpec(mesh, target.placements, tensor_meta=target.tensor_meta)
            if target.placements == source.placements:
                default = source  # nothing changes, as DTensor has it
            if plain._spec != default or not torch.equal(plain._local_tensor, shard(full, mesh, default.shard_order)):
                wrong.append(f"{what}, without an order: {plain._spec}")
            y.backward(DTensor(want * 2, target, requires_grad=False))
            # as DTensor's own: its other ops, the accumulation of gradients among them, keep no order
            back = DTensorSpec(mesh, source.placements, tensor_meta=source.tensor_meta)
            if x.grad._spec != back or not torch.equal(x.grad._local_tensor, shard(full, mesh, back.shard_order) * 2):
                wrong.append(f"{what}, gradient: {x.grad._spec}")
            try:
                theirs = redistribute_local_tensor(x._local_tensor.detach(), source, target)
            except Exception as error:
                kinds[f"only ours: {type(error).__name__}"] += 1
                continue
            if not torch.equal(theirs, y._local_tensor):
                # judged by what torch.chunk says
                kinds["theirs is wrong" if torch.equal(y._local_tensor, want) else "differs"] += 1
            kinds["equal to DTensor's"] += torch.equal(theirs, y._local_tensor)
    gathered = [None] * world
    dist.all_gather_object(gathered, wrong)
    lines = [f"rank {r}: {x}" for r, part in enumerate(gathered) for x in part]
    return {"wrong": len(lines), "first": lines[:12], "kinds": kinds, "orders": len(orders) - 1}


def main():
    dist.init_process_group("gloo")
    found = compare(*map(int, sys.argv[1:3]))
    if dist.get_rank() == 0:
        print(json.dumps(found, indent=1))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

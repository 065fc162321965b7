"""Run under torchrun: random DTensor pairs through our drop-in and through DTensor; rank 0 prints one JSON object."""

import json
import math
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
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard  # noqa: E402
from torch.distributed.tensor._dtensor_spec import DTensorSpec  # noqa: E402

from shardplan.interop.torch import redistribute  # noqa: E402
from shardplan.interop.torch_layout import holdings  # noqa: E402

SIZES = {2: ((2,), (1, 2)), 4: ((4,), (2, 2)), 6: ((6,), (3, 2), (2, 3)), 8: ((8,), (4, 2), (2, 4), (2, 2, 2))}
DTYPES = (torch.float32, torch.float64, torch.int64, torch.bfloat16, torch.int8, torch.bool, torch.complex64)


def placements(rng, mesh, ndim, partial, strided):
    out = [rng.choice([Replicate(), *(Shard(d) for d in range(ndim))]) for _ in range(mesh.ndim)]
    if strided and mesh.ndim > 1 and ndim:
        order = list(range(mesh.ndim))
        rng.shuffle(order)
        d = rng.randrange(ndim)
        out = [Shard(d) if rng.random() < 0.8 else Replicate() for _ in range(mesh.ndim)]
        dims = tuple(k for k in order if isinstance(out[k], Shard))
        if dims:
            from torch.distributed.tensor._dtensor_spec import ShardOrderEntry

            out = list(DTensorSpec._convert_shard_order_to_StridedShard((ShardOrderEntry(d, dims),), tuple(out), mesh))
    if partial:
        for k in range(mesh.ndim):
            if rng.random() < 0.4:
                out[k] = Partial(partial)
    return tuple(out)


def local_of(full, mesh, places, rank, addends):
    """The local tensor: the indices that DTensor's own function gives; addends that reduce to `full`."""
    cut = tuple(Replicate() if isinstance(p, Partial) else p for p in places)
    held = holdings(full.shape, cut, mesh)[rank]
    x = full
    for d, runs in enumerate(held.runs):
        index = [i for a, _, n in runs for i in range(a, a + n)]
        x = x.index_select(d, torch.tensor(index, dtype=torch.long))
    coordinate = mesh.get_coordinate()
    here = 0
    for k, p in enumerate(places):
        if isinstance(p, Partial):
            here = here * mesh.size(k) + coordinate[k]
            kind = p.reduce_op
            if kind == "sum":
                x = x if coordinate[k] == 0 else torch.zeros_like(x)
            elif here:
                x = x - here if kind == "max" else x + here
    return x.contiguous()


def compare(seed, count):
    """Random moves through both; what came out, the same on all ranks."""
    rank, world = dist.get_rank(), dist.get_world_size()
    meshes = [
        init_device_mesh("cpu", s, mesh_dim_names=tuple("xyz"[: len(s)]) if k % 2 else None)
        for k, s in enumerate(SIZES[world])
    ]
    rng = random.Random(f"{seed} {world}")
    wrong, kinds = [], Counter()
    for number in range(count):
        mesh, ndim = rng.choice(meshes), rng.randint(0, 3)
        strided, partial = rng.random() < 0.3, rng.choice(("sum", "max", "min", None, None))
        if strided:
            partial = None
        dtype = rng.choice(DTYPES)
        if partial and dtype in (torch.bool, torch.complex64):
            dtype = torch.float32
        even = rng.random() < 0.5
        shape = [mesh.size() * rng.randint(1, 2) if even else rng.randint(1, 9) for _ in range(ndim)]
        source = placements(rng, mesh, ndim, partial, strided)
        target = list(placements(rng, mesh, ndim, None, strided))
        for k in range(mesh.ndim):
            if isinstance(source[k], Partial) and rng.random() < 0.2:
                target[k] = source[k]
        n = math.prod(shape)
        full = (torch.arange(n) % (2 if dtype == torch.bool else 61)).reshape(shape).to(dtype)
        x = DTensor.from_local(
            local_of(full, mesh, source, rank, partial),
            mesh,
            source,
            run_check=False,
            shape=full.shape,
            stride=full.stride(),
        )
        what = f"{number} {tuple(mesh.mesh.shape)} {shape} {dtype} {source} -> {tuple(target)}"
        try:
            theirs, error = x.redistribute(mesh, target), None
        except Exception as e:  # what it cannot do is no comparison
            theirs, error = None, f"{type(e).__name__}: {str(e).splitlines()[0][:120]}"
        failed = [None] * world
        dist.all_gather_object(failed, error)
        error = next((e for e in failed if e), None)
        try:
            ours = redistribute(x, target)
        except Exception as e:
            wrong.append(f"{what}: {type(e).__name__}: {str(e)[:300]}")
            kinds["raised"] += 1
            continue
        if error:
            kinds["only ours: " + error.partition(":")[0]] += 1
            expected = (
                local_of(full, mesh, target, rank, None) if not any(isinstance(p, Partial) for p in target) else None
            )
            if expected is not None and not torch.equal(ours._local_tensor, expected):
                wrong.append(f"{what}: not the indices of the target")
            continue
        kinds["strided" if strided else partial or "plain"] += 1
        a, b = ours._local_tensor, theirs._local_tensor
        if ours._spec != theirs._spec or ours.placements != theirs.placements:
            wrong.append(f"{what}: spec {ours._spec} not {theirs._spec}")
        if ours.shape != theirs.shape or ours.stride() != theirs.stride() or a.dtype != b.dtype:
            wrong.append(f"{what}: shape")
        kinds["theirs a view of a padded buffer"] += not b.is_contiguous()
        # the stride of a dim of one element is left over from that buffer, too
        if a.shape != b.shape or not a.is_contiguous():
            wrong.append(f"{what}: local {tuple(a.shape)} {a.stride()} not {tuple(b.shape)} {b.stride()}")
        elif any(isinstance(p, Partial) for p in target):
            if not torch.equal(redistribute(ours, [Replicate()] * mesh.ndim)._local_tensor, full):
                wrong.append(f"{what}: addends")
        elif not torch.equal(a, b):
            if torch.equal(a, local_of(full, mesh, target, rank, None)):
                kinds["theirs is wrong"] += 1  # elements lost between uneven _StridedShards
                continue
            wrong.append(f"{what}: values\n{a}\n{b}")
    gathered = [None] * world
    dist.all_gather_object(gathered, wrong)
    lines = [f"rank {r}: {x}" for r, part in enumerate(gathered) for x in part]
    return {"pairs": count, "kinds": kinds, "wrong": len(lines), "first": lines[:12]}


def main():
    dist.init_process_group("gloo")
    found = compare(*map(int, sys.argv[1:3]))
    if dist.get_rank() == 0:
        print(json.dumps(found, indent=1))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

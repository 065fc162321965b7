"""Run on every rank: random DTensor pairs through our drop-in and through DTensor; rank 0 prints one JSON object.

Drawn are dims that divide and that do not, plain and strided shards, orders of sharding, and every kind of `Partial`.
Where DTensor's result is not ours, the indices of the target decide; where it refuses, ours is held against them.
"""

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
from torch.distributed.tensor._dtensor_spec import DTensorSpec, ShardOrderEntry, TensorMeta  # noqa: E402
from torch.distributed.tensor._ops._math_ops import _NormPartial  # noqa: E402
from torch.distributed.tensor._redistribute import redistribute_local_tensor  # noqa: E402

from shardplan.interop.torch import redistribute  # noqa: E402
from shardplan.interop.torch.layout import holdings  # noqa: E402

SIZES = {2: ((2,), (1, 2)), 4: ((4,), (2, 2)), 6: ((6,), (3, 2), (2, 3)), 8: ((8,), (4, 2), (2, 4), (2, 2, 2))}
DTYPES = (torch.float32, torch.float64, torch.int64, torch.bfloat16, torch.int8, torch.bool, torch.complex64)


FLOATS = (torch.float32, torch.float64, torch.bfloat16)
NUMBERS = (*FLOATS, torch.int64, torch.int8)
KINDS = {
    "sum": (*NUMBERS, torch.complex64),
    "avg": (*FLOATS, torch.complex64),
    "product": NUMBERS,
    "max": NUMBERS,
    "min": NUMBERS,
    "bor": (torch.int64, torch.int8, torch.bool),
    "bxor": (torch.int64, torch.int8, torch.bool),
    "norm": (torch.float64,),
}


def partial_of(kind):
    return _NormPartial(2) if kind == "norm" else Partial(kind)


def placements(rng, mesh, ndim, partial, strided):
    out = [rng.choice([Replicate(), *(Shard(d) for d in range(ndim))]) for _ in range(mesh.ndim)]
    if strided and mesh.ndim > 1 and ndim:
        order = list(range(mesh.ndim))
        rng.shuffle(order)
        d = rng.randrange(ndim)
        out = [Shard(d) if rng.random() < 0.8 else Replicate() for _ in range(mesh.ndim)]
        dims = tuple(k for k in order if isinstance(out[k], Shard))
        if dims:
            out = list(DTensorSpec._convert_shard_order_to_StridedShard((ShardOrderEntry(d, dims),), tuple(out), mesh))
    if partial:
        for k in range(mesh.ndim):
            if rng.random() < 0.4:
                out[k] = partial_of(partial)
    return tuple(out)


def order_of(rng, places):
    """A random order of sharding; None beside strided shards, which say one themselves."""
    cuts = {}
    for k, p in enumerate(places):
        if type(p) is Shard:
            cuts.setdefault(p.dim, []).append(k)
        elif not isinstance(p, (Replicate, Partial)):
            return None
    return tuple(ShardOrderEntry(d, tuple(rng.sample(dims, len(dims)))) for d, dims in sorted(cuts.items()))


def local_of(full, mesh, places, rank, addends, order=None):
    """The local tensor: the indices that DTensor's own function gives; addends that reduce to `full`."""
    cut = tuple(Replicate() if isinstance(p, Partial) else p for p in places)
    held = holdings(full.shape, cut, mesh, order)[rank]
    x = full
    for d, runs in enumerate(held.runs):
        index = [i for a, _, n in runs for i in range(a, a + n)]
        x = x.index_select(d, torch.tensor(index, dtype=torch.long))
    coordinate = mesh.get_coordinate()
    here = 0
    for k, p in enumerate(places):
        if isinstance(p, Partial):
            here = here * mesh.size(k) + coordinate[k]
            x = addend(x, "norm" if isinstance(p, _NormPartial) else p.reduce_op, coordinate[k], mesh.size(k), here)
    return x.contiguous()


def addend(x, kind, coordinate, count, here):
    """What the rank at a coordinate of one dim adds; `here` counts over all partial dims."""
    match kind:
        case "sum" | "bxor" | "bor" | "norm":
            return x if coordinate == count - 1 or (kind == "bor" and coordinate) else torch.zeros_like(x)
        case "avg":
            return x * count if coordinate == 0 else torch.zeros_like(x)
        case "product":
            return x if coordinate == count - 1 else torch.ones_like(x)
        case "max":
            return x - here
        case _:
            return x + here


def close(a, b, kind):
    """Equal bit for bit; norms and averages up to rounding, which depends on how many dims are reduced at once."""
    return torch.allclose(a, b) if kind in ("norm", "avg") else torch.equal(a, b)


def right(ours, full, mesh, target, order, rank):
    """Whether ours holds the indices of its target; of a partial one, whether its addends make the whole."""
    if any(isinstance(p, Partial) for p in target):
        kind = next("norm" if isinstance(p, _NormPartial) else p.reduce_op for p in target if isinstance(p, Partial))
        return close(redistribute(ours, [Replicate()] * mesh.ndim)._local_tensor, full, kind)
    want = local_of(full, mesh, target, rank, None, order)
    a = ours._local_tensor
    return a.shape == want.shape and (torch.equal(a, want) or (a.is_floating_point() and torch.allclose(a, want)))


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
        strided, partial = rng.random() < 0.3, rng.choice((*KINDS, *(None,) * 6))
        dtype = rng.choice(KINDS.get(partial, DTYPES))
        even = rng.random() < 0.5
        shape = [mesh.size() * rng.randint(1, 2) if even else rng.randint(1, 9) for _ in range(ndim)]
        source = placements(rng, mesh, ndim, partial, strided)
        target = list(placements(rng, mesh, ndim, None, strided))
        for k in range(mesh.ndim):
            if isinstance(source[k], Partial) and rng.random() < 0.2:
                target[k] = source[k]
        n = math.prod(shape)
        full = (torch.arange(n) % (2 if dtype == torch.bool else 13)).reshape(shape).to(dtype)
        meta = TensorMeta(full.shape, full.stride(), dtype)
        orders = [order_of(rng, places) if rng.random() < 0.5 else None for places in (source, target)]
        if orders[1] is None and tuple(target) == tuple(source):
            orders[1] = orders[0]  # nothing changes, as DTensor has it
        before, after = (
            DTensorSpec(mesh, tuple(places), tensor_meta=meta, shard_order=order)
            for places, order in zip((source, target), orders, strict=True)
        )
        x = DTensor(local_of(full, mesh, source, rank, partial, orders[0]), before, requires_grad=False)
        what = f"{number} {tuple(mesh.mesh.shape)} {shape} {dtype} {source} {orders[0]} -> {tuple(target)} {orders[1]}"
        ordered = any(e is not None and not DTensorSpec.is_default_device_order(e) for e in orders)
        try:
            if ordered:  # DTensor.redistribute takes no order
                found = redistribute_local_tensor(x._local_tensor.clone(), before, after)
                theirs = DTensor(found, after, requires_grad=False)
            else:
                theirs = x.redistribute(mesh, target)
            error = None
        except Exception as e:  # what it cannot do is no comparison
            theirs, error = None, f"{type(e).__name__}: {str(e).splitlines()[0][:120]}"
        failed = [None] * world
        dist.all_gather_object(failed, error)
        error = next((e for e in failed if e), None)
        try:
            ours = redistribute(x, target, shard_order=orders[1])
        except Exception as e:
            wrong.append(f"{what}: {type(e).__name__}: {str(e)[:300]}")
            kinds["raised"] += 1
            continue
        if error:
            kinds["only ours: " + error.partition(":")[0]] += 1
            if not right(ours, full, mesh, target, orders[1], rank):
                wrong.append(f"{what}: not the indices of the target")
            continue
        kinds["strided" if strided else partial or "plain"] += 1
        kinds["strided beside partial"] += strided and bool(partial)
        kinds["in another order"] += ordered
        a, b = ours._local_tensor, theirs._local_tensor
        if ours._spec != theirs._spec or ours.placements != theirs.placements:
            wrong.append(f"{what}: spec {ours._spec} not {theirs._spec}")
        if ours.shape != theirs.shape or ours.stride() != theirs.stride() or a.dtype != b.dtype:
            wrong.append(f"{what}: shape")
        kinds["theirs a view of a padded buffer"] += not b.is_contiguous()
        # the stride of a dim of one element is left over from that buffer, too
        if not a.is_contiguous():
            wrong.append(f"{what}: local strides {a.stride()}")
        is_right = right(ours, full, mesh, target, orders[1], rank)
        if any(isinstance(p, Partial) for p in target):
            if not is_right:
                wrong.append(f"{what}: addends")
        elif a.shape != b.shape or not close(a, b, partial):
            if is_right:
                kinds["theirs is wrong"] += 1  # elements lost between uneven _StridedShards, or an order
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

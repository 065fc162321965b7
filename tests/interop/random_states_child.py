"""Run on 4 or 8 ranks: random states through `redistribute_state`, against the full tensors.

Arguments: seed, first, count. Each state is moved twice under a limit that it just meets, or a looser one: once for the
tables that are made once, once with every storage traced. Rank 0 prints one JSON object.
"""

import json
import math
import random
import sys
import warnings
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "tests" / "execution"), str(Path(__file__).parent)]
warnings.filterwarnings("ignore")

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from dtensor_child import local_of, placements  # noqa: E402
from storages import Made  # noqa: E402
from torch import nn  # noqa: E402
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh  # noqa: E402
from torch.distributed.tensor import DTensor, Replicate, Shard  # noqa: E402

from shardplan.errors import Infeasible  # noqa: E402
from shardplan.interop.torch import redistribute_state  # noqa: E402
from shardplan.interop.torch.state.names import leaves, name_of  # noqa: E402

DTYPES = (torch.float32, torch.float64, torch.int64, torch.bfloat16, torch.int8, torch.bool, torch.complex64)
FLOATS = (torch.float32, torch.float64, torch.bfloat16)
TIMEOUT = 120.0


class Meshes:
    """The meshes of a launch: lines, a rectangle with this rank's submeshes, and halves."""

    def __init__(self):
        self.rank, world = dist.get_rank(), dist.get_world_size()
        self.line = init_device_mesh("cpu", (world,))
        self.square = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("dp", "tp"))
        self.dp, self.tp = self.square["dp"], self.square["tp"]
        order = list(range(world))
        random.Random(world).shuffle(order)
        self.mixed = DeviceMesh("cpu", order)
        self.halves = DeviceMesh("cpu", order[: world // 2]), DeviceMesh("cpu", order[world // 2 :])
        self.stage = int(self.rank in order[world // 2 :])
        self.goals = (self.line, self.square, self.mixed, *self.halves)


def full_of(rng, dtype, shape):
    n = math.prod(shape)
    start = rng.randrange(50)
    return ((torch.arange(n) + start) % (2 if dtype == torch.bool else 61)).reshape(shape).to(dtype)


def draw(rng, meshes):
    """One random state as a recipe: [(path, full, mesh, placements, tie)], layouts, goal, options; equal on all ranks.

    A mesh is a function of this rank's meshes; a path may be of one stage only.
    """
    kind = rng.choice(("one mesh", "submeshes", "stages"))
    move = kind == "stages" or rng.random() < 0.5
    goal = rng.choice(meshes.goals) if move else None
    rows = []
    for k in range(rng.randint(2, 7)):
        dtype = rng.choice(DTYPES)
        shape = [rng.choice((1, 5, 8, 12, 16, 23)) for _ in range(rng.randint(1, 3))]
        shape[-1] *= 16
        if kind == "one mesh":
            where, stage = rng.choice(("line", "square", "mixed")), None
        elif kind == "submeshes":
            where, stage = rng.choice(("square", "dp", "tp")), None
        else:
            where, stage = "stage", rng.randrange(2)
        mesh = meshes.halves[stage] if stage is not None else getattr(meshes, where)
        source = placements(rng, mesh, len(shape), None, rng.random() < 0.3)
        end = mesh if goal is None else goal
        target = placements(rng, end, len(shape), None, rng.random() < 0.2)
        if rng.random() < 0.1:
            target = (Replicate(),) * end.ndim
        nest = rng.choice(
            ((f"layers.{k}.weight",), ("state", f"layers.{k}.weight", "exp_avg"), ("groups", f"g{k}", k, "v"))
        )
        rows.append([nest, full_of(rng, dtype, shape), mesh, source, target, stage, rng.random() < 0.5])
    ties = [rng.randrange(len(rows))] if rng.random() < 0.4 else []
    return kind, rows, goal, ties, rng.random() < 0.4, rng.choice((1.0, 1.0, 1.2, 2.0)), rng.random() < 0.5


def build(meshes, rows, ties):
    """This rank's state: nested, with steps and plain tensors in it."""
    state = {"step": 7, "scale": torch.ones(3), "state": {}, "groups": {"lr": (0.1, None)}}
    for k, (path, full, mesh, source, _, _, parameter) in enumerate(rows):
        if mesh.get_coordinate() is None:
            continue
        local = local_of(full, mesh, source, meshes.rank, None).clone()
        x = DTensor.from_local(local, mesh, source, run_check=False, shape=full.shape, stride=full.stride()).detach()
        del local
        if parameter and full.dtype in FLOATS:
            x = nn.Parameter(x)
        holder = state
        for key in path[:-1]:
            holder = holder.setdefault(key, {})
        holder[path[-1]] = x
        if k in ties:
            state[f"tied.{k}"] = x.detach() if k % 2 else x
    return state


def moved(state, rows, ties, goal, limit, donate):
    layouts = {name_of(path): target for path, _, _, _, target, _, _ in rows}
    layouts |= {f"tied.{k}": rows[k][4] for k in ties}
    return redistribute_state(
        state, layouts, goal, limit, donate=donate, timeout=TIMEOUT, group=dist.group.WORLD
    )  # fmt: skip


def least(meshes, rows, ties, goal, donate):
    """The least limit that works; the moves that go alone say theirs before the batch says its."""
    limit = 1
    for _ in range(8):
        try:
            moved(build(meshes, rows, ties), rows, ties, goal, limit, donate)
            return limit
        except Infeasible as error:
            assert error.least_bytes and error.least_bytes > limit, (str(error), limit)
            limit = error.least_bytes
    raise AssertionError(f"no limit is enough, not {limit}")


def traced(state, call):
    """The most bytes in storages at any time of the call, without those of tensors that stay, and what it returned."""
    with Made(*(x._local_tensor for _, x in leaves(state) if isinstance(x, DTensor))) as book:
        sizes = {id(x): x._local_tensor.nbytes for _, x in leaves(state) if isinstance(x, DTensor)}
        out = call(state)
    stayed = {id(x): x for _, x in leaves(out) if isinstance(x, DTensor) and id(x) in sizes}
    storages = {x._local_tensor.untyped_storage()._cdata: sizes[k] for k, x in stayed.items()}
    return book.peak - sum(storages.values()), out


def check(meshes, recipe):
    """What is wrong with one state, or nothing, and the bytes: peak and limit."""
    kind, rows, goal, ties, donate, slack, _ = recipe
    limit = math.ceil(least(meshes, rows, ties, goal, donate) * slack)
    state = build(meshes, rows, ties)
    before = dict(leaves(state))
    kept = {p: x for p, x in before.items() if not isinstance(x, DTensor)}
    order = [p for p in before if p in kept]
    del before
    moved(build(meshes, rows, ties), rows, ties, goal, limit, donate)
    peak, out = traced(state, lambda x: moved(x, rows, ties, goal, limit, donate))
    wrong = []
    found = dict(leaves(out))
    if [p for p in found if p in kept] != order or any(found[p] is not x for p, x in kept.items()):
        wrong.append("what is no DTensor was not passed on")
    for k, (path, full, mesh, _, target, _, _) in enumerate(rows):
        end = mesh if goal is None else goal
        if end.get_coordinate() is None:
            continue
        x = found.get(path)
        if not isinstance(x, DTensor):
            wrong.append(f"{name_of(path)} is missing")
        elif x.device_mesh != end or x.placements != tuple(target) or x.shape != full.shape:
            wrong.append(f"{name_of(path)}: {x._spec}")
        elif not torch.equal(x.to_local(), local_of(full, end, target, meshes.rank, None)):
            wrong.append(f"{name_of(path)}: values")
        if k in ties and isinstance(x, DTensor) and mesh.get_coordinate() is not None:
            if found[f"tied.{k}",]._local_tensor.untyped_storage()._cdata != x._local_tensor.untyped_storage()._cdata:
                wrong.append(f"{name_of(path)} came out untied")
        # DTensor gathers in ascending order of ranks, and an uneven `_StridedShard` not at all
        plain = all(type(p) is Shard or p.is_replicate() for p in target)
        if plain and end.mesh.flatten().diff().gt(0).all() and not torch.equal(x.full_tensor(), full):
            wrong.append(f"{name_of(path)}: full_tensor")
    return kind, wrong, peak, limit


def main():
    dist.init_process_group("gloo")
    seed, first, count = map(int, sys.argv[1:4])
    meshes, world = Meshes(), dist.get_world_size()
    wrong, over, kinds, ratios = [], [], Counter(), []
    for number in range(first, first + count):
        recipe = draw(random.Random(f"{seed} {world} {number}"), meshes)
        kind, bad, peak, limit = check(meshes, recipe)
        kinds[kind] += 1
        for flag, name in zip(
            (recipe[2] is not None, bool(recipe[3]), recipe[4]), ("moved", "tied", "donated"), strict=True
        ):
            kinds[name] += flag
        wrong += [f"{number}: {line}" for line in bad]
        if peak > limit:
            over.append(f"{number}: {peak} over {limit} ({kind}, {recipe[1][0][0]})")
        ratios.append(peak / limit)
    lines = [None] * world
    dist.all_gather_object(lines, (wrong, over, max(ratios, default=0.0)))
    if meshes.rank == 0:
        told = {
            "states": count, "wrong": sum(bool(w) for w, _, _ in lines),
            "over the limit": sum(len(o) for _, o, _ in lines),
            "largest share of the limit": max(r for _, _, r in lines), "kinds": kinds,
            "first": [f"rank {r}: {x}" for r, (w, o, _) in enumerate(lines) for x in (*w, *o)][:10],
        }  # fmt: skip
        print(json.dumps(told), flush=True)
    dist.barrier()
    sys.stdout.flush()
    import os

    os._exit(0)  # the dispatch mode boxes c10d's work objects, which the interpreter may not free at its end


if __name__ == "__main__":
    main()

"""DTensor's two planners as baselines: the greedy one and the min-cost one, at planning level.

Source: `torch.distributed.tensor._redistribute` (checked with torch 2.13.0), driven through
`_gen_transform_infos_non_cached` on the `fake` process group, so nothing is communicated. Each transform changes the
placement on one mesh dim: Shard -> Replicate is an all-gather, Shard(i) -> Shard(j) an all-to-all, Replicate -> Shard
is local.

Caveats. The cached `_gen_transform_infos` is keyed on the specs only and would replay the other planner's plan, so it
is not used, and the planner objects are dropped before each timing. Dims sharded over axes out of mesh order need a
`shard_order`; torch then always takes the min-cost planner, so `greedy` answers None ("not representable"). An
all-to-all is counted as one, although CPU meshes run it as all-gather and chunk. Uneven gathers are counted without
DTensor's padding. No flattened meshes exist, so consecutive gathers stay separate, as they do for a user who made
none.

The min-cost planner minimises modelled microseconds with several of latency an op: on arrays of kilobytes it gathers
and slices rather than send two all-to-alls, on arrays of megabytes it saves bytes. `scale` lets it plan for a larger
array, so that small problems are not held against it: from scale 64 to 256 its bytes fell by about 1 % (8 devices,
dims 8 to 32). The model takes each CPU device for a host of its own, which makes all links equal.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import time
from typing import TYPE_CHECKING, Literal

from benchmarks.peers.problem import Factor, Moves, Problem, Step, replay

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor._dtensor_spec import DTensorSpec

__all__ = ["Transform", "in_mesh_order", "plan", "steps_of_transforms", "versions"]

Planner = Literal["greedy", "min-cost"]
Transform = tuple[str, int | None, int | None]
"""The mesh axis, and the tensor dim it shards before and after (None: replicated)."""

_DTYPES = {1: "uint8", 2: "bfloat16", 4: "float32", 8: "float64"}


def plan(problem: Problem, planner: Planner, scale: int = 1) -> Moves | None:
    """The plan that a planner of DTensor makes; None where that planner cannot represent the problem.

    The planner is shown dims `scale` times as long (see the caveats); its plan is counted on `problem` itself.
    Starts (and, for another number of devices, restarts) this process's default process group as a `fake` one; raises
    RuntimeError when the process already has a real one.
    """
    if planner == "greedy" and not (in_mesh_order(problem, problem.src) and in_mesh_order(problem, problem.dst)):
        return None
    try:
        shown = dataclasses.replace(problem, shape=tuple(scale * n for n in problem.shape))
        transforms, seconds = _transforms(shown, planner)
    except (AssertionError, ValueError, NotImplementedError) as failure:  # a planner's failure is data here
        return Moves.failed(f"{type(failure).__name__}: {failure}")
    try:
        return replay(problem, steps_of_transforms(problem, transforms), seconds)
    except ValueError as failure:
        return Moves.failed(str(failure), seconds)


def in_mesh_order(problem: Problem, layout: tuple[tuple[str, ...], ...]) -> bool:
    """Whether every dim names its axes in mesh order: what placements without a `shard_order` can say."""
    order = [name for name, _ in problem.mesh]
    return all(list(axes) == sorted(axes, key=order.index) for axes in layout)


def steps_of_transforms(problem: Problem, transforms: list[Transform]) -> list[Step]:
    """The transforms as steps; ValueError when one removes an axis that is not the minor one of its dim."""
    sizes = dict(problem.mesh)
    layout = [list(axes) for axes in problem.src]
    steps = []
    for axis, before, after in transforms:
        if before is not None and (not layout[before] or layout[before].pop() != axis):
            raise ValueError(f"takes axis {axis!r} from dim {before}, of which it is not the minor axis")
        if after is not None:
            layout[after].append(axis)
        cuts = tuple(tuple(Factor(name, 1, sizes[name]) for name in axes) for axes in layout)
        q = sizes[axis]
        if before is None:
            steps.append(Step("slice", q, cuts, f"slice q={q} dim={after}"))
        elif after is None:
            steps.append(Step("all-gather", q, cuts, f"all-gather q={q} dim={before}"))
        else:
            steps.append(Step("all-to-all", q, cuts, f"all-to-all q={q} dim={before}->{after}"))
    return steps


def versions() -> dict[str, str]:
    """The versions of the packages this baseline rests on."""
    return {"torch": importlib.metadata.version("torch")}


def _transforms(problem: Problem, planner: Planner) -> tuple[list[Transform], float]:
    """The transforms of a planner, and the seconds it took (specs and mesh are made before)."""
    from torch.distributed.tensor import Shard
    from torch.distributed.tensor import _redistribute as redistribute

    mesh = _device_mesh(problem)
    source, target = _spec(problem, problem.src, mesh), _spec(problem, problem.dst, mesh)
    redistribute.clear_redistribute_planner_cache()
    started = time.perf_counter()
    with redistribute.use_min_cost_redistribution_plan(planner == "min-cost"):
        infos = redistribute._gen_transform_infos_non_cached(source, target)
    seconds = time.perf_counter() - started
    transforms: list[Transform] = []
    for info in infos:
        before, after = (p.dim if isinstance(p, Shard) else None for p in info.src_dst_placements)
        transforms.append((problem.mesh[info.mesh_dim][0], before, after))
    return transforms, seconds


def _spec(problem: Problem, layout: tuple[tuple[str, ...], ...], mesh: DeviceMesh) -> DTensorSpec:
    import torch
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor._dtensor_spec import DTensorSpec, ShardOrderEntry, TensorMeta

    order = [name for name, _ in problem.mesh]
    where = {axis: dim for dim, axes in enumerate(layout) for axis in axes}
    meta = torch.empty(problem.shape, dtype=getattr(torch, _DTYPES[problem.itemsize]), device="meta")
    return DTensorSpec(
        mesh=mesh,
        placements=tuple(Shard(where[name]) if name in where else Replicate() for name in order),
        tensor_meta=TensorMeta(meta.shape, meta.stride(), meta.dtype),
        shard_order=tuple(
            ShardOrderEntry(dim, tuple(order.index(axis) for axis in axes)) for dim, axes in enumerate(layout) if axes
        ),
    )


def _device_mesh(problem: Problem) -> DeviceMesh:
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import DeviceMesh
    from torch.testing._internal.distributed.fake_pg import FakeStore

    count = problem.devices
    if dist.is_initialized() and dist.get_backend() != "fake":
        raise RuntimeError(f"planning needs the fake process group; this process has {dist.get_backend()!r}")
    if dist.is_initialized() and dist.get_world_size() != count:
        dist.destroy_process_group()
    if not dist.is_initialized():
        dist.init_process_group("fake", rank=0, world_size=count, store=FakeStore())
    devices = torch.arange(count).reshape([size for _, size in problem.mesh])
    return DeviceMesh("cpu", devices, mesh_dim_names=tuple(name for name, _ in problem.mesh))

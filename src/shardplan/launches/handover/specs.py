"""How a checkpoint's tensors are cut by a plan, for torch (a mesh, `parallelize_module`, `fully_shard`) and for JAX.

A tensor's cut is read off the strategy's own tables (`Strategy.layouts`), and written for the dims that the checkpoint
has: the axes of the first of the factors of such a dim, then of the next where the first is cut to single ones.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from shardplan.launches.fixes import strided_text
from shardplan.launches.handover.handed_plan import HandedPlan, WrittenFiles, comment_lines
from shardplan.strategy.model import Model
from shardplan.strategy.parameter import Parameter
from shardplan.strategy.partition.tables import Axes
from shardplan.strategy.strategy import Strategy

Spec = tuple[Axes, ...]  # by dim of a tensor of the checkpoint the axes that cut it, major to minor
HEADS = frozenset(("tensor", "expert_tensor", "group", "expert_group"))


class TensorCut(NamedTuple):
    """How the tensors of one name in a checkpoint lie between steps, and where they are operands."""

    stored: Spec
    held: Spec


def tensor_cuts(model: Model, strategy: Strategy) -> tuple[dict[str, TensorCut], tuple[str, ...]]:
    """Return the cuts by name in the checkpoint, and names of which the checkpoint's dims cannot say one."""
    mesh, layouts = strategy.mesh(model), strategy.layouts(model)
    found: dict[str, TensorCut] = {}
    odd: dict[str, None] = {}
    for name, p in model.parameters.items():
        dims = model.dims[name]
        held = layouts.held_layout(name, dims, mesh)
        stored = layouts.stored_type(name, dims, model.program.types[name], mesh, held)
        both = tuple(_spec(p, dims, cut.dims, strategy.axes(model)) for cut in (stored.layout, held))
        if both[0] is None or both[1] is None or (p.part is not None and any((*both[0], *both[1]))):
            odd[p.file] = None
        else:
            found[p.file] = TensorCut(both[0], both[1])
    return found, tuple(odd)


def _spec(p: Parameter, dims: tuple[str, ...], cuts: tuple[Axes, ...], sizes: dict[str, int]) -> Spec | None:
    """A layout of our dims on the checkpoint's; None where it cannot be said there."""
    by_dim, out = dict(zip(dims, cuts, strict=True)), list[Axes]()
    said = 0
    for factors in p.factors:
        axes: Axes = ()
        for k, (factor, _) in enumerate(factors):
            mine = by_dim.get(factor, ())
            whole = all(n == math.prod(sizes[a] for a in by_dim.get(f, ())) for f, n in factors[:k])
            if mine and not whole:
                return None
            axes += mine
        said += len(axes)
        out.append(axes)
    return tuple(out) if said == sum(len(by_dim[d]) for d in dims if f"{{{d}}}" not in p.file) else None


def _array_text(ids: np.ndarray, arange: str, permute: str, literal: str) -> str:
    plain = f"{arange}({ids.size}).reshape({', '.join(map(str, ids.shape))})"
    if np.array_equal(ids.reshape(-1), np.arange(ids.size)):
        return plain
    return strided_text(ids, arange, permute) or f"{literal}({ids.tolist()})"


def write_jax(plan: HandedPlan) -> WrittenFiles:
    """Return `jax/` of a plan: `specs.py`, with `make_mesh()` and PartitionSpecs by parameter name.

    >>> from shardplan.hardware.topology import Topology
    >>> box = Topology.load("dgx-a100", nodes=1)
    >>> plan = HandedPlan("", "llama3-8b", {}, box, Strategy(data=2, tensor=4, global_batch=8))
    >>> [line for line in write_jax(plan).files["specs.py"].splitlines() if "gate_proj" in line]
    ['    "model.layers.{layer}.mlp.gate_proj.weight": P("tensor", None),']
    """
    model, s = plan.model, plan.strategy
    axes = {"pipeline": s.pipeline} if s.pipeline > 1 else dict[str, int]()
    axes |= s.axes(model) or {"data": 1}
    cuts, odd = tensor_cuts(model, s)
    lines = [f"{name} is cut otherwise than its dims say" for name in odd]
    if s.pipeline > 1:
        lines.append(f"pipeline={s.pipeline}: each stage is a program on its own part of the mesh")
    if s.recompute != "none":
        lines.append(f"recompute={s.recompute} is jax.checkpoint around {_layers(s)}, its policy the user's")
    if s.zero in (1, 2) and not s.fsdp:
        lines.append(f"zero={s.zero}: lay the optimizer's state by STATE; gradients follow where XLA finds it cheaper")
    held = {name: cut.held for name, cut in cuts.items()}
    stored = {name: cut.stored for name, cut in cuts.items()}
    grid = _array_text(plan.device_mesh().reshape(tuple(axes.values())), "np.arange", "transpose", "np.array")
    tables = {"PARAMETERS": stored}
    if stored != held:
        tables["HELD"] = held
    if s.zero in (1, 2) and not s.fsdp:
        tables["STATE"] = {n: c.stored for n, c in tensor_cuts(model, replace(s, zero=3))[0].items()}
    batch = tuple(a for a in ("replica", "data", "expert") if a in axes)
    sequence = tuple(a for a in ("context", "expert_context") if a in axes)
    text = (
        f'"""{plan.title}: `make_mesh()`, and PartitionSpecs by name in the checkpoint."""\n\n'
        f"{comment_lines(tuple(lines))}import jax\nimport numpy as np\nfrom jax.sharding import Mesh\n"
        f"from jax.sharding import PartitionSpec as P\n\nAXES = {axes!r}\n"
        f"BATCH = {_spec_text((batch, sequence))}  # of tokens and targets\n"
    )
    for title, table in tables.items():
        rows = "".join(f'    "{name}": {_spec_text(spec)},\n' for name, spec in table.items())
        text += f"{title} = {{\n{rows}}}\n"
    text += (
        "\n\ndef make_mesh(devices=None):\n"
        f"    devices = np.array(jax.devices() if devices is None else devices)\n"
        f"    return Mesh(devices[{grid}], tuple(AXES))\n"
    )
    return WrittenFiles("jax", {"specs.py": text}, tuple(lines), s)


def _layers(s: Strategy) -> str:
    """Which layers are computed again."""
    return "a layer" if s.recompute_layers is None else f"each of the first {s.recompute_layers} layers"


def _spec_text(spec: Spec) -> str:
    words = ("None" if not a else f'"{a[0]}"' if len(a) == 1 else f"({', '.join(f'{x!r}' for x in a)})" for a in spec)
    return f"P({', '.join(words)})".replace("'", '"')


def write_torch(plan: HandedPlan) -> WrittenFiles:
    """Return `torch/` of a plan: `plan.py`, with `make_mesh(device)` and `apply_plan(module, mesh)`.

    Modules are called as in the checkpoint of the model; a linear module's weight is `[out, in]`.
    """
    model, s, lines = plan.model, plan.strategy, list[str]()
    cuts, odd = tensor_cuts(model, s)
    lines += [f"{name} is cut otherwise than its dims say" for name in odd]
    if s.data > 1 and not s.fsdp:
        near = 3 if s.zero == 3 else 2
        lines.append(f"zero={s.zero} without fsdp; fully_shard runs it as fsdp=true zero={near}")
        s = replace(s, fsdp=True, zero=near)
    for name, how in (("pipeline", "a stage of torch.distributed.pipelining each"),
                      ("context", "torch.distributed.tensor.experimental.context_parallel around the step"),
                      ("expert", "experts are the module's own")):  # fmt: skip
        if getattr(s, name) > 1:
            lines.append(f"{name}={getattr(s, name)}: {how}; the mesh has the axis")
    if s.sequence_parallel and s.tensor > 1:
        lines.append("sequence_parallel: norms and residuals are whole over tensor, which costs memory and no bytes")
    if s.recompute != "none":
        lines.append(f"recompute={s.recompute}: torch.utils.checkpoint around {_layers(s)} is the module's own")
    kinds = {name.removesuffix(".weight").replace("{layer}", "*"): kind
             for name, cut in cuts.items() if (kind := _kind(name, cut.held))}  # fmt: skip
    group = s.shard or s.data
    grid = _array_text(plan.device_mesh(), "torch.arange", "permute", "torch.tensor")
    if group < s.data:
        grid += f".reshape({s.pipeline}, {s.data // group}, {group}, {s.context}, {s.tensor})"
    axes = ("pipeline", *(("replica",) if group < s.data else ()), "data", "context", "tensor")
    rows = "".join(f'    "{name}": {kind},\n' for name, kind in kinds.items())
    text = _TORCH.format(
        title=plan.title, lines=comment_lines(tuple(lines)), rows=rows, grid=grid, axes=axes, tensor=s.tensor,
        shards=s.data * s.context > 1, again=not (s.fsdp and s.zero == 2), half=s.precision in ("bf16", "fp16"),
        dtype={"fp16": "torch.float16"}.get(s.precision or "", "torch.bfloat16"), reduce=_DTYPES[s.sum_dtype or "f32"],
    )  # fmt: skip
    return WrittenFiles("torch", {"plan.py": text}, tuple(lines), s)


def _kind(name: str, held: Spec) -> str:
    """How `parallelize_module` lays a module of two dims, `[out, in]`, that the tensor axes cut; else empty."""
    cut = [bool({*axes} & HEADS) for axes in held]
    if len(held) != 2 or "{experts}" in name or not any(cut):
        return ""
    if "embed" in name or "wte" in name:
        return "RowwiseParallel(input_layouts=Replicate())"
    if "lm_head" in name:
        return "ColwiseParallel(output_layouts=Replicate())"
    return "ColwiseParallel()" if cut[0] else "RowwiseParallel()"


_DTYPES = {"f16": "torch.float16", "bf16": "torch.bfloat16", "f32": "torch.float32", "f64": "torch.float64"}
_TORCH = '''"""{title}: `make_mesh(device)`, and `apply_plan(module, mesh)` of a module called as the checkpoint is."""

{lines}import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

AXES = {axes!r}
TENSOR = {{
{rows}}}


def make_mesh(device="cuda"):
    return DeviceMesh(device, {grid}, mesh_dim_names=AXES)


def apply_plan(module, mesh, layers="model.layers", dtype={dtype} if {half} else None):
    if {tensor} > 1:
        parallelize_module(module, mesh["tensor"], TENSOR)
    if {shards}:
        axes = [a for a in ("data", "context") if mesh[a].size() > 1]
        inner = mesh[axes[0]] if len(axes) == 1 else mesh[tuple(axes)]._flatten("shard")
        over = mesh["replica", axes[0]] if "replica" in AXES else inner
        policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype={reduce} if dtype else None)
        for layer in module.get_submodule(layers):
            fully_shard(layer, mesh=over, reshard_after_forward={again}, mp_policy=policy)
        fully_shard(module, mesh=over, mp_policy=policy)
    return module
'''

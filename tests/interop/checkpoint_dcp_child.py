"""Run in two processes on gloo: a folder of torch.distributed.checkpoint, saved or loaded by torch itself.

    checkpoint_dcp_child.py RANK STORE save|megatron|load FOLDER

`save` writes the checkpoint of the cases as DTensors, `load` reads one into DTensors and compares. `megatron` saves the
tensors of a torch_dist folder, with an optimizer's state, a module of FSDP2 with its own optimizer's, and what is no
tensor beside them.
"""

import os
import sys
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from interop.checkpoint_cases import CONFIG, whole
from movement.weights_more import torch_dist

WORLD = 2


def placed(name: str, array: Any, other: bool) -> list[Any]:
    """Rows on both, columns where a product is cut there, and vectors whole; or the other way round."""
    if array.ndim < 2:
        return [Shard(0) if other else Replicate()]
    return [Shard(int(other != ("o_proj" in name or "down_proj" in name)))]


def fully_sharded() -> dict[str, Any]:
    """The state of a module under FSDP2 and of its optimizer, after a step; uneven rows."""
    module = torch.nn.Sequential(torch.nn.Linear(6, 7), torch.nn.LayerNorm(7))
    fully_shard(module)
    optimizer = torch.optim.AdamW(module.parameters())
    module(torch.ones(2, 6)).sum().backward()
    optimizer.step()
    model, moments = get_state_dict(module, optimizer)
    return {"model": model, "moments": moments}


def main(rank: int, store: str, kind: str, folder: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=WORLD)
    mesh = init_device_mesh("cpu", (WORLD,))
    named = torch_dist(CONFIG, whole(), tensor=2, divisible=4)[0] if kind == "megatron" else whole()
    full = {name: torch.from_numpy(array.copy()) for name, array in named.items()}
    cut = {name: distribute_tensor(x, mesh, placed(name, x, kind == "load")) for name, x in full.items()}
    if kind == "load":
        into: dict[str, Any] = {
            name: DTensor.from_local(
                torch.full_like(x.to_local(), -1), mesh, x.placements, shape=x.shape, stride=x.stride()
            )
            for name, x in cut.items()
        }
        dcp.load(into, checkpoint_id=folder)
        wrong = [name for name, x in into.items() if not torch.equal(x.to_local(), cut[name].to_local())]
        if wrong:
            raise SystemExit(f"rank {rank} loaded others: {wrong}")
    else:
        state: dict[str, Any] = dict(cut)
        if kind == "megatron":
            state["decoder.layers.0.self_attention.linear_qkv._extra_state"] = {"bytes": b"none"}
            moments = {f"optimizer.state.exp_avg.{n}": distribute_tensor(x.double(), mesh, [Shard(0)])
                       for n, x in full.items()}  # fmt: skip
            state |= moments
            state["optimizer.fsdp2"] = fully_sharded()
        dcp.save(state, checkpoint_id=folder)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), *sys.argv[2:])
    os._exit(0)

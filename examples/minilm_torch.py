"""The move of examples/minilm.py on real processes: DTensors in, DTensors out, beside DTensor's own redistribute.

    torchrun --nproc-per-node 8 examples/minilm_torch.py [--limit "60 MB"]

Every rank holds the trainer's shards of all-MiniLM-L6-v2 (FSDP over tensor parallelism, 4 x 2), moves them to the
server's layout (tensor parallelism over 2, 4 replicas) with `redistribute_state` as one plan under a memory limit, then
tensor by tensor with DTensor, and compares both with the checkpoint bit for bit.
"""

from __future__ import annotations

import argparse
import logging
import sys
import time
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

sys.path.insert(0, str(Path(__file__).parent))
from minilm import COLUMNS, ROWS, find_checkpoint

from shardplan.hardware.units import format_bytes, format_seconds, parse_bytes
from shardplan.interop import safetensors
from shardplan.interop.torch import redistribute_state


def trainer(name: str) -> list[Shard]:
    """FSDP over the first dim; tensor parallelism over the output dim, or, of row-parallel weights, the input dim."""
    return [Shard(0), Shard(1) if name.endswith(ROWS) else Shard(0)]


def server(name: str) -> list[Shard | Replicate]:
    """Tensor parallel x replicas."""
    if any(part in f".{name}" for part in COLUMNS):
        return [Replicate(), Shard(0)]
    return [Replicate(), Shard(1)] if name.endswith(ROWS) else [Replicate(), Replicate()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--limit", default="60 MB", help="workspace of a device (default: %(default)s)")
    limit = int(parse_bytes(parser.parse_args().limit))
    warnings.filterwarnings("ignore")
    logging.getLogger("torch.distributed.tensor").setLevel(logging.ERROR)
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size() // 2, 2), mesh_dim_names=("data", "tensor"))
    with safetensors.open(find_checkpoint()) as checkpoint:
        whole = {name: torch.from_numpy(checkpoint.read(name).copy()) for name in checkpoint.names}
    whole = {name: x for name, x in whole.items() if x.ndim}
    state = {name: cut(x, mesh, trainer(name)) for name, x in whole.items()}
    layouts = {name: server(name) for name in whole}

    dist.barrier()
    started = time.perf_counter()
    moved = redistribute_state(state, layouts, memory_limit=limit)  # plans too
    first = time.perf_counter() - started
    dist.barrier()
    started = time.perf_counter()
    moved = redistribute_state(state, layouts, memory_limit=limit)
    ours = time.perf_counter() - started
    dist.barrier()
    started = time.perf_counter()
    theirs = {name: x.redistribute(mesh, layouts[name]) for name, x in state.items()}
    dtensors = time.perf_counter() - started

    for name, x in whole.items():
        want = cut(x, mesh, layouts[name]).to_local()
        for who, got in (("shardplan", moved[name]), ("DTensor", theirs[name])):
            if not torch.equal(got.to_local(), want) or got.placements != tuple(layouts[name]):
                sys.exit(f"rank {dist.get_rank()}: {name} from {who} is not the checkpoint's")
    if dist.get_rank() == 0:
        total = sum(x.nbytes for x in whole.values())
        print(f"{len(whole)} tensors, {format_bytes(total)}, on {mesh.size()} processes: every shard bit for bit")
        print(f"shardplan  one plan within {format_bytes(limit)} a device: {format_seconds(ours)}")
        print(f"           the first time, planned and compared among ranks: {format_seconds(first)}")
        print(f"DTensor    tensor by tensor: {format_seconds(dtensors)}, {dtensors / ours:.2f}x (one run each)")
    dist.destroy_process_group()


def cut(x: torch.Tensor, mesh: object, placements: list[Shard] | list[Shard | Replicate]) -> DTensor:
    """The shard of this rank, cut without communication."""
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(x, mesh, placements, src_data_rank=None)


if __name__ == "__main__":
    main()

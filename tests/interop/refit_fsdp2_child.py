"""Three ranks of FSDP2 train a module that a fourth serves: what arrives beside a refit of the whole checkpoint."""

import os

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import shardplan as sp
from shardplan.interop.torch.refit.handle import Refit
from shardplan.movement.weights.weights import Weights

DATA = 3  # no size below divides by it: shards are uneven, and one is empty
CONFIG = {
    "hidden_size": 16, "intermediate_size": 20, "num_attention_heads": 4, "num_key_value_heads": 2,
    "num_hidden_layers": 2, "vocab_size": 70, "tie_word_embeddings": False,
}  # fmt: skip
DISK = Weights.load("hf-llama", CONFIG, dtype="f32")
TRAINER = Weights.load("fsdp2-llama", CONFIG, data=DATA, dtype="f32")
SERVER = Weights.load("vllm-llama", CONFIG, devices=[DATA], dtype="bf16")


def whole(step: int) -> dict[str, np.ndarray]:
    """The checkpoint after some steps, of which each adds 1 to every element."""
    rng = np.random.default_rng(0)
    return {n: rng.normal(size=shape).astype(np.float32) + step for n, shape, _ in DISK.parameters(0)}


def trained() -> torch.nn.Module:
    """The module of the trainer, every layer and the rest sharded by FSDP2, from the same checkpoint on all ranks."""
    root = torch.nn.Module()
    for name, value in whole(0).items():
        *path, last = name.split(".")
        at = root
        for part in path:
            if part not in at._modules:
                at.add_module(part, torch.nn.Module())
            at = at._modules[part]
        at.register_parameter(last, torch.nn.Parameter(torch.from_numpy(value)))
    mesh = init_device_mesh("cpu", (DATA,))
    for layer in root.model.layers.children():
        fully_shard(layer, mesh=mesh)
    return fully_shard(root, mesh=mesh)


def main(rank: int, store: dist.Store) -> None:
    """Train and serve."""
    plan = sp.refit(TRAINER, SERVER, memory_limit=3_000)
    if rank < DATA:
        dist.init_process_group("gloo", store=dist.PrefixStore("train", store), rank=rank, world_size=DATA)
        model = trained()
        with Refit(plan, model, rank=rank, store=store, timeout=30) as sync:
            for _ in range(3):
                sync()
                with torch.no_grad():
                    for p in model.parameters():
                        p.add_(1)
        dist.destroy_process_group()
        return
    served = {name: torch.zeros(shape, dtype=torch.bfloat16) for name, shape, _ in SERVER.parameters(rank)}
    with Refit(plan, served, rank=rank, store=store, timeout=30) as sync:
        for step in range(3):
            assert sync() == step + 1
            want = sp.refit(DISK, SERVER).apply({0: whole(step)})[rank]
            for name, x in served.items():
                assert x.view(torch.uint16).numpy().tobytes() == want[name].tobytes(), (step, name)


if __name__ == "__main__":
    me = int(os.environ["RANK"])
    main(me, dist.TCPStore("127.0.0.1", int(os.environ["MASTER_PORT"]), None, me == 0, wait_for_workers=False))

"""A trainer's weights to a server at every step, beside three other ways, on 8 processes over gloo.

`python -m benchmarks.weights_live [--count 100]` launches 8 processes. Ranks 0 to 3 hold a Llama in f32 under FSDP2
over tensor parallelism (2 x 2); ranks 4 to 7 hold it in bf16 as vLLM stores it, tensor parallel over 4. A call brings
the first to the second; every way is called once a repetition, in turn, `--count` times, and the time of a call is that
of the slowest rank. Ways:

- `refit`: the prepared handle of `shardplan.interop.torch.Refit`, within 4 MB of staging a rank;
- `full_tensor`: every parameter gathered by DTensor's own `full_tensor()`, cast, and each server's slice sent by one
  trainer;
- `broadcast`: every parameter gathered, cast, and broadcast whole from rank 0 to all servers, which cut their slice;
- `checkpoint`: torch.distributed.checkpoint, cast and saved by the trainers into memory (a folder of /dev/shm), and
  loaded by the servers as DTensors of their slices where one parameter is one tensor, as whole tensors where it is not.

Every way must leave the same bits on the servers. Memory is the peak of live storages that a call makes, parameters
left out, of the worst rank; of the handle, whose calls make none, its staging.
"""

from __future__ import annotations

import os
import shutil
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.common import ROOT, arguments, record, table, use_tests, write
from benchmarks.processes import be_rank, launch, of_all_ranks

CONFIG: dict[str, Any] = {
    "hidden_size": 512, "intermediate_size": 1408, "num_attention_heads": 8, "num_key_value_heads": 4,
    "num_hidden_layers": 4, "vocab_size": 8192, "tie_word_embeddings": False,
}  # fmt: skip
TRAINERS, SERVERS = (0, 1, 2, 3), (4, 5, 6, 7)
LIMIT = 4_000_000
WAYS = ("refit", "full_tensor", "broadcast", "checkpoint")


def whole_shapes() -> dict[str, tuple[int, ...]]:
    """Every parameter as transformers names it."""
    c = CONFIG
    e, f, v = c["hidden_size"], c["intermediate_size"], c["vocab_size"]
    d = e // c["num_attention_heads"]
    kv = c["num_key_value_heads"] * d
    out: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (v, e), "lm_head.weight": (v, e)}
    out["model.norm.weight"] = (e,)
    for k in range(c["num_hidden_layers"]):
        p = f"model.layers.{k}."
        out |= {p + "input_layernorm.weight": (e,), p + "post_attention_layernorm.weight": (e,)}
        out |= {p + f"self_attn.{n}_proj.weight": (r, e) for n, r in (("q", e), ("k", kv), ("v", kv), ("o", e))}
        out |= {
            p + "mlp.gate_proj.weight": (f, e),
            p + "mlp.up_proj.weight": (f, e),
            p + "mlp.down_proj.weight": (e, f),
        }
    return out


def trainer(torch: Any, mesh: Any) -> Any:
    """A module with these parameters: tensor parallel as transformers plans it, then FSDP2."""
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    root = torch.nn.Module()
    for name, shape in whole_shapes().items():
        *path, last = name.split(".")
        module = root
        for part in path:
            if part not in module._modules:
                module.add_module(part, torch.nn.Module())
            module = module._modules[part]
        generator = torch.Generator().manual_seed(sum(map(ord, name)))
        full = torch.randn(shape, generator=generator)
        cut = Shard(1) if name.endswith(("o_proj.weight", "down_proj.weight")) else Shard(0)
        placed = distribute_tensor(full, mesh["tensor"], [Replicate() if len(shape) == 1 else cut])
        module.register_parameter(last, torch.nn.Parameter(placed))
    fully_shard(root, mesh=mesh["data"])
    return root


def cut(torch: Any, name: str, full: Any, t: int) -> tuple[str, Any, Any]:
    """A server's slice of a whole tensor as vLLM's loaders cut it: its parameter, the rows of it, and the slice."""
    p = len(SERVERS)
    if "norm" in name:
        return name, slice(None), full
    if name.endswith(("o_proj.weight", "down_proj.weight")):
        n = full.shape[1] // p
        return name, slice(None), full[:, t * n : (t + 1) * n]
    n = full.shape[0] // p
    mine = full[t * n : (t + 1) * n]
    shapes = whole_shapes()
    for group, joined in ((("q_proj", "k_proj", "v_proj"), "qkv_proj"), (("gate_proj", "up_proj"), "gate_up_proj")):
        for k, part in enumerate(group):
            if part in name:
                before = sum(shapes[name.replace(part, other)][0] // p for other in group[:k])
                return name.replace(part, joined), slice(before, before + n), mine
    return name, slice(None), mine


class Ways:
    """Every way, on one rank."""

    def __init__(self, torch: Any, rank: int) -> None:
        """Make both sides, the handle, and the groups that the peers use."""
        import torch.distributed as dist
        from torch.distributed.device_mesh import DeviceMesh

        from shardplan.interop.torch import Refit
        from shardplan.movement.weights.refit import refit
        from shardplan.movement.weights.weights import Weights

        self.torch, self.dist, self.rank = torch, dist, rank
        a = Weights.load("fsdp2-llama", CONFIG, data=2, tensor=2, dtype="f32")
        b = Weights.load("vllm-llama", CONFIG, tensor=4, devices=SERVERS, dtype="bf16")
        mesh = DeviceMesh("cpu", torch.arange(4).view(2, 2), mesh_dim_names=("data", "tensor"))
        self.cast = dist.new_group([0, *SERVERS])
        self.sides = [dist.new_group(list(r)) for r in (TRAINERS, SERVERS)]
        self.server_mesh = DeviceMesh("cpu", torch.tensor(SERVERS), mesh_dim_names=("tensor",))
        self.trains = rank in TRAINERS
        self.model: Any = None
        self.held: dict[str, Any] = {}
        if self.trains:
            self.model = trainer(torch, mesh)
            self.held = dict(self.model.named_parameters())
        else:
            for name, shape, _ in b.parameters(rank):
                self.held[name] = torch.zeros(shape, dtype=torch.bfloat16)
        started = time.perf_counter()
        plan = refit(a, b, memory_limit=LIMIT)
        self.planning = time.perf_counter() - started
        self.sync = Refit(plan, self.model if self.trains else self.held)
        self.preparing = time.perf_counter() - started
        self.folder = Path("/dev/shm") / f"shardplan-live-{os.environ['MASTER_PORT']}"

    def refit(self) -> None:
        """Ours."""
        self.sync()

    def full_tensor(self) -> None:
        """Gather each, cast, and send each server its slice from the trainer beside it."""
        torch, dist = self.torch, self.dist
        for name, shape in whole_shapes().items():
            if self.trains:
                full = self.held[name].full_tensor().to(torch.bfloat16)
                dist.send(cut(torch, name, full, self.rank)[2].contiguous(), self.rank + len(TRAINERS))
            else:
                t = self.rank - len(TRAINERS)
                into, rows, like = cut(torch, name, torch.empty(shape, dtype=torch.bfloat16, device="meta"), t)
                came = torch.empty(like.shape, dtype=torch.bfloat16)
                dist.recv(came, t)
                self.held[into][rows].copy_(came)

    def broadcast(self) -> None:
        """Gather each, cast, broadcast the whole; servers cut."""
        torch, dist = self.torch, self.dist
        for name, shape in whole_shapes().items():
            if self.trains:
                full = self.held[name].full_tensor().to(torch.bfloat16)
            else:
                full = torch.empty(shape, dtype=torch.bfloat16)
            if self.rank == 0 or not self.trains:
                dist.broadcast(full, 0, group=self.cast)
            if not self.trains:
                into, rows, mine = cut(torch, name, full, self.rank - len(TRAINERS))
                self.held[into][rows].copy_(mine)

    def checkpoint(self) -> None:
        """Save into memory, and load from there."""
        import torch.distributed.checkpoint as dcp
        from torch.distributed.tensor import DTensor, Replicate, Shard

        torch, dist = self.torch, self.dist
        if self.trains:
            dcp.save(
                {n: x.detach().to(torch.bfloat16) for n, x in self.held.items()},
                storage_writer=dcp.FileSystemWriter(self.folder, sync_files=False),
                process_group=self.sides[0],
            )
        dist.barrier()
        if not self.trains:
            wanted: dict[str, Any] = {}
            t = self.rank - len(TRAINERS)
            for name, shape in whole_shapes().items():
                like = cut(torch, name, torch.empty(shape, dtype=torch.bfloat16, device="meta"), t)[2]
                dim = Shard(1) if name.endswith(("o_proj.weight", "down_proj.weight")) else Shard(0)
                place = Replicate() if len(shape) == 1 else dim
                local = torch.empty(like.shape, dtype=torch.bfloat16)
                wanted[name] = DTensor.from_local(local, self.server_mesh, [place], run_check=False)
            reader = dcp.FileSystemReader(self.folder)
            dcp.load(wanted, storage_reader=reader, process_group=self.sides[1])
            for name, x in wanted.items():
                into, rows, _ = cut(torch, name, torch.empty(whole_shapes()[name], device="meta"), t)
                self.held[into][rows].copy_(x.to_local())
        dist.barrier()


def child(count: int) -> dict[str, Any]:
    """Run every way on this rank."""
    import torch
    import torch.distributed as dist

    counted_of = use_tests("execution.storages").Storages

    rank = dist.get_rank()
    ways = Ways(torch, rank)
    calls: dict[str, Callable[[], None]] = {w: getattr(ways, w) for w in WAYS}
    bits: dict[str, bool] = {}
    first: dict[str, Any] = {}
    peaks: dict[str, int] = {}
    for way, call in calls.items():  # the first calls, which are not timed
        if not ways.trains:
            for x in ways.held.values():
                x.zero_()
        call()
        held = list(ways.held.values()) if not ways.trains else [x.to_local() for x in ways.held.values()]
        counted = counted_of(*held)
        before = counted.live
        with counted:
            call()
        peaks[way] = counted.peak - before if way != "refit" else ways.sync.staging_bytes
        if not ways.trains:
            first = first or {n: x.clone() for n, x in ways.held.items()}
            bits[way] = all(torch.equal(x, first[n]) for n, x in ways.held.items()) and any(
                bool(x.any()) for x in ways.held.values()
            )
    times: dict[str, list[float]] = {w: [] for w in WAYS}
    for _ in range(count):
        for way, call in calls.items():
            dist.barrier()
            begun = time.perf_counter()
            call()
            dist.barrier()
            times[way].append(time.perf_counter() - begun)
    every = of_all_ranks((bits, peaks, ways.planning, ways.preparing))
    rows = [
        {
            "way": w,
            "median seconds": statistics.median(times[w]),
            "p90 seconds": sorted(times[w])[int(0.9 * (count - 1))],
            "over refit": statistics.median(times[w]) / statistics.median(times["refit"]),
            "megabytes beside the parameters": max(found[1][w] for found in every) / 1e6,
            "same bits": all(found[0].get(w, True) for found in every),
        }
        for w in WAYS
    ]
    messages = sum(len(s) + len(r) for s, r in ways.sync._exchange.rounds)
    if rank == 0:
        shutil.rmtree(ways.folder, ignore_errors=True)
    ways.sync.close()
    dist.barrier()
    return {
        "rows": rows,
        "megabytes a call": sum(ways.sync.plan.sent_bytes) / 1e6,
        "planning seconds": max(found[2] for found in every),
        "preparing seconds": max(found[3] for found in every),
        "messages of rank 0": messages,
    }


def main() -> None:
    parser = arguments("weights_live", __doc__.splitlines()[0] if __doc__ else "", 100, of="calls")
    options = parser.parse_args()
    found, seconds = launch(ROOT / "benchmarks" / "weights_live.py", 8, options.count)
    shown = list(found["rows"][0])
    print(table(shown, [[row[k] for k in shown] for row in found["rows"]], "a trainer's weights to a server"))
    assert all(row["same bits"] for row in found["rows"]), "the ways disagree"
    write(options.out, record({"count": options.count, "limit": LIMIT, "seconds": round(seconds)} | CONFIG, found))


if __name__ == "__main__":
    if "RANK" in os.environ:
        be_rank(lambda: child(int(sys.argv[1])))
    else:
        main()

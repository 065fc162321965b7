"""What a training step moves under strategies, ours beside DTensor's parallel plans and FSDP2, by counted bytes.

`python -m benchmarks.strategy_dtensor`. The same Llama as `torch.nn.Module`s on 8 gloo processes: tensor parallelism by
`parallelize_module`, with a vocabulary-parallel embedding and `loss_parallel`, FSDP by `fully_shard`. Every collective
that goes through torch's dispatcher on rank 0 is counted in forward pass, backward pass and SGD step; all ranks hold as
much. Torch has no plan that reduces gradients of a tensor parallel model over replicas without sharding them: that is
one `all_reduce` a parameter, written here. The peer computes our loss and our next parameters to 1e-4.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from dataclasses import asdict
from typing import Any

import torch
import torch.distributed as dist
from benchmarks.common import ROOT, arguments, record, table, write
from benchmarks.strategy_ours import (
    DEVICES,
    LAYERS,
    RATE,
    SIZES,
    Moved,
    far,
    filled,
    job_of,
    load,
    moved,
    per_layer,
    stepped,
    told,
)
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.nn.functional import cross_entropy, silu
from torch.utils._python_dispatch import TorchDispatchMode

TIMEOUT = 1800.0
TENSOR: dict[str, Any] = {"data": 2, "tensor": 4}
# Of each row: our strategy; the peer's plan, None where it has none; why it differs.
ROWS: dict[str, tuple[dict[str, Any], str | None, str]] = {
    "data 8": ({"data": 8}, "data", "Equal."),
    "tensor 4 x data 2": (
        TENSOR,
        "tensor",
        (
            "Each of q, k, v and of gate, up reduces its input's cotangent by itself: 5 backward where ours adds them"
            " while partial, 2."
        ),
    ),
    "tensor 4 x data 2, inputs prepared": (
        TENSOR,
        "prepared",
        (
            "Equal in a layer. Outside, the embedding's gradient is whole on every tensor rank, so it is reduced over"
            " data whole."
        ),
    ),
    "sequence 4 x data 2": (
        TENSOR | {"sequence_parallel": True},
        "sequence",
        (
            "DTensor keeps gathered activations for the backward pass; this strategy of ours keeps the cut ones and "
            "gathers again, 2 all-gathers a layer. The embedding as above."
        ),
    ),
    "sequence 4 x data 2, kept": (
        TENSOR | {"sequence_parallel": True, "keep": "sequence"},
        "sequence",
        "Both keep what they gathered. The embedding as above.",
    ),
    "fsdp 8": (
        {"data": 8, "fsdp": True},
        "fsdp",
        "Equal in a layer. Outside, FSDP2 keeps the root's parameters gathered until the backward pass.",
    ),
    "fsdp 8, kept by the peer": (
        {"data": 8, "fsdp": True},
        "kept",
        "FSDP2 keeps gathered weights; this strategy of ours gathers again.",
    ),
    "fsdp 8, kept": (
        {"data": 8, "fsdp": True, "zero": 2},
        "kept",
        "Both keep gathered weights.",
    ),
    "context 4 x data 2": (
        {"data": 2, "context": 4},
        None,
        "DTensor has no plan for Ulysses; its context_parallel is a ring of CUDA kernels.",
    ),
}


class Attention(nn.Module):
    """Causal, of as many heads as its weights have here."""

    def __init__(self, hidden: int, head: int) -> None:
        super().__init__()
        self.head = head
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            setattr(self, name, nn.Linear(hidden, hidden, bias=False))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (p(x).unflatten(-1, (-1, self.head)).transpose(1, 2) for p in (self.q_proj, self.k_proj, self.v_proj))
        q, k = turned(q), turned(k)
        length = q.shape[2]
        scores = (q @ k.transpose(-1, -2)) * self.head**-0.5
        scores = scores.masked_fill(~torch.ones(length, length, dtype=torch.bool).tril(), -1e30)
        return self.o_proj((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))


def turned(x: Tensor) -> Tensor:
    """Rotary positions of `[b h s d]`."""
    half = x.shape[-1] // 2
    angle = torch.arange(x.shape[2])[:, None] * 10000.0 ** (-torch.arange(half) / half)
    a, b = x[..., :half], x[..., half:]
    return torch.cat([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()], -1)


class Mlp(nn.Module):
    """Gated."""

    def __init__(self, hidden: int, ffn: int) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = nn.Linear(hidden, ffn, bias=False), nn.Linear(hidden, ffn, bias=False)
        self.down_proj = nn.Linear(ffn, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    """Attention and MLP, each behind a norm."""

    def __init__(self, c: dict[str, Any]) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(c["hidden"], eps=1e-5)
        self.self_attn = Attention(c["hidden"], c["hidden"] // c["heads"])
        self.post_attention_layernorm = nn.RMSNorm(c["hidden"], eps=1e-5)
        self.mlp = Mlp(c["hidden"], c["ffn"])

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x))
        return x + self.mlp(self.post_attention_layernorm(x))


class Llama(nn.Module):
    """With the names of a checkpoint."""

    def __init__(self, layers: int, c: dict[str, Any]) -> None:
        super().__init__()
        self.model = nn.Module()
        self.model.embed_tokens = nn.Embedding(c["vocab"], c["hidden"])
        self.model.layers = nn.ModuleList(Layer(c) for _ in range(layers))
        self.model.norm = nn.RMSNorm(c["hidden"], eps=1e-5)
        self.lm_head = nn.Linear(c["hidden"], c["vocab"], bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.model.embed_tokens(tokens)
        for layer in self.model.layers:
            x = layer(x)
        return self.lm_head(self.model.norm(x))


class Counting(TorchDispatchMode):
    """Count what every collective receives on this rank."""

    def __init__(self) -> None:
        super().__init__()
        self.received, self.counts = 0, Counter[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(t, DTensor) for t in types):
            return NotImplemented  # its own dispatch comes first, and what it calls is seen
        if func.namespace in ("c10d", "_c10d_functional"):
            self.count(func._schema.name.split("::")[1], args)
        return func(*args, **(kwargs or {}))

    def count(self, name: str, args: Any) -> None:
        """Of a collective by its name in the dispatcher."""
        if name in ("wait_tensor", "_wrap_tensor_autograd"):
            return
        if name in ("all_reduce", "all_gather_into_tensor", "reduce_scatter_tensor", "all_to_all_single"):
            data, group = [args[0]], dist.distributed_c10d._resolve_process_group(args[-1])
        elif name in ("_allgather_base_", "_reduce_scatter_base_"):
            data, group = [args[1]], dist.ProcessGroup.unbox(args[2])
        elif name == "allreduce_":
            data, group = args[0], dist.ProcessGroup.unbox(args[1])
        else:
            raise ValueError(f"no byte count is known for {name}")
        n, q = sum(x.numel() * x.element_size() for x in data), group.size()
        kind = next(
            k for word, k in (("scatter", "reduce-scatter"), ("gather", "all-gather"), ("reduce", "all-reduce"),
                              ("to_all", "all-to-all")) if word in name
        )  # fmt: skip
        self.counts[kind] += 1
        self.received += n * (q - 1) if kind == "all-gather" else n * (q - 1) * (1 + (kind == "all-reduce")) // q


def planned(net: Llama, plan: str, mesh: DeviceMesh) -> None:
    """Apply a plan of the peer."""
    if plan in ("fsdp", "kept"):
        for layer in net.model.layers:
            fully_shard(layer, mesh=mesh["data"], reshard_after_forward=plan == "fsdp")
        fully_shard(net, mesh=mesh["data"])
    if plan not in ("tensor", "prepared", "sequence"):
        return
    whole, rows = Replicate(), Shard(1)
    stream = rows if plan == "sequence" else whole
    prepared = {} if plan == "tensor" else {
        f"model.layers.*.{name}": PrepareModuleInput(input_layouts=(stream,), desired_input_layouts=(whole,))
        for name in ("self_attn", "mlp")
    }  # fmt: skip
    norms = ("model.layers.*.input_layernorm", "model.layers.*.post_attention_layernorm", "model.norm")
    parallelize_module(
        net,
        mesh["tensor"],
        {
            "model.embed_tokens": RowwiseParallel(input_layouts=whole, output_layouts=stream),
            **prepared,
            **{f"model.layers.*.self_attn.{k}_proj": ColwiseParallel() for k in "qkv"},
            **{f"model.layers.*.mlp.{k}_proj": ColwiseParallel() for k in ("gate", "up")},
            "model.layers.*.self_attn.o_proj": RowwiseParallel(output_layouts=stream),
            "model.layers.*.mlp.down_proj": RowwiseParallel(output_layouts=stream),
            **({name: SequenceParallel() for name in norms} if plan == "sequence" else {}),
            "lm_head": ColwiseParallel(input_layouts=stream, output_layouts=Shard(-1), use_local_output=False),
        },
    )


def theirs(name: str, layers: int) -> tuple[Moved, float]:
    """What the peer moves on this rank, and how far its step is from ours."""
    strategy, plan, _ = ROWS[name]
    assert plan is not None
    model = load(layers)
    given = filled(model)
    net = Llama(layers, SIZES)
    net.load_state_dict({n: torch.tensor(a) for n, a in model.unpack({p: given[p] for p in model.parameters}).items()})
    data, tensor = strategy.get("data", 1), strategy.get("tensor", 1)
    mesh = init_device_mesh("cpu", (data, tensor), mesh_dim_names=("data", "tensor"))
    planned(net, plan, mesh)
    at, rows = mesh.get_local_rank("data"), SIZES["batch"] // data
    tokens, targets = (torch.tensor(given[n][at * rows : (at + 1) * rows]).long() for n in ("tokens", "targets"))
    optimizer = torch.optim.SGD(net.parameters(), lr=RATE, foreach=False)
    with Counting() as counting:
        if tensor > 1:
            with loss_parallel():
                loss = cross_entropy(net(tokens).flatten(0, 1), targets.flatten())
                loss.backward()
        else:
            loss = cross_entropy(net(tokens).flatten(0, 1), targets.flatten())
            loss.backward()
        if plan not in ("fsdp", "kept"):
            for p in net.parameters():
                local = p.grad.to_local() if isinstance(p.grad, DTensor) else p.grad
                dist.all_reduce(local, group=mesh.get_group("data"))
                local /= data
        optimizer.step()
    value = (loss.full_tensor() if isinstance(loss, DTensor) else loss).detach().clone()
    dist.all_reduce(value, group=mesh.get_group("data"))
    after = {
        n: (p.full_tensor() if isinstance(p, DTensor) else p).detach().numpy() for n, p in net.state_dict().items()
    }
    want, found = stepped(model, given)
    off = far(float(value) / data, after, (want, model.unpack(found)))
    assert off < 1e-4, f"{name}: the peer is {off} off"
    return Moved(counting.received, float("nan"), dict(sorted(counting.counts.items()))), off


def worker(rank: int, count: int, store: str, out: str) -> None:
    """Every row, on this rank; rank 0 writes them."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=DEVICES)
    found: dict[str, Any] = {}
    for name in list(ROWS)[:count]:
        if ROWS[name][1] is None:
            continue
        both = [theirs(name, layers) for layers in LAYERS]
        found[name] = {"moved": [asdict(m) for m, _ in both], "off": max(off for _, off in both)}
    if rank == 0:
        with open(out, "w", encoding="utf-8") as file:
            json.dump(found, file)
    dist.destroy_process_group()


def peers(count: int) -> dict[str, Any]:
    """The peer's rows, from eight processes."""
    with tempfile.TemporaryDirectory() as folder:
        store, out = os.path.join(folder, "store"), os.path.join(folder, "rows.json")
        environment = dict(os.environ, PYTHONPATH=os.pathsep.join(map(str, (ROOT / "src", ROOT))), OMP_NUM_THREADS="1")
        command = [sys.executable, "-m", "benchmarks.strategy_dtensor", "--count", str(count), "--store", store]
        started = [
            subprocess.Popen([*command, "--rows", out, "--rank", str(rank)], env=environment, cwd=ROOT)
            for rank in range(DEVICES)
        ]
        try:
            codes = [process.wait(TIMEOUT) for process in started]
        finally:
            for process in started:
                process.kill()
        if any(codes):
            raise SystemExit(f"the processes ended with {codes}")
        with open(out, encoding="utf-8") as file:
            return json.load(file)


def main() -> None:
    parser = arguments("strategy_dtensor", "What strategies move, ours beside DTensor's.", len(ROWS), of="rows")
    parser.add_argument("--rank", type=int, default=-1, help="be this process of the peer")
    parser.add_argument("--store", default="")
    parser.add_argument("--rows", default="")
    options = parser.parse_args()
    if options.rank >= 0:
        worker(options.rank, options.count, options.store, options.rows)
        return
    found, rows = peers(options.count), list[dict[str, Any]]()
    for name in list(ROWS)[: options.count]:
        strategy, plan, why = ROWS[name]
        less, more = (moved(job_of(layers, strategy)) for layers in LAYERS)
        one: dict[str, Any] = {"strategy": name, "ours": {"step": asdict(less), "layer": asdict(per_layer(less, more))}}
        if plan is None:
            rows.append(one | {"dtensor": None, "why": why})
            continue
        a, b = (Moved(**m) for m in found[name]["moved"])
        one["dtensor"] = {"step": asdict(a), "layer": asdict(per_layer(a, b))}
        ratio = one["dtensor"]["layer"]["received"] / one["ours"]["layer"]["received"]
        rows.append(one | {"ratio": ratio, "off": found[name]["off"], "why": why})
    shown = [
        [r["strategy"], *(r[s] and r[s]["layer"]["received"] for s in ("ours", "dtensor")), r.get("ratio"),
         *(r[s] and r[s]["step"]["received"] for s in ("ours", "dtensor")),
         told(r["ours"]["layer"]["counts"]), told(r["dtensor"]["layer"]["counts"] if r["dtensor"] else {})]
        for r in rows
    ]  # fmt: skip
    heads = ("strategy", "ours, a layer", "dtensor, a layer", "ratio", f"ours, a step of {LAYERS[0]}",
             f"dtensor, a step of {LAYERS[0]}", "ours, a layer", "dtensor, a layer")  # fmt: skip
    print(table(heads, shown, f"bytes that the worst of {DEVICES} devices receives, f32"))
    print("\n" + "\n".join(f"{r['strategy']}: {r['why']}" for r in rows))
    write(options.out, record({"count": options.count, "sizes": SIZES, "layers": LAYERS}, {"rows": rows}))


if __name__ == "__main__":
    main()

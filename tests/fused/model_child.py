"""One of two ranks that trains stock modules through torch.compile with the pass, and beside them uncompiled copies.

A block of a Llama under `parallelize_module`, and a mixture layer written with functional collectives. Prints JSON.
"""

import copy
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from tests.fused.test_graphs import EAGER  # noqa: E402
from torch import Tensor, nn  # noqa: E402
from torch._dynamo.backends.common import aot_autograd  # noqa: E402
from torch.distributed import _functional_collectives as funcol  # noqa: E402
from torch.distributed.device_mesh import init_device_mesh  # noqa: E402
from torch.distributed.tensor import DTensor  # noqa: E402
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module  # noqa: E402
from torch.nn.functional import relu, silu  # noqa: E402

from shardplan.fused import bind_group, fuse_graph  # noqa: E402

WIDE, HEADS, TOKENS, STEPS = 16, 4, 8, 3


class LlamaBlock(nn.Module):
    """Attention of the rank's heads and a gated MLP, each behind a norm and beside a residual."""

    def __init__(self, ranks: int) -> None:
        super().__init__()
        self.heads = HEADS // ranks
        self.before, self.between = nn.RMSNorm(WIDE), nn.RMSNorm(WIDE)
        self.q, self.k, self.v, self.o = (nn.Linear(WIDE, WIDE, bias=False) for _ in range(4))
        self.gate, self.up, self.down = (nn.Linear(*n, bias=False) for n in ((WIDE, 32), (WIDE, 32), (32, WIDE)))

    def forward(self, x: Tensor) -> Tensor:
        h = self.before(x)
        q, k, v = (w(h).view(1, TOKENS, self.heads, -1).transpose(1, 2) for w in (self.q, self.k, self.v))
        # Written out: a fused attention is another backward pass on each machine.
        scores = (q @ k.transpose(-1, -2)) * q.shape[-1] ** -0.5
        mask = torch.ones(TOKENS, TOKENS, dtype=torch.bool).tril()
        seen = torch.softmax(scores.masked_fill(~mask, float("-inf")), -1) @ v
        x = x + self.o(seen.transpose(1, 2).reshape(1, TOKENS, -1))
        h = self.between(x)
        return x + self.down(silu(self.gate(h)) * self.up(h))


class Mixture(nn.Module):
    """An expert a rank; tokens go to their experts in equal parts, and come back."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__()
        self.group, self.parts = group, [TOKENS // 2] * 2
        self.up, self.down = (nn.Parameter(torch.randn(*n) / 4) for n in ((WIDE, 24), (24, WIDE)))

    def forward(self, x: Tensor) -> Tensor:
        came = funcol.all_to_all_single_autograd(x, self.parts, self.parts, self.group)
        made = relu(came @ self.up) @ self.down
        return x + funcol.all_to_all_single_autograd(made, self.parts, self.parts, self.group)


def whole(x: Any) -> Tensor:
    return x.to_local() if isinstance(x, DTensor) else x


def trained(model: nn.Module, run: Any, given: Tensor) -> list[Tensor]:
    """Losses of some steps, and the parameters behind them."""
    descent = torch.optim.SGD(model.parameters(), lr=0.1)
    losses: list[Tensor] = []
    for _ in range(STEPS):
        descent.zero_grad()
        loss = whole(run(given)).square().mean()
        loss.backward()
        descent.step()
        losses.append(loss.detach())
    return [*losses, *(whole(p).detach() for p in model.parameters())]


def main() -> None:
    dist.init_process_group("gloo")
    rank, mesh = dist.get_rank(), init_device_mesh("cpu", (2,))
    group = mesh.get_group()
    heap = bind_group(group, 4 << 20)
    columns, rows = ColwiseParallel, RowwiseParallel
    torch.manual_seed(0)
    block = LlamaBlock(2)
    plan = {name: columns() for name in ("q", "k", "v", "gate", "up")} | {name: rows() for name in ("o", "down")}
    parallelize_module(block, mesh, plan)  # type: ignore[arg-type]
    torch.manual_seed(dist.get_rank())
    mixture = Mixture(group)
    found: dict[str, Any] = {}
    slow = replace(EAGER, signal=1.0, bandwidth=1e12, copy_bandwidth=1e12)  # by which nothing pays
    cases = (("llama", block, EAGER), ("mixture", mixture, EAGER), ("llama, slow signals", block, slow))
    for name, model, constants in cases:
        torch.compiler.reset()
        torch.manual_seed(5 + (dist.get_rank() if model is mixture else 0))
        given, other = torch.randn(*(1,) * (model is block), TOKENS, WIDE), copy.deepcopy(model, {id(group): group})
        wanted = trained(other, other, given)
        said: list[list[str]] = []

        def compiler(graph: Any, given: Any, said: list[list[str]] = said, constants: Any = constants) -> Any:
            fusion = fuse_graph(graph, constants)
            said.append([f"{row.op} {row.reason}" for row in fusion.rows])
            return fusion.program

        def epochs() -> int:
            return sum(made.epoch for made in heap.kept.values() if hasattr(made, "epoch"))

        before = epochs()
        fast = torch.compile(model, backend=aot_autograd(fw_compiler=compiler, bw_compiler=compiler), fullgraph=True)
        got = trained(model, fast, given)
        away = max(float((x - y).abs().max()) for x, y in zip(got, wanted, strict=True))
        found[name] = {"rows": said, "away": away, "ran": epochs() - before, "loss": [float(x) for x in got[:STEPS]]}
    every: list[Any] = [None, None]
    dist.all_gather_object(every, found)
    heap.close()
    dist.destroy_process_group()
    if rank == 0:
        print(json.dumps(every))


if __name__ == "__main__":
    main()

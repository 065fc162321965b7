"""One of two ranks that runs graphs before and after the pass; then a training step through torch.compile.

Rank 0 prints what differs, and how often fused operators ran, as JSON.
"""

import json
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from tests.fused.graph_cases import CASES, traced  # noqa: E402
from tests.fused.test_graphs import EAGER  # noqa: E402
from torch._dynamo.backends.common import aot_autograd  # noqa: E402
from torch.distributed import _functional_collectives as funcol  # noqa: E402

from shardplan.fused import bind_group, fuse_graph  # noqa: E402


def main() -> None:
    dist.init_process_group("gloo")
    rank, group = dist.get_rank(), dist.group.WORLD
    assert group is not None
    heap = bind_group(group, 4 << 20)
    wrong: list[str] = []

    def calls() -> int:
        return sum(made.epoch for made in heap.kept.values() if hasattr(made, "epoch"))

    ran: dict[str, int] = {}
    for name, one in CASES.items():
        if one.reason != "fused":
            continue
        torch.manual_seed(0)
        graph = traced(one, group.group_name)
        found = fuse_graph(graph, EAGER)
        torch.manual_seed(rank)
        given = one.given()
        want, before = graph(*given), calls()
        got = found.program(*given)
        ran[name] = calls() - before
        if got.shape != want.shape or not torch.allclose(got, want, atol=1e-5):
            wrong.append(f"{name}: {(got - want).abs().max() if got.shape == want.shape else got.shape}")

    rows: list[str] = []

    def compiler(graph: Any, given: Any) -> Any:
        found = fuse_graph(graph, EAGER)
        rows.extend(row.reason for row in found.rows)
        return found.program

    def step(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        y = funcol.all_to_all_single_autograd(a @ b, [2, 2], [2, 2], group)
        return (y * y).sum()

    torch.manual_seed(rank)
    a, b = torch.randn(4, 3, requires_grad=True), torch.randn(3, 6, requires_grad=True)
    step(a, b).backward()
    want = [x.grad.clone() for x in (a, b)]  # type: ignore[union-attr]
    a.grad = b.grad = None
    before = calls()
    torch.compile(step, backend=aot_autograd(fw_compiler=compiler, bw_compiler=compiler), fullgraph=True)(
        a, b
    ).backward()
    ran["compiled step"] = calls() - before
    for name, x, y in zip("ab", (a.grad, b.grad), want, strict=True):
        if x is None or not torch.allclose(x, y, atol=1e-5):
            wrong.append(f"gradient of {name}")
    every: list[Any] = [None, None]
    dist.all_gather_object(every, (wrong, ran, rows))
    heap.close()
    dist.destroy_process_group()
    if rank == 0:
        print(json.dumps(every))


if __name__ == "__main__":
    main()

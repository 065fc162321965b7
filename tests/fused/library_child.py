"""The operators as PyTorch's on processes of gloo: opcheck, compile, export, out, bytes moved; prints JSON."""

from __future__ import annotations

import io
import json
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from tests.fused.forked import Exchange, forked, refused

import shardplan.fused.library as registered
from shardplan import fused
from shardplan.fused.calls.instance import instance

BATCH = 6


class Gemm(torch.nn.Module):
    def __init__(self, group: str, scatter: int) -> None:
        super().__init__()
        self.group, self.scatter = group, scatter

    def forward(self, a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        out = fused.gemm_all_to_all(a * 2, b, bias, group=self.group, activation="silu", scatter=self.scatter)
        return out.sin()


class Gemv(torch.nn.Module):
    def __init__(self, group: str) -> None:
        super().__init__()
        self.group = group

    def forward(self, a: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return fused.gemv_all_reduce(a * 2, x, group=self.group).sin()


class Bags(torch.nn.Module):
    def __init__(self, group: str, mode: str) -> None:
        super().__init__()
        self.group, self.mode = group, mode

    def forward(
        self, first: torch.Tensor, second: torch.Tensor, ids: torch.Tensor, offsets: torch.Tensor, scale: torch.Tensor
    ) -> torch.Tensor:
        tables = [first * 2, second]
        return fused.embedding_bag_all_to_all(tables, ids, offsets, scale, group=self.group, mode=self.mode).sin()


def cases(
    group: str, ranks: int, rank: int
) -> list[tuple[str, torch.nn.Module, Callable[[int], tuple[torch.Tensor, ...]], Any]]:
    """Name, module, operands of a size, and the operator for opcheck."""

    def product(m: int) -> tuple[torch.Tensor, ...]:
        torch.manual_seed(m)  # b and the bias are alike on all ranks
        b, bias = torch.randn(3, 4, requires_grad=True), torch.randn(4, requires_grad=True)
        torch.manual_seed(100 * m + rank)
        return torch.randn(m, 3, requires_grad=True), b, bias

    def thin(m: int) -> tuple[torch.Tensor, ...]:
        torch.manual_seed(100 * m + rank)
        return torch.randn(m, 5, requires_grad=True), torch.randn(5, requires_grad=True)

    def bags(m: int) -> tuple[torch.Tensor, ...]:
        torch.manual_seed(100 * m + rank)
        lengths = torch.full((2 * BATCH,), m % 3 + 1)
        offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
        n = int(offsets[-1])
        tables = (torch.randn(7, 4, requires_grad=True), torch.randn(5, 4, requires_grad=True))
        return (*tables, torch.randint(0, 5, (n,)), offsets, torch.rand(n, requires_grad=True))

    ops = torch.ops.shardplan
    return [
        ("gemm rows", Gemm(group, 0), product, lambda a, b, c: (ops.gemm_all_to_all, (a, b, c, group, "gelu", 0))),
        ("gemm columns", Gemm(group, 1), product,
         lambda a, b, c: (ops.gemm_all_to_all, (a, b, None, group, "none", 1))),
        ("gemv", Gemv(group), thin, lambda a, x: (ops.gemv_all_reduce, (a, x, group))),
        ("bags", Bags(group, "mean"), bags,
         lambda p, q, i, o, s: (ops.embedding_bag_all_to_all,
                                ([p, q], i, o, s, group, "sum", [2] * ranks, _even(ranks), None))),
    ]  # fmt: skip


def _even(ranks: int) -> list[int]:
    from shardplan.fused.tiles.shapes import tile_sizes

    return tile_sizes(BATCH, ranks)


def differentiated(call: Callable[..., torch.Tensor], operands: tuple[torch.Tensor, ...]) -> list[torch.Tensor]:
    out = call(*operands)
    leaves = [x for x in operands if x.requires_grad]
    return [out.detach(), *torch.autograd.grad(out.sum(), leaves)]


def close(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return all(x.shape == y.shape and torch.allclose(x, y, atol=1e-5) for x, y in zip(a, b, strict=True))


def work(rank: int, exchange: Exchange, ranks: int, path: str) -> Any:
    store = dist.FileStore(path, ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks, timeout=timedelta(seconds=60))
    said: dict[str, str] = {}
    with fused.bind_group(nbytes=1 << 22) as heap:
        heap.seconds = 40.0
        for name, module, operands, for_opcheck in cases(dist.group.WORLD.group_name, ranks, rank):
            plain = differentiated(module, operands(4))
            for what in ("opcheck", "compiled", "dynamic", "exported"):
                try:
                    if what == "opcheck":
                        op, given = for_opcheck(*operands(4))
                        torch.library.opcheck(op.default, given)
                        good = True
                    elif what == "compiled":
                        torch._dynamo.reset()
                        good = close(
                            differentiated(torch.compile(module, fullgraph=True, backend="aot_eager"), operands(4)),
                            plain,
                        )
                    elif what == "dynamic":
                        torch._dynamo.reset()
                        call = torch.compile(module, fullgraph=True, dynamic=True, backend="aot_eager")
                        good = close(differentiated(call, operands(4)), plain)
                        good &= close(differentiated(call, operands(8)), differentiated(module, operands(8)))
                    else:
                        given = tuple(x.detach() for x in operands(4))
                        made, file = torch.export.export(module, given), io.BytesIO()
                        torch.export.save(made, file)
                        file.seek(0)
                        good = close([torch.export.load(file).module()(*given)], plain[:1])
                    said[f"{name} {what}"] = "good" if good else "other values"
                except Exception as error:
                    said[f"{name} {what}"] = f"{type(error).__name__}: {error}"[:500]
                    if len(sys.argv) > 2:
                        traceback.print_exc()
                heap.barrier()
        said["one rank"] = one_rank(dist.group.WORLD.group_name, rank)
    dist.destroy_process_group()
    return said


def one_rank(group: str, rank: int) -> str:
    """A compiled graph of whose operands only rank 0's need a gradient: all take part in its backward."""
    torch._dynamo.reset()
    a, b, bias = torch.ones(4, 3, requires_grad=rank == 0), torch.ones(3, 4), torch.zeros(4)
    out = torch.compile(Gemm(group, 0), fullgraph=True, backend="aot_eager")(a, b, bias)
    out.sum().backward()
    alike = a.detach().clone().requires_grad_()
    torch.nn.functional.silu(alike * 2 @ b).sin().sum().backward()
    good = rank or (a.grad is not None and alike.grad is not None and torch.allclose(a.grad, alike.grad, atol=1e-5))
    return "good" if good and out.requires_grad else "other values"


def into(ranks: int, rank: int, exchange: Exchange) -> dict[str, Any]:
    """Five epochs into a tensor of the heap, each read late; tensors elsewhere; what puts moved."""
    said: dict[str, Any] = {}
    ops = registered.torch.ops.shardplan
    with fused.SymmetricHeap.create(1 << 22, "shm", exchange, "into") as heap:
        fused.bind("into", heap)
        whole = heap.alloc((ranks * 3, 4), "f32", "out")
        bags = heap.alloc((3, 2 * ranks, 4), "f32", "bags")
        splits = [2] + [1] * (ranks - 1)
        out, spread = whole.local, bags.local[: splits[rank]]
        held: list[tuple[torch.Tensor, ...]] = []
        ids = torch.arange(2 * sum(splits)) % 7
        for epoch in range(5):
            torch.manual_seed(epoch)
            a, b = torch.randn(ranks, ranks * 3, 5)[rank], torch.randn(5, 4)
            ops.gemm_all_to_all_out(out, a, b, None, "into", "relu")
            tables = [torch.randn(7, 4), torch.randn(7, 4)]
            given = (tables, ids, torch.arange(len(ids) + 1), None, "into", "sum", [2] * ranks, splits)
            ops.embedding_bag_all_to_all_out(spread, *given)
            time.sleep(0.05 * (rank == 0))  # the others are ahead
            held.append((out.clone(), spread.clone(), a, b, *tables))
        late = True
        for x, y, a, b, *tables in held:
            late &= torch.equal(x, fused.gemm_all_to_all(a, b, group="into", activation="relu"))
            late &= torch.equal(y, ops.embedding_bag_all_to_all(tables, *given[1:], None))
        # The word before a call has ranks wait for each other; the schedule's own acks do without it.
        plain = instance(heap, "plain", fused.TileSchedule(), "", 20.0, heap.alloc((ranks, 4), "f32", "plain"))
        steps = plain.call(fused.BlockShape.rows([[1] * ranks] * ranks, 4), {"result": torch.float32})
        for epoch in range(5):
            view = plain.run(steps, lambda step, epoch=epoch: step.view.fill_(epoch))["result"]
            time.sleep(0.05 * (rank == 0))
            late &= bool((view == epoch).all())
        said["late"] = late
        other = heap.alloc((ranks * 3, 4), "f32", "other").local
        a, b = torch.randn(ranks * 3, 5), torch.randn(5, 4)
        pairs = ((out, 1.0), (other, 2.0))
        for x, scale in pairs:
            ops.gemm_all_to_all_out(x, scale * a, b, None, "into", "none")
        said["apart"] = [torch.equal(x, fused.gemm_all_to_all(scale * a, b, group="into")) for x, scale in pairs]
        a, x = torch.randn(6, 3), torch.randn(3)
        places = (torch.full((6,), torch.nan), heap.alloc((6,), "f32", "vector").local)  # elsewhere, and in the heap
        said["vector"] = True
        for place in places:
            for way in ("one_shot", "two_shot"):
                ops.gemv_all_reduce_out(place.fill_(torch.nan), a, x, "into", way)
                said["vector"] &= torch.equal(place, fused.gemv_all_reduce(a, x, group="into", algorithm=way))
        half, wide = torch.zeros(6, 2, dtype=torch.bfloat16), torch.randn(3, 2).bfloat16()
        ops.gemv_all_reduce_out(half, a.bfloat16(), wide, "into", "two_shot")
        whole_sum = fused.gemv_all_reduce(a.bfloat16(), wide, group="into", algorithm="two_shot")
        said["vector"] &= torch.equal(half, whole_sum)
        said["vectors"] = [
            refused(lambda o=wrong: ops.gemv_all_reduce_out(o, a, x, "into", "auto"))
            for wrong in (torch.empty(7), torch.empty(6, 1), torch.empty(6).double(), torch.empty(12)[::2])
        ]
        for name, wrong in (("elsewhere", torch.empty(ranks * 3, 4)), ("middle", whole.local[1:])):
            operands = (torch.randn(ranks * 3, 5), torch.randn(5, 4), None, "into")
            said[name] = refused(lambda o=wrong, x=operands: ops.gemm_all_to_all_out(o, *x))
        heap.barrier()
        with fused.counted(heap) as tally:
            fused.gemm_all_to_all(torch.randn(ranks * 3, 5), torch.randn(5, 4), group="into", tiles=2)
            fused.gemv_all_reduce(torch.randn(600, 3), torch.randn(3), group="into", algorithm="two_shot")
            ops.embedding_bag_all_to_all(*given, None)
            tally.check()
        said["moved"] = [tally.nbytes, len(tally.tiles)]
        with fused.counted(heap) as tally:
            real = torch.mm
            torch.mm = (lambda *o, out: out) if rank == 0 else real  # type: ignore[assignment]  # puts nothing
            fused.gemm_all_to_all(torch.randn(ranks * 3, 5), torch.randn(5, 4), group="into", tiles=2)
            torch.mm = real
        said["nothing"] = refused(tally.check)
    return said


def main() -> None:
    ranks = int(sys.argv[1])
    if sys.argv[2:] == ["into"]:
        print(json.dumps(forked(ranks, lambda rank, exchange: into(ranks, rank, exchange), 100)))
        return
    with tempfile.TemporaryDirectory() as folder:
        print(json.dumps(forked(ranks, lambda rank, exchange: work(rank, exchange, ranks, f"{folder}/store"), 240)))


if __name__ == "__main__":
    main()

"""The three operators on forked ranks beside core's reference and torch's gradients; prints what differs as JSON.

Arguments are what to do and of how many ranks, `pure` where the C++ kernels must not be used, and `net` or `nodes` for
heaps between nodes.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from typing import Any

import numpy as np
import torch
from tests.fused.forked import Exchange, forked

import shardplan as sp
from shardplan.core.ops import AllReduce, AllToAll, Einsum
from shardplan.core.program import Program
from shardplan.core.step import Step
from shardplan.core.tensor import TensorType
from shardplan.errors import ShardplanError
from shardplan.fused.calls.agreement import KNOWN
from shardplan.fused.calls.instance import SignalStep, instance
from shardplan.fused.heap.symmetric import SymmetricHeap
from shardplan.fused.kernels import native as natives
from shardplan.fused.operators import embedding, gemm, gemv
from shardplan.fused.operators.call_context import CallContext
from shardplan.fused.operators.moving import BlockMove
from shardplan.fused.tiles.schedule import TileSchedule
from shardplan.fused.tiles.shapes import starts, tile_sizes

EPOCHS = 3


def backend(rank: int) -> str:
    """`shm`; with `net` every rank is a node, with `nodes` two are."""
    if "net" in sys.argv:
        return f"net:127.0.0.1@{rank}"
    return f"net:127.0.0.1@{rank // 2}" if "nodes" in sys.argv else "shm"


CLOSE = {torch.float32: 2e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}


def away(found: torch.Tensor, wanted: Any, dtype: torch.dtype = torch.float32) -> str:
    """How far a result is from what it must be, empty where it is close; NaN and shape must agree."""
    wanted = torch.as_tensor(wanted)
    if found.shape != wanted.shape:
        return f"shape {list(found.shape)}, not {list(wanted.shape)}"
    scale = wanted.float().abs().nan_to_num().max().item() if wanted.numel() else 1.0
    tolerance = CLOSE[dtype] * max(1.0, scale)
    if torch.allclose(found.float(), wanted.float(), rtol=0, atol=tolerance, equal_nan=True):
        return ""
    return f"off by {(found.float() - wanted.float()).abs().max().item():.3g} of {scale:.3g}"


class Shown:
    """What differed."""

    def __init__(self) -> None:
        self.wrong: list[str] = []
        self.count = 0

    def __call__(self, what: str, said: str) -> None:
        self.count += 1
        if said:
            self.wrong.append(f"{what}: {said}")


def core_gemm(ranks: int, a: np.ndarray, b: np.ndarray, scatter: int) -> list[np.ndarray]:
    """Core's reference of the pair: per rank the result, blocks one after another."""
    mesh = sp.Mesh(x=ranks)
    if scatter == 0:
        types = [TensorType("f32", x.shape, ("x",), mesh) for x in (a, b)]
        steps = [Step(Einsum("wmk,wkn->wmn"), ("0", "1"), ("2",)), Step(AllToAll(0, 1, ("x",)), ("2",), ("3",))]
    else:
        types = [TensorType("f32", a.shape, ("x",), mesh), TensorType("f32", b.shape, (), mesh)]
        steps = [Step(Einsum("sk,kn->sn"), ("0", "1"), ("2",)), Step(AllToAll(0, 1, ("x",)), ("2",), ("3",))]
    program = Program(dict(zip("01", types, strict=True)), steps, ("3",))
    outs = sp.run(program, [sp.distribute(x, t) for x, t in zip((a, b), types, strict=True)])
    return [x.reshape(x.shape[0] * x.shape[1] if x.ndim == 3 else len(x), x.shape[-1]) for x in outs[0]]


def core_gemv(ranks: int, a: np.ndarray, x: np.ndarray) -> np.ndarray:
    if not a.size:
        return a @ x  # core has no empty dims
    mesh = sp.Mesh(x=ranks)
    types = [TensorType("f32", a.shape, (None, "x"), mesh), TensorType("f32", x.shape, ("x",), mesh)]
    steps = [Step(Einsum("mk,kc->mc"), ("0", "1"), ("2",)), Step(AllReduce(("x",)), ("2",), ("3",))]
    program = Program(dict(zip("01", types, strict=True)), steps, ("3",))
    return sp.run(program, [sp.distribute(v, t) for v, t in zip((a, x), types, strict=True)])[0][0]


def gemms(asked: CallContext, shown: Shown) -> None:
    """Even and short splits of both scatters against core, with three epochs; then activations and gradients."""
    n, rank = asked.heap.ranks, asked.heap.rank
    for k, (m, depth, columns) in enumerate([(12, 5, 8), (7, 3, 5), (1, 4, 3), (130, 16, 9)]):
        for scatter in (0, 1):
            rng = np.random.default_rng(k)
            shapes = (
                ((n, m, depth), (n, depth, columns)) if scatter == 0 else ((m * n - k % 2, depth), (depth, columns))
            )
            for epoch in range(EPOCHS):
                a, b = (rng.normal(size=s).astype(np.float32) for s in shapes)
                wanted = core_gemm(n, a, b, scatter)[rank]
                rows = starts(tile_sizes(len(a), n))
                local = (a[rank], b[rank]) if scatter == 0 else (a[rows[rank] : rows[rank + 1]], b)
                for tiles in (1, 3):
                    more = CallContext(asked.heap, tiles, asked.seconds)
                    found = gemm.forward(more, *(torch.from_numpy(x.copy()) for x in local), scatter=scatter)
                    shown(
                        f"gemm {m} {depth} {columns} scatter {scatter} tiles {tiles} epoch {epoch}", away(found, wanted)
                    )


def moe(asked: CallContext, shown: Shown) -> None:
    """Splits that data decides, some empty, other rows on every rank; activations; gradients; dtypes."""
    n, rank = asked.heap.ranks, asked.heap.rank
    for k, (scatter, activation, dtype) in enumerate(
        [(s, a, torch.float32) for s in (0, 1) for a in ("none", "relu", "gelu", "silu")]
        + [(0, "silu", torch.bfloat16), (1, "none", torch.float16), (0, "none", torch.bfloat16)]
    ):
        rng = np.random.default_rng(100 + k)
        counts = rng.integers(0, 6, (n, n)) * (rng.random((n, n)) < 0.7)
        depth, columns = 6, 3 * n + 1
        cols = tile_sizes(columns, n)[::-1]  # not the even ones that are taken where none are given
        rows = counts.sum(1) if scatter == 0 else counts[:, 0]
        a = [torch.from_numpy(rng.normal(size=(int(m), depth))).to(dtype).requires_grad_() for m in rows]
        b = [torch.from_numpy(rng.normal(size=(depth, columns))).to(dtype).requires_grad_() for _ in range(n)]
        bias = [torch.from_numpy(rng.normal(size=columns)).to(dtype).requires_grad_() for _ in range(n)]
        if scatter:
            b, bias = [b[0]] * n, [bias[0]] * n
        act = {
            "none": lambda z: z,
            "relu": torch.relu,
            "gelu": torch.nn.functional.gelu,
            "silu": torch.nn.functional.silu,
        }
        z = [act[activation](x.float() @ y.float() + c.float()) for x, y, c in zip(a, b, bias, strict=True)]
        send = [counts[s].tolist() for s in range(n)] if scatter == 0 else [cols] * n
        parts = [torch.split(x, w, dim=scatter) for x, w in zip(z, send, strict=True)]
        whole = [torch.cat([parts[s][d] for s in range(n)]) for d in range(n)]
        receive = counts[:, rank].tolist() if scatter == 0 else rows.tolist()
        mine = [x.detach() for x in (a[rank], b[rank], bias[rank])]
        what = f"moe scatter {scatter} {activation} {dtype}"
        found = gemm.forward(asked, *mine, activation, scatter, send[rank], receive)
        shown(what, away(found, whole[rank].detach(), dtype))
        up = [torch.from_numpy(rng.normal(size=x.shape)).to(dtype) for x in whole]
        own = [a[rank], bias[rank] if scatter == 0 else a[rank]] + ([b[rank]] if scatter == 0 else [])
        wanted = torch.autograd.grad(list(whole), own, [g.float() for g in up], allow_unused=True)
        da, db, dc = gemm.backward(asked, up[rank], *mine, activation, scatter, send[rank], receive)
        if dtype == torch.float32:
            shown(f"{what}: da", away(da, wanted[0]))
            if scatter == 0:
                shown(f"{what}: db", away(db, wanted[2]))
                shown(f"{what}: dbias", away(dc, wanted[1]))
    text = ""
    try:
        gemm.forward(
            asked, torch.zeros(n, 2), torch.zeros(2, 2), None, "none", 0, [1] * n, [1 + (rank == 1)] + [1] * (n - 1)
        )
    except ShardplanError as error:
        text = str(error)
    wanted = "gemm_all_to_all: rank 1 wants 2 rows of rank 0, which sends 1"
    shown("moe that differs", "" if text == wanted else text or "no error")


def gemvs(asked: CallContext, shown: Shown) -> None:
    """Both algorithms against core and each other, bits equal on all ranks; parts of K that differ, and none."""
    n, rank = asked.heap.ranks, asked.heap.rank
    for k, (m, depth, columns) in enumerate(
        [(16, 8 * n, 1), (37, 3 * n - 1, 3), (5, 1, 2), (600, 64 * n + 5, 1), (0, 4, 1)]
    ):
        rng = np.random.default_rng(200 + k)
        cut = starts(tile_sizes(depth, n))
        for epoch in range(EPOCHS):
            a, x = rng.normal(size=(m, depth)).astype(np.float32), rng.normal(size=(depth, columns)).astype(np.float32)
            here = slice(cut[rank], cut[rank + 1])
            local = torch.from_numpy(a[:, here].copy()), torch.from_numpy(x[here].copy())
            for dtype in (torch.float32, torch.bfloat16) if epoch == 0 else (torch.float32,):
                la, lx = (v.to(dtype) for v in local)
                rounded = (torch.from_numpy(v).to(dtype).float().numpy() for v in (a, x))
                wanted = core_gemv(n, *rounded)
                for algorithm in ("one_shot", "two_shot", "auto"):
                    found = gemv.forward(CallContext(asked.heap, 2, asked.seconds), la, lx, algorithm)
                    shown(f"gemv {m} {depth} {columns} {algorithm} {dtype}", away(found, wanted, dtype))
                    bits = asked.heap.gather(found.contiguous().view(torch.uint8).numpy().tobytes()[:4000])
                    shown(f"gemv {algorithm} bits", "" if len(set(bits)) == 1 else "other bits on other ranks")
    a, x, g = torch.randn(6, 4), torch.randn(4), torch.randn(6)
    shown("gemv vector", away(gemv.forward(asked, torch.ones(6, 4), torch.ones(4)), torch.full((6,), 4.0 * n)))
    la, lx = a.clone().requires_grad_(), x.clone().requires_grad_()
    for found, wanted in zip(gemv.backward(g, a, x), torch.autograd.grad(la @ lx, (la, lx), g), strict=True):
        shown("gemv gradient", away(found, wanted))


def embeddings(asked: CallContext, shown: Shown) -> None:
    """Odd sizes, empty bags, ranks without tables, weights, means, NaN; gradients."""
    n, rank = asked.heap.ranks, asked.heap.rank
    cases = [(m, w, dtype) for m in ("sum", "mean") for w in (False, True) for dtype in (torch.float32, torch.bfloat16)]
    cases.append(("sum", False, torch.float16))
    for k, (mode, weighted, dtype) in enumerate(cases):
        rng = np.random.default_rng(300 + k)
        dim, batch = int(rng.choice([1, 5, 16, 92, 130])), int(rng.integers(0, 12))
        held = rng.integers(0, 4, n)
        held[k % n] = max(1, held[k % n])
        data: list[Any] = []
        for s in range(n):
            tables = [
                torch.from_numpy(rng.normal(size=(int(rng.integers(1, 9)), dim))).to(dtype) for _ in range(held[s])
            ]
            if tables and k == 0:
                tables[0][0, 0] = torch.nan
            lengths = rng.integers(0, 4, (held[s], batch))
            ids = np.concatenate(
                [rng.integers(0, len(t), lengths[j].sum()) for j, t in enumerate(tables)] or [np.zeros(0, int)]
            )
            offsets = np.concatenate([[0], np.cumsum(lengths.ravel())])
            weights = torch.from_numpy(rng.normal(size=len(ids))).float() if weighted else None
            data.append((tables, torch.from_numpy(ids), torch.from_numpy(offsets), weights))
        bags = []
        leaves: list[Any] = []
        for tables, ids, offsets, weights in data:
            mine = [t.float().requires_grad_() for t in tables]
            scale = None if weights is None else weights.clone().requires_grad_()
            leaves.append((mine, scale))
            for j, t in enumerate(mine):
                rows = []
                for q in range(batch):
                    at = slice(int(offsets[j * batch + q]), int(offsets[j * batch + q + 1]))
                    picked = t[ids[at]] if scale is None else t[ids[at]] * scale[at, None]
                    rows.append(picked.sum(0) / max(1, at.stop - at.start) if mode == "mean" else picked.sum(0))
                bags.append(torch.stack(rows) if rows else torch.zeros(0, dim))
        whole = torch.stack(bags, 1)
        splits = tile_sizes(batch, n)
        if k % 2 and batch:
            splits = [batch] + [0] * (n - 1)
        at = starts(splits)
        given = splits if k % 2 else None
        wanted = whole[at[rank] : at[rank + 1]]
        what = f"embedding {mode} weights {weighted} {dtype} dim {dim} batch {batch} held {held.tolist()}"
        for tiles in (1, 3):
            more = CallContext(asked.heap, tiles, asked.seconds)
            for _ in range(EPOCHS):
                found = embedding.forward(more, *data[rank], mode, batch, held.tolist() if k % 3 == 0 else None, given)
                shown(what, away(found, wanted.detach(), dtype))
        if dtype != torch.float32 or k == 0 or not batch:
            continue
        g = torch.from_numpy(rng.normal(size=whole.shape)).float()
        mine, scale = leaves[rank]
        wants = (
            torch.autograd.grad(whole, [*mine, *([scale] if weighted else [])], g, allow_unused=True) if mine else []
        )
        found, each = embedding.backward(asked, g[at[rank] : at[rank + 1]], *data[rank], mode, batch, None, given)
        for x, want in zip([*found, *([each] if each is not None and mine else [])], wants, strict=True):
            shown(f"{what}: gradient", away(x, torch.zeros_like(x) if want is None else want))


def values(rank: int, exchange: Exchange) -> Any:
    shown = Shown()
    with SymmetricHeap.create(1 << 23, backend(rank), exchange, "operators") as heap:
        asked = CallContext(heap, seconds=20.0)
        for work in (gemms, moe, gemvs, embeddings):
            work(asked, shown)
            heap.barrier()
    return {"count": shown.count, "wrong": shown.wrong[:20]}


def told(call: Any) -> tuple[str, float]:
    started = time.monotonic()
    try:
        call()
    except ShardplanError as error:
        return f"{type(error).__name__}: {error}", time.monotonic() - started
    return "no error", time.monotonic() - started


def silent(rank: int, exchange: Exchange) -> Any:
    """In the third call rank 0 leaves out its last signal; then nobody can go on until a reset."""
    with SymmetricHeap.create(1 << 20, backend(rank), exchange, "silent") as heap:
        asked = CallContext(heap, 4, seconds=1.0)
        a, b = torch.ones(8 * heap.ranks, 4), torch.ones(4, 4)
        for _ in range(2):
            gemm.forward(asked, a, b)
        if rank == 0:
            call = next(v for v in heap.kept[KNOWN].values() if isinstance(v, BlockMove)).call
            steps = [list(each) for each in call.steps]
            signals = [k for k, step in enumerate(steps[0]) if isinstance(step, SignalStep)]
            last = max(k for k in signals if steps[0][k - 1].to == 1)
            del steps[0][last]
            object.__setattr__(call, "steps", tuple(map(tuple, steps)))
        said, seconds = told(lambda: gemm.forward(asked, a, b))
        if rank != 1:
            time.sleep(1.5)  # its next signals would be taken for the one that it left out
        poisoned = told(lambda: gemm.forward(asked, a, b))[0]
        heap.reset()
        good = bool((gemm.forward(asked, a, b) == 4).all())
        return said, seconds < 2.0, poisoned, heap.header.failed == "", good


def death(rank: int, exchange: Exchange) -> Any:
    with SymmetricHeap.create(1 << 20, backend(rank), exchange, "death") as heap:
        asked = CallContext(heap, seconds=20.0)
        a, b = torch.ones(8, 4), torch.ones(4, 4)
        gemm.forward(asked, a, b)
        exchange(b"")  # between nodes what a rank said last may die with it
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        said, seconds = told(lambda: gemm.forward(asked, a, b))
        return said.replace(str(heap.header.peers[1].pid), "PID"), seconds < 1.0


def mismatch(rank: int, exchange: Exchange) -> Any:
    with SymmetricHeap.create(1 << 20, backend(rank), exchange, "mismatch") as heap:
        asked = CallContext(heap, seconds=5.0)
        a, x = torch.ones(8, 4), torch.ones(4)
        calls = [lambda: gemm.forward(asked, a, torch.ones(4, 4)), lambda: gemv.forward(asked, a, x)]
        return told(calls[rank % 2])[0], told(lambda: gemv.forward(asked, torch.ones(8 + rank, 4), x))[0]


def index(rank: int, exchange: Exchange) -> Any:
    """Rank 0 has an index that is no row."""
    with SymmetricHeap.create(1 << 20, backend(rank), exchange, "index") as heap:
        ids = torch.tensor([0, 1, 2 + (rank == 0), 0])
        table = [torch.ones(3, 4)]
        said, seconds = told(
            lambda: embedding.forward(CallContext(heap, seconds=20.0), table, ids, torch.arange(5), None, "sum", 4)
        )
        return said, seconds < 1.0


def preset(rank: int, exchange: Exchange) -> Any:
    """Counters over their wrap: an instance begins near the end of 32 bits."""
    with SymmetricHeap.create(1 << 20, backend(rank), exchange, "preset") as heap:
        asked = CallContext(heap, 4, seconds=5.0)
        a, b = torch.ones(8 * heap.ranks, 4), torch.ones(4, 4)
        gemm.forward(asked, a, b)
        made = instance(heap, "gemm_all_to_all", TileSchedule(tiles=4), "", 5.0)
        heap.barrier()
        made.epoch = (2**31 // 4) - 2
        assert made.flags
        made.flags[rank][:, 0] = 4 * made.epoch
        heap.barrier()
        return [bool((gemm.forward(asked, a * k, b) == 4 * k).all()) for k in range(6)], int(made.flags[rank][0, 0]) < 0


def main() -> None:
    if "pure" in sys.argv:
        natives.compiler = lambda: None
        assert natives.native() is None
    else:
        assert natives.native() is not None
    cases = [a.split(":") for a in sys.argv[1:] if ":" in a]
    print(json.dumps([forked(int(ranks), globals()[name], 100) for name, ranks in cases]))


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()

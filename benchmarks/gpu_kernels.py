"""Seconds of a hundred kernels as frameworks launch them, by shape, beside what `hardware` prices them at.

Each is timed by Triton's `do_bench`: device events, the L2 cache cleared between launches, the median. What a row does
and moves is what its op does and moves once, by formula: flops count a multiplication and an addition as two.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch.nn import functional as F  # noqa: N812

from shardplan.core.pattern import Work
from shardplan.hardware.prices.kernels import kernel_seconds
from shardplan.hardware.topology import Topology

DTYPES = {"bf16": torch.bfloat16, "f16": torch.float16, "f32": torch.float32, "f8": torch.float8_e4m3fn}
SIZES = {"bf16": 2, "f16": 2, "f32": 4, "f8": 1}
PRESETS = (("H200", "dgx-h200"), ("H100", "dgx-h100"), ("A100", "dgx-a100-80g"))


class Kernel(NamedTuple):
    """What is launched, and the work that is priced for it."""

    name: str
    shape: dict[str, Any]
    work: Work
    prepare: Callable[[str], Callable[[], Any]]  # from the torch device to the launch


def _draw(where: str, dtype: str, *shape: int) -> torch.Tensor:
    return torch.randn(shape, device=where, dtype=torch.float32).to(DTYPES[dtype])


# Products


def _product(m: int, n: int, k: int, dtype: str, layout: str = "TN") -> Kernel:
    """An m x k by k x n product; in a layout of cuBLAS a letter says whether that operand's summed dim is inner."""

    def prepare(where: str) -> Callable[[], Any]:
        a = _draw(where, dtype, m, k) if layout[0] == "T" else _draw(where, dtype, k, m).T
        b = _draw(where, dtype, n, k).T if layout[1] == "N" else _draw(where, dtype, k, n)
        if dtype == "f8":
            one = torch.ones((), device=where)
            return lambda: torch._scaled_mm(a, b, one, one, out_dtype=torch.bfloat16)
        return lambda: a @ b

    moved = (m * k + k * n) * SIZES[dtype] + m * n * max(SIZES[dtype], 2)
    rate = {"f32": "tf32"}.get(dtype, dtype)
    work = Work(2.0 * m * n * k, rate, moved, "product", (m, n, k))
    return Kernel("product", {"m": m, "n": n, "k": k, "layout": layout, "dtype": dtype}, work, prepare)


def _grouped(groups: int, m: int, n: int, k: int) -> Kernel:
    """As many products of m x k by k x n in one launch, as experts compute them."""

    def prepare(where: str) -> Callable[[], Any]:
        a, b = _draw(where, "bf16", groups * m, k), _draw(where, "bf16", groups, n, k).transpose(1, 2)
        ends = torch.arange(1, groups + 1, device=where, dtype=torch.int32) * m
        return lambda: torch._grouped_mm(a, b, offs=ends)

    moved = 2 * groups * (m * k + k * n + m * n)
    work = Work(2.0 * groups * m * n * k, "bf16", moved, "product", (m, n, k))
    return Kernel("grouped product", {"groups": groups, "m": m, "n": n, "k": k, "dtype": "bf16"}, work, prepare)


# Attention


def _attention(batch: int, seq: int, heads: int, kv_heads: int, head_dim: int, backward: bool, library: str) -> Kernel:
    """Causal attention of bf16 by one of PyTorch's libraries; a backward pass makes the scores again."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    chosen = {"flash": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION}[library]

    def prepare(where: str) -> Callable[[], Any]:
        q, k, v = (
            _draw(where, "bf16", batch, seq, n, head_dim).transpose(1, 2).detach().requires_grad_(backward)
            for n in (heads, kv_heads, kv_heads)
        )
        with sdpa_kernel(chosen) if where != "cpu" else torch.no_grad():
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=heads != kv_heads)
        if not backward:

            def forward() -> Any:
                with sdpa_kernel(chosen):
                    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=heads != kv_heads)

            return forward
        given = torch.randn_like(out)
        return lambda: torch.autograd.grad(out, (q, k, v), given, retain_graph=True)

    products = 5 if backward else 2
    flops = products * 2.0 * batch * heads * seq * seq * head_dim / 2
    moved = 2 * batch * seq * head_dim * (2 * heads + 2 * kv_heads) * (2 if backward else 1)
    shape = {"batch": batch, "seq": seq, "heads": heads, "kv_heads": kv_heads, "head_dim": head_dim}
    name = "attention backward" if backward else "attention"
    return Kernel(name, shape | {"library": library, "dtype": "bf16"}, Work(flops, "bf16", moved, "scores"), prepare)


def _decode(batch: int, context: int, heads: int, kv_heads: int, head_dim: int) -> Kernel:
    """One new token a sequence over a cache."""

    def prepare(where: str) -> Callable[[], Any]:
        q = _draw(where, "bf16", batch, heads, 1, head_dim)
        k, v = (_draw(where, "bf16", batch, kv_heads, context, head_dim) for _ in range(2))
        return lambda: F.scaled_dot_product_attention(q, k, v, enable_gqa=heads != kv_heads)

    flops = 4.0 * batch * heads * context * head_dim
    moved = 4.0 * batch * context * kv_heads * head_dim
    shape = {"batch": batch, "context": context, "heads": heads, "kv_heads": kv_heads, "head_dim": head_dim}
    return Kernel("decode attention", shape | {"dtype": "bf16"}, Work(flops, "bf16", moved, "scores"), prepare)


# What streams


Maker = Callable[..., Callable[[], Any]]


def _streams() -> dict[str, tuple[Maker, float]]:
    """By name: from device, dtype, rows and columns to the launch; and how often it moves an array of that size."""

    def norm(where: str, dtype: str, rows: int, wide: int) -> Callable[[], Any]:
        x, weight = _draw(where, dtype, rows, wide), _draw(where, dtype, wide)
        return lambda: F.rms_norm(x, (wide,), weight)

    def layer_norm(where: str, dtype: str, rows: int, wide: int) -> Callable[[], Any]:
        x, weight = _draw(where, dtype, rows, wide), _draw(where, dtype, wide)
        return lambda: F.layer_norm(x, (wide,), weight, weight)

    def unary(function: Callable[[torch.Tensor], Any]) -> Maker:
        def made(where: str, dtype: str, rows: int, wide: int) -> Callable[[], Any]:
            x = _draw(where, dtype, rows, wide)
            return lambda: function(x)

        return made

    def binary(function: Callable[[torch.Tensor, torch.Tensor], Any]) -> Maker:
        def made(where: str, dtype: str, rows: int, wide: int) -> Callable[[], Any]:
            x, y = _draw(where, dtype, rows, wide), _draw(where, dtype, rows, wide)
            return lambda: function(x, y)

        return made

    return {
        "copy": (unary(torch.clone), 2),
        "add": (binary(torch.add), 3),
        "gelu": (unary(F.gelu), 2),
        "silu, then product": (binary(lambda x, y: F.silu(x) * y), 5),  # two kernels, as eager PyTorch has it
        "softmax": (unary(lambda x: torch.softmax(x, -1)), 2),
        "rms norm": (norm, 2),
        "layer norm": (layer_norm, 2),
        "transpose": (unary(lambda x: x.T.contiguous()), 2),
    }


def _stream(name: str, rows: int, wide: int, dtype: str) -> Kernel:
    make, times = _streams()[name]
    work = Work(0.0, dtype, times * rows * wide * SIZES[dtype])
    return Kernel(name, {"rows": rows, "columns": wide, "dtype": dtype}, work, lambda w: make(w, dtype, rows, wide))


def _adamw(elements: int) -> Kernel:
    """A fused step over f32 parameters: reads four arrays and writes three."""

    def prepare(where: str) -> Callable[[], Any]:
        parameter = torch.nn.Parameter(_draw(where, "f32", elements))
        parameter.grad = torch.randn_like(parameter)
        optimizer = torch.optim.AdamW([parameter], fused=where != "cpu")
        return optimizer.step

    return Kernel("adamw", {"elements": elements, "dtype": "f32"}, Work(0.0, "f32", 28.0 * elements), prepare)


def _cross_entropy(rows: int, vocabulary: int, dtype: str) -> Kernel:
    """The loss alone, without its gradient, as eager PyTorch has it: log-softmax is written, then read at targets."""

    def prepare(where: str) -> Callable[[], Any]:
        x = _draw(where, dtype, rows, vocabulary)
        target = torch.randint(vocabulary, (rows,), device=where)
        return lambda: F.cross_entropy(x, target)

    work = Work(0.0, dtype, 2.0 * rows * vocabulary * SIZES[dtype])
    return Kernel("cross-entropy", {"rows": rows, "columns": vocabulary, "dtype": dtype}, work, prepare)


def _embedding(rows: int, vocabulary: int, wide: int) -> Kernel:
    def prepare(where: str) -> Callable[[], Any]:
        table, ids = _draw(where, "bf16", vocabulary, wide), torch.randint(vocabulary, (rows,), device=where)
        return lambda: F.embedding(ids, table)

    shape = {"rows": rows, "vocabulary": vocabulary, "columns": wide, "dtype": "bf16"}
    return Kernel("embedding", shape, Work(0.0, "bf16", 4.0 * rows * wide), prepare)


def _kernels() -> Iterator[Kernel]:
    """A hundred shapes, chosen before any was timed: those of Llama 3, Mixtral, DeepSeek-V3 and GPT, and squares."""
    for m in (1, 16, 128, 512, 2048, 8192):
        for n, k in ((4096, 4096), (28672, 4096), (4096, 14336), (8192, 1024), (1280, 8192)):
            yield _product(m, n, k, "bf16")
    for m, n, k in (
        (4096, 4096, 8192),
        (8192, 8192, 8192),
        (16384, 16384, 4096),
        (8192, 128256, 4096),
        (300, 700, 900),
    ):
        yield _product(m, n, k, "bf16")
    for layout in ("TT", "NN", "NT"):
        for m, n, k in ((4096, 4096, 8192), (14336, 4096, 8192), (1024, 8192, 4096)):
            yield _product(m, n, k, "bf16", layout)
    for side in (1024, 2048, 4096, 8192):
        yield _product(side, side, side, "f16")
        yield _product(side, side, side, "f32")
        yield _product(side, side, side, "f8")
    for m, n, k in ((16, 4096, 4096), (8192, 28672, 4096), (8192, 4096, 14336)):
        yield _product(m, n, k, "f8")
    for groups, m, n, k in ((8, 1024, 14336, 4096), (8, 128, 4096, 14336), (32, 256, 2048, 7168), (64, 64, 4096, 2048)):
        yield _grouped(groups, m, n, k)
    for library in ("flash", "cudnn"):
        for batch, seq, heads, kv_heads, head_dim in (
            (8, 1024, 16, 16, 64), (2, 4096, 32, 8, 128), (1, 8192, 32, 8, 128), (1, 8192, 8, 1, 128),
            (1, 32768, 8, 1, 128),
        ):  # fmt: skip
            for backward in (False, True):
                yield _attention(batch, seq, heads, kv_heads, head_dim, backward, library)
    for batch, context in ((1, 8192), (64, 2048), (64, 8192)):
        yield _decode(batch, context, 32, 8, 128)
    for name in _streams():
        for rows, wide in ((2048, 4096), (8192, 4096), (8192, 14336)):
            yield _stream(name, rows, wide, "bf16")
    for name in ("copy", "add", "rms norm", "softmax"):
        yield _stream(name, 8192, 8192, "f32")
    for elements in (1 << 20, 1 << 24, 1 << 28):
        yield _adamw(elements)
    for rows, vocabulary, dtype in ((8192, 32000, "bf16"), (8192, 128256, "bf16"), (8192, 128256, "f32")):
        yield _cross_entropy(rows, vocabulary, dtype)
    yield _embedding(8192, 128256, 4096)


def _small(kernel: Kernel) -> bool:
    """Say whether a CPU may run a kernel in a dry run."""
    return kernel.work.flops <= 1e9 and kernel.work.nbytes <= 1e8 and "f8" not in kernel.shape.values()


def priced_on(name: str) -> str:
    """Return the preset of a GPU by the name that its driver gives."""
    return next((preset for part, preset in PRESETS if part in name), "dgx-h100")


def time_kernels(dry: bool) -> dict[str, Any]:
    """Median seconds of each kernel, the price of it, and the ratio; a kernel that fails has its reason."""
    torch.set_float32_matmul_precision("high")
    where = "cpu" if dry else "cuda"
    preset = priced_on("" if dry else torch.cuda.get_device_name())
    spec = Topology.load(preset).device
    rows: list[dict[str, Any]] = []
    for kernel in _kernels():
        if dry and not _small(kernel):
            continue
        row: dict[str, Any] = {"kernel": kernel.name, **kernel.shape}
        row |= {"flops": kernel.work.flops, "bytes": kernel.work.nbytes}
        try:
            run = kernel.prepare(where)
            run()
            if not dry:
                from triton.testing import do_bench

                row["seconds"] = do_bench(run, warmup=10, rep=60, return_mode="median") / 1e3
        except Exception as error:
            row["why"] = f"{type(error).__name__}: {error}".splitlines()[0][:200]
        else:
            row["priced"] = float(kernel_seconds(kernel.work, spec))
            if "seconds" in row:
                row["priced / measured"] = round(row["priced"] / row["seconds"], 3)
        rows.append(row)
        if not dry:
            torch.cuda.empty_cache()
    ran = [row for row in rows if "why" not in row]
    found: dict[str, Any] = {"preset": preset, "rows": rows, "good": len(ran) >= 0.9 * len(rows)}
    ratios: dict[str, list[float]] = {}
    for row in ran:
        if "seconds" in row:
            ratios.setdefault(row["kernel"], []).append(row["priced / measured"])
    return found | {"median priced / measured": {k: round(statistics.median(v), 3) for k, v in ratios.items()}}

"""Ops beside torch's own functions, in f64: what the laws of gradients run over, and what makes a gradient of an op."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from compute_examples import UNEQUAL, Example, Lettered, Sizes
from shardplan.core.layout import Layout
from shardplan.core.mesh import Mesh
from shardplan.core.ops import (
    Attention,
    ClassSums,
    Combine,
    Concat,
    Crop,
    CrossEntropy,
    Dispatch,
    Dropout,
    Einsum,
    Elementwise,
    EmbeddingBag,
    Expand,
    FromSlots,
    Gather,
    LayerNorm,
    Op,
    Pad,
    Pin,
    ReduceDims,
    Reshape,
    RmsNorm,
    Rotary,
    ScatterAdd,
    Softmax,
    Split,
    TopK,
    ToSlots,
)
from shardplan.core.ops.composed import Reverse, differs, needing
from shardplan.core.program import Program
from shardplan.core.program_builder import ProgramBuilder
from shardplan.core.reference import run_reference
from shardplan.core.tensor import TensorType
from shardplan.errors import LayoutError

ONE = Mesh(x=1, y=1)


def case(op: Op, operands: tuple[str, ...], torch: Any, legal: int) -> Example:
    """An op that no size changes; `torch` is of the module torch and the operands."""
    return Example(lambda s, layout: op, operands, lambda s, *x: torch(*x), legal)


def _torch() -> Any:
    return pytest.importorskip("torch")


def _embedding(ids: Any, table: Any) -> Any:
    """Rows by torch, zeros where an id has none."""
    found = _torch().nn.functional.embedding(ids.clamp(0, len(table) - 1), table)
    return found * ((ids >= 0) & (ids < len(table)))[..., None]


def _index_add(s: Sizes, values: Any, ids: Any) -> Any:
    mine = (ids >= 0) & (ids < s["i"])
    return _torch().zeros(s["i"], values.shape[1], dtype=values.dtype).index_add(0, ids[mine], values[mine])


class Ignoring(Lettered):
    """Of its targets some are -100."""


def _class_sums(s: Sizes, logits: Any, top: Any, targets: Any) -> Any:
    chosen = logits.gather(-1, targets.long().clamp(0)[..., None])
    return (logits - top).exp().sum(-1, keepdim=True), chosen * (targets >= 0)[..., None]


def _attention(q: Any, k: Any, v: Any, causal: bool, before: int = 0) -> Any:
    torch = _torch()
    b, s, g, r, d = q.shape
    heads = (x.permute(0, 2, 1, 3).repeat_interleave(r, 1) for x in (k, v))
    mask = torch.ones(s, k.shape[1], dtype=torch.bool).tril(before) if causal else None
    q = q.permute(0, 2, 3, 1, 4).reshape(b, g * r, s, d)
    out = torch.nn.functional.scaled_dot_product_attention(q, *heads, attn_mask=mask)
    return out.reshape(b, g, r, s, -1).permute(0, 3, 1, 2, 4)


def _windowed(q: Any, k: Any, v: Any, window: int, cap: float, mine: Any = None, theirs: Any = None,
              sinks: Any = None) -> Any:  # fmt: skip
    """Causal attention of a window, with capped scores, of segments where there are some; sinks are one more key."""
    torch = _torch()
    x = torch.einsum("bsgrd,btgd->bgrst", q, k) * q.shape[-1] ** -0.5
    x = cap * (x / cap).tanh() if cap else x
    row, column = torch.arange(q.shape[1])[:, None], torch.arange(k.shape[1])
    seen = (column <= row) & (column > row - window) if window else column <= row
    if mine is not None:
        seen = seen & (mine[:, :, None] == theirs[:, None])[:, None, None]
    x = x.masked_fill(~seen, -1e30)
    if sinks is not None:
        x = torch.cat((x, sinks[None, :, :, None, None].expand(*x.shape[:-1], 1)), -1)
    return torch.einsum("bgrst,btge->bsgre", x.softmax(-1)[..., : k.shape[1]], v)


def _turned(x: Any, position: Any, interleaved: bool) -> Any:
    """Rotary positions by complex numbers."""
    torch, half = _torch(), x.shape[-1] // 2
    angle = position[:, None] * 10000.0 ** (-torch.arange(half, dtype=x.dtype) / half)
    by = torch.polar(torch.ones_like(angle), angle)[:, None]
    if interleaved:
        return torch.view_as_real(torch.view_as_complex(x.unflatten(-1, (half, 2)).contiguous()) * by).flatten(-2)
    z = torch.complex(*x.chunk(2, -1)) * by
    return torch.cat([z.real, z.imag], -1)


def _used(ids: Any, g: int, n: int, k: int) -> int:
    """How many choices of a group come before one and have its expert."""
    return sum(int(i) == int(ids[g, n, k]) for i in ids[g].flatten()[: n * ids.shape[2] + k])


def _to_slots(rows: Any, ids: Any, experts: int, capacity: int) -> tuple[Any, Any]:
    """Choice by choice; and how many are dropped."""
    torch = _torch()
    out = [[[torch.zeros(rows.shape[-1], dtype=rows.dtype)] * capacity for _ in range(experts)] for _ in ids]
    dropped = [0] * len(ids)
    for g, n, k in itertools.product(*map(range, ids.shape)):
        used = _used(ids, g, n, k)
        if used < capacity:
            slots = out[g][int(ids[g, n, k])]
            slots[used] = rows[g, n, k]
        dropped[g] += used >= capacity
    found = torch.stack([torch.stack([torch.stack(slots) for slots in of]) for of in out])
    return found, torch.tensor(dropped, dtype=torch.int32)


def _from_slots(slots: Any, ids: Any) -> Any:
    torch = _torch()
    found = torch.zeros(*ids.shape, slots.shape[-1], dtype=slots.dtype)
    for g, n, k in itertools.product(*map(range, ids.shape)):
        used = _used(ids, g, n, k)
        if used < slots.shape[2]:
            found[g, n, k] = slots[g, int(ids[g, n, k]), used]
    return found


def _mixed(x: np.ndarray) -> np.ndarray:
    """The finalizer of MurmurHash3, on unsigned numbers."""
    x = (x ^ (x >> np.uint32(16))) * np.uint32(0x85EBCA6B)
    x = (x ^ (x >> np.uint32(13))) * np.uint32(0xC2B2AE35)
    return x ^ (x >> np.uint32(16))


def _dropout(x: Any, key: Any, rate: float) -> Any:
    first = np.asarray(key, np.int32)
    bits = _mixed(first.astype(np.uint32).reshape([*first.shape, *[1] * (x.ndim - first.ndim)]))
    for d, n in [*enumerate(x.shape)][first.ndim :]:
        here = np.arange(d, d + n, dtype=np.uint32).reshape([n if j == d else 1 for j in range(x.ndim)])
        bits = _mixed(bits ^ _mixed(here))
    return x * _torch().from_numpy((bits % 2**30 >= int(rate * 2**30)) / (1 - rate))


def _of(name: str, *arguments: Any, **named: Any) -> Any:
    return getattr(_torch().nn.functional, name)(*arguments, **named)


def _top(x: Any, k: int) -> tuple[Any, Any]:
    found = _torch().topk(x, k)
    return found.values, found.indices.int()


def lettered(op: Op, operands: tuple[str, ...], torch: Any, legal: int) -> Example:
    """As `case`."""
    return Lettered(lambda s, layout: op, operands, lambda s, *x: torch(*x), legal)


GRADIENTS = (
    case(Einsum("ik,kj->ij"), ("f64 ik", "f64 kj"), lambda a, b: a @ b, 52),
    case(Einsum("ij,jk,j->ik"), ("f64 ij", "f64 jk", "f64 j"), lambda a, b, c: (a * c) @ b, 67),
    case(Einsum("ij->j"), ("f64 ij",), lambda a: a.sum(0), 27),
    case(Einsum("i,jk->ij"), ("f64 i", "f64 jk"), lambda a, b: a[:, None] * b.sum(1), 52),
    case(Einsum("ij->ji"), ("f64 ij",), lambda a: a.T, 36),
    case(Einsum("ij,ij->"), ("f64 ij", "f64 ij"), lambda a, b: (a * b).sum(), 38),
    case(Elementwise("a - 2 * b"), ("f64 ij", "f64 j"), lambda a, b: a - 2 * b, 36),
    case(Elementwise("a * b / (1 + c * c)"), ("f64 ij", "f64 oj", "f64 j"), lambda a, b, c: a * b / (1 + c * c), 38),
    case(Elementwise("where(a, b * b, -c)"), ("bool ij", "f64 ij", "f64 j"),
         lambda a, b, c: _torch().where(a, b * b, -c), 18),
    case(ReduceDims((0,)), ("f64 ij",), lambda a: a.sum(0), 27),
    case(ReduceDims((1,), "mean", keep=True), ("f64 ip",), lambda a: a.mean(1, keepdim=True), 27),
    case(ReduceDims((0,), "max"), ("f64 ij",), lambda a: a.amax(0), 10),
    case(ReduceDims((0, 1), "min", keep=True), ("f64 ij",), lambda a: a.amin((0, 1), keepdim=True), 4),
    Example(lambda s, layout: Expand(f"o=1 j -> k={s['k']} j i={s['i']}", Layout((("x",),))), ("f64 oj",),
            lambda s, a: a.reshape(1, -1, 1).expand(s["k"], -1, s["i"]), 5),
    Example(lambda s, layout: Reshape(f"(a={s['a']} b) j -> a b j"), ("f64 mj",),
            lambda s, a: a.reshape(s["a"], s["b"], s["j"]), 29),
    case(Reshape("a b j -> (a b) j"), ("f64 abj",), lambda a: a.flatten(0, 1), 29),
    case(Reshape("one=1 i -> i other=1"), ("f64 oi",), lambda a: a.T, 24),
    case(Pad((1, 0), (2, 0), 5), ("f64 ij",),
         lambda a: _torch().nn.functional.pad(a, (0, 0, 1, 2), value=5), 17),
    Example(lambda s, layout: Crop((1, 0), (s["i"] - 2, s["j"])), ("f64 ij",), lambda s, a: a[1:-2], 24),
    case(Gather(), ("f64 ij", "i64 k"), lambda table, ids: _embedding(ids, table), 48),
    Example(lambda s, layout: ScatterAdd(s["i"], Layout((("x",),))), ("f64 kj", "i64 k"), _index_add, 5),
    case(Softmax(1), ("f64 ijk",), lambda x: _of("softmax", x, 1), 18),
    lettered(LayerNorm(), ("f64 ijk", "f64 k", "f64 k"), lambda x, g, b: _of("layer_norm", x, g.shape, g, b), 11),
    lettered(RmsNorm(), ("f64 ijk", "f64 k"), lambda x, g: _of("rms_norm", x, g.shape, g, 1e-6), 18),
    Ignoring(lambda s, layout: CrossEntropy(), ("f64 ija", "i32 ij"),
             lambda s, x, y: _of("cross_entropy", x.permute(0, 2, 1), y.long(), reduction="none"), 11),
    Ignoring(lambda s, layout: ClassSums(), ("f64 ija", "f64 ijo", "i32 ij"), _class_sums, 19),
    lettered(EmbeddingBag(), ("f64 ij", "i32 ka"), lambda w, ids: _of("embedding_bag", ids, w, mode="sum"), 40),
    lettered(Attention(), ("f64 biakj", "f64 biaj", "f64 biak"), lambda q, k, v: _attention(q, k, v, True), 18),
    lettered(Attention(False, 0.3), ("f64 biakj", "f64 bpaj", "f64 bpai"),
             lambda q, k, v: _attention(q * 0.3 * q.shape[-1] ** 0.5, k, v, False), 28),
    lettered(Attention(), ("f64 bpakj", "f64 biaj", "f64 biao", "i32"),
             lambda q, k, v, p: _attention(q, k, v, True, int(p)), 54),
    lettered(Attention(window=2, cap=0.7), ("f64 biakj", "f64 biaj", "f64 biao"),
             lambda q, k, v: _windowed(q, k, v, 2, 0.7), 40),
    lettered(Attention(window=2, segments=True, sinks=True),
             ("f64 biakj", "f64 biaj", "f64 biao", "i32 bi", "i32 bi", "f64 ak"),
             lambda q, k, v, mine, theirs, sinks: _windowed(q, k, v, 2, 0, mine, theirs, sinks), 40),
    lettered(Rotary(), ("f64 bijp", "i32 i"), lambda x, p: _turned(x, p, False), 28),
    lettered(Rotary(), ("f64 bip", "i32 i"), lambda x, p: _turned(x[:, :, None], p, False)[:, :, 0], 18),
    lettered(Rotary(interleaved=True), ("f64 bijkp", "i32 i"),
             lambda x, p: _turned(x.flatten(2, 3), p, True).reshape(x.shape), 40),
    lettered(Rotary(interleaved=True), ("f64 bijp", "i32 i"), lambda x, p: _turned(x, p, True), 28),
    lettered(Concat(1), ("f64 ijk", "f64 iak", "f64 iok"), lambda *x: _torch().cat(x, 1), 18),
    Lettered(lambda s, layout: Split(1, (2, s["i"] - 2)), ("f64 jik",),
             lambda s, x: _torch().split(x, (2, s["i"] - 2), 1), 18),
    lettered(TopK(3), ("f64 ijk",), lambda x: _top(x, 3), 11),
    lettered(ToSlots(5, 2, Layout((("y",),))), ("f64 ajkb", "i32 ajk"), lambda x, ids: _to_slots(x, ids, 5, 2)[0], 4),
    lettered(FromSlots(), ("f64 akjb", "i32 aij"), _from_slots, 28),
    lettered(Dispatch(5, 3, Layout((("x",),))), ("f64 aib", "i32 aij"),
             lambda x, ids: _to_slots(x[:, :, None].expand(-1, -1, ids.shape[2], -1), ids, 5, 3), 4),
    lettered(Combine(), ("f64 akjb", "i32 aij", "f64 aij"),
             lambda x, ids, w: (_from_slots(x, ids) * w[..., None]).sum(2), 39),
    lettered(Dropout(0.3), ("f64 ijk", "i32"), lambda x, key: _dropout(x, key, 0.3), 28),
    lettered(Dropout(0.3), ("f64 ijk", "i32 i"), lambda x, key: _dropout(x, key, 0.3), 28),
    case(Pin(Layout((("x",), ()))), ("f64 ij",), lambda a: 1 * a, 18),
)  # fmt: skip


def arrays(example: Example, sizes: Sizes, rng: np.random.Generator) -> list[np.ndarray]:
    """Floats away from ties, conditions, i64 ids of which some have no row, i32 from 0 to 3."""
    found = [
        rng.normal(size=x.shape) if x.dtype.kind == "f" else rng.integers(0, 4, x.shape, "i4") if x.dtype == "i4" else x
        for x in example.arrays(sizes, rng)
    ]
    if isinstance(example, Ignoring):
        found[-1][found[-1] == 3] = -100
    return found


def back(op: Op, types: Sequence[TensorType]) -> Program:
    """From operands and the cotangent of each result to the results, and the cotangents of float operands."""
    names = [f"x{k}" for k in range(len(types))]
    builder = ProgramBuilder(dict(zip(names, types, strict=True)))
    results = builder.write_step(op, *names)
    steps, found, seeds = tuple(builder.steps), dict[str, str](), list[str]()
    for r in results:
        if differs(builder.types[r]):
            t = builder.types[r]
            found[r] = builder.add_input(t.with_layout(Layout(t.layout.dims, root=t.layout.root)))
            seeds.append(found[r])
    wanted = [n for n, t in zip(names, types, strict=True) if differs(t)]
    Reverse(builder, builder.types, lambda name: name).fill_cotangents(
        steps, found, needing(steps, builder.types, wanted)
    )
    inputs = [(n, builder.types[n]) for n in (*names, *seeds)]
    return Program(inputs, builder.steps, (*results, *(found[n] for n in wanted)))


def sampled(example: Example, sizes: Sizes, most: int) -> list[Program]:
    """Gradients on some legal assignments, by compute ops alone."""
    legal = [pair for pair in example.legal_ones(sizes) if not any(t.layout.root for t in pair[1])]
    found: list[Program] = []
    for op, types in legal[:: max(1, len(legal) // most)]:
        try:
            found.append(back(op, types))
        except LayoutError:
            continue
    return found


def on_one(op: Op, values: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Results on one device."""
    types = [TensorType(x.dtype.name, x.shape, (), ONE) for x in values]
    names = [f"x{k}" for k in range(len(types))]
    builder = ProgramBuilder(dict(zip(names, types, strict=True)))
    out = builder.write_step(op, *names)
    return [
        x
        for (x,) in run_reference(
            Program(list(zip(names, types, strict=True)), builder.steps, out), [[x] for x in values]
        )
    ]


def by_torch(example: Example, given: list[np.ndarray], seeds: list[np.ndarray]) -> list[np.ndarray]:
    """Results and gradients as torch has them."""
    torch = _torch()
    leaves = [torch.from_numpy(x.copy()).requires_grad_(x.dtype.kind == "f") for x in given]
    found: Any = example.whole(UNEQUAL, *leaves)
    found = found if isinstance(found, tuple) else (found,)
    wanted = [x for x in leaves if x.requires_grad]
    floats = [y for y in found if y.is_floating_point()]
    grads = torch.autograd.grad(floats, wanted, [torch.from_numpy(s) for s in seeds])
    return [x.detach().numpy() for x in (*found, *grads)]

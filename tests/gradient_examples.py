"""Ops beside torch's own functions, in f64: what the laws of gradients run over, and what makes a gradient of an op."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from compute_examples import Example, Sizes
from shardplan.core.draft import Draft
from shardplan.core.layout import Layout
from shardplan.core.mesh import Mesh
from shardplan.core.ops import Crop, Einsum, Elementwise, Expand, Gather, Op, Pad, ReduceDims, Reshape, ScatterAdd
from shardplan.core.ops.composed import Reverse, differs, needing
from shardplan.core.program import Program
from shardplan.core.reference import run_program
from shardplan.core.tensor import TensorType

ONE = Mesh(x=1, y=1)


def case(op: Op, operands: tuple[str, ...], torch: Any, legal: int) -> Example:
    """An op that no size changes; `torch` is of the module torch and the operands."""
    return Example(lambda s, layout: op, operands, lambda s, *x: torch(*x), legal)


def _torch() -> Any:
    import torch

    return torch


def _embedding(ids: Any, table: Any) -> Any:
    """Rows by torch, zeros where an id has none."""
    found = _torch().nn.functional.embedding(ids.clamp(0, len(table) - 1), table)
    return found * ((ids >= 0) & (ids < len(table)))[..., None]


def _index_add(s: Sizes, values: Any, ids: Any) -> Any:
    mine = (ids >= 0) & (ids < s["i"])
    return _torch().zeros(s["i"], values.shape[1], dtype=values.dtype).index_add(0, ids[mine], values[mine])


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
)  # fmt: skip


def arrays(example: Example, sizes: Sizes, rng: np.random.Generator) -> list[np.ndarray]:
    """Floats away from ties, ids of which some have no row, conditions."""
    found = example.arrays(sizes, rng)
    return [rng.normal(size=x.shape) if x.dtype.kind == "f" else x for x in found]


def back(op: Op, types: Sequence[TensorType]) -> Program:
    """From operands and the cotangent of each result to the results, and the cotangents of float operands."""
    names = [f"x{k}" for k in range(len(types))]
    draft = Draft(dict(zip(names, types, strict=True)))
    results = draft.every(op, *names)
    steps, found, seeds = tuple(draft.steps), dict[str, str](), list[str]()
    for r in results:
        if differs(draft.types[r]):
            t = draft.types[r]
            found[r] = draft.given(t.with_layout(Layout(t.layout.dims, root=t.layout.root)))
            seeds.append(found[r])
    wanted = [n for n, t in zip(names, types, strict=True) if differs(t)]
    Reverse(draft, draft.types, lambda name: name).back(steps, found, needing(steps, draft.types, wanted))
    inputs = [(n, draft.types[n]) for n in (*names, *seeds)]
    return Program(inputs, draft.steps, (*results, *(found[n] for n in wanted)))


def on_one(op: Op, values: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Results on one device."""
    types = [TensorType(x.dtype.name, x.shape, (), ONE) for x in values]
    names = [f"x{k}" for k in range(len(types))]
    draft = Draft(dict(zip(names, types, strict=True)))
    out = draft.every(op, *names)
    return [
        x
        for (x,) in run_program(Program(list(zip(names, types, strict=True)), draft.steps, out), [[x] for x in values])
    ]

"""What frameworks name as one operation, written with ours: products, norms, attention, losses, rows, parts.

Each takes and returns views; none knows a framework.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from shardplan.core.dtypes import stands_for
from shardplan.core.expression_tree import GELU_EXACT
from shardplan.core.layout import Layout
from shardplan.core.ops import (
    Attention,
    Concat,
    Constant,
    Crop,
    CrossEntropy,
    Gather,
    LayerNorm,
    RmsNorm,
    Softmax,
)
from shardplan.interop.importers.views import AtomView, AxisFactor, Descent, Group, size_of
from shardplan.interop.importers.writer import MASKED, ONE, FlatWriter


def linear(w: FlatWriter, x: AtomView, weight: AtomView, bias: AtomView | None = None) -> AtomView:
    """Times a weight `[out in]`, plus a bias."""
    lead = [f"d{d}" for d in range(len(x.dims) - 1)]
    y = w.einsum([[*lead, "i"], ["o", "i"]], [*lead, "o"], x, weight)
    return y if bias is None else w.write_elementwise("a + b", y, bias)


def matmul(w: FlatWriter, x: AtomView, y: AtomView) -> AtomView:
    """The product of matrices, or of a vector, with dims before them that broadcast."""
    ndim = max(len(x.dims), len(y.dims)) - 2
    names = [f"d{d}" for d in range(ndim)]
    left = [*names[ndim - (len(x.dims) - 2) :], "m", "k"] if len(x.dims) > 1 else ["k"]
    right = [*names[ndim - (len(y.dims) - 2) :], "k", "n"] if len(y.dims) > 1 else ["k"]
    out = [*names, *(n for n in ("m", "n") if n in (*left, *right))]
    return w.einsum([left, right], out, x, y)


def softmax(w: FlatWriter, x: AtomView, dim: int) -> AtomView:
    """Along a dim."""
    x = w.merge_dim(x, dim % len(x.dims))
    return AtomView(w.builder(Softmax(x.dims[dim][0].axis), x.name), x.dims)


def gelu(w: FlatWriter, x: AtomView, *, tanh: bool) -> AtomView:
    """By the error function, or by its approximation with a tanh."""
    return w.write_elementwise("gelu(a)" if tanh else GELU_EXACT, x)


def fill_vector(w: FlatWriter, value: float, dtype: str, n: int) -> str:
    """A vector of one value."""
    return w.builder(Constant(value, dtype, (n,), Layout(((),)), ONE))


def layer_norm(w: FlatWriter, x: AtomView, gain: AtomView | None, bias: AtomView | None, eps: float) -> AtomView:
    """Over the last dim."""
    x, name = w.move_dim_last(x)
    n, dtype = x.shape[-1], w.dtype(x)
    gains = (
        w.materialize_view(v).name if v is not None else fill_vector(w, one, dtype, n)
        for v, one in ((gain, 1.0), (bias, 0.0))
    )
    return _forget_origins(AtomView(w.builder(LayerNorm(eps), name, *gains), x.dims))


def rms_norm(w: FlatWriter, x: AtomView, gain: AtomView | None, eps: float) -> AtomView:
    """Over the last dim."""
    x, name = w.move_dim_last(x)
    by = w.materialize_view(gain).name if gain is not None else fill_vector(w, 1.0, w.dtype(x), x.shape[-1])
    return _forget_origins(AtomView(w.builder(RmsNorm(eps), name, by), x.dims))


def _forget_origins(x: AtomView) -> AtomView:
    """What was normalised is no longer what a parameter made."""
    return AtomView(x.name, (*x.dims[:-1], tuple(a._replace(origins=frozenset()) for a in x.dims[-1])))


def attention(
    w: FlatWriter,
    q: AtomView,
    k: AtomView,
    v: AtomView,
    causal: bool,
    scale: float | None,
    mask: AtomView | None = None,
) -> AtomView:
    """Of `[batch heads sequence head]`; keys and values may have fewer heads, or some of them repeated."""
    if len(q.dims) != 4 or (causal and mask is not None):
        raise NotImplementedError("attention of other than 4 dims, or causal with a mask")
    by = q.shape[-1] ** -0.5 if scale is None else scale
    if not by or not math.isfinite(by):
        raise NotImplementedError(f"scale={by}; legal is a finite number other than 0")
    if k.shape[1] != q.shape[1]:
        k, v = (repeated_heads(x, q.shape[1] // x.shape[1]) for x in (k, v))
    q, k, v = w.align_cuts([x.tidy for x in (q, k, v)], [1, 1, 1])
    if any(x.has_axis != y.has_axis for x, y in zip(k.dims[1], v.dims[1], strict=True)):
        k, v = (w.merge_dim(x, 1) for x in (k, v))
        q, k, v = w.align_cuts([q, k, v], [1, 1, 1])
    if mask is not None:
        return _masked_attention(w, q, k, v, by, mask)
    groups = tuple(a.has_axis for a in k.dims[1])
    if groups != tuple(sorted(groups, reverse=True)):  # repeated before the heads, not behind them
        k, v = (w.merge_dim(x, 1) for x in (k, v))
        q, k, v = w.align_cuts([q, k, v], [1, 1, 1])
        groups = tuple(a.has_axis for a in k.dims[1])
    many = sum(groups)
    kept, ratio = q.dims[1][:many], q.dims[1][many:]
    names = [w.materialize_groups(q, [q.dims[0], q.dims[2], kept, ratio, q.dims[3]])]
    names += [w.materialize_groups(x, [x.dims[0], x.dims[2], x.dims[1][:many], x.dims[3]]) for x in (k, v)]
    for name, dims in zip(names, (("kv_heads", "ratio"), ("kv_heads",), ("kv_heads",)), strict=True):
        w.mean(name, "batch", "sequence", *dims, "head")
    out = w.builder(Attention(causal, 0.0 if stands_for(by, q.shape[-1] ** -0.5, w.dtype(q)) else by), *names)
    b, s, g, r, e = w.view_value(out).dims
    return AtomView(out, (b, (*g, *r), s, e))


def repeated_heads(x: AtomView, times: int) -> AtomView:
    """Every head so often."""
    return AtomView(x.name, (x.dims[0], (*x.dims[1], AxisFactor(times, -1)), *x.dims[2:])) if times > 1 else x


def _masked_attention(w: FlatWriter, q: AtomView, k: AtomView, v: AtomView, scale: float, mask: AtomView) -> AtomView:
    scores = w.einsum([["b", "h", "s", "d"], ["b", "h", "t", "d"]], ["b", "h", "s", "t"], q, k)
    scores = w.write_elementwise(f"a * {scale!r}", scores)
    if w.dtype(mask) == "bool":
        scores = w.write_elementwise(f"where(a, b, {MASKED})", mask, scores)
    else:
        scores = w.write_elementwise("a + b", scores, mask)
    return w.einsum([["b", "h", "s", "t"], ["b", "h", "t", "d"]], ["b", "h", "s", "d"], softmax(w, scores, -1), v)


def cross_entropy(w: FlatWriter, logits: AtomView, targets: AtomView) -> AtomView:
    """Of the classes in the last dim, for each of the others."""
    logits, targets = logits.tidy, targets.tidy
    for d in range(len(targets.dims)):
        if size_of(logits.dims[d]) > 1:
            logits, targets = w.align_cuts([logits, targets], [d, d])
    logits, name = w.move_dim_last(logits)
    places = {(d, k): a for d, g in enumerate(logits.dims[:-1]) for k, a in enumerate(g)}
    order = sorted(places, key=lambda p: places[p].axis)
    axes = [(targets.dims[d][k],) if k < len(targets.dims[d]) else () for d, k in order]
    ids = w.materialize_groups(targets, axes)
    w.mean(name, *(None for _ in order), "vocab")
    return AtomView(w.builder(CrossEntropy(), name, ids), logits.dims[:-1])


def gather_rows(w: FlatWriter, table: AtomView, ids: AtomView) -> AtomView:
    """Rows of a table by ids."""
    table = w.merge_dim(table, 0)
    atoms = [a for g in table.dims[1:] for a in g]
    name = w.materialize_groups(table, [table.dims[0], *((a,) for a in atoms)])
    shift = w.builder.types[ids.name].ndim
    place = {a: shift + k for k, a in enumerate(atoms)}
    if len(table.dims) == 2 and len(atoms) == 1:
        w.tables.append((name, ids.name))
    rest = tuple(tuple(a._replace(axis=place[a]) for a in g) for g in table.dims[1:])
    return AtomView(w.builder(Gather(), name, ids.name), (*ids.dims, *rest))


def part(w: FlatWriter, v: AtomView, dim: int, start: int, stop: int) -> AtomView:
    """The elements of a dim from `start` to before `stop`."""
    dim %= len(v.dims)
    n, size = v.shape[dim], stop - start
    if size == n:
        return v
    if size <= 0:
        return w.empty(w.dtype(v), [*v.shape[:dim], 0, *v.shape[dim + 1 :]])
    v = v.tidy
    atoms: list[AxisFactor] = list(v.dims[dim])
    minor = size_of(atoms[1:])
    origins = frozenset(o._replace(parts=n // size) for o in atoms[0].origins if o.parts == 1)
    if len(atoms) > 1 or n % size or start % size:
        origins = frozenset()
    if start % minor or stop % minor or not atoms[0].has_axis:
        v, minor = w.merge_dim(v, dim), 1
        atoms = list(v.dims[dim])
    at, ndim = atoms[0].axis, w.builder.types[v.name].ndim
    shape = w.builder.types[v.name].shape
    begin, end = ([x if d == at else other for d, other in enumerate(ends)] for x, ends in
                  ((start // minor, (0,) * ndim), (stop // minor, shape)))  # fmt: skip
    name = w.builder(Crop(tuple(begin), tuple(end)), v.name)
    first = AxisFactor(size // minor, at, origins)
    rest = tuple(atoms[1:])
    group: Group = (first, *rest) if first.size > 1 or not rest else rest
    return AtomView(name, (*v.dims[:dim], group, *v.dims[dim + 1 :]))


def split_dim(w: FlatWriter, v: AtomView, dim: int, sizes: Sequence[int]) -> list[AtomView]:
    """The parts of these sizes that follow one another along a dim."""
    return [part(w, v, dim, sum(sizes[:k]), sum(sizes[: k + 1])) for k in range(len(sizes))]


def joined_along(w: FlatWriter, views: Sequence[AtomView], dim: int) -> AtomView:
    """After one another along a dim; those without elements add nothing."""
    dim %= len(views[0].dims)
    found = [w.merge_dim(v.tidy, dim) for v in views if v.size]
    if len(found) < 2:
        return found[0] if found else views[0]
    for d in range(len(found[0].dims)):
        if d != dim and size_of(found[0].dims[d]) > 1:
            found = w.align_cuts(found, [d] * len(found))
    first = {(d, k): a for d, g in enumerate(found[0].dims) for k, a in enumerate(g)}
    order = sorted(first, key=lambda p: (first[p].has_axis, first[p].axis))
    names = [w.materialize_groups(v, [(v.dims[d][k],) if k < len(v.dims[d]) else () for d, k in order]) for v in found]
    place = {p: at for at, p in enumerate(order)}
    name = w.builder(Concat(place[dim, 0]), *names)
    total = sum(v.shape[dim] for v in found)
    dims = tuple(
        tuple(
            AxisFactor(total, place[d, k]) if d == dim else AxisFactor(a.size, place[d, k], _origins(found, d, k))
            for k, a in enumerate(g)
        )
        for d, g in enumerate(found[0].dims)
    )
    return AtomView(name, dims)


def _origins(views: Sequence[AtomView], dim: int, k: int) -> frozenset[Descent]:
    """The parameters' dims that one dim of several views comes from."""
    return frozenset(o for v in views if k < len(v.dims[dim]) for o in v.dims[dim][k].origins)

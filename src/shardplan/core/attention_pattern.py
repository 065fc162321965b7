"""`AttentionRule`: products with a softmax of products, masked or not, are attention; a rule of `close_composites`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from shardplan.core.composite_patterns import Formulas, composite
from shardplan.core.dtypes import stands_for
from shardplan.core.ops.arithmetic import Elementwise
from shardplan.core.ops.attention import Attention
from shardplan.core.ops.layers import Softmax
from shardplan.core.ops.placing import Reshape
from shardplan.core.ops.products import Einsum
from shardplan.core.program_builder import ProgramBuilder
from shardplan.core.step import Step

LOW = -1e4  # what is added to a masked score, or stands in its place, is at most this


class Scores(NamedTuple):
    """The product that scores are, their factor, and what is masked: a name, and whether it says what is kept.

    Of a mask that is added, and then scaled with the scores, `more` is the factor.
    """

    step: Step
    scale: float
    mask: str
    kept: bool
    along: tuple[int, ...]  # the dims larger than 1 along which the mask is not the same, among those of the scores
    more: float


class AttentionRule:
    """The rule, and the names of queries, keys and values that it wrote, each with what its dims are."""

    def __init__(self) -> None:
        self.said: list[tuple[str, tuple[str | None, ...]]] = []

    def __call__(self, f: Formulas, builder: ProgramBuilder, step: Step, names: Mapping[str, str]) -> str | None:
        """Write attention where a step is the product that ends it."""
        if not isinstance(step.op, Einsum) or len(step.operands) != 2:
            return None
        for k in (0, 1):
            weights = f.source(step.operands[k])
            x = _softmax_source(f, weights)
            scores = _scores(f, x) if x else None
            if scores is not None:
                return self._write_attention(f, builder, step, k, weights, scores, names)
        return None

    def _write_attention(
        self,
        f: Formulas,
        builder: ProgramBuilder,
        step: Step,
        k: int,
        weights: str,
        scores: Scores,
        names: Mapping[str, str],
    ) -> str | None:
        assert isinstance(scores.step.op, Einsum)
        assert isinstance(step.op, Einsum)
        (left, right), made = scores.step.op.sides
        sides, out = step.op.sides
        same = _match_letters(f, scores.step.results[0], made, step.operands[k], sides[k])
        if same is None or not made or f.types[weights].ndim < 2:
            return None
        back = {mine: theirs for theirs, mine in same.items()}
        order = [back[c] for c in sides[k] if c in back]  # the scores' letters as the weights have them
        t = order[-1]
        at = 0 if t in right else 1
        q, key = (left, right)[at], (left, right)[1 - at]
        values, result = ("".join(back.get(c, c.upper()) for c in s) for s in (sides[1 - k], out))
        sizes = dict(zip(left + right, f.types[scores.step.operands[0]].shape + f.types[scores.step.operands[1]].shape,
                         strict=True))  # fmt: skip
        sizes |= zip(values, f.types[step.operands[1 - k]].shape, strict=True)
        ones = [c for c in q if c in key and c in made and sizes[c] == 1 and c not in order]
        spare = [c for c in values if c in result and sizes[c] == 1 and c not in q]
        if len(ones) == len(spare):
            swap = str.maketrans("".join(spare), "".join(ones))
            values, result = values.translate(swap), result.translate(swap)
        shared = [c for c in q if c in key and c in values and c in result]
        inner = [c for c in q if c in key and c not in made]
        last = [c for c in values if c in result and c not in q]
        rows = [c for c in order if c in q and c not in key]
        if not (len(inner) == len(last) == 1 and 1 <= len(rows) <= 2 and 1 <= len(shared) <= 2 and t not in result):
            return None
        large = [c for c in order if sizes[c] > 1]
        seen = [large[d] for d in scores.along]
        s = next((c for c in rows if c in seen), rows[-1])
        ratio = [c for c in rows if c != s]
        batch, heads = shared[0], shared[1:]
        legal = {*shared, t}
        fits = {*q} == {*shared, *rows, *inner} and {*key} == {*legal, *inner} and {*values} == {*legal, *last}
        if not fits or {*result} != {*shared, *rows, *last}:
            return None
        kinds = {f.types[n].dtype for n in (*scores.step.operands, step.operands[1 - k], step.results[0])}
        causal = _causal(f, scores, sizes[s], sizes[t])
        if causal is None or len(kinds) > 1:  # of a mask that is an input: the steps stay, but their dims are known
            called = {batch: "batch", s: "sequence", t: "sequence", inner[0]: "head", last[0]: "head"}
            called |= dict.fromkeys(heads, "kv_heads") | dict.fromkeys(ratio, "ratio" if heads else "kv_heads")
            ends = (*scores.step.operands, scores.step.results[0], step.operands[1 - k])
            for name, letters in zip(ends, (left, right, made, values), strict=True):
                self.said.append((names[name], tuple(called[c] if sizes[c] > 1 else None for c in letters)))
            return None
        (x, by), (y, more) = (_scale_of(f, scores.step.operands[j]) for j in (at, 1 - at))
        ends, factor = (names[x], names[y], names[step.operands[1 - k]]), scores.scale * by * more
        if not factor or not math.isfinite(factor):  # a scale of 0 is the default in the op
            return None
        given = [_arrange_heads(builder, ends[0], q, [batch, s, *heads, *ratio, *inner], heads, ratio, 2)]
        given += [_arrange_heads(builder, ends[1], key, [batch, t, *heads, *inner], heads, ["r"], 2),
                  _arrange_heads(builder, ends[2], values, [batch, t, *heads, *last], heads, ["r"], 2)]  # fmt: skip
        for name, dims in zip(given, (("kv_heads", "ratio"), ("kv_heads",), ("kv_heads",)), strict=True):
            self.said.append((name, ("batch", "sequence", *dims, "head")))
        scale = 0.0 if stands_for(factor, sizes[inner[0]] ** -0.5, f.types[scores.step.results[0]].dtype) else factor
        y = builder(Attention(causal, scale), *given)
        words = ["b", "s", "g" if heads else "g=1", "r" if ratio else "r=1", "e"]
        if not (heads and ratio):
            kept = [w for w in words if "=" not in w]
            y = builder(Reshape(f"{' '.join(words)} -> {' '.join(kept)}"), y)
        now = "".join([batch, s, *heads, *ratio, *last])
        return y if now == result else builder(Einsum(f"{now}->{result}"), y)


def _arrange_heads(
    builder: ProgramBuilder, name: str, now: str, wanted: list[str], heads: list[str], ratio: list[str], at: int
) -> str:
    """A value in the order that attention takes, with dims of size 1 for heads and ratio that it lacks."""
    order = "".join(wanted)
    if now != order:
        name = builder(Einsum(f"{now}->{order}"), name)
    if heads and ratio:
        return name
    words = [f"d{k}" for k in range(len(order))]
    more = [*(() if heads else ("g=1",)), *(() if ratio else ("r=1",))]
    place = at + len(heads)
    return builder(Reshape(f"{' '.join(words)} -> {' '.join([*words[:place], *more, *words[place:]])}"), name)


def _scale_of(f: Formulas, name: str) -> tuple[str, float]:
    """What a value is a multiple of, and its factor."""
    step = f.made.get(name)
    if step is None or not isinstance(step.op, Elementwise) or len(step.operands) != 1:
        return name, 1.0
    number, parts = f.split("*", f.term(name))
    alone = len(parts) == 1 and parts[0].value == f.source(step.operands[0])
    return (step.operands[0], number) if alone else (name, 1.0)


def _softmax_source(f: Formulas, name: str) -> str:
    """Of what a value is the softmax over the last dim; empty where it is none."""
    step = f.made.get(name)
    if step is not None and isinstance(step.op, Softmax):
        return step.operands[0] if step.op.dim == f.types[name].ndim - 1 else ""
    found = composite(f, name) if step is not None else None
    return found[1][0] if found is not None and isinstance(found[0], Softmax) else ""


def _scores(f: Formulas, name: str) -> Scores | None:
    """How scores are made; None where they are no product."""
    scale, mask, kept, along, more = 1.0, "", True, (), 1.0
    while True:
        name = f.source(name)
        step = f.made.get(name)
        if step is None:
            return None
        if isinstance(step.op, Einsum):
            return Scores(step, scale, mask, kept, along, more) if len(step.operands) == 2 else None
        found = f.term(name)
        if found.kind == "where" and not mask and found.parts[0].value:
            _, yes, no = found.parts
            along = _mask_dims(f, step, found.parts[0].value)
            if f.expand_term(no).kind == "number" and f.expand_term(no).number * scale <= LOW:
                mask, kept, name = found.parts[0].value, True, yes.value
            elif f.expand_term(yes).kind == "number" and f.expand_term(yes).number * scale <= LOW:
                mask, kept, name = found.parts[0].value, False, no.value
            else:
                return None
        elif found.kind == "+" and not mask:
            sides = [p.value for p in found.parts]
            fixed = [v for v in sides if v and f.key(v) is not None]
            fixed = fixed or [v for v, other in (sides, sides[::-1]) if v and other and _scores(f, other)]
            if len(fixed) != 1:
                return None
            along = _mask_dims(f, step, fixed[0])
            mask, name, more = fixed[0], next(v for v in sides if v != fixed[0]), scale
        else:
            number, parts = f.split("*", found)
            if len(parts) != 1 or parts[0].value in ("", name):
                return None
            scale, name = scale * number, parts[0].value
        if not name:
            return None


def _mask_dims(f: Formulas, step: Step, mask: str) -> tuple[int, ...]:
    """Along which dims larger than 1 of a step's result its mask is not the same."""
    shape = f.types[step.results[0]].shape
    held = next(f.types[o].shape for o in step.operands if f.source(o) == mask)
    held = (1,) * (len(shape) - len(held)) + held
    return tuple(k for k, (_, m) in enumerate((n, m) for n, m in zip(shape, held, strict=True) if n > 1) if m > 1)


def _match_letters(f: Formulas, x: str, left: str, y: str, right: str) -> dict[str, str] | None:
    """Which letter of one value is which of another that is the same but for dims of size 1."""
    a, b = (list(zip(s, f.types[n].shape, strict=True)) for n, s in ((x, left), (y, right)))
    if [n for _, n in a] != [n for _, n in b]:
        a, b = ([p for p in side if p[1] > 1] for side in (a, b))
    if [n for _, n in a] != [n for _, n in b] or not a:
        return None
    return dict(zip((c for c, _ in a), (c for c, _ in b), strict=True))


def _causal(f: Formulas, scores: Scores, queries: int, keys: int) -> bool | None:
    """Whether the mask is the causal one; None for another."""
    if not scores.mask:
        return False
    found = f.constant(scores.mask)
    if found is None or found.size != queries * keys:
        return None
    found, seen = found.reshape(queries, keys), np.tri(queries, keys, dtype=bool)
    if found.dtype == bool:
        return True if np.array_equal(found if scores.kept else ~found, seen) else None
    return True if (found[seen] == 0).all() and (found[~seen] * scores.more <= LOW).all() else None

"""A scan as `repeat`: what it carries, what every run reads, and what is sliced and stacked along the first dim.

A parameter of which each run takes a row keeps its factors inside the body, so that heads are dims there too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from shardplan.core.attention_pattern import AttentionRule
from shardplan.core.composite_patterns import close_composites
from shardplan.core.nested import row_type
from shardplan.core.ops import Repeat
from shardplan.core.program import Program
from shardplan.core.step import Step
from shardplan.core.tensor import TensorType
from shardplan.interop.importers.views import AtomView, AxisFactor, Group
from shardplan.interop.importers.writer import FlatWriter

Kind = tuple[str, tuple[int, ...]]


class ScanForm(NamedTuple):
    """What a scan is: the dtypes and shapes of its body's operands and results.

    Operands of a body are the same in every run, carried, or rows, in this order; results are carried, or rows.
    """

    same: int
    carried: int
    operands: Sequence[Kind]
    results: Sequence[Kind]
    length: int
    reverse: bool = False


def write_scan(
    w: FlatWriter, form: ScanForm, args: Sequence[Any], write: Callable[[FlatWriter, list[Any]], list[Any]]
) -> list[AtomView]:
    """Write a scan; `write` writes its body on values and returns the results."""
    consts, carried = form.same, form.carried
    inner, tag = w.begin_body(), f"run.{next(w.numbers)}"
    outer: list[list[str]] = [[], [], []]  # carried, the same, rows
    given: list[list[tuple[str, TensorType]]] = [[], [], []]
    values = list[Any]()
    for k, (value, (dtype, shape)) in enumerate(zip(args, form.operands, strict=True)):
        part = 1 if k < consts else 0 if k < consts + carried else 2
        name = f"{tag}.in.{k}"
        if part == 1 and not isinstance(value, AtomView):
            values.append(value)
            continue
        seen = value if isinstance(value, AtomView) else w.constant(value, dtype, shape)
        if part == 0:
            outside = w.materialize_view(w.cast(seen, dtype)).name
            t, dims = w.builder.types[outside], tuple((AxisFactor(n, d),) for d, n in enumerate(shape))
        elif part == 1:
            outside, t, dims = seen.name, w.builder.types[seen.name], seen.dims
        else:
            outside, dims = _rows(w, seen)
            t = row_type(w.builder.types[outside])
            w.mean(outside, "layer")
        outer[part].append(outside)
        given[part].append((name, t))
        inner.builder.types[name] = t
        values.append(AtomView(name, dims))
    outputs = _results(inner, write(inner, values), form)
    w.opaques += inner.opaques
    for name in (n for n in inner.constants if n in inner.inputs):  # that the body is the first to read, or reads too
        outer[1].append(w.declare_constant(inner.constants[name]).name)
        given[1].append((name, inner.builder.types[name]))
    body = _body(w, inner, [pair for side in given for pair in side], outputs, tag)
    op = Repeat(form.length, body, len(outer[0]), len(outer[2]), form.reverse)
    return [w.view_value(r) for r in w.builder.write_step(op, *(n for side in outer for n in side))]


def _rows(w: FlatWriter, v: AtomView) -> tuple[str, tuple[Group, ...]]:
    """A value whose first dim is ours too, and what a row of it shows."""
    v = w.merge_dim(v, 0)
    (first,), rest = v.dims[0], sorted((a for g in v.dims[1:] for a in g if a.has_axis), key=lambda a: a.axis)
    name = w.materialize_groups(v, [(first,), *((a,) for a in rest)])
    place = {a.axis: k for k, a in enumerate(rest)}
    return name, tuple(tuple(a._replace(axis=place[a.axis]) if a.has_axis else a for a in g) for g in v.dims[1:])


def _results(inner: FlatWriter, found: list[Any], form: ScanForm) -> list[str]:
    """The names of the results of a body, whole."""
    names = list[str]()
    for value, (dtype, shape) in zip(found, form.results, strict=True):
        seen = value if isinstance(value, AtomView) else inner.constant(np.asarray(value).item(), dtype, shape)
        names.append(inner.materialize_view(inner.cast(seen, dtype)).name)
    return names


def _body(
    w: FlatWriter, inner: FlatWriter, given: list[tuple[str, TensorType]], outputs: list[str], tag: str
) -> Program:
    """The program of a body, with composites as one step and names that no other value has."""
    rule, steps = AttentionRule(), [inner.builder.steps[k] for k in inner.builder.live(outputs)]
    program = close_composites(Program(given, steps, outputs), rule)
    own = {r: f"{tag}.{r}" for s in program.steps for r in s.results}
    w.meanings += [(own.get(v, v), said) for v, said in (*inner.meanings, *rule.said)]
    new = [Step(s.op, tuple(own.get(o, o) for o in s.operands), tuple(own[r] for r in s.results), s.stopped)
           for s in program.steps]  # fmt: skip
    return Program(given, new, [own.get(o, o) for o in program.outputs])

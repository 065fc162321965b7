"""A source as a flat program, and that as a `Model`: `repeat` recovered, dims and parameters named.

A source is written again as long as steps ask for factors of parameters' dims. Dims are named by `dim_names` from what
the caller says of inputs and what composites say of their operands (`FlatWriter.mean`); the rest is d0, d1, ...
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from shardplan.core.attention_pattern import AttentionRule
from shardplan.core.composite_patterns import close_composites
from shardplan.core.dim_names import DimNames, dim_names
from shardplan.core.dtypes import numpy_dtype
from shardplan.core.layout import Layout
from shardplan.core.nested import as_nested
from shardplan.core.ops import Cast, Crop, Einsum, Elementwise, Reshape
from shardplan.core.ops.compute import computing
from shardplan.core.program import Program
from shardplan.core.resizing import counted_means
from shardplan.core.step import Step
from shardplan.core.tensor import TensorType
from shardplan.errors import ShardplanError, excerpt
from shardplan.interop.importers.columns import FREE, column_names
from shardplan.interop.importers.views import AtomView
from shardplan.interop.importers.writer import FlatWriter, Stored
from shardplan.strategy.model import Model, assemble_model
from shardplan.strategy.parameter import Parameter
from shardplan.strategy.repeats import recover_repeats
from shardplan.strategy.training import rename_values

Names = Mapping[str, Sequence[str | None]]


class Flattened(NamedTuple):
    """What was written: inputs that are no parameters, results, values of constants; `spare` is a model's.

    `given` and `wanted` are how the source says that inputs lie, by name, and results, in order.
    """

    writer: FlatWriter
    inputs: Sequence[str]
    outputs: Sequence[AtomView]
    constants: Mapping[str, Any]
    spare: frozenset[str] = frozenset()
    given: Mapping[str, TensorType] = MappingProxyType({})
    wanted: Sequence[TensorType | None] = ()


def write_until_stable(write: Callable[[FlatWriter], Flattened], opaque: bool, training: bool) -> Flattened:
    """Write until no step asks for other factors of a parameter."""
    cuts: dict[tuple[str, int], tuple[int, ...]] = {}
    while True:
        found = write(FlatWriter(cuts, opaque, training))
        if not found.writer.wanted:
            return found
        cuts |= found.writer.wanted


def model_of(
    name: str, flat: Flattened, names: Names | None, training: bool, optimizer: str | None, settings: dict[str, float]
) -> Model:
    """Return the model of what was written."""
    w = flat.writer
    if w.opaques:
        warnings.warn(f"{name}: {w.opaques} operations are opaque: they run nowhere, and stay whole", stacklevel=3)
    program, results = _program(flat, training)
    rule = AttentionRule()
    program = _stopping(counted_means(close_composites(program, rule)))
    w.meanings += [*rule.said, *_tables(flat)]
    made = recover_repeats(program, _stack_name, {*flat.inputs} - w.parameters.keys())
    renamed = dict(zip(made.program.outputs, results, strict=True))
    program = rename_values(made.program, renamed)
    rows = {stack: [w.parameters[n] for n in group] for stack, group in made.stacks.items() if group[0] in w.parameters}
    dims = _dims(program, w, dict(names or {}), rows)
    parameters: dict[str, Parameter] = {}
    for key, _ in program.inputs:
        held = rows.get(key) or ([w.parameters[key]] if key in w.parameters else [])
        if held:
            floating = numpy_dtype(program.types[key].dtype).kind in "fV"
            parameters[key] = replace(_parameter(program, key, dims[key], held, key in rows), trained=floating)
    constants = {key: np.stack([flat.constants[n] for n in made.stacks[key]]) if key in made.stacks
                 else flat.constants[key] for key, _ in program.inputs
                 if made.stacks.get(key, (key,))[0] in flat.constants}  # fmt: skip
    kinds = [program.types[key].dtype for key in parameters] or ["f32"]
    fields = {"training": training, "optimizer": optimizer, "dtype": max(kinds, key=kinds.count), **settings}
    found = assemble_model(name, program, dims, parameters, {}, fields, settings)
    pins = ((step.results[0], op.pinned_layout) for level in _programs(program) for step in level.steps
            if (op := computing(step.op)) is not None)  # fmt: skip
    said = {value: layout.dims for value, layout in pins if layout is not None}
    known = {value for level in _programs(program) for step in level.steps for value in step.results}
    places = {value: place for old, place in w.places.items() if (value := renamed.get(old, old)) in known}
    return replace(found, constants=MappingProxyType(constants), constraints=MappingProxyType(said), spare=flat.spare,
                   annotations=MappingProxyType(_annotations(flat, made.stacks, program, results)),
                   places=MappingProxyType(places))  # fmt: skip


def _annotations(
    flat: Flattened, stacks: Mapping[str, Sequence[str]], program: Program, results: Sequence[str]
) -> dict[str, TensorType]:
    """How the source says that inputs and results lie; of a stack where all its rows lie alike."""
    found = {n: t for n, t in zip(results, flat.wanted, strict=False) if t is not None}
    for key, t in program.inputs:
        rows = [flat.given[n] for n in stacks.get(key, (key,)) if n in flat.given]
        if rows and len({*rows}) == 1:
            whole = ((),) * (t.ndim - rows[0].ndim)
            found[key] = t.with_layout(Layout((*whole, *rows[0].layout.dims)), rows[0].mesh)
    return found


def _program(flat: Flattened, training: bool) -> tuple[Program, list[str]]:
    """The flat program, and what its outputs are called."""
    w = flat.writer
    outputs = [w.materialize_view(v).name for v in flat.outputs]
    for k, name in enumerate(outputs):  # an input, or twice a result, is a value of its own
        if name in w.inputs or name in outputs[:k]:
            outputs[k] = w.builder(Elementwise("a"), name)
    types = w.builder.types
    losses = [o for o in outputs if not types[o].shape and numpy_dtype(types[o].dtype).kind in "fV"]
    if training and len(losses) != 1:
        raise ShardplanError(f"load: training of a source with {len(losses)} scalar results; legal is one, the loss")
    others = [o for o in outputs if len(losses) != 1 or o != losses[0]]
    called = {o: "output" if len(others) == 1 else f"output.{k}" for k, o in enumerate(others)}
    if training:
        outputs = [losses[0], *others]
    names = [called.get(o, "loss") for o in outputs]
    live = sorted(w.builder.live(outputs), key=lambda k: k not in w.hoisted)
    steps = [w.builder.steps[k] for k in live]
    used = {o for step in steps for o in step.operands}
    inputs = {n: types[n] for n in w.inputs if n in used or n not in w.constants}
    return Program(inputs, steps, outputs), names


def _stopping(program: Program) -> Program:
    """A program in which the readers of what is stopped say so, and no step stands for it; in bodies too.

    Nothing else that was written is stopped yet.
    """
    held: dict[str, str] = {}
    steps = list[Step]()
    for step in program.steps:
        inner = as_nested(step.op)
        if step.stopped and step.results[0] not in program.outputs:
            held[step.results[0]] = held.get(step.operands[0], step.operands[0])
            continue
        op = step.op if inner is None else replace(inner, body=_stopping(inner.body))
        stopped = (*step.stopped, *(k for k, o in enumerate(step.operands) if o in held))
        steps.append(Step(op, tuple(held.get(o, o) for o in step.operands), step.results, stopped))
    return Program(program.inputs, steps, program.outputs)


def _tables(flat: Flattened) -> Iterator[tuple[str, tuple[str | None, ...]]]:
    """What the dims of tables are: positions where the ids hang on no input, words where they are an input.

    Of several that are looked up by ids of one shape, words are those of the most rows; the others are token types.
    """
    w, given = flat.writer, {*flat.inputs}
    said = {n for n in given if numpy_dtype(w.builder.types[n].dtype).kind in "iu"}
    for step in w.builder.steps:
        given |= {*step.results} if given & {*step.operands} else set[str]()
        if isinstance(step.op, Cast | Reshape | Crop | Einsum | Elementwise) and given & {*step.operands} <= said:
            said |= {*step.results} if said & {*step.operands} else set[str]()
    types, most = w.builder.types, dict[tuple[int, ...], int]()
    for table, ids in w.tables:
        if ids in said:
            most[types[ids].shape] = max(types[table].shape[0], most.get(types[ids].shape, 0))
    for table, ids in w.tables:
        words = "vocab" if ids in said and types[table].shape[0] == most[types[ids].shape] else None
        yield table, (words if ids in given else "position", "hidden")


def _stack_name(names: tuple[str, ...]) -> str:
    """What the names of its rows have in common: `h.0.w`, `h.1.w` are `h.w`."""
    found = _layer_pattern(names)
    return ".".join(p for p in found[0].split(".") if p != "{layer}") or names[0] if found else names[0]


def _layer_pattern(names: Sequence[str]) -> tuple[str, int] | None:
    """The pattern of names that count on in one place, and the first number."""
    parts = [n.split(".") for n in names]
    if len({len(p) for p in parts}) > 1:
        return None
    differ = [k for k in range(len(parts[0])) if len({p[k] for p in parts}) > 1] or [
        k for k, p in enumerate(parts[0]) if p.isdigit() and len(names) == 1
    ][:1]
    if len(differ) != 1 or not all(p[differ[0]].isdecimal() for p in parts):
        return None
    numbers = [int(p[differ[0]]) for p in parts]
    if numbers != list(range(numbers[0], numbers[0] + len(names))) or "{" in names[0]:
        return None
    return ".".join("{layer}" if k == differ[0] else p for k, p in enumerate(parts[0])), numbers[0]


def _dims(
    program: Program, w: FlatWriter, names: dict[str, Any], stacks: Collection[str]
) -> dict[str, tuple[str, ...]]:
    """The names of all inputs' dims."""
    for key in names:
        if key not in w.inputs:
            raise ShardplanError(
                f"load: names of {excerpt(key)}, which is no input; inputs are {', '.join(w.inputs)}"[:400]
            )
    given = {key: tuple(said) for key, said in names.items()}
    found = dim_names(program, given)
    called: dict[str, str] = {}
    levels = [*_levels(found)]
    for value, said in w.meanings:
        for level in levels:
            for parts, meaning in zip(level.values.get(value, ()), said, strict=False):
                if meaning and len(parts) == 1 and FREE.fullmatch(parts[0]):
                    called.setdefault(parts[0], meaning)
    labels = {key: ["_".join(called.get(p, p).replace(".", "_") for p in parts) for parts in found.values[key]]
              for key, _ in program.inputs}  # fmt: skip
    weights = {key: row for key, row in labels.items() if key in w.parameters or key in stacks}
    inner = column_names(program, found, called, weights)
    return {key: tuple(inner.get(x, x) for x in row) for key, row in labels.items()}


def _programs(program: Program) -> Iterator[Program]:
    yield program
    for op in (as_nested(step.op) for step in program.steps):
        yield from _programs(op.body) if op else ()


def _levels(names: DimNames) -> Iterator[DimNames]:
    yield names
    for inner in names.bodies.values():
        yield from _levels(inner)


def _parameter(program: Program, key: str, names: tuple[str, ...], held: Sequence[Stored], stacked: bool) -> Parameter:
    """Where a checkpoint has an input."""
    own: list[str] = []
    for k, name in enumerate(names):  # names of a parameter's dims are distinct
        plain = "layer" if stacked and not k else name
        own.append(plain if plain not in own else f"{plain}_{k}")
    left, groups = own[stacked:], list[str]()
    for cut in held[0].factors:
        part, left = left[: len(cut)], left[len(cut) :]
        groups.append(part[0] if len(part) == 1 else f"({' '.join(part)})")
    pairs = tuple(zip(own, program.types[key].shape, strict=True))
    stored = " ".join(groups)
    if not stacked:
        return Parameter(pairs, held[0].file, stored)
    found = _layer_pattern([h.file for h in held])
    if found is not None:
        return Parameter(pairs, found[0], stored, first=found[1])
    return Parameter(pairs, "{layer}", stored, rows=tuple(h.file for h in held))

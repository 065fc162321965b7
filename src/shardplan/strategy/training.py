"""A training step: from a program with a loss to one that also updates its parameters; sgd, adamw, adafactor."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple

from shardplan.core import validation
from shardplan.core.dtypes import numpy_dtype
from shardplan.core.gradients import Keep, Origin, gradients, keep_computed
from shardplan.core.ops import Adafactor, AdamW, Cast, Elementwise, ReduceDims, Sgd
from shardplan.core.ops.composed import Composed
from shardplan.core.ops.placing import cast_to, widened
from shardplan.core.program import Program
from shardplan.core.program_builder import ProgramBuilder
from shardplan.core.step import Step
from shardplan.core.tensor import TensorType
from shardplan.errors import ShardplanError
from shardplan.strategy.parameter import Parameter
from shardplan.strategy.scope import ONE


@dataclass(frozen=True, slots=True)
class Optimizer:
    """An update with its settings, as fields of the op: operands are a parameter, its gradient, its state, the step.

    `state` names what it keeps for each parameter, in f32 or wider; `counts` says whether it takes the step's number.
    One that is `factored` keeps of a matrix ROW and COLUMN instead, which have a dim of 1 for each that is summed up.
    """

    op: type[Composed]
    settings: Mapping[str, float]
    state: tuple[str, ...] = ()
    counts: bool = False
    inputs: tuple[str, ...] = ()  # settings that may be inputs of a step, as schedules want them
    factored: bool = False
    # Of settings the least and the most; of others 0 is the least.
    bounds: Mapping[str, tuple[float, float]] = field(default_factory=dict[str, tuple[float, float]])

    @property
    def fields(self) -> Mapping[str, float]:
        """What a model may say of it: settings, the norm of clipped gradients, and a scale of the loss; 0 is none."""
        return {**self.settings, CLIP: 0.0, SCALE: 0.0}

    def state_shapes(self, p: Parameter) -> dict[str, tuple[int, ...]]:
        """Return what it keeps of a parameter, with the shapes."""
        _, rows, cols = p.sides
        summed = {ROW: cols, COLUMN: rows} if self.factored and rows else dict.fromkeys(self.state, ())
        return {part: tuple(1 if k in dims else n for k, n in enumerate(p.shape)) for part, dims in summed.items()}

    def made(self, said: Mapping[str, Any], p: Parameter) -> Composed:
        """Return the op of a parameter's update, with what is said of its settings."""
        make: Any = self.op
        form = dict(zip(("each", "rows", "cols"), p.sides, strict=True)) if self.factored else {}
        inputs = self.given(said)
        numbers = {n: value if n in inputs else said.get(n, value) for n, value in self.settings.items()}
        return make(**numbers, **form, **({"inputs": inputs} if inputs else {}))

    def given(self, said: Mapping[str, Any]) -> tuple[str, ...]:
        """Return the settings that are inputs of a step."""
        return tuple(name for name in self.inputs if said.get(name) == INPUT)

    def read(self, what: str, fields: Mapping[str, Any]) -> dict[str, Any]:
        """Return what fields say of it; raises `ShardplanError` for what is no number, and no input where one may be.

        `what` opens the message.
        """
        return {
            k: fields[k]
            if k in (*self.inputs, SCALE) and fields[k] == INPUT
            else validation.number(f"{what}: {k}", fields[k], ShardplanError, *self.bounds.get(k, ()))
            for k in self.fields
            if k in fields
        }


class Precision(NamedTuple):
    """A recipe: the dtype of parameters and of what is computed, and that in which gradients are added up.

    Where parameters are narrower than f32, the optimizer updates a copy in f32, its `master`, which it rounds. Where it
    is `narrow`, layers multiply with their parameters in 8 bits (`narrowing.narrow_products`).
    """

    dtype: str
    gradient: str
    narrow: bool = False

    @property
    def master(self) -> bool:
        """Whether there is such a copy."""
        return numpy_dtype(self.dtype).itemsize < 4


MASTER, CLIP, SCALE, SKIPPED, INPUT = "master", "clip", "loss_scale", "skipped", "input"
ROW, COLUMN = "row", "column"
CLIP_EPS = 1e-6  # what torch's clip_grad_norm_ adds to the norm
PRECISIONS = {
    "fp32": Precision("f32", "f32"),
    "bf16": Precision("bf16", "f32"),
    "fp16": Precision("f16", "f16"),
    "fp8": Precision("bf16", "f32", narrow=True),
}
_MOMENTS = {"lr": 1e-3, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "decay": 0.01}
_FACTORED = {"lr": 1e-2, "beta2_decay": -0.8, "eps1": 0.0, "eps2": 1e-3, "clip_threshold": 1.0, "decay": 0.0}
_UPDATES = (
    Optimizer(Sgd, {"lr": 1e-2}, inputs=("lr",)),
    Optimizer(AdamW, _MOMENTS, ("m", "v"), counts=True, inputs=("lr", "decay")),
    Optimizer(
        Adafactor,
        _FACTORED,
        ("v",),
        counts=True,
        inputs=("lr", "decay"),
        factored=True,
        bounds={"beta2_decay": (-math.inf, 0.0), "clip_threshold": (1.0, math.inf)},
    ),
)
OPTIMIZERS = {update.op.name: update for update in _UPDATES}


def recipe_of(what: str, name: str | None) -> Precision | None:
    """Return the recipe of a name, if any; raises `ShardplanError`, which `what` opens, for another one."""
    return None if name is None else PRECISIONS[validation.choice(what, name, tuple(PRECISIONS), ShardplanError)]


class Training(NamedTuple):
    """A program with gradients and updates: the values `gradients`, and what takes the place of inputs, `replaced`.

    `origins` are those of its first steps; the others are the optimizer's.
    """

    program: Program
    gradients: dict[str, str]
    replaced: dict[str, str]
    origins: tuple[Origin | None, ...]


def training_program(
    program: Program,
    wanted: Mapping[str, Parameter],
    optimizer: str | None = None,
    settings: Mapping[str, Any] = MappingProxyType({}),
    keep: Keep = keep_computed,
    *,
    master: bool = False,
) -> Training:
    """Return a program of a `loss` with the gradients in `wanted` as outputs, or with an optimizer the updates.

    State of parameter w is w.m, and so on; gradients are gradient.w, and what takes the place of w is next.w. How many
    steps were done is `step`. With `master` it is w.master that is updated, and w what it is rounded to. `keep` is
    that of `gradients`. With a scale of the loss gradients are scaled, and a step whose gradients are not all finite
    changes nothing but `skipped`, which counts such steps.
    """
    names = list(wanted)
    scale = settings.get(SCALE) or 1.0
    if scale == INPUT:
        t = program.types["loss"]
        program = Program(
            (*program.inputs, (SCALE, TensorType(t.dtype, (), (), t.mesh))), program.steps, program.outputs
        )
    found = gradients(program, "loss", names, keep, SCALE if scale == INPUT else float(scale))
    count = len(program.outputs)
    called: dict[str, str] = {}
    made: dict[str, str] = {}
    for w, value in zip(names, found.program.outputs[count:], strict=True):
        made[w] = called.setdefault(value, f"gradient.{w}")
    named = rename_values(found.program, called)
    if optimizer is None:
        return Training(named, made, {}, found.origins)
    rule = OPTIMIZERS[optimizer]
    builder, states, steps = ProgramBuilder(named.types), dict[str, TensorType](), list(named.steps)
    replaced: dict[str, str] = {}
    now: tuple[str, ...] = ()
    scaled, factor, taken = dict(made), "", ""
    if settings.get(CLIP) or settings.get(SCALE):
        total = _add_up(builder, [sum_squares(builder, made[w]) for w in names])
        factor = builder(Elementwise(factor_expression(settings)), total, *((SCALE,) if scale == INPUT else ()))
        scaled = {w: multiply(builder, made[w], factor) for w in names}
    if settings.get(SCALE):
        taken = builder(Cast("i32"), builder(Elementwise("where(a > 0, 1, 0)"), factor))
        states[SKIPPED] = builder.types[SKIPPED] = TensorType("i32", (), (), ONE)
        replaced[SKIPPED] = builder(Elementwise("a + 1 - b"), SKIPPED, taken)
    if rule.counts:
        states["step"] = builder.types["step"] = TensorType("i32", (), (), ONE)
        now = (builder(Elementwise("a + 1"), "step"),)
        replaced["step"] = builder(Elementwise("a + b"), "step", taken) if taken else now[0]
    wide = "f64" if any(named.types[w].dtype == "f64" for w in names) else "f32"
    for name in rule.given(settings):
        states[name] = builder.types[name] = TensorType(wide, (), (), ONE)
        now = (*now, name)
    for w in names:
        t = named.types[w]
        kept = "f32" if numpy_dtype(t.dtype).itemsize < 4 else t.dtype
        first, p = f"{w}.{MASTER}" if master else w, wanted[w]
        mine = {f"{w}.{part}": shape for part, shape in rule.state_shapes(p).items()}
        for name, shape in (({first: t.shape} if master else {}) | mine).items():
            states[name] = builder.types[name] = TensorType(kept, shape, t.layout, t.mesh)
        out = builder.write_step(rule.made(settings, p), first, scaled[w], *mine, *now)
        if taken:
            pairs = zip(out, (first, *mine), strict=True)
            out = tuple(
                builder(Elementwise(TAKEN), a, b, cast_to(builder, factor, builder.types[a].dtype)) for a, b in pairs
            )
        replaced |= {w: builder(Cast(t.dtype), out[0])} if master else {}
        replaced |= zip((first, *mine), out, strict=True)
    names_of = {v: f"next.{name}" for name, v in replaced.items()}
    steps += (_rename_step(step, names_of) for step in builder.steps)
    outputs = (*named.outputs[:count], *names_of.values())
    whole = Program((*named.inputs, *states.items()), steps, outputs)
    return Training(whole, made, {name: f"next.{name}" for name in replaced}, found.origins)


TAKEN = "where(c > 0, a, b)"  # what an update makes, or what was there, by the factor of gradients


def factor_expression(settings: Mapping[str, Any]) -> str:
    """Return what gradients are multiplied with, of the sum of their squares `a`: as torch's clip_grad_norm_.

    With a scale of the loss, which is `b` where it is an input, also with its inverse; 0 where the sum is not finite.
    """
    clip, scale = settings.get(CLIP), settings.get(SCALE)
    by = "b" if scale == INPUT else f"{scale}"
    factor = f"{clip} / (sqrt(a){f' / {by}' if scale else ''} + {CLIP_EPS})" if clip else "1"
    found = f"where({factor} < 1, {factor}, 1)" if clip else "1"
    return f"where(a - a == 0, {found} / {by}, 0)" if scale else found


def multiply(builder: ProgramBuilder, gradient: str, factor: str) -> str:
    """Write a gradient times a factor, in the wider dtype of both."""
    kinds = [builder.types[name].dtype for name in (gradient, factor)]
    kind = max(kinds, key=lambda kind: numpy_dtype(kind).itemsize)
    return builder(Elementwise("a * b"), cast_to(builder, gradient, kind), cast_to(builder, factor, kind))


def sum_squares(builder: ProgramBuilder, name: str) -> str:
    """Write the sum of the squares of a value, in f32 or wider."""
    dims = tuple(range(builder.types[name].ndim))
    return builder(ReduceDims(dims), builder(Elementwise("a * a"), widened(builder, name)))


def _add_up(builder: ProgramBuilder, names: Sequence[str]) -> str:
    total, *others = names
    for name in others:
        total = builder(Elementwise("a + b"), total, name)
    return total


def _rename_step(step: Step, names: Mapping[str, str]) -> Step:
    operands, results = (tuple(names.get(v, v) for v in side) for side in (step.operands, step.results))
    return Step(step.op, operands, results, step.stopped)


def rename_values(program: Program, names: Mapping[str, str]) -> Program:
    """Return a program in which some values have other names."""
    steps = [_rename_step(step, names) for step in program.steps]
    return Program(program.inputs, steps, tuple(names.get(o, o) for o in program.outputs))

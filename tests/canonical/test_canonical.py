"""The canonical form: it runs to the same values, is its own form, and is the same for programs that differ in writing.

`scrambled` writes a program otherwise: other names, another order of steps, inputs and commuting operands, other
letters, transpositions there and back, sums in another order, steps that nobody reads or that stand there twice.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from string import ascii_lowercase
from typing import Any

import numpy as np
import pytest
from tests.canonical.form import Canonical, canonical
from tests.canonical.rules import lettered, tree_of
from tests.models.small import SMALL

from shardplan.core.expression_tree import Binary, Call, Negate, Node
from shardplan.core.nested import as_nested
from shardplan.core.ops import Einsum, Elementwise, Repeat
from shardplan.core.program import Program
from shardplan.core.reference import run_reference
from shardplan.core.step import Step
from shardplan.errors import TypingError
from shardplan.strategy import Model

WRITTEN = "gpt2", "llama3-8b", "mlp-xs", "dlrm-kaggle", "deepseek-v3"


def small(preset: str, **fields: Any) -> Program:
    settings: dict[str, Any] = SMALL[preset] | {"dtype": "f64", "training": False} | fields
    return Model.load(preset, **settings).program


def values_of(program: Program, seed: int = 0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    whole = {n: rng.integers(0, 2, t.shape).astype(f"i{t.itemsize}") for n, t in program.inputs if t.dtype[0] == "i"}
    return {n: rng.normal(0, 0.3, t.shape) for n, t in program.inputs} | whole


def run(program: Program, values: Mapping[str, np.ndarray]) -> list[np.ndarray]:
    return [shards[0] for shards in run_reference(program, [[values[n]] for n, _ in program.inputs])]


def text(program: Program) -> str:
    return str(canonical(program).program)


def exchanged(node: Node, rng: random.Random) -> Node:
    """A formula with the sides of sums and products exchanged."""
    match node:
        case Binary("+" | "*" as symbol, left, right):
            sides = [exchanged(left, rng), exchanged(right, rng)]
            rng.shuffle(sides)
            return Binary(symbol, *sides)
        case Binary("-", left, right) if rng.random() < 0.5:
            return Binary("+", Negate(exchanged(right, rng)), exchanged(left, rng))
        case Binary(symbol, left, right):
            return Binary(symbol, exchanged(left, rng), exchanged(right, rng))
        case Call(function, arguments):
            return Call(function, tuple(exchanged(x, rng) for x in arguments))
        case _:
            return node


def scrambled(program: Program, rng: random.Random, *, fixed: bool = False) -> tuple[Program, dict[str, str]]:
    """The program written otherwise, and what its inputs are called; a body's are `fixed` in their order."""
    names: dict[str, str] = {}

    def called(name: str) -> str:
        while name not in names:
            new = "".join(rng.choice(ascii_lowercase) for _ in range(6))
            names.update({name: new} if new not in names.values() else {})
        return names[name]

    steps = list[Step]()
    waiting = list(program.steps)
    ready = {n for n, _ in program.inputs}
    while waiting:
        step = rng.choice([s for s in waiting if {*s.operands} <= ready])
        waiting.remove(step)
        ready |= {*step.results}
        op, operands, results = step.op, [called(o) for o in step.operands], tuple(called(r) for r in step.results)
        tree = tree_of(Step(op, tuple(operands), results))
        inner = as_nested(op)
        if tree is not None and not step.stopped:
            expression, operands = lettered(exchanged(tree, rng))
            op = Elementwise(str(expression))
        elif isinstance(op, Einsum):
            sides, out = list(op.sides[0]), op.sides[1]
            for k, side in enumerate(sides):
                if rng.random() < 0.5 and len(side) > 1 and len({*side}) == len(side):
                    turned = "".join(rng.sample(side, len(side)))
                    steps.append(Step(Einsum(f"{side}->{turned}"), (operands[k],), (called(f"turned.{len(steps)}"),)))
                    operands[k], sides[k] = steps[-1].results[0], turned
            order = rng.sample(range(len(sides)), len(sides))
            mine = dict(zip(ascii_lowercase, rng.sample(ascii_lowercase, 26), strict=True))
            sides, operands = [sides[k] for k in order], [operands[k] for k in order]
            op = Einsum("".join(mine.get(c, c) for c in f"{','.join(sides)}->{out}"))
        elif isinstance(inner, Repeat):
            op = Repeat(inner.n, scrambled(inner.body, rng, fixed=True)[0], inner.carried, inner.sliced, inner.reverse)
        steps.append(Step(op, tuple(operands), results, step.stopped))
        if rng.random() < 0.2:
            more = tuple(called(f"again.{len(steps)}.{r}") for r in results)
            steps.append(Step(op, tuple(operands), more, step.stopped))
    inputs = [(called(n), t) for n, t in program.inputs]
    if not fixed:
        rng.shuffle(inputs)
    return Program(inputs, steps, [called(o) for o in program.outputs]), {n: called(n) for n, _ in program.inputs}


def agree(form: Canonical, program: Program, values: Mapping[str, np.ndarray]) -> None:
    for x, y in zip(run(program, values), run(form.program, form.values(values)), strict=True):
        assert np.abs(x - y).max(initial=0) <= 1e-12 * max(1.0, np.abs(x).max(initial=0))


@pytest.mark.parametrize("preset", WRITTEN)
def test_it_runs_and_is_its_own_form(preset: str) -> None:
    program = small(preset)
    form = canonical(program)
    agree(form, program, values_of(program))
    assert str(canonical(form.program, form.constants).program) == str(form.program)


def test_a_training_step_has_a_form() -> None:
    program = small("gpt2", training=True, optimizer="sgd")
    form = canonical(program)
    agree(form, program, values_of(program))
    assert str(canonical(form.program, form.constants).program) == str(form.program)


@pytest.mark.parametrize("preset", WRITTEN)
@pytest.mark.parametrize("seed", range(3))
def test_other_writing_changes_nothing(preset: str, seed: int) -> None:
    program = small(preset)
    other, names = scrambled(program, random.Random(seed))
    form = canonical(other)
    assert str(form.program) == text(program)
    values = values_of(program)
    agree(form, other, {names[n]: x for n, x in values.items()})


def parsed(*lines: str) -> Program:
    body = "\n".join(f"  {line}" for line in lines)
    return Program.parse(f"program\n  mesh \n{body}\n")


NORMED = (
    "input %x: f32[3, 4]",
    "input %g: f32[4]",
    "input %w: f32[4, 4]",
    "%n = rms_norm(%x, %g; eps={eps}): f32[3, 4]",
    '%y = einsum(%n, %w; spec="ab,bc->ac"): f32[3, 4]',
    '%z = elementwise(%y, %{residual}; expr="a + b"): f32[3, 4]',
    "output %z",
)


def layer(eps: str = "1e-05", residual: str = "x") -> Program:
    return parsed(*(line.format(eps=eps, residual=residual) if "{" in line else line for line in NORMED))


def test_the_text_by_hand() -> None:
    assert text(layer()) == str(
        parsed(
            "input %in.0: f32[3, 4]",
            "input %in.1: f32[4]",
            "input %in.2: f32[4, 4]",
            "%0 = rms_norm(%in.0, %in.1; eps=1e-05): f32[3, 4]",
            '%1 = einsum(%0, %in.2; spec="ab,bc->ac"): f32[3, 4]',
            '%2 = elementwise(%1, %in.0; expr="a + b"): f32[3, 4]',
            "output %2",
        )
    )


def test_another_program_has_another_form() -> None:
    forms = {text(layer()), text(layer(eps="1e-06")), text(layer(residual="n")), text(layer(residual="y"))}
    assert len(forms) == 4


PARTS = (
    "input %x: f32[3, 4]",
    "input %w: f32[4, 2, 4]",
    '%y = einsum(%x, %w; spec="ab,bcd->acd"): f32[3, 2, 4]',
    "%p = crop(%y; start=(0,0,0), stop=(3,1,4)): f32[3, 1, 4]",
    "%q = crop(%y; start=(0,1,0), stop=(3,2,4)): f32[3, 1, 4]",
    '%z = elementwise(%{0}, %{1}; expr="exp(a) * b"): f32[3, 1, 4]',
    "output %z",
)


def test_parts_of_one_product_that_change_places_are_another_program() -> None:
    forms = {text(parsed(*PARTS[:-2], PARTS[-2].format(*pair), PARTS[-1])) for pair in ("pq", "qp")}
    assert len(forms) == 2


def test_separate_weights_that_change_places_are_another_mapping() -> None:
    lines = (
        "input %x: f32[3, 4]",
        "input %u: f32[4, 4]",
        "input %v: f32[4, 4]",
        '%p = einsum(%x, %u; spec="ab,bc->ac"): f32[3, 4]',
        '%q = einsum(%x, %v; spec="ab,bc->ac"): f32[3, 4]',
        '%z = elementwise(%{0}, %{1}; expr="exp(a) * b"): f32[3, 4]',
        "output %z",
    )
    one, other = (canonical(parsed(*lines[:-2], lines[-2].format(*pair), lines[-1])) for pair in ("pq", "qp"))
    assert str(one.program) == str(other.program)
    turned = {"u": "v", "v": "u", "x": "x"}
    assert {n: turned[t.name] for n, t in one.inputs.items()} == {n: t.name for n, t in other.inputs.items()}


def test_a_table_and_its_formula_are_one_program() -> None:
    tail = ('%z = elementwise(%x, %t; expr="a * b"): f32[3, 4]', "output %z")
    made = parsed("input %x: f32[3, 4]", "%i = iota(; dtype=f32, shape=(4), dim=0, over=[_], mesh=m0): f32[4]",
                  '%t = elementwise(%i; expr="cos(a / 3)"): f32[4]', *tail)  # fmt: skip
    held = parsed("input %x: f32[3, 4]", "input %t: f32[4]", *tail)
    table = np.cos(np.arange(4, dtype="f4") / 3)
    forms = canonical(made), canonical(held, {"t": table})
    assert str(forms[0].program) == str(forms[1].program)
    for form in forms:
        ((name, found),) = form.constants.items()
        assert np.allclose(found, table, atol=1e-7)
        assert name not in form.inputs
    x = np.random.default_rng(0).normal(size=(3, 4)).astype("f4")
    assert np.allclose(run(made, {"x": x})[0], run(forms[0].program, forms[0].values({"x": x}))[0], atol=1e-6)


def test_ids_count_from_the_first_row() -> None:
    head = ("input %t: f32[5, 2]", "input %i: i32[3]")
    plain = parsed(*head, "%y = gather(%t, %i): f32[3, 2]", "output %y")
    wrap = ('%a = elementwise(%i; expr="where(a < 0, 1, 0)"): i32[3]', "%b = cast(%a; dtype=bool): bool[3]",
            '%m = elementwise(%i; expr="a + {}"): i32[3]',
            '%c = elementwise(%b, %m, %i; expr="where(a, b, c)"): i32[3]',
            "%y = gather(%t, %c): f32[3, 2]", "output %y")  # fmt: skip
    five, four = (parsed(*head, *(line.format(n) if "{}" in line else line for line in wrap)) for n in (5, 4))
    assert text(five) == text(plain)
    assert text(four) != text(plain)


def test_what_is_the_same_in_every_run_is_made_before() -> None:
    program = small("llama3-8b", layers=3)
    (step,) = (s for s in canonical(program).program.steps if as_nested(s.op))
    body = as_nested(step.op)
    assert body is not None
    first = body.carried_count
    fixed = {n for n, _ in body.body.inputs[first : len(body.body.inputs) - body.cut]}
    assert not [s for s in body.body.steps if {*s.operands} <= fixed]


def test_stacked_weights_have_the_dims_of_their_product() -> None:
    program = parsed(
        "input %x: f64[3, 4]",
        "input %w: f64[2, 5, 4]",
        "input %v: f64[2, 4, 5]",
        "%y = repeat(%x, %w, %v; n=2, carried=1, sliced=2) {",
        "  input %x: f64[3, 4]",
        "  input %w: f64[5, 4]",
        "  input %v: f64[4, 5]",
        '  %a = einsum(%x, %w; spec="bi,oi->bo"): f64[3, 5]',
        '  %b = einsum(%a, %v; spec="bi,oi->bo"): f64[3, 4]',
        "  output %b",
        "}: f64[3, 4]",
        "output %y",
    )
    form = canonical(program)
    assert {t.name: t.dims for t in form.inputs.values()} == {"x": (0, 1), "w": (0, 2, 1), "v": (0, 2, 1)}
    agree(form, program, values_of(program))


def test_more_devices_are_refused() -> None:
    program = Program.parse("program\n  mesh x=2\n  input %a: f32[4@x]\n  output %a\n")
    with pytest.raises(TypingError, match="a program on 2 devices; legal is one"):
        canonical(program)

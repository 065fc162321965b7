"""Recovering `repeat`: unrolling gives back the graph, with unlike layers, shared weights and rows alone, too."""

from collections.abc import Mapping

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardplan.core.nested import as_nested
from shardplan.core.ops import Crop, Einsum, Elementwise, Reshape, RmsNorm
from shardplan.core.program import Program
from shardplan.core.reference import run_reference
from shardplan.core.step import Step
from shardplan.core.tensor import TensorType
from shardplan.strategy import Model
from shardplan.strategy.repeats import Recovered, recover_repeats

ONE = "x=1"
X, W, G = (TensorType.parse(t, ONE) for t in ("f32[2, 3]", "f32[3, 3]", "f32[3]"))
SQUARE = Einsum("bi,io->bo")


def written(layers: str, *, shared: bool = False, outputs: str = "", invariant: bool = False) -> Program:
    """A layer a letter: `a` adds a product of a norm, `b` a gated one, `c` has no residual."""
    inputs, steps, x = {"x": X, "same": W}, [], "x"
    rows: list[str] = []

    def step(op: object, *operands: str) -> str:
        steps.append(Step(op, operands, (f"v{len(steps)}",)))  # type: ignore[arg-type]
        return steps[-1].results[0]

    if invariant:
        inputs["extra"] = X
    for k, kind in enumerate(layers):
        inputs |= {f"g{k}": G, f"w{k}": W}
        y = step(RmsNorm(), x, f"g{k}")
        w = "same" if shared else f"w{k}"
        if kind == "b":
            inputs[f"u{k}"] = W
            y = step(Elementwise("silu(a) * b"), step(SQUARE, y, w), step(SQUARE, y, f"u{k}"))
        else:
            y = step(SQUARE, y, w)
        if invariant:
            y = step(Elementwise("a * b"), y, "extra")
        x = y if kind == "c" else step(Elementwise("a + b"), x, y)
        rows.append(x)
    x = step(RmsNorm(), x, "same_gain") if inputs.setdefault("same_gain", G) else x
    chosen = {"": [x], "every": [x, *rows], "some": [x, *rows[1::2]], "weights": [x, *(f"w{k}" for k in range(2))]}
    return Program(inputs, steps, chosen[outputs])


def canonical(program: Program) -> list[object]:
    """Steps and outputs by numbers of values instead of names; inputs keep theirs."""
    number = {r: (k, j) for k, s in enumerate(program.steps) for j, r in enumerate(s.results)}
    lines = [(s.op, [number.get(o, o) for o in s.operands], s.stopped) for s in program.steps]
    return [*lines, [number.get(o, o) for o in program.outputs]]


def flat_steps(found: Recovered) -> list[object]:
    """The canonical steps of the unrolled program, rows of stacks being what they are rows of."""
    value: dict[str, object] = {}
    rows: dict[str, tuple[object, ...]] = dict(found.stacks)
    lines: list[object] = []

    def write(step: Step, at: dict[str, object]) -> None:
        if step.operands and step.operands[0] in rows:  # a row taken alone: a crop, and then a reshape
            if isinstance(step.op, Crop):
                at[step.results[0]] = rows[step.operands[0]][step.op.start[0]]
                return
        if isinstance(step.op, Reshape) and step.operands[0].split(".row")[0] == step.results[0]:
            at[step.results[0]] = at[step.operands[0]]
            return
        lines.append((step.op, [at.get(o, o) for o in step.operands], step.stopped))
        at.update((r, (len(lines) - 1, j)) for j, r in enumerate(step.results))

    for step in found.program.steps:
        op = as_nested(step.op)
        if op is None:
            write(step, value)
            continue
        whole, outs = len(step.operands) - op.cut, list[list[object]]()
        state = [value.get(o, o) for o in step.operands[: op.carried_count]]
        for k in op.order:
            outer = [*state, *(value.get(o, o) for o in step.operands[op.carried_count : whole])]
            outer += [rows[o][k] for o in step.operands[whole:]]
            inner = dict(zip((n for n, _ in op.body.inputs), outer, strict=True))
            for s in op.body.steps:
                write(s, inner)
            made = [inner[o] for o in op.body.outputs]
            state = made[: op.carried_count]
            outs.append(made[op.carried_count :])
        value |= zip(step.results, state, strict=False)
        rows |= zip(step.results[op.carried_count :], zip(*outs, strict=True), strict=True)
    return [*lines, [value.get(o, o) for o in found.program.outputs]]


def values_of(program: Program, seed: int = 0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {n: rng.normal(size=t.shape).astype("f4") for n, t in program.inputs}


def runs(program: Program, values: Mapping[str, np.ndarray]) -> list[np.ndarray]:
    return [shards[0] for shards in run_reference(program, [[values[n]] for n, _ in program.inputs])]


def stacked(found: Recovered, values: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    rows = {name: np.stack([values[n] for n in group]) for name, group in found.stacks.items()}
    return {**values, **rows}


def times(found: Recovered) -> list[int]:
    return [op.times for s in found.program.steps if (op := as_nested(s.op))]


def checked(flat: Program) -> list[int]:
    found = recover_repeats(flat)
    assert flat_steps(found) == canonical(flat)
    values = values_of(flat)
    before, after = runs(flat, values), runs(found.program, stacked(found, values))
    assert all(np.array_equal(a, b) for a, b in zip(before, after, strict=True))
    return times(found)


@pytest.mark.parametrize(
    ("layers", "expected"),
    [
        ("a" * 7, [7]),
        ("b" * 5, [5]),
        ("aaabaaaa", [3, 1, 4]),
        ("ab" * 4, [4]),
        ("aaaabbbbb", [4, 5]),
        ("baaaa", [4]),
        ("ab", []),
        ("a", []),
        ("", []),
    ],
)
def test_layers_are_found(layers: str, expected: list[int]) -> None:
    assert checked(written(layers)) == expected


@pytest.mark.parametrize("outputs", ["every", "some", "weights"])
def test_what_leaves_a_layer_is_a_row(outputs: str) -> None:
    flat = written("a" * 6, outputs=outputs)
    assert len(times(recover_repeats(flat))) == 1
    checked(flat)


def test_shared_weights_and_invariants_are_not_stacked() -> None:
    found = recover_repeats(written("a" * 6, shared=True, invariant=True))
    assert times(found) == [6]
    assert [group[0] for group in found.stacks.values()] == ["g0"]
    checked(written("a" * 6, shared=True, invariant=True))


def test_a_weight_of_two_layers_alone_is_no_row_twice() -> None:
    flat = written("a" * 6)
    steps = [Step(s.op, tuple("w1" if o == "w4" else o for o in s.operands), s.results) for s in flat.steps]
    checked(Program(flat.inputs, steps, flat.outputs))


def test_a_step_wired_otherwise_is_another_layer() -> None:
    flat = written("a" * 6)
    # The fourth layer adds what came into the third one: its tokens are those of the others.
    steps = list(flat.steps)
    steps[11] = Step(steps[11].op, (steps[5].results[0], steps[10].results[0]), steps[11].results)
    assert 6 not in checked(Program(flat.inputs, steps, flat.outputs))


def test_a_layer_with_its_factors_swapped_is_another() -> None:
    flat = written("b" * 6)
    steps = list(flat.steps)
    gates = [k for k, s in enumerate(steps) if len(s.operands) == 2 and s.op == Elementwise("silu(a) * b")]
    steps[gates[3]] = Step(steps[gates[3]].op, steps[gates[3]].operands[::-1], steps[gates[3]].results)
    assert checked(Program(flat.inputs, steps, flat.outputs)) == [3, 1, 2]


def test_a_layer_with_another_invariant_is_another() -> None:
    flat = written("a" * 6, invariant=True)
    steps, uses = list(flat.steps), [k for k, s in enumerate(flat.steps) if "extra" in s.operands]
    operands = tuple("more" if o == "extra" else o for o in steps[uses[3]].operands)
    steps[uses[3]] = Step(steps[uses[3]].op, operands, steps[uses[3]].results)
    assert checked(Program([*flat.inputs, ("more", X)], steps, flat.outputs)) == [3, 1, 2]


@given(st.text(alphabet="abc", max_size=14), st.booleans(), st.sampled_from(["", "every", "some"]))
def test_unrolling_gives_back_the_graph(layers: str, shared: bool, outputs: str) -> None:
    checked(written(layers, shared=shared, outputs=outputs))


def test_a_built_model_comes_back() -> None:
    model = Model.load("llama", layers=5, hidden=8, heads=2, ffn=12, seq=3, vocab=11, training=False)
    (number,) = (k for k, s in enumerate(model.program.steps) if as_nested(s.op))
    step = model.program.steps[number]
    op = as_nested(step.op)
    assert op is not None
    assert op.times == 5
    inputs = {n: t for n, t in model.program.inputs if n not in step.operands[-op.cut :]}
    flat, x = list(model.program.steps[:number]), step.operands[0]
    shared = dict(zip((n for n, _ in op.body.inputs[1 : -op.cut]), step.operands[1 : -op.cut], strict=True))
    for k in range(op.times):
        at = {op.body.inputs[0][0]: x, **shared}
        for name, t in op.body.inputs[-op.cut :]:
            inputs[f"{name}.{k}"] = t
            at[name] = f"{name}.{k}"
        for s in op.body.steps:
            results = tuple(f"{k}.{r}" for r in s.results)
            flat.append(Step(s.op, tuple(at[o] for o in s.operands), results, s.stopped))
            at |= zip(s.results, results, strict=True)
        x = at[op.body.outputs[0]]
    last = [
        Step(s.op, tuple(x if o == step.results[0] else o for o in s.operands), s.results)
        for s in model.program.steps[number + 1 :]
    ]
    found = recover_repeats(Program(inputs, [*flat, *last], model.program.outputs))
    assert times(found) == [5]
    assert [len(group) for group in found.stacks.values()] == [5] * op.cut
    (made,) = (as_nested(s.op) for s in found.program.steps if as_nested(s.op))
    assert made is not None
    assert [s.op for s in made.body.steps] == [s.op for s in op.body.steps]

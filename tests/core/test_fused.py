"""Fused ops: they mean their bodies, whoever runs them; programs fused and taken apart again."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardplan.core.dtypes import numpy_dtype
from shardplan.core.fusing import decompose_fused, fusable, fused_with
from shardplan.core.gradients import gradients
from shardplan.core.ops import EmbeddingBagAllToAll, GemmAllToAll, GemvAllReduce, ReduceDims, Repeat
from shardplan.core.ops.fused_forms import GemmForm
from shardplan.core.program import Program
from shardplan.core.reference import distribute, run_reference
from shardplan.core.step import Step
from shardplan.errors import TypingError

EXPERTS = """program
  mesh x=2
  input %a: f32[2@x, 4, 3]
  input %b: f32[2@x, 3, 5]
  %z = einsum(%a, %b; spec="wmk,wkn->wmn"): f32[2@x, 4, 5]
  %y = all_to_all(%z; src_dim=0, dst_dim=1, axes=(x)): f32[2, 4@x, 5]
  output %y"""
ULYSSES = """program
  mesh y=2, x=3
  input %a: f32[12@(y,x), 3]
  input %b: f32[3, 6]
  %z = einsum(%a, %b; spec="sk,kn->sn"): f32[12@(y,x), 6]
  %s = elementwise(%z; expr="silu(a)"): f32[12@(y,x), 6]
  %y = all_to_all(%s; src_dim=0, dst_dim=1, axes=(x)): f32[12@y, 6@x]
  output %y"""
GEMV = """program
  mesh x=4
  input %a: f32[6, 8@x]
  input %b: f32[8@x, 3]
  %z = einsum(%a, %b; spec="mk,kc->mc"): f32[6, 3]{+x}
  %y = all_reduce(%z; axes=(x)): f32[6, 3]
  output %y"""
BAGS = """program
  mesh x=2
  input %t: f32[7, 4@x]
  input %i: i32[6, 3]
  input %u: f32[5, 4@x]
  input %j: i32[6, 2]
  input %d: f32[6, 4@x]
  %p = embedding_bag(%t, %i): f32[6, 4@x]
  %q = embedding_bag(%u, %j): f32[6, 4@x]
  %p1 = expand(%p; spec="b d -> b one=1 d"): f32[6, 1, 4@x]
  %q1 = expand(%q; spec="b d -> b one=1 d"): f32[6, 1, 4@x]
  %d1 = expand(%d; spec="b d -> b one=1 d"): f32[6, 1, 4@x]
  %c = concat(%d1, %p1, %q1; dim=1): f32[6, 3, 4@x]
  %y = all_to_all(%c; src_dim=2, dst_dim=0, axes=(x)): f32[6@x, 3, 4]
  output %y"""
LAYERS = """program
  mesh x=2
  input %h: f32[4@x, 6]
  input %w: f32[3, 6, 6]
  %r = repeat(%h, %w; n=3, carried=1, sliced=1) {
    input %h: f32[4@x, 6]
    input %w: f32[6, 6]
    %z = einsum(%h, %w; spec="mk,kn->mn"): f32[4@x, 6]
    %y = all_to_all(%z; src_dim=0, dst_dim=1, axes=(x)): f32[4, 6@x]
    %v = all_to_all(%y; src_dim=1, dst_dim=0, axes=(x)): f32[4@x, 6]
    output %v
  }: f32[4@x, 6]
  output %r"""
GATHER = """program
  mesh y=2, x=3
  input %a: f32[12@(y,x), 3]
  input %b: f32[3, 6@x]
  %g = all_gather(%a; dim=0, axes=(x)): f32[12@y, 3]
  %y = einsum(%g, %b; spec="sk,kn->sn"): f32[12@y, 6@x]
  output %y"""
SCATTER = """program
  mesh x=3
  input %a: f32[6, 9@x]
  input %b: f32[9@x, 2]
  %z = einsum(%a, %b; spec="sk,kn->sn"): f32[6, 2]{+x}
  %y = reduce_scatter(%z; dim=0, axes=(x)): f32[6@x, 2]
  output %y"""
TEXTS = {"gemm_all_to_all": EXPERTS, "gemv_all_reduce": GEMV, "embedding_bag_all_to_all": BAGS}


def all_fused(program: Program) -> Program:
    """A program with all that can be."""
    return fused_with(program, {one.place: (one, one.op) for one in fusable(program) if one.op is not None})


def shards(program: Program, seed: int = 0) -> list[list[np.ndarray]]:
    """Shards of random inputs; ids are rows of every table."""
    rng = np.random.default_rng(seed)
    found: list[list[np.ndarray]] = []
    for _, t in program.inputs:
        whole = rng.integers(0, 5, t.shape) if t.dtype[0] == "i" else rng.normal(size=t.shape)
        found.append(distribute(whole.astype(numpy_dtype(t.dtype)), t))
    return found


def assert_alike(one: Program, other: Program, seed: int = 0) -> None:
    assert one.output_types == other.output_types
    given_ = shards(one, seed)
    for x, y in zip(run_reference(one, given_), run_reference(other, given_), strict=True):
        for a, b in zip(x, y, strict=True):
            np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("text", [EXPERTS, ULYSSES, GEMV, BAGS, LAYERS, GATHER, SCATTER])
def test_fusing_keeps_types_and_results_and_is_undone(text: str) -> None:
    program = Program.parse(text)
    found = all_fused(program)
    assert len(found.steps) < len(program.steps) or "repeat" in text
    assert_alike(program, found)
    assert_alike(program, decompose_fused(found))
    assert {s.op for s in decompose_fused(found).steps} == {s.op for s in program.steps}
    assert Program.parse(str(found)) == found


@pytest.mark.parametrize("text", [EXPERTS, GEMV, BAGS])
def test_bytes_are_those_of_the_steps(text: str) -> None:
    program = Program.parse(text)
    found = all_fused(program)
    step = found.steps[-1]
    operands, results = found.step_types(step)
    last = program.steps[-1]
    types = program.step_types(last)[0]
    np.testing.assert_array_equal(step.op.received_bytes(*operands), last.op.received_bytes(*types))
    np.testing.assert_array_equal(step.op.sent_bytes(*operands)[1], last.op.sent_bytes(*types)[1])
    assert step.op.rounds(*operands) == last.op.rounds(*types)
    # What the computations make lies there when it moves; the result is not counted twice.
    assert step.op.staging(*operands) == types[0].local_bytes() + last.op.staging(*types)
    assert step.op.infer(*operands) == results
    assert step.op.members(operands[0]) == ("x",)


def test_forms() -> None:
    forms = {}
    for name, text in (*TEXTS.items(), ("ulysses", ULYSSES)):
        (one,) = fusable(Program.parse(text))
        assert one.op is not None and name in (one.op.name, "ulysses")
        forms[name] = one.op.form
    one = forms["gemm_all_to_all"]
    assert (one.batch, one.rows, one.inner, one.columns, one.scatter, one.gathered) == ("w", "m", "k", "n", 0, "w")
    one = forms["ulysses"]
    assert (one.rows, one.columns, one.scatter, one.gathered, one.activation) == ("s", "n", 1, "s", "silu")
    one = forms["gemv_all_reduce"]
    assert (one.rows, one.inner, one.columns, one.a, one.b) == ("m", "k", "c", 0, 1)
    assert forms["embedding_bag_all_to_all"].tables == ((4, -1), (0, 1), (2, 3))
    for text, cut, gathered, landing in ((GATHER, "", "s", 6 * 3 * 4), (SCATTER, "s", "", 6 * 2 * 4)):
        (found,) = fusable(Program.parse(text))
        assert found.op is not None
        one = found.op.form
        assert isinstance(one, GemmForm)
        assert (one.rows, one.inner, one.columns, one.cut, one.gathered) == ("s", "k", "n", cut, gathered)
        assert found.op.landing_bytes == landing
        assert found.move == (0 if gathered else 1)


REFUSED = {
    "several_users": (EXPERTS.replace("output %y", "output %y, %z"), 0, "%z is read by the program, as a result"),
    "effect_between": (ULYSSES.replace("silu(a)", "silu(a) + 1"), 1, "elementwise between product and move"),
    "dtype": (GEMV.replace("f32", "f64"), 0, "f64; legal are f32, bf16, f16"),
    "splits_unknown": (EXPERTS.replace(" 4,", " 3,").replace("4@x", "3@x"), -1, "has tiles of several sizes"),
    "not_sum": (
        GEMV.replace("mesh x=4", "mesh y=2, x=2").replace("@x", "@(y,x)").replace("{+x}", "{+y,+x}").replace(
            "%y = all_reduce(%z; axes=(x)): f32[6, 3]", "%y = all_reduce(%z; axes=(x)): f32[6, 3]{+y}"
        ), -1, "is summed in parts"),
    "overlapped": (
        GATHER.replace("  %y =", """  %c = einsum(%a, %b; spec="sk,kn->sn"): f32[12@(y,x), 6]
  %y =""").replace("3, 6@x]", "3, 6]").replace("12@y, 6@x", "12@y, 6").replace("output %y", "output %y, %c"),
        1, "it runs while the move does"),
}  # fmt: skip


@pytest.mark.parametrize("reason", REFUSED)
def test_what_blocks_is_said(reason: str) -> None:
    text, blocked, says = REFUSED[reason]
    (one,) = fusable(Program.parse(text))
    assert (one.reason, one.op) == (reason, None)
    assert says in one.text
    assert blocked < 0 or one.blocked == blocked


def through(text: str, name: str, step: str) -> str:
    """A program with one more step, which makes %r, between what makes a value and the step that reads it."""
    head, _, tail = text.partition(f"(%{name}")
    at = head.rindex("  %y =") if "  %y =" in head else head.rindex("  %")
    return f"{head[:at]}  %r = {step}\n{head[at:]}(%r{tail}"


MORE = {  # more that blocks: the text, the reason, what is said
    "gathered sums": (
        GATHER.replace("f32[12@(y,x), 3]", "f32[12@y, 3@x]").replace("dim=0", "dim=1"),
        "splits_unknown",
        "the dim k is one of both operands",
    ),
    "gather read twice": (GATHER.replace("output %y", "output %y, %g"), "several_users", "%g is read by the program"),
    "gather, then relu": (
        through(GATHER, "g", 'elementwise(%g; expr="relu(a)"): f32[12@y, 3]'),
        "effect_between",
        "elementwise between gather and product",
    ),
    "sum of parts": (
        SCATTER.replace("mesh x=3", "mesh y=3, x=3")
        .replace("9@x", "9@(y,x)")
        .replace("{+x}", "{+y,+x}")
        .replace("f32[6@x, 2]", "f32[6@x, 2]{+y}"),
        "not_sum",
        "is summed in parts",
    ),
    "scaled sum": (
        through(SCATTER, "z", 'elementwise(%z; expr="a * 2"): f32[6, 2]{+x}'),
        "effect_between",
        "elementwise between product and sum",
    ),
    "sum that a product hides": (
        SCATTER.replace("  output %y", '  %c = einsum(%a, %b; spec="sk,kn->sn"): f32[6, 2]{+x}\n  output %y, %c'),
        "overlapped",
        "it runs while the move does",
    ),
}


@pytest.mark.parametrize("name", MORE)
def test_what_blocks_gathers_and_sums_is_said(name: str) -> None:
    text, reason, says = MORE[name]
    (one,) = fusable(Program.parse(text))
    assert (one.reason, one.op) == (reason, None)
    assert says in one.text


@settings(deadline=None, max_examples=30)
@given(st.data())
def test_random_products_with_gathers_and_sums_are_fused_and_mean_the_same(data: st.DataObject) -> None:
    """All orders of dims of products whose operand is gathered, or whose sum is cut."""
    ranks, gathers = data.draw(st.sampled_from([2, 3])), data.draw(st.booleans())
    batch = data.draw(st.sampled_from(["", "e"]))
    one, other = ("".join(data.draw(st.permutations(batch + side + "k"))) for side in ("ab", "cd"))
    result = "".join(data.draw(st.permutations("abcd" + batch)))
    moved = data.draw(st.sampled_from("abcd"))
    sizes = {c: 2 * ranks if c in (moved, "k") else 2 for c in result + "k"}

    def typed(side: str, cut: str) -> str:
        return ", ".join(f"{sizes[c]}@x" if c == cut else str(sizes[c]) for c in side)

    spec = f'spec="{one},{other}->{result}"'
    if gathers:
        name, side = ("a", one) if moved in one else ("b", other)
        given_ = [("a", one), ("b", other)]
        text = "".join(f"  input %{n}: f32[{typed(s, moved if n == name else '')}]\n" for n, s in given_)
        text += f"  %g = all_gather(%{name}; dim={side.index(moved)}, axes=(x)): f32[{typed(side, '')}]\n"
        operands = "%g, %b" if name == "a" else "%a, %g"
        text += f"  %y = einsum({operands}; {spec}): f32[{typed(result, '')}]\n"
    else:
        text = f"  input %a: f32[{typed(one, 'k')}]\n  input %b: f32[{typed(other, 'k')}]\n"
        text += f"  %z = einsum(%a, %b; {spec}): f32[{typed(result, '')}]{{+x}}\n"
        text += f"  %y = reduce_scatter(%z; dim={result.index(moved)}, axes=(x)): f32[{typed(result, moved)}]\n"
    program = Program.parse(f"program\n  mesh x={ranks}\n{text}  output %y")
    (found,) = fusable(program)
    assert found.op is not None, found.text
    assert_alike(program, all_fused(program))


@settings(deadline=None, max_examples=30)
@given(st.data())
def test_random_products_are_fused_and_mean_the_same(data: st.DataObject) -> None:
    ranks = data.draw(st.sampled_from([2, 3, 4]))
    letters = data.draw(st.permutations("abcd"))
    # The first operand has a, b and k, the other c, d and k; e is a batch, or is not there.
    batch = data.draw(st.sampled_from(["", "e"]))
    one, other = (data.draw(st.permutations(batch + side + "k")) for side in ("ab", "cd"))
    result = "".join(data.draw(st.permutations([*letters, *batch])))
    src, dst = data.draw(st.permutations(result))[:2]
    sizes = {c: ranks * data.draw(st.sampled_from([1, 2])) if c in (src, dst) else 2 for c in result} | {"k": 3}

    def typed(side: list[str] | str) -> str:
        return ", ".join(f"{sizes[c]}@x" if c == src else str(sizes[c]) for c in side)

    after = ", ".join(f"{sizes[c]}@x" if c == dst else str(sizes[c]) for c in result)
    program = Program.parse(f"""program
      mesh x={ranks}
      input %a: f32[{typed(one)}]
      input %b: f32[{typed(other)}]
      %z = einsum(%a, %b; spec="{"".join(one)},{"".join(other)}->{result}"): f32[{typed(result)}]
      %y = all_to_all(%z; src_dim={result.index(src)}, dst_dim={result.index(dst)}, axes=(x)): f32[{after}]
      output %y""")
    (found,) = fusable(program)
    if dst == "e":  # a batch that is cut
        assert found.reason == "splits_unknown"
        return
    assert found.op is not None
    form = found.op.form
    assert isinstance(form, GemmForm)
    assert sorted(form.batch + form.rows + form.columns) == sorted(result)
    assert_alike(program, all_fused(program))


def test_steps_that_run_ahead_are_counted_again() -> None:
    """The product and the move of a repeat's row run ahead, and are one step then."""
    text = """program
  mesh x=2
  input %h: f32[4, 6@x]
  input %v: f32[3, 4@x, 6]
  input %w: f32[6, 6]
  %r = repeat(%h, %w, %v; n=3, carried=1, sliced=1, ahead=2) {
    input %h: f32[4, 6@x]
    input %w: f32[6, 6]
    input %v: f32[4@x, 6]
    %z = einsum(%v, %w; spec="mk,kn->mn"): f32[4@x, 6]
    %y = all_to_all(%z; src_dim=0, dst_dim=1, axes=(x)): f32[4, 6@x]
    %s = elementwise(%h, %y; expr="a + b"): f32[4, 6@x]
    output %s
  }: f32[4, 6@x]
  output %r"""
    program = Program.parse(text)
    found = all_fused(program)
    op = found.steps[0].op
    assert isinstance(op, Repeat)
    assert (op.ahead, len(op.body.steps)) == (1, 2)
    assert_alike(program, found)


def test_the_gradient_is_that_of_the_steps() -> None:
    for text, wanted in ((EXPERTS, ["a", "b"]), (GEMV, ["a", "b"]), (BAGS, ["t", "u", "d"])):
        program = Program.parse(text)
        whole = ReduceDims(tuple(range(program.types["y"].ndim)))
        last = Step(whole, ("y",), ("loss",))
        both = [Program(p.inputs, (*p.steps, last), ("loss",)) for p in (program, all_fused(program))]
        one, other = (gradients(p, "loss", wanted).program for p in both)
        assert_alike(one, other)


def test_bags_of_many_tables_are_one_op() -> None:
    """As many as the public recommender has: 26."""
    many = range(26)
    given_ = "".join(f"  input %t{k}: f32[7, 4@x]\n  input %i{k}: i32[6, 2]\n" for k in many)
    bags = "".join(
        f"  %p{k} = embedding_bag(%t{k}, %i{k}): f32[6, 4@x]\n"
        f'  %q{k} = expand(%p{k}; spec="b d -> b one=1 d"): f32[6, 1, 4@x]\n'
        for k in many
    )
    parts = ", ".join(f"%q{k}" for k in many)
    program = Program.parse(
        f"program\n  mesh x=2\n{given_}{bags}  %c = concat({parts}; dim=1): f32[6, 26, 4@x]\n"
        "  %y = all_to_all(%c; src_dim=2, dst_dim=0, axes=(x)): f32[6@x, 26, 4]\n  output %y"
    )
    found = all_fused(program)
    assert len(found.steps) == 1
    assert_alike(program, found)


def test_bodies_that_are_none_are_refused() -> None:
    body = Program.parse(EXPERTS)
    with pytest.raises(TypingError, match="gemv_all_reduce: the body's one result is not that of one all_reduce"):
        GemvAllReduce(body)
    with pytest.raises(TypingError, match="gemm_all_to_all: tiles is -1; legal is a whole number"):
        GemmAllToAll(body, tiles=-1)
    with pytest.raises(TypingError, match="embedding_bag_all_to_all: "):
        EmbeddingBagAllToAll(body)
    with pytest.raises(TypingError, match="gemv_all_reduce: shots is 3"):
        replace(GemvAllReduce(Program.parse(GEMV)), shots=3)

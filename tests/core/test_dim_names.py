"""`dim_names`: names that pass through every op, into bodies and to gradients; what meets, and what does not."""

import random
from dataclasses import fields, replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from compute_examples import UNEQUAL, Example
from gradient_examples import GRADIENTS, ONE
from shardplan.core.dim_names import DimNames, Names, dim_names, links, steps_by_value
from shardplan.core.gradients import Gradients, gradients
from shardplan.core.layout import Layout
from shardplan.core.mesh import Mesh
from shardplan.core.op import Op
from shardplan.core.ops import (
    Attention,
    Backward,
    Combine,
    CrossEntropy,
    Dispatch,
    Einsum,
    Elementwise,
    EmbeddingBag,
    Expand,
    Gather,
    Iota,
    Pad,
    ReduceDims,
    Repeat,
    Reshape,
    RmsNorm,
    Rotary,
    Send,
    Softmax,
    Split,
    Together,
)
from shardplan.core.ops.composed import Composed, differs
from shardplan.core.ops.compute import RuleTypedOp
from shardplan.core.program import Program
from shardplan.core.program_builder import ProgramBuilder
from shardplan.core.step import Step
from shardplan.core.tensor import TensorType
from shardplan.errors import LayoutError, ShardplanError, TypingError

Given = dict[str, tuple[str | None, ...]]


def builder(mesh: Mesh = ONE, **types: str) -> ProgramBuilder:
    return ProgramBuilder({n: TensorType.parse(t, mesh) for n, t in types.items()})


def program(d: ProgramBuilder, inputs: int, *outputs: str) -> Program:
    return Program([*d.types.items()][:inputs], d.steps, outputs)


def text(names: DimNames, value: str) -> str:
    """The names of a value's dims, those of a dim of several factors with a star between them."""
    return " ".join("*".join(dim) for dim in names.values[value])


# A decoder: two layers of grouped attention and a gated product, the last of which gives logits of a vocabulary.
LAYER = {
    "g1": "6", "wq": "6, 2, 3, 4", "wk": "6, 2, 4", "wv": "6, 2, 4", "wo": "2, 3, 4, 6", "g2": "6", "up": "6, 14",
    "gate": "6, 14", "down": "14, 6",
}  # fmt: skip
NAMED: Given = {
    "ids": ("batch", "sequence"),
    "targets": (None, None),
    "table": ("vocab", "hidden"),
    "wq": (None, None, "kv_heads", "ratio", "head_dim"),
    "wv": (None, None, None, "head_dim"),  # else a dim of its own, as in latent attention
    "up": (None, None, "ffn"),
}


def decoder() -> Program:
    body = builder(x="f64[10, 8, 6]", place="i32[8]", **{n: f"f64[{t}]" for n, t in LAYER.items()})
    inputs = len(body.types)
    y = body(RmsNorm(), "x", "g1")
    q, k, v = (
        body(Einsum(s), y, n) for s, n in (("bsh,hgrd->bsgrd", "wq"), ("bsh,hgd->bsgd", "wk"), ("bsh,hgd->bsgd", "wv"))
    )
    q = body(
        Reshape("b s (g=2 r) d -> b s g r d"), body(Rotary(), body(Reshape("b s g r d -> b s (g r) d"), q), "place")
    )
    o = body(Einsum("bsgrd,grdh->bsh"), body(Attention(), q, body(Rotary(), k, "place"), v), "wo")
    x = body(Elementwise("a + b"), "x", o)
    y = body(RmsNorm(), x, "g2")
    up, gate = (body(Einsum("bsh,hf->bsf"), y, n) for n in ("up", "gate"))
    y = body(Einsum("bsf,fh->bsh"), body(Elementwise("silu(a) * b"), gate, up), "down")
    layer = program(body, inputs, body(Elementwise("a + b"), x, y))
    d = builder(
        ids="i32[10, 8]", targets="i32[10, 8]", table="f64[22, 6]", **{n: f"f64[2, {t}]" for n, t in LAYER.items()}
    )
    inputs = len(d.types)
    place = d(Iota("i32", (8,), 0, Layout(((),)), ONE))
    x = d(Repeat(2, layer, 1, len(LAYER)), d(Gather(), "table", "ids"), place, *LAYER)
    loss = d(ReduceDims((0, 1), "mean"), d(CrossEntropy(), d(Einsum("bsh,vh->bsv"), x, "table"), "targets"))
    return program(d, inputs, loss)


def test_a_decoder_is_named_by_a_few_of_its_inputs() -> None:
    p = decoder()
    names = dim_names(p, NAMED)
    assert {n: text(names, n) for n, _ in p.inputs} == {
        "ids": "batch sequence",
        "targets": "batch sequence",
        "table": "vocab hidden",
        "g1": "layer hidden",
        "wq": "layer hidden kv_heads ratio head_dim",
        "wk": "layer hidden kv_heads head_dim",
        "wv": "layer hidden kv_heads head_dim",
        "wo": "layer kv_heads ratio head_dim hidden",
        "g2": "layer hidden",
        "up": "layer hidden ffn",
        "gate": "layer hidden ffn",
        "down": "layer ffn hidden",
    }
    inside = names.bodies[2]
    body = p.steps[2].op.body  # type: ignore[attr-defined]
    found = {text(inside, r) for s in body.steps for r in s.results}
    assert found == {
        "batch sequence hidden",
        "batch sequence kv_heads ratio head_dim",
        "batch sequence kv_heads*ratio head_dim",
        "batch sequence kv_heads head_dim",
        "batch sequence ffn",
    }
    attention = next(k for k, s in enumerate(body.steps) if s.op.name == "attention")
    assert sorted(inside.factors[attention].values()) == sorted(
        (n,) for n in ("batch", "sequence", "sequence", "kv_heads", "ratio", "head_dim", "head_dim")
    )
    assert text(inside, "place") == "sequence"


def test_gradients_are_named_as_their_parameters_are() -> None:
    p = decoder()
    wanted = ["table", *LAYER]
    found = gradients(p, p.outputs[0], wanted)
    names = dim_names(found.program, NAMED, found.origins)
    assert [text(names, n) for n in found.program.outputs[1:]] == [text(names, n) for n in wanted]
    auto = {
        x for level in every(names) for dims in level.values.values() for dim in dims for x in dim if x[1:].isdigit()
    }
    assert auto <= {"d0"}  # the dim of size 1 of a sum that is kept


def every(names: DimNames) -> list[DimNames]:
    return [names, *(x for body in names.bodies.values() for x in every(body))]


def test_without_origins_rows_of_a_scatter_have_no_name() -> None:
    d = builder(table="f64[22, 6]", ids="i32[10]")
    p = program(d, 2, d(Einsum("ij->"), d(Gather(), "table", "ids")))
    found = gradients(p, p.outputs[0], ["table"])
    grad = found.program.outputs[1]
    given: Given = {"table": ("vocab", "hidden")}
    assert text(dim_names(found.program, given), grad) == "d2 d1"
    assert text(dim_names(found.program, given, found.origins), grad) == "vocab hidden"


def test_copies_and_zeros_are_named_as_their_values_are() -> None:
    """What is made again in the reverse body ties to nothing there but to the value that it is a copy of."""
    body = builder(x="f64[3]", z="f64[3]", w="f64[3, 4]")
    e = body(Expand("b -> b t=4"), "z")
    layer = program(body, 3, body(Einsum("b,bt->b"), "x", e), body(Elementwise("a + b"), e, "w"))
    d = builder(x="f64[3]", z="f64[3]", w="f64[3, 4]", unused="f64[3, 5]")
    y, _ = d.write_step(Repeat(2, layer, 1), "x", "z", "w")
    p = program(d, 4, d(Einsum("b,b->"), y, y))
    found = gradients(p, p.outputs[0], ["x", "unused"], lambda step, moved: step.op.name == "repeat")
    names = dim_names(found.program, {"w": ("batch", "sequence"), "unused": ("rows", None)}, found.origins)
    assert text(names, found.program.outputs[2]) == "rows d0"
    forward, back = names.bodies.values()
    assert text(forward, e) == "batch sequence"
    assert {text(back, n) for n in back.values} == {"batch", "batch sequence"}


def test_moves_pass_names_to_any_mesh() -> None:
    p = Program.parse("""program
  mesh m0: a=2, b=3
  mesh m1: c=2 devices=6:8
  input %x: f32[12@a, 6] on m0
  input %y: f32[6@a, 5] on m0
  %2, %3 = all_gather(%x, %y; dim=0, axes=(a)): f32[12, 6] on m0; f32[6, 5] on m0
  %4 = send(%2; layout=[@c, _], mesh=m1): f32[12@c, 6] on m1
  output %4, %3""")
    names = dim_names(p, {"x": ("rows", None)})
    assert [text(names, n) for n in ("x", "2", "4", "y", "3")] == ["rows d0"] * 3 + ["d1 d2"] * 2


def test_moves_at_once_pass_names() -> None:
    here, there = Mesh(x=2), Mesh({"y": 3}, devices=[2, 3, 1])
    a, b = TensorType("i32", (12, 2), ("x",), here), TensorType("i32", (12, 3), ("y",), there)
    sends = [Step(Send(b.layout, there), ("a",), ("c",)), Step(Send(a.layout, here), ("b",), ("d",))]
    swap = Together(Program({"a": a, "b": b}, sends, ("d", "c")))
    p = Program({"a": a, "b": b}, [Step(swap, ("a", "b"), ("d", "c"))], ("d", "c"))
    names = dim_names(p, {"a": ("rows", "left"), "b": (None, "right")})
    assert [text(names, n) for n in ("c", "d")] == ["rows left", "d0 right"]
    assert [text(names.bodies[0], n) for n in ("c", "d")] == ["rows left", "d0 right"]


def test_layers_of_layers_are_layers_of_layers() -> None:
    row = builder(x="f64[4]", s="f64[4]")
    inner = program(row, 2, row(Elementwise("a * b"), "x", "s"))
    body = builder(x="f64[4]", s="f64[3, 4]")
    outer = program(body, 2, body(Repeat(3, inner, 1, 1), "x", "s"))
    d = builder(x="f64[4]", s="f64[2, 3, 4]")
    names = dim_names(program(d, 2, d(Repeat(2, outer, 1, 1), "x", "s")), {"x": ("hidden",)})
    assert text(names, "s") == "layer layer hidden"
    assert text(names.bodies[0], "s") == "layer hidden" and text(names.bodies[0].bodies[0], "s") == "hidden"


SQUARE = "f64[3, 6, 6]"


def square(given: Given) -> DimNames:
    """Layers of a square weight, whose result is the next one's operand."""
    body = builder(x="f64[4, 6]", w="f64[6, 6]")
    layer = program(body, 2, body(Elementwise("relu(a)"), body(Einsum("bi,io->bo"), "x", "w")))
    d = builder(x="f64[4, 6]", w=SQUARE)
    return dim_names(program(d, 2, d(Repeat(3, layer, 1, 1), "x", "w")), given)


def test_a_square_weight_has_one_name_twice() -> None:
    assert text(square({"x": (None, "hidden")}), "w") == text(square({"w": (None, "hidden", "hidden")}), "w")
    assert text(square({"x": (None, "hidden")}), "w") == "layer hidden hidden"
    assert text(square({"w": ("block", "hidden", None)}), "w") == "block hidden hidden"
    (inner,) = square({"x": ("batch", "hidden")}).bodies.values()
    assert inner.factors[0] == {"b": ("batch",), "i": ("hidden",), "o": ("hidden",)}


def test_whole_and_factors_may_both_be_named() -> None:
    d = builder(x="f64[6, 4]", y="f64[2, 3, 4]", z="f64[2, 3, 4]")
    y = d(Reshape("(g=2 r) d -> g r d"), "x")
    p = program(d, 3, d(Elementwise("a * b"), y, "y"), d(Elementwise("a * b"), y, "z"))
    names = dim_names(p, {"x": ("heads", None)})
    assert (text(names, "x"), text(names, "y")) == ("heads d0", "heads.0 heads.1 d0")
    names = dim_names(p, {"x": ("heads", None), "y": ("kv_heads", None, None)})
    assert (text(names, "x"), text(names, "z")) == ("kv_heads*heads.1 d0", "kv_heads heads.1 d0")
    names = dim_names(p, {"x": (None, None), "y": ("kv_heads", "ratio", "d0")})
    assert text(names, "x") == "kv_heads*ratio d0"


def test_ways_to_cut_a_dim_are_matched_where_they_nest() -> None:
    d = builder(x="f64[24]", y="f64[2, 12]", z="f64[4, 6]", w="f64[3, 8]")
    y, z, w = (d(Reshape(f"(a={n} b) -> a b"), "x") for n in (2, 4, 3))
    p = program(d, 4, *(d(Elementwise("a + b"), m, n) for m, n in ((y, "y"), (z, "z"), (w, "w"))))
    names = dim_names(p, {"z": ("a", "b")})
    assert {n: text(names, n) for n in "xyzw"} == {"x": "a*b", "y": "a.0 a.1*b", "z": "a b", "w": "d0 d1"}


def test_a_factor_of_size_one_has_no_part_in_a_dim_of_several() -> None:
    d = builder(x="f64[1, 6]", y="f64[6, 1, 1]")
    y = d(Reshape("b s -> (b s)"), "x")
    z = d(Elementwise("a + b"), d(Reshape("s -> s one=1 two=1"), y), "y")
    names = dim_names(program(d, 2, z), {"x": ("batch", "sequence")})
    assert (text(names, y), text(names, z)) == ("sequence", "sequence d0 d1")


def test_dims_of_size_one_that_differ_may_meet() -> None:
    d = builder(x="f64[4, 1]", y="f64[5, 1]", c="f64[1]")
    p = program(d, 3, *(d(Elementwise("a + b"), n, "c") for n in "xy"))
    names = dim_names(p, {"x": (None, "batch"), "y": (None, "heads")})
    assert (text(names, "x"), text(names, "y"), text(names, "c")) == ("d0 batch", "d1 heads", "batch")


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"x": (None, "hidden"), "w": ("model", None)},
         "step 0 (einsum): 'hidden', dim 1 of input %x, meets 'model', dim 0 "
         "of input %w; legal is one name for both"),
        ({"w": (None, "model"), "b": ("ffn",)},
         "step 1 (elementwise): 'model', dim 1 of input %w, meets 'ffn', dim 0 of "
         "input %b; legal is one name for both"),
        ({"x": ("batch",)}, "dim_names: the names ('batch',); legal are 2 of %x, f64[4, 6]"),
        ({"q": ("batch",)}, "dim_names: the names ('batch',); there is no input %q"),
        ({"x": ("batch", "hid den")}, "dim_names: the name 'hid den' of %x; legal are letters, digits and '_'"),
        ({"x": ("batch", "h.0")}, "dim_names: the name 'h.0' of %x; legal are letters, digits and '_'"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_named(given: Given, said: str) -> None:
    d = builder(x="f64[4, 6]", w="f64[6, 5]", b="f64[5]")
    p = program(d, 3, d(Elementwise("a + b"), d(Einsum("bi,io->bo"), "x", "w"), "b"))
    with pytest.raises(TypingError) as caught:
        dim_names(p, given)
    assert str(caught.value) == said


def test_what_a_repeat_carries_may_leave_under_another_name() -> None:
    names = square({"w": (None, "inner", "outer")})
    (inside,) = names.bodies.values()
    assert [text(names, n) for n in ("x", "2")] == ["d0 inner", "d0 inner"]
    assert text(inside, "2") == "d0 outer"
    assert inside.factors[0] == {"b": ("d0",), "i": ("inner",), "o": ("outer",)}
    assert text(square({"w": (None, None, "outer")}), "x") == "d0 outer"


def test_an_error_names_the_step_in_a_body() -> None:
    with pytest.raises(TypingError, match=r"^step 0 \(repeat\), step 0 \(einsum\): 'hidden'.* meets 'inner'"):
        body = builder(x="f64[4, 6]", w="f64[6, 6]")
        layer = program(body, 2, body(Einsum("bi,io->bo"), "x", "w"))
        d = builder(x="f64[4, 6]", w=SQUARE)
        dim_names(
            program(d, 2, d(Repeat(3, layer, 0, 1), "x", "w")), {"x": (None, "hidden"), "w": (None, "inner", None)}
        )


def test_names_of_what_has_the_same_factors_are_one() -> None:
    d = builder(x="f64[6]", y="f64[6]")
    back = d(Reshape("(a=2 b) -> a b"), "x"), d(Reshape("(a=2 b) -> a b"), "y")
    p = program(d, 2, d(Elementwise("a + b"), *back))
    assert text(dim_names(p, {"x": ("inner",)}), "y") == "inner"
    with pytest.raises(TypingError) as caught:
        dim_names(p, {"x": ("inner",), "y": ("outer",)})
    assert str(caught.value) == (
        "dim_names: 'inner', dim 0 of input %x, and 'outer', dim 0 of input %y, are of the same factors; legal is one "
        "name for both"
    )


class Writer:
    """A random program: steps that type are kept."""

    def __init__(self, draw: st.DrawFn) -> None:
        self.draw, self.d, self.inputs = draw, ProgramBuilder({}), list[str]()
        for _ in range(self.among(range(1, 4))):
            self.given([self.among((1, 2, 3, 4, 6)) for _ in range(self.among(range(1, 4)))])
        self.kinds = (
            *(self.einsum, self.map, self.multiply, self.reduce, self.cut, self.merge, self.expand, self.softmax),
            *(self.gather, self.repeat, self.pad),
        )
        for _ in range(self.among(range(1, 9))):
            value = self.among([n for n, t in self.d.types.items() if 0 < t.ndim < 5 and differs(t)])
            try:
                self.among(self.kinds)(value, self.d.types[value].shape)
            except ShardplanError:
                continue
        used = {o for step in self.d.steps for o in step.operands}
        ends = [n for n, t in self.d.types.items() if n not in used and differs(t)]
        total = [self.d(Einsum(f"{'abcdef'[: self.d.types[n].ndim]}->"), n) for n in ends]
        loss = total[0]
        for other in total[1:]:
            loss = self.d(Elementwise("a + b"), loss, other)
        self.program = Program([(n, self.d.types[n]) for n in self.inputs], self.d.steps, (loss,))

    def among(self, chosen: Any) -> Any:
        return self.draw(st.sampled_from(list(chosen)))

    def given(self, shape: list[int]) -> str:
        self.inputs.append(self.d.add_input(TensorType("f64", shape, (), ONE)))
        return self.inputs[-1]

    def einsum(self, x: str, shape: tuple[int, ...]) -> None:
        left = "abcd"[: len(shape)]
        y = self.given([self.among(shape) for _ in range(2)]) if self.among((True, False)) else self.among(self.inputs)
        right, free = "", "wxyz"
        for k, n in enumerate(self.d.types[y].shape):
            right += self.among([c for c, m in zip(left, shape, strict=True) if m == n and c not in right] + [free[k]])
        every = list(dict.fromkeys(left + right))
        out = self.draw(st.lists(st.sampled_from(every), min_size=1, max_size=3, unique=True))
        self.d(Einsum(f"{left},{right}->{''.join(out)}"), x, y)

    def map(self, x: str, shape: tuple[int, ...]) -> None:
        self.d(Elementwise("tanh(a)"), x)

    def multiply(self, x: str, shape: tuple[int, ...]) -> None:
        self.d(Elementwise("a * b"), x, self.among([n for n, t in self.d.types.items() if differs(t)]))

    def reduce(self, x: str, shape: tuple[int, ...]) -> None:
        self.d(ReduceDims((self.among(range(len(shape))),), keep=self.among((True, False))), x)

    def cut(self, x: str, shape: tuple[int, ...]) -> None:
        k = self.among(range(len(shape)))
        n = self.among([m for m in range(1, shape[k] + 1) if shape[k] % m == 0])
        letters = "abcd"[: len(shape)]
        self.d(Reshape(" ".join(f"({c}={n} z)" if j == k else c for j, c in enumerate(letters)) + " -> "
                       + " ".join(f"{c} z" if j == k else c for j, c in enumerate(letters))), x)  # fmt: skip

    def merge(self, x: str, shape: tuple[int, ...]) -> None:
        self.d(
            Reshape({2: "a b -> (a b)", 3: self.among(("a b c -> (a b) c", "a b c -> a (b c)"))}.get(len(shape), "")), x
        )

    def expand(self, x: str, shape: tuple[int, ...]) -> None:
        letters = " ".join("abcd"[: len(shape)])
        self.d(Expand(f"{letters} -> z={self.among((2, 3))} {letters}"), x)

    def softmax(self, x: str, shape: tuple[int, ...]) -> None:
        self.d(Softmax(self.among(range(len(shape)))), x)

    def gather(self, x: str, shape: tuple[int, ...]) -> None:
        self.d(Gather(), x, self.d(Iota("i32", (self.among((2, 3)),), 0, Layout(((),)), ONE)))

    def repeat(self, x: str, shape: tuple[int, ...]) -> None:
        n, q = self.among((1, 2, 3)), shape[-1]
        w = self.given([n, q, q])
        inner = ProgramBuilder({"x": self.d.types[x], "w": TensorType("f64", (q, q), (), ONE)})
        letters = "abcd"[: len(shape) - 1]
        y = inner(Einsum(f"{letters}i,io->{letters}o"), inner(Elementwise("tanh(a)"), "x"), "w")
        body = Program([("x", inner.types["x"]), ("w", inner.types["w"])], inner.steps, (y, y))
        self.d.write_step(Repeat(n, body, 1, 1), x, w)

    def pad(self, x: str, shape: tuple[int, ...]) -> None:
        self.d(Pad((1,) * len(shape), (0,) * len(shape)), x)


@st.composite
def programs(draw: st.DrawFn) -> Program:
    return Writer(draw).program


def with_gradients(p: Program) -> Gradients:
    return gradients(p, p.outputs[0], [n for n, t in p.inputs if differs(t)])


def plain(p: Program) -> Gradients:
    return Gradients(p, (None,) * len(p.steps))


@settings(max_examples=60, deadline=None)
@given(programs())
def test_a_gradient_has_the_names_of_its_value(p: Program) -> None:
    found = with_gradients(p)
    names = dim_names(found.program, {}, found.origins)
    for (name, _), grad in zip(p.inputs, found.program.outputs[1:], strict=True):
        assert names.values[grad] == names.values[name], (name, str(found.program))


def shuffled(p: Program, rng: random.Random) -> tuple[Program, list[int]]:
    """The steps in another order, also in bodies, and which each of them was."""
    makers = {r: k for k, step in enumerate(p.steps) for r in step.results}
    after = {k: {makers[o] for o in step.operands if o in makers} for k, step in enumerate(p.steps)}
    order: list[int] = []
    while len(order) < len(p.steps):
        order.append(rng.choice([k for k in after if k not in order and after[k] <= set(order)]))
    steps = [p.steps[k] for k in order]
    steps = [Step(_shuffled_op(s.op, rng), s.operands, s.results, s.stopped) for s in steps]
    return Program(p.inputs, steps, p.outputs), order


def _shuffled_op(op: Op, rng: random.Random) -> Op:
    return replace(op, body=shuffled(op.body, rng)[0]) if isinstance(op, Repeat) else op


def by_value(p: Program, names: DimNames) -> dict[str, Any]:
    """All names, with no step's number in them."""
    found: dict[str, Any] = dict(names.values)
    for k, step in enumerate(p.steps):
        body = getattr(step.op, "body", None)
        found[f"of {step.results[0]}"] = by_value(body, names.bodies[k]) if body else names.factors[k]
    return found


@settings(max_examples=60, deadline=None)
@given(programs(), st.randoms(use_true_random=False))
def test_names_do_not_hang_on_the_order_of_steps(p: Program, rng: random.Random) -> None:
    for one in (p, with_gradients(p).program):
        other, _ = shuffled(one, rng)
        assert by_value(other, dim_names(other, {})) == by_value(one, dim_names(one, {}))
        assert sorted(steps_by_value(one)) == list(range(len(one.steps)))


MESH = Mesh(x=2)


def legal(op: Op, found: tuple[TensorType, ...], f: str) -> bool:
    """Whether a rule lets a factor be sharded that is the first in its dims, but for those of size 1."""
    assert isinstance(op, RuleTypedOp)
    return all(factor.name != f or factor.kind != "replicate" for factor in op.rule(*found).factors)


def shards_by_names(
    op: Op, types: tuple[TensorType, ...], names: list[tuple[Names, ...]], factors: dict[str, Names]
) -> int:
    """Shard what has a name that one factor has, and look whether the op types; return how often it does."""
    found, count = links(op, types), 0
    for name in {n for (n, *more) in factors.values() if not more}:
        f, *others = (f for f, said in factors.items() if name in said)
        dims = [dim for side in (*found.operands, *found.results) for dim in side if f in dim]
        minor = any(found.sizes[g] > 1 for dim in dims for g in dim[: dim.index(f)])
        if others or minor or found.sizes[f] == 1 or (found.sizes[f] % 2 and any(len(dim) > 1 for dim in dims)):
            continue
        at = [[("x",) if dim[:1] == (name,) else () for dim in side] for side in names]
        given = tuple(TensorType(t.dtype, t.shape, a, MESH) for t, a in zip(types, at, strict=False))
        whole = tuple(TensorType(t.dtype, t.shape, (), MESH) for t in types)
        try:
            results = op.infer(*given)
        except LayoutError as error:
            assert not isinstance(op, RuleTypedOp) or not legal(op, whole, f), str(error)
            continue
        held = any(f in dim for side in found.operands for dim in side)
        for t, a in zip(results, at[len(types) :], strict=True):
            assert list(t.layout.dims) == (a if held else [()] * t.ndim), (str(op), [str(t) for t in given], str(t))
        count += held
    return count


def shards(p: Program, names: DimNames) -> int:
    count = 0
    for k, step in enumerate(p.steps):
        body = getattr(step.op, "body", None)
        if body:
            count += shards(body, names.bodies[k])
        elif step.operands:
            types = tuple(p.types[o] for o in step.operands)
            of = [names.values[n] for n in (*step.operands, *step.results)]
            count += shards_by_names(step.op, types, of, dict(names.factors[k]))
    return count


@settings(max_examples=60, deadline=None)
@given(programs())
def test_what_has_a_name_may_be_sharded_wherever_the_rule_allows_it(p: Program) -> None:
    for found in (plain(p), with_gradients(p)):
        shards(found.program, dim_names(found.program, {}, found.origins))


def test_a_decoder_is_sharded_by_its_names() -> None:
    p = decoder()
    for found, least in ((plain(p), 60), (gradients(p, p.outputs[0], ["table", *LAYER]), 200)):
        assert shards(found.program, dim_names(found.program, NAMED, found.origins)) >= least


def ops(example: Example) -> list[tuple[Op, tuple[TensorType, ...]]]:
    """The op of an example, and its gradient where that is one op."""
    op, types = next(example.assigned(UNEQUAL))
    op = replace(op, over=Layout(())) if "over" in {f.name for f in fields(op)} else op
    types = tuple(TensorType(t.dtype, t.shape, (), ONE) for t in types)
    found: list[tuple[Op, tuple[TensorType, ...]]] = [(op, types)]
    if isinstance(op, Composed):
        results = op.infer(*types)
        floats = tuple(k for k, t in enumerate(types) if differs(t))
        cotangents = tuple(TensorType("f64", t.shape, (), ONE) for t in results)
        found.append((Backward(op, floats, len(results)), (*types, *cotangents)))
    return found


# Of each example how many factors of operands may be sharded, and of its gradient, where that is one op.
SHARDED = (
    *((3,), (3,), (2,), (3,), *[(2,)] * 9, (1,), (2,), (2,), (1,), (1,), (1,), (3,), (2,)),
    *(
        (2, 2),
        (2, 2),
        (2, 2),
        (2, 2),
        (3, 3),
        (4, 4),
        (5, 5),
        (5, 5),
        (4, 4),
        (4, 4),
        (4, 4),
        (3, 3),
        (2, 2),
        (4, 4),
        (3, 3),
        (2, 2),
        (2, 2),
    ),
    *((2,), (2,), (3,), (2, 4), (3, 3), (3,), (3,), (2,)),
)


@pytest.mark.parametrize(
    ("example", "counts"),
    list(zip(GRADIENTS, SHARDED, strict=True)),
    ids=[str(next(e.assigned(UNEQUAL))[0].name) for e in GRADIENTS],
)
def test_a_factor_of_an_op_alone_may_be_sharded(example: Example, counts: tuple[int, ...]) -> None:
    for (op, types), count in zip(ops(example), counts, strict=True):
        found = links(op, types)
        names = [*found.operands, *found.results]
        assert shards_by_names(op, types, names, {f: (f,) for f in found.sizes}) == count


LINKS = {
    Attention(): "[i j k l m] [i n k m] [i n k o] -> [i j k l o]",
    Rotary(): "[i j k (l m)] [j] -> [i j k (l m)]",
    CrossEntropy(): "[i j k] [i j] -> [i j]",
    EmbeddingBag(): "[i j] [k l] -> [k j]",
    Split(1, (2, 5)): "[i j k] -> [i l k] [i m k]",
    Dispatch(5, 3): "[i j k] [i j l] -> [i m n k] [i]",
    Combine(): "[i j k l] [i m n] [i m n] -> [i m l]",
}
BACK = {
    Attention(): "[i j k l m] [i n k m] [i n k o] [i j k l o] -> [i j k l m] [i n k m] [i n k o]",
    Rotary(): "[i j k (l m)] [j] [i j k (l m)] -> [i j k (l m)]",
    CrossEntropy(): "[i j k] [i j] [i j] -> [i j k]",
    EmbeddingBag(): "[i j] [k l] [k j] -> [i j]",
    Split(1, (2, 5)): "[i j k] [i l k] [i m k] -> [i j k]",
    Dispatch(5, 3): "[i j k] [i j l] [i m n k] [o] -> [i j k]",  # of a count there is no cotangent
    Combine(): "[i j k l] [i m n] [i m n] [i m l] -> [i j k l] [i m n]",
}


def test_a_composed_op_and_its_gradient_have_a_rule_of_factors() -> None:
    seen: set[Op] = set()
    for (op, types), *back in (ops(e) for e in GRADIENTS):
        if op in LINKS and op not in seen:
            seen.add(op)
            assert [shape(op, types), *(shape(*one) for one in back)] == [LINKS[op], BACK[op]]
    assert seen == set(LINKS)


def shape(op: Op, types: tuple[TensorType, ...]) -> str:
    found = links(op, types)
    sides = [
        " ".join(f"[{' '.join(dim[0] if len(dim) == 1 else f'({chr(32).join(dim)})' for dim in t)}]" for t in side)
        for side in (found.operands, found.results)
    ]
    return " -> ".join(sides)

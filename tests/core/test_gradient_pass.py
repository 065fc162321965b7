"""`gradients` of programs: losses and gradients as torch has them, under every kind of layout, whatever is kept."""

from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import oracle
from shardplan.core.gradients import Gradients, Keep, gradients
from shardplan.core.layout import Layout
from shardplan.core.mesh import Mesh
from shardplan.core.ops import (
    AllGather,
    AllReduce,
    AllToAll,
    Broadcast,
    Einsum,
    Elementwise,
    Exchange,
    Gather,
    Iota,
    Op,
    Permute,
    ReduceDims,
    ReduceScatter,
    Repeat,
    Send,
    Slice,
    Softmax,
    ToPartial,
)
from shardplan.core.program import Program
from shardplan.core.program_builder import ProgramBuilder
from shardplan.core.reference import run_reference
from shardplan.core.tensor import TensorType
from shardplan.errors import ShardplanError, TypingError

MESH = Mesh(d=2, t=3)
LAYERS = 5
SHAPES = {"x": "4, 6", "s": "6", "w1": "6, 9", "w2": "9, 6"}


def body(x: str, s: str, w1: str, w2: str, gather: bool = False) -> Program:
    """A layer: y = x + tanh((x * s) @ w1) @ w2, whose second result is what is added."""
    d = ProgramBuilder(
        {n: TensorType.parse(f"f64[{t}]", MESH) for n, t in {"x": x, "s": s, "w1": w1, "w2": w2}.items()}
    )
    inputs = list(d.types.items())
    up, down = ("w1", "w2")
    if gather:  # parameters sharded over d, gathered where they are used
        up, down = d(AllGather(0, ("d",)), up), d(AllGather(1, ("d",)), down)
    h = d(Elementwise("tanh(a)"), d(Einsum("bi,ih->bh"), d(Elementwise("a * b"), "x", "s"), up))
    o = d.reduce_axes(d(Einsum("bh,ho->bo"), h, down), ("d", "t"))
    return Program(inputs, d.steps, (d(Elementwise("a + b"), "x", o), o))


def net(layer: Program) -> Program:
    """Layers, and a loss of what the last gives and of what each adds."""
    types = layer.input_types
    stack = [TensorType(t.dtype, (LAYERS, *t.shape), ((), *t.layout.dims), MESH) for t in types[2:]]
    d = ProgramBuilder(dict(zip(SHAPES, (*types[:2], *stack), strict=True)))
    inputs = list(d.types.items())
    z, added = d.write_step(Repeat(LAYERS, layer, 1, 2), *SHAPES)
    loss = d(Einsum("bo,lbo->"), d(Elementwise("sin(a)"), z), added)
    return Program(inputs, d.steps, (loss,))


def values(program: Program) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {n: rng.normal(size=t.shape) / 2 for n, t in program.inputs}


def equals(found: Gradients, given: dict[str, np.ndarray], want: list[Any]) -> None:
    """Hold the outputs against torch's."""
    rng, program = np.random.default_rng(1), found.program
    assert Program.parse(str(program)) == program
    shards = run_reference(program, [oracle.spread(given[n], t, rng) for n, t in program.inputs])
    for x, t, whole in zip(shards, program.output_types, want, strict=True):
        assert oracle.wrong(x, t, whole.detach().numpy(), 1e-9) is None, str(t)


LAYOUTS = {
    "one": (("4, 6", "6", "6, 9", "9, 6"), False),
    "data": (("4@d, 6", "6", "6, 9", "9, 6"), False),
    "tensor": (("4, 6", "6", "6, 9@t", "9@t, 6"), False),
    "data and tensor": (("4@d, 6", "6", "6, 9@t", "9@t, 6"), False),
    "uneven": (("4@t, 6", "6", "6, 9@d", "9@d, 6"), False),
    "parameters gathered": (("4@d, 6", "6", "6@d, 9@t", "9@t, 6@d"), True),
}


KEEP: dict[str, Keep] = {
    "all": lambda step, moved: True,
    "what is made": lambda step, moved: not moved,
    "no elementwise": lambda step, moved: step.op.name != "elementwise",
    "none": lambda step, moved: False,
}


@pytest.mark.parametrize("keep", KEEP)
@pytest.mark.parametrize("name", LAYOUTS)
def test_a_repeat_in_reverse_has_torchs_gradients(name: str, keep: str) -> None:
    torch = pytest.importorskip("torch")
    (x, s, w1, w2), gather = LAYOUTS[name]
    program = net(body(x, s, w1, w2, gather))
    found = gradients(program, program.outputs[0], list(SHAPES), KEEP[keep])
    given = values(program)
    leaves = {n: torch.tensor(v, requires_grad=True) for n, v in given.items()}
    z, added = leaves["x"], []
    for k in range(LAYERS):
        added.append(torch.tanh((z * leaves["s"]) @ leaves["w1"][k]) @ leaves["w2"][k])
        z = z + added[-1]
    loss = (torch.sin(z) * torch.stack(added)).sum()
    equals(found, given, [loss, *torch.autograd.grad(loss, list(leaves.values()))])


def test_what_is_kept_is_stacked_and_what_moved_moves_again() -> None:
    program = net(body(*LAYOUTS["parameters gathered"][0], gather=True))
    kept: dict[str, int] = {}
    moves: dict[str, int] = {}
    for name, keep in KEEP.items():
        first, *_, last = gradients(program, program.outputs[0], ["w1"], keep).program.steps
        kept[name] = len(first.results) - 2
        moves[name] = [s.op.name for s in last.op.body.steps].count("all_gather")  # type: ignore[attr-defined]
    # x, x * s, tanh and both parameters; not the parameters; x and the product before the tanh; x alone
    assert kept == {"all": 4, "what is made": 2, "no elementwise": 4, "none": 1}
    assert moves == {"all": 0, "what is made": 2, "no elementwise": 0, "none": 2}


def test_a_step_knows_its_forward_step() -> None:
    program = net(body(*LAYOUTS["data and tensor"][0]))
    found = gradients(program, program.outputs[0], ["s", "w1", "w2"])
    assert found.origins[: len(program.steps)] == (None,) * len(program.steps)
    (back,) = [o for o in found.origins if o and o.inner]
    assert back.forward == 0
    body_steps = program.steps[0].op.body.steps  # type: ignore[attr-defined]
    named = Counter(body_steps[o.forward].op.name for o in back.inner if o.forward is not None)
    assert named["einsum"] == 4  # of each product the gradients of both operands
    assert named["elementwise"] > 0


MOVES: list[tuple[Op, str]] = [
    (AllReduce(("t",)), "8@d, 6]{+t"),
    (AllGather(1, ("t",)), "8@d, 6@t"),
    (AllGather((0, 1), ("d", "t")), "8@d, 6@t"),
    (AllGather(1, ("d", "t")), "8, 6@(d,t)"),
    (ReduceScatter(1, ("t",)), "8@d, 6]{+t"),
    (Slice(1, ("t",)), "8@d, 6"),
    (AllToAll(0, 1, ("d",)), "8@d, 6"),
    (Exchange(Layout(((), ("d", "t")))), "8@(d,t), 6"),
    (Permute(Layout(((), ("t", "d")))), "8, 6@(d,t)"),
    (ToPartial(("t",)), "8@d, 6"),
    (ToPartial(("d",)), "8@d, 6"),
    (Send(Layout((("a",), ())), Mesh({"a": 2}, devices=range(6, 8))), "8@d, 6"),
]


@pytest.mark.parametrize(("op", "text"), MOVES, ids=lambda x: x.name if isinstance(x, Op) else x)
@pytest.mark.parametrize("after", ["a * b", "einsum"])
def test_the_gradient_of_a_move_is_a_move(op: Op, text: str, after: str) -> None:
    """After it each device computes the same, or its rows alone, so that the cotangent is whole, or partial."""
    torch = pytest.importorskip("torch")
    d = ProgramBuilder(
        {"x": TensorType.parse(f"f64[{text}" + ("" if text.endswith("{") else "]" if "{" not in text else "}"), MESH)}
    )
    y = d(op, "x")
    t = d.types[y]
    free = [a for a in t.mesh.axes if a not in t.layout.used_axes]
    over = (tuple(free[:1]), (), ()) if after == "einsum" and not t.layout.partial else ((), (), ())
    d.types["w"] = TensorType("f64", (12, 8, 6), (over[0], *t.layout.dims), t.mesh)
    inputs = [("x", d.types["x"]), ("w", d.types["w"])]
    loss = d(Einsum("bij,ij->"), "w", y) if not t.layout.partial else d(Einsum("ij->"), y)
    program = Program(inputs, d.steps, (loss,))
    given = values(program)
    x, w = (torch.tensor(given[n], requires_grad=True) for n in ("x", "w"))
    want = (w * x).sum() if not t.layout.partial else x.sum()
    found = gradients(program, loss, ["x"])
    steps = found.program.steps[len(program.steps) :]
    assert not [s for s in steps if s.op.name == "all_reduce"] or after == "einsum", str(found.program)
    equals(found, given, [want, torch.autograd.grad(want, x)[0]])


def test_partial_and_whole_cotangents_are_added() -> None:
    """A residual beside a column-parallel product: what the product gives is reduced before it is added."""
    torch = pytest.importorskip("torch")
    d = ProgramBuilder({"x": TensorType.parse("f64[4@d, 6]", MESH), "w": TensorType.parse("f64[6, 9@t]", MESH)})
    inputs = list(d.types.items())
    y = d(Einsum("bi,ih->"), d(Elementwise("a * a"), "x"), "w")
    loss = d(Elementwise("a + b"), d.reduce_axes(y, ("d", "t")), d.reduce_axes(d(ReduceDims((0, 1)), "x"), ("d",)))
    program = Program(inputs, d.steps, (loss,))
    given = values(program)
    x, w = (torch.tensor(given[n], requires_grad=True) for n in ("x", "w"))
    want = ((x * x) @ w).sum() + x.sum()
    equals(gradients(program, loss, ["x", "w"]), given, [want, *torch.autograd.grad(want, [x, w])])


def test_no_gradient_goes_through_a_stopped_use() -> None:
    text = """program
  mesh d=2, t=3
  input %x: f64[4@d]
  %y = elementwise(%x; expr="exp(a)"): f64[4@d]
  %l = einsum(%x, stop %y; spec="i,i->"): f64[]{+d}
  output %l"""
    program = Program.parse(text)
    assert str(program) == text
    found = gradients(program, "l", ["x"])
    x = np.arange(4.0)
    shards = oracle.spread(x, program.input_types[0], np.random.default_rng(0))
    (_, (dx, t)) = zip(run_reference(found.program, [shards]), found.program.output_types, strict=True)
    assert oracle.wrong(dx, t, np.exp(x), 1e-9) is None


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda d: d(Broadcast(("t",)), "r"), "the gradient of step 0 (broadcast): broadcast of f64[4]{root:t} has no "
         "gradient; legal are values on all devices, whole, sharded or sums"),
        (lambda d: d(Einsum("ii->i"), "q"), "the gradient of step 0 (einsum): einsum ii->i has no gradient: operand 0 "
         "has a factor twice"),
    ],
)  # fmt: skip
def test_a_missing_gradient_names_the_op(make: Callable[[ProgramBuilder], str], text: str) -> None:
    d = ProgramBuilder({n: TensorType.parse(t, MESH) for n, t in {"r": "f64[4]{root:t}", "q": "f64[4, 4]"}.items()})
    inputs = list(d.types.items())
    loss = d(Einsum("i->"), make(d))
    with pytest.raises(ShardplanError) as caught:
        gradients(Program(inputs, d.steps, (loss,)), loss, ["r", "q"])
    assert str(caught.value) == text


def test_what_is_no_value_or_no_scalar_is_refused() -> None:
    d = ProgramBuilder({"x": TensorType.parse("f64[4]", MESH), "r": TensorType.parse("f64[]{root:t}", MESH)})
    ids = d(Iota("i32", (4,), 0, Layout(((),)), MESH))
    rows = d(Gather(), "x", ids)
    loss, scalar = d(Einsum("i->"), rows), "legal is a scalar, whole or a sum"
    program = Program([*d.types.items()][:2], d.steps, (loss,))
    for wrong, said in (
        ((loss, ["y"]), "%y is no value of the program, or no real float; legal are such values"),
        (("y", ["x"]), "%y is no value of the program, or no real float; legal are such values"),
        ((loss, [ids]), f"%{ids} is no value of the program, or no real float; legal are such values"),
        ((ids, ["x"]), f"%{ids} is no value of the program, or no real float; legal are such values"),
        ((rows, ["x"]), f"the loss %{rows} is f64[4]; {scalar}"),
        (("r", ["x"]), f"the loss %r is f64[]{{root:t}}; {scalar}"),
    ):
        with pytest.raises(TypingError) as caught:
            gradients(program, *wrong)
        assert str(caught.value) == f"gradients: {said}"


def test_a_gradient_of_a_gradient_is_refused() -> None:
    d = ProgramBuilder({"x": TensorType.parse("f64[4, 6]", MESH)})
    inputs, loss = [*d.types.items()], d(Einsum("ij,ij->"), d(Softmax(1), "x"), "x")
    once = gradients(Program(inputs, d.steps, (loss,)), loss, ["x"]).program
    d = ProgramBuilder(once.types)
    loss = d(Einsum("ij,ij->"), once.outputs[1], once.outputs[1])
    twice = Program(once.inputs, [*once.steps, *d.steps], (loss,))
    number = next(k for k, step in enumerate(once.steps) if step.op.name == "backward")
    with pytest.raises(TypingError) as caught:
        gradients(twice, loss, ["x"])
    assert str(caught.value) == f"the gradient of step {number} (backward): the gradient of softmax has no gradient"

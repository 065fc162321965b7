"""Ops by decomposition, opened: sharded as the whole op does not type, with reductions between its steps alone."""

import numpy as np
import pytest

import oracle
from compute_examples import MESH, UNEQUAL, Example
from gradient_examples import GRADIENTS, arrays, by_torch
from shardplan.core.dtypes import numpy_dtype
from shardplan.core.layout import Layout
from shardplan.core.ops import (
    AdamW,
    Attention,
    Backward,
    Concat,
    CrossEntropy,
    Dispatch,
    Dropout,
    EmbeddingBag,
    LayerNorm,
    Op,
    Rotary,
    Sgd,
    Softmax,
    Split,
    TopK,
)
from shardplan.core.ops.composed import Composed, decompose_sharded, differs, zeros
from shardplan.core.program import Program
from shardplan.core.program_builder import ProgramBuilder
from shardplan.core.reference import run_reference
from shardplan.core.tensor import TensorType
from shardplan.errors import LayoutError, TypingError

COMPOSED = [e for e in GRADIENTS if isinstance(next(e.assigned(UNEQUAL))[0], Composed)]
# Of these the whole op types as far as its steps do: a dim of several factors, and one that is cut, stay whole.
WHOLE = {"embedding_bag", "rotary", "split"}


@pytest.mark.parametrize("example", COMPOSED, ids=lambda e: next(e.assigned(UNEQUAL))[0].name)
def test_opened_it_equals_torch_on_assignments_that_the_whole_op_refuses(example: Example) -> None:
    rng, count, name = np.random.default_rng(0), 0, next(example.assigned(UNEQUAL))[0].name
    given = arrays(example, UNEQUAL, rng)
    seeds: list[np.ndarray] = []
    whole: list[np.ndarray] = []
    for op, types in example.assigned(UNEQUAL):
        assert isinstance(op, Composed)
        if any(t.layout.reduction not in (None, "sum") or t.layout.root for t in types):
            continue
        try:
            op.infer(*types)
            continue
        except LayoutError:
            pass
        needs = tuple(k for k, t in enumerate(types) if differs(t))
        try:
            forward = decompose_sharded(op, types)
            builder = ProgramBuilder.of(types)
            made = builder.copy(forward.steps, lambda n: n)
            out = [made.get(r, r) for r in forward.results]
            cotangents = {r: builder.types[r].with_layout(Layout(builder.types[r].layout.dims)) for r in out}
            dys = [builder.add_input(t) if differs(t) else zeros(builder, t, r) for r, t in cotangents.items()]
            body = decompose_sharded(Backward(op, needs, len(dys)), [*types, *(builder.types[c] for c in dys)])
        except LayoutError:
            continue
        own = [*map(str, range(len(types))), *dys]
        outside = {str(k): n for k, n in enumerate(own)}
        back = builder.copy(body.steps, outside.__getitem__)
        inputs = [(str(k), t) for k, t in enumerate(types)]
        inputs += [(c, builder.types[c]) for c in dys if differs(builder.types[c])]
        program = Program(inputs, builder.steps, [*out, *(back.get(r, r) for r in body.results)])
        assert {s.op.name for s in program.steps if s.op.received_bytes(*program.step_types(s)[0]).any()} <= {
            "all_reduce"
        }
        if not whole:
            seeds = [rng.normal(size=t.shape) for _, t in inputs[len(types) :]]
            whole = by_torch(example, given, seeds)
        shards = [oracle.spread(a, t, rng) for a, t in zip([*given, *seeds], program.input_types, strict=True)]
        for x, t, want in zip(run_reference(program, shards), program.output_types, whole, strict=True):
            assert oracle.wrong(x, t, want, 1e-9) is None, ([str(t) for t in types], str(program))
        count += 1
    assert (count > 0) != (name in WHOLE), count


def test_no_logit_is_gathered() -> None:
    (example,) = (e for e in COMPOSED if next(e.assigned(UNEQUAL))[0].name == "cross_entropy")
    op, _ = next(example.assigned(UNEQUAL))
    types = [TensorType.parse("f64[7, 4, 6@y]", MESH), TensorType.parse("i32[7, 4]", MESH)]
    seed = TensorType.parse("f64[7, 4]", MESH)
    assert isinstance(op, Composed)
    for body, given in (
        (decompose_sharded(op, types), types),
        (decompose_sharded(Backward(op, (0,)), [*types, seed]), [*types, seed]),
    ):
        builder = ProgramBuilder.of(given)
        names = builder.copy(body.steps, lambda n: n)
        moved = [s for s in builder.steps if s.op.name == "all_reduce"]
        assert moved and all(builder.types[s.operands[0]].shape == (7, 4, 1) for s in moved)
        assert body.results[0] in names.keys() | {"0"}


@pytest.mark.parametrize("op", [Sgd(0.1), AdamW(0.1, decay=0.2)], ids=lambda op: op.name)
def test_updates_are_torchs(op: Composed) -> None:
    torch = pytest.importorskip("torch")
    rng = np.random.default_rng(0)
    w, g = rng.normal(size=(7, 4)), rng.normal(size=(3, 7, 4))
    m, v = np.zeros((7, 4)), np.zeros((7, 4))
    leaf = torch.tensor(w, requires_grad=True)
    other = torch.optim.SGD([leaf], 0.1) if isinstance(op, Sgd) else torch.optim.AdamW([leaf], 0.1, weight_decay=0.2)
    for text in ("f64[7@x, 4]", "f64[7, 4@(x,y)]", "f64[7@y, 4]"):
        k, t = ("f64[7@x, 4]", "f64[7, 4@(x,y)]", "f64[7@y, 4]").index(text), TensorType.parse(text, MESH)
        types = [t, t] if isinstance(op, Sgd) else [t, t, t, t, TensorType.parse("i32[]", MESH)]
        values = [w, g[k], m, v, np.asarray(k + 1, np.int32)][: len(types)]
        found = op.reference([oracle.spread(x, u, rng) for x, u in zip(values, types, strict=True)], types)
        leaf.grad = torch.tensor(g[k])
        other.step()
        assert oracle.wrong(found[0], t, leaf.detach().numpy(), 1e-12) is None
        w = leaf.detach().numpy().copy()
        if isinstance(op, AdamW):
            state = other.state[leaf]
            m, v = (state[n].numpy().copy() for n in ("exp_avg", "exp_avg_sq"))
            assert oracle.wrong(found[1], t, m, 1e-12) is None and oracle.wrong(found[2], t, v, 1e-12) is None
    assert [a for a, _ in op.aliases] == list(range(len(op.aliases)))
    shared = [types[b] for _, b in op.aliases]  # is read, and written
    assert op.touched_bytes(*types) == sum(t.local_bytes() for t in (*types, *shared))


def test_a_narrow_softmax_is_rounded_once() -> None:
    t = TensorType.parse("bf16[3, 100]", MESH)
    x = np.random.default_rng(0).normal(size=t.shape).astype(np.float32)
    y = Softmax(1).reference([[x.astype(numpy_dtype("bf16"))] * 6], [t])[0][0]
    e = np.exp(x.astype(numpy_dtype("bf16")).astype(np.float32))
    assert np.array_equal(y, (e / e.sum(1, keepdims=True)).astype(numpy_dtype("bf16")))


def test_dropout_drops_its_rate_and_hangs_on_the_key() -> None:
    t, key = TensorType.parse("f32[400, 300]", MESH), TensorType.parse("i32[]", MESH)
    found = [
        Dropout(0.25).reference([[np.ones(t.shape, np.float32)] * 6, [np.asarray(k, np.int32)] * 6], [t, key])[0][0]
        for k in (0, 1)
    ]
    for x in found:
        assert abs((x == 0).mean() - 0.25) < 0.01 and abs(x.mean() - 1) < 0.01
        assert abs((x[:, 0] == 0).mean() - 0.25) < 0.1 and abs((x[0] == 0).mean() - 0.25) < 0.1
    assert abs(((found[0] == 0) & (found[1] == 0)).mean() - 0.0625) < 0.01


@pytest.mark.parametrize(
    ("op", "operands", "said"),
    [
        (CrossEntropy(), "f32[4, 6] i32[5]", "cross_entropy: logits f32[4, 6] and targets i32[5]; legal are targets "
         "of the shape of all dims but the last"),
        (Softmax(2), "f32[4, 6]", "softmax: reduce_dims: f32[4, 6] has no dim 2; legal are 0 to 1"),
        (Rotary(), "f32[4, 6] i32[4]", "rotary: f32[4, 6]; legal are three dims or more, the last of an even size"),
        (Rotary(), "f32[4, 6, 2, 3] i32[6]", "rotary: f32[4, 6, 2, 3]; legal are three dims or more, the last of an "
         "even size"),
        (Concat(1), "f32[4]", "concat along dim 1 of f32[4]; legal is one that all have"),
        (Concat(0), "", "concat along dim 0 of nothing; legal is one that all have"),
        (Split(0, (2, 3)), "f32[4]", "split: the sizes (2, 3) along dim 0 of f32[4]; legal are those that add up to "
         "its"),
        (LayerNorm(), "f32[4, 6] f32[6]", "layer_norm takes 3 operands, not 2"),
        (Attention(), "f32[2, 3, 2, 1, 4] f32[2, 3, 3, 4] f32[2, 3, 2, 4]", "attention: einsum bsgrd,btgd->bgrst: "
         "operand 1, f32[2, 3, 3, 4], has g=3; legal is 2"),
        (EmbeddingBag(), "f32[4, 6] f32[2, 3]",
         "embedding_bag: gather: the ids are f32[2, 3]; legal is an integer dtype"),
        (TopK(5), "f32[4]", "top_k: 5 of f32[4]; legal are 1 to the size of the last dim"),
        (Dispatch(2, 2), "f32[1, 2, 3] f32[1, 2, 2]", "dispatch by the ids f32[1, 2, 2]; legal are integers of three "
         "dims: group, token, choice"),
        (Dropout(1.0), "f32[4] i32[]",
         "dropout(1.0) of f32[4] by i32[]; legal are 0 <= rate < 1, floats and an i32 key"),
        (Sgd(0.1), "f32[4] f32[1]", "sgd of f32[4], f32[1]; legal are a gradient and moments of the shape"),
        (AdamW(0.1), "f32[4] f32[4]", "adamw takes 5 operands, not 2"),
    ],
)  # fmt: skip
def test_what_an_op_does_not_take_is_said_in_a_line(op: Op, operands: str, said: str) -> None:
    types = [
        TensorType.parse(text if text.endswith("]") else f"{text}]", MESH) for text in operands.split("] ") if text
    ]
    with pytest.raises(TypingError) as caught:
        op.infer(*types)
    assert str(caught.value) == said

"""Gradients of ops: on every legal assignment of axes those of torch's own functions, and central differences."""

import numpy as np
import pytest

import oracle
from compute_examples import UNEQUAL, Example
from gradient_examples import GRADIENTS, ONE, arrays, back, by_torch, on_one, sampled
from shardplan.core.ops import Backward, Softmax
from shardplan.core.ops.composed import differs
from shardplan.core.program import Program
from shardplan.core.reference import run_reference
from shardplan.core.tensor import TensorType
from shardplan.errors import LayoutError, ShardplanError

OPS = [next(e.assigned(UNEQUAL))[0].name for e in GRADIENTS]
# Counted op by op: an example of another op changes no name, and planted faults find the test that they name.
NAMES = [f"{name}-{OPS[:k].count(name)}" for k, name in enumerate(OPS)]


@pytest.mark.parametrize("example", GRADIENTS, ids=NAMES)
def test_every_legal_assignment_has_torchs_gradients(example: Example) -> None:
    rng, count = np.random.default_rng(0), 0
    given = arrays(example, UNEQUAL, rng)
    seeds: list[np.ndarray] = []
    whole: list[np.ndarray] = []
    for op, types in example.legal_ones(UNEQUAL):
        try:
            program = back(op, types)
        except LayoutError:
            assert {t.layout.reduction for t in op.infer(*types)} & {"max", "min"}, [str(t) for t in types]
            continue
        if not whole:
            seeds = [rng.normal(size=t.shape) for t in program.input_types[len(types) :]]
            whole = by_torch(example, given, seeds)
        shards = [oracle.spread(a, t, rng) for a, t in zip([*given, *seeds], program.input_types, strict=True)]
        for x, t, want in zip(run_reference(program, shards), program.output_types, whole, strict=True):
            assert oracle.wrong(x, t, want, 1e-9) is None, ([str(t) for t in types], str(program))
        count += 1
    assert count == example.legal


@pytest.mark.parametrize("example", GRADIENTS, ids=NAMES)
def test_central_differences(example: Example) -> None:
    rng, step = np.random.default_rng(1), 1e-5
    given = arrays(example, UNEQUAL, rng)
    op, _ = next(example.assigned(UNEQUAL))
    program = back(op, [TensorType(x.dtype, x.shape, (), ONE) for x in given])
    seeds = [rng.normal(size=t.shape) for t in program.input_types[len(given) :]]
    found = [x for (x,) in run_reference(program, [[x] for x in (*given, *seeds)])]
    grads = iter(found[len(found) - sum(x.dtype.kind == "f" for x in given) :])

    def value() -> float:
        results = [x for x in on_one(op, given) if x.dtype.kind == "f"]
        return sum(float((x * s).sum()) for x, s in zip(results, seeds, strict=True))

    for x in given:
        if x.dtype.kind != "f":
            continue
        grad = next(grads)
        for place in rng.permutation(x.size)[:12]:
            at = np.unravel_index(place, x.shape)
            middle = x[at]
            x[at] = middle + step
            up = value()
            x[at] = middle - step
            down = value()
            x[at] = middle
            assert (up - down) / (2 * step) == pytest.approx(grad[at], rel=1e-6, abs=1e-6)


@pytest.mark.parametrize("example", GRADIENTS, ids=NAMES)
def test_a_gradient_lies_as_its_value_does(example: Example) -> None:
    for op, types in example.legal_ones(UNEQUAL):
        try:
            program = back(op, types)
        except LayoutError:
            continue
        found = program.output_types[len(op.infer(*types)) :]
        for t, u in zip((t for t in types if differs(t)), found, strict=True):
            assert (t.shape, t.atoms) == (u.shape, u.atoms)
            assert not set(t.mesh.expand(t.layout.used_axes)) & set(t.mesh.expand(u.layout.partial))


@pytest.mark.parametrize("example", GRADIENTS, ids=NAMES)
def test_a_gradient_is_text_that_parses_back(example: Example) -> None:
    (program, *_) = sampled(example, UNEQUAL, 10)
    assert Program.parse(str(program)) == program


def test_the_gradient_of_a_composed_op_names_it_with_its_fields() -> None:
    t = TensorType.parse("f64[4, 6]", ONE)
    program = back(Softmax(1), [t])
    line = "  %3 = backward(%x0, %2; of=softmax(; dim=1), needs=(0)): f64[4, 6]"
    assert line in str(program).splitlines()
    for wrong, said in (
        ("of=softmax(; dim=2)", "reduce_dims: f64[4, 6] has no dim 2; legal are 0 to 1"),
        ('of=einsum(; spec="ij->ij")', "einsum has no decomposition; its gradient is steps of its own"),
        ("of=softmax(; dim=1), results=2", "needs=(0,) of 0 operands and 2 cotangents of softmax"),
        ("of=reduce_dims(; dims=(1))", "reduce_dims has no decomposition; its gradient is steps of its own"),
        ("of=embedding_bag()", "embedding_bag takes 2 operands, not 1"),
    ):
        with pytest.raises(ShardplanError) as caught:
            Program.parse(str(program).replace("of=softmax(; dim=1)", wrong))
        assert str(caught.value) == f"step 1 (backward): backward: {said}"
    with pytest.raises(ShardplanError) as caught:
        Backward(Softmax(1), (0,)).infer(t, TensorType.parse("f64[1, 6]", ONE))
    assert str(caught.value) == "backward: cotangents f64[1, 6]; the results have the shapes [(4, 6)]"

"""The law of compute ops on the backends: on torch and MPI here, on JAX in a child process with eight devices."""

from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

import oracle
from compute_examples import EXAMPLES, MESH, UNEQUAL, Example, MeanSquare, Moments, numbers, of_dtype, of_functions
from execution.jax_child import said
from gradient_examples import GRADIENTS, arrays, sampled
from shardplan.core.dtypes import NAMES
from shardplan.core.expression import Expression
from shardplan.core.mesh import Mesh
from shardplan.core.namespace import NUMPY
from shardplan.core.ops import Cast, Compute
from shardplan.core.reference import distribute
from shardplan.core.tensor import TensorType
from shardplan.execution.async_executor import finish
from shardplan.execution.mpi import steps
from shardplan.execution.mpi.steps import Binding


def by_torch(op: Compute, types: tuple[TensorType, ...], shards: list[list[np.ndarray]]) -> list[list[np.ndarray]]:
    """The shards of the results, each by the interpreter of its device."""
    torch = pytest.importorskip("torch")
    from shardplan.execution.torch.compute import bind_compute
    from shardplan.execution.torch.dtypes import to_numpy, to_torch

    wire: Any = SimpleNamespace(device=torch.device("cpu"))
    results = op.infer(*types)
    found: list[list[np.ndarray]] = [[] for _ in results]
    for k in range(results[0].mesh.size):
        given = [to_torch(x[k].copy()) for x in shards]
        with pytest.raises(StopIteration) as done:
            next(bind_compute(op, types, results, k)(given, wire))
        for x, shards_of_one in zip(done.value.value, found, strict=True):
            assert all(x.data_ptr() != y.data_ptr() or not y.numel() for y in given), f"{op} gives its operand out"
            shards_of_one.append(to_numpy(x))
    return found


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda e: str(next(e.assigned(UNEQUAL))[0]))
def test_torch_equals_the_whole(example: Example) -> None:
    rng = np.random.default_rng(1)
    arrays = example.arrays(UNEQUAL, rng)
    whole = np.asarray(example.whole(UNEQUAL, *arrays))
    for op, types in example.legal_ones(UNEQUAL):
        shards = [oracle.spread(a, t, rng) for a, t in zip(arrays, types, strict=True)]
        (found,) = by_torch(op, types, shards)
        assert oracle.wrong(found, op.infer(*types)[0], whole) is None, (op, [str(t) for t in types])


def test_integers_are_multiplied_on_the_host_where_no_library_does(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    from shardplan.execution.torch.compute import torch_namespace

    xp, asked = torch_namespace(torch.device("cuda")), list[str]()
    monkeypatch.setattr(torch.Tensor, "cpu", lambda x: asked.append(str(x.dtype)) or x)
    for dtype in (torch.int64, torch.int32, torch.float32):
        a, b = torch.arange(6).reshape(2, 3).to(dtype), torch.arange(12).reshape(3, 4).to(dtype)
        assert (xp.einsum("ik,kj->ij", a, b).numpy() == a.numpy() @ b.numpy()).all()
    assert asked == ["torch.int64"] * 2 + ["torch.int32"] * 2


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda e: str(next(e.assigned(UNEQUAL))[0]))
def test_mpi_equals_the_whole(example: Example) -> None:
    rng, wire = np.random.default_rng(5), cast("Any", None)  # nothing is sent
    arrays = example.arrays(UNEQUAL, rng)
    whole = np.asarray(example.whole(UNEQUAL, *arrays))
    for op, types in example.legal_ones(UNEQUAL):
        results = op.infer(*types)
        shards = [oracle.spread(a, t, rng) for a, t in zip(arrays, types, strict=True)]
        found: list[np.ndarray] = []
        for k in range(results[0].mesh.size):
            given = [x[k].copy() for x in shards]
            (x,) = finish(steps.bind_step(op, types, results, Binding(k))(given, wire))
            assert not any(np.shares_memory(x, y) for y in given), f"{op} gives its operand out"
            found.append(x)
        assert oracle.wrong(found, results[0], whole) is None, (op, [str(t) for t in types])


@pytest.mark.parametrize("example", GRADIENTS, ids=lambda e: next(e.assigned(UNEQUAL))[0].name)
def test_torch_runs_gradients(example: Example) -> None:
    rng = np.random.default_rng(6)
    given = arrays(example, UNEQUAL, rng)
    for program in sampled(example, UNEQUAL, 5):
        values = [*given, *(rng.normal(size=t.shape) for t in program.input_types[len(given) :])]
        shards = [oracle.spread(x, t, rng) for x, t in zip(values, program.input_types, strict=True)]
        known = dict(zip((n for n, _ in program.inputs), shards, strict=True))
        want = dict(known)
        for step in program.steps:
            types, _ = program.step_types(step)
            assert isinstance(step.op, Compute)
            known |= zip(step.results, by_torch(step.op, types, [known[o] for o in step.operands]), strict=True)
            want |= zip(step.results, step.op.reference([want[o] for o in step.operands], types), strict=True)
        for name in program.outputs:
            for x, y in zip(known[name], want[name], strict=True):
                np.testing.assert_allclose(x, y, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("dtype", NAMES)
def test_torch_computes_in_every_dtype(dtype: str) -> None:
    rng = np.random.default_rng(3)
    for op, types in of_dtype(dtype):
        shards = [distribute(numbers(t, rng), t) for t in types]
        for x, y in zip(by_torch(op, types, shards)[0], op.reference(shards, types)[0], strict=True):
            assert x.dtype == y.dtype and np.array_equal(x, y), (op, [str(t) for t in types])


def test_torch_rounds_once() -> None:
    t = TensorType("f64", (1,), (), Mesh(x=1))
    x = np.array([1 + 2.0**-11 + 2.0**-40])  # through f32 it lies half way, and goes to the even one, which is less
    assert float(by_torch(Cast("f16"), (t,), [[x]])[0][0][0]) == 1 + 2.0**-10


def test_torch_runs_ops_from_outside() -> None:
    t = TensorType("f32", (6, 7), (None, "x"), MESH)
    shards = [distribute(np.random.default_rng(4).integers(-9, 10, t.shape).astype(np.float32), t)]
    for op in (Moments(), MeanSquare()):
        for got, want in zip(by_torch(op, (t,), shards), op.reference(shards, [t]), strict=True):
            for x, y in zip(got, want, strict=True):
                np.testing.assert_allclose(x, y, rtol=1e-6)


def test_torch_has_every_function() -> None:
    torch = pytest.importorskip("torch")
    from shardplan.execution.torch.compute import torch_namespace

    xp, f32 = torch_namespace(torch.device("cpu")), np.dtype(np.float32)
    for text, x in of_functions():
        e = Expression.parse(text)
        arrays = [x, x[::-1].copy()][: e.arity]
        found = e.evaluate(xp, [torch.from_numpy(y) for y in arrays], f32)
        np.testing.assert_allclose(found.numpy(), e.evaluate(NUMPY, arrays, f32), rtol=1e-5, atol=1e-6, err_msg=text)


def test_jax_equals_the_whole() -> None:
    pytest.importorskip("jax")
    assert said("execution/jax_compute_checks.py") == {
        "law": [],
        "every_dtype": [],
        "functions": [],
        "outside": [],
        "gradients": [],
        "updates": [],
    }

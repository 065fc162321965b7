"""Models made of programs in other sizes: what a family builds at that size, or an error that names what hides one."""

from __future__ import annotations

from dataclasses import replace
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest

from shardplan import LayoutError, Mesh, Model, Program, ShardplanError, Strategy, TensorType, partition
from shardplan.core.layout import Layout
from shardplan.core.op import Op
from shardplan.core.ops import Cast, Constant, Crop, Einsum, Elementwise, Expand, Gather, Iota, Pad, ReduceDims, Reshape
from shardplan.core.ops.opaque import Opaque
from shardplan.core.program_builder import ProgramBuilder
from shardplan.core.reference import run_reference
from shardplan.core.resizing import counted_means
from strategy.jobs import apart, arrays, by_name, model, stepped

ONE = Mesh()
SIZES: list[tuple[str, dict[str, int]]] = [
    ("llama", {"batch": 3, "seq": 5}),
    ("odd", {"batch": 4}),
    ("gpt", {"batch": 2, "seq": 4}),
    ("moe", {"batch": 3}),
    ("mlp", {"batch": 8}),
    ("dlrm", {"batch": 5}),
]


def own(of: Model, **more: Any) -> Model:
    """The same model, made of its program."""
    assert of.forward is not None
    dims = {name: of.dims[name] for name, _ in of.forward.inputs}
    settings = {k: of.fields[k] for k in ("lr", "decay") if k in of.fields}
    return Model.of(of.forward, dims, of.parameters, optimizer=of.fields["optimizer"], **settings, **more)


@pytest.mark.parametrize(("name", "sizes"), SIZES, ids=str)
def test_it_is_the_program_that_its_family_builds(name: str, sizes: dict[str, int]) -> None:
    family = model(name, batch=2)
    found = own(family).resize(**sizes)
    wanted = family.resize(**sizes)
    assert str(found.program) == str(wanted.program)
    assert (found.dims, found.gradients, found.replaced) == (wanted.dims, wanted.gradients, wanted.replaced)


def test_slots_of_experts_hide_the_tokens_of_a_group() -> None:
    with pytest.raises(ShardplanError, match=r"dispatch: 3 slots an expert hide a size: of f64\[2, 6, 16\], which"):
        own(model("moe", batch=2)).resize(seq=4)


def test_a_job_has_microbatches_of_another_size() -> None:
    family = model("gpt", batch=5)
    big = own(family)
    job = partition(
        big, Strategy(data=2, tensor=2, global_batch=5)
    )  # three microbatches of two, one row weighs nothing
    given = arrays(family, family.program)
    want, got = by_name(big.program, given), stepped(job, given)
    assert all(apart(got[n], want[o]) < 1e-9 for n, o in ({"loss": "loss"} | dict(big.replaced)).items())


def made(*steps: tuple[Op, tuple[str, ...]], dims: tuple[str, ...] = ("batch", "sequence")) -> Model:
    """A model of x [4, 6] and a parameter w [5]; a step reads those or `0`, `1`, ... by their numbers."""
    builder = ProgramBuilder({"x": TensorType("f32", (4, 6), (), ONE), "w": TensorType("f32", (5,), (), ONE)})
    inputs, names = [(n, t) for n, t in builder.types.items()], list[str]()
    for op, operands in steps:
        names.append(builder(op, *(names[int(o)] if o.isdigit() else o for o in operands)))
    program = Program(inputs, builder.steps, (names[-1],))
    return Model.of(program, {"x": dims, "w": ("width",)}, ["w"], training=False)


def constant(value: float, *shape: int) -> Constant:
    return Constant(value, "f32", shape, Layout(((),) * len(shape)), ONE)


FOLLOWS: list[tuple[tuple[tuple[Op, tuple[str, ...]], ...], tuple[int, ...]]] = [
    (((Reshape("b s -> (b s)"), ("x",)),), (27,)),
    (((Reshape("b (s=3 t) -> b s t"), ("x",)), (Reshape("b s t -> b (s t)"), ("0",)), (Elementwise("a + 1"), ("1",))),
     ()),
    (((constant(2, 4, 6), ()), (Elementwise("a * b"), ("x", "0"))), (3, 9)),
    (((Iota("f32", (6,), 0, Layout(((),)), ONE), ()), (Elementwise("a * b"), ("x", "0"))), (3, 9)),
    (((Expand("w -> b=4 w"), ("w",)), (Reshape("b w -> b w o=1"), ("0",)), (ReduceDims((2,)), ("1",))), (4, 5)),
    (((ReduceDims((1,)), ("x",)), (Elementwise("3 * a + 6"), ("0",))), (3,)),
    (((ReduceDims((1,), "mean"), ("x",)), (Elementwise("a / 6"), ("0",))), (3,)),
]  # fmt: skip


@pytest.mark.parametrize(("steps", "shape"), FOLLOWS, ids=lambda x: str(x)[:40])
def test_shapes_follow(steps: Any, shape: tuple[int, ...]) -> None:
    asked = {"batch": 3, "sequence": 9}
    if not shape:  # a factor of a dim that changes
        with pytest.raises(ShardplanError, match=r"step 0 \(reshape\): a factor of 3 of sequence=6 hides a size"):
            made(*steps).resize(**asked)
        return
    found = made(*steps).resize(**asked).program
    assert found.output_types[0].shape == shape


TABLE = Pad((0, 0), (3, 0)), Gather()
REFUSED: list[tuple[tuple[tuple[Op, tuple[str, ...]], ...], dict[str, int], str]] = [
    (((ReduceDims((0, 1)), ("x",)), (Elementwise("a / 24"), ("0",))), {"batch": 2},
     r"step 1 \(elementwise\): 24 in 'a / 24', beside a sum of 24 elements, hides a size that changes, batch=4"),
    (((ReduceDims((1,)), ("x",)), (Elementwise("0.16666666666666666 * a"), ("0",))), {"seq": 3},
     r"step 1 \(elementwise\): 0.166667 in .* beside a sum of 6 elements, hides a size that changes, sequence=6"),
    (((ReduceDims((1,)), ("x",)), (ReduceDims((0,)), ("0",)), (constant(24), ()), (Elementwise("a / b"), ("1", "2"))),
     {"batch": 8}, r"step 3 \(elementwise\): 24 in 'a / b', beside a sum of 24"),
    (((Crop((0, 1), (4, 6)), ("x",)),), {"sequence": 7},
     r"step 0 \(crop\): crop: 1 to 6 of 6, which becomes 7, hides a size"),
    (((Pad((0, 0), (0, 2)), ("x",)),), {"sequence": 7}, r"step 0 \(pad\) hides a size: .* comes to .*9.* its dims"),
    (((Opaque("sort", ("f32",), ((4, 6),)), ("x",)),), {"batch": 2}, r"step 0 \(opaque\): opaque 'sort' hides how"),
    (((Iota("i32", (6,), 0, Layout(((),)), ONE), ()), (Cast("i64"), ("0",)), (Reshape("v -> v o=1"), ("w",)),
      (Pad((0, 0), (3, 0)), ("2",)), (Gather(), ("3", "1")), (ReduceDims((1,)), ("4",)),
      (Elementwise("a * b"), ("x", "5"))), {"sequence": 9}, r"step 4 \(gather\): 9 rows of .*, which has 8"),
    (((Elementwise("a + 1"), ("x",)),), {"width": 3}, "width=3 changes the parameter w; import it with that"),
    (((Elementwise("a + 1"), ("x",)),), {"rows": 3}, "no dim of one size is called 'rows'; legal are batch, sequence"),
    (((Elementwise("a + 1"), ("x",)),), {"batch": 0}, "batch is 0; legal is a whole"),
]  # fmt: skip


@pytest.mark.parametrize(("steps", "asked", "text"), REFUSED, ids=lambda x: str(x)[:40])
def test_what_hides_a_size_is_named(steps: Any, asked: dict[str, int], text: str) -> None:
    with pytest.raises(ShardplanError, match=text):
        made(*steps).resize(**asked)


def test_a_dim_of_two_sizes_is_none() -> None:
    with pytest.raises(ShardplanError, match="no dim of one size is called 'side'; legal are none"):
        made((Elementwise("a + 1"), ("x",)), dims=("side", "side")).resize(side=3)


def test_a_constant_of_the_source_hides_a_size() -> None:
    plain = made((Elementwise("a + 1"), ("x",)))
    kept = replace(plain, constants=MappingProxyType({"x": np.ones((4, 6), "f4")}))
    with pytest.raises(ShardplanError, match="the constant x of the source hides a size, sequence"):
        kept.resize(sequence=7)


@pytest.mark.parametrize(
    ("text", "mean"),
    [("a / 24", True), ("a * 0.041666666666666664", True), ("0.041666666666666664 * a", True), ("a / 12", False),
     ("a * 24", False), ("24 / a", False), ("a / 24 + 1", False)],
)  # fmt: skip
def test_a_sum_by_the_number_of_its_elements_is_a_mean(text: str, mean: bool) -> None:
    plain = made((ReduceDims((0, 1)), ("x",)), (Elementwise(text), ("0",))).program
    found = counted_means(plain)
    assert [s.op.name for s in found.steps] == (["reduce_dims"] if mean else ["reduce_dims", "elementwise"])
    x = np.arange(24, dtype="f4").reshape(4, 6) - 3
    values = {"x": x, "w": np.ones(5, "f4")}
    (got, want) = (run_reference(p, [[values[n]] for n, _ in p.inputs])[0][0] for p in (found, plain))
    assert np.isclose(got, want, rtol=1e-6)


def test_a_weight_that_is_split_unevenly_is_refused_by_name() -> None:
    builder = ProgramBuilder({"x": TensorType("f32", (4, 5), (), ONE), "w": TensorType("f32", (5, 6), (), ONE)})
    inputs = [(n, t) for n, t in builder.types.items()]
    split = builder(Reshape("i (a=2 b) -> i a b"), "w")
    made_of = builder(Einsum("bi,iac->bac"), "x", split)
    program = Program(inputs, builder.steps, (made_of,))
    own_one = Model.of(program, {"x": ("batch", "width"), "w": ("width", "ffn")}, ["w"], training=False)
    with pytest.raises(LayoutError, match=r"step 0 \(reshape\) on f32\[5, 6\]: no dim that the axis tensor serves"):
        partition(own_one, Strategy(tensor=4, microbatch=4))

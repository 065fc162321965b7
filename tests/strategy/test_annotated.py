"""A program laid out as its author annotates it computes what it computes, and moves only where annotations differ."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import shardplan as sp
from shardplan.core.layout import Layout
from shardplan.core.ops import Einsum, Elementwise, Pin
from shardplan.core.step import Step
from shardplan.errors import LayoutError
from shardplan.strategy.partition.annotated import partition_annotated, read_annotations
from shardplan.strategy.partition.remedies import annotation_remedies

MESH = sp.Mesh(x=2, y=2)
AXES: list[tuple[str, ...]] = [(), ("x",), ("y",), ("x", "y"), ("y", "x")]


def two_products(pin: Layout | None = None) -> sp.Model:
    """`relu(a b) c`, with the first product pinned where that is asked."""
    types = {n: sp.TensorType("f64", (8, 8), (), sp.Mesh()) for n in "abc"}
    steps = [Step(Einsum("ik,kj->ij"), ("a", "b"), ("p",))]
    if pin is not None:
        steps.append(Step(Pin(pin), ("p",), ("q",)))
    steps += [Step(Elementwise("maximum(a, 0)"), (steps[-1].results[0],), ("r",)),
              Step(Einsum("ik,kj->ij"), ("r", "c"), ("out",))]  # fmt: skip
    return sp.Model.of(sp.Program(types, steps, ("out",)), dict.fromkeys("abc", ("d", "d")), ("b", "c"),
                       training=False)  # fmt: skip


LAYOUTS = st.sampled_from([dims for dims in itertools.product(AXES, AXES) if not {*dims[0]} & {*dims[1]}])


@settings(max_examples=40, deadline=None)
@given(st.fixed_dictionaries(dict.fromkeys(("a", "b", "c", "out"), LAYOUTS)), st.none() | LAYOUTS, st.integers(0, 99))
def test_any_annotations_compute_the_same(said: dict[str, Any], pin: Any, seed: int) -> None:
    model = two_products(None if pin is None else Layout(pin))
    types = {n: sp.TensorType("f64", (8, 8), dims, MESH) for n, dims in said.items()}
    annotations = read_annotations(model, types)
    job = partition_annotated(model, annotations)
    program = job.programs[0, "F"]
    assert dict(program.inputs) == {n: types[n] for n in "abc"}
    assert program.output_types == (types["out"],)
    rng = np.random.default_rng(seed)
    a, b, c = (rng.integers(-3, 4, (8, 8)).astype("f8") for _ in range(3))
    shards = [sp.distribute(x, types[n]) for n, x in zip("abc", (a, b, c), strict=True)]
    (held,) = sp.run(program, shards)
    out = sp.collect(held, types["out"])
    assert (out == np.maximum(a @ b, 0) @ c).all()
    # What is named of a movement removes it, and moves less than before.
    for (value, by), remedy in annotation_remedies(job, annotations).items():
        then = partition_annotated(model, annotations.with_annotations(remedy.types))
        assert (value, by) not in {(m.value, m.by) for m in then.movements[0, "F"]}
        assert then.settled.seconds - job.settled.seconds == pytest.approx(remedy.more, abs=1e-12)


@pytest.mark.parametrize("dims", [(("y",), ("x",)), (("x",), ("y",)), ((), ("y", "x")), (("y", "x"), ())])
def test_what_is_wanted_of_the_result_is_made_so(dims: Any) -> None:
    """Of inputs that all devices have nothing is moved, however the result is to lie."""
    model = two_products()
    job = partition_annotated(model, read_annotations(model, {"out": sp.TensorType("f64", (8, 8), dims, MESH)}))
    moved = [m.plan.certificate.received_bytes for m in job.movements[0, "F"]]
    assert not any(map(any, moved)), job.programs[0, "F"]
    assert not any(m.by == "the result out" for m in job.movements[0, "F"])


def test_why_tells_of_all_that_is_moved() -> None:
    model = two_products()
    types = {"a": "f64[8@x, 8]", "b": "f64[8, 8@y]", "c": "f64[8@y, 8]", "out": "f64[8@x, 8@y]"}
    found = sp.why(model, "nominal", annotations=types, mesh=MESH)
    assert [m.ops for m in found.movements] == [("reduce_scatter",)]
    assert found.movements[0].made == sp.TensorType("f64", (8, 8), (("x",), ()), MESH, partial={"y": "sum"})
    assert found.timeline.seconds >= found.movements[0].seconds > 0


@pytest.mark.parametrize(
    ("said", "mesh", "text"),
    [
        ({"a": "f64[8@x, 8]"}, None, "annotations: a is 'f64[8@x, 8]', of no mesh; legal is mesh='x=4,y=2'"),
        ({}, None, "annotations of no mesh; legal is one, as mesh='x=4,y=2' or of the types"),
        ({"e": "f64[8]"}, "x=2", "annotations: there is no 'e'; legal are a, b, c, out"),
        ({"a": "f64[8@x]"}, "x=2", "annotations: a is f64[8@x]; legal is a layout of f64[8, 8]"),
        ({"a": 3}, "x=2", "annotations: a is 3; legal is a layout of f64[8, 8]"),
        ({"a": sp.TensorType("f64", (8, 8), (), sp.Mesh(z=2))}, "x=2", "annotations of 2 meshes"),
    ],
)
def test_what_annotations_may_say(said: dict[str, Any], mesh: str | None, text: str) -> None:
    with pytest.raises(LayoutError) as error:
        sp.why(two_products(), annotations=said, mesh=mesh)
    assert text in str(error.value) and "\n" not in str(error.value)


def test_a_pin_to_another_mesh_and_a_model_that_trains() -> None:
    with pytest.raises(LayoutError, match=r"%q is pinned to the axis 'z'; legal are x, y"):
        sp.why(two_products(Layout((("z",), ()))), mesh=MESH)
    trains = sp.Model.load("gpt", layers=1, hidden=8, heads=2, seq=4, vocab=8)
    with pytest.raises(LayoutError, match="annotations of a model that trains"):
        sp.why(trains, mesh=MESH)
    job = sp.partition(trains, sp.Strategy(data=2))
    with pytest.raises(LayoutError, match="annotations and mesh are of a program"):
        sp.why(job, mesh="x=2")

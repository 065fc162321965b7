"""Ids of inputs: which inputs they are, what they may be, and what `run` says of one that none is."""

import numpy as np
import pytest

import shardplan as sp
from shardplan.core.ids import id_ranges
from shardplan.core.mesh import Mesh
from shardplan.core.ops import CrossEntropy, Elementwise, EmbeddingBag, Gather, Repeat, Reshape
from shardplan.core.ops.compute import IdRange
from shardplan.core.program import Program
from shardplan.core.step import Step
from shardplan.core.tensor import TensorType
from shardplan.errors import LayoutError

ONE = Mesh(x=1)


def types(**said: str) -> dict[str, TensorType]:
    return {name: TensorType.parse(text, ONE) for name, text in said.items()}


def test_an_input_that_is_read_as_ids_is_ids() -> None:
    inputs = types(
        table="f32[5, 2]", few="f32[3, 2]", logits="f32[4, 7]", ids="i32[4]", both="i32[2, 2]", other="i32[4]"
    )
    steps = [
        Step(Gather(), ("table", "ids"), ("a",)),
        Step(CrossEntropy(), ("logits", "ids"), ("b",)),
        Step(EmbeddingBag(), ("table", "both"), ("c",)),
        Step(Reshape("a b -> (a b)"), ("both",), ("flat",)),
        Step(Gather(), ("few", "flat"), ("d",)),
        Step(Elementwise("a + 1"), ("other",), ("more",)),
        Step(Gather(), ("table", "more"), ("e",)),
    ]
    found = id_ranges(Program(inputs, steps, ("a", "b", "c", "d", "e")))
    assert found == {"ids": IdRange(5), "both": IdRange(3)}  # of what is computed of `other` nobody knows


def test_ids_in_a_body_are_ids_unless_they_are_carried() -> None:
    body = Program(types(x="i32[2]", table="f32[5, 2]", ids="i32[2]"), [Step(Gather(), ("table", "ids"), ("a",)),
                   Step(Gather(), ("table", "x"), ("b",))], ("x", "a", "b"))  # fmt: skip
    inputs = types(x="i32[2]", table="f32[5, 2]", ids="i32[3, 2]")
    loop = Step(Repeat(3, body, 1, 1), ("x", "table", "ids"), ("y", "a", "b"))
    assert id_ranges(Program(inputs, [loop], ("y", "a", "b"))) == {"ids": IdRange(5)}


@pytest.mark.parametrize(
    ("place", "value", "message"),
    [
        ((1, 2), 7, "input %ids: the id at [1, 2] is 7; legal are 0 to 6"),
        ((2, 0), -1, "input %ids: the id at [2, 0] is -1; legal are 0 to 6"),
        ((3, 1), -100, "input %ids: the id at [3, 1] is -100; legal are 0 to 6"),
    ],
)
def test_run_names_the_place_in_the_whole(place: tuple[int, int], value: int, message: str) -> None:
    mesh = Mesh(x=2, y=2)
    inputs = {"table": TensorType.parse("f32[7@y, 2]", mesh), "ids": TensorType.parse("i32[4@x, 3]", mesh)}
    program = Program(inputs, [Step(Gather(), ("table", "ids"), ("rows",))], ("rows",))
    ids = np.arange(12, dtype="i4").reshape(4, 3) % 7
    given = [np.ones((7, 2), "f4"), ids]
    sp.run(program, [sp.distribute(x, t) for x, t in zip(given, inputs.values(), strict=True)])
    ids[place] = value
    with pytest.raises(LayoutError) as error:
        sp.run(program, [sp.distribute(x, t) for x, t in zip(given, inputs.values(), strict=True)])
    assert str(error.value) == message


@pytest.mark.parametrize(("value", "legal"), [(-100, True), (-99, False), (-101, False), (3, False), (0, True)])
def test_a_target_may_be_ignored(value: int, legal: bool) -> None:
    inputs = types(logits="f32[2, 3]", targets="i64[2]")
    program = Program(inputs, [Step(CrossEntropy(), ("logits", "targets"), ("loss",))], ("loss",))
    given = [[np.zeros((2, 3), "f4")], [np.array([1, value])]]
    if legal:
        [[loss]] = sp.run(program, given)
        assert loss.tolist() == pytest.approx([np.log(3), 0 if value == -100 else np.log(3)])
        return
    with pytest.raises(LayoutError) as error:
        sp.run(program, given)
    said = "legal are 0 to 2, and -100 for what does not count"
    assert str(error.value) == f"input %targets: the id at [1] is {value}; {said}"


def test_unsigned_targets_are_none_ignored() -> None:
    inputs = types(logits="f64[2, 3]", targets="u8[2]")
    program = Program(inputs, [Step(CrossEntropy(), ("logits", "targets"), ("loss",))], ("loss",))
    [[loss]] = sp.run(program, [[np.zeros((2, 3))], [np.array([156, 0], "u1") % 3]])
    assert loss.tolist() == pytest.approx([np.log(3)] * 2)

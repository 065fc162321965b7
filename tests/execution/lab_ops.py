"""A program with every compute op that is defined here, each once, on floats that are no integers."""

from __future__ import annotations

from collections.abc import Iterator

from compute_examples import EVEN, EXAMPLES, MESH
from gradient_examples import GRADIENTS
from shardplan.core.layout import Layout
from shardplan.core.ops import (
    OPS,
    Adafactor,
    AdamW,
    Cast,
    Compute,
    Constant,
    Elementwise,
    Iota,
    RingAttention,
    RingAttentionBackward,
    Sgd,
    Softmax,
    Write,
)
from shardplan.core.ops.composed import Backward
from shardplan.core.program import Program
from shardplan.core.step import Step
from shardplan.core.tensor import TensorType
from shardplan.errors import LayoutError, TypingError


def one_of_each() -> dict[str, tuple[Compute, tuple[TensorType, ...]]]:
    """By its name, every op that an example has, on the operands that most axes cut; floats are f32."""
    found: dict[str, tuple[Compute, tuple[TensorType, ...]]] = {}
    for op, types in _every_case():
        if any(t.layout.partial or t.layout.root for t in types):
            continue
        have = found.get(op.name)
        if have is None or _cuts(types) > _cuts(have[1]):
            found[op.name] = op, types
    return found


def _every_case() -> Iterator[tuple[Compute, tuple[TensorType, ...]]]:
    for example in (*EXAMPLES, *GRADIENTS):
        for op, types in example.legal_ones(EVEN):
            narrow = tuple(_of_dtype("f32", t) if t.dtype == "f64" else t for t in types)
            try:
                op.infer(*narrow)
            except (LayoutError, TypingError):
                continue
            yield op, narrow
    t, number = TensorType("f32", (12, 6), ("x", "y"), MESH), TensorType("i32", (), (), MESH)
    yield Sgd(0.1), (t, t)
    yield AdamW(0.1), (t, t, t, t, number)
    yield Adafactor(0.1, each=2), (t, t, t, number)
    yield Backward(Softmax(1), (0,)), (rows := TensorType("f32", (12, 6), (("x", "y"),), MESH), rows)
    q, k, v, out, logs = (
        TensorType("f32", (2, 12, 4, *rest), ("x", "y"), MESH) for rest in ((3, 8), (8,), (6,), (3, 6), (3,))
    )
    yield RingAttention(), (q, k, v)
    yield RingAttentionBackward(), (q, k, v, logs, logs, out)


def _of_dtype(dtype: str, t: TensorType) -> TensorType:
    return TensorType(dtype, t.shape, t.layout, t.mesh)


def _cuts(types: tuple[TensorType, ...]) -> int:
    return sum(len(t.layout.used_axes) for t in types)


def program_of_every_op() -> tuple[Program, set[str]]:
    """The program, and the names of compute ops that it lacks."""
    inputs: dict[str, TensorType] = {}
    steps: list[Step] = []
    outputs: list[str] = []
    for name, (op, types) in one_of_each().items():
        operands: list[str] = []
        for k, t in enumerate(types):
            given, used = f"{name}.{k}", f"{name}.{k}.used"
            if isinstance(op, Write) and k == len(types) - 1:  # each place once, so that no order counts
                steps.append(Step(Iota(t.dtype, t.shape, 0, Layout(()), MESH), (), (used,)))
            elif not t.shape and t.dtype != "f32":
                steps.append(Step(Constant(3, t.dtype, (), Layout(()), MESH), (), (used,)))
            elif t.dtype == "f32":
                inputs[given] = t
                small = (
                    "sin(a) * sin(a) / 4" if isinstance(op, Adafactor | AdamW) else "sin(a) / 4"
                )  # second moments have roots
                steps.append(Step(Elementwise(small), (given,), (used,)))
            else:  # the lab's integers of a byte are small, as ids are
                inputs[given] = t if t.dtype == "bool" else _of_dtype("u8", t)
                steps.append(Step(Cast(t.dtype), (given,), (used,)))
            operands.append(used)
        results = tuple(f"{name}.result{k}" for k in range(len(op.infer(*types))))
        steps.append(Step(op, tuple(operands), results))
        outputs += results
    used = {step.op.name for step in steps}
    return Program(inputs, steps, outputs), {n for n, kind in OPS.items() if issubclass(kind, Compute)} - used

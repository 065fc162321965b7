"""`weight_loss_rows`: a program whose loss is a mean over a batch, as one whose rows have weights."""

from __future__ import annotations

from shardplan.core.ops.arithmetic import Elementwise, Expand, ReduceDims
from shardplan.core.program import Program
from shardplan.core.program_builder import ProgramBuilder
from shardplan.core.step import Step
from shardplan.core.tensor import TensorType
from shardplan.errors import TypingError


def weight_loss_rows(program: Program, loss: str, dim: int, weight: str) -> Program:
    """Return the program with one more input, the weights [batch] of the loss's rows in the place of 1 / batch.

    `dim` is the batch among the dims of what the loss is the mean of. Raises `TypingError` for a loss that is no mean.

    >>> t = TensorType.parse("f32[4, 3]", "x=1")
    >>> p = Program({"a": t}, [Step(ReduceDims((0, 1), "mean"), ("a",), ("loss",))], ("loss",))
    >>> [step.op.name for step in weight_loss_rows(p, "loss", 0, "w").steps]
    ['expand', 'elementwise', 'reduce_dims']
    """
    number, step = next((k, s) for k, s in enumerate(program.steps) if loss in s.results)
    op = step.op
    t = program.types[step.operands[0]] if step.operands else program.types[loss]
    if not isinstance(op, ReduceDims) or op.reduction != "mean" or len(op.dims) != t.ndim:
        raise TypingError(f"the loss is made by {op.name}; legal for rows of unequal weights is a mean over all dims")
    builder = ProgramBuilder(program.types)
    builder.types[weight] = TensorType(t.dtype, (t.shape[dim],), (), t.mesh)
    rest = t.nbytes // t.itemsize // t.shape[dim]
    dims = " ".join("b" if d == dim else f"d{d}={n}" for d, n in enumerate(t.shape))
    spread = builder(Expand(f"b -> {dims}"), weight) if t.ndim > 1 else weight
    scaled = builder(Elementwise(f"a * b / {rest}" if rest > 1 else "a * b"), step.operands[0], spread)
    steps = [*program.steps[:number], *builder.steps, Step(ReduceDims(op.dims), (scaled,), (loss,))]
    inputs = (*program.inputs, (weight, builder.types[weight]))
    return Program(inputs, (*steps, *program.steps[number + 1 :]), program.outputs)

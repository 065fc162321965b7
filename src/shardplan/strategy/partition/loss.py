"""`with_loss`: a forward program whose loss of classes keeps no wide copy of its logits, or makes some at a time.

In chunks the product with the head and the loss are the body of a `repeat` over parts of every sequence; its backward
pass makes the logits of a part again, so that on a device there are those of one part. A part has every n-th position:
so axes that cut the sequence cut every part, and nothing moves. The head is read outside of the body, once.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import NamedTuple

from shardplan.core.dim_names import dim_names, links
from shardplan.core.ops import Einsum, Repeat, Reshape
from shardplan.core.ops.compute import Compute, computing
from shardplan.core.program import Program
from shardplan.core.program_builder import ProgramBuilder
from shardplan.core.step import Step
from shardplan.core.tensor import TensorType
from shardplan.errors import LayoutError

SEQUENCE = "sequence"
LETTERS = "abcdefghijklmopqrstuvwxyz"  # of dims; n are the chunks


class ClassLoss(NamedTuple):
    """A loss of classes: the step of the product that makes its logits, and its own; by number, None without one."""

    product: int | None
    step: int
    op: Compute


def class_loss(program: Program) -> ClassLoss | None:
    """Return where a program has a loss that can be in one pass, with the product whose result it alone reads."""
    found = ((k, one) for k, s in enumerate(program.steps) if (op := computing(s.op)) and (one := op.in_one_pass()))
    loss = next(found, None)
    if loss is None:
        return None
    number, op = loss
    logits = program.steps[number].operands[0]
    readers = sum(s.operands.count(logits) for s in program.steps) + program.outputs.count(logits)
    makers = (k for k, s in enumerate(program.steps) if logits in s.results)
    product = next((k for k in makers if _is_product(program, k)), None)
    return ClassLoss(product if readers == 1 else None, number, op)


def losses_of(program: Program) -> tuple[str, ...]:
    """Return which losses of `Strategy.loss` a forward program can have."""
    found = class_loss(program)
    if found is None:
        return ("whole",)
    return ("whole", "fused") if found.product is None else ("whole", "fused", "chunked")


def _is_product(program: Program, number: int) -> bool:
    op = computing(program.steps[number].op)
    return op is not None and op.kernel_class == "product" and len(program.steps[number].operands) == 2


def with_loss(program: Program, dims: Mapping[str, tuple[str, ...]], chunks: int) -> Program:
    """Return a program whose loss is in one pass, and with several `chunks` of so many parts of the sequence.

    Args:
        program: A forward pass, on one device.
        dims: Names of the dims of its inputs.
        chunks: Of the logits, along the sequence; 1 for all of them at once.

    Raises `LayoutError` for a program without such a loss, and for chunks that do not divide the sequence.
    """
    found = class_loss(program)
    if found is None:
        raise LayoutError("loss: the model has no loss of classes; legal is 'whole'")
    steps = [*program.steps]
    if chunks == 1:
        steps[found.step] = replace(steps[found.step], op=found.op)
        return Program(program.inputs, steps, program.outputs)
    names = dim_names(program, dims)
    loss = steps[found.step]
    targets = [k for k, of in enumerate(names.values[loss.operands[1]]) if of == (SEQUENCE,)]
    if found.product is None or len(targets) != 1:
        raise LayoutError("loss='chunked': no product alone makes the logits of a sequence; legal are 'whole', 'fused'")
    size = program.types[loss.operands[1]].shape[targets[0]]
    if size % chunks:
        raise LayoutError(f"loss_chunks={chunks} of a sequence of {size}; legal are divisors of {size}")
    builder = ProgramBuilder(program.types)
    _write_chunks(builder, steps[found.product], replace(loss, op=found.op), targets[0], chunks)
    made = builder.steps[-1].results[0]
    builder.steps[-1] = replace(builder.steps[-1], results=loss.results)
    assert made not in program.types  # it is the builder's own
    steps[found.step : found.step + 1] = builder.steps
    del steps[found.product]
    return Program(program.inputs, steps, program.outputs)


def _write_chunks(builder: ProgramBuilder, product: Step, loss: Step, dim: int, chunks: int) -> None:
    """Write the rows of what has positions, the loop over them, and its results as one value, which is the last."""
    sides = links(product.op, tuple(builder.types[o] for o in product.operands))
    (position,) = sides.results[0][dim]
    where = [next((d for d, of in enumerate(side) if position in of), None) for side in sides.operands]
    outside: dict[str, str] = {}  # by operand what enters the body for it
    rows: dict[str, str] = {}
    for name, at in zip((*product.operands, loss.operands[1]), (*where, dim), strict=True):
        if at is None:
            outside[name] = builder(Reshape(_text(builder.types[name])), name)
        else:
            rows[name] = _rows(builder, name, at, chunks)
    given: dict[str, TensorType] = {name: builder.types[name] for name in outside}
    given |= {name: _row(builder.types[stack]) for name, stack in rows.items()}
    body = Program(given, [product, loss], loss.results)
    losses = builder(Repeat(chunks, body, sliced=len(rows)), *outside.values(), *rows.values())
    letters = LETTERS[: builder.types[losses].ndim - 1]
    inside = f"{letters[: dim + 1]}n{letters[dim + 1 :]}"
    joined = " ".join(f"({letter} n={chunks})" if k == dim else letter for k, letter in enumerate(letters))
    builder(Reshape(f"{' '.join(inside)} -> {joined}"), builder(Einsum(f"n{letters}->{inside}"), losses))


def _text(t: TensorType) -> str:
    letters = " ".join(LETTERS[: t.ndim])
    return f"{letters} -> {letters}"


def _rows(builder: ProgramBuilder, name: str, dim: int, chunks: int) -> str:
    """Write a stack of the parts of a value along a dim."""
    letters = LETTERS[: builder.types[name].ndim]
    whole = " ".join(f"({letter} n={chunks})" if k == dim else letter for k, letter in enumerate(letters))
    inside = f"{letters[: dim + 1]}n{letters[dim + 1 :]}"
    return builder(Einsum(f"{inside}->n{letters}"), builder(Reshape(f"{whole} -> {' '.join(inside)}"), name))


def _row(t: TensorType) -> TensorType:
    return TensorType(t.dtype, t.shape[1:], (), t.mesh)

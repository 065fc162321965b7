"""What a fused kernel has to know of a body: which dims are rows, columns and sums, and what goes where.

Dims have letters, as in the einsum's spec. The ranks are those that the move goes between, W of them; a letter that the
move gathers has W blocks in the result, one of each rank.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from shardplan.core.ops.arithmetic import Elementwise, Expand
from shardplan.core.ops.layers import Concat, EmbeddingBag
from shardplan.core.ops.movement import AllGather, AllToAll
from shardplan.core.ops.products import Einsum
from shardplan.core.ops.reduction import AllReduce, ReduceScatter
from shardplan.core.program import Program
from shardplan.core.step import Step
from shardplan.core.tensor import TensorType
from shardplan.errors import TypingError

THIN = 16  # columns of a thin product
ACTIVATIONS = {f"{name}(a)": name for name in ("relu", "gelu", "silu")}


class Unfit(TypingError):
    """A body that no fused kernel runs, and why: one of a closed set of reasons."""

    def __init__(self, op: str, reason: str, text: str) -> None:
        super().__init__(f"{op}: {text}")
        self.reason = reason


def unfit(error: TypingError) -> str:
    """Return the reason of a refusal; `not_sum` is of reductions, `splits_unknown` of uneven tiles."""
    return error.reason if isinstance(error, Unfit) else ""


@dataclass(frozen=True, slots=True)
class GemmForm:
    """A product as matrices `[batch, rows, inner] [batch, inner, columns]`, each a string of letters.

    `sides` are the letters of the body's inputs `a` and `b`, by number. `cut` is the letter that the ranks get parts
    of, the first of rows, or with `scatter` 1 of columns; `gathered` the one of which the result has all ranks' blocks,
    the first of rows but for `scatter` 0 of an all-to-all. Where there is none of the two it is empty.
    """

    a: int
    b: int
    sides: tuple[str, str]
    batch: str
    rows: str
    inner: str
    columns: str
    result: str
    cut: str
    gathered: str
    scatter: int = 0
    activation: str = "none"


@dataclass(frozen=True, slots=True)
class GemvForm:
    """A matrix `[rows, inner]`, the body's input `a`, times a thin one `[inner, columns]`, its input `b`."""

    a: int
    b: int
    sides: tuple[str, str]
    rows: str
    inner: str
    columns: str
    result: str


@dataclass(frozen=True, slots=True)
class BagForm:
    """Bags of tables: pairs of the numbers of a table and of its ids, -1 where the value is its own table."""

    tables: tuple[tuple[int, int], ...]


FusedForm = GemmForm | GemvForm | BagForm


def _product(
    name: str, body: Program, step: Step, gathered: tuple[str, str] = ("", "")
) -> tuple[tuple[str, str], str, tuple[int, int]]:
    """The letters of both operands, of the result, and the operands' numbers; `gathered` has an input's names."""
    if not isinstance(step.op, Einsum) or len(step.operands) != 2:
        raise Unfit(name, "", f"{step.op.name} of {len(step.operands)} operands; legal is an einsum of two")
    (one, other), result = step.op.sides
    if any(len(set(side)) < len(side) for side in (one, other)):
        raise Unfit(name, "", f"einsum {step.op.spec} has a dim twice in an operand; legal is once")
    names = [gathered[1] if n == gathered[0] else n for n, _ in body.inputs]
    if any(o not in names for o in step.operands) or step.operands.count(gathered[1]) > 1:
        raise Unfit(name, "", "the product's operands are made inside; legal are the body's inputs, each once")
    lost = [c for c in one + other if c not in result and (c in one) != (c in other)]
    if lost:
        raise Unfit(name, "", f"einsum {step.op.spec} sums {lost[0]} of one operand; legal are dims of both")
    return (one, other), result, (names.index(step.operands[0]), names.index(step.operands[1]))


def _check_even(name: str, *types: TensorType) -> None:
    for t in types:
        if not t.all_even:
            raise Unfit(name, "splits_unknown", f"{t} has tiles of several sizes; legal are even ones")
        if t.layout.root:
            raise Unfit(name, "splits_unknown", f"{t} is on some devices only; legal are values on all")


def gemm_form(name: str, body: Program) -> GemmForm:
    """Return a body of an einsum, perhaps an activation, and an all-to-all as matrices; raises `TypingError`."""
    product, *between, last = body.steps
    if not isinstance(last.op, AllToAll) or len(last.operands) != 1:
        raise Unfit(name, "", f"{last.op.name} at the end; legal is an all_to_all of one value")
    activation = "none"
    if between:
        one = between[0].op
        known = isinstance(one, Elementwise) and len(between[0].operands) == 1 and ACTIVATIONS.get(one.expr)
        if len(between) > 1 or not known or between[0].operands != product.results:
            legal = ", ".join(ACTIVATIONS)
            raise Unfit(name, "effect_between", f"{one.name} between product and move; legal are {legal}, or nothing")
        activation = known
    (one, other), result, numbers = _product(name, body, product)
    t, u = body.types[last.operands[0]], body.types[last.results[0]]
    _check_even(name, *body.input_types, t, u)
    if t.layout.partial:
        raise Unfit(name, "not_sum", f"the product {t} is not summed yet; legal is a whole one")
    if last.op.order not in ((), last.op.axes):
        raise Unfit(name, "splits_unknown", f"axes come in the order {last.op.order}; legal is {last.op.axes}")
    cut, gathered = result[last.op.dst_dim], result[last.op.src_dim]
    (one, other), numbers = _cut_first(name, cut, (one, other), numbers)
    if gathered in other and gathered not in one:  # as blocks of columns the result needs no transposition
        found = _in_matrices((other, one), result, (numbers[1], numbers[0]), gathered, cut, gathered)
        return replace(found, columns=cut + found.columns.replace(cut, ""), scatter=1, activation=activation)
    return replace(_in_matrices((one, other), result, numbers, cut, cut, gathered), activation=activation)


def gather_form(name: str, body: Program) -> GemmForm:
    """Return a body of an all-gather and an einsum of what it gathers as matrices; raises `TypingError`."""
    first, *between, product = body.steps
    if not isinstance(first.op, AllGather) or not isinstance(first.op.dim, int):
        raise Unfit(name, "splits_unknown", f"{first.op.name} first; legal is an all_gather along one dim")
    if between:
        raise Unfit(name, "effect_between", f"{between[0].op.name} between gather and product; legal is nothing")
    (given,), (came,) = first.operands, first.results
    (one, other), result, numbers = _product(name, body, product, (given, came))
    _check_even(name, *body.input_types, body.types[came], *body.output_types)
    if product.operands[1] == came:
        (one, other), numbers = (other, one), (numbers[1], numbers[0])
    gathered = one[first.op.dim]
    if gathered in other:
        raise Unfit(
            name, "splits_unknown", f"the dim {gathered} is one of both operands; legal to gather is one of rows"
        )
    return _in_matrices((one, other), result, numbers, gathered, "", gathered)


def scatter_form(name: str, body: Program) -> GemmForm:
    """Return a body of an einsum over a sharded factor and a reduce-scatter as matrices; raises `TypingError`."""
    product, *between, last = body.steps
    if not isinstance(last.op, ReduceScatter) or not isinstance(last.op.dim, int):
        raise Unfit(name, "splits_unknown", f"{last.op.name} at the end; legal is a reduce_scatter along one dim")
    if between:
        raise Unfit(name, "effect_between", f"{between[0].op.name} between product and sum; legal is nothing")
    sides, result, numbers = _product(name, body, product)
    _check_summed(name, body, last.op.reduction)
    cut = result[last.op.dim]
    sides, numbers = _cut_first(name, cut, sides, numbers)
    return _in_matrices(sides, result, numbers, cut, cut, "")


def _cut_first(
    name: str, cut: str, sides: tuple[str, str], numbers: tuple[int, int]
) -> tuple[tuple[str, str], tuple[int, int]]:
    """The operands, that with the dim that is cut first."""
    if cut in sides[0] and cut in sides[1]:
        raise Unfit(name, "splits_unknown", f"the dim {cut} is one of both operands; legal to cut is one of either")
    return ((sides[1], sides[0]), (numbers[1], numbers[0])) if cut in sides[1] else (sides, numbers)


def _in_matrices(
    sides: tuple[str, str], result: str, numbers: tuple[int, int], first: str, cut: str, gathered: str
) -> GemmForm:
    """The form of a product whose rows begin with a letter."""
    one, other = sides
    batch = "".join(c for c in result if c in one and c in other)
    inner = "".join(c for c in one if c in other and c not in result)
    rows = first + "".join(c for c in result if c in one and c not in other and c != first)
    columns = "".join(c for c in result if c in other and c not in one)
    return GemmForm(*numbers, sides, batch, rows, inner, columns, result, cut, gathered)


def _check_summed(name: str, body: Program, reduction: str) -> None:
    """A sum, over all axes at once, of even tiles."""
    if reduction != "sum":
        raise Unfit(name, "not_sum", f"{body.steps[-1].op.name} with {reduction}; legal is sum")
    t, u = body.types[body.steps[-1].operands[0]], body.output_types[0]
    _check_even(name, *body.input_types, t, u)
    if any(x.layout.partial for x in body.input_types) or u.layout.partial:
        raise Unfit(name, "not_sum", f"{t} is summed in parts; legal is over all its axes at once")


def gemv_form(name: str, body: Program) -> GemvForm:
    """Return a body of a thin einsum and an all-reduce as matrices; raises `TypingError`."""
    product, *between, last = body.steps
    if not isinstance(last.op, AllReduce) or len(last.operands) != 1:
        raise Unfit(name, "", f"{last.op.name} at the end; legal is an all_reduce of one value")
    if between:
        raise Unfit(name, "effect_between", f"{between[0].op.name} between product and sum; legal is nothing")
    (one, other), result, numbers = _product(name, body, product)
    _check_summed(name, body, last.op.reduction)
    t = body.types[last.operands[0]]
    if any(c in one and c in other for c in result):
        raise Unfit(name, "", f"einsum of {one} and {other} to {result} has a batch; legal is none")
    sizes = dict(zip(result, t.local_shape(0), strict=True))

    def own(side: str) -> str:
        return "".join(c for c in result if c in side)

    if math.prod(sizes[c] for c in own(one)) < math.prod(sizes[c] for c in own(other)):
        (one, other), numbers = (other, one), (numbers[1], numbers[0])
    rows, columns = own(one), own(other)
    thin = math.prod(sizes[c] for c in columns)
    if not 1 <= thin <= THIN:
        raise Unfit(name, "", f"a product of {thin} columns; legal are up to {THIN}")
    inner = "".join(c for c in one if c in other)
    return GemvForm(*numbers, (one, other), rows, inner, columns, result)


def bag_form(name: str, body: Program) -> BagForm:
    """Return a body of embedding bags, side by side, and an all-to-all as bags; raises `TypingError`."""
    *before, last = body.steps
    if not isinstance(last.op, AllToAll) or len(last.operands) != 1:
        raise Unfit(name, "", f"{last.op.name} at the end; legal is an all_to_all of one value")
    t, u = body.types[last.operands[0]], body.types[last.results[0]]
    _check_even(name, *body.input_types, t, u)
    if last.op.dst_dim != 0 or last.op.src_dim != t.ndim - 1 or last.op.order not in ((), last.op.axes):
        raise Unfit(name, "splits_unknown", "the move is not from the last dim to the batch")
    made = {r: step for step in before for r in step.results}
    inputs = [n for n, _ in body.inputs]
    joint = made.get(last.operands[0])
    parts: Sequence[str] = last.operands
    stacked = joint is not None and isinstance(joint.op, Concat)
    if joint is not None and isinstance(joint.op, Concat):
        if joint.op.dim != 1 or t.ndim != 3:
            raise Unfit(name, "effect_between", f"concat along dim {joint.op.dim}; legal is dim 1 of 3")
        parts = joint.operands
    tables = tuple(_table(name, body, made, inputs, part, stacked) for part in parts)
    if all(ids < 0 for _, ids in tables):
        raise Unfit(name, "", "no embedding_bag; legal are some")
    return BagForm(tables)


def _table(
    name: str, body: Program, made: dict[str, Step], inputs: list[str], part: str, stacked: bool
) -> tuple[int, int]:
    """The numbers of a table and of its ids in the body's inputs."""
    step = made.get(part)
    if step is not None and stacked and isinstance(step.op, Expand):
        t = body.types[part]
        if t.ndim != 3 or t.shape[1] != 1 or body.types[step.operands[0]].shape != (t.shape[0], t.shape[2]):
            raise Unfit(name, "effect_between", f"expand to {t}; legal is a dim of one table")
        part = step.operands[0]
        step = made.get(part)
    if step is None:
        t = body.types[part]
        if stacked and t.ndim == 3 and t.shape[1] != 1:
            raise Unfit(name, "", f"{t} of {t.shape[1]} tables; legal is one")
        return inputs.index(part), -1
    if not isinstance(step.op, EmbeddingBag) or any(o not in inputs for o in step.operands):
        raise Unfit(name, "effect_between", f"{step.op.name} between bags and move; legal are embedding_bag, concat")
    table, ids = (body.types[o] for o in step.operands)
    if table.layout.dims[0] or any(ids.layout.dims):
        raise Unfit(name, "splits_unknown", f"bags of {table} and {ids}; legal are whole rows and ids")
    return inputs.index(step.operands[0]), inputs.index(step.operands[1])

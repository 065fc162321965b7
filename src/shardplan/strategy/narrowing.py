"""`narrow_products`: the products of layers with their parameters in 8 bits, as a recipe of precision has them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from shardplan.core.nested import as_nested
from shardplan.core.ops import ScaledEinsum
from shardplan.core.ops.compute import computing
from shardplan.core.ops.narrow import FORWARD, write_quantized
from shardplan.core.program import Program
from shardplan.core.program_builder import ProgramBuilder
from shardplan.core.step import Step
from shardplan.errors import ShardplanError
from shardplan.strategy.parameter import Parameter

APART = ("experts", "one")  # dims that a router's or a gate's parameter makes: their products stay as they are


def narrow_products(name: str, program: Program, parameters: Mapping[str, Parameter]) -> Program:
    """Return a forward program whose layers multiply with their parameters in 8 bits; what is narrow stays so.

    As frameworks have it (Transformer Engine, torchao): embedding, head, norms, routers and attention stay in the
    program's dtype; each tensor has one scale, a parameter of experts and what they take one for each expert.

    Raises `ShardplanError` for a model `name` none of whose layers has such a product.
    """
    steps: list[Step] = []
    found = False
    for step in program.steps:
        op = as_nested(step.op)
        if op is not None:
            inside = [n for n, _ in op.body.inputs]
            outer = dict(zip(inside, step.operands, strict=True))
            body = _narrow_layer(op.body, {n: parameters[o] for n, o in outer.items() if o in parameters})
            found |= any(t.dtype == FORWARD for t in body.types.values())
            step = step if body is op.body else replace(step, op=replace(op, body=body))
        steps.append(step)
    if not found:
        raise ShardplanError(
            f"precision='fp8' of {name}, in which no layer multiplies with a parameter; legal are models that repeat "
            "layers with such products"
        )
    return Program(program.inputs, steps, program.outputs)


def _narrow_layer(body: Program, held: Mapping[str, Parameter]) -> Program:
    """A layer; each value is quantized once for all products that read it alike."""
    builder, steps = ProgramBuilder(body.types), list[Step]()
    known: dict[tuple[str, frozenset[int]], tuple[str, str, str]] = {}
    for step in body.steps:
        op = computing(step.op)
        product = op and op.product_sides
        if product is None or not _is_of_layer(*product, step.operands, held):
            steps.append(step)
            continue
        sides, out = product
        kept = {*sides[0]} & {*sides[1]} & {*out}
        made: list[tuple[str, str]] = []
        for value, letters in zip(step.operands, sides, strict=True):
            key = value, frozenset(letters.index(c) for c in kept)
            if key not in known:
                before = len(builder.steps)
                known[key] = write_quantized(builder, value, letters, kept, FORWARD)
                steps += builder.steps[before:]
            made.append(known[key][:2])
        scales = ("".join(c for c in letters if c in kept) for letters in sides)
        spec = f"{','.join((*sides, *scales))}->{out}"
        narrow = ScaledEinsum(spec, body.types[step.results[0]].dtype)
        steps.append(Step(narrow, (*(v for v, _ in made), *(most for _, most in made)), step.results, step.stopped))
    return Program(body.inputs, steps, body.outputs) if known else body


def _is_of_layer(sides: Sequence[str], out: str, operands: Sequence[str], held: Mapping[str, Parameter]) -> bool:
    """Say whether it is a product of a value with a parameter, but for those of routers and gates."""
    mine = [k for k, o in enumerate(operands) if o in held]
    if len(mine) != 1:
        return False
    own, other = sides[mine[0]], sides[1 - mine[0]]
    names = [dim for dim, _ in held[operands[mine[0]]].dims][-len(own) :]
    makes = [dim for c, dim in zip(own, names, strict=True) if c not in other and c in out]
    summed = {*own} & {*other} - {*out}
    alone = [c for side, rest in ((own, other), (other, own)) for c in side if c not in rest and c not in out]
    return bool(summed and makes) and not alone and not {*makes} & {*APART}

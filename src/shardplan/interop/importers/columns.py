"""What of an imported model a tensor axis may cut: dims inside a block, made by one product and taken by the next.

Nothing hangs on what a module is called: `ffn` is what one weight makes and another one takes. Of dims that stand in
one weight the one that is made first is it, so a residual stream is none where it has weights in common with heads, or
with what is made inside. A model without any deals out what its products make, or else what they sum over.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from shardplan.core.dim_names import DimNames, links
from shardplan.core.nested import as_nested
from shardplan.core.ops import Cast, Crop, Einsum, Gather, Reshape
from shardplan.core.program import Program

FREE = re.compile(r"d\d+")  # dims that nothing names
_CUT = ("kv_heads", "ffn", "vocab", "experts")  # what is dealt out already


class _Sides(NamedTuple):
    """Of a product of a weight and what is no weight: the dims that the weight makes, and those it is summed over."""

    makes: tuple[str, ...]
    takes: tuple[str, ...]


def column_names(
    program: Program, names: DimNames, called: Mapping[str, str], weights: Mapping[str, Sequence[str]]
) -> dict[str, str]:
    """Return what dims without a name are called.

    Args:
        program: The model's program.
        names: The names of its dims.
        called: What composites said of them.
        weights: Of each parameter the labels of its dims.
    """
    given = {name for name, _ in program.inputs if name not in weights}
    products = list(_products(program, names, given))
    sizes = {p: n for key, row in weights.items() for p, n in zip(row, program.types[key].shape, strict=True)}
    made = list(dict.fromkeys(x for p in products for x in p.makes))
    taken = list(dict.fromkeys(x for p in products for x in p.takes))
    words = [n for x, n in sizes.items() if x == "vocab"]
    found = {x: "vocab" for x in made if FREE.fullmatch(called.get(x, x)) and x not in taken and sizes.get(x) in words}

    def choose(some: Sequence[str], often: bool = False) -> None:
        """Call dims columns of which no weight has one already, nor, but where it may be `often`, the dim twice."""
        for x in (x for x in some if x not in found and FREE.fullmatch(called.get(x, x))):
            mine = [row for row in weights.values() if x in row]
            dealt = any(found.get(y, y) in _CUT for row in mine for y in row)
            if mine and not dealt and sizes[x] > 1 and (often or all(row.count(x) == 1 for row in mine)):
                found[x] = "ffn"

    fixed = set(_fixed_dims(program, names))
    inside = [x for x in made if x in taken]
    choose([x for x in inside if x not in fixed])
    for rest in (inside, [x for x in made if x not in fixed], made, taken):
        if not any(found.get(x, x) in _CUT for row in weights.values() for x in row):
            choose(rest, often=True)
    return found


def _products(program: Program, names: DimNames, given: set[str]) -> Iterator[_Sides]:
    """The products of a program and its bodies of what hangs on inputs, and of weights or rows of them."""
    fed, rows = set(given), set[str]()  # what hangs on inputs, and of that rows of weights, chosen by ids
    for number, step in enumerate(program.steps):
        inner = as_nested(step.op)
        if inner is not None:
            inside = {n for n, o in zip((n for n, _ in inner.body.inputs), step.operands, strict=True) if o in fed}
            yield from _products(inner.body, names.bodies[number], inside)
        if isinstance(step.op, Gather) and step.operands[0] not in fed:
            rows |= {*step.results}
        if len(step.operands) == 1 and step.operands[0] in rows and isinstance(step.op, Reshape | Cast | Crop | Einsum):
            rows |= {*step.results}
        held = [o not in fed for o in step.operands]
        held = held if any(held) else [o in rows for o in step.operands]
        if isinstance(step.op, Einsum) and not all(held):
            sides = [[p for d in names.values[o] for p in d] for o in step.operands]
            made = {p for d in names.values[step.results[0]] for p in d}
            for k in (k for k, weight in enumerate(held) if weight):
                others = {p for j, side in enumerate(sides) for p in side if j != k}
                own = list(dict.fromkeys(sides[k]))
                makes = tuple(p for p in own if p in made - others)
                yield _Sides(makes, tuple(p for p in own if p in others - made))
        if fed & {*step.operands}:
            fed |= {*step.results}


def _fixed_dims(program: Program, names: DimNames) -> Iterator[str]:
    """The dims that some op takes whole: cut to a part, sorted, looked up."""
    for number, step in enumerate(program.steps):
        inner = as_nested(step.op)
        if inner is not None:
            yield from _fixed_dims(inner.body, names.bodies[number])
            continue
        for factor in links(step.op, tuple(program.types[o] for o in step.operands)).fixed:
            yield from names.factors[number][factor]

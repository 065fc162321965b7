"""What of an imported model a tensor axis may cut: dims inside a block, made by one product and taken by the next.

Nothing hangs on what a module is called: `ffn` is what one weight makes and another one takes. Of dims that stand in
one weight the one that is made first is it, so a residual stream is none where it has weights in common with heads, or
with what is made inside. A model without any deals out what its products make, or else what they sum over.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from shardplan.core.dim_names import DimNames
from shardplan.core.nested import as_nested
from shardplan.core.ops import Einsum
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

    def free(x: str) -> bool:
        """Whether no weight that has it has a dim that is dealt out, nor itself twice."""
        mine = [row for row in weights.values() if x in row]
        dealt = any(found.get(y, y) in _CUT for row in mine for y in row)
        return bool(mine) and not dealt and sizes[x] > 1 and all(row.count(x) == 1 for row in mine)

    def choose(some: Sequence[str]) -> None:
        for x in some:
            if x not in found and FREE.fullmatch(called.get(x, x)) and free(x):
                found[x] = "ffn"

    choose([x for x in made if x in taken])
    for rest in (made, taken):
        if not any(y in _CUT for row in weights.values() for x in row for y in (found.get(x, x),)):
            choose(rest)
    return found


def _products(program: Program, names: DimNames, given: set[str]) -> Iterator[_Sides]:
    """The products of a program and its bodies in which one operand hangs on no input of the model but parameters."""
    fed = set(given)
    for number, step in enumerate(program.steps):
        inner = as_nested(step.op)
        if inner is not None:
            inside = {n for n, o in zip((n for n, _ in inner.body.inputs), step.operands, strict=True) if o in fed}
            yield from _products(inner.body, names.bodies[number], inside)
        if isinstance(step.op, Einsum) and len(step.operands) == 2 and len({*step.operands} & fed) == 1:
            dims = [{p for d in names.values[o] for p in d} for o in (*step.operands, *step.results)]
            w, x = (0, 1) if step.operands[1] in fed else (1, 0)
            own = list(dict.fromkeys(p for d in names.values[step.operands[w]] for p in d))
            makes = tuple(p for p in own if p in dims[2] and p not in dims[x])
            yield _Sides(makes, tuple(p for p in own if p in dims[x] and p not in dims[2]))
        if fed & {*step.operands}:
            fed |= {*step.results}

"""Which factor of a line every axis carries, and which axes' sums it passes, where nothing has a price.

What an axis serves and how an op is typed are asked of `choices`, as `settle` does; where that takes what costs least,
this takes what comes first. A held parameter says which factor its axis carries, and so does one whose gradient is
made. Else an axis stays where operands have it, in the order of what it serves; where they have it on factors that are
alike and not one, as queries and keys, or on one that a parameter holds whole, it goes to the first that it serves
there. Axes that cut one dim leave it together. Sums pass where the op types so: not into a product that the axis could
cut, which every device would do whole, and none of what the backward pass has too, which is kept as no sum. None is
made that is larger than what it is made of, as tokens are that are dealt out to slots: then what it is made of is
gathered.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from shardplan.core.dim_names import Links
from shardplan.core.mesh import Mesh
from shardplan.core.op import results_of
from shardplan.strategy.partition.choices import Choice, Layer, served
from shardplan.strategy.partition.flow import Line

PARTIAL = -1  # in place of a dim: an axis over which a value is a sum
State = Mapping[str, int]  # by axis the dim that it cuts, or PARTIAL; whole over all others
Groups = Sequence[Sequence[str]]  # of dims, in order of preference
_TWO = Layer(Mesh(sum=2))  # on which it is asked whether a sum passes


class OperandState(NamedTuple):
    """An operand: where axes have it; of a parameter how it is held.

    `kept`: the forward pass keeps it for the backward pass, where it is `saved`.
    """

    state: State
    held: State | None
    kept: bool = False
    saved: bool = False


def propagate_axes(
    serve: Mapping[str, Groups], line: Line, operands: Sequence[OperandState], gradients: Sequence[State | None]
) -> tuple[dict[str, str], tuple[str, ...]]:
    """Return by axis the factor that it carries, and the axes whose sums pass.

    Args:
        serve: By axis what it serves.
        line: The line, its types those of one device.
        operands: Where its operands are.
        gradients: Of every result that is the gradient of a parameter how that is held, else None.
    """
    link, op = line.links, line.op
    chosen: dict[str, str] = {}
    passed: list[str] = []
    left: set[str] = set()  # factors that an axis was on, and is taken from
    swelling = _swelling(line, gradients)
    for axis, groups in serve.items():
        forced, barred = _asked(axis, link, operands, gradients)
        barred |= link.fixed | swelling
        at = [
            (next((f for f in fs if link.sizes[f] > 1), fs[0]), one.saved)
            for one, dims in zip(operands, link.operands, strict=True)
            if one.held is None
            and (dim := one.state.get(axis)) is not None
            and 0 <= dim < len(dims)
            and (fs := dims[dim])
        ]
        there = [f for f, _ in at]
        summed = frozenset(k for k, o in enumerate(operands) if o.held is None and o.state.get(axis) == PARTIAL)
        if forced is not None:
            chosen[axis] = forced
            left |= {f for f in there if f != forced}
            continue
        may = [f for factors in served(line, groups) for f in factors]
        stay = [f for f in dict.fromkeys(there) if f not in barred and f not in left]
        if len({line.names.get(f, ()) for f in stay}) < len(stay):
            stay = []
        stay = [f for f in stay if (f, True) in at] or stay
        legal = [f for f in may if f not in barred and f not in left]
        reduced = any(operands[k].kept for k in summed) or (op.kernel_class == "product" and legal)
        if summed and not reduced and _passes(line, summed, smaller=bool(there)):
            passed.append(axis)
        elif stay:
            chosen[axis] = min(stay, key=lambda f: may.index(f) if f in may else len(may))
        elif (there or summed) and legal:
            chosen[axis] = legal[0]
    return chosen, tuple(passed)


def _swelling(line: Line, gradients: Sequence[State | None]) -> frozenset[str]:
    """Factors over which a line would make sums larger than what it reads: it is cheaper to have that whole."""
    if line.op.kernel_class != "streamed" or any(one is not None for one in gradients):
        return frozenset()
    link = line.links
    read: dict[str, int] = {}
    for t, dims in zip(line.types, link.operands, strict=True):
        for f in (f for fs in dims for f in fs if link.sizes[f] > 1):
            read[f] = max(read.get(f, 0), t.local_bytes())
    found: set[str] = set()
    for t, dims in zip(results_of(line.op, line.types), link.results, strict=True) if read else ():
        made = {f for fs in dims for f in fs}
        found |= {f for f, n in read.items() if f not in made and t.local_bytes() > n}
    return frozenset(found)


def _passes(line: Line, summed: frozenset[int], smaller: bool) -> bool:
    """Whether sums pass, as the op is typed, into nothing larger, or into less: later there would be more to reduce."""
    laid = _TWO.laid(line, Choice().passing("sum", summed))
    if laid is None or not all(t.layout.partial for t in laid.results):
        return False
    return sum(t.local_bytes() for t in laid.results) + smaller <= sum(line.types[k].local_bytes() for k in summed)


def _asked(
    axis: str, link: Links, operands: Sequence[OperandState], gradients: Sequence[State | None]
) -> tuple[str | None, set[str]]:
    """The factor on which a parameter holds the axis, and those that parameters have whole."""
    forced: str | None = None
    barred: set[str] = set()
    sides = [(o.held, dims) for o, dims in zip(operands, link.operands, strict=True)]
    sides += zip(gradients, link.results, strict=True)
    for held, dims in sides:
        if held is None:
            continue
        dim = held.get(axis)
        if dim is not None and dim < len(dims) and dims[dim]:
            forced = dims[dim][0]
        barred |= {f for d, fs in enumerate(dims) for f in fs if d != dim}
    return forced, barred

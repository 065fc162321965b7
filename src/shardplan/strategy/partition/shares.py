"""What an axis deals out: of operations, of bytes that lie, and of bytes that ops touch, the part of the worst device.

Each is beside what it would be were the axis not there and all else as it is, so that 1/n is an axis of n devices that
deals everything out, and 1 one that does nothing. What is above `SLACK` times 1/n is worth a word.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from shardplan.core.mesh import Mesh
from shardplan.core.tensor import TensorType
from shardplan.strategy.model import Model
from shardplan.strategy.partition.choices import TypedLine
from shardplan.strategy.partition.problem import Maker, onto
from shardplan.strategy.partition.settle import Settled

SLACK = 1.1
MOST_NAMED = 6  # parameters left whole, of which a line says the names


@dataclass(frozen=True, slots=True)
class AxisShare:
    """Of an axis of `size` devices the worst device's part of what it would be without the axis.

    `operations` are those of products and attention in a step's passes, `held` bytes of parameters, gradients and the
    optimizer's state between programs, `touched` bytes that ops read and write; `whole` are the parameters that the
    axis does not cut where they lie, the largest first.
    """

    axis: str
    size: int
    operations: float
    held: float
    touched: float
    whole: tuple[str, ...]

    @property
    def replicates(self) -> bool:
        """Whether the worst device does more than `SLACK` times an even share of the operations."""
        return self.operations > SLACK / self.size

    def __str__(self) -> str:
        """Return a line."""
        more = len(self.whole) - MOST_NAMED
        named = ", ".join(self.whole[:MOST_NAMED]) + (f" and {more} more" if more > 0 else "")
        parts = (("operations", self.operations), ("bytes held", self.held), ("bytes touched", self.touched))
        said = ", ".join(f"{share:.3f} of {what}" for what, share in parts)
        return f"{self.axis}={self.size}: {said}; even is {1 / self.size:.3f}; whole: {named or 'no parameter'}"


def axis_shares(model: Model, settled: Settled, state: Sequence[tuple[str, TensorType]]) -> tuple[AxisShare, ...]:
    """Return what every axis deals out.

    Args:
        model: Its parameters are told apart by their names.
        settled: How its lines are laid.
        state: The parameters of all stages and what is kept of them, each by the model's name; types on any mesh.
    """
    return tuple(_share(model, settled, state, axis, n) for axis, n in axis_sizes(settled.problem.mesh))


def operation_shares(settled: Settled) -> Iterator[tuple[str, int, float]]:
    """Yield every axis with its devices and the worst device's part of the operations of products."""
    for axis, size in axis_sizes(settled.problem.mesh):
        found = [(m.times * _flops(laid), m.times * _flops(alone)) for m, laid, alone in _pairs(settled, axis, True)]
        yield axis, size, _ratio(sum(x for x, _ in found), sum(x for _, x in found))


def replicated_lines(settled: Settled, axis: str) -> list[Maker]:
    """Return the choices whose products every device of an axis does whole, those of the most operations first."""
    found = [(m.times * _flops(laid), m) for m, laid, alone in _pairs(settled, axis, True) if alone is laid]
    return [m for _, m in sorted(found, key=lambda pair: -pair[0])]


def _share(model: Model, settled: Settled, state: Sequence[tuple[str, TensorType]], axis: str, size: int) -> AxisShare:
    others = set(settled.problem.mesh.axes) - {axis}
    pairs = list(_pairs(settled, axis, False))
    products = [(m, *two) for m, *two in pairs if _is_product(two[0])]
    operations, touched = (
        _ratio(*(sum(m.times * measure(two[k]) for m, *two in those) for k in (0, 1)))
        for measure, those in ((_flops, products), (_bytes_touched, pairs))
    )
    held = (
        sum(t.local_bytes() for t in types) for types in ([t for _, t in state], [onto(t, others) for _, t in state])
    )
    cut = {name for name, t in state if axis in t.layout.used_axes}
    whole = [n for n in model.parameters if n not in cut]
    whole.sort(key=lambda n: -model.parameters[n].size)
    return AxisShare(axis, size, operations, _ratio(*held), touched, tuple(whole))


def axis_sizes(mesh: Mesh) -> Iterator[tuple[str, int]]:
    """Yield the axes of a mesh with their devices."""
    return ((axis, mesh.span(axis).size) for axis in mesh.axes)


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else 1.0


def _flops(laid: TypedLine) -> float:
    return laid.op.flops(*laid.operands)


def _bytes_touched(laid: TypedLine) -> float:
    return laid.op.touched_bytes(*laid.operands)


def _is_product(laid: TypedLine) -> bool:
    return laid.op.kernel_class != "streamed"


def _pairs(settled: Settled, axis: str, products: bool) -> Iterator[tuple[Maker, TypedLine, TypedLine]]:
    """Yield every line, or every product, as it is laid, and as it were without an axis: the same where it has none."""
    for m in settled.lines.values():
        one = settled.options[m]
        if m.line is None or one.laid is None or (products and not _is_product(one.laid)):
            continue
        choice = one.choice.without(axis)
        yield m, one.laid, one.laid if choice == one.choice else settled.problem.layer.typed(m.line, choice)

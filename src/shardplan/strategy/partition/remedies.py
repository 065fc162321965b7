"""Which annotations of a program remove a movement: those that lay inputs, results and pinned values as it is wanted.

A layout that is wanted is pulled back along the factors of ops to what can be annotated; a layout in which a value is
made is said of the result, or the pin, that asks. Each set of annotations is tried: the program is laid out anew, and
what is then moved is all that is moved.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from shardplan.core.layout import Layout
from shardplan.core.tensor import TensorType
from shardplan.errors import LayoutError
from shardplan.plans.pricing import Where
from shardplan.strategy.model import Model
from shardplan.strategy.partition.annotated import Annotations, given_type, partition_annotated
from shardplan.strategy.partition.job import Job
from shardplan.strategy.partition.settle import Settled
from shardplan.strategy.partition.write import Movement

MOST_TRIED = 32  # sets of annotations
LEAST_GONE = 0.5  # of a movement's seconds: what moves less then moves elsewhere


class AnnotationRemedy(NamedTuple):
    """Annotations that remove a movement; `seconds` are those of all then, `more` over those of today."""

    types: Mapping[str, TensorType]
    seconds: float
    more: float

    def to_dict(self) -> dict[str, object]:
        """Return it as an object of JSON."""
        return {"annotations": {name: str(t) for name, t in self.types.items()}, "seconds": self.seconds,
                "more": self.more}  # fmt: skip


class _Tried(NamedTuple):
    remedy: AnnotationRemedy
    moves: frozenset[tuple[str, str]]
    seconds: float  # of movements


def annotation_remedies(
    job: Job, annotations: Annotations, where: Where | None = None
) -> dict[tuple[str, str], AnnotationRemedy]:
    """Return by a movement's value and who asks for it the annotations that remove it in the least seconds of all.

    A movement that none removes is left out, as one inside a loop is.
    """
    movements = [m for m in job.movements[0, "F"] if not m.path]
    tried: list[_Tried] = []
    seen: set[tuple[tuple[str, TensorType], ...]] = set()
    for types in (one for m in movements for one in _candidates(job.settled, m)):
        new = {n: t for n, t in types.items() if t != _now(job.model, annotations, n)}
        key = tuple(sorted(new.items(), key=lambda item: item[0]))
        if not new or key in seen or len(seen) >= MOST_TRIED:
            continue
        seen.add(key)
        try:
            other = partition_annotated(job.model, annotations.with_annotations(new), where)
        except LayoutError:
            continue
        seconds = other.settled.seconds
        remedy = AnnotationRemedy(new, seconds, seconds - job.settled.seconds)
        moves = frozenset((m.value, m.by) for m in other.movements[0, "F"])
        tried.append(_Tried(remedy, moves, sum(_seconds(other.settled, m) for m in other.movements[0, "F"])))
    whole = sum(_seconds(job.settled, m) for m in job.movements[0, "F"])
    found: dict[tuple[str, str], AnnotationRemedy] = {}
    for m in movements:
        gone = whole - LEAST_GONE * _seconds(job.settled, m)
        mine = [t.remedy for t in tried if (m.value, m.by) not in t.moves and t.seconds <= gone]
        if mine:
            found[m.value, m.by] = min(mine, key=lambda r: (r.seconds, len(r.types)))
    return found


def _seconds(settled: Settled, m: Movement) -> float:
    program = m.plan.program
    return m.times * sum(settled.prices.op(step.op, program.step_types(step)[0]) for step in program.steps)


def _now(model: Model, annotations: Annotations, name: str) -> TensorType | None:
    known = dict(model.program.inputs)
    return given_type(model, annotations, name) if name in known else annotations.types.get(name)


def _candidates(settled: Settled, m: Movement) -> Iterator[dict[str, TensorType]]:
    """Annotations that may remove a movement: where the value comes from as it is wanted, who asks as it is made."""
    (made,), (wanted,) = m.plan.program.input_types, m.plan.program.output_types
    if not wanted.layout.partial:
        back = dict[str, TensorType]()
        if _pull_back(settled, m.value, wanted, back):
            yield back
    if made.layout.partial:
        return
    line = None if m.asks is None else m.asks.line
    if line is None:
        yield {m.by.removeprefix("the result "): made}
    elif line.op.pinned_layout is not None:
        yield {line.results[0]: made}
    else:  # the other operands as this one is made
        found = dict[str, TensorType]()
        factors = _factors(line.links.operands[m.operand], made)
        others = [k for k in range(len(line.operands)) if k != m.operand]
        if factors is not None and all(
            _pull_back(settled, line.operands[k], _laid(line.types[k], line.links.operands[k], factors, made), found)
            for k in others
        ):
            yield found


def _pull_back(settled: Settled, value: str, wanted: TensorType, found: dict[str, TensorType]) -> bool:
    """Note what inputs and pins must be for a value to be made in a type; say whether one set of annotations is."""
    source = settled.sources.get(((), value))
    if source is None or source.cut or source.counts:
        return False
    if source.maker is None:
        return _note(source.name, wanted, found)
    line = source.maker.line
    if line is None:
        return False
    if line.op.pinned_layout is not None and not _note(line.results[0], wanted, found):
        return False
    factors = _factors(line.links.results[source.result], wanted)
    if factors is None:
        return False
    return all(
        _pull_back(settled, name, _laid(t, dims, factors, wanted), found)
        for name, t, dims in zip(line.operands, line.types, line.links.operands, strict=True)
    )


def _note(name: str, t: TensorType, found: dict[str, TensorType]) -> bool:
    return found.setdefault(name, t) == t


def _factors(dims: tuple[tuple[str, ...], ...], t: TensorType) -> dict[str, tuple[str, ...]] | None:
    """The axes of every factor, of a dim those of its major one; None where one has two."""
    found: dict[str, tuple[str, ...]] = {}
    for dim, axes in zip(dims, t.layout.dims, strict=True):
        if not dim:
            if axes:
                return None
        elif found.setdefault(dim[0], axes) != axes:
            return None
    return found


def _laid(
    t: TensorType, dims: tuple[tuple[str, ...], ...], factors: Mapping[str, tuple[str, ...]], like: TensorType
) -> TensorType:
    return t.with_layout(Layout(tuple(factors.get(dim[0], ()) if dim else () for dim in dims)), like.mesh)

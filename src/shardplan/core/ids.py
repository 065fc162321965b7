"""`id_ranges`: which inputs of a program are ids, and what they may be; `check_ids` holds arrays against it.

An input is one where an op reads it as such (`Compute.ids`), or what a move, a reshape or a body of layers hands on of
it. What is computed of an input is not: ops say what strange ids mean, and padding relies on it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from types import MappingProxyType

import numpy as np

from shardplan.core.dtypes import numpy_dtype
from shardplan.core.nested import as_nested
from shardplan.core.ops.collective import moving
from shardplan.core.ops.compute import IdRange, computing
from shardplan.core.program import Program
from shardplan.core.tensor import TensorType
from shardplan.errors import LayoutError


@lru_cache(maxsize=256)
def id_ranges(program: Program) -> Mapping[str, IdRange]:
    """Return what the inputs that are ids may be, by name: what all ops that read one allow.

    >>> from shardplan.core.ops import Gather
    >>> from shardplan.core.step import Step
    >>> from shardplan.core.tensor import TensorType
    >>> inputs = {"table": TensorType.parse("f32[4, 2]", "x=1"), "ids": TensorType.parse("i32[3]", "x=1")}
    >>> dict(id_ranges(Program(inputs, [Step(Gather(), ("table", "ids"), ("rows",))], ("rows",))))
    {'ids': IdRange(rows=4, ignored=None)}
    """
    found: dict[str, IdRange] = {}
    for name, one in _read(program, {name: name for name, _ in program.inputs}):
        known = found.get(name, one)
        ignored = one.ignored if one.ignored == known.ignored else None
        found[name] = IdRange(min(one.rows, known.rows), ignored)
    return MappingProxyType(found)


def _read(program: Program, named: Mapping[str, str]) -> Iterator[tuple[str, IdRange]]:
    """What a program reads as ids, by what `named` calls it; values that it does not name are computed."""
    names, types = dict(named), program.types
    for step in program.steps:
        inner, op = as_nested(step.op), computing(step.op)
        if inner is not None:
            pairs = zip(step.operands, inner.body.inputs, strict=True)
            # What is carried is another value in the next run.
            handed = [(o, name) for k, (o, (name, _)) in enumerate(pairs) if inner.at_once or k >= inner.carried_count]
            yield from _read(inner.body, {name: names[o] for o, name in handed if o in names})
        elif op is not None:
            ranges = op.ids(*(types[o] for o in step.operands))
            yield from ((names[step.operands[k]], one) for k, one in ranges.items() if step.operands[k] in names)
        if (op is not None and op.view) or (inner is None and moving(step.op) is not None):
            pairs = zip(step.operands, step.results, strict=False)
            names.update((result, names[o]) for o, result in pairs if o in names)


def check_ids(name: str, one: IdRange, array: np.ndarray, start: Sequence[int] = ()) -> None:
    """Raise `LayoutError` for the first id of an input that is none, by its place in the whole array.

    `start` says where the array begins in it.
    """
    wrong = (array < 0) | (array >= one.rows)
    if one.ignored is not None:
        wrong &= array != one.ignored
    if wrong.any():
        place = np.unravel_index(int(np.argmax(wrong)), array.shape)
        where = ", ".join(str(int(k) + first) for k, first in zip(place, start or [0] * array.ndim, strict=True))
        also = "" if one.ignored is None else f", and {one.ignored} for what does not count"
        raise LayoutError(
            f"input %{name}: the id at [{where}] is {int(array[place])}; legal are 0 to {one.rows - 1}{also}"
        )


def check_shard_ids(program: Program, shards: Callable[[str, TensorType], Iterable[tuple[int, np.ndarray]]]) -> None:
    """Hold what there is of the inputs that are ids against what they may be.

    `shards` gives of an input, by name and type, shards with the places of their devices. Addends, what lies away from
    a root, and shards of a table of boxes are no ids; what has another shape or dtype than it should is passed over.
    """
    types = dict(program.inputs)
    for name, one in id_ranges(program).items():
        t = types[name]
        if t.layout.partial or t.layout.root or t.layout.boxes is not None:
            continue
        for place, array in shards(name, t):
            if array.shape == t.local_shape(place) and array.dtype == numpy_dtype(t.dtype):
                check_ids(name, one, array, [start for start, _ in t.box(place)])

"""`Parameter`: an input of a model's program, and where a checkpoint has it.

A checkpoint's dims are written as the dims of ours that they are made of, major to minor: `(kv_heads ratio head)
hidden`. A name with `{layer}` or `{experts}` in braces is one tensor for each index of that dim of ours.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from shardplan.errors import LayoutError

Array = np.ndarray
_BRACES = re.compile(r"{(\w+)}")
_DIM = re.compile(r"\(([^()]*)\)|(\S+)")


class FactorPart(NamedTuple):
    """What of a factor of a checkpoint's dim a parameter is: its size there, and where ours begins.

    A factor that our value does not have is one place of it; no factor is the first dim, of which ours are some rows.
    """

    factor: str
    size: int
    start: int


@dataclass(frozen=True, slots=True)
class Parameter:
    """A value's dims with their sizes; the checkpoint's names and dims.

    `first` is the number of the first layer, and the others follow by `stride`; `trained` says whether an optimizer
    updates it. `rows` are the names of the layers' tensors where they follow no pattern.

    >>> p = Parameter((("layer", 2), ("hidden", 6), ("heads", 3), ("head", 4)), "h.{layer}.q", "(heads head) hidden")
    >>> p.shape, p.stored_shape, [name for _, name in p.names()]
    ((2, 6, 3, 4), (12, 6), ['h.0.q', 'h.1.q'])
    """

    dims: tuple[tuple[str, int], ...]
    file: str
    stored: str
    part: FactorPart | None = None
    first: int = 0
    trained: bool = True
    rows: tuple[str, ...] = ()
    stride: int = 1

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of our value."""
        return tuple(n for _, n in self.dims)

    @property
    def size(self) -> int:
        """The number of elements."""
        return math.prod(self.shape)

    @property
    def factors(self) -> tuple[tuple[tuple[str, int], ...], ...]:
        """The factors of each dim in the checkpoint, with their sizes there."""
        sizes = dict(self.dims)
        if self.part and self.part.factor:
            sizes[self.part.factor] = self.part.size
        return tuple(tuple((name, sizes[name]) for name in names) for names in self.stored_dims)

    @property
    def stored_shape(self) -> tuple[int, ...]:
        """The shape of one tensor of the checkpoint."""
        own = tuple(math.prod(n for _, n in factors) for factors in self.factors)
        return (self.part.size, *own[1:]) if self.part and not self.part.factor else own

    @property
    def sides(self) -> tuple[int, tuple[int, ...], tuple[int, ...]]:
        """How many first dims number tensors, and our dims that the last two of such a tensor are made of.

        Both are empty where it has one dim, or another part of a dim has all of a side.
        """
        ours = [name for name, _ in self.dims]
        each = 1 if self.rows or ours[:1] == ["layer"] else len(_BRACES.findall(self.file))
        own = self.stored_dims
        rows, cols = (tuple(ours.index(n) for n in names if n in ours[each:]) for names in ((), *own)[-2:])
        return (each, rows, cols) if rows and cols else (each, (), ())

    @property
    def stored_dims(self) -> tuple[tuple[str, ...], ...]:
        """The factors of each dim in the checkpoint by their names."""
        return tuple(tuple((group or one).split()) for group, one in _DIM.findall(self.stored))

    def names(self) -> Iterator[tuple[tuple[int, ...], str]]:
        """Yield the names in the checkpoint, each with its index along the first dims of our value."""
        if self.rows:
            yield from (((k,), name) for k, name in enumerate(self.rows))
            return
        along = _BRACES.findall(self.file)
        for index in itertools.product(*(range(n) for _, n in self.dims[: len(along)])):
            shift = ((self.stride, self.first) if name == "layer" else (1, 0) for name in along)
            yield index, self.file.format(**{n: k * by + s for n, k, (by, s) in zip(along, index, shift, strict=True)})

    def view(self, array: Array, name: str) -> Array:
        """Return a tensor of the checkpoint as our value has it, a view of the same storage.

        Raises `LayoutError` where its shape is another.
        """
        if array.shape != self.stored_shape:
            raise LayoutError(f"{name} of the checkpoint has the shape {array.shape}; legal is {self.stored_shape}")
        factors, part = self.factors, self.part
        if part and not part.factor:
            array = array[part.start : part.start + math.prod(n for _, n in factors[0])]
            part = None
        flat = [pair for pairs in factors for pair in pairs]
        split = array.reshape([n for _, n in flat])
        ours, at = dict(self.dims), [slice(None)] * len(flat)
        order = [factor for factor, _ in flat]
        index: list[Any] = at
        if part:
            start = part.start
            k = order.index(part.factor)
            if part.factor in ours:
                index[k] = slice(start, start + ours[part.factor])
            else:
                index[k] = start
                order.pop(k)
        wanted = [name for name, _ in self.dims[len(_BRACES.findall(self.file)) :]]
        return split[tuple(index)].transpose([order.index(name) for name in wanted])

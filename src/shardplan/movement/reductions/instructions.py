"""The reduction language of arXiv 2110.10548: instructions (slice, form, collective) over a hierarchy of digits.

The members of a reduction group are numbered by their digits d_0 .. d_(L-1), major first, over the sizes h of a
hierarchy; slice s fixes d_0 .. d_s, and an ancestor a is above s (-1 is the root). Devices with equal digits outside a
range form a group:

- `InsideGroup`  digits [s+1, L) vary;
- `Parallel(a)`  digits [a+1, s+1) vary;
- `Master(a)`    as Parallel, but only the devices whose later digits are 0 take part; the others idle.

A hierarchy of L digits, none of size 1, has exactly L^2 distinct groupings: L(L+1)/2 ranges and L(L-1)/2 masters. This
module knows neither states nor types; `state_matrix` says which instructions are legal.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

COLLECTIVES = ("all_reduce", "reduce_scatter", "all_gather", "reduce", "broadcast")
_PAPER = {name: name.title().replace("_", "") for name in COLLECTIVES}


@dataclass(frozen=True, slots=True)
class Grouping:
    """Which devices form groups: the digits `varies` vary; `master` keeps those whose later digits are 0.

    Invariants: `varies` ascends and is not empty; the paper's groupings vary a contiguous range.
    """

    varies: tuple[int, ...]
    master: bool = False

    @property
    def contiguous(self) -> bool:
        """Whether the paper's forms can say it."""
        return self.varies[-1] - self.varies[0] == len(self.varies) - 1

    def members(self, sizes: Sequence[int]) -> NDArray[np.int64]:
        """Return the member numbers of every group, int64 [groups, k], in the order of their digits.

        `sizes` are those of all digits of the hierarchy, major first.

        >>> Grouping((0,), master=True).members((2, 3)).tolist()
        [[0, 3]]
        """
        later = self.varies[-1] + 1
        grid = np.arange(math.prod(sizes)).reshape(sizes)
        if self.master:
            grid = grid[(slice(None),) * later + (0,) * (len(sizes) - later)]
        others = [d for d in range(grid.ndim) if d not in self.varies]
        k = math.prod(sizes[d] for d in self.varies)
        return np.ascontiguousarray(grid.transpose((*others, *self.varies))).reshape(-1, k)


@dataclass(frozen=True, slots=True)
class Instruction:
    """One step of a reduction program: a collective on every group of a grouping at once."""

    grouping: Grouping
    collective: str

    def form(self, depth: int, names: Sequence[str] = ()) -> str:
        """Return the instruction as the paper writes it, such as `(node, InsideGroup, ReduceScatter)`.

        `depth` is the number of digits L; `names` are theirs, for slices and ancestors, their numbers by default.
        Digits that are no range, which the paper cannot say, are listed.

        >>> Instruction(Grouping((1,)), "all_gather").form(2, ("node", "gpu"))
        '(node, InsideGroup, AllGather)'
        """
        label = ["root", *(names or map(str, range(depth)))]
        first, stop = self.grouping.varies[0], self.grouping.varies[-1] + 1
        kind = "Master" if self.grouping.master else "Parallel"
        if not self.grouping.contiguous:
            return f"({'+'.join(label[d + 1] for d in self.grouping.varies)}, {kind}, {_PAPER[self.collective]})"
        if stop == depth:
            return f"({label[first]}, InsideGroup, {_PAPER[self.collective]})"
        return f"({label[stop]}, {kind}({label[first]}), {_PAPER[self.collective]})"


@lru_cache(maxsize=16)
def groupings(depth: int, subsets: bool = False) -> tuple[Grouping, ...]:
    """Return the distinct groupings over `depth` digits, none of size 1: depth^2 of them; `subsets` admits any digits.

    >>> [len(groupings(n)) for n in (1, 2, 3, 4)]
    [1, 4, 9, 16]
    """
    sets = sorted(s for n in range(1, depth + 1) for s in itertools.combinations(range(depth), n))
    every = [*map(Grouping, sets), *(Grouping(s, True) for s in sets if s[-1] + 1 < depth)]
    return tuple(g for g in every if subsets or g.contiguous)


@lru_cache(maxsize=16)
def alphabet(depth: int) -> tuple[Instruction, ...]:
    """Return every instruction over `depth` digits: the five collectives on each grouping."""
    return tuple(Instruction(g, name) for g in groupings(depth) for name in COLLECTIVES)


def instruction_list_text(program: Sequence[Instruction], depth: int, names: Sequence[str] = ()) -> str:
    """Return a program as text: its instructions with '; ' between them."""
    return "; ".join(step.form(depth, names) for step in program)

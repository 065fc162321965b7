"""Logical tensors: what the model means. A tensor is a name and dims, each a product of atoms, and has no storage.

A dim may have a range of its first atom: `l[3:61], x, e` is there for 58 of 61 layers, under their numbers, and
`l[1::2], x, e` for every second, from the second on.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from shardplan.core.notation import NAME, Scanner
from shardplan.errors import LayoutError, excerpt

_RANGE = re.compile(r"[^\[\]]*")
MOST_ELEMENTS = 2**62


@dataclass(frozen=True, slots=True)
class LogicalDim:
    """The atoms of a dim, major first, and the texts of its range, `""` where it is whole."""

    atoms: tuple[str, ...]
    first: str = ""
    stop: str = ""
    step: str = ""

    def __str__(self) -> str:
        """Return the text, as `l[3:61]`."""
        body = " ".join(self.atoms) or "1"
        step = f":{self.step}" if self.step else ""
        return f"{body}[{self.first}:{self.stop}{step}]" if self.first or self.stop or step else body


def logical_dims(tensor: str, text: str) -> tuple[LogicalDim, ...]:
    """Read the dims of a logical tensor; raises `ParseError` at the character.

    >>> [str(d) for d in logical_dims("router", "l[3:61], x, g r d")]
    ['l[3:61]', 'x', 'g r d']
    """
    s = Scanner(text)
    found: list[LogicalDim] = []
    while True:
        begin = s.position
        atoms: list[str] = []
        if not s.take("1"):
            while (name := s.match(NAME)) is not None:
                atoms.append(name)
        parts = []
        if s.take("["):
            parts = [t.strip() for t in (s.match(_RANGE) or "").split(":")]
        if (parts and not (2 <= len(parts) <= 3 and s.take("]"))) or not (s.peek(",") or s.end()):
            dim = excerpt(text[begin:].partition(",")[0].strip())
            raise s.error(f"{tensor} = {excerpt(text)}: the dim {dim} is none; legal is as 'l[3:61], g r d, e'")
        found.append(LogicalDim(tuple(atoms), *parts))
        if not s.take(","):
            return tuple(found)


@dataclass(frozen=True, slots=True)
class LogicalTensor:
    """A logical tensor with sizes: per dim the atoms, the size, and the indices that there are."""

    name: str
    dims: tuple[LogicalDim, ...]
    sizes: tuple[int, ...]
    ranges: tuple[range, ...]

    def __post_init__(self) -> None:
        """Refuse a range that is none, and an atom that stands twice."""
        for d, n, r in zip(self.dims, self.sizes, self.ranges, strict=True):
            if not 0 <= r.start <= r.stop <= n:
                raise LayoutError(f"{self.name}: {d} is {r.start} to {r.stop} of {n}; legal is a range within 0 to {n}")
        if math.prod(max(1, n) for n in self.sizes) > MOST_ELEMENTS:
            raise LayoutError(
                f"{self.name} has the sizes {excerpt(self.sizes)}; legal are {MOST_ELEMENTS} elements at most"
            )
        atoms = [a for d in self.dims for a in d.atoms]
        if len(set(atoms)) < len(atoms):
            twice = next(a for a in atoms if atoms.count(a) > 1)
            raise LayoutError(f"{self.name} has the atom {twice} twice; legal is each atom once: give one another name")

    @property
    def extents(self) -> tuple[int, ...]:
        """How many indices there are in every dim."""
        return tuple(map(len, self.ranges))

    @property
    def text(self) -> str:
        """The dims as text."""
        return ", ".join(map(str, self.dims))

"""What one rank has of a storage dim, read as a product and sum of atoms from the logical index at every position."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from shardplan.errors import LayoutError
from shardplan.movement.weights.derive.trials import SeenArray, SeenTrial
from shardplan.movement.weights.form import FormAlternative, FormFactor

Atoms = list[tuple[str, int]]  # with sizes, major first


@dataclass(frozen=True, slots=True, eq=False)
class DimLine:
    """A storage dim along a line through an element: per position the tensor (-1: padding) and the logical index.

    `along` is the logical dim of every tensor whose index changes, -1 where none does; `index` is int64 [positions].
    """

    tensor: np.ndarray
    index: np.ndarray
    along: Mapping[int, int]


def line_of(
    seen: SeenTrial, array: SeenArray, dim: int, known: Mapping[str, int] | None = None, through: int | None = None
) -> DimLine | None:
    """Return the line along a dim through the first element that is none of padding; None where there is no element.

    `through` is the number of the tensor whose first element is meant instead. `known` says of each tensor which
    logical dim is meant; without it, that whose index changes. Raises `LayoutError` where the indices of several dims
    of one tensor change.
    """
    flat = array.tensor.reshape(-1)
    first = np.flatnonzero(flat >= 0 if through is None else flat == through)
    if not array.tensor.size:
        return None
    if not len(first):
        return DimLine(np.full(array.tensor.shape[dim], -1), np.zeros(array.tensor.shape[dim], dtype=np.int64), {})
    base = [slice(int(i), int(i) + 1) for i in np.unravel_index(int(first[0]), array.tensor.shape)]
    base[dim] = slice(None)
    tensors, flat = array.tensor[tuple(base)].reshape(-1), array.index[tuple(base)].reshape(-1)
    index, along = np.zeros_like(flat), dict[int, int]()
    for tensor in dict.fromkeys(tensors[tensors >= 0].tolist()):
        mine = tensors == tensor
        every = np.unravel_index(flat[mine], seen.shape(tensor))
        changing = [k for k, i in enumerate(every) if (i != i[0]).any()]
        if len(changing) > 1:
            raise LayoutError(f"dim {dim} joins several dims of {seen.tensors[tensor]}; legal is one")
        along[tensor] = (changing or [-1])[0] if known is None else known.get(seen.tensors[tensor], -1)
        if along[tensor] >= 0:
            index[mine] = every[along[tensor]]
    return DimLine(tensors, index, along)


@dataclass(slots=True)
class AtomNames:
    """Atoms that a table needs beyond those of the family: digits of an atom, and sizes of padding."""

    split: dict[str, tuple[str, str]] = field(default_factory=dict[str, tuple[str, str]])
    sizes: dict[str, str] = field(default_factory=dict[str, str])

    def parts(self, atom: str, major: int, minor: int) -> Atoms:
        """Return the digits of an atom that is stored in another order; the smaller one has a size of its own."""
        names = f"{atom}_major", f"{atom}_minor"
        self.split[atom] = names
        constant = 0 if major <= minor else 1
        size = (major, minor)[constant]
        self.sizes.setdefault(names[constant], str(size))
        self.sizes.setdefault(names[1 - constant], f"{atom} / {size}")
        return [(names[0], major), (names[1], minor)]


def digits_of(index: np.ndarray) -> list[tuple[int, int]]:
    """Return (count, step), major first, of the digits that an order of indices runs through; () where it has none.

    >>> digits_of(np.array([0, 2, 4, 1, 3, 5]))
    [(2, 1), (3, 2)]
    """
    rest, found = index - index[0], list[tuple[int, int]]()
    while len(rest) > 1:
        step = int(rest[1] - rest[0])
        even = np.flatnonzero(np.diff(rest) != step)
        count = int(even[0]) + 1 if len(even) else len(rest)
        while len(rest) % count:
            count -= 1
        if step <= 0 or count < 2:
            return []
        found.append((count, step))
        rest = rest[::count]
    found.reverse()
    made = np.zeros(1, dtype=np.int64)
    for count, step in found:
        made = (made[:, None] + np.arange(count) * step).reshape(-1)
    return found if np.array_equal(made, index - index[0]) else []


def atoms_of(index: np.ndarray, atoms: Sequence[tuple[str, int]], names: AtomNames) -> Atoms | None:
    """Return the atoms of a dim in the order in which indices run through them; None where they are no such order."""
    found = digits_of(index)
    if not found and len(index) > 1:
        return None
    steps: dict[str, tuple[int, int]] = {}  # atom -> step, size
    below = 1
    for atom, size in reversed(atoms):
        steps[atom] = below, size
        below *= size
    if sorted(index.tolist()) != list(range(below)):
        return None  # only a part of the dim
    out: Atoms = []
    cuts = {step for _, step in found} | {step * count for count, step in found}
    for count, step in found:
        for atom, size in atoms:
            low = steps[atom][0]
            high = low * size
            inside = sorted(c for c in cuts if low < c < high and c % low == 0)
            parts = [(atom, low, high)]
            if len(inside) == 1:
                (major, a), (minor, b) = names.parts(atom, high // inside[0], inside[0] // low)
                parts = [(major, inside[0], inside[0] * a), (minor, low, low * b)]
            elif inside:
                return None
            out += [(name, b // a) for name, a, b in parts if a >= step and b <= step * count and b > a]
    return out if math.prod(size for _, size in out) == below else None


def whole_of(line: DimLine, orders: Mapping[int, Atoms], tensors: Sequence[str], padding: str) -> list[FormFactor]:
    """Return the factors of a dim: a product, or a sum whose addends repeat below the atoms that all have.

    Raises `LayoutError` where it is neither.
    """
    labels: list[int] = line.tensor.tolist()
    return _factors(labels, {t: list(atoms) for t, atoms in orders.items()}, tensors, padding)


def _factors(labels: list[int], orders: Mapping[int, Atoms], tensors: Sequence[str], padding: str) -> list[FormFactor]:
    if len(set(labels)) == 1:
        return [FormFactor(atom) for atom, _ in orders[labels[0]]]
    n = len(labels)
    period = next(p for p in range(1, n + 1) if n % p == 0 and labels == labels[:p] * (n // p))
    outer: list[FormFactor] = []
    rest = {t: list(atoms) for t, atoms in orders.items()}
    repeats = n // period
    while repeats > 1:
        heads = {atoms[0] if atoms else ("", 0) for atoms in rest.values()}
        if len(heads) > 1 or -1 in labels:
            raise LayoutError("tensors take turns by no atom that all of them have; legal is an atom before the sum")
        ((atom, size),) = heads
        if not size or repeats % size:
            raise LayoutError(f"tensors take turns {repeats} times, which is no atom; legal is a whole atom")
        outer.append(FormFactor(atom))
        rest = {t: atoms[1:] for t, atoms in rest.items()}
        repeats //= size
    blocks = [k for k in range(period) if k == 0 or labels[k] != labels[k - 1]]
    order = [labels[k] for k in blocks]
    if len(set(order)) < len(order):
        raise LayoutError("a tensor stands in several places of a dim, at no equal distance; legal is one, or repeats")
    alternatives = tuple(
        FormAlternative(None, (), padding)
        if t < 0
        else FormAlternative(tensors[t], tuple(FormFactor(atom) for atom, _ in rest[t]))
        for t in order
    )
    return [*outer, FormFactor(alternatives)]

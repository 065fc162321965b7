"""What stands in names: families of parameters, the numbers in their names, and which rank has which."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from shardplan.errors import LayoutError
from shardplan.movement.weights.derive.cuts import cuts_over
from shardplan.movement.weights.derive.trials import SeenArray, SeenTrial
from shardplan.movement.weights.form import FormFactor, product_text
from shardplan.movement.weights.lowering import expand_digits
from shardplan.movement.weights.pieces import FormContext, local_pieces

_NUMBER = re.compile(r"(\d+)")


@dataclass(slots=True)
class SeenFamily:
    """Parameters whose names differ in numbers: texts and the atoms of numbers in turn, and the tensors inside."""

    first: str
    parts: tuple[str, ...]
    tensors: frozenset[str]
    holes: dict[int, str] = field(default_factory=dict[int, str])  # place of a number in `parts` -> atom

    @property
    def pattern(self) -> re.Pattern[str]:
        """What its names look like."""
        texts = [r"(\d+)" if k in self.holes else re.escape(part) for k, part in enumerate(self.parts)]
        return re.compile("".join(texts) + r"\Z")

    def name(self, local: Mapping[str, bool]) -> str:
        """Return the name as a table has it; `local` says of an atom whether its numbers are a rank's own."""
        texts: list[str] = []
        for k, part in enumerate(self.parts):
            atom = self.holes.get(k)
            texts.append(part if atom is None else f"{{{atom}.local}}" if local[atom] else f"{{{atom}}}")
        return "".join(texts)


@dataclass(frozen=True, slots=True, eq=False)
class SeenMember:
    """A parameter of a family on a rank: its name, the numbers in it, the logical index of every hole, the elements."""

    name: str
    numbers: Mapping[str, int]
    at: Mapping[str, int]
    array: SeenArray


def parameter_tensors(seen: SeenTrial, array: SeenArray) -> frozenset[str]:
    """Return the names of the logical tensors that a parameter has elements of."""
    return frozenset(seen.tensors[t] for t in np.unique(array.tensor).tolist() if t >= 0)


def fixed_atoms(seen: SeenTrial, array: SeenArray) -> dict[str, int]:
    """Return the atoms whose index is one for all elements of a parameter, and that index."""
    out: dict[str, int] = {}
    for tensor in np.unique(array.tensor).tolist():
        if tensor < 0:
            continue
        dims = seen.trial.source.tensors[seen.tensors[tensor]].dims
        every = np.unravel_index(array.index[array.tensor == tensor], seen.shape(tensor))
        for dim, index in zip(dims, every, strict=True):
            if len(dim.atoms) == 1 and (index == index[0]).all():
                out.setdefault(dim.atoms[0], int(index[0]))
    return out


def families_of(seen: SeenTrial) -> list[SeenFamily]:
    """Return the families of a trial on one rank; raises `LayoutError` where a dim is in no name and not in memory."""
    groups: dict[tuple[tuple[str, ...], frozenset[str]], list[str]] = {}
    for name, array in seen.held[0].items():
        key = tuple(_NUMBER.split(name)[::2]), parameter_tensors(seen, array)
        if not key[1]:
            raise LayoutError(f"{name} holds no element of the checkpoint; legal is a parameter that is loaded")
        groups.setdefault(key, []).append(name)
    found = {key: _family(seen, names, key[1]) for key, names in groups.items()}
    before = {(atom, f.parts[k - 1]) for f in found.values() for k, atom in f.holes.items()}
    for key, names in groups.items():
        _single(seen, found[key], names, before)
    return list(found.values())


def _family(seen: SeenTrial, names: Sequence[str], tensors: frozenset[str]) -> SeenFamily:
    """A family with the numbers in which its names differ."""
    found = SeenFamily(names[0], tuple(_NUMBER.split(names[0])), tensors)
    split = [_NUMBER.split(name) for name in names]
    atoms = [fixed_atoms(seen, seen.held[0][name]) for name in names]
    for k in range(1, len(found.parts), 2):
        if len({parts[k] for parts in split}) == 1:
            continue
        legal = [
            atom for atom in atoms[0] if atom not in found.holes.values()
            and all(own.get(atom) == int(parts[k]) for own, parts in zip(atoms, split, strict=True))
        ]  # fmt: skip
        if not legal:
            raise LayoutError(
                f"{names[1]}: the number {split[1][k]} in it is the index of no dim; legal is a whole dim"
            )
        found.holes[k] = legal[0]
    return found


def _single(seen: SeenTrial, found: SeenFamily, names: Sequence[str], before: set[tuple[str, str]]) -> None:
    """Add the numbers that are one in all names, and the index of a dim that is not in memory."""
    every = [fixed_atoms(seen, seen.held[0][name]) for name in names]
    sizes = seen.trial.source.sizing
    places = [k for k in range(1, len(found.parts), 2) if k not in found.holes]
    for atom, index in every[0].items():
        if atom in found.holes.values() or sizes.size(atom) < 2 or any(own.get(atom) != index for own in every):
            continue
        legal = [k for k in places if found.parts[k] == str(index) and k not in found.holes]
        known = [k for k in legal if (atom, found.parts[k - 1]) in before]
        if len(known or legal) != 1:
            raise LayoutError(
                f"{found.first}: {atom} is {index} throughout, as {'several numbers' if legal else 'no number'} of the "
                "name; legal is a first trial in which it differs"
            )
        found.holes[(known or legal)[0]] = atom


def members(families: Sequence[SeenFamily], seen: SeenTrial, rank: int) -> Iterator[tuple[int, SeenMember]]:
    """Yield the parameters of a rank with the number of their family; raises `LayoutError` where one is of none."""
    for name, array in seen.held[rank].items():
        own, at = parameter_tensors(seen, array), fixed_atoms(seen, array)
        for k, family in enumerate(families):
            match = family.pattern.match(name)
            if match and own <= family.tensors:
                numbers = {family.holes[at]: int(n) for at, n in zip(sorted(family.holes), match.groups(), strict=True)}
                yield k, SeenMember(name, numbers, at, array)
                break
        else:
            raise LayoutError(f"{name} of rank {rank} is as none of the first trial's parameters; legal are the same")


@dataclass(frozen=True, slots=True, eq=False)
class RankHole:
    """Which indices of a dim a rank has in its names, and what an expression is read with."""

    trial: int
    values: frozenset[int]
    scenery: FormContext


def hole_of(atom: str, ranks: Sequence[RankHole], axes: Sequence[str]) -> str | None:
    """Return the expression of a dim that stands in names, with the cut that fits all ranks, None where none does."""
    options = [(FormFactor(atom),)]
    if axes:
        options = [(FormFactor(atom, cuts),) for cuts in cuts_over(axes)]
    for factors in options:
        if all(_fits(factors, atom, rank, ranks) for rank in ranks):
            return product_text(factors)
    return None


def _fits(factors: tuple[FormFactor, ...], atom: str, rank: RankHole, ranks: Sequence[RankHole]) -> bool:
    every = frozenset[int]().union(*(r.values for r in ranks if r.trial == rank.trial))
    found = values_of(factors, atom, rank.scenery)
    return found is not None and frozenset(found) & every == rank.values


def values_of(factors: tuple[FormFactor, ...], atom: str, scenery: FormContext) -> list[int] | None:
    """Return the indices that an expression gives a rank, in its order; None where a cut does not fit."""
    try:
        return [values[atom] for values in expand_digits(local_pieces(factors, scenery)[1])]
    except LayoutError:
        return None

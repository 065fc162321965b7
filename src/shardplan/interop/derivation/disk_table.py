"""The table of what a model class saves: names and shapes at several configs, each of which has one field doubled."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from shardplan.errors import LayoutError, excerpt
from shardplan.interop.derivation.model_class import Failure, ModelClass
from shardplan.movement.weights.table import WeightTable

Shapes = Mapping[str, tuple[int, ...]]
_MOST_ELEMENTS = 4_000_000  # each is loaded some three times, a digit of its number each
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")
_IDS = ("_id", "_ids", "_index", "version")
_COUNTS = ("num", "n_")  # of heads and experts, which stand before the sizes of each in a product


class SavedShapes:
    """What a class saves at a config, and at the same with some fields as many times as large; each made once."""

    def __init__(self, saves: ModelClass, config: Mapping[str, Any]) -> None:
        """Save the model of the config; raises `LayoutError` where there is none."""
        self.saves, self.config = saves, dict(config)
        try:
            self.first: Shapes = saves.saved_shapes(config)
        except Failure as error:
            raise LayoutError(f"{saves.name}: no model is made of the config: {excerpt(str(error))}") from None
        elements = sum(map(math.prod, self.first.values()))
        if elements > _MOST_ELEMENTS:
            raise LayoutError(
                f"{saves.name}: the smallest model that its config gives has {elements} elements; legal are "
                f"{_MOST_ELEMENTS} at most, of --config with small sizes"
            )
        self._known: dict[tuple[tuple[str, int], ...], Shapes | None] = {(): self.first}
        numbers = {k: v for k, v in config.items() if type(v) is int and v > 1 and not k.endswith(_IDS)}
        seen = {k: self.with_factors({k: 2}) for k in numbers}
        self.values = {k: n for k, n in numbers.items() if seen[k] not in (None, self.first)}
        """The fields on which names or shapes depend, with their values."""

    def with_factors(self, by: Mapping[str, int]) -> Shapes | None:
        """Return names and shapes where fields are so many times as large, None where no model is made."""
        key = tuple(sorted(by.items()))
        if key not in self._known:
            try:
                self._known[key] = self.saves.saved_shapes(self.larger(by))
            except Failure:
                self._known[key] = None
        return self._known[key]

    def larger(self, by: Mapping[str, int]) -> dict[str, Any]:
        """Return the config with fields so many times as large."""
        return self.config | {k: self.config[k] * n for k, n in by.items()}

    def unseen(self) -> dict[str, Any] | None:
        """Return a config with as many fields as possible three times as large, None where there is none."""
        by: dict[str, int] = {}
        for field in self.values:
            if self.with_factors({**by, field: 3}) is not None:
                by[field] = 3
        return self.larger(by) if by else None


def disk_table(shapes: SavedShapes, name: str) -> WeightTable:
    """Return the table of what a class saves, each tensor a logical one of its own; raises `LayoutError`.

    Numbers in names that a field counts are dims in front (layers, experts); others are text.
    """
    aliases = _aliases(shapes.values)
    atoms: dict[str, str] = {alias: field for field, alias in aliases.items()}
    tensors: dict[str, str] = {}
    holes: dict[str, str] = {}
    parameters: list[dict[str, Any]] = []
    for pattern, counted in _patterns(shapes).items():
        own = [aliases[f] for f in counted]
        holes |= {a: a for a in own}
        first = pattern.format(*[0] * len(counted))
        used = set(own)
        dims = [_product(_dim_formula(shapes, first, d), aliases, atoms, used) for d in range(len(shapes.first[first]))]
        key = f"t{len(tensors)}"
        tensors[key] = ", ".join([*own, *dims]) or "1"
        parameters.append(
            {"name": pattern.format(*(f"{{{a}}}" for a in own)), "is": f"{key} = {', '.join(dims or ['1'])}"}
        )
    data = {
        "name": name, "source": f"what {shapes.saves.name} saves", "mesh": ["replica"], "degrees": {"replica": 1},
        "of": {"atoms": atoms, "tensors": tensors}, "holes": holes, "parameters": parameters,
    }  # fmt: skip
    return WeightTable.of(data, name)


def _aliases(values: Mapping[str, int]) -> dict[str, str]:
    """An atom for every field: its initials, with a number where another has them."""
    out: dict[str, str] = {}
    for field in values:
        letters = "".join(part[0] for part in field.split("_") if part) or "x"
        taken = {*out.values(), *values}
        out[field] = next(n for n in (letters, *(f"{letters}{k}" for k in range(2, 99))) if n not in taken)
    return out


def _patterns(shapes: SavedShapes) -> dict[str, list[str]]:
    """Names with braces for the numbers that a field counts, and these fields."""
    groups: dict[str, list[tuple[int, ...]]] = {}
    for name in shapes.first:
        groups.setdefault(_NUMBER.sub("{}", name), []).append(tuple(map(int, _NUMBER.findall(name))))
    out: dict[str, list[str]] = {}
    for text, numbers in groups.items():
        fields = [_counting(shapes, text, k, {n[k] for n in numbers}) for k in range(len(numbers[0]))]
        for found in numbers:
            filled = [("{}" if f else str(n)) for f, n in zip(fields, found, strict=True)]
            out[text.format(*filled)] = [f for f in fields if f]
    return out


def _counting(shapes: SavedShapes, text: str, place: int, found: set[int]) -> str | None:
    """The field that counts a number in names, None where it is part of the name; raises `LayoutError`."""
    for field, value in shapes.values.items():
        doubled = {
            int(_NUMBER.findall(n)[place])
            for n in shapes.with_factors({field: 2}) or ()
            if _NUMBER.sub("{}", n) == text
        }
        if doubled and doubled != found:
            if found == set(range(value)) and doubled == set(range(2 * value)):
                return field
            raise LayoutError(
                f"{text.format(*'n' * text.count('{}'))}: {len(found)} numbers where {field} = {value}, "
                f"{len(doubled)} where it is {2 * value}; legal is one a layer or expert: write a table"
            )
    return None


def _dim_formula(shapes: SavedShapes, name: str, dim: int) -> SizeFormula:
    def sizes(by: Mapping[str, int]) -> int | None:
        found = shapes.with_factors(by)
        return None if found is None or name not in found else found[name][dim]

    size = shapes.first[name][dim]
    found = fit_size(size, shapes.values, sizes)
    if found is None:
        raise LayoutError(f"{name}: dim {dim} of {size} follows the config by no sum of products; write a table")
    return found


def _product(formula: SizeFormula, aliases: Mapping[str, str], atoms: dict[str, str], used: set[str]) -> str:
    """A dim as a product of atoms: counts before sizes; what divides, or is a sum, is one atom.

    An atom that another dim of the tensor has, which `used` says, gets another name: of equal dims each is cut apart.
    """

    def atom(name: str, text: str) -> str:
        name = next(n for n in (name, *(f"{name}_{k}" for k in range(2, 99))) if n not in used)
        atoms[name] = text
        used.add(name)
        return name

    if formula.down or formula.text:
        known = next((a for a, t in atoms.items() if t == formula.arithmetic), f"d{len(atoms)}")
        return atom(known, formula.arithmetic)
    times = [atom(f"of{formula.times}", str(formula.times))] if formula.times != 1 else []
    fields = sorted(formula.up, key=lambda f: (not f.startswith(_COUNTS), "head_dim" in f or f.endswith("_size")))
    return " ".join([*times, *(atom(aliases[f], f) for f in fields)]) or "1"


Sizes = Callable[[Mapping[str, int]], int | None]
"""A size under factors of some fields (2 for twice as much), None where no model can be made."""
_MOST_FIELDS = 4


@dataclass(frozen=True, slots=True)
class SizeFormula:
    """A whole number times fields, some of which divide: `times * up / down`; or a text, where it is a sum."""

    times: int = 1
    up: tuple[str, ...] = ()
    down: tuple[str, ...] = ()
    text: str = ""

    @property
    def arithmetic(self) -> str:
        """The formula as a table says sizes."""
        if self.text:
            return self.text
        over = [str(self.times), *self.up] if self.times != 1 or not self.up else [*self.up]
        return " / ".join([" * ".join(over), *self.down])


def fit_size(size: int, values: Mapping[str, int], sizes: Sizes) -> SizeFormula | None:
    """Return the formula of a size at some values of fields, None where neither a product nor a sum of them fits.

    It is fitted where each field is twice as large, alone or with others, and checked where all are.

    >>> fit_size(24, {"e": 8, "n": 2}, lambda by: 3 * 8 * by.get("e", 1))
    SizeFormula(times=3, up=('e',), down=(), text='')
    """
    ratios = {f: Fraction(n, size) for f in values if (n := sizes({f: 2})) is not None and size}
    fields = [f for f, r in ratios.items() if r != 1]
    if not fields:
        return SizeFormula(size)
    every, thrice = sizes(dict.fromkeys(fields, 2)), sizes(dict.fromkeys(fields, 3))
    up = tuple(f for f in fields if ratios[f] == 2)
    down = tuple(f for f in fields if ratios[f] == Fraction(1, 2))
    if len(up) + len(down) == len(fields):
        times = Fraction(size * math.prod(values[f] for f in down), math.prod(values[f] for f in up))
        whole = Fraction(size) * 2 ** len(up) / 2 ** len(down)
        more = Fraction(size) * 3 ** len(up) / 3 ** len(down)
        if times.denominator == 1 and every in (None, whole) and thrice in (None, more):
            return SizeFormula(int(times), up, down)
    return None if down or len(fields) > _MOST_FIELDS else _fit_sum(fields, values, sizes)


def _fit_sum(fields: Sequence[str], values: Mapping[str, int], sizes: Sizes) -> SizeFormula | None:
    """A sum of products of fields, each at most once in one: its coefficients are differences of sizes."""
    found: dict[tuple[str, ...], int] = {}
    for count in range(len(fields) + 1):
        for chosen in itertools.combinations(fields, count):
            # Inclusion and exclusion over the doubled fields: what is left is the product of exactly these.
            total = 0
            for some in itertools.chain.from_iterable(itertools.combinations(chosen, k) for k in range(count + 1)):
                n = sizes(dict.fromkeys(some, 2))
                if n is None:
                    return None
                total += (-1) ** (count - len(some)) * n
            found[chosen] = total
    terms: list[str] = []
    # A difference at `chosen` holds every product that has these fields, whatever else it has.
    for chosen in sorted(found, key=len, reverse=True):
        own = found[chosen] - sum(n for more, n in found.items() if len(more) > len(chosen) and set(chosen) < set(more))
        found[chosen] = own
        times = Fraction(own, math.prod(values[f] for f in chosen))
        if times.denominator != 1 or times < 0:
            return None
        if times:
            terms.append(" * ".join([*([str(times)] if times != 1 or not chosen else []), *chosen]))
    formula = " + ".join(reversed(terms))
    thrice = sizes(dict.fromkeys(fields, 3))
    want = sum(n * 3 ** len(chosen) for chosen, n in found.items())
    return SizeFormula(text=formula) if thrice in (None, want) else None

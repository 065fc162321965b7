"""How a size follows the fields of a config: a product of fields, or a sum of products, fitted and then checked."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction

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

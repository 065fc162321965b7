"""How one parameter is stored, as an expression: products, sums and cuts of named atoms.

    stored    = [tensor "="] dim ("," dim)*          the parameter's dims; the tensor, where no sum names several
              | tensor "="                           a scalar
    dim       = factor+ | "1"                        a product, major to minor
    factor    = (atom | "(" alternative ("|" alternative)* ")") cut*
    alternative = [tensor ":"] factor* | "0:" size   a sum is a concatenation; `0:` is padding
    cut       = "@" axis ("*" axis)* [rule]
    rule      = ".ceil" | ".first" | ".last" | ".robin" | ".NAME" | "~"      and nothing: even

A cut over `@a*b` is one cut over both axes, `@a@b` are two nested cuts: they differ where the pieces are uneven. What a
rule means is said in `cuts`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Final

from shardplan.core.notation import INTEGER, NAME, Scanner
from shardplan.errors import ParseError

EVEN: Final = "even"
SHARED: Final = "shared"
RULES: Final = (EVEN, "ceil", "first", "last", "robin", SHARED)
_ONE, _DIGIT, _PADDING = re.compile(r"1(?!\d)"), re.compile(r"(?=\d)"), re.compile(r"0\s*:")
_NAMED = {sign: re.compile(rf"{NAME.pattern}(?=\s*{sign})") for sign in "=:"}  # a tensor, before its sign
_MOST_NESTED = 32


@dataclass(frozen=True, slots=True)
class FormCut:
    """A cut over mesh axes, major first, by a rule: one of `RULES`, or the name of a table of owners."""

    axes: tuple[str, ...]
    rule: str = EVEN

    def __str__(self) -> str:
        """Return the text, as `@data*tensor.ceil`."""
        suffix = {EVEN: "", SHARED: "~"}.get(self.rule, f".{self.rule}")
        return f"@{'*'.join(self.axes)}{suffix}"


@dataclass(frozen=True, slots=True)
class FormFactor:
    """An atom, or a sum (of one alternative: a group), with its cuts, outermost first."""

    item: str | tuple[FormAlternative, ...]
    cuts: tuple[FormCut, ...] = ()

    def __str__(self) -> str:
        """Return the text, as `(q: g r d | k: g d)@tensor`."""
        item = self.item if isinstance(self.item, str) else f"({' | '.join(map(str, self.item))})"
        return item + "".join(map(str, self.cuts))


@dataclass(frozen=True, slots=True)
class FormAlternative:
    """One addend of a sum: the factors of a tensor, or of the tensor that is meant (None), or padding of a size."""

    tensor: str | None
    factors: tuple[FormFactor, ...]
    padding: str | None = None

    def __str__(self) -> str:
        """Return the text, as `q: g r d` or `0: pad`."""
        if self.padding is not None:
            return f"0: {self.padding}"
        body = " ".join(map(str, self.factors))
        return body if self.tensor is None else f"{self.tensor}: {body}".rstrip()


@dataclass(frozen=True, slots=True)
class StoredForm:
    """The dims of a stored parameter, each a product of factors, and the tensor it holds where no sum names several.

    >>> form = StoredForm.parse("(q: (g r)@t d|k: g@t~ d), e")
    >>> print(form)
    (q: (g r)@t d | k: g@t~ d), e
    >>> StoredForm.parse(str(form)) == form, form.tensors, form.axes
    (True, ('q', 'k'), ('t',))
    """

    tensor: str | None
    dims: tuple[tuple[FormFactor, ...], ...]

    @staticmethod
    def parse(text: str) -> StoredForm:
        """Read an expression; raises `ParseError` pointing at the character."""
        return _parse_form(text)

    def __str__(self) -> str:
        """Return the canonical text, which `parse` reads back to an equal form."""
        head = "" if self.tensor is None else f"{self.tensor} = "
        return (head + ", ".join(product_text(factors) for factors in self.dims)).rstrip()

    def rename(self, names: Mapping[str, str]) -> StoredForm:
        """Return it with other names of tensors.

        >>> print(StoredForm.parse("(q: (g r)@t d | k: g@t~ d), e").rename({"q": "a", "k": "b"}))
        (a: (g r)@t d | b: g@t~ d), e
        """

        def product(factors: tuple[FormFactor, ...]) -> tuple[FormFactor, ...]:
            return tuple(f if isinstance(f.item, str) else replace(f, item=tuple(map(addend, f.item))) for f in factors)

        def addend(a: FormAlternative) -> FormAlternative:
            return replace(a, tensor=a.tensor and names[a.tensor], factors=product(a.factors))

        return StoredForm(self.tensor and names[self.tensor], tuple(map(product, self.dims)))

    @property
    def tensors(self) -> tuple[str, ...]:
        """The logical tensors that are stored, in order of appearance."""
        named = [a.tensor for d in self.dims for a in alternatives(d) if a.tensor is not None]
        return tuple(dict.fromkeys(([] if self.tensor is None else [self.tensor]) + named))

    @property
    def axes(self) -> tuple[str, ...]:
        """The mesh axes that cut it, in order of appearance."""
        return tuple(dict.fromkeys(axis for d in self.dims for axis in axes_of(d)))


def product_text(factors: tuple[FormFactor, ...]) -> str:
    """Return the text of a product; of none it is `1`."""
    return " ".join(map(str, factors)) or "1"


def walk_factors(factors: tuple[FormFactor, ...]) -> Iterator[FormFactor]:
    """Yield every factor of a product, outer before inner."""
    for factor in factors:
        yield factor
        if not isinstance(factor.item, str):
            for alternative in factor.item:
                yield from walk_factors(alternative.factors)


def alternatives(factors: tuple[FormFactor, ...]) -> Iterator[FormAlternative]:
    """Yield every alternative of a product, outer before inner."""
    for factor in walk_factors(factors):
        if not isinstance(factor.item, str):
            yield from factor.item


def cuts_of(factors: tuple[FormFactor, ...]) -> Iterator[FormCut]:
    """Yield every cut of a product."""
    for factor in walk_factors(factors):
        yield from factor.cuts


def axes_of(factors: tuple[FormFactor, ...]) -> tuple[str, ...]:
    """Return the axes that cut a product, in order of appearance."""
    return tuple(dict.fromkeys(axis for cut in cuts_of(factors) for axis in cut.axes))


def parse_product(text: str) -> tuple[FormFactor, ...]:
    """Read one dim, as the table of holes has them; raises `ParseError`."""
    form = _parse_form(text)
    if form.tensor is not None or len(form.dims) != 1:
        raise ParseError("one dim is meant here: a product of atoms without '=' and ','", text, 0)
    return form.dims[0]


@lru_cache(maxsize=4096)  # the same expressions stand in every table of a family
def _parse_form(text: str) -> StoredForm:
    s = Scanner(text)
    tensor = _tensor(s, "=")
    if tensor is not None and s.end():
        return StoredForm(tensor, ())
    dims = [_dim(s)]
    while s.take(","):
        dims.append(_dim(s))
    if not s.end():
        raise s.error("the expression should end here; legal are an atom, '(', '@' and ','")
    return StoredForm(tensor, tuple(dims))


def _name(s: Scanner, what: str) -> str:
    found = s.match(NAME)
    if found is None:
        raise s.error(f"{what} is missing here; legal is a name")
    return found


def _tensor(s: Scanner, sign: str) -> str | None:
    """A tensor and the sign behind it, None where no such sign comes."""
    found = s.match(_NAMED[sign])
    if found is not None:
        s.take(sign)
    return found


def _dim(s: Scanner) -> tuple[FormFactor, ...]:
    """A product of at least one factor."""
    if s.match(_ONE):
        return ()
    factors = _factors(s, 0)
    if not factors:
        raise s.error("a dim is empty; legal are atoms, groups in parentheses, and 1")
    return factors


def _factors(s: Scanner, depth: int) -> tuple[FormFactor, ...]:
    """A product of any number of factors."""
    if depth > _MOST_NESTED:
        raise s.error(f"parentheses are nested more than {_MOST_NESTED} deep")
    found: list[FormFactor] = []
    item: str | tuple[FormAlternative, ...] | None
    while True:
        if s.take("("):
            several = [_alternative(s, depth)]
            while s.take("|"):
                several.append(_alternative(s, depth))
            if not s.take(")"):
                raise s.error("a ')' is missing here; legal are an atom, '|' and ')'")
            item = tuple(several)
        elif (item := s.match(NAME)) is None:
            return tuple(found)
        cuts: list[FormCut] = []
        while s.take("@"):
            cuts.append(_cut(s))
        found.append(FormFactor(item, tuple(cuts)))


def _alternative(s: Scanner, depth: int) -> FormAlternative:
    """One addend of a sum."""
    if s.match(_PADDING):
        size = s.match(NAME) or s.match(INTEGER)
        if size is None:
            raise s.error("the size of the padding is missing here; legal is an atom or a number")
        return FormAlternative(None, (), size)
    if s.match(_DIGIT) is not None:
        raise s.error("a number here begins padding; legal is '0: size'")
    tensor = _tensor(s, ":")
    return FormAlternative(tensor, _factors(s, depth + 1))


def _cut(s: Scanner) -> FormCut:
    """What stands behind an '@'."""
    axes = [_name(s, "an axis")]
    while s.take("*"):
        axes.append(_name(s, "an axis"))
    if s.take("~"):
        return FormCut(tuple(axes), SHARED)
    return FormCut(tuple(axes), _name(s, "a rule") if s.take(".") else EVEN)

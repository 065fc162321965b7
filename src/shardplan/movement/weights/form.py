"""How one parameter is stored, as an expression: products, sums and cuts of named atoms.

    stored    = [tensor "="] dim ("," dim)*          the parameter's dims; the tensor, where no sum names several
    dim       = factor+ | "1"                        a product, major to minor
    factor    = (atom | "(" alternative ("|" alternative)* ")") cut*
    alternative = [tensor ":"] factor* | "0:" size   a sum is a concatenation; `0:` is padding
    cut       = "@" axis ("*" axis)* [rule]
    rule      = ".ceil" | ".first" | ".last" | ".robin" | ".NAME" | "~"      and nothing: even

A cut over `@a*b` is one cut over both axes, `@a@b` are two nested cuts: they differ where the pieces are uneven. What a
rule means is said in `pieces`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

from shardplan.errors import ParseError

EVEN: Final = "even"
SHARED: Final = "shared"
RULES: Final = (EVEN, "ceil", "first", "last", "robin", SHARED)
_TOKEN = re.compile(r"\s*(?:([A-Za-z_][A-Za-z0-9_]*)|([0-9]+)|([@*.~()|:=,\[\]]))")
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
        return head + ", ".join(product_text(factors) for factors in self.dims)

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
    return _FormReader(text).read_stored_form()


class _FormReader:
    """The tokens of a text, and where the next one is."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.tokens: list[tuple[str, str, int]] = []
        self.at = 0
        position = 0
        while text[position:].strip():
            match = _TOKEN.match(text, position)
            if match is None:
                start = position + len(text[position:]) - len(text[position:].lstrip())
                raise ParseError(f"unexpected {text[start]!r} in an expression of storage", text, start)
            kind = ("name", "number", "sign")[(match.lastindex or 1) - 1]
            self.tokens.append((kind, match.group(match.lastindex or 1), match.start(match.lastindex or 1)))
            position = match.end()

    def fail(self, message: str) -> ParseError:
        """The error that points at the next token."""
        place = self.tokens[self.at][2] if self.at < len(self.tokens) else len(self.text)
        return ParseError(message, self.text, place)

    def has_sign_ahead(self, sign: str, further: int = 0) -> bool:
        """Say whether a sign comes next, or `further` tokens later."""
        k = self.at + further
        return k < len(self.tokens) and self.tokens[k][:2] == ("sign", sign)

    def kind(self) -> str:
        """What comes next: name, number, sign, or nothing at the end."""
        return self.tokens[self.at][0] if self.at < len(self.tokens) else ""

    def take(self, sign: str) -> bool:
        """Take a sign if it comes next."""
        found = self.has_sign_ahead(sign)
        self.at += found
        return found

    def name(self, what: str) -> str:
        """Take a name."""
        if self.kind() != "name":
            raise self.fail(f"{what} is missing here; legal is a name")
        self.at += 1
        return self.tokens[self.at - 1][1]

    def read_stored_form(self) -> StoredForm:
        """Take the whole text."""
        tensor = None
        if self.kind() == "name" and self.has_sign_ahead("=", 1):
            tensor = self.name("a tensor")
            self.at += 1
        dims = [self.dim()]
        while self.take(","):
            dims.append(self.dim())
        if self.at < len(self.tokens):
            raise self.fail("the expression should end here; legal are an atom, '(', '@' and ','")
        return StoredForm(tensor, tuple(dims))

    def dim(self) -> tuple[FormFactor, ...]:
        """Take a product of at least one factor."""
        if self.kind() == "number" and self.tokens[self.at][1] == "1":
            self.at += 1
            return ()
        factors = self.factors(0)
        if not factors:
            raise self.fail("a dim is empty; legal are atoms, groups in parentheses, and 1")
        return factors

    def factors(self, depth: int) -> tuple[FormFactor, ...]:
        """Take a product of any number of factors."""
        if depth > _MOST_NESTED:
            raise self.fail(f"parentheses are nested more than {_MOST_NESTED} deep")
        found: list[FormFactor] = []
        while self.kind() == "name" or self.has_sign_ahead("("):
            item: str | tuple[FormAlternative, ...]
            if self.take("("):
                several = [self.alternative(depth)]
                while self.take("|"):
                    several.append(self.alternative(depth))
                if not self.take(")"):
                    raise self.fail("a ')' is missing here; legal are an atom, '|' and ')'")
                item = tuple(several)
            else:
                item = self.name("an atom")
            cuts: list[FormCut] = []
            while self.take("@"):
                cuts.append(self.cut())
            found.append(FormFactor(item, tuple(cuts)))
        return tuple(found)

    def alternative(self, depth: int) -> FormAlternative:
        """Take one addend of a sum."""
        if self.kind() == "number":
            if self.tokens[self.at][1] != "0" or not self.has_sign_ahead(":", 1):
                raise self.fail("a number here begins padding; legal is '0: size'")
            self.at += 2
            if self.kind() not in ("name", "number"):
                raise self.fail("the size of the padding is missing here; legal is an atom or a number")
            self.at += 1
            return FormAlternative(None, (), self.tokens[self.at - 1][1])
        tensor = None
        if self.kind() == "name" and self.has_sign_ahead(":", 1):
            tensor = self.name("a tensor")
            self.at += 1
        return FormAlternative(tensor, self.factors(depth + 1))

    def cut(self) -> FormCut:
        """Take what stands behind an '@'."""
        axes = [self.name("an axis")]
        while self.take("*"):
            axes.append(self.name("an axis"))
        if self.take("~"):
            return FormCut(tuple(axes), SHARED)
        return FormCut(tuple(axes), self.name("a rule") if self.take(".") else EVEN)

"""The scanner shared by every parser of the package: names, numbers and punctuation, with errors that point.

Axis names are identifiers; sub-axes append `.part` (a level or a prime's number): `data.node`, `data.0`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from shardplan.errors import ParseError, excerpt

NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
AXIS = re.compile(r"[A-Za-z_][A-Za-z0-9_]*(?:\.[A-Za-z0-9_]+)*")
INTEGER = re.compile(r"[0-9]+")
MOST_DIGITS = 18  # of a number: the most for which every number fits in 64 bits
_SPACE = re.compile(r"[ \t]*")


class Scanner:
    """A cursor over one text; every `expect` that fails raises a `ParseError` pointing at the character."""

    def __init__(self, text: str) -> None:
        """Start at the beginning of `text`; raises `ParseError` for what is no text."""
        if not isinstance(text, str):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ParseError(f"a text is read here, got {excerpt(text)}")
        self.text = text
        self.position = 0

    def skip(self) -> None:
        """Skip blanks."""
        match = _SPACE.match(self.text, self.position)
        if match:
            self.position = match.end()

    def peek(self, token: str) -> bool:
        """Say whether `token` comes next."""
        self.skip()
        return self.text.startswith(token, self.position)

    def take(self, token: str) -> bool:
        """Consume `token` if it comes next."""
        if self.peek(token):
            self.position += len(token)
            return True
        return False

    def expect(self, token: str, where: str) -> None:
        """Consume `token` or fail, naming what was being read."""
        if not self.take(token):
            raise self.error(f"expected {token!r} in {where}")

    def match(self, pattern: re.Pattern[str]) -> str | None:
        """Consume and return what `pattern` matches next, or None."""
        self.skip()
        found = pattern.match(self.text, self.position)
        if found is None:
            return None
        self.position = found.end()
        return found.group()

    def name(self, what: str) -> str:
        """Consume an axis-like name, or fail saying that `what` was expected."""
        found = self.match(AXIS)
        if found is None:
            raise self.error(f"expected {what}")
        return found

    def integer(self, what: str) -> int:
        """Consume a non-negative integer, or fail saying that `what` was expected."""
        found = self.match(INTEGER)
        if found is None or len(found) > MOST_DIGITS:
            raise self.error(f"expected {what}" if found is None else f"{what} has {len(found)} digits")
        return int(found)

    def items(self, close: str, where: str) -> Iterator[None]:
        """Come to every item of a list in `where`, which the caller consumes; consume the commas, and `close`."""
        while not self.take(close):
            yield
            if not self.take(",") and not self.peek(close):
                raise self.error(f"expected ',' or '{close}' in {where}")

    def integers(self, close: str, what: str, where: str) -> list[int]:
        """Consume integers between commas up to `close`, each `what`, in `where`."""
        return [self.integer(what) for _ in self.items(close, where)]

    def names(self, what: str) -> tuple[str, ...]:
        """Consume one name or a parenthesised list of names, `a` or `(a,b)`."""
        if not self.take("("):
            return (self.name(what),)
        return tuple([self.name(what) for _ in self.items(")", "a list of axes")])

    def end(self) -> bool:
        """Say whether nothing but blanks is left."""
        self.skip()
        return self.position >= len(self.text)

    def finish(self, what: str) -> None:
        """Fail unless the text ends here."""
        if not self.end():
            raise self.error(f"unexpected text after {what}")

    def error(self, message: str) -> ParseError:
        """Return a `ParseError` that points at the present character."""
        return ParseError(message, self.text, self.position)


def axes_text(names: tuple[str, ...]) -> str:
    """Return `a` for one axis, else `(a,b)`."""
    return names[0] if len(names) == 1 else f"({','.join(names)})"

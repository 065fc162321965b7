"""Every error a user can cause, as one small hierarchy.

A message says what was asked, what is wrong, the offending values, and what would be legal. The command line maps
`Infeasible`, a missing package and missing privileges to exit status 3, failures while running to 4, and every other
error to 2.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from difflib import get_close_matches
from importlib import import_module
from types import ModuleType

LONGEST = 80  # characters of a value in a message: what is said about it fits beside it on two lines of a terminal
LONGEST_LINE = 4 * LONGEST  # of a path or of another error's text, which may be the whole message


class ShardplanError(Exception):
    """The base of all errors raised on purpose by shardplan."""


class ParseError(ShardplanError):
    """A text (type, program, unit, file) is malformed; the message points at the character."""

    def __init__(self, message: str, text: str = "", position: int | None = None) -> None:
        """Point at `position` in `text` with a caret when both are given."""
        self.text = text
        self.position = position
        if position is not None:
            line_start = text.rfind("\n", 0, position) + 1
            line_end = text.find("\n", position)
            line = text[line_start : len(text) if line_end < 0 else line_end]
            line = "".join(c if c.isprintable() else " " for c in line)
            message = f"{message}\n  {line}\n  {' ' * (position - line_start)}^"
        super().__init__(message)


class LayoutError(ShardplanError):
    """A mesh, layout or tensor type breaks an invariant."""


class TypingError(ShardplanError):
    """An op is not defined for the types of its operands."""


class TopologyError(ShardplanError):
    """A topology or placement breaks an invariant."""


class Infeasible(ShardplanError):
    """No answer exists within the limits that were asked for.

    Where the limit was a number of bytes, `least_bytes` is the smallest memory limit that works with at most 64 chunks
    a step, and `absolute_least_bytes` the smallest that works at all.
    """

    def __init__(self, message: str, least_bytes: int | None = None, absolute_least_bytes: int | None = None) -> None:
        """Carry the smallest limits that work, when there are any."""
        self.least_bytes = least_bytes
        self.absolute_least_bytes = absolute_least_bytes
        super().__init__(message)


class CertificateError(ShardplanError):
    """A claim of a certificate does not follow from its program."""


class ScheduleError(ShardplanError):
    """A pipeline or tile schedule is incomplete, deadlocks or exceeds its memory bound."""


class TimedOut(ShardplanError):
    """A bounded wait ended before its event arrived."""


class BackendError(ShardplanError):
    """A backend cannot run an op, or failed while running one."""


class MissingExtra(BackendError, ImportError):
    """An optional package is not installed; the message says how to install it."""


class ReplicationWarning(UserWarning):
    """Devices of an axis do the same work; the message says how much, and which line of the tables deals it out."""


def excerpt(value: object) -> str:
    """Return a value as a message shows it: on one line, and cut where it is long.

    >>> excerpt("a" * 100)[-4:], excerpt([1.5, "x"])
    ('a...', "[1.5, 'x']")
    """
    try:
        text = " ".join(repr(value).split())
    except Exception:  # a value's own repr may fail, as that of an integer of 5,000 digits does
        text = f"<{type(value).__name__}>"
    return text if len(text) <= LONGEST else text[: LONGEST - 3] + "..."


def line(text: object) -> str:
    """Return a path or another error's text on one line, cut where it is long."""
    found = " ".join(str(text).split())
    return found if len(found) <= LONGEST_LINE else found[: LONGEST_LINE - 3] + "..."


def near_text(name: object, known: Iterable[str], most: int = 1) -> str:
    """Return a guess at what was meant, as the part of a message; nothing where no known name is near.

    >>> near_text("tesnor", ["data", "tensor"]), near_text("x", ["data"])
    ("; did you mean 'tensor'", '')
    """
    found = get_close_matches(str(name), list(known), most, 0.6 if most == 1 else 0.5)
    return f"; did you mean {' or '.join(map(repr, found))}" if found else ""


def optional(module: str, extra: str) -> ModuleType:
    """Return a module that needs an optional package, which this extra of shardplan installs.

    Raises `MissingExtra` where the package is not installed.

    >>> optional("json", "none").__name__
    'json'
    """
    found = sys.modules.get(module)
    if found is not None and not getattr(getattr(found, "__spec__", None), "_initializing", False):
        return found  # unless another thread is importing it
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        raise missing(error, extra) from None


def missing(error: ModuleNotFoundError, extra: str) -> MissingExtra:
    """Return the error to raise where an import failed for want of the package that an extra installs."""
    package = (error.name or extra).partition(".")[0]
    return MissingExtra(f"{package} is not installed: pip install 'shardplan[{extra}]'", name=error.name)

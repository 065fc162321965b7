"""Colour on a terminal: the answer's first line and the heads of rows, what is right, what is near, what went wrong.

Texts are made without it, in `report`; here alone a line gets it, as it is written. None under `--json`, in a pipe or a
file, with `NO_COLOR`, on a dumb terminal; with `FORCE_COLOR` everywhere but under `--json` (https://no-color.org).
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from typing import Any, TextIO

BOLD, RED, GREEN, YELLOW, CYAN = (f"\x1b[{code}m" for code in ("1", "1;31", "32", "33", "36"))
END = "\x1b[0m"
# The first that is found at the beginning of a line: what of it is coloured, and how.
_RULES = (
    (re.compile(r"shardplan: warning:"), YELLOW),
    (re.compile(r"shardplan:"), RED),
    (re.compile(r"(does not fit|differs)\b.*"), RED),
    (re.compile(r"(ok|fits)\b"), GREEN),
    (re.compile(r"(Usage|Arguments|Options|Example|Exit status|Commands|[A-Z][a-z ]+ commands):"), BOLD),
    (re.compile(r"[a-z]+(?: [a-z]+)?(?=  +\S)"), CYAN),
)


def wants_colour(stream: TextIO, environ: Mapping[str, str] = os.environ) -> bool:
    """Say whether what is written to a stream gets colour, by what it is and by the environment."""
    if environ.get("NO_COLOR"):
        return False
    return bool(environ.get("FORCE_COLOR")) or (stream.isatty() and environ.get("TERM", "dumb") != "dumb")


def colour_line(line: str, first: bool = False) -> str:
    r"""Return a line with colour; `first` is the answer's.

    >>> colour_line("memory    63 GB of 80 GB")
    '\x1b[36mmemory\x1b[0m    63 GB of 80 GB'
    """
    for pattern, code in _RULES:
        if found := pattern.match(line):
            return f"{code}{found[0]}{END}{line[found.end() :]}"
    return f"{BOLD}{line}{END}" if first and line else line


class CommandStream:
    """A text stream of a command: `before` is called with its first word, and lines get colour where it is wanted.

    What has colour already, such as a progress bar, is left as it is.
    """

    def __init__(self, stream: TextIO, before: Callable[[], None], *, colour: bool, answers: bool) -> None:
        """Wrap a stream; of one that `answers` the first line is told apart."""
        self._stream, self._before, self._colour = stream, before, colour
        self._first, self._begun = answers, True

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        """Write a text, whose lines begin where the last one ended."""
        self._before()
        if not self._colour or "\x1b" in text or not text:
            return self._stream.write(text)
        lines = text.split("\n")
        for k, line in enumerate(lines):
            if line and (k or self._begun):
                lines[k] = colour_line(line, self._first)
                self._first = False
        self._begun = not lines[-1]
        self._stream.write("\n".join(lines))
        return len(text)

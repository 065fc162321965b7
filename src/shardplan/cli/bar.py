"""What tells on standard error that a command is at work, where that is a terminal: a bar, or a line with the time.

A command that knows how much there is to do has a bar. Every other one that has said nothing for two seconds gets the
line, which is gone with its first word, or when a bar begins. What is written on a terminal has colour.
"""

from __future__ import annotations

import os
import re
import sys
import threading
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from typing import Any, TextIO

SILENT = 2.0  # seconds after which a command says that it is at work
_RANKS = ("RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID")  # of the processes of a launch the first tells


class WaitingLine:
    """A line with the seconds that a command has taken, from `SILENT` seconds until it is ended."""

    def __init__(self, stream: TextIO, what: str, after: float = SILENT) -> None:
        """Begin to wait; the line is written to `stream`."""
        self._stream, self._what, self._after = stream, what, after
        self._bar: Any = None
        self._over = False
        self._lock = threading.Lock()
        self._timer = threading.Timer(after, self._show)
        self._timer.daemon = True
        self._timer.start()

    def _show(self) -> None:
        from rich.console import Console
        from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

        columns = (SpinnerColumn(), TextColumn("{task.description}", markup=False), TimeElapsedColumn())
        # What others write stays where they write it: their first word ends the line.
        bar: Any = Progress(
            *columns, console=Console(file=self._stream), transient=True, redirect_stdout=False, redirect_stderr=False
        )
        bar.add_task(self._what, total=None)
        bar.tasks[0].start_time -= self._after
        with self._lock:
            if not self._over:
                self._bar = bar
                bar.start()

    def end(self) -> None:
        """End it: the line is gone, if it was there; again, and nothing is done."""
        if self._over:
            return
        with self._lock:
            self._over = True
            self._timer.cancel()
            if self._bar is not None:
                self._bar.stop()


_begun: list[WaitingLine] = []


def begin_waiting(stream: TextIO, what: str, environ: Mapping[str, str] = os.environ) -> Callable[[], None]:
    """Begin to wait for a command's first word, and return what ends it; without a terminal nothing is ever written."""
    if not stream.isatty() or any(environ.get(name, "0") != "0" for name in _RANKS):
        return lambda: None
    _begun.append(WaitingLine(stream, what))
    return _begun[-1].end


@contextmanager
def progress_bar() -> Generator[Callable[[float, float, str], None] | None]:
    """Yield what is called with the work done, the work to do, and what is being done; None without a terminal.

    It is called as often as work is done; the bar is gone when the context ends.
    """
    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

    for one in _begun:
        one.end()
    columns = (BarColumn(), TaskProgressColumn(), TimeRemainingColumn(), TextColumn("{task.description}", markup=False))
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("starting", total=None)

        def tell(done: float, total: float, what: str) -> None:
            bar.update(task, completed=done, total=total, description=what)

        yield tell


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

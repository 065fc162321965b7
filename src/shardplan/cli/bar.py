"""A progress bar with the time left, on standard error, where that is a terminal."""

from __future__ import annotations

import sys
from collections.abc import Callable, Generator
from contextlib import contextmanager


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

    columns = (BarColumn(), TaskProgressColumn(), TimeRemainingColumn(), TextColumn("{task.description}", markup=False))
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("starting", total=None)

        def tell(done: float, total: float, what: str) -> None:
            bar.update(task, completed=done, total=total, description=what)

        yield tell

"""`WrittenFiles`: what a framework gets of a plan, and what of it the framework cannot say."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from shardplan.strategy.strategy import Strategy


@dataclass(frozen=True, slots=True)
class WrittenFiles:
    """Texts by file name; what cannot be said, a line each; and the strategy that runs there, whose price counts."""

    framework: str
    files: Mapping[str, str]
    lines: tuple[str, ...]
    runs: Strategy


def comment_lines(lines: tuple[str, ...]) -> str:
    """Return lines as the comments that begin a file; nothing where there are none."""
    return "".join(f"# cannot be said: {line}\n" for line in lines)

"""How the commands print what they found: one JSON object, or a text folded to 80 columns."""

from __future__ import annotations

from collections.abc import Callable, Mapping


def print_answer(as_json: bool, make_object: Callable[[], Mapping[str, object]], make_text: Callable[[], str]) -> None:
    """Print one JSON object, or a text folded to lines of 80 characters; only the one that is asked for is made."""
    if as_json:
        print_object(make_object())
    else:
        print_text(make_text())


def print_object(found: Mapping[str, object]) -> None:
    """Print one JSON object on one line."""
    from shardplan.report.text import json_text

    print(json_text(found))


def print_text(text: str) -> None:
    """Print a text, folded to lines of 80 characters."""
    from shardplan.report.fold import fold_lines

    print(fold_lines(text))

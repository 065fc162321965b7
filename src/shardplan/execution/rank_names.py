"""How ranks and programs are named in messages."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

SHOWN = 16  # ranks that a message lists: one line of a terminal
NAME_DIGITS = 8  # hexadecimal digits of a digest that call a program: those of one job are then told apart


def format_ranks(ranks: Sequence[int]) -> str:
    """Return a list of ranks, cut short where it is long.

    >>> format_ranks((0, 2))
    '[0, 2]'
    """
    shown = ", ".join(map(str, ranks[:SHOWN]))
    return f"[{shown}{', ...' if len(ranks) > SHOWN else ''}]"


def name_ranks(ranks: Iterable[int]) -> str:
    """Return one rank or several by name.

    >>> name_ranks([3]), name_ranks([3, 1])
    ('rank 3', 'ranks [1, 3]')
    """
    found = sorted(ranks)
    return f"rank {found[0]}" if len(found) == 1 else f"ranks {format_ranks(found)}"

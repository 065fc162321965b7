"""What a notebook shows of a value: `_repr_html_` of its class is `notebook_html`.

Pictures and tables are drawn by a room above those of the values. The package, which alone knows all rooms, says who
draws; a value knows only that it is drawn.
"""

from __future__ import annotations

from collections.abc import Callable

Drawer = Callable[[object], str | None]
_drawers: list[Drawer] = []


def draw_with(drawer: Drawer) -> None:
    """Say who draws what a notebook shows, in the place of who did."""
    _drawers[:] = [drawer]


def notebook_html(value: object) -> str | None:
    """Return a value as HTML without a script, for a notebook; None, and a notebook shows the text, where none is."""
    return _drawers[0](value) if _drawers else None

"""The picture in `docs/architecture.md` is what `docs/draw_rooms.py` draws of the code."""

from runpy import run_path
from typing import Any

import pytest
from tests.docs.test_first_page import DOCS

DRAW: dict[str, Any] = run_path(str(DOCS / "draw_rooms.py"))


def test_the_picture_is_current() -> None:
    found = DRAW["DRAWN"].search((DOCS / "architecture.md").read_text())
    assert found is not None
    assert found[0] == DRAW["drawing"](), "run python docs/draw_rooms.py"


def test_every_room_is_drawn() -> None:
    package = DRAW["PACKAGE"]
    rooms = {path.parent.name for path in package.glob("*/__init__.py")} | {"errors", "notebook"}
    assert set(DRAW["room_sentences"]()) == rooms


def test_imports_inside_functions_are_seen() -> None:
    assert "execution" in DRAW["room_imports"]()["report"]


@pytest.mark.parametrize(
    ("imports", "arrows"),
    [
        ({"a": {"b", "c"}, "b": {"c"}, "c": set()}, {"a": {"b"}, "b": {"c"}, "c": set()}),
        ({"a": {"b", "c"}, "b": set(), "c": set()}, {"a": {"b", "c"}, "b": set(), "c": set()}),
    ],
)
def test_an_arrow_that_others_make_is_left_out(imports: dict[str, set[str]], arrows: dict[str, set[str]]) -> None:
    assert DRAW["without_shortcuts"](imports) == arrows

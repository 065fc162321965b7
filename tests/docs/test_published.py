"""The pictures of the papers' pages are what `docs/draw_published.py` draws of the result files."""

from runpy import run_path
from typing import Any
from xml.etree import ElementTree

import pytest
from tests.docs.test_first_page import DOCS

DRAW: dict[str, Any] = run_path(str(DOCS / "draw_published.py"))
FIGURES = DRAW["list_figures"]()


@pytest.mark.parametrize("paper", sorted(p.stem.removeprefix("paper-") for p in DOCS.glob("paper-*.md")))
def test_the_picture_is_current(paper: str) -> None:
    path = DRAW["PICTURES"] / f"published-{paper}.svg"
    assert path.read_text() == DRAW["draw_figures"](*FIGURES[paper]), "run python docs/draw_published.py"
    assert f"(pictures/{path.name})" in (DOCS / f"paper-{paper}.md").read_text()


def test_the_longer_bar_is_the_greater_figure() -> None:
    title, theirs, figures = FIGURES["2112.01075"]
    root = ElementTree.fromstring(DRAW["draw_figures"](title, theirs, figures))
    bars = [float(r.get("width", 0)) for r in root.iter("{http://www.w3.org/2000/svg}rect") if r.get("height") == "14"]
    for k, one in enumerate(figures):
        assert bars[2 * k] / bars[2 * k + 1] == pytest.approx(one.theirs / one.ours, rel=1e-4)
        assert max(bars[2 * k : 2 * k + 2]) == DRAW["BARS"]

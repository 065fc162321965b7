"""`PagePart` and `render_page`: a report is a list of parts, each text, a table, markup or a figure.

plotly draws figures, and its script stands in the page, once, where a part has one; jinja2 fills the page. Colours of
text and lines are the page's, which follow the reader's light or dark.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from shardplan.errors import optional

EXTRA = "report"  # what installs plotly and jinja2
Figure = Mapping[str, Any]  # `data` and `layout`, as plotly takes them


@dataclass(frozen=True, slots=True)
class PagePart:
    """A part of a report: a title, a line on how to read it, and what is in it.

    Args:
        title: What it answers.
        note: How to read it.
        text: As a terminal prints it.
        rows: A table, headings first; cells are text.
        markup: HTML that was made here, such as a picture.
        figure: What plotly draws.
        cards: Numbers with what they are.
    """

    title: str
    note: str = ""
    text: str = ""
    rows: Sequence[Sequence[str]] = ()
    markup: str = ""
    figure: Figure | None = None
    cards: Sequence[tuple[str, str]] = ()


def render_page(title: str, parts: Sequence[PagePart], subtitle: str = "") -> str:
    """Return a report as one file; raises `MissingExtra` where plotly or jinja2 is not installed.

    >>> page = render_page("a plan", [PagePart("answer", text="1 < 2")])
    >>> "1 &lt; 2" in page, "<script" in page
    (True, False)
    """
    template = page_template("page.html.jinja")
    script = ""
    if any(part.figure is not None for part in parts):
        script = optional("plotly.offline", EXTRA).get_plotlyjs()
    return template.render(title=title, subtitle=subtitle, parts=parts, plotly=script, spec=figure_text)


@cache
def page_template(name: str) -> Any:
    """Return a template of this folder; raises `MissingExtra` where jinja2 is not installed."""
    jinja2 = optional("jinja2", EXTRA)
    loader = jinja2.FileSystemLoader(Path(__file__).parent)
    return jinja2.Environment(loader=loader, autoescape=True, trim_blocks=True, lstrip_blocks=True).get_template(name)


def figure_text(figure: Figure) -> str:
    """Return a figure as JSON that may stand in a script."""
    return json.dumps(figure, separators=(",", ":")).replace("</", "<\\/").replace("<!--", "<\\!--")

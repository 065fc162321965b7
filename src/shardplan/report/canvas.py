"""What the SVG pictures share: fonts and colours, elements of text and rectangles, and the document around them."""

from __future__ import annotations

import colorsys
from xml.sax.saxutils import escape, quoteattr

MONO = "ui-monospace,Menlo,Consolas,'DejaVu Sans Mono',monospace"
SANS = "system-ui,'Segoe UI',Helvetica,Arial,'DejaVu Sans',sans-serif"
MARGIN = 24
INK, FAINT, LINE, PAPER = "#1f2933", "#616e7c", "#c3ccd5", "#ffffff"


def pastels(count: int) -> list[str]:
    """Return light colours, none twice, neighbours far apart in hue: hues by the golden ratio, in four lightnesses.

    >>> pastels(2)
    ['#ecb1b1', '#a3b5e0']
    """
    found: dict[str, None] = {}
    number = 0
    while len(found) < count:  # rounded, a colour may come again: it is one
        hue, light = number * 0.6180339887498949 % 1.0, (0.81, 0.76, 0.86, 0.71)[number % 4]
        rgb = colorsys.hls_to_rgb(hue, light, 0.6 - 0.1 * (number % 3))
        found["#" + "".join(f"{round(255 * x):02x}" for x in rgb)] = None
        number += 1
    return list(found)


class Canvas:
    """A growing list of elements."""

    def __init__(self) -> None:
        """Start empty."""
        self.parts: list[str] = []

    def text(
        self,
        x: float,
        y: float,
        text: str,
        size: float = 12,
        fill: str = INK,
        weight: int = 400,
        font: str = "",
        anchor: str = "start",
    ) -> None:
        """Write a line of text; spaces count."""
        family = f" font-family={quoteattr(font)}" if font else ""
        bold = f' font-weight="{weight}"' if weight != 400 else ""
        side = f' text-anchor="{anchor}"' if anchor != "start" else ""
        self.parts.append(
            f'<text x="{x:g}" y="{y:g}" font-size="{size:g}" fill="{fill}"{family}{bold}{side} '
            f'xml:space="preserve">{escape(text)}</text>'
        )

    def rect(self, x: float, y: float, w: float, h: float, fill: str, stroke: str = "", extra: str = "") -> None:
        """Draw a rectangle; `extra` are further attributes."""
        line = f' stroke="{stroke}"' if stroke else ""
        self.parts.append(f'<rect x="{x:g}" y="{y:g}" width="{w:g}" height="{h:g}" fill="{fill}"{line}{extra}/>')

    def document(self, width: float, height: float, title: str, definitions: str = "") -> str:
        """Return the standalone file, white behind; `definitions` are patterns that elements refer to."""
        return "\n".join(
            [
                f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:g}" height="{height:g}" '
                f'viewBox="0 0 {width:g} {height:g}" role="img" font-family={quoteattr(SANS)}>',
                f"<title>{escape(title)}</title>",
                *([definitions] if definitions else []),
                f'<rect width="100%" height="100%" fill="{PAPER}"/>',
                *self.parts,
                "</svg>",
                "",
            ]
        )


class Page:
    """A canvas that is filled from above: `y` is how far down it is used so far."""

    def __init__(self) -> None:
        """Start with a margin."""
        self.canvas = Canvas()
        self.y = float(MARGIN)

    def write_line(
        self,
        text: str,
        step: float,
        size: float = 12,
        fill: str = INK,
        weight: int = 400,
        font: str = "",
        drop: float = 0,
    ) -> None:
        """Write a line at the left margin, `drop` below `y`, and go down by `step`."""
        self.canvas.text(MARGIN, self.y + drop, text, size, fill, weight, font)
        self.y += step

"""What the SVG pictures share: fonts and colours, elements of text and rectangles, and the document around them."""

from __future__ import annotations

from xml.sax.saxutils import escape, quoteattr

MONO = "ui-monospace,Menlo,Consolas,'DejaVu Sans Mono',monospace"
SANS = "system-ui,'Segoe UI',Helvetica,Arial,'DejaVu Sans',sans-serif"
INK, FAINT, LINE, PAPER = "#1f2933", "#616e7c", "#c3ccd5", "#ffffff"


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

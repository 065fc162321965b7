"""The picture as a standalone SVG file: a row for every step, a small copy of the global array for every device.

Of an array of more than two dims the two largest are drawn; the ranges along the others stand below each drawing, and
elements are numbered only where one plane is held.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Callable, Sequence
from typing import NamedTuple

from shardplan.core.box_table import strides
from shardplan.core.program import Program
from shardplan.core.tensor import Box, TensorType
from shardplan.report.canvas import FAINT, INK, LINE, MARGIN, MONO, PAPER, Page
from shardplan.report.contents import LEGEND, Frame, HeldBox, cuts, frames, shape_text

PANEL = 112  # the longer side of a drawn array
GAP = 20  # between panels
ACROSS = 8  # panels of a line
MOST_DEVICES = 32
MOST_FRAMES = 40
LEAST_GAP = 4.0  # between grid lines; where they would be closer they hide the fill: none, and a line says so
THIN = 4.0  # a box of a shorter side has no outline, which would hide its fill, and a strong colour
_EMPTY, _STRONG = "#f3f5f7", "#3f7fb5"
_COLOURS = {
    "held": ("#a9cdea", ""),
    "kept": ("#a9cdea", ""),
    "received": ("#fbd38d", "#dd8a16"),
    "reduced": ("#b5e3c0", "#2f9e5b"),
    "filled": ("#e4e0f5", "#8e7cc3"),
    "computed": ("#f6c4cf", "#c9516b"),
}


def svg_picture(subject: Program | TensorType, title: str = "", note: str = "") -> str:
    """Return a picture of what each device holds, as an SVG document with no references to anything outside it.

    A program is drawn before and after every step. Title and note stand above; without a title, a text that says what
    is drawn.

    >>> from shardplan.core.mesh import Mesh
    >>> svg_picture(TensorType.parse("f32[4@x]", Mesh(x=2)))[:11]
    '<svg xmlns='
    """
    drawn = frames(subject, MOST_DEVICES)
    meshes = (subject.mesh,) if isinstance(subject, TensorType) else subject.meshes
    left_out = len({d for m in meshes for d in m.devices}) - len(drawn[0].held) if drawn else 0
    hidden = len(drawn) - MOST_FRAMES
    page = _ContentsPage(drawn[:MOST_FRAMES], cuts(drawn))
    texts = [note] if note else []
    texts.append("mesh " + "; ".join(map(str, meshes)))
    if left_out > 0:
        texts.append(f"{left_out} more devices are not drawn")
    if hidden > 0:
        texts.append(f"{hidden} more pictures are not drawn")
    if any(f.type.ndim > 2 for f in drawn):
        texts.append(
            "Of more than two dims the two largest are drawn; the ranges along the others stand below each drawing, "
            "and what was kept shows only where it spans them."
        )
    return page.document(title or "What each device holds", texts)


class _ContentsPage(Page):
    """What devices hold, frame by frame."""

    def __init__(self, drawn: Sequence[Frame], lines: dict[tuple[int, ...], tuple[tuple[int, ...], ...]]) -> None:
        super().__init__()
        self.drawn = drawn
        self.lines = lines
        count = max((len(f.held) for f in drawn), default=1)
        mesh = drawn[0].type.mesh if drawn else None
        minor = mesh.sizes[-1] if mesh and mesh.sizes else 1
        self.across = min(count, ACROSS if minor > ACROSS else ACROSS // minor * minor)
        self.width = max(2 * MARGIN + self.across * (PANEL + GAP) - GAP, 640)

    def document(self, title: str, notes: Sequence[str]) -> str:
        self.y += 10
        for line in textwrap.wrap(title, max(20, int((self.width - 2 * MARGIN) / 9.2))):
            self.write_line(line, 22, size=17, weight=600)
        for note in notes:
            for line in textwrap.wrap(note, max(20, int((self.width - 2 * MARGIN) / 6.6))):
                self.write_line(line, 17, size=12, fill=FAINT)
        self.legend()
        for number, frame in enumerate(self.drawn):
            before = self.drawn[number - 1] if number else None
            self.frame(frame, before is None or before.title != frame.title)
        height = self.y + MARGIN - 12
        return self.canvas.document(
            self.width,
            height,
            title,
            "<defs>" + "".join(_hatch(how) for how in _COLOURS if _COLOURS[how][1]) + "</defs>",
        )

    def fill(self, x: float, y: float, w: float, h: float, how: str) -> None:
        if min(w, h) < THIN:
            self.canvas.rect(x, y, max(w, 1.0), max(h, 1.0), _COLOURS[how][1] or _STRONG)
            return
        self.canvas.rect(x, y, w, h, _COLOURS[how][0])
        if _COLOURS[how][1]:
            self.canvas.rect(x, y, w, h, f"url(#{how})")

    def legend(self) -> None:
        used: dict[str, str] = {}
        for frame in self.drawn:
            for held in frame.held:
                if held.box is None:
                    continue
                if held.kept is not None:
                    key = "held" if frame.how == "held" else "kept"
                    used[key] = LEGEND[key]
                if held.kept != held.box:
                    used[frame.how] = LEGEND[frame.how]
        if "held" in used and "kept" in used:
            used.pop("held")
            used["kept"] = "held before, or kept"
        marks = {
            "+": "an addend of a partial value" if any(f.type.layout.partial for f in self.drawn) else "",
            "\u2217": "the root's value" if any(f.type.layout.root for f in self.drawn) else "",
        }
        x = float(MARGIN)
        self.y += 4
        for key in (k for k in LEGEND if k in used):
            x = self.entry(x, used[key], lambda left, how=key: self.swatch(left, how))
        for mark, text in marks.items():
            if text:
                x = self.entry(
                    x,
                    text,
                    lambda left, m=mark: self.canvas.text(
                        left + 7, self.y + 5, m, size=15, weight=700, anchor="middle"
                    ),
                )
        self.y += 22

    def swatch(self, x: float, how: str) -> None:
        self.fill(x, self.y - 6, 14, 12, how)
        self.canvas.rect(x, self.y - 6, 14, 12, "none", LINE)

    def entry(self, x: float, text: str, draw: Callable[[float], None]) -> float:
        wide = 20 + 6.5 * len(text) + 16
        if x > MARGIN and x + wide > self.width - MARGIN:
            x = float(MARGIN)
            self.y += 19
        draw(x)
        self.canvas.text(x + 20, self.y + 4, text, size=12)
        return x + wide

    def frame(self, frame: Frame, first: bool) -> None:
        columns = max(20, int((self.width - 2 * MARGIN) / 7.0))
        if first:
            self.canvas.parts.append(
                f'<line x1="{MARGIN}" y1="{self.y:g}" x2="{self.width - MARGIN:g}" y2="{self.y:g}" stroke="{LINE}"/>'
            )
            self.y += 20
            self.canvas.text(MARGIN, self.y, frame.title, size=14, weight=600)
            if frame.note:
                self.canvas.text(self.width - MARGIN, self.y, frame.note, size=12, fill=FAINT, anchor="end")
            self.y += 18
            for line in _wrapped(frame.op, columns):
                self.write_line(line, 16, size=11.5, font=MONO)
        else:
            self.y += 12
        value = f"%{frame.value}: {frame.type}" if frame.value else str(frame.type)
        for line in _wrapped(value, columns):
            self.write_line(line, 16, size=11.5, font=MONO, fill=INK)
        dims, wide, high = _shown(frame.type)
        for d, length in zip(reversed(dims), (wide, high), strict=False):
            positions = self.lines[frame.type.shape][d]
            if _crowded(positions, frame.type.shape[d], length):
                text = f"dim {d} is cut into {len(positions) - 1} parts, whose lines are not drawn"
                self.write_line(text, 16, size=11.5, fill=FAINT)
        below = 24 if frame.type.ndim == len(dims) else 36
        mark = "+" if frame.type.layout.partial else "\u2217" if frame.type.layout.root else ""
        for start in range(0, len(frame.held), self.across):
            self.y += 12
            row = frame.held[start : start + self.across]
            several = any(h.coordinates for h in row) and len(frame.type.mesh.axes) > 0
            for k, held in enumerate(row):
                x = MARGIN + k * (PANEL + GAP)
                self.canvas.text(x, self.y, f"device {held.device}", size=11.5, weight=600)
                if mark and held.box is not None:
                    self.canvas.text(x + max(wide, 76), self.y, mark, size=15, weight=700, anchor="end")
                if held.coordinates:
                    self.canvas.text(x, self.y + 13, _coordinates(frame, held), size=10, fill=FAINT)
                self.panel(frame, held, x, self.y + (19 if several else 6), dims, wide, high)
            self.y += (19 if several else 6) + high + below
        if frame.more:
            self.y += 8
            self.write_line(f"... and {frame.more} more tensors", 20, size=12, fill=FAINT)

    def panel(
        self, frame: Frame, held: HeldBox, x: float, y: float, dims: tuple[int, ...], wide: float, high: float
    ) -> None:
        empty = ' stroke-dasharray="3 3"' if held.box is None else ""
        self.canvas.rect(x, y, wide, high, _EMPTY if held.box is not None else PAPER, LINE, empty)
        shape = tuple(frame.type.shape[d] for d in dims)
        area = _Area(x, y, wide, high, shape)
        if held.box is not None:
            self.fill(*area.of(tuple(held.box[d] for d in dims)), frame.how)
            if frame.how != "held" and held.kept is not None and _spans(held.kept, held.box, dims):
                self.fill(*area.of(tuple(held.kept[d] for d in dims)), "kept")
        self.grid(area, tuple(self.lines[frame.type.shape][d] for d in dims))
        if held.box is None:
            self.canvas.text(x, y + high + 12, "nothing", size=10, fill=FAINT)
            return
        box = tuple(held.box[d] for d in dims)
        at = area.of(box)
        if min(at.width, at.height) >= THIN:
            self.canvas.rect(*at, "none", INK, ' stroke-width="1.3"')
        self.numbers(area, box, frame.type.shape, held.box, dims)
        self.canvas.text(x, y + high + 12, shape_text([b - a for a, b in held.box]), size=10, fill=FAINT)
        others = [f"{a}:{b}" if d not in dims else ":" for d, (a, b) in enumerate(held.box)]
        if len(others) > len(dims):
            self.canvas.text(x, y + high + 24, f"at [{', '.join(others)}]", size=10, fill=FAINT)

    def grid(self, area: _Area, lines: tuple[tuple[int, ...], ...]) -> None:
        for dim, positions in enumerate(lines):
            n = area.shape[dim]
            length = area.wide if dim == len(lines) - 1 else area.high
            if _crowded(positions, n, length):
                continue
            for p in range(1, n) if n <= 16 else [p for p in positions if 0 < p < n]:
                at = area.line(dim, p)
                self.canvas.parts.append(
                    f'<line x1="{at.x1:g}" y1="{at.y1:g}" x2="{at.x2:g}" y2="{at.y2:g}" stroke="#8795a1" '
                    'stroke-width="0.4"/>'
                )

    def numbers(self, area: _Area, box: Box, whole: tuple[int, ...], held: Box, dims: tuple[int, ...]) -> None:
        """Number the elements that are held, where the cells have room for it and stand for one element each."""
        hidden = [d for d in range(len(whole)) if d not in dims]
        if any(held[d][1] - held[d][0] > 1 for d in hidden):
            return
        steps = strides(whole)
        first = sum(held[d][0] * steps[d] for d in hidden)
        down, along = ([0, 0] + [steps[d] for d in dims])[-2:]
        shape = (1,) * (2 - len(area.shape)) + area.shape
        most = len(str(math.prod(whole) - 1))
        cell_w, cell_h = area.wide / shape[1], area.high / shape[0]
        size = min(10.0, cell_h * 0.72, cell_w / (0.62 * most + 0.3))
        if math.prod(shape) > 128 or size < 6:
            return
        rows, columns = (((0, 1),) * (2 - len(box)) + box)[:2]
        for r in range(*rows):
            for c in range(*columns):
                x, y = area.x + (c + 0.5) * cell_w, area.y + (r + 0.5) * cell_h + size * 0.36
                self.canvas.text(x, y, str(first + r * down + c * along), size=round(size, 1), anchor="middle")


class _Rectangle(NamedTuple):
    x: float
    y: float
    width: float
    height: float


class _Segment(NamedTuple):
    x1: float
    y1: float
    x2: float
    y2: float


class _Area:
    """Where an array of `shape` (at most two dims) is drawn."""

    def __init__(self, x: float, y: float, wide: float, high: float, shape: tuple[int, ...]) -> None:
        self.x, self.y, self.wide, self.high, self.shape = x, y, wide, high, shape

    def of(self, box: Box) -> _Rectangle:
        """Return where a box lies."""
        x, y, w, h = self.x, self.y, self.wide, self.high
        if box:
            x, w = self._side(self.x, self.wide, box[-1], self.shape[-1])
        if len(box) > 1:
            y, h = self._side(self.y, self.high, box[0], self.shape[0])
        return _Rectangle(x, y, w, h)

    @staticmethod
    def _side(start: float, length: float, part: tuple[int, int], n: int) -> tuple[float, float]:
        return round(start + length * part[0] / n, 2), round(length * (part[1] - part[0]) / n, 2)

    def line(self, dim: int, position: int) -> _Segment:
        """Return the grid line at `position` of `dim`."""
        if dim == len(self.shape) - 1:
            x = round(self.x + self.wide * position / self.shape[dim], 2)
            return _Segment(x, self.y, x, self.y + self.high)
        y = round(self.y + self.high * position / self.shape[dim], 2)
        return _Segment(self.x, y, self.x + self.wide, y)


def _shown(t: TensorType) -> tuple[tuple[int, ...], float, float]:
    """The dims that are drawn, and the width and height of the drawing."""
    largest = sorted(range(t.ndim), key=lambda d: (-t.shape[d], d))[:2]
    dims = tuple(sorted(largest))
    if not dims:
        return dims, 24.0, 24.0
    if len(dims) == 1:
        return dims, float(PANEL), 22.0
    ratio = min(3.0, max(1 / 3, t.shape[dims[1]] / t.shape[dims[0]]))
    return dims, PANEL * min(1.0, ratio), PANEL * min(1.0, 1 / ratio)


def _crowded(positions: Sequence[int], n: int, length: float) -> bool:
    """Whether the lines between the parts of a dim would lie too close to be told apart."""
    return n > 16 and length < LEAST_GAP * (len(positions) - 1)


def _spans(kept: Box, box: Box, dims: tuple[int, ...]) -> bool:
    return all(kept[d] == box[d] for d in range(len(box)) if d not in dims)


def _coordinates(frame: Frame, held: HeldBox) -> str:
    """The coordinates of a device with the names of the axes, or without them where they would not fit."""
    mesh = frame.type.mesh
    named = ", ".join(f"{a}={c}" for a, c in zip(mesh.axes, held.coordinates, strict=True))
    return named if len(named) * 5.6 <= PANEL + GAP - 4 else f"({', '.join(map(str, held.coordinates))})"


def _wrapped(text: str, columns: int) -> list[str]:
    """A text in at most 4 lines, the last of which says that it goes on."""
    lines = textwrap.wrap(text, columns, subsequent_indent="    ", break_long_words=True)
    return lines if len(lines) <= 4 else [*lines[:3], lines[3][: columns - 1] + "\u2026"]


def _hatch(how: str) -> str:
    return (
        f'<pattern id="{how}" width="6" height="6" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">'
        f'<line x1="0" y1="0" x2="0" y2="6" stroke="{_COLOURS[how][1]}" stroke-width="1.6" stroke-opacity="0.55"/>'
        "</pattern>"
    )

"""A placement as a standalone SVG file: a box for every host, a cell for every device, a strip for every axis.

Cells whose strips of one axis bear one colour and number are a group of that axis; no other group of the picture has
that colour. A strip with a dark edge belongs to a group that leaves its host; the bar below a host shows what leaves it
in a step, by demand. Many hosts are folded as in `placement_picture`: numbers are those of the first and of the last.
"""

from __future__ import annotations

from collections.abc import Sequence

from shardplan.hardware.placement import Placement
from shardplan.launches.launch import Launch
from shardplan.movement.placing.traffic import Demand, Traffic
from shardplan.report.canvas import FAINT, LINE, MARGIN, MONO, PAPER, Page, pastels
from shardplan.report.placement_picture import (
    Cell,
    HostBox,
    Scene,
    box_name,
    crossed,
    heading,
    load_text,
    pod_name,
    scene,
    span_text,
)

MOST_BOXES = 8
MOST_CELLS = 32
ACROSS = 8  # cells of a line
CELL = 104  # width of a cell
STRIP = 16  # height of an axis's strip
GAP = 6
_WIDTH = 2 * MARGIN + ACROSS * (CELL + GAP) - GAP + 24
_BOX, _EDGE = "#f7f9fb", "#7b1e1e"
_BARS = ("#3f7fb5", "#d98a1f", "#2f9e5b", "#c9516b", "#7b66bd", "#8a7a1a")


def svg_placement(
    subject: Placement | Launch, traffic: Traffic | Sequence[Demand] | None = None, title: str = ""
) -> str:
    """Return a picture of where a mesh lies, as an SVG document with no references to anything outside it.

    `traffic` is what a step communicates, for the loads of the uplinks; the heading is mesh, topology and verdict
    unless there is a title. Raises `LayoutError` for malformed traffic.

    >>> from shardplan.core.mesh import Mesh
    >>> from shardplan.hardware.topology import Topology
    >>> svg_placement(Placement(Mesh(x=8), Topology.load("nominal"), ((8,),)))[:11]
    '<svg xmlns='
    """
    return _PlacementPage(scene(subject, traffic, MOST_BOXES)).document(title)


class _PlacementPage(Page):
    """Where a mesh lies, host by host."""

    def __init__(self, drawn: Scene) -> None:
        super().__init__()
        self.drawn = drawn
        self.axes = drawn.launch.mesh.axes
        shown = [cell for box in drawn.boxes for cell in box.cells[:MOST_CELLS]]
        groups = sorted({(i, g) for cell in shown for i, g in enumerate(cell.groups)})
        self.colours = dict(zip(groups, pastels(len(groups)), strict=True))
        self.most = max((sum(box.out) for box in drawn.boxes), default=0.0)

    def document(self, title: str) -> str:
        self.y += 10
        self.write_line(title or heading(self.drawn), 24, size=17, weight=600)
        if title:
            self.write_line(heading(self.drawn), 20, fill=FAINT)
        self.table()
        self.legend()
        above = ""
        for box in self.drawn.boxes:
            if self.drawn.hidden and box is self.drawn.boxes[-1]:
                word = self.drawn.level.name if self.drawn.level is not None else "host"
                self.write_line(f"... {self.drawn.hidden} more {word}s", 26, fill=FAINT, drop=10)
            if (pods := pod_name(box, self.drawn)) != above:
                self.write_line(pods, 24, size=14, weight=600, drop=12)
                above = pods
            self.box(box)
        height = self.y + MARGIN - 12
        return self.canvas.document(_WIDTH, height, title or heading(self.drawn))

    def table(self) -> None:
        """The matrix, or the units spanned, with what every axis crosses."""
        found, levels = self.drawn.findings, self.drawn.launch.topology.levels
        first = MARGIN + 8.0 * max(len(axis) for axis in (*self.axes, "axis")) + 28
        step = 7.6 * max(6, *(len(level.name) for level in levels)) + 8
        for j, level in enumerate(levels):
            self.canvas.text(first + j * step, self.y, level.name, fill=FAINT, anchor="end")
        if found.matrix is None:
            self.canvas.text(first + len(levels) * step - 16, self.y, "units spanned: there is no matrix", fill=FAINT)
        self.y += 18
        for i, words in enumerate(crossed(self.drawn)):
            self.canvas.text(MARGIN, self.y, self.axes[i], weight=600)
            for j in range(len(levels)):
                low, high = found.spans[i][j]
                number = found.matrix[i][j] if found.matrix is not None else low if low == high else f"{low}-{high}"
                self.canvas.text(first + j * step, self.y, str(number), font=MONO, anchor="end")
            self.canvas.text(first + len(levels) * step - 16, self.y, words, fill=FAINT)
            self.y += 18
        self.y += 4

    def legend(self) -> None:
        x = float(MARGIN)
        example = self.colours[0, self.drawn.boxes[0].cells[0].groups[0]]
        self.canvas.rect(x, self.y - 10, 30, 12, example)
        words = "one colour and number in an axis's row: one group"
        self.canvas.text(x + 36, self.y, words, size=11)
        x += 36 + 6.1 * len(words) + 14
        if self.drawn.level is not None and any(any(c.leaves) for box in self.drawn.boxes for c in box.cells):
            self.canvas.rect(x, self.y - 10, 30, 12, example, _EDGE, ' stroke-width="1.6"')
            self.canvas.text(x + 36, self.y, f"dark edge: the group leaves its {self.drawn.level.name}", size=11)
        self.y += 20
        if self.most > 0:
            x = float(MARGIN)
            for k, demand in enumerate(self.drawn.demands):
                text = str(demand)
                if x > MARGIN and x + 6.1 * len(text) + 20 > _WIDTH - MARGIN:
                    x = float(MARGIN)
                    self.y += 17
                self.canvas.rect(x, self.y - 9, 10, 10, _BARS[k % len(_BARS)])
                self.canvas.text(x + 15, self.y, text, size=11)
                x += 15 + 6.1 * len(text) + 16
            self.y += 18
        self.y += 4

    def box(self, box: HostBox) -> None:
        cells = box.cells[:MOST_CELLS]
        high = 20 + STRIP * len(self.axes)
        rows = -(-len(cells) // ACROSS)
        load = load_text(box, self.drawn)
        inside = 26 + rows * (high + GAP) + (16 if len(box.cells) > MOST_CELLS else 0) + (24 if load else 0) + 4
        self.canvas.rect(MARGIN, self.y, _WIDTH - 2 * MARGIN, inside, _BOX, LINE, ' rx="4"')
        self.canvas.text(MARGIN + 12, self.y + 18, box_name(box, self.drawn), size=13, weight=600)
        top = self.y + 26
        for k, (cell, least, greatest) in enumerate(zip(cells, box.least, box.greatest, strict=False)):
            x, y = MARGIN + 12 + k % ACROSS * (CELL + GAP), top + k // ACROSS * (high + GAP)
            self.cell(x, y, high, cell, (least, greatest))
        top += rows * (high + GAP)
        if len(box.cells) > MOST_CELLS:
            self.canvas.text(
                MARGIN + 12, top + 10, f"... {len(box.cells) - MOST_CELLS} more devices", size=11, fill=FAINT
            )
            top += 16
        if load:
            self.bar(box, load, top + 4)
        self.y += inside + 12

    def cell(self, x: float, y: float, high: float, cell: Cell, ends: tuple[Cell, Cell]) -> None:
        """A device; of alike hosts that of the first one, with the numbers between which theirs are."""
        least, greatest = ends
        self.canvas.rect(x, y, CELL, high, PAPER, LINE)
        rank = f"rank {span_text((least.rank,), (greatest.rank,))}"
        coordinates = span_text(least.coordinates, greatest.coordinates)
        # Both in one line: the coordinates as small as they must be, but legible; of several hosts only where they fit.
        fits = (CELL - 18 - 7.2 * len(rank)) / (0.62 * len(coordinates))
        self.canvas.text(x + 5, y + 14, rank, size=11, weight=600)
        if least == greatest or fits >= 7:
            size = round(max(7.0, min(11.0, fits)), 1)
            self.canvas.text(x + CELL - 5, y + 14, coordinates, size=size, font=MONO, anchor="end")
        groups = zip(self.axes, cell.groups, least.groups, greatest.groups, cell.leaves, strict=True)
        for i, (axis, group, low, end, edge) in enumerate(groups):
            top = y + 20 + i * STRIP
            stroke = ' stroke-width="1.6"' if edge else ""
            self.canvas.rect(x + 2, top, CELL - 4, STRIP - 3, self.colours[i, group], _EDGE if edge else "", stroke)
            name = axis if len(axis) <= 11 else axis[:10] + "\u2026"
            self.canvas.text(x + 6, top + 10, name, size=9.5)
            self.canvas.text(x + CELL - 6, top + 10, span_text((low,), (end,)), size=9.5, anchor="end")

    def bar(self, box: HostBox, load: str, y: float) -> None:
        """What leaves the box, to the scale of the busiest."""
        room = _WIDTH - 2 * MARGIN - 24 - 250
        x = float(MARGIN + 12)
        for k, nbytes in enumerate(box.out):
            wide = room * nbytes / self.most if self.most else 0.0
            if wide > 0:
                self.canvas.rect(round(x, 2), y, round(wide, 2), 12, _BARS[k % len(_BARS)])
                x += wide
        self.canvas.text(x + 8, y + 10, load, size=11)

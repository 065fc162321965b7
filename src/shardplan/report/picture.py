"""The picture as text: what each device holds of the global array before and after every step.

A small array is drawn element by element, a larger one block by block between the cuts of its layouts; where that would
not fit (many devices, many cuts, more than two dims), boxes are listed.
"""

from __future__ import annotations

import math
import string
from collections.abc import Sequence

from shardplan.core.program import Program
from shardplan.core.tensor import TensorType
from shardplan.report.contents import LEGEND, Frame, HeldBox, box_text, cuts, device_text, frames
from shardplan.report.fold import WIDTH

MOST_ELEMENTS = 64  # drawn one by one
MOST_BLOCKS = 16  # blocks along a dim
MOST_PANELS = 16  # devices drawn as grids
MOST_LISTED = 32  # devices listed by their boxes
_LETTERS = string.ascii_lowercase + string.ascii_uppercase
_NEW = {"received": ">", "reduced": ">", "filled": "~", "computed": ">"}


def text_picture(subject: Program | TensorType) -> str:
    """Return a picture of what each device holds, of a type, or of a program before and after every step.

    Below it stands a legend of the marks that were used.

    >>> from shardplan.core.mesh import Mesh
    >>> print(text_picture(TensorType.parse("f32[4@x]", Mesh(x=2))))
    f32[4@x]
      device 0 (0)  device 1 (1)
      0 1 . .       . . 2 3
    <BLANKLINE>
    0, 1, ...     elements of the array, numbered in row-major order
    device 1 (1)  the device with the id 1, at x=1
    """
    drawn = frames(subject, MOST_LISTED)
    lines = cuts(drawn)
    blocks: list[str] = []
    rasters: set[str] = set()
    marks: dict[str, list[str]] = {}
    for frame in drawn:
        raster = _raster(frame, lines[frame.type.shape])
        body = _listed(frame) if raster is None else _panels(frame, raster, marks)
        rasters.add("boxes" if raster is None else raster.kind)
        if frame.more:
            body.append(f"  ... and {frame.more} more tensors")
        blocks.append("\n".join([_heading(frame), *body]))
    return "\n\n".join([*blocks, _legend(drawn, rasters, marks)])


class _Raster:
    """The cells of an array of at most two dims: their bounds along each dim, and their labels."""

    def __init__(self, rows: Sequence[int], columns: Sequence[int], kind: str, width: int) -> None:
        self.rows = tuple(zip(rows, rows[1:], strict=False))
        self.columns = tuple(zip(columns, columns[1:], strict=False))
        self.kind = kind
        self.width = width

    def label(self, row: int, column: int) -> str:
        """Return what stands in a cell."""
        number = row * len(self.columns) + column
        if self.kind == "blocks":
            return _LETTERS[number]
        return str(number)


def _raster(frame: Frame, lines: tuple[tuple[int, ...], ...]) -> _Raster | None:
    """The cells of a small array, its elements, or of a larger one, blocks between the cuts; None of too many."""
    shape = frame.type.shape
    if len(shape) > 2 or len(frame.held) > MOST_PANELS:
        return None
    if math.prod(shape) <= MOST_ELEMENTS and (not shape or shape[-1] <= MOST_BLOCKS):
        sides = [range(n + 1) for n in shape]
        kind, width = "elements", len(str(math.prod(shape) - 1))
    else:
        sides = list(lines)
        count = math.prod(len(x) - 1 for x in sides)
        if max(len(x) - 1 for x in sides) > MOST_BLOCKS or count > MOST_ELEMENTS:
            return None
        kind, width = ("blocks", 1) if count <= len(_LETTERS) else ("numbered", len(str(count - 1)))
    both = [range(2)] * (2 - len(sides)) + sides  # a dim that is missing is one cell
    return _Raster(both[0], both[1], kind, width)


def _heading(frame: Frame) -> str:
    value = f"%{frame.value}: " if frame.value else ""
    if not frame.op:
        return f"{frame.title}  {value}{frame.type}" if value else str(frame.type)
    return f"{frame.title}  {frame.op}  # {frame.note}\n  {value}{frame.type}"


def _name(held: HeldBox) -> str:
    return f"device {device_text(str(held.device), map(str, held.coordinates))}"


def _panels(frame: Frame, raster: _Raster, marks: dict[str, list[str]]) -> list[str]:
    """The grids of the devices side by side, a row for the mesh's last axis where the line has room for it."""
    panels = [[_name(h), *_grid(frame, h, raster, marks)] for h in frame.held]
    width = max(len(line) for panel in panels for line in panel) + 2
    most = max(1, (WIDTH - 2) // width)
    mesh = frame.type.mesh
    minor = mesh.sizes[-1] if mesh.sizes and len(frame.held) == mesh.size else 1
    per_line = min(minor if len(mesh.sizes) > 1 and minor > 1 else len(panels), most)
    out: list[str] = []
    for start in range(0, len(panels), per_line):
        row = panels[start : start + per_line]
        out += ["  " + "".join(f"{p[k]:<{width}}" for p in row).rstrip() for k in range(len(row[0]))]
        if start + per_line < len(panels):
            out.append("")
    return out


def _inside(cell: tuple[tuple[int, int], tuple[int, int]], box: Sequence[tuple[int, int]] | None) -> bool:
    """Say whether a cell lies in a box; cells are never cut by one."""
    if box is None:
        return False
    sides = [(0, 1)] * (2 - len(box)) + list(box)
    return all(a <= c and d <= b for (c, d), (a, b) in zip(cell, sides, strict=True))


def _grid(frame: Frame, held: HeldBox, raster: _Raster, marks: dict[str, list[str]]) -> list[str]:
    """The cells of one device; adds to `marks` what the marks that were used stand for."""
    layout = frame.type.layout
    new = _NEW.get(frame.how, "")
    after = "+" if layout.partial else "*" if layout.root else ""
    width = raster.width + len(new) + len(after)
    lines: list[str] = []
    for r, rows in enumerate(raster.rows):
        cells: list[str] = []
        for c, columns in enumerate(raster.columns):
            cell = (rows, columns)
            if not _inside(cell, held.box):
                cells.append(f"{'.':>{width - len(after)}}{' ' * len(after)}")
                continue
            fresh = "" if _inside(cell, held.kept) else new
            if fresh:
                marks.setdefault(fresh, []).append(frame.how)
            cells.append(f"{fresh + raster.label(r, c) + after:>{width}}")
        lines.append(" ".join(cells))
    return lines


def _listed(frame: Frame) -> list[str]:
    """A line for every device: its box, and what it kept of it."""
    rows: list[tuple[str, str, str]] = []
    for held in frame.held:
        box = "nothing" if held.box is None else box_text(held.box)
        before = "none of it" if held.kept is None else "all" if held.kept == held.box else box_text(held.kept)
        rows.append((_name(held), box, "" if frame.how in ("held", "computed") or held.box is None else before))
    names, boxes = (max(len(r[k]) for r in rows) for k in (0, 1))
    out = [f"  {n:<{names}}  {b:<{boxes}}  {'kept ' + k if k else ''}".rstrip() for n, b, k in rows]
    left = len(frame.type.mesh.devices) - len(rows)
    return [*out, f"  ... and {left} more devices"] if left > 0 else out


def _legend(drawn: Sequence[Frame], rasters: set[str], marks: dict[str, list[str]]) -> str:
    rows: list[tuple[str, str]] = []
    if "elements" in rasters:
        rows.append(("0, 1, ...", "elements of the array, numbered in row-major order"))
    if "blocks" in rasters:
        rows.append(("a, b, ...", "blocks of the array between the cuts of its layouts, in row-major order"))
    if "numbered" in rasters:
        rows.append(("0, 1, ...", "blocks of the array between the cuts of its layouts, in row-major order"))
    if "boxes" in rasters:
        rows.append(("[0:4, 2:6]", "start:stop along each dim of the array"))
    grids = rasters != {"boxes"}
    if grids:
        rows += [(mark + "0", ", or ".join(LEGEND[how] for how in dict.fromkeys(hows))) for mark, hows in marks.items()]
    for mark, word in (
        ("+", "an addend: the value is the sum (or max, min) over the partial axes"),
        ("*", "the root's"),
    ):
        used = any(f.type.layout.partial if mark == "+" else f.type.layout.root for f in drawn)
        if used and grids:
            rows.append(("0" + mark, word))
    example = next((h for f in drawn for h in f.held[1:] if h.coordinates), None)
    if example is not None:
        mesh = next(f.type.mesh for f in drawn if example in f.held)
        at = ", ".join(f"{a}={c}" for a, c in zip(mesh.axes, example.coordinates, strict=True))
        rows.append((_name(example), f"the device with the id {example.device}, at {at}"))
    width = max((len(k) for k, _ in rows), default=0)
    return "\n".join(f"{k:<{width}}  {text}" for k, text in rows)

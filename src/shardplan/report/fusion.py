"""What the pass over programs found, as text: the summary, a table of rows, and what blocks."""

from __future__ import annotations

from typing import Any

from shardplan.fused.deciding.rows import Fusion, FusionRow
from shardplan.hardware.units import format_bytes, format_seconds
from shardplan.report.text import table


def fusion_text(found: Fusion[Any]) -> str:
    """Return the summary and two lines a row, what it costs and its types; below them, by place, what blocks."""
    lines = [found.summary]
    if not found.rows:
        return lines[0]
    rows = [["place", "op", "sent", "unfused", "fused", "choice", "reason"]]
    rows += [_cells(row) for row in found.rows]
    head, *told = table(rows, left=(0, 1))
    lines += ["", head]
    for row, line in zip(found.rows, told, strict=True):
        lines += [line, f"  {' '.join(row.types[:-1])} -> {row.types[-1]}"]
    blocked = [": ".join(filter(None, (row.place, row.blocked, row.text))) for row in found.rows if row.text]
    return "\n".join([*lines, *([""] if blocked else []), *blocked])


def _cells(row: FusionRow) -> list[str]:
    seconds = ["" if s is None else format_seconds(s) for s in (row.unfused_seconds, row.best_seconds)]
    return [row.place, row.op, format_bytes(row.nbytes), *seconds, row.choice, row.reason]

"""What the pass over programs found, as text: the summary, a table of rows, and what blocks."""

from __future__ import annotations

from typing import Any

from shardplan.fused.deciding.rows import Fusion, FusionRow
from shardplan.hardware.units import format_bytes, format_seconds
from shardplan.report.text import table

MOST_TYPES = 60  # characters of the types of a row


def fusion_text(found: Fusion[Any]) -> str:
    """Return the summary and a line a row; below it, by place, what blocks."""
    lines = [found.summary]
    if not found.rows:
        return lines[0]
    rows = [["place", "op", "types", "sent", "unfused", "fused", "choice", "reason"]]
    rows += [_cells(row) for row in found.rows]
    lines += ["", *table(rows, left=3)]
    blocked = [f"{row.place}: {row.blocked}: {row.text}" for row in found.rows if row.blocked]
    return "\n".join([*lines, *([""] if blocked else []), *blocked])


def _cells(row: FusionRow) -> list[str]:
    types = f"{' '.join(row.types[:-1])} -> {row.types[-1]}"
    if len(types) > MOST_TYPES:
        types = f"{types[: MOST_TYPES - 3]}..."
    seconds = ["" if s is None else format_seconds(s) for s in (row.unfused_seconds, row.best_seconds)]
    return [row.place, row.op, types, format_bytes(row.nbytes), *seconds, row.choice, row.reason]

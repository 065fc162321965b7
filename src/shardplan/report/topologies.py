"""What `topologies` prints, and its JSON object."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from shardplan.hardware.prices.library import library
from shardplan.hardware.topology import Topology


def topologies_text(found: Sequence[Topology]) -> str:
    """Return a line for each topology: name, levels, library, and on what the library's prices were fitted."""
    rows = [["topology", "levels", "library", "prices fitted on"]]
    rows += [[t.name, t.describe(), t.library, library(t.library).measured or "nothing measured"] for t in found]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)).rstrip() for row in rows)


def topologies_object(found: Sequence[Topology]) -> dict[str, Any]:
    """Return topologies as an object; `text` is what a topology file says."""
    return {
        "topologies": [
            {
                "name": t.name,
                "levels": t.describe(),
                "size": t.size,
                "library": t.library,
                "measured": library(t.library).measured,
                "text": str(t),
            }
            for t in found
        ]
    }

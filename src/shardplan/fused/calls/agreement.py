"""What every rank says of a call, before the first one of its kind: compared, so that none waits for another call."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from shardplan.errors import line
from shardplan.fused.heap.failures import HeapMismatch
from shardplan.fused.heap.symmetric import SymmetricHeap


def agreed(
    heap: SymmetricHeap, op: str, facts: dict[str, Any], alike: Sequence[str], seconds: float
) -> list[dict[str, Any]]:
    """Return what all ranks say of a call; collective.

    Raises `HeapMismatch`, on all ranks, where ranks call different operators or a fact named in `alike` differs.
    """
    said = [json.loads(raw) for raw in heap.gather(json.dumps({"op": op} | facts).encode(), seconds, op)]
    first = said[0]
    for rank, other in enumerate(said):
        for key in ("op", *alike):
            if other.get(key) != first.get(key):
                here, there = (line(f"{each['op']} with {key} {each.get(key)}") for each in (first, other))
                if key == "op":
                    here, there = first["op"], other["op"]
                raise HeapMismatch(
                    f"{op}: rank 0 calls {here}, rank {rank} calls {there}; legal is the same call on all"
                )
    return said

"""What results of searches have in common: a strategy as text and as JSON, and why strategies were left out."""

from __future__ import annotations

from typing import Any, NamedTuple

from shardplan.strategy.strategy import Strategy


class PrunedClass(NamedTuple):
    """How many strategies were left out, and why."""

    rule: str
    strategies: int


def plan_object(strategy: Strategy, seconds: float, peak_bytes: float) -> dict[str, Any]:
    """Return a strategy with its price as an object of JSON."""
    names = Strategy.__dataclass_fields__
    said = {name: getattr(strategy, name) for name in names if getattr(strategy, name) is not None}
    return {"strategy": said, "seconds": seconds, "peak_bytes": peak_bytes}

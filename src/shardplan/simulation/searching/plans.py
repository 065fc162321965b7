"""What results of searches have in common: a strategy as text and as JSON, and why strategies were left out."""

from __future__ import annotations

from typing import Any, NamedTuple

from shardplan.strategy.strategy import Strategy


class PrunedClass(NamedTuple):
    """How many strategies were left out, and why."""

    rule: str
    strategies: int


def strategy_text(s: Strategy) -> str:
    """Return what a strategy says otherwise than by default."""
    plain = Strategy()
    names = [name for name in Strategy.__dataclass_fields__ if name != "global_batch"]
    return (
        " ".join(f"{name}={getattr(s, name)}" for name in names if getattr(s, name) != getattr(plain, name)) or "data=1"
    )


def plan_object(strategy: Strategy, seconds: float, peak_bytes: float) -> dict[str, Any]:
    """Return a strategy with its price as an object of JSON."""
    names = Strategy.__dataclass_fields__
    said = {name: getattr(strategy, name) for name in names if getattr(strategy, name) is not None}
    return {"strategy": said, "seconds": seconds, "peak_bytes": peak_bytes}

"""Strategies as a line of text: `data=2 tensor=4 recompute=full`, or in the short names of others: `dp=2, tp=4`."""

from __future__ import annotations

import math
from typing import Any

from shardplan.errors import LayoutError, ParseError, excerpt, near_text
from shardplan.strategy.schedules.schedule import Schedule
from shardplan.strategy.strategy import Strategy

# Fields that a line can say; the others hold what has a file or a table of its own.
WHOLE = ("data", "tensor", "pipeline", "context", "expert", "microbatch", "global_batch", "interleave", "zero", "shard",
         "offload_layers", "loss_chunks", "recompute_layers")  # fmt: skip
WORDS = ("schedule", "recompute", "context_kind", "precision", "gradient_dtype", "reduce_dtype", "attention", "bucket",
         "loss", "expert_from", "dispatch", "expert_products")  # fmt: skip
NUMBERS = ("imbalance",)
FLAGS = ("sequence_parallel", "fsdp", "offload", "prefetch", "tensor_overlap", "expert_overlap")
SAID = {"true": True, "false": False}
SHORT = {"dp": "data", "tp": "tensor", "pp": "pipeline", "cp": "context", "ep": "expert", "sp": "sequence_parallel",
         "vpp": "interleave", "mbs": "microbatch", "gbs": "global_batch"}  # fmt: skip


def strategy_text(s: Strategy) -> str:
    """Return what a strategy says otherwise than by default; its global batch is left out.

    >>> strategy_text(Strategy(data=2, sequence_parallel=True, global_batch=8))
    'data=2 sequence_parallel=true'
    """
    words = [f"{name}={_value_text(x)}" for name, x in s.non_defaults().items() if name != "global_batch"]
    return " ".join(words) or "data=1"


def _value_text(x: object) -> str:
    if isinstance(x, Schedule):
        return f"{x.name or 'own'}.csv"
    return str(x).lower() if isinstance(x, bool) else str(x)


def parse_strategy(text: str, devices: int | None = None, **known: Any) -> Strategy:
    """Return the strategy that a line says, with fields that are known beside it.

    Where it says no replicas and `devices` are given, it has as many as are left; chunks are `interleaved`, unless it
    names a schedule.

    Raises `ParseError` for a field that no line says, one said twice or known, and a value of another kind; and
    `LayoutError` as `Strategy` does, and for degrees that do not divide the devices.

    >>> parse_strategy("data=2 fsdp=true", global_batch=8).microbatches
    4
    >>> strategy_text(parse_strategy("tp=4, pp=2, vpp=2, sp", 16, global_batch=8))
    'data=2 tensor=4 pipeline=2 schedule=interleaved interleave=2 sequence_parallel=true'
    """
    found = strategy_fields(text)
    for name in found.keys() & known.keys():
        raise ParseError(f"strategy: {name} is said twice; legal is once")
    if found.get("interleave", 1) > 1:
        found.setdefault("schedule", "interleaved")
    if devices is not None and "data" not in found:
        inside = math.prod(found.get(name, 1) for name in ("tensor", "pipeline", "context"))
        if not inside or devices % inside:
            raise LayoutError(
                f"strategy: a replica of {text.strip()} has {inside} devices; legal is a divisor of {devices}"
            )
        found["data"] = devices // inside
    return Strategy(**found, **known)


def strategy_fields(text: str) -> dict[str, Any]:
    """Return the fields that a line says, by their own names: words apart by blanks or commas, a flag alone is true.

    Raises `ParseError` as `parse_strategy` does.
    """
    found: dict[str, Any] = {}
    for word in text.replace(",", " ").split():
        said, equals, value = word.partition("=")
        name = SHORT.get(said.lower(), said)
        legal = ", ".join((*WHOLE, *WORDS, *NUMBERS, *FLAGS))
        if name not in legal.split(", ") or not (equals or name in FLAGS):
            raise ParseError(
                f"strategy: {excerpt(word)}{near_text(said, legal.split(', '))}; legal is field=value, of {legal}"
            )
        if name in found:
            raise ParseError(f"strategy: {name} is said twice; legal is once")
        found[name] = _value(name, value if equals else "true")
    return found


def _value(name: str, value: str) -> object:
    if name in FLAGS:
        if value.lower() not in SAID:
            raise ParseError(f"strategy: {name}={value}; legal are true and false")
        return SAID[value.lower()]
    if name in WHOLE:
        if not (value.isascii() and value.isdigit() and len(value) < 10):
            raise ParseError(f"strategy: {name}={value}; legal is a whole number of at most 9 digits")
        return int(value)
    if name in NUMBERS:
        try:
            return float(value)
        except ValueError:
            raise ParseError(f"strategy: {name}={excerpt(value)}; legal is a number") from None
    return value

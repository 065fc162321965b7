"""Strategies as a line of text: `data=2 tensor=4 recompute=full`."""

from __future__ import annotations

from typing import Any

from shardplan.errors import ParseError, shown
from shardplan.strategy.strategy import Strategy

# Fields that a line can say; the others hold what has a file or a table of its own.
WHOLE = ("data", "tensor", "pipeline", "context", "expert", "microbatch", "global_batch", "interleave", "zero", "shard",
         "offload_layers")  # fmt: skip
WORDS = ("schedule", "recompute", "context_kind", "precision", "gradient_dtype", "attention", "bucket")
FLAGS = ("sequence_parallel", "fsdp", "offload", "prefetch", "tensor_overlap")
SAID = {"true": True, "false": False}


def strategy_text(s: Strategy) -> str:
    """Return what a strategy says otherwise than by default; its global batch is left out.

    >>> strategy_text(Strategy(data=2, sequence_parallel=True, global_batch=8))
    'data=2 sequence_parallel=true'
    """
    plain = Strategy()
    names = [name for name in Strategy.__dataclass_fields__ if name != "global_batch"]
    said = ((name, getattr(s, name)) for name in names if getattr(s, name) != getattr(plain, name))
    words = [f"{name}={str(x).lower() if isinstance(x, bool) else x}" for name, x in said]
    return " ".join(words) or "data=1"


def parse_strategy(text: str, **known: Any) -> Strategy:
    """Return the strategy that a line says, with fields that are known beside it.

    Raises `ParseError` for a field that no line says, one said twice or known, and a value of another kind; and
    `LayoutError` as `Strategy` does.

    >>> parse_strategy("data=2 fsdp=true", global_batch=8).microbatches
    4
    """
    found: dict[str, Any] = {}
    for word in text.split():
        name, equals, value = word.partition("=")
        if not equals or name not in (*WHOLE, *WORDS, *FLAGS):
            legal = ", ".join((*WHOLE, *WORDS, *FLAGS))
            raise ParseError(f"strategy: {shown(word)}; legal is field=value, of {legal}")
        if name in found or name in known:
            raise ParseError(f"strategy: {name} is said twice; legal is once")
        found[name] = _value(name, value)
    return Strategy(**found, **known)


def _value(name: str, value: str) -> object:
    if name in FLAGS:
        if value.lower() not in SAID:
            raise ParseError(f"strategy: {name}={value}; legal are true and false")
        return SAID[value.lower()]
    if name in WHOLE:
        if not (value.isascii() and value.isdigit() and len(value) < 10):
            raise ParseError(f"strategy: {name}={value}; legal is a whole number of at most 9 digits")
        return int(value)
    return value

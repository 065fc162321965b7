"""A closed jaxpr as a flat program."""

from __future__ import annotations

from typing import Any

from shardplan.interop.importers.flat import Flattened
from shardplan.interop.importers.writer import Cuts


def is_jaxpr(source: object) -> bool:
    """Whether it is a closed jaxpr, without importing JAX."""
    return type(source).__name__ == "ClosedJaxpr"


def flattened(source: Any, cuts: Cuts, opaque: bool) -> Flattened:
    """Write the equations."""
    raise NotImplementedError

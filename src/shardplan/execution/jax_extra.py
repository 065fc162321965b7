"""JAX is an extra: without it, one line says how to install it."""

from __future__ import annotations

from importlib.util import find_spec

from shardplan.errors import BackendError


def require_jax() -> None:
    """Raise `BackendError` where JAX is not installed."""
    if find_spec("jax") is None:
        raise BackendError("jax is not installed: pip install 'shardplan[jax]'")

"""What ends a wait on a symmetric heap before its signal: time, a peer that failed, a peer that died."""

from __future__ import annotations

from shardplan.errors import BackendError, TimedOut


class FusedTimeout(TimedOut):
    """A bounded wait of a fused operator ended before its signal; the message names operator, rank, source and tile."""


class PeerLost(BackendError):
    """A peer of a symmetric heap died, or failed and said so."""


class HeapMismatch(BackendError):
    """Ranks of a symmetric heap ask for different things at the same time."""

"""A job as bytes, for the processes of the lab: partitioning takes a second, and each of them would do it again."""

from __future__ import annotations

import io
import pickle
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from shardplan.strategy.partition.job import Job


class _JobPickler(pickle.Pickler):
    """Takes read-only mappings, too, which `pickle` does not."""

    def reducer_override(self, obj: Any) -> Any:
        """Say how a read-only mapping is made again."""
        return (_make_proxy, (dict(obj),)) if isinstance(obj, MappingProxyType) else NotImplemented


def _make_proxy(known: dict[Any, Any]) -> MappingProxyType[Any, Any]:
    return MappingProxyType(known)


def pack_job(job: Job) -> bytes:
    """Return a job as bytes, without what running it does not look at: its movements, and how it was settled."""
    nothing: Any = None
    out = io.BytesIO()
    _JobPickler(out).dump(replace(job, movements={}, settled=nothing))
    return out.getvalue()


def unpack_job(data: bytes) -> Job:
    """Return the job of such bytes."""
    return pickle.loads(data)

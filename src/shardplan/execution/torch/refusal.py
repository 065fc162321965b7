"""A rank that raises instead of taking part in a call: the others raise too, at once, and are told why.

Ranks make a call together. One that finds no plan within its limit, or cannot read what it was given, never comes to
the run; the others wait for it, in the agreement on a program that is new, or for a message of one that is known.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
from collections.abc import Sequence

import torch.distributed as dist

from shardplan.execution import agreement
from shardplan.execution.run import TIMEOUT
from shardplan.execution.torch.faults import TorchWatch
from shardplan.execution.torch.group_state import group_state
from shardplan.execution.torch.libraries import device_among
from shardplan.execution.torch.wire import TorchWire


def refusing(ranks: Sequence[int], what: str) -> contextlib.AbstractContextManager[None]:
    """Tell the other ranks of a call what the block raises on this one: see `refuse`."""
    return agreement.refusing(functools.partial(refuse, ranks, what))


def refuse(ranks: Sequence[int], what: str, error: BaseException) -> None:
    """Tell the other ranks of a call that this one raises `error` instead of taking part, and let go those that wait.

    It counts as a run of `ranks`, global ones. It takes as long as the others need to come, at most `PATIENCE` seconds;
    on nccl those that run a program that is known wait on their devices, and are not told.
    """
    ranks = tuple(sorted(ranks))
    if not (dist.is_available() and dist.is_initialized()) or len(ranks) < 2 or dist.get_rank() not in ranks:
        return
    state = group_state()
    if not set(ranks) <= set(state.ranks):
        return
    digest = hashlib.sha256(what.encode()).hexdigest()
    watch = TorchWatch(ranks, dist.get_rank(), what, digest, (), TIMEOUT, state)
    watch.withdraw(error, TorchWire.of(watch, device_among(state.libraries)))

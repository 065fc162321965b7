"""Live handles of all ranks of a refit in threads of one process, with one rank that is stale, or fails."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from tests.rank_threads import in_threads

import shardplan as sp
from shardplan.errors import ShardplanError
from shardplan.movement.weights.binding import WeightsMismatch
from shardplan.movement.weights.weights import Weights

from .weights_judged import Held, Session

TIMEOUT = 20.0  # seconds that a wait may take on a busy machine


def answers(ranks: list[int], work: Callable[[int], Any]) -> dict[int, Any]:
    """What each rank's work returns, or the error that it raised."""

    def body(rank: int) -> Any:
        try:
            return work(rank)
        except Exception as error:  # is what is asked
            return error

    return in_threads(ranks, body, 3 * TIMEOUT)


class Ranks:
    """Tensors of every rank, and handles on them in one store of this process."""

    def __init__(self, s: Session, source: Held) -> None:
        import torch

        self.s = s
        self.store = torch.distributed.HashStore()

        def tensors(named: dict[str, np.ndarray], old: bool) -> dict[str, Any]:
            """Tensors of their own; of a target those served before, of which no element but padding is 0."""
            made = {n: np.where(a == 0, a, 7 * np.ones_like(a)) if old else a for n, a in named.items()}
            return {n: torch.from_numpy(np.array(a, order="C")) for n, a in made.items()}

        self.tensors = {rank: tensors(named, False) for rank, named in source.items()}
        self.tensors |= {rank: tensors(named, True) for rank, named in s.held[1].items()}
        self.ranks = sorted(self.tensors)

    def handles(self, plan_of: Callable[[int], Any], **given: Any) -> dict[int, Any]:
        """A handle a rank, or the error with which it refused."""
        from shardplan.interop.torch.refit.handle import Refit

        def made(rank: int) -> Any:
            return Refit(plan_of(rank), self.tensors[rank], rank=rank, store=self.store, timeout=TIMEOUT, **given)

        return answers(self.ranks, made)

    def after(self) -> Held:
        """What the target's ranks hold."""
        return {rank: {n: t.numpy().copy() for n, t in self.tensors[rank].items()} for rank in self.s.held[1]}


def _first(found: dict[int, Any]) -> ShardplanError | None:
    errors = [e for e in found.values() if isinstance(e, BaseException)]
    for e in errors:
        if not isinstance(e, ShardplanError):
            raise e
    return next((e for e in errors if isinstance(e, WeightsMismatch)), next(iter(errors), None))


def kept_by_one(s: Session, stale: tuple[Weights, Weights], rank: int) -> Any:
    """A call in which one rank brings a plan from before."""

    def run(plan: Any, source: Held) -> tuple[Held, ShardplanError | None]:
        old = sp.refit(*stale)
        ranks = Ranks(s, source)
        handles = ranks.handles(lambda r: old if r == rank else plan)
        error = _first(handles)
        if isinstance(error, WeightsMismatch):
            raise error
        found = {} if error else answers(ranks.ranks, lambda r: handles[r]())
        return ranks.after(), error or _first(found)

    return run


class _Lost(RuntimeError):
    """A rank fails."""


def torn_by(s: Session, rank: int, when: float) -> Any:
    """A call in which one rank fails: in one of its messages, or where it finishes."""

    def run(plan: Any, source: Held) -> tuple[Held, ShardplanError | None]:
        ranks = Ranks(s, source)
        handles = ranks.handles(lambda _: plan)
        for handle in handles.values():
            if isinstance(handle, BaseException):
                raise handle
        messages = [m for sends, receives in handles[rank]._exchange.rounds for m in (*sends, *receives)]

        def fail() -> None:
            raise _Lost("lost")

        at = int(when * (len(messages) + 1))

        class Failing:
            run = staticmethod(fail)

        if at < len(messages):
            object.__setattr__(messages[at], "copies", Failing)
        elif handles[rank].target is not None:
            handles[rank].finish = lambda _: fail()
        else:
            object.__setattr__(handles[rank]._commit, "run", lambda *_: fail())
        answers(ranks.ranks, lambda r: handles[r](version=3))
        refusals: list[ShardplanError] = []
        for r in s.held[1]:
            try:
                handles[r].serve()
            except ShardplanError as error:
                refusals.append(error)
        return ranks.after(), refusals[0] if len(refusals) == len(s.held[1]) else None

    return run

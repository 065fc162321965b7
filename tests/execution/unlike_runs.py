"""Ranks as threads that run sequences of programs, one of them another one once: the real watch, wire and posts.

The library's collective is a stand-in that never looks at what it carries: it ends where all members have come, with
whatever they brought, as a library does whose members call it with equal sizes; the root of a broadcast does not wait.
"""

from __future__ import annotations

import contextlib
import random
import re
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist

import shardplan as sp
from rank_threads import in_threads
from shardplan.execution.torch import faults, group_state
from shardplan.execution.torch.faults import TorchWatch
from shardplan.execution.torch.group_state import GroupState
from shardplan.execution.torch.posts import PostOffice
from shardplan.execution.torch.wire import TorchWire

GRACE, TIMEOUT = 0.1, 10.0  # of half a second
HOST = torch.device("cpu")


@contextlib.contextmanager
def hasty() -> Iterator[None]:
    """All that is waited for before the store is asked, in a fifth of its time."""
    short = {"GRACE": GRACE, "TICK": GRACE / 5}
    more = {"PATIENCE": 4 * GRACE, "POLL": GRACE / 50, "ANSWER": GRACE / 10}
    with patch.multiple(group_state, **short), patch.multiple(faults, **short, **more):
        yield


@dataclass
class Library:
    """Where members of a group meet, call after call; `recv` is how a connection is closed (`TorchWire.cut`)."""

    size: int
    came: Counter[int] = field(default_factory=Counter)
    lock: threading.Condition = field(default_factory=threading.Condition)
    closed: bool = False

    def recv(self, *_: Any) -> Library:
        return self

    def send(self, *_: Any) -> None:
        """A message of no use, which ends no collective."""

    def wait(self, _: Any) -> None:
        with self.lock:
            self.closed = True
            self.lock.notify_all()
        raise RuntimeError("closed")


@dataclass
class Call:
    """One member's call of the library."""

    library: Library
    number: int
    waits: bool

    def __hash__(self) -> int:
        return id(self)

    def wait(self, timeout: Any) -> None:
        library = self.library
        with library.lock:
            library.came[self.number] += 1
            library.lock.notify_all()
            if self.waits and not library.lock.wait_for(
                lambda: library.closed or library.came[self.number] >= library.size, timeout.total_seconds()
            ):
                raise RuntimeError("timed out")
            if library.closed and library.came[self.number] < library.size:
                raise RuntimeError("connection closed by peer")


@dataclass
class Seen:
    """What a rank saw: the runs whose results it has, and what each further one raised."""

    done: list[int]
    errors: list[tuple[int, str]]


def run_sequence(programs: list[list[str]], known: set[str], roots: set[int], tries: int) -> list[Seen]:
    """Run by each rank its programs (digests), `known` ones without agreement; run k is a broadcast if in `roots`.

    A rank whose run fails goes on with the next one, `tries` times in all.
    """
    ranks, store = tuple(range(len(programs))), dist.HashStore()
    library = Library(len(ranks))
    found = [Seen([], []) for _ in ranks]
    states = [GroupState(library, store, ranks) for _ in ranks]

    def one(rank: int) -> None:
        state = states[rank]
        state.__dict__["aside"] = store
        state.__dict__["posts"] = PostOffice(store, rank)
        state.agreed |= known
        for number, digest in enumerate(programs[rank]):
            watch = TorchWatch(ranks, rank, f"program {digest[:4]}", digest, ["op"], TIMEOUT, state)
            wire = TorchWire(library, watch, HOST, native=True)
            try:
                watch.begin("")
                watch.begin_step(0)
                wire.group_of(ranks)
                wire.wait_call(ranks, Call(library, number, number not in roots or rank != 0))
                wire.compare_posts()
                found[rank].done.append(number)
            except sp.ShardplanError as error:
                found[rank].errors.append((number, str(error)))
                watch.broke(error, wire)
                wire.abandon()
                if len(found[rank].errors) == tries:
                    return

    in_threads(ranks, one)
    for state in states:
        state.end()
    return found


def named_in(text: str) -> set[int]:
    """The ranks that an error names, beside the list of all."""
    text = re.sub(r"the ranks \[[\d, ]+\] do| of \[[\d, ]+\]", "", text)
    return {int(n) for found in re.findall(r"ranks? (\d+|\[[\d, ]+\])", text) for n in re.findall(r"\d+", found)}


def wrong_sequences(count: int, seed: int, together: int = 1) -> tuple[list[str], float]:
    """Of so many random sequences in which one rank differs once, some at a time: what is wrong; and seconds.

    Ranks mostly wait, so that many sequences take the time of one.
    """
    rng, started = random.Random(seed), time.perf_counter()
    seeds = [rng.getrandbits(64) for _ in range(count)]
    with ThreadPoolExecutor(together) as pool:
        wrong = [text for found in pool.map(wrong_ranks, seeds) for text in found]
    return wrong, time.perf_counter() - started


def wrong_ranks(seed: int) -> list[str]:
    """Run a random sequence in which one rank differs once; a line for each rank that is not told, or not of whom."""
    rng, wrong = random.Random(seed), list[str]()
    size, length = rng.randint(2, 5), rng.randint(3, 6)
    names = [f"{n:09x}{0:055x}" for n in rng.sample(range(16**8, 16**9), 8)]
    common = [rng.choice(names) for _ in range(length)]
    at, who = rng.randrange(length - 1), rng.randrange(size)
    programs = [list(common) for _ in range(size)]
    programs[who][at] = rng.choice([n for n in names if n != common[at]])
    known = set(rng.sample(names, rng.randint(0, len(names))))
    roots = {n for n in range(length) if rng.random() < 0.3}
    found = run_sequence(programs, known, roots, tries=rng.randint(1, 2))
    for rank, seen in enumerate(found):
        first = seen.errors[0] if seen.errors else (length, "")
        hears = next((n for n in range(at + 1, length) if rank or n not in roots), length)
        early, late = first[0] < at, first[0] > hears
        named = who in named_in(first[1]) or rank == who or first[0] > at + 1
        if early or late or not named:
            wrong.append(f"sequence {seed}, rank {rank} of {size}, rank {who} differs in run {at}: {seen}")
    return wrong

"""Before a program runs for the first time, the processes that own its devices compare what they are about to run.

Unequal programs would wait for each other for ever, or mix up their bytes. A hash of the program's text goes through
the key-value store of `jax.distributed`, which every launch has: each process writes its own, all meet at a barrier,
the first process compares, and the others read its verdict. That is at most `MOST_OPERATIONS` operations for a process,
however many there are, and none when the program runs again.

Programs that have been agreed upon may still be run in different orders: see `executables.guard_with_header`.

What lies in the store, below `shardplan/PROCESSES/NUMBER` of a meeting: `came/PROCESS`, the digest of one, which the
first process deletes, and `verdict`: the digests by process where they differ, else none. A process that raises instead
of running comes with what it raises in place of a digest.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax  # pyright: ignore[reportMissingImports]
from jax._src.distributed import global_state  # pyright: ignore[reportMissingImports]

from shardplan.core.program import Program
from shardplan.errors import BackendError, TimedOut
from shardplan.execution import agreement
from shardplan.execution.agreement import Agreement, RankFailed, RankReady, Refusal, Word, Words, meet
from shardplan.execution.rank_names import format_ranks

MOST_OPERATIONS = 5
RAISED = "raised "  # begins what a process says that raises instead of coming with a program; no digest does
SHOWN_DIGITS = 12  # hexadecimal digits of a hash in a message: enough to tell programs apart by eye
LEAST_SECONDS = 1.0  # for the verdict, which is on its way once all have met, however little time is left
_agreed: set[tuple[str, tuple[int, ...]]] = set()  # digests of programs, by the processes that agreed on them
_meetings: Counter[tuple[int, ...]] = Counter()  # held so far, by processes: all of them count alike


def agree(program: Program, timeout: float) -> None:
    """Return when the processes that own the program's devices have come with it; at once if they have before.

    Waits `timeout` seconds at most for the others.

    Raises:
        BackendError: Another program in another process, on every process; no `jax.distributed.initialize()`.
        TimedOut: Processes that did not come, by number.
    """
    if not (processes := _meeting_processes(program.devices)):
        return
    digest = hashlib.sha256(str(program).encode()).hexdigest()
    if (digest, processes) not in _agreed:
        _next_meeting(processes, f"a program of {len(program.steps)} steps").hold(digest, timeout)
        _agreed.add((digest, processes))


def refusing(devices: Sequence[int]) -> contextlib.AbstractContextManager[None]:
    """Tell the other processes that own devices, given by id, what the block raises in this one: see `refuse`."""
    return agreement.refusing(functools.partial(refuse, devices))


def refuse(devices: Sequence[int], error: BaseException) -> None:
    """Tell the other processes that own devices, given by id, that this one raises `error` instead of coming with them.

    Those that come with a program that they have not agreed on raise too, at once. It takes as long as they need to
    come, at most `LEAST_SECONDS`.
    """
    if processes := _meeting_processes(devices):
        _next_meeting(processes, "nothing").refuse(f"{type(error).__name__}: {' '.join(str(error).split())}")


def processes_of(devices: Sequence[int]) -> tuple[int, ...]:
    """Return the processes, ascending, that own devices, which are given by id."""
    wanted = set(devices)
    return tuple(sorted({d.process_index for d in jax.devices() if d.id in wanted}))


def _meeting_processes(devices: Sequence[int]) -> tuple[int, ...]:
    """Return the processes that own devices, given by id, where this is one of several; else none."""
    processes = processes_of(devices) if jax.process_count() > 1 else ()
    return processes if len(processes) > 1 and jax.process_index() in processes else ()


def _next_meeting(processes: tuple[int, ...], what: str) -> Meeting:
    if global_state.client is None:
        raise BackendError("jax: several processes without jax.distributed.initialize(), so nothing can be compared")
    _meetings[processes] += 1
    return Meeting(global_state.client, jax.process_index(), processes, _meetings[processes] - 1, what)


@dataclass(slots=True)
class Meeting:
    """One comparison among some processes, and its mail: see `agreement.Mail`."""

    client: Any  # of the store of `jax.distributed`
    me: int  # this process
    processes: Sequence[int]  # ascending
    number: int  # how many these have held before
    what: str  # what this process is about to run, for messages
    said: str = ""  # what this process came with

    def hold(self, digest: str, timeout: float) -> None:
        """Compare digests, within `timeout` seconds; raises as `agree`."""
        self.said = digest
        mine = Agreement.among_all(self.processes, self.me, RankReady(digest))
        meet(mine, self, timeout)
        if not isinstance(found := mine.verdict, Refusal):
            return
        if found.failure:
            raise BackendError(f"jax: {self.what} did not start: process {found.failure}; nothing was sent")
        others = [f"{p} ({d[:SHOWN_DIGITS]})" for p, d in sorted(found.offers.items()) if d != digest]
        raise BackendError(
            f"jax: process {self.me} runs {self.what} (hash {digest[:SHOWN_DIGITS]}), but another is run by "
            f"process {', '.join(others)}; nothing was sent"
        )

    def refuse(self, why: str) -> None:
        """Come without a program, and go as soon as all have come, or after `LEAST_SECONDS`; `why` is a line.

        It raises nothing: who calls it is about to raise what goes before.
        """
        self.said = RAISED + why
        # Where the others are late, they find what this process said; where the store is lost, nobody hears anything.
        with contextlib.suppress(TimedOut, jax.errors.JaxRuntimeError):
            self.post([])
            self.collect(LEAST_SECONDS)

    def post(self, words: Words) -> None:
        """Say to all what this process comes with."""
        self.client.key_value_set(f"{self._key}/came/{self.me}", self.said)

    def collect(self, seconds: float) -> Mapping[int, Word]:
        """Return what all say, once all have come; where some do not, the words of those that fail, or `TimedOut`."""
        deadline = time.monotonic() + seconds
        try:
            self.client.wait_at_barrier(self._key, max(1, _milliseconds(seconds)), list(self.processes))
            if self.me == self.processes[0]:
                found = self._came()
                unlike = found if len(set(found.values())) > 1 else {}
                self.client.key_value_set(f"{self._key}/verdict", json.dumps(unlike))
                self.client.key_value_delete(f"{self._key}/came/")
            else:
                left = max(LEAST_SECONDS, deadline - time.monotonic())
                found = json.loads(self.client.blocking_key_value_get(f"{self._key}/verdict", _milliseconds(left)))
        except jax.errors.JaxRuntimeError as error:
            came = self._came()
            found = {p: text for p, text in came.items() if text.startswith(RAISED)}
            if not found:
                raise self._late_error(came, seconds, error) from None
        found = found or dict.fromkeys(self.processes, self.said)
        return {int(p): RankFailed(text) if text.startswith(RAISED) else RankReady(text) for p, text in found.items()}

    def close(self) -> None:
        """Nothing: the first has deleted what all have said."""

    @property
    def _key(self) -> str:
        return f"shardplan/{'-'.join(map(str, self.processes))}/{self.number}"

    def _came(self) -> dict[int, str]:
        """Return what those have said that have come, by process."""
        return {int(k.rpartition("/")[2]): d for k, d in self.client.key_value_dir_get(f"{self._key}/came/")}

    def _late_error(self, came: dict[int, str], timeout: float, error: Exception) -> TimedOut:
        """Return the error that says who is missing; nobody is where the others gave up before this process came."""
        late = [p for p in self.processes if p not in came]
        told = f"jax: process {self.me} came to run {self.number}, {self.what}, but "
        if late:
            return TimedOut(f"{told}after {timeout:g} s these had not: {format_ranks(late)[1:-1]}")
        return TimedOut(f"{told}the others had given up waiting: {str(error).splitlines()[0]}")


def _milliseconds(seconds: float) -> int:
    return int(1000 * seconds)

"""Before a program runs for the first time, the processes that own its devices compare what they are about to run.

Unequal programs would wait for each other for ever, or mix up their bytes. A hash of the program's text goes through
the key-value store of `jax.distributed`, which every launch has: each process writes its own, all meet at a barrier,
the first process compares, and the others read its verdict. That is at most `MOST_OPERATIONS` operations for a process,
however many there are, and none when the program runs again.

Programs that have been agreed upon may still be run in different orders: see `header`.

What lies in the store, below `shardplan/PROCESSES/NUMBER` of a meeting: `came/PROCESS`, the digest of one, which the
first process deletes, and `verdict`: the digests by process where they differ, else none. A process that raises instead
of running comes with what it raises in place of a digest.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import time
from collections import Counter
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Any

from shardplan.core.program import Program
from shardplan.errors import BackendError, TimedOut
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
    import jax  # pyright: ignore[reportMissingImports]

    if jax.process_count() == 1:
        return
    processes = processes_of(program.devices)
    me = jax.process_index()
    digest = hashlib.sha256(str(program).encode()).hexdigest()
    if me not in processes or len(processes) == 1 or (digest, processes) in _agreed:
        return
    meeting = Meeting(_client(), me, processes, _meetings[processes], f"a program of {len(program.steps)} steps")
    _meetings[processes] += 1
    meeting.hold(digest, timeout)
    _agreed.add((digest, processes))


@contextlib.contextmanager
def refusing(devices: Sequence[int]) -> Generator[None]:
    """Tell the other processes that own devices, given by id, what the block raises in this one: see `refuse`."""
    try:
        yield
    except BaseException as error:  # an interrupt too: the others would wait for this process
        refuse(devices, error)
        raise


def refuse(devices: Sequence[int], error: BaseException) -> None:
    """Tell the other processes that own devices, given by id, that this one raises `error` instead of coming with them.

    Those that come with a program that they have not agreed on raise too, at once. It takes as long as they need to
    come, at most `LEAST_SECONDS`.
    """
    import jax  # pyright: ignore[reportMissingImports]

    if jax.process_count() == 1:
        return
    processes, me = processes_of(devices), jax.process_index()
    if me not in processes or len(processes) == 1:
        return
    meeting = Meeting(_client(), me, processes, _meetings[processes], "nothing")
    _meetings[processes] += 1
    meeting.refuse(f"{type(error).__name__}: {' '.join(str(error).split())}")


def processes_of(devices: Sequence[int]) -> tuple[int, ...]:
    """Return the processes, ascending, that own devices, which are given by id."""
    import jax  # pyright: ignore[reportMissingImports]

    wanted = set(devices)
    return tuple(sorted({d.process_index for d in jax.devices() if d.id in wanted}))


def _client() -> Any:
    from jax._src.distributed import global_state  # pyright: ignore[reportMissingImports]

    if global_state.client is None:
        raise BackendError("jax: several processes without jax.distributed.initialize(), so nothing can be compared")
    return global_state.client


@dataclass(frozen=True, slots=True)
class Meeting:
    """One comparison among some processes."""

    client: Any  # of the store of `jax.distributed`
    me: int  # this process
    processes: Sequence[int]  # ascending
    number: int  # how many these have held before
    what: str  # what this process is about to run, for messages

    def hold(self, digest: str, timeout: float) -> None:
        """Compare digests, within `timeout` seconds; raises as `agree`."""
        import jax  # pyright: ignore[reportMissingImports]

        deadline = time.monotonic() + timeout
        try:
            self._come(digest, timeout)
            if self.me == self.processes[0]:
                found = self._judge()
            else:
                left = max(LEAST_SECONDS, deadline - time.monotonic())
                found = json.loads(self.client.blocking_key_value_get(f"{self._key}/verdict", _milliseconds(left)))
        except jax.errors.JaxRuntimeError as error:
            found = self._came()
            if not any(text.startswith(RAISED) for text in found.values()):
                raise self._late_error(found, timeout, error) from None
        if why := next((f"process {p} {text}" for p, text in found.items() if text.startswith(RAISED)), ""):
            raise BackendError(f"jax: {self.what} did not start: {why}; nothing was sent")
        others = [f"{p} ({d[:SHOWN_DIGITS]})" for p, d in sorted((int(p), d) for p, d in found.items()) if d != digest]
        if others:
            raise BackendError(
                f"jax: process {self.me} runs {self.what} (hash {digest[:SHOWN_DIGITS]}), but another is run by "
                f"process {', '.join(others)}; nothing was sent"
            )

    def refuse(self, why: str) -> None:
        """Come without a program, and go as soon as all have come, or after `LEAST_SECONDS`; `why` is a line."""
        import jax  # pyright: ignore[reportMissingImports]

        with contextlib.suppress(jax.errors.JaxRuntimeError):  # the others are late: they find what this process said
            self._come(RAISED + why, LEAST_SECONDS)
            if self.me == self.processes[0]:
                self._judge()

    @property
    def _key(self) -> str:
        return f"shardplan/{'-'.join(map(str, self.processes))}/{self.number}"

    def _come(self, digest: str, timeout: float) -> None:
        """Say what this process comes with, and wait until all have come."""
        self.client.key_value_set(f"{self._key}/came/{self.me}", digest)
        self.client.wait_at_barrier(self._key, max(1, _milliseconds(timeout)), list(self.processes))

    def _judge(self) -> dict[int, str]:
        """Write the verdict: what the first of the processes does, once all have come."""
        found = self._came()
        self.client.key_value_set(f"{self._key}/verdict", json.dumps({} if len(set(found.values())) == 1 else found))
        self.client.key_value_delete(f"{self._key}/came/")
        return found

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

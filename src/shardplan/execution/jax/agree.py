"""Before a program runs for the first time, the processes that own its devices compare what they are about to run.

Unequal programs would wait for each other for ever, or mix up their bytes. A hash of the program's text goes through
the key-value store of `jax.distributed`, which every launch has: each process writes its own, all meet at a barrier,
the first process compares, and the others read its verdict. That is at most `MOST_OPERATIONS` operations for a process,
however many there are, and none when the program runs again.

Programs that have been agreed upon may still be run in different orders: see `header`.

What lies in the store, below `shardplan/PROCESSES/NUMBER` of a meeting: `came/PROCESS`, the digest of one, which the
first process deletes, and `verdict`: the digests by process where they differ, else none.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from shardplan.core.program import Program
from shardplan.errors import BackendError, TimedOut
from shardplan.execution.rank_names import listed

MOST_OPERATIONS = 5
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

        key = f"shardplan/{'-'.join(map(str, self.processes))}/{self.number}"
        deadline = time.monotonic() + timeout
        try:
            self.client.key_value_set(f"{key}/came/{self.me}", digest)
            self.client.wait_at_barrier(key, max(1, _milliseconds(timeout)), list(self.processes))
            if self.me == self.processes[0]:
                found = self._came(key)
                self.client.key_value_set(f"{key}/verdict", json.dumps({} if len(set(found.values())) == 1 else found))
                self.client.key_value_delete(f"{key}/came/")
            else:
                left = max(LEAST_SECONDS, deadline - time.monotonic())
                found = json.loads(self.client.blocking_key_value_get(f"{key}/verdict", _milliseconds(left)))
        except jax.errors.JaxRuntimeError as error:
            raise self._late(key, timeout, error) from None
        others = [f"{p} ({d[:SHOWN_DIGITS]})" for p, d in sorted((int(p), d) for p, d in found.items()) if d != digest]
        if others:
            raise BackendError(
                f"jax: process {self.me} runs {self.what} (hash {digest[:SHOWN_DIGITS]}), but another is run by "
                f"process {', '.join(others)}; nothing was sent"
            )

    def _came(self, key: str) -> dict[int, str]:
        """Return the digests of those that have come, by process."""
        return {int(k.rpartition("/")[2]): d for k, d in self.client.key_value_dir_get(f"{key}/came/")}

    def _late(self, key: str, timeout: float, error: Exception) -> TimedOut:
        """Return the error that says who is missing; nobody is where the others gave up before this process came."""
        came = self._came(key)
        late = [p for p in self.processes if p not in came]
        told = f"jax: process {self.me} came to run {self.number}, {self.what}, but "
        if late:
            return TimedOut(f"{told}after {timeout:g} s these had not: {listed(late)[1:-1]}")
        return TimedOut(f"{told}the others had given up waiting: {str(error).splitlines()[0]}")


def _milliseconds(seconds: float) -> int:
    return int(1000 * seconds)

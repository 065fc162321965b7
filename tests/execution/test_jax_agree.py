"""Agreement among processes, against a store of one process: counted operations, verdicts, absences."""

from __future__ import annotations

import threading
from collections import Counter
from typing import Any

import pytest

from rank_threads import in_threads
from shardplan.errors import BackendError, ShardplanError, TimedOut
from shardplan.execution.jax import agree
from shardplan.execution.jax.agree import MOST_OPERATIONS, Meeting

jax = pytest.importorskip("jax")


class Store:
    """The key-value store and barriers of a launch; `client(p)` counts the operations of process p."""

    def __init__(self) -> None:
        self.values: dict[str, str] = {}
        self.changed = threading.Condition()
        self.arrived: dict[str, set[int]] = {}
        self.failed: set[str] = set()
        self.operations: Counter[int] = Counter()

    def client(self, process: int) -> Client:
        return Client(self, process)


class Client:
    def __init__(self, store: Store, process: int) -> None:
        self.store, self.process = store, process

    def _count(self) -> None:
        self.store.operations[self.process] += 1

    def key_value_set(self, key: str, value: str) -> None:
        with self.store.changed:
            self._count()
            assert key not in self.store.values, "the real store refuses to overwrite"
            self.store.values[key] = value
            self.store.changed.notify_all()

    def key_value_dir_get(self, key: str) -> list[tuple[str, str]]:
        with self.store.changed:
            self._count()
            return [(k, v) for k, v in self.store.values.items() if k.startswith(key)]

    def key_value_delete(self, key: str) -> None:
        with self.store.changed:
            self._count()
            for k in [k for k in self.store.values if k.startswith(key)]:
                del self.store.values[k]

    def blocking_key_value_get(self, key: str, milliseconds: int) -> str:
        with self.store.changed:
            self._count()
            if not self.store.changed.wait_for(lambda: key in self.store.values, milliseconds / 1000):
                raise jax.errors.JaxRuntimeError(f"DEADLINE_EXCEEDED: {key}")
            return self.store.values[key]

    def wait_at_barrier(self, name: str, milliseconds: int, processes: list[int]) -> None:
        with self.store.changed:
            self._count()
            if name in self.store.failed:
                raise jax.errors.JaxRuntimeError("DEADLINE_EXCEEDED: Barrier timed out.\nmore")
            here = self.store.arrived.setdefault(name, set())
            here.add(self.process)
            self.store.changed.notify_all()
            if not self.store.changed.wait_for(lambda: here >= set(processes), milliseconds / 1000):
                self.store.failed.add(name)
                raise jax.errors.JaxRuntimeError("DEADLINE_EXCEEDED: Barrier timed out.\nmore")


def meet(store: Store, processes: list[int], digests: dict[int, str], timeout: float = 60.0, number: int = 0) -> Any:
    """What each process that comes is told: None, or its error."""

    def one(process: int) -> ShardplanError | None:
        try:
            Meeting(store.client(process), process, processes, number, "a program of 2 steps").hold(
                digests[process], timeout
            )
        except ShardplanError as error:
            return error
        return None

    return in_threads(digests, one, 120)


@pytest.mark.parametrize("count", [4, 16, 64])
def test_operations_are_constant(count: int) -> None:
    """The first process reads what all have written, the others read its verdict: 5 operations and 3."""
    store = Store()
    told = meet(store, list(range(count)), dict.fromkeys(range(count), "abc"))
    assert set(told.values()) == {None} and len(told) == count
    assert store.operations == {0: MOST_OPERATIONS, **dict.fromkeys(range(1, count), 3)}
    assert len(store.values) == 1, "no key a process is left behind"


@pytest.mark.parametrize("odd", [[0], [5], [2, 3]])
def test_another_program_is_told_everywhere(odd: list[int]) -> None:
    store = Store()
    digests = {p: "b" * 64 if p in odd else "a" * 64 for p in range(6)}
    told = meet(store, list(range(6)), digests)
    for p, error in told.items():
        others = ", ".join(f"{q} ({digests[q][:12]})" for q in range(6) if digests[q] != digests[p])
        assert isinstance(error, BackendError)
        assert str(error) == (
            f"jax: process {p} runs a program of 2 steps (hash {digests[p][:12]}), but another is run by process "
            f"{others}; nothing was sent"
        )
    assert max(store.operations.values()) == MOST_OPERATIONS


def test_absent_processes_are_named() -> None:
    store = Store()
    told = meet(store, [1, 4, 6, 7], {1: "a", 6: "a"}, timeout=0.3, number=9)
    for p in (1, 6):
        assert isinstance(told[p], TimedOut)
        assert (
            str(told[p]) == f"jax: process {p} came to run 9, a program of 2 steps, but after 0.3 s these had not: 4, 7"
        )
    assert all(isinstance(e, TimedOut) for e in meet(store, [1, 4, 6, 7], {4: "a"}, 0.3, 9).values())
    (late,) = meet(store, [1, 4, 6, 7], {7: "a"}, 60.0, 9).values()
    assert str(late) == (
        "jax: process 7 came to run 9, a program of 2 steps, but the others had given up waiting: "
        "DEADLINE_EXCEEDED: Barrier timed out."
    )


@pytest.mark.parametrize("odd", [0, 2])
def test_a_process_that_raises_is_told_of_everywhere(odd: int) -> None:
    store, why = Store(), "Infeasible: no plan within 1 byte"
    refusing = threading.Thread(target=lambda: meeting(store, odd, 7).refuse(why))
    refusing.start()
    told = meet(store, [0, 1, 2, 3], {p: "a" for p in range(4) if p != odd}, number=7)
    refusing.join(120)
    for error in told.values():
        assert isinstance(error, BackendError)
        assert str(error) == f"jax: a program of 2 steps did not start: process {odd} raised {why}; nothing was sent"
    assert len(told) == 3
    assert list(store.values) == ["shardplan/0-1-2-3/7/verdict"], "nobody waits until time is up"


def test_who_comes_after_one_that_raised_is_told_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agree, "LEAST_SECONDS", 0.05)
    store = Store()
    meeting(store, 0, 7).refuse("ValueError: no")  # which goes before the others come
    for error in meet(store, [0, 1, 2, 3], {1: "a", 2: "a", 3: "a"}, number=7).values():
        assert isinstance(error, BackendError)
        assert str(error) == (
            "jax: a program of 2 steps did not start: process 0 raised ValueError: no; nothing was sent"
        )


@pytest.mark.parametrize("lost", ["key_value_set", "wait_at_barrier", "key_value_dir_get"])
def test_who_raises_is_not_told_that_the_store_is_lost(monkeypatch: pytest.MonkeyPatch, lost: str) -> None:
    """It has an error of its own to raise, which this one would take the place of."""

    def fail(self: Client, *_: object) -> None:
        raise jax.errors.JaxRuntimeError("UNAVAILABLE: failed to connect")

    monkeypatch.setattr(agree, "LEAST_SECONDS", 0.05)
    monkeypatch.setattr(Client, lost, fail)
    meeting(Store(), 0, 7).refuse("ValueError: no")


def meeting(store: Store, process: int, number: int) -> Meeting:
    return Meeting(store.client(process), process, [0, 1, 2, 3], number, "a program of 2 steps")

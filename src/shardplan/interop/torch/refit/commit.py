"""The end of a refit: one version for all ranks, or none. Up a binomial tree and down again, in buffers made once.

A version is kept with the tensors that hold it. `RefitStarted` is a refit under way on a thread of its own.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from shardplan.errors import BackendError, LayoutError, TimedOut
from shardplan.execution.torch.wire import TorchWire

NONE = -1  # no version was given


class RefitCommit:
    """Three numbers a rank: the largest version given, the smallest, and what follows where none was given."""

    def __init__(self, ranks: Sequence[int], rank: int) -> None:
        """Take the ranks in their order; the first is the root."""
        self.ranks, self.me = tuple(ranks), ranks.index(rank)
        self.mine = torch.empty(3, dtype=torch.int64)
        self.other = torch.empty(3, dtype=torch.int64)
        self.bytes = self.mine.view(torch.uint8), self.other.view(torch.uint8)

    def run(self, wire: TorchWire, version: int | None, following: int) -> int:
        """Return the version of all ranks, once all have come; raises `LayoutError` where ranks gave different ones."""
        most = torch.iinfo(torch.int64).max
        for k, value in enumerate((NONE, most, following) if version is None else (version, version, following)):
            self.mine[k].fill_(value)
        step = 1
        while step < len(self.ranks) and not self.me & step:
            if self.me + step < len(self.ranks):
                self._take(wire, self.me + step, self.bytes[1])
                large, small, after = self.other.tolist()
                here = self.mine.tolist()
                for k, value in enumerate((max(here[0], large), min(here[1], small), max(here[2], after))):
                    self.mine[k].fill_(value)
            step *= 2
        if self.me:
            self._give(wire, self.me - step)
            self._take(wire, self.me - step, self.bytes[0])
        while step > 1:
            step //= 2
            if self.me + step < len(self.ranks):
                self._give(wire, self.me + step)
        large, small, after = self.mine.tolist()
        if large not in (NONE, small):
            raise LayoutError(f"a refit was given versions from {small} to {large}; legal is one version on all ranks")
        return after if large == NONE else large

    def _give(self, wire: TorchWire, at: int) -> None:
        _, sent = wire.post([], [(self.ranks[at], self.bytes[0])])
        wire.wait(sent)

    def _take(self, wire: TorchWire, at: int, into: torch.Tensor) -> None:
        taken, _ = wire.post([(self.ranks[at], into)], [])
        wire.wait(taken)


class ServedVersion:
    """What a target holds: a version, or why there is none."""

    __slots__ = ("changes", "reason", "torn", "version")

    def __init__(self) -> None:
        self.version: int | None = None
        self.reason = "no refit has run"
        self.changes = 0  # how often a refit, of any handle, has begun
        self.torn = False  # whether a refit has failed and no full one has succeeded since

    def begin(self) -> None:
        """Take the version back: parameters are about to change."""
        self.version, self.reason = None, "a refit is under way"
        self.changes += 1

    def fail(self, error: BaseException) -> None:
        """Say why there is none: parameters may be torn, until a full refit has succeeded."""
        lines = str(error).splitlines()
        self.version, self.torn = None, True
        self.reason = f"the last refit failed: {lines[0] if lines else type(error).__name__}"

    def succeed(self, version: int) -> None:
        """Hold a version."""
        self.version, self.torn = version, False

    def served_version(self) -> int:
        """Return the version; raises `BackendError` where there is none."""
        if self.version is None:
            raise BackendError(f"these weights are not served: {self.reason}; legal is to serve after a full refit")
        return self.version


_held = WeakTensorKeyDictionary()


def served_by(tensor: torch.Tensor) -> ServedVersion:
    """Return what the model holds whose first tensor this is."""
    if tensor not in _held:
        _held[tensor] = ServedVersion()
    return _held[tensor]


class RefitStarted:
    """A refit under way on a thread of its own; `wait` for it before its parameters are used or changed."""

    __slots__ = ("_error", "_thread", "version")

    def __init__(self, run: Callable[[], int]) -> None:
        self.version: int | None = None
        self._error: BaseException | None = None

        def body() -> None:
            try:
                self.version = run()
            except BaseException as error:  # raised where it is waited for
                self._error = error

        self._thread = threading.Thread(target=body, name="shardplan-refit", daemon=True)
        self._thread.start()

    def done(self) -> bool:
        """Whether it has ended, in success or not."""
        return not self._thread.is_alive()

    def wait(self, timeout: float | None = None) -> int:
        """Return the version, once all ranks have it.

        Raises what the refit raised, at every call, and `TimedOut` after `timeout` seconds (it goes on then).
        """
        self._thread.join(timeout)
        if self._thread.is_alive():
            raise TimedOut(f"the refit has not ended within {timeout:g} s; it goes on")
        if self._error is not None:
            raise self._error
        assert self.version is not None
        return self.version

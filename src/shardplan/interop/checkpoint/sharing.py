"""Several processes write one checkpoint: whose each file is, and what they know of each other, by the file system.

Every process keeps a note in the destination, `shardplan-process-00001.json`: what it has finished, and how far it is.
The others read it, and see by its changes that the process lives. The first process closes the checkpoint when every
note says that it is done, and takes the notes away. Where one gives no sign, the others name it when the time is over.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from shardplan.core.decoding import decode_json
from shardplan.errors import BackendError, LayoutError, ParseError, ShardplanError, TimedOut, excerpt, line
from shardplan.plans.plan_file import write_atomic

NOTE = re.compile(r"shardplan-process-(\d{5})\.json\Z")
POLL, LONGEST_POLL, BEAT = 0.02, 0.5, 1.0  # seconds between two looks, at first and later, and between two signs
GRACE = 10.0  # seconds in which a process that failed before this one came may come again
_LAUNCHERS = (  # of torchrun, Open MPI, and MPICH with what stems from it
    ("RANK", "WORLD_SIZE"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("PMI_RANK", "PMI_SIZE"),
)


@dataclass(frozen=True, slots=True)
class ProcessShare:
    """Which of how many processes this is, counted from 0."""

    number: int = 0
    count: int = 1

    def __post_init__(self) -> None:
        """Refuse a number that is none of the count."""
        if not 0 <= self.number < self.count:
            raise LayoutError(f"process {self.number} of {self.count}; legal are 0 to {max(self.count - 1, 0)}")


def launched_share(environment: Mapping[str, str]) -> ProcessShare:
    """Return which process a launcher says this is; the only one where there is no launcher. Raises `ParseError`.

    >>> launched_share({"RANK": "1", "WORLD_SIZE": "4"}), launched_share({})
    (ProcessShare(number=1, count=4), ProcessShare(number=0, count=1))
    """
    for keys in _LAUNCHERS:
        if all(key in environment for key in keys):
            texts = [environment[key] for key in keys]
            if not all(t.isdecimal() for t in texts):
                said = ", ".join(f"{k} = {excerpt(t)}" for k, t in zip(keys, texts, strict=True))
                raise ParseError(f"the launcher's variables {said}; legal are whole numbers")
            return ProcessShare(int(texts[0]), int(texts[1]))
    return ProcessShare()


def assign_by_size(sizes: Sequence[int], count: int) -> list[int]:
    """Return whose each of some sizes is, the largest first, to who has least: a function of its arguments alone.

    >>> assign_by_size([5, 3, 3, 1], 2)
    [0, 1, 1, 0]
    """
    load, out = [0] * count, [0] * len(sizes)
    for k in sorted(range(len(sizes)), key=lambda k: -sizes[k]):
        out[k] = min(range(count), key=lambda p: load[p])
        load[out[k]] += sizes[k]
    return out


@dataclass(slots=True)
class ProcessNote:
    """What one process says: the request, which process of how many, how far it is, and the files it has finished."""

    request: str
    number: int
    count: int
    verified: bool = False
    complete: bool = False
    failed: str = ""
    files: dict[str, dict[str, Any]] = field(default_factory=dict[str, dict[str, Any]])

    @staticmethod
    def of(path: Path) -> ProcessNote | None:
        """Read a note, None where it is gone; raises `ParseError` where it is malformed."""
        try:
            return decode_json(path.read_bytes(), ProcessNote)
        except FileNotFoundError:
            return None
        except (OSError, ParseError) as error:
            raise ParseError(f"{line(path)}: {line(error)}; legal is what reshard wrote") from None


def notes_of(folder: Path) -> dict[int, ProcessNote]:
    """Return the notes in a folder, by the number of the process; raises `ParseError`."""
    found = {int(m.group(1)): ProcessNote.of(p) for p in folder.glob("*.json") if (m := NOTE.match(p.name))}
    return {number: note for number, note in sorted(found.items()) if note is not None}


def note_path(folder: Path, number: int) -> Path:
    """Return where the note of a process is."""
    return folder / f"shardplan-process-{number:05d}.json"


class ProcessMeeting:
    """This process among the others; alone it writes no note and waits for nobody."""

    def __init__(self, folder: Path, share: ProcessShare, request: str, timeout: float) -> None:
        """Come: write a note that keeps what an earlier one of this number says is finished."""
        self.folder, self.share, self.timeout = folder, share, timeout
        self._beaten = self._begun = time.monotonic()
        self._poll = POLL
        self._seen: dict[int, tuple[tuple[int, int], ProcessNote]] = {}  # as they were last, with when they changed
        self._first: dict[int, tuple[int, int]] = {}  # as they were when this process came
        self._alive: dict[int, float] = {}
        self.note = ProcessNote(request, share.number, share.count)
        if share.count > 1:
            if (old := ProcessNote.of(note_path(folder, share.number))) is not None and old.request == request:
                self.note.files = old.files
            self._look()
            self._first = {number: sign for number, (sign, _) in self._seen.items()}
            self.save()

    def save(self) -> None:
        """Write the note; raises `ShardplanError` where that cannot be."""
        if self.share.count > 1:
            path = note_path(self.folder, self.share.number)
            try:
                write_atomic(path, (json.dumps(asdict(self.note)) + "\n").encode())
            except OSError as error:
                raise ShardplanError(f"cannot write {line(path)}: {error.strerror or error}") from None

    def beat(self) -> None:
        """Give a sign, once a second at most."""
        if self.share.count > 1 and (now := time.monotonic()) > self._beaten + BEAT:
            self._beaten = now
            with contextlib.suppress(OSError):
                os.utime(note_path(self.folder, self.share.number))

    def fail(self, error: BaseException) -> None:
        """Say what went wrong, so that the others need not wait for this process."""
        self.note.failed = str(line(error)) or type(error).__name__
        with contextlib.suppress(ShardplanError):
            self.save()

    def leave(self) -> None:
        """Take the note away."""
        if self.share.count > 1:
            note_path(self.folder, self.share.number).unlink(missing_ok=True)

    def late_processes(self, how_far: str) -> list[int]:
        """Return the processes whose notes do not say `verified`, or `complete`, of this request."""
        self._look()
        out: list[int] = []
        for number in range(self.share.count):
            note = self.note if number == self.share.number else self._note(number)
            if note is None or not getattr(note, how_far):
                out.append(number)
        return out

    def wait(self, late: list[int]) -> None:
        """Wait a moment for some processes, to be called until nobody is late.

        Raises `BackendError` where one failed and did not come again, and `TimedOut` where one gave no sign in time.
        """
        self.beat()
        now, where = time.monotonic(), f"reshard into {line(self.folder)}"
        for number in late:
            if number == self.share.number:
                continue
            who, seen = f"process {number} of {self.share.count}", self._seen.get(number)
            came = seen is not None and seen[0] != self._first.get(number)
            old = now - self._begun < GRACE  # of an earlier run, perhaps, until the process comes again
            if seen is not None and seen[1].failed and (came or not old):
                raise BackendError(f"{where}: {who} failed: {seen[1].failed}")
            if now - self._alive.get(number, self._begun) > self.timeout:
                what = "gave no sign" if came else "did not come"
                raise TimedOut(
                    f"{where}: {who} {what} within {self.timeout:g} s; legal is the same call in all {self.share.count}"
                    " processes that the launcher started, or process=(0, 1) in one alone"
                )
        time.sleep(self._poll)
        self._poll = min(2 * self._poll, LONGEST_POLL)

    def _note(self, number: int) -> ProcessNote | None:
        note = self._seen[number][1] if number in self._seen else None
        return note if note is not None and note.count == self.share.count else None

    def _look(self) -> None:
        for number in range(self.share.count):
            path = note_path(self.folder, number)
            try:
                status = path.stat()
                sign = status.st_mtime_ns, status.st_size
                if number in self._seen and self._seen[number][0] == sign:
                    continue
                note = ProcessNote.of(path)
            except OSError:
                sign, note = (0, 0), None
            if note is None:
                self._seen.pop(number, None)
                continue
            if note.request != self.note.request:
                raise LayoutError(
                    f"reshard into {line(self.folder)}: process {number} of {note.count} is of another request "
                    f"({note.request[:16]}, and this is {self.note.request[:16]}); legal is one call in all"
                )
            self._seen[number] = sign, note
            self._alive[number] = time.monotonic()

"""What ranks tell each other through the store: that they run one program, and why a run failed.

A run has a number, which all its ranks count alike, and one verdict, `ok` or what went wrong first: whoever finds a
fault writes it, nobody overwrites it, and every rank that fails raises what it says. Agreeing on a program at its first
run costs a rank at most seven operations on the store, however many ranks there are; later runs cost none. Only a rank
that has waited for long (see `group_state`) says what it runs and for whom it waits, and reads the verdict.

A rank blocked in gloo cannot be interrupted without closing all connections. So a rank that knows of a fault, and still
waits for another, asks that one for a message of no use: one that failed lets the others go before it raises
(`TorchWatch.broke`). Whoever is not let go in time closes its connections.

What lies in the store, below `shardplan/HASH` of the ranks: at `RANK` what that rank last said of itself, and below
`NUMBER` of a run `program` (the digest of who came first), `count` (ranks that came with it), `verdict`, `left` (ranks
that have left a failed run), `asked/RANK` and `asked/RANK/K` (how often that rank was asked for a message, and the
K-th such request: who asks, the bytes, the tag). A verdict is written by `compare_set`, in place of nothing or of `ok`,
so that the first fault holds.

Two threads: the run's, which agrees, waits, fails and raises; and that of `group_state`, which calls `slow` and `over`
while the run's thread is blocked in a wait. Both may set `verdict`: to what the store holds, wherever it can be
reached, so to the same.
"""

from __future__ import annotations

import contextlib
import hashlib
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from functools import lru_cache
from typing import Any, NamedTuple

from shardplan.errors import BackendError, LayoutError, TimedOut
from shardplan.execution.agreement import describe_unlike, late_error, silent
from shardplan.execution.rank_names import format_ranks, name_ranks
from shardplan.execution.torch.group_state import GRACE, TICK, GroupState, group_state
from shardplan.execution.torch.posts import Post, PostedRun
from shardplan.execution.torch.waits import Releasing, Wait

PATIENCE = 4 * GRACE  # seconds that a failed rank lets others go, and that others wait to be let go
POLL = TICK / 10  # seconds between two looks into the store for what another rank is about to say
ANSWER = TICK / 2  # seconds between two looks for ranks that ask to be let go: each look is several operations
OK = "ok"
TAGS = 2**31  # gloo's tags have 31 bits
# 2**32 over the golden ratio, and odd: multiples of it, modulo a power of two, lie far apart and are all distinct.
SPREAD = 0x9E3779B1
RUNS = 2**15  # tags lie so many runs apart from turn to turn: those of 2**16 turns, in runs near each other, differ
KEY_DIGITS = 16  # hexadecimal digits of the hash of a set of ranks in the store: enough that no two share keys
IDENTITY_DIGITS = 15  # hexadecimal digits of a digest in a post: 60 bits, which a signed 64-bit integer holds
MOST_SETS = 256  # sets of ranks whose hash is remembered
TAG_DIGITS = 8  # hexadecimal digits of a digest in a tag: 32 bits, all that a tag can hold


class RankReport(NamedTuple):
    """What a rank last said of itself."""

    number: int
    digest: str
    peer: int  # for whom it waits in that run; -1 for nobody, or for all before it starts
    name: str


@dataclass(slots=True, eq=False)
class TorchWatch:
    """The view of one rank on one run of a program by `ranks`."""

    ranks: tuple[int, ...]
    rank: int
    name: str  # of the program, for messages
    digest: str  # the identity of the program, the same on all ranks
    steps: Sequence[str]  # their texts, for messages
    timeout: float  # seconds that any wait may take
    state: GroupState = field(default_factory=group_state)
    step: int = -1  # the one that runs; -1 before the first
    number: int = 0  # of the run, from 1
    verdict: str = ""  # once this rank knows that the run has failed
    running: bool = False  # whether others may have sent something
    parts: bool = False  # whether it is of several programs, each with tags of its own, and begins once for all
    untagged: bool = False  # whether what it has posted could meet what another run posts
    _posted: dict[int, str] = field(default_factory=dict[int, str])  # the rank that posted another program, and which
    _asked: float = 0.0  # seconds into its wait at which it asked to be let go
    _answered: int = 0  # requests of others that it has answered
    _said: Wait | None = None  # what it has told the others that it waits for

    def __post_init__(self) -> None:
        """Number the run."""
        self.state.runs[self.ranks] += 1
        self.number = self.state.runs[self.ranks]

    @property
    def tag(self) -> int:
        """A tag for the messages of this run: its number and the identity of its program, so others never match.

        Runs of one program have different tags for `TAGS` runs; those of two programs are equal by chance once in
        `TAGS`.
        """
        return self.tag_of(0)

    @property
    def posted_run(self) -> PostedRun:
        """This run in what ranks post, whatever each of them runs as that number."""
        return PostedRun(int(_key_of(self.ranks)[:IDENTITY_DIGITS], 16), self.number)

    @property
    def post(self) -> Post:
        """What this rank runs in it."""
        return Post(int(self.digest[:IDENTITY_DIGITS], 16), self.name)

    def tag_of(self, turn: int) -> int:
        """A tag for the messages of a part of this run, by its turn."""
        return (int(self.digest[:TAG_DIGITS], 16) + (self.number + turn * RUNS) * SPREAD) % TAGS

    def begin(self, problem: str) -> None:
        """Agree on the program at its first run, and refuse a run in which this rank cannot take part.

        Args:
            problem: What is wrong with this rank's shards, a line, or empty; it becomes the error of every rank.

        Raises:
            TimedOut: Some ranks did not come; they are named.
            BackendError: A rank runs another program.
            LayoutError: A rank has a wrong shard.
        """
        if len(self.ranks) == 1:
            if problem:
                raise LayoutError(f"{self.name}: {problem}")
            return
        self.state.look_after_waits()
        self.running = self.digest in self.state.agreed
        if not self.running:
            self._agree(problem)
            self.state.agreed.add(self.digest)
            self.running = True
        elif problem:
            raise self.verdict_error(self._post(f"refused {self.rank} {problem}; rank {self.rank} sent nothing"))

    def _agree(self, problem: str) -> None:
        """Wait for all ranks to come with one program: the last of them writes the verdict, the others wait for it."""
        store, key = self.state.store, self._key
        try:
            self._say(store)
            first = store.compare_set(key("program"), "", self.digest).decode()
            if problem:
                found = self._post(f"refused {self.rank} {problem}; nothing was sent")
            elif first != self.digest:
                found = self._post("other")
            elif store.add(key("count"), 1) == len(self.ranks):
                found = store.compare_set(key("verdict"), "", OK).decode()
                # All ranks have come here, so all have left the agreement before this one behind.
                for old in self.state.agreements.get(self.ranks, "").split():
                    store.delete_key(old)
            else:
                store.wait([key("verdict")], timedelta(seconds=self.timeout))
                found = store.get(key("verdict")).decode()
        except RuntimeError as error:
            found = self._absent(error)
        if found == OK:
            self.state.agreements[self.ranks] = " ".join(key(part) for part in ("program", "count", "verdict"))
            return
        if found == "other":
            raise self._unlike(store)
        if found.startswith("withdrew"):
            store.add(key("left"), 1)  # the rank that has withdrawn waits for those that a message may hold
        raise self.verdict_error(found)

    def _absent(self, error: Exception) -> str:
        """Return the verdict after the store failed or timed out: who did not come, if anybody."""
        missing = [r for r in self.ranks if self._heard(self.state.store, r).number < self.number]
        if missing and self.rank not in missing:
            return self._post(f"absent {_commas(missing)} {self.timeout:g}")
        return f"broken {self.rank} {_line(error)}"

    def _unlike(self, store: Any) -> Exception:
        """Return the error for ranks that do not run one program: who runs what, of those that have come."""
        until = time.monotonic() + min(GRACE, self.timeout)
        while True:
            heard = {r: s for r in self.ranks if (s := self._heard(store, r)).number >= self.number}
            if len(heard) == len(self.ranks) or time.monotonic() > until:
                break
            time.sleep(POLL)
        others = {r: s for r, s in heard.items() if (s.number, s.digest) != (self.number, self.digest)}
        # A rank that has heard of nothing may be a run ahead: it is named only if nobody else is.
        others = {r: s for r, s in others.items() if s.number == self.number} or ({} if self._posted else others)
        told = next((s.name for s in others.values()), next(iter(self._posted.values()), "another program"))
        who = name_ranks(others or self._posted) if others or self._posted else "another rank"
        if self.running and all(s.peer >= 0 for s in others.values()):  # all of them started: another order
            return TimedOut(
                f"{self.step_text}: {who} of {format_ranks(self.ranks)} came to {told} in its place; legal is one "
                "order of programs on all ranks"
            )
        more = "" if len({s.digest for s in others.values()}) <= 1 else " and others"
        return BackendError(describe_unlike(self.ranks, self.rank, self.name, who, told + more))

    @property
    def step_text(self) -> str:
        """The program and the step, for messages."""
        return f"{self.name}, step {self.step} ({self.steps[self.step] if self.steps else 'start'})"

    def begin_step(self, step: int) -> None:
        """Note that the rank begins a step."""
        self.step = step

    # Faults, on the thread of the run

    def wait_error(self, peer: int, error: Exception | None) -> Exception:
        """Return the error to raise after a wait for `peer` failed, or (without `error`) was ended by a fault."""
        if error is None:
            return self.verdict_error(self.verdict)
        store, text = self.state.store, str(error).lower()
        if "timed out" in text or "timeout" in text:
            cause = "late" if self.step > 0 or self.parts else "absent"
            return self.verdict_error(self._post(f"{cause} {_commas(self._silent(store, peer))} {self.timeout:g}"))
        until = time.monotonic() + 2 * GRACE  # a peer that closed its connections is about to say why
        while not (found := self._read(store)) and time.monotonic() < until:
            time.sleep(POLL)
        return self.verdict_error(found or self._post(f"lost {peer} {_line(error)}"))

    def verdict_error(self, verdict: str) -> Exception:
        """Return the error that a verdict is on this rank."""
        self.verdict = verdict
        if verdict == "other":
            return self._mismatch()
        cause, who, text = verdict.split(" ", 2)
        ranks = sorted(map(int, who.split(",")))
        match cause:
            case "refused":
                return LayoutError(f"{self.name}: {text}")
            case "withdrew":
                return BackendError(f"{self.name} did not start: rank {who} raised {text}; rank {who} sent nothing")
            case "raised":
                return BackendError(f"{self.step_text}: rank {who} failed: {text}")
            case "lost":
                return BackendError(f"{self.step_text}: lost rank {who} of {format_ranks(self.ranks)}: {text}")
            case "late" | "absent":
                where = self.step_text if cause == "late" else f"{self.name} did not start"
                return late_error(where, ranks, f" of {format_ranks(self.ranks)}", float(text))
            case _:
                return BackendError(f"{self.name}: the store of torch.distributed failed: {text}")

    def mismatch_error(self, peer: int, name: str) -> Exception:
        """Return the error to raise after `peer` posted that it runs something else, of that name."""
        self._posted = {peer: name}
        self._say(self.state.store, peer)
        return self.verdict_error(self._post("other"))

    def _mismatch(self) -> Exception:
        """Return the error for unlike programs; those that have not heard of it are told by the next run."""
        store = self.state.store
        error = self._unlike(store)
        if self.untagged:
            self.state.mismatches[self.ranks] = text = f"in the run before, {_line(error)}"
            with contextlib.suppress(RuntimeError):
                store.compare_set(self._key("verdict", 1), "", f"raised {self.rank} {text}")
        return error

    def refuse_after_mismatch(self) -> None:
        """Refuse collectives and messages without tags after ranks ran unlike programs: nothing of theirs meets."""
        if text := self.state.mismatches.get(self.ranks):
            raise BackendError(f"{self.name} did not start: {text}; legal is a new process group")

    def broke(self, error: BaseException, wire: Releasing) -> None:
        """Tell the others of an exception on this rank, and let go those that wait for it."""
        if len(self.ranks) == 1 or not self.running:
            return
        if not self.verdict:
            self.verdict = self._post(f"raised {self.rank} {type(error).__name__}: {_line(error)}")
        if isinstance(error, Exception):
            self._release(wire)

    def withdraw(self, error: BaseException, wire: Releasing) -> None:
        """Tell the others that this rank raises instead of coming, and let go those that wait for it."""
        with contextlib.suppress(RuntimeError):  # without a store nobody can be told
            self._say(self.state.store)
        self.verdict = self._post(f"withdrew {self.rank} {type(error).__name__}: {_line(error)}")
        if isinstance(error, Exception):
            self._release(wire)

    def _release(self, wire: Releasing) -> None:
        """Answer the ranks that wait for this one until all have left the run, or patience ends."""
        store = self.state.store
        cause, _, rest = self.verdict.partition(" ")
        gone = len(rest.partition(" ")[0].split(",")) if cause in ("lost", "late", "absent") else 0
        until = time.monotonic() + PATIENCE
        with contextlib.suppress(RuntimeError):  # without a store nobody can ask
            left = store.add(self._key("left"), 1)
            while left < len(self.ranks) - gone and time.monotonic() < until:
                time.sleep(ANSWER)
                self._answer(store, wire)
                left = store.add(self._key("left"), 0)

    def _answer(self, store: Any, wire: Releasing) -> None:
        """Send the messages that others have asked this rank for, each once, in the order of the requests."""
        asked = self._key(f"asked/{self.rank}")
        while self._answered < store.add(asked, 0):
            self._answered += 1
            wire.answer(*map(int, store.get(f"{asked}/{self._answered}").decode().split()))

    # Slow waits, on the second thread (see `group_state.WatchedRun`)

    def slow(self, wait: Wait, seconds: float) -> None:
        """Say what this rank runs and waits for; find out whether the run has failed, and then ask to be let go."""
        store = self.state.aside
        if self._said is not wait:
            self._said = wait
            self._say(store, wait.peer)
            if store.compare_set(self._key("program"), "", self.digest).decode() != self.digest:
                self._post("other", store)
        if self.verdict:
            self._answer(store, wait.wire)
            if seconds > self._asked + PATIENCE:
                wait.wire.cut(wait.peer)
            return
        found = self._read(store)
        if found:
            self._asked, self.verdict = seconds, found
            asked = self._key(f"asked/{wait.peer}")
            store.set(f"{asked}/{store.add(asked, 1)}", f"{self.rank} {wait.sent} {wait.wire.tag}")

    def end_wait(self) -> None:
        """Say that this rank waits for nobody."""
        if not self.verdict:
            self._say(self.state.aside)
        self._said = None

    # The store

    def _key(self, part: str, ahead: int = 0) -> str:
        return f"shardplan/{_key_of(self.ranks)}/{self.number + ahead}/{part}"

    def _say(self, store: Any, peer: int = -1) -> None:
        store.set(f"shardplan/{_key_of(self.ranks)}/{self.rank}", f"{self.number} {self.digest} {peer} {self.name}")

    def _heard(self, store: Any, rank: int) -> RankReport:
        """Return what a rank last said of itself; number -1 where it has not said anything."""
        key = f"shardplan/{_key_of(self.ranks)}/{rank}"
        with contextlib.suppress(RuntimeError):
            if store.check([key]):
                number, digest, peer, name = store.get(key).decode().split(" ", 3)
                return RankReport(int(number), digest, int(peer), name)
        return RankReport(-1, "", -1, "")

    def _post(self, verdict: str, store: Any = None) -> str:
        """Write the verdict on this run, unless there is one; return the one that holds."""
        store = store or self.state.store
        try:
            found = store.compare_set(self._key("verdict"), "", verdict).decode()
            if found == OK:  # the ranks agreed in this very run
                found = store.compare_set(self._key("verdict"), OK, verdict).decode()
            return found
        except RuntimeError:  # nobody can be told
            return verdict

    def _read(self, store: Any) -> str:
        """Return what went wrong with this run, or nothing."""
        try:
            found = store.get(self._key("verdict")).decode() if store.check([self._key("verdict")]) else OK
        except RuntimeError:
            return ""
        return "" if found == OK else found

    def _silent(self, store: Any, peer: int) -> list[int]:
        """Follow who waits for whom from `peer` on, to the rank that waits for nobody and has not come."""

        def ask(rank: int) -> list[int] | None:
            said = self._heard(store, rank)
            waits = (said.number, said.digest) == (self.number, self.digest) and said.peer >= 0
            return [said.peer] if waits else None

        return silent(self.rank, [peer], ask)


@lru_cache(maxsize=MOST_SETS)
def _key_of(ranks: tuple[int, ...]) -> str:
    return hashlib.sha256(",".join(map(str, ranks)).encode()).hexdigest()[:KEY_DIGITS]


def _commas(ranks: Iterable[int]) -> str:
    return ",".join(map(str, ranks))


def _line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0].strip() if lines else type(error).__name__

"""Programs that ranks have agreed to run, each with communicators of its own.

Ranks agree at the first call of a program, and never again while they remember it: what carries the program's identity
from then on is its communicators, since what is sent on one cannot be received on another. Ranks that run cached
programs in different orders therefore wait for each other, in vain, and never take one's data for the other's.

A set of ranks numbers its agreements, so all of them forget the same program when there are too many. A rank that
cannot run a program agreed on withdraws from it: the others are told, and the next call agrees anew.
"""

from __future__ import annotations

import functools
import hashlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from shardplan.execution.mpi.agree import Agreement, NotStarted, Refusal, Word, Words, name_of
from shardplan.execution.mpi.faults import MpiWatch, said
from shardplan.execution.mpi.mail import LEAVING, Mail, mail

if TYPE_CHECKING:
    from mpi4py import MPI

AGREED = 32  # programs that a set of ranks remembers: MPICH has some 2,000 communicators
CREATION = 1  # the tag of the messages that make a communicator
Members = tuple[int, ...]
Key = tuple[bytes, int]  # a set of ranks, the number of its agreement


@dataclass(frozen=True, slots=True)
class Letter:
    """A letter: a word of an agreement."""

    key: Key
    word: Word


@dataclass(frozen=True, slots=True)
class Withdrawal:
    """A letter: the sender does not take part in a run of a program agreed on, nor in later ones."""

    key: Key
    run: int
    why: str


@dataclass(slots=True)
class Pact:
    """A program that a set of ranks has agreed on, and this process's communicators for it, by their members."""

    key: Key
    digest: bytes
    communicators: dict[Members, MPI.Intracomm] = field(default_factory=dict["Members", "MPI.Intracomm"])
    run: int = 0  # that this process is in, or has done last
    over: bool = False
    withdrawal: Withdrawal | None = None

    @property
    def stopped(self) -> str:
        """Why the run that this process is in cannot end; empty where it can."""
        return self.withdrawal.why if self.withdrawal is not None and self.withdrawal.run <= self.run else ""


class Pacts:
    """What this process has agreed on with others."""

    def __init__(self, letters: Mail) -> None:
        """Begin with nothing."""
        self._mail = letters
        self._begun: Counter[bytes] = Counter()  # agreements of a set of ranks
        self._made: dict[bytes, list[Pact]] = {}  # oldest first
        self._open: dict[Key, Agreement] = {}
        self._early: dict[Key, list[tuple[int, Word]]] = {}  # said before this process came
        letters.on(Letter, self._said)
        letters.on(Withdrawal, self._withdrawn)

    def enter(self, ranks: Members, digest: bytes) -> Pact | None:
        """Begin a run of a program agreed on; None where the ranks have to agree.

        Raises:
            NotStarted: A rank has withdrawn from this run.
        """
        pact = self._find(ranks, digest)
        if pact is None:
            return None
        self._mail.collect()
        pact.run += 1
        if pact.withdrawal is None or not pact.stopped:
            return pact
        pact.over = True
        if pact.withdrawal.run == pact.run:
            raise NotStarted(f"{name_of(digest)} did not start: {pact.stopped}")
        return None  # the runs that this process has done did not need the rank that withdrew from one

    def agree(self, watch: MpiWatch, digest: bytes, groups: Sequence[Members]) -> Pact:
        """Wait until all ranks have come with the same program; make communicators of all of them and of `groups`.

        Raises:
            NotStarted: A rank runs another program, cannot run, or has ended.
            TimedOut: Some ranks did not come; they are named.
        """
        agreement, key = self._begin(watch.ranks, watch.rank, digest)
        self._open[key] = agreement
        self._post(key, agreement.open())
        for sender, word in self._early.pop(key, []):
            self._post(key, agreement.hear(sender, word))

        def done() -> bool:
            self._mail.collect()
            if agreement.verdict is None and (why := watch.parted()):
                self._post(key, agreement.refuse(f"{watch.name} did not start: {why}"))
            return agreement.verdict is not None and self._mail.gone()

        watch.gather(done, lambda: agreement.waits_for)
        del self._open[key]
        if isinstance(agreement.verdict, Refusal):
            raise NotStarted(f"{agreement.verdict.why}; nothing was sent")
        pact = Pact(key, digest, run=1)
        made = self._made.setdefault(key[0], [])
        made.append(pact)
        with watch.bounded("its communicators were not made"):
            while len(made) > AGREED:  # every rank of the set forgets this one now
                for communicator in made.pop(0).communicators.values():
                    communicator.Free()
            pact.communicators = connect([watch.ranks, *groups])
        return pact

    def refuse(self, ranks: Members, rank: int, digest: bytes, error: BaseException) -> None:
        """Tell the others that this rank raises `error` instead of beginning a run."""
        why = f"rank {rank} raised {said(error)}"
        pact = self._find(ranks, digest)
        if pact is None:
            agreement, key = self._begin(ranks, rank, digest)
            self._early.pop(key, None)
            self._post(key, agreement.refuse(f"{name_of(digest)} did not start: {why}"))
        else:
            pact.over = True
            for r in ranks:
                if r != rank:
                    self._mail.post(r, Withdrawal(pact.key, pact.run + 1, why))
        self._mail.flush(LEAVING)

    def _find(self, ranks: Members, digest: bytes) -> Pact | None:
        made = self._made.get(_name(ranks), [])
        return next((p for p in reversed(made) if p.digest == digest and not p.over), None)

    def _begin(self, ranks: Members, rank: int, digest: bytes) -> tuple[Agreement, Key]:
        name = _name(ranks)
        self._begun[name] += 1
        return Agreement(ranks, rank, digest), (name, self._begun[name])

    def _post(self, key: Key, words: Words) -> None:
        for rank, word in words:
            self._mail.post(rank, Letter(key, word))

    def _said(self, sender: int, letter: Letter) -> None:
        name, number = letter.key
        if letter.key in self._open:
            self._post(letter.key, self._open[letter.key].hear(sender, letter.word))
        elif number > self._begun[name]:
            self._early.setdefault(letter.key, []).append((sender, letter.word))
        # else of an agreement that this process has left: it was refused

    def _withdrawn(self, sender: int, letter: Withdrawal) -> None:
        for pact in self._made.get(letter.key[0], []):
            if pact.key == letter.key and (pact.withdrawal is None or letter.run < pact.withdrawal.run):
                pact.withdrawal = letter


def connect(groups: Sequence[Members]) -> dict[Members, MPI.Intracomm]:
    """Make a communicator of each of `groups`, ranks of the world in member order.

    All members come here with the same program, in the same order. MPI makes them only in a blocking way.
    """
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    whole = world.Get_group()
    made: dict[Members, MPI.Intracomm] = {}
    for ranks in dict.fromkeys(groups):
        group = whole.Incl(ranks)
        made[ranks] = world.Create_group(group, CREATION)
        group.Free()
    whole.Free()
    return made


@functools.cache
def _name(ranks: Members) -> bytes:
    return hashlib.sha256(repr(ranks).encode()).digest()[:16]


@functools.cache
def pacts() -> Pacts:
    """Return what this process has agreed on."""
    return Pacts(mail())

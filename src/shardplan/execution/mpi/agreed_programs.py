"""Programs that ranks have agreed to run, each with communicators of its own.

Ranks agree at the first call of a program, and never again while they remember it: what carries the program's identity
from then on is its communicators, since what is sent on one cannot be received on another. Ranks that run cached
programs in different orders therefore wait for each other, in vain, and never take one's data for the other's.

A set of ranks numbers its agreements, so all of them forget the same program when there are too many. A rank that
cannot run a program agreed on withdraws from it: the others are told, and the next call agrees anew.

A rank that an exception ends says to all how far it has come: those that wait for more than that, then or later, wait
no longer. One that ends without (`sys.exit`, a script that is over) says nothing: MPICH fails at the end of a rank to
which letters are still on their way, and so would every job that ends well.
"""

from __future__ import annotations

import functools
import hashlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from shardplan.execution.mpi.agree import Agreement, NotStarted, Refusal, Word, Words, program_name
from shardplan.execution.mpi.faults import MpiWatch, error_line
from shardplan.execution.mpi.mail import LEAVING, Mail, mail

if TYPE_CHECKING:
    from mpi4py import MPI

MOST_AGREED = 32  # programs that a set of ranks remembers: MPICH has some 2,000 communicators
CREATION = 1  # the tag of the messages that make a communicator
Members = tuple[int, ...]  # ranks of the world, in member order
AgreementKey = tuple[bytes, int]  # the name of a set of ranks, the number of its agreement
NAME_BYTES = 16  # of the digest that names a set of ranks: enough that no two are called alike


@dataclass(frozen=True, slots=True)
class Letter:
    """A letter: a word of an agreement."""

    key: AgreementKey
    word: Word


@dataclass(frozen=True, slots=True)
class Withdrawal:
    """A letter: the sender does not take part in a run of a program agreed on, nor in later ones."""

    key: AgreementKey
    run: int  # the first that it leaves out, counted from 1
    why: str


@dataclass(frozen=True, slots=True)
class Parting:
    """A letter: an exception ends the sender."""

    error: str
    begun: dict[bytes, int]  # agreements, by the name of the set of ranks
    runs: dict[AgreementKey, int]  # of programs agreed on


@dataclass(slots=True)
class AgreedProgram:
    """A program that a set of ranks has agreed on, and this process's communicators for it, by their members."""

    key: AgreementKey
    digest: bytes
    communicators: dict[Members, MPI.Intracomm] = field(default_factory=dict["Members", "MPI.Intracomm"])
    run: int = 0  # that this process is in, or has done last
    over: bool = False  # a rank has withdrawn: the next call agrees anew
    withdrawal: Withdrawal | None = None  # of those that have come, that from the earliest run

    @property
    def stop_reason(self) -> str:
        """Why the run that this process is in cannot end; empty where it can."""
        return self.withdrawal.why if self.withdrawal is not None and self.withdrawal.run <= self.run else ""


class AgreedPrograms:
    """What this process has agreed on with others."""

    def __init__(self, letters: Mail) -> None:
        """Begin with nothing."""
        self._mail = letters
        self._begun: Counter[bytes] = Counter()  # agreements, by the name of the set of ranks
        self._made: dict[bytes, list[AgreedProgram]] = {}  # by that name; oldest first
        self._open: dict[AgreementKey, Agreement] = {}
        self._early: dict[AgreementKey, list[tuple[int, Word]]] = {}  # sender and word, said before this process came
        letters.set_reader(Letter, self._hear_word)
        self._parted: dict[int, Parting] = {}  # by rank
        letters.set_reader(Withdrawal, self._withdrawn)
        letters.set_reader(Parting, self._parted.__setitem__)

    def enter(self, ranks: Members, digest: bytes) -> AgreedProgram | None:
        """Begin a run of a program agreed on; None where the ranks have to agree.

        Raises:
            NotStarted: A rank has withdrawn from this run.
        """
        agreed = self._find(ranks, digest)
        if agreed is None:
            return None
        self._mail.collect()
        agreed.run += 1
        if agreed.withdrawal is None or not agreed.stop_reason:
            return agreed
        agreed.over = True
        if agreed.withdrawal.run == agreed.run:
            raise NotStarted(f"{program_name(digest)} did not start: {agreed.stop_reason}")
        return None  # the runs that this process has done did not need the rank that withdrew from one

    def agree(self, watch: MpiWatch, digest: bytes, groups: Sequence[Members]) -> AgreedProgram:
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
            if agreement.verdict is None and (why := self._end_reason(watch.ranks, key)):
                self._post(key, agreement.refuse(f"{watch.name} did not start: {why}"))
            return agreement.verdict is not None and self._mail.has_sent_all()

        watch.gather(done, lambda: agreement.waits_for)
        del self._open[key]
        if isinstance(agreement.verdict, Refusal):
            raise NotStarted(f"{agreement.verdict.why}; nothing was sent")
        agreed = AgreedProgram(key, digest, run=1)
        made = self._made.setdefault(key[0], [])
        made.append(agreed)
        with watch.abort_on_timeout("its communicators were not made"):
            while len(made) > MOST_AGREED:  # every rank of the set forgets this one now
                for communicator in made.pop(0).communicators.values():
                    communicator.Free()
            agreed.communicators = connect([watch.ranks, *groups])
        return agreed

    def refuse(self, ranks: Members, rank: int, digest: bytes, error: BaseException) -> None:
        """Tell the others that this rank raises `error` instead of beginning a run."""
        why = f"rank {rank} raised {error_line(error)}"
        agreed = self._find(ranks, digest)
        if agreed is None:
            agreement, key = self._begin(ranks, rank, digest)
            self._early.pop(key, None)
            self._post(key, agreement.refuse(f"{program_name(digest)} did not start: {why}"))
        else:
            agreed.over = True
            for r in ranks:
                if r != rank:
                    self._mail.post(r, Withdrawal(agreed.key, agreed.run + 1, why))
        self._mail.flush(LEAVING)

    def stop_reason(self, ranks: Members, agreed: AgreedProgram) -> str:
        """Say why the run that this process is in cannot end; nothing where it can."""
        return agreed.stop_reason or self._end_reason(ranks, agreed.key, agreed.run)

    def announce_end(self, error: BaseException) -> None:
        """Tell all ranks that `error` ends this process, and how far it has come."""
        from mpi4py import MPI

        world = MPI.COMM_WORLD
        runs = {p.key: p.run for made in self._made.values() for p in made}
        letter = Parting(error_line(error), dict(self._begun), runs)
        for rank in range(world.Get_size()):
            if rank != world.Get_rank():
                self._mail.post(rank, letter)
        self._mail.flush(LEAVING)

    def _end_reason(self, ranks: Members, key: AgreementKey, run: int = 0) -> str:
        """Say which rank has ended before it came to an agreement, or to a run of the program agreed on, and why."""
        for rank, letter in self._parted.items():
            came = letter.runs.get(key, 0) >= run if run else letter.begun.get(key[0], 0) >= key[1]
            if rank in ranks and not came:
                return f"rank {rank} ended: {letter.error}"
        return ""

    def _find(self, ranks: Members, digest: bytes) -> AgreedProgram | None:
        made = self._made.get(_name(ranks), [])
        return next((p for p in reversed(made) if p.digest == digest and not p.over), None)

    def _begin(self, ranks: Members, rank: int, digest: bytes) -> tuple[Agreement, AgreementKey]:
        name = _name(ranks)
        self._begun[name] += 1
        return Agreement(ranks, rank, digest), (name, self._begun[name])

    def _post(self, key: AgreementKey, words: Words) -> None:
        for rank, word in words:
            self._mail.post(rank, Letter(key, word))

    def _hear_word(self, sender: int, letter: Letter) -> None:
        """Read a word: of an agreement under way, or of one that this process has yet to come to."""
        name, number = letter.key
        if letter.key in self._open:
            self._post(letter.key, self._open[letter.key].hear(sender, letter.word))
        elif number > self._begun[name]:
            self._early.setdefault(letter.key, []).append((sender, letter.word))
        # else of an agreement that this process has left: it was refused

    def _withdrawn(self, sender: int, letter: Withdrawal) -> None:
        for agreed in self._made.get(letter.key[0], []):
            if agreed.key == letter.key and (agreed.withdrawal is None or letter.run < agreed.withdrawal.run):
                agreed.withdrawal = letter


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
    return hashlib.sha256(repr(ranks).encode()).digest()[:NAME_BYTES]


@functools.cache
def agreed_programs() -> AgreedPrograms:
    """Return what this process has agreed on."""
    return AgreedPrograms(mail())

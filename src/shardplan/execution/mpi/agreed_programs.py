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
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from shardplan.errors import BackendError
from shardplan.execution.agreement import Agreement, RankFailed, RankReady, Refusal, Word, Words, describe_unlike
from shardplan.execution.mpi.faults import MpiWatch, error_line
from shardplan.execution.mpi.letters import LEAVING, Letters, letters
from shardplan.execution.rank_names import NAME_DIGITS

if TYPE_CHECKING:
    from mpi4py import MPI

MOST_AGREED = 32  # programs that a set of ranks remembers: MPICH has some 2,000 communicators
CREATION = 1  # the tag of the messages that make a communicator
Members = tuple[int, ...]  # ranks of the world, in member order
AgreementKey = tuple[bytes, int]  # the name of a set of ranks, the number of its agreement
NAME_BYTES = 16  # of the digest that names a set of ranks: enough that no two are called alike


class NotStarted(BackendError):
    """A run that was refused before any rank sent anything: every rank of the set raises and lives."""


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


@dataclass(frozen=True, slots=True)
class AgreementMail:
    """The mail of one agreement: see `agreement.Mail`."""

    key: AgreementKey
    letters: Letters
    inboxes: dict[AgreementKey, dict[int, Word]]  # those of all agreements under way; the last word of each sender

    def post(self, words: Words) -> None:
        """Send a letter for each word."""
        for rank, word in words:
            self.letters.post(rank, Letter(self.key, word))

    def collect(self, seconds: float = 0.0) -> Mapping[int, Word]:
        """Return the words that have come; who polls waits elsewhere."""
        self.letters.collect()
        found, self.inboxes[self.key] = self.inboxes[self.key], {}
        return found

    def close(self) -> None:
        """Leave: later words are of no use."""
        self.inboxes.pop(self.key, None)


class AgreedPrograms:
    """What this process has agreed on with others."""

    def __init__(self, letters: Letters) -> None:
        """Begin with nothing."""
        self._letters = letters
        self._begun: Counter[bytes] = Counter()  # agreements, by the name of the set of ranks
        self._made: dict[bytes, list[AgreedProgram]] = {}  # by that name; oldest first
        self._inboxes: dict[AgreementKey, dict[int, Word]] = {}  # of agreements under way, or yet to be come to
        letters.set_reader(Letter, self._hear_word)
        self._parted: dict[int, Parting] = {}  # by rank
        letters.set_reader(Withdrawal, self._withdrawn)
        letters.set_reader(Parting, self._parted.__setitem__)

    def join(self, watch: MpiWatch, digest: bytes, groups: Sequence[Members]) -> dict[Members, MPI.Intracomm]:
        """Begin a run with all its ranks; return its communicators. A rank alone needs none; raises as `agree`."""
        if len(watch.ranks) == 1:
            return {}
        agreed = self.enter(watch.ranks, digest) or self.agree(watch, digest, groups)
        watch.stopped = functools.partial(self.stop_reason, watch.ranks, agreed)
        return agreed.communicators

    def enter(self, ranks: Members, digest: bytes) -> AgreedProgram | None:
        """Begin a run of a program agreed on; None where the ranks have to agree.

        Raises:
            NotStarted: A rank has withdrawn from this run.
        """
        agreed = self._find(ranks, digest)
        if agreed is None:
            return None
        self._letters.collect()
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
        mail = self._begin(watch.ranks)
        agreement = Agreement.in_tree(watch.ranks, watch.rank, RankReady(digest))
        mail.post(agreement.open())

        def exchange_letters() -> bool:
            mail.post(agreement.hear({**mail.collect(), **self._end_words(watch.ranks, mail.key)}))
            return agreement.verdict is not None and self._letters.has_sent_all()

        watch.gather(exchange_letters, lambda: agreement.waits_for)
        mail.close()
        if isinstance(agreement.verdict, Refusal):
            raise refusal_error(watch, agreement.verdict)
        agreed = AgreedProgram(mail.key, digest, run=1)
        made = self._made.setdefault(mail.key[0], [])
        made.append(agreed)
        with watch.abort_on_timeout():
            while len(made) > MOST_AGREED:  # every rank of the set forgets this one now
                for communicator in made.pop(0).communicators.values():
                    communicator.Free()
            agreed.communicators = connect([watch.ranks, *groups])
        return agreed

    def refuse(self, ranks: Members, rank: int, digest: bytes, error: BaseException) -> None:
        """Tell the others, if there are any, that this rank raises `error` instead of beginning a run."""
        why = f"raised {error_line(error)}"
        agreed = self._find(ranks, digest)
        if agreed is None:
            mail = self._begin(ranks)
            mail.post(Agreement.in_tree(ranks, rank, RankFailed(why)).open())
            mail.close()
        else:
            agreed.over = True
            for r in ranks:
                if r != rank:
                    self._letters.post(r, Withdrawal(agreed.key, agreed.run + 1, f"rank {rank} {why}"))
        self._letters.flush(LEAVING)

    def stop_reason(self, ranks: Members, agreed: AgreedProgram) -> str:
        """Say why the run that this process is in cannot end; nothing where it can."""
        ended = self._end_words(ranks, agreed.key, agreed.run)
        return agreed.stop_reason or next((f"rank {rank} {word.why}" for rank, word in ended.items()), "")

    def announce_end(self, error: BaseException) -> None:
        """Tell all ranks that `error` ends this process, and how far it has come."""
        from mpi4py import MPI

        world = MPI.COMM_WORLD
        runs = {p.key: p.run for made in self._made.values() for p in made}
        letter = Parting(error_line(error), dict(self._begun), runs)
        for rank in range(world.Get_size()):
            if rank != world.Get_rank():
                self._letters.post(rank, letter)
        self._letters.flush(LEAVING)

    def _end_words(self, ranks: Members, key: AgreementKey, run: int = 0) -> dict[int, RankFailed]:
        """Return the words of ranks that ended before they came to an agreement, or to a run of what was agreed on."""
        return {
            rank: RankFailed(f"ended: {letter.error}")
            for rank, letter in self._parted.items()
            if rank in ranks and not (letter.runs.get(key, 0) >= run if run else letter.begun.get(key[0], 0) >= key[1])
        }

    def _find(self, ranks: Members, digest: bytes) -> AgreedProgram | None:
        made = self._made.get(_name(ranks), [])
        return next((p for p in reversed(made) if p.digest == digest and not p.over), None)

    def _begin(self, ranks: Members) -> AgreementMail:
        name = _name(ranks)
        self._begun[name] += 1
        key = name, self._begun[name]
        self._inboxes.setdefault(key, {})
        return AgreementMail(key, self._letters, self._inboxes)

    def _hear_word(self, sender: int, letter: Letter) -> None:
        """Keep a word: of an agreement under way, or of one that this process has yet to come to."""
        name, number = letter.key
        if letter.key in self._inboxes or number > self._begun[name]:
            self._inboxes.setdefault(letter.key, {})[sender] = letter.word
        # else of an agreement that this process has left: it was refused

    def _withdrawn(self, sender: int, letter: Withdrawal) -> None:
        for agreed in self._made.get(letter.key[0], []):
            if agreed.key == letter.key and (agreed.withdrawal is None or letter.run < agreed.withdrawal.run):
                agreed.withdrawal = letter


def refusal_error(watch: MpiWatch, refusal: Refusal) -> NotStarted:
    """Return the error of a run that was refused: it names who does not come, or two ranks that run unlike programs."""
    if refusal.failure:
        return NotStarted(f"{watch.name} did not start: rank {refusal.failure}; nothing was sent")
    (rank, own), *others = refusal.offers.items()
    other, theirs = next(pair for pair in others if pair[1] != own)
    return NotStarted(describe_unlike(watch.ranks, rank, program_name(own), f"rank {other}", program_name(theirs)))


def program_name(digest: bytes) -> str:
    """Return what a program is called in messages.

    >>> program_name(bytes(range(32)))
    'program 00010203'
    """
    return f"program {digest.hex()[:NAME_DIGITS]}"


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
    return AgreedPrograms(letters())

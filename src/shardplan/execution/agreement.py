"""One agreement: ranks that are to begin something together find out whether all come with the same.

Each rank has a word of its own: `RankReady`, with what it offers, or `RankFailed`, with the reason why it does not
come. It hears the words of the ranks below it. Once one of them fails, or comes with something else, that is its
verdict: a `Refusal`, of all words that it has heard. Once all of them have come with what it offers itself, it says so
to the rank above; one with nobody above it says `Start` to those below. A verdict holds, and nothing said later changes
it, nor does time: ranks that are still `silent` are named, and the agreement is over. So where all words arrive all
ranks come to the same verdict, in whatever order they do, and a refusal waits for nobody who is late.

Who is below and above is the transport's, and so is how words travel, its `Mail`:

- MPI (`mpi.agreed_programs`): a binary tree, of letters to neighbours, at most three a rank; a refusal goes on from
  neighbour to neighbour. That a rank has ended is a word, `RankFailed`. Where one is late a roll call finds who is
  silent.
- JAX's store (`jax.agree`): all others. Each writes its word, all meet at a barrier, the first reads all words and
  writes them down for the others where they differ: five operations. Where the barrier fails, who has written nothing
  is named, unless one that has written fails.
- The store of a refit (`interop.torch.refit.meeting`): all others. Each writes its word with the number of the meeting
  and reads those of all; who has not come to that number is named, who was started again catches up.
- torch's store (`torch.faults`): nobody. Who comes first writes its offer, a counter finds the last, which writes the
  verdict: seven operations at most, however many ranks there are. The verdict lies in one cell with that of the run
  that follows, so that the first fault holds, of either, and who is blocked in gloo is let go by a message.
- A heap (`fused.heap.header`): nobody. Words lie in the memory of all, behind the barrier of every call; a wait ends by
  time, by the death of a process, or by the word that ends kernels too.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from shardplan.errors import TimedOut
from shardplan.execution.rank_names import format_ranks, name_ranks


@dataclass(frozen=True, slots=True)
class RankReady:
    """To the rank above: this rank, and all below it, come with this offer; the same where it is equal."""

    offer: Any


@dataclass(frozen=True, slots=True)
class RankFailed:
    """Of a rank: it does not come; `why` goes on behind its name, as in "raised ValueError: no"."""

    why: str


@dataclass(frozen=True, slots=True)
class Start:
    """To the ranks below: all come with the same."""


@dataclass(frozen=True, slots=True)
class Refusal:
    """To all neighbours: nothing begins; what was said by whom, first by the rank that found it out."""

    said: tuple[tuple[int, RankReady | RankFailed], ...]

    @property
    def failure(self) -> str:
        """Which rank does not come, and why, as a clause without "rank"; empty where ranks come with unlike offers."""
        return next((f"{rank} {word.why}" for rank, word in self.said if isinstance(word, RankFailed)), "")

    @property
    def offers(self) -> dict[int, Any]:
        """What ranks come with, as far as was heard."""
        return {rank: word.offer for rank, word in self.said if isinstance(word, RankReady)}


Word = RankReady | RankFailed | Start | Refusal
Words = list[tuple[int, Word]]  # the rank of the receiver, and what it is told


class Mail(Protocol):
    """How the words of one agreement travel to and from a rank."""

    def post(self, words: Words) -> None:
        """Say words to other ranks, without waiting for them."""
        ...

    def collect(self, seconds: float) -> Mapping[int, Word]:
        """Return the words that have come, by sender; a mail that can wait does, at most so many seconds."""
        ...

    def close(self) -> None:
        """Take leave, of words to come too."""
        ...


@dataclass(slots=True)
class Agreement:
    """The view of one rank on one agreement; `verdict` is what it has come to."""

    rank: int
    own: RankReady | RankFailed
    below: tuple[int, ...]
    above: int | None = None
    shared: bool = False  # whether each says its word to all, and none waits for another's verdict
    verdict: Start | Refusal | None = None
    _said: dict[int, RankReady | RankFailed] = field(default_factory=dict[int, "RankReady | RankFailed"])

    @staticmethod
    def in_tree(ranks: Sequence[int], rank: int, own: RankReady | RankFailed) -> Agreement:
        """Return that of a binary tree, in which the rank at index k has its parent at (k - 1) // 2."""
        k = ranks.index(rank)
        return Agreement(rank, own, tuple(ranks[2 * k + 1 : 2 * k + 3]), ranks[(k - 1) // 2] if k else None)

    @staticmethod
    def among_all(ranks: Sequence[int], rank: int, own: RankReady | RankFailed) -> Agreement:
        """Return that of ranks each of which hears all others."""
        return Agreement(rank, own, tuple(r for r in ranks if r != rank), shared=True)

    @property
    def waits_for(self) -> list[int]:
        """The ranks whose word is outstanding."""
        if self.verdict is not None:
            return []
        return sorted({*self.below} - {*self._said}) or ([] if self.above is None else [self.above])

    def open(self) -> Words:
        """Return the first words of this rank."""
        words = self.hear({self.rank: self.own})
        return [(rank, self.own) for rank in self.below] if self.shared else words

    def hear(self, words: Mapping[int, Word]) -> Words:
        """Return what words of other ranks, by their sender, make this one say."""
        if self.verdict is not None or not words:
            return []
        for sender, word in words.items():
            if isinstance(word, Start | Refusal):
                return self._settle(word, sender)
            self._said[sender] = word
        if any(isinstance(word, RankFailed) or word != self.own for word in self._said.values()):
            return self._settle(Refusal(tuple(self._said.items())))
        if not {*self.below} <= {*self._said}:
            return []
        return self._settle(Start()) if self.above is None else [(self.above, self.own)]

    def _settle(self, verdict: Start | Refusal, told_by: int | None = None) -> Words:
        """Come to a verdict, and return whom it is told: a refusal to all neighbours but who told it."""
        self.verdict = verdict
        upwards = () if self.above is None or isinstance(verdict, Start) else (self.above,)
        return [] if self.shared else [(rank, verdict) for rank in (*upwards, *self.below) if rank != told_by]


def meet(agreement: Agreement, mail: Mail, seconds: float) -> None:
    """Say and hear words until there is a verdict, or for so many seconds: then there is none."""
    until, left = time.monotonic() + seconds, seconds
    mail.post(agreement.open())
    while agreement.verdict is None and left > 0:
        if words := agreement.hear(mail.collect(left)):
            mail.post(words)
        left = until - time.monotonic()
    mail.close()


@contextlib.contextmanager
def refusing(refuse: Callable[[BaseException], object]) -> Generator[None]:
    """Tell the others, by `refuse`, what the block raises here: an interrupt too, as they would wait for this one."""
    try:
        yield
    except BaseException as error:
        refuse(error)
        raise


def describe_unlike(ranks: Sequence[int], rank: int, own: str, others: str, theirs: str) -> str:
    """Return the message of ranks that come with unlike programs, all of them by name.

    >>> describe_unlike((0, 1), 1, "program 3f", "rank 0", "program 4a")
    'the ranks [0, 1] do not run one program: rank 1 runs program 3f, rank 0 program 4a; nothing was sent'
    """
    return (
        f"the ranks {format_ranks(ranks)} do not run one program: rank {rank} runs {own}, {others} {theirs}; nothing "
        "was sent"
    )


def late_error(where: str, late: Iterable[int], among: str, seconds: float) -> TimedOut:
    """Return the error of ranks that did not come, all of them by name.

    >>> print(late_error("program 3f did not start", [2, 3], " of [0, 1, 2, 3]", 1.5))
    program 3f did not start: ranks [2, 3] of [0, 1, 2, 3] did not arrive within 1.5 s
    """
    return TimedOut(f"{where}: {name_ranks(late)}{among} did not arrive within {seconds:g} s")


def silent(rank: int, waits_for: Sequence[int], ask: Callable[[int], Sequence[int] | None]) -> list[int]:
    """Return the ranks that `rank` waits for, over others if need be, and that do not say for whom they wait.

    `ask` says for whom a rank waits, None where it says nothing. Where all say it, those are its own peers.

    >>> silent(0, [1], {1: [2], 3: [0]}.get)
    [2]
    """
    seen, found, ahead = {rank}, set[int](), list(waits_for)
    while ahead:
        r = ahead.pop()
        if r in seen:
            continue
        seen.add(r)
        answer = ask(r)
        if answer is None:
            found.add(r)
        else:
            ahead += answer
    return sorted(found or set(waits_for))

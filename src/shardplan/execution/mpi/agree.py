"""How ranks agree to start a program: one word up a binary tree, and one down, so at most three sent by each.

The rank at index k of the set has its parent at (k - 1) // 2. A rank whose children all run its program says so to its
parent; the root lets all start. A rank that finds another program at a child, or cannot run, refuses: the refusal goes
to all its neighbours, which pass it on, so that it reaches every rank without waiting for those that are late.

This is what is said, and when; how words travel says `agreed_programs`.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from shardplan.errors import BackendError
from shardplan.execution.rank_names import NAME_DIGITS, format_ranks


class NotStarted(BackendError):
    """A run that was refused before any rank sent anything: every rank of the set raises and lives."""


@dataclass(frozen=True, slots=True)
class Runs:
    """To the parent: this rank, and all below it, run this program."""

    digest: bytes


@dataclass(frozen=True, slots=True)
class Start:
    """To the children: all ranks run one program."""


@dataclass(frozen=True, slots=True)
class Refusal:
    """To all neighbours: the run does not start, and why."""

    why: str


Word = Runs | Start | Refusal
Words = list[tuple[int, Word]]  # the rank of the receiver, and what it is told


@dataclass(slots=True)
class Agreement:
    """The view of one rank on one agreement of `ranks`; `verdict` is what it has come to."""

    ranks: tuple[int, ...]
    rank: int
    digest: bytes
    verdict: Start | Refusal | None = None
    _children: tuple[int, ...] = field(init=False)
    _parent: int | None = field(init=False)
    _silent: set[int] = field(init=False)  # children that have not said a word

    def __post_init__(self) -> None:
        """Find the neighbours."""
        k = self.ranks.index(self.rank)
        self._children = self.ranks[2 * k + 1 : 2 * k + 3]
        self._parent = self.ranks[(k - 1) // 2] if k else None
        self._silent = set(self._children)

    @property
    def waits_for(self) -> list[int]:
        """The ranks whose word is outstanding."""
        if self.verdict is not None:
            return []
        return sorted(self._silent) or ([] if self._parent is None else [self._parent])

    def open(self) -> Words:
        """Return the first words of a rank that can run."""
        return self._speak()

    def refuse(self, why: str) -> Words:
        """Return the words of a rank that cannot run, or has found out that another does not."""
        self.verdict = Refusal(why)
        return [(r, self.verdict) for r in self._neighbours()]

    def hear(self, sender: int, word: Word) -> Words:
        """Return what a neighbour's word makes this rank say."""
        if self.verdict is not None:
            return []
        match word:
            case Refusal():
                self.verdict = word
                return [(r, word) for r in self._neighbours() if r != sender]
            case Start():
                return self._start()
            case Runs(digest):
                self._silent.discard(sender)
                if digest != self.digest:
                    return self.refuse(
                        f"the ranks {format_ranks(self.ranks)} do not run one program: rank {self.rank} runs "
                        f"{program_name(self.digest)}, rank {sender} {program_name(digest)}"
                    )
                return self._speak()

    def _speak(self) -> Words:
        """Return the word to the parent, or, at the root, to the children; none before all children have spoken."""
        if self._silent:
            return []
        return self._start() if self._parent is None else [(self._parent, Runs(self.digest))]

    def _start(self) -> Words:
        self.verdict = Start()
        return [(r, self.verdict) for r in self._children]

    def _neighbours(self) -> tuple[int, ...]:
        return self._children if self._parent is None else (self._parent, *self._children)


def program_name(digest: bytes) -> str:
    """Return what a program is called in messages.

    >>> program_name(bytes(range(32)))
    'program 00010203'
    """
    return f"program {digest.hex()[:NAME_DIGITS]}"

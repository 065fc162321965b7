"""`Script`: what every device sends, receives and waits for, in order, in bytes; no values, no local work.

The point-to-point traffic of an engine that runs collectives: what is replayed on real links, timed by `replay`, and
summed to bytes per link. Its rules are those of the engine (`execution.torch.steps`):

- a device goes through the stages one after another, at its own pace, and in a stage through its rounds;
- entering a stage it posts the receives of all its rounds;
- a round posts its sends, then waits for its receives; where several rounds of a stage are in flight, for those of
  the round that is the last but so many, and in the end for all;
- leaving a stage it waits for all its sends.

A message is received in the round in which it is sent, and the messages of two devices arrive in the order in which
they are sent. So whatever is sent is received, and nobody waits for what never comes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest

import numpy as np

from shardplan.errors import ShardplanError

Ints = np.ndarray
Message = tuple[int, int]  # device id of the peer, bytes


class ScriptError(ShardplanError):
    """A script sends what nobody receives, or waits for what nobody sends."""


@dataclass(frozen=True, slots=True, eq=False)
class ScriptRound:
    """Messages that are posted at once, those of two devices in order; raises `ScriptError` for what is none."""

    sender: Ints  # int64 [n] device ids
    receiver: Ints  # int64 [n] device ids
    nbytes: Ints  # int64 [n], at least 1

    def __post_init__(self) -> None:
        """Refuse empty messages, and those of a device to itself."""
        if bool((self.nbytes < 1).any()) or bool((self.sender == self.receiver).any()):
            raise ScriptError("a message of a script has at least one byte, and goes to another device")

    @staticmethod
    def joined(rounds: Sequence[ScriptRound]) -> ScriptRound:
        """Return the messages of several rounds as those of one."""
        sides = [(one.sender, one.receiver, one.nbytes) for one in rounds]
        return ScriptRound(*(np.concatenate(column) for column in zip(*sides, strict=True)))


@dataclass(frozen=True, slots=True, eq=False)
class Stage:
    """A part of a step after which a device waits for what it has sent."""

    step: int  # number of the step in `Script.names`
    rounds: tuple[ScriptRound, ...]
    in_flight: int = 1  # rounds whose messages a device has under way at once


@dataclass(frozen=True, slots=True, eq=False)
class Table:
    """All messages of a script, in order; int64 [n]."""

    stage: Ints  # its number in the script
    round: Ints  # its number, over all stages
    sender: Ints
    receiver: Ints
    nbytes: Ints


@dataclass(frozen=True, slots=True, eq=False)
class Script:
    """The stages of a run.

    >>> swap = ScriptRound(np.array([0, 1]), np.array([1, 0]), np.array([8, 8]))
    >>> Script((Stage(0, (swap,)),), ("swap",), ("permute",)).payload()
    {(0, 1): 8, (1, 0): 8}
    """

    stages: tuple[Stage, ...]  # in the order in which every device goes through those it takes part in
    names: tuple[str, ...]  # of the steps, for people
    kinds: tuple[str, ...]  # of the steps: the op's or the collective's name
    title: str = ""  # for people: where it comes from

    def table(self) -> Table:
        """Return all messages."""
        rounds = [(number, one) for number, stage in enumerate(self.stages) for one in stage.rounds]
        size = np.array([len(one.nbytes) for _, one in rounds], dtype=np.int64)

        def column(name: str) -> Ints:
            return np.concatenate([np.zeros(0, dtype=np.int64), *(getattr(one, name) for _, one in rounds)])

        return Table(
            np.repeat(np.array([number for number, _ in rounds], dtype=np.int64), size),
            np.repeat(np.arange(len(rounds)), size),
            column("sender"),
            column("receiver"),
            column("nbytes"),
        )

    @property
    def devices(self) -> tuple[int, ...]:
        """The ids of the devices that send or receive, ascending."""
        table = self.table()
        return tuple(np.unique(np.concatenate([table.sender, table.receiver])).tolist())

    def rounds_of(self, device: int) -> Iterator[tuple[Stage, list[tuple[list[Message], list[Message]]]]]:
        """Yield a device's stages, and of each by round what it sends and what it receives."""
        for stage in self.stages:
            found: list[tuple[list[Message], list[Message]]] = []
            for one in stage.rounds:
                sent, got = np.flatnonzero(one.sender == device), np.flatnonzero(one.receiver == device)
                if sent.size or got.size:
                    sends = list(zip(one.receiver[sent].tolist(), one.nbytes[sent].tolist(), strict=True))
                    found.append((sends, list(zip(one.sender[got].tolist(), one.nbytes[got].tolist(), strict=True))))
            if found:
                yield stage, found

    def payload(self) -> dict[tuple[int, int], int]:
        """Return the bytes that each device sends to each other, by (sender, receiver)."""
        table = self.table()
        return _summed(table.sender, table.receiver, table.nbytes)

    def received(self) -> dict[tuple[int, int], int]:
        """Return the bytes that each device receives in each step, by (device, step)."""
        table = self.table()
        steps = np.array([stage.step for stage in self.stages], dtype=np.int64)
        return _summed(table.receiver, steps[table.stage], table.nbytes)


def abreast(step: int, strands: Sequence[Iterable[Stage]]) -> Iterator[Stage]:
    """Yield the stages of several strands, between devices of their own, as those of one: the n-th of all are one."""
    for stages in zip_longest(*strands):
        there = [stage for stage in stages if stage is not None]
        rounds = zip_longest(*(stage.rounds for stage in there))
        joined = tuple(ScriptRound.joined([r for r in one if r is not None]) for one in rounds)
        yield Stage(step, joined, max(stage.in_flight for stage in there))


def _summed(first: Ints, second: Ints, nbytes: Ints) -> dict[tuple[int, int], int]:
    """Return the bytes by pair of what stands in two columns, in order."""
    pairs, number = pairs_of(first, second)
    sums = np.zeros(len(pairs), dtype=np.int64)
    np.add.at(sums, number, nbytes)
    return dict(zip(map(tuple, pairs.tolist()), sums.tolist(), strict=True))


def pairs_of(first: Ints, second: Ints) -> tuple[Ints, Ints]:
    """Return the pairs of what stands in two columns, in order, [pairs, 2], and the number of the pair of each row."""
    width = int(second.max(initial=0)) + 1
    keys, number = np.unique(first * width + second, return_inverse=True)
    return np.stack([keys // width, keys % width], axis=1), number

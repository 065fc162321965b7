"""`Script`: what every device sends, receives and waits for, in order, in bytes; no values, no local work.

The point-to-point traffic of an engine that runs collectives: what is replayed on real links, timed by `events`, and
summed to bytes per link. Its rules are those of the engine (`execution.torch.steps`):

- a device goes through the stages one after another, at its own pace, and in a stage through its rounds;
- entering a stage it posts the receives of all its rounds;
- a round posts its sends, then waits for its receives;
- leaving a stage it waits for all its sends.

Messages between two devices arrive in the order in which they are sent, and are received in the order posted. What one
device sends another, that one receives: checked by `Script.checked`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from shardplan.errors import ShardplanError

Message = tuple[int, int]  # device id of the peer, bytes (at least 1)


class ScriptError(ShardplanError):
    """A script sends what nobody receives, or waits for what nobody sends."""


@dataclass(frozen=True, slots=True)
class ScriptRound:
    """What a device posts at once, and then waits for."""

    sends: tuple[Message, ...]
    receives: tuple[Message, ...]

    def __bool__(self) -> bool:
        """Whether anything moves."""
        return bool(self.sends or self.receives)


@dataclass(frozen=True, slots=True)
class Stage:
    """A part of a step after which a device waits for what it has sent; `rounds` by device id."""

    step: int  # number of the step in `Script.names`
    rounds: Mapping[int, tuple[ScriptRound, ...]]


@dataclass(frozen=True, slots=True)
class Script:
    """The stages of a run.

    >>> swap = {0: (ScriptRound(((1, 8),), ((1, 8),)),), 1: (ScriptRound(((0, 8),), ((0, 8),)),)}
    >>> Script((Stage(0, swap),), ("swap",), ("permute",)).payload()
    {(0, 1): 8, (1, 0): 8}
    """

    stages: tuple[Stage, ...]  # in the order in which every device goes through those it takes part in
    names: tuple[str, ...]  # of the steps, for people
    kinds: tuple[str, ...]  # of the steps: the op's or the collective's name
    title: str = ""  # for people: where it comes from

    @property
    def devices(self) -> tuple[int, ...]:
        """The device ids that take part, or are sent to or waited for, ascending."""
        found: set[int] = set()
        for stage in self.stages:
            for device, rounds in stage.rounds.items():
                found |= {device, *(peer for one in rounds for peer, _ in (*one.sends, *one.receives))}
        return tuple(sorted(found))

    def payload(self) -> dict[tuple[int, int], int]:
        """Return the bytes that each device sends to each other, by (sender, receiver)."""
        out: Counter[tuple[int, int]] = Counter()
        for stage in self.stages:
            for device, rounds in stage.rounds.items():
                for peer, nbytes in (m for one in rounds for m in one.sends):
                    out[device, peer] += nbytes
        return dict(sorted(out.items()))

    def received(self) -> dict[tuple[int, int], int]:
        """Return the bytes that each device receives in each step, by (device, step)."""
        out: Counter[tuple[int, int]] = Counter()
        for stage in self.stages:
            for device, rounds in stage.rounds.items():
                out[device, stage.step] += sum(nbytes for one in rounds for _, nbytes in one.receives)
        return dict(out)

    def checked(self) -> Script:
        """Return the script; raise `ScriptError` unless each pair's messages are received as they are sent."""
        sent: dict[tuple[int, int], list[int]] = {}
        expected: dict[tuple[int, int], list[int]] = {}
        for stage in self.stages:
            for device, rounds in stage.rounds.items():
                for one in rounds:
                    for peer, nbytes in one.sends:
                        sent.setdefault((device, peer), []).append(nbytes)
                    for peer, nbytes in one.receives:
                        expected.setdefault((peer, device), []).append(nbytes)
        for pair in sorted({*sent, *expected}):
            if sent.get(pair) != expected.get(pair):
                raise ScriptError(
                    f"device {pair[0]} sends {sent.get(pair, [])} bytes to device {pair[1]}, which waits for "
                    f"{expected.get(pair, [])}"
                )
        return self

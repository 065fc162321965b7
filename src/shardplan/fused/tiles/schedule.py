"""`TileSchedule`: in which order a rank serves the others, in how many tiles, and where it waits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Literal, get_args

from shardplan.errors import ParseError, excerpt
from shardplan.fused.tiles.checker import TileMode, check
from shardplan.fused.tiles.events import TileProtocol, TileScheduleError
from shardplan.fused.tiles.generate import ScheduleSpec, block_protocol, two_shot_protocol
from shardplan.fused.tiles.shapes import BlockShape, TileShape

SLOTS = 2  # of memory: epochs take turns
TileOrder = Literal["remote_first", "natural"]
TileWaits = Literal["last_program", "second_launch", "owner"]


@dataclass(frozen=True, slots=True)
class TileSchedule:
    """Order, tiles, slices, programs and waits of a fused kernel (arXiv 2305.06942, section 3).

    - `order` is how a rank goes round its destinations: `remote_first` serves (rank + 1 + s) mod W at step s, so that
      at every step all ranks serve different ones and the own block comes last. Operators have this one; what is tried
      beside it is `natural`, which serves s, and a tuple of offsets, which serves (rank + offset) mod W.
    - `tiles` is how many a destination gets, `slice` how many of them signal together.
    - `programs` share the tiles of a rank: program p takes tiles p, p + programs, ...
    - `waits` says who waits: the `last_program` for everything; every program of a `second_launch` for everything, to
      read its share; or, of a sum in two shots, the `owner`, program by program.
    - `slots` is how many epochs share no memory; with `acks` a reader tells the writer when a slot is free again,
      without which one slot is too few.
    - `shots` is 1 where of a sum every rank gets all addends, 2 where owners sum and spread them.

    >>> TileSchedule(tiles=2).destinations(1, 4)
    [2, 3, 0, 1]
    >>> TileSchedule.parse(str(TileSchedule(order=(1, 0), waits="second_launch", acks=True)))
    TileSchedule(order=(1, 0), tiles=1, slice=1, programs=1, waits='second_launch', slots=2, acks=True, shots=1)
    """

    order: TileOrder | tuple[int, ...] = "remote_first"
    tiles: int = 1
    slice: int = 1
    programs: int = 1
    waits: TileWaits = "last_program"
    slots: int = SLOTS
    acks: bool = False
    shots: int = 1

    def __post_init__(self) -> None:
        """Check every field."""
        named = isinstance(self.order, str)
        if (named and self.order not in get_args(TileOrder)) or (not named and not _permutes(self.order)):
            legal = f"{', '.join(get_args(TileOrder))} or every offset below the number of ranks once"
            raise TileScheduleError(f"tile schedule: order {excerpt(self.order)}; legal are {legal}")
        if self.waits not in get_args(TileWaits):
            legal = ", ".join(get_args(TileWaits))
            raise TileScheduleError(f"tile schedule: waits {excerpt(self.waits)}; legal are {legal}")
        for field, least, most in (
            ("tiles", 1, 4096),
            ("slice", 1, 4096),
            ("programs", 1, 4096),
            ("slots", 1, 2),
            ("shots", 1, 2),
        ):
            value = getattr(self, field)
            if type(value) is not int or not least <= value <= most:
                raise TileScheduleError(
                    f"tile schedule: {field} {excerpt(value)}; legal are integers {least} to {most}"
                )

    def __str__(self) -> str:
        """Return the fields by name."""
        order = self.order if isinstance(self.order, str) else ",".join(map(str, self.order))
        rest = (
            f"{f.name}={int(getattr(self, f.name)) if f.name == 'acks' else getattr(self, f.name)}"
            for f in fields(self)[1:]
        )
        return " ".join([f"order={order}", *rest])

    @classmethod
    def parse(cls, text: str) -> TileSchedule:
        """Return the schedule that a text says; fields that it leaves out have their defaults."""
        found: dict[str, object] = {}
        names = [f.name for f in fields(cls)]
        for word in text.split():
            key, _, value = word.partition("=")
            if key not in names or not value or key in found:
                raise ParseError(
                    f"tile schedule: {excerpt(word)}; legal is each of {', '.join(names)} once, as name=value"
                )
            try:
                if key == "order":
                    found[key] = tuple(map(int, value.split(","))) if value[0].isdigit() else value
                else:
                    found[key] = value if key == "waits" else bool(int(value)) if key == "acks" else int(value)
            except ValueError:
                raise ParseError(f"tile schedule: {excerpt(word)}; legal are integers") from None
        return cls(**found)  # type: ignore[arg-type]

    def destinations(self, rank: int, ranks: int) -> list[int]:
        """Return whom a rank serves, in order.

        Raises `TileScheduleError` where the order is a tuple for another number of ranks.
        """
        match self.order:
            case "remote_first":
                return [(rank + 1 + s) % ranks for s in range(ranks)]
            case "natural":
                return list(range(ranks))
            case _:
                if len(self.order) != ranks:
                    raise TileScheduleError(f"tile schedule: order of {len(self.order)} offsets for {ranks} ranks")
                return [(rank + offset) % ranks for offset in self.order]

    def protocol(self, ranks: int, shape: TileShape) -> TileProtocol:
        """Return what every program of every rank does with a shape, unchecked."""
        orders = [self.destinations(rank, ranks) for rank in range(ranks)]
        plainly = ScheduleSpec(
            str(self), orders, self.tiles, self.slice, self.programs, self.waits, self.slots, self.acks
        )
        if self.shots == 1:
            return block_protocol(plainly, shape if isinstance(shape, BlockShape) else shape.lanes(ranks))
        if isinstance(shape, BlockShape):
            raise TileScheduleError(f"tile schedule {self}: shots=2 of blocks; legal is 1, or rows to be summed")
        return two_shot_protocol(plainly, ranks, shape)

    def check(self, ranks: int, shape: TileShape, modes: Sequence[TileMode] = ("ranks", "resident")) -> TileProtocol:
        """Return the protocol for a shape on so many ranks, proved right in the modes in which it may run.

        Raises `TileScheduleError` with the circle of waits, the two writers, or the read that nothing holds back. It is
        pure, tries every element's order, and is for small ones: `symmetry.prove` is for every size. See `checker` for
        what is proved.

        >>> TileSchedule(tiles=2).check(2, BlockShape.rows([[1, 3], [2, 2]])).counters
        2
        >>> TileSchedule(slots=1).check(2, BlockShape.rows([[1, 3], [2, 2]]))
        Traceback (most recent call last):
        shardplan.fused.tiles.events.TileScheduleError: ...
        """
        protocol = self.protocol(ranks, shape)
        check(protocol, modes)
        return protocol


def _permutes(order: object) -> bool:
    return isinstance(order, tuple) and sorted(order) == list(range(len(order))) and len(order) > 0

"""`Schedule`: which stage does what on which microbatch, in which order: one list of actions a rank."""

from __future__ import annotations

import csv
import io
import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from shardplan.core import validation
from shardplan.errors import ScheduleError, excerpt, line
from shardplan.plans.plan_file import write_atomic
from shardplan.strategy.schedules.action import COMPUTE, OURS, OVERLAP, Action

IDLE = "."  # an idle slot in the text of a schedule; an empty cell in a file


@dataclass(frozen=True, slots=True)
class Schedule:
    r"""One tuple of actions a rank, None for an idle slot, which takes no time: it only draws the others apart.

    Stages form a chain, 0 first: the forward of a stage feeds the next one's. With `copies=2` they form two equal
    chains, one behind the other in number, that hold the same parameters (DualPipe); a microbatch goes through one of
    them. `stages` and `owners`, the rank that has most actions of a stage, are derived.

    `str` and `parse` are inverse; equality is of all but the name.

    >>> print(Schedule.parse("schedule 1f1b, 2 microbatches\n0: 0F0 0F1 0B0 0B1\n1: 1F0 1B0 1F1 1B1"))
    schedule 1f1b, 2 microbatches
    0: 0F0 0F1 0B0 0B1
    1: 1F0 1B0 1F1 1B1
    """

    ranks: tuple[tuple[Action | None, ...], ...]
    microbatches: int
    copies: int = 1
    name: str = field(default="", compare=False)
    stages: int = field(init=False, compare=False, repr=False)
    owners: tuple[int, ...] = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        rows: list[tuple[Action | None, ...]] = []
        for i, row in enumerate(
            validation.items("Schedule: ranks", self.ranks, "lists of actions, one a rank", ScheduleError)
        ):
            actions = validation.items(f"Schedule: rank {i}", row, "actions", ScheduleError)
            for action in actions:
                if action is not None and not isinstance(action, Action):
                    raise ScheduleError(
                        f"Schedule: rank {i} has {excerpt(action)}; legal is an Action, or None for an idle slot"
                    )
            rows.append(tuple(actions))
        validation.whole_number("Schedule: microbatches", self.microbatches, 1, kind=ScheduleError)
        validation.whole_number("Schedule: copies", self.copies, 1, kind=ScheduleError)
        counts: Counter[tuple[int, int]] = Counter(
            (a.stage, rank) for rank, row in enumerate(rows) for a in _leaves(row)
        )
        owners = {stage: rank for (stage, rank), _ in sorted(counts.items(), key=lambda each: (each[1], -each[0][1]))}
        stages = max(owners, default=-1) + 1
        if stages == 0:
            raise ScheduleError("Schedule: no rank has an action")
        if stages % self.copies:
            raise ScheduleError(f"Schedule: {self.copies} copies cannot share {stages} stages")
        for name, value in (
            ("ranks", tuple(rows)),
            ("stages", stages),
            ("owners", tuple(owners.get(s, -1) for s in range(stages))),
        ):
            object.__setattr__(self, name, value)

    def __str__(self) -> str:
        head = f"schedule {self.name}".rstrip() + f", {self.microbatches} microbatches"
        head += f", {self.copies} copies" if self.copies > 1 else ""
        rows = (
            f"{i}: {' '.join(IDLE if a is None else str(a) for a in row)}".rstrip() for i, row in enumerate(self.ranks)
        )
        return "\n".join((head, *rows))

    @staticmethod
    def parse(text: str) -> Schedule:
        """Return the schedule that a text says, as `str` writes it; raises `ScheduleError`."""
        head, *rows = validation.text("Schedule.parse", text, ScheduleError).strip().split("\n")
        said, *sizes = head.split(", ")
        found = {
            what: int(n) for n, _, what in (size.partition(" ") for size in sizes) if n.isdecimal() and len(n) < 10
        }
        if said.split(" ", 1)[0] != "schedule" or "microbatches" not in found or len(found) != len(sizes):
            raise ScheduleError(
                f"a schedule begins with {excerpt(head)}; legal is as in 'schedule 1f1b, 8 microbatches'"
            )
        if found.keys() - {"microbatches", "copies"}:
            raise ScheduleError(f"a schedule has {excerpt(head)}; legal are microbatches and copies")
        ranks: list[list[Action | None]] = []
        for i, row in enumerate(rows):
            number, colon, actions = row.partition(":")
            if not colon or number.strip() != str(i):
                raise ScheduleError(
                    f"line {i + 2} of a schedule is {excerpt(row)}; legal is the list of rank {i}, as in '{i}: 0F0 0B0'"
                )
            ranks.append([None if a == IDLE else Action.parse(a) for a in actions.split()])
        return Schedule(_tuples(ranks), found["microbatches"], found.get("copies", 1), said.partition(" ")[2])

    @property
    def label(self) -> str:
        """What errors call it."""
        return f"the schedule {self.name}".rstrip()

    @property
    def forward_only(self) -> bool:
        """Whether nothing runs backward, as in inference."""
        return all(a.kind not in ("B", "I", "W") for row in self.ranks for a in _leaves(row))

    @property
    def has_messages(self) -> bool:
        """Whether sends and receives are placed: torch's format `compute_comms`, else `compute_only`."""
        return any(a is not None and a.kind not in (*COMPUTE, OVERLAP, *OURS) for row in self.ranks for a in row)

    def filter_actions(self, keep: Callable[[Action], bool]) -> Schedule:
        """Return the schedule without idle slots and without what `keep` does not keep, of an overlap its parts."""
        return Schedule(
            tuple(tuple(_kept_actions(row, keep)) for row in self.ranks), self.microbatches, self.copies, self.name
        )

    def compute_only(self) -> Schedule:
        """Return the computations alone, in their order."""
        return self.filter_actions(lambda a: a.kind in COMPUTE)

    def stage_before(self, stage: int) -> int | None:
        """The stage whose forward feeds this one's, None for the first of a chain."""
        return stage - 1 if stage % (self.stages // self.copies) else None

    def stage_after(self, stage: int) -> int | None:
        """The stage that this one's forward feeds, None for the last of a chain."""
        return stage + 1 if (stage + 1) % (self.stages // self.copies) else None

    @staticmethod
    def from_csv(path: str | os.PathLike[str], copies: int = 1) -> Schedule:
        """Read a file in either format of `torch.distributed.pipelining`: a row a rank, an empty cell an idle slot.

        Raises `ScheduleError` with the row and the cell that say no action.
        """
        where = Path(path)
        try:
            rows = list(csv.reader(io.StringIO(where.read_bytes().decode(), newline="")))
        except (OSError, UnicodeDecodeError, csv.Error) as error:
            raise ScheduleError(f"{line(where)} is no schedule: {line(error)}") from None
        ranks: list[list[Action | None]] = []
        for i, row in enumerate(rows):
            try:
                ranks.append([Action.parse(cell) if cell.strip() else None for cell in row])
            except ScheduleError as error:
                raise ScheduleError(f"{line(where)}, row {i + 1} (rank {i}): {error}") from None
        seen = [a.microbatch for row in ranks for a in _leaves(row) if a.microbatch is not None]
        if not seen:
            raise ScheduleError(f"{line(where)} has no action on a microbatch")
        return Schedule(_tuples(ranks), max(seen) + 1, copies, where.stem)

    def to_csv(self, path: str | os.PathLike[str], ours: bool = False) -> None:
        """Write what torch reads: the format is `compute_comms` where messages are placed, which has no idle slots.

        With `ours` also `OPT`, `OFFLOAD` and `RELOAD`, which torch refuses.
        """
        where = Path(path)
        try:
            write_atomic(where, self.csv_text(ours).encode())
        except OSError as error:
            raise ScheduleError(f"{line(where)} cannot be written: {line(error)}") from None

    def csv_text(self, ours: bool = False) -> str:
        """Return what `to_csv` writes."""
        found = io.StringIO(newline="")
        writer = csv.writer(found)
        idle = not self.has_messages
        for row in self.ranks:
            writer.writerow([a for a in row if (idle if a is None else ours or a.kind not in OURS)])
        return found.getvalue()


def _tuples(ranks: Sequence[Sequence[Action | None]]) -> tuple[tuple[Action | None, ...], ...]:
    return tuple(tuple(row) for row in ranks)


def _leaves(row: Sequence[Action | None]) -> Iterator[Action]:
    return (leaf for action in row if action is not None for leaf in action.leaves)


def _kept_actions(row: Sequence[Action | None], keep: Callable[[Action], bool]) -> Iterator[Action]:
    for action in row:
        parts = () if action is None else tuple(a for a in action.leaves if keep(a))
        if action is not None and parts == action.leaves:
            yield action
        else:
            yield from parts

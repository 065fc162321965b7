"""`Fusion`: what the pass found, with a row for every candidate, fused or not."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from shardplan.hardware.prices.fused import UNFUSED, FusedDecision
from shardplan.hardware.units import format_bytes, format_seconds

REASONS = (
    "fused",
    "not_faster",
    "several_users",
    "not_sum",
    "unknown_group",
    "no_peer_access",
    "splits_unknown",
    "effect_between",
    "overlapped",
    "taken",
    "dtype",
    "memory",
)
Subject = TypeVar("Subject")


@dataclass(frozen=True, slots=True)
class FusionRow:
    """A candidate.

    `place` says where its last step is: its number, behind those of the repeats that it is in (`2.5`), of a job
    behind the program (`0F 2.5`), of a graph a node's name. `types` are those of the operands and of the result, as
    text; `nbytes` is what a device sends; `seconds` has by way to run it what it takes, empty where nothing could be
    priced. `choice` is one of these ways, `reason` one of `REASONS`; what blocks it is `blocked`, `text` says why, or
    of products of several experts why they are a call each.
    `source` says where the constants of the prices come from.
    """

    place: str
    op: str
    types: tuple[str, ...]
    nbytes: int
    seconds: Mapping[str, float]
    choice: str
    reason: str
    blocked: str = ""
    text: str = ""
    source: str = ""

    @property
    def is_fused(self) -> bool:
        """Whether it was fused."""
        return self.reason == "fused"

    @property
    def unfused_seconds(self) -> float | None:
        """What it takes unfused; None where it has no price."""
        return self.seconds.get(str(UNFUSED))

    @property
    def best_seconds(self) -> float | None:
        """What the best fused way takes, chosen or not; None where it has no price."""
        return min((s for way, s in self.seconds.items() if way != str(UNFUSED)), default=None)

    @property
    def saved_seconds(self) -> float:
        """What fusing it saves; 0 where it stays."""
        return self.seconds[str(UNFUSED)] - self.seconds[self.choice] if self.is_fused else 0.0

    def __str__(self) -> str:
        """One line."""
        head = f"{self.place}  {self.op}  {' '.join(self.types[:-1])} -> {self.types[-1]}  {format_bytes(self.nbytes)}"
        if self.unfused_seconds is not None and self.best_seconds is not None:
            head += f"  {format_seconds(self.unfused_seconds)} unfused, {format_seconds(self.best_seconds)} fused"
        return f"{head}  {self.choice} ({': '.join(filter(None, (self.reason, self.blocked, self.text)))})"

    def to_dict(self) -> dict[str, Any]:
        """Return it as an object of JSON."""
        return {name: getattr(self, name) for name in self.__slots__} | {
            "types": list(self.types),
            "seconds": dict(self.seconds),
        }


def seconds_of(decision: FusedDecision) -> dict[str, float]:
    """Return what every way takes, by name."""
    return {str(way): float(s) for way, s in zip(decision.variants, decision.seconds, strict=True)}


@dataclass(frozen=True, slots=True)
class Fusion(Generic[Subject]):
    """A program, a job or a graph with what pays fused, and a row for every candidate.

    `source` says where the constants come from: of a machine that was measured, or the topology's figures.
    """

    program: Subject
    rows: tuple[FusionRow, ...]
    source: str

    @property
    def saved_seconds(self) -> float:
        """What the fused candidates save, each counted once."""
        return sum(row.saved_seconds for row in self.rows)

    @property
    def summary(self) -> str:
        """One line: how many candidates, how many fused, and why the others are not."""
        if not self.rows:
            return (
                "no candidates: nowhere does an all-to-all or a sum follow a product, or bags, or a gather feed a "
                "product, of one of the patterns"
            )
        found = Counter(row.reason for row in self.rows)
        words = ", ".join(f"{found[reason]} {reason}" for reason in REASONS if found[reason])
        return f"{len(self.rows)} candidate{'s' * (len(self.rows) != 1)}: {words}; constants: {self.source}"

    def __str__(self) -> str:
        """The summary, then a line a row."""
        return "\n".join([self.summary, *map(str, self.rows)])

    def to_dict(self) -> dict[str, Any]:
        """Return rows and summary as an object of JSON; a program is text."""
        return {
            "summary": self.summary,
            "source": self.source,
            "saved_seconds": self.saved_seconds,
            "rows": rows_dict(self.rows),
        }


def rows_dict(rows: Sequence[FusionRow]) -> list[dict[str, Any]]:
    """Return rows as a list of JSON."""
    return [row.to_dict() for row in rows]

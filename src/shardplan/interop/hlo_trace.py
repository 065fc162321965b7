"""`HloTrace`: what a module that XLA compiled moves: its collectives in order, and how its values are sharded.

It is a trace, and no program: values, local work and what overlaps are not known. It may be timed, each collective by
its price and one after another, and replayed, message by message.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from shardplan.core.decoding import read_text
from shardplan.core.mesh import Mesh
from shardplan.core.pattern import AtOnce, Groups, Messages, Pattern, StepPattern
from shardplan.errors import ParseError, ShardplanError, line
from shardplan.hardware.prices.cost import price
from shardplan.hardware.units import format_bytes, format_seconds
from shardplan.interop.hlo import HloCollective, hlo_script, parse_hlo
from shardplan.interop.hlo_groups import MOST_DEVICES, integer
from shardplan.plans.pricing import Where, fabric_of, where_of
from shardplan.simulation.replay import Constants, replayed
from shardplan.simulation.script import Script
from shardplan.simulation.timeline import Timeline

_PARTITIONS = re.compile(r"^HloModule .*?\bnum_partitions=(\d+)", re.MULTILINE)
_REPLICAS = re.compile(r"^HloModule .*?\breplica_count=(\d+)", re.MULTILINE)
_MODULE = re.compile(r"^HloModule ([^\s,]+)", re.MULTILINE)
_BRACES = r"\{(?:[^{}]|\{[^{}]*\})*\}"
_SHARDED = re.compile(
    rf"^\s+(?:ROOT )?%?(?P<name>[\w.\-]+) = (?P<shape>\([^)]*\)|\S+) [\w\-]+\(.*?sharding=(?P<said>{_BRACES})",
    re.MULTILINE,
)


@dataclass(frozen=True, slots=True)
class HloSharding:
    """How the value of an instruction is sharded, as XLA writes it: `{devices=[2,4]<=[8]}`."""

    name: str
    shape: str  # of one device's part, as `f32[32,16]{1,0}`
    sharding: str


@dataclass(frozen=True, slots=True, repr=False)
class HloTrace:
    """The collectives of a compiled module in the order in which it runs them, on devices 0, 1, 2, ..."""

    name: str
    devices: int
    collectives: tuple[HloCollective, ...]
    shardings: tuple[HloSharding, ...]

    @staticmethod
    def parse(text: str, name: str = "") -> HloTrace:
        """Read a compiled module's text, `compiled.as_text()`.

        Raises:
            ParseError: No HLO module, several replicas, or a communicating instruction whose bytes are not known.
        """
        replicas, found = _REPLICAS.search(text), _PARTITIONS.search(text)
        if replicas and integer(replicas[1]) > 1:
            raise ParseError(f"an HLO module of {replicas[1]} replicas; legal is one, of several partitions")
        devices = integer(found[1]) if found else 1
        if devices > MOST_DEVICES:
            raise ParseError(f"an HLO module of {devices} partitions; legal are at most {MOST_DEVICES}")
        collectives = tuple(parse_hlo(text, devices))
        module = _MODULE.search(text)
        shardings = [HloSharding(m["name"], m["shape"], m["said"]) for m in _SHARDED.finditer(text)]
        return HloTrace(name or (module[1] if module else "module"), devices, collectives, tuple(shardings))

    @staticmethod
    def read(path: str | Path) -> HloTrace:
        """Read a file of such text; errors as for `parse`, and where there is none."""
        return HloTrace.parse(read_text(path, f"the HLO text {line(path)}"), Path(path).stem)

    @property
    def moved_bytes(self) -> int:
        """What all devices receive together, by the bandwidth-optimal algorithm of each collective."""
        return sum(one.moved_bytes for one in self.collectives)

    @property
    def script(self) -> Script:
        """The messages of all collectives, one after another, by rings."""
        return hlo_script(self.collectives, self.name)

    def times(self, where: Where | str, algorithm: str = "auto") -> tuple[float, ...]:
        """Return the seconds of each collective.

        Args:
            where: A placement, or a topology (or its text) whose ids are the device ids.
            algorithm: `auto` for the library's cheapest, or one that it has.

        Raises:
            TopologyError: A device is not there; an unknown algorithm.
        """
        place = where_of("seconds: where", where)
        if place is None:
            raise ShardplanError("seconds: where is None; legal are a placement, a topology, and a topology's text")
        fabric = fabric_of(place, (Mesh({"device": self.devices}),))
        return tuple(price(_pattern(one), fabric, algorithm).seconds for one in self.collectives)

    def seconds(self, where: Where | str, algorithm: str = "auto") -> float:
        """Return the seconds of all collectives, one after another; arguments and errors as for `times`."""
        return sum(self.times(where, algorithm))

    def replayed(self, where: Where, constants: Constants | None = None) -> Timeline:
        """Return the timeline of all messages, every device at its own pace; see `simulation.replay`."""
        return replayed(self.script, where, constants=constants)

    def __str__(self) -> str:
        """List shardings and collectives."""
        lines = [f"{self.name}: {len(self.collectives)} collectives on {self.devices} devices"]
        lines += [f"  {s.name}: {s.shape} {s.sharding}" for s in self.shardings]
        for one in self.collectives:
            groups = one.groups or one.pairs
            lines.append(f"  {one.kind} of {format_bytes(one.operand_bytes)} over {_format_groups(groups)}")
        return "\n".join(lines)

    def __repr__(self) -> str:
        """Say what it is, and what it is not."""
        return (
            f"<HloTrace {self.name}: {len(self.collectives)} collectives; a trace, no program: only timed and replayed>"
        )


def _format_groups(groups: Iterable[tuple[int, ...]]) -> str:
    return " ".join("{" + ",".join(map(str, group)) + "}" for group in groups)


def _pattern(one: HloCollective) -> Pattern:
    """What a collective does: its groups of one size are one pattern."""
    if one.pairs:
        ends = one.moving_pairs
        return Messages(ends[:, 0], ends[:, 1], np.full(len(ends), float(one.output_bytes)))
    kind = one.kind.removeprefix("collective-").replace("-", "_")
    found: list[StepPattern] = []
    for size in sorted({len(group) for group in one.groups} - {1}):
        members = np.array([group for group in one.groups if len(group) == size], dtype=np.int64)
        pattern = Groups(kind, members, np.full(len(members), float(one.operand_bytes)))
        found.append(StepPattern(pattern, np.unique(members)))
    return found[0].pattern if len(found) == 1 else AtOnce(tuple(found))


SHOWN = 8  # told in full


class HloMovement(NamedTuple):
    """A collective, and those like it of one operation: how often it runs, and all of its bytes and seconds.

    `shapes` are what a device gives and has then; `hidden` says that XLA starts it and waits for it later: what runs
    between may hide it. A module says no shardings of what is inside: what would remove it `sp.why` says of its source.
    """

    kind: str
    asks: str
    place: str
    shapes: tuple[str, str]
    groups: int
    members: int
    runs: int
    received_bytes: int
    seconds: float
    hidden: bool

    def to_dict(self) -> dict[str, Any]:
        """Return it as an object of JSON."""
        return self._asdict() | {"shapes": list(self.shapes)}


def hlo_movements(trace: HloTrace, where: Where | str) -> tuple[HloMovement, ...]:
    """Return the movements of a trace, those of most seconds first; raises as `HloTrace.times` does."""
    found: dict[tuple[object, ...], HloMovement] = {}
    for one, seconds in zip(trace.collectives, trace.times(where), strict=True):
        groups = len(one.groups) or len(one.pairs)
        members = max((len(group) for group in one.groups), default=2)
        received = one.moved_bytes // max(1, trace.devices)
        row = HloMovement(one.kind, one.op, one.place, one.shapes, groups, members, 1, received, seconds, one.is_async)
        key = row._replace(seconds=0.0, received_bytes=0)
        known = found.get(key)
        found[key] = row if known is None else known._replace(
            runs=known.runs + 1, received_bytes=known.received_bytes + received, seconds=known.seconds + seconds
        )  # fmt: skip
    return tuple(sorted(found.values(), key=lambda m: (-m.seconds, m.kind, m.asks)))


def hlo_why_text(found: tuple[HloMovement, ...], top: int = SHOWN) -> str:
    """Return movements as text: those of most seconds in full, then what the others come to."""
    seconds = sum(m.seconds for m in found)
    lines = [f"movements {len(found)}: {format_seconds(seconds)} a run, one after another"]
    for number, m in enumerate(found[:top], 1):
        over = f"{m.groups} pairs" if m.kind == "collective-permute" else f"{m.groups} groups of {m.members}"
        hidden = "XLA may hide it" if m.hidden else "nothing hides it"
        lines += ["", f"{number:>2}  {m.kind} over {over}", f"    asked    {m.asks or 'the module does not say'}"]
        lines += [f"    where    {m.place}"] if m.place else []
        lines += [f"    gives    {m.shapes[0]}", f"    has      {m.shapes[1]}"]
        lines.append(f"    costs    {m.runs:,} times: {format_bytes(m.received_bytes)}, {format_seconds(m.seconds)}; "
                     f"{hidden}")  # fmt: skip
    rest = found[top:]
    if rest:
        lines += ["", f"{len(rest)} more, {format_seconds(sum(m.seconds for m in rest))}: --top shows them"]
    lines += ["", "what removes one, why says of the program that the module is of: module:function"]
    return "\n".join(lines)

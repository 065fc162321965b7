"""`HloTrace`: what a module that XLA compiled moves: its collectives in order, and how its values are sharded.

It is a trace, and no program: values, local work and what overlaps are not known. It may be timed, each collective by
its price and one after another, and replayed, message by message.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from shardplan.core.decoding import read_text
from shardplan.core.mesh import Mesh
from shardplan.core.pattern import AtOnce, Groups, Messages, Pattern, StepPattern
from shardplan.errors import ParseError, ShardplanError, line
from shardplan.hardware.prices.cost import price
from shardplan.hardware.units import format_bytes
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
        ends = np.array([pair for pair in one.pairs if pair[0] != pair[1]], dtype=np.int64).reshape(-1, 2)
        return Messages(ends[:, 0], ends[:, 1], np.full(len(ends), float(one.output_bytes)))
    kind = one.kind.removeprefix("collective-").replace("-", "_")
    found: list[StepPattern] = []
    for size in sorted({len(group) for group in one.groups} - {1}):
        members = np.array([group for group in one.groups if len(group) == size], dtype=np.int64)
        pattern = Groups(kind, members, np.full(len(members), float(one.operand_bytes)))
        found.append(StepPattern(pattern, np.unique(members)))
    return found[0].pattern if len(found) == 1 else AtOnce(tuple(found))

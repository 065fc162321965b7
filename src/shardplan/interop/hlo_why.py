"""`hlo_movements`: of every collective of a compiled module which operation asks for it, where, and what it costs."""

from __future__ import annotations

from typing import Any, NamedTuple

from shardplan.hardware.units import format_bytes, format_seconds
from shardplan.interop.hlo_trace import HloTrace
from shardplan.plans.pricing import Where

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


def hlo_movements(trace: HloTrace, where: Where | str, algorithm: str = "auto") -> tuple[HloMovement, ...]:
    """Return the movements of a trace, those of most seconds first; raises as `HloTrace.times` does."""
    found: dict[tuple[object, ...], HloMovement] = {}
    for one, seconds in zip(trace.collectives, trace.times(where, algorithm), strict=True):
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

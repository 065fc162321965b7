"""Frames: what every device holds of a value before a program starts and after each of its steps."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from shardplan.core.accounting import account
from shardplan.core.messages import at_root, own_places
from shardplan.core.ops.collective import meet
from shardplan.core.part import moved_values
from shardplan.core.program import Program
from shardplan.core.step import Step
from shardplan.core.tensor import Box, TensorType
from shardplan.core.text import op_text
from shardplan.hardware.units import format_bytes

# How the part of a box that a device did not hold before came to it, and what a legend says of it.
LEGEND = {
    "held": "held",
    "kept": "held before the step and kept",
    "received": "received in the step",
    "reduced": "reduced in the step, with addends of other devices",
    "filled": "filled with the identity of the reduction",
    "computed": "computed in the step",
}
MOST_VALUES = 4  # values drawn for each step of a batch


@dataclass(frozen=True, slots=True)
class HeldBox:
    """What one device holds of a value: its box (None: nothing), and the part of it that it kept."""

    device: int
    coordinates: tuple[int, ...]
    box: Box | None
    kept: Box | None


@dataclass(frozen=True, slots=True)
class Frame:
    """One value on the devices of a program after the step called `title`."""

    title: str
    op: str  # as text; empty before the first step
    note: str
    value: str  # its name; empty where a type is drawn
    type: TensorType
    how: str  # a key of `LEGEND`, for what lies in a box but was not kept
    held: tuple[HeldBox, ...]  # ascending by device id
    more: int = 0  # on the last frame of a step: further values of it that are not drawn


def device_text(number: str, coordinates: Iterable[str]) -> str:
    """Return a device as every picture of text names it: its id and where it is in the mesh, `5 (1, 2)`."""
    place = ", ".join(coordinates)
    return f"{number} ({place})" if place else number


def frames(subject: Program | TensorType, most_devices: int = 64) -> list[Frame]:
    """Return the frames of a program, its inputs first and then each step, or the single frame of a type.

    Only the `most_devices` devices with the smallest ids are drawn, and of each step up to `MOST_VALUES` values. Of a
    program with tables of boxes nothing is.

    >>> from shardplan.core.mesh import Mesh
    >>> frame, = frames(TensorType.parse("f32[4@x]", Mesh(x=2)))
    >>> [h.box for h in frame.held]
    [((0, 2),), ((2, 4),)]
    """
    if isinstance(subject, TensorType):
        devices = tuple(sorted(subject.mesh.devices))[:most_devices]
        return [Frame("holds", "", "", "", subject, "held", _holdings(subject, devices))]
    if subject.tables:
        return []
    devices = subject.devices[:most_devices]
    received = account(subject).step_received
    out = _drawn(
        [Frame("before", "", "", name, t, "held", _holdings(t, devices)) for name, t in subject.inputs[:MOST_VALUES]],
        len(subject.inputs),
    )
    for number, step in enumerate(subject.steps):
        note = f"{format_bytes(received[number])} received at the worst device" if received[number] else "nothing moves"
        out += _drawn(_after(subject, number, step, devices, note), len(step.results))
    return out


def _drawn(made: list[Frame], count: int) -> list[Frame]:
    """The frames of a step with `count` values; the last says how many are not drawn."""
    if made and count > len(made):
        made[-1] = replace(made[-1], more=count - len(made))
    return made


def _after(program: Program, number: int, step: Step, devices: Sequence[int], note: str) -> list[Frame]:
    """The frames of a step's results."""
    names = {m: f"m{k}" for k, m in enumerate(program.meshes)}
    text = op_text(step.op, step.operands, names)
    operands, results = program.step_types(step)
    made: list[Frame] = []
    for k, (name, u) in enumerate(zip(step.results, results, strict=True)):
        if k >= MOST_VALUES:
            break
        before = operands[k] if moved_values(step) else None
        got = step.op.received_bytes(before) if before else np.zeros(u.mesh.size)
        kept = {} if before is None else _kept(got, before, u, devices)
        made.append(Frame(f"step {number + 1}", text, note, name, u, _how(before, u, got), _holdings(u, devices, kept)))
    return made


def _how(before: TensorType | None, after: TensorType, got: np.ndarray) -> str:
    """How what is new in a result's box came there, as a key of `LEGEND`."""
    if before is None:
        return "computed"
    addends = [math.prod(t.mesh.span(a).size for a in t.layout.partial) for t in (before, after)]
    values = [math.prod(t.mesh.span(a).size for a in (*t.layout.partial, *t.layout.root)) for t in (before, after)]
    if values[1] > values[0] and not got.any():  # what was one value is addends of one, or is dropped but at a root
        return "filled"
    return "reduced" if addends[1] < addends[0] else "received"


def _box(rows: np.ndarray) -> Box:
    return tuple((int(a), int(b)) for a, b in rows)


def _volume(box: Box) -> int:
    return math.prod(b - a for a, b in box)


def _kept(got: np.ndarray, before: TensorType, after: TensorType, devices: Sequence[int]) -> dict[int, Box]:
    """The part of its new box that each device (by place) kept: what it held, unless as much was received again.

    `got` are the bytes that each received.
    """
    places = own_places(before, after)
    roots, old, new = at_root(before), before.boxes(), after.boxes()
    found: dict[int, Box] = {}
    wanted = set(devices)
    for k, device in enumerate(after.mesh.devices):
        if device not in wanted:
            continue
        place = int(places[k])
        part = meet(old[place], new[k]) if place >= 0 and roots[place] else None
        if part is None:
            continue
        kept = _box(part)
        if got[k] <= (_volume(_box(new[k])) - _volume(kept)) * after.itemsize:
            found[k] = kept
    return found


def _holdings(t: TensorType, devices: Sequence[int], kept: dict[int, Box] | None = None) -> tuple[HeldBox, ...]:
    """What each device (by id) holds, and kept (by place); without `kept` it kept all."""
    place = {d: k for k, d in enumerate(t.mesh.devices)}
    roots, boxes = at_root(t), t.boxes()
    made: list[HeldBox] = []
    for d in devices:
        k = place.get(d)
        if k is None:
            made.append(HeldBox(d, (), None, None))
            continue
        box = _box(boxes[k]) if roots[k] and _volume(_box(boxes[k])) else None
        part = None if box is None else box if kept is None else kept.get(k)
        made.append(HeldBox(d, t.mesh.coordinates(k), box, part))
    return tuple(made)


def cuts(drawn: Sequence[Frame]) -> dict[tuple[int, ...], tuple[tuple[int, ...], ...]]:
    """Return, for every shape drawn, the positions along each dim where a box of any device starts or stops.

    Devices that are not drawn count too: what they hold is cut as well.
    """
    found: dict[tuple[int, ...], list[set[int]]] = {}
    for frame in drawn:
        lines = found.setdefault(frame.type.shape, [{0, n} for n in frame.type.shape])
        boxes = frame.type.boxes()
        for dim, here in enumerate(lines):
            here.update(np.unique(boxes[:, dim]).tolist())
    return {shape: tuple(tuple(sorted(x)) for x in lines) for shape, lines in found.items()}


def shape_text(shape: Sequence[int]) -> str:
    """Return `4 x 6`, or `scalar`."""
    return " x ".join(map(str, shape)) or "scalar"


def box_text(box: Box) -> str:
    """Return `[0:2, 4:6]`, or `[]` for a scalar's."""
    return f"[{', '.join(f'{a}:{b}' for a, b in box)}]"

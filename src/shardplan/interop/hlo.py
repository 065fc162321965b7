"""The collectives of a compiled XLA module, read from its scheduled text, and the script that moves their bytes.

Source: the text form that XLA prints (`compiled.as_text()`; checked with jaxlib 0.10.2). A called computation counts
once a call, a while loop once a trip where XLA states a known trip count and once otherwise, every branch of a
conditional once. Devices are partition ids of a module with one replica. The list is a trace of what another compiler
does: it may be replayed and timed, and is no program.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from shardplan.core.mesh import Mesh
from shardplan.core.ops import AllGather, AllReduce, AllToAll, Broadcast, ReduceScatter
from shardplan.core.ops.collective import Collective
from shardplan.core.tensor import TensorType
from shardplan.errors import ParseError, excerpt
from shardplan.interop.hlo_groups import Groups, integer, integers_in, parse_groups
from shardplan.simulation.script import Script, ScriptRound, Stage, abreast
from shardplan.simulation.scripts import stages_of

BYTE = 8  # bits
SHOWN = 200  # characters of a text that an error shows
MOST = 2**20  # collectives of a module, once a trip
MOST_BYTES = 2**62  # of an array
_DEEPEST = 100  # computations that call each other
_WIDEST = 128  # bits of an element
COLLECTIVES = ("all-gather", "all-to-all", "collective-permute", "all-reduce", "reduce-scatter", "collective-broadcast")
_UNREAD = ("ragged-all-to-all", "send", "recv")
_ARRAY = re.compile(r"([a-z][a-z0-9]*)\[([^\]]*)\]")
_HEADER = re.compile(r"^(ENTRY\s+)?%?([\w.\-]+)\s*(?:\(.*\)\s*->.*)?\{\s*$")
_CALLED = re.compile(r"(?:calls|to_apply|body|condition|true_computation|false_computation)=%?([\w.\-]+)")
_CALLED_MANY = re.compile(r"(?:branch_computations|called_computations)=\{([^}]*)\}")
_TRIPS = re.compile(r'"known_trip_count":\s*\{\s*"n":\s*"?(\d+)')
_DIM = re.compile(r"dimensions=\{(\d+)\}")
_PAIRS = re.compile(r"source_target_pairs=\{((?:\{\d+,\d+\},?\s*)*)\}")


@dataclass(frozen=True, slots=True)
class HloCollective:
    """One collective of a compiled module."""

    kind: str  # the opcode without `-start`
    groups: Groups  # of all kinds but a permute: device ids in member order
    pairs: tuple[tuple[int, int], ...]  # of a permute: device ids of source and target
    operand_bytes: int  # of all operands together, on one device
    output_bytes: int  # of all results together, on one device
    name: str  # of the instruction
    dim: int | None = field(default=None, compare=False)  # of the arrays, that it acts on, where it is printed
    op: str = field(default="", compare=False)  # the operation of the source that it is of, as XLA calls it
    place: str = field(default="", compare=False)  # where that is
    shapes: tuple[str, str] = field(default=("", ""), compare=False)  # of all operands, and of the result
    is_async: bool = field(default=False, compare=False)  # whether it is begun, and waited for later

    @property
    def moving_pairs(self) -> np.ndarray:
        """Those of the pairs, int64 [n, 2], whose ends differ."""
        return np.array([pair for pair in self.pairs if pair[0] != pair[1]], dtype=np.int64).reshape(-1, 2)

    @property
    def moved_bytes(self) -> int:
        """What all devices receive together, by the bandwidth-optimal algorithm of the kind."""
        if self.kind == "collective-permute":
            return sum(self.output_bytes for source, target in self.pairs if source != target)
        return sum(self._moved_bytes(len(group)) for group in self.groups)

    def _moved_bytes(self, q: int) -> int:
        match self.kind:
            case "all-gather":
                return q * (self.output_bytes - self.operand_bytes) if q > 1 else 0
            case "all-to-all" | "reduce-scatter":
                return (q - 1) * self.operand_bytes
            case "all-reduce":
                return 2 * (q - 1) * self.operand_bytes
            case _:
                return (q - 1) * self.output_bytes

    def __str__(self) -> str:
        n = len(self.pairs) if self.kind == "collective-permute" else max(map(len, self.groups), default=1)
        return f"{self.kind}({'pairs' if self.kind == 'collective-permute' else 'q'}={n}, {self.operand_bytes} bytes)"


def parse_hlo(text: str, devices: int) -> list[HloCollective]:
    """Return the collectives of a compiled module, given as XLA prints it, in the order in which the text runs them.

    A collective that names no groups runs on that many `devices`. Raises `ParseError` for what is no HLO module, and a
    communicating instruction whose bytes are not known.
    """
    module = HloModule.parse(text)
    return _collectives(module, module.entry, devices, {})


def hlo_script(collectives: Sequence[HloCollective], title: str = "hlo") -> Script:
    """Return the movement of collectives by the ring engine, one step each; adding and local copies are left out.

    The bytes sent are `moved_bytes`, for every collective.
    """
    stages: list[Stage] = []
    for number, one in enumerate(collectives):
        stages += _stages(number, one)
    return Script(tuple(stages), tuple(map(str, collectives)), tuple(c.kind for c in collectives), title)


def _stages(number: int, one: HloCollective) -> Iterator[Stage]:
    """Yield the stages of a collective, in order; its groups go through each together."""
    if one.pairs:
        ends = one.moving_pairs
        if len(ends) and one.output_bytes:
            yield Stage(number, (ScriptRound(ends[:, 0], ends[:, 1], np.full(len(ends), one.output_bytes)),))
    yield from abreast(
        number, [stages_of(*_typed_collective(one, group), number) for group in one.groups if len(group) > 1]
    )


def _typed_collective(one: HloCollective, group: Sequence[int]) -> tuple[Collective, list[TensorType]]:
    """The collective of a group as an op on bytes."""
    n, q = one.operand_bytes, len(group)
    op, text = {
        "all-gather": (AllGather(0, ("x",)), f"u8[{n * q}@x]"),
        "reduce-scatter": (ReduceScatter(0, ("x",)), f"u8[{n}]{{+x}}"),
        "all-reduce": (AllReduce(("x",)), f"u8[{n}]{{+x}}"),
        "all-to-all": (AllToAll(0, 1, ("x",)), f"u8[{q}@x, {n}]"),
        "collective-broadcast": (Broadcast(("x",)), f"u8[{one.output_bytes}]{{root:x}}"),
    }[one.kind]
    return op, [TensorType.parse(text, Mesh({"x": q}, devices=group))]


@dataclass(frozen=True, slots=True)
class HloInstruction:
    """One line of a computation."""

    name: str
    shape: str  # of the result, as text
    opcode: str
    operands: tuple[str, ...]  # as text: a name, or a shape and a name
    attributes: str  # what follows the operands


@dataclass(frozen=True, slots=True)
class HloModule:
    """The computations of a compiled module, each a tuple of instructions in the order of the text."""

    computations: dict[str, tuple[HloInstruction, ...]]  # by name
    entry: str  # the name of the one that runs
    places: SourcePlaces

    @staticmethod
    def parse(text: str) -> HloModule:
        """Read a text: computations are blocks from a line that ends in `{` to one that begins with `}`.

        Raises `ParseError` for what is no HLO module, and for a line in it that is no instruction.
        """
        computations: dict[str, tuple[HloInstruction, ...]] = {}
        entry, name, lines = "", "", []
        for line in text.splitlines():
            stripped = line.strip()
            if not name:
                if not line.startswith(("HloModule", " ")) and (header := _HEADER.match(line)):
                    name, lines = header[2], []
                    entry = name if header[1] else entry
            elif stripped == "}" or stripped.startswith("}, "):
                computations[name] = tuple(lines)
                name = ""
            elif " = " in stripped:
                lines.append(_instruction(stripped))
        if not entry:
            raise ParseError("not the text of an HLO module: it has no ENTRY computation")
        return HloModule(computations, entry, SourcePlaces.parse(text))


def _collectives(
    module: HloModule, name: str, devices: int, found: dict[str, list[HloCollective] | None], depth: int = 0
) -> list[HloCollective]:
    """Return the collectives of a computation, those of what it calls where it calls them; `found` remembers them."""
    if name not in module.computations:
        raise ParseError(f"a computation {excerpt(name)} is called, which the HLO module does not have")
    known = found.get(name, [])
    if known is None or depth > _DEEPEST:
        what = "calls itself" if known is None else f"is called at a depth of more than {_DEEPEST}"
        raise ParseError(f"the computation {excerpt(name)} {what}; legal are calls of others, at most so deep")
    if name in found:
        return known
    found[name] = None
    instructions = module.computations[name]
    shapes = {instruction.name: instruction.shape for instruction in instructions}
    out: list[HloCollective] = []
    for instruction in instructions:
        kind = instruction.opcode.removesuffix("-start")
        if kind in COLLECTIVES:
            out.append(_collective(kind, instruction, shapes, devices, module.places))
        elif kind in _UNREAD:
            raise ParseError(
                f"instruction {instruction.name!r}: no byte count is known for {kind!r}; known are "
                f"{', '.join(COLLECTIVES)}"
            )
        elif kind in ("async-done", "async-update"):  # its computation was counted at the start
            continue
        else:
            trips = _TRIPS.search(instruction.attributes) if instruction.opcode == "while" else None
            inner: list[HloCollective] = []
            for called in called_computations(instruction):
                inner += _collectives(module, called, devices, found, depth + 1)
            times = integer(trips[1]) if trips else 1
            if len(out) + len(inner) * times > MOST:
                raise ParseError(
                    f"instruction {excerpt(instruction.name)}: {len(inner)} collectives in {times} trips; legal are at "
                    f"most {MOST} in a module"
                )
            out += inner * times
    found[name] = out
    return out


def _collective(
    kind: str, instruction: HloInstruction, shapes: dict[str, str], devices: int, places: SourcePlaces
) -> HloCollective:
    attributes = instruction.attributes
    pairs, dim = _PAIRS.search(attributes), _DIM.search(attributes)
    output = instruction.shape
    if instruction.opcode in ("all-gather-start", "collective-permute-start"):
        parts = _elements(output)
        if len(parts) < 2:
            raise ParseError(
                f"instruction {excerpt(instruction.name)} has the shape {excerpt(output)}; legal is a tuple"
            )
        output = parts[1]
    given = [_operand_shape(operand, shapes) for operand in instruction.operands]
    operands = sum(map(sum, map(array_bytes, given)))
    op, place = places.place(attributes)
    permute = kind == "collective-permute"
    ids = integers_in(pairs[1]) if pairs else ()
    groups = () if permute else parse_groups(attributes, devices)
    if len(ids) % 2:
        raise ParseError(
            f"instruction {excerpt(instruction.name)}: source_target_pairs of {len(ids)} ids; legal are two each"
        )
    return HloCollective(
        kind=kind,
        groups=groups,
        pairs=tuple(zip(ids[::2], ids[1::2], strict=True)) if permute else (),
        operand_bytes=operands,
        output_bytes=sum(array_bytes(output)),
        name=instruction.name,
        dim=integer(dim[1]) if dim else None,
        op=op,
        place=place,
        shapes=(", ".join(map(_plain_shape, given)), _plain_shape(output)),
        is_async=instruction.opcode.endswith("-start"),
    )


def _plain_shape(shape: str) -> str:
    """A shape without the order of its dims in memory."""
    return re.sub(r"\{[^{}]*\}", "", shape)


def _operand_shape(operand: str, shapes: dict[str, str]) -> str:
    """An operand is `%name`, or `shape %name` as older printers have it."""
    shape, _, name = operand.rpartition(" ")
    if not shape and name.lstrip("%") not in shapes:
        raise ParseError(f"the operand {excerpt(operand)} of a collective is no instruction before it")
    return shape or shapes[name.lstrip("%")]


def called_computations(instruction: HloInstruction) -> tuple[str, ...]:
    """Return the names of the computations that an instruction calls, of a fusion also."""
    many = [n.strip().lstrip("%") for inner in _CALLED_MANY.findall(instruction.attributes) for n in inner.split(",")]
    return (*_CALLED.findall(instruction.attributes), *(n for n in many if n))


def array_bytes(shape: str) -> list[int]:
    """Return the bytes of every array in a shape, nested tuples flattened; raises `ParseError`."""
    found = [_bits(dtype) * math.prod(integers_in(dims)) // BYTE for dtype, dims in _ARRAY.findall(shape)]
    if sum(found) > MOST_BYTES:
        raise ParseError(f"the shape {excerpt(shape)} has {sum(found):.3g} bytes; legal are at most {MOST_BYTES:.3g}")
    return found


def _bits(dtype: str) -> int:
    if dtype in ("token", "opaque"):
        return 0
    if dtype == "pred":
        return BYTE
    found = re.match(r"[a-z]+(\d+)", dtype)
    if not found or integer(found[1]) > _WIDEST:
        raise ParseError(
            f"unknown HLO element type {excerpt(dtype)}; legal are pred and letters with a width, such as bf16"
        )
    return int(found[1])


def _instruction(line: str) -> HloInstruction:
    """`[ROOT] %name = shape opcode(operands), attributes`."""
    line = re.sub(r"/\*.*?\*/", "", line)
    name, _, rest = line.removeprefix("ROOT ").partition(" = ")
    shape_end = _closing(rest, 0) + 1 if rest.startswith("(") else rest.find(" ")
    call = rest[shape_end:].lstrip()
    opening = call.find("(")
    if shape_end < 0 or opening < 0:
        raise ParseError(f"{excerpt(line)} is no HLO instruction; legal is name = shape opcode(operands)")
    closing = _closing(call, opening)
    return HloInstruction(
        name=name.strip().lstrip("%"),
        shape=rest[:shape_end],
        opcode=call[:opening],
        operands=tuple(_elements(call[opening : closing + 1])),
        attributes=call[closing + 1 :],
    )


def _closing(text: str, opening: int) -> int:
    """The position of the bracket that closes the one at `opening`."""
    depth = 0
    for position in range(opening, len(text)):
        depth += (text[position] in "([{") - (text[position] in ")]}")
        if depth == 0:
            return position
    raise ParseError("unbalanced brackets in HLO text", text[:SHOWN], opening)


def _elements(text: str) -> list[str]:
    """The parts of `(a, b, ...)` at the outermost level."""
    inner, parts, depth, start = text.strip()[1:-1], [], 0, 0
    for position, char in enumerate(inner):
        depth += (char in "([{") - (char in ")]}")
        if char == "," and depth == 0:
            parts.append(inner[start:position].strip())
            start = position + 1
    last = inner[start:].strip()
    return [*parts, last] if last else parts


# Where in its source an instruction of a compiled module comes from, by the module's metadata.
#
# Source: the text that XLA prints (checked with jaxlib 0.10.2): `metadata={op_name="jit(f)/add" stack_frame_id=2}` with
# tables of files, functions, locations and frames in front, or, as older ones have it, `source_file=` and
# `source_line=`.


_NAME = re.compile(r'op_name="((?:[^"\\]|\\.)*)"')
_FRAME = re.compile(r"stack_frame_id=(\d+)")
_FILE = re.compile(r'source_file="((?:[^"\\]|\\.)*)"')
_LINE = re.compile(r"source_line=(\d+)")
_TABLES = ("FileNames", "FunctionNames", "FileLocations", "StackFrames")
_ROW = re.compile(r"^(\d+) (.*)$")
_FIELD = re.compile(r"(\w+)=(\d+)")


class SourcePlaces(NamedTuple):
    """By the number of a stack frame where it is: `file:line (function)`."""

    frames: Mapping[int, str]

    @staticmethod
    def parse(text: str) -> SourcePlaces:
        """Read the tables in front of a module; of one without them there are none."""
        rows: dict[str, dict[int, str]] = {title: {} for title in _TABLES}
        title = ""
        for line in text.splitlines():
            if line in rows:
                title = line
            elif line.startswith(("%", "ENTRY")):
                break
            elif title and (row := _ROW.match(line)):
                rows[title][int(row[1])] = row[2]
        names, functions, locations, frames = (rows[title] for title in _TABLES)
        found: dict[int, str] = {}
        for number, said in frames.items():
            at = dict(_FIELD.findall(locations.get(int(dict(_FIELD.findall(said)).get("file_location_id", 0)), "")))
            file = names.get(int(at.get("file_name_id", 0)), "").strip('"')
            function = functions.get(int(at.get("function_name_id", 0)), "").strip('"')
            if file:
                found[number] = f"{file}:{at.get('line', 0)}" + (f" ({function})" if function else "")
        return SourcePlaces(found)

    def place(self, attributes: str) -> tuple[str, str]:
        """Return the operation that an instruction is of, and where that is; empty texts where it does not say."""
        name, frame = _NAME.search(attributes), _FRAME.search(attributes)
        file, line = _FILE.search(attributes), _LINE.search(attributes)
        where = self.frames.get(int(frame[1]), "") if frame else ""
        if not where and file:
            where = file[1] + (f":{line[1]}" if line else "")
        return (name[1] if name else ""), where

"""Reads the collectives of a compiled HLO module from its text.

Source: the text form that XLA prints (`compiled.as_text()`; checked with jaxlib 0.10.2), with the three spellings of
`replica_groups`: explicit lists, iota (`[2,4]<=[8]`, `[4,2]<=[2,4]T(1,0)`), and named meshes with sub-axes
(`mesh['x'=2,'y'=4], device_ids=([2,2,2]T(0,2,1)) {'y':(2)2}`, as `MeshAxesReplicaGroupList::ToString` writes them).

Caveats: a called computation counts once per call, a while loop once per trip where XLA states a known trip count and
once otherwise, every branch of a conditional once. Devices are partition ids of a module with one replica.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from benchmarks.peers.problem import rounds_of

COLLECTIVES = ("all-gather", "all-to-all", "collective-permute", "all-reduce", "reduce-scatter", "collective-broadcast")
_UNREAD = ("ragged-all-to-all", "send", "recv")
_ARRAY = re.compile(r"([a-z][a-z0-9]*)\[([^\]]*)\]")
_HEADER = re.compile(r"^(ENTRY\s+)?%?([\w.\-]+)\s*(?:\(.*\)\s*->.*)?\{\s*$")
_CALLED = re.compile(r"(?:calls|to_apply|body|condition|true_computation|false_computation)=%?([\w.\-]+)")
_CALLED_MANY = re.compile(r"(?:branch_computations|called_computations)=\{([^}]*)\}")
_TRIPS = re.compile(r'"known_trip_count":\s*\{\s*"n":\s*"?(\d+)')
_PAIRS = re.compile(r"source_target_pairs=\{((?:\{\d+,\d+\},?\s*)*)\}")
_GROUP_LISTS = re.compile(r"replica_groups=\{((?:\{[\d,\s]*\},?\s*)*)\}")
_GROUP_IOTA = re.compile(r"replica_groups=(\[[\d,]+\]<=\[[\d,]+\](?:T\([\d,]+\))?)")
_GROUP_MESH = re.compile(r"replica_groups=mesh\[([^\]]*)\](?:,\s*device_ids=\(([^{]*)\))?\s*\{([^}]*)\}")
_DIM = re.compile(r"dimensions=\{(\d+)\}")


@dataclass(frozen=True, slots=True)
class HloCollective:
    """One collective of a compiled module.

    `kind` is the opcode without `-start`; a permute has source and target `pairs`, all others have `groups`. The bytes
    are those of all operands and of all results on one device. `dim` is the array dim it acts on, where it is printed.
    """

    kind: str
    groups: tuple[tuple[int, ...], ...]
    pairs: tuple[tuple[int, int], ...]
    operand_bytes: int
    output_bytes: int
    name: str
    dim: int | None = None

    @property
    def q(self) -> int:
        """The devices of the largest group (2 for a permute that moves anything, else 1)."""
        if self.kind == "collective-permute":
            return 2 if any(a != b for a, b in self.pairs) else 1
        return max((len(group) for group in self.groups), default=1)

    def received(self, device_count: int) -> tuple[int, ...]:
        """Bytes that each device receives."""
        got = [0] * device_count
        if self.kind == "collective-permute":
            for source, target in self.pairs:
                got[target] = self.output_bytes if source != target else 0
            return tuple(got)
        for group in self.groups:
            for place, device in enumerate(group):
                got[device] = self._received_in_group(len(group), place)
        return tuple(got)

    def _received_in_group(self, q: int, place: int) -> int:
        match self.kind:
            case "all-gather":
                return self.output_bytes - self.operand_bytes if q > 1 else 0
            case "all-to-all" | "reduce-scatter":
                return self.operand_bytes * (q - 1) // q
            case "all-reduce":
                return 2 * self.operand_bytes * (q - 1) // q
            case "collective-broadcast":
                return self.output_bytes if place > 0 else 0
            case _:
                raise ValueError(f"{self.name}: no byte count is known for {self.kind!r}; known are {COLLECTIVES}")

    @property
    def rounds(self) -> int:
        """The rounds it takes (see `problem.rounds_of`)."""
        kind = "permute" if self.kind == "collective-permute" else self.kind
        return rounds_of(kind, self.q, moved=self.q > 1)

    def __str__(self) -> str:
        where = "" if self.dim is None else f" dim={self.dim}"
        return self.kind if self.kind == "collective-permute" else f"{self.kind} q={self.q}{where}"


@dataclass(frozen=True, slots=True)
class _Instruction:
    name: str
    shape: str
    opcode: str
    operands: tuple[str, ...]
    attributes: str


@dataclass(frozen=True, slots=True)
class _Module:
    computations: dict[str, tuple[_Instruction, ...]]
    entry: str


def parse_hlo(text: str, device_count: int) -> list[HloCollective]:
    """The collectives of a compiled module, in the order in which its (scheduled) text runs them.

    `device_count` is used where a collective names no groups, which means all devices. Raises ValueError on text that
    is not an HLO module, and on a communicating instruction whose bytes it cannot count.
    """
    module = _read(text)
    return list(_collectives(module, module.entry, device_count))


def largest_bytes(text: str) -> int:
    """The largest array, in bytes, that an instruction of the module outputs; of a tuple, its largest element.

    Instructions inside fusions are left out: they are not buffers. (XLA may reuse buffers; this is a logical size.)
    """
    module = _read(text)
    fused = {
        name
        for instructions in module.computations.values()
        for instruction in instructions
        if instruction.opcode == "fusion"
        for name in _called(instruction)
    }
    kept = (instructions for name, instructions in module.computations.items() if name not in fused)
    return max((max(_sizes(i.shape), default=0) for instructions in kept for i in instructions), default=0)


def parse_groups(attributes: str, device_count: int) -> tuple[tuple[int, ...], ...]:
    """The groups that `replica_groups=...` names, in any of its three spellings; all devices when it names none."""
    if found := _GROUP_LISTS.search(attributes):
        groups = tuple(_numbers(inner) for inner in re.findall(r"\{([^}]*)\}", found[1]))
        return groups or (tuple(range(device_count)),)
    if found := _GROUP_IOTA.search(attributes):
        return _rows(_iota(found[1]))
    if found := _GROUP_MESH.search(attributes):
        return _mesh_groups(found[1], found[2], found[3])
    if "replica_groups=" in attributes:
        raise ValueError(f"replica_groups in an unknown spelling: {attributes[:200]!r}")
    return (tuple(range(device_count)),)


def _mesh_groups(mesh: str, device_ids: str | None, group_axes: str) -> tuple[tuple[int, ...], ...]:
    """Groups over some axes of a named mesh, sub-axes `'x':(m)k` being k chunks below m chunks of x."""
    sizes = {name: int(size) for name, size in re.findall(r"'?([^,'=\s]+)'?=(\d+)", mesh)}
    wanted = [
        (name, int(major or 1), int(size) if size else sizes[name])
        for name, major, size in re.findall(r"'?([^,':\s]+)'?(?::\((\d+)\)(\d+))?", group_axes)
    ]
    # Every axis becomes the run of its parts, cut at the ends of the wanted sub-axes; a group then spans whole parts.
    parts: list[tuple[str, int]] = []
    lengths: list[int] = []
    for name, size in sizes.items():
        ends = {1, size} | {end for axis, major, k in wanted if axis == name for end in (major, major * k)}
        ordered = sorted(ends)
        for start, stop in itertools.pairwise(ordered):
            parts.append((name, start))
            lengths.append(stop // start)
    if device_ids is None:
        ids = np.arange(math.prod(sizes.values()))
    else:
        ids = _iota(device_ids).reshape(-1) if "[" in device_ids else np.array(_numbers(device_ids))
    chosen: list[int] = []
    for axis, major, k in wanted:
        chosen += [i for i, (name, start) in enumerate(parts) if name == axis and major <= start < major * k]
    rest = [i for i in range(len(parts)) if i not in chosen]
    q = math.prod(lengths[i] for i in chosen)
    return _rows(ids.reshape(lengths).transpose(rest + chosen).reshape(-1, q))


def _iota(text: str) -> np.ndarray:
    """`[g,q]<=[d0,d1,...]T(p0,...)`: the ids 0.. in shape d, transposed by p, in shape [g,q] (where one is given)."""
    shape, _, source = text.rpartition("<=")
    found = re.fullmatch(r"\s*\[([\d,]+)\]\s*(?:T\(([\d,]+)\))?\s*", source)
    if not found:
        raise ValueError(f"not an iota list of devices: {text!r}")
    dims = _numbers(found[1])
    ids = np.arange(math.prod(dims)).reshape(dims)
    if found[2]:
        ids = ids.transpose(_numbers(found[2]))
    return ids.reshape(_numbers(shape.strip("[] "))) if shape else ids


def _rows(ids: np.ndarray) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(int(i) for i in row) for row in ids)


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(n) for n in re.findall(r"\d+", text))


def _collectives(module: _Module, name: str, device_count: int) -> Iterator[HloCollective]:
    instructions = module.computations[name]
    shapes = {instruction.name: instruction.shape for instruction in instructions}
    for instruction in instructions:
        kind = instruction.opcode.removesuffix("-start")
        if kind in COLLECTIVES:
            yield _collective(kind, instruction, shapes, device_count)
        elif kind in _UNREAD:
            raise ValueError(f"{instruction.name}: no byte count is known for {kind!r}; known are {COLLECTIVES}")
        else:
            trips = _TRIPS.search(instruction.attributes) if instruction.opcode == "while" else None
            for _ in range(int(trips[1]) if trips else 1):
                for called in _called(instruction):
                    yield from _collectives(module, called, device_count)


def _collective(kind: str, instruction: _Instruction, shapes: dict[str, str], device_count: int) -> HloCollective:
    attributes = instruction.attributes
    pairs = _PAIRS.search(attributes)
    dim = _DIM.search(attributes)
    output = instruction.shape
    if instruction.opcode in ("all-gather-start", "collective-permute-start"):
        output = _elements(output)[1]
    operands = sum(sum(_sizes(_operand_shape(operand, shapes))) for operand in instruction.operands)
    permute = kind == "collective-permute"
    ids = _numbers(pairs[1]) if pairs else ()
    return HloCollective(
        kind=kind,
        groups=() if permute else parse_groups(attributes, device_count),
        pairs=tuple(zip(ids[::2], ids[1::2], strict=True)) if permute else (),
        operand_bytes=operands,
        output_bytes=sum(_sizes(output)),
        name=instruction.name,
        dim=int(dim[1]) if dim else None,
    )


def _operand_shape(operand: str, shapes: dict[str, str]) -> str:
    """An operand is `%name`, or `shape %name` as older printers have it."""
    shape, _, name = operand.rpartition(" ")
    return shape or shapes[name.lstrip("%")]


def _called(instruction: _Instruction) -> tuple[str, ...]:
    many = [n.strip().lstrip("%") for inner in _CALLED_MANY.findall(instruction.attributes) for n in inner.split(",")]
    return (*_CALLED.findall(instruction.attributes), *(n for n in many if n))


def _sizes(shape: str) -> list[int]:
    """The bytes of every array in a shape, nested tuples flattened."""
    return [_bits(dtype) * math.prod(_numbers(dims)) // 8 for dtype, dims in _ARRAY.findall(shape)]


def _bits(dtype: str) -> int:
    if dtype in ("token", "opaque"):
        return 0
    if dtype == "pred":
        return 8
    found = re.match(r"[a-z]+(\d+)", dtype)
    if not found:
        raise ValueError(f"unknown HLO element type {dtype!r}")
    return int(found[1])


def _read(text: str) -> _Module:
    computations: dict[str, tuple[_Instruction, ...]] = {}
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
        raise ValueError("not the text of an HLO module: it has no ENTRY computation")
    return _Module(computations, entry)


def _instruction(line: str) -> _Instruction:
    """`[ROOT] %name = shape opcode(operands), attributes`."""
    line = re.sub(r"/\*.*?\*/", "", line)
    name, _, rest = line.removeprefix("ROOT ").partition(" = ")
    shape_end = _closing(rest, 0) + 1 if rest.startswith("(") else rest.index(" ")
    call = rest[shape_end:].lstrip()
    opening = call.index("(")
    closing = _closing(call, opening)
    return _Instruction(
        name=name.strip().lstrip("%"),
        shape=rest[:shape_end],
        opcode=call[:opening],
        operands=tuple(_elements(call[opening : closing + 1])),
        attributes=call[closing + 1 :],
    )


def _closing(text: str, opening: int) -> int:
    """The place of the bracket that closes the one at `opening`."""
    depth = 0
    for place in range(opening, len(text)):
        depth += (text[place] in "([{") - (text[place] in ")]}")
        if depth == 0:
            return place
    raise ValueError(f"unbalanced brackets in HLO text: {text[:200]!r}")


def _elements(text: str) -> list[str]:
    """The parts of `(a, b, ...)` at the outermost level."""
    inner, parts, depth, start = text.strip()[1:-1], [], 0, 0
    for place, char in enumerate(inner):
        depth += (char in "([{") - (char in ")]}")
        if char == "," and depth == 0:
            parts.append(inner[start:place].strip())
            start = place + 1
    last = inner[start:].strip()
    return [*parts, last] if last else parts

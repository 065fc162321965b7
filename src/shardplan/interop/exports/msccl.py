"""Reduction programs as MSCCL XML: every collective of the program expanded over rings of its groups.

The XML is an all-reduce of the communicator of one group of the reduction, out of place or in place. A GPU's id is its
place among the group's ranks in ascending order, as communicators number them. The chunks of the payload are the cells
of its chunk dims, so `nchunksperloop` is their number, times `parts`; NCCL takes the algorithm for counts that it
divides, and nothing pads there.

Around a ring of k members a chunk that ends at member p starts at member p + 1. A reduce-scatter is `s`, `rrs` at those
between, and `rrc` at p; an all-gather `s`, `rcs`, `r`; an all-reduce joins the two by an `rrcs`; a reduce and a
broadcast are chains along the same ring. All groups over one set of axes share a range of channels; a thread block is
one ring's edge pair (receive from before, send to after) on one channel. Steps are made in one order for all GPUs
(program step, row of chunks, time around the ring), and wait for earlier steps only, so nothing can deadlock as long as
a connection holds two chunks, which every protocol of NCCL does.

Values are read where they are, in the input or in the output, and written to the output, so nothing is copied first.
Reads and writes of a chunk by other thread blocks become dependencies; more than one is written as `nop`s before.
Facts: the MSCCL language's XML and the executor's parser and interpreter (github.com/microsoft/msccl-tools,
github.com/Azure/msccl-executor-nccl); `msccl_schema` lists them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from shardplan.core.messages import at_root
from shardplan.core.program import Program
from shardplan.core.tensor import TensorType
from shardplan.errors import BackendError
from shardplan.hardware.placement import Placement
from shardplan.interop.exports.msccl_interpreter import verify
from shardplan.interop.exports.msccl_schema import MOST_BLOCKS, MOST_CHANNELS, MOST_STEPS
from shardplan.interop.exports.recipe import Recipe, RecipeStep, heading, recipe

LARGEST = 2**35  # bytes, above any payload; the executor takes 0 for no limit, the older one does not
VERIFIED = 32  # GPUs up to which what is returned is interpreted first: the time of that grows faster than their number


class _Action(NamedTuple):
    """What a member of a ring does with a chunk."""

    part: int  # of the row: whose chunk it is, by member
    member: int  # of the ring, who acts
    kind: str  # of the step
    chunk: int


@dataclass(slots=True, eq=False)
class _Step:
    """A step of a thread block, before it has a number."""

    kind: str
    source: tuple[str, int] | None
    target: tuple[str, int] | None
    waits: list[tuple[_ThreadBlock, int]]  # steps of other blocks, by their index there
    awaited: bool = False


@dataclass(slots=True, eq=False)
class _ThreadBlock:
    """A thread block, whose steps are still being added."""

    send: int  # the GPUs that it sends to and receives from; -1 for none
    recv: int
    channel: int
    steps: list[_Step] = field(default_factory=list[_Step])
    known: dict[int, int] = field(default_factory=dict[int, int])  # id of a block: its last step that was waited for


@dataclass(slots=True)
class _Gpu:
    """A GPU and the state of its chunks, as far as steps have been added."""

    blocks: dict[int, _ThreadBlock]  # by channel
    buffer: list[str]  # where every chunk's value is: i or o
    wrote: dict[int, tuple[_ThreadBlock, int]]  # the last step that wrote a chunk
    read: dict[int, list[tuple[_ThreadBlock, int]]]  # the steps that have read it since


def msccl_text(
    program: Program,
    placement: Placement | None = None,
    *,
    group: int = 0,
    parts: int = 1,
    channels: int | None = None,
    proto: str = "Simple",
    name: str = "shardplan",
    min_bytes: int = 0,
    max_bytes: int = LARGEST,
) -> str:
    """Return the MSCCL XML of a reduction program, which must give the whole payload to every device.

    Up to `VERIFIED` GPUs it has been checked against the schema and interpreted on integers.

    Args:
        program: As `recipe` says.
        placement: Where it lies, which says its ranks.
        group: Which group of the reduction, where they are numbered differently; equal for most meshes.
        parts: Parts of equal size that each chunk is cut in; parts travel on different channels where there are some.
        channels: Channels a ring is spread over; None takes as few as the steps of a thread block allow.
        proto: Simple, LL or LL128.
        name: What the XML calls the algorithm.
        min_bytes: The least payload for which NCCL may choose it, in bytes.
        max_bytes: The largest.

    Raises:
        BackendError: A program that cannot be exported, or more steps, thread blocks or channels than an executor has.

    >>> from shardplan.core.mesh import Mesh
    >>> from shardplan.core.ops import AllReduce
    >>> from shardplan.core.step import Step
    >>> from shardplan.core.tensor import TensorType
    >>> t = TensorType("f32", (2, 5), (), Mesh(data=2), partial={"data": "sum"})
    >>> text = msccl_text(Program({"0": t}, [Step(AllReduce(("data",)), ("0",), ("1",))], ("1",)))
    >>> [line.split()[2] for line in text.splitlines() if "<step" in line]
    ['type="s"', 'type="rrcs"', 'type="r"', 'type="s"', 'type="rrcs"', 'type="r"']
    """
    r = recipe(program, placement)
    mesh = program.output_types[0].mesh
    if mesh.expand(r.program.output_types[0].layout.used_axes):
        raise BackendError(
            f"msccl: the program ends in {program.output_types[0]}; legal is the whole payload on every device, since "
            f"the export is an all-reduce"
        )
    for move in r.moves:
        if not set(move.axes) <= set(r.reduced):
            raise BackendError(
                f"msccl: a {move.kind} over {', '.join(move.axes)} leaves the group that is reduced, over "
                f"{', '.join(r.reduced)}"
            )
    if parts < 1 or (channels is not None and channels < 1):
        raise BackendError(f"msccl: parts={parts}, channels={channels}; legal are 1 and more")
    rows = mesh.group_places(r.reduced)
    if not 0 <= group < len(rows):
        raise BackendError(f"msccl: there is no group {group}; the reduction has {len(rows)}, 0 to {len(rows) - 1}")
    gpus = _expand(r, rows[group], parts, channels)
    families = len({move.axes for move in r.moves})
    spread = 1 + max(b.channel for g in gpus for b in g.blocks.values())
    blocks = max(len(g.blocks) for g in gpus)
    if spread > MOST_CHANNELS or blocks > MOST_BLOCKS or _longest(gpus) > MOST_STEPS:
        raise BackendError(
            f"msccl: {families} sets of groups need {spread} channels, {blocks} thread blocks of up to "
            f"{_longest(gpus)} steps; an executor has {MOST_CHANNELS}, {MOST_BLOCKS} and {MOST_STEPS}: fewer parts, or "
            f"a program with fewer steps, would do"
        )
    total = int(np.prod(r.chunks)) * parts
    ranks = sorted(r.ranks[p] for p in rows[group].tolist())
    lines = [
        f'<algo name="{name}" proto="{proto}" nchannels="{spread}" nchunksperloop="{total}" ngpus="{len(gpus)}" '
        f'coll="allreduce" inplace="1" outofplace="1" minBytes="{min_bytes}" maxBytes="{max_bytes}">',
        *_comment([*heading(program, placement), f"GPU k is rank {ranks} [k]"]),
    ]
    for k, gpu in enumerate(gpus):
        lines.append(f'  <gpu id="{k}" i_chunks="{total}" o_chunks="{total}" s_chunks="0">')
        lines += _gpu_lines(gpu)
        lines.append("  </gpu>")
    text = "\n".join([*lines, "</algo>"]) + "\n"
    if len(gpus) <= VERIFIED:
        verify(text)
    return text


def _comment(lines: list[str]) -> list[str]:
    return [
        "  <!-- A reduction exported by shardplan.",
        *(f"    {x}".rstrip().replace("--", "- -") for x in lines),
        "  -->",
    ]


def _expand(r: Recipe, members: np.ndarray, parts: int, channels: int | None) -> list[_Gpu]:
    """Expand over as many channels as are given, or over the fewest for which thread blocks are short enough."""
    lanes = channels or 1
    while True:
        gpus = _rings(r, members, parts, lanes)
        longest = _longest(gpus)
        if channels is not None or longest <= MOST_STEPS or lanes >= MOST_CHANNELS:
            return gpus
        lanes = min(MOST_CHANNELS, max(lanes + 1, -(-lanes * longest // MOST_STEPS)))


def _longest(gpus: list[_Gpu]) -> int:
    """The steps of the longest thread block, the `nop`s that wait among them."""
    return max((sum(max(1, len(s.waits)) for s in b.steps) for g in gpus for b in g.blocks.values()), default=0)


def _rings(r: Recipe, members: np.ndarray, parts: int, lanes: int) -> list[_Gpu]:
    """The GPUs of a group, given by the places of its members, with all their steps; a ring takes `lanes` channels."""
    program = r.program
    mesh = program.input_types[0].mesh
    order = sorted(members.tolist(), key=lambda place: r.ranks[place])
    gpu_of = {place: k for k, place in enumerate(order)}
    total = int(np.prod(r.chunks)) * parts
    gpus = [_Gpu({}, ["i"] * total, {}, {}) for _ in order]
    families: dict[tuple[str, ...], int] = {}
    for move in r.moves:
        (t,), (u,) = program.step_types(program.steps[move.step])
        first = families.setdefault(move.axes, len(families)) * lanes
        held = at_root(t if move.reduces else u)
        for row in mesh.group_places(move.axes).tolist():
            if row[0] not in gpu_of or not held[row[0]]:
                continue
            ring = [gpu_of[p] for p in row]
            turns = _ring_rows(move, t, u, row, r, parts)
            for number, actions in enumerate(turns):
                for part, member, kind, chunk in actions:  # in order of time around the ring
                    # Whole rings on a channel, where there are enough; else the parts of a ring on different ones.
                    lane = (number if len(turns) >= lanes else number * move.size + part) % lanes
                    _add(gpus, ring, member, kind, chunk, first + lane)
    for gpu in gpus:
        _finish(gpu)
    return gpus


def _cells(t: TensorType, place: int, r: Recipe, parts: int) -> list[int]:
    """Return the chunks that a device holds, ascending."""
    box = t.box(place)[:-1]
    grid = np.arange(int(np.prod(r.chunks))).reshape(r.chunks)
    cells = grid[tuple(slice(a, b) for a, b in box)].reshape(-1)
    return (cells[:, None] * parts + np.arange(parts)).reshape(-1).tolist()


def _ring_rows(
    move: RecipeStep, t: TensorType, u: TensorType, row: list[int], r: Recipe, parts: int
) -> list[list[_Action]]:
    """Return the actions of a collective, by rows: at most one chunk for each member's part, in order of time."""
    k = move.size
    own = _cells(t, row[0], r, parts)
    if move.turn:
        shares = [_cells(u if move.reduces else t, place, r, parts) for place in row]
    elif move.reduces and move.spreads:
        shares = [own[p * len(own) // k : (p + 1) * len(own) // k] for p in range(k)]
    else:  # a chain to the first member, or from it
        shares = [own]
    down = ["s"] + ["rrs"] * (k - 2) if move.reduces else []
    up = ["rcs"] * (k - 2) + ["r"] if move.spreads else []
    over = "rrcs" if down and up else "rrc" if down else "s"
    return [
        [
            _Action(p, (p + move.reduces + time) % k, kind, share[number])  # a sum starts behind the part's member
            for time, kind in enumerate([*down, over, *up])
            for p, share in enumerate(shares)
            if number < len(share)
        ]
        for number in range(max(map(len, shares)))
    ]


def _add(gpus: list[_Gpu], ring: list[int], member: int, kind: str, chunk: int, channel: int) -> None:
    """Append a step to the thread block of a ring's member, waiting for what other blocks did to the chunk."""
    gpu = gpus[ring[member]]
    send, recv = ring[(member + 1) % len(ring)], ring[member - 1]
    block = gpu.blocks.setdefault(channel, _ThreadBlock(send, recv, channel))
    _append(gpu, block, kind, chunk, reads=kind in ("s", "rrs", "rrc", "rrcs"), writes=kind not in ("s", "rrs"))


def _append(gpu: _Gpu, block: _ThreadBlock, kind: str, chunk: int, *, reads: bool, writes: bool) -> None:
    """Add a step to a block, with the steps of other blocks that it must wait for and does not know to be done."""
    before = [gpu.wrote[chunk]] if chunk in gpu.wrote else []
    if writes:  # the input and the output may be one: a write waits for reads of either
        before += gpu.read.get(chunk, [])
    latest: dict[int, tuple[_ThreadBlock, int]] = {}
    for other, number in before:
        if other is not block and number > max(block.known.get(id(other), -1), latest.get(id(other), (other, -1))[1]):
            latest[id(other)] = (other, number)
    for key, (other, number) in latest.items():
        block.known[key] = number
        other.steps[number].awaited = True
    source = (gpu.buffer[chunk], chunk) if reads else None
    if writes:
        gpu.buffer[chunk] = "o"
    block.steps.append(_Step(kind, source, ("o", chunk) if writes else None, list(latest.values())))
    mark = (block, len(block.steps) - 1)
    if reads:
        gpu.read.setdefault(chunk, []).append(mark)
    if writes:
        gpu.wrote[chunk], gpu.read[chunk] = mark, []


def _finish(gpu: _Gpu) -> None:
    """Copy what never left the input: the chunks of a group of one."""
    left = [chunk for chunk, buffer in enumerate(gpu.buffer) if buffer == "i"]
    if left:
        block = gpu.blocks.setdefault(max(gpu.blocks, default=-1) + 1, _ThreadBlock(-1, -1, 0))
        for chunk in left:
            _append(gpu, block, "cpy", chunk, reads=True, writes=True)


def _gpu_lines(gpu: _Gpu) -> list[str]:
    blocks = sorted(gpu.blocks.values(), key=lambda b: (b.channel, b.send))
    ids = {id(block): number for number, block in enumerate(blocks)}
    # The number of a step counts the nops before it.
    at = {id(b): np.cumsum([max(1, len(s.waits)) for s in b.steps]) - 1 for b in blocks}
    lines: list[str] = []
    for number, block in enumerate(blocks):
        lines.append(f'    <tb id="{number}" send="{block.send}" recv="{block.recv}" chan="{block.channel}">')
        s = 0
        for step in block.steps:
            waits = [(ids[id(other)], int(at[id(other)][index])) for other, index in step.waits] or [(-1, -1)]
            for wait in waits[:-1]:
                lines.append(_step_line(s, "nop", None, None, wait, False))
                s += 1
            lines.append(_step_line(s, step.kind, step.source, step.target, waits[-1], step.awaited))
            s += 1
        lines.append("    </tb>")
    return lines


def _step_line(
    s: int,
    kind: str,
    source: tuple[str, int] | None,
    target: tuple[str, int] | None,
    wait: tuple[int, int],
    awaited: bool,
) -> str:
    source, target = source or ("i", -1), target or ("o", -1)
    return (
        f'      <step s="{s}" type="{kind}" srcbuf="{source[0]}" srcoff="{source[1]}" dstbuf="{target[0]}" '
        f'dstoff="{target[1]}" cnt="{int(kind != "nop")}" depid="{wait[0]}" deps="{wait[1]}" hasdep="{int(awaited)}"/>'
    )

"""Interprets MSCCL XML on integers: what the GPUs of an executor would do, whatever wrote the XML.

A thread block runs its steps in order, `loops` times over, each time on another slice of every chunk. A step waits for
the step of another block that it depends on, takes a message from its receive connection (first in, first out) and puts
one into its send connection, which holds `slots` chunks. As in NCCL's primitives, a step that does both starts only
when the message is there and the connection has room. A count above 1 goes chunk by chunk, the strictest that an
executor may do. The executors' interpreter: Azure/msccl-executor-nccl, `msccl_kernel.cu`; two chunks is what the
shortest connection, Simple's, holds (8 slots, 4 a chunk).

Found are deadlocks, messages that nobody takes, messages of another size than is expected, reads of chunks that nothing
wrote, and races: two accesses to a chunk, one a write, by different thread blocks with no chain of dependencies and
messages between them. Clocks find a race in any order of running, so one order is enough.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from shardplan.errors import LayoutError, ScheduleError
from shardplan.interop.exports.msccl_schema import READS, RECEIVES, SENDS, WRITES, Algorithm, MscclInstruction, parse

SLOTS = 2  # chunks that a connection holds, at the least: see the module
NUMBERS = 2**40  # integers below it, either sign, are summed: thousands of them stay exact, and no two sums are alike
SHOWN = 4  # thread blocks that the error of a deadlock explains
Clock = np.ndarray  # int64 [thread blocks]: the ticks of each that are known to be over


class _Location(NamedTuple):
    """Where a value is."""

    gpu: int
    buffer: str
    chunk: int
    loop: int


class _Done(NamedTuple):
    """A step that a thread block has run."""

    gpu: int
    block: int
    loop: int
    step: int


@dataclass(slots=True)
class _Access:
    """The last write of a location, and the reads since, as (thread block, its tick)."""

    write: tuple[int, int] | None
    reads: dict[int, int]


class _MscclRun:
    """The state of all GPUs."""

    def __init__(self, algorithm: Algorithm, inputs: np.ndarray, in_place: bool, slots: int, loops: int) -> None:
        self.algorithm = algorithm
        self.in_place, self.slots, self.loops = in_place, slots, loops
        self.blocks = [(g, k) for g, gpu in enumerate(algorithm.gpus) for k in range(len(gpu.blocks))]  # GPU, id there
        self.number = {block: n for n, block in enumerate(self.blocks)}
        self.clocks = [np.zeros(len(self.blocks), np.int64) for _ in self.blocks]
        self.at = [(0, 0, 0) for _ in self.blocks]  # loop, step, chunk of the step
        self.done: dict[_Done, Clock] = {}
        # By sender, receiver and channel: value, the sender's clock, chunks of the message that are left.
        self.wires: dict[tuple[int, int, int], deque[tuple[np.ndarray, Clock, int]]] = {}
        self.values: dict[_Location, np.ndarray] = {}
        self.seen: dict[_Location, _Access] = {}
        for g in range(len(algorithm.gpus)):
            for chunk in range(algorithm.gpus[g].chunks["i"]):
                for loop in range(loops):
                    self.values[_Location(g, "i", chunk, loop)] = inputs[g, chunk, loop]

    def location(self, g: int, buffer: str, chunk: int, loop: int) -> _Location:
        """In place the output is the input."""
        return _Location(g, "i" if buffer == "o" and self.in_place else buffer, chunk, loop)

    def run(self) -> None:
        """Run until nothing moves."""
        moving = True
        while moving:
            moving = False
            for n in range(len(self.blocks)):
                while self.advance(n):
                    moving = True
        stuck = [n for n in range(len(self.blocks)) if self.at[n][0] < self.loops and self.steps(n)]
        if stuck:
            shown = "; ".join(self.why(n) for n in stuck[:SHOWN])
            raise ScheduleError(f"deadlock: {len(stuck)} of {len(self.blocks)} thread blocks cannot go on: {shown}")
        for (sender, receiver, channel), wire in self.wires.items():
            if wire:
                raise ScheduleError(
                    f"{len(wire)} chunks that gpu {sender} sent to gpu {receiver} on channel {channel} were never "
                    f"received"
                )

    def steps(self, n: int) -> tuple[MscclInstruction, ...]:
        g, k = self.blocks[n]
        return self.algorithm.gpus[g].blocks[k].steps

    def why(self, n: int) -> str:
        """Say what a block that cannot go on waits for."""
        (g, k), (_, s, _) = self.blocks[n], self.at[n]
        step, block = self.steps(n)[s], self.algorithm.gpus[g].blocks[k]
        if step.wait is not None and _Done(g, step.wait[0], self.at[n][0], step.wait[1]) not in self.done:
            reason = f"waits for step {step.wait[1]} of tb {step.wait[0]}"
        elif step.kind in RECEIVES and not self.wires.get((block.recv, g, block.channel)):
            reason = f"waits for a message of gpu {block.recv}"
        else:
            reason = f"waits for room towards gpu {block.send}"
        return f"gpu {g}, tb {k}, step {s} ({step.kind}) {reason}"

    def advance(self, n: int) -> bool:
        """Run the next chunk of the next step of a block, if it can."""
        (g, k), (loop, s, c) = self.blocks[n], self.at[n]
        steps = self.steps(n)
        if loop == self.loops or not steps:
            return False
        step, block = steps[s], self.algorithm.gpus[g].blocks[k]
        if step.wait is not None and c == 0:
            other = self.done.get(_Done(g, step.wait[0], loop, step.wait[1]))
            if other is None:
                return False
        into = self.wires.setdefault((block.recv, g, block.channel), deque())
        out = self.wires.setdefault((g, block.send, block.channel), deque())
        if (step.kind in RECEIVES and not into) or (step.kind in SENDS and len(out) >= self.slots):
            return False
        clock = self.clocks[n]
        if step.wait is not None and c == 0:
            np.maximum(clock, self.done[_Done(g, step.wait[0], loop, step.wait[1])], out=clock)
        clock[n] += 1
        if step.kind != "nop":
            self.act(n, g, step, loop, c, into, out)
        if c + 1 < step.count:
            self.at[n] = (loop, s, c + 1)
            return True
        self.done[_Done(g, k, loop, s)] = clock.copy()
        self.at[n] = (loop, s + 1, 0) if s + 1 < len(steps) else (loop + 1, 0, 0)
        return True

    def act(
        self,
        n: int,
        g: int,
        step: MscclInstruction,
        loop: int,
        c: int,
        into: deque[tuple[np.ndarray, Clock, int]],
        out: deque[tuple[np.ndarray, Clock, int]],
    ) -> None:
        """Do one chunk of a step: take from `into`, read, add, write, and put into `out`, as its kind says."""
        clock = self.clocks[n]
        source = self.location(g, step.source[0], step.source[1] + c, loop)
        target = self.location(g, step.target[0], step.target[1] + c, loop)
        value = None
        if step.kind in RECEIVES:
            value, theirs, left = into.popleft()
            if left != step.count - c:
                raise ScheduleError(
                    f"gpu {g}, tb {self.blocks[n][1]}: {step.kind} of {step.count} chunks receives a message of "
                    f"another number: {left} of its chunks are left where {step.count - c} are expected"
                )
            np.maximum(clock, theirs, out=clock)
        if step.kind in READS:
            mine = self.read(n, source)
            value = mine if value is None else value + mine
        if step.kind == "re":
            value = self.read(n, target) + value
        assert value is not None  # every type but nop receives or reads
        if step.kind in WRITES:
            self.write(n, target, value)
        if step.kind in SENDS:
            out.append((value, clock.copy(), step.count - c))

    def check_order(self, n: int, location: _Location, what: str, other: tuple[int, int]) -> None:
        """Refuse an access of block n that its clock does not put after an earlier one: (block, its tick)."""
        who, tick = other
        if self.clocks[n][who] < tick:
            first, second = self.blocks[who][1], self.blocks[n][1]
            raise ScheduleError(
                f"race on gpu {location.gpu}, chunk {location.chunk} of buffer {location.buffer}: tb {second} {what} "
                f"it, and nothing puts that after an access of tb {first}"
            )

    def read(self, n: int, location: _Location) -> np.ndarray:
        if location not in self.values:
            raise ScheduleError(
                f"gpu {location.gpu}, tb {self.blocks[n][1]} reads chunk {location.chunk} of {location.buffer}, "
                "which nothing wrote"
            )
        access = self.seen.setdefault(location, _Access(None, {}))
        if access.write is not None:
            self.check_order(n, location, "reads", access.write)
        access.reads[n] = int(self.clocks[n][n])
        return self.values[location]

    def write(self, n: int, location: _Location, value: np.ndarray) -> None:
        access = self.seen.setdefault(location, _Access(None, {}))
        for other in (*access.reads.items(), *([access.write] if access.write else [])):
            self.check_order(n, location, "writes", other)
        self.seen[location] = _Access((n, int(self.clocks[n][n])), {})
        self.values[location] = value


def run(
    algorithm: Algorithm | str, inputs: np.ndarray, *, in_place: bool = False, slots: int = SLOTS, loops: int = 2
) -> np.ndarray:
    """Run an algorithm on integers.

    Args:
        algorithm: The XML, or what `parse` made of it.
        inputs: Integers [GPUs, n], where `nchunksperloop` divides n; every GPU's input of all its chunks.
        in_place: Whether the output is the input.
        slots: Chunks that a connection holds.
        loops: Slices that every chunk is cut in and goes through the whole algorithm by itself; they divide a chunk's
            elements.

    Returns:
        The outputs, [GPUs, elements of an output].

    Raises:
        ParseError: The XML breaks a rule.
        LayoutError: Inputs of another shape.
        ScheduleError: A deadlock, an unmatched message, a race, a read of what nothing wrote, an output left unwritten.

    Source: the executors' interpreter, see the module.
    """
    found = parse(algorithm) if isinstance(algorithm, str) else algorithm
    width = inputs.shape[1] // found.chunks
    if inputs.shape != (len(found.gpus), width * found.chunks) or width % loops:
        raise LayoutError(
            f"inputs of shape {inputs.shape} for {len(found.gpus)} GPUs and {found.chunks} chunks in {loops} loops; "
            f"legal are [GPUs, a multiple of chunks x loops]"
        )
    state = _MscclRun(found, inputs.reshape(len(found.gpus), found.chunks, loops, -1), in_place, slots, loops)
    state.run()
    out = np.empty((len(found.gpus), found.chunks, loops, width // loops), inputs.dtype)
    for g in range(len(found.gpus)):
        for chunk in range(found.chunks):
            for loop in range(loops):
                location = state.location(g, "o", chunk, loop)
                if location not in state.values:
                    raise ScheduleError(f"gpu {g}: chunk {chunk} of the output is never written")
                out[g, chunk, loop] = state.values[location]
    return out.reshape(len(found.gpus), -1)


def verify(text: str, seed: int = 0, slots: int = SLOTS) -> Algorithm:
    """Check that MSCCL XML is an all-reduce: its rules, and its sums on random integers, in and out of place.

    Returns the algorithm. `seed` is that of the integers, and a connection holds `slots` chunks.

    Raises:
        ParseError: The XML breaks a rule, or is another collective.
        ScheduleError: It cannot run, or an output is not the sum of the inputs.
    """
    found = parse(text)
    if found.collective != "allreduce":
        raise ScheduleError(f"coll is {found.collective}; only allreduce is verified")
    inputs = np.random.default_rng(seed).integers(-NUMBERS, NUMBERS, (len(found.gpus), found.chunks * 2))
    for in_place, wanted in ((False, found.out_of_place), (True, found.in_place)):
        if not wanted:
            continue
        wrong = run(found, inputs, in_place=in_place, slots=slots) != inputs.sum(axis=0)
        if wrong.any():
            g, at = np.argwhere(wrong)[0].tolist()
            raise ScheduleError(
                f"gpu {g}: chunk {at // 2} of the output is not the sum of the inputs "
                f"({'in' if in_place else 'out of'} place)"
            )
    return found

"""The script of a program: which messages an engine makes of it, from types alone.

An engine sends what the lowering of an op says by one algorithm, where the op has it; or what gloo sends, where a step
is one of its own collectives. Of all operands what goes from one device to another in a round is one message, or one
for each element width, narrow ones first. The engines that do this on real processes, the torch backend's interpreter
of the same lowering and gloo itself, are written apart, and are compared with the script.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Literal

import numpy as np

from shardplan.core.dtypes import numpy_dtype
from shardplan.core.library_call import LibraryCall, library_call
from shardplan.core.lowering import Ints, Region, Round
from shardplan.core.messages import at_root
from shardplan.core.op import Op
from shardplan.core.program import Program
from shardplan.core.tensor import TensorType
from shardplan.core.walk import turns
from shardplan.hardware.prices.gloo_messages import GLOO_MESSAGES
from shardplan.simulation.predict import step_names
from shardplan.simulation.script import Script, ScriptError, ScriptRound, Stage, abreast

Engine = Literal["ring", "tree", "direct", "gloo"]
ENGINES: dict[Engine, str] = {
    "ring": "rings and chains of messages in member order",
    "tree": "trees of messages, where an op has one, and else rings",
    "direct": "everybody's messages to everybody at once",
    "gloo": "gloo's own collectives",
}


def algorithm_of(engine: Engine) -> str:
    """Return the algorithm by which an engine lowers what no collective of a library does; empty for the usual one."""
    return "" if engine == "gloo" else engine


def script_of(program: Program, title: str = "", engine: Engine = "ring") -> Script:
    """Return what an engine sends when it runs a program; raises `ScriptError` where puts and takes differ."""
    stages: list[Stage] = []
    for number, visit in turns(program):
        if not visit.relabels:
            stages += stages_of(visit.step.op, visit.operands, number, engine)
    return Script(tuple(stages), step_names(program), tuple(s.op.name for s in program.steps), title)


def stages_of(op: Op, operands: Sequence[TensorType], number: int, engine: Engine = "ring") -> Iterator[Stage]:
    """Yield the stages of a step, in the order in which every device goes through them: the rounds to one that closes.

    `number` is that of the step.
    """
    results = op.infer(*operands)
    devices = np.unique(np.concatenate([t.mesh.ids for t in (*operands, *results)]))
    if engine == "gloo" and (call := library_call(op, operands)) is not None:
        groups = _called(op, operands[0])
        yield from abreast(number, [_gloo_stages(call, op, operands, results, own, number) for own in groups])
        return
    lowering = op.lowering(operands, devices, algorithm_of(engine))
    if lowering is None:
        return
    widths = {name: numpy_dtype(buffer.dtype).itemsize for name, buffer in lowering.buffers.items()}
    for letter, side in (("x", operands), ("y", results)):
        widths |= {f"{letter}{k}": t.itemsize for k, t in enumerate(side)}
    stage: list[ScriptRound] = []
    for one in lowering.rounds():
        found = _messages(one, devices, widths)
        if found.nbytes.size:
            stage.append(found)
        if one.closes and stage:
            yield Stage(number, tuple(stage))
            stage = []
    if stage:
        yield Stage(number, tuple(stage))


def _called(op: Op, t: TensorType) -> list[list[int]]:
    """The groups, by place, in which the library is called: those that hold the value."""
    return [own for own in t.mesh.group_places(op.members(t)).tolist() if at_root(t)[own].any()]


def _gloo_stages(
    call: LibraryCall,
    op: Op,
    operands: Sequence[TensorType],
    results: Sequence[TensorType],
    places: Sequence[int],
    number: int,
) -> Iterator[Stage]:
    """Yield what gloo does for a group, call after call."""
    ids = operands[0].mesh.ids[places]
    for nbytes, width in call.sizes(op.chunks, operands, results, places):
        for part in GLOO_MESSAGES[call.kind](len(ids), nbytes, width):
            rounds = [ScriptRound(ids[one[:, 0]], ids[one[:, 1]], one[:, 2]) for one in part.rounds if len(one)]
            yield Stage(number, tuple(rounds), part.in_flight)


def _messages(one: Round, devices: Ints, widths: Mapping[str, int]) -> ScriptRound:
    """The messages of a round: what is put, which is what is taken."""
    puts = _sizes([(devices, put.peer, put.source) for put in one.puts], widths)
    takes = _sizes([(take.peer, devices, take.target) for take in one.takes], widths)
    if not np.array_equal(puts, takes):
        pairs = {(s, r) for (_, s, r, _) in {*map(tuple, puts.T.tolist())} ^ {*map(tuple, takes.T.tolist())}}
        sender, receiver = min(pairs)
        sent, wanted = ([n for _, s, r, n in x.T.tolist() if (s, r) == (sender, receiver)] for x in (puts, takes))
        raise ScriptError(f"device {sender} sends {sent} bytes to device {receiver}, which waits for {wanted}")
    return ScriptRound(*puts[1:])


def _sizes(moves: Sequence[tuple[Ints, Ints, Region]], widths: Mapping[str, int]) -> Ints:
    """Element width, sender, receiver and bytes of what is moved, one for each pair and width, in order: [4, n]."""
    found = [np.zeros((4, 0), dtype=np.int64)]
    for sender, receiver, region in moves:
        elements, width = region.elements(), widths[region.buffer]
        rows = np.flatnonzero(elements)
        found.append(np.stack([np.full(len(rows), width), sender[rows], receiver[rows], elements[rows] * width]))
    table = np.concatenate(found, axis=1)
    table = table[:, np.lexsort((table[2], table[1], table[0]))]
    fresh = np.ones(table.shape[1], dtype=bool)
    fresh[1:] = (table[:3, 1:] != table[:3, :-1]).any(axis=0)
    first = np.flatnonzero(fresh)
    if not first.size:
        return table
    return np.concatenate([table[:3, first], np.add.reduceat(table[3:], first, axis=1)])

"""The ring engine's script: which messages a program is made of, by the lowering of its ops, from types alone.

Where an op has a ring the engine takes it. Of all operands what goes from one device to another in a round is one
message, or one for each element width, narrow ones first. The engine that does this on real processes, the torch
backend's interpreter of the same lowering, is written apart, and the two are compared message by message.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from shardplan.core.dtypes import numpy_dtype
from shardplan.core.lowering import Ints, Region, Round
from shardplan.core.ops.collective import Collective, moving
from shardplan.core.program import Program
from shardplan.core.tensor import TensorType
from shardplan.core.walk import turns
from shardplan.simulation.predict import step_names
from shardplan.simulation.script import Script, ScriptError, ScriptRound, Stage


def script_of(program: Program, title: str = "") -> Script:
    """Return what the ring engine sends when it runs a program; raises `ScriptError` where puts and takes differ."""
    stages: list[Stage] = []
    for number, visit in turns(program):
        op = moving(visit.step.op)
        if op is not None and not visit.relabels:
            stages += stages_of(op, visit.operands, number)
    return Script(tuple(stages), step_names(program), tuple(s.op.name for s in program.steps), title)


def stages_of(op: Collective, operands: Sequence[TensorType], number: int) -> Iterator[Stage]:
    """Yield the stages of a step, in the order in which every device goes through them: the rounds to one that closes.

    `number` is that of the step.
    """
    devices = np.unique(np.concatenate([t.mesh.ids for t in (*operands, *op.infer(*operands))]))
    lowering = op.lowering(operands, devices, "ring")
    widths = {name: numpy_dtype(buffer.dtype).itemsize for name, buffer in lowering.buffers.items()}
    widths |= {f"{letter}{k}": t.itemsize for letter in "xy" for k, t in enumerate(operands)}
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

"""The ring engine's script: which messages a program is made of, by the lowering of its ops, from types alone.

Where an op has a ring the engine takes it. Of all operands what goes from one device to another in a round is one
message, or one for each element width, narrow ones first. The engine that does this on real processes, the torch
backend's interpreter of the same lowering, is written apart, and the two are compared message by message.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from shardplan.core.dtypes import numpy_dtype
from shardplan.core.lowering import Ints, Region
from shardplan.core.ops.collective import Collective, moving
from shardplan.core.program import Program
from shardplan.core.tensor import TensorType
from shardplan.core.walk import turns
from shardplan.simulation.predict import step_names
from shardplan.simulation.script import Message, Script, ScriptRound, Stage


def script_of(program: Program, title: str = "") -> Script:
    """Return what the ring engine sends when it runs a program."""
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
    stage: dict[int, list[ScriptRound]] = defaultdict(list)
    for one in lowering.rounds():
        sends = _messages(devices, [(put.peer, put.source) for put in one.puts], widths)
        receives = _messages(devices, [(take.peer, take.target) for take in one.takes], widths)
        for d in sorted({*sends, *receives}):
            stage[d].append(ScriptRound(tuple(sends.get(d, ())), tuple(receives.get(d, ()))))
        if one.closes and stage:
            yield Stage(number, {d: tuple(rounds) for d, rounds in stage.items()})
            stage = defaultdict(list)
    if stage:
        yield Stage(number, {d: tuple(rounds) for d, rounds in stage.items()})


def _messages(
    devices: Ints, moves: Sequence[tuple[Ints, Region]], widths: Mapping[str, int]
) -> dict[int, list[Message]]:
    """By device, the messages of a round to or from its peers."""
    sizes: Counter[tuple[int, int, int]] = Counter()  # bytes by width, device and peer
    for peers, region in moves:
        elements, width = region.elements(), widths[region.buffer]
        rows = np.flatnonzero(elements)
        sizes.update(
            {
                (width, d, peer): n * width
                for d, peer, n in zip(
                    devices[rows].tolist(), peers[rows].tolist(), elements[rows].tolist(), strict=True
                )
            }
        )
    found: dict[int, list[Message]] = defaultdict(list)
    for (_, d, peer), nbytes in sorted(sizes.items(), key=lambda item: item[0][0]):
        found[d].append((peer, nbytes))
    return found

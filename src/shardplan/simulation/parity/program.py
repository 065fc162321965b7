"""`DistirProgram`: a graph cut over data, tensor and pipeline degrees, as timed actions of each block.

What an action adds to live memory and takes from it hangs on which ops use a value on the same place, which is the same
for every microbatch; results that are joined over microbatches grow with the microbatch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from shardplan.simulation.parity.graph import DistirGraph, DistirOp
from shardplan.simulation.parity.machine import DistirMachine


@dataclass(frozen=True, slots=True)
class TimedAction:
    """What every device of a tensor group does at one place: an op, or joint, one op of them all.

    Bytes are DistIR's: `added` is live before `freed` is gone. Both grow by their second number with each microbatch.
    """

    kind: str
    seconds: float
    added: tuple[int, int]
    freed: tuple[int, int]
    joint: bool = False


@dataclass(frozen=True, slots=True)
class DistirSend:
    """A value that goes from one place to another: seconds on both ends, bytes here freed and there added."""

    source: int
    target: int
    seconds: float
    added: int
    freed: int


@dataclass(frozen=True, slots=True)
class DistirProgram:
    """A graph on `data * tensor * pipeline` devices: device `1 + (i * tensor + j) * pipeline + k` is at (i, j, k).

    `actions` and `sends` are by block; `first` are the actions for microbatch 0. `initial` is the live memory by place
    before anything ran; `reductions` are the all-reduces of gradients over replicas, and `updates` SGD, by place.
    """

    data: int
    tensor: int
    pipeline: int
    steps: tuple[tuple[tuple[int, int, int], ...], ...]
    first: tuple[tuple[TimedAction, ...], ...]
    actions: tuple[tuple[TimedAction, ...], ...]
    sends: tuple[tuple[DistirSend, ...], ...]
    initial: tuple[int, ...]
    reductions: tuple[tuple[int, TimedAction], ...]
    updates: tuple[TimedAction, ...]


@dataclass(slots=True)
class _Account:
    """Who uses which value where, and how often yet."""

    graph: DistirGraph
    microbatches: int
    uses: Counter[tuple[int, int]]  # by value and place
    inputs: frozenset[int]

    def used(self, value: int, place: int) -> int:
        """Count a use; the bytes that the last one frees. Inputs of the function stay."""
        if value in self.inputs:
            return 0
        self.uses[value, place] -= 1
        return 0 if self.uses[value, place] else self.graph.values[value].counted

    def freed(self, op: DistirOp, place: int) -> int:
        """The bytes that an op frees."""
        return sum(self.used(v, place) for v in op.operands)


def distir_program(
    graph: DistirGraph, machine: DistirMachine, data: int, tensor: int, pipeline: int, microbatches: int
) -> DistirProgram:
    """Return a graph cut over devices, with the schedule of its blocks.

    Args:
        graph: A model on one device of a tensor group, for a microbatch.
        machine: What prices messages and reductions.
        data: Replicas.
        tensor: Devices of a tensor group.
        pipeline: Places.
        microbatches: Of a replica.

    Source: microsoft/dist-ir 7cfa1b0, `transforms`.
    """
    block_of = {n: b for b, block in enumerate(graph.blocks) for n in range(block.start, block.stop)}
    producer = {v: n for n, op in enumerate(graph.ops) for v in op.results}
    places = [block.place for block in graph.blocks]
    inputs = frozenset(range(len(graph.values))) - producer.keys()
    uses: Counter[tuple[int, int]] = Counter()
    waits: list[set[int]] = [set() for _ in graph.blocks]
    users: dict[int, set[int]] = {}  # blocks that use a value
    for n, op in enumerate(graph.ops):
        for v in op.operands:
            uses[v, places[block_of[n]]] += 1
            users.setdefault(v, set()).add(block_of[n])
            if v not in inputs and block_of[producer[v]] != block_of[n]:
                waits[block_of[n]].add(block_of[producer[v]])
    targets = {
        v: sorted({places[b] for b in blocks} - {places[block_of[producer[v]]]})
        for v, blocks in users.items() if v not in inputs
    }  # fmt: skip
    for v, away in targets.items():
        uses[v, places[block_of[producer[v]]]] += len(away)
    joined = {v: (kind, seconds) for v, kind, seconds in graph.merged} if microbatches > 1 else {}
    for v in joined:
        uses[v, places[block_of[producer[v]]]] += 1
    account = _Account(graph, microbatches, uses, inputs)
    first, later, sends = (
        list[tuple[TimedAction, ...]](),
        list[tuple[TimedAction, ...]](),
        list[tuple[DistirSend, ...]](),
    )
    for block in graph.blocks:
        one, other = list[TimedAction](), list[TimedAction]()
        for op in graph.ops[block.start : block.stop]:
            made = [graph.values[v] for v in op.results]
            both = [
                TimedAction(op.kind, op.seconds, (sum(x.counted for x in made), 0), (account.freed(op, block.place), 0))
            ]
            if op.summed:
                seconds = machine.reduced(made[0].nbytes, tensor)
                both.append(
                    TimedAction("MPIAllreduce", seconds, (made[0].counted, 0), (made[0].counted, 0), joint=True)
                )
            one += both
            other += both
            for v in op.results:
                if v in joined:
                    kind, seconds = joined[v]
                    size, freed = graph.values[v].counted, account.used(v, block.place)
                    grows = size if kind == "Concat" else 0
                    one.append(TimedAction("Identity", 0.0, (size, 0), (freed, 0)))
                    other.append(TimedAction(kind, seconds, (size, grows), (freed + size - grows, grows)))
        first.append(tuple(one))
        later.append(tuple(other))
        gone = list[DistirSend]()
        for op in graph.ops[block.start : block.stop]:
            for v in op.results:
                value = graph.values[v]
                for target in targets.get(v, ()):
                    seconds = 0.0 if value.known else machine.message(value.nbytes)
                    gone.append(DistirSend(block.place, target, seconds, value.counted, account.used(v, block.place)))
        sends.append(tuple(gone))
    initial = [0] * pipeline
    for v in sorted(inputs):
        for place in sorted({places[b] for b in users[v]}):
            initial[place] += graph.values[v].nbytes * (microbatches if v in graph.dealt else 1)
    steps = alternating(places, [b.backward for b in graph.blocks], [sorted(w) for w in waits], microbatches)
    at = {g: places[block_of[producer[g]]] for g in graph.gradients}
    reductions = tuple(
        (at[v], _reduction(machine, graph.values[v].nbytes, data)) for v, _, _ in graph.merged if data > 1 and v in at
    )
    trained = range(pipeline if graph.gradients else 0)
    updates = tuple(_update(graph, machine, [g for g in graph.gradients if at[g] == k]) for k in trained)
    return DistirProgram(
        data, tensor, pipeline, steps, tuple(first), tuple(later), tuple(sends), tuple(initial), reductions,
        updates,
    )  # fmt: skip


def _reduction(machine: DistirMachine, nbytes: int, data: int) -> TimedAction:
    """The all-reduce of a gradient."""
    return TimedAction("MPIAllreduce", machine.reduced(nbytes, data), (nbytes, 0), (nbytes, 0), joint=True)


def _update(graph: DistirGraph, machine: DistirMachine, gradients: list[int]) -> TimedAction:
    """SGD on one place; its results take no memory."""
    values = [graph.values[g] for g in gradients]
    counts = [v.nbytes // v.itemsize for v in values]
    return TimedAction(
        "SGDOptimizer", machine.updated(counts, values[0].itemsize), (0, 0), (sum(v.nbytes for v in values), 0)
    )


# The pipeline schedule of DistIR, which it calls 1F1B: forward and backward blocks in turn, wherever both are ready.
#
# Time goes in steps, in which each place of the pipeline runs at most one block; a block is ready from the step after
# the
# last that it waits for. A place whose last block was a forward one takes a backward one if any is ready, and the other
# way round; of those it takes the least microbatch. Where nothing of the kind is ready it runs the other kind, so that
# a
# first place runs forward blocks while it waits: in flight are more microbatches than 1F1B has (mistake 8).
#
# Source: microsoft/dist-ir 7cfa1b0, `transforms/pipedream_scheduler.py`.


def alternating(
    places: Sequence[int], backward: Sequence[bool], waits: Sequence[Sequence[int]], microbatches: int
) -> tuple[tuple[tuple[int, int, int], ...], ...]:
    """Return the steps: for each, the places that run something, ascending, as (place, block, microbatch).

    Args:
        places: The place of each block.
        backward: Whether it is one of the backward pass.
        waits: The blocks that it waits for, of the same microbatch.
        microbatches: How many there are.

    Source: microsoft/dist-ir 7cfa1b0, `transforms/pipedream_scheduler.py`.

    >>> alternating((0, 1, 1, 0), (False, False, True, True), ((), (0,), (1,), (2, 0)), 1)
    (((0, 0, 0),), ((1, 1, 0),), ((1, 2, 0),), ((0, 3, 0),))
    """
    missing = {(b, m): len(set(waits[b])) for b in range(len(places)) for m in range(microbatches)}
    followers: list[list[int]] = [[] for _ in places]
    for block, before in enumerate(waits):
        for one in set(before):
            followers[one].append(block)
    ready: list[list[tuple[int, int]]] = [[] for _ in range(max(places) + 1)]
    for (block, microbatch), count in missing.items():
        if not count:
            ready[places[block]].append((block, microbatch))
    last = [True] * len(ready)  # whether a place's last block was a backward one
    steps: list[tuple[tuple[int, int, int], ...]] = []
    left = len(missing)
    while left:
        step: list[tuple[int, int, int]] = []
        for place, waiting in enumerate(ready):
            if not waiting:
                continue
            kinds = [x for x in waiting if backward[x[0]] is not last[place]] or waiting
            # `min` keeps the order in which blocks became ready.
            block, microbatch = min(kinds, key=lambda x: x[1])
            last[place] = backward[block]
            waiting.remove((block, microbatch))
            step.append((place, block, microbatch))
        for _, block, microbatch in step:
            for after in followers[block]:
                missing[after, microbatch] -= 1
                if not missing[after, microbatch]:
                    ready[places[after]].append((after, microbatch))
        left -= len(step)
        steps.append(tuple(step))
    return tuple(steps)

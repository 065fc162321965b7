"""Bytes of a program: live, staged and received, per device; derived from the types alone.

A value is live from its definition (inputs: from the start) to its last use, outputs to the end, and its storage as
long as a value in it: see `storages`. During a step the storage of its operands, of its results, of every other live
value and its staging exist at once: that is the workspace. An input that is an output too is *kept*: its storage
belongs to the caller, and counts to the end. A body's invariants and slices are storage of the operands of the op that
it is in, which live as long as that step.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import NamedTuple

import numpy as np

from shardplan.core.mesh import Mesh
from shardplan.core.messages import at_root, overlap_elements
from shardplan.core.nested import Nested
from shardplan.core.op import Op
from shardplan.core.program import Program
from shardplan.core.tensor import TensorType, live_reduction
from shardplan.core.walk import program_leaves, walk

Bytes = np.ndarray | int  # per device of `Program.devices`, or the same on all
# A step in more chunks than these pays its latency so often that a plan says so; `Infeasible.least_bytes` is what works
# with at most so many.
MANY_CHUNKS = 64


@dataclass(frozen=True, slots=True)
class Account:
    """The bytes of a program on its devices (ascending ids)."""

    devices: tuple[int, ...]
    input_bytes: int  # largest sum of inputs
    peak_bytes: int  # largest sum of live values between steps
    workspace_bytes: int  # largest sum of live values, results and staging during a step
    step_workspaces: tuple[int, ...]
    received: np.ndarray  # int64 [devices]
    sent: np.ndarray  # int64 [devices]
    step_received: tuple[int, ...]  # bytes at the worst device, per step; of a body's steps in turn the sum
    step_moved: tuple[int, ...]  # the same of the larger of what a device sends and receives
    rounds: tuple[int, ...]
    latencies: tuple[int, ...]  # rounds, each as often as there are chunks


class _Ledger:
    """Bytes of types per device, by ascending id over all meshes; plain integers while all devices agree."""

    def __init__(self, devices: tuple[int, ...]) -> None:
        self.devices = devices

    @cached_property
    def ids(self) -> np.ndarray:
        return np.asarray(self.devices, dtype=np.int64)

    def spread(self, ids: np.ndarray, values: np.ndarray) -> np.ndarray:
        if np.array_equal(ids, self.ids):
            return values
        out = np.zeros(len(self.devices), dtype=values.dtype)
        out[np.searchsorted(self.ids, ids)] = values
        return out

    def level(self, ids: np.ndarray, values: np.ndarray) -> Bytes:
        most = int(values.max(initial=0))
        return most if len(ids) == len(self.devices) and bool((values == most).all()) else self.spread(ids, values)

    def size(self, t: TensorType) -> Bytes:
        if t.all_even and t.mesh.size == len(self.devices):
            return t.local_bytes()
        return self.spread(t.mesh.ids, t.elements() * t.itemsize)

    def sizes(self, program: Program) -> dict[str, Bytes]:
        return {name: self.size(t) for name, t in program.types.items()}


def _worst(value: Bytes) -> int:
    return value if isinstance(value, int) else int(value.max())


class Storages(NamedTuple):
    """In whose storage every value is, the one's that brought it; and which storages end with each step."""

    of: dict[str, str]
    ended: list[list[str]]


def storages(
    program: Program, sizes: Mapping[str, Bytes], fixed: Collection[str] = (), relabel: bool = True
) -> Storages:
    """Say which values of a program share storage.

    A result takes the storage of an operand that it may share (`Op.aliases`) where this step is the last to use any
    value in it, and uses it once; the storage of the inputs `fixed` it never takes. The result of a view is in its
    operand's storage, whoever else is. Either has the bytes of its operand on every device. A step that relabels
    leaves its operands where they are, unless `relabel` says that it moves them.
    """
    of = {name: name for name, _ in program.inputs}
    living = dict.fromkeys(of, 1)  # by storage how many values in it are live
    ended: list[list[str]] = []
    for visit in walk(program):
        step, freed = visit.step, visit.freed
        moved = visit.relabels and relabel
        for result, operand in ((k, k) for k in range(len(step.results))) if moved else step.op.aliases:
            made, o = step.results[result], step.operands[operand]
            last = o in freed and step.operands.count(o) == 1 and living[of[o]] == 1 and of[o] not in fixed
            if made not in of and (moved or step.op.view or last) and bool(np.all(sizes[made] == sizes[o])):
                of[made] = of[o]
                living[of[o]] += 1
        for made in step.results:
            if made not in of:
                of[made], living[made] = made, 1
        for name in freed:
            living[of[name]] -= 1
        ended.append([s for s in dict.fromkeys(of[name] for name in freed) if not living[s]])
    return Storages(of, ended)


def shared_values(program: Program) -> dict[str, str]:
    """Return in whose storage every value of a program is, where its inputs are others' and never written."""
    return storages(program, _Ledger(program.devices).sizes(program), dict(program.inputs)).of


@dataclass(frozen=True, slots=True)
class StepHoldings:
    """What exists during a step, without its staging, and after it; per device, or the same on all."""

    during: Bytes
    after: Bytes


def live_bytes(
    program: Program, devices: tuple[int, ...], outside: Sequence[str] = ()
) -> tuple[Bytes, list[StepHoldings]]:
    """Return the live bytes at the start of a program, and of every step, on `devices` (ascending ids).

    The inputs named in `outside` are not counted.
    """
    sizes = _Ledger(devices).sizes(program)
    of, ended = storages(program, sizes, outside)
    sizes |= dict.fromkeys(outside, 0)
    used = {o for step in program.steps for o in step.operands} | set(program.outputs)
    start: Bytes = sum((sizes[name] for name, _ in program.inputs), 0)
    live: Bytes = start
    for name, _ in program.inputs:
        if name not in used:
            live = live - sizes[name]
    found: list[StepHoldings] = []
    behind: dict[str, int] = {}  # by storage, the padding that lies behind it: no part of any shard
    for step, ends in zip(program.steps, ended, strict=True):
        for name in step.results:
            if of[name] == name:
                live = live + sizes[name]
        if more := step.op.overhang_bytes(*program.step_types(step)[0]):
            behind[of[step.results[0]]] = more
        during = live + sum(behind.values())
        for name in ends:
            live = live - sizes[name]
            behind.pop(name, None)
        found.append(StepHoldings(during, live))
    return start, found


class Padding(NamedTuple):
    """What parts of one size cost where arrays have others: bytes on the worst device."""

    received: int  # among those received
    staged: int  # of the largest step's slots
    behind: int  # of results that are in slots, beside them as long as they live


def padding_of(program: Program) -> Padding:
    """Return what the padding of a program costs."""
    ledger = _Ledger(program.devices)
    received, staged, behind = np.zeros(len(program.devices), dtype=np.int64), 0, 0
    for leaf in program_leaves(program):
        found = leaf.op.padding_bytes(*leaf.operands)
        if found.any() or leaf.op.overhang_bytes(*leaf.operands):
            ids = leaf.op.devices(*leaf.op.infer(*leaf.operands))
            received = received + leaf.times * ledger.spread(ids, found)
            staged = max(staged, leaf.op.staging(*leaf.operands))
            behind = max(behind, leaf.op.overhang_bytes(*leaf.operands))
    return Padding(int(received.max(initial=0)), staged, behind)


class _Entry(NamedTuple):
    """What one step adds to the books, by itself."""

    staging: int
    received: Bytes
    sent: Bytes
    most_received: int
    most_moved: int
    rounds: int
    latencies: int


def _entry(op: Op, operands: tuple[TensorType, ...], results: tuple[TensorType, ...], ledger: _Ledger) -> _Entry:
    got, given = (
        ledger.level(op.devices(*results), op.received_bytes(*operands)),
        ledger.level(*op.sent_bytes(*operands)),
    )
    received = _worst(got)
    moved = max(received, _worst(given))
    rounds = op.rounds(*operands)
    latencies = rounds * op.chunks
    if isinstance(op, Nested):
        inner = books_of(op.body)
        latencies = max(inner.latencies) if op.at_once else op.times * sum(inner.latencies)
        if not op.at_once:
            received, moved = (op.times * sum(each) for each in (inner.step_received, inner.step_moved))
    return _Entry(op.staging(*operands), got, given, received, moved, rounds, latencies)


def account(program: Program) -> Account:
    """Return the bytes of a program."""
    ledger = _Ledger(program.devices)
    start, found = live_bytes(program, program.devices)
    peak = _worst(start)
    received: Bytes = 0
    sent: Bytes = 0
    known: dict[tuple[Op, tuple[TensorType, ...]], _Entry] = {}  # the layers of a model repeat the same few
    workspaces: list[int] = []
    step_received: list[int] = []
    step_moved: list[int] = []
    rounds: list[int] = []
    latencies: list[int] = []
    for step, hold in zip(program.steps, found, strict=True):
        operands, results = program.step_types(step)
        entry = known.get((step.op, operands))
        if entry is None:
            entry = known[step.op, operands] = _entry(step.op, operands, results, ledger)
        workspaces.append(_worst(hold.during) + entry.staging)
        peak = max(peak, _worst(hold.after))
        received, sent = received + entry.received, sent + entry.sent
        step_received.append(entry.most_received)
        step_moved.append(entry.most_moved)
        rounds.append(entry.rounds)
        latencies.append(entry.latencies)
    return Account(
        devices=program.devices,
        input_bytes=_worst(start),
        peak_bytes=peak,
        workspace_bytes=max([_worst(start), *workspaces]),
        step_workspaces=tuple(workspaces),
        received=np.zeros(len(program.devices), dtype=np.int64) + received,
        sent=np.zeros(len(program.devices), dtype=np.int64) + sent,
        step_received=tuple(step_received),
        step_moved=tuple(step_moved),
        rounds=tuple(rounds),
        latencies=tuple(latencies),
    )


@lru_cache(maxsize=256)
def books_of(body: Program) -> Account:
    """Return the account of a program, or the body of an op; remembered."""
    return account(body)


@lru_cache(maxsize=256)
def workspace_beside(program: Program, outside: frozenset[str]) -> int:
    """Return the most bytes that a device holds during a program, without its inputs `outside`, which outlive it."""
    start, found = live_bytes(program, program.devices, sorted(outside))
    most, known = _worst(start), dict[tuple[Op, tuple[TensorType, ...]], int]()
    for step, hold in zip(program.steps, found, strict=True):
        key = step.op, program.step_types(step)[0]
        if key not in known:  # the layers of a model repeat the same few
            known[key] = step.op.staging(*key[1])
        most = max(most, _worst(hold.during) + known[key])
    return most


@lru_cache(maxsize=256)
def held_inside(body: Program, carried: int, ahead: int = 0, uncounted: frozenset[str] = frozenset()) -> int:
    """Return what a run of a body holds, on the worst device, beside the storage of its op's operands and results.

    That is also what the steps that are run `ahead` have made of the next row. Values that are `uncounted` weigh
    nothing, nor does what is staged to make them.

    Operands are its invariants and slices; what it carries is its own from the second run on. Of the results, those
    carried do not exist before the last run makes them; what is stacked exists beside the stack until it is copied,
    also where the stack takes the storage of a sliced operand.
    """
    ledger = _Ledger(body.devices)
    outside = [*(name for name, _ in body.inputs[carried:]), *sorted(uncounted)]
    start, found = live_bytes(body, body.devices, outside)
    sizes = ledger.sizes(body) | dict.fromkeys(uncounted, 0)
    of = storages(body, sizes, outside).of
    made = {of[r] for step in body.steps[:ahead] for r in step.results} - dict(body.inputs).keys()
    read = {of[o] for o in (*body.outputs, *(o for step in body.steps[ahead:] for o in step.operands))}
    early = sum((sizes[name] for name in made & read), 0)
    weigh = [not uncounted.issuperset(step.results) for step in body.steps]
    staged = [k and step.op.staging(*body.step_types(step)[0]) for k, step in zip(weigh, body.steps, strict=True)]
    results = sum((ledger.size(t) for t in body.output_types[:carried]), 0)
    moments = [start, *(hold.during + early + n for hold, n in zip(found, staged, strict=True))]
    return max(0, *(_worst(moment - results) for moment in moments))


@lru_cache(maxsize=256)
def shared_around(body: Program, carried: int, cut: int) -> tuple[tuple[int, int], ...]:
    """Return the pairs (result, operand) of an op that runs a body again and again that may share storage.

    A carried result may be where it entered, a stack where the rows are that it was made of: each run leaves the value
    in the storage in which it entered, which no other result leaves in. What only moves leaves in another.
    """
    names = [name for name, _ in body.inputs]
    whole = len(names) - cut
    of = storages(body, _Ledger(body.devices).sizes(body), names[carried:whole], relabel=False).of
    homes = [of[name] for name in body.outputs]
    pairs = ((k, names.index(home)) for k, home in enumerate(homes) if home in names and homes.count(home) == 1)
    return tuple((k, j) for k, j in pairs if (j == k if k < carried else j >= whole and body.outputs[k] != names[j]))


def bound_bytes(sources: Sequence[TensorType], destinations: Sequence[TensorType]) -> int:
    """Return max(sum of source shards, sum of destination shards) over devices."""
    devices = Mesh.devices_of(t.mesh for t in (*sources, *destinations))
    ledger = _Ledger(devices)
    return max(_worst(sum((ledger.size(t) for t in side), 0)) for side in (sources, destinations))


def lower_bound(s: TensorType, t: TensorType, devices: tuple[int, ...]) -> np.ndarray:
    """Return the bytes that each of `devices` (ascending ids) must receive at least: int64 [devices].

    Equal partial parts: the destination box minus what the device holds (nothing away from the source's mesh or root);
    addends are taken to be moved, not recombined.
    A partial source and a destination that is not: the whole destination box. A destination partial otherwise: 0.
    """
    ledger = _Ledger(devices)
    needs = np.where(at_root(t), t.elements(), 0)
    source, target = (set(x.mesh.expand(x.layout.partial)) for x in (s, t))
    if t.mesh == s.mesh and source == target and live_reduction(s) == live_reduction(t):
        needs = np.where(needs > 0, needs - overlap_elements(s, t), 0)
    elif target:
        needs = np.zeros_like(needs)
    elif not source:
        needs = np.where(needs > 0, needs - overlap_elements(s, t), 0)
    return ledger.spread(t.mesh.ids, needs * t.itemsize)

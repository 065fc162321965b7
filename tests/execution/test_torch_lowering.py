"""What ranks of torch, and of the lab's engines of messages, send and add up: threads for ranks, queues for sockets."""

from collections import Counter, defaultdict, deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import shardplan as sp
import strategies as some
from conformance import bodies, boxed, cases, differences
from shardplan.core.accounting import account
from shardplan.core.dtypes import itemsize, numpy_dtype
from shardplan.core.lowering import Boxes, Buffer, Copy, Group, Ints, Region, Round, places_of
from shardplan.core.messages import at_root
from shardplan.core.ops import AllGather, AllReduce, AllToAll, Broadcast, Op, Reduce, ReduceScatter, Send, Together
from shardplan.core.ops.collective import Collective, moving
from shardplan.core.ops.grouped import Grouped
from shardplan.core.pattern import Messages
from shardplan.core.program import Program, Step
from shardplan.core.reference import run_reference
from shardplan.hardware.level import Level
from shardplan.hardware.topology import Topology
from shardplan.simulation.replay import replayed
from shardplan.simulation.script import Script, ScriptRound, Stage
from shardplan.simulation.scripts import Engine, script_of

pytest.importorskip("torch")
import torch

from execution.threads import Network, Shards, played
from shardplan.execution.async_executor import finish
from shardplan.execution.lab.rank import LabWire, Replay
from shardplan.execution.rank_rounds import rank_rounds
from shardplan.execution.record import Record
from shardplan.execution.torch import steps
from shardplan.execution.torch.dtypes import to_numpy, to_torch
from shardplan.execution.torch.pack import Packing, landings
from shardplan.execution.torch.run import Binder, TorchExecutable
from shardplan.execution.torch.steps import MOST_KEPT

X, LARGE = sp.Mesh({"x": 4}, devices=(2, 0, 3, 1)), 300_000
MESSAGES: tuple[Engine, ...] = ("ring", "tree", "direct")
BINDERS: dict[str, Binder] = {"torch": steps.bind_step} | {e: partial(steps.bind_step, algorithm=e) for e in MESSAGES}


def raw(x: torch.Tensor) -> torch.Tensor:
    return x.view(-1).view(torch.uint8)


@dataclass
class QueueWire:
    """The traffic of one device, as `TorchWire` has it; a message has the size of the buffer it is received into."""

    network: Network
    me: int
    batched: bool = False
    native: bool = False
    received: int = 0
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    awaited: dict[int, deque[torch.Tensor]] = field(default_factory=lambda: defaultdict(deque))
    posted: list[tuple[int, int]] = field(default_factory=list)  # how many receives and sends, at once
    pending: int = 0  # sends that were not waited for

    def empty(self, elements: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(elements, dtype=dtype)

    def post(self, receives: list[tuple[int, torch.Tensor]], sends: list[tuple[int, torch.Tensor]]) -> Any:
        self.posted.append((len(receives), len(sends)))
        self.pending += len(sends)
        for peer, x in receives:
            self.awaited[peer].append(x)
            self.received += x.nbytes
        for peer, x in sends:
            self.network.send(self.me, peer, raw(x).numpy().tobytes())
        return receives, [(peer, None) for peer, _ in sends]

    def wait(self, pending: list[tuple[int, Any]]) -> None:
        for peer, x in pending:
            self.wait_one(peer, x)

    def wait_one(self, peer: int, x: torch.Tensor | None) -> None:
        self.pending -= x is None
        while any(x is y for y in self.awaited[peer]):
            into = raw(self.awaited[peer].popleft())
            came = self.network.receive(peer, self.me)
            assert len(into) == len(came)
            into.copy_(torch.frombuffer(bytearray(came), dtype=torch.uint8))


def driven(bind: Binder, wires: list[QueueWire] | None = None, batched: bool = False) -> Any:
    """What runs a program on a device with the steps of an engine; `wires` gets one a device."""

    def drive(program: Program, device: int, own: Mapping[str, np.ndarray], network: Network) -> Shards:
        values = {name: to_torch(own[name]) if name in own else torch.empty(0) for name, _ in program.inputs}
        watch, wire = SimpleNamespace(begin_step=lambda _: None), QueueWire(network, device, batched)
        running: Any = TorchExecutable(program, device, bind).drive(values, wire, watch)  # type: ignore[arg-type]
        results = [to_numpy(x) for x in finish(running)]
        assert not wire.pending
        if wires is not None:
            wires.append(wire)
        return results

    return drive


def program_of(op: Op, mesh: sp.Mesh, *texts: str) -> Program:
    ins, outs = [f"x{k}" for k in range(len(texts))], [f"y{k}" for k in range(len(texts))]
    types = [sp.TensorType.parse(text, mesh) for text in texts]
    return Program(dict(zip(ins, types, strict=True)), [Step(op, tuple(ins), tuple(outs))], tuple(outs))


def one(text: str, op: Op, mesh: sp.Mesh) -> Program:
    return program_of(op, mesh, text)


@pytest.mark.parametrize("engine", BINDERS)
def test_programs_equal_the_reference(engine: str) -> None:
    """And every byte that the ops say is received, no more: by each device, and in rings by all together."""
    wrong: list[str] = []
    for case in (*cases(5, 40, 4), *bodies(5, 20, 4), *boxed(5, 30, 4)):
        got, network = played(case.program, case.inputs(), driven(BINDERS[engine]))
        wrong += differences(case, lambda mesh: range(mesh.size), got, case.expected())
        said = account(case.program).received.tolist()
        found = [network.received(d) for d in case.program.devices]
        assert sum(found) == sum(said) and (found == said or engine in ("ring", "tree")), case.name
    assert wrong == []


def staged(program: Program, device: int) -> int:
    """The bytes of the staging buffers that a rank makes for the only step of a program."""
    (step,) = program.steps
    operands, results = program.step_types(step)
    found = rank_rounds(step.op, operands, results, device)
    assert found is not None
    stages = list(steps._stages(found.rounds()))
    shapes = {name: shape for name, shape in found.shapes.items() if name[0] not in "xy"}
    packing = Packing(shapes, found.dtypes, landings(stages, shapes))
    for stage in stages:
        packing.stage(stage)
    return sum(n * itemsize(packing.dtypes[name]) for name, n in packing.room.items())


@settings(max_examples=120, deadline=None)
@given(some.applied(), st.integers(1, 4), st.integers(1, 2))
@example((AllGather(1, ("x",)), sp.TensorType.parse("i32[4, 8@x]", X)), 1, 1)
@example((AllGather(1, ("x",)), sp.TensorType.parse("i32[1, 7@x]", X)), 1, 1)
@example((ReduceScatter(1, ("x",)), sp.TensorType.parse("i32[3, 6]{+x}", X)), 1, 1)
def test_by_any_algorithm_ranks_stage_no_more_than_is_said(
    found: tuple[Op, sp.TensorType], chunks: int, n: int
) -> None:
    """And receive what is said of it; that results are right says `core`'s law of lowerings."""
    op, t = found
    move = moving(op)
    assert move is not None
    for algorithm in move.algorithms if isinstance(move, Grouped) else ():
        by = replace(move, algorithm=algorithm).in_chunks(chunks)
        program = program_of(by, t.mesh, *[str(t)] * n)
        assert max(staged(program, d) for d in t.mesh.devices) <= by.staging(*[t] * n), by
        said = by.received_bytes(*[t] * n).sum()
        assert by.sent_bytes(*[t] * n)[1].sum() == said >= move.received_bytes(*[t] * n).sum()
        assert said == move.received_bytes(*[t] * n).sum() or algorithm == "padded"


COMPOSED = [
    ("i32[7@a, 5]", AllGather(0, ("a",))),
    ("i32[5, 7@(a,b)]", AllGather(1, ("a", "b"), chunks=2)),
    ("u16[5@b, 7]{+a}", AllReduce(("a",), chunks=2)),
    ("i32[3, 5]{bor:a,b}", ReduceScatter(1, ("b", "a"), "bor")),
    ("i32[5@a, 7]", AllToAll(0, 1, ("a",))),
    ("i32[9]{band:a,b}", Reduce(("a", "b"), "band")),
]


@pytest.mark.parametrize("batched", [False, True])
@pytest.mark.parametrize(("text", "op"), COMPOSED, ids=lambda x: getattr(x, "name", x))
def test_ranks_obey_the_algorithm_of_a_step(text: str, op: Grouped, batched: bool) -> None:
    """What each pair of ranks says to each other is what the lowering by that algorithm puts; results are right."""
    mesh = sp.Mesh({"a": 3, "b": 2}, devices=(4, 2, 0, 5, 1, 3))
    for algorithm in op.algorithms:
        by = replace(op, algorithm=algorithm)
        program = one(text, by, mesh)
        assert f"algorithm={algorithm}" in str(program) and Program.parse(str(program)) == program
        network = same(program, "torch", batched)
        if algorithm == "padded":  # to a library one collective: all pairs of a group say as much to each other
            got = by.received_bytes(*program.input_types)
            assert {d: network.received(d) for d in mesh.devices} == dict(zip(mesh.devices, got.tolist(), strict=True))
            continue
        pattern = by.pattern(*program.input_types)
        rounds = [pattern] if isinstance(pattern, Messages) else [s.pattern for s in pattern.steps * pattern.times]
        said: Counter[tuple[int, int]] = Counter()
        for one_round in rounds:
            for sender, receiver, nbytes in zip(one_round.sender, one_round.receiver, one_round.nbytes, strict=True):
                said[int(sender), int(receiver)] += nbytes
        assert {pair: sum(sizes) for pair, sizes in network.sent.items() if sizes} == pytest.approx(said)
        if algorithm == "ring" and op.name != "all_to_all":
            assert len({sender for sender, _ in said}) == len(said)  # nobody but the next member hears of one


@pytest.mark.parametrize("op", [ReduceScatter(0, ("b", "a")), AllReduce(("b", "a"))], ids=lambda op: op.name)
def test_sums_are_taken_in_member_order(op: Op) -> None:
    """Bit for bit, of addends whose sum depends on the order: each member adds its own where it stands in the group."""
    program = one("f32[24]{+a,+b}", op, sp.Mesh({"a": 2, "b": 3}, devices=(4, 2, 0, 5, 1, 3)))
    rng = np.random.default_rng(1)
    shards = [(rng.standard_normal(24) * 10.0 ** rng.integers(-6, 7, 24)).astype(np.float32) for _ in range(6)]
    ((got,), _), (want,) = played(program, [shards], driven(steps.bind_step)), run_reference(program, [shards])
    assert [x.tobytes() for x in got] == [x.tobytes() for x in want]
    (other,) = run_reference(program, [shards[::-1]])
    assert [x.tobytes() for x in other] != [x.tobytes() for x in want]


PAIR, AWAY = sp.Mesh({"y": 2}, devices=(1, 4)), sp.Mesh({"z": 2}, devices=(5, 0))
MOVES: list[tuple[str, Op, sp.Mesh]] = [
    ("i32[101@x]", AllGather(0, ("x",)), X),
    ("i16[7]{+x}", AllReduce(("x",)), X),
    (f"i8[{LARGE}]{{root:y}}", Broadcast(("y",)), PAIR),
    ("f64[9@y]", Send(sp.TensorType.parse("f64[9@z]", AWAY).layout, AWAY), PAIR),
]


def ones(program: Program) -> list[Shards]:
    """Shards for every input."""
    return [[np.ones(t.local_shape(k), numpy_dtype(t.dtype)) for k in range(t.mesh.size)] for t in program.input_types]


def together(moves: list[tuple[str, Op, sp.Mesh]]) -> Program:
    """A program of one step: moves posted at once, their results in reverse order."""
    types = {f"x{k}": sp.TensorType.parse(text, mesh) for k, (text, _, mesh) in enumerate(moves)}
    names = [f"y{k}" for k in range(len(moves))]
    body = Program(types, [Step(op, (f"x{k}",), (f"y{k}",)) for k, (_, op, _) in enumerate(moves)], names[::-1])
    return Program(types, [Step(Together(body), tuple(types), tuple(names[::-1]))], names)


TALKS = {
    "all_gather": one(f"i8[{LARGE + 1}@x]", AllGather(0, ("x",), 3), X),
    "reduce_scatter": one(f"i16[{LARGE + 1}]{{+x}}", ReduceScatter(0, ("x",), chunks=2), X),
    "all_reduce": one(f"i16[{LARGE + 1}]{{+x}}", AllReduce(("x",), chunks=2), X),
    "all_to_all": one("i32[10@x, 7]", AllToAll(0, 1, ("x",), chunks=2), X),
    "reduce": one(f"i16[{LARGE}]{{+x}}", Reduce(("x",)), X),
    "broadcast": one(f"i16[{LARGE}]{{root:x}}", Broadcast(("x",)), X),
    "all_gather of three": program_of(AllGather(0, ("x",)), X, "i64[4@x]", "i8[9@x, 3]", "f64[8@x]"),
    "all_reduce of two": program_of(AllReduce(("x",)), X, "i16[7]{+x}", "i16[5]{+x}"),
    "broadcast of two": program_of(Broadcast(("x",)), X, f"i16[{LARGE}]{{root:x}}", "i8[3]{root:x}"),
    "four together": together(MOVES),
}


@pytest.mark.parametrize("engine", MESSAGES)
@pytest.mark.parametrize("name", TALKS)
def test_an_engine_sends_what_its_script_says(name: str, engine: Engine) -> None:
    """Message by message, and not only in bytes: so is the traffic replayed and timed that a run makes."""
    program = TALKS[name]
    _, network = played(program, ones(program), driven(BINDERS[engine]))
    said: dict[tuple[int, int], list[int]] = {}
    table = script_of(program, engine=engine).table()
    for sender, receiver, n in zip(*(x.tolist() for x in (table.sender, table.receiver, table.nbytes)), strict=True):
        said.setdefault((sender, receiver), []).append(n)
    assert {pair: sizes for pair, sizes in network.sent.items() if sizes} == said


def test_the_moves_of_a_batch_are_under_way_at_once() -> None:
    """In as many rounds as its longest move has; a stage begins with the receives of all moves."""
    program, wires = TALKS["four together"], list[QueueWire]()
    found = script_of(program)
    alone = [sum(len(stage.rounds) for stage in script_of(one(*move)).stages) for move in MOVES]
    assert sum(len(stage.rounds) for stage in found.stages) == max(alone) < sum(alone)
    assert found.kinds == ("together",)
    played(program, ones(program), driven(BINDERS["ring"], wires))
    for wire in wires:
        _, first = next(found.rounds_of(wire.me))
        assert next(n for n, _ in wire.posted if n) == sum(len(takes) for _, takes in first)


@pytest.mark.parametrize("batched", [False, True])
def test_a_stage_begins_with_its_receives(batched: bool) -> None:
    """All of a ring's; but a batch ends as a whole, so that in one there is nothing of a later round."""
    program, wires = TALKS["all_gather"], list[QueueWire]()
    shards = [np.ones(program.input_types[0].local_shape(k), np.int8) for k in range(4)]
    played(program, [shards], driven(BINDERS["ring"], wires, batched))
    for wire in wires:
        assert wire.posted == 3 * ([(1, 1)] * 3 if batched else [(3, 1), (0, 1), (0, 1)])


def test_the_lab_counts_all_that_a_device_is_sent_and_sends_it_to_a_rank() -> None:
    sent: list[tuple[int, int]] = []
    group = SimpleNamespace(send=lambda xs, rank, tag: sent.append((rank, xs[0].nbytes)), recv=lambda *_: None)
    watch: Any = SimpleNamespace(timeout=1.0, tag=0, state=SimpleNamespace(rank_in={0: 0, 1: 1}))
    wire = LabWire(group, watch, torch.device("cpu"), ranks={8: 1, 9: 0})
    x = torch.zeros(6, dtype=torch.int16)
    wire.post([(9, x)], [(8, x), (9, x[:2])])
    wire.post([], [(8, x[:1])])
    assert wire.payload == {8: 12 + 2, 9: 4} and wire.received == 12
    assert sent == [(1, 12), (0, 4), (1, 2)]


def test_a_native_group_of_the_lab_is_one_of_ranks_in_member_order() -> None:
    watch: Any = SimpleNamespace(timeout=1.0, tag=0, state=SimpleNamespace(members=lambda ranks: ranks))
    wire = LabWire(None, watch, torch.device("cpu"), native=True, ranks={8: 1, 9: 0, 4: 2})
    assert wire.group_of((4, 8, 9)) == (2, 1, 0)


@pytest.mark.parametrize("in_flight", [1, 2, 5])
def test_a_replay_has_so_many_rounds_in_flight(in_flight: int) -> None:
    """All receives are posted first; before a round the device waits for the one that may be under way no more."""
    done: list[str] = []
    wire: Any = SimpleNamespace(
        received=0,
        post=lambda ins, outs: (done.append(f"{len(ins)}+{len(outs)}"), (ins, outs))[1],
        wait=lambda pending: done.append(f"wait {len(pending)}"),
    )
    ring = [ScriptRound(np.array([0, 1]), np.array([1, 0]), np.array([n, n])) for n in (3, 2, 4)]
    Replay(Script((Stage(0, tuple(ring), in_flight),), ("x",), ("x",)), 1).run(wire, Record())
    before = [f"wait {int(k >= in_flight)}" for k in range(3)]
    assert done == ["3+0", *(x for wait in before for x in (wait, "0+1")), f"wait {min(3, in_flight) + 3}"]


def test_what_several_peers_get_is_packed_once() -> None:
    """Two tiles of 3 and 2 elements, for three peers; a receiver has room for each of theirs."""
    op, types = AllGather(0, ("x",)), [sp.TensorType.parse(text, X) for text in ("i32[12@x]", "f32[8@x]")]
    first = rank_rounds(op, types, op.infer(*types), 0)
    assert first is not None
    packing = Packing({}, first.dtypes, set())
    (only,) = packing.stage(list(first.rounds()))
    assert packing.room == {"sent i32": 5, "taken i32": 3 * 5}
    assert [(m.peer, m.run.view.offset, len(m.copies)) for m in only.sends] == [(2, 0, 2), (3, 0, 0), (1, 0, 0)]


def same(program: Program, engine: str, batched: bool = False) -> Network:
    """Run a program on random integers as an engine does, compare it with the reference, and say what was sent."""
    rng = np.random.default_rng(2)
    shards = [
        [rng.integers(0, 100, t.local_shape(k)).astype(numpy_dtype(t.dtype)) for k in range(t.mesh.size)]
        for t in program.input_types
    ]
    got, network = played(program, shards, driven(BINDERS[engine], None, batched))
    for outs, wants, t in zip(got, run_reference(program, shards), program.output_types, strict=True):
        for k in np.flatnonzero(at_root(t)):
            assert np.array_equal(outs[k], wants[k])
    return network


def test_many_chunks_are_made_in_their_turn() -> None:
    network = same(program_of(ReduceScatter(0, ("x",), chunks=MOST_KEPT + 2), X, "i32[2000]{+x}", "i8[4]{+x}"), "torch")
    assert sum(network.sent[2, 0]) == 500 * 4 + 1
    assert len([n for n in network.sent[2, 0] if n > 1]) == MOST_KEPT + 2


@dataclass(frozen=True, slots=True)
class Relay(Collective):
    """A tile goes two members on, in two hops; between them the ranks wait for all they have sent, or do not."""

    name = "relay"
    waits: bool

    def result(self, t: sp.TensorType) -> sp.TensorType:
        return t

    def lower(self, t: sp.TensorType, u: sp.TensorType, devices: Ints, algorithm: str) -> Iterator[Round]:
        group, here = Group(t, ("x",), devices), Boxes(t, places_of(t.mesh, devices))
        for source, taken, closes in (("x", "hop", self.waits), ("hop", "y", True)):
            moves = (
                group.put(group.me + 1, here.whole_region(source)),
                group.take(group.me - 1, here.whole_region(taken)),
            )
            yield Round.of(moves, closes)

    def buffers(self, t: sp.TensorType, u: sp.TensorType, devices: Ints, algorithm: str) -> dict[str, Buffer]:
        return {"hop": Buffer(Boxes(t, places_of(t.mesh, devices)).whole_region("x").elements(), t.dtype)}


@pytest.mark.parametrize("waits", [False, True])
def test_what_is_staged_stays_as_long_as_it_is_read(waits: bool) -> None:
    network = same(program_of(Relay(waits), X, "i32[8@x]", "f32[4@x, 3]", "i16[4@x]"), "torch")
    assert network.sent[2, 0] == 2 * [2, 2 * 4 + 3 * 4]


@dataclass(frozen=True, slots=True)
class Fold(Collective):
    """What a device holds in 2 x 3 elements is added to 3 x 2 others, in order."""

    name = "fold"

    def result(self, t: sp.TensorType) -> sp.TensorType:
        return t

    def lower(self, t: sp.TensorType, u: sp.TensorType, devices: Ints, algorithm: str) -> Iterator[Round]:
        here = Boxes(t, places_of(t.mesh, devices))
        wide, high = (
            np.broadcast_to(np.array(box), (len(devices), 2, 2)) for box in ([[0, 2], [1, 4]], [[1, 4], [0, 2]])
        )
        yield Round.of(
            [Copy(here.whole_region("x"), here.whole_region("y")), Copy(Region("x", wide), Region("y", high), "sum")]
        )


def test_a_copy_between_boxes_of_other_shapes() -> None:
    same(program_of(Fold(), X, "i32[4, 4]"), "torch")


@dataclass(frozen=True, slots=True)
class Collect(Collective):
    """The tiles of a group go to its first member: `axis`, minor in `dim`, becomes a root axis."""

    name = "collect"
    dim: int
    axis: str
    backwards: bool = False

    def result(self, t: sp.TensorType) -> sp.TensorType:
        dims = tuple(names[:-1] if d == self.dim else names for d, names in enumerate(t.layout.dims))
        return t.with_layout(replace(t.layout, dims=dims, root=(*t.layout.root, self.axis)))

    def lower(self, t: sp.TensorType, u: sp.TensorType, devices: Ints, algorithm: str) -> Iterator[Round]:
        group, (before, after) = Group(t, (self.axis,), devices), Boxes.ends(t, u, devices)
        own, first = before.whole_region("x"), group.me == 0
        members = range(group.size)
        blocks = [after.part("y", Boxes(t, group.place(k))) for k in (members[::-1] if self.backwards else members)]
        takes = [group.take(k, blocks[k]) for k in members[1:]]
        yield Round.of([Copy(own.restrict(first), blocks[0]), group.put(0, own.restrict(~first)), *takes])


@pytest.mark.parametrize("backwards", [False, True])
def test_an_op_from_outside_is_run_and_simulated(backwards: bool) -> None:
    """Nothing but its typing and its lowering is said of it; what the lowering delivers in reverse order, all do."""
    program = one("f32[4@b, 6@(c,a)]", Collect(1, "a", backwards), sp.Mesh({"a": 3, "b": 2, "c": 1}))
    whole = np.arange(24, dtype=np.float32).reshape(4, 6)
    shards = sp.distribute(whole, program.input_types[0])
    want = whole.reshape(4, 3, 2)[:, ::-1].reshape(4, 6) if backwards else whole
    for bind in BINDERS.values():
        (got,), network = played(program, [shards], driven(bind))
        assert np.array_equal(np.concatenate(got[:2]), want)
        assert dict(network.sent) == {p: [16] for p in script_of(program).payload()}
    flat = Topology("", (Level("gpu", 6, "switch", 1e6, 1e-6),))
    assert replayed(script_of(program), flat).seconds == pytest.approx(2 * 16 / 1e6 + 1e-6)

"""What ranks of torch, and of the lab's ring engine, send and add up: threads for ranks, and queues for sockets."""

from collections import defaultdict, deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import shardplan as sp
from conformance import bodies, cases, differences
from shardplan.core.accounting import account
from shardplan.core.dtypes import numpy_dtype
from shardplan.core.ops import AllGather, AllReduce, AllToAll, Broadcast, Op, Reduce, ReduceScatter
from shardplan.core.program import Program, Step
from shardplan.core.reference import run_program
from shardplan.simulation.ring import script_of

pytest.importorskip("torch")
import torch

from execution.threads import Network, Shards, played
from shardplan.execution.drive import finish
from shardplan.execution.lab import ring
from shardplan.execution.lab.wire import LabWire
from shardplan.execution.torch import steps
from shardplan.execution.torch.dtypes import to_numpy, to_torch
from shardplan.execution.torch.pack import PeerPart, pack, staged
from shardplan.execution.torch.run import Binder, TorchExecutable

BINDERS = {"torch": steps.bind, "lab": ring.bind}


def raw(x: torch.Tensor) -> torch.Tensor:
    return x.view(-1).view(torch.uint8)


@dataclass
class QueueWire:
    """The traffic of one device, as `TorchWire` has it; a message has the size of the buffer it is received into."""

    network: Network
    me: int
    received: int = 0
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    awaited: dict[int, deque[torch.Tensor]] = field(default_factory=lambda: defaultdict(deque))

    def empty(self, elements: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(elements, dtype=dtype)

    def post(self, receives: list[tuple[int, torch.Tensor]], sends: list[tuple[int, torch.Tensor]]) -> Any:
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
        while any(x is y for y in self.awaited[peer]):
            into = raw(self.awaited[peer].popleft())
            came = self.network.receive(peer, self.me)
            assert len(into) == len(came)
            into.copy_(torch.frombuffer(bytearray(came), dtype=torch.uint8))


def driven(bind: Binder) -> Any:
    """What runs a program on a device with the steps of an engine."""

    def drive(program: Program, device: int, own: Mapping[str, np.ndarray], network: Network) -> Shards:
        values = {name: to_torch(own[name]) if name in own else torch.empty(0) for name, _ in program.inputs}
        watch, wire = SimpleNamespace(begin_step=lambda _: None), QueueWire(network, device)
        running: Any = TorchExecutable(program, device, bind).drive(values, wire, watch)  # type: ignore[arg-type]
        return [to_numpy(x) for x in finish(running)]

    return drive


def one(text: str, op: Op, mesh: sp.Mesh) -> Program:
    return Program({"0": sp.TensorType.parse(text, mesh)}, [Step(op, ("0",), ("1",))], ("1",))


@pytest.mark.parametrize("engine", BINDERS)
def test_programs_equal_the_reference(engine: str) -> None:
    """And every byte that the ops say is received, no more: by each device, and in rings by all together."""
    wrong: list[str] = []
    for case in (*cases(5, 40, 4), *bodies(5, 20, 4)):
        got, network = played(case.program, case.inputs(), driven(BINDERS[engine]))
        wrong += differences(case, lambda mesh: range(mesh.size), got, case.expected())
        said = account(case.program).received.tolist()
        found = [network.received(d) for d in case.program.devices]
        assert sum(found) == sum(said) and (found == said or engine == "lab"), case.name
    assert wrong == []


@pytest.mark.parametrize("op", [ReduceScatter(0, ("b", "a")), AllReduce(("b", "a"))], ids=lambda op: op.name)
def test_sums_are_taken_in_member_order(op: Op) -> None:
    """Bit for bit, of addends whose sum depends on the order: each member adds its own where it stands in the group."""
    program = one("f32[24]{+a,+b}", op, sp.Mesh({"a": 2, "b": 3}, devices=(4, 2, 0, 5, 1, 3)))
    rng = np.random.default_rng(1)
    shards = [(rng.standard_normal(24) * 10.0 ** rng.integers(-6, 7, 24)).astype(np.float32) for _ in range(6)]
    ((got,), _), (want,) = played(program, [shards], driven(steps.bind)), run_program(program, [shards])
    assert [x.tobytes() for x in got] == [x.tobytes() for x in want]
    (other,) = run_program(program, [shards[::-1]])
    assert [x.tobytes() for x in other] != [x.tobytes() for x in want]


X, LARGE = sp.Mesh({"x": 4}, devices=(2, 0, 3, 1)), 300_000
TALKS = {
    "all_gather": one(f"i8[{LARGE + 1}@x]", AllGather(0, ("x",), 3), X),
    "reduce_scatter": one(f"i16[{LARGE + 1}]{{+x}}", ReduceScatter(0, ("x",), chunks=2), X),
    "all_reduce": one(f"i16[{LARGE + 1}]{{+x}}", AllReduce(("x",), chunks=2), X),
    "all_to_all": one("i32[10@x, 7]", AllToAll(0, 1, ("x",), chunks=2), X),
    "reduce": one(f"i16[{LARGE}]{{+x}}", Reduce(("x",)), X),
    "broadcast": one(f"i16[{LARGE}]{{root:x}}", Broadcast(("x",)), X),
}


@pytest.mark.parametrize("name", TALKS)
def test_the_lab_says_what_its_script_says(name: str) -> None:
    """Message by message, and not only in bytes: so is the traffic replayed and timed that a run makes."""
    program = TALKS[name]
    (t,) = program.input_types
    shards = [np.ones(t.local_shape(k), numpy_dtype(t.dtype)) for k in range(4)]
    _, network = played(program, [shards], driven(ring.bind))
    said: dict[tuple[int, int], list[int]] = {}
    for stage in script_of(program).stages:
        for device, rounds in stage.rounds.items():
            for peer, n in (m for r in rounds for m in r.sends):
                said.setdefault((device, peer), []).append(n)
    assert {pair: sizes for pair, sizes in network.sent.items() if sizes} == said


def test_the_lab_counts_all_that_a_device_is_sent_and_sends_it_to_a_rank() -> None:
    sent: list[tuple[int, int]] = []
    group = SimpleNamespace(send=lambda xs, rank, tag: sent.append((rank, xs[0].nbytes)), recv=lambda *_: None)
    watch: Any = SimpleNamespace(timeout=1.0, tag=0)
    wire = LabWire(group, watch, torch.device("cpu"), ranks={8: 1, 9: 0})
    x = torch.zeros(6, dtype=torch.int16)
    wire.post([(9, x)], [(8, x), (9, x[:2])])
    wire.post([], [(8, x[:1])])
    assert wire.payload == {8: 12 + 2, 9: 4} and wire.received == 12
    assert sent == [(1, 12), (0, 4), (1, 2)]


def test_what_several_peers_get_is_packed_once() -> None:
    """Two columns of a 4 x 4 array, for two peers; a receiver has room for each."""
    columns = [PeerPart(peer, 0, (4, 4), ((0, 4), (1, 3))) for peer in (1, 2)]
    out, into = pack(columns, 0, 1, True), pack(columns, 0, 1, False)
    assert (staged(out), staged(into)) == (8, 16)
    assert [(m.peer, m.start, m.stop, m.packs) for m in out] == [(1, 0, 8, True), (2, 0, 8, False)]

"""What the ranks of MPI send, add up and copy, with threads for ranks, queues for communicators, and no MPI."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest

import shardplan as sp
from conformance import bodies, boxed, cases, differences
from execution.threads import Network, Shards, played
from shardplan.core.accounting import account
from shardplan.core.lowering import Boxes, Copy, Group, Round
from shardplan.core.ops import AllGather, AllReduce, Broadcast, Exchange, Permute, Reduce
from shardplan.core.ops.collective import Collective
from shardplan.core.ops.movement import with_dims, without_suffix
from shardplan.core.program import Program, Step
from shardplan.core.reference import run_reference
from shardplan.core.tensor import Box
from shardplan.execution.async_executor import finish
from shardplan.execution.lower import group_of
from shardplan.execution.mpi import run as backend
from shardplan.execution.mpi import steps
from shardplan.execution.mpi.steps import Binding
from shardplan.execution.mpi.wire import Buffers, Messages, MpiPiece


class Datatypes:
    """Datatypes as what they stand for: a shape and boxes of it."""

    def piece(self, array: str, shape: tuple[int, ...], itemsize: int, boxes: Sequence[Box]) -> MpiPiece:
        nbytes = itemsize * sum(int(np.prod([b - a for a, b in box])) for box in boxes)
        return MpiPiece(array, 0, 1, (shape, tuple(boxes)), nbytes)  # type: ignore[arg-type]

    def free(self) -> None:
        pass


def places(buffers: Buffers, message: tuple[MpiPiece, ...]) -> list[np.ndarray]:
    """The parts of arrays that a message is sent from, or received into."""
    found: list[np.ndarray] = []
    for piece in message:
        shape, boxes = piece.datatype  # type: ignore[misc]
        found += [buffers[piece.array].reshape(shape)[(*(slice(*pair) for pair in box), ...)] for box in boxes]
    return found


@dataclass
class QueueWire:
    """The traffic of one device, as `MpiWire` has it."""

    network: Network
    me: int
    received: int = 0
    unsent: int = 0  # messages that nobody has waited for
    most_unsent: int = 0
    watch: Any = field(default_factory=SimpleNamespace)

    def messages(self, buffers: Buffers, sends: Messages, receives: Messages) -> list[Any]:
        for peer, message in sends.items():
            self.network.send(self.me, peer, b"".join(x.tobytes() for x in places(buffers, message)))
        self.unsent += len(sends)
        self.most_unsent = max(self.most_unsent, self.unsent)
        self.received += sum(piece.nbytes for message in receives.values() for piece in message)
        return [(None, []) for _ in sends] + [(peer, places(buffers, message)) for peer, message in receives.items()]

    def all_to_all(self, members: Sequence[int], buffers: Buffers, sends: Messages, receives: Messages) -> list[Any]:
        assert steps.NATIVE
        assert self.me in members and {*sends, *receives} <= {*members}
        return self.messages(buffers, sends, receives)

    def wait(self, pending: Sequence[Any], group: Sequence[int]) -> None:
        assert self.me in group
        for peer, parts in pending:
            if peer is None:
                self.unsent -= 1
                continue
            came, start = self.network.receive(peer, self.me), 0
            for x in parts:
                x[...] = np.frombuffer(came[start : start + x.nbytes], x.dtype).reshape(x.shape)
                start += x.nbytes
            assert start == len(came)


@pytest.fixture(autouse=True)
def without_datatypes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend, "Binding", lambda device: Binding(device, types=Datatypes()))  # type: ignore[arg-type]


def drive(program: Program, device: int, own: Mapping[str, np.ndarray], network: Network) -> Shards:
    wire: Any = QueueWire(network, device)
    values = {name: own[name].copy() if name in own else np.empty(0) for name, _ in program.inputs}
    results = finish(backend.MpiExecutable(program, device).drive(values, wire))
    assert not wire.unsent
    return results


@pytest.mark.parametrize("table", [steps.NATIVE, {}])
def test_programs_equal_the_reference(table: dict[str, float], monkeypatch: pytest.MonkeyPatch) -> None:
    """And every device receives the bytes that the ops say, with MPI's all-to-alls and without."""
    monkeypatch.setattr(steps, "NATIVE", table)
    wrong: list[str] = []
    for case in (*cases(5, 40, 4), *bodies(5, 20, 4), *boxed(5, 30, 4)):
        got, network = played(case.program, case.inputs(), drive)
        wrong += differences(case, lambda mesh: range(mesh.size), got, case.expected())
        assert [network.received(d) for d in case.program.devices] == account(case.program).received.tolist()
    assert wrong == []


@pytest.mark.parametrize("reduction", ["sum", "max", "min", "product", "bxor"])
def test_a_chain_reduces_as_it_is_asked(reduction: str) -> None:
    t = sp.TensorType("i32", (5,), (None,), sp.Mesh({"x": 3}, devices=(1, 2, 0)), partial={"x": reduction})
    program = Program({"0": t}, [Step(Reduce(("x",), reduction, 2), ("0",), ("1",))], ("1",))
    shards = [np.random.default_rng(k).integers(-50, 50, 5, dtype=np.int32) for k in range(3)]
    ((got, *_),), network = played(program, [shards], drive)
    ((want, *_),) = run_reference(program, [shards])
    assert got.tolist() == want.tolist()
    assert network.sent == {(0, 2): [8, 12], (2, 1): [8, 12]}  # towards the first member


# Which rounds are all-to-alls

FOUR = sp.Mesh(x=4, devices=(1, 2, 0, 3))
SIX = sp.Mesh(x=2, y=3)
SQUARE = sp.Mesh(a=2, b=2)


def kind(text: str, mesh: sp.Mesh = FOUR) -> sp.TensorType:
    return sp.TensorType.parse(text, mesh)


@pytest.mark.parametrize(
    ("op", "t", "members"),
    [
        (AllGather(0, ("x",)), kind("f32[8@x]"), (1, 2, 0, 3)),
        (AllGather(1, ("b",), 3), kind("f32[8@a, 8@b]", SQUARE), (0, 1)),
        (AllReduce(("x",)), kind("f32[8]{+x}"), (1, 2, 0, 3)),
        (Reduce(("x",)), kind("f32[8]{+x}"), ()),
        (Broadcast(("x",), 2), kind("f32[8]{root:x}"), ()),
        (Permute(kind("f32[8@(b,a)]", SQUARE).layout), kind("f32[8@(a,b)]", SQUARE), ()),
        (Exchange(kind("f32[8, 8@x]").layout), kind("f32[8@x, 8]"), (1, 2, 0, 3)),
        (Exchange(kind("f32[8@(b,a)]", SQUARE).layout), kind("f32[8@(a,b)]", SQUARE), (1, 2)),  # of four, two swap
        (Exchange(kind("f32[9@x]").layout), kind("f32[9]"), ()),  # nothing moves
        (Exchange(kind("f32[12@(x,y)]", SIX).layout), kind("f32[12@(y,x)]", SIX), ()),  # each hears from two of five
        (AllGather(0, ("x",)), kind("f32[1@x]"), ()),  # one has all that there is
    ],
)  # fmt: skip
def test_an_all_to_all_is_among_those_most_of_whom_have_messages(
    op: Collective, t: sp.TensorType, members: tuple[int, ...]
) -> None:
    place = t.mesh.devices.index(1)
    group = [t.mesh.devices[m] for m in group_of(op, t, place)]
    assert steps.all_to_all_members(op, [t], group) == members


# Ops from outside


@dataclass(frozen=True, slots=True)
class GatherToFirst(Collective):
    """The first member of every group over `axes` takes the tiles of dim 0, turned round where it is asked to."""

    name: ClassVar[str] = "gather_to_first"
    axes: tuple[str, ...]
    turned: bool = False
    closes: bool = True

    def result(self, t: sp.TensorType) -> sp.TensorType:
        layout = with_dims(t.layout, t.mesh, {0: without_suffix(self.name, t, 0, self.axes)})
        return t.with_layout(replace(layout, root=(*t.layout.root, *self.axes)))

    def lower(self, t: sp.TensorType, u: sp.TensorType, devices: np.ndarray, algorithm: str) -> Iterator[Round]:
        group, (before, after) = Group(t, self.axes, devices), Boxes.ends(t, u, devices)
        first, own = group.me == 0, before.whole_region("x")
        tiles = [after.part("y", Boxes(t, group.place(k))).restrict(first) for k in range(group.size)]
        targets = tiles[::-1] if self.turned else tiles
        takes = [group.take(k, targets[k]) for k in range(1, group.size)]
        yield Round.of([group.put(0, own.restrict(~first)), Copy(own.restrict(first), targets[0]), *takes], self.closes)


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("closes", [False, True])
def test_an_op_from_outside_runs_by_its_lowering(turned: bool, closes: bool) -> None:
    t = kind("i32[8@x, 3]")
    program = Program({"0": t}, [Step(GatherToFirst(("x",), turned, closes), ("0",), ("1",))], ("1",))
    tiles = [np.full((2, 3), k, np.int32) for k in range(4)]
    ((got, *_),), network = played(program, [tiles], drive)
    ((want, *_),) = run_reference(program, [tiles])
    assert got.tolist() == want.tolist() == np.concatenate(tiles[::-1] if turned else tiles).tolist()
    assert network.sent == {(d, 1): [24] for d in (2, 0, 3)}


@pytest.mark.parametrize(
    ("op", "t", "most"),
    [
        (Permute(kind("i32[12@(b,a)]", SQUARE).layout, 3), kind("i32[12@(a,b)]", SQUARE), 1),
        (Broadcast(("x",), 3), kind("i32[6]{root:x}"), 3),
    ],
)
def test_sends_are_under_way_until_a_round_closes(op: Collective, t: sp.TensorType, most: int) -> None:
    program = Program({"0": t}, [Step(op, ("0",), ("1",))], ("1",))
    found: list[int] = []

    def watched(program: Program, device: int, own: Mapping[str, np.ndarray], network: Network) -> Shards:
        wire: Any = QueueWire(network, device)
        results = finish(backend.MpiExecutable(program, device).drive(dict(own), wire))
        found.append(wire.most_unsent)
        return results

    played(program, [[np.zeros(t.local_shape(k), np.int32) for k in range(4)]], watched)
    assert max(found) == most

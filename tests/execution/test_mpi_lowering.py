"""What the ranks of MPI send, add up and copy, with threads for ranks, queues for communicators, and no MPI."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import shardplan as sp
from conformance import bodies, cases, differences
from execution.threads import Network, Shards, played
from shardplan.core.accounting import account
from shardplan.core.ops import Reduce
from shardplan.core.program import Program, Step
from shardplan.core.reference import run_program
from shardplan.core.tensor import Box
from shardplan.execution.mpi import run as backend
from shardplan.execution.mpi.binding import Binding
from shardplan.execution.mpi.wire import Messages, Piece


class Boxes:
    """Datatypes as what they stand for: a shape and boxes of it."""

    def piece(self, array: int, shape: tuple[int, ...], itemsize: int, boxes: Sequence[Box]) -> Piece:
        nbytes = itemsize * sum(int(np.prod([b - a for a, b in box])) for box in boxes)
        return Piece(array, (shape, tuple(boxes)), nbytes)  # type: ignore[arg-type]

    def free(self) -> None:
        pass


def places(arrays: Sequence[np.ndarray], message: tuple[Piece, ...]) -> list[np.ndarray]:
    """The parts of arrays that a message is sent from, or received into."""
    found: list[np.ndarray] = []
    for piece in message:
        shape, boxes = piece.datatype  # type: ignore[misc]
        found += [arrays[piece.array].reshape(shape)[(*(slice(*pair) for pair in box), ...)] for box in boxes]
    return found


@dataclass
class QueueWire:
    """The traffic of one device, as `MpiWire` has it."""

    network: Network
    me: int
    received: int = 0
    watch: Any = field(default_factory=SimpleNamespace)

    def messages(self, out: Any, sends: Messages, into: Any, receives: Messages) -> list[Any]:
        for peer, message in sends.items():
            self.network.send(self.me, peer, b"".join(x.tobytes() for x in places(out, message)))
        self.received += sum(piece.nbytes for message in receives.values() for piece in message)
        return [(peer, places(into, message)) for peer, message in receives.items()]

    def all_to_all(self, members: Sequence[int], out: Any, sends: Messages, into: Any, receives: Messages) -> list[Any]:
        assert self.me in members and {*sends, *receives} <= {*members}
        return self.messages(out, sends, into, receives)

    def receive(self, peer: int, x: np.ndarray) -> Any:
        self.received += x.nbytes
        return peer, [x]

    def send(self, peer: int, x: np.ndarray) -> Any:
        self.network.send(self.me, peer, x.tobytes())
        return peer, []

    def wait(self, pending: Sequence[Any], group: Sequence[int]) -> None:
        for peer, parts in pending:
            if not parts:
                continue
            came, start = self.network.receive(peer, self.me), 0
            for x in parts:
                x[...] = np.frombuffer(came[start : start + x.nbytes], x.dtype).reshape(x.shape)
                start += x.nbytes
            assert start == len(came)


@pytest.fixture(autouse=True)
def without_datatypes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend, "Binding", lambda device: Binding(device, types=Boxes()))  # type: ignore[arg-type]


def drive(program: Program, device: int, own: Mapping[str, np.ndarray], network: Network) -> Shards:
    wire: Any = QueueWire(network, device)
    values = {name: own[name].copy() if name in own else np.empty(0) for name, _ in program.inputs}
    return backend.MpiExecutable(program, device).drive(values, wire)


def test_programs_equal_the_reference() -> None:
    """And every device receives the bytes that the ops say."""
    wrong: list[str] = []
    for case in (*cases(5, 40, 4), *bodies(5, 20, 4)):
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
    ((want, *_),) = run_program(program, [shards])
    assert got.tolist() == want.tolist()
    assert network.sent == {(0, 2): [8, 12], (2, 1): [8, 12]}  # towards the first member

"""Native collectives on threads: what each rank packs, calls and unpacks, against the reference."""

import threading
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

import shardplan as sp
from rank_threads import in_threads

torch = pytest.importorskip("torch")

from shardplan.core.dtypes import numpy_dtype  # noqa: E402
from shardplan.core.library_call import library_call  # noqa: E402
from shardplan.errors import BackendError  # noqa: E402
from shardplan.execution.async_executor import finish  # noqa: E402
from shardplan.execution.record import NativeCall  # noqa: E402
from shardplan.execution.torch import native  # noqa: E402
from shardplan.execution.torch.dtypes import fold, to_numpy, to_torch  # noqa: E402
from shardplan.execution.torch.libraries import native_on  # noqa: E402

PROGRAMS = [
    "mesh a=2, b=2\ninput %0: i32[8@(a,b), 3]\n%1 = all_gather(%0; dim=0, axes=(b), chunks=2)\noutput %1",
    "mesh a=2, b=2\ninput %0: i64[4, 8@b]\ninput %1: i16[2, 4@b]\n%2, %3 = all_gather(%0, %1; dim=1, axes=(b))\n"
    "output %2, %3",
    "mesh a=2, b=2\ninput %0: i16[8@(b,a), 4]\n%1 = all_to_all(%0; src_dim=0, dst_dim=1, axes=(b,a), order=(a,b))\n"
    "output %1",
    "mesh a=4\ninput %0: i32[8, 5]{+a}\n%1 = reduce_scatter(%0; dim=0, axes=(a))\noutput %1",
    "mesh a=4\ninput %0: i32[3, 8]{+a}\n%1 = reduce_scatter(%0; dim=1, axes=(a), chunks=2)\noutput %1",
    "mesh a=2, b=2\ninput %0: i32[4@b]{+a}\ninput %1: i32[6]{+a}\n%2, %3 = all_reduce(%0, %1; axes=(a))\noutput %2, %3",
    "mesh a=2, b=2\ninput %0: i32[8@a]{band:b}\n%1 = all_gather(%0; dim=0, axes=(a))\noutput %1",
    "mesh a=4 devices=[2,0,3,1]\ninput %0: i32[4]{root:a}\n%1 = broadcast(%0; axes=(a))\noutput %1",
    # Padded: behind the result, inside it, along a minor dim, in chunks, of several arrays, with empty parts.
    "mesh a=4\ninput %0: i32[63@a, 5]\n%1 = all_gather(%0; dim=0, axes=(a), algorithm=padded)\noutput %1",
    "mesh a=4\ninput %0: i32[5@a]\n%1 = all_gather(%0; dim=0, axes=(a), algorithm=padded)\noutput %1",
    "mesh a=2, b=2\ninput %0: i32[9@(a,b), 3]\n%1 = all_gather(%0; dim=0, axes=(a,b), algorithm=padded)\noutput %1",
    "mesh a=2, b=2\ninput %0: i32[3, 7@(a,b)]\n"
    "%1 = all_gather(%0; dim=1, axes=(a,b), chunks=2, algorithm=padded)\noutput %1",
    "mesh a=2, b=2\ninput %0: i32[7@a, 5@b]\n%1 = all_gather(%0; dim=(0,1), axes=(a,b), algorithm=padded)\noutput %1",
    "mesh a=4\ninput %0: i16[3, 9@a]\ninput %1: i32[2, 5@a]\ninput %2: i16[4, 6@a]\n"
    "%3, %4, %5 = all_gather(%0, %1, %2; dim=1, axes=(a), algorithm=padded)\noutput %3, %4, %5",
    "mesh a=4\ninput %0: i32[13, 5]{+a}\n%1 = reduce_scatter(%0; dim=0, axes=(a), algorithm=padded)\noutput %1",
    "mesh a=4\ninput %0: i32[3, 9]{+a}\n%1 = reduce_scatter(%0; dim=1, axes=(a), chunks=2, algorithm=padded)\n"
    "output %1",
    "mesh a=2, b=2\ninput %0: i16[7@(b,a), 5]\n"
    "%1 = all_to_all(%0; src_dim=0, dst_dim=1, axes=(b,a), order=(a,b), algorithm=padded)\noutput %1",
]


@dataclass
class Meeting:
    """Where the threads of a group meet, call after call."""

    size: int
    given: dict[int, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.barrier = threading.Barrier(self.size, timeout=20)


@dataclass
class ThreadWire:
    """A wire whose groups are tuples of ranks."""

    rank: int
    meetings: dict[tuple[int, ...], Meeting]
    device: Any = field(default_factory=lambda: torch.device("cpu"))
    received: int = 0
    sent: int = 0
    calls: list[Any] = field(default_factory=list)

    def empty(self, elements: int, dtype: Any) -> Any:
        return torch.full((elements,), 77, dtype=torch.uint8).repeat(dtype.itemsize).view(dtype)

    def group_of(self, ranks: tuple[int, ...]) -> Any:
        return self, ranks

    def wait_call(self, ranks: tuple[int, ...], work: Any) -> None:
        work()


def called(kind: str) -> Any:
    """What a library does, by the kind of collective: all that the members give, in their order."""

    def call(y: Any, x: Any, reduction: Any, group: Any) -> Any:
        wire, ranks = group

        def meet() -> None:
            meeting, me, q = wire.meetings[ranks], ranks.index(wire.rank), len(ranks)
            meeting.given[wire.rank] = (y if kind in ("all_reduce", "broadcast") else x).clone()
            meeting.barrier.wait()
            parts = [meeting.given[r] for r in ranks]
            assert len({len(part) for part in parts}) == 1
            if kind == "all_gather":
                y.copy_(torch.cat(parts))
            elif kind == "all_to_all":
                y.copy_(torch.cat([part.chunk(q)[me] for part in parts]))
            elif kind == "broadcast":
                y.copy_(parts[0])
            else:
                total = parts[0].clone()
                for part in parts[1:]:
                    fold(total, part, "sum")
                y.copy_(total.chunk(q)[me] if kind == "reduce_scatter" else total)
            meeting.barrier.wait()

        return meet

    return call


@pytest.mark.parametrize("text", PROGRAMS)
def test_what_ranks_pack_and_unpack_is_what_the_library_moves(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    program = sp.Program.parse("program\n" + text)
    (step,) = program.steps
    operands, results = program.step_types(step)
    monkeypatch.setattr(native, "NATIVE", {kind: called(kind) for kind in native.NATIVE})
    arrays = []
    for k, t in enumerate(operands):
        whole = np.random.default_rng(k).integers(0, 50, t.shape).astype(numpy_dtype(t.dtype))
        shards = sp.distribute(whole, t)
        arrays.append(
            [(x + d).astype(x.dtype) for d, x in enumerate(shards)] if t.layout.reduction == "sum" else shards
        )
    want = sp.run(program, arrays[0] if len(arrays) == 1 else arrays)
    ids, meetings, calls = operands[0].mesh.devices, {}, {}
    for group in operands[0].mesh.group_places(step.op.members(operands[0])):
        meetings[tuple(ids[p] for p in group)] = Meeting(len(group))

    def rank(place: int) -> list[torch.Tensor]:
        bound = native.bind_native(step.op, operands, results, ids[place])
        assert bound is not None
        wire: Any = ThreadWire(ids[place], meetings)
        made = finish(bound([to_torch(x[place].copy()) for x in arrays], wire))
        calls[ids[place]] = wire.calls
        return made

    found = in_threads(range(len(ids)), rank, 30)
    for k, shards in enumerate([want] if len(results) == 1 else want):
        for place, x in enumerate(shards):
            assert np.array_equal(to_numpy(found[place][k]), x), (place, k)
    assert calls == called_by(program)


def called_by(program: sp.Program) -> dict[int, list[NativeCall]]:
    """What the types alone say that devices call, by id."""
    out: dict[int, list[NativeCall]] = {d: [] for d in program.devices}
    for step in program.steps:
        operands, results = program.step_types(step)
        call = library_call(step.op, operands)
        assert call is not None
        t = operands[0]
        for group in t.mesh.group_places(step.op.members(t)).tolist():
            ranks = tuple(t.mesh.devices[p] for p in group)
            sizes = [n for n, _ in call.sizes(step.op.chunks, operands, results, group)]
            for d in ranks:
                out[d] += [NativeCall(call.kind, ranks, n) for n in sizes]
    return out


@pytest.mark.parametrize("text", [
    "mesh a=4\ninput %0: i32[7@a]\n%1 = all_gather(%0; dim=0, axes=(a))\noutput %1",
    "mesh a=4\ninput %0: u16[8]{+a}\n%1 = all_reduce(%0; axes=(a))\noutput %1",
    "mesh a=4\ninput %0: i32[8@a]\n%1 = permute(%0; layout=[@(a.1,a.0)])\noutput %1",
])  # fmt: skip
def test_what_no_collective_fits_is_left_to_messages(text: str) -> None:
    program = sp.Program.parse("program\n" + text)
    (step,) = program.steps
    assert native.bind_native(step.op, *program.step_types(step), device=0) is None


@pytest.mark.parametrize(
    ("said", "gloo", "nccl"),
    [(None, False, True), ("", False, False), ("gloo", True, False), ("nccl,gloo", True, True)],
)
def test_the_switch(said: str | None, gloo: bool, nccl: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SHARDPLAN_NATIVE", raising=False)
    if said is not None:
        monkeypatch.setenv("SHARDPLAN_NATIVE", said)
    assert (native_on("gloo"), native_on("nccl")) == (gloo, nccl)


def test_the_switch_names_what_it_knows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHARDPLAN_NATIVE", "mpi")
    with pytest.raises(BackendError, match="SHARDPLAN_NATIVE names 'mpi'; legal are gloo, nccl, or nothing"):
        native_on("gloo")

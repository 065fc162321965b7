"""The symmetric heap on real processes: layout, notes, barriers, and how it fails."""

import os
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from tests.fused.forked import DIED, run, segments

import shardplan as sp
from rank_threads import Hub
from shardplan.fused.heap.header import NOTE, has_reached, wrap_int32
from shardplan.fused.heap.peers import Peer
from shardplan.fused.heap.segments import PREFIX, folder, sweep
from shardplan.fused.heap.symmetric import SymmetricHeap

CASES = ("whole:2", "whole:4", "wraps:3", "differ:3", "other_size:2", "full:2", "huge:2", "late:3", "failing:3",
         "killed:2", "killed:3", "again:2")  # fmt: skip


@pytest.fixture(scope="module")
def seen() -> dict[str, Any]:
    found = run("heap_child", *CASES)
    jobs = {case.partition(":")[0] for case in CASES} | {"size"}  # another run's heaps may be about
    assert [name for name in segments() if name.split("-")[1:3] in [[str(os.getuid()), job] for job in jobs]] == []
    return dict(zip(CASES, found, strict=True))


def test_puts_notes_and_barriers(seen: dict[str, Any]) -> None:
    assert seen["whole:2"] == [[]] * 2, "a segment had a name while it was used"
    assert seen["whole:4"] == [[]] * 4
    assert seen["wraps:3"] == [wrap_int32(2**31 + 3)] * 3


def test_ranks_that_differ_are_named(seen: dict[str, Any]) -> None:
    first, second, third = seen["differ:3"]
    assert first == third.replace("rank 2", "rank 0")
    assert first == "HeapMismatch: alloc: rank 1 asks for x f32[5], rank 0 for x f32[4]"
    assert second == "HeapMismatch: alloc: rank 0 asks for x f32[4], rank 1 for x f32[5]"
    assert seen["other_size:2"][0] == (
        "HeapMismatch: symmetric heap: rank 1 asks for shm 1048577 size, this rank for shm 1048576 size"
    )


def test_memory_has_an_end(seen: dict[str, Any]) -> None:
    for said in seen["full:2"]:
        assert said.startswith("BackendError: alloc x f32[1048576]: 4194304 bytes of symmetric heap full, of which ")
    here, there = seen["huge:2"]
    assert here.startswith("HeapMismatch") or here == "BackendError: symmetric heap huge: rank 1 has no memory for it"
    assert there.startswith("BackendError: symmetric heap huge: 70368744")


def test_a_late_rank_ends_the_wait(seen: dict[str, Any]) -> None:
    (first, soon), (second, with_it), third = seen["late:3"]
    said = "symmetric heap late: rank 0 waited 0.3 s for rank 2 at a barrier (want 1, seen 0)"
    assert (first, soon) == (f"FusedTimeout: {said}", True)
    assert (second, with_it) == (f"PeerLost: symmetric heap late: rank 1 ended: {said}", True)
    assert third == f"PeerLost: symmetric heap late: rank 2 ended: {said}"


def test_a_failure_is_told(seen: dict[str, Any]) -> None:
    assert seen["failing:3"][0] == "left"
    for rank, (said, soon) in enumerate(seen["failing:3"][1:], 1):
        assert said == f"PeerLost: symmetric heap failing: rank {rank} ended: rank 0 failed: ValueError: no luck"
        assert soon


def test_a_dead_peer_is_named(seen: dict[str, Any]) -> None:
    for case in ("killed:2", "killed:3"):
        said, soon = seen[case][0]
        assert said.endswith("symmetric heap killed: rank 1 (pid PID) died")
        assert soon
        assert seen[case][1] == DIED


def test_reset(seen: dict[str, Any]) -> None:
    for rank, (first, values) in enumerate(seen["again:2"]):
        assert first == f"PeerLost: symmetric heap again: rank {rank} ended: rank 0 gave up"
        assert values == [0, 0, 0, 0]


def alone(name: str) -> SymmetricHeap:
    return SymmetricHeap.create(1 << 16, "virtual", lambda mine: [mine], name)


def test_the_longest_note_is_carried_and_no_longer_one() -> None:
    with alone("notes") as heap:
        for size in (0, 1, NOTE - 5, NOTE - 4):
            assert heap.gather(b"x" * size) == [b"x" * size]
        with pytest.raises(sp.ShardplanError) as error:
            heap.gather(b"x" * (NOTE - 3))
        assert str(error.value) == f"symmetric heap notes: a note of {NOTE - 3} bytes; legal are {NOTE - 4}"


def test_what_failed_first_is_what_is_told() -> None:
    with alone("first") as heap:
        for text in ("what failed first", "what came of it"):
            heap.header.fail(text)
        assert heap.header.failure() == "what failed first"


def test_a_tensor_is_known_by_its_begin_until_a_reset() -> None:
    with alone("held") as heap:
        first, second = (heap.alloc((2, 3), "f32", name) for name in ("first", "second"))
        assert heap.holding(first.local) is first and heap.holding(second.local.view(-1)) is second
        for other in (first.local.t(), first.local[:, :1], second.local[1:], first.local.clone()):
            assert heap.holding(other) is None
        held = first.local
        heap.reset()
        assert heap.holding(held) is None


def test_a_heap_can_be_filled_to_its_last_byte() -> None:
    with alone("last") as heap:
        with pytest.raises(sp.BackendError, match="bytes of symmetric heap last, of which"):
            heap.alloc((heap.nbytes - heap.used + 1,), "u8", "too much")
    with alone("last") as heap:
        heap.alloc((heap.nbytes - heap.used,), "u8", "the rest")
        assert heap.used == heap.nbytes


def test_segments_of_the_dead_are_swept() -> None:
    done = subprocess.run([sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True, text=True)
    me = Peer.me()
    stale = folder() / f"{PREFIX}-{os.getuid()}-job-{int(done.stdout)}-1-abc"
    other = folder() / f"{PREFIX}-{os.getuid()}-job-{me.pid}-{me.started + 1}-abc"
    alive = folder() / f"{PREFIX}-{os.getuid()}-job-{me.pid}-{me.started}-abc"
    try:
        for path in (stale, other, alive):
            path.write_bytes(b"")
        assert {*sweep()} >= {stale.name, other.name}
        assert alive.exists()
    finally:
        for path in (stale, other, alive):
            path.unlink(missing_ok=True)


def on_heaps(backends: list[str], work: Callable[[int, SymmetricHeap], None]) -> None:
    """Give each of some ranks, which are threads, a heap of its backend, and raise what one of them raised."""
    hub = Hub(len(backends))

    def run(rank: int) -> None:
        with SymmetricHeap.create(1 << 16, backends[rank], partial(hub.exchange, rank), "threads") as heap:
            work(rank, heap)

    hub.in_threads(run, 30)


def test_virtual_ranks_are_threads() -> None:
    found: list[Any] = [None] * 3

    def work(rank: int, heap: SymmetricHeap) -> None:
        flags = heap.flags(3, "f")
        for to in range(3):
            flags[to][rank, 0] = 10 + rank
        heap.barrier(10.0)
        found[rank] = flags[rank][:, 0].tolist()
        heap.barrier(10.0)

    on_heaps(["virtual"] * 3, work)
    assert found == [[10, 11, 12]] * 3


@pytest.mark.parametrize(
    "part",
    [
        (slice(0, 3), slice(1, 3), slice(1, 4)),
        (slice(0, 3, 2), slice(0, 4, 2), slice(0, 5, 2)),
        (slice(1, 3), slice(0, 4), slice(2, 4)),
        (slice(0, 3), slice(2, 3), slice(0, 5)),
    ],
)
def test_a_part_of_three_dims_goes_between_nodes(part: tuple[slice, ...]) -> None:
    """Each of two nodes stores a part of an array in the other's memory: it lies there, and nothing else does."""
    found: list[Any] = [None] * 2
    numbers = torch.arange(1.0, 61.0).reshape(3, 4, 5)

    def work(rank: int, heap: SymmetricHeap) -> None:
        x = heap.alloc((3, 4, 5), "f32", "x")
        x.local.zero_()
        heap.barrier(10.0)
        view = x.peer(1 - rank)[part]
        view.copy_((numbers * (rank + 1))[part])
        heap.push(1 - rank, view)
        heap.barrier(10.0)
        found[rank] = x.local.clone()
        heap.barrier(10.0)

    on_heaps(["net:127.0.0.1@0", "net:127.0.0.1@1"], work)
    for rank in range(2):
        wanted = torch.zeros(3, 4, 5)
        wanted[part] = (numbers * (2 - rank))[part]
        assert torch.equal(found[rank], wanted)


def test_after_a_reset_a_mirror_holds_nothing() -> None:
    """What a rank stored in its mirror of another node's memory is as gone as the memory itself."""
    found: list[Any] = [None] * 2

    def work(rank: int, heap: SymmetricHeap) -> None:
        for value in (7.0, 0.0):
            x = heap.alloc((3, 4), "f32", "x")
            before = x.peer(1 - rank).clone(), x.local.clone()
            x.peer(1 - rank).fill_(value)
            heap.push(1 - rank, x.peer(1 - rank))
            heap.barrier(10.0)
            heap.reset()
        found[rank] = before

    on_heaps(["net:127.0.0.1@0", "net:127.0.0.1@1"], work)
    for mirror, own in found:
        assert torch.equal(mirror, torch.zeros(3, 4)) and torch.equal(own, mirror)


@pytest.mark.parametrize(
    ("nbytes", "backend", "message"),
    [
        (
            1,
            "tcp",
            "symmetric heap x: backend 'tcp'; legal are shm, virtual, cuda_ipc, torch_symm, net, net:ADDRESS, "
            "net:ADDRESS@NODE",
        ),
        (
            1,
            "net:192.0.2.7",
            "symmetric heap x: backend 'net:192.0.2.7'; legal is net:ADDRESS of this rank: "
            "Cannot assign requested address",
        ),
        (0, "shm", "symmetric heap x: 0 bytes; legal is a positive integer"),
    ],
)
def test_what_is_asked_is_checked(nbytes: int, backend: str, message: str) -> None:
    with pytest.raises(sp.BackendError) as error:
        SymmetricHeap.create(nbytes, backend, lambda mine: [mine], "x")
    assert str(error.value) == message


def test_a_process_is_known_by_its_start() -> None:
    assert Peer.me().alive()
    assert not Peer(Peer.me().pid, Peer.me().started + 1).alive()
    assert has_reached(wrap_int32(2**31), 2**31 - 1) and not has_reached(2**31 - 1, wrap_int32(2**31))

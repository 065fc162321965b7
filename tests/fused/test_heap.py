"""The symmetric heap on real processes: layout, notes, barriers, and how it fails."""

import os
import subprocess
import sys
import threading
from typing import Any

import pytest
from tests.fused.forked import DIED, run, segments

import shardplan as sp
from shardplan.fused.heap.header import reached, wrapped
from shardplan.fused.heap.peers import Peer
from shardplan.fused.heap.segments import PREFIX, folder, sweep
from shardplan.fused.heap.symmetric import SymmetricHeap

CASES = ("whole:2", "whole:4", "wraps:3", "differ:3", "other_size:2", "full:2", "huge:2", "late:3", "failing:3",
         "killed:2", "killed:3", "again:2")  # fmt: skip


@pytest.fixture(scope="module")
def seen() -> dict[str, Any]:
    found = run("heap_child", *CASES)
    assert [name for name in segments() if f"-{os.getuid()}-" in name] == []
    return dict(zip(CASES, found, strict=True))


def test_puts_notes_and_barriers(seen: dict[str, Any]) -> None:
    assert seen["whole:2"] == [[]] * 2, "a segment had a name while it was used"
    assert seen["whole:4"] == [[]] * 4
    assert seen["wraps:3"] == [wrapped(2**31 + 3)] * 3


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


def test_virtual_ranks_are_threads() -> None:
    said: list[bytes] = [b""] * 3
    meet = threading.Barrier(3, timeout=20)
    found: list[Any] = [None] * 3

    def work(rank: int) -> None:
        def exchange(mine: bytes) -> list[bytes]:
            said[rank] = mine
            meet.wait()
            out = list(said)
            meet.wait()
            return out

        with SymmetricHeap.create(1 << 16, "virtual", exchange, "threads") as heap:
            flags = heap.flags(3, "f")
            for to in range(3):
                flags.words(to)[rank, 0] = 10 + rank
            heap.barrier(10.0)
            found[rank] = flags.words(rank)[:, 0].tolist()
            heap.barrier(10.0)

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert found == [[10, 11, 12]] * 3


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
    assert reached(wrapped(2**31), 2**31 - 1) and not reached(2**31 - 1, wrapped(2**31))

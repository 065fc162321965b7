"""PyTorch's operators by Triton's kernels, and heaps whose data are on devices, beside kernels of CPUs."""

import os
from importlib.util import find_spec
from typing import Any

import pytest
from tests.fused.forked import run, segments

from shardplan import fused
from shardplan.errors import BackendError

pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed: shardplan[triton]")


@pytest.fixture(scope="module", params=["shm", "cuda_ipc"])
def said(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    """What ranks say, two on memory of CPUs, three on that of a stand-in for a device."""
    found = run("device_child", 2 if request.param == "shm" else 3, request.param, seconds=300)
    assert [name for name in segments() if f"-{os.getuid()}-" in name] == []
    assert all(isinstance(each, dict) for each in found), found
    return found


def test_values_and_gradients_are_those_of_kernels_of_cpus(said: list[dict[str, Any]]) -> None:
    """Three epochs: uneven and empty splits, both scatters, one shot and two, bags with ranks without tables."""
    for each in said:
        assert each["wrong"] == [] and each["count"] >= 55
        assert each["parts"] == (len(said) if "broken" in each else 0)


def test_splits_of_data_need_no_more_memory(said: list[dict[str, Any]]) -> None:
    for each in said:
        assert each["used"][1:] == each["used"][:1] * 2


def test_what_kernels_cannot_do_is_refused(said: list[dict[str, Any]]) -> None:
    for each in said:
        text = f"TypingError: gemm_all_to_all: out [{2 * len(said)}, 2]; legal is a contiguous tensor that begins where"
        assert each["out"].startswith(text)
        assert each["counted"] == (
            "BackendError: gemv_all_reduce: counted with kernels of Triton; legal is a heap that kernels of CPUs serve"
        )
        assert each["placed"] == "TypingError: gemv_all_reduce: an operand on meta; legal is cpu, as the heap's"
        if "broken" in each:
            assert each["flags"] == "BackendError: symmetric heap 0: flags mine on cpu; legal is memory of CPUs"


def test_results_lie_in_the_heap_until_the_next_call(said: list[dict[str, Any]]) -> None:
    assert [each["into"] for each in said] == [True] * len(said)


def test_a_mistake_of_one_rank_ends_the_others(said: list[dict[str, Any]]) -> None:
    """Their kernels, which wait, are told, too; after a reset all is well."""
    name, index = "embedding_bag_all_to_all", "index 4 of a table; legal are 0 to 3"
    for rank, each in enumerate(said):
        why = f"rank {rank} ended: {name}: rank 1 failed: TypingError: {name}: {index}"
        assert each["index"] in (
            (f"TypingError: {name}: {index}",) if rank == 1 else (f"PeerLost: symmetric heap 0: {why}", "no error")
        )
        own = f"TypingError: {name}: {index}" if rank == 1 else ""  # of its own record, where that is looked at first
        assert each["after"] in (f"PeerLost: gemv_all_reduce: {why}", own)
        assert each["told"] and each["cleared"] and each["again"]


def test_a_rank_without_memory_leaves_none_waiting(said: list[dict[str, Any]]) -> None:
    for rank, each in enumerate(said):
        if "broken" in each:
            text = "cuda_ipc: no memory there" if rank == 1 else "rank 1 has no cuda_ipc"
            assert each["broken"] == f"BackendError: symmetric heap 0: {text}"
            none = "cuda_ipc: torch sees no GPU; legal without one are shm, virtual and net"
            assert each["no GPU"] == f"BackendError: symmetric heap 0: {none}"


@pytest.mark.parametrize(
    ("backend", "kernels", "legal"),
    [("shm", "gpu", "auto, cpu, triton"), ("cuda_ipc", "cpu", "auto, triton"), ("net", "triton", "auto, cpu")],
)
def test_kernels_that_do_not_fit_the_memory(backend: str, kernels: str, legal: str) -> None:
    with pytest.raises(BackendError) as refused:
        fused.bind_group(object(), backend=backend, kernels=kernels)
    assert str(refused.value) == f"bind_group: kernels '{kernels}' on backend '{backend}'; legal are {legal}"

"""The three operators on real processes, beside core's reference and torch's gradients; failures; kernels."""

import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.fused.forked import DIED, run, segments
from torch.utils._python_dispatch import TorchDispatchMode

from shardplan.fused.kernels import native as natives
from shardplan.fused.kernels.activation import ACTIVATIONS, activation_gradient, apply_activation
from shardplan.fused.kernels.bags import TILE, BagCall, BagKernel
from shardplan.fused.kernels.vectors import rows_times
from shardplan.fused.operators.gemv import in_order

FAULTS = ("silent:3", "death:3", "mismatch:2", "index:3", "preset:2")
NAME = "gemm_all_to_all"


@pytest.fixture(scope="module", params=[(), ("net",)])
def failed(request: pytest.FixtureRequest) -> dict[str, Any]:
    found = run("operator_child", *request.param, *FAULTS)
    assert [name for name in segments() if f"-{os.getuid()}-" in name] == []
    return dict(zip(FAULTS, found, strict=True))


@pytest.mark.parametrize(
    "arguments",
    [
        ("values:2", "values:3", "values:4"),
        ("pure", "values:2"),
        ("net", "values:2", "values:3"),
        ("nodes", "values:4"),
        ("net", "pure", "values:2"),
    ],
)
def test_values_and_gradients(arguments: tuple[str, ...]) -> None:
    for ranks in run("operator_child", *arguments):
        assert [each["wrong"] for each in ranks] == [[]] * len(ranks)
        assert min(each["count"] for each in ranks) > 200


def test_a_signal_left_out_is_named(failed: dict[str, Any]) -> None:
    first, second, third = failed["silent:3"]
    said = f"{NAME}: rank 1 waited 1.0 s for tile 3 of rank 0 (epoch 3: want 12, seen 11)"
    assert second[:2] == [f"FusedTimeout: {said}", True]
    assert second[2] == f"FusedTimeout: {NAME}: failed before: {said}; legal is a reset of the heap on all ranks"
    assert first[0] == third[0] == "no error", "a rank whose signals all came knows nothing yet"
    for rank, each in ((0, first), (2, third)):
        assert each[2] == f"PeerLost: {NAME}: rank {rank} ended: {said}"
    assert all(each[3:] == [True, True] for each in failed["silent:3"]), "a reset makes it good again"


def test_a_dead_peer_is_named(failed: dict[str, Any]) -> None:
    first, second, third = failed["death:3"]
    assert second == DIED
    for said, soon in (first, third):
        assert said.endswith(f"{NAME}: rank 1 (pid PID) died")
        assert soon


def test_programs_that_differ_are_named(failed: dict[str, Any]) -> None:
    (first, shapes), (second, others) = failed["mismatch:2"]
    said = "rank 0 calls gemm_all_to_all, rank 1 calls gemv_all_reduce; legal is the same call on all"
    assert first == f"HeapMismatch: gemm_all_to_all: {said}"
    assert second == f"HeapMismatch: gemv_all_reduce: {said}"
    assert shapes == others == (
        "HeapMismatch: gemv_all_reduce: rank 0 calls gemv_all_reduce with M 8, rank 1 calls gemv_all_reduce with M 9; "
        "legal is the same call on all"
    )  # fmt: skip


def test_a_wrong_index_is_no_wild_read(failed: dict[str, Any]) -> None:
    said = "embedding_bag_all_to_all: index 3 of table 0; legal are 0 to 2"
    assert failed["index:3"][0] == [f"TypingError: {said}", True]
    for rank, each in enumerate(failed["index:3"][1:], 1):
        assert each == [f"PeerLost: embedding_bag_all_to_all: rank {rank} ended: {said}", True]


def test_counters_wrap(failed: dict[str, Any]) -> None:
    assert failed["preset:2"] == [[[True] * 6, True]] * 2


needs_compiler = pytest.mark.skipif(natives.compiler() is None, reason="no C++ compiler")


@needs_compiler
@given(st.data())
@settings(max_examples=40)
def test_bags_in_cpp_are_those_in_torch(data: st.DataObject) -> None:
    dim, batch = data.draw(st.integers(1, 150)), data.draw(st.integers(1, 6))
    dtype = data.draw(st.sampled_from((torch.float32, torch.bfloat16, torch.float16)))
    rng = np.random.default_rng(data.draw(st.integers(0, 1000)))
    tables = [torch.from_numpy(rng.normal(size=(5, dim))).to(dtype) for _ in range(data.draw(st.integers(1, 3)))]
    if data.draw(st.booleans()):
        tables[0][1, 0] = data.draw(st.sampled_from((torch.nan, torch.inf, 1e-7)))
    lengths = rng.integers(0, 4, len(tables) * batch)
    ids = torch.from_numpy(rng.integers(0, 5, lengths.sum()))
    offsets = torch.from_numpy(np.concatenate([[0], np.cumsum(lengths)]))
    weights = torch.from_numpy(rng.normal(size=len(ids))).float() if data.draw(st.booleans()) else None
    call = BagCall(tables, ids, offsets, weights, data.draw(st.sampled_from(("sum", "mean"))), batch, "test")
    assert BagKernel.fits(call)
    wanted, found = (torch.full((batch, len(tables), dim), 7.0).to(dtype) for _ in range(2))
    call.store(0, batch, wanted)
    half = batch // 2
    parts = [(0, half, found.data_ptr(), 0, 0, 0), (half, batch, found[half:].data_ptr(), 0, 0, 0)]
    BagKernel(call, len(tables) * dim, dim).store(np.array(parts, TILE), 0)
    assert torch.allclose(found.float(), wanted.float(), rtol=2 * torch.finfo(dtype).eps, atol=1e-6, equal_nan=True)


@pytest.mark.parametrize("mode", ["sum", "mean"])
@pytest.mark.parametrize("weighted", [False, True])
def test_gradients_of_bags_are_those_of_autograd(mode: str, weighted: bool) -> None:
    """Bags of 0 to 3 rows of two tables, computed row by row."""
    torch.manual_seed(0)
    lengths, batch = [2, 0, 3, 1, 3, 2], 3
    offsets = torch.tensor([0, *np.cumsum(lengths)])
    ids = torch.randint(5, (sum(lengths),))
    tables = [torch.randn(5, 4, requires_grad=True) for _ in range(2)]
    weights = torch.randn(len(ids), requires_grad=True) if weighted else None
    g = torch.randn(batch, 2, 4)
    total = torch.zeros(())
    for k, length in enumerate(lengths):
        for at in range(int(offsets[k]), int(offsets[k + 1])):
            row = tables[k // batch][ids[at]]
            row = row if weights is None else row * weights[at]
            total = total + (row * g[k % batch, k // batch]).sum() / (length if mode == "mean" else 1)
    wanted = torch.autograd.grad(total, [*tables, *([] if weights is None else [weights])])
    detached = None if weights is None else weights.detach()
    call = BagCall([t.detach() for t in tables], ids, offsets, detached, mode, batch, "test")
    found, each = call.gradients(g, weighted)
    assert (each is None) == (weights is None)
    for x, y in zip([*found, *([] if each is None else [each])], wanted, strict=True):
        torch.testing.assert_close(x, y)


class Largest(TorchDispatchMode):
    """The most numbers of a result of any operation."""

    numbers = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        if isinstance(found, torch.Tensor):
            self.numbers = max(self.numbers, found.numel())
        return found


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_gradients_of_bags_copy_no_row_for_an_id(dtype: torch.dtype) -> None:
    """Of 1,000 ids of two tables of 7 rows: nothing is larger than two numbers an id."""
    ids, offsets = torch.arange(1000).remainder(7).to(dtype), torch.arange(0, 1001, 125).to(dtype)
    tables, g = [torch.zeros(7, 32) for _ in range(2)], torch.randn(4, 2, 32)
    call = BagCall(tables, ids, offsets, torch.full((1000,), 2.0), "sum", 4, "test", as_given=True)
    assert call.indices.dtype == call.offsets.dtype == dtype
    with Largest() as seen:
        found, _ = call.gradients(g, False)
    assert seen.numbers <= 2 * 1000
    for t, each in enumerate(found):
        wanted = torch.zeros(7, 32).index_add_(
            0, ids[500 * t : 500 * t + 500].long(), 2 * g[:, t].repeat_interleave(125, 0)
        )
        torch.testing.assert_close(each, wanted, rtol=1e-4, atol=1e-3)
    call.indices = torch.where(ids == 6, 7, torch.where(ids == 0, -1, ids))  # no rows: what kernels of GPUs leave out
    for t, each in enumerate(call.gradients(g, False)[0]):
        assert not each[[0, 6]].any()
        torch.testing.assert_close(each[1:6], found[t][1:6], rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_gradients_of_activations_are_those_of_autograd(name: str) -> None:
    z = torch.tensor([-2.0, -0.5, -0.0, 0.0, 0.5, 3.0], requires_grad=True)
    g = torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0, 6.0])
    (wanted,) = torch.autograd.grad(apply_activation(z, name), z, g)
    torch.testing.assert_close(activation_gradient(g, z.detach(), name), wanted)


@needs_compiler
@given(
    st.integers(0, 9),
    st.integers(0, 200),
    st.integers(1, 16),
    st.sampled_from((torch.float32, torch.bfloat16, torch.float16)),
)
@settings(max_examples=40)
def test_thin_products_in_cpp_are_those_in_torch(m: int, k: int, c: int, dtype: torch.dtype) -> None:
    a, x = torch.randn(m, k).to(dtype), torch.randn(c, k)
    found = torch.full((m, c), 7.0)
    rows_times(a, x, found)
    assert torch.allclose(found, a.float() @ x.t(), atol=1e-4)
    wide = torch.full((m, c), 7.0)
    rows_times(torch.randn(m, 2 * k).to(dtype)[:, :k].copy_(a), x, wide)
    assert torch.equal(wide, found), "strides of rows do not matter"
    turned = torch.full((m, c), 7.0)
    rows_times(a.t().contiguous().t(), x, turned)
    assert torch.allclose(turned, found, atol=1e-4), "nor does it matter that elements of a row lie apart"


@needs_compiler
def test_kernels_are_built_once(tmp_path: Path) -> None:
    made_by = natives.compiler()
    assert made_by is not None
    path = natives.build(made_by, tmp_path)
    stamp = path.stat().st_mtime_ns
    assert natives.build(made_by, tmp_path) == path and path.stat().st_mtime_ns == stamp
    assert [p.name for p in tmp_path.iterdir()] == [path.name], "no draft is left"
    assert natives.TileKernels(path)


def test_no_compiler_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    natives.native.cache_clear()
    try:
        assert natives.native() is None
        assert natives.why_not() == ""
        monkeypatch.setattr("platform.machine", lambda: "riscv64")
        assert natives.why_not() == (
            "no C++ kernels, which need a compiler and a folder that is this user's alone, and without them plain "
            "stores signal, which riscv64 does not keep in order"
        )
    finally:
        natives.native.cache_clear()


def test_lanes_are_added_in_order() -> None:
    lanes = torch.tensor([[1.0], [1e8], [-1e8]])
    assert in_order(lanes).item() == 0.0, "from the last one on it is 1"

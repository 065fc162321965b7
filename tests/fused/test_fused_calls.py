"""Fused ops of programs on ranks that are threads, beside the reference: all orders of dims, groups and algorithms."""

import importlib.util
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import numpy as np
import pytest

if importlib.util.find_spec("torch") is None:
    pytest.skip("torch is not installed", allow_module_level=True)

import torch

from core.test_fused import BAGS, EXPERTS, GATHER, GEMV, SCATTER, ULYSSES, all_fused, shards
from rank_threads import Hub
from shardplan.core.ops.fused import Fused, as_fused
from shardplan.core.program import Program
from shardplan.core.reference import run_reference
from shardplan.execution.lower import members_of
from shardplan.fused.calls.moved_tally import counted
from shardplan.fused.deciding.kernels import fused_call
from shardplan.fused.heap.symmetric import SymmetricHeap

SEQUENCE = """program
  mesh x=2
  input %a: f32[3, 8@x, 4]
  input %b: f32[4, 6, 2]
  %z = einsum(%a, %b; spec="bsk,khd->hbsd"): f32[6, 3, 8@x, 2]
  %y = all_to_all(%z; src_dim=2, dst_dim=0, axes=(x)): f32[6@x, 3, 8, 2]
  output %y"""
CASES = {
    "experts": EXPERTS,
    "two experts a rank": EXPERTS.replace("2@x", "4@x").replace("f32[2, 4@x", "f32[4, 4@x"),
    "columns": ULYSSES,
    "heads first": SEQUENCE,
    "gathered columns": SEQUENCE.replace("src_dim=2, dst_dim=0", "src_dim=2, dst_dim=1").replace("3,", "4,").replace(
        "f32[6@x, 4, 8, 2]", "f32[6, 4@x, 8, 2]"
    ),
    "gemv": GEMV,
    "bags": BAGS,
    "gathered rows": GATHER,
    "gathered rows of two experts": """program
  mesh x=2
  input %a: f32[2, 3, 8@x, 4]
  input %b: f32[2, 5, 4]
  %g = all_gather(%a; dim=2, axes=(x)): f32[2, 3, 8, 4]
  %y = einsum(%b, %g; spec="enk,emsk->smne"): f32[8, 3, 5, 2]
  output %y""",
    "cut sums": SCATTER,
    "cut sums of two experts": """program
  mesh x=2
  input %a: f32[2, 6@x, 8]
  input %b: f32[2, 4, 6@x, 5]
  %z = einsum(%a, %b; spec="eks,enkm->snme"): f32[8, 4, 5, 2]{+x}
  %y = reduce_scatter(%z; dim=1, axes=(x)): f32[8, 4@x, 5, 2]
  output %y""",
}  # fmt: skip


def everywhere(ranks: int, work: Callable[[int, Callable[[bytes], list[bytes]]], None]) -> None:
    """Run ranks as threads, which exchange bytes."""
    hub = Hub(ranks)
    hub.in_threads(lambda rank: work(rank, partial(hub.exchange, rank)))


@pytest.mark.parametrize("name", [*CASES, "gemv in one shot"])
def test_fused_calls_mean_their_bodies(name: str) -> None:
    program = all_fused(Program.parse(CASES[name.removesuffix(" in one shot")]))
    step = program.steps[-1]
    op = as_fused(step.op)
    assert isinstance(op, Fused)
    op = replace(op, shots=1) if name.endswith("shot") else op  # type: ignore[call-arg]
    given = [[np.asarray(x) for x in each] for each in shards(op.body)]
    (want,) = run_reference(op.body, given)
    operands = tuple(t for _, t in op.body.inputs)
    group = members_of(op, operands[0], 0)
    call = fused_call(op, len(group))
    got: dict[int, np.ndarray] = {}
    came: dict[int, int] = {}

    def work(rank: int, exchange: Callable[[bytes], list[bytes]]) -> None:
        with SymmetricHeap.create(call.nbytes + (1 << 16), "virtual", exchange, name) as heap:
            mine = [torch.from_numpy(np.ascontiguousarray(x[group[rank]])) for x in given]
            for _ in range(2):
                got[rank] = call.run(heap, 20.0, mine).numpy()
            with counted(heap) as tally:
                call.run(heap, 20.0, mine)
            came[rank] = sum(tile.changed for tile in tally.tiles if tile.source != heap.rank)

    everywhere(len(group), work)
    for rank, place in enumerate(group):
        np.testing.assert_allclose(got[rank], want[place], atol=1e-5)
        assert came[rank] == call.received[rank], (rank, came[rank], call.received)

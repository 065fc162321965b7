"""The loss that a strategy asks for: whole, in one pass, or in parts; values, programs, and what is held meanwhile."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from tests.strategy.jobs import model, wrong

import shardplan as sp
from shardplan import Model, Strategy, partition
from shardplan.core.nested import as_nested
from shardplan.core.program import Program
from shardplan.core.walk import programs
from shardplan.errors import LayoutError
from shardplan.simulation.closed.configurations import Configurations
from shardplan.simulation.closed.form import ClosedForm
from shardplan.simulation.closed.parameters import Parameters
from shardplan.simulation.steps import simulate_step
from shardplan.strategy.partition.memory import certify, holdings
from shardplan.strategy.runtimes import runtime_of

FUSED: dict[str, Any] = {"loss": "fused"}
PARTS: dict[str, Any] = {"loss": "chunked", "loss_chunks": 4}
WORDY = Model.load("llama", layers=2, hidden=256, heads=8, kv_heads=8, ffn=512, seq=1024, vocab=32768, precision="bf16")
LOGITS = 1024 * 32768  # of a sequence


@pytest.mark.parametrize(
    ("said", "loss"),
    [
        ({"tensor": 2}, FUSED),
        ({"tensor": 2, "sequence_parallel": True, "context": 2, "context_kind": "gather"}, PARTS),
        ({"data": 2, "fsdp": True, "tensor": 2, "global_batch": 4}, PARTS),
        ({"pipeline": 2, "schedule": "zb-h1", "global_batch": 3}, PARTS),
        ({"data": 2, "global_batch": 3, "recompute": "full"}, PARTS),  # a sequence that weighs nothing
    ],
    ids=str,
)
def test_steps_equal_the_whole_models(said: dict[str, Any], loss: dict[str, Any]) -> None:
    assert wrong(model("llama"), Strategy(**said, **loss), 1) == []


def test_a_head_of_two_uses_and_classes_that_do_not_divide() -> None:
    assert wrong(model("gpt"), Strategy(tensor=2, pipeline=2, loss="chunked", loss_chunks=3), 1) == []


def test_parts_do_not_change_how_layers_lie() -> None:
    said: dict[str, Any] = {"tensor": 2, "sequence_parallel": True, "context": 2, "context_kind": "gather"}
    jobs = [partition(WORDY, Strategy(**said, **loss)) for loss in ({}, PARTS)]
    loops = [[op for s in job.programs[0, "F"].steps if (op := as_nested(s.op)) and op.times == 2] for job in jobs]
    assert len(loops[0]) == 1 and [str(op.body) for op in loops[0]] == [str(op.body) for op in loops[1]]


def _wide(program: Program) -> Iterator[str]:
    """Values of logits in f32."""
    for one in programs(program):
        yield from (n for n, t in one.types.items() if t.dtype == "f32" and t.shape[-1:] == (32768,))


def test_one_pass_keeps_no_copy_in_f32() -> None:
    for loss, copies in ({}, True), (FUSED, False), (PARTS, False):
        job = partition(WORDY, Strategy(tensor=2, **loss))
        assert any(any(_wide(p)) for p in job.programs.shared) == copies, loss


def test_of_parts_one_is_held() -> None:
    # Beside the logits 2 bytes each of gradient; whole, under a cut of classes, f32 too: copy, exponentials, gradient.
    held = [certify(partition(WORDY, Strategy(tensor=2, **loss))) for loss in ({}, FUSED, PARTS)]
    work = [(c.peak_bytes[0] - c.state_bytes[0]) / (LOGITS / 2) for c in held]
    assert work[0] > 12 and work[1] == pytest.approx(4, abs=0.6) and work[2] == pytest.approx(4 / 4, abs=0.3)


def test_the_gradient_of_the_head_is_reduced_once() -> None:
    job = partition(WORDY, Strategy(data=2, fsdp=True, global_batch=4, **PARTS))
    for kind in ("F", "B"):
        loops = [op for s in job.programs[0, kind].steps if (op := as_nested(s.op)) and op.times == 4]
        steps = [(op.body, s) for op in loops for s in op.body.steps]
        moved = [s.op.name for body, s in steps if s.op.received_bytes(*body.step_types(s)[0]).any()]
        assert len(loops) == 1 and moved == []


@pytest.mark.parametrize("loss", [FUSED, PARTS], ids=str)
@pytest.mark.parametrize("said", [{"tensor": 2}, {"pipeline": 2, "global_batch": 4},
                                  {"data": 2, "fsdp": True, "global_batch": 2}], ids=str)  # fmt: skip
def test_the_closed_form_and_the_runtimes_account_agree(said: dict[str, Any], loss: dict[str, Any]) -> None:
    form = ClosedForm(WORDY, sp.Topology.load("dgx-h100", nodes=1), Parameters(fragmentation=1.0, context=0.0))
    peaks: list[float] = []
    for one in ({}, loss):
        strategy = Strategy(**said, **one)
        closed = form(Configurations.of([strategy])).peak_bytes[0]
        peaks.append(max(holdings(partition(WORDY, strategy), runtime_of(strategy)).peak_bytes))
        assert 0.98 < closed / peaks[-1] < 1.05
    assert peaks[1] < 0.8 * peaks[0]


def test_parts_take_the_time_of_another_product() -> None:
    box = sp.Topology.load("dgx-h100", nodes=1)
    said = [Strategy(data=8, microbatch=2, **loss) for loss in ({}, FUSED, PARTS)]
    for times in (
        [simulate_step(WORDY, one, box, "closed").seconds for one in said],
        [sp.simulate(partition(WORDY, one, box), box).seconds for one in said],
    ):
        whole, fused, parts = times
        assert fused < whole and fused < parts


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ({"loss": "narrow"}, "loss 'narrow' is unknown; legal: whole, fused, chunked"),
        ({"loss": "chunked"}, "loss_chunks=1 with loss='chunked'; legal are 2 and more with 'chunked', else 1"),
        ({"loss_chunks": 2}, "loss_chunks=2 with loss='whole'; legal are 2 and more with 'chunked', else 1"),
        ({"loss": "chunked", "loss_chunks": 3}, "a sequence of 1024; legal are divisors of 1024"),
    ],
    ids=str,
)
def test_what_is_no_loss_is_refused(said: dict[str, Any], message: str) -> None:
    with pytest.raises(LayoutError, match=message):
        partition(WORDY, Strategy(**said))


def test_a_model_without_classes_refuses_it() -> None:
    with pytest.raises(LayoutError, match="loss='fused' of mlp: no product alone makes logits of classes"):
        partition(model("mlp"), Strategy(loss="fused"))

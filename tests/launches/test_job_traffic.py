"""Traffic of a job beside what Megatron-LM's and FSDP's papers count, and audits of jobs by the command."""

from __future__ import annotations

from typing import Any

import pytest

from shardplan import Model, Strategy, Topology, partition
from shardplan.cli.audit import audit_command
from shardplan.errors import LayoutError
from shardplan.launches.job_traffic import JobTraffic, job_traffic

HIDDEN, FFN, VOCAB, SEQ, LAYERS = 32, 48, 64, 16, 4
BOX = Topology.load("dgx-h100", nodes=1)
MODEL = Model.load("llama", layers=LAYERS, hidden=HIDDEN, heads=4, kv_heads=4, ffn=FFN, seq=SEQ, vocab=VOCAB)
LAYER = 4 * HIDDEN * HIDDEN + 3 * HIDDEN * FFN  # parameters of a layer's products


def traffic_of(**strategy: object) -> JobTraffic:
    return job_traffic(partition(MODEL, Strategy(**strategy)), BOX)  # pyright: ignore[reportArgumentType]


def total(found: JobTraffic, axis: str, *kinds: str) -> float:
    return sum(d.nbytes * d.count for d in found.demands if d.axes == (axis,) and d.op in kinds)


def test_tensor_parallelism_sums_activations_twice_a_layer_and_pass() -> None:
    """Megatron-LM: two all-reduces forward and two backward in a layer (arXiv 1909.08053), each of a microbatch."""
    micro = 4
    found = traffic_of(tensor=2, data=2, pipeline=2, global_batch=2 * micro)
    assert str(found.mesh) == "pipeline=2, data=2, tensor=2"
    (sums,) = (d for d in found.demands if d.axes == ("tensor",) and d.op == "all_reduce")
    one = SEQ * HIDDEN * 4
    layers = 4 * (LAYERS // 2) * micro
    assert sums.count >= layers and total(found, "tensor", "all_reduce") == pytest.approx(layers * one, rel=0.15)
    # A microbatch's activations go on, and their gradients back; each rank sends one of the two.
    (sent,) = (d for d in found.demands if d.op == "permute")
    assert (sent.axes, sent.count) == (("pipeline",), micro) and sent.nbytes == one


def test_gradients_are_summed_once_and_hidden_behind_one_backward_pass() -> None:
    found = traffic_of(tensor=2, data=4, global_batch=16)
    sums = [d for d in found.demands if d.axes == ("data",) and d.nbytes > 100]
    held = (LAYERS * LAYER + 2 * VOCAB * HIDDEN) / 2 * 4
    assert total(found, "data", "all_reduce") == pytest.approx(held, rel=0.03)
    assert all(d.hidden_seconds > 0 for d in sums) and not any(
        d.hidden_seconds for d in found.demands if d.axes == ("tensor",)
    )


def test_fsdp_gathers_each_layer_twice_and_scatters_its_gradients_once_a_microbatch() -> None:
    """ZeRO-3 (arXiv 1910.02054): parameters are gathered forward and backward; a layer's go as one call."""
    micro, n = 2, 8
    found = traffic_of(data=n, fsdp=True, zero=3, global_batch=micro * n)
    held = (LAYERS * LAYER + 2 * VOCAB * HIDDEN) * 4
    assert total(found, "data", "all_gather") == pytest.approx(2 * micro * held / n, rel=0.06)
    assert total(found, "data", "reduce_scatter") == pytest.approx(micro * held, rel=0.06)
    gathers = [d for d in found.demands if d.op == "all_gather"]
    assert sum(d.count for d in gathers) <= micro * 2 * (LAYERS + 3) and all(d.hidden_seconds for d in gathers)


def test_the_command_takes_a_job() -> None:
    job: dict[str, Any] = {"model": "llama3-8b,layers=4", "batch": 64}
    best = audit_command("dgx-h100", nodes=2, strategy="tp=8 zero=1", **job)
    assert best.object["answer"] == "well placed" and best.object["mesh"] == "data=2, tensor=8"
    assert best.text.splitlines()[1].startswith("traffic  llama3-8b")
    torn = audit_command("dgx-h100", nodes=2, rank_order="cyclic", strategy="tp=8 zero=1", **job)
    assert "times the best: `tensor` spans 2 nodes" in torn.object["answer"]
    text = "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --use-tp-pp-dp-mapping --lr 1"
    mapped = audit_command("dgx-h100", nodes=2, strategy=text, **job)
    assert mapped.object["matrix"] == [[1, 2], [2, 2], [1, 2]]  # the pipeline inside nodes, data across
    assert "options that say nothing of traffic: lr" in mapped.text


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"model": "gpt2"}, "a job is --model, such as llama3-70b, with --strategy, such as 'tensor=8 pipeline=4'"),
        ({"model": "gpt2", "strategy": "dp=16", "traffic": "data=1GB"},
         "a job says its own traffic; give --traffic, or --model with --strategy"),
        ({"model": "gpt2,layers=2", "strategy": "tp=2", "mesh": "data=16"},
         "--mesh data=16: the job's axes are data=8, tensor=2; legal are those, in any order"),
        ({}, "audit needs --mesh, such as data=4,tensor=8, or --model with --strategy"),
    ],
)  # fmt: skip
def test_errors(options: dict[str, str], message: str) -> None:
    with pytest.raises(LayoutError) as caught:
        audit_command("dgx-h100", nodes=2, **options)  # pyright: ignore[reportArgumentType]
    assert str(caught.value) == message

"""What a step takes: the closed form and events of stages beside ops, where each effect that both have is large."""

from dataclasses import replace
from typing import Any

import pytest

import shardplan as sp
from shardplan.simulation.jobs.job_timeline import simulate_job
from shardplan.simulation.searching.certifier import even_cuts
from shardplan.simulation.steps import derate, simulate_step

SIZES: dict[str, Any] = {"layers": 4, "hidden": 4096, "heads": 32, "seq": 2048, "vocab": 50304, "precision": "bf16"}
LLAMA = SIZES | {"kv_heads": 8, "ffn": 12288, "vocab": 128256}
EXPERTS = SIZES | {"kv_heads": 8, "ffn": 2048, "experts": 8, "experts_per_token": 2}
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any], float]] = {
    "gradients hidden": ("llama", LLAMA, {"data": 8, "global_batch": 16}, 0.03),
    "gradients as parameters are": (
        "llama",
        LLAMA,
        {"data": 8, "zero": 1, "precision": None, "global_batch": 16},
        0.01,
    ),
    "one microbatch of them": ("llama", LLAMA, {"data": 8, "zero": 1, "precision": None, "global_batch": 8}, 0.01),
    "updates dealt out": ("llama", LLAMA, {"data": 8, "zero": 1, "global_batch": 16}, 0.03),
    "halved": ("llama", LLAMA, {"data": 8, "zero": 1, "schedule": "zb-h1", "global_batch": 16}, 0.05),
    "gathers bound it": ("gpt", SIZES, {"data": 8, "tensor": 8, "zero": 3, "global_batch": 16}, 0.05),
    "beside gradients": ("gpt", SIZES, {"tensor": 8, "microbatch": 4, "global_batch": 16}, 0.05),
    "to the layer's end": ("gpt", SIZES, {"recompute": "full", "global_batch": 8}, 0.03),
    "one layer to its end": ("gpt", SIZES, {"recompute": "full", "recompute_layers": 1, "global_batch": 8}, 0.03),
    "some of two stages": (
        "llama",
        LLAMA | {"layers": 8},
        {"tensor": 8, "pipeline": 2, "recompute": "full", "recompute_layers": 2, "global_batch": 16},
        0.05,
    ),
    "a mixture to the layer's end": (
        "moe",
        EXPERTS | {"kv_heads": 32},
        {"tensor": 8, "expert": 4, "microbatch": 4, "recompute": "full", "global_batch": 8},
        0.06,
    ),
    "all state dealt out": (
        "llama",
        LLAMA,
        {"data": 8, "zero": 3, "recompute": "full", "schedule": "zb-h1", "global_batch": 16},
        0.05,
    ),
    "rows of replicas": ("llama", LLAMA, {"data": 16, "shard": 4, "fsdp": True, "global_batch": 32}, 0.05),
    "rows of replicas, zero 1": ("llama", LLAMA, {"data": 16, "shard": 4, "zero": 1, "global_batch": 32}, 0.05),
    "a ring between nodes": (
        "llama",
        LLAMA | {"seq": 8192},
        {"tensor": 4, "context": 4, "context_kind": "ring", "global_batch": 4},
        0.05,
    ),
    "experts whole over a context": (
        "moe",
        EXPERTS,
        {"data": 4, "context": 4, "context_kind": "gather", "zero": 2, "fsdp": True, "global_batch": 4},
        0.02,
    ),
    "chunks wait once": (
        "gpt",
        SIZES | {"layers": 8},
        {"data": 8, "pipeline": 4, "schedule": "interleaved", "interleave": 2, "zero": 1, "global_batch": 16},
        0.08,
    ),
    "a table of two stages, halved": (
        "gpt",
        SIZES | {"hidden": 2048, "vocab": 128256},
        {"data": 8, "tensor": 4, "pipeline": 2, "schedule": "zb-h1", "zero": 1, "microbatch": 4, "global_batch": 128},
        0.04,
    ),
    "two chunks and a long last one": (
        "llama",
        LLAMA | {"layers": 8, "vocab": 256000},
        {"tensor": 8, "pipeline": 2, "schedule": "v-half", "interleave": 2, "global_batch": 4},
        0.07,
    ),
    "gathers of ranks that wait": (
        "llama",
        LLAMA | {"layers": 16},
        {"data": 4, "pipeline": 4, "zero": 3, "global_batch": 16},
        0.03,
    ),
    "gradients behind each pass": (
        "llama",
        LLAMA | {"layers": 8, "vocab": 50304},
        {"data": 8, "pipeline": 2, "zero": 2, "fsdp": True, "schedule": "zb-h1", "global_batch": 64},
        0.04,
    ),
    "a host that is late": (
        "gpt",
        SIZES | {"hidden": 2048, "heads": 16, "seq": 1024},
        {"tensor": 4, "schedule": "looped-bfs", "global_batch": 8},
        0.025,
    ),
    "tokens kept": (
        "moe",
        EXPERTS | {"kv_heads": 32, "experts": 16},
        {"data": 4, "tensor": 4, "expert": 4, "microbatch": 2, "sequence_parallel": True, "global_batch": 16},
        0.05,
    ),
    "a table of two stages": ("gpt", SIZES, {"tensor": 2, "pipeline": 4, "global_batch": 2}, 0.05),
    "layers gathered": ("gpt", SIZES, {"data": 4, "zero": 3, "fsdp": True, "global_batch": 16}, 0.05),
    "gradients in every pass": ("llama", LLAMA, {"data": 8, "zero": 2, "fsdp": True, "global_batch": 64}, 0.05),
    "apart from products": (
        "llama",
        LLAMA,
        {"data": 8, "zero": 2, "fsdp": True, "schedule": "zb-h1", "global_batch": 32},
        0.05,
    ),
    "forward passes first": (
        "gpt",
        SIZES,
        {"data": 4, "zero": 3, "fsdp": True, "schedule": "gpipe", "global_batch": 16},
        0.05,
    ),
    "sequences gathered": ("gpt", SIZES, {"tensor": 8, "sequence_parallel": True, "global_batch": 8}, 0.12),
    "a ring": ("llama", LLAMA | {"seq": 32768}, {"context": 8, "context_kind": "ring", "global_batch": 2}, 0.05),
    "layers to their end, gathered once": (
        "gpt",
        SIZES | {"hidden": 16384, "heads": 128, "seq": 4096},
        {"data": 2, "tensor": 8, "pipeline": 2, "recompute": "full", "zero": 3, "global_batch": 4},
        0.09,
    ),
    "chunks of one microbatch reduce in turn": (
        "gpt",
        SIZES | {"layers": 12, "seq": 1024, "vocab": 256000},
        {
            "data": 8,
            "tensor": 8,
            "microbatch": 2,
            "schedule": "v-half",
            "interleave": 2,
            "recompute": "full",
            "sequence_parallel": True,
            "zero": 2,
            "fsdp": True,
            "global_batch": 16,
        },
        0.05,
    ),
    "both ends on one rank": (
        "llama",
        LLAMA | {"layers": 8, "vocab": 256000},
        {"data": 4, "pipeline": 2, "schedule": "zb-v", "interleave": 2, "global_batch": 4},
        0.05,
    ),
    "passes by turns": (
        "llama",
        LLAMA | {"layers": 8, "seq": 1024},
        {"tensor": 2, "pipeline": 4, "context": 4, "schedule": "zb-h2", "zero": 2, "fsdp": True, "global_batch": 16},
        0.05,
    ),
    "passes by turns in two chunks": (
        "gpt",
        SIZES | {"layers": 12, "seq": 4096, "vocab": 256000},
        {"data": 2, "pipeline": 2, "schedule": "zb-v", "interleave": 2, "zero": 3, "global_batch": 16},
        0.04,
    ),
    "tokens by parts": (
        "moe",
        EXPERTS | {"kv_heads": 32, "hidden": 8192, "heads": 64, "ffn": 4096},
        {"data": 4, "tensor": 8, "expert": 4, "microbatch": 4, "sequence_parallel": True, "global_batch": 64},
        0.06,
    ),
    "rounds that wait for their longest chunk": (
        "llama",
        LLAMA | {"vocab": 256000},
        {
            "context": 2,
            "pipeline": 2,
            "context_kind": "gather",
            "schedule": "looped-bfs",
            "interleave": 2,
            "zero": 3,
            "fsdp": True,
            "global_batch": 16,
        },
        0.08,
    ),
    "messages that receivers wait for": (
        "llama",
        LLAMA | {"layers": 2, "vocab": 32000},
        {"data": 8, "pipeline": 2, "global_batch": 64},
        0.01,
    ),
    "all forwards, and messages between": (
        "llama",
        LLAMA | {"layers": 2, "vocab": 32000},
        {"data": 8, "pipeline": 2, "schedule": "gpipe", "global_batch": 64},
        0.01,
    ),
    "messages within nodes and between": (
        "llama",
        LLAMA | {"vocab": 50304},
        {"data": 4, "pipeline": 4, "global_batch": 32},
        0.01,
    ),
    "whole messages within a node": (
        "llama",
        SIZES | {"kv_heads": 32, "hidden": 2048, "seq": 1024, "ffn": 5632, "layers": 2},
        {"tensor": 4, "pipeline": 2, "global_batch": 64},
        0.035,
    ),
    "a mixture of two nodes to the layer's end": (
        "moe",
        EXPERTS | {"kv_heads": 32, "seq": 8192, "vocab": 32000},
        {"data": 8, "tensor": 8, "expert": 2, "recompute": "full", "zero": 1, "global_batch": 32},
        0.08,
    ),
    "a mixture on a context": (
        "moe",
        EXPERTS | {"hidden": 8192, "heads": 64, "seq": 8192, "ffn": 4096, "experts": 16},
        {
            "data": 4,
            "tensor": 4,
            "context": 4,
            "sequence_parallel": True,
            "context_kind": "gather",
            "global_batch": 16,
        },
        0.04,
    ),
    "a mixture with a tensor axis": (
        "moe",
        EXPERTS | {"seq": 8192},
        {"data": 4, "tensor": 8, "sequence_parallel": True, "global_batch": 16},
        0.03,
    ),
    "parameters of two levels at once": (
        "llama",
        SIZES | {"kv_heads": 8, "hidden": 2048, "heads": 16, "ffn": 6144, "seq": 1024, "vocab": 32000},
        {"data": 8, "context": 4, "zero": 3, "fsdp": True, "context_kind": "gather", "global_batch": 32},
        0.02,
    ),
    "tokens gathered": ("moe", EXPERTS | {"seq": 8192}, {"context": 4, "expert": 4, "context_kind": "gather"}, 0.06),
}


@pytest.mark.parametrize("name", CASES)
def test_closed_and_events_are_near_ops(name: str) -> None:
    kind, fields, said, within = CASES[name]
    model, strategy = sp.Model.load(kind, **fields), sp.Strategy(**{"precision": "bf16", **said})
    where = sp.Topology.load("dgx-h100", node=max(1, strategy.devices // 8), gpu=min(8, strategy.devices))
    job = sp.partition(model, replace(strategy, cuts=even_cuts(model, strategy)), where)
    ops = simulate_job(job, derate(where, attention=strategy.software.attention)).seconds
    for fidelity in ("closed", "events"):
        assert simulate_step(model, strategy, where, fidelity).seconds == pytest.approx(ops, rel=within), fidelity


def test_a_rank_that_waits_has_gathered_by_then() -> None:
    """Its first layer's parameters are there when another rank's value comes."""
    model, where = sp.Model.load("llama", **LLAMA | {"layers": 8}), sp.Topology.load("dgx-h100", node=2, gpu=8)
    strategy = sp.Strategy(data=4, pipeline=4, zero=3, global_batch=8, precision="bf16")
    job = sp.partition(model, replace(strategy, cuts=even_cuts(model, strategy)), where)
    ops = simulate_job(job, derate(where, attention=strategy.software.attention)).seconds
    for fidelity in ("closed", "events"):
        assert simulate_step(model, strategy, where, fidelity).seconds == pytest.approx(ops, rel=0.05), fidelity


@pytest.mark.parametrize("attention", ["flash1", "flash3", "cudnn", "cudnn_2024"])
def test_attention_is_of_one_generation_at_every_fidelity(attention: str) -> None:
    """Long sequences, in which kernels of attention are most of a step: ops take the generation that is said."""
    model = sp.Model.load("llama", **LLAMA | {"seq": 32768, "layers": 4})
    strategy = sp.Strategy(tensor=8, precision="bf16", attention=attention)
    where = sp.Topology.load("dgx-h100", node=1, gpu=8)
    seconds = {f: sp.simulate(model, strategy, where, fidelity=f).seconds for f in ("closed", "events", "ops")}
    assert seconds["ops"] == pytest.approx(seconds["closed"], rel=0.05)
    assert seconds["events"] == pytest.approx(seconds["closed"], rel=0.01)
    plain = sp.simulate(model, replace(strategy, attention=None), where, fidelity="ops").seconds
    assert abs(seconds["ops"] / plain - 1) > 0.05

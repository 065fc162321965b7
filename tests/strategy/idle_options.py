"""Drawn strategies, and which of their options do nothing: without them the job, or what is predicted, is the same."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import shardplan as sp
from shardplan.errors import ShardplanError
from shardplan.simulation.closed.configurations import Configurations
from shardplan.simulation.closed.form import ClosedForm
from shardplan.simulation.closed.parameters import Parameters
from shardplan.strategy.options import check_options
from shardplan.strategy.strategy import FIELDS

GPT = {"layers": 2, "hidden": 12, "heads": 6, "seq": 4, "vocab": 12}
LLAMA = {"layers": 2, "hidden": 8, "heads": 4, "kv_heads": 2, "ffn": 8, "seq": 4, "vocab": 8}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt": ("gpt", {**GPT, "optimizer": "adamw"}),
    "gpt, sgd": ("gpt", {**GPT, "optimizer": "sgd"}),
    "gpt, gradients": ("gpt", {**GPT, "optimizer": None}),
    "gpt, forward": ("gpt", {**GPT, "training": False}),
    "llama": ("llama", {**LLAMA, "precision": "bf16"}),
    "moe": ("moe", {**LLAMA, "experts": 4, "experts_per_token": 2, "dense_layers": 0}),
    "mlp": ("mlp", {"layers": 3, "hidden": 8, "optimizer": "sgd"}),
    "dlrm": ("dlrm", {"table_rows": (8, 6), "embedding_dim": 4, "dense_features": 4, "bottom": (8, 4), "top": (8, 1),
                      "bag": 2}),
}  # fmt: skip


@cache
def model(name: str) -> sp.Model:
    family, sizes = MODELS[name]
    return sp.Model.load(family, batch=2, **sizes)


@cache
def form(name: str, products: bool) -> ClosedForm:
    """Without launches, which would hide all else at this size; or where only `products` are waited for."""
    box = sp.Topology.load("dgx-a100-80g", nodes=1)
    device = replace(box.device, launch=0.0)
    if products:
        device = replace(device, memory_bandwidth=1e6 * device.memory_bandwidth)
        levels = [replace(x, bandwidth=1e6 * x.bandwidth, latency=0.0) for x in box.levels]
        box = replace(box, levels=tuple(levels))
    box = replace(box, library="ring", device=device)
    return ClosedForm(model(name), box, replace(Parameters(), launch=0.0))


@cache
def job(name: str, strategy: sp.Strategy) -> object:
    """All that a job is, but for the strategy in it; or the error that refuses it."""
    try:
        found = sp.partition(model(name), strategy)
    except ShardplanError as error:
        return error
    programs = {key: str(program) for key, program in found.programs.items()}
    state = {key: (str(t), t.mesh, found.parts[key]) for key, t in found.state.items()}
    moves = [(t.kind, t.source, t.target, t.types) for t in found.transfers]
    order = None if found.order is None else found.order.tolist()
    return programs, state, moves, str(found.schedule), found.batch, order


@cache
def account(name: str, strategy: sp.Strategy) -> object:
    """The seconds and bytes that are predicted of a step; or the error that refuses it."""
    try:
        check_options(model(name), strategy)
        one = Configurations.of([strategy])
        found = [(made(one), made.stages(one)) for made in (form(name, products=False), form(name, products=True))]
    except ShardplanError as error:
        return error
    return [(float(out.seconds[0]), float(out.peak_bytes[0]), *stages) for out, stages in found]


DEFAULTS = {name: sp.Strategy.__dataclass_fields__[name].default for name in FIELDS}
SAID: dict[str, list[Any]] = {
    "data": [1, 2, 3], "tensor": [1, 2, 3, 8], "pipeline": [1, 2], "context": [1, 2, 4], "expert": [1, 2],
    "microbatch": [1, 2], "interleave": [None, 1, 2],
    "schedule": ["1f1b", "gpipe", "interleaved", "looped-bfs", "zb-h1", "dualpipev", "combined-1f1b"],
    "recompute": ["none", "full", "selective", ("einsum",), ()],
    "recompute_layers": [None, 1, 2],
    "sequence_parallel": [False, True], "zero": [0, 1, 2, 3], "fsdp": [False, True],
    "context_kind": ["ulysses", "gather", "ring", "zigzag"], "precision": [None, "bf16", "fp8", "nvfp4"],
    "gradient_dtype": [None, "f16", "f64"], "reduce_dtype": [None, "f16", "f64"], "offload": [False, True],
    "shard": [None, 1, 2], "bucket": [None, 64, 1e6], "prefetch": [None, False, True],
    "keep": [(), ("layers.*",), ("nothing",)], "attention": [None, "unfused", "flash1"],
    "tensor_overlap": [False, True], "offload_layers": [0, 1, 5], "loss": ["whole", "fused", "chunked"],
    "loss_chunks": [1, 2], "expert_from": ["data", "context", "tensor"], "imbalance": [None, 1.5],
    "dispatch": [None, "direct", "levels"], "expert_products": [None, "loop"],
    "expert_overlap": [False, True],
}  # fmt: skip
# What no program knows, and what no formula does; each alone is refused where it is not known.
PREDICTED = ("attention", "tensor_overlap", "offload_layers", "imbalance", "dispatch", "expert_products",
             "expert_overlap")  # fmt: skip
PARTITIONED = ("bucket", "offload", "keep", "prefetch")
# By field what says in other words what is so by default; and of a forward pass how it would train.
SPELLED: dict[str, Callable[[sp.Model, sp.Strategy], bool]] = {
    "shard": lambda m, s: s.shard == s.data,
    "precision": lambda m, s: s.precision == m.fields.get("precision"),
    "zero": lambda m, s: s.fsdp and s.zero == 3,
    "fsdp": lambda m, s: s.zero == 3 and s.context == 1,  # both deal out to the same replicas, layer by layer
    "attention": lambda m, s: s.attention == "flash2",
    "dispatch": lambda m, s: True,  # in one node, as here, it is the same
    "expert_products": lambda m, s: True,  # without launches, as here, it is the same
    "gradient_dtype": lambda m, s: s.gradient_dtype == replace(s, gradient_dtype=None).total_dtype,
    "reduce_dtype": lambda m, s: s.reduce_dtype == s.total_dtype,
    "prefetch": lambda m, s: s.prefetch == replace(s, prefetch=None).gathers_ahead,
    "schedule": lambda m, s: not m.fields["training"],
    "interleave": lambda m, s: s.interleave == replace(s, interleave=None).interleave,
}


def drawn(rng: random.Random, most: int) -> sp.Strategy:
    """A strategy that can be made: degrees, and a few options."""
    while True:
        said: dict[str, Any] = {name: rng.choice(SAID[name]) for name in ("data", "microbatch") if rng.random() < 0.7}
        said |= {name: rng.choice(values) for name, values in rng.sample(sorted(SAID.items()), most)}
        said["global_batch"] = said.get("data", 1) * said.get("microbatch", 1) * rng.choice([1, 2, 4])
        try:
            return sp.Strategy(**said)
        except ShardplanError:
            continue


def idle_fields(name: str, strategy: sp.Strategy) -> list[str]:
    """The fields that are not as by default, and without which the job, or what is predicted alone, is the same."""
    found: list[str] = []
    for field in SAID:
        same = getattr(strategy, field) == DEFAULTS[field] or (field == "interleave" and strategy.interleave == 1)
        if same or (field in SPELLED and SPELLED[field](model(name), strategy)):
            continue
        try:
            plain: dict[str, Any] = {"schedule": {"interleave": None}, "loss": {"loss_chunks": 1}}.get(field, {})
            less = replace(strategy, **{field: DEFAULTS[field], **plain})
        except ShardplanError:
            continue
        predicted = field in PREDICTED or (field == "precision" and strategy.precision == "nvfp4")
        made, unknown = (account, PARTITIONED) if predicted else (job, PREDICTED)
        asked = [made(name, without(one, unknown)) for one in (strategy, less)]
        if any(isinstance(answer, ShardplanError) for answer in asked) or repr(asked[0]) != repr(asked[1]):
            continue
        # Where passes are split, what waits at the peak may be what W reads, which stays: it does something under 1F1B.
        split = field == "offload_layers" and strategy.schedule in ("zb-h1", "dualpipev")
        if not split or field in idle_fields(name, replace(strategy, schedule="1f1b", interleave=None)):
            found.append(field)
    return found


def without(strategy: sp.Strategy, names: tuple[str, ...]) -> sp.Strategy:
    kind = "fp8" if strategy.precision == "nvfp4" and names == PREDICTED else strategy.precision
    return replace(strategy, precision=kind, **{name: DEFAULTS[name] for name in names})


def tally(name: str, seed: int, count: int) -> tuple[Counter[str], list[str]]:
    """Of so many drawn strategies those that make a job, are predicted alone, or are refused; and all idle options."""
    rng, found, idle = random.Random(f"{name} {seed}"), Counter[str](), list[str]()
    for _ in range(count):
        strategy = drawn(rng, rng.choice([2, 3, 4, 6]))
        made = [not isinstance(answer(name, strategy), ShardplanError) for answer in (job, account)]
        found["a job" if made[0] else "predicted alone" if made[1] else "refused"] += 1
        idle += (f"{field} of {strategy}" for field in idle_fields(name, strategy))
    return found, idle

"""Models and strategies of realistic sizes, drawn at random, and what the closed form and their jobs say they hold."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

import shardplan as sp
from shardplan.errors import ShardplanError
from shardplan.simulation.closed.configurations import Configurations
from shardplan.simulation.closed.form import ClosedForm
from shardplan.simulation.closed.parameters import Parameters
from shardplan.simulation.jobs.job_timeline import simulate_job
from shardplan.simulation.searching.certifier import even_cuts
from shardplan.simulation.steps import derate, simulate_step
from shardplan.strategy.model import Model
from shardplan.strategy.options import check_options
from shardplan.strategy.partition.memory import holdings
from shardplan.strategy.runtimes import runtime_of

SEARCHED = ("1f1b", "1f1b", "interleaved", "gpipe")
HEADS, LEAST_HIDDEN = (16, 32, 64, 128), 2048  # of models whose steps are timed: hidden 2,048 to 16,384
ALL = (*SEARCHED, "looped-bfs", "zb-h1", "zb-h2", "zb-v", "v-half", "dualpipev")


class DrawnMemory(NamedTuple):
    """A drawn strategy: its model, and the bytes of its worst device by the closed form and by its certificate."""

    kind: str
    fields: dict[str, Any]
    strategy: sp.Strategy
    closed: float
    certified: float

    @property
    def ratio(self) -> float:
        """The closed form's over the certificate's."""
        return self.closed / self.certified


def drawn(
    seed: int, schedules: Sequence[str] = SEARCHED, head_counts: Sequence[int] = (16, 32, 64, 33)
) -> Iterator[tuple[str, dict[str, Any], sp.Strategy]]:
    """Yield kinds of models, their fields, and strategies that are legal for them, without an end."""
    rng, rows = random.Random(seed), random.Random(seed + 2)
    while True:
        kind = rng.choice(["gpt", "llama", "moe"])
        heads = rng.choice(head_counts)
        f: dict[str, Any] = {
            "layers": rng.choice([4, 8, 12, 16]), "heads": heads, "hidden": heads * rng.choice([64, 128]),
            "seq": rng.choice([1024, 2048, 4096, 8192, 32768]), "vocab": rng.choice([32000, 50304, 128256, 256000]),
            "precision": "bf16",
        }  # fmt: skip
        if kind != "gpt":
            f |= {
                "kv_heads": rng.choice([heads, 8 if heads % 8 == 0 else heads]),
                "ffn": rng.choice([3, 4]) * f["hidden"],
            }
        if kind == "moe":
            f |= {"experts": rng.choice([8, 16]), "experts_per_token": 2, "ffn": f["hidden"] // 2}
        data, context = rng.choice([1, 2, 4, 8]), rng.choice([1, 1, 1, 2, 4])
        s: dict[str, Any] = {
            "data": data, "context": context, "tensor": rng.choice([1, 1, 2, 4, 8]),
            "pipeline": rng.choice([1, 1, 2, 4]),
            "microbatch": rng.choice([1, 1, 2, 4]), "zero": rng.choice([0, 1, 2, 3]), "precision": "bf16",
            "recompute": rng.choice(["none", "none", "full", "selective"]), "schedule": rng.choice(schedules),
        }  # fmt: skip
        s["sequence_parallel"] = s["tensor"] > 1 and rng.random() < 0.5
        if context > 1:
            s["context_kind"] = rng.choice(["ulysses", "gather", "ring"])
        if data * context == 1:
            s["zero"] = 0
        elif rng.random() < 1 / 3:
            s |= {"fsdp": True, "zero": rng.choice([2, 3]), "recompute": rng.choice(["none", "full", "selective_op"])}
        if s["zero"] and data > 2:
            s["shard"] = rows.choice([None, None, data // 2])
        if s["schedule"] in ("interleaved", "looped-bfs"):
            s["interleave"] = rng.choice([1, 2])
        if kind == "moe":
            s["expert"] = rng.choice([1, 2, 4])
        s["global_batch"] = data * s["microbatch"] * rng.choice([1, 2, 4, 8, 16])
        try:
            strategy, model = sp.Strategy(**s), Model.load(kind, **f)
            check_options(model, strategy)
        except ShardplanError:
            continue
        yield kind, f, strategy


def drawn_memory(seed: int, count: int, schedules: Sequence[str] = SEARCHED) -> Iterator[DrawnMemory]:
    """Yield so many strategies with what they hold; the allocator's and the driver's part is left out of both."""
    left, losses = count, random.Random(seed + 1)
    for kind, fields, strategy in drawn(seed, schedules):
        if not left:
            return
        loss, chunks = losses.choice([("whole", 1)] * 4 + [("fused", 1), ("chunked", 8)])
        model, strategy = Model.load(kind, **fields), replace(strategy, loss=loss, loss_chunks=chunks)
        cuts = even_cuts(model, strategy)
        if cuts is None and strategy.pipeline * (strategy.interleave or 1) > 1:
            continue  # layers that do not come to a stage each
        try:
            job = sp.partition(model, replace(strategy, cuts=cuts))
        except ShardplanError:
            continue
        where = sp.Topology.load("dgx-h100", nodes=max(1, strategy.devices // 8))
        form = ClosedForm(model, where, Parameters(fragmentation=1.0, context=0.0))
        closed = float(form(Configurations.of([strategy])).peak_bytes[0])
        left -= 1
        yield DrawnMemory(kind, fields, strategy, closed, float(np.max(holdings(job, runtime_of(strategy)).peak_bytes)))


class DrawnTime(NamedTuple):
    """A drawn strategy: its model, and the seconds of its step at every fidelity."""

    kind: str
    fields: dict[str, Any]
    strategy: sp.Strategy
    closed: float
    events: float
    ops: float


def drawn_times(seed: int, count: int, schedules: Sequence[str] = ALL) -> Iterator[DrawnTime]:
    """Yield so many strategies with what their steps take; stages are cut alike at all fidelities."""
    left = count
    for kind, fields, strategy in drawn(seed, schedules, HEADS):
        if not left:
            return
        model = Model.load(kind, **fields)
        cuts = even_cuts(model, strategy)
        if fields["hidden"] < LEAST_HIDDEN or (cuts is None and strategy.pipeline * (strategy.interleave or 1) > 1):
            continue
        where = sp.Topology.load("dgx-h100", nodes=max(1, strategy.devices // 8))
        where = where if where.size == strategy.devices else sp.Topology.load("dgx-h100", node=1, gpu=strategy.devices)
        try:
            job = sp.partition(model, replace(strategy, cuts=cuts), where)
        except ShardplanError:
            continue
        closed, events = (simulate_step(model, strategy, where, fidelity).seconds for fidelity in ("closed", "events"))
        left -= 1
        ops = simulate_job(job, derate(where)).seconds
        yield DrawnTime(kind, fields, strategy, closed, events, ops)

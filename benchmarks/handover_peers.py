"""Plans handed over, read by the frameworks' own code: torchtitan 0.3's dataclasses, megatron-core's RankGenerator.

    python -m benchmarks.handover_peers SITE_PACKAGES

`SITE_PACKAGES` is where `pip install --no-deps torchtitan==0.3.0 megatron-core==0.16.1 spmd_types==0.2.3 tyro
docstring_parser typeguard` put them. Every strategy is written, its `plan_config.py` is run with torchtitan's
dataclasses, `ParallelDims` made of it; and the groups that RankGenerator makes of Megatron's arguments are compared
with the plan's own, axis by axis.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
from benchmarks.common import RESULTS, record, write

from shardplan.hardware.topology import Topology
from shardplan.launches.handover.handed_plan import HandedPlan
from shardplan.launches.handover.megatron import mapping_of, write_megatron
from shardplan.launches.handover.torchtitan import write_torchtitan
from shardplan.simulation.searching.plans import RankedPlan
from shardplan.strategy.strategy_text import parse_strategy

LLAMA = ("llama3-8b", {"layers": 8, "seq": 512})
MOE = ("mixtral-8x7b", {"layers": 8, "seq": 512})
CASES = (
    (LLAMA, "dp=32 fsdp"), (LLAMA, "tp=8 fsdp sp"), (LLAMA, "tp=8 pp=2 zero=1 sp recompute=full"),
    (LLAMA, "tp=4 pp=4 vpp=2 sp zero=1"), (LLAMA, "cp=4 fsdp context_kind=gather"), (LLAMA, "tp=2 cp=2 pp=2 fsdp"),
    (LLAMA, "pp=4 fsdp zero=2 recompute=selective_op"), (LLAMA, "fsdp shard=8"), (LLAMA, "dp=32"),
    (MOE, "ep=8 fsdp"), (MOE, "tp=2 pp=2 ep=4 zero=1 sp"),
)  # fmt: skip
SWAPPED = ("data", "pipeline", "context", "tensor")


def groups(ids: np.ndarray, axis: int) -> set[tuple[int, ...]]:
    """Return the groups of ranks along an axis of [pipeline, data, context, tensor]."""
    rows = np.moveaxis(ids, axis, -1).reshape(-1, ids.shape[axis])
    return {tuple(sorted(map(int, row))) for row in rows}


def of_torchtitan(plan: HandedPlan) -> dict[str, Any]:
    """Return the mesh that torchtitan makes of a plan, and the one that the plan has."""
    from torchtitan.distributed.parallel_dims import ParallelDims  # pyright: ignore

    written, space = write_torchtitan(plan), dict[str, Any]()
    exec(written.files["plan_config.py"], space)
    config = space["plan_config"](SimpleNamespace(training=SimpleNamespace()))
    dims = ParallelDims.from_config(config.parallelism, plan.topology.size)
    s, parts = written.runs, config.parallelism.module_fqns_per_model_part
    layers = sorted(int(n.split(".")[1]) for part in parts or () for n in part if n.startswith("layers."))
    same = (dims.pp, dims.dp_replicate * dims.dp_shard, dims.cp, dims.tp, dims.ep) == (
        s.pipeline, s.data, s.context, s.tensor, s.expert)  # fmt: skip
    whole = not parts or (layers == list(range(8)) and len(parts) == s.pipeline * (s.interleave or 1))
    return {"mesh_equal": same, "layers_once": whole, "lines": len(written.lines)}


def of_megatron(plan: HandedPlan) -> dict[str, Any]:
    """Return how many axes have the groups that the plan has, and that RankGenerator makes."""
    from megatron.core.parallel_state import RankGenerator  # pyright: ignore

    said = dict(line.split(" ", 1) for line in write_megatron(plan).files["arguments.txt"].splitlines()
                if line.startswith("--") and " " in line)  # fmt: skip
    words = write_megatron(plan).files["arguments.txt"].split()
    order = "tp-cp-ep-pp-dp" if "--use-tp-pp-dp-mapping" in words else "tp-cp-ep-dp-pp"
    assert order == mapping_of(plan)
    sizes = {k: int(said[f"--{name}-size"]) for k, name in (
        ("tp", "tensor-model-parallel"), ("pp", "pipeline-model-parallel"), ("cp", "context-parallel"))}  # fmt: skip
    data = plan.topology.size // int(np.prod(list(sizes.values())))
    made = RankGenerator(ep=1, dp=data, order=order, **sizes)
    ids = RankedPlan(plan.strategy, 0.0, 0.0, plan.order).device_mesh()
    equal = [groups(ids, k) == {tuple(sorted(g)) for g in made.get_ranks(name)}
             for k, name in enumerate(("pp", "dp", "cp", "tp"))]  # fmt: skip
    return {"axes_equal": sum(equal), "mapping": "--use-tp-pp-dp-mapping" in words}


def main(paths: list[str]) -> None:
    """Print and write them."""
    sys.path += paths
    topology = Topology.load("dgx-h100", nodes=4)
    rows: list[dict[str, Any]] = []
    for (name, fields), text in CASES:
        strategy = parse_strategy(text, 32, global_batch=64, precision="bf16")
        plan = HandedPlan(name, name, {**fields, "precision": "bf16"}, topology, strategy)
        rows.append({"strategy": text, "model": name, "torchtitan": of_torchtitan(plan), "megatron": of_megatron(plan),
                     "swapped": of_megatron(replace(plan, order=SWAPPED))})  # fmt: skip
    write(RESULTS / "handover_peers.json", record({"strategies": len(rows)}, {"rows": rows}))


if __name__ == "__main__":
    main(sys.argv[1:])

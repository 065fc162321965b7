"""Refits of published models on published systems: bytes, seconds beside their bound, and how long planning takes.

`python -m benchmarks.weights_plans [--count 3]`: the nine system files of NVIDIA/nccl-extensions 44d2de0
(nccl_m2n/benchmarks/configs/system_configs), each on the three models of its benchmark at full shapes, from their
config.json, Megatron-Core to vLLM, and Kimi-K2 from 256 devices to 128 and from 2,048 to 1,024. Experts of a trainer
lie over data x tensor, so a file's ep_size x dp_size (with tp_size 1) are its data ranks. Layers that do not divide
are spread as evenly as they can. Prices are those of shipped topologies: of the file's name (GB200 NVL72 with 64
devices a rack, DGX H100); trainer and generator lie in racks of their own.

`floor`: bytes received over what receivers need, 1 where nothing travels twice (what is passed on inside a node is
counted there). `seconds` over `bound`: direct, and with receivers fed once a node where that is cheaper
(`relay=None`). `regions over least`: strided regions of a rank over the least there can be, one for each pair of
families, ranks and named parameters between which anything goes; the most of all ranks that were asked (the first,
middle and last of either side). `planning` is processor seconds of the whole job, `regions` those of one rank, medians
of `count` runs. `executed`: the same system on a model of small shapes, moved by the reference and compared, byte for
byte, with slow converters.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from time import process_time
from typing import Any

import numpy as np
from benchmarks.common import arguments, record, table, write
from tests.movement import weights_frameworks as frameworks
from tests.movement import weights_more as more

import shardplan as sp

COUNT = 3
ASKED = {
    "seconds over bound": 1.05,
    "regions over least": 1.1,
    "planning at 256 devices": 0.5,
    "planning at 2,048": 3.0,
    "regions": 0.02,
}
# hub: Qwen/Qwen3-32B, Qwen/Qwen3-235B-A22B, deepseek-ai/DeepSeek-V3, moonshotai/Kimi-K2-Instruct, config.json
QWEN32 = {
    "hidden_size": 5120, "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 128, "num_hidden_layers": 64,
    "intermediate_size": 25600, "vocab_size": 151936, "tie_word_embeddings": False,
}  # fmt: skip
QWEN235 = {
    "hidden_size": 4096, "num_attention_heads": 64, "num_key_value_heads": 4, "head_dim": 128, "num_hidden_layers": 94,
    "intermediate_size": 12288, "moe_intermediate_size": 1536, "num_experts": 128, "vocab_size": 151936,
    "tie_word_embeddings": False,
}  # fmt: skip
DEEPSEEK = {
    "hidden_size": 7168, "num_attention_heads": 128, "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128, "v_head_dim": 128, "n_routed_experts": 256, "moe_intermediate_size": 2048,
    "intermediate_size": 18432, "n_shared_experts": 1, "first_k_dense_replace": 3, "num_hidden_layers": 61,
    "vocab_size": 129280, "tie_word_embeddings": False,
}  # fmt: skip
KIMI = DEEPSEEK | {
    "num_attention_heads": 64, "n_routed_experts": 384, "first_k_dense_replace": 1, "vocab_size": 163840,
}  # fmt: skip
MODELS = {"qwen3-32b": ("qwen3", QWEN32), "qwen3-235b": ("qwen3-moe", QWEN235), "dsv3": ("deepseek-v3", DEEPSEEK)}
# The file's name: train tp, cp, ep, pp, dp, devices; generation tp, devices; devices of a node.
SYSTEMS = {
    "dsv3-128gpus-gb200": ((1, 1, 16, 4, 1, 64), (8, 64), 64),
    "dsv3-256gpus-gb200": ((1, 1, 16, 8, 1, 128), (8, 128), 64),
    "dsv3-pp-64gpus-gb200": ((1, 1, 16, 2, 1, 32), (8, 32), 64),
    "qwen235b-TP2CP2PP4EP16-128gpus-gb200": ((2, 2, 16, 4, 1, 64), (8, 64), 64),
    "qwen3-32b-dp1-tp1-to-dp1-tp1": ((1, 1, 1, 1, 1, 1), (1, 1), 8),
    "qwen3-32b-dp1-tp2-to-dp1-tp2": ((2, 1, 1, 1, 1, 2), (2, 2), 8),
    "qwen3-32b-dp1-tp4-to-dp1-tp4": ((4, 1, 1, 1, 1, 4), (4, 4), 8),
    "qwen3-32b-tp2pp4dp2-to-tp1dp16-32gpus-gb200": ((2, 1, 1, 4, 2, 16), (1, 16), 64),
    "qwen3-32b-tp4pp4dp2-to-tp4dp8-64gpus-h100": ((4, 1, 1, 4, 2, 32), (4, 32), 8),
}
SMALL = {
    "qwen3-32b": {"hidden_size": 12, "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 2,
                  "intermediate_size": 16, "num_hidden_layers": 9, "vocab_size": 70},
    "qwen3-235b": {"hidden_size": 12, "num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 2,
                   "moe_intermediate_size": 16, "num_experts": 16, "num_hidden_layers": 9, "vocab_size": 70},
    "dsv3": {"hidden_size": 12, "num_attention_heads": 16, "q_lora_rank": 6, "kv_lora_rank": 4, "qk_rope_head_dim": 2,
             "qk_nope_head_dim": 2, "v_head_dim": 2, "n_routed_experts": 16, "moe_intermediate_size": 16,
             "intermediate_size": 32, "first_k_dense_replace": 3, "num_hidden_layers": 9, "vocab_size": 70},
}  # fmt: skip


def even(layers: int, stages: int) -> list[int]:
    """Layers of stages, the first with one more."""
    return [layers // stages + (k < layers % stages) for k in range(stages)]


def degrees(kind: str, train: tuple[int, ...], serve: tuple[int, int], layers: int) -> tuple[dict[str, Any], ...]:
    """The degrees of both sides."""
    tp, _, ep, pp, _, devices = train
    a: dict[str, Any] = {"tensor": tp, "pipeline": pp, "data": devices // (tp * pp), "stages": even(layers, pp)}
    if kind != "qwen3":
        a["expert"] = ep
    return a, {"tensor": serve[0], "replica": serve[1] // serve[0]}


def sides(kind: str, config: dict[str, Any], a: dict[str, Any], b: dict[str, Any], first: int) -> tuple[Any, Any]:
    """Megatron-Core and vLLM, the second on devices from `first`."""
    source = sp.Weights.load(f"megatron-{kind.removesuffix('-ep')}", config, dtype="bf16", **a)
    size = int(np.prod([v for v in b.values() if isinstance(v, int)]))
    target = sp.Weights.load(f"vllm-{kind}", config, dtype="bf16", devices=range(first, first + size), **b)
    return source, target


def median(work: Callable[[], Any], count: int) -> float:
    """The median of processor seconds of some runs."""
    taken: list[float] = []
    for _ in range(count):
        started = process_time()
        work()
        taken.append(process_time() - started)
    return statistics.median(taken)


def over_least(plan: Any) -> float:
    """Strided regions over the pairs of ranks, families and parameters that need one each, the most of some ranks."""
    found: list[float] = []
    for every in (plan.source.devices, plan.target.devices):
        for rank in {every[0], every[len(every) // 2], every[-1]}:
            r = plan.regions(rank)
            pairs = np.stack([r.source, r.target, r.move, r.source_parameter, r.target_parameter], axis=1)
            found.append(len(r) / max(1, len(np.unique(pairs, axis=0))))
    return max(found)


def planned(name: str, kind: str, config: dict[str, Any], a: Any, b: Any, node: int, count: int) -> dict[str, Any]:
    """One row: a system and a model."""
    devices = int(np.prod([v for k, v in a.items() if k in ("tensor", "pipeline", "data")]))
    first = -(-devices // node) * node
    source, target = sides(kind, config, a, b, first)
    nodes = -(-(max(target.devices) + 1) // node)
    preset = sp.Topology.load("dgx-h100" if node == 8 else "gb200-nvl72", nodes=nodes)
    topology = preset.resize(gpus=node)
    direct = sp.refit(source, target, topology)
    best = sp.refit(source, target, topology, relay=None)
    needed = sum(target.nbytes(r) for r in target.devices)  # no vocabulary of these is padded
    got = sum(best.received_bytes) + int(best.relay_traffic[2].sum())
    sent = [n for n in best.sent_bytes if n]
    return {
        "system": name, "model": kind, "devices": f"{devices} -> {len(target.devices)}", "GB": needed / 1e9,
        "floor": got / needed, "direct s": direct.seconds, "seconds": best.seconds, "bound": best.bound_seconds,
        "over": best.seconds / best.bound_seconds, "fed once": bool(best.relays),
        "largest sender over mean": max(sent) * len(sent) / sum(sent),
        "planning s": median(lambda: sp.refit(*sides(kind, config, a, b, first)), count),
        "regions s": median(lambda: direct.regions(first), count), "regions": len(direct.regions(first)),
        "regions over least": over_least(direct),
        "names": len(source.names(0)),
    }  # fmt: skip


def executed(model: str, a: dict[str, Any], b: dict[str, Any]) -> str:
    """Move a small model on the same system, and compare with slow converters."""
    kind = MODELS[model][0]
    c = SMALL[model] | {"kind": "deepseek" if model == "dsv3" else kind, "tie_word_embeddings": False, "fp8": False,
                        "n_shared_experts": 1, "intermediate_size": 32}  # fmt: skip
    make = more.deepseek if model == "dsv3" else frameworks.checkpoint
    whole = make(c, np.random.default_rng(0))
    stages = even(9, a["pipeline"])
    train: Callable[..., Any] = more.deepseek_megatron if model == "dsv3" else frameworks.megatron
    serve: Callable[..., Any] = more.deepseek_served if model == "dsv3" else frameworks.served
    before, wanted = train(c, whole, **a | {"stages": stages}), serve(c, whole, **b)
    source = sp.Weights.load(f"megatron-{kind}", c, dtype="f32", **a | {"stages": stages})
    target = sp.Weights.load(f"vllm-{kind}", c, dtype="f32", devices=range(1000, 1000 + len(wanted)), **b)
    after = sp.refit(source, target).apply(before)
    wrong = sum(after[1000 + r][n].tobytes() != x.tobytes() for r, named in wanted.items() for n, x in named.items())
    return "equal" if not wrong else f"{wrong} differ"


def main() -> None:
    """Plan all, print a table, and write the result."""
    given = arguments(
        "weights_plans", "Refits of published models on published systems.", COUNT, of="runs"
    ).parse_args()
    rows: list[dict[str, Any]] = []
    for name, (train, serve, node) in SYSTEMS.items():
        for model, (kind, config) in MODELS.items():
            a, b = degrees(kind, train, serve, int(config["num_hidden_layers"]))
            ran = executed(model, a, b)
            rows.append(planned(name, kind, dict(config), a, b, node, given.count) | {"executed": ran})
            print(name, model, {k: rows[-1][k] for k in ("floor", "over", "planning s", "executed")}, flush=True)
    for name, (tp, pp, data), serve in (
        ("kimi-k2-256-to-128", (1, 8, 32), (1, 32, 4)), ("kimi-k2-2048-to-1024", (1, 16, 128), (1, 32, 32)),
    ):  # fmt: skip
        a = {"tensor": tp, "pipeline": pp, "data": data, "expert": 32, "stages": even(61, pp)}
        b = {"tensor": serve[0], "data": serve[1], "replica": serve[2]}
        rows.append(planned(name, "deepseek-v3-ep", dict(KIMI), a, b, 8, given.count))
    columns = [k for k in rows[0] if k not in ("names", "regions")]
    print(
        table(columns, [[str(x) if isinstance(x, bool) else x for x in (r.get(k, "") for k in columns)] for r in rows])
    )
    met = {
        "at the floor": all(abs(r["floor"] - 1) < 1e-9 for r in rows),
        "seconds over bound": max(r["over"] for r in rows) <= ASKED["seconds over bound"],
        "planning at 256 devices": max(r["planning s"] for r in rows[:-1]) <= ASKED["planning at 256 devices"],
        "planning at 2,048": rows[-1]["planning s"] <= ASKED["planning at 2,048"],
        "regions": max(r["regions s"] for r in rows) <= ASKED["regions"],
        "regions over least": max(r["regions over least"] for r in rows) <= ASKED["regions over least"],
        "executed": all(r.get("executed", "equal") == "equal" for r in rows),
    }
    print(met)
    write(given.out, record({"count": given.count}, {"asked": ASKED, "met": met, "rows": rows}))


if __name__ == "__main__":
    main()

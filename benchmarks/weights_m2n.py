"""Bytes and staging of refits beside those of vLLM's `nccl_m2n` weight transfer, on five pairs of models and systems.

`python -m benchmarks.weights_m2n [--count 5]`. The peer is read from its source (vllm-project/vllm 397ade2,
distributed/weight_transfer/m2n_layout.py; m2n_staging.py of d060bf6): a tensor of the checkpoint goes straight into the
server's parameter of the same name where its loader is a plain copy, or that of a column- or row-parallel layer, and
its one cut is even over tensor parallelism; all else, `qkv_proj`, `gate_up_proj`, experts and padded vocabularies, is
delivered whole to every rank, in a buffer as large, and cut there. With pipeline parallelism every tensor is. So a
server's rank receives the bytes of its direct parameters and of every other tensor whole, and stages at least the
largest of these. Ours receives its own elements once, in what staging it is given: 256 MB here. Both sides are bf16.
`peer over ours` counts bytes that reach all ranks.
"""

from __future__ import annotations

import math
from typing import Any

from benchmarks.common import arguments, record, table, write
from benchmarks.weights_plans import DEEPSEEK, QWEN32, QWEN235

import shardplan as sp
from shardplan.movement.weights.form import cuts_of

STAGING = 256_000_000
LLAMA8 = {
    "hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "num_hidden_layers": 32,
    "intermediate_size": 14336, "vocab_size": 128256, "tie_word_embeddings": False,
}  # fmt: skip
MIXTRAL = LLAMA8 | {"num_local_experts": 8, "vocab_size": 32000}
# A name, the model, its config, the trainer's table and degrees, the server's degrees.
PAIRS: tuple[tuple[str, str, dict[str, Any], str, dict[str, Any], dict[str, int]], ...] = (
    ("llama3-8b, FSDP2 8 to TP4", "llama", LLAMA8, "fsdp2", {"data": 8}, {"tensor": 4}),
    ("qwen3-32b, TP4 PP2 to TP4 twice", "qwen3", QWEN32, "megatron", {"tensor": 4, "pipeline": 2},
     {"tensor": 4, "replica": 2}),
    ("mixtral-8x7b, TP2 EP4 to TP8", "mixtral", MIXTRAL, "megatron", {"tensor": 2, "data": 4, "expert": 4},
     {"tensor": 8}),
    ("qwen3-235b, PP2 EP16 to TP4 x DP4", "qwen3-moe", QWEN235, "megatron",
     {"tensor": 1, "pipeline": 2, "data": 16, "expert": 16}, {"tensor": 4, "data": 4}),
    ("deepseek-v3, PP4 EP16 to TP16", "deepseek-v3", DEEPSEEK, "megatron",
     {"tensor": 1, "pipeline": 4, "data": 16, "expert": 16, "stages": [16, 15, 15, 15]}, {"tensor": 16}),
)  # fmt: skip


def direct_bytes(server: sp.Weights, whole: dict[str, tuple[int, ...]]) -> dict[str, int]:
    """Bytes that the first rank gets of each tensor of a checkpoint that goes straight into a parameter, by name."""
    out: dict[str, int] = {}
    if server.degrees.get("pipeline", 1) > 1:
        return out
    for family in server.families:
        form = family.entry.form
        cuts = [c for d in form.dims for c in cuts_of(d)]
        plain = len(form.tensors) == 1 and not any("embed" in t or t == "head" for t in form.tensors)
        even = len(cuts) <= 1 and all(c.rule in ("", "even") and "tensor" in c.axes for c in cuts)
        if not plain or not even:
            continue
        for name in family.device_names(0):
            local = family.local_shape(0)
            ranks = server.degrees["tensor"] if cuts else 1
            if name in whole and math.prod(local) * ranks == math.prod(whole[name]):
                out[name] = math.prod(local) * 2
    return out


def judge(
    name: str, model: str, config: dict[str, Any], trainer: str, a: dict[str, Any], b: dict[str, int]
) -> dict[str, Any]:
    """One pair: bytes that reach the server's ranks, and what a rank stages."""
    source = sp.Weights.load(f"{trainer}-{model}", config, dtype="bf16", **a)
    first = max(source.devices) + 1
    count = math.prod(b.values())
    server = sp.Weights.load(f"vllm-{model}", config, dtype="bf16", devices=range(first, first + count), **b)
    plan = sp.refit(source, server, None, STAGING)
    disk = sp.Weights.load(f"hf-{model}", config, dtype="bf16")
    whole = {n: s for n, s, _ in disk.parameters(0)}
    direct = direct_bytes(server, whole)
    fallback = {n: math.prod(s) * 2 for n, s in whole.items() if n not in direct}
    peer = (sum(direct.values()) + sum(fallback.values())) * count
    ours = sum(plan.received_bytes)
    return {
        "pair": name, "ranks": count, "direct of tensors": f"{len(direct)} of {len(whole)}",
        "GB ours": ours / 1e9, "GB peer": peer / 1e9, "peer over ours": peer / ours,
        "staging MB ours": STAGING / 1e6, "staging MB peer at least": max(fallback.values()) / 1e6,
        "more": ours > peer,
    }  # fmt: skip


def main() -> None:
    """Judge every pair, and write the result."""
    given = arguments("weights_m2n", "Refits beside nccl_m2n: bytes and staging.", len(PAIRS), of="pairs").parse_args()
    rows = [judge(*pair) for pair in PAIRS[: given.count]]
    columns = [k for k in rows[0] if k != "more"]
    print(table(columns, [[r[c] for c in columns] for r in rows]))
    found = {"ours never more": not any(r["more"] for r in rows), "rows": rows}
    write(given.out, record({"staging": STAGING}, found))


if __name__ == "__main__":
    main()

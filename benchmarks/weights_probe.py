"""Shipped tables compared with what a framework's own loader makes of a checkpoint whose elements carry their index.

`python -m benchmarks.weights_probe`: a tiny model of each kind is written as safetensors under the names of the table
on disk, loaded by `from_pretrained` of transformers, and read off `named_parameters()` and `named_buffers()`; FSDP2's
tables are read off `fully_shard` over tensor-parallel DTensors, rank by rank on a fake process group. A row that was
not probed says why. Of each loader a table is also derived, and compared with the shipped one: how many expressions are
the same text, and a probe at sizes that the derivation did not see.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import re
import tempfile
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from benchmarks.common import arguments, record, table, write

from shardplan.errors import LayoutError
from shardplan.movement.weights.derive import LoaderTrial, derive_table
from shardplan.movement.weights.probe import probe
from shardplan.movement.weights.table import WeightTable, shipped_tables
from shardplan.movement.weights.weights import Weights, make_weights

Named = Mapping[str, np.ndarray]
LLAMA = {
    "hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 4,
    "num_hidden_layers": 2, "vocab_size": 70, "tie_word_embeddings": False, "max_position_embeddings": 32,
}  # fmt: skip
MOE = LLAMA | {"moe_intermediate_size": 8, "num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2}
LATENT = {
    "hidden_size": 16, "num_attention_heads": 4, "num_key_value_heads": 4, "q_lora_rank": 8, "kv_lora_rank": 8,
    "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 4, "n_routed_experts": 4, "moe_intermediate_size": 8,
    "intermediate_size": 24, "n_shared_experts": 1, "first_k_dense_replace": 1, "num_hidden_layers": 2,
    "vocab_size": 70, "tie_word_embeddings": False, "n_group": 1, "topk_group": 1, "num_experts_per_tok": 2,
    "max_position_embeddings": 32,
}  # fmt: skip
GPT2 = {"n_embd": 16, "n_head": 4, "n_layer": 2, "n_positions": 8, "vocab_size": 70}
MAVERICK = MOE | {"intermediate_size": 8, "intermediate_size_mlp": 24, "interleave_moe_layer_step": 2,
                  "num_hidden_layers": 4}  # fmt: skip
MAMBA = {
    "hidden_size": 16, "num_hidden_layers": 2, "num_heads": 4, "head_dim": 8, "n_groups": 2, "state_size": 4,
    "conv_kernel": 4, "expand": 2, "vocab_size": 70, "tie_word_embeddings": False,
}  # fmt: skip
# What the published checkpoints have before names of the text model alone.
BEFORE = {"Llama4ForCausalLM": "language_model."}
# The table on disk, the table in memory, transformers' config and class, and the sizes.
TRANSFORMERS: tuple[tuple[str, str, str, str, dict[str, Any]], ...] = (
    ("hf-llama", "hf-llama", "LlamaConfig", "LlamaForCausalLM", LLAMA),
    ("hf-qwen3", "hf-qwen3", "Qwen3Config", "Qwen3ForCausalLM", LLAMA),
    ("hf-qwen3-moe", "hf5-qwen3-moe", "Qwen3MoeConfig", "Qwen3MoeForCausalLM", MOE),
    ("hf-mixtral", "hf5-mixtral", "MixtralConfig", "MixtralForCausalLM", MOE),
    ("hf-deepseek-v3", "hf5-deepseek-v3", "DeepseekV3Config", "DeepseekV3ForCausalLM", LATENT),
    ("hf-gpt2", "hf-gpt2", "GPT2Config", "GPT2Model", GPT2),
    ("hf5-gpt-oss", "hf5-gpt-oss", "GptOssConfig", "GptOssForCausalLM", MOE),
    ("hf-llama4", "hf-llama4", "Llama4TextConfig", "Llama4ForCausalLM", MAVERICK),
    ("hf-mamba2", "hf-mamba2", "Mamba2Config", "Mamba2ForCausalLM", MAMBA),
)
# Sizes that a derivation did not see; of FSDP2 the mesh is another, too.
UNSEEN: dict[str, Any] = {"num_hidden_layers": 5, "vocab_size": 90, "n_layer": 3, "n_embd": 24, "intermediate_size": 40,
                          "moe_intermediate_size": 12, "state_size": 6}  # fmt: skip
GROUP = re.compile(r"\(([^()|:]*)\)(?!@)")  # parentheses that say nothing
_NOT = "by benchmarks.weights_loaders, where its framework is installed"
WHY = dict.fromkeys(("megatron", "vllm", "sglang", "torchtitan", "peft"), _NOT) | {
    "hf": "read, as the checkpoint on disk: the source of the probe of what transformers has in memory, or of none",
    "hf5": "not probed: transformers is not importable",
    "fsdp2": "not probed under its own names: fsdp2-llama is cut by the same code of torch",
}


def loaded(
    config: str, kind: str, sizes: dict[str, Any], folder: Path, named: Named
) -> dict[int, dict[str, np.ndarray]]:
    """What `from_pretrained` has of a checkpoint."""
    transformers = importlib.import_module("transformers")
    torch = importlib.import_module("torch")
    save = importlib.import_module("safetensors.torch").save_file
    before = BEFORE.get(kind, "")
    tensors = {n.removeprefix(before): torch.from_numpy(np.ascontiguousarray(a)) for n, a in named.items()}
    save(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    made = getattr(transformers, config)(**sizes)
    (folder / "config.json").write_text(json.dumps(made.to_dict() | {"architectures": [kind], "dtype": "float32"}))
    model = getattr(transformers, kind).from_pretrained(folder, dtype=torch.float32)
    held = dict(model.named_parameters()) | {n: b for n, b in model.named_buffers() if "rotary" not in n}
    return {0: {before + n: t.detach().float().numpy() for n, t in held.items()}}


def by_transformers(disk: str, memory: str, config: str, kind: str, sizes: dict[str, Any]) -> list[dict[str, Any]]:
    """Probe one table of transformers, and derive it."""
    row: dict[str, Any] = {"table": memory, "loader": f"transformers {kind}.from_pretrained"}
    if importlib.util.find_spec("transformers") is None:
        return [row | {"found": "not probed: transformers is not importable"}]

    def trial(sizes: dict[str, Any]) -> LoaderTrial:
        def load(named: Named) -> dict[int, dict[str, np.ndarray]]:
            with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
                warnings.simplefilter("ignore")
                return loaded(config, kind, sizes, Path(folder), named)

        return LoaderTrial(Weights.load(disk, sizes, dtype="f32"), load)

    unseen = sizes | {k: v for k, v in UNSEEN.items() if k in sizes}
    first = trial(sizes)
    rows = [row | said(first.source, first.load, Weights.load(memory, sizes, dtype="f32"))]
    return [*rows, row | derivation(memory, [first], trial(unseen), unseen)]


def derivation(name: str, trials: list[LoaderTrial], unseen: LoaderTrial, sizes: dict[str, Any]) -> dict[str, Any]:
    """What is derived from trials beside a shipped table, as columns of a row: probed where no trial was."""
    head: dict[str, Any] = {"derived": True}
    try:
        found = derive_table(trials, name)
        target = make_weights(found, sizes, dict(unseen.mesh), None, "f32")
    except (LayoutError, ImportError, ValueError, RuntimeError, AttributeError, TypeError, KeyError) as error:
        return head | {"found": f"not derived: {type(error).__name__}: {str(error).splitlines()[0][:200]}"}
    known, mine = (
        {p.name: GROUP.sub(r"\1", str(p.form)) for p in t.parameters} for t in (WeightTable.read(name), found)
    )
    same = sum(known.get(name) == form for name, form in mine.items())
    head |= {"expressions": len(found.parameters), "as shipped": same}
    return head | said(unseen.source, unseen.load, target)


def said(source: Weights, load: Any, target: Weights) -> dict[str, Any]:
    """What a probe found, as columns of a row."""
    try:
        found = probe(source, load, target)
    except (LayoutError, ImportError, ValueError, RuntimeError, AttributeError, TypeError, KeyError) as error:
        return {"found": f"not probed: {type(error).__name__}: {str(error).splitlines()[0][:200]}"}
    head = str(found.differences[0]) if found.differences else "equal"
    return {"parameters": found.parameters, "elements": found.elements, "differ": len(found.differences), "found": head}


def by_fsdp2(data: int = 3, tensor: int = 4) -> list[dict[str, Any]]:
    """Probe FSDP2 over tensor parallelism, every rank of 3 x 4; and derive it from ranks of 1, 5 x 2 and 5 x 4."""
    torch = importlib.import_module("torch")
    parallel = importlib.import_module("torch.distributed.tensor")
    store = importlib.import_module("torch.testing._internal.distributed.fake_pg").FakeStore
    sizes = LLAMA | {"num_key_value_heads": 4}

    def one(named: Named, rank: int, data: int, tensor: int) -> dict[str, np.ndarray]:
        torch.distributed.init_process_group("fake", store=store(), rank=rank, world_size=data * tensor)
        try:
            init = torch.distributed.device_mesh.init_device_mesh
            mesh = init("cpu", (data, tensor), mesh_dim_names=("data", "tensor"))
            holder = torch.nn.Module()
            for k, (name, array) in enumerate(named.items()):
                value = torch.from_numpy(np.ascontiguousarray(array))
                if value.ndim == 2:
                    place = [parallel.Shard(int(name.endswith(("o_proj.weight", "down_proj.weight"))))]
                    value = parallel.distribute_tensor(value, mesh["tensor"], place, src_data_rank=None)
                holder.register_parameter(f"p{k}", torch.nn.Parameter(value))
            importlib.import_module("torch.distributed.fsdp").fully_shard(holder, mesh=mesh["data"])
            return {n: p.to_local().detach().numpy().copy() for n, p in zip(named, holder.parameters(), strict=True)}
        finally:
            torch.distributed.destroy_process_group()

    def trial(data: int, tensor: int) -> LoaderTrial:
        source = Weights.load("hf-llama", sizes, dtype="f32")
        count = data * tensor
        return LoaderTrial(
            source,
            lambda named: {r: one(named, r, data, tensor) for r in range(count)},
            {"data": data, "tensor": tensor},
        )

    probed = trial(data, tensor)
    target = Weights.load("fsdp2-llama", sizes, dtype="f32", data=data, tensor=tensor)
    row = {"table": "fsdp2-llama", "loader": f"torch fully_shard over DTensor, {data} x {tensor} ranks"}
    rows = [row | said(probed.source, probed.load, target)]
    return [*rows, row | derivation("fsdp2-llama", [trial(1, 1), trial(5, 2), trial(5, 4)], probed, sizes)]


def main() -> None:
    """Probe what can be imported, print a line a table, and write the result."""
    given = arguments("weights_probe", "Shipped tables beside frameworks' own loaders.", 1, of="runs").parse_args()
    rows = [row for case in TRANSFORMERS for row in by_transformers(*case)] + by_fsdp2()
    probed = {row["table"] for row in rows}
    rest = [{"table": n, "found": WHY[n.split("-")[0]]} for n in shipped_tables() if n not in probed]
    columns = ("table", "derived", "expressions", "as shipped", "parameters", "elements", "differ", "found")
    print(table(columns, [[str(row.get(key, "")) for key in columns] for row in rows + rest]))
    installed = {}
    for name in ("torch", "transformers"):
        if importlib.util.find_spec(name) is not None:
            installed[name] = importlib.import_module(name).__version__
    write(given.out, record({"installed": installed}, {"rows": rows, "not probed": rest}))


if __name__ == "__main__":
    main()

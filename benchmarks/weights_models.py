"""Models of transformers through the storage of other frameworks and back: names, shapes and logits.

`python -m benchmarks.weights_models` needs transformers beside torch (5.24 was used; the project does not need it). Of
every architecture a tiny model with random weights is saved by `save_pretrained`. Its table is found by
`shardplan reshard`, its tensors are written as vLLM, Megatron, FSDP2 and SGLang store them, and back to Hugging Face's
form, which `from_pretrained` opens: the logits must be equal, bit for bit, and so must every parameter, those of a
vision tower, too, which is passed through. What a framework's table has no place for
must be refused by name. `--shapes FILE` writes the names and shapes of what was saved, for a test of the tables.
"""

from __future__ import annotations

import json
import tempfile
from importlib import import_module
from pathlib import Path
from typing import Any

from benchmarks.common import arguments, record, table, write

from shardplan.errors import LayoutError, ParseError
from shardplan.interop import safetensors
from shardplan.interop.checkpoint import reshard

MODELS = (
    "llama", "mistral", "ministral", "ministral3", "cwm", "granite", "helium", "smollm3", "ernie4_5", "seed_oss",
    "qwen2", "qwen3", "hunyuan_v1_dense", "gemma", "gemma2", "gemma3_text", "vaultgemma", "olmo", "olmo2", "olmo3",
    "exaone4", "glm", "glm4", "phi3", "phi", "starcoder2", "nemotron", "arcee", "nanochat", "cohere", "cohere2",
    "stablelm", "qwen3_moe", "mixtral", "deepseek_v3", "gpt_oss", "gpt2", "qwen2_moe", "olmoe",
    "qwen3_next", "mamba2",
)  # fmt: skip
SIZES = {
    "hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
    "num_hidden_layers": 2, "vocab_size": 120, "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2, "moe_intermediate_size": 16, "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4,
    "num_experts_per_tok": 2, "shared_expert_intermediate_size": 16, "decoder_sparse_step": 1, "q_lora_rank": 16,
    "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8, "n_group": 1, "topk_group": 1,
    "first_k_dense_replace": 1, "n_shared_experts": 1, "n_embd": 32, "n_head": 4, "n_layer": 2, "n_positions": 64,
    "sliding_window": 32,
}  # fmt: skip
# Models that also see: the fields of their text model's config, and of their tower's.
TEXT = {k: n for k, n in SIZES.items() if k in (
    "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "num_hidden_layers", "vocab_size",
    "max_position_embeddings", "pad_token_id", "bos_token_id", "eos_token_id",
)}  # fmt: skip
TURNS = {"rope_parameters": {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 1e4}}
BLOCKS = {"depth": 2, "hidden_size": 16, "intermediate_size": 24, "num_heads": 2, "out_hidden_size": 32,
          "patch_size": 4, "spatial_merge_size": 1}  # fmt: skip
LAYERS = {"hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2, "num_hidden_layers": 2,
          "image_size": 16, "patch_size": 8}  # fmt: skip
SEEING: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "qwen2_5_vl": (TURNS, BLOCKS),
    "qwen3_vl": (TURNS | {"head_dim": 8}, BLOCKS | {"deepstack_visual_indexes": [0], "num_position_embeddings": 16}),
    "gemma3": ({"head_dim": 8}, LAYERS),
    "llava": ({"model_type": "llama"}, LAYERS | {"model_type": "clip_vision_model", "projection_dim": 16}),
    "mistral3": ({"model_type": "mistral", "head_dim": 8}, LAYERS | {"model_type": "pixtral", "head_dim": 8}),
    "internvl": ({"model_type": "qwen2"}, LAYERS | {"image_size": [16, 16], "patch_size": [8, 8]}),
}
OWN: dict[str, dict[str, Any]] = {
    "deepseek_v3": {"num_key_value_heads": 4},  # latent attention has one key head a query head
    "qwen3_next": {"num_hidden_layers": 6, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
                   "linear_key_head_dim": 8, "linear_value_head_dim": 6, "linear_conv_kernel_dim": 4},
    "mamba2": {"num_heads": 8, "head_dim": 8, "n_groups": 2, "state_size": 4, "conv_kernel": 4, "expand": 2,
               "chunk_size": 8},
}  # fmt: skip
WORDS = ("vllm,tp=2", "megatron,tp=2,divisible=8", "fsdp2,dp=2", "sglang,tp=2")
COLUMNS = ("model", "tensors", "found", *WORDS)


def tiny_model(kind: str) -> Any:
    """Return a model of random weights, f32, every one of its tensors with other values."""
    torch, transformers = import_module("torch"), import_module("transformers")
    made = transformers.CONFIG_MAPPING[kind]
    torch.manual_seed(7)
    if kind in SEEING:
        text, tower = SEEING[kind]
        whole = made(text_config=TEXT | text, vision_config=tower, image_token_id=5)
        model = transformers.AutoModelForImageTextToText.from_config(whole)
    else:
        fields = {*getattr(made, "__dataclass_fields__", {}), *made.attribute_map}
        sizes = {k: v for k, v in (SIZES | OWN.get(kind, {})).items() if k in fields}
        model = transformers.AutoModelForCausalLM.from_config(made(**sizes))
    for own in model.parameters():  # norms and biases begin as ones and zeros, which would hide a mistake
        own.data.copy_(torch.randn_like(own) * 0.05 + (1.0 if own.ndim == 1 else 0.0))
    return model.eval()


def logits(model: Any) -> Any:
    """Return what a model says to 12 tokens."""
    torch = import_module("torch")
    with torch.no_grad():
        return model(torch.arange(3, 15)[None]).logits


def judge(kind: str, folder: Path) -> tuple[dict[str, Any], dict[str, list[int]]]:
    """Return a model's row, and the names and shapes of what it saves."""
    model = tiny_model(kind)
    model.save_pretrained(folder / "hf")
    with safetensors.open(folder / "hf/model.safetensors") as file:
        shapes = {name: list(file.entry(name).shape) for name in file.names}
    row: dict[str, Any] = {"model": kind, "tensors": len(shapes)}
    for word in WORDS:
        there, back = folder / word.partition(",")[0], folder / f"{word.partition(',')[0]}-back"
        try:
            done = reshard(folder / "hf", there, to=word)
            row["found"] = done.plan.source.table.name
            reshard(there, back, to="hf")
        except (LayoutError, ParseError) as error:
            row[word] = f"refused: {str(error).splitlines()[0][:200]}"
            continue
        again = type(model).from_pretrained(back)
        row[word] = "equal" if bool((logits(again) == logits(model)).all()) else "logits differ"
        wanted = dict(model.named_parameters())
        if any(not bool((own == wanted[name]).all()) for name, own in again.named_parameters()):
            row[word] = "tensors differ"
    return row, shapes


def main() -> None:
    """Judge every model, print a line a model, and write the result."""
    parser = arguments(
        "weights_models", "Models of transformers through other frameworks' storage.", len(MODELS) + len(SEEING)
    )
    parser.add_argument("--of", nargs="+", choices=(*MODELS, *SEEING), default=(*MODELS, *SEEING), help="which of them")
    parser.add_argument("--shapes", type=Path, help="a JSON file for the names and shapes of what was saved")
    given = parser.parse_args()
    version = import_module("transformers").__version__
    rows: list[dict[str, Any]] = []
    shapes: dict[str, dict[str, list[int]]] = {}
    for kind in given.of:
        with tempfile.TemporaryDirectory() as folder:
            row, shapes[kind] = judge(kind, Path(folder))
        rows.append(row)
        print(*(str(row.get(column, ""))[:60] for column in COLUMNS), sep="  ", flush=True)
    print(table(COLUMNS, [[str(row.get(c, ""))[:24] for c in COLUMNS] for row in rows]))
    if given.shapes is not None:
        head = {"transformers": version, "sizes": SIZES, "own": OWN}
        lines = ",\n".join(f"{json.dumps(kind)}: {json.dumps(found)}" for kind, found in shapes.items())
        given.shapes.write_text(f'{json.dumps(head)[:-1]}, "models": {{\n{lines}\n}}}}\n', encoding="utf-8")
    found = {"models": len(rows), "equal": {w: sum(r.get(w) == "equal" for r in rows) for w in WORDS}}
    write(given.out, record({"transformers": version}, {**found, "rows": rows}))


if __name__ == "__main__":
    main()

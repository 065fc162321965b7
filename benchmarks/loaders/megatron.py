"""Megatron-Core: `GPTModel` on every rank, filled by `dist_checkpointing.load` from a torch_dist folder.

A folder is written by torch.distributed.checkpoint under the names of the table on disk; `sharded_state_dict` of every
rank's model says what it wants, and `load` cuts it. A model of which there is no table on disk is saved by one rank
with `dist_checkpointing.save`, and loaded by several. Patched: the current device, which is CUDA's in this version.
Modules are those of Megatron itself; with Transformer Engine, whose names the tables have, a norm belongs to the
product behind it, and a rank's experts are numbered: `renamed` says so, by the keys of `sharded_state_dict` itself.
What goes down to a latent is on every tensor rank, as with Transformer Engine: `Duplicated` stands in for its linear.
Mamba's mixers are Megatron's without the kernels of mamba_ssm, which have no weights but those of `GatedNorm`.
"""

from __future__ import annotations

import importlib
import json
import re
import tempfile
import warnings
from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from benchmarks.loaders.cases import LATENT, LLAMA, MOE, LoaderCase, Named

from shardplan.interop.checkpoint import reshard
from shardplan.interop.derivation.forked_ranks import Parameters, fork_ranks
from shardplan.movement.weights.weights import Weights

torch: Any = importlib.import_module("torch")
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    state: Any = importlib.import_module("megatron.core.parallel_state")
    saved: Any = importlib.import_module("megatron.core.dist_checkpointing")
    model: Any = importlib.import_module("megatron.core.models.gpt").GPTModel
    specs: Any = importlib.import_module("megatron.core.models.gpt.gpt_layer_specs")
    configs: Any = importlib.import_module("megatron.core.transformer.transformer_config")
    attention: Any = importlib.import_module("megatron.core.transformer.multi_latent_attention")
torch.cuda.current_device = lambda: "cpu"
torch.cuda.synchronize = lambda *_: None
torch.Tensor.cuda = lambda tensor, *_, **__: tensor

_DIVISIBLE = {"divisible": 4}
_SAYS = "megatron-core GPTModel.sharded_state_dict, dist_checkpointing.load"
_NORMS = "norms before a product are named as Transformer Engine's fused ones"
_GATED = "a layer's norm.weight is mixer.in_proj.layer_norm_weight, as Transformer Engine's fused one"
_NEXT = "as of experts; transformer_layer of 0.16.1 is mtp_model_layer of the version that the table names"
_EXPERTS = _NORMS + "; local_experts.{x}.linear_fc1.weight is linear_fc1.weight{x}"
MAMBA: dict[str, Any] = {
    "hidden_size": 16, "num_hidden_layers": 4, "num_heads": 4, "head_dim": 8, "n_groups": 2, "state_size": 4,
    "conv_kernel": 4, "expand": 2, "vocab_size": 100, "tie_word_embeddings": False,
}  # fmt: skip
GPT2: dict[str, Any] = {"n_embd": 32, "n_head": 4, "n_layer": 4, "n_positions": 16, "vocab_size": 100}
_FOUR = {"num_hidden_layers": 4}
_DENSE: tuple[tuple[Mapping[str, Any], Mapping[str, Any]], ...] = (
    ({}, {}),
    ({}, {"tensor": 2, "pipeline": 2, "stages": [2, 1]}),
    (_FOUR, {"tensor": 2, "pipeline": 2, "chunks": 2}),
    (_FOUR | {"tie_word_embeddings": True}, {"tensor": 2, "pipeline": 2, "data": 2}),
    ({"num_key_value_heads": 8}, {"tensor": 4}),
)
_MIXED: tuple[tuple[Mapping[str, Any], Mapping[str, Any]], ...] = (
    ({}, {}),
    ({}, {"tensor": 2, "data": 2, "expert": 2, "pipeline": 2, "stages": [1, 2]}),
    (_FOUR, {"tensor": 2, "data": 2, "expert": 4, "pipeline": 2}),
    ({}, {"tensor": 2, "data": 2, "expert": 2, "etp": 2}),
    ({}, {"tensor": 1, "data": 4, "expert": 2}),
)
_LATENT = {"data": 4, "expert": 4, "pipeline": 2, "stages": [1, 2]}


def _cases(kind: str, sizes: Mapping[str, Any], runs: Any, renamed: str, disk: str = "dist-") -> tuple[LoaderCase, ...]:
    return tuple(
        LoaderCase(
            f"megatron-{disk}{kind}", f"megatron-{kind}", {**sizes, **more}, _SAYS, _DIVISIBLE | dict(degrees),
            _DIVISIBLE, renamed,
        )
        for more, degrees in runs
    )  # fmt: skip


CASES = (
    *_cases("llama", LLAMA, _DENSE, _NORMS),
    *_cases("qwen3", LLAMA, _DENSE[1:3], _NORMS),
    *_cases("qwen3-moe", MOE, _MIXED, _EXPERTS),
    *_cases("mixtral", MOE, _MIXED[1:3], _EXPERTS),
    *_cases("deepseek-v3", LATENT, (*_MIXED[:2], *_MIXED[3:]), _EXPERTS),
    *_cases("llama", LLAMA, _DENSE[1:3], _NORMS, "stacked-"),
    *_cases("qwen3", LLAMA, _DENSE[1:2], _NORMS, "stacked-"),
    *_cases("qwen3-moe", MOE, _MIXED[1:2], _EXPERTS, "stacked-"),
    *_cases("mixtral", MOE, _MIXED[2:3], _EXPERTS, "stacked-"),
    *(
        LoaderCase(
            "hf-" + kind, "megatron-" + kind, sizes, "shardplan reshard, then " + _SAYS, _DIVISIBLE | more, {}, names
        )
        for kind, sizes, names in (("llama", LLAMA, _NORMS), ("deepseek-v3", LATENT, _EXPERTS))
        for more in ({"tensor": 2, "pipeline": 2, "stages": [2, 1]},)
    ),
    *_cases(
        "deepseek-v3-mtp", LATENT | {"num_nextn_predict_layers": 1}, (_MIXED[0], *_MIXED[3:], _MIXED[1]), _NEXT, ""
    ),
    *_cases("mamba2", MAMBA, (({}, {}), ({}, {"tensor": 2}), ({}, {"tensor": 2, "pipeline": 2})), _GATED, ""),
    *_cases("gpt2", GPT2, (({}, {}), ({}, {"tensor": 2}), ({}, {"tensor": 4, "data": 2})), _NORMS, ""),
)
LEFT: dict[str, str] = {}


def config(case: LoaderCase, kind: str) -> Any:
    """What Megatron is told of a model and its degrees."""
    c = case.sizes
    common = {
        "tensor_model_parallel_size": case.degree("tensor"),
        "pipeline_model_parallel_size": case.degree("pipeline"),
        "pipeline_dtype": torch.float32,
        "use_cpu_initialization": True,
        "perform_initialization": False,
        "gradient_accumulation_fusion": False,
    }
    if case.degree("chunks") > 1:
        common["virtual_pipeline_model_parallel_size"] = case.degree("chunks")
    if stages := case.degrees.get("stages"):
        common["num_layers_in_first_pipeline_stage"], common["num_layers_in_last_pipeline_stage"] = stages
    if kind == "gpt2":
        return configs.TransformerConfig(
            num_layers=c["n_layer"], hidden_size=c["n_embd"], num_attention_heads=c["n_head"], **common
        )
    if kind == "mamba2":
        return configs.TransformerConfig(
            num_layers=c["num_hidden_layers"], hidden_size=c["hidden_size"], num_attention_heads=c["num_heads"],
            mamba_num_heads=c["num_heads"], mamba_head_dim=c["head_dim"], mamba_num_groups=c["n_groups"],
            mamba_state_dim=c["state_size"], normalization="RMSNorm", add_bias_linear=False, **common,
        )  # fmt: skip
    common |= {
        "num_layers": c["num_hidden_layers"], "hidden_size": c["hidden_size"],
        "num_attention_heads": c["num_attention_heads"], "ffn_hidden_size": c["intermediate_size"],
        "gated_linear_unit": True, "activation_func": torch.nn.functional.silu, "add_bias_linear": False,
        "normalization": "RMSNorm",
    }  # fmt: skip
    if kind in ("qwen3-moe", "mixtral", "deepseek-v3"):
        experts = {"qwen3-moe": "num_experts", "mixtral": "num_local_experts", "deepseek-v3": "n_routed_experts"}[kind]
        width = "intermediate_size" if kind == "mixtral" else "moe_intermediate_size"
        common |= {
            "num_moe_experts": c[experts], "moe_ffn_hidden_size": c[width],
            "expert_model_parallel_size": case.degree("expert"), "expert_tensor_parallel_size": case.degree("etp"),
        }  # fmt: skip
    if kind == "deepseek-v3":
        common["mtp_num_layers"] = 1 if case.target.endswith("-mtp") else None
        dense = c["first_k_dense_replace"]
        return configs.MLATransformerConfig(
            q_lora_rank=c["q_lora_rank"], kv_lora_rank=c["kv_lora_rank"], qk_head_dim=c["qk_nope_head_dim"],
            qk_pos_emb_head_dim=c["qk_rope_head_dim"], v_head_dim=c["v_head_dim"], qk_layernorm=True,
            moe_layer_freq=[0] * dense + [1] * (c["num_hidden_layers"] - dense),
            moe_shared_expert_intermediate_size=c["moe_intermediate_size"] * c["n_shared_experts"],
            moe_router_enable_expert_bias=True, moe_router_score_function="sigmoid", rope_type="rope", **common,
        )  # fmt: skip
    return configs.TransformerConfig(
        num_query_groups=c["num_key_value_heads"], kv_channels=c["head_dim"], qk_layernorm="qwen3" in kind, **common
    )


def named_as_fused(layer: Any, latent: bool) -> None:
    """Give a layer the names on disk that it has with Transformer Engine: a norm is its product's."""
    dense = "MoE" not in type(layer.mlp.submodules).__name__
    keys = {"pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_"} if dense else {}
    if latent:
        own = layer.self_attention.submodules
        own.core_attention, own.linear_q_down_proj, own.linear_kv_down_proj = NoScores, Duplicated, Duplicated
        keys |= {
            f"self_attention.{x}_layernorm.": f"self_attention.linear_{x}_up_proj.layer_norm_" for x in ("q", "kv")
        }
    else:
        keys |= {"input_layernorm.": "self_attention.linear_qkv.layer_norm_"}
    layer.sharded_state_dict_keys_map = keys


class NoScores(torch.nn.Module):
    """Attention's scores, which have no weights: Megatron's own take no latent heads."""

    def __init__(self, *_: Any, **__: Any) -> None:
        super().__init__()


class Duplicated(torch.nn.Linear):
    """A product whose weight every tensor rank has, in the place of Transformer Engine's with that mode."""

    def __init__(self, wide: int, high: int, **_: Any) -> None:
        super().__init__(wide, high, bias=False)


attention.TELinear = Duplicated


class GatedNorm(torch.nn.Module):
    """The weight of Mamba's gated norm, in the place of mamba_ssm's, and cut as Megatron cuts that one."""

    def __init__(self, size: int, **_: Any) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(size))

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: Any = (), metadata: Any = None) -> dict[str, Any]:
        """Say that dim 0 is cut over the tensor ranks."""
        make = importlib.import_module("megatron.core.transformer.utils").make_sharded_tensors_for_checkpoint
        return make(self.state_dict(keep_vars=True), prefix, {"weight": 0}, sharded_offsets)


def mamba(case: LoaderCase, said: Any, vocabulary: int) -> Any:
    """A rank's Mamba: Megatron's mixers without the kernels, which have no weights."""
    mixer: Any = importlib.import_module("megatron.core.ssm.mamba_mixer")
    layer: Any = importlib.import_module("megatron.core.ssm.mamba_layer")
    block: Any = importlib.import_module("megatron.core.ssm.mamba_block")
    parts: Any = importlib.import_module("megatron.core.tensor_parallel.layers")
    norm: Any = importlib.import_module("megatron.core.transformer.torch_norm").WrappedTorchNorm
    spec: Any = importlib.import_module("megatron.core.transformer.spec_utils").ModuleSpec
    mixer.HAVE_MAMBA_SSM, mixer.ExtendedRMSNorm, block.TENorm = True, GatedNorm, norm
    mixer.get_cuda_rng_tracker = lambda: SimpleNamespace(fork=nullcontext)
    products = mixer.MambaMixerSubmodules(in_proj=parts.ColumnParallelLinear, out_proj=parts.RowParallelLinear)
    whole = layer.MambaLayerSubmodules(
        norm=norm,
        mixer=spec(module=mixer.MambaMixer, submodules=products),
        sharded_state_dict_keys_map={"norm.": "mixer.in_proj.layer_norm_"},
    )
    stack = block.MambaStackSubmodules(mamba_layer=spec(module=layer.MambaLayer, submodules=whole))
    return importlib.import_module("megatron.core.models.mamba").MambaModel(
        said,
        spec(module=block.MambaStack, submodules=stack),
        vocab_size=vocabulary,
        max_sequence_length=64,
        pre_process=state.is_pipeline_first_stage(),
        post_process=state.is_pipeline_last_stage(),
        share_embeddings_and_output_weights=bool(case.sizes["tie_word_embeddings"]),
    )


def built(case: LoaderCase, kind: str) -> list[Any]:
    """A rank's chunks of a model."""
    c = case.sizes
    state.initialize_model_parallel(
        tensor_model_parallel_size=case.degree("tensor"),
        pipeline_model_parallel_size=case.degree("pipeline"),
        virtual_pipeline_model_parallel_size=case.degree("chunks") if case.degree("chunks") > 1 else None,
        expert_model_parallel_size=case.degree("expert"),
        expert_tensor_parallel_size=case.degree("etp"),
    )
    unit = case.degree("divisible") * case.degree("tensor")
    ties = kind == "gpt2" or bool(c.get("tie_word_embeddings"))
    chunks: list[Any] = []
    for chunk in range(case.degree("chunks")):
        said = config(case, kind)
        if kind == "mamba2":
            chunks.append(zero(mamba(case, said, -(-c["vocab_size"] // unit) * unit)))
            continue
        at: dict[str, Any] = {"vp_stage": chunk} if case.degree("chunks") > 1 else {}
        norm = "LayerNorm" if kind == "gpt2" else "RMSNorm"
        spec = (
            specs.get_gpt_decoder_block_spec(said, use_transformer_engine=False, normalization=norm, **at)
            if said.num_moe_experts
            else specs.get_gpt_layer_local_spec(qk_layernorm="qwen3" in kind, normalization=norm)
        )
        for layer in spec.layer_specs if said.num_moe_experts else [spec]:
            named_as_fused(layer.submodules, kind == "deepseek-v3")
        virtual = {"ignore_virtual": False, **at}
        if said.mtp_num_layers:
            at["mtp_block_spec"] = specs.get_gpt_mtp_block_spec(said, spec, use_transformer_engine=False, **at)
        chunks.append(
            model(
                said, spec, vocab_size=-(-c["vocab_size"] // unit) * unit,
                max_sequence_length=c.get("n_positions", 64), share_embeddings_and_output_weights=ties,
                pre_process=state.is_pipeline_first_stage(**virtual),
                post_process=state.is_pipeline_last_stage(**virtual),
                position_embedding_type="learned_absolute" if kind == "gpt2" else "rope", **at,
            )
        )  # fmt: skip
        zero(chunks[-1])
    return chunks


def zero(chunk: Any) -> Any:
    """Make all of a chunk zeros, and return it."""
    for tensor in (*chunk.parameters(), *chunk.buffers()):
        tensor.data.zero_()
    return chunk


def wanted(chunk: Any, stacked: bool = False) -> dict[str, Any]:
    """What a chunk wants of a folder, by its own names: without the state of Transformer Engine."""
    held = chunk.sharded_state_dict(metadata={"non_homogeneous_layers": not stacked})
    return {name: part for name, part in held.items() if not name.endswith("_extra_state")}


def weights(chunk: Any) -> dict[str, Any]:
    """A chunk's parameters, and the buffers that are weights, by its own names."""
    return dict(chunk.named_parameters()) | {n: b for n, b in chunk.named_buffers() if "expert_bias" in n}


def renamed(name: str, keys: Mapping[str, Any]) -> str:
    """A name of a model with Transformer Engine, of one without."""
    key = getattr(keys.get(name), "key", "")
    if "layer_norm_" in key:
        name = re.sub(r"(layers\.\d+\.).*", r"\1", name) + re.sub(r".*layers\.\d+\.", "", key)
    name = name.replace(".transformer_layer.", ".mtp_model_layer.")
    return re.sub(r"local_experts\.(\d+)\.(linear_fc\d)\.weight", r"\2.weight\1", name)


def write(case: LoaderCase, named: Named, folder: Path) -> None:
    """Write a torch_dist folder: by torch, or by `shardplan reshard` of a checkpoint of transformers."""
    tensors = {n: torch.from_numpy(np.array(a)) for n, a in named.items()}
    if case.source.startswith("hf-"):
        with tempfile.TemporaryDirectory() as whole:
            importlib.import_module("safetensors.torch").save_file(tensors, Path(whole) / "model.safetensors")
            disk = case.target.replace("megatron-", "megatron-dist-")
            given: Any = _DIVISIBLE
            sides = (
                Weights.load(case.source, dict(case.sizes), dtype="f32"),
                Weights.load(disk, dict(case.sizes), dtype="f32", **given),
            )
            reshard(whole, folder / "made", from_=sides[0], to=sides[1], form="distributed")
        for path in (folder / "made").iterdir():
            path.rename(folder / path.name)
    else:
        torch.distributed.checkpoint.save(tensors, checkpoint_id=folder, no_dist=True)
    torch.save({}, folder / "common.pt")
    parts = {"sharded_backend": "torch_dist", "common_backend": "torch"}
    (folder / "metadata.json").write_text(json.dumps(parts | {f"{name}_version": 1 for name in parts}))


def loaded(case: LoaderCase, named: Named) -> dict[int, Parameters]:
    """What every rank has of a folder."""
    kind = case.target.removeprefix("megatron-").removesuffix("-mtp")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if case.source != case.target:
            write(case, named, folder)
        else:
            alone = LoaderCase(case.source, case.target, case.sizes, "", case.given)

            def save(_: int) -> Parameters:
                (chunk,) = built(alone, kind)
                keys = wanted(chunk)
                for n, tensor in weights(chunk).items():
                    tensor.data.copy_(torch.from_numpy(np.array(named["0." + renamed(n, keys)])))
                saved.save(keys, str(folder))
                return {}

            fork_ranks(1, save)

        def rank(_: int) -> Parameters:
            chunks = built(case, kind)
            found = saved.load({k: wanted(c, "stacked" in case.source) for k, c in enumerate(chunks)}, str(folder))
            out: Parameters = {}
            for k, chunk in enumerate(chunks):
                keys = wanted(chunk)
                chunk.load_state_dict(found[k], strict=False)
                out |= {f"{k}.{renamed(n, keys)}": p.detach().numpy() for n, p in weights(chunk).items()}
            return out

        return fork_ranks(case.ranks, rank)

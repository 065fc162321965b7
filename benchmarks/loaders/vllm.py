"""vLLM's own models on the CPU: `load_weights` of the whole model class, on every rank of a mesh.

The platform is vLLM's own CPU platform, chosen by its variable, and every rank is a process of what vLLM calls an
external launcher: replicas over data over pipeline over tensor. A model is made by `initialize_model`, its parameters
are set to zeros in f32 (an f8 or packed parameter would not hold a digit), and its own `load_weights` gets the tensors;
what it then has is read before `process_weights_after_loading`.

Four things are patched, none of which loads: which kernel experts run by (Triton's, as on a GPU; the CPU's want other
instructions), which kernel f8 products run by (none), the declaration of one activation's kernel of vLLM's compiled
library, and the process in which vLLM looks at a model's class (this one). A torchvision whose kernels do not fit this
torch counts as none.
"""

from __future__ import annotations

import importlib
import json
import logging
import os
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from benchmarks.loaders.cases import LLAMA, MOE, LoaderCase, Named

from shardplan.interop.derivation.forked_ranks import fork_ranks

os.environ.setdefault("VLLM_TARGET_DEVICE", "cpu")
logging.getLogger("vllm").setLevel(logging.ERROR)
try:
    importlib.import_module("torchvision")
except (ImportError, RuntimeError):  # one whose kernels do not fit this torch is none
    sys.modules["torchvision"] = None  # type: ignore[assignment]
_config: Any = importlib.import_module("vllm.config")
_distributed: Any = importlib.import_module("vllm.distributed")
_making: Any = importlib.import_module("vllm.model_executor.model_loader.utils")
_registry: Any = importlib.import_module("vllm.model_executor.models.registry")
_torch: Any = importlib.import_module("torch")
_auto: Any = importlib.import_module("transformers").AutoConfig

_LAYERS = "vllm.model_executor.layers."
# Where a kernel of experts is chosen: the module that asks, its question, where kernels are listed, and the list.
CHOICES = (
    ("fused_moe.unquantized_fused_moe_method", "select_unquantized_moe_backend", "unquantized",
     "UnquantizedMoeBackend"),
    ("quantization.fp8", "select_fp8_moe_backend", "fp8", "Fp8MoeBackend"),
    ("quantization.mxfp4", "select_mxfp4_moe_backend", "mxfp4", "Mxfp4MoeBackend"),
)  # fmt: skip


def _patch() -> None:
    """Choose kernels as on a GPU, without one; say that activations have theirs; look at classes in this process."""
    for module, question, oracle, kinds in CHOICES:
        found = importlib.import_module(_LAYERS + "fused_moe.oracle." + oracle)
        triton = getattr(found, kinds).TRITON
        answer = (triton, found.backend_to_kernel_cls(triton)[0])
        setattr(importlib.import_module(_LAYERS + module), question, lambda *_, answer=answer, **__: answer)
    fp8: Any = importlib.import_module(_LAYERS + "quantization.fp8")
    fp8.init_fp8_linear_kernel = lambda **_: None
    library = _torch.library.Library("_C", "FRAGMENT")
    library.define("gelu_new(Tensor! out, Tensor input) -> ()")
    _kept.append(library)
    _registry._run_in_subprocess = lambda look: look()


_kept: list[Any] = []  # a library ends with its last name
_patch()
LATENT: dict[str, Any] = {
    "hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 4, "q_lora_rank": 8, "kv_lora_rank": 8,
    "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 4, "n_routed_experts": 6, "moe_intermediate_size": 16,
    "intermediate_size": 24, "n_shared_experts": 1, "first_k_dense_replace": 1, "num_hidden_layers": 3,
    "vocab_size": 100, "tie_word_embeddings": False, "n_group": 1, "topk_group": 1, "num_experts_per_tok": 2,
    "max_position_embeddings": 64, "topk_method": "noaux_tc",
}  # fmt: skip
SIX: dict[str, Any] = MOE | {"num_experts": 6, "num_local_experts": 6}
GPT2: dict[str, Any] = {"n_embd": 32, "n_head": 8, "n_layer": 2, "n_positions": 16, "vocab_size": 100}
FP8: dict[str, Any] = LATENT | {
    "weight_block_size": 4, "moe_intermediate_size": 32, "intermediate_size": 48,
}  # fmt: skip
PACKED: dict[str, Any] = MOE | {"hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 1}
SCOUT: dict[str, Any] = MOE | {"interleave_moe_layer_step": 1}
MAVERICK: dict[str, Any] = MOE | {"intermediate_size_mlp": 64, "interleave_moe_layer_step": 2, "num_hidden_layers": 4}
# What stands before the names of a text model in its checkpoint and its table.
BEFORE = {"vllm-llama4": "language_model."}
# What config.json says of a quantized checkpoint.
QUANTIZED: dict[str, dict[str, Any]] = {
    "vllm-deepseek-v3-fp8": {
        "quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3", "weight_block_size": [4, 4]
    },
    "vllm-gpt-oss-mxfp4": {"quant_method": "mxfp4"},
}  # fmt: skip
# A table's start, the type and class of its model, and the table of its checkpoint.
KINDS: dict[str, tuple[str, str, str]] = {
    "vllm-llama": ("llama", "LlamaForCausalLM", "hf-llama"),
    "vllm-qwen3": ("qwen3", "Qwen3ForCausalLM", "hf-qwen3"),
    "vllm-qwen3-moe": ("qwen3_moe", "Qwen3MoeForCausalLM", "hf-qwen3-moe"),
    "vllm-mixtral": ("mixtral", "MixtralForCausalLM", "hf-mixtral"),
    "vllm-deepseek-v3": ("deepseek_v3", "DeepseekV3ForCausalLM", "hf-deepseek-v3"),
    "vllm-deepseek-v3-fp8": ("deepseek_v3", "DeepseekV3ForCausalLM", "hf-deepseek-v3-fp8"),
    "vllm-gpt-oss-mxfp4": ("gpt_oss", "GptOssForCausalLM", "hf-gpt-oss-mxfp4"),
    "vllm-gpt-oss": ("gpt_oss", "GptOssForCausalLM", "hf5-gpt-oss"),
    "vllm-llama4": ("llama4_text", "Llama4ForCausalLM", "hf-llama4"),
    "vllm-gpt2": ("gpt2", "GPT2LMHeadModel", "hf-gpt2"),
}
# Buffers that hold no weights: caches of rotary embeddings, scales of the attention's cache, maps of experts.
RUNTIME = ("cos_sin_cache", "_scale", "_map")
LEFT: dict[str, str] = {}


def _case(name: str, sizes: Mapping[str, Any], **degrees: Any) -> LoaderCase:
    """One run of a table at some degrees."""
    _, kind, source = KINDS[name.removesuffix("-ep")]
    renamed = f"{BEFORE[name]} is taken off, and put before again" if name in BEFORE else ""
    return LoaderCase(source, name, sizes, f"vllm {kind}.load_weights", degrees, renamed=renamed)


CASES: tuple[LoaderCase, ...] = (
    _case("vllm-llama", LLAMA),
    _case("vllm-llama", LLAMA, tensor=2),
    _case("vllm-llama", LLAMA, tensor=8),
    _case("vllm-llama", LLAMA, replica=2, pipeline=2, stages=[2, 1]),
    _case("vllm-llama", LLAMA, pipeline=2, tensor=2, stages=[1, 2]),
    _case("vllm-llama", LLAMA | {"num_hidden_layers": 4}, pipeline=2, tensor=2),
    _case("vllm-llama", LLAMA | {"tie_word_embeddings": True}, tensor=2),
    _case("vllm-llama", LLAMA | {"tie_word_embeddings": True}, pipeline=3, tensor=1),
    _case("vllm-qwen3", LLAMA, tensor=4),
    _case("vllm-qwen3", LLAMA | {"tie_word_embeddings": True}, pipeline=2, tensor=2, stages=[2, 1]),
    _case("vllm-qwen3-moe", MOE),
    _case("vllm-qwen3-moe", MOE, data=2, tensor=2),
    _case("vllm-qwen3-moe", MOE, pipeline=2, tensor=4, stages=[2, 1]),
    _case("vllm-qwen3-moe-ep", MOE, tensor=4),
    _case("vllm-qwen3-moe-ep", SIX, data=2, tensor=2),
    _case("vllm-mixtral", MOE, data=2, tensor=2),
    _case("vllm-mixtral", MOE, pipeline=2, tensor=4, stages=[2, 1]),
    _case("vllm-mixtral", MOE | {"tie_word_embeddings": True}, pipeline=2, tensor=2, stages=[2, 1]),
    _case("vllm-mixtral-ep", MOE, tensor=2),
    _case("vllm-mixtral-ep", SIX, data=2, pipeline=3, tensor=2),
    _case("vllm-deepseek-v3", LATENT),
    _case("vllm-deepseek-v3", LATENT, data=2, tensor=2),
    _case("vllm-deepseek-v3", LATENT, pipeline=2, tensor=4, stages=[2, 1]),
    _case("vllm-deepseek-v3-ep", LATENT, tensor=4),
    _case("vllm-deepseek-v3-ep", LATENT, data=2, tensor=2),
    _case("vllm-deepseek-v3-ep", LATENT, data=2),
    _case("vllm-gpt-oss", MOE),
    _case("vllm-gpt-oss", MOE, tensor=2),
    _case("vllm-gpt-oss", MOE | {"num_key_value_heads": 4}, tensor=4),  # more ranks than kv heads it does not run
    _case("vllm-gpt-oss-mxfp4", PACKED),
    _case("vllm-gpt-oss-mxfp4", PACKED, tensor=2),
    _case("vllm-deepseek-v3-fp8", FP8),
    _case("vllm-deepseek-v3-fp8", FP8, data=2, tensor=2),
    _case("vllm-deepseek-v3-fp8", FP8, pipeline=2, tensor=4, stages=[2, 1]),
    _case("vllm-deepseek-v3-fp8-ep", FP8, tensor=2),
    _case("vllm-deepseek-v3-fp8-ep", FP8, data=2, tensor=2),
    _case("vllm-llama4", SCOUT),
    _case("vllm-llama4", SCOUT, tensor=4),
    _case("vllm-llama4", SCOUT, pipeline=2, tensor=2, stages=[2, 1]),
    _case("vllm-llama4", MAVERICK, tensor=2),
    _case("vllm-gpt2", GPT2),
    _case("vllm-gpt2", GPT2, tensor=2),
    _case("vllm-gpt2", GPT2, tensor=8),
)


def loaded(case: LoaderCase, named: Named) -> dict[int, dict[str, np.ndarray]]:
    """What every rank has after the model's own `load_weights`."""
    with tempfile.TemporaryDirectory() as folder:
        described(case, Path(folder))
        return fork_ranks(case.ranks, lambda rank: _loaded(case, named, rank, folder))


def described(case: LoaderCase, folder: Path) -> None:
    """Write the model's config.json."""
    model, kind, _ = KINDS[case.target.removesuffix("-ep")]
    config = _auto.for_model(model, **case.sizes).to_dict()
    quantized = QUANTIZED.get(case.target.removesuffix("-ep"))
    config |= {"quantization_config": quantized} if quantized else {}
    _registry.ModelRegistry.models[kind].load_model_cls()  # here, so that no rank has to import it
    (folder / "config.json").write_text(json.dumps(config | {"architectures": [kind], "dtype": "bfloat16"}))


def _loaded(case: LoaderCase, named: Named, rank: int, folder: str) -> dict[str, np.ndarray]:
    """One rank: the config, the groups, the model, its weights."""
    os.environ["RANK"] = str(rank)
    if "stages" in case.degrees:
        os.environ["VLLM_PP_LAYER_PARTITION"] = ",".join(map(str, case.degrees["stages"]))
    config, before = engine(case, folder), BEFORE.get(case.target, "")
    given = ((n.removeprefix(before), _torch.from_numpy(np.array(a))) for n, a in named.items())
    with _config.set_current_vllm_config(config):
        model = empty(case, config, rank)
        model.load_weights(given)
    held = dict(model.named_parameters()) | {n: b for n, b in model.named_buffers() if not n.endswith(RUNTIME)}
    return {before + name: tensor.detach().float().numpy() for name, tensor in held.items()}


def empty(case: LoaderCase, config: Any, rank: int) -> Any:
    """A rank's model, all zeros in f32, under its engine's config, which is the current one."""
    _distributed.init_distributed_environment(case.ranks, rank, "env://", rank, "gloo")
    _distributed.ensure_model_parallel_initialized(case.degree("tensor"), case.degree("pipeline"))
    model = _making.initialize_model(config)
    for tensor in model.parameters():
        tensor.data = _torch.zeros(tensor.shape, dtype=_torch.float32)
    return model


def engine(case: LoaderCase, folder: str) -> Any:
    """The engine's config on this rank."""
    return _config.VllmConfig(
        model_config=_config.ModelConfig(model=folder, skip_tokenizer_init=True, dtype="bfloat16", enforce_eager=True),
        parallel_config=_config.ParallelConfig(
            tensor_parallel_size=case.degree("tensor"),
            pipeline_parallel_size=case.degree("pipeline"),
            data_parallel_size=case.degree("data"),
            enable_expert_parallel=case.target.endswith("-ep"),
            distributed_executor_backend="external_launcher",
        ),
        device_config=_config.DeviceConfig("cpu"),
    )

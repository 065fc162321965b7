"""SGLang's own model classes and their `load_weights`, on the CPU, for `benchmarks.weights_loaders`.

Of each table the whole model class is built on every rank, in SGLang's own process groups over gloo, under a published
`ServerArgs` as a server has it; every layer and every `weight_loader` is SGLang's. What is not: packages of compiled
kernels (`KERNELS`) are empty modules where they cannot be imported, for model files import them at the top, and no
loader calls them. The CPU engine of SGLang is off, so that its loaders take the way that they take beside a GPU.
Without a GPU shared experts are not fused into the routed ones, as with `--disable-shared-experts-fusion`.

Three ties are not asked, for SGLang 0.5.23 does not serve them: Mixtral and Qwen3-MoE at all degrees, and DeepSeek-V3
over several stages, have an `lm_head` of their own that is loaded only from a checkpoint that has one. The tables say
there what the parameter means; the loader leaves it as it was.
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
import os
import sys
import types
import warnings
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from typing import Any
from unittest.mock import MagicMock

import numpy as np
from benchmarks.loaders.cases import LLAMA, MOE, LoaderCase, Named

from shardplan.interop.derivation.forked_ranks import Parameters, fork_ranks

KERNELS = ("torchvision", "sgl_kernel", "flashinfer")
# Table, module, class, and transformers' config.
MODELS = {
    "sglang-llama": ("llama", "LlamaForCausalLM", "LlamaConfig"),
    "sglang-qwen3": ("qwen3", "Qwen3ForCausalLM", "Qwen3Config"),
    "sglang-qwen3-moe": ("qwen3_moe", "Qwen3MoeForCausalLM", "Qwen3MoeConfig"),
    "sglang-mixtral": ("mixtral", "MixtralForCausalLM", "MixtralConfig"),
    "sglang-deepseek-v3": ("deepseek_v2", "DeepseekV3ForCausalLM", "DeepseekV3Config"),
}
CACHES = ("rotary_emb",)  # buffers that are no weights


class EmptyModule(types.ModuleType):
    """A module that has whatever is asked of it, and nothing in it."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return MagicMock(name=f"{self.__name__}.{name}")


class EmptyPackages:
    """Finds packages by their first name, and makes empty modules of them."""

    def __init__(self, roots: Sequence[str]) -> None:
        self.roots = tuple(roots)

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        """Find what begins with one of the roots."""
        return ModuleSpec(name, self, is_package=True) if name.split(".", 1)[0] in self.roots else None  # type: ignore

    def create_module(self, spec: ModuleSpec) -> types.ModuleType:
        """Make an empty module."""
        return EmptyModule(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        """Run nothing."""


def without_kernels() -> None:
    """Put empty modules in the place of packages of kernels that cannot be imported."""
    absent: list[str] = []
    for name in KERNELS:
        try:
            importlib.import_module(name)
        except Exception:  # not installed, or built for another torch
            absent.append(name)
    for name in [m for m in sys.modules if m.split(".", 1)[0] in absent]:
        del sys.modules[name]
    sys.meta_path.insert(0, EmptyPackages(absent))  # type: ignore


def models() -> dict[str, type]:
    """Import SGLang, and return the model class of every table."""
    if importlib.util.find_spec("sglang") is None:
        raise ImportError("sglang is not installed")
    without_kernels()
    os.environ |= {"SGLANG_USE_CPU_ENGINE": "0", "SGLANG_USE_MESSAGE_QUEUE_BROADCASTER": "0"}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = {
            table: getattr(importlib.import_module(f"sglang.srt.models.{module}"), kind)
            for table, (module, kind, _) in MODELS.items()
        }
    logging.getLogger("sglang").setLevel(logging.ERROR)
    return found


CLASSES = models()


def cases_of(table: str, sizes: dict[str, Any], *degrees: dict[str, int]) -> tuple[LoaderCase, ...]:
    """One case for each mapping of degrees."""
    says = f"sglang {MODELS[table][1]}.load_weights"
    return tuple(LoaderCase(table.replace("sglang", "hf"), table, sizes, says, given) for given in degrees)


WIDE = ({"tensor": 1}, {"tensor": 2}, {"tensor": 4}, {"pipeline": 2}, {"tensor": 4, "pipeline": 2})
EXPERTS = (
    {"tensor": 2, "ep": 2},
    {"tensor": 4, "ep": 2},
    {"tensor": 4, "ep": 4},
    {"tensor": 2, "pipeline": 2, "ep": 2},
)
TIED = LLAMA | {"tie_word_embeddings": True}
LATENT: dict[str, Any] = {
    "hidden_size": 32, "num_attention_heads": 8, "num_key_value_heads": 8, "q_lora_rank": 12, "kv_lora_rank": 8,
    "qk_rope_head_dim": 4, "qk_nope_head_dim": 6, "v_head_dim": 5, "n_routed_experts": 4, "moe_intermediate_size": 16,
    "intermediate_size": 48, "n_shared_experts": 2, "first_k_dense_replace": 1, "num_hidden_layers": 3,
    "vocab_size": 100, "tie_word_embeddings": False, "n_group": 1, "topk_group": 1, "num_experts_per_tok": 2,
    "max_position_embeddings": 64, "moe_layer_freq": 1, "topk_method": "noaux_tc", "scoring_func": "sigmoid",
    "norm_topk_prob": True, "routed_scaling_factor": 2.5, "rope_scaling": {
        "type": "yarn", "factor": 40, "beta_fast": 32, "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 64,
    },
}  # fmt: skip
CASES: tuple[LoaderCase, ...] = (
    *cases_of("sglang-llama", LLAMA, *WIDE),
    *cases_of("sglang-llama", TIED, {"tensor": 2}, {"tensor": 2, "pipeline": 2}),
    *cases_of("sglang-qwen3", LLAMA, *WIDE),
    *cases_of("sglang-qwen3", TIED, {"tensor": 2}, {"tensor": 2, "pipeline": 2}),
    *cases_of("sglang-qwen3-moe", MOE, *WIDE, *EXPERTS),
    *cases_of("sglang-mixtral", MOE, *WIDE, *EXPERTS),
    *cases_of("sglang-deepseek-v3", LATENT, *WIDE, *EXPERTS),
    *cases_of("sglang-deepseek-v3", LATENT | {"tie_word_embeddings": True}, {"tensor": 2}),
)
LEFT: dict[str, str] = {}


def built(case: LoaderCase, rank: int) -> Any:
    """Publish a server's arguments for a rank, make SGLang's groups, and build the model as its loader does."""
    context = importlib.import_module("sglang.srt.runtime_context")
    state = importlib.import_module("sglang.srt.distributed.parallel_state")
    arguments = importlib.import_module("sglang.srt.server_args")
    moe = importlib.import_module("sglang.srt.layers.moe.utils")
    given = arguments.ServerArgs(
        model_path="none", device="cpu", tp_size=case.degree("tensor"), pp_size=case.degree("pipeline"),
        ep_size=case.degree("ep"),
    )  # fmt: skip
    context.publish(given, role="tp_worker", ranks=context.SpawnRanks(world_rank=rank))
    state.set_custom_all_reduce(False)
    state.init_distributed_environment(case.ranks, rank, "env://", rank, "gloo")
    state.initialize_model_parallel()
    moe.initialize_moe_config()
    model, kind = CLASSES[case.target], MODELS[case.target]
    config = getattr(importlib.import_module("transformers"), kind[2])(**case.sizes, architectures=[kind[1]])
    shared = moe.resolve_shared_experts_config(model, config, None)
    with context.get_model().override(shared_experts=shared):
        return model(config)


def loaded(case: LoaderCase, named: Named) -> dict[int, Parameters]:
    """Give tensors by their names on disk to the model of every rank; return what each rank then has."""
    torch: Any = importlib.import_module("torch")

    def load(rank: int) -> Parameters:
        model = built(case, rank)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
        model.load_weights((name, torch.from_numpy(np.ascontiguousarray(a))) for name, a in named.items())
        held = dict(model.named_parameters())
        held |= {name: b for name, b in model.named_buffers() if not any(c in name for c in CACHES)}
        return {name: a.detach().float().numpy() for name, a in held.items()}

    return fork_ranks(case.ranks, load)

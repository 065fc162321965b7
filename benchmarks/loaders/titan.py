"""torchtitan: Llama 3 built as its trainer builds it, and filled from a checkpoint of transformers as it does.

`Llama3Model` on the meta device, `parallelize_llama` (tensor parallelism, then FSDP2), and what `DCPCheckpointManager`
does with `from_hf=True`: the state-dict adapter's names, the checkpoint's tensors, `from_hf`, `load_state_dict`.
Patched: the device type, which is CUDA where there is no accelerator. `spmd_backend` is `partial_dtensor`: the others
of this version want a later torch.
"""

from __future__ import annotations

import importlib
import logging
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from benchmarks.loaders.cases import LLAMA, LoaderCase, Named

from shardplan.interop.derivation.forked_ranks import Parameters, fork_ranks

torch: Any = importlib.import_module("torch")
_tools: Any = importlib.import_module("torchtitan.tools.utils")
_tools.device_type, _tools.device_module = "cpu", torch.cpu
titan: Any = importlib.import_module("torchtitan.models.llama3")
common: Any = importlib.import_module("torchtitan.models.common")
config: Any = importlib.import_module("torchtitan.config")
distributed: Any = importlib.import_module("torchtitan.distributed")
wrapper: Any = importlib.import_module("torchtitan.components.checkpointer.base").ModelWrapper
importlib.import_module("torchtitan.trainer")
save: Any = importlib.import_module("safetensors.torch").save_file
logging.disable(logging.WARNING)

_SAYS = "torchtitan Llama3Model, parallelize_llama, Llama3StateDictAdapter.from_hf"
_FUSED = "torchtitan-llama"
_SPLIT = ", fuse_qkv=False"
_HALVES = (
    "the loader's own: with half a key head a rank torch.distributed.checkpoint reads a permuted k_proj to other "
    "places, so that the parameter's full_tensor() is not what one rank loads"
)
_MANY, _FEW = LLAMA | {"num_key_value_heads": 4}, LLAMA
CASES = (
    *(
        LoaderCase("hf-llama", _FUSED, sizes, _SAYS, degrees)
        for sizes in (_MANY, _FEW)
        for degrees in (
            {},
            {"tensor": 2},
            {"data": 3},
            {"data": 3, "tensor": 2},
            {"replica": 2, "data": 2, "tensor": 2},
        )
    ),
    *(
        LoaderCase("hf-llama", "torchtitan-llama-split", _MANY, _SAYS + _SPLIT, degrees)
        for degrees in (
            {},
            {"tensor": 2},
            {"data": 2, "tensor": 2},
            {"replica": 2, "data": 2, "tensor": 2},
            {"data": 3},
        )
    ),
    LoaderCase("hf-llama", "torchtitan-llama-split", _FEW, _SAYS + _SPLIT, {"replica": 2, "data": 2}),
    LoaderCase("hf-llama", "torchtitan-llama-split", _FEW, _SAYS + _SPLIT, {"data": 2, "tensor": 2}, fault=_HALVES),
)
LEFT: dict[str, str] = {}


def made(case: LoaderCase, fused: bool) -> tuple[Any, Any]:
    """A rank's model, sharded, and its config."""
    c = case.sizes
    dim, words = c["hidden_size"], c["vocab_size"]
    zeros = {"weight": torch.nn.init.zeros_}
    heads = {"n_heads": c["num_attention_heads"], "n_kv_heads": c["num_key_value_heads"]}
    rope = common.ComplexRoPE.Config(dim=c["head_dim"], max_seq_len=64, theta=500000.0, scaling="none")
    model = titan.Llama3Model.Config(
        dim=dim,
        vocab_size=words,
        tok_embeddings=common.Embedding.Config(num_embeddings=words, embedding_dim=dim, param_init=zeros),
        norm=common.RMSNorm.Config(normalized_shape=dim, param_init=zeros),
        lm_head=common.Linear.Config(in_features=dim, out_features=words, param_init=zeros),
        layers=titan._build_llama3_layers(
            n_layers=c["num_hidden_layers"], dim=dim, hidden_dim=c["intermediate_size"], fuse_qkv=fused,
            attn_backend="flex", rope=rope, **heads,
        ),
    )  # fmt: skip
    how = config.ParallelismConfig(
        data_parallel_replicate_degree=case.degree("replica"),
        data_parallel_shard_degree=case.degree("data"),
        tensor_parallel_degree=case.degree("tensor"),
        spmd_backend="partial_dtensor",
    )
    model.update_from_config(config=SimpleNamespace(parallelism=how))
    dims = distributed.ParallelDims.from_config(how, case.ranks)
    dims.build_mesh()
    with torch.device("meta"):
        built = model.build()
    titan.parallelize_llama(
        built, parallel_dims=dims, training=config.TrainingConfig(), parallelism=how,
        compile_config=config.CompileConfig(), ac_config=None, dump_folder="",
    )  # fmt: skip
    built.to_empty(device="cpu")
    return built, model


def loaded(case: LoaderCase, named: Named) -> dict[int, Parameters]:
    """What every rank has of a checkpoint."""
    with tempfile.TemporaryDirectory() as folder:
        tensors = {n: torch.from_numpy(np.ascontiguousarray(a)) for n, a in named.items()}
        save(tensors, Path(folder) / "model.safetensors", metadata={"format": "pt"})

        def rank(_: int) -> Parameters:
            model, sizes = made(case, case.target == _FUSED)
            adapter = titan.Llama3StateDictAdapter(sizes, None)
            states = wrapper(model)
            wanted = adapter.to_hf(states.state_dict())
            torch.distributed.checkpoint.load(wanted, storage_reader=adapter.get_hf_storage_reader(folder))
            states.load_state_dict(adapter.from_hf(wanted))
            return {n: p.to_local().detach().numpy() for n, p in model.named_parameters()}

        return fork_ranks(case.ranks, rank)

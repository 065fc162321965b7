"""peft: an adapter of every projection of a Llama of transformers, by `PeftModel.from_pretrained`, then FSDP2."""

from __future__ import annotations

import importlib
import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from benchmarks.loaders.cases import LLAMA, LoaderCase, Named

from shardplan.interop.derivation.forked_ranks import Parameters, fork_ranks

torch: Any = importlib.import_module("torch")
transformers: Any = importlib.import_module("transformers")
peft: Any = importlib.import_module("peft")
save: Any = importlib.import_module("safetensors.torch").save_file

SIZES: dict[str, Any] = LLAMA | {"lora_rank": 6}
PROJECTIONS = [*(f"{x}_proj" for x in "qkvo"), "gate_proj", "up_proj", "down_proj"]
_SAYS = "peft PeftModel.from_pretrained on transformers LlamaForCausalLM, torch fully_shard"
CASES = tuple(
    LoaderCase("peft-llama", "fsdp2-peft-llama", SIZES, _SAYS, degrees)
    for degrees in ({}, {"data": 2}, {"data": 4}, {"replica": 2, "data": 3})
)
LEFT: dict[str, str] = {}


def loaded(case: LoaderCase, named: Named) -> dict[int, Parameters]:
    """What every rank has of an adapter."""
    c = dict(case.sizes)
    rank = c.pop("lora_rank")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        tensors = {n: torch.from_numpy(np.ascontiguousarray(a)) for n, a in named.items()}
        save(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
        said = {"peft_type": "LORA", "r": rank, "target_modules": PROJECTIONS, "task_type": "CAUSAL_LM"}
        (folder / "adapter_config.json").write_text(json.dumps(said | {"base_model_name_or_path": "none"}))

        def one(_: int) -> Parameters:
            base = transformers.LlamaForCausalLM(transformers.LlamaConfig(**c))
            model = peft.PeftModel.from_pretrained(base, folder)
            mesh = torch.distributed.device_mesh.init_device_mesh(
                "cpu", (case.degree("replica"), case.degree("data")), mesh_dim_names=("replica", "data")
            )
            torch.distributed.fsdp.fully_shard(model, mesh=mesh)
            held = {n: p for n, p in model.named_parameters() if "lora_" in n}
            return {n: p.to_local().detach().numpy() for n, p in held.items()}

        return fork_ranks(case.ranks, one)

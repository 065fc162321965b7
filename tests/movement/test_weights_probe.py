"""Probes: FSDP2's own sharding, a loader written out, and a table with two tensors swapped."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import shardplan as sp
from movement import weights_frameworks as frameworks
from shardplan.errors import LayoutError
from shardplan.movement.weights.form import StoredForm
from shardplan.movement.weights.probe import probe
from shardplan.movement.weights.weights import Weights

CONFIG: dict[str, Any] = {
    "kind": "llama", "hidden_size": 12, "intermediate_size": 20, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 4, "num_hidden_layers": 2, "vocab_size": 70, "tie_word_embeddings": False,
}  # fmt: skip
Named = Mapping[str, np.ndarray]


def served(named: Named) -> dict[int, dict[str, np.ndarray]]:
    return frameworks.served(CONFIG, dict(named), tensor=2)


def test_a_loader_that_does_as_the_table_says_passes() -> None:
    found = probe(sp.Weights.load("hf-llama", CONFIG), served, sp.Weights.load("vllm-llama", CONFIG, tensor=2))
    assert found.differences == ()
    assert found.elements > 2**12  # two digits
    found.require()


def test_swapped_tensors_of_one_shape_are_found() -> None:
    right = sp.Weights.load("vllm-llama", CONFIG, tensor=2)
    swapped = StoredForm.parse("(up: f@tensor | gate: f@tensor), e")
    entries = tuple(replace(p, form=swapped) if "gate_up" in p.name else p for p in right.table.parameters)
    wrong = Weights(replace(right.table, parameters=entries), right.config, right.given, right.devices, right.dtype)
    source = sp.Weights.load("hf-llama", CONFIG)
    assert sp.refit(source, wrong).moves  # the proof cannot see it
    with pytest.raises(LayoutError) as caught:
        probe(source, served, wrong).require()
    assert str(caught.value).startswith("4 of 30 parameters differ from the loader's: model.layers.0.mlp.gate_up_proj")
    assert (
        "is model.layers.0.mlp.gate_proj.weight[0, 0], and the table says model.layers.0.mlp.up_proj.weight[0, 0]"
        in (str(caught.value))
    )


def test_fsdp2_over_tensor_parallelism_cuts_as_the_table_says() -> None:
    torch = pytest.importorskip("torch")
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import Shard, distribute_tensor
    from torch.testing._internal.distributed.fake_pg import FakeStore

    data, tensor = 3, 4
    config = CONFIG | {"num_key_value_heads": 4}

    def rank_of(named: Named, rank: int) -> dict[str, np.ndarray]:
        torch.distributed.init_process_group("fake", store=FakeStore(), rank=rank, world_size=data * tensor)
        try:
            mesh = torch.distributed.device_mesh.init_device_mesh(
                "cpu", (data, tensor), mesh_dim_names=("data", "tensor")
            )
            names = list(named)
            holder = torch.nn.Module()
            for k, name in enumerate(names):
                value = torch.from_numpy(np.ascontiguousarray(named[name]))
                if value.ndim == 2:
                    dim = 1 if name.endswith(("o_proj.weight", "down_proj.weight")) else 0
                    value = distribute_tensor(value, mesh["tensor"], [Shard(dim)], src_data_rank=None)
                holder.register_parameter(f"p{k}", torch.nn.Parameter(value))
            fully_shard(holder, mesh=mesh["data"])
            return {n: p.to_local().detach().numpy().copy() for n, p in zip(names, holder.parameters(), strict=True)}
        finally:
            torch.distributed.destroy_process_group()

    def load(named: Named) -> dict[int, dict[str, np.ndarray]]:
        return {rank: rank_of(named, rank) for rank in range(data * tensor)}

    target = sp.Weights.load("fsdp2-llama", config, data=data, tensor=tensor)
    found = probe(sp.Weights.load("hf-llama", config), load, target)
    found.require()
    assert found.parameters == data * tensor * 21


def test_a_checkpoint_on_several_devices_is_refused() -> None:
    two = sp.Weights.load("hf-llama", CONFIG, replica=2)
    with pytest.raises(LayoutError, match="a probe loads from 2 devices; legal is a checkpoint on one"):
        probe(two, served, sp.Weights.load("vllm-llama", CONFIG, tensor=2))

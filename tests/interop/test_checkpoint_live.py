"""A live model compared with a checkpoint, whatever their storage; and the logical place of what differs."""

import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from interop.checkpoint_cases import CONFIG, plain, served, whole
from movement import weights_cases as cases
from shardplan.errors import LayoutError
from shardplan.interop.checkpoint import diff
from shardplan.interop.checkpoint.compare import logical_place, place_text
from shardplan.interop.checkpoint.live import live_side
from shardplan.movement.weights.refit import refit
from shardplan.movement.weights.weights import Weights

HF = Weights.load("hf-llama", CONFIG)
VLLM = Weights.load("vllm-llama", CONFIG, tensor=2)
K = "model.layers.1.self_attn.k_proj.weight"


def modules(named: dict[str, np.ndarray]) -> Any:
    """A module whose parameters have these names, whose state_dict returns copies of something else."""
    import torch

    class Copies(torch.nn.Module):
        def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
            raise AssertionError("state_dict may return copies")

    model = Copies()
    for name, array in named.items():
        *path, last = name.split(".")
        at: torch.nn.Module = model
        for part in path:
            if not hasattr(at, part):
                at.add_module(part, torch.nn.Module())
            at = getattr(at, part)
        at.register_parameter(last, torch.nn.Parameter(torch.from_numpy(array.copy())))
    model.register_buffer("inverse", torch.zeros(3))  # which no table has
    return model


@pytest.mark.parametrize("rank", [0, 1])
def test_a_module_of_a_rank_is_compared_with_a_checkpoint(tmp_path: Path, rank: int) -> None:
    import torch

    source = plain(tmp_path / "hf")
    model = modules(served(CONFIG, whole(), tensor=2)[rank])
    found = diff(model, source, weights=VLLM, other=HF, rank=rank, memory_limit="14 MB")
    assert found.equal and found.parameters == len(VLLM.names(rank))
    assert diff(source, model, weights=HF, other=VLLM, rank=rank).equal
    with torch.no_grad():
        model.get_parameter("model.layers.1.self_attn.qkv_proj.weight")[17, 4] = 0.5  # a row of the rank's keys
    old = whole()[K][rank * 8 + 1, 4]
    assert str(diff(model, source, weights=VLLM, other=HF, rank=rank).difference) == (
        f"k[l=1, g={rank}, d=1, e=4]: rank {rank} model.layers.1.self_attn.qkv_proj.weight[17, 4] = 0.5; "
        f"rank 0 {K}[{rank * 8 + 1}, 4] = {old}"
    )
    assert str(diff(source, model, weights=HF, other=VLLM, rank=rank).difference) == (
        f"k[l=1, g={rank}, d=1, e=4]: rank 0 {K}[{rank * 8 + 1}, 4] = {old}; "
        f"rank {rank} model.layers.1.self_attn.qkv_proj.weight[17, 4] = 0.5"
    )


def test_tensors_by_name_in_another_dtype_are_compared_after_the_cast(tmp_path: Path) -> None:
    import torch

    source = plain(tmp_path / "hf")
    named = {n: torch.from_numpy(a.copy()).bfloat16() for n, a in whole().items()}
    side = Weights.load("hf-llama", CONFIG, dtype="bf16")
    assert diff(named, source, weights=side, other=HF).equal
    named[K][15, 3] = -3
    assert str(diff(named, source, weights=side, other=HF).difference).startswith("k[l=1, g=1, d=7, e=3]: rank 0 ")
    with pytest.raises(LayoutError, match=r"is torch.bfloat16; legal is torch.float32, as the weights say"):
        diff(named, source, weights=HF, other=HF)


def test_arrays_need_no_torch(tmp_path: Path) -> None:
    source = plain(tmp_path / "hf")
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "from interop.checkpoint_cases import CONFIG, whole\n"
        "from shardplan.interop.checkpoint import diff\n"
        "from shardplan.movement.weights.weights import Weights\n"
        "w = Weights.load('hf-llama', CONFIG)\n"
        "print(diff(whole(), sys.argv[1], weights=w, other=w).equal)\n"
    )
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run([sys.executable, "-c", code, str(source)], capture_output=True, text=True, env=environment)
    assert done.stdout == "True\n", done.stderr


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ({}, "a live model without its weights, which say how it is stored; legal is weights= or other="),
        ({"weights": VLLM}, "a live model of 2 devices without rank=; legal is one of them"),
        ({"weights": VLLM, "rank": 2}, "rank = 2 is not one of the live side; legal are its devices"),
    ],
)
def test_a_live_side_that_is_not_said_is_refused(tmp_path: Path, what: dict[str, Any], said: str) -> None:
    with pytest.raises(LayoutError) as error:
        diff(whole(), plain(tmp_path / "hf"), other=HF, **what)
    assert str(error.value) == said


def test_wrong_live_tensors_are_named(tmp_path: Path) -> None:
    source, named = plain(tmp_path / "hf"), whole()
    named["model.norm.weight"] = named["model.norm.weight"][:-1]
    with pytest.raises(LayoutError) as error:
        diff(named, source, weights=HF, other=HF)
    assert str(error.value) == "rank 0 of hf-llama, live: 1 misshapen (model.norm.weight is [31], legal is [32])"
    named = whole()
    named[K] = np.asfortranarray(named[K])
    with pytest.raises(LayoutError, match=r"k_proj.weight has strides \(4, 64\); legal is a contiguous array"):
        diff(named, source, weights=HF, other=HF)
    with pytest.raises(LayoutError, match="diff of two live models; legal is a checkpoint on one side, or both"):
        diff(whole(), whole(), weights=HF, other=HF)
    with pytest.raises(LayoutError, match="rank = 1 with two checkpoints; legal with a live model"):
        diff(source, source, rank=1)


def test_a_live_tensor_is_read_as_it_is_now() -> None:
    named = whole()
    held = live_side(named, HF, 0).tensor(0, K)
    named[K][0, 1] = 7
    out = bytearray(8)
    held.read_into(memoryview(out), 1)
    assert np.frombuffer(out, np.float32)[0] == 7 and np.frombuffer(out, np.float32)[1] == named[K][0, 2]


@pytest.mark.parametrize("kind", list(cases.TABLES))
def test_every_shipped_table_says_where_an_element_stands(kind: str) -> None:
    """The first and the last element of some parameters: what a plan brings there has the same place at its source."""
    rng = random.Random(3)
    c = cases.made(kind, rng)
    arrays = cases.checkpoint(kind, c, np.random.default_rng(0))
    for name in cases.TABLES[kind]:
        w, _ = cases.side(kind, name, c, arrays, rng, 0)
        plan = refit(w, w)
        rank = rng.choice(w.devices)
        found = plan.regions(rank)
        legal = w.parameters(rank)
        for k in rng.sample(range(len(found)), min(6, len(found))):
            if found.target[k] != rank:
                continue
            number, at = int(found.target_parameter[k]), int(found.target_offset[k])
            place = logical_place(w, rank, number, at)
            source = logical_place(w, int(found.source[k]), int(found.source_parameter[k]), int(found.source_offset[k]))
            assert place is not None and place == source, (name, legal[number])
            tensor = w.tensors[place[0]]
            sizes = {a: w.sizing[a] for d in tensor.dims for a in d.atoms}
            assert all(0 <= i < sizes[a] for a, i in place[1]) and place_text(place).startswith(place[0])

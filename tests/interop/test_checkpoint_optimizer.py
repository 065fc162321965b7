"""Optimizer states through `reshard`: what torch saves, to Megatron's names, and back to torch's own loader."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from interop.checkpoint_cases import CONFIG, read, whole
from movement.weights_more import torch_dist
from shardplan.errors import LayoutError
from shardplan.interop.checkpoint import reshard
from shardplan.interop.checkpoint.sources import open_checkpoint

torch: Any = pytest.importorskip("torch")
dcp: Any = pytest.importorskip("torch.distributed.checkpoint")
state_dict: Any = pytest.importorskip("torch.distributed.checkpoint.state_dict")
planner: Any = pytest.importorskip("torch.distributed.checkpoint.default_planner")
SIZES = {k: v for k, v in CONFIG.items() if k != "kind"} | {"model_type": "llama"}


def module(seed: int) -> Any:
    """A module that has the parameters of the checkpoint of the cases, in modules of their names."""
    top = torch.nn.Module()
    for name, array in whole(seed).items():
        *path, last = name.split(".")
        at = top
        for part in path:
            if not hasattr(at, part):
                at.add_module(part, torch.nn.Module())
            at = getattr(at, part)
        at.register_parameter(last, torch.nn.Parameter(torch.from_numpy(array.copy())))
    return top


def step(model: Any, optimizer: Any, seed: int) -> None:
    """A step on gradients at random."""
    generator = torch.Generator().manual_seed(seed)
    for p in model.parameters():
        p.grad = torch.randn(p.shape, generator=generator)
    optimizer.step()


def trained(folder: Path, layout: str) -> tuple[Any, Any]:
    """A module and its AdamW after three steps, saved by torch, and a config beside."""
    model = module(0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)
    for seed in range(3):
        step(model, optimizer, seed)
    weights, moments = state_dict.get_state_dict(model, optimizer)
    saved = {"model": weights, "optim": moments} if layout == "nested" else weights | {"optimizer": moments}
    dcp.save(saved, checkpoint_id=folder, no_dist=True)
    (folder / "config.json").write_text(json.dumps(SIZES))
    return model, optimizer


def resumed(folder: Path) -> tuple[Any, Any]:
    """A module and its AdamW as torch's loader fills them."""
    model = module(1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)
    weights, moments = state_dict.get_state_dict(model, optimizer)
    into = weights | {"optimizer": {"state": moments["state"]}}
    dcp.load(into, checkpoint_id=folder, no_dist=True)
    state_dict.set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=moments)
    return model, optimizer


@pytest.mark.parametrize("layout", ["nested", "flat"])
def test_an_optimizer_goes_to_megatron_and_back_and_steps_as_before(tmp_path: Path, layout: str) -> None:
    model, optimizer = trained(tmp_path / "dcp", layout)
    reshard(tmp_path / "dcp", tmp_path / "megatron", to="megatron,tp=2", dtype="bf16")
    wanted = torch_dist(CONFIG, {n: p.detach().numpy() for n, p in model.named_parameters()}, tensor=1)[0]
    moments = {n: optimizer.state[p]["exp_avg"].numpy() for n, p in model.named_parameters()}
    with open_checkpoint(tmp_path / "megatron") as held:
        found = held.first_tensors
        for state, arrays in (("param", wanted), ("exp_avg", torch_dist(CONFIG, moments, tensor=1)[0])):
            for name, array in arrays.items():
                tensor = found[f"optimizer.state.{state}.{name}"]
                data = bytearray(4 * int(np.prod(tensor.shape)))
                tensor.read_into(memoryview(data), 0)
                out = np.frombuffer(data, np.float32).reshape(tensor.shape)
                rows = tuple(slice(n) for n in array.shape)
                assert out[rows].tobytes() == array.tobytes(), name
                assert found[name].dtype_name == "bf16"
    reshard(tmp_path / "megatron", tmp_path / "back", to="fsdp2,dp=2")
    other, again = resumed(tmp_path / "back")
    for m, o in ((model, optimizer), (other, again)):
        step(m, o, 9)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))


def test_megatrons_states_go_to_torch_with_the_steps_that_are_said(tmp_path: Path) -> None:
    """Megatron has the count in its common.pt, and bf16 parameters beside the optimizer's own."""
    model, optimizer = trained(tmp_path / "dcp", "flat")
    arrays = {n: p.detach().numpy() for n, p in model.named_parameters()}
    state = {
        k: {n: optimizer.state[p][k].numpy() for n, p in model.named_parameters()} for k in ("exp_avg", "exp_avg_sq")
    }
    saved: dict[str, Any] = {n: torch.from_numpy(x.copy()).bfloat16() for n, x in torch_dist(CONFIG, arrays)[0].items()}
    for key, held in ({"fp32_param": arrays} | state).items():
        saved |= {
            f"optimizer.state.{key}.{n}": torch.from_numpy(x.copy()) for n, x in torch_dist(CONFIG, held)[0].items()
        }
    dcp.save(saved, checkpoint_id=tmp_path / "dist", no_dist=True)
    (tmp_path / "dist" / "config.json").write_text(json.dumps(SIZES))
    with pytest.raises(LayoutError, match=r"no count of steps, .* --set optimizer_step=1000"):
        reshard(tmp_path / "dist", tmp_path / "none", to="fsdp2")
    reshard(tmp_path / "dist", tmp_path / "back", to="fsdp2", overrides={"optimizer_step": 3})
    assert "optimizer_step" not in (tmp_path / "back" / "config.json").read_text()
    other, again = resumed(tmp_path / "back")
    for m, o in ((model, optimizer), (other, again)):
        step(m, o, 9)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))
    again.state[next(other.parameters())]["exp_avg"].add_(1)  # which a comparison can see
    step(other, again, 10)
    step(model, optimizer, 10)
    assert not torch.equal(next(model.parameters()), next(other.parameters()))


def test_flat_buckets_are_refused_by_name(tmp_path: Path) -> None:
    name = "optimizer.distributed.dp_group_idx_0.gbuf_idx_0.dtype_bf16.bucket_idx_0.exp_avg"
    saved = {n: torch.from_numpy(x.copy()) for n, x in torch_dist(CONFIG, whole())[0].items()} | {name: torch.ones(3)}
    dcp.save(saved, checkpoint_id=tmp_path / "dist", no_dist=True)
    (tmp_path / "dist" / "config.json").write_text(json.dumps(SIZES))
    with pytest.raises(LayoutError, match="dp_reshardable is flat buckets"):
        reshard(tmp_path / "dist", tmp_path / "out", to="fsdp2")


def test_a_server_takes_no_optimizer_and_says_so(tmp_path: Path) -> None:
    model, _ = trained(tmp_path / "dcp", "nested")
    with pytest.raises(LayoutError, match="has optimizer states, and vllm stores none; legal is --ignore 'optim"):
        reshard(tmp_path / "dcp", tmp_path / "vllm", to="vllm")
    reshard(tmp_path / "dcp", tmp_path / "hf", to="hf", ignore=["optim*"])
    (found,) = read(tmp_path / "hf")
    for name, p in model.named_parameters():
        assert found[name].tobytes() == p.detach().numpy().tobytes()

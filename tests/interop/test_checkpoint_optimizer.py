"""Optimizer states through `reshard`: what torch saves, to Megatron's names, and back to torch's own loader."""

import argparse
import json
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from interop.checkpoint_cases import CONFIG, read, whole
from movement.weights_more import torch_dist
from shardplan.errors import LayoutError, ShardplanError
from shardplan.interop.checkpoint import reshard
from shardplan.interop.checkpoint.sources import open_checkpoint
from shardplan.report.weights import reshard_text

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


def grouped(model: Any, lr: float, decays: tuple[float, float], betas: tuple[float, float]) -> Any:
    """An AdamW of two groups, as trainers make them: matrices, then what has one dim."""
    every = [[p for p in model.parameters() if (p.ndim > 1) == wide] for wide in (True, False)]
    groups = [{"params": own, "weight_decay": w} for own, w in zip(every, decays, strict=True)]
    return torch.optim.AdamW(groups, lr=lr, betas=betas)


def trained(folder: Path, layout: str, decays: tuple[float, float] = (0.1, 0.0)) -> tuple[Any, Any]:
    """A module and its AdamW after three steps, saved by torch, and a config beside."""
    model = module(0)
    optimizer = grouped(model, 0.01, decays, (0.8, 0.97))
    for seed in range(3):
        step(model, optimizer, seed)
    weights, moments = state_dict.get_state_dict(model, optimizer)
    if layout == "flat":
        alone = state_dict.StateDictOptions(flatten_optimizer_state_dict=True)
        moments = state_dict.get_optimizer_state_dict(model, optimizer, options=alone)
    saved = {"model": weights, "optim": moments} if layout == "nested" else weights | {"optimizer": moments}
    dcp.save(saved, checkpoint_id=folder, no_dist=True)
    (folder / "config.json").write_text(json.dumps(SIZES))
    return model, optimizer


def resumed(folder: Path, groups: bool = True) -> tuple[Any, Any]:
    """A module and its AdamW, which was made with other settings, as torch's loader fills them."""
    model = module(1)
    optimizer = grouped(model, 9.0, (0.7, 0.6), (0.1, 0.2)) if groups else grouped(model, 0.01, (0.1, 0.0), (0.8, 0.97))
    weights, moments = state_dict.get_state_dict(model, optimizer)
    into = weights | {"optimizer": moments if groups else {"state": moments["state"]}}
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
    common = torch.load(tmp_path / "megatron" / "release" / "common.pt", weights_only=True)["optimizer"]
    wide, narrow = common["optimizer"]["param_groups"]
    assert common["param_state_sharding_type"] == "fully_reshardable"
    for group, decay, factor in ((wide, 0.1, 1.0), (narrow, 0.0, 0.0)):
        assert (group["lr"], group["betas"], group["weight_decay"]) == (0.01, (0.8, 0.97), decay)
        assert (group["step"], group["wd_mult"], group["bias_correction"]) == (3, factor, True)
    reshard(tmp_path / "megatron", tmp_path / "back", to="fsdp2,dp=2")
    other, again = resumed(tmp_path / "back")
    for a, b in zip(optimizer.param_groups, again.param_groups, strict=True):
        assert {k: v for k, v in a.items() if k != "params"} == {k: v for k, v in b.items() if k != "params"}
    for m, o in ((model, optimizer), (other, again)):
        step(m, o, 9)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))


def megatrons(folder: Path, model: Any, optimizer: Any, common: dict[str, Any] | None = None) -> None:
    """Save a model and its optimizer as Megatron does: bf16 parameters, the optimizer's own in f32, `common.pt`."""
    arrays = {n: p.detach().numpy() for n, p in model.named_parameters()}
    state = {
        k: {n: optimizer.state[p][k].numpy() for n, p in model.named_parameters()} for k in ("exp_avg", "exp_avg_sq")
    }
    saved: dict[str, Any] = {n: torch.from_numpy(x.copy()).bfloat16() for n, x in torch_dist(CONFIG, arrays)[0].items()}
    for key, held in ({"fp32_param": arrays} | state).items():
        saved |= {
            f"optimizer.state.{key}.{n}": torch.from_numpy(x.copy()) for n, x in torch_dist(CONFIG, held)[0].items()
        }
    dcp.save(saved, checkpoint_id=folder, no_dist=True)
    (folder / "config.json").write_text(json.dumps(SIZES))
    if common is not None:
        torch.save(common, folder / "common.pt")


def test_megatrons_states_go_to_torch_with_the_steps_that_are_said(tmp_path: Path) -> None:
    model, optimizer = trained(tmp_path / "dcp", "flat")
    megatrons(tmp_path / "dist", model, optimizer)
    with pytest.raises(LayoutError, match=r"no count of steps, .* --set optimizer_step=1000"):
        reshard(tmp_path / "dist", tmp_path / "none", to="fsdp2")
    reshard(tmp_path / "dist", tmp_path / "back", to="fsdp2", overrides={"optimizer_step": 3})
    assert "optimizer_step" not in (tmp_path / "back" / "config.json").read_text()
    other, again = resumed(tmp_path / "back", groups=False)
    for m, o in ((model, optimizer), (other, again)):
        step(m, o, 9)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))
    again.state[next(other.parameters())]["exp_avg"].add_(1)  # which a comparison can see
    step(other, again, 10)
    step(model, optimizer, 10)
    assert not torch.equal(next(model.parameters()), next(other.parameters()))


def common_of(*groups: dict[str, Any], **more: Any) -> dict[str, Any]:
    """A `common.pt` as DistributedOptimizer.state_dict and Megatron-LM's checkpointing make it."""
    said = {"lr": 0.01, "betas": (0.8, 0.97), "eps": 1e-8, "weight_decay": 0.1, "bias_correction": True, "step": 3,
            "wd_mult": 1.0, "lr_mult": 1.0, "is_expert_parallel": False, "is_decoupled_lr": False,
            "default_config": True, "max_lr": 0.02, "min_lr": 0.001}  # fmt: skip
    own = {"optimizer": {"param_groups": [said | g for g in groups]}, "param_state_sharding_type": "fully_reshardable"}
    args = argparse.Namespace(params_dtype=torch.bfloat16, activation=torch.nn.functional.silu, names={"a", "b"},
                              order=OrderedDict(a=1), apply_wd_to_qk_layernorm=False)  # fmt: skip
    return {"args": args, "checkpoint_version": 3.0, "iteration": 3, "optimizer": own} | more


NARROW = {"wd_mult": 0.0, "weight_decay": 0.0}


def test_megatrons_common_file_says_steps_and_groups(tmp_path: Path) -> None:
    """What is saved beside, functions and dtypes and sets, is read as data."""
    model, optimizer = trained(tmp_path / "dcp", "nested")
    scheduler = {"opt_param_scheduler": {"max_lr": 0.02, "num_steps": 3}}
    megatrons(tmp_path / "dist", model, optimizer, common_of({}, NARROW, **scheduler))
    done = reshard(tmp_path / "dist", tmp_path / "back", to="fsdp2")
    assert done.left == ("opt_param_scheduler of common.pt",) and "not kept" in reshard_text(done, False)
    other, again = resumed(tmp_path / "back")
    assert [(g["lr"], g["betas"], g["weight_decay"]) for g in again.param_groups] == [
        (0.01, (0.8, 0.97), 0.1), (0.01, (0.8, 0.97), 0.0)
    ]  # fmt: skip
    for m, o in ((model, optimizer), (other, again)):
        step(m, o, 9)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))
    reshard(tmp_path / "back", tmp_path / "again", to="megatron,tp=2")
    common = torch.load(tmp_path / "again" / "release" / "common.pt", weights_only=True)["optimizer"]
    groups = common_of({}, NARROW)["optimizer"]["optimizer"]["param_groups"]
    for said, found in zip(groups, common["optimizer"]["param_groups"], strict=True):
        assert said.items() <= found.items()  # what torch's Adam has beside is there, too


def test_torchtitan_asks_for_settings_of_each_parameter(tmp_path: Path) -> None:
    model, optimizer = trained(tmp_path / "dcp", "nested")
    megatrons(tmp_path / "dist", model, optimizer, common_of({}, NARROW))
    reshard(tmp_path / "dist", tmp_path / "titan", to="torchtitan")
    said = {f"optimizer.param_groups.{n}.weight_decay": -1.0 for n in ("tok_embeddings.weight", "norm.weight")}
    dcp.load(said, checkpoint_id=tmp_path / "titan", no_dist=True)
    assert list(said.values()) == [0.1, 0.0]
    reshard(tmp_path / "titan", tmp_path / "fsdp2", to="fsdp2")
    assert [g["weight_decay"] for g in resumed(tmp_path / "fsdp2")[1].param_groups] == [0.1, 0.0]


@pytest.mark.parametrize(
    ("groups", "said"),
    [
        ([{}, {"lr": 0.5}], r"groups of wd_mult = 1.0 that differ in lr \(0.01 and 0.5\)"),
        ([{}, {"lr_mult": 2.0, "lr": 0.02}], r"a group of wd_mult = 1.0, lr_mult = 2.0"),
        ([{"step": 3}, {"step": 4, **NARROW}], r"counts of 3.0 and 4.0 steps"),
        ([{"bias_correction": False}], r"bias_correction = False, which the destination's Adam cannot do"),
        ([{"lr": print}], r"common.pt has a print; legal are numbers"),
        ([{"step": "three"}], r"common.pt has 'three' steps; legal is a count"),
        ([{"step": (3, 3)}], r"common.pt has .* steps; legal is a count"),
        ([{"step": float("nan")}], r"common.pt has .* steps; legal is a count"),
    ],
)
def test_groups_that_do_not_go_along_are_refused(tmp_path: Path, groups: list[dict[str, Any]], said: str) -> None:
    model, optimizer = trained(tmp_path / "dcp", "nested")
    megatrons(tmp_path / "dist", model, optimizer, common_of(*groups))
    with pytest.raises(ShardplanError, match=said):
        reshard(tmp_path / "dist", tmp_path / "back", to="fsdp2")
    assert not list(tmp_path.glob("back/*"))


def test_what_is_ignored_or_said_is_not_read_of_the_common_file(tmp_path: Path) -> None:
    model, optimizer = trained(tmp_path / "dcp", "nested")
    megatrons(tmp_path / "odd", model, optimizer, common_of({"lr": print}, NARROW))
    reshard(tmp_path / "odd", tmp_path / "states", to="fsdp2", ignore=["*param_groups*"])
    other, again = resumed(tmp_path / "states", groups=False)
    assert {float(again.state[p]["step"]) for p in other.parameters()} == {3.0}
    megatrons(tmp_path / "two", model, optimizer, common_of({"step": 3}, {"step": 4, **NARROW}))
    reshard(tmp_path / "two", tmp_path / "hf", to="hf", ignore=["optim*"])
    reshard(tmp_path / "two", tmp_path / "said", to="fsdp2", ignore=["*param_groups*"], overrides={"optimizer_step": 4})
    other, again = resumed(tmp_path / "said", groups=False)
    assert {float(again.state[p]["step"]) for p in other.parameters()} == {4.0}


def test_groups_of_torch_without_names_are_none(tmp_path: Path) -> None:
    model, optimizer = trained(tmp_path / "dcp", "nested")
    weights, moments = state_dict.get_state_dict(model, optimizer)
    for group in moments["param_groups"]:
        group["params"] = 5
    dcp.save(weights | {"optimizer": moments}, checkpoint_id=tmp_path / "numbers", no_dist=True)
    (tmp_path / "numbers" / "config.json").write_text(json.dumps(SIZES))
    reshard(tmp_path / "numbers", tmp_path / "megatron", to="megatron")
    assert "optimizer" not in torch.load(tmp_path / "megatron" / "release" / "common.pt", weights_only=True)


def test_groups_that_megatron_has_not_are_refused_or_said(tmp_path: Path) -> None:
    trained(tmp_path / "dcp", "nested", (0.1, 0.1))
    done = reshard(tmp_path / "dcp", tmp_path / "megatron", to="megatron")
    (said,) = done.left
    assert said.startswith("weight_decay 0.1 of biases and parameters of one dim (decoder.")
    model = module(0)
    first, *rest = model.parameters()
    optimizer = torch.optim.AdamW([{"params": [first], "lr": 0.5}, {"params": rest}], lr=0.01)
    step(model, optimizer, 0)
    weights, moments = state_dict.get_state_dict(model, optimizer)
    dcp.save(weights | {"optimizer": moments}, checkpoint_id=tmp_path / "two", no_dist=True)
    (tmp_path / "two" / "config.json").write_text(json.dumps(SIZES))
    with pytest.raises(LayoutError, match=r"differ in lr \(0.* and 0.*\), and Megatron has one group for matrices"):
        reshard(tmp_path / "two", tmp_path / "none", to="megatron")
    reshard(tmp_path / "two", tmp_path / "without", to="megatron", ignore=["*param_groups*"])
    assert "optimizer" not in torch.load(tmp_path / "without" / "release" / "common.pt", weights_only=True)


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

"""What a trainer keeps beside weights, converted, by loaders of the frameworks: optimizer states, and LoRA adapters.

`python -m benchmarks.weights_trained`, with megatron-core 0.16.1, peft 0.21.2 and transformers 5.23.0 beside torch (as
of `weights_loaders`). A Llama's AdamW after three steps, saved by torch.distributed.checkpoint, is converted for
Megatron-Core at several degrees; every rank's `dist_checkpointing.load` asks for the states by the sharded tensors of
its own model, as `DistributedOptimizer` of `fully_reshardable` does, and all elements are compared with the slow
converters of the tests. `_filter_and_reorder_param_groups` of Megatron's optimizers, which themselves ask for CUDA,
fits the groups of `common.pt` to those that it makes of its parameters: each parameter's settings are compared with
torch's. It is converted back, and torch's loader fills a second optimizer: both make a step, and all parameters must be
equal. An adapter of peft goes to Megatron-Bridge's forms, of an A each and of one A behind a fused product, and back:
its logits must be.
"""

from __future__ import annotations

import importlib
import json
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
from benchmarks.common import arguments, record, table, use_tests, write
from benchmarks.loaders import megatron
from benchmarks.loaders.cases import LLAMA, LoaderCase, Named

from shardplan.interop.checkpoint import reshard
from shardplan.interop.checkpoint.manifest import MANIFEST
from shardplan.interop.derivation.forked_ranks import fork_ranks

torch: Any = importlib.import_module("torch")
transformers: Any = importlib.import_module("transformers")
peft: Any = importlib.import_module("peft")
sharded: Any = importlib.import_module("megatron.core.dist_checkpointing.optimizer").make_sharded_optimizer_tensor
core: Any = importlib.import_module("megatron.core.optimizer")
cases: Any = use_tests("interop.test_checkpoint_optimizer")
cut: Any = use_tests("movement.weights_frameworks").megatron
STATES = ("param", "exp_avg", "exp_avg_sq")
SETTINGS = ("lr", "eps", "weight_decay")
DEGREES: tuple[dict[str, int], ...] = (
    {"tensor": 1},
    {"tensor": 2},
    {"tensor": 2, "data": 2},
    {"tensor": 2, "pipeline": 3},
)
PROJECTIONS = [*(f"{x}_proj" for x in "qkvo"), "gate_proj", "up_proj", "down_proj"]


def merged(own: list[dict[str, Any]], saved: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The groups of a file with the numbers of a rank's parameters, as `FP32Optimizer.sharded_state_dict` puts them."""
    keys = ("wd_mult", "lr_mult", "is_expert_parallel", "is_decoupled_lr")
    at = {tuple(g[k] for k in keys): g for g in saved}
    return [at[tuple(g[k] for k in keys)] | {"params": g["params"]} for g in own]


def on_ranks(folder: Path, sizes: dict[str, Any], degrees: dict[str, int]) -> dict[int, dict[str, np.ndarray]]:
    """What every rank's loader gives of the states, by state and name of the model, and of its optimizer's settings.

    Settings are `group NAME` of each parameter, in its group of `_get_param_groups` once the file's are fitted.
    """
    case = LoaderCase("megatron-dist-llama", "megatron-llama", sizes, "", {"divisible": 128, **degrees})

    def rank(_: int) -> dict[str, np.ndarray]:
        (chunk,) = megatron.built(case, "llama")
        keys, parameters = megatron.wanted(chunk), dict(chunk.named_parameters())
        asked: dict[str, Any] = {}
        for name in keys.keys() & parameters.keys():
            for state in STATES:
                blank = torch.zeros_like(parameters[name].data, dtype=torch.float32)
                asked[f"{state} 0.{megatron.renamed(name, keys)}"] = sharded(
                    keys[name], blank, prefix=f"optimizer.state.{state}"
                )
        found = megatron.saved.load(asked, str(folder / "release"))
        out = {name: x.detach().numpy() for name, x in found.items() if name in asked}
        groups = core._get_param_groups([chunk], core.OptimizerConfig(optimizer="adam", lr=9.0), None)
        inner = torch.optim.AdamW([g for g in groups if g["params"]])
        own = inner.state_dict()["param_groups"]
        said = merged(own, found["optimizer"]["optimizer"]["param_groups"])
        fitted = core.MegatronOptimizer._filter_and_reorder_param_groups(own, said)
        inner.load_state_dict({"state": {}, "param_groups": fitted})
        names = {p: name for name, p in chunk.named_parameters()}
        for group in inner.param_groups:
            row = np.array([*(group[key] for key in SETTINGS), *group["betas"], group["step"]])
            out |= {f"group {names[p]}": row for p in group["params"]}
        return out

    return fork_ranks(case.ranks, rank)


def wanted_settings(group: dict[str, Any]) -> np.ndarray:
    """What a group of torch's optimizer says, and its three steps."""
    return np.array([*(group[key] for key in SETTINGS), *group["betas"], 3.0], np.float32)


def optimizers(place: Path) -> list[dict[str, Any]]:
    """A row for each of Megatron's degrees, and one for torch."""
    model, optimizer = cases.trained(place / "torch", "flat")
    sizes = {**LLAMA, **json.loads((place / "torch" / "config.json").read_text()), "head_dim": 8}
    named = dict(model.named_parameters())
    arrays: dict[str, Named] = {"param": {n: p.detach().numpy() for n, p in named.items()}}
    arrays |= {s: {n: optimizer.state[p][s].numpy() for n, p in named.items()} for s in STATES[1:]}
    rows: list[dict[str, Any]] = []
    for degrees in DEGREES:
        folder = place / "-".join(f"{k}{n}" for k, n in degrees.items())
        tensor = degrees["tensor"]
        reshard(place / "torch", folder, to=f"megatron,tp={tensor}", dtype="bf16")
        found = on_ranks(folder, sizes, degrees)
        wrong = count = elements = 0
        for state in STATES:
            for rank, own in cut({**sizes, "kind": "llama"}, arrays[state], **degrees).items():
                for name, array in own.items():
                    count, elements = count + 1, elements + array.size
                    wrong += found[rank][f"{state} {name}"].tobytes() != array.tobytes()
        for own in found.values():
            for name, row in own.items():
                if name.startswith("group "):
                    one_dim = name.endswith(("norm.weight", "layer_norm_weight"))
                    count, elements = count + 1, elements + row.size
                    wrong += row.tobytes() != wanted_settings(optimizer.param_groups[one_dim]).tobytes()
        said = " ".join(f"{k}={n}" for k, n in degrees.items())
        rows.append({"from": "torch AdamW", "to": f"megatron {said}", "loader": "megatron-core dist_checkpointing.load",
                     "tensors": count, "elements": elements, "wrong": wrong})  # fmt: skip
    reshard(place / "tensor2", place / "back", to="fsdp2,dp=2")
    other, again = cases.resumed(place / "back")
    for m, o in ((model, optimizer), (other, again)):
        cases.step(m, o, 9)
    pairs = list(zip(model.parameters(), other.parameters(), strict=True))
    wrong = sum(not torch.equal(a, b) for a, b in pairs)
    for a, b in zip(optimizer.param_groups, again.param_groups, strict=True):
        wrong += any(a[key] != b[key] for key in a if key != "params")
    rows.append({"from": "megatron tensor=2", "to": "torch AdamW", "loader": "dcp.load, set_state_dict, and a step",
                 "tensors": len(pairs), "elements": sum(a.numel() for a, _ in pairs), "wrong": wrong})  # fmt: skip
    return rows


def adapters(place: Path, fused: bool) -> list[dict[str, Any]]:
    """A row for each degree of the folder between: logits of an adapter of peft before and after.

    That of Megatron-Bridge's fused LoRA has one A for q, k and v, and one for gate and up; its folder is read as if
    another program had written it.
    """
    torch.manual_seed(0)
    base = transformers.LlamaForCausalLM(transformers.LlamaConfig(**LLAMA))
    said = peft.LoraConfig(r=4, target_modules=PROJECTIONS, task_type="CAUSAL_LM")
    model = peft.get_peft_model(base, said)
    for name, p in model.named_parameters():
        if "lora_B" in name:
            p.data.normal_()
    if fused:
        for layer in base.model.layers:
            every = (*(getattr(layer.self_attn, f"{x}_proj") for x in "qkv"), layer.mlp.gate_proj, layer.mlp.up_proj)
            for one, first in zip(every, (every[0],) * 3 + (every[3],) * 2, strict=True):
                one.lora_A["default"].weight.data.copy_(first.lora_A["default"].weight.data)
    model.save_pretrained(place / "peft")
    base.config.save_pretrained(place / "base")
    tokens = torch.arange(8)[None]
    want, rows = model(tokens).logits, list[dict[str, Any]]()
    plain = model.unload()
    without = plain(tokens).logits
    for tensor in (1, 2, 4):
        middle, back = place / f"bridge{tensor}", place / f"peft{tensor}"
        form = ",fused" if fused else ""
        reshard(place / "peft", middle, to=f"megatron,tp={tensor}{form}", config=place / "base")
        if fused:
            (middle / MANIFEST).unlink()
        reshard(middle, back, to="vllm", config=place / "base")
        again = peft.PeftModel.from_pretrained(plain, back)
        got = again(tokens).logits
        plain = again.unload()
        wrong = int(not torch.equal(got, want)) + int(torch.equal(without, want))
        rows.append({"from": "peft", "to": f"Megatron-Bridge{' fused' * fused} tensor={tensor}, and back", "tensors": 1,
                     "loader": "PeftModel.from_pretrained", "elements": want.numel(), "wrong": wrong})  # fmt: skip
    return rows


def main() -> None:
    """Convert, load, compare, and write the result."""
    given = arguments("weights_trained", "Optimizer states and adapters by frameworks' loaders.", 1).parse_args()
    with tempfile.TemporaryDirectory() as name:
        rows = [*optimizers(Path(name)), *adapters(Path(name) / "each", False), *adapters(Path(name) / "one", True)]
    print(table(list(rows[0]), [[row[k] for k in rows[0]] for row in rows], "Optimizer states and adapters"))
    installed = {n: version(n) for n in ("torch", "megatron-core", "peft", "transformers")}
    write(given.out, record({"installed": installed}, {"rows": rows}))


if __name__ == "__main__":
    main()

"""Copies of one element in a checkpoint: compared while they are read, and the first that differs is named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from interop.checkpoint_cases import CONFIG, plain, read, served, whole
from shardplan.cli import run_command
from shardplan.errors import LayoutError
from shardplan.interop import safetensors
from shardplan.interop.checkpoint import diff, reshard
from shardplan.interop.checkpoint.gather import WindowGather
from shardplan.interop.checkpoint.live import LiveTensor
from shardplan.interop.checkpoint.replicas import compare_copies
from shardplan.interop.checkpoint.sources import open_checkpoint
from shardplan.movement.weights.refit import refit
from shardplan.movement.weights.weights import Weights

HF = Weights.load("hf-llama", CONFIG)
QKV = "model.layers.1.self_attn.qkv_proj.weight"


def ranks(folder: Path, change: Any = None, config: dict[str, Any] | None = None, **degrees: Any) -> Weights:
    """A checkpoint of vLLM's shards, a folder a rank, which `change` may alter."""
    config = config or CONFIG
    held = {r: {n: np.ascontiguousarray(a).copy() for n, a in named.items()}
            for r, named in served(config, whole(), **degrees).items()}  # fmt: skip
    if change is not None:
        change(held)
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    for rank, named in held.items():
        (folder / f"rank-{rank:05d}").mkdir()
        safetensors.write(folder / f"rank-{rank:05d}" / "model.safetensors", named, {"format": "pt"})
    return Weights.load("vllm-llama", config, **degrees)


def test_a_copy_that_differs_is_named_with_both_values(tmp_path: Path) -> None:
    """4 ranks with 2 key-value heads: neighbours share one, which is a part of a joined parameter."""

    def change(held: Any) -> None:
        held[3][QKV][8 + 5, 7] = 1234.5  # of 8 rows of queries, then 8 of keys

    side = ranks(tmp_path / "bad", change, tensor=4)
    with pytest.raises(LayoutError) as caught:
        reshard(tmp_path / "bad", tmp_path / "out", from_=side, to=HF, memory_limit="14 MB")
    was = served(CONFIG, whole(), tensor=4)[2][QKV][13, 7]
    assert str(caught.value) == (
        f"copies of k differ in vllm-llama: {QKV}[13, 7] of rank 3 is 1234.5, and {QKV}[13, 7] of rank 2 is {was}; "
        f"legal are equal copies in {tmp_path / 'bad'}, or --no-replicas (compare_replicas=False), which takes one of "
        "them"
    )
    assert not list((tmp_path / "out").glob("*.safetensors"))
    reshard(tmp_path / "bad", tmp_path / "out", from_=side, to=HF, compare_replicas=False)
    assert read(tmp_path / "out")[0].keys() == whole().keys()


def test_the_last_element_of_the_last_copy_is_seen_in_small_windows(tmp_path: Path) -> None:
    def change(held: Any) -> None:
        held[1]["lm_head.weight"][-39, -1] += 1  # the last row that is no padding

    side = ranks(tmp_path / "bad", change, replica=2)
    with pytest.raises(
        LayoutError, match=r"copies of head differ in vllm-llama: lm_head.weight\[89, 31\] of rank 1 is"
    ):
        reshard(tmp_path / "bad", tmp_path / "out", from_=side, to=HF, memory_limit="13 MB")


@pytest.mark.parametrize("size", [64, 200, 1024])
def test_every_element_of_a_copy_is_compared_whatever_the_window(size: int, tmp_path: Path) -> None:
    """A joined parameter cut in rows, of which neighbours share some: each element of it is altered in turn."""
    side = ranks(tmp_path / "good", tensor=4)
    name = "model.layers.0.self_attn.qkv_proj.weight"
    plan = refit(side, HF)
    with open_checkpoint(tmp_path / "good", 4) as held:
        places = [dict(tensors) for tensors in held.places]
        held.places = tuple(places)
        own = np.array(read(tmp_path / "good")[1][name])
        total = compare_copies(plan, held, [1], WindowGather(size), lambda: None)
        assert total == sum(int(m.elements[m.target == 1].sum()) * 4 for m in plan.replicas.moves)
        rng = np.random.default_rng(0)
        for row, column in [(8, 0), (23, 31), *zip(rng.integers(0, 24, 40), rng.integers(0, 32, 40), strict=True)]:
            other = own.copy()
            other[row, column] += 1
            places[1][name] = LiveTensor(other.reshape(-1), other.shape, "f32")
            if row < 8:  # queries, which nobody else has
                compare_copies(plan, held, [1], WindowGather(size), lambda: None)
                continue
            with pytest.raises(LayoutError, match=rf"{name}\[{row}, {column}\] of rank 1 is"):
                compare_copies(plan, held, [1], WindowGather(size), lambda: None)


def test_copies_that_are_equal_raise_no_alarm_and_padding_is_none(tmp_path: Path) -> None:
    def padding(held: Any) -> None:
        held[1]["lm_head.weight"][-1] = 7.0

    side = ranks(tmp_path / "good", padding, tensor=2, replica=2)
    reshard(tmp_path / "good", tmp_path / "out", from_=side, to=HF, memory_limit="14 MB")
    (again,) = read(tmp_path / "out")
    assert all(again[n].tobytes() == a.tobytes() for n, a in whole().items())


def test_diff_looks_at_the_copies_of_both(tmp_path: Path) -> None:
    def change(held: Any) -> None:
        held[2]["model.norm.weight"][3] = -8.0

    source, side = plain(tmp_path / "hf"), ranks(tmp_path / "bad", change, tensor=2, replica=2)
    with pytest.raises(
        LayoutError, match=r"copies of norm differ in vllm-llama: model.norm.weight\[3\] of rank 2 is -8.0"
    ):
        diff(source, tmp_path / "bad", weights=HF, other=side)
    assert diff(source, tmp_path / "bad", weights=HF, other=side, compare_replicas=False).equal
    found = diff(tmp_path / "bad", source, weights=side, other=HF).difference  # each of the first is compared
    assert found is not None and (found.rank, found.name, found.index) == (2, "model.norm.weight", (3,))
    live = whole()
    with pytest.raises(LayoutError, match="copies of norm differ"):
        diff(live, tmp_path / "bad", weights=HF, other=side)


def test_the_commands_compare_and_say_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def change(held: Any) -> None:
        held[1]["model.norm.weight"][3] = -8.0

    ranks(tmp_path / "bad", change, replica=2)
    command = [
        "reshard",
        str(tmp_path / "bad"),
        str(tmp_path / "out"),
        "--from",
        "vllm-llama,replica=2",
        "--to",
        "hf-llama",
    ]
    assert run_command(command) == 2
    said = capsys.readouterr().err
    assert (
        said.count("\n") == 1 and "copies of norm differ in vllm-llama: model.norm.weight[3] of rank 1 is -8.0" in said
    )
    assert run_command([*command, "--no-replicas"]) == 0
    both = [
        "diff",
        str(tmp_path / "out"),
        str(tmp_path / "bad"),
        "--table",
        "hf-llama",
        "--other",
        "vllm-llama,replica=2",
    ]
    assert run_command(both) == 2
    assert run_command([*both, "--no-replicas"]) == 0


def test_the_commands_drop_what_they_are_told_to_and_no_more(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = CONFIG | {"kind": "qwen3", "head_dim": 8, "rope_theta": 1e6}
    source = tmp_path / "qwen3"
    source.mkdir()
    named = whole()
    for k in range(CONFIG["num_hidden_layers"]):
        for name in ("q_norm", "k_norm"):
            named[f"model.layers.{k}.self_attn.{name}.weight"] = np.ones(8, np.float32)
    safetensors.write(source / "model.safetensors", named, {"format": "pt"})
    (source / "config.json").write_text(json.dumps(config))
    command = ["reshard", str(source), str(tmp_path / "out"), "--from", "hf-qwen3", "--to", "vllm-llama,tensor=2"]
    wanted = (
        "hf-qwen3 stores what vllm-llama does not take: qn (model.layers.{l}.self_attn.q_norm.weight), "
        "kn (model.layers.{l}.self_attn.k_norm.weight); legal is a target that takes it, or "
        "drop = 'qn', 'kn' (--drop qn --drop kn)"
    )
    for more in ([], ["--dry-run"]):
        assert run_command([*command, *more]) == 2
        assert wanted in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
    assert run_command([*command, "--drop", "qn", "--drop", "*k_norm.weight"]) == 0
    assert "dropped     qn, kn\n" in capsys.readouterr().out
    for rank, found in enumerate(read(tmp_path / "out")):
        assert all(found[n].tobytes() == a.tobytes() for n, a in served(CONFIG, whole(), tensor=2)[rank].items())
    # refit and diff, likewise
    both = ["refit", "hf-qwen3", "vllm-llama,tensor=2", "--config", str(source)]
    assert run_command(both) == 2
    assert run_command([*both, "--drop", "?n", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["dropped"] == ["qn", "kn"]
    for tables in (["--table", "hf-qwen3", "--other", "hf-llama"], ["--table", "hf-llama", "--other", "hf-qwen3"]):
        pair = [source, tmp_path / "llama"] if tables[1] == "hf-qwen3" else [tmp_path / "llama", source]
        if not (tmp_path / "llama").exists():
            plain(tmp_path / "llama")
        asked = ["diff", *map(str, pair), *tables, "--config", str(source)]
        assert run_command(asked) == 2
        assert run_command([*asked, "--drop", "qn"]) == 2
        assert run_command([*asked, "--drop", "?n"]) == 0, capsys.readouterr().err
        assert run_command([*asked, "--drop", "?n", "--drop", "q"]) == 2
        capsys.readouterr()


def test_configs_that_differ_are_refused_by_command_and_may_be_said_to(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = plain(tmp_path / "hf")
    other = tmp_path / "other.toml"
    other.write_text(str(Weights.load("vllm-llama", CONFIG | {"rope_theta": 5e5}, dtype="f32")))
    config = tmp_path / "config.json"
    config.write_text(json.dumps(CONFIG | {"rope_theta": 1e4}))
    command = [
        "reshard",
        str(source),
        str(tmp_path / "out"),
        "--from",
        "hf-llama",
        "--to",
        str(other),
        "--config",
        str(config),
    ]
    assert run_command(command) == 2
    said = capsys.readouterr().err
    assert (
        "the configs of hf-llama and vllm-llama differ: rope_theta is 10000 at the source and 500000 at the target"
        in said
    )
    assert run_command([*command, "--differ", "rope_theta"]) == 0
    assert run_command([*command, "--differ", "heads"]) == 2
    assert "differ = 'heads' is no field in which the configs differ; legal are rope_theta" in capsys.readouterr().err

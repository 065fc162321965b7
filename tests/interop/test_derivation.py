"""Tables derived of model classes: what they say, checkpoints converted by them, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from interop.checkpoint_cases import read
from interop.derived_classes import SavedModel
from shardplan.cli import run_command
from shardplan.errors import LayoutError, ParseError
from shardplan.interop import safetensors
from shardplan.interop.derivation import derive_class_table
from shardplan.interop.derivation.disk_table import fit_size
from shardplan.movement.weights.table import WeightTable
from shardplan.movement.weights.weights import make_weights

CONFIG: dict[str, Any] = {
    "hidden_size": 8, "ffn": 12, "num_heads": 2, "head_dim": 4, "vocab_size": 20, "num_layers": 2, "num_experts": 3,
}  # fmt: skip
AT = "interop.derived_classes"


def test_a_served_class_is_derived_on_ranks_and_a_checkpoint_goes_there_and_back(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "small.json").write_text(json.dumps(CONFIG))
    out = tmp_path / "served.toml"
    given = [
        "--config",
        str(tmp_path / "small.json"),
        "--reads",
        f"{AT}:SavedModel",
        "--tensor",
        "2",
        "--out",
        str(out),
    ]
    assert run_command(["derive", f"{AT}:ServedModel", *given]) == 0
    said = capsys.readouterr().out
    assert "load_weights, 2 trials, on 1 and 2 rank(s)" in said and "elements at sizes of no trial: equal" in said
    assert all(len(line) <= 80 for line in said.splitlines() if str(tmp_path) not in line)
    forms = {p.name: str(p.form) for p in WeightTable.read(out).parameters}
    assert [n.replace("{nl}", "0") for n in forms] == ["embed", "layers.0.gate_up", "layers.0.square", "layers.0.w"]
    assert forms["embed"].endswith(" | 0: pad)@tensor, hs")
    # a model of other sizes, whose storage on 4 ranks no trial had
    big = CONFIG | {"hidden_size": 16, "ffn": 24, "vocab_size": 50, "num_layers": 3, "num_experts": 5}
    folder = tmp_path / "saved"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(big))
    disk = WeightTable.read(tmp_path / "served-disk.toml")
    rng = np.random.default_rng(0)
    named = {n: rng.random(s, np.float32) for n, s, _ in make_weights(disk, big, {}, None, "f32").parameters(0)}
    assert {n: a.shape for n, a in named.items()} == {
        n: tuple(t.shape) for n, t in SavedModel(SimpleNamespace(**big)).state_dict().items()
    }
    safetensors.write(folder / "model.safetensors", named, {"format": "pt"})
    lost = ["--drop", "layers.*.fused.*", "--drop", "ends.*", "--drop", "layers.*.square.bias"]
    there = ["--from", str(tmp_path / "served-disk.toml"), "--to", f"{out},tensor=4", *lost]
    assert run_command(["convert", str(folder), str(tmp_path / "there"), *there]) == 0
    capsys.readouterr()
    ranks = read(tmp_path / "there")
    for rank, own in enumerate(ranks):
        gate, up = (named[f"layers.2.{x}.weight"][rank * 6 : rank * 6 + 6] for x in ("gate", "up"))
        assert np.array_equal(own["layers.2.gate_up"], np.concatenate([gate, up]))
        assert np.array_equal(own["layers.1.square"], named["layers.1.square.weight"][:, rank * 4 : rank * 4 + 4])
        stacked = np.stack([named[f"layers.0.experts.{x}.weight"][rank * 6 : rank * 6 + 6] for x in range(5)])
        assert np.array_equal(own["layers.0.w"], stacked)
    assert np.array_equal(np.concatenate([own["embed"] for own in ranks])[:50], named["embed.weight"])


def test_a_class_that_loads_its_own_state_is_one_of_equal_names() -> None:
    found = derive_class_table(f"{AT}:SavedModel", CONFIG)
    assert {p.name for p in found.memory.parameters} == {p.name for p in found.disk.parameters}
    assert found.loader == "load_state_dict" and found.elements > 0
    assert dict(found.disk.atoms).keys() >= {"hs", "hs_2"}  # of a square weight each dim is cut apart
    assert "ends.0.weight" in {p.name for p in found.disk.parameters}  # a number that no field counts is a name


def test_buffers_are_parameters_where_they_are_saved() -> None:
    found = derive_class_table(f"{AT}:CentredModel", CONFIG)
    plain = derive_class_table(f"{AT}:SavedModel", CONFIG)
    assert {p.name for p in found.memory.parameters} - {p.name for p in plain.memory.parameters} == {"centre"}


@pytest.mark.parametrize(
    ("size", "fields", "text"),
    [
        (lambda a, b, c: 7, ("a", "b", "c"), "7"),
        (lambda a, b, c: 3 * a * b, ("a", "b", "c"), "3 * a * b"),
        (lambda a, b, c: a * b // c, ("a", "b", "c"), "a * b / c"),
        (lambda a, b, c: a * b + 2 * b, ("a", "b", "c"), "2 * b + a * b"),
        (lambda a, b, c: a * a, ("a", "b", "c"), None),
        (lambda a, b, c: a * b + max(0, a - 8), ("a", "b", "c"), None),  # which only three times as much shows
        (lambda a, b, c: a * b + 2 * b + max(0, a - 8), ("a", "b", "c"), None),
        (lambda a, b, c: a * b + a % 3, ("a", "b", "c"), None),
    ],
)
def test_sizes_are_products_or_sums_of_them(size: Any, fields: tuple[str, ...], text: str | None) -> None:
    values = dict(zip(fields, (4, 6, 2), strict=True))
    found = fit_size(size(**values), values, lambda by: size(**{k: n * by.get(k, 1) for k, n in values.items()}))
    assert (None if found is None else found.arithmetic) == text


@pytest.mark.parametrize(
    ("name", "more", "error", "said"),
    [
        ("nothing.such:Model", {}, ParseError, "legal is a class of a package that is here"),
        (f"{AT}:Nothing", {}, ParseError, "has no class or function Nothing"),
        ("a b", {}, ParseError, "legal is a class, as transformers:LlamaForCausalLM"),
        (f"{AT}:SavedModel", {"config": {}}, LayoutError, "legal is --config with a small config"),
        (f"{AT}:SavedModel", {"config": CONFIG | {"vocab_size": 10**6}}, LayoutError, "legal are 4000000 at most"),
        (f"{AT}:SavedModel", {"config": {"hidden_size": 8}}, LayoutError, "no model is made of the config"),
    ],
)
def test_what_cannot_be_derived_is_one_line(name: str, more: dict[str, Any], error: Any, said: str) -> None:
    with pytest.raises(error, match=said) as caught:
        derive_class_table(name, **{"config": CONFIG, **more})
    assert len(str(caught.value).splitlines()) == 1

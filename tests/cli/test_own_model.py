"""`plan` and `why` of a program of one's own: a file, or a function of a module."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from shardplan.cli import run_command
from shardplan.cli.statuses import DONE, MISTAKE
from shardplan.interop.importers.source_text import is_source

ON = ["--on", "dgx-h100", "--nodes", "1"]
MODULE = """
import torch
from torch import nn
from torch.nn import functional

NAMES = {"ids": ("batch", "sequence"), "targets": ("batch", "sequence")}


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x):
        return x + self.down(functional.relu(self.up(x)))


class Trained(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(24, 16), nn.Linear(16, 24)
        self.blocks = nn.ModuleList(Block() for _ in range(4))

    def forward(self, ids, targets):
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return functional.cross_entropy(self.head(x).view(-1, 24), targets.view(-1))


def trained():
    ids = torch.zeros(4, 8, dtype=torch.long)
    return Trained(), (ids, ids), NAMES


def nameless():
    return trained()[:2]


def logits():
    return nn.Linear(4, 4), (torch.zeros(2, 4),)


def fails():
    raise ValueError("of no\\nuse")


def nothing():
    return 3
"""
JAX = """
import jax
import jax.numpy as jnp


def product():
    x, w = jax.ShapeDtypeStruct((8, 16), jnp.float32), jax.ShapeDtypeStruct((16, 32), jnp.float32)
    return lambda x, w: x @ w, (x, w)
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder with a module, in which the command is given; nothing of it stays loaded."""
    (tmp_path / "own_program.py").write_text(MODULE)
    (tmp_path / "own_function.py").write_text(JAX)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    yield tmp_path
    for name in ("own_program", "own_function"):
        sys.modules.pop(name, None)


def told(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    assert run_command([*words, "--json"]) == DONE, capsys.readouterr().err
    return json.loads(capsys.readouterr().out)


def test_what_a_source_is() -> None:
    assert all(map(is_source, ["mine:train", "a.b:c", "x.onnx", "folder/x.pt2", "step.hlo"]))
    assert not any(map(is_source, ["llama3-8b", "gpt,layers=2", "folder/config.json", "a:b:c", "C:\\x", "a:b,seq=4"]))


def test_plan_of_a_torch_module(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("torch")
    found = told(capsys, "plan", "own_program:trained", *ON, "--batch", "32", "--top", "2")
    assert found["best"]["strategy"]["data"] * found["best"]["strategy"]["tensor"] <= 8
    assert found["notes"][0].endswith("in f32, as it is, with AdamW; the batch is a dim of ids, targets")
    one = found["answer"][0]
    assert one["tokens_per_second"] == pytest.approx(32 * 8 / one["seconds"])
    longer = told(capsys, "plan", "own_program:trained,seq=16", *ON, "--batch", "32", "--fit", "tp=2")
    assert longer["fits"] and longer["tokens_per_second"] == pytest.approx(32 * 16 / longer["seconds"])


def test_plan_of_an_onnx_file(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    onnx = pytest.importorskip("onnx")
    helper, float_ = onnx.helper, onnx.TensorProto.FLOAT
    weights = [onnx.numpy_helper.from_array(__import__("numpy").ones((16, 16), "f4"), f"w.{k}") for k in range(4)]
    nodes: list[Any] = []
    for k in range(4):
        nodes += [helper.make_node("MatMul", [f"x{k}" if k else "x", f"w.{k}"], [f"y{k}"]),
                  helper.make_node("Relu", [f"y{k}"], [f"x{k + 1}"])]  # fmt: skip
    nodes.append(helper.make_node("ReduceMean", ["x4"], ["loss"], keepdims=0))
    graph = helper.make_graph(nodes, "g", [helper.make_tensor_value_info("x", float_, [8, 16])],
                              [helper.make_tensor_value_info("loss", float_, [])], weights)  # fmt: skip
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)]), "own.onnx")
    found = told(capsys, "plan", "own.onnx", *ON, "--batch", "32")
    assert found["notes"][0].endswith("the batch is a dim of x")
    degrees = found["best"]["strategy"]
    assert degrees["data"] * degrees["pipeline"] == 8 and degrees["tensor"] == 1


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["own_program:fails"], "own_program:fails raises ValueError: of no use"),
        (["own_program:nothing"], "load: 3; legal are an ExportedProgram"),
        (["own_program:missing"], "own_program has no function missing; legal is one without arguments"),
        (["no_such_module:f"], "there is no module no_such_module; legal is one that Python finds"),
        (["own_program:logits"], "load: training of a source with 0 scalar results; legal is one, the loss"),
        (["own_program:trained,layers=2"], "plan: layers of own_program:trained, a program of its own; legal is seq"),
        (["own_program:trained", "--out", "x"], "plan: --out with own_program:trained, a program of its own"),
        (["own_program:trained", "--workers", "2"], "plan: --workers with own_program:trained"),
        (["own_program:trained", "--precision", "bf16"], "plan: --precision with own_program:trained"),
        (["none.onnx"], "none.onnx"),
        (["none.hlo"], "none.hlo is a trace, no model"),
    ],
)
def test_what_is_refused(here: Path, words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("torch")
    assert run_command(["plan", *words, *ON, "--batch", "32"]) == MISTAKE
    error = capsys.readouterr().err
    lines = [x for x in error.splitlines() if x.startswith("shardplan: ")]
    assert len(lines) == 1 and said in lines[0] and error.rstrip().endswith(lines[0]), error


MESH = ["--mesh", "x=2,y=4"]


def test_why_of_a_function_of_jax(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The sum over a dim that both operands are cut along, and what annotating them otherwise does."""
    pytest.importorskip("jax")
    said = {"x": "f32[8@x, 16@y]", "w": "f32[16@y, 32]", "output": "f32[8@x, 32]"}
    words = [x for name, t in said.items() for x in ("--annotate", f"{name}={t}")]
    (moved,) = told(capsys, "why", "own_function:product", *MESH, *words)["movements"]
    assert (moved["ops"], moved["asks"], moved["dims"]) == (["all_reduce"], "the result output",
                                                            ["sum over y -> added"])  # fmt: skip
    assert moved["received_bytes"] == 768 and "own_function.py:8" in moved["location"]  # 2 x 3/4 of 4 x 32 x 4 bytes
    assert moved["remedy"]["annotations"] == {"x": "f32[8@x, 16]", "w": "f32[16, 32]"}
    named = [x for n in said for x in ("--annotate", f"{n}={moved['remedy']['annotations'].get(n, said[n])}")]
    assert told(capsys, "why", "own_function:product", *MESH, *named)["movements"] == []
    assert run_command(["why", "own_function:product", *MESH, *words, "result", "output"]) == DONE
    assert "annotating %x as f32[8@x, 16], %w as f32[16, 32]" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["own_function:product"], "annotations of no mesh; legal is one, as mesh='x=4,y=2' or of the types"),
        (["own_function:product", *MESH, "--annotate", "x"], "--annotate 'x'; legal is NAME=TYPE"),
        (["own_function:product", *MESH, "--annotate", "v=f32[4]"], "there is no 'v'; legal are x, w, output"),
        (["own_function:product", "--measured", "t.json"], "--measured with own_function:product"),
        (["own.hlo"], "own.hlo is a trace, and takes as long as its links; legal is with --on"),
        (["own.hlo", *ON, *MESH], "a trace; legal is --on"),
        (["nowhere", *MESH], "--mesh with nowhere; legal is a program of one's own with it"),
    ],
)
def test_what_why_refuses(here: Path, words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("jax")
    (here / "own.hlo").write_text("HloModule x, num_partitions=8\n\nENTRY %main (p: f32[4]) -> f32[4] {\n"
                                  "  ROOT %p = f32[4]{0} parameter(0)\n}\n")  # fmt: skip
    assert run_command(["why", *words]) == MISTAKE
    error = capsys.readouterr().err
    assert said in error and error.count("\n") == 1, error


def test_what_has_no_batch_works_once_a_microbatch(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Run as it is for every microbatch, the program does the work that it does where its four rows are named."""
    pytest.importorskip("torch")
    asked = [*ON, "--batch", "32", "--fit", "dp=8 mbs=4"]
    named, plain = (told(capsys, "plan", f"own_program:{name}", *asked) for name in ("trained", "nameless"))
    assert plain["notes"][0].endswith("no dim is called batch")
    assert plain["mfu"] * plain["seconds"] == pytest.approx(named["mfu"] * named["seconds"])

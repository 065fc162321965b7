"""The drop-ins for DTensor on real gloo ranks: random pairs beside DTensor itself, and every other promise by name."""

import ast
import json
import os
import signal
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

import shardplan as sp

pytest.importorskip("torch", reason="the extra `torch` is not installed")
HERE = Path(__file__).parent
TORCHRUN = Path(sys.executable).with_name("torchrun")
DROP_IN = HERE / "torch_dropin_child.py"
MEANING = HERE / "torch_semantics_child.py"
KINDS = HERE / "torch_kinds_child.py"


def launch(ranks: int, script: Path, *arguments: str, seconds: float) -> dict:
    """Run a script on gloo ranks of this machine; the object that rank 0 prints. Nothing outlives the call."""
    command = [str(TORCHRUN), "--standalone", "--nproc-per-node", str(ranks), str(script), *arguments]
    process = subprocess.Popen(
        command, env=os.environ | {"OMP_NUM_THREADS": "1"}, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        start_new_session=True,
    )  # fmt: skip
    try:
        out, err = process.communicate(timeout=seconds)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait(10)
    assert "{" in out, f"exit status {process.returncode}:\n{err[-3000:]}"
    found = json.loads(out[out.index("{") :])
    return found | {"status": process.returncode, "err": err[-3000:]}


def test_equals_dtensor_on_random_pairs_of_six_ranks():
    """Six ranks leave most arrays uneven; the pairs of four ranks are a check of the other launch."""
    found = launch(6, HERE / "dtensor_child.py", "7", "80", seconds=240)
    assert found["wrong"] == 0, "\n".join(found["first"])
    assert found["status"] == 0 and found["pairs"] == 80
    assert {"strided", "strided beside partial", "plain", "in another order", "sum"} <= found["kinds"].keys()
    assert {"avg", "product", "max", "min", "bor", "bxor", "norm"} <= found["kinds"].keys()


@pytest.mark.parametrize("ranks", [4, 6, 8])
def test_orders_of_sharding(ranks: int):
    """PyTorch's own generator's orders to each other, of 2 x 2, 2 x 3, 3 x 2 and 2 x 2 x 2."""
    found = launch(ranks, HERE / "shard_order_child.py", "40", "1", seconds=400)
    assert found["wrong"] == 0, "\n".join(found["first"])
    assert found["status"] == 0 and found["orders"] == (60 if ranks == 8 else 12)
    assert found["kinds"]["in another order than the default"] > 5 and found["kinds"]["equal to DTensor's"]


@cache
def checks(child: Path = DROP_IN) -> dict:
    return launch(4, child, seconds=600)


def names(child: Path = DROP_IN) -> list[str]:
    """The checks that the child lists, read off its source: importing it would need torch's processes."""
    for node in ast.parse(child.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and node.targets[0].id == "CHECKS":
            return [e.id for e in ast.walk(node.value) if isinstance(e, ast.Name)]
    raise AssertionError("the child lists no checks")


@pytest.mark.parametrize("name", names())
def test_drop_in(name: str):
    found = checks()
    if found["skipped"].get(name):
        pytest.skip(found["skipped"][name])
    assert not found["wrong"][name], "\n".join(found["wrong"][name])


@pytest.mark.parametrize("name", names(MEANING))
def test_meaning(name: str):
    found = checks(MEANING)
    assert not found["wrong"][name], "\n".join(found["wrong"][name])


@pytest.mark.parametrize("name", names(KINDS))
def test_kinds(name: str):
    found = checks(KINDS)
    assert not found["wrong"][name], "\n".join(found["wrong"][name])


def test_a_result_that_nobody_uses_does_not_break_the_exit():
    """The child leaves such a move under way: its sums need every rank to go on, and no rank may hang or crash."""
    found = checks()
    assert found["status"] == 0, found["err"]


def test_addends_that_stay_are_moved_by_themselves() -> None:
    """A plan over the whole mesh is cheaper here, and leaves other addends."""
    from shardplan.interop.torch.layout import apart

    mesh = sp.Mesh(a=2, b=4)
    s, t = (sp.TensorType.parse(text, mesh) for text in ("f32[5, 10]{+a,+b}", "f32[5, 10]{+a}"))
    assert "to_partial" in [step.op.name for step in sp.redistribute(s, t).program.steps]
    part = sp.Mesh(b=4, devices=range(4, 8))
    found = apart(s, [0], (1, 2)), apart(t, [0], (1, 2))
    assert found == (sp.TensorType.parse("f32[5, 10]{+b}", part), sp.TensorType.parse("f32[5, 10]", part))

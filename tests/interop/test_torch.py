"""The drop-ins for DTensor on real gloo ranks: random pairs beside DTensor itself, and every other promise by name."""

import ast
import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

import shardplan as sp
from execution.torch_launch import launch

pytest.importorskip("torch", reason="the extra `torch` is not installed")
HERE = Path(__file__).parent
DROP_IN = HERE / "torch_dropin_child.py"
MEANING = HERE / "torch_semantics_child.py"
KINDS = HERE / "torch_kinds_child.py"
CITIZEN = HERE / "torch_citizen_child.py"


def told(ranks: int, script: Path, *arguments: Any, seconds: float, to_the_end: bool = False) -> dict:
    """The object that rank 0 of a script prints, with the status and the errors of the launch."""
    status, out, err = launch(ranks, script, *arguments, seconds=seconds, to_the_end=to_the_end)
    assert "{" in out, f"exit status {status}:\n{err[-3000:]}"
    return json.loads(out[out.index("{") :]) | {"status": status, "err": err[-3000:]}


def names(child: Path) -> list[str]:
    """The checks that a child lists, read off its source: importing it would need torch's processes."""
    for node in ast.parse(child.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and node.targets[0].id == "CHECKS":
            return [e.id for e in ast.walk(node.value) if isinstance(e, ast.Name)]
    raise AssertionError("the child lists no checks")


Checks = Callable[[Path], dict]


@pytest.fixture(scope="module")
def checks(request: pytest.FixtureRequest) -> Checks:
    """What came of those checks of a child that this run has; one child is about how an interpreter ends."""
    asked = {i.callspec.params.get("name") for i in request.session.items if isinstance(i, pytest.Function)
             and i.path == request.path and hasattr(i, "callspec")}  # fmt: skip

    @cache
    def run(child: Path) -> dict:
        chosen = [name for name in names(child) if name in asked] or names(child)[:1]
        return told(4, child, *chosen, seconds=600, to_the_end=child == DROP_IN)

    return run


def test_equals_dtensor_on_random_pairs_of_six_ranks():
    """Six ranks leave most arrays uneven; the pairs of four ranks are a check of the other launch."""
    found = told(6, HERE / "dtensor_child.py", 7, 80, seconds=240)
    assert found["wrong"] == 0, "\n".join(found["first"])
    assert found["status"] == 0 and found["pairs"] == 80
    assert {"strided", "strided beside partial", "plain", "in another order", "sum"} <= found["kinds"].keys()
    assert {"avg", "product", "max", "min", "bor", "bxor", "norm"} <= found["kinds"].keys()


@pytest.mark.parametrize("ranks", [4, 6, 8])
def test_orders_of_sharding(ranks: int):
    """PyTorch's own generator's orders to each other, of 2 x 2, 2 x 3, 3 x 2 and 2 x 2 x 2."""
    found = told(ranks, HERE / "shard_order_child.py", 40, 1, seconds=400)
    assert found["wrong"] == 0, "\n".join(found["first"])
    assert found["status"] == 0 and found["orders"] == (60 if ranks == 8 else 12)
    assert found["kinds"]["in another order than the default"] > 5 and found["kinds"]["equal to DTensor's"]


@pytest.mark.parametrize("name", names(DROP_IN))
def test_drop_in(name: str, checks: Checks):
    found = checks(DROP_IN)
    if found["skipped"].get(name):
        pytest.skip(found["skipped"][name])
    assert not found["wrong"][name], "\n".join(found["wrong"][name])


@pytest.mark.parametrize("name", names(MEANING))
def test_meaning(name: str, checks: Checks):
    found = checks(MEANING)
    assert not found["wrong"][name], "\n".join(found["wrong"][name])


@pytest.mark.parametrize("name", names(KINDS))
def test_kinds(name: str, checks: Checks):
    found = checks(KINDS)
    assert not found["wrong"][name], "\n".join(found["wrong"][name])


@pytest.mark.parametrize("name", names(CITIZEN))
def test_what_frameworks_see(name: str, checks: Checks):
    found = checks(CITIZEN)
    assert not found["wrong"][name], "\n".join(found["wrong"][name])


def test_a_result_that_nobody_uses_does_not_break_the_exit(checks: Checks):
    """The child leaves such a move under way: its sums need every rank to go on, and no rank may hang or crash."""
    found = checks(DROP_IN)
    assert found["status"] == 0, found["err"]


def test_addends_that_stay_are_moved_by_themselves() -> None:
    """A plan over the whole mesh is cheaper here, and leaves other addends."""
    from shardplan.interop.torch.layout import type_at_coordinate

    mesh = sp.Mesh(a=2, b=4)
    s, t = (sp.TensorType.parse(text, mesh) for text in ("f32[5, 10]{+a,+b}", "f32[5, 10]{+a}"))
    assert "to_partial" in [step.op.name for step in sp.redistribute(s, t).program.steps]
    part = sp.Mesh(b=4, devices=range(4, 8))
    found = type_at_coordinate(s, [0], (1, 2)), type_at_coordinate(t, [0], (1, 2))
    assert found == (sp.TensorType.parse("f32[5, 10]{+b}", part), sp.TensorType.parse("f32[5, 10]", part))

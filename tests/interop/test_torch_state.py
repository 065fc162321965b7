"""`redistribute_state` on real gloo ranks: every promise by name, the usual model, and random states traced."""

import ast
from functools import cache
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="the extra `torch` is not installed")
from interop.test_torch import launch

CHILD = Path(__file__).with_name("torch_state_child.py")
RANDOM = Path(__file__).with_name("random_states_child.py")


@cache
def checks() -> dict:
    return launch(4, CHILD, seconds=600)


def names() -> list[str]:
    """The checks that the child lists, read off its source: importing it would need torch's processes."""
    for node in ast.parse(CHILD.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and node.targets[0].id == "CHECKS":
            return [e.id for e in ast.walk(node.value) if isinstance(e, ast.Name)]
    raise AssertionError("the child lists no checks")


@pytest.mark.parametrize("name", names())
def test_state(name: str):
    found = checks()
    assert not found["wrong"][name], "\n".join(found["wrong"][name])


def test_random_states_equal_the_full_tensors_within_the_limit():
    found = launch(4, RANDOM, "1", "0", "24", seconds=600)
    assert found["status"] == 0 and found["states"] == 24
    assert found["wrong"] == 0 and found["over the limit"] == 0, "\n".join(found["first"])
    assert {"one mesh", "submeshes", "stages", "tied", "donated", "moved"} <= found["kinds"].keys()
    assert 0.9 < found["largest share of the limit"] <= 1  # a trace that sees nothing would prove nothing

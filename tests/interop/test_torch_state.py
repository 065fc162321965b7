"""`redistribute_state` on real gloo ranks: every promise by name, the usual model, and random states traced."""

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="the extra `torch` is not installed")
from interop.test_torch import checks, names, told  # noqa: F401  # pyright: ignore[reportUnusedImport]

CHILD = Path(__file__).with_name("torch_state_child.py")
RANDOM = Path(__file__).with_name("random_states_child.py")


@pytest.mark.parametrize("name", names(CHILD))
def test_state(name: str, checks: Any):  # noqa: F811
    found = checks(CHILD)
    assert not found["wrong"][name], "\n".join(found["wrong"][name])


def test_random_states_equal_the_full_tensors_within_the_limit():
    found = told(4, RANDOM, 1, 0, 24, seconds=600)
    assert found["status"] == 0 and found["states"] == 24
    assert found["wrong"] == 0 and found["over the limit"] == 0, "\n".join(found["first"])
    assert {"one mesh", "submeshes", "stages", "tied", "donated", "moved"} <= found["kinds"].keys()
    assert 0.9 < found["largest share of the limit"] <= 1  # a trace that sees nothing would prove nothing

"""`interop.jax.reshard` under random stacks of transformations, arguments and meshes, beside JAX's own constraint.

What needs eight devices runs in a child process (`jax_random_checks.py`).
"""

from typing import Any

import pytest

from execution.jax_child import said
from interop.jax_random_checks import PARTS

pytest.importorskip("jax")


def check_found(found: dict[str, Any], most_refused: float) -> None:
    assert found["wrong"] == {}
    seen = found["seen"]
    assert sum(seen.values()) and seen.get("right raw", 0) == 0, seen
    assert seen["right right"] >= (1 - most_refused) * sum(seen.values()), found


def test_cases_that_once_went_wrong() -> None:
    check_found(said("interop/jax_random_checks.py", "known")["known"], 0.25)


@pytest.mark.parametrize("part", range(PARTS))
def test_random_cases_are_as_with_a_constraint(part: int) -> None:
    """Values and shardings, or one line of ours, or what JAX's own constraint raises there too."""
    check_found(said("interop/jax_random_checks.py", f"part_{part}")[f"part_{part}"], 0.4)

"""`interop.jax.reshard` under random stacks of transformations, arguments and meshes, beside JAX's own constraint.

What needs eight devices runs in a child process (`jax_random_checks.py`).
"""

from typing import Any

import pytest

from execution.jax_child import said
from interop.jax_random_checks import CASES, KNOWN, PARTS

pytest.importorskip("jax")


def check_found(found: dict[str, Any], ran: int, most_told: int) -> None:
    """Of those that JAX runs, so many, all are right, but for some whose source nobody says, or not as the type."""
    assert found["wrong"] == {}
    seen = found["seen"]
    assert set(seen) <= {"right right", "right told", "raw raw", "raw told", "raw right"}, seen
    assert sum(n for words, n in seen.items() if words.startswith("right")) == ran, seen
    assert seen["right right"] > 0 and seen.get("right told", 0) <= most_told, found


def test_cases_that_once_went_wrong() -> None:
    check_found(said("interop/jax_random_checks.py", "known")["known"], len(KNOWN), 1)


@pytest.mark.parametrize("part", range(PARTS))
def test_random_cases_are_as_with_a_constraint(part: int) -> None:
    """Values and shardings, or one line of ours, or what JAX's own constraint raises there too."""
    check_found(said("interop/jax_random_checks.py", f"part_{part}")[f"part_{part}"], CASES, CASES // 8)

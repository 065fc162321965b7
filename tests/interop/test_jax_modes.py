"""`interop.jax.reshard` by kinds of axes (Auto, Explicit, Manual) and transformations: right, or one line of ours.

What needs eight devices runs once, in a child process (`jax_mode_checks.py`).
"""

import re
from typing import Any

import pytest

from execution.jax_child import said_to_tests

pytest.importorskip("jax")

AUTO = r"BackendError: reshard: inside jit, in auto mode, an array does not carry its sharding .*; pass source=, .*"
MIXED = r"BackendError: reshard: inside jit, over the Auto axes [ab], an array does not carry its sharding .*; pass .*"
STAYS = (
    r"BackendError: reshard: P\('b', 'a'\) is on a mesh with the Explicit axes a(, b)?, but inside jit an array in "
    r"auto mode \(float32\[16,24\]\) stays so; legal is a mesh of Auto axes here, or reshard outside jit"
)
OTHERWISE = {  # by case: what it says, if it is not right; the last that matches holds
    "AA(, set)?: (jit|vmap)": AUTO,
    "AA, set: grad": r"at P\(\)",  # nobody needs the moved array, and JAX chooses where the gradient lies
    "(EA|AE)(, set)?: (jit|vmap|grad)": MIXED,
    "AA to E.: jit": STAYS,
    "EA, wrong source: jit": (
        r"BackendError: reshard: source= says P\('b', 'a'\), but the array's type is float32\[16@a,24\]; legal is "
        r"P\('a',\) over the Explicit axes a"
    ),
    "AE(, jit)?: over a, (from columns to rows|grad)": r"at P\('a',\)",  # where JAX puts it even if nothing moves
    "EA, one dim by both, Auto first: jit": (
        r"BackendError: reshard: P\(\('b', 'a'\),\) cuts a dim over \('b', 'a'\), the Auto axis b before an Explicit "
        r"one, for which JAX has no type inside jit; legal are Explicit axes first, or reshard outside jit"
    ),
    ".*: over all(, no source)?": (
        r"BackendError: reshard: .* inside a shard_map over a, b, along which every device has an array of its own; "
        r"legal are collectives of jax.lax there, or reshard outside of it"
    ),
    ".*: over a, moved to a": (
        r"BackendError: reshard: P\(.*\) to P\('a',\) inside a shard_map over a, along which every device has an array "
        r"of its own; legal are shardings over b there, or reshard outside of it"
    ),
}


@pytest.fixture(scope="module")
def seen(request: pytest.FixtureRequest) -> dict[str, Any]:
    return said_to_tests(request, "interop/jax_mode_checks.py")


@pytest.mark.parametrize("where", ["in_jit", "in_shard_map"])
def test_every_mode_is_right_or_says_what_is_legal(where: str, seen: dict[str, Any]) -> None:
    assert len(seen[where]) > 30, seen[where]
    for case, found in seen[where].items():
        expected = next((says for named, says in reversed(OTHERWISE.items()) if re.fullmatch(named, case)), "right")
        assert re.fullmatch(expected, found), (case, found)

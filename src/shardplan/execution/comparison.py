"""Whether a shard is what the reference has: bit for bit, but for results of floats computed, which may be rounded."""

from __future__ import annotations

import numpy as np

from shardplan.core.ops.compute import computing
from shardplan.core.program import Program
from shardplan.core.walk import program_leaves

# Results that are computed in floats may differ from the reference's by the order of additions: by some units in the
# last place of dtypes of 4 bytes and more, and of narrower ones (bf16 has 8 bits) by about one.
TOLERANCE, NARROW_TOLERANCE = 1e-6, 1e-2


def first_difference(got: np.ndarray, want: np.ndarray, rounded: bool) -> tuple[int, ...] | None:
    """Return the index of the first element that differs (of what is `rounded`, by more than that), or None.

    Both are of one shape and dtype.
    """
    if np.array_equal(got, want, equal_nan=want.dtype.kind in "fcV"):
        return None
    unequal = ~np.asarray(got == want)
    if rounded and want.dtype.kind in "fcV":
        wide = np.complex128 if want.dtype.kind == "c" else np.float64
        tolerance = TOLERANCE if want.dtype.itemsize >= 4 else NARROW_TOLERANCE
        unequal = ~np.isclose(got.astype(wide), want.astype(wide), rtol=tolerance, atol=tolerance, equal_nan=True)
    return tuple(int(k) for k in np.argwhere(unequal)[0]) if unequal.any() else None


def computes(program: Program) -> bool:
    """Say whether a program does more than move and reduce."""
    return any(computing(leaf.op) is not None for leaf in program_leaves(program))

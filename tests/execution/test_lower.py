"""The bytes that JAX moves where it has no such collective."""

import shardplan as sp
from shardplan.core.ops import AllReduce
from shardplan.execution.jax.lower import moved_bytes


def test_other_reductions_than_sums_move_tiles_of_one_size() -> None:
    """Four elements over three devices are padded to six: two tiles of 8 bytes are received, added up, and two more."""
    t = sp.TensorType("i32", (4,), (None,), sp.Mesh(x=3), partial={"x": "product"})
    assert moved_bytes(AllReduce(("x",), "product"), t) == dict.fromkeys(range(3), 2 * 8 + 2 * 8)

"""What backends share: segments of chains, and the bytes that JAX moves where it has no such collective."""

from hypothesis import given
from hypothesis import strategies as st

import shardplan as sp
from shardplan.core.ops import AllReduce
from shardplan.execution.jax.lower import moved_bytes
from shardplan.execution.lower import SEGMENT, segments_of


@given(st.integers(0, 2**21), st.sampled_from((1, 2, 4, 8, 16)), st.integers(1, 9))
def test_segments_are_as_few_as_their_size_allows(n: int, itemsize: int, chunks: int) -> None:
    """They cover all elements, none is above the bound, and there are no more than that or the chunks ask for."""
    found = segments_of(n, itemsize, chunks)
    assert [k for a, b in found for k in (a, b)] == sorted([0, n, *(2 * [b for _, b in found[:-1]])] if found else [])
    assert all(0 < (b - a) * itemsize <= SEGMENT for a, b in found)
    assert len(found) == min(n, max(chunks, -(-n * itemsize // SEGMENT)))


def test_other_reductions_than_sums_move_tiles_of_one_size() -> None:
    """Four elements over three devices are padded to six: two tiles of 8 bytes are received, added up, and two more."""
    t = sp.TensorType("i32", (4,), (None,), sp.Mesh(x=3), partial={"x": "product"})
    assert moved_bytes(AllReduce(("x",), "product"), t) == dict.fromkeys(range(3), 2 * 8 + 2 * 8)

"""Parts of arrays as boxes and views, element by element; and the bytes that JAX moves where it lacks a collective."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

import shardplan as sp
from shardplan.core.ops import AllReduce
from shardplan.execution.jax.lower import moved_bytes
from shardplan.execution.lower import box_elements, chunk_of, flat_boxes, view_of

BOXES = st.lists(st.tuples(st.integers(0, 2), st.integers(1, 4), st.integers(0, 2)), min_size=1, max_size=3)


@given(BOXES, st.integers(1, 5))
def test_boxes_of_a_run_hold_its_elements_in_order(dims: list[tuple[int, int, int]], chunks: int) -> None:
    """Of an array with a margin on both sides of a box; chunk by chunk the whole box, and each as views have it."""
    shape, box = [a + n + b for a, n, b in dims], tuple((a, a + n) for a, n, _ in dims)
    x = np.arange(np.prod(shape)).reshape(shape)
    found: list[int] = []
    for k in range(chunks):
        start, stop = chunk_of(box_elements(box), k, chunks)
        parts = flat_boxes(box, start, stop)
        assert sum(map(box_elements, parts)) == stop - start
        for part in parts:
            view = view_of(shape, part)
            strides = [n * x.itemsize for n in view.stride]
            seen = np.lib.stride_tricks.as_strided(x.ravel()[view.offset :], view.size, strides).ravel().tolist()
            assert view.contiguous == (seen == list(range(seen[0], seen[0] + view.elements)))
            found += seen
    assert found == x[tuple(slice(a, b) for a, b in box)].ravel().tolist()


def test_other_reductions_than_sums_move_tiles_of_one_size() -> None:
    """Four elements over three devices are padded to six: two tiles of 8 bytes are received, added up, and two more."""
    t = sp.TensorType("i32", (4,), (None,), sp.Mesh(x=3), partial={"x": "product"})
    assert moved_bytes(AllReduce(("x",), "product"), t) == dict.fromkeys(range(3), 2 * 8 + 2 * 8)

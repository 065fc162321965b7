"""Ops that run some elements, or some rows, at a time: the bits of the whole, and little more than the results."""

import tracemalloc
from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardplan.core.mesh import Mesh
from shardplan.core.namespace import NUMPY
from shardplan.core.ops import AdamW, Cast, CrossEntropy, Elementwise
from shardplan.core.ops.composed import Backward
from shardplan.core.ops.compute import Compute, at_place
from shardplan.core.tensor import TensorType

ONE = Mesh(x=1)
ROWS = "shardplan.core.ops.row_tiles.TILE"
BLOCKS = "shardplan.core.ops.blocks.BLOCK"


def typed(x: np.ndarray) -> TensorType:
    return TensorType(str(x.dtype), x.shape, (), ONE)


def ran(op: Compute, arrays: list[np.ndarray]) -> list[np.ndarray]:
    return op.bind([typed(x) for x in arrays], at_place(0))(NUMPY, arrays)


def in_parts(op: Compute, arrays: list[np.ndarray], what: str, size: int) -> list[np.ndarray]:
    with mock.patch(what, size):
        return ran(op, arrays)


@given(st.lists(st.integers(1, 6), min_size=1, max_size=4), st.integers(1, 40), st.randoms(use_true_random=False))
@settings(max_examples=150)
def test_blocks_are_the_whole(shape: list[int], size: int, random) -> None:
    """Of operands that broadcast along dims, in front and inside, for blocks of every size."""
    rng = np.random.default_rng(random.randrange(2**32))
    other = tuple(n if random.random() < 0.6 else 1 for n in shape)[random.randint(0, len(shape)) :]
    arrays = [rng.standard_normal(shape).astype(np.float32), rng.standard_normal(other).astype(np.float32)]
    for op, some in ((Elementwise("a * exp(b) - silu(a)"), arrays), (Cast("bf16"), arrays[:1])):
        for whole, parts in zip(ran(op, some), in_parts(op, some, BLOCKS, size), strict=True):
            assert whole.dtype == parts.dtype and np.array_equal(whole, parts)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_an_update_in_blocks_is_the_whole(dtype: type) -> None:
    """All of its steps of a block before the next: parameter and both moments, to the bit."""
    rng = np.random.default_rng(0)
    arrays = [rng.random((37, 11)).astype(dtype) for _ in range(4)]
    arrays = [*arrays, np.array(3, np.int32)]
    for whole, parts in zip(ran(AdamW(0.1), arrays), in_parts(AdamW(0.1), arrays, BLOCKS, 50), strict=True):
        assert np.array_equal(whole, parts)


@given(st.integers(1, 9), st.integers(1, 9), st.integers(1, 60))
@settings(max_examples=80)
def test_a_loss_some_rows_at_a_time_is_the_whole(batch: int, rows: int, tile: int) -> None:
    rng = np.random.default_rng(batch * 10 + rows)
    logits, targets = rng.standard_normal((batch, rows, 7)), rng.integers(0, 7, (batch, rows)).astype(np.int32)
    targets[rng.random(targets.shape) < 0.2] = -100
    back = Backward(CrossEntropy(), (0,))
    for op, arrays in ((CrossEntropy(), [logits, targets]), (back, [logits, targets, rng.random((batch, rows))])):
        for whole, parts in zip(ran(op, arrays), in_parts(op, arrays, ROWS, tile), strict=True):
            assert whole.shape == parts.shape and np.array_equal(whole, parts)


def peak(op: Compute, arrays: list[np.ndarray]) -> int:
    """Bytes that an op has at most beside its operands."""
    bound = op.bind([typed(x) for x in arrays], at_place(0))
    tracemalloc.start()
    bound(NUMPY, arrays)
    found = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return found


def test_little_is_made_beside_the_results() -> None:
    """32 MiB of each operand: where whole arrays go from call to call there are three to six of them."""
    x = np.full((2048, 4096), 0.5, np.float32)
    assert peak(Elementwise("gelu(a) * b + tanh(a - b)"), [x, x]) < x.nbytes + 2**24
    assert peak(AdamW(0.1), [x, x, x, x, np.array(1, np.int32)]) < 3 * x.nbytes + 2**24
    targets = np.zeros(2048, np.int32)
    assert peak(CrossEntropy(), [x, targets]) < 2**25
    assert peak(Backward(CrossEntropy(), (0,)), [x, targets, np.ones(2048, np.float32)]) < x.nbytes + 2**25

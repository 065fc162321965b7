"""The lowering of every movement op, interpreted, is what the op means; its bytes are those that the op counts."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from tests import strategies

from shardplan.core.dtypes import numpy_dtype
from shardplan.core.interpret import interpret
from shardplan.core.messages import at_root
from shardplan.core.ops.collective import Collective
from shardplan.core.reference import distribute
from shardplan.core.tensor import TensorType


def shards_of(t: TensorType) -> list[np.ndarray]:
    array = np.arange(int(np.prod(t.shape)), dtype=np.int64).reshape(t.shape).astype(numpy_dtype(t.dtype))
    return distribute(array, t)


def run(op: Collective, types: Sequence[TensorType], algorithm: str) -> tuple[list[list[np.ndarray]], np.ndarray]:
    """What the lowering leaves on the devices of the results, and the bytes that each of these receives."""
    results = op.infer(*types)
    ids = np.array(sorted({d for t in (*types, *results) for d in t.mesh.devices}))
    rows = {d: k for k, d in enumerate(ids.tolist())}
    lowering = op.lowering(types, ids, algorithm)
    arrays: dict[str, list[np.ndarray]] = {}
    for k, (t, u) in enumerate(zip(types, results, strict=True)):
        arrays[f"x{k}"] = [np.zeros(0, numpy_dtype(t.dtype)) for _ in ids]
        arrays[f"y{k}"] = [np.zeros(0, numpy_dtype(u.dtype)) for _ in ids]
        for d, x in zip(t.mesh.devices, shards_of(t), strict=True):
            arrays[f"x{k}"][rows[d]] = x
        for place, d in enumerate(u.mesh.devices):
            arrays[f"y{k}"][rows[d]] = np.full(u.local_shape(place), 77).astype(numpy_dtype(u.dtype))
    interpret(lowering, arrays, op.name)
    received = np.zeros(len(ids), dtype=np.int64)
    for one in lowering.rounds():
        for take in one.takes:
            received += take.target.elements() * types[0].itemsize
    outs = [[arrays[f"y{k}"][rows[d]] for d in u.mesh.devices] for k, u in enumerate(results)]
    return outs, received[[rows[d] for d in results[0].mesh.devices]]


def check(op: Collective, types: Sequence[TensorType]) -> None:
    results = op.infer(*types)
    expected = op.reference([shards_of(t) for t in types], types)
    for algorithm in op.algorithms:
        outs, received = run(op, types, algorithm)
        for u, found, want in zip(results, outs, expected, strict=True):
            held = at_root(u)
            for place in np.flatnonzero(held):
                assert np.array_equal(found[place], want[place]), (op, algorithm, [str(t) for t in types], place)
        counted = op.received(*types)
        assert received.sum() == counted.sum(), (op, algorithm, [str(t) for t in types])
        if algorithm == op.algorithms[0]:  # in a ring the parts of uneven shards meet others
            assert received.tolist() == counted.tolist(), (op, [str(t) for t in types])


@given(strategies.applied(), st.integers(1, 3))
def test_a_lowering_does_what_the_op_means(applied: tuple[Collective, TensorType], chunks: int) -> None:
    op, t = applied
    if chunks > 1 and hasattr(op, "chunks"):
        op = replace(op, chunks=chunks)  # type: ignore[call-arg]
    check(op, [t])

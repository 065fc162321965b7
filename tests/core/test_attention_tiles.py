"""Attention a few rows of queries at a time: the values of its steps in every namespace, and few scores at once."""

from __future__ import annotations

import tracemalloc
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from shardplan.core.namespace import NUMPY, Namespace
from shardplan.core.ops import Attention, Backward, query_tiles
from shardplan.core.ops.compute import Compute, at_place
from shardplan.core.tensor import TensorType
from shardplan.errors import MissingExtra, optional

Arrays = Sequence[np.ndarray]


def _typed(*texts: str) -> list[TensorType]:
    return [TensorType.parse(text, "x=2") for text in texts]


# A device has half of the sequence: its first query is not the first of all.
CASES: dict[str, tuple[Attention, list[TensorType]]] = {
    "causal": (Attention(), _typed("f64[2, 12@x, 2, 3, 4]", "f64[2, 12, 2, 4]", "f64[2, 12, 2, 5]")),
    "whole": (Attention(causal=False), _typed("f64[2, 12@x, 2, 3, 4]", "f64[2, 9, 2, 4]", "f64[2, 9, 2, 5]")),
    "zigzag": (Attention(zigzag=3, scale=0.7), _typed("f64[1, 12, 2, 1, 4]", "f64[1, 12, 2, 4]", "f64[1, 12, 2, 4]")),
    "cache": (Attention(), _typed("f64[2, 6@x, 2, 3, 4]", "f64[2, 20, 2, 4]", "f64[2, 20, 2, 5]", "i32[]")),
    "window": (
        Attention(window=4, cap=0.8),
        _typed("f64[2, 6@x, 2, 3, 4]", "f64[2, 20, 2, 4]", "f64[2, 20, 2, 5]", "i32[]"),
    ),
    "packed": (
        Attention(window=5, segments=True, sinks=True),
        _typed(
            "f64[2, 12@x, 2, 3, 4]", "f64[2, 12, 2, 4]", "f64[2, 12, 2, 5]", "i32[2, 12@x]", "i32[2, 12]", "f64[2, 3]"
        ),
    ),
}


def _arrays(types: Sequence[TensorType], place: int) -> list[np.ndarray]:
    rng = np.random.default_rng(5)
    shapes = [(t.local_shape(place), t.dtype) for t in types]
    ids = [
        np.arange(np.prod(s)).reshape(s).astype(np.int32) // 3 % 2 if s else np.full(s, 11, np.int32) for s, _ in shapes
    ]
    return [k if d == "i32" else rng.normal(size=s) for k, (s, d) in zip(ids, shapes, strict=True)]


def _namespaces() -> dict[str, tuple[Namespace, Any]]:
    found: dict[str, tuple[Namespace, Any]] = {"numpy": (NUMPY, np.asarray)}
    try:
        torch = optional("torch", "torch")
    except MissingExtra:
        return found
    from shardplan.execution.torch.compute import torch_namespace

    return found | {"torch": (torch_namespace(torch.device("cpu")), torch.from_numpy)}


@pytest.mark.parametrize("name", CASES)
def test_rows_of_queries_say_what_the_steps_say(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    op, types = CASES[name]
    back = Backward(op, (0, 1, 2, *((5,) if op.sinks else ())))
    cases: list[tuple[Compute, list[TensorType]]] = [(op, types), (back, [*types, *op.infer(*types)])]
    for one, given in cases:
        for place in (0, 1):
            arrays = _arrays(given, place)
            want = one.bind(given, at_place(place))(NUMPY, arrays)
            for xp, into in _namespaces().values():
                for most in (1, 100):  # one row, and several, the last ones fewer
                    with monkeypatch.context() as patch:
                        patch.setattr(query_tiles, "TILE", most)
                        run = one.bind(given, at_place(place))
                    got = run(xp, [into(x) for x in arrays])
                    for a, b in zip(got, want, strict=True):
                        np.testing.assert_allclose(np.asarray(a), b, rtol=1e-12, atol=1e-12)


def test_a_long_sequence_does_not_have_all_scores() -> None:
    types = _typed("f32[1, 1024, 8, 1, 16]", "f32[1, 1024, 8, 16]", "f32[1, 1024, 8, 16]")
    run = Attention().bind(types, at_place(0))
    arrays = [np.ones(t.local_shape(0), np.float32) for t in types]
    tracemalloc.start()
    try:
        run(NUMPY, arrays)
        most = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert most < 6 * 4 * query_tiles.TILE < 8 * 1024 * 1024 * 4  # of 8 heads' scores all in f32

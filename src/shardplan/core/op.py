"""`Op`: what every operation must say of itself.

One frozen class per operation, all its facets on it: typing rule, meaning in numpy, bytes, communication. An op never
stores types; they follow from its operands. No facet has a default that an op could forget to say.
"""

from __future__ import annotations

import abc
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar

import numpy as np

from shardplan.core.pattern import Pattern
from shardplan.core.tensor import TensorType
from shardplan.errors import TypingError

Array = np.ndarray
Shards = Sequence[Array]  # one array a device, in mesh order


@dataclass(frozen=True, slots=True)
class Op(abc.ABC):
    """An operation of a program."""

    name: ClassVar[str]
    boxed: ClassVar[bool] = False  # whether operands may lie in a table of boxes

    @abc.abstractmethod
    def infer(self, *operands: TensorType) -> tuple[TensorType, ...]:
        """Return the result types, or raise `TypingError` / `LayoutError`."""

    @abc.abstractmethod
    def reference(self, operands: Sequence[Shards], types: Sequence[TensorType]) -> list[list[Array]]:
        """Return, per result, the shards on all devices, given those of the operands and their types."""

    @abc.abstractmethod
    def received(self, *operands: TensorType) -> np.ndarray:
        """Return the bytes that each device of the result's mesh receives, int64 [devices]."""

    @abc.abstractmethod
    def rounds(self, *operands: TensorType) -> int:
        """Return the latency rounds of the step; 0 for a local op."""

    @abc.abstractmethod
    def staging(self, *operands: TensorType) -> int:
        """Return the bytes of packed send and receive buffers on the worst device; 0 for a local op."""

    @abc.abstractmethod
    def pattern(self, *operands: TensorType) -> Pattern:
        """Return the communication of the op over all devices."""


@lru_cache(maxsize=4096)
def results_of(op: Op, operands: tuple[TensorType, ...]) -> tuple[TensorType, ...]:
    """Return the result types of an op; remembered, since the layers of a model repeat the same few thousand."""
    for t in operands:
        if t.layout.boxes is not None and not op.boxed:
            raise TypingError(f"{op.name}: {t} lies in a table of boxes, which no axes say; move it to a layout first")
    return op.infer(*operands)


def poison(shape: tuple[int, ...], dtype: np.dtype[np.generic]) -> Array:
    """Return an array that must not be read; NaN or the largest integer show in whatever is made of it."""
    if dtype.kind == "b":
        return np.ones(shape, dtype=dtype)
    return np.full(shape, np.iinfo(dtype.name).max if dtype.kind in "iu" else np.nan).astype(dtype)

"""One window filled: strided pieces of stored tensors, read by as few and as long reads as pay.

A piece whose runs are contiguous at both ends is read in place. Else the bytes from its first element to its last are
read at once, where that costs less than its runs one by one, and copied from there.
"""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np

from shardplan.core.box_table import region_view
from shardplan.movement.weights.reference import convert_values
from shardplan.movement.weights.regions import merge_levels

READ, COPY = 1 / 6e9, 1 / 6e9  # seconds a byte, of a core that reads cached pages, and that copies
CALL = 3e-6  # seconds of a read, beside its bytes


class StoredTensor(Protocol):
    """A tensor on disk, as flat elements in C order."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Its shape."""
        ...

    @property
    def dtype(self) -> np.dtype[Any]:
        """Its dtype."""
        ...

    @property
    def dtype_name(self) -> str:
        """The short name of its dtype."""
        ...

    def read_into(self, target: memoryview, start: int) -> None:
        """Fill bytes from the element `start` on."""
        ...


class WindowGather:
    """Fills windows, through scratch of a fixed size."""

    def __init__(self, nbytes: int) -> None:
        """Make scratch of so many bytes."""
        self.scratch = np.empty(nbytes, dtype=np.uint8)
        self.bytes_read = 0

    def fill(
        self,
        into: np.ndarray,
        tensor: StoredTensor,
        sizes: tuple[int, ...],
        strides: tuple[tuple[int, ...], tuple[int, ...]],
        at: tuple[int, int],
        plus: int,
    ) -> None:
        """Fill a strided block of a flat array from one of a stored tensor.

        Args:
            into: 1-D, of the dtype that is wanted.
            tensor: where the elements are.
            sizes: of the block.
            strides: from element to element, in the tensor and in the array.
            at: where the block begins, in the tensor and in the array.
            plus: what is added to every element.
        """
        levels = sorted(
            ((n, s, t) for n, s, t in zip(sizes, *strides, strict=True) if n > 1), key=lambda x: (-x[1], -x[2])
        )
        self._fill(into, tensor, merge_levels(levels), at, plus)

    def _fill(
        self, into: np.ndarray, tensor: StoredTensor, levels: list[tuple[int, int, int]], at: tuple[int, int], plus: int
    ) -> None:
        width = tensor.dtype.itemsize
        same = tensor.dtype == into.dtype and not plus
        if same and (not levels or levels in ([(levels[0][0], 1, 1)],)):
            count = levels[0][0] if levels else 1
            self.read(tensor, memoryview(_bytes(into[at[1] : at[1] + count])), at[0])
            return
        elements, runs, span = 1, 1, 1
        for count, s, _ in levels:
            elements *= count
            span += (count - 1) * s
        run = levels[-1][0] if levels and levels[-1][1] == 1 and (levels[-1][2] == 1 or not same) else 1
        runs = elements // run
        cover = CALL + span * width * READ + elements * width * COPY
        apart = runs * CALL + elements * width * READ + (0 if same else elements * width * COPY)
        if span * width <= len(self.scratch) and (cover <= apart or not levels):
            self._cover(into, tensor, levels, at, span, plus)
            return
        (count, s, t), rest = levels[0], levels[1:]
        inner = 1 + sum((n - 1) * x for n, x, _ in rest)
        each = 1 if cover > apart else max((len(self.scratch) // width - inner) // max(s, 1) + 1, 1)
        for k in range(0, count, each):
            part = min(each, count - k)
            more = [(part, s, t), *rest] if part > 1 else rest
            self._fill(into, tensor, more, (at[0] + k * s, at[1] + k * t), plus)

    def _cover(
        self,
        into: np.ndarray,
        tensor: StoredTensor,
        levels: list[tuple[int, int, int]],
        at: tuple[int, int],
        span: int,
        plus: int,
    ) -> None:
        """Read from the first element to the last, and copy what is wanted."""
        held = self.scratch[: span * tensor.dtype.itemsize]
        self.read(tensor, memoryview(_bytes(held)), at[0])
        shape = [n for n, _, _ in levels]
        values = region_view(held.view(tensor.dtype), 0, shape, [s for _, s, _ in levels])
        place = region_view(into, at[1], shape, [t for _, _, t in levels])
        if tensor.dtype == into.dtype and not plus:
            wide_values, wide_place = _widest(values, place)
            wide_place[...] = wide_values
        else:
            place[...] = convert_values(values, into.dtype, plus)

    def read(self, tensor: StoredTensor, target: memoryview, start: int) -> None:
        """Read, and count."""
        self.bytes_read += len(target)
        tensor.read_into(target, start)


def _widest(a: np.ndarray, b: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """View two arrays of one shape, whose last dim is contiguous in both, as wider elements where that fits."""
    width = a.itemsize
    if not a.ndim or a.strides[-1] != width or b.strides[-1] != width:
        return a, b
    starts = [x.__array_interface__["data"][0] for x in (a, b)]
    marks = [a.shape[-1] * width, *starts, *a.strides[:-1], *b.strides[:-1]]
    for wide in (8, 4, 2):
        if wide > width and all(x % wide == 0 for x in marks):
            return a.view(f"u{wide}"), b.view(f"u{wide}")
    return a, b


def _bytes(flat: np.ndarray) -> Any:
    return flat.view(np.uint8)

"""A lowering run on all devices at once, with numpy: what its data means, and what an op that says no other is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from shardplan.core.box_table import region_view
from shardplan.core.dtypes import COMBINE, identity, numpy_dtype
from shardplan.core.lowering import BufferBlock, Copy, Kernel, Lowering, Region, match_messages
from shardplan.core.namespace import NUMPY
from shardplan.core.op import Array


def interpret(lowering: Lowering, arrays: Mapping[str, Sequence[Array]], what: str) -> None:
    """Run a lowering of all devices that take part; `arrays` has by buffer one a device, and results are filled in.

    Raises `TypingError`, which `what` opens, where what is put is not what is taken.
    """
    ids = lowering.devices.tolist()
    held = {n: [np.empty(k, numpy_dtype(b.dtype)) for k in b.elements.tolist()] for n, b in lowering.buffers.items()}
    held |= {name: list(shards) for name, shards in arrays.items()}
    for one in lowering.rounds():
        came = [(row, into, read(held, frm, sender)) for sender, row, frm, into in match_messages(one, ids, what)]
        for copy in one.meanwhile:
            _copy(held, copy)
        for kernel in one.kernels:
            _run_kernel(held, kernel)
        for row, into, elements in came:
            write(held, into, row, elements)
        for copy in one.then:
            _copy(held, copy)


def _copy(held: Mapping[str, Sequence[Array]], copy: Copy) -> None:
    for row in np.flatnonzero(copy.target.elements()).tolist():
        old = read(held, copy.target, row)
        if copy.source is None:
            new = np.full_like(old, identity(copy.fold or "sum", old.dtype))
        else:
            new = read(held, copy.source, row)
            new = COMBINE[copy.fold](old, new).astype(old.dtype) if copy.fold else new
        write(held, copy.target, row, new)


def _run_kernel(held: Mapping[str, Sequence[Array]], kernel: Kernel) -> None:
    for row in np.flatnonzero(kernel.live).tolist():
        arrays = [_block(held, block, row).reshape(block.shape[row]) for block in kernel.sources]
        with np.errstate(all="ignore"):
            found = kernel.run(NUMPY, arrays, kernel.numbers[row].tolist())
        for block, x in zip(kernel.targets, found, strict=True):
            _block(held, block, row)[...] = x.reshape(-1)


def _block(held: Mapping[str, Sequence[Array]], block: BufferBlock, row: int) -> Array:
    start = int(block.start[row])
    return held[block.buffer][row].reshape(-1)[start : start + int(block.elements[row])]


def _view(array: Array, region: Region, row: int) -> Array:
    box = region.box[row]
    if region.strides is not None:
        strides = region.strides[row]
        return region_view(array, box[:, 0] @ strides, box[:, 1] - box[:, 0], strides)
    if len(box) != array.ndim:
        return array.reshape(-1)[box[0, 0] : box[0, 1]]
    return array[tuple(slice(a, b) for a, b in box)]


def _run(n: int, chunk: tuple[int, int]) -> slice:
    c, count = chunk
    return slice(n * c // count, n * (c + 1) // count)


def read(held: Mapping[str, Sequence[Array]], region: Region, row: int) -> Array:
    """Return a copy of the elements of a device's region, in row-major order."""
    view = _view(held[region.buffer][row], region, row)
    return view.reshape(-1)[_run(view.size, region.chunk)].copy()


def write(held: Mapping[str, Sequence[Array]], region: Region, row: int, elements: Array) -> None:
    """Fill a device's region."""
    view = _view(held[region.buffer][row], region, row)
    whole = view.reshape(-1).copy()
    whole[_run(view.size, region.chunk)] = elements
    view[...] = whole.reshape(view.shape)

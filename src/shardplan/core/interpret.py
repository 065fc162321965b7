"""A lowering run on all devices at once, with numpy: what its data means, and what an op that says no other is."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Mapping, Sequence

import numpy as np

from shardplan.core.dtypes import COMBINE, identity, numpy_dtype
from shardplan.core.lowering import Copy, Lowering, Region
from shardplan.core.op import Array
from shardplan.errors import TypingError


def interpret(lowering: Lowering, arrays: Mapping[str, Sequence[Array]], what: str) -> None:
    """Run a lowering of all devices that take part; `arrays` has by buffer one a device, and results are filled in.

    Raises `TypingError`, which `what` opens, where what is put is not what is taken.
    """
    ids = lowering.devices.tolist()
    held = {n: [np.empty(k, numpy_dtype(b.dtype)) for k in b.elements.tolist()] for n, b in lowering.buffers.items()}
    held |= {name: list(shards) for name, shards in arrays.items()}
    for one in lowering.rounds():
        mail: dict[tuple[int, int], deque[Array]] = defaultdict(deque)
        for put in one.puts:
            for row in np.flatnonzero(put.source.elements()).tolist():
                mail[ids[row], int(put.peer[row])].append(read(held, put.source, row))
        for copy in one.meanwhile:
            _copy(held, copy)
        for take in one.takes:
            for row in np.flatnonzero(take.target.elements()).tolist():
                pair, n = (int(take.peer[row]), ids[row]), int(take.target.elements()[row])
                came = mail[pair].popleft() if mail[pair] else None
                if came is None or came.size != n:
                    sent = "nothing" if came is None else f"{came.size} elements"
                    raise TypingError(
                        f"{what}: device {pair[1]} takes {n} elements from device {pair[0]}, which puts {sent}"
                    )
                write(held, take.target, row, came)
        for copy in one.then:
            _copy(held, copy)
        left = [pair for pair, messages in mail.items() if messages]
        if left:
            raise TypingError(f"{what}: device {left[0][0]} puts what device {left[0][1]} does not take")


def _copy(held: Mapping[str, Sequence[Array]], copy: Copy) -> None:
    for row in np.flatnonzero(copy.target.elements()).tolist():
        old = read(held, copy.target, row)
        if copy.source is None:
            new = np.full_like(old, identity(copy.fold or "sum", old.dtype))
        else:
            new = read(held, copy.source, row)
            new = COMBINE[copy.fold](old, new).astype(old.dtype) if copy.fold else new
        write(held, copy.target, row, new)


def _view(array: Array, region: Region, row: int) -> Array:
    box = region.box[row]
    if region.strides is not None:
        flat, strides = array.reshape(-1), region.strides[row]
        sizes = box[:, 1] - box[:, 0]
        return np.lib.stride_tricks.as_strided(flat[box[:, 0] @ strides :], sizes, strides * flat.strides[0])
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

"""Parts of distributed values: some positions along every dim, on all devices, under the value's true type.

A movement op treats every element by itself: where it goes depends on the boxes, not on its value. So a program may be
run on part of the positions of each dim, with the same op, types and messages, and devices that hold only those
positions of their boxes. A large array is run part by part in little memory.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import cast

import numpy as np
from numpy.typing import NDArray

from shardplan.core.layout import Layout
from shardplan.core.mesh import Mesh
from shardplan.core.op import Array, Shards
from shardplan.core.ops.collective import Collective
from shardplan.core.program import Program
from shardplan.core.step import Step
from shardplan.core.tensor import TensorType
from shardplan.core.walk import open_together, posted_steps, walk

Positions = tuple[NDArray[np.int64], ...]  # ascending, one array a dim


@dataclass(frozen=True, eq=False)
class Part:
    """What `Collective.move` asks of a type, for a part: boxes and shapes count the positions that are there.

    >>> t = TensorType.parse("f32[8@x]", "x=2")
    >>> Part(t, (np.array([1, 5, 6]),)).boxes().tolist()
    [[[0, 1]], [[1, 3]]]
    """

    whole_type: TensorType
    positions: Positions

    @property
    def dtype(self) -> str:
        """The element type."""
        return self.whole_type.dtype

    @property
    def mesh(self) -> Mesh:
        """The mesh of the whole."""
        return self.whole_type.mesh

    @property
    def layout(self) -> Layout:
        """The layout of the whole."""
        return self.whole_type.layout

    @property
    def atoms(self) -> tuple[tuple[int, ...], ...]:
        """The prime sub-axes of every dim of the whole."""
        return self.whole_type.atoms

    def boxes(self) -> NDArray[np.int64]:
        """Return the boxes of all devices among the positions, int64 [devices, ndim, 2]."""
        return self._boxes

    @cached_property
    def _boxes(self) -> NDArray[np.int64]:
        whole = self.whole_type.boxes()
        out = np.empty_like(whole)
        for d, positions in enumerate(self.positions):
            out[:, d] = np.searchsorted(positions, whole[:, d])
        return out

    def local_shape(self, device: int = 0) -> tuple[int, ...]:
        """Return the shape of what the device at a place of the mesh holds of the part."""
        box = self.boxes()[device]
        return tuple((box[:, 1] - box[:, 0]).tolist())


def run_part(program: Program, name: str, shards: Shards, positions: Positions) -> dict[str, list[Array]]:
    """Run what a program makes of one input by moving it, on a part.

    `shards` is what the input's devices hold of the part, in mesh order. Returns, by name, what devices hold of the
    outputs that are the input, moved.
    """
    values = {name: list(shards)}
    for visit in walk(open_together(program)[0]):
        for operand, result in moved_values(visit.step):
            if operand in values:
                t = program.types[operand]
                before, after = (cast("TensorType", Part(x, positions)) for x in (t, program.types[result]))
                values[result] = visit.step.op.move(values[operand], before, after)  # pyright: ignore
        for gone in visit.freed:
            values.pop(gone, None)
    return {output: values[output] for output in program.outputs if output in values}


def moved_values(step: Step) -> tuple[tuple[str, str], ...]:
    """Return the operands that a step moves, each with its result; none of a step that computes."""
    moves = [s for s in posted_steps(step) if isinstance(s.op, Collective)]
    return tuple(pair for s in moves for pair in zip(s.operands, s.results, strict=True))


def descent(program: Program, name: str) -> dict[str, TensorType]:
    """Return, by name, the types of all values that are one input, moved; the input first."""
    found = {name: program.types[name]}
    for step in program.steps:
        found |= {result: program.types[result] for operand, result in moved_values(step) if operand in found}
    return found


def corners(types: Iterable[TensorType]) -> Positions:
    """Return, of each dim, the first and the last position of every run that no box of any device cuts.

    Inside a run every element goes the same way, so these few positions say how all the others are moved.
    """
    ends: list[set[int]] = []
    for t in types:
        boxes = t.boxes()
        ends = ends or [set() for _ in t.shape]
        for d, here in enumerate(ends):
            here.update(p for cut in np.unique(boxes[:, d]).tolist() for p in (cut - 1, cut) if 0 <= p < t.shape[d])
    return tuple(np.array(sorted(here), dtype=np.int64) for here in ends)


def blocks(shape: tuple[int, ...], most: int) -> Iterator[Positions]:
    """Yield the positions of blocks of at most `most` elements that make up an array, in row-major order.

    >>> [[p.tolist() for p in block] for block in blocks((2, 5), 3)]
    [[[0], [0, 1, 2]], [[0], [3, 4]], [[1], [0, 1, 2]], [[1], [3, 4]]]
    """
    steps: list[int] = []  # of each dim as much as fits beside the whole of the minor ones, so that blocks are runs
    for d in reversed(range(len(shape))):
        inner = math.prod(shape[d + 1 :])
        steps.insert(0, min(shape[d], max(1, most // inner)))
    runs = [range(0, n, step) for n, step in zip(shape, steps, strict=True)]
    for starts in itertools.product(*runs):
        ends = (min(a + step, n) for a, step, n in zip(starts, steps, shape, strict=True))
        yield tuple(np.arange(a, b) for a, b in zip(starts, ends, strict=True))


def numbers(shape: tuple[int, ...], positions: Positions, modulo: int) -> Array:
    """Return the row-major numbers, modulo `modulo`, of the elements at the positions of an array of `shape`.

    >>> numbers((3, 4), (np.array([1, 2]), np.array([3])), 10).tolist()
    [[7], [1]]
    """
    out = np.zeros((1,) * len(shape), dtype=np.int64)  # below modulo, so that two of them add up below 2**63
    for d, at in enumerate(positions):
        stride = math.prod(shape[d + 1 :]) % modulo
        along = np.array([p % modulo * stride % modulo for p in at.tolist()], dtype=np.int64)
        out = out + along.reshape([-1 if k == d else 1 for k in range(len(shape))])
        np.subtract(out, modulo, out=out, where=out >= modulo)
    return out

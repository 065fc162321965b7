"""`Op`: what every operation must say of itself.

One frozen class per operation, all its facets on it: typing rule, meaning in numpy, bytes, communication. An op never
stores types; they follow from its operands. No facet has a default that an op could forget to say.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from typing import ClassVar, Self

import numpy as np

from shardplan.core.box_table import BoxTable
from shardplan.core.lowering import Ints, Lowering
from shardplan.core.mesh import Mesh
from shardplan.core.pattern import Pattern
from shardplan.core.tensor import TensorType
from shardplan.errors import TypingError

Array = np.ndarray
Shards = Sequence[Array]  # one array a device, in mesh order


@dataclass(frozen=True, slots=True)
class Op(abc.ABC):
    """An operation of a program."""

    name: ClassVar[str]
    boxed: ClassVar[bool] = False  # whether operands and results may lie in a table of boxes
    peers: ClassVar[int] = 0  # on one mesh, outside groups: 1 where a device has one each way, 2 where any number
    # Unannotated, so that they are no fields before an op's own.
    chunks = 1  # parts that it runs in one after another
    aliases = tuple[tuple[int, int], ...]()  # pairs (result, operand): it may take the storage, where nobody reads on
    view = False  # whether its results are its operands' storage, read on or not
    algorithm = ""  # by which it is composed of messages, whatever a library has; empty where nobody chose

    @property
    def cuttable(self) -> bool:
        """Whether its chunks can be set."""
        return any(field.name == "chunks" for field in fields(self))

    def in_chunks(self, chunks: int) -> Self:
        """Return it in so many chunks, itself where they cannot be set."""
        return replace(self, chunks=chunks) if self.cuttable else self

    def nearest(self, blocks: tuple[int, ...]) -> Self:
        """Return it with the nearest of several holders sending, in nested blocks of ids; itself where none chooses."""
        return self

    def compositions(self, *operands: TensorType) -> Sequence[Self]:
        """Return it by every algorithm that it may be composed by where a library has no collective for it."""
        return ()

    def members(self, t: TensorType) -> tuple[str, ...]:
        """Return the axes of the groups that an operand's devices form, major to minor; none where they form none."""
        return ()

    @abc.abstractmethod
    def infer(self, *operands: TensorType) -> tuple[TensorType, ...]:
        """Return the result types, or raise `TypingError` / `LayoutError`."""

    @abc.abstractmethod
    def reference(self, operands: Sequence[Shards], types: Sequence[TensorType]) -> list[list[Array]]:
        """Return, per result, the shards on all devices, given those of the operands and their types."""

    @abc.abstractmethod
    def received_bytes(self, *operands: TensorType) -> np.ndarray:
        """Return the bytes that each of its `devices` receives, int64 [devices]."""

    @abc.abstractmethod
    def sent_bytes(self, *operands: TensorType) -> tuple[np.ndarray, np.ndarray]:
        """Return the ids of the devices that hold the operands, and the bytes that each of them sends, int64 both."""

    @abc.abstractmethod
    def rounds(self, *operands: TensorType) -> int:
        """Return the latency rounds of the step; 0 for a local op."""

    @abc.abstractmethod
    def staging(self, *operands: TensorType) -> int:
        """Return the bytes of packed send and receive buffers on the worst device; 0 for a local op."""

    def staging_by_chunks(self, *operands: TensorType) -> Callable[[int], int]:
        """Return the staging as a function of the number of chunks; from 2 on it never rises."""
        need = self.staging(*operands)
        return lambda chunks: need

    def padding_bytes(self, *operands: TensorType) -> np.ndarray:
        """Return the bytes of padding among those that each of its `devices` receives, int64 [devices]."""
        return np.zeros_like(self.devices(*self.infer(*operands)))

    def overhang_bytes(self, *operands: TensorType) -> int:
        """Return the bytes of padding that stay behind its results, as long as these live, on the worst device."""
        return 0

    @abc.abstractmethod
    def pattern(self, *operands: TensorType) -> Pattern:
        """Return the communication of the op over all devices."""

    def named_collective(self, *operands: TensorType) -> Op | None:
        """Return the op that does the same by a collective of its own name; None where it is one, or there is none."""
        return None

    def lowering(self, operands: Sequence[TensorType], devices: Ints, algorithm: str = "") -> Lowering | None:
        """Return what the devices of those ids, int64 [devices], send, receive, copy and fold, in rounds.

        The k-th operand is the buffer "xk", the k-th result "yk". None for an op that computes, or that loops.
        """
        return None

    def devices(self, *results: TensorType) -> np.ndarray:
        """Return the ids of its devices: those of the first result's mesh, in mesh order; int64 [devices]."""
        return results[0].mesh.ids

    @property
    def meshes(self) -> tuple[Mesh, ...]:
        """The meshes that it uses inside, beside those of its operands and results."""
        return ()

    @property
    def tables(self) -> tuple[BoxTable, ...]:
        """The tables of boxes that it uses inside, as of `meshes`."""
        return ()

    @classmethod
    def moves(cls, source: TensorType, destination: TensorType) -> Sequence[Op]:
        """Return ops of this class that the planner may try on the way from one type to another; by default none."""
        return ()


@lru_cache(maxsize=4096)
def results_of(op: Op, operands: tuple[TensorType, ...]) -> tuple[TensorType, ...]:
    """Return the result types of an op; remembered, since the layers of a model repeat the same few thousand."""
    _check_boxed(op, operands)
    found = op.infer(*operands)
    _check_boxed(op, found)
    return found


def _check_boxed(op: Op, types: Sequence[TensorType]) -> None:
    for t in types:
        if t.layout.boxes is not None and not op.boxed:
            raise TypingError(f"{op.name}: {t} lies in a table of boxes; of such exchange and send move to a layout")


def base_array(x: Array) -> Array:
    """Return the array whose memory an array is a view of; itself, where it is none."""
    return base_array(x.base) if isinstance(x.base, np.ndarray) else x


def own_array(x: Array, others: set[int]) -> Array:
    """Return an array that no other shares, a copy where one does: `others` are the ids of their bases, and of its own.

    A view of a part is copied too: it would keep the whole.
    """
    memory = base_array(x)
    if memory.nbytes != x.nbytes or not x.flags.writeable or id(memory) in others:
        x = memory = np.array(x)
    others.add(id(memory))
    return x


def poison(shape: tuple[int, ...], dtype: np.dtype[np.generic]) -> Array:
    """Return an array that must not be read; NaN or the largest integer show in whatever is made of it."""
    if dtype.kind == "b":
        return np.ones(shape, dtype=dtype)
    return np.full(shape, np.iinfo(dtype.name).max if dtype.kind in "iu" else np.nan).astype(dtype)

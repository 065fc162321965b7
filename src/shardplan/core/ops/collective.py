"""`Collective`: what the ops that move or reduce share. It takes any number of operands, as one packed transfer."""

from __future__ import annotations

import abc
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import zip_longest
from typing import ClassVar

import numpy as np

from shardplan.core.dtypes import COMBINE, numpy_dtype
from shardplan.core.interpret import interpret
from shardplan.core.lowering import Buffer, Ints, Lowering, Round, side_by_side
from shardplan.core.message_totals import own_copy_bytes
from shardplan.core.messages import FIGURES, Packed
from shardplan.core.op import Array, Op, Shards, poison
from shardplan.core.pattern import Local, Messages, Pattern
from shardplan.core.round_messages import MessageCounts, RoundMessages, count
from shardplan.core.tensor import TensorType
from shardplan.errors import TypingError, excerpt

# What may be asked for of any op; one without it takes that of `INSTEAD`, or its first.
PADDED = "padded"  # the library's collective on parts of one size, the largest one's
ALGORITHMS = ("direct", "ring", "doubling", "chain", "tree", PADDED)
INSTEAD = {"tree": "ring"}  # as libraries do: only whole reductions and broadcasts have trees
SEGMENTED = ("chain", "tree")  # whose chunks are no rounds of their own, but the least segments


@dataclass(frozen=True, slots=True)
class Collective(Op):
    """An op that moves or reduces each operand by itself, all operands packed into one transfer.

    A class says its typing (`result`) and its lowering (`lower`); what it means and what it costs follow from these,
    unless the class says it shorter.
    """

    algorithms: ClassVar[tuple[str, ...]] = ("direct",)  # those it has a lowering for, the usual one first

    @abc.abstractmethod
    def result(self, t: TensorType) -> TensorType:
        """Return the type of one operand after the op."""

    def move(self, shards: Shards, t: TensorType, u: TensorType) -> list[Array]:
        """Return the shards of one operand after the op: what the lowering makes of them."""
        ids = np.unique(np.concatenate([t.mesh.ids, u.mesh.ids]))
        dtype = numpy_dtype(t.dtype)
        given = dict(zip(t.mesh.devices, shards, strict=True))
        made = {d: poison(u.local_shape(k), dtype) for k, d in enumerate(u.mesh.devices)}
        absent = np.empty(0, dtype)
        arrays = {"x": [given.get(d, absent) for d in ids.tolist()], "y": [made.get(d, absent) for d in ids.tolist()]}
        interpret(self.lower_operand(t, u, ids), arrays, self.name)
        return [made[d] for d in u.mesh.devices]

    @abc.abstractmethod
    def lower(self, t: TensorType, u: TensorType, devices: Ints, algorithm: str) -> Iterator[Round]:
        """Yield the rounds of one operand "x" that becomes "y" on the devices of those ids, int64 [devices]."""

    def buffers(self, t: TensorType, u: TensorType, devices: Ints, algorithm: str) -> dict[str, Buffer]:
        """Return the staging buffers that `lower` names, beside "x" and "y"."""
        return {}

    def lower_operand(self, t: TensorType, u: TensorType, devices: Ints, algorithm: str = "") -> Lowering:
        """Return the lowering of one operand "x" that becomes "y"; raises `TypingError` for an unknown algorithm."""
        if algorithm and algorithm not in (*ALGORITHMS, *self.algorithms):
            legal = ", ".join(dict.fromkeys((*ALGORITHMS, *self.algorithms)))
            raise TypingError(f"{self.name}: the algorithm {excerpt(algorithm)} is unknown; legal are {legal}")
        wanted = self.algorithm or algorithm
        near = (a for a in (wanted, INSTEAD.get(wanted)) if a in self.algorithms)
        chosen = next(near, self.algorithms[0])
        buffers = self.buffers(t, u, devices, chosen)
        return Lowering(devices, buffers, lambda: self.lower(t, u, devices, chosen))

    def lowering(self, operands: Sequence[TensorType], devices: Ints, algorithm: str = "") -> Lowering:
        """Lower the operands side by side; an op that lacks the algorithm takes that of `INSTEAD`, or its first one."""
        return side_by_side(
            devices,
            [(k, k, self.lower_operand(t, result_type(self, t), devices, algorithm)) for k, t in enumerate(operands)],
        )

    def infer(self, *operands: TensorType) -> tuple[TensorType, ...]:
        """Apply `result` to every operand."""
        if not operands:
            raise TypingError(f"{self.name} needs at least one operand")
        if self.algorithm and self.algorithm not in self.algorithms:
            raise TypingError(
                f"{self.name}: algorithm={excerpt(self.algorithm)}; legal are {', '.join(self.algorithms)}, or none"
            )
        if any(t.mesh != operands[0].mesh for t in operands):
            raise TypingError(f"{self.name} packs operands of one mesh; got {', '.join(map(repr, operands))}")
        return tuple(result_type(self, t) for t in operands)

    def reference(self, operands: Sequence[Shards], types: Sequence[TensorType]) -> list[list[Array]]:
        """Apply `move` to every operand."""
        return [self.move(shards, t, result_type(self, t)) for shards, t in zip(operands, types, strict=True)]

    @property
    def saying(self) -> type[Collective]:
        """Who says its bytes and staging: its class for its usual algorithm; those of another one are counted."""
        return type(self) if self.algorithm in ("", self.algorithms[0]) else Collective

    def received_bytes(self, *operands: TensorType) -> np.ndarray:
        """Sum over the operands."""
        parts = [self.saying.received_one(self, t, result_type(self, t)) for t in operands]
        return parts[0] if len(parts) == 1 else np.sum(parts, axis=0)

    def received_one(self, t: TensorType, u: TensorType) -> np.ndarray:
        """Return the bytes each device receives for one operand, int64 [devices]."""
        return lowering_counts(self, t, u).received_by(u) * u.itemsize

    def sent_bytes(self, *operands: TensorType) -> tuple[np.ndarray, np.ndarray]:
        """Sum over the operands."""
        parts = [self.saying.sent_one(self, t, result_type(self, t)) for t in operands]
        return operands[0].mesh.ids, parts[0] if len(parts) == 1 else np.sum(parts, axis=0)

    def sent_one(self, t: TensorType, u: TensorType) -> np.ndarray:
        """Return the bytes that each device sends of one operand, int64 [devices]."""
        return lowering_counts(self, t, u).sent_by(t) * t.itemsize

    def rounds(self, *operands: TensorType) -> int:
        """Return the most peers that a device hears from, in all rounds of a chunk."""
        return max(lowering_counts(self, t, result_type(self, t)).rounds for t in operands)

    def packing(self, t: TensorType, u: TensorType) -> Packed:
        """Return what the worst device packs of one operand, on either side."""
        return lowering_counts(self, t, u).packed

    def pattern(self, *operands: TensorType) -> Pattern:
        """Return the messages of all rounds, those of all operands between two devices together; or what is copied."""
        every = [one for turn in self.turns(*operands) for one in turn]
        if not every:
            return Local(
                float(sum(lowering_counts(self, t, result_type(self, t)).written * t.itemsize for t in operands))
            )
        found = RoundMessages.merge_parts(every)
        return Messages(
            found.sender, found.receiver, found.amount.astype(np.float64), self.chunks, self._kept_bytes(operands)
        )

    def _kept_bytes(self, operands: Sequence[TensorType]) -> float:
        """The bytes that a device copies of what it has; of what is reduced none, which is folded where it comes."""
        ends = [(t, result_type(self, t)) for t in operands]
        return float(sum(own_copy_bytes(t, u) for t, u in ends if t.layout.partial == u.layout.partial))

    def turns(self, *operands: TensorType) -> Iterator[list[RoundMessages]]:
        """Yield the messages of every round that has any, in bytes, those of each operand."""
        strands = [
            [(t.itemsize, one) for one in lowering_counts(self, t, result_type(self, t)).turns] for t in operands
        ]
        for parts in zip_longest(*strands):
            yield [one._replace(amount=one.amount * size) for size, one in filter(None, parts)]

    def staging(self, *operands: TensorType) -> int:
        """Return the bytes of a chunk's send and receive buffers; a single operand that is contiguous needs none."""
        return self.staging_by_chunks(*operands)(self.chunks)

    def staging_by_chunks(self, *operands: TensorType, shared: bool = False) -> Callable[[int], int]:
        """Return the bytes of the buffers as a function of the number of chunks; from 2 on it never rises.

        `shared` says that other moves share its messages, so that nothing goes straight from or into an operand.
        """
        pairs = [(t, result_type(self, t)) for t in operands]
        # Thousands of a batch are of a few types.
        known = {t: self.saying.packing(self, t, u) for t, u in dict(pairs).items()}
        packed = [known[t] for t in operands]
        pieces: list[tuple[int, int]] = []  # counted when they are first needed: one chunk is the common case

        def nbytes(chunks: int) -> int:
            # only a single operand is sent from, or received into, its own array
            alone = len(operands) == 1 and not shared
            segmented = (self.algorithm or self.algorithms[0]) in SEGMENTED and not alone
            if chunks == 1 or segmented or self.algorithm in SEGMENTED:
                return sum(
                    p.sent * (not (alone and p.sent_contiguous)) * t.itemsize
                    + p.received * (not (alone and p.received_contiguous)) * t.itemsize
                    + p.buffers * t.itemsize
                    for t, p in zip(operands, packed, strict=True)
                )
            if not pieces:
                pieces.extend(self.saying.pieces(self, t, u) for t, u in pairs)
            return sum(
                (chunk_elements(p.sent, chunks, to) + chunk_elements(p.received + p.buffers, chunks, frm)) * t.itemsize
                for t, p, (to, frm) in zip(operands, packed, pieces, strict=True)
            )

        return nbytes

    def pieces(self, t: TensorType, u: TensorType) -> tuple[int, int]:
        """Return the largest number of parts that a device sends, and that it receives, in a round."""
        return lowering_counts(self, t, u).pieces


@dataclass(frozen=True, slots=True)
class InPlace(Collective):
    """A collective that sends nothing: every device makes its new shard of its old one."""

    def received_one(self, t: TensorType, u: TensorType) -> np.ndarray:
        """Nothing moves."""
        return np.zeros(t.mesh.size, dtype=np.int64)

    def sent_one(self, t: TensorType, u: TensorType) -> np.ndarray:
        """Nothing moves."""
        return np.zeros(t.mesh.size, dtype=np.int64)

    def rounds(self, *operands: TensorType) -> int:
        """None."""
        return 0

    def packing(self, t: TensorType, u: TensorType) -> Packed:
        """Nothing."""
        return Packed(0, 0, True, True)


def moving(op: Op) -> Collective | None:
    """Return the op if it moves or reduces its operands, each to one result of its own; None of one that computes."""
    return op if isinstance(op, Collective) else None


@lru_cache(maxsize=256)
def lowering_counts(op: Collective, t: TensorType, u: TensorType) -> MessageCounts:
    """Return what the lowering of one operand costs in one chunk; remembered, since several facets ask."""
    one = op if op.algorithm in SEGMENTED else op.in_chunks(1)
    return count(t, u, lambda ids: one.lower_operand(t, u, ids))


@lru_cache(maxsize=FIGURES)
def result_type(op: Collective, t: TensorType) -> TensorType:
    """Return the type of one operand after the op; remembered, since every facet of every step asks for it."""
    return op.result(t)


def chunk_elements(elements: int, chunks: int, pieces: int) -> int:
    """Return a bound on the elements of one round when each of `pieces` parts, `elements` in all, is cut in `chunks`.

    Every part of n elements gives ceil(n / chunks) of them at most.
    """
    return min(elements, (elements + pieces * (chunks - 1)) // chunks)


def major(shape: tuple[int, ...], dim: int) -> bool:
    """Say whether a piece cut along `dim` of a local array is one contiguous run: all dims before have extent 1."""
    return all(n <= 1 for n in shape[:dim])


def reduce_in_order(shards: Shards, group: np.ndarray, reduction: str) -> Array:
    """Reduce the shards of a group in member order, each result rounded to the dtype: the order is part of meaning."""
    total = shards[group[0]]
    for m in group[1:]:
        total = COMBINE[reduction](total, shards[m]).astype(total.dtype)
    return total


def cut_box(array: Array, frm: Sequence[Sequence[int]] | np.ndarray, to: Sequence[Sequence[int]] | np.ndarray) -> Array:
    """Return the part of `array`, which holds the box `frm`, that lies in the box `to` (inside `frm`)."""
    return array[tuple(slice(b[0] - a[0], b[1] - a[0]) for a, b in zip(frm, to, strict=True))]


def meet(a: np.ndarray, b: np.ndarray) -> np.ndarray | None:
    """Return the intersection of two boxes [ndim, 2], or None when it is empty."""
    lo, hi = np.maximum(a[:, 0], b[:, 0]), np.minimum(a[:, 1], b[:, 1])
    return None if np.any(lo >= hi) else np.stack([lo, hi], axis=1)


def assemble(
    box: np.ndarray, pieces: Sequence[tuple[np.ndarray, Array]], dtype: np.dtype[np.generic], what: str
) -> Array:
    """Return the array of `box` put together from the `pieces` (box, array) that meet it, each element once."""
    out = np.empty(tuple(int(n) for n in box[:, 1] - box[:, 0]), dtype=dtype)
    filled = 0
    for frm, array in pieces:
        part = meet(frm, box)
        if part is None:
            continue
        index = tuple(slice(b - a, c - a) for (a, _), (b, c) in zip(box, part, strict=True))
        if filled + out[index].size > out.size:
            raise TypingError(f"{what}: two senders deliver the same element of the box {box.tolist()}")
        out[index] = cut_box(array, frm, part)
        filled += out[index].size
    if filled != out.size:
        raise TypingError(f"{what}: {out.size - filled} elements of the box {box.tolist()} have no sender")
    return out


def point_to_point(
    t: TensorType,
    u: TensorType,
    sender: np.ndarray,
    receiver: np.ndarray,
    nbytes: np.ndarray,
    chunks: int,
    own: float = 0.0,
) -> Messages:
    """Return messages by device id from places in the two meshes."""
    return Messages(t.mesh.ids[sender], u.mesh.ids[receiver], nbytes.astype(np.float64), chunks, own)

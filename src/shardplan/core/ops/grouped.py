"""`Grouped`: collectives in groups over axes, which a library may run itself, or which are composed of messages.

By the algorithm `padded` the library's collective runs on parts that are not of one size: each travels in a slot as
large as the largest one of its group, and what is behind it there is not read. These bytes count as bytes received and
as staging, and so say the certificate and the print-out of a plan.
"""

from __future__ import annotations

import abc
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache, lru_cache, partial
from typing import ClassVar, Self

import numpy as np

from shardplan.core.lowering import Ints
from shardplan.core.messages import Packed, at_root
from shardplan.core.op import Op
from shardplan.core.ops.collective import PADDED, SEGMENTED, Collective, result_type
from shardplan.core.pattern import Groups, InTurn, Local, Messages, Pattern, StepPattern, taking_part
from shardplan.core.round_messages import RoundMessages
from shardplan.core.tensor import TensorType

# What libraries reduce as the reference does, floating-point sums in an order of their own.
LIBRARY_REDUCTIONS = ("sum", "product", "min", "max")
LIBRARY_DTYPES = frozenset({"i8", "u8", "i32", "i64", "f16", "bf16", "f32", "f64"})
# Messages of a step up to which they are listed; the price of more is that of the library's collective.
MOST_LISTED = 2**20
SCATTERING = ("reduce_scatter", "all_to_all")  # kinds whose members send a part of what they hold to each other one


@dataclass(frozen=True, slots=True)
class Grouped(Collective):
    """A collective in groups over its axes, whose algorithm the cost model chooses by its kind."""

    kind: ClassVar[str]

    def members(self, t: TensorType) -> tuple[str, ...]:
        """Return its axes."""
        return self.axes  # pyright: ignore[reportAttributeAccessIssue, reportUnknownMemberType, reportUnknownVariableType]

    def pieces(self, t: TensorType, u: TensorType) -> tuple[int, int]:
        """One a member."""
        q = math.prod(t.mesh.span(a).size for a in self.members(t))
        return q, q

    def rounds(self, *operands: TensorType) -> int:
        """ceil(log2 q) for gathers and reductions over q devices."""
        if self.saying is Collective:
            return Collective.rounds(self, *operands)
        q = math.prod(operands[0].mesh.span(a).size for a in self.members(operands[0]))
        return math.ceil(math.log2(q)) if q > 1 else 0

    def pattern(self, *operands: TensorType) -> Pattern:
        """All groups at once, the bytes of all operands together; by an algorithm that is said its messages."""
        t = operands[0]
        places = t.mesh.group_places(self.members(t))
        if places.shape[1] < 2:
            return Local(0.0)
        padded = self.algorithm == PADDED and self._reduced_everywhere(operands)
        if self.algorithm and not padded:
            return self._as_messages(*operands)
        if padded:
            return self._as_padded(operands, places)
        held = np.zeros(len(places))
        for operand in operands:
            even = operand.all_even
            held += operand.local_bytes() if even else (operand.elements() * operand.itemsize)[places].max(axis=1)
        if self.kind in SCATTERING and not all(result_type(self, operand).all_even for operand in operands):
            # Of uneven parts the largest says how long a round takes: as much as where all are of its size.
            most = np.maximum(self.received_bytes(*operands), self.sent_bytes(*operands)[1])[places].max(axis=1)
            held = np.maximum(held, most * places.shape[1] / (places.shape[1] - 1))
        if t.layout.root:
            live = at_root(t)[places].any(axis=1)
            places, held = places[live], held[live]
        found = Groups(self.kind, t.mesh.ids[places], held, self.chunks)
        if self._everywhere(operands, places):
            return found
        if places.size * places.shape[1] > MOST_LISTED:
            return replace(found, composed=lambda: found)
        return replace(found, composed=cache(partial(replace(self, algorithm=self.algorithms[0]).pattern, *operands)))

    def compositions(self, *operands: TensorType) -> Sequence[Self]:
        """By every algorithm, where not all libraries have it and none was said."""
        if self._reduced_everywhere(operands) and all(t.all_even for o in operands for t in (o, result_type(self, o))):
            return ()
        pattern = self.pattern(*operands)
        if not isinstance(pattern, Groups) or pattern.composed is None:
            return ()
        padded = [PADDED] if PADDED in self.algorithms and self._reduced_everywhere(operands) else []
        if isinstance(pattern.composed(), Groups):  # of too many messages to list
            return [replace(self, algorithm=algorithm) for algorithm in padded]
        listed = (algorithm for algorithm in self.algorithms if algorithm != PADDED)
        return [replace(self, algorithm=algorithm) for algorithm in (*listed, *padded)]

    def _everywhere(self, operands: Sequence[TensorType], places: np.ndarray) -> bool:
        """Say whether every library has it: members with equal parts, and a reduction that all have."""
        results = [result_type(self, t) for t in operands]
        sizes = (t.elements()[places] for t in (*operands, *results) if not t.all_even)
        return self._reduced_everywhere(operands) and all(bool((size == size[:, :1]).all()) for size in sizes)

    def _reduced_everywhere(self, operands: Sequence[TensorType]) -> bool:
        """Say whether it reduces nothing, or as every library does."""
        if not any(t.layout.partial != result_type(self, t).layout.partial for t in operands):
            return True
        known = {t.layout.reduction for t in operands} <= set(LIBRARY_REDUCTIONS)
        return known and {t.dtype for t in operands} <= LIBRARY_DTYPES

    @property
    def saying(self) -> type[Collective]:
        """Of padded parts their slots say it."""
        return _Slots if self.algorithm == PADDED else Collective.saying.__get__(self)

    def part_elements(self, t: TensorType, u: TensorType) -> Ints:
        """Return the elements of the largest part that each device gives another, or is given by others: [devices]."""
        return t.elements()

    def overhang(self, t: TensorType, u: TensorType) -> int | None:
        """Return the elements behind a result into which a library puts slots itself, as long as the result lives.

        None where it cannot: slots are staged, and copied.
        """
        return None

    def padding_bytes(self, *operands: TensorType) -> Ints:
        """Return what slots hold beside parts."""
        if self.algorithm != PADDED:
            return np.zeros(operands[0].mesh.size, dtype=np.int64)
        return self.received_bytes(*operands) - replace(self, algorithm="").received_bytes(*operands)

    def overhang_bytes(self, *operands: TensorType) -> int:
        """Return what the slots of a single result hold beside it."""
        if self.algorithm != PADDED or len(operands) != 1:
            return 0
        (t,) = operands
        return (self.overhang(t, result_type(self, t)) or 0) * t.itemsize

    def _as_padded(self, operands: Sequence[TensorType], places: Ints) -> Groups:
        """Return the collective on slots."""
        given = places.shape[1] if self.kind in SCATTERING else 1
        held = sum(given * slot_bytes(self, t)[places[:, 0]] for t in operands)
        live = at_root(operands[0])[places].any(axis=1)
        held = np.asarray(held, dtype=np.float64)[live]
        copied = max(self.padding_copies(t, result_type(self, t)) for t in operands) if len(operands) == 1 else 0
        return Groups(self.kind, operands[0].mesh.ids[places[live]], held, self.chunks, copied=float(copied))

    def padding_copies(self, t: TensorType, u: TensorType) -> int:
        """Return the bytes that the busiest device copies into slots, or out of them, where of even parts it has none.

        Nothing where an array is packed in either case.
        """
        return 0

    def _as_messages(self, *operands: TensorType) -> Pattern:
        """Return the messages of the algorithm that is said, in their rounds."""
        times = 1 if self.algorithm in SEGMENTED else self.chunks
        found = [RoundMessages.merge_parts(turn) for turn in self.turns(*operands)]
        own = self._kept_bytes(operands) / times
        rounds = [
            Messages(one.sender, one.receiver, one.amount / times, own=own * (k == 0)) for k, one in enumerate(found)
        ]
        if not rounds:
            return Local(0.0)
        if len(rounds) == 1:
            return Messages(rounds[0].sender, rounds[0].receiver, rounds[0].nbytes * times, times, own * times)
        steps = (
            StepPattern(one, taking_part(one, operands[0].mesh.ids), (k - 1,) * (k > 0)) for k, one in enumerate(rounds)
        )
        return InTurn(times, tuple(steps))


def grouped(op: Op) -> Grouped | None:
    """Return the op if it is a collective in groups; None of any other."""
    return op if isinstance(op, Grouped) else None


@lru_cache(maxsize=256)
def slot_elements(op: Grouped, t: TensorType) -> Ints:
    """Return the elements of a slot of each device's group in one chunk, int64 [devices] in mesh order."""
    places = t.mesh.group_places(op.members(t))
    parts = op.part_elements(t, result_type(op, t))
    slots = np.zeros(t.mesh.size, dtype=np.int64)
    slots[places] = parts[places].max(axis=1, keepdims=True)
    return -(-slots // op.chunks)


def slot_bytes(op: Grouped, t: TensorType) -> Ints:
    """Return the bytes of a slot in all chunks together, int64 [devices] in mesh order."""
    return slot_elements(op, t) * op.chunks * t.itemsize


class _Slots(Grouped, abc.ABC):
    """What is said of padded parts, of any class: every member gives and gets a slot for each other one."""

    def received_one(self, t: TensorType, u: TensorType) -> Ints:
        """All slots but its own."""
        q = math.prod(t.mesh.span(a).size for a in self.members(t))
        return np.where(at_root(t), slot_bytes(self, t) * (q - 1), 0)

    def sent_one(self, t: TensorType, u: TensorType) -> Ints:
        """As many."""
        return _Slots.received_one(self, t, u)

    def packing(self, t: TensorType, u: TensorType) -> Packed:
        """A slot, or one for each member where parts differ, and a slot from each, unless they lie in the result.

        Several operands are packed once more where messages run.
        """
        places, whole = t.mesh.group_places(self.members(t)), self.in_chunks(1)
        q, slots = places.shape[1], slot_elements(whole, t)
        sent = q if self.kind in SCATTERING else 1
        staged = q
        if self.kind not in SCATTERING and whole.overhang(t, u) is not None:
            staged = int((t.elements()[places] < slots[places]).sum(axis=1).max(initial=0))
        slot = int(slots.max(initial=0))
        return Packed(sent * slot, q * slot, True, True, (sent + staged) * slot)

    def pieces(self, t: TensorType, u: TensorType) -> tuple[int, int]:
        """One a member."""
        return Grouped.pieces(self, t, u)

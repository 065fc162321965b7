"""`Overlapped`: an op that computes and communicates at once; all that it is, is its lowering, with kernels in rounds.

What it means, what every device receives and stages, and what its rounds take follow from the lowering.
"""

from __future__ import annotations

import abc
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar, NamedTuple

import numpy as np

from shardplan.core.dtypes import numpy_dtype
from shardplan.core.interpret import interpret
from shardplan.core.lowering import Ints, Kernel, Lowering
from shardplan.core.op import Array, Shards, poison, results_of
from shardplan.core.ops.compute import FactorTyped, LocalRun, Where
from shardplan.core.pattern import AtOnce, InTurn, Messages, Pattern, StepPattern, Work, taking_part
from shardplan.core.round_messages import RoundMessages
from shardplan.core.tensor import TensorType
from shardplan.errors import TypingError


@dataclass(frozen=True, slots=True)
class Overlapped(FactorTyped):
    """An op, typed by a factor rule, whose devices compute between messages."""

    alone: ClassVar[bool] = False

    @abc.abstractmethod
    def lowering(self, operands: Sequence[TensorType], devices: Ints, algorithm: str = "") -> Lowering:
        """Return the rounds; see `Op.lowering`."""

    def bind(self, operands: Sequence[TensorType], where: Where) -> LocalRun:
        """None: a device alone does not run it."""
        raise TypingError(f"{self.name} goes from device to device; legal is to run its lowering")

    def reference(self, operands: Sequence[Shards], types: Sequence[TensorType]) -> list[list[Array]]:
        """Run the lowering on all devices."""
        results = self.infer(*types)
        arrays: dict[str, Sequence[Array]] = {f"x{k}": x for k, x in enumerate(operands)}
        made = [[poison(t.local_shape(k), numpy_dtype(t.dtype)) for k in range(t.mesh.size)] for t in results]
        arrays |= {f"y{k}": y for k, y in enumerate(made)}
        interpret(self.lowering(types, types[0].mesh.ids), arrays, self.name)
        return made

    def flops(self, *operands: TensorType) -> float:
        """Add up the kernels of the device that has most to do."""
        return _figures(self, operands).flops

    def received_bytes(self, *operands: TensorType) -> np.ndarray:
        """Add up what is taken."""
        return _figures(self, operands).received

    def sent_bytes(self, *operands: TensorType) -> tuple[np.ndarray, np.ndarray]:
        """Add up what is put."""
        return operands[0].mesh.ids, _figures(self, operands).sent

    def rounds(self, *operands: TensorType) -> int:
        """Count the rounds in which anything travels."""
        return _figures(self, operands).rounds

    def staging(self, *operands: TensorType) -> int:
        """Add up the buffers."""
        return _figures(self, operands).staging

    def pattern(self, *operands: TensorType) -> Pattern:
        """The rounds in turn, in each its messages beside its kernels."""
        return _figures(self, operands).pattern


class _Figures(NamedTuple):
    """What a lowering on all devices comes to; int64 [devices] in mesh order."""

    flops: float
    received: Ints
    sent: Ints
    rounds: int
    staging: int
    pattern: Pattern


@lru_cache(maxsize=256)
def _figures(op: Overlapped, operands: tuple[TensorType, ...]) -> _Figures:
    ids = operands[0].mesh.ids
    lowering = op.lowering(operands, ids)
    widths = {name: numpy_dtype(b.dtype).itemsize for name, b in lowering.buffers.items()}
    for letter, side in (("x", operands), ("y", results_of(op, operands))):
        widths |= {f"{letter}{k}": t.itemsize for k, t in enumerate(side)}
    received, sent = np.zeros((2, len(ids)), dtype=np.int64)
    busy = np.zeros(len(ids))
    steps: list[StepPattern] = []
    known: dict[object, Pattern] = {}
    rounds = 0
    for one in lowering.rounds():
        for kernel in one.kernels:
            busy += np.where(kernel.live, kernel.flops, 0.0)
        for take in one.takes:
            received += take.target.elements() * widths[take.target.buffer]
        messages: list[RoundMessages] = []
        for put in one.puts:
            amount = put.source.elements() * widths[put.source.buffer]
            there = np.flatnonzero(amount)
            sent += amount
            messages.append(RoundMessages(ids[there], put.peer[there], amount[there]))
        joint = RoundMessages.merge_parts(messages) if messages else None
        works = [w for kernel in one.kernels if (w := _work(kernel, operands, widths, op))]
        if joint is not None and not joint.amount.size:
            joint = None
        rounds += joint is not None
        key = (*(x.tobytes() for x in joint or ()), *((w.flops, w.nbytes) for w in works))
        if key:
            known.setdefault(key, _at_once(works, joint, ids))
            pattern = known[key]
            steps.append(StepPattern(pattern, taking_part(pattern, ids), (len(steps) - 1,) * bool(steps)))
    room = sum((b.elements * widths[name] for name, b in lowering.buffers.items()), np.zeros_like(ids))
    return _Figures(float(busy.max()), received, sent, rounds, int(room.max()), InTurn(1, tuple(steps)))


def _work(kernel: Kernel, operands: Sequence[TensorType], widths: dict[str, int], op: Overlapped) -> Work | None:
    """A kernel on its worst device; None where no device runs it."""
    if not kernel.live.any():
        return None
    blocks = (*kernel.sources, *kernel.targets)
    nbytes = sum((b.elements * widths[b.buffer] for b in blocks), np.zeros(len(kernel.live), dtype=np.int64))
    flops, most = float(kernel.flops[kernel.live].max()), float(nbytes[kernel.live].max())
    return Work(flops, operands[0].dtype, most, op.kernel_class, op.kernel_sides(*operands))


def _at_once(works: Sequence[Work], joint: RoundMessages | None, ids: Ints) -> Pattern:
    """Kernels in turn, beside the messages of their round."""
    steps = [StepPattern(work, ids, (k - 1,) * (k > 0)) for k, work in enumerate(works)]
    parts = [StepPattern(InTurn(1, tuple(steps)), ids) if len(steps) > 1 else s for s in steps[:1]]
    if joint is not None:
        found = Messages(joint.sender, joint.receiver, joint.amount.astype(np.float64))
        parts.append(StepPattern(found, taking_part(found, ids)))
    return parts[0].pattern if len(parts) == 1 else AtOnce(tuple(parts))

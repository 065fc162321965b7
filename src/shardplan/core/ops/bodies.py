"""The ops with a program in them: Repeat, one body again and again, and Together, moves posted at once.

What they cost follows from the account of the body. How values enter and leave it: `core.nested`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Self

import numpy as np

from shardplan.core import validation
from shardplan.core.accounting import books_of, held_inside, shared_around
from shardplan.core.lowering import Ints, Lowering, side_by_side
from shardplan.core.nested import Nested, check_depth
from shardplan.core.op import Array, Shards
from shardplan.core.ops.collective import Collective, moving
from shardplan.core.pattern import AtOnce, InTurn, Pattern
from shardplan.core.program import Program
from shardplan.core.reference import run_reference, run_values
from shardplan.core.step import Step
from shardplan.core.tensor import TensorType
from shardplan.core.walk import step_patterns
from shardplan.errors import TypingError


@dataclass(frozen=True, slots=True)
class Repeat(Nested):
    """`n` runs of a body; the first `carried` and the last `sliced` operands: see `core.nested`.

    In `reverse` rows are taken, and stacked, from the last to the first. The first `ahead` steps of the body, which
    read nothing carried, are run a run early, before the others of that run: what they make is there twice.

    With n = 0 all results are carried: a stack has at least one row. Raises `TypingError`.

    >>> from shardplan.core.ops import AllReduce, Einsum
    >>> from shardplan.core.step import Step
    >>> x = TensorType.parse("f32[4, 8@t]", "t=2")
    >>> w = TensorType.parse("f32[8@t, 8]", x.mesh)
    >>> steps = [Step(Einsum("bi,io->bo"), ("x", "w"), ("y",)), Step(AllReduce(("t",)), ("y",), ("z",))]
    >>> layer = Program({"x": x, "w": w}, steps, ("z",))
    >>> print(*Repeat(3, layer, sliced=2).infer(TensorType.parse("f32[3, 4, 8@t]", x.mesh),
    ...       TensorType.parse("f32[3, 8@t, 8]", x.mesh)))
    f32[3, 4, 8]
    """

    name: ClassVar[str] = "repeat"
    at_once: ClassVar[bool] = False
    n: int
    body: Program
    carried: int = 0
    sliced: int = 0
    reverse: bool = False
    ahead: int = 0  # pyright: ignore[reportIncompatibleMethodOverride]  # a field, as n is behind `times`

    def __post_init__(self) -> None:
        """Check the counts, and that what is carried keeps its type."""
        body = self.body
        validation.whole_number("repeat: n", self.n, 0, kind=TypingError)
        validation.whole_number(
            "repeat: carried", self.carried, 0, min(len(body.inputs), len(body.outputs)), TypingError
        )
        validation.whole_number("repeat: sliced", self.sliced, 0, len(body.inputs) - self.carried, TypingError)
        validation.whole_number("repeat: ahead", self.ahead, 0, len(body.steps), TypingError)
        carried = {name for name, _ in body.inputs[: self.carried]}
        for number, step in enumerate(body.steps[: self.ahead]):
            if late := [o for o in step.operands if o in carried]:
                raise TypingError(
                    f"repeat: step {number} ({step.op.name}) of ahead={self.ahead} reads %{late[0]}, which is carried; "
                    "legal are rows, invariants and what is made of them"
                )
        if not body.outputs:
            raise TypingError("repeat: the body has no outputs; legal is at least one")
        if not self.n and (self.sliced or self.carried < len(body.outputs)):
            raise TypingError("repeat: n=0 with sliced operands or stacked results; legal is n of at least 1 row there")
        pairs = zip(body.input_types[: self.carried], body.output_types, strict=False)
        for k, (before, after) in enumerate(pairs):
            if before != after:
                raise TypingError(
                    f"repeat: carried value {k} enters as {before} and leaves as {after}; legal is one type"
                )
        check_depth(self)

    @property
    def times(self) -> int:
        """How often the body runs."""
        return self.n

    @property
    def backwards(self) -> bool:
        """Whether the last row comes first."""
        return self.reverse

    @property
    def carried_count(self) -> int:
        """How many values are carried."""
        return self.carried

    @property
    def cut(self) -> int:
        """How many operands are sliced."""
        return self.sliced

    @property
    def aliases(self) -> tuple[tuple[int, int], ...]:
        """What leaves every run of the body in the storage in which it entered."""
        return shared_around(self.body, self.carried, self.sliced)

    def reference(self, operands: Sequence[Shards], types: Sequence[TensorType]) -> list[list[Array]]:
        """Run the body again and again; what is carried is let go by the run that replaces it."""
        names, whole = [name for name, _ in self.body.inputs], len(operands) - self.sliced
        state = [list(shards) for shards in operands[: self.carried]]
        same, cut = operands[self.carried : whole], operands[whole:]
        del operands
        stacks: list[list[Array]] = []  # by stacked result, by device
        for number, k in enumerate(self.order):
            now = [*state, *map(list[Array], same), *([x[k, ...] for x in shards] for shards in cut)]
            values = dict(zip(names, now, strict=True))
            del now
            state.clear()
            found = run_values(self.body, values)
            state = found[: self.carried]
            stacks = stacks or [[np.empty((self.n, *x.shape), x.dtype) for x in each] for each in found[self.carried :]]
            for stack, shards in zip(stacks, found[self.carried :], strict=True):
                for rows, x in zip(stack, shards, strict=True):
                    rows[self.n - 1 - number if self.reverse else number] = x
            del found
        return [*(list(shards) for shards in state), *stacks]

    def received_bytes(self, *operands: TensorType) -> np.ndarray:
        """Those of the body, n times."""
        return self.n * books_of(self.body).received

    def sent_bytes(self, *operands: TensorType) -> tuple[np.ndarray, np.ndarray]:
        """Those of the body, n times."""
        return self.devices(), self.n * books_of(self.body).sent

    def devices(self, *results: TensorType) -> np.ndarray:
        """Return all devices of the body, ascending."""
        return np.asarray(self.body.devices, dtype=np.int64)

    def rounds(self, *operands: TensorType) -> int:
        """Those of the body, n times."""
        return self.n * sum(books_of(self.body).rounds)

    def staging(self, *operands: TensorType) -> int:
        """What a run of the body holds, on the worst device, beside this op's operands and carried results."""
        return held_inside(self.body, self.carried, self.ahead if self.n > 1 else 0) if self.n else 0

    def pattern(self, *operands: TensorType) -> Pattern:
        """Those of the body's steps, n times."""
        return InTurn(self.n, step_patterns(self.body) if self.n else ())


@dataclass(frozen=True, slots=True)
class MovedBody(Nested):
    """An op that runs its body once: what it means and moves is what the body does."""

    def reference(self, operands: Sequence[Shards], types: Sequence[TensorType]) -> list[list[Array]]:
        """Run the body."""
        return run_reference(self.body, operands)

    def received_bytes(self, *operands: TensorType) -> np.ndarray:
        """Those of all moves of the body."""
        return books_of(self.body).received

    def sent_bytes(self, *operands: TensorType) -> tuple[np.ndarray, np.ndarray]:
        """Those of all moves of the body."""
        return self.devices(), books_of(self.body).sent

    def devices(self, *results: TensorType) -> np.ndarray:
        """Return all devices of the body, ascending."""
        return np.asarray(self.body.devices, dtype=np.int64)


@dataclass(frozen=True, slots=True)
class Together(MovedBody):
    """Moves that do not depend on each other, posted at once; also on different meshes, as both halves of a swap.

    Every move reads inputs of the body, and all that they make are its outputs. Raises `TypingError`.

    >>> from shardplan.core.ops import AllGather
    >>> from shardplan.core.step import Step
    >>> t = TensorType.parse("f32[4@x]", "x=2")
    >>> steps = [Step(AllGather(0, ("x",)), ("a",), ("b",)), Step(AllGather(0, ("x",)), ("c",), ("d",))]
    >>> print(*Together(Program({"a": t, "c": t}, steps, ("b", "d"))).infer(t, t))
    f32[4] f32[4]
    """

    name: ClassVar[str] = "together"
    at_once: ClassVar[bool] = True
    body: Program

    def __post_init__(self) -> None:
        """Check that the moves are moves, and independent."""
        body = self.body
        given = {name for name, _ in body.inputs}
        for number, step in enumerate(body.steps):
            if moving(step.op) is None:
                raise TypingError(f"together: step {number} ({step.op.name}) computes; legal are ops that move")
            if late := [o for o in step.operands if o not in given]:
                raise TypingError(
                    f"together: step {number} ({step.op.name}) reads %{late[0]}, which another step makes; legal are "
                    "inputs of the body"
                )
        made = [r for step in body.steps for r in step.results]
        if not made or sorted(made) != sorted(body.outputs):
            raise TypingError("together: the outputs are not what the moves make; legal is each of them once")

    def members(self, t: TensorType) -> tuple[str, ...]:
        """The axes of all moves."""
        types = self.body.types
        return tuple(dict.fromkeys(a for step in self.body.steps for a in step.op.members(types[step.operands[0]])))

    def lowering(self, operands: Sequence[TensorType], devices: Ints, algorithm: str = "") -> Lowering:
        """The rounds of all moves side by side."""
        given = {name: k for k, (name, _) in enumerate(self.body.inputs)}
        strands: list[tuple[int, int, Lowering]] = []
        for step in self.body.steps:
            move = moving(step.op)
            assert move is not None  # checked when it was made
            for operand, result in zip(step.operands, step.results, strict=True):
                t, u = self.body.types[operand], self.body.types[result]
                made = self.body.outputs.index(result)
                strands.append((given[operand], made, move.lower_operand(t, u, devices, algorithm)))
        return side_by_side(devices, strands)

    def rounds(self, *operands: TensorType) -> int:
        """Those of the longest move."""
        return max(books_of(self.body).rounds)

    @property
    def chunks(self) -> int:
        """The most that a move has."""
        return max(step.op.chunks for step in self.body.steps)

    @property
    def cuttable(self) -> bool:
        """Whether the chunks of all moves can be set."""
        return all(step.op.cuttable for step in self.body.steps)

    def in_chunks(self, chunks: int) -> Self:
        """Every move in so many."""
        steps = [Step(step.op.in_chunks(chunks), step.operands, step.results) for step in self.body.steps]
        return replace(self, body=Program(self.body.inputs, steps, self.body.outputs))

    def staging(self, *operands: TensorType) -> int:
        """The buffers of all moves, which exist at once."""
        return sum(staged(move.chunks) for move, staged in self._buffers())

    def staging_by_chunks(self, *operands: TensorType) -> Callable[[int], int]:
        """Those of all moves, each in so many chunks."""
        found = [staged for _, staged in self._buffers()]
        return lambda chunks: sum(staged(chunks) for staged in found)

    def _buffers(self) -> Iterator[tuple[Collective, Callable[[int], int]]]:
        """Each move with its staging; messages of two moves between two devices are one."""
        for number, step in enumerate(self.body.steps):
            move, types = moving(step.op), self.body.step_types(step)
            assert move is not None  # checked when it was made
            others = (self.body.step_types(s) for k, s in enumerate(self.body.steps) if k != number)
            shared = any(all(_meet(a[0], b[0]) for a, b in zip(types, other, strict=True)) for other in others)
            yield move, move.staging_by_chunks(*types[0], shared=shared)

    def pattern(self, *operands: TensorType) -> Pattern:
        """Those of all moves, at once."""
        return AtOnce(step_patterns(self.body))


def _meet(t: TensorType, u: TensorType) -> bool:
    """Say whether two types have a device in common."""
    return t.mesh is u.mesh or not set(t.mesh.devices).isdisjoint(u.mesh.devices)

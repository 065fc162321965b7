"""Fused ops: a computation and the collective behind it as one op, whose tiles may leave as soon as they are computed.

Each has its steps as a body: computations, then one move. The body is its decomposition: meaning, types, bytes and
gradient follow from it, and whoever knows nothing of fused kernels runs it as a loop of one run. What a kernel has to
know is its `form`, from which operands are laid out as matrices or bags. Source: arXiv 2305.06942.

- `gemm_all_to_all`           einsum, perhaps an activation, all_to_all
- `gemv_all_reduce`           a thin einsum over a sharded factor, all_reduce
- `embedding_bag_all_to_all`  bags of one table or of several, side by side, all_to_all
"""

from __future__ import annotations

import abc
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Self

from shardplan.core import border
from shardplan.core.accounting import books_of, held_inside
from shardplan.core.nested import check_depth
from shardplan.core.op import Op
from shardplan.core.ops.bodies import MovedBody
from shardplan.core.ops.collective import Collective, moving
from shardplan.core.ops.compute import computing
from shardplan.core.ops.fused_forms import (
    BagForm,
    FusedForm,
    GemmForm,
    GemvForm,
    bag_form,
    gemm_form,
    gemv_form,
    unfit,
)
from shardplan.core.ops.movement import AllToAll
from shardplan.core.ops.reduction import AllReduce
from shardplan.core.pattern import Overlap, Pattern
from shardplan.core.program import Program
from shardplan.core.step import Step
from shardplan.core.tensor import TensorType
from shardplan.core.walk import step_patterns
from shardplan.errors import TypingError

MOST_TILES = 64


@dataclass(frozen=True, slots=True)
class Fused(MovedBody):
    """A body of computations and one move, run as one; `tiles` a destination, 0 where the kernel chooses.

    Raises `TypingError` where the body is no such thing.
    """

    at_once: ClassVar[bool] = False
    overlaps: ClassVar[bool] = True
    move: ClassVar[type[Collective]]  # of the body's last step
    kind: ClassVar[str] = "product"  # of its kernels: see `Overlap`
    body: Program
    tiles: int = 0

    def __post_init__(self) -> None:
        """Check the body."""
        border.whole_number(f"{self.name}: tiles", self.tiles, 0, MOST_TILES, TypingError)
        body = self.body
        last = body.steps[-1] if body.steps else None
        if last is None or not isinstance(last.op, self.move) or body.outputs != last.results or len(last.results) != 1:
            raise TypingError(f"{self.name}: the body's one result is not that of one {self.move.name} at its end")
        if strange := [step.op.name for step in body.steps[:-1] if computing(step.op) is None]:
            raise TypingError(f"{self.name}: {strange[0]} before the move; legal are ops that compute")
        self.form  # noqa: B018  # refuses what no kernel has
        check_depth(self)

    @property
    @abc.abstractmethod
    def form(self) -> FusedForm:
        """What a kernel has to know; raises `TypingError` where no kernel does it."""

    @classmethod
    def of(cls, steps: Sequence[Step], types: dict[str, TensorType], **options: int) -> tuple[Self, tuple[str, ...]]:
        """Return the op that some steps of a program make, and its operands; raises `TypingError`.

        `types` are those of the program's values. Operands are in the order in which steps first read them.
        """
        made = {r for step in steps for r in step.results}
        given = tuple(dict.fromkeys(o for step in steps for o in step.operands if o not in made))
        body = Program([(name, types[name]) for name in given], steps, steps[-1].results)
        return cls(body, **options), given

    @property
    def carried_count(self) -> int:
        """Its result is the body's."""
        return 1

    @property
    def move_with_types(self) -> tuple[Collective, TensorType, TensorType]:
        """The move, and the types before and behind it."""
        last = self.body.steps[-1]
        op = moving(last.op)
        assert op is not None  # checked when it was made
        return op, self.body.types[last.operands[0]], self.body.types[last.results[0]]

    def members(self, t: TensorType) -> tuple[str, ...]:
        """The axes of the move."""
        op, before, _ = self.move_with_types
        return op.members(before)

    def rounds(self, *operands: TensorType) -> int:
        """Those of the move."""
        return sum(books_of(self.body).rounds)

    def staging(self, *operands: TensorType) -> int:
        """What a run of the body holds beside operands and result."""
        # The result is the body's own; types are even, so that every device is the worst.
        return max(0, held_inside(self.body, 0) - self.move_with_types[2].local_bytes())

    def pattern(self, *operands: TensorType) -> Pattern:
        """The kernels of the body and its move, tile by tile."""
        *before, last = step_patterns(self.body)
        _, t, u = self.move_with_types
        whole = u.local_bytes() if t.layout.partial else 0
        return Overlap(tuple(before), last, t.local_bytes(), whole, self.tiles, self.in_one_shot, self.kind)

    @property
    def in_one_shot(self) -> bool:
        """Whether all ranks add up all addends, and none gathers sums."""
        return False


@dataclass(frozen=True, slots=True)
class GemmAllToAll(Fused):
    """A product of two operands whose rows, or columns, go to their devices.

    `[W@x,M,K] [W@x,K,N] -> [W,M@x,N]` (blocks of rows: experts) or `[S@x,K] [K,N] -> [S,N@x]` (blocks of columns:
    Ulysses), or an einsum that is one of the two up to the order of dims; between the two steps there may be an
    activation.

    >>> from shardplan.core.ops import Einsum
    >>> a, b = TensorType.parse("f32[2@x, 4, 3]", "x=2"), TensorType.parse("f32[2@x, 3, 5]", "x=2")
    >>> steps = [Step(Einsum("wmk,wkn->wmn"), ("a", "b"), ("z",)), Step(AllToAll(0, 1, ("x",)), ("z",), ("y",))]
    >>> types = Program({"a": a, "b": b}, steps, ("y",)).types
    >>> op, operands = GemmAllToAll.of(steps, dict(types))
    >>> print(operands, *op.infer(a, b), op.form.scatter)
    ('a', 'b') f32[2, 4@x, 5] 0
    """

    name: ClassVar[str] = "gemm_all_to_all"
    move: ClassVar[type[Collective]] = AllToAll

    @property
    def form(self) -> GemmForm:
        """As matrices."""
        return gemm_form(self.name, self.body)


@dataclass(frozen=True, slots=True)
class GemvAllReduce(Fused):
    """A thin product over a factor that is sharded, summed over all devices: `[M,K@x] [K@x,C] -> [M,C]`, C up to 16.

    In one shot (`shots` 1) every device gets all addends and sums them, in two the owner of a part does. Bytes are
    those of the body, whichever a kernel takes.
    """

    name: ClassVar[str] = "gemv_all_reduce"
    move: ClassVar[type[Collective]] = AllReduce
    kind: ClassVar[str] = "vector"
    shots: int = 2

    @property
    def form(self) -> GemvForm:
        """As a matrix and a thin one."""
        border.whole_number(f"{self.name}: shots", self.shots, 1, 2, TypingError)
        return gemv_form(self.name, self.body)

    @property
    def in_one_shot(self) -> bool:
        """As it says."""
        return self.shots == 1


@dataclass(frozen=True, slots=True)
class EmbeddingBagAllToAll(Fused):
    """Bags of tables `[v, h@x]` for the whole batch, side by side, to the devices of the batch: `[b@x, t, h]`.

    A value `[b, h@x]` that stands between the tables' is its own table, of bags of one.
    """

    name: ClassVar[str] = "embedding_bag_all_to_all"
    move: ClassVar[type[Collective]] = AllToAll
    kind: ClassVar[str] = "bags"

    @property
    def form(self) -> BagForm:
        """As bags."""
        return bag_form(self.name, self.body)


def as_fused(op: Op) -> Fused | None:
    """Return an op where it is a fused one."""
    return op if isinstance(op, Fused) else None


__all__ = ["EmbeddingBagAllToAll", "Fused", "GemmAllToAll", "GemvAllReduce", "as_fused", "unfit"]

"""Fused ops: a computation and the collective behind it as one op, whose tiles may leave as soon as they are computed.

Each has its steps as a body: computations, then one move, or a move and what it feeds. The body is its decomposition:
meaning, types, bytes and gradient follow from it, and whoever knows nothing of fused kernels runs it as a loop of one
run. What a kernel has to know is its `form`, from which operands are laid out as matrices or bags. Source: arXiv
2305.06942.

- `gemm_all_to_all`           einsum, perhaps an activation, all_to_all
- `gemv_all_reduce`           a thin einsum over a sharded factor, all_reduce
- `all_gather_gemm`           all_gather, an einsum of what it brings
- `gemm_reduce_scatter`       an einsum over a sharded factor, reduce_scatter
- `embedding_bag_all_to_all`  bags of one table or of several, side by side, all_to_all
"""

from __future__ import annotations

import abc
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Self

from shardplan.core import validation
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
    gather_form,
    gemm_form,
    gemv_form,
    scatter_form,
    unfit,
)
from shardplan.core.ops.movement import AllGather, AllToAll
from shardplan.core.ops.reduction import AllReduce, ReduceScatter
from shardplan.core.pattern import Overlap, Pattern
from shardplan.core.program import Program
from shardplan.core.step import Step
from shardplan.core.tensor import TensorType
from shardplan.core.walk import step_patterns
from shardplan.errors import TypingError

MOST_TILES = 64
ADDEND = 4  # bytes of an addend, as kernels send it


@dataclass(frozen=True, slots=True)
class Fused(MovedBody):
    """A body of computations and one move, the last step, or the first one where it `gathers`, run as one.

    `tiles` are those of a destination, 0 where the kernel chooses.

    Raises `TypingError` where the body is no such thing.
    """

    at_once: ClassVar[bool] = False
    overlaps: ClassVar[bool] = True
    move: ClassVar[type[Collective]]
    gathers: ClassVar[bool] = False
    kind: ClassVar[str] = "product"  # of its kernels: see `Overlap`
    body: Program
    tiles: int = 0

    def __post_init__(self) -> None:
        """Check the body."""
        validation.whole_number(f"{self.name}: tiles", self.tiles, 0, MOST_TILES, TypingError)
        body = self.body
        last = body.steps[-1].results if body.steps else ()
        if not body.steps or not isinstance(self._move_step.op, self.move) or body.outputs != last or len(last) != 1:
            where = "after one" if self.gathers else "that of one"
            end = "" if self.gathers else " at its end"
            raise TypingError(f"{self.name}: the body's one result is not {where} {self.move.name}{end}")
        others = body.steps[1:] if self.gathers else body.steps[:-1]
        if strange := [step.op.name for step in others if computing(step.op) is None]:
            raise TypingError(f"{self.name}: {strange[0]} beside the move; legal are ops that compute")
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
    def _move_step(self) -> Step:
        return self.body.steps[0 if self.gathers else -1]

    @property
    def move_with_types(self) -> tuple[Collective, TensorType, TensorType]:
        """The move, and the types before and behind it."""
        step = self._move_step
        op = moving(step.op)
        assert op is not None  # checked when it was made
        return op, self.body.types[step.operands[0]], self.body.types[step.results[0]]

    @property
    def addend_bytes(self) -> int:
        """The bytes of addends, where something is summed, on a device."""
        _, t, _ = self.move_with_types
        return t.local_bytes() // t.itemsize * ADDEND if self.move in (AllReduce, ReduceScatter) else 0

    @property
    def landing_bytes(self) -> int:
        """The bytes of the memory that peers write in a run."""
        return self.addend_bytes or self.move_with_types[2].local_bytes()

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
        return max(0, held_inside(self.body, 0) - self.body.output_types[0].local_bytes())

    def pattern(self, *operands: TensorType) -> Pattern:
        """The kernels of the body and its move, tile by tile."""
        steps = list(step_patterns(self.body))
        moved = steps.pop(0 if self.gathers else -1)
        if self.gathers:  # what reads the move's result computes
            steps = [replace(step, reads=tuple(k for k in step.reads if k)) for step in steps]
        _, t, u = self.move_with_types
        whole = u.local_bytes() if self.move is AllReduce else 0
        nbytes, written = (u, self.body.output_types[0]) if self.gathers else (t, t)
        return Overlap(
            tuple(steps), moved, nbytes.local_bytes(), whole, self.tiles, self.in_one_shot, self.kind,
            self.addend_bytes, written.local_bytes(),
        )  # fmt: skip

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
        validation.whole_number(f"{self.name}: shots", self.shots, 1, 2, TypingError)
        return gemv_form(self.name, self.body)

    @property
    def in_one_shot(self) -> bool:
        """As it says."""
        return self.shots == 1


@dataclass(frozen=True, slots=True)
class AllGatherGemm(Fused):
    """Rows of all devices, multiplied as they come: `[M@x,K] [K,N] -> [M,N]`, M any dim that is not summed.

    >>> p = Program.parse('''program
    ...   mesh x=2
    ...   input %a: f32[4@x, 3]
    ...   input %b: f32[3, 6@x]
    ...   %g = all_gather(%a; dim=0, axes=(x)): f32[4, 3]
    ...   %y = einsum(%g, %b; spec="mk,kn->mn"): f32[4, 6@x]
    ...   output %y''')
    >>> AllGatherGemm(p).form.gathered, AllGatherGemm(p).landing_bytes
    ('m', 48)
    """

    name: ClassVar[str] = "all_gather_gemm"
    move: ClassVar[type[Collective]] = AllGather
    gathers: ClassVar[bool] = True

    @property
    def form(self) -> GemmForm:
        """As matrices."""
        return gather_form(self.name, self.body)


@dataclass(frozen=True, slots=True)
class GemmReduceScatter(Fused):
    """A product over a factor that is sharded, summed, of which a device gets a part: `[M,K@x] [K@x,N] -> [M@x,N]`.

    Addends are sent in f32, whatever the dtype.
    """

    name: ClassVar[str] = "gemm_reduce_scatter"
    move: ClassVar[type[Collective]] = ReduceScatter

    @property
    def form(self) -> GemmForm:
        """As matrices."""
        return scatter_form(self.name, self.body)


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


__all__ = [
    "AllGatherGemm",
    "EmbeddingBagAllToAll",
    "Fused",
    "GemmAllToAll",
    "GemmReduceScatter",
    "GemvAllReduce",
    "as_fused",
    "unfit",
]

"""`Nested`: an op with a program in it, as all that walks into bodies sees it.

Operands are, in order: those carried, whose place the body's first results take in its next run; invariants, the same
in every run; and those sliced along a leading dim that no axis cuts, a row a run. The body's results are those carried,
then those whose rows are stacked along a new leading dim. A body that runs `at_once` runs once and stacks nothing.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import ClassVar

from shardplan.core.box_table import BoxTable
from shardplan.core.mesh import Mesh
from shardplan.core.op import Op
from shardplan.core.parse import MOST_NESTED
from shardplan.core.program import Program
from shardplan.core.tensor import TensorType
from shardplan.errors import TypingError


class Nested(Op):
    """An op with a program in it; how its values enter and leave the body, see the module."""

    __slots__ = ()
    boxed: ClassVar[bool] = True
    body: Program
    at_once: ClassVar[bool]  # its steps do not depend on each other, and are posted together
    overlaps: ClassVar[bool] = False  # computations and a move that a kernel may run as one

    @property
    def times(self) -> int:
        """How often the body runs."""
        return 1

    @property
    def backwards(self) -> bool:
        """Whether runs take and stack rows from the last to the first."""
        return False

    @property
    def order(self) -> range:
        """The rows, in the order of the runs."""
        return range(self.times)[:: -1 if self.backwards else 1]

    @property
    def carried_count(self) -> int:
        """How many of its first operands, and of its first results, are carried."""
        return 0

    @property
    def cut(self) -> int:
        """How many of its last operands are sliced."""
        return 0

    @property
    def ahead(self) -> int:
        """How many of the body's first steps are run before the run that is theirs, on the next row."""
        return 0

    @property
    def meshes(self) -> tuple[Mesh, ...]:
        """Those of the body."""
        return self.body.meshes

    @property
    def tables(self) -> tuple[BoxTable, ...]:
        """Those of the body."""
        return self.body.tables

    def infer(self, *operands: TensorType) -> tuple[TensorType, ...]:
        """Hold the operands against the body's inputs; carried results are the body's, the others rows of a stack."""
        inner = self.body.input_types
        whole = len(inner) - self.cut
        legal = (*inner[:whole], *(stacked_type(t, self.times) for t in inner[whole:]))
        if operands != legal:
            raise TypingError(f"{self.name}: operands {_texts(operands)}; the body takes {_texts(legal)}")
        found = self.body.output_types
        if self.at_once:
            return found
        return (*found[: self.carried_count], *(stacked_type(u, self.times) for u in found[self.carried_count :]))


def as_nested(op: Op) -> Nested | None:
    """Return an op where it has a body, else None."""
    return op if isinstance(op, Nested) else None


def depth(op: Op) -> int:
    """Return how deep bodies lie in an op; 0 where it has none."""
    return 1 + max((depth(step.op) for step in op.body.steps), default=0) if isinstance(op, Nested) else 0


def check_depth(op: Nested) -> None:
    """Raise `TypingError` where bodies lie deeper than text is read."""
    if depth(op) > MOST_NESTED:
        raise TypingError(f"{op.name}: bodies inside each other, {depth(op)} deep; legal are {MOST_NESTED}")


@lru_cache(maxsize=1 << 14)  # a body is typed again and again over a few of them
def stacked_type(t: TensorType, count: int) -> TensorType:
    """Return the type of `count` values of one type, stacked along a leading dim that no axis cuts."""
    if t.layout.boxes is not None:
        raise TypingError(f"{t} lies in a table of boxes, which has no rows to stack or to slice")
    return TensorType(t.dtype, (count, *t.shape), replace(t.layout, dims=((), *t.layout.dims)), t.mesh)


@lru_cache(maxsize=1 << 14)
def row_type(t: TensorType) -> TensorType:
    """Return the type of one of several values that are stacked; raises `TypingError` where axes cut the stack."""
    if t.layout.boxes is not None or not t.ndim or t.layout.dims[0]:
        raise TypingError(f"{t} is no stack along a first dim that no axis cuts")
    return TensorType(t.dtype, t.shape[1:], replace(t.layout, dims=t.layout.dims[1:]), t.mesh)


def _texts(types: tuple[TensorType, ...]) -> str:
    return ", ".join(map(str, types)) or "none"

"""Opaque: an op of an imported program that nobody here knows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Self

from shardplan.core.factor_rule import FactorRule, factor_names
from shardplan.core.namespace import Namespace, Tensor
from shardplan.core.ops.compute import At, RuleTypedOp, Size
from shardplan.core.rule_text import rule_of
from shardplan.core.tensor import TensorType
from shardplan.errors import BackendError, TypingError


@dataclass(frozen=True, slots=True)
class Opaque(RuleTypedOp):
    """What `called` makes, of the dtypes and shapes that its source says; it runs nowhere, and no dim may be sharded.

    It costs the bytes that it reads and writes.
    """

    name: ClassVar[str] = "opaque"
    called: str
    kinds: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]

    def rule(self, *operands: TensorType) -> FactorRule:
        """All dims of the operands stay whole; those of the results are new, and not named in `over`."""
        names = iter(factor_names(sum(t.ndim for t in operands) + sum(map(len, self.shapes))))
        before = [[next(names) for _ in t.shape] for t in operands]
        after = [[f"{next(names)}={n}" for n in shape] for shape in self.shapes]
        sides = (" ".join(f"[{' '.join(dims)}]" for dims in side) for side in (before, after))
        fixed = " ".join(name for dims in before for name in dims)
        return rule_of(self.name, " -> ".join(sides) + (f" | fixed: {fixed}" if fixed else ""), operands)

    def dtypes(self, *operands: TensorType) -> tuple[str, ...]:
        """Those that its source says."""
        return self.kinds

    def passes(self, partial: frozenset[int], reduction: str, operands: Sequence[TensorType]) -> bool:
        """Nothing is known of it."""
        return False

    def local(self, xp: Namespace, arrays: Sequence[Tensor], at: At, size: Size) -> tuple[Tensor, ...]:
        """Refuse."""
        raise BackendError(f"opaque {self.called!r} runs nowhere: an import kept it without knowing what it means")

    def with_sizes(self, before: Sequence[TensorType], after: Sequence[TensorType], sizes: Mapping[str, int]) -> Self:
        """Refuse where a size changes: what it makes then is not known."""
        if any(sizes[f.name] != f.size for f in self.rule(*before).factors):
            raise TypingError(f"opaque {self.called!r} hides how its results hang on the sizes of its operands")
        return self

    def flops(self, *operands: TensorType) -> float:
        """None that is known."""
        return 0.0

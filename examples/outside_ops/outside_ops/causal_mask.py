"""What a causal attention adds to its scores: nothing up to the query's position, a large negative number after it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from shardplan import TensorType
from shardplan.core.factor_rule import FactorRule
from shardplan.core.namespace import Namespace, Tensor
from shardplan.core.ops.compute import At, RuleTypedOp, Size
from shardplan.core.rule_text import rule_of


@dataclass(frozen=True, slots=True)
class CausalMask(RuleTypedOp):
    """Scores [batch, query, key]: `value` where the key comes after the query."""

    name: ClassVar[str] = "causal_mask"
    value: float = -1e30

    def rule(self, *operands: TensorType) -> FactorRule:
        """Every dim may be sharded: what is masked follows from positions."""
        return rule_of(self.name, "[b q k] -> [b q k]", operands)

    def passes(self, partial: frozenset[int], reduction: str, operands: Sequence[TensorType]) -> bool:
        """Addends of scores are no scores."""
        return False

    def local(self, xp: Namespace, arrays: Sequence[Tensor], at: At, size: Size) -> tuple[Tensor, ...]:
        """Compare the positions in the whole array."""
        (_, query, key), (_, queries, keys) = at.operands[0], size.operands[0]
        late = (key + xp.arange(keys))[None, :] > (query + xp.arange(queries))[:, None]
        return (xp.where(late, xp.full((), self.value, xp.dtype(arrays[0])), arrays[0]),)

    def flops(self, *operands: TensorType) -> float:
        """A comparison an element."""
        return float(operands[0].local_bytes() // operands[0].itemsize)

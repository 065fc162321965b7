"""A gated linear unit with a soft cap: what it gives stays between -cap and cap."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from shardplan import TensorType
from shardplan.core.ops import Einsum, Elementwise
from shardplan.core.ops.composed import Composed
from shardplan.core.program_builder import ProgramBuilder


@dataclass(frozen=True, slots=True)
class CappedGlu(Composed):
    """Of x `[b h]` and two weights `[h f]`: silu of one product times the other, softly capped, `[b f]`."""

    name: ClassVar[str] = "capped_glu"
    cap: float = 30.0

    def write(self, d: ProgramBuilder, *operands: TensorType) -> Sequence[str]:
        """Two products and one expression; the operands are called "0", "1" and "2"."""
        gate, up = (d(Einsum("bh,hf->bf"), "0", weight) for weight in ("1", "2"))
        return [d(Elementwise(f"{self.cap} * tanh(silu(a) * b / {self.cap})"), gate, up)]

"""Products: Einsum."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar

from shardplan.core.factor_rule import FactorRule
from shardplan.core.namespace import Namespace, Tensor, wide
from shardplan.core.ops.arithmetic import expand_dims
from shardplan.core.ops.compute import At, KernelClass, RuleTypedOp, Size, common_dtype
from shardplan.core.program_builder import Cotangents, ProgramBuilder, Values
from shardplan.core.rule_text import rule_of
from shardplan.core.tensor import TensorType
from shardplan.errors import ParseError, TypingError


@dataclass(frozen=True, slots=True)
class Einsum(RuleTypedOp):
    """Products and sums of any number of operands in Einstein's notation, `ik,kj->ij`; no ellipsis.

    Raises `ParseError` at the character for a malformed spec.

    >>> from shardplan.core.mesh import Mesh
    >>> m = Mesh(x=2)
    >>> a, b = TensorType("f32", (8, 8), (None, "x"), m), TensorType("f32", (8, 16), ("x",), m)
    >>> print(*Einsum("ik,kj->ij").infer(a, b), Einsum("ik,kj->ij").flops(a, b))
    f32[8, 16]{+x} 1024.0
    """

    name: ClassVar[str] = "einsum"
    spec: str

    def __post_init__(self) -> None:
        """Check the spec."""
        text = self.spec
        arrow = text.find("->")
        if arrow < 0:
            raise ParseError("an einsum spec names its result, as in ik,kj->ij", text, len(text))
        for k, c in enumerate(text):
            if not (c.isascii() and c.isalpha()) and k not in (arrow, arrow + 1) and (c != "," or k > arrow):
                raise ParseError(f"{c!r} is not legal in an einsum spec; legal are letters, ',' and one '->'", text, k)
        for k in range(arrow + 2, len(text)):
            if text[k] not in text[:arrow]:
                raise ParseError(f"the factor {text[k]} of the result is in no operand", text, k)
            if text[k] in text[arrow + 2 : k]:
                raise ParseError(f"the factor {text[k]} is twice in the result", text, k)

    @property
    def kernel_class(self) -> KernelClass:
        """A product."""
        return "product"

    @property
    def sides(self) -> tuple[tuple[str, ...], str]:
        """The factors of the operands' dims, and of the result's."""
        left, right = self.spec.split("->")
        return tuple(left.split(",")), right

    @property
    def product_sides(self) -> tuple[tuple[str, ...], str] | None:
        """Those of two operands."""
        return self.sides if self.spec.count(",") == 1 else None

    def kernel_sides(self, *operands: TensorType) -> tuple[float, ...]:
        """Those of the factors of both operands and not of the result, and of those of one of them."""
        sides, result = self.sides
        if len(sides) != 2:
            return ()
        a, b, c = (set(side) for side in (*sides, result))
        shapes = ((side, t.local_shape()) for side, t in zip(sides, operands, strict=True))
        size = {f: n for side, shape in shapes for f, n in zip(side, shape, strict=True)}
        return tuple(float(math.prod(max(1, size[f]) for f in one)) for one in ((a & c) - b, (b & c) - a, (a & b) - c))

    def rule(self, *operands: TensorType) -> FactorRule:
        """Contracted factors are reduced with a sum, the others pass."""
        found = rule_of(f"einsum {self.spec}", einsum_rule(self.spec), operands)
        if common_dtype(self.name, operands) == "bool":
            raise TypingError("einsum: products and sums are not defined for bool; legal is a numeric dtype")
        return found

    def passes(self, partial: frozenset[int], reduction: str, operands: Sequence[TensorType]) -> bool:
        """A product is linear in one operand at a time; a mere transposition passes everything."""
        sides, result = self.sides
        if reduction == "sum":
            return len(partial) == 1
        return len(sides) == 1 and set(sides[0]) == set(result)

    def local(self, xp: Namespace, arrays: Sequence[Tensor], at: At, size: Size) -> tuple[Tensor, ...]:
        """Einsum in the wide dtype."""
        return (xp.einsum(self.spec, *(xp.astype(x, wide(xp.dtype(x))) for x in arrays)),)

    def gradient(self, builder: ProgramBuilder, operands: Values, results: Values, cotangents: Values) -> Cotangents:
        """Of each operand the product of the others with the cotangent; factors it has alone are expanded."""
        sides, out = self.sides
        found: list[str | None] = []
        for k, (side, x) in enumerate(zip(sides, operands, strict=True)):
            if len(set(side)) < len(side):
                raise TypingError(f"einsum {self.spec} has no gradient: operand {k} has a factor twice")
            others = [(s, n) for j, (s, n) in enumerate(zip(sides, operands, strict=True)) if j != k]
            kept = "".join(c for c in side if c in out or any(c in s for s, _ in others))
            dx = cotangents[0]
            if others or kept != out:
                spec = f"{','.join([out, *(s for s, _ in others)])}->{kept}"
                dx = builder(Einsum(spec), dx, *(n for _, n in others))
            found.append(expand_dims(builder, dx, tuple(kept), tuple(side), builder.types[x]))
        return found

    def flops(self, *operands: TensorType) -> float:
        """2 x the product of the local factor sizes; of one operand, its additions."""
        sides, result = self.sides
        self.infer(*operands)
        sizes: dict[str, int] = {}
        for letters, t in zip(sides, operands, strict=True):
            sizes.update(zip(letters, t.local_shape(0), strict=True))  # place 0 has the largest tile of every dim
        per = int(not set(sides[0]) <= set(result)) if len(sides) == 1 else 2
        return float(per * math.prod(sizes.values()))


@lru_cache(maxsize=1024)
def einsum_rule(spec: str) -> str:
    """Return the text of the rule: `ik,kj->ij` is `[i k] [k j] -> [i j] | sum: k`."""
    left, right = spec.split("->")
    summed = "".join(dict.fromkeys(x for x in left if x != "," and x not in right))
    sides = " ".join(f"[{' '.join(letters)}]" for letters in left.split(","))
    return f"{sides} -> [{' '.join(right)}]" + (f" | sum: {' '.join(summed)}" if summed else "")


def matmul(ndim: int = 2) -> Einsum:
    """Return the matrix product of operands of `ndim` dims, the leading ones being batches.

    >>> matmul().spec, matmul(3).spec, matmul(4).spec
    ('mk,kn->mn', 'bmk,bkn->bmn', 'bcmk,bckn->bcmn')
    """
    letters = "bcdefghijlopqrstuvwxyz"  # without those of the matrix dims, and without a
    if not 2 <= ndim <= len(letters) + 2:
        raise TypingError(f"a matrix product of {ndim} dims; legal are 2 to {len(letters) + 2}")
    batch = letters[: ndim - 2]
    return Einsum(f"{batch}mk,{batch}kn->{batch}mn")

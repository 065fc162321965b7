"""Products of 8 bits: Quantize, and ScaledEinsum, which accumulates in f32 or wider; scales are of whole tensors.

The recipe is that of current scaling (NVIDIA Transformer Engine, `Float8CurrentScaling` in its format HYBRID; "FP8
Formats for Deep Learning", arXiv 2209.05433): what goes forward is in e4m3, cotangents are in e5m2. A tensor is
multiplied with the largest number of the format over the largest of its absolute values, and rounded to nearest even;
a product with the inverse of both; all of it in f32. The largest value is that of the whole tensor, however it is
sharded, so what it is rounded to hangs on no layout.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import ml_dtypes
import numpy as np

from shardplan.core.dtypes import numpy_dtype, short_name
from shardplan.core.factor_rule import FactorRule, factor_names
from shardplan.core.namespace import Namespace, Tensor, wide
from shardplan.core.ops.arithmetic import ReduceDims
from shardplan.core.ops.compute import At, RuleTypedOp, Size, check_arity
from shardplan.core.ops.products import Einsum, einsum_rule
from shardplan.core.program_builder import ProgramBuilder
from shardplan.core.rule_text import rule_of
from shardplan.core.tensor import TensorType
from shardplan.errors import TypingError

FORWARD, BACKWARD = "f8e4m3", "f8e5m2"
_F32 = np.dtype(np.float32)


@dataclass(frozen=True, slots=True)
class Quantize(RuleTypedOp):
    """A float in 8 bits, scaled as its largest absolute values say, which have its dims `dims`.

    Its gradient is the cotangent, as if nothing were rounded.

    >>> from shardplan.core.mesh import Mesh
    >>> m = Mesh(x=2)
    >>> print(*Quantize("f8e4m3").infer(TensorType("bf16", (8, 4), ("x",), m), TensorType("bf16", (), (), m)))
    f8e4m3[8@x, 4]
    """

    name: ClassVar[str] = "quantize"
    dtype: str
    dims: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        """Check the dtype."""
        object.__setattr__(self, "dtype", short_name(self.dtype))
        _check_narrow(self.name, self.dtype)

    def rule(self, *operands: TensorType) -> FactorRule:
        """All dims pass."""
        t, most = check_arity(self.name, operands, 2)
        kept = tuple(t.shape[d] for d in self.dims if 0 <= d < t.ndim)
        if most.dtype != t.dtype or most.shape != kept or numpy_dtype(t.dtype).kind not in "fV":
            raise TypingError(
                f"quantize of {t} by {most}, its dims {self.dims}; legal are floats and the largest of them along all "
                "other dims"
            )
        names = factor_names(t.ndim)
        whole, held = " ".join(names), " ".join(names[d] for d in self.dims)
        return rule_of(self.name, f"[{whole}] [{held}] -> [{whole}]", operands)

    def dtypes(self, *operands: TensorType) -> tuple[str, ...]:
        """Return the dtype."""
        return (self.dtype,)

    def passes(self, partial: frozenset[int], reduction: str, operands: Sequence[TensorType]) -> bool:
        """Addends are not rounded as their sum is."""
        return False

    def local(self, xp: Namespace, arrays: Sequence[Tensor], at: At, size: Size) -> tuple[Tensor, ...]:
        """Multiply and clip; the caller rounds."""
        shape = size.operands[0]
        whole, most = _whole_and_most(xp, arrays[1], self.dtype)
        scale = (whole / most).reshape(tuple(n if d in self.dims else 1 for d, n in enumerate(shape)))
        return (xp.maximum(xp.minimum(xp.astype(arrays[0], _F32) * scale, whole), -whole),)

    def gradient(
        self, builder: ProgramBuilder, operands: Sequence[str], results: Sequence[str], cotangents: Sequence[str]
    ) -> Sequence[str | None]:
        """The cotangent, as it is."""
        return [cotangents[0], None]

    def flops(self, *operands: TensorType) -> float:
        """A product and two comparisons an element."""
        return 3.0 * math.prod(operands[0].local_shape(0))


@dataclass(frozen=True, slots=True)
class ScaledEinsum(Einsum):
    """A product of two operands in 8 bits, as `ik,kj,,->ij`; the others are the largest values that scaled them.

    The result is in `dtype`. Cotangents are quantized to e5m2 for the products of the gradient.

    >>> from shardplan.core.mesh import Mesh
    >>> m = Mesh(x=2)
    >>> a, b = TensorType("f8e4m3", (8, 8), (None, "x"), m), TensorType("f8e4m3", (8, 16), ("x",), m)
    >>> scale = TensorType("bf16", (), (), m)
    >>> print(*ScaledEinsum("ik,kj,,->ij", "bf16").infer(a, b, scale, scale))
    bf16[8, 16]{+x}
    """

    name: ClassVar[str] = "scaled_einsum"
    dtype: str

    def __post_init__(self) -> None:
        """Check the spec, and that each scale is of dims that all have."""
        super(ScaledEinsum, self).__post_init__()
        object.__setattr__(self, "dtype", short_name(self.dtype))
        sides, out = self.sides
        if len(sides) != 4 or any({*held} != {*sides[0]} & {*sides[1]} & {*out} for held in sides[2:]):
            raise TypingError(
                f"scaled_einsum {self.spec}: legal are two operands, and two of the factors that both and the result "
                "have"
            )

    def rule(self, *operands: TensorType) -> FactorRule:
        """Contracted factors are reduced with a sum, the others pass."""
        kinds = [t.dtype for t in check_arity(self.name, operands, 4)]
        for kind in kinds[:2]:
            _check_narrow(self.name, kind)
        return rule_of(f"scaled_einsum {self.spec}", einsum_rule(self.spec), operands)

    def dtypes(self, *operands: TensorType) -> tuple[str, ...]:
        """Return the dtype."""
        return (self.dtype,)

    def kernel_sides(self, *operands: TensorType) -> tuple[float, ...]:
        """Those of the product."""
        return self._product.kernel_sides(*operands[:2])

    def passes(self, partial: frozenset[int], reduction: str, operands: Sequence[TensorType]) -> bool:
        """What is scaled is no addend."""
        return False

    def local(self, xp: Namespace, arrays: Sequence[Tensor], at: At, size: Size) -> tuple[Tensor, ...]:
        """The product in f32 or wider, times both scales."""
        up = wide(numpy_dtype(self.dtype))
        sides, out = self.sides
        found = xp.einsum(self._product.spec, *(xp.astype(x, up) for x in arrays[:2]))
        for x, most, letters in zip(arrays[:2], arrays[2:], sides[2:], strict=True):
            whole, most = _whole_and_most(xp, most, xp.dtype(x))
            scale = xp.einsum(f"{letters}->{''.join(c for c in out if c in letters)}", most / whole)
            shape = tuple(n if c in letters else 1 for c, n in zip(out, size.results[0], strict=True))
            found = found * xp.astype(scale, up).reshape(shape)
        return (found,)

    def gradient(
        self, builder: ProgramBuilder, operands: Sequence[str], results: Sequence[str], cotangents: Sequence[str]
    ) -> Sequence[str | None]:
        """Of each operand the product of the other with the cotangent, in e5m2, both with their scales."""
        sides, out = self.sides
        narrow, most, held = write_quantized(builder, cotangents[0], out, {*sides[2]}, BACKWARD)
        found: list[str | None] = []
        for k in (0, 1):
            j = 1 - k
            spec = f"{out},{sides[j]},{held},{sides[2 + j]}->{sides[k]}"
            found.append(builder(ScaledEinsum(spec, self.dtype), narrow, operands[j], most, operands[2 + j]))
        return [*found, None, None]

    @property
    def _product(self) -> Einsum:
        sides, out = self.sides
        return Einsum(f"{','.join(sides[:2])}->{out}")


def write_quantized(
    builder: ProgramBuilder, name: str, letters: str, kept: set[str], dtype: str
) -> tuple[str, str, str]:
    """Write a value with these factors in 8 bits; return it, the largest values that scale it, and their factors.

    These are one for each coordinate of the factors `kept`.
    """
    dims = tuple(d for d, c in enumerate(letters) if c in kept)
    most = builder(ReduceDims(tuple(d for d in range(len(letters)) if d not in dims), "absmax"), name)
    return builder(Quantize(dtype, dims), name, most), most, "".join(letters[d] for d in dims)


def _check_narrow(op: str, dtype: str) -> None:
    if dtype not in (FORWARD, BACKWARD):
        raise TypingError(f"{op}: {dtype}; legal are {FORWARD} and {BACKWARD}")


def _whole_and_most(xp: Namespace, most: Tensor, dtype: str | np.dtype[np.generic]) -> tuple[Tensor, Tensor]:
    """The largest finite number of a format (448, 57344) and the largest values, which are it where all are 0."""
    kind = numpy_dtype(dtype) if isinstance(dtype, str) else dtype
    whole, most = xp.full((), float(ml_dtypes.finfo(kind).max), _F32), xp.astype(most, _F32)
    return whole, xp.where(most > 0, most, whole)

"""What every fused operator is asked beside its tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

from shardplan.errors import TypingError, optional
from shardplan.fused.heap.symmetric import SymmetricHeap

if TYPE_CHECKING:
    import torch

    from shardplan.fused.triton.serving import TritonKernels

DTYPES = ("float32", "bfloat16", "float16", "float64")  # the last one on CPUs only


@dataclass(frozen=True, slots=True)
class CallContext:
    """The heap of the group, tiles a destination (0: chosen by size), and the seconds of a wait.

    Ranks must say the same of `backward`, whether autograd would call it here. With `tile_sizes` ranks have as many
    rows.
    """

    heap: SymmetricHeap
    tiles: int = 0
    seconds: float = 30.0
    backward: bool = True
    even: bool = False

    @property
    def kernels(self) -> TritonKernels | None:
        """What runs the operators where those of CPUs do not."""
        return self.heap.kernels

    def check_product(self, name: str, a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        """Raise `TypingError` where a and b are no [M, K] and [K, N] of one dtype, and as `check_operands`."""
        if a.ndim != 2 or b.ndim != 2 or a.shape[1] != b.shape[0] or a.dtype != b.dtype:
            said = " and ".join(f"{str(x.dtype).removeprefix('torch.')}{list(x.shape)}" for x in (a, b))
            raise TypingError(f"{name}: {said}; legal are [M, K] and [K, N] of one dtype")
        self.check_operands(name, a, b, bias)

    def check_operands(
        self, name: str, *operands: torch.Tensor | None, numbers: Sequence[torch.Tensor | None] = ()
    ) -> None:
        """Raise `TypingError` where an operand, or one of `numbers`, is on another kind of device than the heap.

        Also where an operand is of a dtype that no kernel computes in.
        """
        for each in (*operands, *numbers):
            if each is not None and each.device.type != self.heap.device:
                raise TypingError(f"{name}: an operand on {each.device}; legal is {self.heap.device}, as the heap's")
        legal = _legal_dtypes(self.kernels is None)
        for each in operands:
            if each is not None and each.dtype not in legal:
                words = [str(kind).removeprefix("torch.") for kind in (each.dtype, *legal)]
                raise TypingError(f"{name}: an operand of {words[0]}; legal are {', '.join(words[1:])}")


@cache
def _legal_dtypes(on_cpus: bool) -> tuple[torch.dtype, ...]:
    torch = optional("torch", "torch")
    return tuple(getattr(torch, name) for name in (DTYPES if on_cpus else DTYPES[:-1]))


def count_tiles(asked: int, rows: int, least: int) -> int:
    """Return the tiles of so many rows: as asked, or where that is 0 of `least` rows each, at most 8.

    >>> count_tiles(0, 640, 64), count_tiles(0, 10, 64), count_tiles(3, 10, 64)
    (8, 1, 3)
    """
    return asked or max(1, min(8, rows // least))

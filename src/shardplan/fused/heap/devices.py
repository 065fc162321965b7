"""The data of a heap in the memory of GPUs, which all ranks of a machine map; the header stays in shared memory.

`cuda_ipc` exchanges CUDA's handles of one allocation a rank, `torch_symm` asks `torch.distributed._symmetric_memory`
(and so needs a process group, whose name is the heap's). Each rank's current device is its own.
"""

from __future__ import annotations

import io
import os
import pickle
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

from shardplan.errors import BackendError, optional

if TYPE_CHECKING:
    import torch


class DeviceSegment(Protocol):
    """One rank's memory on its device: made by its rank, then opened by all at once, and there as long as this is."""

    device: str  # what torch calls this kind of device

    def export(self, nbytes: int, name: str) -> bytes:
        """Make it, all zero; return what the others need to open it, never empty. Raises what may go wrong."""
        ...

    def open(self, said: Sequence[bytes], rank: int) -> list[torch.Tensor]:
        """Return the memory of every rank, uint8 [nbytes], given what all ranks said."""
        ...


def _cuda() -> Any:
    torch = optional("torch", "torch")
    if not torch.cuda.is_available():
        raise BackendError("torch sees no GPU; legal without one are shm, virtual and net")
    return torch


class CudaIpcSegment:
    """One allocation of torch, whose handle the others open."""

    device = "cuda"

    def export(self, nbytes: int, name: str) -> bytes:
        """Make it, and return torch's own handle of it."""
        torch = _cuda()
        from multiprocessing.reduction import ForkingPickler

        optional("torch.multiprocessing", "torch")  # which teaches the pickler what a tensor is
        self.mine = torch.zeros(nbytes, dtype=torch.uint8, device="cuda")
        torch.cuda.synchronize()
        raw = io.BytesIO()
        ForkingPickler(raw).dump(self.mine)
        return raw.getvalue()

    def open(self, said: Sequence[bytes], rank: int) -> list[torch.Tensor]:
        """Open the others' handles: one does not open in the process that made it."""
        parts = [self.mine if r == rank else pickle.loads(raw) for r, raw in enumerate(said)]
        for part in parts:
            if part.device != self.mine.device:  # a copy has torch enable access of kernels here to that device
                part[8:16].copy_(self.mine[8:16])
        return parts


class TorchSymmSegment:
    """Memory of torch's own symmetric heap."""

    device = "cuda"

    def export(self, nbytes: int, name: str) -> bytes:
        """Make it; what the others need torch exchanges."""
        torch = _cuda()
        os.environ.setdefault("TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES", "1")  # several ranks on one GPU
        self.symmetric = optional("torch.distributed._symmetric_memory", "torch")
        self.mine, self.name = self.symmetric.empty(nbytes, dtype=torch.uint8, device="cuda"), name
        self.mine.zero_()
        torch.cuda.synchronize()
        return b"made"

    def open(self, said: Sequence[bytes], rank: int) -> list[torch.Tensor]:
        """Meet."""
        self.handle = self.symmetric.rendezvous(self.mine, self.name)  # which owns the buffers
        return [self.handle.get_buffer(r, tuple(self.mine.shape), self.mine.dtype) for r in range(len(said))]


DEVICES: dict[str, type[DeviceSegment]] = {"cuda_ipc": CudaIpcSegment, "torch_symm": TorchSymmSegment}


def device_parts(
    kind: str, nbytes: int, rank: int, exchange: Any, name: str
) -> tuple[DeviceSegment, list[torch.Tensor]]:
    """Return this rank's memory and that of all ranks; collective. Raises `BackendError` on all where one fails."""
    made = DEVICES[kind]()
    parts: list[torch.Tensor] = []
    wrong: Exception | None = None
    try:
        mine = made.export(nbytes, name)
    except Exception as error:  # whatever a driver may say: the others must not wait
        mine, wrong = b"", error
    said: list[bytes] = exchange(mine)
    if all(said):
        try:
            parts = made.open(said, rank)
        except Exception as error:
            wrong = error
    opened: list[bytes] = exchange(b"opened" if parts else b"")
    if wrong is not None:
        raise BackendError(f"symmetric heap {name}: {kind}: {wrong}") from wrong
    if not all(opened):
        raise BackendError(
            f"symmetric heap {name}: rank {(said if not all(said) else opened).index(b'')} has no {kind}"
        )
    return made, parts

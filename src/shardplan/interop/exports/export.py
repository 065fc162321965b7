"""The exports of reduction programs, by name: each gives the text for a program and its placement.

- `torch` Python for torch.distributed's process groups
- `jax`   Python for `shard_map`
- `mpi`   Python for mpi4py's communicators
- `msccl` XML for the executors of MSCCL

The texts need neither shardplan nor each other. Making one imports no framework.
"""

from __future__ import annotations

from collections.abc import Callable

from shardplan.core.program import Program
from shardplan.errors import BackendError
from shardplan.hardware.placement import Placement
from shardplan.interop.exports.jax import jax_text
from shardplan.interop.exports.mpi import mpi_text
from shardplan.interop.exports.msccl import msccl_text
from shardplan.interop.exports.torch import torch_text

EXPORTS: dict[str, Callable[[Program, Placement | None], str]] = {
    "torch": torch_text,
    "jax": jax_text,
    "mpi": mpi_text,
    "msccl": msccl_text,
}


def export_text(name: str, program: Program, placement: Placement | None = None) -> str:
    """Return a reduction program as Python source, or as XML, by the export of that name.

    The program starts from a partial payload; `placement`, where it lies, says its ranks (`recipe.ranks_of`): without
    one they are its device ids. Raises `BackendError` for an unknown name, and a program that cannot be exported so.

    >>> export_text("nccl", None)
    Traceback (most recent call last):
    shardplan.errors.BackendError: there is no export 'nccl'; legal are torch, jax, mpi, msccl
    """
    if name not in EXPORTS:
        raise BackendError(f"there is no export {name!r}; legal are {', '.join(EXPORTS)}")
    return EXPORTS[name](program, placement)

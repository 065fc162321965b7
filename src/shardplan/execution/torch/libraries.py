"""Which library of a process group carries what: asked by the device on which tensors lie, never of the group.

A group may have a library for each type of device (`cuda:nccl,cpu:gloo`), and its own text says how it was made, which
is `undefined` where no library was named.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping
from functools import cache
from typing import Any

import torch
import torch.distributed as dist

from shardplan.errors import BackendError

NATIVE_BACKENDS = ("gloo", "nccl")  # whose collectives `native` knows


def libraries_of(group: Any) -> dict[str, str]:
    """Return the library by type of device: `{"cuda": "nccl"}`, also where the group was made without naming one."""
    return dict(pair.split(":", 1) for pair in dist.get_backend_config(group).split(","))


def device_among(libraries: Mapping[str, str], kind: str = "") -> torch.device:
    """Return where a rank that only receives has its memory: on a device of type `kind`, if that is said.

    Else on the accelerator of its process group, if that has a library of its own (`nccl` does), else on the host.
    """
    own = (k for k, library in libraries.items() if k != "cpu" and library != libraries.get("cpu"))
    return torch.empty(0, device=kind or next(own, "cpu")).device


def native_on(library: str) -> bool:
    """Say whether collectives are the library's own: on nccl, or on the backends that `SHARDPLAN_NATIVE` names.

    Raises `BackendError` where it names another.
    """
    named = os.environ.get("SHARDPLAN_NATIVE")
    if named is None:
        return library == "nccl"
    names = named.replace(",", " ").split()
    if strange := sorted(set(names) - set(NATIVE_BACKENDS)):
        raise BackendError(f"SHARDPLAN_NATIVE names {strange[0]!r}; legal are {', '.join(NATIVE_BACKENDS)}, or nothing")
    return library in names


def tell_composed(library: str, kind: str) -> None:
    """Warn, once, where no collective of an accelerator is the library's own though nobody turned them off."""
    if kind != "cpu" and os.environ.get("SHARDPLAN_NATIVE") != "":
        _tell_once(library, kind)


@cache
def _tell_once(library: str, kind: str) -> None:
    warnings.warn(
        f"on {kind} the process group has {library}: all collectives go as messages between two ranks, while prices on "
        f"a topology are of its library's own; these run on {' and '.join(NATIVE_BACKENDS)}, on gloo where "
        "SHARDPLAN_NATIVE names it",
        stacklevel=2,
    )

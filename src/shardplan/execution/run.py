"""`run`: a program on shards, by a backend named in one explicit table."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

from shardplan.core.ops.base import Array, Shards
from shardplan.core.program import Program
from shardplan.core.reference import run_program
from shardplan.errors import BackendError

Backend = Callable[[Program, Sequence[Shards]], list[list[Array]]]

BACKENDS: dict[str, Backend] = {"reference": run_program}


def run(program: Program, shards: Any, backend: str = "reference") -> Any:
    """Run a program and return the shards of its results.

    `shards`: for one input a list with one array a device in mesh order, for several inputs a list of such lists; the
    results have the same form. Raises `BackendError` for an unknown backend, `LayoutError` for wrong shards.

    >>> import numpy as np
    >>> import shardplan as sp
    >>> t = sp.TensorType("i64", (4,), ("x",), sp.Mesh(x=2))
    >>> plan = sp.redistribute(t, sp.TensorType("i64", (4,), (None,), t.mesh))
    >>> run(plan.program, sp.distribute(np.arange(4), t))
    [array([0, 1, 2, 3]), array([0, 1, 2, 3])]
    """
    found = BACKENDS.get(backend)
    if found is None:
        raise BackendError(f"unknown backend {backend!r}; legal are {', '.join(BACKENDS)}")
    single = len(program.inputs) == 1 and (not shards or getattr(shards[0], "shape", None) is not None)
    inputs = [shards] if single else shards
    outputs = found(program, cast("Sequence[Shards]", inputs))
    return outputs[0] if len(outputs) == 1 and single else outputs

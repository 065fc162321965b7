"""`run`: a program on shards, by a backend named in one explicit table.

A backend is a folder of this room whose `run.py` has a function `run_program`, and one line here. Under a launcher
(torchrun, mpiexec, JAX's own) every process passes and receives the shards of its own devices, in mesh order.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from typing import Any, Protocol, cast

from shardplan.core import border
from shardplan.core.program import Program
from shardplan.core.reference import run_program as reference
from shardplan.errors import BackendError, LayoutError, optional, shown
from shardplan.execution.record import Record
from shardplan.plans.plan import Plan

TIMEOUT = 300.0  # seconds that any wait may take: peers may still be loading a framework, or compiling


class Backend(Protocol):
    """What a backend's `run_program` is: inputs and results are a list, each with the shards of this process."""

    def __call__(
        self, program: Program, inputs: Sequence[Sequence[Any]], *, timeout: float, record: Record | None
    ) -> list[list[Any]]:
        """Run the program; `record`, where given, takes the start and end of every step."""
        ...


BACKENDS = {
    "reference": "every device in this process, in numpy: the meaning of a program",
    "torch": "torch.distributed, one process a device; device ids are global ranks",
    "jax": "shard_map over jax.devices(); device ids are theirs",
    "mpi": "mpi4py, one process a device; device ids are ranks of the world",
}

PACKAGES = {"torch": "torch", "jax": "jax", "mpi": "mpi4py"}  # what a backend needs, installed by the extra of its name


def needed(backend: str) -> None:
    """Raise `MissingExtra` where the package of a backend is not installed."""
    if backend in PACKAGES:
        optional(PACKAGES[backend], backend)


def run(program: Program | Plan, shards: Any, backend: str = "reference", timeout: float = TIMEOUT) -> Any:
    """Run a program and return the shards of its results.

    Args:
        program: A program, or a plan, whose program it is.
        shards: For one input a list with one array for every device of this process, in mesh order (the reference has
            all devices in this process), of the local shape and the dtype of the input's type; for several inputs a
            list of such lists. Torch takes tensors or arrays.
        backend: `reference`, `torch`, `jax` or `mpi`, each but the first under its own launcher.
        timeout: Seconds that any wait for other processes may take.

    Returns:
        The shards of the results, in the form of the inputs.

    Raises:
        BackendError: An unknown backend, an op that it cannot run, another program on another rank, a failed peer.
        LayoutError: Wrong shards, or no program.
        MissingExtra: The backend's package is not installed.
        TimedOut: A peer did not arrive in time.

    >>> import numpy as np
    >>> import shardplan as sp
    >>> t = sp.TensorType("i64", (4,), ("x",), sp.Mesh(x=2))
    >>> plan = sp.redistribute(t, sp.TensorType("i64", (4,), (None,), t.mesh))
    >>> run(plan.program, sp.distribute(np.arange(4), t))
    [array([0, 1, 2, 3]), array([0, 1, 2, 3])]
    """
    return run_recorded(program, shards, backend, timeout, None)


def run_recorded(program: Program | Plan, shards: Any, backend: str, timeout: float, record: Record | None) -> Any:
    """Run as `run` does, with what the processes saw of it in `record`."""
    if isinstance(program, Plan):
        program = program.program
    if not isinstance(program, Program):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise LayoutError(f"run takes a Program or a Plan, got {shown(program)}")
    if not isinstance(backend, str) or backend not in BACKENDS:  # pyright: ignore[reportUnnecessaryIsInstance]
        raise BackendError(f"unknown backend {shown(backend)}; legal are {', '.join(BACKENDS)}")
    seconds = isinstance(timeout, (int, float)) and not isinstance(timeout, bool)  # pyright: ignore[reportUnnecessaryIsInstance]
    if not (seconds and 0 < timeout <= border.MOST):
        raise BackendError(f"timeout={shown(timeout)}; legal is a positive number of seconds")
    shards = border.items("shards", shards, "arrays; for several inputs of such lists")
    # one input: a list of arrays. A process without a device of its mesh passes an empty list.
    single = len(program.inputs) == 1 and (not shards or getattr(shards[0], "shape", None) is not None)
    inputs = (
        [shards] if single else [border.items(f"the shards of input {k}", x, "arrays") for k, x in enumerate(shards)]
    )
    if backend == "reference":
        outputs: list[list[Any]] = reference(program, inputs)
    else:
        needed(backend)
        found = cast("Backend", import_module(f"shardplan.execution.{backend}.run").run_program)
        outputs = found(program, inputs, timeout=timeout, record=record)
    return outputs[0] if len(outputs) == 1 and single else outputs

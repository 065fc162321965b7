"""`run`: a program on shards, or a job on arrays, by a backend named in one explicit table.

A backend is a folder of this room whose `run.py` has the functions `run_program`, `decline` and `join_launch`, and one
line here. Under a launcher (torchrun, mpiexec, JAX's own) every process passes and receives the shards of its own
devices, in mesh order. Of a job every process passes and receives the whole arrays.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from importlib import import_module
from typing import Any, Protocol, cast

from shardplan.core import validation
from shardplan.core.ids import check_shard_ids
from shardplan.core.program import Program
from shardplan.core.reference import check_shards
from shardplan.core.reference import run_reference as reference
from shardplan.errors import BackendError, LayoutError, ShardplanError, excerpt, optional
from shardplan.execution.job_arrays import check_step_arrays
from shardplan.execution.job_backend import JobBackend, JobLaunch
from shardplan.execution.jobs import JobRun, offer
from shardplan.execution.record import Record
from shardplan.plans.plan import Plan
from shardplan.strategy.partition.job import Job

TIMEOUT = 300.0  # seconds that any wait may take: peers may still be loading a framework, or compiling


class Backend(Protocol):
    """What the `run.py` of a backend has."""

    def run_program(
        self, program: Program, inputs: Sequence[Sequence[Any]], *, timeout: float, record: Record | None
    ) -> list[list[Any]]:
        """Run a program on the shards of this process, a list an input; `record` takes the start and end of steps."""
        ...

    def decline(self, program: Program, error: BaseException) -> None:
        """Tell the other processes of a program that this one raises instead of running it."""
        ...

    def join_launch(self, offered: JobLaunch, timeout: float) -> JobBackend | None:
        """Agree with the other processes on a step of a job; None for a process without a device of it."""
        ...


BACKENDS = {
    "reference": "every device in this process, in numpy: the meaning of a program",
    "torch": "torch.distributed, one process a device; device ids are global ranks",
    "jax": "shard_map over jax.devices(); device ids are theirs",
    "mpi": "mpi4py, one process a device; device ids are ranks of the world",
}

PACKAGES = {"torch": "torch", "jax": "jax", "mpi": "mpi4py"}  # what a backend needs, installed by the extra of its name


def require_backend(backend: str) -> None:
    """Raise `MissingExtra` where the package of a backend is not installed."""
    if backend in PACKAGES:
        optional(PACKAGES[backend], backend)


def run(program: Program | Plan | Job, shards: Any, backend: str = "reference", timeout: float = TIMEOUT) -> Any:
    """Run a program and return the shards of its results, or a step of a job and return its results as arrays.

    Args:
        program: A program, a plan, whose program it is, or a job.
        shards: Of a program, for one input a list with one array for every device of this process, in mesh order (the
            reference has all devices in this process), of the local shape and the dtype of the input's type; for
            several inputs a list of such lists. Torch takes tensors or arrays. Of a job the global arrays of the
            model's inputs, by name, the same in every process.
        backend: `reference`, `torch`, `jax` or `mpi`, each but the first under its own launcher.
        timeout: Seconds that any wait for other processes may take.

    Returns:
        The shards of the results, in the form of the inputs. Of a job by name, as global arrays in every process that
        has a device of it: results, gradients (`gradient.w`), and what takes the place of inputs, under their names.
        All of these are gathered whole in each, which is for small jobs; `start` gathers results alone.

    Raises:
        BackendError: An unknown backend, an op that it cannot run, another program on another rank, a failed peer.
        LayoutError: Wrong shards or arrays, ids that no row or class has (on a CPU), or no program.
        MissingExtra: The backend's package is not installed.
        TimedOut: A peer did not arrive in time.

    >>> import numpy as np
    >>> import shardplan as sp
    >>> t = sp.TensorType("i64", (4,), ("x",), sp.Mesh(x=2))
    >>> plan = sp.redistribute(t, sp.TensorType("i64", (4,), (None,), t.mesh))
    >>> run(plan.program, sp.distribute(np.arange(4), t))
    [array([0, 1, 2, 3]), array([0, 1, 2, 3])]
    >>> model = sp.Model.load("mlp", layers=2, hidden=2, dtype="f64", optimizer="sgd")
    >>> job = sp.partition(model, sp.Strategy(tensor=2))
    >>> found = run(job, {name: np.ones(t.shape) for name, t in model.program.inputs})
    >>> print(found["loss"], *sorted(found))
    18.0 gradient.layers.weight layers.weight loss
    """
    return run_recorded(program, shards, backend, timeout, None)


def load_backend(backend: str) -> Backend:
    """Return a backend other than the reference; raises `MissingExtra` where its package is not installed."""
    require_backend(backend)
    return cast("Backend", import_module(f"shardplan.execution.{backend}.run"))


def run_recorded(
    program: Program | Plan | Job, shards: Any, backend: str, timeout: float, record: Record | None
) -> Any:
    """Run as `run` does, with what the processes saw of it in `record`."""
    if isinstance(program, Plan):
        program = program.program
    if not isinstance(program, (Program, Job)):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise LayoutError(f"run takes a Program, a Plan or a Job, got {excerpt(program)}")
    if not isinstance(backend, str) or backend not in BACKENDS:  # pyright: ignore[reportUnnecessaryIsInstance]
        raise BackendError(f"unknown backend {excerpt(backend)}; legal are {', '.join(BACKENDS)}")
    if isinstance(program, Job):
        check_seconds(timeout)
        return _run_job(program, shards, backend, timeout, record)
    try:
        check_seconds(timeout)
        inputs, single = _shards_by_input(program, shards)
    except ShardplanError as error:  # the other processes would wait for this one
        with contextlib.suppress(ShardplanError):  # nobody is there who could be told
            if backend != "reference":
                load_backend(backend).decline(program, error)
        raise
    if backend == "reference":
        given = dict(zip((name for name, _ in program.inputs), inputs, strict=False))
        check_shard_ids(program, lambda name, t: enumerate(check_shards(name, t, given.get(name, []))))
        outputs: list[list[Any]] = reference(program, inputs)
    else:
        outputs = load_backend(backend).run_program(program, inputs, timeout=timeout, record=record)
    return outputs[0] if len(outputs) == 1 and single else outputs


def check_seconds(timeout: float) -> None:
    """Refuse what is no number of seconds that a wait may take."""
    seconds = isinstance(timeout, (int, float)) and not isinstance(timeout, bool)  # pyright: ignore[reportUnnecessaryIsInstance]
    if not (seconds and 0 < timeout <= validation.MOST):
        raise BackendError(f"timeout={excerpt(timeout)}; legal is a positive number of seconds")


def _shards_by_input(program: Program, shards: Any) -> tuple[list[Any], bool]:
    """Return the shards by input, and whether they were given as those of one input, without a list around them."""
    shards = validation.items("shards", shards, "arrays; for several inputs of such lists")
    # one input: a list of arrays. A process without a device of its mesh passes an empty list.
    if len(program.inputs) == 1 and (not shards or getattr(shards[0], "shape", None) is not None):
        return [shards], True
    return [validation.items(f"the shards of input {k}", x, "arrays") for k, x in enumerate(shards)], False


def _run_job(job: Job, arrays: Any, backend: str, timeout: float, record: Record | None) -> dict[str, Any]:
    """Run a step of a job: what is wrong with the arrays of a process is an error of all."""
    given, problem = {}, None
    try:
        given = check_step_arrays(job, arrays)
    except LayoutError as error:
        problem = error
    joined = JobBackend() if backend == "reference" else load_backend(backend).join_launch(offer(job, problem), timeout)
    if problem is not None:
        raise problem
    return {} if joined is None else JobRun(job, joined, given, record).step()

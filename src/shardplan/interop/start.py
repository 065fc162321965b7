"""`start`: a job whose state lives in shards on its devices, from arrays or from a checkpoint in any layout."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shardplan.core import validation
from shardplan.errors import LayoutError, excerpt
from shardplan.execution.live import Live
from shardplan.execution.run import BACKENDS, TIMEOUT, check_seconds, require_backend
from shardplan.interop.checkpoint.job_state import arrays_source, folder_source, write_state
from shardplan.interop.checkpoint.sources import open_checkpoint
from shardplan.strategy.partition.job import Job


def start(
    job: Job, state: Mapping[str, Any] | str | Path, backend: str = "reference", timeout: float = TIMEOUT
) -> Live:
    """Return a live job: its state stays in shards on its devices, and `step` runs it.

    Args:
        job: A training step under a strategy, or a forward pass.
        state: Parameters, and what a step replaces beside them (an optimizer's state and step, caches), all of it or
            nothing, which begins as zeros; a master in f32 then begins as its parameter. By name as global arrays, of
            which each process takes its shards, or a folder: what `Live.save` wrote under any strategy, or whole
            tensors under the model's names. Of a folder each process reads what its devices hold.
        backend: As of `run`, under its own launcher.
        timeout: Seconds that any wait for other processes may take.

    Returns:
        A `Live`, which is a context manager: `step(batch)`, `save(folder)`, `collect(names)`, `reshard(strategy)`.

    Raises as `run`, and `ParseError` for a folder that is no checkpoint.

    >>> import numpy as np
    >>> import shardplan as sp
    >>> model = sp.Model.load("mlp", layers=2, hidden=4, dtype="f64", optimizer="sgd", lr=0.001)
    >>> job = sp.partition(model, sp.Strategy(data=2, fsdp=True))
    >>> batch = {"inputs": np.ones((2, 4)), "targets": np.zeros((2, 4))}
    >>> with start(job, {"layers.weight": np.full((2, 4, 4), 0.5)}) as live:
    ...     losses = [float(live.step(batch)) for _ in range(3)]
    ...     whole = live.collect()["layers.weight"]
    >>> losses[0] > losses[1] > losses[2], whole.shape
    (True, (2, 4, 4))
    """
    if not isinstance(job, Job):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise LayoutError(f"start takes a Job, got {excerpt(job)}")
    validation.choice("start: backend", backend, tuple(BACKENDS), LayoutError)
    check_seconds(timeout)
    require_backend(backend)
    live = Live(job, backend, write_state, timeout)
    if isinstance(state, Mapping):
        live.lay_out(lambda: arrays_source(job, state))
    elif isinstance(state, str | Path):  # pyright: ignore[reportUnnecessaryIsInstance]
        with open_checkpoint(state) as held:
            live.lay_out(lambda: folder_source(job, held))
    else:
        raise LayoutError(f"start from {excerpt(state)}; legal are arrays by name, or a folder")
    return live

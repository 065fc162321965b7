"""A step of a job beside the same step of the whole model: losses, gradients and all that a step replaces.

The whole model is the reference's program on one device, so what is compared knows nothing of strategies.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from shardplan.core.dtypes import numpy_dtype
from shardplan.core.ids import id_ranges
from shardplan.core.program import Program
from shardplan.core.reference import run_reference
from shardplan.execution.run import TIMEOUT, run
from shardplan.strategy.model import Model
from shardplan.strategy.partition.job import Job
from shardplan.strategy.partition.programs import TOTAL

EQUAL = 1e-9  # relative to the largest element: f64 keeps 1e-16, and sums have some hundred addends
LEAST = 1e-6  # what is smaller everywhere is zero but for rounding, and is compared with this


class StepComparison(NamedTuple):
    """Values of a step by kind: how many, the largest difference of each kind, and the value that has it."""

    kinds: tuple[tuple[str, int, float, str], ...]
    loss: float
    whole_loss: float

    @property
    def is_equal(self) -> bool:
        """Whether nothing differs by more than rounding in f64."""
        return all(apart <= EQUAL for _, _, apart, _ in self.kinds)


def draw_arrays(model: Model, batch: int) -> dict[str, np.ndarray]:
    """Return random inputs of a step of so many sequences: parameters, zeros for state, ids that are legal."""
    rng, big = np.random.default_rng(0), model.resize(batch=batch)
    ranges, found = id_ranges(big.program), dict[str, np.ndarray]()
    for name, t in big.program.inputs:
        kind = numpy_dtype(t.dtype)
        if name in model.parameters:
            found[name] = rng.normal(0, 0.3, t.shape).astype(kind)
        elif name in model.replaced:
            found[name] = np.zeros(t.shape, kind)
        elif name in ranges:
            found[name] = rng.integers(0, ranges[name].rows, t.shape).astype(kind)
        else:
            found[name] = rng.normal(size=t.shape).astype(kind)
    return found


def step_of_whole(model: Model, given: Mapping[str, np.ndarray], batch: int) -> dict[str, np.ndarray]:
    """Return what a step of the whole model gives on one device, by the names that a job's results have."""
    program = model.resize(batch=batch).program
    more = {f"{TOTAL}{name}": value for name, value in model.gradients.items() if value in program.types}
    wanted = dict.fromkeys([*program.outputs, *more.values()])
    whole = Program(program.inputs, program.steps, tuple(wanted))
    found = {name: one[0] for name, one in
             zip(whole.outputs, run_reference(whole, [[given[n]] for n, _ in whole.inputs]), strict=True)}  # fmt: skip
    named = {name: found[value] for name, value in more.items()} | {n: found[o] for n, o in model.replaced.items()}
    return named | {name: found[name] for name in program.outputs if name not in model.replaced.values()}


def step_beside_whole(model: Model, job: Job, backend: str = "reference", timeout: float = TIMEOUT) -> StepComparison:
    """Run a step of a job on random arrays, and compare every value with the whole model's.

    A value that one side lacks differs. `model` is what the job was made of. Under a launcher every process compares,
    and takes part in the step. Raises as `run` does.

    >>> from shardplan import Strategy, partition
    >>> model = Model.load("mlp", layers=2, hidden=4, dtype="f64", optimizer="sgd")
    >>> step_beside_whole(model, partition(model, Strategy(tensor=2))).is_equal
    True
    """
    batch = job.strategy.sequences
    given = draw_arrays(model, batch)
    found = run(job, given, backend, timeout)
    want = step_of_whole(model, given, batch)
    worst: dict[str, tuple[int, float, str]] = {}
    for name in sorted(found.keys() | want.keys()):
        kind = "loss" if name == "loss" else "gradients" if name.startswith(TOTAL) else _kind(model, name)
        both = name in found and name in want
        apart = _largest_difference(found[name], want[name]) if both else float("inf")
        count, most, who = worst.get(kind, (0, -1.0, ""))
        worst[kind] = (count + 1, max(most, apart), name if apart > most else who)
    kinds = tuple((kind, *worst[kind]) for kind in sorted(worst, key=lambda k: (k != "loss", k)))
    return StepComparison(kinds, float(np.mean(found["loss"])), float(np.mean(want["loss"])))


def _kind(model: Model, name: str) -> str:
    return "parameters" if name in model.parameters else "state" if name in model.replaced else "results"


def _largest_difference(got: np.ndarray, want: np.ndarray) -> float:
    """The largest difference, relative to the largest element."""
    if got.shape != want.shape:
        return float("inf")
    return float(np.abs(got - want).max(initial=0) / max(LEAST, np.abs(want).max(initial=0)))

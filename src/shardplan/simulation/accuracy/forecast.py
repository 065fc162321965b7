"""Rows predicted: seconds with an interval, bytes, and whether it fits."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from shardplan.errors import ShardplanError
from shardplan.simulation.accuracy.step_rows import RowCluster, RowModel, StepRow
from shardplan.simulation.accuracy.subject import dropped, form_of, strategies_of
from shardplan.simulation.closed.chips import APART
from shardplan.simulation.closed.configurations import CODES, Configurations
from shardplan.simulation.closed.form import ClosedForm
from shardplan.simulation.closed.machines import MachineFit, machine_fit
from shardplan.strategy.strategy import NARROW, Strategy

Floats = np.ndarray
# Of the logarithm of a prediction, what no parameter explains. A source differs from others by `APART` of a chip: of
# dense rows of twelve sources left out nothing else is left (deviation 0.136: 0.122 by `APART`, and 0.06).
RESIDUAL = 0.05
# What is open beside that, for a mixture of experts, where products are narrow, and where a source leaves fields open.
MIXTURE = 0.29
NARROW_OPEN = 0.06
ASSUMED = 0.06
# Deviations of the logarithms of parameters that all machines have alike: products alone say 86 to 150 of `half`.
OPEN = {"half": 0.7, "order": 0.35}
MEMORY_RESIDUAL = 0.1  # nine predictions in ten of bytes are off by less: what is not, does not fit
NORMAL_90 = 1.645  # half of a normal distribution's 90 %
STEP = 1e-3  # of a parameter's logarithm, in a derivative


@dataclass(frozen=True, slots=True)
class Forecast:
    """A prediction of a row.

    `assumed` has fields that were unpublished, with the values that it takes least with; `dropped` published options
    that do nothing, as they were said.
    """

    id: str
    seconds_per_step: float
    seconds_interval: tuple[float, float]
    peak_bytes: float
    activation_bytes: float
    parameter_and_optimizer_bytes: float
    fits: bool
    assumed: Mapping[str, object]
    dropped: Mapping[str, object] = field(default_factory=dict[str, object])


def forecast(
    rows: Iterable[StepRow],
    fit_of: Callable[[str], MachineFit] = machine_fit,
    done: Callable[[StepRow], None] = lambda row: None,
) -> tuple[list[Forecast], list[tuple[str, str]]]:
    """Return the predictions of rows, in their order, and the ids and reasons of those that have none.

    Args:
        rows: What was measured; nothing of that is read.
        fit_of: By the preset of a topology the parameters of its machine.
        done: Called with every row.
    """
    groups: dict[tuple[RowModel, RowCluster], list[tuple[int, StepRow, list[Strategy]]]] = {}
    found: dict[int, Forecast] = {}
    skipped: list[tuple[str, str]] = []
    for number, row in enumerate(rows):
        try:
            groups.setdefault((row.model, row.cluster), []).append((number, row, strategies_of(row)))
        except ShardplanError as error:
            skipped.append((row.id, str(error)))
            done(row)
    for (model, cluster), members in groups.items():
        try:
            form, machine = form_of(model, cluster), fit_of(cluster.preset)
            made = _together(form.on(form.topology, machine.parameters), machine, members)
            found |= zip((number for number, _, _ in members), made, strict=True)
        except ShardplanError as error:
            skipped += [(row.id, str(error)) for _, row, _ in members]
        for _, row, _ in members:
            done(row)
    return [found[number] for number in sorted(found)], skipped


def _together(
    form: ClosedForm, machine: MachineFit, members: Sequence[tuple[int, StepRow, list[Strategy]]]
) -> Iterator[Forecast]:
    """Rows of one model and cluster: each with the strategy, of those it may be, that takes least."""
    every = [s for _, _, several in members for s in several]
    tried = form(Configurations.of(every))
    fits = tried.peak_bytes * (1 - MEMORY_RESIDUAL) <= form.topology.device.memory
    best: list[Strategy] = []
    at = 0
    for _, _, several in members:
        mine = slice(at, at + len(several))
        least = np.where(fits[mine] | ~fits[mine].any(), tried.seconds[mine], np.inf)
        best.append(several[int(np.argmin(least))])
        at += len(several)
    columns = Configurations.of(best)
    out = form(columns)
    half = NORMAL_90 * deviation(form, columns, machine)
    open_fields = np.array([bool(row.unknown or row.assumed) for _, row, _ in members])
    half = np.hypot(half, NORMAL_90 * ASSUMED * open_fields)
    # Where it is not said in what gradients are accumulated it is counted as the paper does, in f32.
    plain = [replace(s, gradient_dtype=s.gradient_dtype or "f32") for s in best]
    state, waiting = form.layers(Configurations.of(plain))
    for k, (_, row, _) in enumerate(members):
        now, peak = float(out.seconds[k]), float(out.peak_bytes[k])
        yield Forecast(
            row.id,
            now,
            (now * math.exp(-half[k]), now * math.exp(half[k])),
            peak,
            float(waiting[k]),
            float(state[k]),
            peak * (1 - MEMORY_RESIDUAL) <= form.topology.device.memory,
            {name: getattr(best[k], name) for name in row.unknown},
            dropped(row, best[k]),
        )


def deviation(form: ClosedForm, columns: Configurations, machine: MachineFit) -> Floats:
    """Return the standard deviation of the logarithms of measurements of steps around their predictions, [n].

    What the parameters leave open, and what no parameter explains. A source that nobody fitted to is another machine
    with the chip: it differs from those that were fitted as they do from each other, in each parameter (`APART`), so
    that a row's interval is as wide as the row depends on what machines differ in.
    """
    narrow = np.isin(columns.columns["precision"], [CODES["precision"].index(name) for name in NARROW])
    mixture = any("experts" in dims for dims in form.model.dims.values())
    rest = RESIDUAL**2 + NARROW_OPEN**2 * narrow + MIXTURE**2 * mixture
    return np.sqrt(spread(form, columns, machine, another=machine.is_measured or bool(machine.taken)) ** 2 + rest)


def spread(form: ClosedForm, columns: Configurations, machine: MachineFit, *, another: bool = False) -> Floats:
    """Return the standard deviation of the logarithms of predictions that the parameters leave open, [n].

    The joint covariance of their logarithms, and what is open of those that all machines have alike, through the
    derivatives of the predictions; with `another` also what one machine with a chip differs from the next.
    """
    at = np.log(form.seconds(columns))
    differs = APART if another else {}
    names = (*machine.names, *(name for name in (*OPEN, *differs) if name not in machine.names))
    joint = np.diag([OPEN.get(name, 0.0) ** 2 for name in names])
    joint[: len(machine.names), : len(machine.names)] = machine.covariance
    joint += np.diag([differs.get(name, 0.0) ** 2 for name in names])
    slopes = np.stack([(np.log(_moved(form, name).seconds(columns)) - at) / STEP for name in names])
    return np.sqrt(np.maximum(np.einsum("kn,kl,ln->n", slopes, joint, slopes), 0.0))


def _moved(form: ClosedForm, name: str) -> ClosedForm:
    p = form.parameters
    return form.on(form.topology, replace(p, **{name: getattr(p, name) * math.exp(STEP)}))

"""The sweep: every pair of every experiment measured on real links, alternating, with its predictions beside.

A result grows by one experiment at a time, so that a sweep which was interrupted goes on where it stopped. At its end a
tenth of the pairs is measured again: the noise floor is the median absolute log ratio to the first time.
"""

from __future__ import annotations

import datetime
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace

from shardplan.errors import BackendError, TimedOut
from shardplan.execution.lab.experiments import Experiment, LabKey, Pair, pairs
from shardplan.execution.lab.item import WrongResult
from shardplan.execution.lab.machine import require_idle
from shardplan.execution.lab.measurement import Measurement
from shardplan.execution.lab.results import BUSY, Again, Done, Row, Sweep
from shardplan.execution.lab.session import MOST_LATE, REPETITIONS, Lab, duration
from shardplan.simulation.scripts import Engine

AGAIN = 10  # of so many pairs one is measured again at the end
TRIES = 2  # of an experiment, before it is kept with its error
Progress = Callable[[float, float, str], None]  # seconds of work done, of all, and what is being done


def measure_experiments(
    experiments: Sequence[Experiment],
    *,
    engine: Engine = "ring",
    repetitions: int = REPETITIONS,
    before: Sweep | None = None,
    keep: Callable[[Sweep], None] | None = None,
    progress: Progress | None = None,
    most_late: float = MOST_LATE,
    floor: bool = True,
    busy: bool = False,
) -> Sweep:
    """Measure every pair of every experiment, alternating their repetitions.

    An experiment that fails twice, because the machine is too busy, is kept with its error and tried again on resuming.

    Args:
        experiments: Those of one cluster one after another: each change of cluster builds one.
        engine: Of `ENGINES`.
        repetitions: Timed runs of every pair.
        before: What an earlier call found; its experiments are not measured again.
        keep: Called with the result so far after every experiment.
        progress: Called often, for a bar.
        most_late: As for `Lab`.
        floor: Whether to measure a tenth again at the end.
        busy: Whether to measure on a busy machine, too; without it that is refused.

    Returns:
        The result, with the experiments of `before`.

    Raises:
        Unavailable: This machine cannot run it, or is busy.
        WrongResult: A result differs from the reference.
        BackendError: `before` is of another engine or another number of repetitions.
    """
    found = before or Sweep(engine, repetitions)
    if (found.engine, found.repetitions) != (engine, repetitions):
        raise BackendError(
            f"the result to go on with is of engine={found.engine!r}, repetitions={found.repetitions}; asked are "
            f"{engine!r}, {repetitions}"
        )
    found = replace(found, experiments=tuple(d for d in found.experiments if not d.error))
    have = {d.experiment for d in found.experiments}
    if not busy and not have >= set(experiments):
        require_idle()
    todo = [(e, pairs(e, engine)) for e in dict.fromkeys(experiments) if e not in have]
    second = floor and (bool(todo) or not found.again)
    work = sum(_work(own, repetitions) for _, own in todo)
    twice = work + sum(_work(d.rows, repetitions) for d in found.experiments)
    meter = _WorkMeter(progress, work + second * twice / AGAIN)
    with _Labs(engine, most_late) as labs:
        for experiment, own in todo:
            done = _measure_experiment(labs, experiment, own, repetitions, meter)
            found = replace(found, experiments=(*found.experiments, done), again=())
            if keep is not None:
                keep(found)
        if second:
            found = replace(found, again=tuple(_measure_again(labs, found, repetitions, meter)))
            if keep is not None:
                keep(found)
    return found


class _Labs(ExitStack):
    """The lab that is running, of the cluster asked for last."""

    def __init__(self, engine: Engine, most_late: float) -> None:
        super().__init__()
        self.engine: Engine = engine
        self.most_late = most_late
        self.key: LabKey | None = None
        self.lab: Lab | None = None

    def of(self, experiment: Experiment) -> Lab:
        """Return a lab of an experiment's cluster."""
        if self.lab is None or self.key != experiment.key:
            self.stop()
            lab = Lab(experiment.build(), engine=self.engine, most_late=self.most_late)
            self.lab, self.key = self.enter_context(lab), experiment.key
        return self.lab

    def stop(self) -> None:
        """Take it down; the next is built anew."""
        self.close()
        self.lab = self.key = None


class _WorkMeter:
    """Seconds of predicted work done, for a bar."""

    def __init__(self, progress: Progress | None, total: float) -> None:
        self.progress, self.total, self.done = progress, total, 0.0

    def part(self, work: float, what: str) -> Callable[[int, int], None]:
        """Return what a measurement calls with the runs done and to do, and count the work in."""
        start = self.done
        self.done += work

        def tell(done: int, total: int) -> None:
            if self.progress is not None:
                self.progress(min(start + work * done / max(total, 1), self.total), self.total, what)

        return tell


def _work(own: Iterable[Pair | Row], repetitions: int) -> float:
    """Seconds that pairs are predicted to take."""
    return sum(duration(p.events, repetitions) for p in own)


def _measure_experiment(
    labs: _Labs, experiment: Experiment, own: list[Pair], repetitions: int, meter: _WorkMeter
) -> Done:
    tell = meter.part(_work(own, repetitions), experiment.name)
    started, load = time.monotonic(), os.getloadavg()[0]
    date = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC")
    error, rows = "", ()
    for _ in range(TRIES):
        try:
            measured = labs.of(experiment).measure([p.task() for p in own], repetitions, progress=tell)
            error, rows = "", tuple(_row(p, m) for p, m in zip(own, measured, strict=True))
            break
        except WrongResult:
            raise
        except (BackendError, TimedOut) as problem:
            error = str(problem)
            labs.stop()
    return Done(experiment, date, time.monotonic() - started, load, rows, error)


def _row(pair: Pair, m: Measurement) -> Row:
    said = m.predicted_edge_bytes
    most = max(said, default=0)
    busy = [k / n for k, n in zip(m.kernel_edge_bytes, said, strict=True) if n and n >= BUSY * most]
    return Row(
        placement=pair.placement.describe(),
        program=pair.text,
        ops=pair.ops,
        events=pair.events,
        barrier=pair.barrier,
        seconds=tuple(r.seconds for r in m.repetitions),
        repeated=m.repeated,
        voided=m.voided,
        lateness=tuple(r.lateness for r in m.repetitions),
        cpu_share=tuple(r.cpu_share for r in m.repetitions),
        drops=tuple(r.drops for r in m.repetitions),
        load=m.load,
        exact=m.exact,
        payload=most,
        kernel=(min(busy), max(busy)) if busy else None,
    )


def _measure_again(labs: _Labs, found: Sweep, repetitions: int, meter: _WorkMeter) -> Iterator[Again]:
    """Measure one in `AGAIN` pairs once more; yield each, cluster by cluster, so that a lab is built once a cluster."""
    number = 0
    for done in sorted(found.experiments, key=lambda d: d.experiment.cluster_name):
        wanted: list[Row] = []
        for row in done.rows:
            if number % AGAIN == AGAIN // 2:
                wanted.append(row)
            number += 1
        if not wanted:
            continue
        known = {(p.placement.describe(), p.text): p for p in pairs(done.experiment, found.engine)}
        own = [known[row.placement, row.program] for row in wanted]
        tell = meter.part(_work(own, repetitions), f"again: {done.experiment.name}")
        try:
            measured = labs.of(done.experiment).measure([p.task() for p in own], repetitions, progress=tell)
        except (BackendError, TimedOut):
            labs.stop()
            continue
        for row, m in zip(wanted, measured, strict=True):
            times = tuple(r.seconds for r in m.repetitions)
            yield Again(done.experiment.name, row.placement, row.program, row.median, m.seconds, times)


def estimate(experiments: Sequence[Experiment], repetitions: int = REPETITIONS, engine: Engine = "ring") -> float:
    """Return about how many seconds a sweep takes, the noise floor included."""
    return sum(_work(pairs(e, engine), repetitions) for e in experiments) * (1 + 1 / AGAIN)

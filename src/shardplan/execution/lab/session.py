"""`Lab`: a cluster that is up, and measures many programs one after another on the same ranks."""

from __future__ import annotations

import math
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np

from shardplan.core.program import Program
from shardplan.errors import BackendError, TimedOut, TopologyError
from shardplan.execution.lab import needs
from shardplan.execution.lab.cluster import Cluster
from shardplan.execution.lab.item import Failure, Item, Order, Run
from shardplan.execution.lab.measurement import Measurement, repetition_of, run_seconds, variation
from shardplan.execution.measure import timeline_of
from shardplan.hardware.placement import Placement
from shardplan.hardware.topology import Topology
from shardplan.plans.pricing import fabric_of
from shardplan.simulation.interval import Interval
from shardplan.simulation.predict import step_names
from shardplan.simulation.script import Script
from shardplan.simulation.scripts import ENGINES, Engine, script_of
from shardplan.simulation.timeline import Timeline

HOST = ("-m", "shardplan.execution.lab.host")  # what Python runs inside the namespaces
REPETITIONS = 5
OVERHEAD = 0.06  # seconds a run takes beside what it measures: for the estimate of the time left
MOST_VARIATION = 0.05  # a set of repetitions that varies more is taken again, once
MOST_VOID = 10  # runs in a row that may be thrown away because a rank was late, before a repetition is given up
PAUSE, DOUBLINGS = 0.01, 5  # seconds after a run that a rank was late for, and how often they double: at most a third
TIMEOUT = 60.0  # seconds that any wait of a rank for another may take: programs here take one, or few
MOST_LATE = 0.01  # seconds by which a rank may miss the agreed start
START_TIMEOUT = 120.0  # seconds, importing torch included
END_TIMEOUT = 10.0  # seconds that the host has to end after its pipe: it ends at once, and the kernel after it
# Seconds that the host has to answer an order: it itself waits twice a rank's timeout, for inputs and for a run, and
# a first order may make process groups.
ANSWER_TIMEOUTS, ANSWER_SECONDS = 5, 60.0


@dataclass(frozen=True, slots=True)
class Task:
    """Something to measure."""

    what: Program | Script  # of a script the bytes are replayed, without values
    where: Placement | None = None  # on the lab's topology; None where device ids are positions on it
    title: str = ""  # for people; by default the program's steps


class Lab:
    """A running cluster; a context manager.

    Args:
        cluster: What to build; a topology is one with `leaf="ns"`.
        engine: Of `ENGINES`, where a measurement does not say another.
        timeout: Seconds that any wait of a rank for another may take.
        most_late: Seconds by which a rank may miss the agreed start; a run with a later one does not count.

    Raises:
        Unavailable: This machine cannot run it; on entering.
        TopologyError: The topology is no tree of switches with one uplink.
        BackendError: The ranks did not start.

    >>> from shardplan.execution.lab import Cluster, Lab
    >>> def fastest(programs):
    ...     with Lab(Cluster.of("2x4", (200, 1000))) as lab:
    ...         return min(lab.measure(programs), key=lambda m: m.seconds)
    """

    def __init__(
        self,
        cluster: Cluster | Topology,
        *,
        engine: Engine = "ring",
        timeout: float = TIMEOUT,
        most_late: float = MOST_LATE,
    ) -> None:
        """Check what can be checked before anything is built."""
        _check_engine(engine)
        if not (timeout > 0 and math.isfinite(timeout)):
            raise BackendError(f"timeout={timeout!r}; legal is a positive number of seconds")
        self.cluster = cluster if isinstance(cluster, Cluster) else Cluster(cluster)
        self.engine: Engine = engine
        self.timeout = timeout
        self.most_late = most_late
        self._process: subprocess.Popen[bytes] | None = None
        self._pipe: Connection | None = None
        self._said: Any = None
        self._keys = 0

    def __enter__(self) -> Self:
        """Build the cluster and start the ranks: a few seconds, most of them for torch."""
        needs.require()
        here, there = Pipe()
        source = str(Path(__file__).resolve().parents[3])  # where the package lies: the host must find this very one
        paths = [source, *(p for p in os.environ.get("PYTHONPATH", "").split(os.pathsep) if p)]
        environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(paths)}
        self._said = tempfile.TemporaryFile()
        self._process = subprocess.Popen(
            [*needs.namespace_command(), sys.executable, *HOST, str(there.fileno())],
            pass_fds=[there.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=self._said,
            stderr=self._said,
            env=environment,
            start_new_session=True,  # an interrupt from the terminal is for us: the ranks go with the host
        )
        there.close()
        self._pipe = here
        try:
            here.send((self.cluster, self.timeout))
            self._answer(START_TIMEOUT, "the start of the cluster")
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Take everything down."""
        self.close()

    def close(self) -> None:
        """Take everything down: the host ends when the pipe does, and all else with it."""
        pipe, process = self._pipe, self._process
        self._pipe = self._process = None
        if pipe is not None:
            pipe.close()
        if process is not None:
            try:
                process.wait(END_TIMEOUT)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait(END_TIMEOUT)
        if self._said is not None:
            self._said.close()
            self._said = None

    def measure(
        self,
        tasks: Sequence[Task | Program | Script],
        repetitions: int = REPETITIONS,
        *,
        engine: Engine | None = None,
        progress: Callable[[int, int], None] | None = None,
    ) -> list[Measurement]:
        """Run every task once on verified integers, then all of them in turn, `repetitions` times.

        A task whose times vary by more than `MOST_VARIATION` is taken once more, and the calmer set is kept.

        Args:
            tasks: Programs, scripts, or either with a placement.
            repetitions: Timed runs of each, at least 1.
            engine: Another engine than the lab's; scripts are replayed whatever it is.
            progress: Called with the runs done and the runs to do.

        Returns:
            One measurement a task.

        Raises:
            BackendError: A result differs from the reference, a rank failed, or ranks were late again and again.
            TimedOut: A rank did not arrive.
            TopologyError: A device is not on the cluster.
        """
        chosen = engine or self.engine
        _check_engine(chosen)
        if repetitions < 1:
            raise BackendError(f"repetitions={repetitions}; legal are 1 and more")
        cells = [_Cell(*self._item(t if isinstance(t, Task) else Task(t), chosen)) for t in tasks]
        done, total = 0, len(cells) * (repetitions + 1)

        def tell() -> None:
            nonlocal done
            done += 1
            if progress is not None:
                progress(min(done, total), total)

        try:
            for cell in cells:
                cell.key = self.new_key()
                self.call("load", cell.key, cell.item)
                cell.verified = cell.item.script is None
                self.call("run", cell.key, True)
                tell()
            self._repeat(cells, repetitions, tell)
            for cell in cells:
                cell.first, cell.runs = cell.runs, []
                if not cell.first:
                    raise BackendError(
                        f"{cell.item.title}: in all of {cell.voided} runs a rank started late, in the last by "
                        f"{cell.latest * 1e3:.1f} ms (legal are {self.most_late * 1e3:g} ms); the machine is too busy"
                    )
            restless = [c for c in cells if variation([run_seconds(r) for r in c.first]) > MOST_VARIATION]
            total += len(restless) * repetitions
            self._repeat(restless, repetitions, tell)
        finally:
            if self._pipe is not None:
                for cell in cells:
                    if cell.key:
                        self.call("forget", cell.key)
        return [self._measurement(cell) for cell in cells]

    def _repeat(self, cells: Sequence[_Cell], repetitions: int, tell: Callable[[], None]) -> None:
        """Run all cells, taking turns, so that none has the quiet minute for itself."""
        for _ in range(repetitions):
            for cell in cells:
                self._add_run(cell)
                tell()

    def _add_run(self, cell: _Cell) -> None:
        """Add one run to a cell; after `MOST_VOID` in which a rank started late, none."""
        run, voided, cell.latest = self.run_on_time(cell.key)
        cell.runs += [] if run is None else [run]
        cell.voided += voided

    def run_on_time(self, key: int) -> tuple[Run | None, int, float]:
        """Run what is loaded until no rank starts late, at most `MOST_VOID` times.

        Returns the run, None where none was on time; how many were thrown away; and the seconds by which the last was
        late.
        """
        latest = 0.0
        for attempt in range(MOST_VOID):
            run: Run = self.call("run", key, False)
            latest = max((o.lateness for o in run.outcomes), default=0.0)
            if latest <= self.most_late:
                return run, attempt, latest
            time.sleep(PAUSE * 2 ** min(attempt, DOUBLINGS))  # what kept the ranks from the cores may pass
        return None, MOST_VOID, latest

    def _item(self, task: Task, engine: Engine) -> tuple[Task, Item]:
        what = task.what
        if isinstance(what, Program):
            devices, names = what.devices, step_names(what)
            title = task.title or "; ".join(step.op.name for step in what.steps) or "program without steps"
            item = Item(title, engine, self._ranks(task, devices), names, program=str(what))
        else:
            title = task.title or what.title or "script"
            item = Item(title, engine, self._ranks(task, what.devices), what.names, script=what)
        return task, item

    def _ranks(self, task: Task, devices: Sequence[int]) -> dict[int, int]:
        topology = self.cluster.topology
        where = topology if task.where is None else task.where
        if isinstance(where, Placement) and where.topology.level_sizes != topology.level_sizes:
            raise TopologyError(
                f"the placement is on {where.topology.describe()}, but the lab's cluster is {topology.describe()}"
            )
        laid = (where.mesh,) if isinstance(where, Placement) else ()
        fabric = fabric_of(where, task.what.meshes if isinstance(task.what, Program) else laid)
        found = fabric.topology_ids(np.array(devices, dtype=np.int64)).tolist()
        return dict(zip(devices, found, strict=True))

    def _measurement(self, cell: _Cell) -> Measurement:
        sets = [s for s in (cell.first, cell.runs) if s]
        runs = min(sets, key=lambda s: variation([run_seconds(r) for r in s]))
        item, tree = cell.item, self.cluster.tree
        middle = sorted(runs, key=run_seconds)[(len(runs) - 1) // 2]
        payload: Counter[tuple[int, int]] = Counter()
        for outcome in middle.outcomes:
            payload.update({(outcome.device or 0, peer): n for peer, n in outcome.payload.items()})
        what = cell.task.what
        script = what if isinstance(what, Script) else script_of(what, engine=item.engine)

        def edges(traffic: dict[tuple[int, int], int]) -> tuple[int, ...]:
            return tree.edge_bytes({(item.ranks[a], item.ranks[b]): n for (a, b), n in traffic.items()})

        predicted = script.payload()
        return Measurement(
            item.title,
            "replay" if isinstance(what, Script) else item.engine,
            tuple(e.name for e in tree.edges),
            tuple(repetition_of(r) for r in runs),
            len(sets) > 1,
            cell.voided,
            cell.verified,
            dict(sorted(payload.items())),
            edges(payload),
            predicted,
            edges(predicted),
            {o.device or 0: o.calls for o in middle.outcomes if o.calls},
            cell.load,
            _timeline(what, middle, item),
        )

    def new_key(self) -> int:
        """Return a key for an item, which no other has."""
        self._keys += 1
        return self._keys

    def call(self, name: str, *arguments: Any) -> Any:
        """Return what a method of the host returns; raises `BackendError` where the lab does not run."""
        if self._pipe is None:
            raise BackendError("the lab is not running; use it as a context manager: with Lab(...) as lab: ...")
        self._pipe.send(Order(name, arguments))
        return self._answer(ANSWER_TIMEOUTS * self.timeout + ANSWER_SECONDS, name)

    def _answer(self, timeout: float, what: str) -> Any:
        pipe = self._pipe
        assert pipe is not None
        try:
            if not pipe.poll(timeout):
                self.close()
                raise TimedOut(f"the lab did not answer ({what}) within {timeout:g} s")
            answer = pipe.recv()
        except (EOFError, ConnectionResetError):
            said = self._last_words()
            self.close()
            raise BackendError(f"the lab's first process died during {what}: {said}") from None
        except KeyboardInterrupt:
            self.close()  # an answer that nobody reads would be taken for that to the next order
            raise
        if isinstance(answer, Failure):
            if answer.fatal:
                self.close()
            raise answer.error()
        return answer

    def _last_words(self) -> str:
        self._said.seek(0)
        lines = self._said.read().decode(errors="replace").strip().splitlines()
        return lines[-1] if lines else "it said nothing"


class _Cell:
    """A task, and its runs so far."""

    def __init__(self, task: Task, item: Item) -> None:
        self.task = task
        self.item = item
        self.key = 0
        self.verified = False
        self.first: list[Run] = []
        self.runs: list[Run] = []
        self.voided = 0
        self.latest = 0.0  # seconds by which a rank was late, in the last run
        self.load = os.getloadavg()[0]


def duration(seconds: float, repetitions: int = REPETITIONS) -> float:
    """Return the seconds that a task which takes that long is measured for, with the run that is verified."""
    return (seconds + OVERHEAD) * (repetitions + 1)


def measure(
    program: Program | Script | Task,
    cluster: Cluster | Topology,
    *,
    engine: Engine = "ring",
    repetitions: int = REPETITIONS,
) -> Timeline:
    """Run one program on a cluster of its own, and return the timeline of the repetition with the median time.

    Device ids are positions on the cluster's topology; there are `repetitions` timed runs.

    Raises:
        Unavailable: This machine cannot run it.
        BackendError: A result differs from the reference, or a rank failed.
    """
    with Lab(cluster, engine=engine) as lab:
        return lab.measure([program], repetitions)[0].timeline


def _check_engine(engine: str) -> None:
    if engine not in ENGINES:
        raise BackendError(f"engine={engine!r}; legal are {', '.join(ENGINES)}")


def _timeline(what: Program | Script, run: Run, item: Item) -> Timeline:
    spans = [s for o in run.outcomes for s in o.spans]
    title = f"lab, {item.engine} engine: {item.title}"
    if isinstance(what, Program):
        return timeline_of(what, spans, title)
    origin = min((s.start for s in spans), default=0.0)
    rows = sorted(spans, key=lambda s: (s.start, s.device, s.step))
    return Timeline(
        tuple(
            Interval(s.device, "comm", s.start - origin, s.end - origin, what.names[s.step], what.kinds[s.step], s.step,
                     s.received)
            for s in rows
        ),
        source="measured",
        title=title,
    )  # fmt: skip

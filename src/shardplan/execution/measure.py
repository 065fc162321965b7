"""`measure`: a real run of a program as a `Timeline`, of the same type and trace format as a predicted one.

`measured_links` is the topology of the links that the processes have: what a prediction for them is made with.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from shardplan.core.mesh import Mesh
from shardplan.core.ops import AllGather
from shardplan.core.pattern import communicates
from shardplan.core.program import Program
from shardplan.core.reference import distribute
from shardplan.core.step import Step
from shardplan.core.tensor import TensorType
from shardplan.errors import BackendError
from shardplan.execution.record import Record, StepSpan
from shardplan.execution.run import BACKENDS, TIMEOUT, run_recorded
from shardplan.hardware.level import Level
from shardplan.hardware.topology import Topology
from shardplan.simulation.interval import Interval
from shardplan.simulation.predict import step_names
from shardplan.simulation.timeline import Timeline

# All-gathers of so many bytes a device, and how often each: the fastest counts, and the first run only connects. On
# eight devices at 1 Gbit/s the large ones take half a second together; the whole is bounded by about a second.
SMALL, LARGE, TIMES = 64, 1 << 20, 4


def measure(program: Program, shards: Any, backend: str, timeout: float = TIMEOUT) -> tuple[Any, Timeline]:
    """Run a program as `run` does, and return its results and what every device did when.

    The timeline is in seconds since the first device began its first step, on one clock: under torch the ranks' offsets
    are measured at the start, and every rank has the intervals of all; else a process has those of its own devices, on
    its own clock. Raises as `run`, and `BackendError` for the reference, which has no time.
    """
    if backend not in BACKENDS or backend == "reference":
        legal = ", ".join(name for name in BACKENDS if name != "reference")
        raise BackendError(f"nothing to measure on the backend {backend!r}; legal are {legal}")
    record = Record()
    results = run_recorded(program, shards, backend, timeout, record)
    return results, timeline_of(program, record.spans, f"{backend} backend")


def timeline_of(program: Program, spans: Sequence[StepSpan], title: str) -> Timeline:
    """Return spans on one clock as a timeline that starts at 0; a step without messages is `compute`, else `comm`."""
    origin = min((s.start for s in spans), default=0.0)
    names = step_names(program)
    intervals: list[Interval] = []
    for s in sorted(spans, key=lambda s: (s.start, s.device, s.step)):
        step = program.steps[s.step]
        local = not communicates(step.op.pattern(*program.step_types(step)[0]))
        intervals.append(
            Interval(
                s.device,
                "compute" if local else "comm",
                s.start - origin,
                s.end - origin,
                names[s.step],
                step.op.name,
                s.step,
                s.received,
            )
        )
    return Timeline(tuple(intervals), source="measured", title=title)


def measured_links(devices: Sequence[int], backend: str, timeout: float = TIMEOUT) -> Topology | None:
    """Return the links between devices as one switch, by the seconds of a few small and large all-gathers.

    All processes call it, and those of other devices pass no shards. An all-gather of n devices is priced as n - 1
    rounds, each a latency and a device's bytes over the bandwidth; so the library is `ring`. Raises as `measure`; None
    for one device, which has no links.
    """
    n = len(devices)
    if n < 2:
        return None
    mesh = Mesh({"x": n}, devices=devices)
    here = set(own_devices(backend))
    found: list[float] = []
    for nbytes in (SMALL, LARGE):
        whole = TensorType("i32", (n * nbytes // 4,), ("x",), mesh)
        program = Program({"0": whole}, [Step(AllGather(0, ("x",)), ("0",), ("1",))], ("1",))
        shards = distribute(np.zeros(whole.shape, np.int32), whole)
        mine = [x for d, x in zip(mesh.devices, shards, strict=True) if d in here]
        runs = [measure(program, mine, backend, timeout)[1].seconds for _ in range(1 + TIMES)]
        found.append(min(runs[1:]))
    small, large = found
    # Where large and small take as long, latency is all there is to see: then the bandwidth is at least this.
    bandwidth = (LARGE - SMALL) / max(large - small, large / 10) * (n - 1)
    level = Level("device", max(devices) + 1, "switch", bandwidth, small / (n - 1))
    return Topology("measured links", (level,))


def own_devices(backend: str) -> tuple[int, ...]:
    """Return the device ids of this process under a backend's launcher."""
    match backend:
        case "torch":
            import torch.distributed as dist

            return (dist.get_rank(),)
        case "mpi":
            from mpi4py import MPI

            return (MPI.COMM_WORLD.Get_rank(),)
        case "jax":
            import jax

            return tuple(d.id for d in jax.local_devices())
        case _:
            raise BackendError(f"the backend {backend!r} has all devices in one process")

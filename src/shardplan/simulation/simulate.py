"""`simulate`: programs and jobs on a placement, and models under a strategy on a topology."""

from __future__ import annotations

from typing import overload

from shardplan.core import validation
from shardplan.core.program import Program
from shardplan.errors import ShardplanError, excerpt
from shardplan.hardware.topology import Topology, topology_of
from shardplan.plans.pricing import Where
from shardplan.simulation import events
from shardplan.simulation.closed.parameters import Parameters
from shardplan.simulation.inference.request_timeline import simulate_requests
from shardplan.simulation.inference.requests import Requests
from shardplan.simulation.jobs.job_timeline import JobTimeline, simulate_job
from shardplan.simulation.steps import derate, simulate_step
from shardplan.simulation.timeline import Timeline
from shardplan.strategy.model import Model
from shardplan.strategy.options import check_options
from shardplan.strategy.partition.job import Job
from shardplan.strategy.partition.partition import partition
from shardplan.strategy.strategy import Strategy

FIDELITIES = ("closed", "events", "ops")


@overload
def simulate(program: Program, placement: Where | str, *, algorithm: str = "auto") -> Timeline: ...
@overload
def simulate(program: Job, placement: Where | str, *, algorithm: str = "auto") -> JobTimeline: ...
@overload
def simulate(
    program: Model,
    placement: Strategy,
    topology: Topology | str,
    fidelity: str = "events",
    params: Parameters | None = None,
    algorithm: str = "auto",
    requests: Requests | None = None,
) -> Timeline | JobTimeline: ...


def simulate(
    program: Program | Job | Model,
    placement: Where | str | Strategy,
    topology: Topology | str | None = None,
    fidelity: str | None = None,
    params: Parameters | None = None,
    algorithm: str = "auto",
    requests: Requests | None = None,
) -> Timeline | JobTimeline:
    """Return the timeline of a program, of a job's step, or of a model's step under a strategy.

    Args:
        program: A program; a job, whose ops are followed on streams; or a model.
        placement: A placement, or a topology, or its text; of a model the strategy.
        topology: Of a model on what it runs.
        fidelity: Of a model: `closed` (a formula of its stages), `events` (its stages' passes, by default), or `ops`
            (the ops of the job that `partition` makes, on what the machine delivers).
        params: Of a model: parameters of the machine, by default those that ship.
        algorithm: Of programs, jobs and ops: `auto`, or an algorithm of the topology's library.
        requests: Of a model that serves: its requests, instead of a training step, at the fidelity `closed`.

    Raises `ShardplanError` for what does not go together, and what each of them raises.

    >>> model = Model.load("gpt", layers=4, hidden=256, heads=4, seq=128, vocab=1000, precision="bf16")
    >>> one = Strategy(pipeline=2, tensor=2, data=2, global_batch=32)
    >>> simulate(model, one, Topology.load("dgx-a100-80g", nodes=1)).peak_bytes > 0
    True
    """
    if isinstance(program, Model):
        if not isinstance(placement, Strategy) or topology is None:
            raise ShardplanError(
                f"simulate of a model: {excerpt(placement)} and {excerpt(topology)}; legal are a Strategy and a "
                "topology"
            )
        if requests is not None:
            validation.choice("simulate: fidelity of requests", fidelity or "closed", FIDELITIES[:1], ShardplanError)
            return simulate_requests(program, placement, topology, requests, params)
        said = validation.choice("simulate: fidelity", fidelity or "events", FIDELITIES, ShardplanError)
        if said == "ops":
            check_options(program, placement)
            if placement.software.attention == "unfused":
                raise ShardplanError(
                    "simulate: attention='unfused' at the fidelity 'ops', which has attention as one kernel; "
                    "legal are 'closed' and 'events', or another kernel"
                )
            for name, plain in (("tensor_overlap", False), ("offload_layers", 0)):
                if (said := getattr(placement.software, name)) != plain:
                    raise ShardplanError(
                        f"simulate: {name}={said} at the fidelity 'ops', whose jobs have no such ops; "
                        f"legal are 'closed' and 'events', or {plain}"
                    )
            for name in ("imbalance", "dispatch", "expert_products"):
                if (said := getattr(placement.software, name)) is not None:
                    raise ShardplanError(
                        f"simulate: {name}={said!r} at the fidelity 'ops', whose experts have as many tokens each, "
                        "exchanged by the job's collectives, in one kernel; legal are 'closed' and 'events', or None"
                    )
            where = derate(topology_of("the topology", topology), params, placement.software.attention)
            return simulate_job(partition(program, placement, topology), where, algorithm=algorithm)
        return simulate_step(program, placement, topology, said, params)
    if isinstance(topology, str) and algorithm == "auto":  # of a program the third is the algorithm
        topology, algorithm = None, topology
    if any(x is not None for x in (topology, fidelity, params, requests)):
        raise ShardplanError(
            "simulate: topology, fidelity, params and requests are of a model; legal is a program's placement"
        )
    if isinstance(placement, Strategy):
        raise ShardplanError(f"simulate: a strategy with {excerpt(program)}; legal is a Model with it")
    if isinstance(program, Job):
        return simulate_job(program, placement, algorithm=algorithm)
    return events.simulate(program, placement, algorithm)

"""A model's step under a strategy, simulated: by the closed form, or by events of its stages."""

from __future__ import annotations

from collections import deque
from dataclasses import replace

from shardplan.core import validation
from shardplan.errors import ShardplanError, excerpt
from shardplan.hardware.topology import Topology, topology_of
from shardplan.simulation.closed.collectives import with_network
from shardplan.simulation.closed.configurations import Configurations
from shardplan.simulation.closed.form import ClosedForm, PricedSteps
from shardplan.simulation.closed.kernel_classes import with_kernels
from shardplan.simulation.closed.machines import check_topology_size, of_machine
from shardplan.simulation.closed.parameters import Parameters
from shardplan.simulation.interval import Interval, MemoryCurve
from shardplan.simulation.sweep import compile_schedule, intervals_of, sweep
from shardplan.simulation.timeline import Timeline
from shardplan.strategy.model import Model
from shardplan.strategy.options import check_options
from shardplan.strategy.schedules.schedule import Schedule
from shardplan.strategy.schedules.table import is_rendezvous
from shardplan.strategy.strategy import Strategy

FIDELITIES = ("closed", "events")
_recent: deque[ClosedForm] = deque(maxlen=4)


def simulate_step(
    model: Model,
    strategy: Strategy,
    topology: Topology | str,
    fidelity: str = "events",
    params: Parameters | None = None,
) -> Timeline:
    """Return the timeline of one training step.

    Args:
        model: What is trained.
        strategy: How; its devices lie on the topology in their order, those of the tensor axis innermost.
        topology: On what, or its text; it has as many devices.
        fidelity: `closed`: a formula of what stages take, drawn on one rank as its busy time, what it waits for, and
            what comes once a step. `events`: what every rank does, pass by pass.
        params: Of the machine; by default those that ship for the topology's preset.

    Raises:
        ShardplanError: Another fidelity; a topology of another size; values of other kinds.
        LayoutError: A strategy that says what is only partitioned, such as `cuts`, or what does nothing for the model.

    >>> model = Model.load("gpt", layers=4, hidden=256, heads=4, seq=128, vocab=1000, precision="bf16")
    >>> one = Strategy(pipeline=2, tensor=2, data=2, global_batch=32)
    >>> box = Topology.load("dgx-a100-80g", nodes=1)
    >>> line = simulate_step(model, one, box)
    >>> line.devices, 0.7 < simulate_step(model, one, box, "closed").seconds / line.seconds < 1.3
    ((0, 1), True)
    """
    validation.choice("simulate: fidelity", fidelity, FIDELITIES, ShardplanError)
    where = topology_of("the topology", topology)
    check_topology_size("simulate", where, strategy)
    if params is not None and not isinstance(params, Parameters):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ShardplanError(f"simulate: params is {excerpt(params)}; legal are Parameters, or None")
    check_options(model, strategy)
    own = strategy.schedule if isinstance(strategy.schedule, Schedule) else None
    form = _form_of(model, where, params or of_machine(where))
    # A schedule of one's own has no formula: what its passes take is that of a named one of as many chunks.
    chunks = strategy.interleave or 1
    plain = "zb-h1" if own is not None and any(a.kind == "W" for row in own.ranks for a in row if a) else "1f1b"
    named = strategy if own is None else replace(strategy, schedule="interleaved" if chunks > 1 else plain)
    columns = Configurations.of([named])
    if fidelity == "closed" and own is None:
        return _closed_form_timeline(form(columns), where.name)
    stages = form.stages(columns).of_chunks(own is None and is_rendezvous(str(strategy.schedule), chunks))
    together = strategy.software.expert_overlap
    order = compile_schedule(own, together=together) if own else compile_schedule(
        str(strategy.schedule), strategy.pipeline, strategy.microbatches, strategy.interleave, together=together
    )  # fmt: skip
    curve = MemoryCurve(0, ((0.0, int(form.peak_bytes(columns)[0])),))
    return Timeline(intervals_of(sweep(order, stages)), (curve,), title=f"events, {where.name}")


def _form_of(model: Model, topology: Topology, params: Parameters) -> ClosedForm:
    """Return the closed form of a model; of the last few models, what was read of them is remembered."""
    form = next((one for one in _recent if one.model is model), None) or ClosedForm(model, topology, params)
    if (form.topology, form.parameters) != (topology, params):
        form = form.on(topology, params)
    _recent.append(form)
    return form


def derate(topology: Topology, params: Parameters | None = None, attention: str | None = None) -> Topology:
    """Return a topology as its machine delivers it: what parameters say of kernels, collectives and the host.

    `attention` is the generation of its kernels, as `Software.attention` has it; FlashAttention 2 by default.
    """
    p = params or of_machine(topology)
    device = replace(with_kernels(topology.device, p, attention or "flash2"), issue=p.launch)
    return replace(with_network(topology, p), device=device)


def _closed_form_timeline(out: PricedSteps, name: str) -> Timeline:
    """One rank: busy, waiting, and what comes once a step."""
    seconds, bubble, once = (float(x[0]) for x in (out.seconds, out.parts["bubble"], out.parts["once"]))
    ends = [("busy", seconds - bubble - once), ("bubble", bubble), ("once", once)]
    found: list[Interval] = []
    at = 0.0
    for kind, length in ends:
        if length > 0:
            causes = (len(found) - 1,) if found else ()
            found.append(Interval(0, "compute", at, at + length, kind, kind, len(found), 0, causes))
            at += length
    return Timeline(tuple(found), (MemoryCurve(0, ((0.0, int(out.peak_bytes[0])),)),), title=f"closed form, {name}")

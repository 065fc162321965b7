"""The requests of one strategy, at the closed form, as a timeline: prompts, then tokens."""

from __future__ import annotations

from dataclasses import replace

from shardplan.errors import ShardplanError, excerpt
from shardplan.hardware.topology import Topology, topology_of
from shardplan.simulation.closed.configurations import Configurations
from shardplan.simulation.closed.machines import check_topology_size, of_machine
from shardplan.simulation.closed.parameters import Parameters
from shardplan.simulation.inference.form import RequestForm
from shardplan.simulation.inference.requests import Requests
from shardplan.simulation.interval import Interval, MemoryCurve
from shardplan.simulation.timeline import Timeline
from shardplan.strategy.model import Model
from shardplan.strategy.options import check_options
from shardplan.strategy.strategy import Strategy

# What a strategy that serves does not say, and what it then says.
PLAIN = {"zero": 0, "fsdp": False, "recompute": "none", "interleave": 1}


def simulate_requests(
    model: Model, strategy: Strategy, topology: Topology | str, requests: Requests, params: Parameters | None = None
) -> Timeline:
    """Return a replica's time from the prompts of all that is in flight to their last tokens.

    Args:
        model: What serves, in the precision in which it does.
        strategy: How; its microbatch is the sequences of a group, and divides the concurrency.
        topology: On what, or its text.
        requests: The requests.
        params: Of the machine; by default those that ship for the topology's preset.

    Raises `ShardplanError` for what does not fit together, and for a strategy of training alone.

    >>> model = Model.load("gpt2", precision="bf16")
    >>> box = Topology.load("dgx-a100-80g", nodes=1)
    >>> line = simulate_requests(model, Strategy(tensor=4, data=2, microbatch=4), box, Requests(128, 32, 4))
    >>> [one.name for one in line.intervals]
    ['prompts', 'tokens']
    """
    where = topology_of("the topology", topology)
    if not isinstance(requests, Requests):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ShardplanError(f"simulate: requests is {excerpt(requests)}; legal is a Requests")
    check_topology_size("simulate", where, strategy)
    served = serving_strategy(strategy, requests)
    c = Configurations.of([served])
    check_options(model, served, serves=True)
    form = RequestForm.of(model, where, params or of_machine(where), requests)
    first, _, latency, _, peak, _, _ = (x[0].item() for x in form.priced(c))
    found = [Interval(0, "compute", 0.0, first, "prompts", "prompts", 0, 0, ())]
    if latency > first:
        found.append(Interval(0, "compute", first, latency, "tokens", "tokens", 1, 0, (0,)))
    return Timeline(tuple(found), (MemoryCurve(0, ((0.0, int(peak)),)),), title=f"requests, {where.name}")


def serving_strategy(s: Strategy, requests: Requests) -> Strategy:
    """Return a strategy with as many sequences as are in flight; raises `ShardplanError` where it does not serve."""
    for name, value in PLAIN.items():
        if getattr(s, name) != value:
            raise ShardplanError(f"serving with {name}={getattr(s, name)!r}; legal is {value!r}")
    if requests.concurrency % s.microbatch:
        raise ShardplanError(
            f"serving {requests.concurrency} in flight by groups of microbatch={s.microbatch}; legal are divisors"
        )
    if s.context > 1 and (s.context_kind != "gather" or s.expert > 1 or requests.prompt % s.context):
        raise ShardplanError(
            f"serving with context={s.context}, context_kind={s.context_kind!r}, expert={s.expert}; legal is one that "
            f"divides prompt={requests.prompt}, context_kind='gather' and expert=1"
        )
    return replace(s, global_batch=s.data * requests.concurrency)

"""The command that times a machine, and writes its parameters for `plan --params`."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from shardplan.cli.answers import print_answer
from shardplan.cli.options import Json, NeededTopology, Nodes, check_writable, read_topology
from shardplan.cli.statuses import MISTAKE
from shardplan.errors import ShardplanError

if TYPE_CHECKING:
    from shardplan.hardware.topology import Topology

ITEMS = 37  # what is timed, of which each gets an equal part of the seconds


def measure(
    topology: NeededTopology,
    out: Annotated[Path, typer.Option("--out", metavar="FILE", help="Write the parameters, for plan --params.")],
    nodes: Nodes = None,
    precision: Annotated[
        str | None, typer.Option("--precision", help="Of products: bf16, by default on a GPU; fp32, on cores; fp16.")
    ] = None,
    seconds: Annotated[float, typer.Option("--seconds", min=1, max=180, help="About how long it takes.")] = 90.0,
    as_json: Json = False,
) -> None:
    """Time products, copies and collectives on this machine, under torchrun, a process a device.

    What they reach of what the topology states are the parameters of its machine, in the file that plan --params takes.
    """
    from shardplan.errors import optional
    from shardplan.plans.plan_file import write_atomic

    rank = int(os.environ.get("RANK", "0"))
    try:
        optional("torch", "torch")
        check_writable(out)
        where = read_topology(topology, nodes)
        assert where is not None  # an option that must be given
        _check_asked(where, precision)
    except ShardplanError:
        if rank:  # the first says it
            raise typer.Exit(MISTAKE) from None
        raise
    from shardplan.cli.bar import progress_bar
    from shardplan.execution.torch.machine_timings import join_machine, time_machine, wall_timer
    from shardplan.report.measurements import timed_machine_object, timed_machine_text
    from shardplan.simulation.accuracy.machine_timings import params_of_timings
    from shardplan.strategy.training import PRECISIONS

    with join_machine() as device, progress_bar() as tell:
        name = precision or ("fp32" if device.type == "cpu" else "bf16")
        timer = wall_timer(device, seconds / ITEMS)
        done = (lambda k, n: tell(k, n, "kernels and collectives")) if tell and not rank else lambda k, n: None
        timings = time_machine(device, PRECISIONS[name].dtype, timer, done)
        library = "gloo" if device.type == "cpu" else "nccl"
    if rank:
        return
    count, beside = len(timings.kernels), len(timings.collectives)
    source = f"{count} kernels and {beside} collectives timed on {where.size} devices over {library}"
    found = params_of_timings(timings, where, source)
    write_atomic(out, found.text.encode())
    print_answer(as_json, lambda: timed_machine_object(found, timings), lambda: timed_machine_text(found, timings))


def _check_asked(where: Topology, precision: str | None) -> None:
    """Refuse what cannot be measured, before any process is joined."""
    from shardplan.core import validation
    from shardplan.strategy.training import PRECISIONS

    if precision is not None:
        validation.choice("measure: --precision", precision, tuple(PRECISIONS), ShardplanError)
    if not where.device.flops:
        raise ShardplanError(
            f"measure: {where.name} states no flops of its device; legal is one that does, with memory_bandwidth"
        )
    size = int(os.environ.get("WORLD_SIZE", where.size))
    if size != where.size:
        raise ShardplanError(
            f"measure: {size} processes on {where.name}, which has {where.size} devices ({where.describe()}); legal is "
            "a process a device, or --nodes"
        )

"""`distir` and `distir_listing`: what DistIR's simulator says of a configuration, and the program it says it of."""

from __future__ import annotations

from collections.abc import Iterator

from shardplan.errors import LayoutError
from shardplan.simulation.parity.gpt import gpt_graph
from shardplan.simulation.parity.machine import DistirMachine
from shardplan.simulation.parity.mlp import mlp_graph
from shardplan.simulation.parity.points import DistirPoint
from shardplan.simulation.parity.program import DistirProgram, distir_program
from shardplan.simulation.parity.replay import DistirResult, ListedAction, replayed, unrolled


def compiled(point: DistirPoint, machine: DistirMachine) -> DistirProgram:
    """Return a configuration's program.

    Args:
        point: One on which DistIR does not fail.
        machine: What prices it.

    Raises `LayoutError` where DistIR fails.
    """
    if failure := point.failure():
        raise LayoutError(f"distir: {point} has no program, DistIR fails on it: {failure}")
    sizes = point.sizes
    if sizes.heads:
        graph = gpt_graph(machine, sizes.layers, sizes.heads, sizes.hidden, point.rows, point.tensor, point.pipeline)
    else:
        graph = mlp_graph(machine, sizes.layers, sizes.hidden, point.rows, point.tensor, point.pipeline)
    return distir_program(graph, machine, point.data, point.tensor, point.pipeline, point.microbatches)


def distir(point: DistirPoint, machine: DistirMachine | None = None) -> DistirResult:
    """Return what DistIR's simulator says of a configuration, its mistakes kept.

    Args:
        point: The configuration: an MLP is trained, a GPT runs forward only.
        machine: The machine; DistIR's default.

    Returns:
        Seconds of the latest device and bytes of the fullest, equal to DistIR's; -1 and why where DistIR fails.

    Source: microsoft/dist-ir 7cfa1b0 (arXiv 2111.05426).

    >>> distir(DistirPoint("mlp-small", global_batch=64))
    DistirResult(seconds=0.04069380533434918, peak_bytes=8600420356, failure=None)
    """
    if failure := point.failure():
        return DistirResult(-1.0, -1, failure)
    return replayed(compiled(point, machine or DistirMachine()))


def distir_listing(point: DistirPoint, machine: DistirMachine | None = None) -> Iterator[ListedAction]:
    """Yield the ops of DistIR's program in its order, on every device; inputs are where they are used before the first.

    Args:
        point: The configuration.
        machine: The machine; DistIR's default.

    Raises `LayoutError` where DistIR fails.

    Source: microsoft/dist-ir 7cfa1b0.

    >>> [action.kind for action in distir_listing(DistirPoint("mlp-xs"))][:3]
    ['MatMul', 'Relu', 'MatMul']
    """
    return unrolled(compiled(point, machine or DistirMachine()))

"""A forward and a backward of two microbatches that a schedule runs together: what of their exchanges is left to see.

Ops keep their order, pass after pass, as actions of a rank do. An exchange of tokens with experts takes what the other
pass does not hide of it, as `closed.pair_overlap` says of what both compute and exchange.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from shardplan.simulation.closed.pair_overlap import PairedPass, hidden_exchanges
from shardplan.simulation.jobs.framework_ops import needs_processors
from shardplan.simulation.jobs.timing import COMPUTE, Node, TimedOp, of_parameters
from shardplan.strategy.partition.job import Job

Passes = tuple[tuple[Node, ...], tuple[Node, ...]]


def beside_another(forward: tuple[Node, ...], backward: tuple[Node, ...], processors: int) -> Passes:
    """Return the ops of a forward and of a backward as they are in a pair.

    Args:
        forward: Ops of a pass alone.
        backward: Those of the backward pass of the same stage.
        processors: Those of a device; 0 where they are not known, and nothing is lost.
    """
    there, back = (PairedPass(*(np.array([x]) for x in pass_sums(nodes))) for nodes in (forward, backward))
    hidden = hidden_exchanges(there, back, processors)
    return _shorter(forward, _left(there, hidden[0])), _shorter(backward, _left(back, hidden[1]))


def pass_sums(nodes: Sequence[Node]) -> tuple[float, float, float]:
    """Return the seconds of a pass's kernels, of those that need all processors, and of its exchanges."""
    found = np.zeros(3)
    for node in nodes:
        if isinstance(node, TimedOp):
            kernel = node.cost.stream == COMPUTE
            found += node.cost.seconds * np.array([kernel, kernel and needs_processors(node), _exchanges(node)])
        else:
            found += node.times * np.array(pass_sums((*node.early, *node.late)))
    kernels, slowed, exchanged = found.tolist()
    return kernels, slowed, exchanged


def joint_actions(job: Job) -> frozenset[tuple[int, str, int | None]]:
    """Return the forwards and backwards that run together: stage, kind and microbatch."""
    actions = (a for row in job.schedule.ranks for a in row if a is not None)
    return frozenset((leaf.stage, leaf.kind, leaf.microbatch) for a in actions if a.is_pair for leaf in a.parts)


def _left(one: PairedPass, hidden: np.ndarray) -> float:
    """What part of a pass's exchanges is not hidden."""
    exchanged = float(one.exchanged[0])
    return 1 - float(hidden[0]) / exchanged if exchanged else 1.0


def _exchanges(op: TimedOp) -> bool:
    """Say whether an op takes tokens to their experts, or back."""
    return op.cost.exchanges and not of_parameters(op.cost.stream)


def _shorter(nodes: Sequence[Node], share: float) -> tuple[Node, ...]:
    """Ops whose exchanges take a share of their time."""
    found: list[Node] = []
    for node in nodes:
        if not isinstance(node, TimedOp):
            found.append(replace(node, early=_shorter(node.early, share), late=_shorter(node.late, share)))
        elif _exchanges(node):
            found.append(replace(node, cost=replace(node.cost, seconds=node.cost.seconds * share)))
        else:
            found.append(node)
    return tuple(found)

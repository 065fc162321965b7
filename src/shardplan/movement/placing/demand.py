"""One demand of a job's traffic on a placement: its price as one collective, its program, its lower bound."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from shardplan.core.ops import OPS, AllToAll
from shardplan.core.pattern import Groups, Messages, Pattern
from shardplan.core.tensor import TensorType
from shardplan.hardware.level_factors import Digits, LevelFactor, factors, groups_along
from shardplan.hardware.placement import Placement
from shardplan.hardware.prices.cost import price
from shardplan.hardware.prices.fabric import Fabric
from shardplan.hardware.topology import Topology
from shardplan.movement.placing.traffic import Demand
from shardplan.movement.redistribution.choice import chain
from shardplan.movement.reductions.instructions import Grouping, Instruction
from shardplan.movement.reductions.payload import ELEMENT, payload
from shardplan.movement.reductions.reduce import checked_path
from shardplan.movement.reductions.type_graph import factor_states, path_of
from shardplan.plans.certificate import issue
from shardplan.plans.collective_bounds import all_gather_bound, all_reduce_bound, reduce_scatter_bound
from shardplan.plans.plan import Plan

Programs = Literal["best", "stock"]
# By the letters before and after.
_BOUNDS = {("P", "U"): all_reduce_bound, ("P", "S"): reduce_scatter_bound, ("S", "U"): all_gather_bound}


def stock_seconds(found: tuple[LevelFactor, ...], topology: Topology, demand: Demand, algorithm: str = "auto") -> float:
    """Return the seconds of a demand as the one collective that it is, once whatever its count.

    `found` are the factors of its axes on a placement; `algorithm` is as for `hardware.prices.cost.price`.
    """
    digits = tuple(d for f in found for d in f.strides)
    return _seconds(digits, topology, demand.op, demand.nbytes, algorithm) if digits else 0.0


@lru_cache(maxsize=4096)  # many placements have the same digits
def _seconds(digits: Digits, topology: Topology, op: str, nbytes: float, algorithm: str) -> float:
    pattern = demand_pattern(op, groups_along(digits, (), topology.size), nbytes)
    return price(pattern, Fabric(topology), algorithm).seconds


def demand_pattern(op: str, members: NDArray[np.int64], nbytes: float) -> Pattern:
    """Return the communication of an op over all groups at once, as `hardware.prices.cost.price` takes it.

    `members` are device ids, int64 [groups, k], in member order; `nbytes` is what a member holds before. A permute
    sends to the next member.
    """
    if OPS[op].peers:
        sender, receiver = members[:, :-1].reshape(-1), members[:, 1:].reshape(-1)
        return Messages(sender, receiver, np.full(len(sender), nbytes))
    return Groups(op, members, np.full(len(members), nbytes))


def demand_plan(
    placement: Placement, demand: Demand, programs: Programs = "best", algorithm: str = "auto"
) -> Plan | None:
    """Return the program of a demand on the types of its payload; None for a permute, which is one message.

    `programs` is `best`, or `stock` for the one collective; `algorithm` is as for `hardware.prices.cost.price`.
    """
    members = math.prod(placement.mesh.span(a).size for a in demand.axes)
    if demand.shifts:
        return None
    if not all(demand.letters):  # an all-to-all, as one of a matrix from its rows to its columns
        mesh = placement.mesh_split()
        each = max(1, math.ceil(demand.nbytes / (ELEMENT * members)))
        others = tuple(a for a in mesh.axes if a not in demand.axes)
        groups = mesh.size // members
        axes = tuple(a for f in factors(placement, demand.axes) for a in f.axes)
        source = TensorType("f32", (members, members, each * groups), (axes, (), others), mesh)
        ops = [AllToAll(0, 1, axes)] if members > 1 else []
        program = chain(ops, source)
        ends = (source,), program.output_types
        return Plan.from_issuer(program, lambda: issue(program, *ends, placement, None, False, None, algorithm))
    view = payload(placement, demand.axes, demand.payload(members))
    before, after = factor_states(demand.op, len(view.factors))
    if programs == "stock":
        every = Grouping(tuple(range(len(view.factors))))
        ops, exact = view.ops(path_of([Instruction(every, demand.op)] if view.factors else [], before) or ()), False
    else:
        found = checked_path(view, placement, before, after, algorithm)
        ops, exact = view.path_ops(before, after, found), found.whole
    program = chain(ops, view.type(before))
    ends = (view.type(before),), (view.type(after),)
    return Plan.from_issuer(program, lambda: issue(program, *ends, placement, None, exact, None, algorithm))


def demand_bound(placement: Placement, demand: Demand) -> float:
    """Return a lower bound in seconds of a demand, all groups together, by cut, count and gather; see `bounds`."""
    fabric = Fabric(placement.topology)
    ids = placement.device_mesh()
    at = [placement.mesh.axes.index(a) for a in demand.axes]
    rest = [i for i in range(ids.ndim) if i not in at]
    members = np.ascontiguousarray(ids.transpose([*rest, *at])).reshape(-1, math.prod(ids.shape[i] for i in at))
    nbytes = np.full(len(members), demand.nbytes)
    if demand.letters not in _BOUNDS:
        return 0.0
    least = _BOUNDS[demand.letters](members, nbytes, fabric)
    return least + fabric.first_hop() if least > 0 else 0.0

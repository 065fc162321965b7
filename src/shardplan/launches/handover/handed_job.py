"""`job_of`: the job of a plan that was handed over, and the machine as it delivers."""

from __future__ import annotations

from dataclasses import replace

from shardplan.hardware.topology import Topology
from shardplan.launches.handover.handed_plan import HandedPlan
from shardplan.simulation.searching.certifier import even_cuts
from shardplan.simulation.steps import delivered
from shardplan.strategy.partition.job import Job
from shardplan.strategy.partition.partition import partition
from shardplan.strategy.strategy import NARROW


def job_of(plan: HandedPlan) -> tuple[Job, Topology]:
    """Return the job of a plan, cut as it is priced, and its machine as it delivers.

    What only predictions know is left out: kernels of attention, products beside movements, narrow products (bf16).
    """
    s = replace(plan.strategy, attention=None, tensor_overlap=False, offload_layers=0)
    s = replace(s, precision="bf16") if s.precision in NARROW else s
    model, topology = plan.model, delivered(plan.topology)
    return partition(model, replace(s, cuts=even_cuts(model, s)), topology), topology

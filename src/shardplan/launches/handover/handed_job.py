"""`job_of`: the job of a plan that was handed over, and the machine as it delivers."""

from __future__ import annotations

from shardplan.hardware.topology import Topology
from shardplan.launches.handover.handed_plan import HandedPlan
from shardplan.simulation.searching.certifier import priced_job
from shardplan.simulation.steps import derate
from shardplan.strategy.partition.job import Job


def job_of(plan: HandedPlan) -> tuple[Job, Topology]:
    """Return the job of a plan, cut as it is priced, and its machine as it delivers.

    Of what only predictions know, it has narrower products than those of 8 bits as these.
    """
    topology = derate(plan.topology, attention=plan.strategy.software.attention)
    return priced_job(plan.model, plan.strategy, topology), topology

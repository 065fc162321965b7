"""`torchrun.sh` and `slurm.sh` of a plan: a launcher on every node, ranks node by node, device by device."""

from __future__ import annotations

from shardplan.core.mesh import Mesh
from shardplan.launches.audit import Audit, audit
from shardplan.launches.handover.handed_plan import ORDER, HandedPlan
from shardplan.launches.hostfile import host_size


def nodes_of(plan: HandedPlan) -> tuple[int, int]:
    """Return how many nodes a plan's topology has, and devices of each."""
    inside = host_size(plan.topology)
    return plan.topology.size // inside, inside


def write_scripts(plan: HandedPlan) -> dict[str, str]:
    """Return both scripts; each takes the program to run and its arguments.

    >>> from shardplan.hardware.topology import Topology
    >>> from shardplan.strategy.strategy import Strategy
    >>> plan = HandedPlan("tiny", "gpt2", {}, Topology.load("dgx-a100", nodes=2), Strategy(data=16))
    >>> [line for line in write_scripts(plan)["slurm.sh"].splitlines() if "--nodes=" in line]
    ['#SBATCH --nodes=2']
    """
    nodes, devices = nodes_of(plan)
    head = f"# {plan.title}: {nodes} nodes of {devices}; rank r is device r % {devices} of node r / {devices}."
    run = (
        f"torchrun --nnodes {nodes} --nproc-per-node {devices} --rdzv-id plan --rdzv-backend static "
        '--master-addr "${MASTER_ADDR}" --master-port "${MASTER_PORT:-29500}" --node-rank'
    )
    torchrun = (
        f"#!/usr/bin/env bash\n{head}\n# On every node: MASTER_ADDR=first-host NODE_RANK=0.. ./torchrun.sh train.py\n"
        'set -euo pipefail\n: "${NODE_RANK:?the number of this node, from 0}" "${MASTER_ADDR:?the host of node 0}"\n'
        f'exec {run} "${{NODE_RANK}}" "$@"\n'
    )
    asked = {"nodes": nodes, "ntasks-per-node": 1, "gpus-per-node": devices, "distribution": "block"}
    batch = "".join(f"#SBATCH --{name}={value}\n" for name, value in asked.items())
    slurm = (
        f"#!/usr/bin/env bash\n{batch}#SBATCH --exclusive\n{head}\n# sbatch slurm.sh train.py\nset -euo pipefail\n"
        'MASTER_ADDR="$(scontrol show hostnames "${SLURM_JOB_NODELIST}" | head -n 1)"\nexport MASTER_ADDR\n'
        "# One launcher a node, not bound to cores: its processes share all of them.\n"
        f'exec srun --cpu-bind=none --kill-on-bad-exit=1 bash -c \'{run} "${{SLURM_NODEID}}" "$@"\' run "$@"\n'
    )
    return {"torchrun.sh": torchrun, "slurm.sh": slurm}


def audit_plan(plan: HandedPlan) -> Audit:
    """Return the audit of the launch that the scripts make: ranks in a row, which the plan's mesh numbers."""
    sizes = {axis: getattr(plan.strategy, axis) for axis in ORDER}
    return audit(plan.device_mesh(), Mesh(sizes), plan.topology)

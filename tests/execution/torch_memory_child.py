"""Run on every rank: live storages of every rank against the certificate, chunked plans included; prints JSON."""

import json
import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "tests" / "execution")]

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from storages import Made, Storages  # noqa: E402

import shardplan as sp  # noqa: E402
from conformance import boxed, cases  # noqa: E402
from shardplan.core.accounting import account  # noqa: E402
from shardplan.execution.async_executor import finish  # noqa: E402
from shardplan.execution.torch.dtypes import to_torch  # noqa: E402
from shardplan.execution.torch.run import executable, launch  # noqa: E402


def measured(program, values):
    """The peak of this rank's storages during a run that may free its inputs."""
    bound = executable(program, dist.get_rank())
    if not os.environ["SHARDPLAN_NATIVE"]:
        with Storages(*values.values()) as tally:
            finish(launch(bound, values, 60.0))
        return tally.peak
    # Groups, and room for headers in them, are made once. A thread of gloo lets go of what a call took a moment after
    # the call has ended, so the least of several runs counts; all ranks do as many.
    peaks = []
    for _ in range(5):
        given = {name: x.clone() for name, x in values.items()}
        with Made(*given.values()) as tally:
            finish(launch(bound, given, 60.0))
        peaks.append(tally.peak)
    return min(peaks)


def own(program, inputs, rank):
    values = {}
    for (name, t), shards in zip(program.inputs, inputs, strict=True):
        place = [k for k, d in enumerate(t.mesh.devices) if d == rank]
        values[name] = to_torch(shards[place[0]].copy()) if place else torch.empty(0)
    return values


def main():
    os.environ["SHARDPLAN_NATIVE"] = sys.argv[3]
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    wrong, chunked, ratios = [], 0, []
    seed, count = map(int, sys.argv[1:3])
    for case in (*cases(seed, count, world), *boxed(seed, count // 2, world)):
        if case.name.startswith("computation") or rank not in case.program.devices:
            continue
        peak = measured(case.program, own(case.program, case.inputs(), rank))
        limit = account(case.program).workspace_bytes
        if peak > limit:
            wrong.append(f"{case.name}: {peak} bytes, the certificate has {limit}\n{case.program}")
    mesh = sp.Mesh(a=world)
    for text in ("f32[24@a, 48]", "f32[24, 48@a]", "f32[23@a, 47]", "f32[24, 48]{+a}"):
        for other in ("f32[24, 48@a]", "f32[24@a, 48]", "f32[23, 47@a]", "f32[24, 48]"):
            if text == other or text[4:6] != other[4:6]:
                continue
            s, t = (sp.TensorType.parse(x, mesh) for x in (text, other))
            for share in (None, 0.05, 0.3):
                limit = None
                if share is not None:
                    try:
                        sp.redistribute(s, t, memory_limit=1)
                    except sp.Infeasible as error:
                        limit = error.least_bytes + int(share * s.local_bytes())
                plan = sp.redistribute(s, t, memory_limit=limit)
                chunked += any(step.op.chunks > 1 for step in plan.program.steps)
                shards = sp.distribute(torch.zeros(s.shape).numpy(), s)
                peak = measured(plan.program, own(plan.program, [shards], rank))
                if peak > plan.certificate.workspace_bytes:
                    wrong.append(f"{s} to {t}, limit {limit}: {peak} over {plan.certificate.workspace_bytes}\n{plan}")
                ratios.append(peak / plan.certificate.workspace_bytes)
    gathered = [None] * world
    dist.all_gather_object(gathered, wrong)
    if rank == 0:
        lines = [f"rank {r}: {x}" for r, part in enumerate(gathered) for x in part]
        print(json.dumps({"wrong": lines[:6], "count": len(lines), "chunked": chunked, "least": min(ratios)}))
    dist.barrier()
    sys.stdout.flush()
    # The dispatch mode boxes c10d's work objects; the interpreter once aborted while it freed them at its end.
    os._exit(0)


if __name__ == "__main__":
    main()

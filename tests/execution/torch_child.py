"""Run on every rank: conformance cases on this rank against the reference; rank 0 prints one JSON object.

Arguments: seed, number of cases, and a way: `gloo`, `batched` (messages as on nccl, over gloo), `native` (the same,
with gloo's own collectives) or `nccl` (a GPU a rank).
"""

import json
import os
import sys
from dataclasses import replace
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

import numpy as np  # noqa: E402
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

from conformance import bodies, cases, differences  # noqa: E402
from shardplan.execution.record import Record  # noqa: E402
from shardplan.execution.run import run_recorded  # noqa: E402
from shardplan.execution.torch.dtypes import to_numpy, to_torch  # noqa: E402
from shardplan.execution.torch.wire import TorchWire  # noqa: E402


def places(mesh, rank):
    return [k for k, d in enumerate(mesh.devices) if d == rank]


def listed(got, program):
    return [got] if len(program.inputs) == len(program.outputs) == 1 and not (got and isinstance(got[0], list)) else got


def main() -> None:
    seed, count = map(int, sys.argv[1:3])
    way = sys.argv[3] if len(sys.argv) > 3 else "gloo"
    dist.init_process_group("nccl" if way == "nccl" else "gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    device = torch.device("cuda", rank) if way == "nccl" else torch.device("cpu")
    if way in ("batched", "native"):
        plain = TorchWire.of
        TorchWire.of = staticmethod(lambda *a: replace(plain(*a), batched=True, native=way == "native"))
    if way == "nccl":
        torch.cuda.set_device(device)
    wrong = []
    for case in (*cases(seed, count, world), *(bodies(seed, 5, world) if world >= 4 else ())):
        inputs, expected = case.inputs(), case.expected()
        mine = [
            [to_torch(x[k]).to(device) for k in places(t.mesh, rank)]
            for x, t in zip(inputs, case.program.input_types, strict=True)
        ]
        record = Record()
        got = run_recorded(case.program, mine, "torch", 60.0, record)
        got = [[to_numpy(x) for x in shards] for shards in listed(got, case.program)]
        wrong += differences(case, lambda mesh: places(mesh, rank), got, expected)
        for span in record.spans:
            step = case.program.steps[span.step]
            types = case.program.step_types(step)
            here = np.flatnonzero(step.op.devices(*types[1]) == span.device)
            want = int(step.op.received_bytes(*types[0])[here[0]]) if len(here) else 0
            if span.received != want:
                wrong.append(f"{case.name}: {step.op}: received {span.received}, the op says {want}")
    gathered = [None] * world
    dist.all_gather_object(gathered, wrong)
    if rank == 0:
        print(json.dumps({"cases": count, "wrong": [x for part in gathered for x in part][:20]}))
    dist.destroy_process_group()


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()

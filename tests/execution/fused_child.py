"""One rank of a launch that runs programs and jobs fused and not; rank 0 prints one JSON object of what was found."""

import contextlib
import json
import sys
from collections.abc import Generator
from pathlib import Path
from typing import Any

import numpy as np
import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

import torch.distributed as dist  # noqa: E402

from execution.fused_cases import FusedCase, cases  # noqa: E402
from shardplan import Job  # noqa: E402
from shardplan.execution.jobs import parts  # noqa: E402
from shardplan.execution.record import Record  # noqa: E402
from shardplan.execution.run import run_recorded  # noqa: E402
from shardplan.execution.torch.fused import group_heaps  # noqa: E402
from shardplan.fused.calls.moved_tally import MovedTally, counted  # noqa: E402

CLOSE = 2e-5
RUNS = 3


def ran(one: FusedCase, fused: bool, rank: int) -> tuple[dict[str, Any], list[int]]:
    """The results by name, and the bytes received in each step that moves or is fused."""
    subject, record = one.fusion.program if fused else one.plain, Record()
    if isinstance(subject, Job):
        found = run_recorded(subject, one.given, "torch", 60.0, record)
        spans = [span for _, run in record.runs for span in run.spans]
        return {n: np.asarray(x) for n, x in found.items()}, [
            s.received for s in spans if s.received and s.device == rank
        ]
    mine = [[torch.from_numpy(x[rank])] for x in one.given]
    found = run_recorded(subject, mine[0] if len(mine) == 1 else mine, "torch", 60.0, record)
    found = found if isinstance(found[0], list) else [found]
    return {str(k): x[0].numpy() for k, x in enumerate(found)}, [
        s.received for s in record.spans if s.received and s.device == rank
    ]


def calls() -> int:
    """How often fused operators ran on this rank."""
    return sum(made.epoch for heap in group_heaps() for made in heap.kept.values() if hasattr(made, "epoch"))


@contextlib.contextmanager
def tallied() -> Generator[list[MovedTally]]:
    """What puts really move, in all heaps that are open."""
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(counted(heap)) for heap in group_heaps()]


def tried(one: FusedCase, rank: int) -> dict[str, Any]:
    """What differs, the bytes and the calls of a case."""
    devices = parts(one.plain).devices if isinstance(one.plain, Job) else one.plain.devices
    if rank not in devices:
        return {"wrong": [], "bytes": [[], []], "calls": 0, "moved": 0}
    wrong: list[str] = []
    want, plain = ran(one, False, rank)
    before = calls()
    got, fused = ran(one, True, rank)
    made = calls() - before
    for _ in range(RUNS - 1):
        got, again = ran(one, True, rank)
        wrong += [f"{one.name}: bytes {again}"] if again != fused else []
    with tallied() as tallies:
        ran(one, True, rank)
    heaps = group_heaps()
    moved = sum(
        t.changed for heap, tally in zip(heaps, tallies, strict=True) for t in tally.tiles if t.source != heap.rank
    )
    for tally in tallies:
        tally.check()
    if got.keys() != want.keys():
        wrong.append(f"{one.name}: {sorted(got.keys() ^ want.keys())}")
    for name, x in want.items():
        scale = max(1.0, float(np.abs(x).max(initial=0)))
        away = float(np.abs(got[name] - x).max(initial=0))
        if got[name].shape != x.shape or got[name].dtype != x.dtype or not away <= CLOSE * scale:
            wrong.append(f"{one.name}: {name} by {away:.1e} of {scale:.1e}")
    return {"wrong": wrong, "bytes": [plain, fused], "calls": made, "moved": moved}


def main() -> None:
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    found = {one.name: tried(one, rank) for one in cases()}
    every: list[Any] = [None] * world
    dist.all_gather_object(every, found)
    dist.destroy_process_group()
    if rank == 0:
        print(json.dumps(every))


if __name__ == "__main__":
    main()

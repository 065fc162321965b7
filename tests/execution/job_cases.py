"""Jobs for real processes, made once for all of them: cases in a file, and how a process runs one."""

from __future__ import annotations

import copyreg
import pickle
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

import shardplan as sp
from shardplan import Job, Strategy, partition
from shardplan.core.program import Program
from shardplan.execution.jobs import parts
from shardplan.execution.record import Record
from shardplan.execution.run import run_recorded
from shardplan.strategy.schedules import Schedule
from shardplan.strategy.training import OPTIMIZERS
from strategy.jobs import arrays, by_name, model

STEPS = 3
LEAST = (
    1e-6  # key biases have gradients of zero, but for rounding; what is smaller than this is not compared with itself
)
SETTINGS = {name for optimizer in OPTIMIZERS.values() for name in optimizer.fields}
# With messages: the receives stand behind what need not wait for them, and a send behind another computation.
PLACED = Schedule.parse("""schedule mine, 4 microbatches
0: 0F0 0SEND_F0 0F1 0F2 0SEND_F1 3RECV_F0 3F0 3B0 3SEND_B0 0SEND_F2 0F3 0SEND_F3 3RECV_F1 3F1 3I1 3SEND_B1 3W1 \
0RECV_B0 0I0 0W0 3RECV_F2 3F2 3B2 3SEND_B2 3RECV_F3 0RECV_B1 0B1 3F3 3B3 3SEND_B3 0RECV_B2 0B2 0RECV_B3 0B3
1: 1RECV_F0 1F0 2F0 2SEND_F0 1RECV_F1 1F1 2F1 2SEND_F1 2RECV_B0 2I0 1I0 1SEND_B0 2W0 1W0 1RECV_F2 1F2 2F2 2SEND_F2 \
1RECV_F3 1F3 2F3 2RECV_B1 2SEND_F3 2B1 1B1 1SEND_B1 2RECV_B2 2B2 1B2 1SEND_B2 2RECV_B3 2B3 1B3 1SEND_B3""")
SGD = {"optimizer": "sgd"}  # has less state, so that there is less to bring to every process
Cases = dict[str, tuple[str, dict[str, Any], dict[str, Any]]]  # by name a family, fields and degrees
CASES: Cases = {
    "llama tensor data": ("llama", SGD, {"tensor": 2, "data": 2}),
    "llama fsdp sequence": ("llama", SGD, {"data": 2, "tensor": 2, "fsdp": True, "sequence_parallel": True}),
    "llama fsdp kept": (
        "llama",
        SGD | {"layers": 2},
        {
            "data": 2,
            "tensor": 2,
            "sequence_parallel": True,
            "fsdp": True,
            "zero": 2,
            "keep": "sequence",
            "bucket": "1 kB",
            "prefetch": True,
        },
    ),
    "llama 1f1b": ("llama", SGD, {"pipeline": 2, "data": 2, "global_batch": 6}),
    "llama clipped 1f1b": ("llama", SGD | {"clip": 0.01}, {"pipeline": 2, "data": 2, "zero": 2, "global_batch": 6}),
    "llama first layers again": (
        "llama",
        SGD | {"layers": 4},
        {"pipeline": 2, "tensor": 2, "recompute": "full", "recompute_layers": 1, "global_batch": 4},
    ),
    "llama context": ("llama", {}, {"context": 2, "data": 2, "zero": 1}),
    "llama ring": ("llama", SGD, {"context": 4, "context_kind": "ring"}),
    "odd zigzag tensor": ("odd", SGD, {"context": 2, "context_kind": "zigzag", "tensor": 2}),
    "gpt tensor data": ("gpt", SGD, {"tensor": 2, "data": 2}),
    "gpt 1f1b": ("gpt", SGD, {"pipeline": 2, "data": 2, "global_batch": 5}),
    "gpt gpipe": ("gpt", SGD, {"pipeline": 2, "tensor": 2, "global_batch": 3, "schedule": "gpipe"}),
    "moe expert": (
        "moe",
        SGD,
        {"data": 2, "expert": 2, "global_batch": 4},
    ),  # two of four processes have none of its devices
    "moe expert tensor": ("moe", SGD, {"data": 2, "expert": 2, "tensor": 2, "global_batch": 4}),
    "moe expert 1f1b": ("moe", {}, {"pipeline": 2, "data": 2, "expert": 2, "global_batch": 4}),
    # No layers: its I are empty.
    "dlrm data": ("dlrm", {}, {"data": 4, "zero": 1, "global_batch": 8, "schedule": "zb-h1"}),
    "dlrm tensor data": ("dlrm", SGD, {"data": 2, "tensor": 2}),
    "mlp tensor data": ("mlp", SGD, {"tensor": 2, "data": 2}),
    "mlp fsdp": ("mlp", SGD, {"data": 4, "fsdp": True}),
    "mlp zb-h1": ("mlp", SGD, {"pipeline": 2, "tensor": 2, "global_batch": 4, "schedule": "zb-h1"}),
    "mlp zb-v": ("mlp", SGD, {"pipeline": 2, "data": 2, "global_batch": 8, "schedule": "zb-v"}),
    "mlp dualpipev": ("mlp", SGD, {"pipeline": 2, "data": 2, "global_batch": 8, "schedule": "dualpipev"}),
    "mlp dualpipe": ("mlp", SGD, {"pipeline": 2, "data": 2, "global_batch": 8, "schedule": "dualpipe"}),
    "mlp placed": ("mlp", SGD, {"pipeline": 2, "tensor": 2, "global_batch": 4, "schedule": PLACED}),
    "mlp interleaved": (
        "mlp",
        SGD,
        {"pipeline": 2, "data": 2, "global_batch": 4, "interleave": 2, "schedule": "interleaved"},
    ),
}
MPI = ("odd zigzag tensor", "llama fsdp sequence", "llama clipped 1f1b", "gpt gpipe", "moe expert tensor",
       "dlrm tensor data", "mlp interleaved", "mlp placed")  # fmt: skip
# On JAX the compiler takes the time, and of a perceptron the least: it has each strategy that it admits, alone.
MORE: Cases = {
    f"mlp {name}": ("mlp", SGD, said)
    for name, said in {
        "data": {"data": 4, "global_batch": 8},
        "tensor": {"tensor": 4},
        "zero 2": {"data": 4, "zero": 2, "global_batch": 8},
        "zero 3": {"data": 4, "zero": 3, "microbatch": 2},
        "shard": {"data": 4, "shard": 2, "fsdp": True},
        "gpipe": {"pipeline": 4, "global_batch": 4, "schedule": "gpipe"},
        "full": {"tensor": 2, "recompute": "full"},
        "tensor data 1f1b": {"tensor": 2, "data": 2, "pipeline": 2, "global_batch": 4},
        "1f1b zero full": {"pipeline": 2, "data": 4, "zero": 2, "recompute": "full", "global_batch": 8},
        "tensor shard microbatches": {"tensor": 2, "data": 4, "shard": 2, "zero": 3, "global_batch": 8},
        "gpipe data fsdp": {"pipeline": 2, "data": 4, "fsdp": True, "global_batch": 8, "schedule": "gpipe"},
    }.items()
} | {
    "llama ulysses": ("llama", SGD, {"context": 2}),
    "llama sequence zero": (
        "llama",
        {"optimizer": "adamw", "hidden": 16, "heads": 4},
        {"tensor": 2, "sequence_parallel": True, "data": 2, "zero": 1},
    ),
    "llama gather fsdp": ("llama", SGD, {"context": 2, "context_kind": "gather", "data": 2, "fsdp": True}),
}
JAX = (
    "llama ring",
    "moe expert",
    "dlrm tensor data",
    "mlp fsdp",
    "mlp interleaved",
    *MORE,
)


class Case(NamedTuple):
    """A job, arrays for its first step, and by step what the whole model makes of them, under the job's names."""

    name: str
    job: Job
    given: dict[str, np.ndarray]
    wanted: list[dict[str, np.ndarray]]


def _proxied(known: dict[Any, Any]) -> MappingProxyType[Any, Any]:
    return MappingProxyType(known)


copyreg.pickle(MappingProxyType, lambda known: (_proxied, (dict(known),)))


@lru_cache(maxsize=32)
def reference(family: str, fields: tuple[tuple[str, Any], ...], sequences: int) -> tuple[Any, ...]:
    """Inputs of a model of so many sequences, and by step results, gradients and what is replaced."""
    big = model(family, **dict(fields)).resize(batch=sequences)
    plain = {name: value for name, value in fields if name not in SETTINGS}
    slopes = model(family, **plain | {"optimizer": None}).resize(batch=sequences)
    given = now = arrays(big, big.program)
    wanted: list[dict[str, np.ndarray]] = []
    for _ in range(STEPS):
        made, found = by_name(big.program, now), by_name(slopes.program, now)
        new = {old: made[new] for old, new in big.replaced.items()}
        wanted.append(made | {f"gradient.{w}": found[g] for w, g in slopes.gradients.items()} | new)
        now = {**now, **new}
    return given, wanted


def case(name: str) -> Case:
    """Make a case by its name."""
    return made(name, *(CASES | MORE)[name])


def made(name: str, family: str, fields: Mapping[str, Any], degrees: Mapping[str, Any]) -> Case:
    """Make a case: the job's own plans stay behind, since a run needs none of them."""
    strategy = Strategy(**degrees)
    job = partition(model(family, **fields), strategy)
    given, whole = reference(family, tuple(fields.items()), strategy.sequences)
    kept = {n for n in whole[0] if n.startswith("gradient.") or n in job.results or n in job.model.replaced}
    wanted = [{n: array for n, array in one.items() if n in kept} for one in whole]
    return Case(name, replace(job, movements={}, settled=None), given, wanted)  # type: ignore[arg-type]


def write(path: Path, cases: Iterable[Case] = ()) -> None:
    """Write cases, by default those of `CASES`, one after another."""
    with path.open("wb") as file:
        for one in cases or map(case, CASES):
            pickle.dump(one, file)


def read(path: str, names: Iterable[str] | None = None) -> list[Case]:
    """Return the cases of these names, by default all."""
    found: list[Case] = []
    with Path(path).open("rb") as file:
        while file.peek(1):  # type: ignore[attr-defined]
            found.append(pickle.load(file))
    chosen = None if names is None else set(names)
    return [one for one in found if chosen is None or one.name in chosen]


class Ran(NamedTuple):
    """What differs in some steps of a case, how many bytes came in the first, and the largest relative difference."""

    wrong: list[str]
    received: int
    apart: float


def wrong(one: Case, backend: str, here: set[int], timeout: float = 60.0) -> tuple[list[str], int]:
    """What differs in some steps of a case by more than 1e-9, and in the bytes of the first; and how many came."""
    return ran(one, backend, here, timeout)[:2]


def ran(one: Case, backend: str, here: set[int], timeout: float = 60.0) -> Ran:
    """Run the steps of a case on the devices that are here."""
    now, out, received, most = one.given, list[str](), 0, 0.0
    if here.isdisjoint(parts(one.job).devices):
        lines = [f"{one.name}: something on {here}" for _ in one.wanted if sp.run(one.job, now, backend, timeout)]
        return Ran(lines, 0, 0.0)
    for step, want in enumerate(one.wanted):
        record = Record()
        got = run_recorded(one.job, now, backend, timeout, record)
        if got.keys() != want.keys():
            out.append(f"{one.name}, step {step}: {sorted(got.keys() ^ want.keys())}")
        for name, array in want.items():
            apart = np.abs(got[name] - array).max(initial=0) / max(LEAST, np.abs(array).max(initial=0))
            most = max(most, float(apart))
            if got[name].shape != array.shape or not apart <= 1e-9:
                out.append(f"{one.name}, step {step}: {name} by {apart:.1e}")
        if step == 0:
            received = sum(span.received for _, run in record.runs for span in run.spans)
            out += [f"{one.name}: {line}" for line in counted(one.job, record, here)] if backend != "jax" else []
        now = {name: got.get(name, array) for name, array in now.items()}
    return Ran(out, received, most)


def rank_devices(job: Job, rank: int) -> set[int]:
    """The devices of a rank of the schedule."""
    meshes = zip(job.schedule.owners, job.programs.meshes, strict=True)
    return {d for owner, mesh in meshes if owner == rank for d in mesh.devices}


def counted(job: Job, record: Record, here: set[int]) -> list[str]:
    """Where a process ran other programs than the job says, or a collective received other bytes than its op says."""
    out: list[str] = []
    ran: Counter[Program] = Counter()
    for program, seen in record.runs:
        ran[program] += 1
        if [span.step for span in seen.spans] != list(range(len(program.steps))):
            out.append(f"spans of the steps {[span.step for span in seen.spans]} of {len(program.steps)}")
        for span in seen.spans:
            step = program.steps[span.step]
            types = program.step_types(step)
            place = np.flatnonzero(step.op.devices(*types[1]) == span.device)
            want = int(step.op.received_bytes(*types[0])[place[0]]) if len(place) else 0
            if span.received != want:
                out.append(f"{step.op.name}: received {span.received} bytes, the op says {want}")
    expected: Counter[Program] = Counter()
    runs = job.runs
    for key, program in job.programs.items():
        expected[program] += runs[key]
    for transfer, move in zip(job.transfers, parts(job).moves, strict=True):
        for program in (move.before, move.rest):
            if program is not None:
                kinds = {"F": ("F",), "B": ("B", "I")}.get(transfer.kind, ())
                expected[program] += sum(runs[transfer.source[0], kind] for kind in kinds) if kinds else 1
    for program, times in expected.items():
        if here & set(program.devices) and ran.pop(program, 0) != times:
            out.append(f"a program of {len(program.steps)} steps on {program.devices} not {times} times")
    own = [row for rank, row in enumerate(job.schedule.compute_only().ranks) if here & set(rank_devices(job, rank))]
    order = [job.programs[a.stage, a.kind] for row in own for each in row if each is not None for a in each.leaves]
    computed = {program for (_, kind), program in job.programs.items() if kind not in job.updates}
    if len(here) == 1 and order and [p for p, _ in record.runs if p in computed] != [p for p in order if p.devices]:
        out.append("the order of the programs is not that of the schedule")
    whole = set(job.programs.meshes[0].devices).union(*(mesh.devices for mesh in job.programs.meshes))
    if any(set(program.devices) != whole for program in ran) or sum(ran.values()) != 1 + job.strategy.microbatches:
        out.append(f"runs beside the job's programs: {[(len(p.steps), p.devices, n) for p, n in ran.items()]}")
    return out

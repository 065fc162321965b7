"""Strategies of a training step on real links: compute slept, messages real, and what the simulation said of each.

`python -m benchmarks.lab_strategies [--count 16] [--repetitions 5] [--number 2]`, about twelve minutes. Runs on Linux
with the privileges that `shardplan lab` needs. A small GPT is trained on 2 nodes of 4 ranks; the strategies are drawn
by `SEED` from those of 8 devices (`drawn`), without a look at what they take. Every rank sleeps the seconds that an op
of compute takes on a device of `DEVICE`; collectives and messages between stages go over shaped links of `RATES`. These
numbers, and those of the lab (latency, payload's share), were committed before the first prediction; `--number` says
the how manieth run of the whole this is.

The prediction is `sp.simulate` of the job, op by op, on that topology: one stream a device, since ranks of the lab wait
for each collective (`overlap=False`), links shared by all that is under way (`contention=True`), and messages between
stages that gloo sends once their receiver waits for them (`rendezvous=True`). Beside it stand the same without
rendezvous, without contention too, and the default, which has streams for collectives. Reported: Kendall's tau and the
regret of the predicted best over all strategies, errors, and by strategy what part of the measured step communication
has added to what compute and schedule take alone.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
from benchmarks.common import arguments, record, table, write

from shardplan.errors import ShardplanError
from shardplan.execution.jobs import parts
from shardplan.execution.lab import Cluster, Lab, missing
from shardplan.execution.lab.experiments import emulated_topology
from shardplan.execution.lab.steps import StepMeasurement, measure_steps
from shardplan.hardware.level import DeviceSpec
from shardplan.hardware.topology import Topology
from shardplan.simulation.accuracy.metrics import kendall_tau, regret
from shardplan.simulation.jobs.job_timeline import JobTimeline, simulate_job
from shardplan.simulation.jobs.messages import MESSAGES
from shardplan.strategy.model import Model
from shardplan.strategy.partition.job import Job
from shardplan.strategy.partition.partition import partition
from shardplan.strategy.strategy import Strategy

SEED = 20260730  # of run 2; of run 1, whose predictions had no rendezvous, 20260729
SIZES, RATES = "2x4", (8.0, 32.0)  # ranks, and Mbit/s, outermost first
BUCKET = 2**12  # bytes that a link lets pass at once after a pause: a fraction of a message
DEVICE = DeviceSpec(flops=(("*", 1.5e8),), memory_bandwidth=7.5e7)
MODEL: dict[str, Any] = {"layers": 4, "hidden": 64, "heads": 8, "seq": 64, "vocab": 256, "optimizer": "adamw"}
BATCH = 16  # sequences of a step
JOINED = 1e6  # bytes up to which gradients and parameters move together: some hundred messages a step, not thousands
SCHEDULES = ("1f1b", "gpipe", "interleaved", "looped-bfs", "zb-h1")
MOST = 2  # microbatches a stage: of many small ones this machine would time its own interpreter
TAU, REGRET, SHARE = 0.8, 5.0, 1 / 3  # the bars: tau, percent, and the part of exposed communication in half of them
TIMEOUT = 60.0


class Drawn(NamedTuple):
    """A strategy that was drawn, and its job."""

    title: str
    strategy: Strategy
    job: Job


def degrees(devices: int) -> list[tuple[int, int, int, int]]:
    """All degrees (data, tensor, pipeline, context) of so many devices that the model has heads and layers for."""
    found: list[tuple[int, int, int, int]] = []
    for data in range(1, devices + 1):
        for tensor in range(1, MODEL["heads"] + 1):
            for pipeline in range(1, MODEL["layers"] + 1):
                context = devices // (data * tensor * pipeline)
                if data * tensor * pipeline * context == devices:
                    found.append((data, tensor, pipeline, context))
    return found


def candidates(devices: int, seed: int) -> Iterator[dict[str, Any]]:
    """Yield fields of strategies for ever: degrees alike often, then all else among what these leave open."""
    chance = random.Random(seed)
    every = degrees(devices)
    while True:
        data, tensor, pipeline, context = chance.choice(every)
        counts = [m for m in range(1, MOST * pipeline + 1) if BATCH // data % m == 0]
        fields: dict[str, Any] = {"data": data, "tensor": tensor, "pipeline": pipeline, "context": context}
        fields["microbatch"] = BATCH // data // chance.choice(counts)
        if pipeline > 1:
            fields["schedule"] = chance.choice(SCHEDULES)
        if tensor > 1:
            fields["sequence_parallel"] = chance.choice((False, True))
        if context > 1:
            fields["context_kind"] = chance.choice(("ulysses", "gather", "ring"))
        if data * context > 1:
            zero, fsdp = chance.choice(((0, False), (1, False), (2, False), (3, False), (2, True), (3, True)))
            fields |= {"zero": zero, "fsdp": fsdp}
        fields["recompute"] = chance.choice(("none", "none", "full"))
        yield fields


def drawn(count: int, topology: Topology, seed: int = SEED) -> tuple[list[Drawn], dict[str, int]]:
    """Return the first strategies whose jobs differ, and how many were drawn, refused, and drawn again for that."""
    model = Model.load("gpt", **MODEL)
    found: dict[str, Drawn] = {}
    tally = {"drawn": 0, "refused": 0, "the same job again": 0}
    for fields in candidates(topology.size, seed):
        if len(found) == count:
            break
        tally["drawn"] += 1
        job = None
        for bucket in (JOINED, None):  # a bucket that joins nothing is refused
            try:
                strategy = Strategy(global_batch=BATCH, bucket=bucket, **fields)
                job = partition(model, strategy, topology)
            except ShardplanError:
                continue
            break
        if job is None:
            tally["refused"] += 1
            continue
        digest = parts(job).digest
        if digest in found:
            tally["the same job again"] += 1
        else:
            found[digest] = Drawn(titled(fields), strategy, job)
    return list(found.values()), tally


def titled(fields: dict[str, Any]) -> str:
    """A strategy in few words, such as `d2 t2 p2, 1f1b, mb 4, zero 1`."""
    told = " ".join(
        f"{name[0]}{fields[name]}" for name in ("data", "tensor", "pipeline", "context") if fields[name] > 1
    )
    more = [str(fields["schedule"])] if "schedule" in fields else []
    more += [f"mb {fields['microbatch']}"] + (["seq"] if fields.get("sequence_parallel") else [])
    more += [fields["context_kind"]] if "context_kind" in fields else []
    more += ([f"fsdp {fields['zero']}"] if fields["fsdp"] else [f"zero {fields['zero']}"]) if fields.get("zero") else []
    more += ["recompute"] if fields["recompute"] == "full" else []
    return ", ".join([told, *more])


class Predicted(NamedTuple):
    """Seconds of a step, as the simulation has them under several settings."""

    seconds: float  # the prediction: one stream a device, links shared, messages met
    unmet: float  # messages between stages that go as soon as they are made
    unshared: float  # that, each movement on links of its own
    streams: float  # collectives on streams of their own, links not shared: the default
    alone: float  # without any communication: compute, and what the schedule leaves idle


def predicted(job: Job, topology: Topology) -> Predicted:
    """Predict a step."""
    unshared = simulate_job(job, topology, overlap=False)
    return Predicted(
        simulate_job(job, topology, overlap=False, contention=True, rendezvous=True).seconds,
        simulate_job(job, topology, overlap=False, contention=True).seconds,
        unshared.seconds,
        simulate_job(job, topology).seconds,
        silent(unshared).seconds,
    )


def silent(line: JobTimeline) -> JobTimeline:
    """A step whose communication costs nothing."""
    levels = [level.name for level in line.compiled.fabric.topology.levels]
    return line.without(*(name for name in (*levels, MESSAGES) if name in line.names))


def scored(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """How the predictions order and time what was measured."""
    measured = np.array([r["measured"] for r in rows])
    found: dict[str, Any] = {}
    for way in ("predicted", "without rendezvous", "without contention", "default streams"):
        guess = np.array([r[way] for r in rows])
        errors = guess / measured - 1
        found[way] = {
            "kendall": kendall_tau(guess, measured),
            "regret percent": regret(guess, measured),
            "mean error percent": 100 * float(np.abs(errors).mean()),
            "signed error percent": 100 * float(errors.mean()),
            "max error percent": 100 * float(np.abs(errors).max()),
        }
    return found


def row_of(one: Drawn, guess: Predicted, m: StepMeasurement) -> dict[str, Any]:
    """What is kept of a strategy."""
    return {
        "strategy": one.title,
        "measured": m.seconds,
        "predicted": guess.seconds,
        "over measured": guess.seconds / m.seconds,
        "without rendezvous": guess.unmet,
        "without contention": guess.unshared,
        "default streams": guess.streams,
        "without communication": guess.alone,
        "exposed share": 1 - guess.alone / m.seconds,
        "slept": max(m.slept),
        "cv": m.cv,
        "cpu share": m.cpu_share,
        "voided": m.voided,
        "repetitions": [r.seconds for r in m.repetitions],
        "fields": {f: getattr(one.strategy, f) for f in one.strategy.__slots__ if getattr(one.strategy, f) is not None},
    }


def main() -> None:
    """Draw, predict, measure, print, write."""
    parser = arguments("lab_strategies", "Strategies of a training step on real links.", 16, of="strategies")
    parser.add_argument("--repetitions", type=int, default=5, help="timed runs of each (default %(default)s)")
    parser.add_argument("--number", type=int, default=2, help="which run of the whole it is (default %(default)s)")
    given = parser.parse_args()
    if lacking := missing():
        raise SystemExit(lacking)
    cluster = replace(Cluster.of(SIZES, RATES), bucket=BUCKET)
    topology = replace(emulated_topology(cluster.topology), device=DEVICE)
    chosen, tally = drawn(given.count, topology)
    guesses = [predicted(one.job, topology) for one in chosen]
    print(f"{tally}; predicted: {sum(g.seconds for g in guesses):.1f} s a round", flush=True)
    started = time.monotonic()
    with Lab(cluster, timeout=TIMEOUT) as lab:
        found = measure_steps(lab, [(one.title, one.job) for one in chosen], topology, given.repetitions)
    took = time.monotonic() - started
    rows = [row_of(*each) for each in zip(chosen, guesses, found, strict=True)]
    rows.sort(key=lambda r: r["measured"])
    scores = scored(rows)
    exposed = sum(r["exposed share"] >= SHARE for r in rows)
    main_score = scores["predicted"]
    holds = {
        "kendall": main_score["kendall"] >= TAU,
        "regret": main_score["regret percent"] <= REGRET,
        "exposed": 2 * exposed >= len(rows),
    }
    heads = ("measured", "predicted", "over measured", "without rendezvous", "default streams", "exposed share", "cv",
             "cpu share")  # fmt: skip
    print(table(["strategy", *heads], [[r["strategy"], *(r[h] for h in heads)] for r in rows]))
    keys = list(main_score)
    print(table(["prediction", *keys], [[way, *(s[k] for k in keys)] for way, s in scores.items()]))
    print(f"exposed communication of a third and more: {exposed} of {len(rows)}; {holds}; {took:.0f} s")
    parameters = {
        "seed": SEED, "count": given.count, "repetitions": given.repetitions, "run": given.number, "cluster": SIZES,
        "rates": RATES, "bucket of links": BUCKET, "flops": DEVICE.flops, "memory bandwidth": DEVICE.memory_bandwidth,
        "model": MODEL, "global batch": BATCH, "bucket of strategies": JOINED, "draws": tally,
    }  # fmt: skip
    result = {"scores": scores, "holds": holds, "exposed a third and more": exposed, "strategies": len(rows),
              "load": found[0].load, "rows": rows}  # fmt: skip
    write(given.out, record(parameters, result))


if __name__ == "__main__":
    main()

"""Folding changes nothing: layers, prices, ranks and microbatches, each alone and all together."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import shardplan as sp
from shardplan.hardware.level import Level
from shardplan.hardware.prices.fabric import Floats
from shardplan.hardware.topology import Topology
from shardplan.plans.pricing import fabric_of
from shardplan.simulation.jobs.compiled_job import CompiledJob, compile_job
from shardplan.simulation.jobs.job_timeline import simulate_job
from shardplan.simulation.jobs.settings import Fold, JobSettings
from shardplan.simulation.jobs.sweep import JobSweep, sweep
from shardplan.simulation.jobs.timing import COMPUTE
from shardplan.strategy.schedules import replay
from shardplan.strategy.schedules.action import Action
from simulation.jobs.job_cases import CLUSTER, SIZES, STRATEGIES, job

WAYS: dict[str, dict[str, Any]] = {
    "streams": {},
    "one stream": {"overlap": False, "launch": 0.0},
    "no launch": {"launch": 0.0},
    "slow host": {"launch": 1e-5},
}


def assert_same(a: JobSweep, b: JobSweep) -> None:
    """Begin and end of every action, and of every message, to 1e-12 of the makespan."""
    slack = 1e-12 * b.seconds
    assert abs(a.seconds - b.seconds) <= slack
    for one, other in zip(a.ranks, b.ranks, strict=True):
        assert one.actions == other.actions
        for x, y in ((one.begin, other.begin), (one.done, other.done), (one.sent, other.sent)):
            assert np.allclose(x, y, rtol=0.0, atol=slack)
    for x, y in zip(a.last, b.last, strict=True):
        assert np.allclose(x, y, rtol=0.0, atol=slack)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", STRATEGIES)
def test_folded_is_as_every_device_op_by_op(name: str, way: str) -> None:
    """The folded sweep is maps put together; the other the event engine on tasks of devices."""
    folded = simulate_job(job(name), CLUSTER, **WAYS[way])
    plain = simulate_job(job(name), CLUSTER, fold=False, **WAYS[way])
    assert_same(folded.swept, plain.swept)
    assert np.isclose(folded.bubble_seconds, plain.bubble_seconds, rtol=0.0, atol=1e-12 * plain.seconds)
    assert np.isclose(folded.idle_seconds, plain.idle_seconds, rtol=0.0, atol=1e-12 * plain.seconds)
    assert folded.exposed.keys() == plain.exposed.keys()
    for key, seconds in plain.exposed.items():
        assert np.isclose(folded.exposed[key], seconds, rtol=0.0, atol=1e-11 * plain.seconds)


@pytest.mark.parametrize("name", ["1f1b", "gpipe", "interleaved", "zb-h1", "dualpipe"])
def test_long_messages_queue(name: str) -> None:
    """On links so slow that a message waits for the one before it."""
    slow = replace(CLUSTER, levels=tuple(replace(level, bandwidth=1e7) for level in CLUSTER.levels))
    folded = simulate_job(job(name), slow)
    assert_same(folded.swept, simulate_job(job(name), slow, fold=False).swept)
    queued = [
        times[0] - made
        for run in folded.swept.ranks
        for times, made in zip(run.sent[:, :1].reshape(-1, 2), run.done, strict=False)
    ]
    assert max(queued) > 0.0


@pytest.mark.parametrize("switch", ["layers", "prices"])
@pytest.mark.parametrize("name", ["tensor", "prefetch", "gpipe", "interleaved"])
def test_each_fold_alone_changes_nothing(name: str, switch: str) -> None:
    one = simulate_job(job(name, 8), CLUSTER)
    other = simulate_job(job(name, 8), CLUSTER, fold=replace(Fold(), **{switch: False}))
    assert_same(one.swept, other.swept)


def test_layers_are_raised_to_a_power_and_prices_remembered() -> None:
    deep = job("tensor", 8)
    assert any(p.steps and p.steps[-1].op.name == "repeat" for p in deep.programs.shared)
    fabric = fabric_of(CLUSTER, deep.programs.meshes)
    one, other = (compile_job(deep, fabric, JobSettings(), f) for f in (Fold(), Fold(layers=False, prices=False)))
    for key, found in one.maps.items():
        assert np.allclose(found.matrix, other.maps[key].matrix, rtol=1e-12, atol=0.0)


@cache
def bare(name: str, ranks: int, microbatches: int) -> CompiledJob:
    """A job of a schedule whose maps are scaled later."""
    sizes: dict[str, Any] = {**SIZES, "layers": 2 * ranks}
    strategy = sp.Strategy(
        pipeline=ranks, schedule=name, interleave=2 if name == "interleaved" else None, global_batch=microbatches
    )
    model = sp.Model.load("gpt", **sizes)
    found = sp.partition(model, strategy)
    return compile_job(found, fabric_of(CLUSTER, found.programs.meshes), JobSettings(), Fold())


def scaled(one: CompiledJob, factors: list[float], message: float) -> CompiledJob:
    maps = {
        (stage, kind): replace(
            found, matrix=np.where(np.isfinite(found.matrix), found.matrix * factors[stage], -np.inf)
        )
        for (stage, kind), found in one.maps.items()
    }
    return replace(one, maps=maps, messages=tuple(replace(m, seconds=m.seconds * message) for m in one.messages))


def one_by_one(compiled: CompiledJob) -> list[list[tuple[float, float, list[tuple[float, float]]]]]:
    """Begin, end and messages (start, arrival) of every action: the rules of the docs, one action after another."""
    n, owners = len(compiled.streams), compiled.job.schedule.owners
    free = [np.zeros(n) for _ in compiled.rows]
    done: dict[tuple[int, int], float] = {}  # by stage and microbatch
    mail: dict[tuple[int, int], float] = {}  # by message and microbatch
    record: dict[tuple[int, int], tuple[list[tuple[float, float]], int]] = {}  # where it is written down
    line: dict[int, float] = {}  # by message until when its connection is taken
    found: list[list[tuple[float, float, list[tuple[float, float]]]]] = [[] for _ in compiled.rows]
    left = sum(map(len, compiled.rows))
    while left:
        for r, row in enumerate(compiled.rows):
            at = len(found[r])
            if at == len(row) or any((number, row[at][2]) not in mail for number in compiled.taken[row[at][:2]]):
                continue
            stage, kind, k = row[at]
            for number in compiled.taken[stage, kind] if compiled.is_rendezvous else ():
                if seconds := compiled.messages[number].seconds:  # it waits until this rank has computed so far
                    times, place = record[number, k]
                    start = max(times[place][0], free[r][compiled.streams.index(COMPUTE)])
                    times[place] = start, start + seconds
                    mail[number, k] = start + seconds
            took = [mail[number, k] for number in compiled.taken[stage, kind]]
            entry = np.array([*free[r], done.get((stage, k), -np.inf), *took])
            after = (compiled.map_at(r, at, (stage, kind)).matrix + entry).max(axis=1)
            free[r], done[stage, k] = after[:n], float(after[n + 1])
            sent: list[tuple[float, float]] = []
            for number, made in zip(compiled.sent[stage, kind], after[n + 2 :].tolist(), strict=True):
                assert owners[compiled.messages[number].transfer.source[0]] == r
                start = made if compiled.is_rendezvous else max(made, line.get(number, -np.inf))
                line[number] = mail[number, k] = start + compiled.messages[number].seconds
                record[number, k] = sent, len(sent)
                sent.append((start, line[number]))
            found[r].append((float(after[n]), float(after[n + 1]), sent))
            left -= 1
    return found


@settings(max_examples=40, deadline=None)
@given(
    st.sampled_from(["1f1b", "gpipe", "zb-h1", "interleaved", "dualpipe", "zb-v"]), st.integers(1, 2),
    st.sampled_from([0.0, 1.0, 30.0]), st.integers(0, 2**32 - 1),
)  # fmt: skip
def test_level_by_level_is_one_action_after_another(name: str, half: int, message: float, seed: int) -> None:
    """Maps of any numbers, messages of any length: the same begin, end and messages, bit by bit."""
    one, random = bare(name, 2 * half, 12), np.random.default_rng(seed)
    maps = {
        key: replace(found, matrix=np.where(random.random(found.matrix.shape) < 0.5, random.random(found.matrix.shape),
                                            found.matrix))
        for key, found in one.maps.items()
    }  # fmt: skip
    assert_run_one_by_one(replace(scaled(one, [1.0] * one.job.stages, message), maps=maps))


@pytest.mark.parametrize("name", STRATEGIES)
def test_level_by_level_is_one_action_after_another_on_every_stream(name: str) -> None:
    """Collectives and copies beside the actions of other microbatches, and what moves once a step."""
    found = job(name, 8)
    assert_run_one_by_one(compile_job(found, fabric_of(CLUSTER, found.programs.meshes), JobSettings(), Fold()))


def assert_run_one_by_one(compiled: CompiledJob) -> None:
    for run, expected in zip(sweep(compiled).ranks, one_by_one(compiled), strict=True):
        for k, (begin, end, sent) in enumerate(expected):
            assert (run.begin[k], run.done[k]) == (begin, end)
            assert [tuple(times) for times in run.sent[k, : len(sent)].tolist()] == sent


def at_ends(matrix: Floats, streams: int) -> Floats:
    """A map whose values come before its first op, and leave behind its last one: ops may do both in between."""
    found = matrix.copy()
    found[:, streams + 1 :] = found[:, [1]]
    found[streams + 2 :] = found[streams + 1]
    return found


@pytest.mark.parametrize(
    ("name", "ranks", "chunks"), [("1f1b", 3, 1), ("gpipe", 2, 1), ("zb-h1", 2, 1), ("interleaved", 2, 2)]
)
def test_one_stream_without_launch_is_the_schedule_replayed(name: str, ranks: int, chunks: int) -> None:
    """Stage-level events: what `replay` makes of the seconds of every action, messages free and between actions."""
    found = bare(name, ranks, 12).job
    line = simulate_job(found, CLUSTER, overlap=False, launch=0.0).without("messages")
    n = len(line.compiled.streams)
    maps = {key: at_ends(one.matrix, n) for key, one in line.compiled.maps.items()}
    laid_so = replace(
        line.compiled, maps={key: replace(one, matrix=maps[key]) for key, one in line.compiled.maps.items()}
    )

    def cost(action: Action) -> float:
        return float(maps[action.stage, action.kind][n + 1].max())

    spans_of = replay(found.schedule.compute_only(), cost).spans
    for run, expected in zip(sweep(laid_so).ranks, spans_of, strict=True):
        done = [end for (_, kind, _), end in zip(run.actions, run.done, strict=True) if kind != "OPT"]
        assert np.allclose(done, [end for *_, end in expected], rtol=1e-12)


def faster(topology: Topology, level: int, factor: float) -> Topology:
    levels = list(topology.levels)
    levels[level] = replace(levels[level], bandwidth=levels[level].bandwidth * factor)
    return replace(topology, levels=tuple(levels))


@settings(max_examples=25, deadline=None)
@given(st.sampled_from(["tensor", "fsdp", "interleaved", "gpipe"]), st.integers(0, 1), st.floats(1.0, 8.0))
def test_more_bandwidth_never_slows_a_step(name: str, level: int, factor: float) -> None:
    before = simulate_job(job(name), CLUSTER)
    after = simulate_job(job(name), faster(CLUSTER, level, factor))
    assert after.seconds <= before.seconds * (1 + 1e-12)


@pytest.mark.parametrize("name", ["tensor", "fsdp", "offload", "bucket"])
def test_shared_links_never_speed_a_step_up(name: str) -> None:
    """And where everybody shares one uplink, the step is slower."""
    narrow = replace(CLUSTER, levels=(Level("node", 8, "switch", 1e7, 1e-6), Level("gpu", 1, "switch", 1e10, 0.0)))
    for topology in (CLUSTER, narrow):
        alone = simulate_job(job(name), topology, launch=0.0)
        shared = simulate_job(job(name), topology, launch=0.0, contention=True)
        assert shared.seconds >= alone.seconds * (1 - 1e-12)


def test_optimizers_of_stages_share_an_uplink() -> None:
    """Two stages, each on both nodes, reduce their gradients at once over one uplink a node: neither has all of it."""
    wide = Topology(
        "one uplink",
        (Level("node", 2, "switch", 1e8, 1e-6), Level("gpu", 2, "switch", 1e12, 0.0)),
        CLUSTER.device,
    )
    model = sp.Model.load("gpt", **SIZES)
    found = sp.partition(model, sp.Strategy(pipeline=2, data=2, global_batch=4))
    mesh = sp.Mesh(pipeline=2, data=2)
    where = next(p for p in sp.placements(mesh, wide) if p.device_mesh().reshape(-1).tolist() == [0, 2, 1, 3])
    alone, shared = (simulate_job(found, where, contention=c, launch=0.0) for c in (False, True))
    assert shared.seconds > 1.2 * alone.seconds
    assert "node" in alone.shared_levels

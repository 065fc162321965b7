"""Jobs under every schedule: a generator's, one's own, forward only; stages lie on ranks as it says."""

import pickle
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shardplan import LayoutError, ScheduleError, Strategy, partition
from shardplan.execution.jobs import order, parts
from shardplan.strategy.schedules import GENERATORS, Schedule, Shop, Times, list_schedule, place_messages, schedule
from strategy.jobs import apart, arrays, by_name, model, stepped, wrong

V = [name for name, made in GENERATORS.items() if made.chunks > made.copies]  # with two stages of a chain a rank


@pytest.mark.parametrize("name", GENERATORS)
def test_a_job_computes_what_the_model_does(name: str) -> None:
    """Stages of one and of two layers."""
    small = model("mlp", layers=5 if name in V else 3)
    assert wrong(small, Strategy(pipeline=2, global_batch=4, schedule=name)) == []


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("mlp", {"pipeline": 4, "global_batch": 8, "schedule": "dualpipev"}),
        ("mlp", {"pipeline": 3, "global_batch": 6, "schedule": "interleaved", "interleave": 3}),
        ("llama", {"pipeline": 2, "data": 2, "zero": 2, "global_batch": 6, "schedule": "zb-v"}),
        ("gpt", {"pipeline": 2, "recompute": "full", "global_batch": 5, "schedule": "dualpipev"}),
        ("gpt", {"pipeline": 2, "microbatch": 2, "global_batch": 7, "schedule": "dualpipe"}),
    ],
    ids=str,
)
def test_with_what_else_a_strategy_says(name: str, said: dict[str, Any]) -> None:
    steps = 3 if name == "mlp" else 1
    assert wrong(model(name, layers=9 if name == "mlp" else 4), Strategy(**said), steps) == []


def test_stages_lie_as_the_schedule_says() -> None:
    """Rank r has the stages r and 2p-1-r, and what stages of one rank hand on to each other is not moved."""
    job = partition(model("mlp", layers=9), Strategy(pipeline=4, global_batch=4, schedule="zb-v", data=1))
    assert [mesh.devices for mesh in job.programs.meshes] == [(0,), (1,), (2,), (3,), (3,), (2,), (1,), (0,)]
    still = {(t.source[0], t.target[0]) for t, m in zip(job.transfers, parts(job).moves, strict=True) if not m.rest}
    assert still == {(3, 4), (4, 3)}
    turned = Schedule.parse("schedule, 1 microbatches\n0: 1F0 1B0\n1: 0F0 0B0")
    away = partition(model("mlp"), Strategy(pipeline=2, tensor=2, schedule=turned))
    assert [mesh.devices for mesh in away.programs.meshes] == [(2, 3), (0, 1)]
    assert wrong(model("mlp"), Strategy(pipeline=2, tensor=2, schedule=turned)) == []


def test_two_chains_hold_the_same_parameters() -> None:
    """Of DualPipe: the second chain has no state of the optimizer, and its gradients go to the first, which sends."""
    job = partition(
        model("mlp", layers=3, optimizer="adamw"), Strategy(pipeline=2, global_batch=4, schedule="dualpipe")
    )
    assert [mesh.devices for mesh in job.programs.meshes] == [(0,), (1,), (1,), (0,)]
    assert all(job.programs.which[s, "F"] == job.programs.which[s + 2, "F"] for s in range(2))
    assert [stage for stage, kind in job.programs if kind == "OPT"] == [0, 1]
    names = [{part.name for part in job.parts.values() if part.stage == s} for s in (1, 3)]
    assert names[0] - names[1] == {"layers.weight.m", "layers.weight.v", "step"}
    said = {(t.kind, t.source[0], t.target[0]) for t in job.transfers}
    assert said == {("F", 0, 1), ("F", 2, 3), ("B", 1, 0), ("B", 3, 2),
                    ("total", 2, 0), ("total", 3, 1), ("OPT", 0, 2), ("OPT", 1, 3)}  # fmt: skip


def own(name: str = "v-half") -> Schedule:
    return place_messages(schedule(name, 2, 4), Times(2, 3, 1))


def test_a_schedule_of_one_s_own(tmp_path: Path) -> None:
    """With its messages, from a file, and of the list scheduler; strategies are equal, hashed, printed and pickled."""
    found = own()
    found.to_csv(tmp_path / "mine.csv")
    read = Strategy(pipeline=2, global_batch=4, schedule=str(tmp_path / "mine.csv"))
    said = Strategy(pipeline=2, global_batch=4, schedule=found)
    assert read == said == Strategy(pipeline=2, global_batch=4, schedule=tmp_path / "mine.csv")
    assert pickle.loads(pickle.dumps(said)) == said and hash(read) == hash(said)
    assert "0SEND_F0" in repr(said) and said.interleave == 2
    small = model("mlp", layers=5)
    assert wrong(small, said) == []
    job = partition(small, said)
    for rank, row in enumerate(found.ranks):
        wanted = [(a.stage, a.kind, a.microbatch) for a in row if a is not None and a.microbatch is not None]
        assert wanted == [a for a in order(job) if found.owners[a[0]] == rank]
    uneven = Shop((0, 1, 2, 1), 4, ((2, 2, 1), (1, 1, 1), (3, 2, 2), (1, 1, 1)), (4, 6, 4))
    many = Strategy(pipeline=3, global_batch=4, schedule=list_schedule(uneven, 50))
    assert many.interleave == 2 and partition(small, many).schedule.owners == uneven.owners
    assert wrong(small, many) == []


@pytest.mark.parametrize("name", [*GENERATORS, "own"])
def test_forward_only(name: str) -> None:
    """One F a stage and microbatch; what is decided for training is what is run."""
    made = own() if name == "own" else name
    strategy = Strategy(pipeline=2, global_batch=4, schedule=made)
    small = model("mlp", layers=5, training=False, optimizer=None)
    big = small.resize(batch=4)
    job = partition(small, strategy)
    assert all(kind == "F" for _, kind in job.programs)
    found = Counter(k for _, kind, k in order(job) if kind == "F")
    assert found == dict.fromkeys(range(4), job.stages // job.schedule.copies)
    assert not any(kind in "BIW" or kind.endswith("_B") for _, kind, _ in order(job))
    given = arrays(big, big.program)
    got, want = stepped(job, given), by_name(big.program, given)
    assert all(apart(got[o], want[o]) < 1e-9 for o in job.results)


def test_prefill_and_decode_under_a_v() -> None:
    """A stage's cache lies where the stage does."""
    strategy = Strategy(pipeline=2, schedule="zb-v", data=2)
    prefill = model("llama", layers=5, cache=6, training=False, batch=2, seq=4)
    whole = model("llama", layers=5, training=False, batch=2, seq=6)
    rng = np.random.default_rng(1)
    held = {n: rng.normal(0, 0.3, p.shape) for n, p in prefill.parameters.items()}
    tokens = rng.integers(0, 32, (2, 6)).astype(np.int32)
    state, got = dict(prefill.state()), list[np.ndarray]()
    for at, one in ((0, prefill), (4, prefill.resize(seq=1)), (5, prefill.resize(seq=1))):
        out = stepped(partition(one, strategy), {**held, **state, "tokens": tokens[:, at : at + (4 if at == 0 else 1)]})
        state = {n: out[n] for n in state}
        got.append(out["logits"])
    assert apart(np.concatenate(got, 1), by_name(whole.program, {**held, "tokens": tokens})["logits"]) < 1e-9


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"schedule": "zbv"}, "strategy: schedule 'zbv' is unknown; legal: gpipe, 1f1b, .*"),
    ({"schedule": 3}, "strategy: schedule 3 is unknown; legal: .*"),
    ({"schedule": "nowhere.csv"}, "nowhere.csv is no schedule: .*No such file.*"),
    ({"pipeline": 2, "schedule": "zb-v", "interleave": 1}, "schedule zb-v has 2 chunks a rank, 1 were asked for"),
    (
        {"schedule": own("zb-h1")},
        "strategy: pipeline=1 with the schedule zb-h1 of 2 ranks, 1 chunks and 4 microbatches; legal is pipeline=2",
    ),
    (
        {"pipeline": 2, "global_batch": 3, "schedule": own("zb-h1")},
        "strategy: microbatches=3 with .*; legal is microbatches=4",
    ),
    (
        {"pipeline": 2, "global_batch": 4, "interleave": 2, "schedule": own("zb-h1")},
        "strategy: interleave=2 with .*; legal is interleave=1",
    ),
    (
        {"pipeline": 2, "schedule": Schedule.parse("schedule a, 1 microbatches\n0: 0F0 0B0\n1: 1B0 1F0")},
        r"schedule a: 1F0 \(rank 1, slot 1\) stands behind 1B0 \(rank 1, slot 0\)",
    ),
    (
        {"pipeline": 2, "schedule": Schedule.parse("schedule a, 1 microbatches\n0: 0F0\n1: 1F0")},
        "the schedule a runs nothing backward, and the model trains; legal are a B, or an I and a W, for each F",
    ),
    (
        {"pipeline": 2, "global_batch": 4, "schedule": "dualpipe", "bucket": 9},
        "a job under the schedule dualpipe, which holds 2 copies of the parameters; legal are two, without bucket, of "
        "a model without caches",
    ),
    ({"pipeline": 3, "global_batch": 4, "schedule": "zb-v"}, "6 stages of a model of 5 layers; legal are 1 to 5"),
]


@pytest.mark.parametrize(("said", "text"), REFUSED, ids=[str(k) for k in range(len(REFUSED))])
def test_what_is_not_legal_is_said_in_a_line(said: dict[str, Any], text: str) -> None:
    with pytest.raises((ScheduleError, LayoutError), match=f"^{text}$"):
        partition(model("mlp", layers=5), Strategy(**said))


def test_what_is_offloaded_of_overlapped_actions() -> None:
    """Each forward that leaves returns, before what reads it."""
    strategy = Strategy(pipeline=2, global_batch=8, schedule="dualpipev", offload=True)
    job = partition(model("mlp", layers=5), strategy)
    for row in job.schedule.ranks:
        seen = [str(leaf) for a in row if a is not None for leaf in a.leaves]
        away = [text.replace("OFFLOAD", "RELOAD") for text in seen if "OFFLOAD" in text]
        assert away and sorted(away) == sorted(text for text in seen if "RELOAD" in text)
        for text in away:
            later = seen[seen.index(text) :]
            assert text.replace("RELOAD", "B") in later or text.replace("RELOAD", "I") in later

"""Requests: what groups in a pipeline take, tokens summed one by one, and the search for what serves them best."""

import itertools
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

import shardplan as sp
from shardplan import Infeasible, LayoutError, Model, ParseError, Requests, ShardplanError, Strategy, Topology
from shardplan.cli import app
from shardplan.simulation.closed.collectives import CollectivePrices
from shardplan.simulation.closed.configurations import Configurations
from shardplan.simulation.closed.machines import of_machine
from shardplan.simulation.closed.parameters import Parameters
from shardplan.simulation.inference import forward
from shardplan.simulation.inference.form import ISSUED, PricedRequests, RequestForm
from shardplan.simulation.inference.request_timeline import serving_strategy
from shardplan.simulation.inference.serving_plans import COMPARED
from shardplan.simulation.inference.space import ServingSpace
from shardplan.simulation.searching import ranges

SIZES: dict[str, Any] = {
    "layers": 4,
    "hidden": 256,
    "heads": 4,
    "seq": 64,
    "vocab": 512,
    "ffn": 384,
    "precision": "bf16",
}
LLAMA = Model.load("llama", kv_heads=2, **SIZES)
MOE = Model.load("moe", kv_heads=2, experts=4, experts_per_token=2, dense_layers=0, **SIZES)
LARGE = Model.load("llama3-8b", precision="bf16")
BOX = Topology.load("dgx-a100-80g", nodes=1)
TRAFFIC = Requests(64, 16, 6)


def on(devices: int, memory: float | None = None) -> Topology:
    device = BOX.device if memory is None else replace(BOX.device, memory=memory)
    return replace(BOX, device=device, levels=(BOX.levels[0], replace(BOX.levels[1], size=devices)))


def priced(model: Model, topology: Topology, requests: Requests, *said: dict[str, Any]) -> PricedRequests:
    form = RequestForm.of(model, topology, of_machine(topology), requests)
    return form.priced(Configurations.of([serving_strategy(Strategy(**one), requests) for one in said]))


# How groups follow each other


def passing(stages: list[float], groups: int, tokens: int) -> float:
    """The time of the last token, when every group passes stage by stage, in turn, and begins again behind the last."""
    free, done = [0.0] * len(stages), [0.0] * groups
    for _ in range(tokens):
        for g in range(groups):
            at = done[g]
            for k, seconds in enumerate(stages):
                at = free[k] = max(at, free[k]) + seconds
            done[g] = at
    return max(done)


@given(st.lists(st.floats(0.1, 3), min_size=1, max_size=5), st.integers(1, 8))
@settings(max_examples=50, deadline=None)
def test_groups_pass_as_the_formula_says(stages: list[float], groups: int) -> None:
    """Prompts exactly; tokens in the long run."""
    assert passing(stages, groups, 1) == pytest.approx(sum(stages) + (groups - 1) * max(stages))
    each = (passing(stages, groups, 60) - passing(stages, groups, 20)) / 40
    assert each == pytest.approx(max(sum(stages), groups * max(stages)))


def test_the_form_has_that_formula(monkeypatch: pytest.MonkeyPatch) -> None:
    requests = Requests(64, 16, 12)
    form = RequestForm.of(LLAMA, BOX, Parameters(), requests)
    first, token = np.array([[1.0, 2.0, 4.0, 3.0]]), np.array([[0.1, 0.3, 0.2, 0.2]])
    monkeypatch.setattr(RequestForm, "_times", lambda *_: (first, token, 0 * first))  # pyright: ignore[reportUnknownLambdaType]
    for microbatch, want in ((12, 10 + 0 * 4), (4, 10 + 2 * 4), (1, 10 + 11 * 4)):
        c = Configurations.of([Strategy(pipeline=4, data=2, microbatch=microbatch, global_batch=24)])
        out = form.priced(c)
        each = max(0.8, 12 // microbatch * 0.3)
        assert out.first_token[0] == want and out.token[0] == pytest.approx(each)
        assert out.latency[0] == pytest.approx(want + 15 * each)
        assert out.tokens_per_second[0] == pytest.approx(2 * 12 * 16 / out.latency[0])


# What a token takes as the cache grows


@pytest.mark.parametrize("said", [{"tensor": 2, "data": 4, "microbatch": 6}, {"pipeline": 4, "tensor": 2}], ids=str)
@pytest.mark.parametrize("output", [2, 15, 40])
def test_the_mean_length_stands_for_every_token(said: dict[str, Any], output: int) -> None:
    """The tokens of an answer, each priced with the positions that it attends to."""
    model = Model.load("llama", **{**SIZES, "layers": 8, "hidden": 512}, kv_heads=2)
    whole = priced(model, BOX, Requests(256, output, 6), said)
    each = sum(priced(model, BOX, Requests(256 + k - 1, 2, 6), said).token[0] for k in range(1, output))
    assert (output - 1) * whole.token[0] == pytest.approx(each, rel=1e-6)


def test_one_token_comes_of_the_prompt() -> None:
    out = priced(LLAMA, BOX, Requests(64, 1, 6), {"tensor": 4, "data": 2})
    assert out.latency[0] == out.first_token[0] and out.tokens_per_second[0] == pytest.approx(12 / out.latency[0])


def test_more_of_anything_takes_no_less() -> None:
    said: dict[str, Any] = {"tensor": 2, "pipeline": 2, "data": 2}
    few = priced(LLAMA, BOX, Requests(64, 16, 4), said)
    for more in (Requests(128, 16, 4), Requests(64, 32, 4), Requests(64, 16, 8)):
        many = priced(LLAMA, BOX, more, said)
        assert many.latency[0] > few.latency[0] and many.cache_bytes[0] > few.cache_bytes[0]
        assert many.parameter_bytes[0] == few.parameter_bytes[0] and many.peak_bytes[0] > few.peak_bytes[0]
    quick = replace(BOX, device=replace(BOX.device, memory_bandwidth=2 * BOX.device.memory_bandwidth))
    assert 0.4 < priced(LLAMA, quick, Requests(64, 16, 4), said).token[0] / few.token[0] < 1


def test_a_token_is_no_sooner_than_memory_is_read() -> None:
    """A large model and one sequence: every parameter once, and the cache, at the bandwidth that is reached."""
    model, params = Model.load("llama3-8b", precision="bf16"), Parameters(stream=0.8)
    one = Topology.load("dgx-h100", nodes=1)
    one = replace(one, levels=(one.levels[0], replace(one.levels[1], size=1)))
    form = RequestForm.of(model, one, params, Requests(1024, 512, 1))
    out = form.priced(Configurations.of([Strategy()]))
    table = model.parameters["embed"].size * 2  # of which a token reads a row
    caches = out.cache_bytes[0] * (1024 + 256) / (1024 + 512)
    read = (out.parameter_bytes[0] - table + caches) / (one.device.memory_bandwidth * 0.8)
    assert 1 <= out.token[0] / read < 1.05
    # Of each layer keys and values of 8 heads of 128, in 2 bytes.
    assert out.cache_bytes[0] == 2 * 32 * 8 * 128 * 2 * 1536 and out.parameter_bytes[0] == model.parameter_count * 2


def test_caches_lie_over_heads_and_stages_and_replicas() -> None:
    model = Model.load("llama", **{**SIZES, "heads": 8}, kv_heads=2)
    one, *rest = priced(
        model, BOX, TRAFFIC, {"data": 8}, {"tensor": 2, "data": 4}, {"tensor": 8}, {"pipeline": 4, "data": 2},
        {"context": 4, "context_kind": "gather", "data": 2},
    ).cache_bytes  # fmt: skip
    assert one == 2 * 4 * 2 * 32 * 2 * (64 + 16) * 6
    assert [one / other for other in rest] == [2, 2, 4, 1]  # no more parts than heads of keys; context has all


def test_no_host_starts_the_collectives_of_a_captured_step() -> None:
    slow = Topology.load("dgx-a100-80g", nodes=2)
    slow = replace(slow, device=replace(slow.device, launch=1.0))
    group, size = [(np.array([2, 8, 16]), np.array([8, 1, 1]))], np.ones(3)
    plain, captured = (CollectivePrices.of(slow, Parameters(), c) for c in (False, True))
    for summed, whole in itertools.product((True, False), (True, False)):
        apart = [prices.lines(summed, whole, group).seconds(size) for prices in (plain, captured)]
        assert apart[0] - apart[1] == pytest.approx([1.0, 1.0, 1.0])
    distance = np.array([1, 8])
    apart = [prices.message_lines(distance, np.array([2])).seconds(np.ones(2)) for prices in (plain, captured)]
    assert apart[0] - apart[1] == pytest.approx([1.0, 1.0])


# The search


def test_who_issues_kernels_is_asked() -> None:
    """A graph is as quick as no launch; a host that launches each is slower, one in Python slower still."""
    small, params = Requests(8, 8, 1), replace(of_machine(BOX), launch=2e-5, eager=8e-5)
    c = Configurations.of([serving_strategy(Strategy(), small)])
    token = {by: RequestForm.of(LLAMA, on(1), params, small, issued=by).priced(c).token.item() for by in ISSUED}
    still = RequestForm.of(LLAMA, on(1), replace(params, launch=0.0, eager=0.0), small, issued="host").priced(c)
    assert token["graph"] == pytest.approx(still.token.item())
    kernels = token["host"] / params.launch  # the device takes next to nothing beside that
    assert token["eager"] / params.eager == pytest.approx(kernels, rel=0.01)
    assert 10 * LLAMA.fields["layers"] < kernels < 60 * LLAMA.fields["layers"]
    with pytest.raises(ShardplanError, match="requests: issued 'rpc' is unknown; legal: graph, host, eager"):
        RequestForm.of(LLAMA, on(1), params, small, issued="rpc")


@pytest.mark.parametrize("sequences", [1, 2, 5, 40])
def test_experts_that_no_token_goes_to_are_not_read(sequences: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Counted by drawing: tokens go to 2 of 16 experts each, and the memory reads those that one goes to."""
    wide = Model.load("moe", **SIZES | {"hidden": 1024, "ffn": 4096, "layers": 1, "vocab": 64, "heads": 8},
                      kv_heads=2, experts=16, experts_per_token=2, dense_layers=0)  # fmt: skip
    bandwidth = 1e9
    device = replace(BOX.device, memory_bandwidth=bandwidth)
    params = replace(of_machine(BOX), stream=1.0)
    asked = Requests(8, 2, sequences)
    form = RequestForm.of(wide, replace(on(1), device=device), params, asked)
    c = Configurations.of([serving_strategy(Strategy(microbatch=sequences), asked)])
    token = form.priced(c).token.item()
    monkeypatch.setattr(forward, "_unread_seconds", lambda *_: {})
    unread = form.priced(c).token.item() - token
    rng = np.random.default_rng(0)
    drawn = [len({e for _ in range(sequences) for e in rng.choice(16, 2, replace=False)}) for _ in range(4000)]
    one_expert = 3 * 1024 * 4096 * 2 / bandwidth
    assert unread / one_expert == pytest.approx(16 - float(np.mean(drawn)), abs=0.1)


def test_the_answer_says_how_far_published_requests_are_off() -> None:
    found = json.loads((Path(__file__).parents[2] / "benchmarks" / "results" / "request_accuracy.json").read_text())
    sources = found["open"]["sources"] | found["locked"]["sources"]
    count = sum(one["count"] for one in sources.values())
    mean = np.mean([one["mean_error_percent"] for one in sources.values()])
    worst = max(one["max_error_percent"] for one in sources.values())
    assert f"beside {count} published requests of {len(sources)} sources" in COMPARED
    assert f"{mean:.0f} % off in the mean, the worst {worst:.0f} %" in COMPARED


def by_loops(devices: int, prompt: int, concurrency: int, experts: int) -> Iterator[dict[str, Any]]:
    degrees = range(1, devices + 1)
    for d, t, p, c, e in itertools.product(degrees, degrees, degrees, degrees, range(1, experts + 1)):
        if d * t * p * c != devices or t > 4 or p > 4 or prompt % c or experts % e or (d * t * c) % e:
            continue
        if c > 1 and experts > 1:
            continue
        for mb, parallel in itertools.product(range(1, concurrency + 1), (False, True)):
            if concurrency % mb == 0 and (t > 1 or not parallel):
                yield {"data": d, "tensor": t, "pipeline": p, "context": c, "expert": e, "microbatch": mb,
                       "sequence_parallel": parallel, "context_kind": "gather" if c > 1 else "ulysses"}  # fmt: skip


@pytest.mark.parametrize("objective", ["latency", "tokens"])
@pytest.mark.parametrize(("model", "experts"), [(LLAMA, 1), (MOE, 4)], ids=["llama", "moe"])
@pytest.mark.parametrize("devices", [4, 6])
def test_plain_loops_find_the_same(model: Model, experts: int, devices: int, objective: Any) -> None:
    topology = on(devices)
    found = sp.search(model, topology, objective=objective, prompt=64, output=16, concurrency=6, top=5)
    said = list(by_loops(devices, 64, 6, experts))
    assert found.counted == len(said) == ServingSpace.of(model, devices, TRAFFIC).count
    rows: list[tuple[float, float, str]] = []
    form = RequestForm.of(model, topology, of_machine(topology), TRAFFIC)
    for one in said:
        out = form.priced(Configurations.of([Strategy(**one, global_batch=6 * one["data"])]))
        rows.append((out.latency[0] if objective == "latency" else 1 / out.tokens_per_second[0], out.peak_bytes[0], ""))
    rows.sort()
    assert [p.seconds for p in found.ranked] == pytest.approx([row[0] for row in rows[:5]], rel=1e-12)
    front = [row for row in rows if not any(o[0] <= row[0] and o[1] < row[1] for o in rows)]
    assert sorted({p.peak_bytes for p in found.pareto}) == pytest.approx(sorted({row[1] for row in front}), rel=1e-12)
    for p in (*found.ranked, *found.pareto):
        assert p.seconds == pytest.approx(p.latency if objective == "latency" else 1 / p.tokens_per_second)
        assert p.latency == pytest.approx(p.first_token + 15 * p.token)


@given(
    st.sampled_from((LLAMA, MOE)), st.sampled_from((6, 8)), st.sampled_from(("latency", "tokens")),
    st.sampled_from((1, 6, 8)), st.floats(1e6, 2e7), st.integers(1, 6),
)  # fmt: skip
@settings(max_examples=8, deadline=None)
def test_pruning_changes_nothing(
    model: Model, devices: int, objective: Any, many: int, memory: float, top: int
) -> None:
    found: list[Any] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ranges, "FIRST", 2)
        patch.setattr(ranges, "BLOCK", 4)
        for prune in (True, False):
            try:
                one = sp.search(model, on(devices, memory), objective=objective, prompt=64, output=16,
                                concurrency=many, prune=prune, top=top)  # fmt: skip
                found.append((one.ranked, one.pareto))
                assert one.priced + sum(c.strategies for c in one.pruned[:2]) == one.counted
                assert prune or one.priced == one.counted
                assert all(p.peak_bytes <= memory for p in (*one.ranked, *one.pareto))
            except Infeasible as error:
                found.append(type(error))
    assert found[0] == found[1]


@pytest.mark.parametrize("objective", ["latency", "tokens"])
@pytest.mark.parametrize(
    ("model", "requests"), [(LLAMA, Requests(64, 16, 12)), (MOE, Requests(64, 16, 12)), (LARGE, Requests(2048, 8, 12))],
    ids=["llama", "moe", "large"],
)  # fmt: skip
def test_no_strategy_is_below_its_frames_floors(model: Model, requests: Requests, objective: str) -> None:
    space = ServingSpace.of(model, 8, requests)
    form = RequestForm.of(model, BOX, of_machine(BOX), requests, objective)
    frames = np.arange(len(space.frames))
    out = form(space.columns(np.repeat(frames, space.inside), 0, np.tile(np.arange(space.inside), len(frames))))
    floors = form.floors(space.columns(frames, 0, 0))
    for got, floor in zip((out.seconds, out.peak_bytes), floors, strict=True):
        ratio = got.reshape(-1, space.inside) / floor[:, None]
        assert ratio.min() >= 1
        assert np.median(ratio.min(axis=1)) < 1.5  # and they say something


def test_executors_and_journals_change_nothing(tmp_path: Path) -> None:
    said: dict[str, Any] = {"objective": "tokens", "prompt": 64, "output": 16, "concurrency": 6}
    plain = sp.search(LLAMA, BOX, **said)
    path = tmp_path / "journal.json"
    with ThreadPoolExecutor(2) as pool:
        threads = sp.search(LLAMA, BOX, **said, executor=pool, resume=path)
    again = sp.search(LLAMA, BOX, **said, resume=path)
    assert (plain.ranked, plain.pareto) == (threads.ranked, threads.pareto) == (again.ranked, again.pareto)
    for other in ({"objective": "latency"}, {"output": 17}):
        with pytest.raises(ParseError, match="journal of another search"):
            sp.search(LLAMA, BOX, **{**said, **other}, resume=path)
    told = plain.sensitivity(BOX)
    assert told.keys() == {"node", "gpu", "flops", "memory_bandwidth", "memory"}
    for slower, faster in told.values():
        assert faster.seconds <= plain.best.seconds * (1 + 1e-12) <= slower.seconds * (1 + 1e-11)


def test_what_is_best_hangs_on_the_objective() -> None:
    """One request is soonest done on all devices; most tokens come of replicas."""
    model = Model.load("llama3-8b", precision="bf16")
    best = [
        sp.search(model, BOX, objective=name, prompt=1024, output=128, concurrency=8).best
        for name in ("latency", "tokens")
    ]
    assert best[0].strategy.data == 1 and best[1].strategy.data > 1
    assert best[0].latency < best[1].latency and best[0].tokens_per_second < best[1].tokens_per_second


# One strategy


def test_requests_of_one_strategy_are_a_timeline() -> None:
    one = Strategy(tensor=4, data=2, microbatch=3)
    line = sp.simulate(LLAMA, one, BOX, requests=TRAFFIC)
    out = priced(LLAMA, BOX, TRAFFIC, {"tensor": 4, "data": 2, "microbatch": 3})
    assert line.seconds == out.latency[0] and line.peak_bytes == int(out.peak_bytes[0])
    assert [(i.name, i.start, i.end) for i in line.intervals] == [
        ("prompts", 0.0, out.first_token[0]), ("tokens", out.first_token[0], out.latency[0])]  # fmt: skip


@pytest.mark.parametrize(
    ("what", "text"),
    [
        ({"strategy": Strategy(data=4)}, "a strategy of 4 devices on a topology of 8; legal is one of 4"),
        ({"strategy": Strategy(data=8, zero=3)}, "serving with zero=3; legal is 0"),
        ({"strategy": Strategy(data=8, recompute="full")}, "serving with recompute='full'; legal is 'none'"),
        ({"strategy": Strategy(data=8, microbatch=4)}, "6 in flight by groups of microbatch=4; legal are divisors"),
        ({"strategy": Strategy(context=8)}, "context_kind='gather' and expert=1"),
        ({"requests": (64, 16, 6)}, "legal is a Requests"),
        ({"fidelity": "events"}, "fidelity of requests 'events' is unknown; legal: closed"),
        ({"program": Model.load("mlp-xs")}, "serving mlp-xs: it has no cache of keys and values"),
        ({"program": Model.load("gpt", positions=79, **SIZES)}, "up to positions=79"),
    ],
    ids=str,
)
def test_what_does_not_serve_is_refused(what: dict[str, Any], text: str) -> None:
    said = {"program": LLAMA, "strategy": Strategy(data=8), "requests": TRAFFIC, "fidelity": None} | what
    with pytest.raises((ShardplanError, LayoutError), match=text):
        sp.simulate(said["program"], said["strategy"], BOX, said["fidelity"], requests=said["requests"])


@pytest.mark.parametrize(
    ("said", "text"),
    [
        ({"objective": "speed"}, "objective 'speed' is unknown; legal: step, latency, tokens"),
        ({"objective": "latency", "prompt": 8, "output": 4}, "requests: concurrency is 0"),
        ({"objective": "tokens", "global_batch": 8}, "global_batch with objective='tokens'; legal are prompt, output"),
        ({"global_batch": 8, "output": 4}, "output with objective='step'; legal is global_batch"),
        ({}, "global_batch is None"),
    ],
    ids=str,
)
def test_what_a_search_is_not_asked_is_refused(said: dict[str, Any], text: str) -> None:
    with pytest.raises(ShardplanError, match=text):
        sp.search(LLAMA, BOX, **said)


def test_what_does_not_fit_is_said() -> None:
    with pytest.raises(Infeasible, match=r"none of \d+ strategies of llama fits into 100 kB a device; the smallest"):
        sp.search(LLAMA, on(8, 1e5), objective="latency", prompt=64, output=16, concurrency=6)


def test_the_command() -> None:
    run = CliRunner()
    arguments = ["plan", "llama3-8b", "--on", "dgx-h100", "--nodes", "1", "--top", "2", "--objective", "latency",
                 "--prompt", "2048", "--output", "256", "--concurrency", "32"]  # fmt: skip
    found = run.invoke(app, arguments)
    assert found.exit_code == 0, found.output
    assert "32 in flight a replica" in found.stdout and "tensor=8" in found.stdout
    said = json.loads(run.invoke(app, [*arguments, "--json"]).stdout)
    assert said["objective"] == "latency" and said["requests"] == {"prompt": 2048, "output": 256, "concurrency": 32}
    assert said["best"]["latency"] == said["best"]["seconds"] and len(said["ranked"]) == 2
    for more in (["--batch", "8"], ["--prompt", "0"]):
        assert run.invoke(app, [*arguments, *more]).exit_code != 0
    assert run.invoke(app, arguments[:5]).exit_code != 0  # a step without --batch

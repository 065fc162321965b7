"""The search: its space is what plain loops find, and pruning, executors and journals change nothing."""

import itertools
import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

import shardplan as sp
from shardplan import Infeasible, Model, ParseError, ShardplanError, Strategy
from shardplan.cli import app
from shardplan.simulation.closed.configurations import Configurations
from shardplan.simulation.closed.form import ClosedForm
from shardplan.simulation.closed.machines import of_machine
from shardplan.simulation.searching import ranges
from shardplan.simulation.searching import search as searching
from shardplan.simulation.searching.bounds import frame_floors
from shardplan.simulation.searching.certifier import CertifiedPeak, Certifier
from shardplan.simulation.searching.front import Points
from shardplan.simulation.searching.plans import RankedPlan
from shardplan.simulation.searching.search import SearchResult
from shardplan.simulation.searching.space import INSIDE, StrategySpace
from shardplan.simulation.step_events import StepEvents
from shardplan.simulation.steps import simulate_step
from shardplan.strategy.options import check_options
from simulation.small_box import BOX, GPT, MOE, SIZES, box_with

# Its passes hide what is reduced: else what a microbatch adds to its gradients is below that.
LONG = Model.load("gpt", layers=8, hidden=1024, heads=8, seq=4096, vocab=2048, precision="bf16")


@cache
def every_plan() -> tuple[searching.RankedPlan, ...]:
    """What a search that leaves nothing out finds of 16 sequences."""
    return sp.search(GPT, BOX, 16, certify=False, prune=False, top=10_000).ranked


def by_loops(devices: int, batch: int, experts: int, heads: int) -> set[tuple[Any, ...]]:
    """Every combination of plain ranges that `Strategy` takes and that divides what it must."""
    found: set[tuple[Any, ...]] = set()
    degrees = range(1, devices + 1)
    for d, t, p, c in itertools.product(degrees, degrees, degrees, degrees):
        if d * t * p * c != devices or t > 4 or p > 4 or 64 % c or batch % d:
            continue
        for e, mb in itertools.product(range(1, experts + 1), range(1, batch // d + 1)):
            if experts % e or (d * t * c) % e or (batch // d) % mb:
                continue
            orders = [("1f1b", 1)]
            if p > 1:
                orders += [("gpipe", 1)] if batch // d // mb > 1 else []
                orders += [("interleaved", v) for v in range(2, 5) if (batch // d // mb) % p == 0 and 4 % (p * v) == 0]
            left = heads // t if t <= heads else heads // math.gcd(t, heads)  # key-value heads of a device
            kinds = [k for k, fits in (("ulysses", c <= max(left, 1)), ("gather", c > 1)) if fits]
            for (name, v), sp_, kind in itertools.product(orders, (False, True) if t > 1 else (False,), kinds):
                for r, (zero, fsdp) in itertools.product(
                    ("none", "full", "selective", "selective_op"),
                    ((0, False), (1, False), (2, False), (3, False), (2, True), (3, True)),
                ):
                    if r == "selective_op" and not fsdp:
                        continue
                    Strategy(data=d, tensor=t, pipeline=p, context=c, expert=e, microbatch=mb, global_batch=batch,
                             schedule=name, interleave=v, sequence_parallel=sp_, context_kind=kind, recompute=r,
                             zero=zero, fsdp=fsdp)  # fmt: skip
                    found.add((d, t, p, c, e, mb, name, v, sp_, kind, r, zero, fsdp))
    return found


def idle_one(model: Model, strategy: Strategy) -> bool:
    """Whether it is refused as it has an option that does nothing."""
    try:
        check_options(model, strategy)
    except ShardplanError:
        return True
    return False


def everything(space: StrategySpace, order: int | None = None) -> Configurations:
    """Every strategy of a space, in its order; or all frames on one order."""
    frames = np.arange(len(space.frames))
    which, orders, places = space.pairs(frames)
    if order is not None:
        which, orders = frames, np.full(len(frames), order)
    else:
        assert places.tolist() == list(range(len(places)))
    n = len(INSIDE)
    return space.columns(np.repeat(which, n), np.repeat(orders, n), np.tile(np.arange(n), len(which)))


@pytest.mark.parametrize(("devices", "batch"), [(1, 4), (4, 8), (6, 12), (8, 8)])
@pytest.mark.parametrize(("model", "experts", "heads"), [(GPT, 1, 4), (MOE, 4, 2)], ids=["gpt", "moe"])
def test_the_space_is_what_plain_loops_find(model: Model, experts: int, heads: int, devices: int, batch: int) -> None:
    space = StrategySpace.of(model, devices, batch)
    names = ("data", "tensor", "pipeline", "context", "expert", "microbatch", "schedule", "interleave",
             "sequence_parallel", "context_kind", "recompute", "zero", "fsdp")  # fmt: skip
    every = everything(space)
    got = [tuple(getattr(every.strategy(k), name) for name in names) for k in range(len(every))]
    assert len(got) == len(set(got)) == space.count
    assert set(got) == by_loops(devices, batch, experts, heads)
    assert space.one(space.count - 1).strategy(0) == every.strategy(len(every) - 1)
    frames = np.arange(len(space.frames))
    live = space.live(frames).reshape(-1)
    assert [not idle_one(model, every.strategy(k)) for k in range(len(every))] == live.tolist()
    assert live.sum() == space.count - space.idle


@pytest.mark.parametrize("model", [GPT, MOE], ids=["gpt", "moe"])
def test_placements_are_the_ways_in_which_devices_lie(model: Model) -> None:
    """As sets of who is next to whom: every order of the blocks on the ids, those that are alike once."""
    space = StrategySpace.of(model, 8, 8, placements=True)
    plain = StrategySpace.of(model, 8, 8)
    wanted = 0
    for k in range(len(plain.frames)):
        s = plain.columns(np.array([k]), 0, 0).strategy(0)
        sizes = {block: getattr(s, block) for block in ("pipeline", "data", "context", "tensor")}
        ways: set[bytes] = set()
        for order in itertools.permutations(sizes):
            ids = np.arange(8).reshape([sizes[b] for b in order])
            ways.add(ids.transpose([order.index(b) for b in sizes]).tobytes())
        wanted += len(ways) * len(INSIDE)
    assert space.count == wanted
    got = everything(space)
    seen: set[tuple[Any, ...]] = set()
    for k in range(len(got)):
        one = searching.RankedPlan(got.strategy(k), 0.0, 0.0, got.order(k))
        seen.add((one.strategy, one.device_mesh().tobytes()))
    assert len(seen) == len(got) == space.count
    last = space.one(space.count - 1)
    assert (last.strategy(0), last.order(0)) == (got.strategy(len(got) - 1), got.order(len(got) - 1))
    assert space.one(0).order(0) == ("pipeline", "data", "context", "tensor")


def test_an_order_lies_as_its_strides_say() -> None:
    space = StrategySpace.of(GPT, 8, 8, placements=True)
    every = everything(space)
    strides = every.strides()
    for k in range(0, len(every), 37):
        ids = searching.RankedPlan(every.strategy(k), 0.0, 0.0, every.order(k)).device_mesh()
        for axis, block in enumerate(("pipeline", "data", "context", "tensor")):
            if ids.shape[axis] > 1:
                assert set(np.diff(ids, axis=axis).reshape(-1).tolist()) == {int(strides[block][k])}


@given(
    st.sampled_from((GPT, MOE)), st.sampled_from((4, 8)), st.sampled_from((8, 12)), st.floats(5e6, 4e8),
    st.integers(1, 12), st.booleans(),
)  # fmt: skip
@settings(max_examples=10, deadline=None)
def test_pruning_changes_nothing(
    model: Model, devices: int, batch: int, memory: float, top: int, placements: bool
) -> None:
    nodes = 2 if placements else 1  # where all are in one node, their order changes nothing
    levels = replace(BOX.levels[0], size=nodes), replace(BOX.levels[1], size=devices // nodes)
    topology = replace(box_with(memory), levels=levels)
    found: list[Any] = []
    for prune in (True, False):
        try:
            one = sp.search(model, topology, batch, prune=prune, top=top, placements=placements, certify=False)
            # Seconds to the last digits: sums over other numbers of strategies at once are rounded otherwise.
            found.append(
                [[p._replace(seconds=float(f"{p.seconds:.12g}")) for p in x] for x in (one.ranked, one.pareto)]
            )
            idle = one.pruned[3].strategies
            assert one.priced + sum(c.strategies for c in one.pruned[:2]) == one.counted - idle
            assert prune or one.priced == one.counted - idle
            assert not any(idle_one(model, p.strategy) for p in (*one.ranked, *one.pareto))
            assert all(p.peak_bytes <= memory for p in (*one.ranked, *one.pareto))
        except Infeasible as error:
            found.append(type(error))
    assert found[0] == found[1]


@pytest.mark.parametrize("model", [GPT, MOE, LONG], ids=["gpt", "moe", "long"])
def test_no_strategy_is_below_its_frames_floors(model: Model) -> None:
    space = StrategySpace.of(model, 8, 16)
    # Nothing is waited for but bytes and operations: launches would hide the others at this size.
    form = ClosedForm(model, BOX, replace(of_machine(BOX), launch=0.0))
    frames = np.arange(len(space.frames))
    out = form(everything(space))
    seconds, nbytes = frame_floors(form, space, frames)
    ratio = out.seconds.reshape(-1, len(INSIDE)) / seconds[:, None]
    assert ratio.min() >= 1 - 1e-12
    assert np.median(ratio.min(axis=1)) < 1.5  # and they say something
    ratio = out.peak_bytes.reshape(-1, len(INSIDE)) / nbytes[:, None]
    assert ratio.min() >= 1 - 1e-12
    assert np.median(ratio.min(axis=1)) < 1.5


@pytest.mark.parametrize("model", [GPT, MOE], ids=["gpt", "moe"])
def test_no_order_is_below_all_blocks_inside(model: Model) -> None:
    """And none holds other bytes; the floor of a frame is below that, too."""
    space = StrategySpace.of(model, 16, 16, placements=True)
    topology = replace(BOX, levels=(replace(BOX.levels[0], size=4), replace(BOX.levels[1], size=4)))
    # Nothing is waited for but bytes and operations: launches would hide the others at this size.
    form = ClosedForm(model, topology, replace(of_machine(BOX), launch=0.0))
    frames = np.arange(len(space.frames))
    which, n = space.pairs(frames)[0], len(INSIDE)
    out, least = form(everything(space)), form(everything(space, space.floor_order))
    ratio = out.seconds.reshape(-1, n) / least.seconds.reshape(-1, n)[which]
    assert ratio.min() >= 1 - 1e-12
    assert ratio.max() > 1.5  # an order matters here
    alone = (space.starts[1:] - space.starts[:-1])[which] == 1  # one block has all devices: nothing is inside of it
    assert np.allclose(ratio[alone], 1, rtol=1e-12, atol=0)
    assert (out.peak_bytes.reshape(-1, n) == least.peak_bytes.reshape(-1, n)[which]).all()
    seconds, _ = frame_floors(form, space, frames)
    assert (least.seconds.reshape(-1, n) >= seconds[:, None] * (1 - 1e-12)).all()


@given(st.lists(st.tuples(st.integers(0, 6), st.integers(0, 6)), max_size=12))
@settings(max_examples=100, deadline=None)
def test_the_front_is_what_comparing_all_finds(points: list[tuple[int, int]]) -> None:
    x = np.array(points, dtype=float).reshape(-1, 2)
    front = Points(np.arange(len(x)), x[:, 0], x[:, 1]).front()
    want = {p for p in points if not any(q != p and q[0] <= p[0] and q[1] <= p[1] for q in points)}
    assert {(int(s), int(b)) for s, b in zip(front.seconds, front.nbytes, strict=True)} == want
    assert len(front) == len(want)
    for s, b in itertools.product(range(8), range(8)):
        said = bool(front.better(np.array([float(s)]), np.array([float(b)]))[0])
        assert said == any(p[0] < s and p[1] <= b for p in points)


def test_of_the_front_stays_what_needs_less_than_all_that_are_quicker() -> None:
    """Certificates may say other bytes than the closed form, by which the front was found."""
    front = tuple(RankedPlan(Strategy(), float(k), n, ()) for k, n in enumerate((5, 3, 4, 3, 1)))
    found = SearchResult(front, front, 1, None, (), 5, 5, lambda _: front[0])
    assert [one.peak_bytes for one in found.pareto] == [5, 3, 1]
    assert found.ranked == front[:1] and found.best is front[0]


@pytest.mark.parametrize(("model", "memory"), [(GPT, 1e7), (MOE, 2e7)], ids=["gpt", "moe"])
def test_pruning_changes_nothing_by_events(model: Model, memory: float) -> None:
    found = [
        sp.search(model, box_with(memory), 12, prune=prune, fidelity="events", top=4, certify=False)
        for prune in (True, False)
    ]
    assert (found[0].ranked, found[0].pareto) == (found[1].ranked, found[1].pareto)
    assert found[0].priced < found[1].priced == found[1].counted - found[1].pruned[3].strategies
    best = found[0].best
    assert best.seconds == pytest.approx(simulate_step(model, best.strategy, BOX, "events").seconds, rel=1e-12)


@pytest.mark.parametrize("fidelity", ["closed", "events"])
def test_all_are_ranked_as_each_is_priced(fidelity: str) -> None:
    """Orders that are priced alike are priced once: their seconds are those of each by itself, on three levels, too."""
    levels = (
        replace(BOX.levels[0], name="rack", size=2),
        replace(BOX.levels[0], size=2),
        replace(BOX.levels[1], size=2),
    )
    topology = replace(BOX, levels=levels)
    space = StrategySpace.of(GPT, 8, 8, precision="bf16", placements=True)
    form: Any = ClosedForm(GPT, topology, of_machine(BOX))
    live = space.live(space.pairs(np.arange(len(space.frames)))[0])
    out = (StepEvents(form) if fidelity == "events" else form)(everything(space)[live.reshape(-1)])
    found = sp.search(GPT, topology, 8, placements=True, prune=False, top=space.count, fidelity=fidelity, certify=False)
    assert [p.seconds for p in found.ranked] == pytest.approx(sorted(out.seconds.tolist()), rel=1e-12)
    assert len({p.seconds for p in found.ranked}) > space.count / 20


def test_executors_and_journals_change_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(searching, "RANGE", 64)
    plain = sp.search(GPT, BOX, 16, certify=False)
    with ThreadPoolExecutor(2) as pool:
        threads = sp.search(GPT, BOX, 16, executor=pool, certify=False)
    path = tmp_path / "journal.json"

    def stop_at_two(now: int, whole: int) -> None:
        if now >= 2 * 64:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        sp.search(GPT, BOX, 16, resume=path, done=stop_at_two, certify=False)
    first = json.loads(path.read_text())
    assert len(first["ranges"]) == 2
    calls: list[Any] = []
    real = ranges.searched

    def counted(*arguments: Any) -> Any:
        calls.append(arguments)
        return real(*arguments)

    monkeypatch.setattr(searching, "searched", counted)
    resumed = sp.search(GPT, BOX, 16, resume=path, certify=False)
    assert len(calls) == math.ceil(len(StrategySpace.of(GPT, 8, 16).frames) / 64) - 2
    for other in (threads, resumed):
        assert (other.ranked, other.pareto) == (plain.ranked, plain.pareto)
    with pytest.raises(ParseError, match="journal of another search"):
        sp.search(GPT, BOX, 8, resume=path, certify=False)
    path.write_text("{")
    with pytest.raises(ParseError, match="is no journal of a search"):
        sp.search(GPT, BOX, 16, resume=path, certify=False)


@pytest.mark.parametrize("after", [1, 100, 200])
def test_an_interrupt_gives_the_best_of_what_was_searched(after: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever was searched when it came, what is returned is the best of so many strategies; else it is raised."""
    monkeypatch.setattr(searching, "RANGE", 100)
    monkeypatch.setattr(ranges, "FIRST", 16)
    every = every_plan()

    def stop(now: int, whole: int) -> None:
        if now >= after:
            raise KeyboardInterrupt

    found = sp.search(GPT, BOX, 16, certify=False, done=stop, partial=True)
    assert 0 < found.frames_left < len(StrategySpace.of(GPT, 8, 16).frames)
    assert {one.strategy for one in found.ranked} <= {one.strategy for one in every}
    assert found.to_dict()["frames_left"] == found.frames_left and found.priced < len(every)
    with pytest.raises(KeyboardInterrupt):
        sp.search(GPT, BOX, 16, certify=False, done=stop)
    whole = sp.search(GPT, BOX, 16, certify=False, partial=True)
    assert whole.frames_left == 0 and whole.best.seconds <= found.best.seconds


def by_plan(ranked: Iterable[RankedPlan]) -> dict[tuple[str, tuple[str, ...], str], float]:
    """Seconds and bytes of each plan: arrays of other lengths sum in another order, so that a last digit may differ."""
    return {
        (repr(one.strategy), one.order, kind): value
        for one in ranked
        for kind, value in (("seconds", one.seconds), ("bytes", one.peak_bytes))
    }


@pytest.mark.parametrize(
    "fixed",
    [
        {"tensor": 2},
        {"tensor": 4, "zero": 1},
        {"schedule": "interleaved"},
        {"recompute": "full", "fsdp": True},
        {"gradient_dtype": "bf16", "sequence_parallel": True},
        {"shard": 2, "zero": 3},
    ],
    ids=str,
)
def test_what_is_fixed_is_so_and_the_rest_is_found(fixed: dict[str, Any]) -> None:
    """The best with something given is the best of all that have it."""
    found = sp.search(GPT, BOX, 16, fixed=fixed, certify=False, prune=False, top=10_000)
    assert all(getattr(one.strategy, name) == value for one in found.ranked for name, value in fixed.items())
    if fixed.keys().isdisjoint(("gradient_dtype", "shard")):
        mine = [one for one in every_plan() if all(getattr(one.strategy, k) == v for k, v in fixed.items())]
        assert by_plan(found.ranked) == pytest.approx(by_plan(mine), rel=1e-12)
    assert found.priced == len(found.ranked) + sum(one.strategies for one in found.pruned[:3])
    assert sum(one.strategies for one in found.pruned) + len(found.ranked) == found.counted


@pytest.mark.parametrize(
    ("fixed", "reason"),
    [
        ({"tensor": 3}, "16 sequences, tensor=3 is legal: degrees multiply to the devices, tensor up to 4 heads"),
        ({"bucket": 1}, "fixed bucket=1; legal are data, tensor, pipeline"),
        ({"context_kind": "rings"}, "fixed context_kind=rings; legal are ulysses, gather"),
        ({"zero": 1, "data": 1, "context": 1}, "zero=1, data=1, context=1 is legal: .*; zero and fsdp need data or"),
        ({"shard": 2, "zero": 0, "fsdp": False}, "shard=2, zero=0, fsdp=False is legal: .* and shard the replicas"),
        ({"shard": 0}, "fixed shard is 0; legal is a whole number of at least 1"),
        ({"data": "x"}, "fixed data is 'x'; legal is a whole number"),
        ({"schedule": "zb-h1"}, "schedules 'zb-h1' is unknown; legal: 1f1b, interleaved, gpipe"),
    ],
)
def test_what_cannot_be_fixed_is_refused(fixed: dict[str, Any], reason: str) -> None:
    with pytest.raises(ShardplanError, match=reason):
        sp.search(GPT, BOX, 16, fixed=fixed)


def test_narrow_precisions_are_searched() -> None:
    """In fp8 wide products are quicker and narrow ones are not (casts)."""
    wide = Model.load("gpt", positions=64, **SIZES | {"hidden": 4096, "heads": 32, "ffn": 16384})
    for model, quicker in ((wide, True), (GPT, False)):
        found, plain = (sp.search(model, sp.Topology.load("dgx-h100"), 16, precision=p) for p in ("fp8", "bf16"))
        assert found.best.strategy.precision == "fp8"
        assert (found.best.seconds < plain.best.seconds) is quicker


POINTS = {"index": [0], "seconds": [0.5], "nbytes": [1]}
DONE: dict[str, Any] = {"best": POINTS, "front": POINTS, "priced": 1, "slow": 0, "large": 0, "unfit": 0, "least": None}


@pytest.mark.parametrize(
    ("found", "reason"),
    [
        ([], "Expected `object`, got `array` - at `$.ranges[...]`"),
        (DONE | {"priced": -1}, "Expected `int` >= 0 - at `$.ranges[...].priced`"),
        (DONE | {"best": POINTS | {"index": [2**64]}}, "at `$.ranges[...].best.index["),
        (
            DONE | {"best": POINTS | {"seconds": ["x"]}},
            "Expected `float | null`, got `str` - at `$.ranges[...].best.seconds[",
        ),
        (DONE | {"front": POINTS | {"nbytes": []}}, "1 places, 1 seconds and 0 nbytes; legal are alike"),
    ],
)
def test_fields_of_a_journal_are_checked(found: Any, reason: str, tmp_path: Path) -> None:
    path = tmp_path / "journal.json"
    path.write_text(json.dumps({"search": "key", "ranges": {"0 64": DONE}}))
    assert ranges.Journal(path, "key").read()["0 64"].priced == 1
    path.write_text(json.dumps({"search": "key", "ranges": {"0 64": found}}))
    with pytest.raises(ParseError) as error:
        ranges.Journal(path, "key").read()
    assert str(error.value).startswith(f"{path} is no journal of a search: ") and reason in str(error.value)


def test_a_killed_search_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "journal.json"
    code = (
        "import shardplan as sp\n"
        "from shardplan.simulation.searching import search as s\n"
        "s.RANGE = 40\n"
        "m = sp.Model.load('gpt', layers=4, hidden=256, heads=4, seq=64, vocab=512, positions=64, precision='bf16')\n"
        f"r = sp.search(m, sp.Topology.load('dgx-a100-80g', nodes=1), 16, resume={str(path)!r}, certify=False)\n"
        "print([p.seconds for p in r.ranked])\n"
    )
    one = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.DEVNULL)
    limit = time.monotonic() + 60
    while not path.exists() and one.poll() is None and time.monotonic() < limit:
        time.sleep(0.01)
    os.kill(one.pid, signal.SIGKILL)
    one.wait()
    assert json.loads(path.read_text())["ranges"]
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=True)
    assert json.loads(done.stdout) == [p.seconds for p in sp.search(GPT, BOX, 16, certify=False).ranked]


def test_what_cannot_be_is_said() -> None:
    with pytest.raises(Infeasible, match=r"none of [\d,]+ strategies of gpt fits into 1 MB a device; the smallest"):
        sp.search(GPT, box_with(1e6), 16)
    for said, text in (
        ({"global_batch": 0}, "global_batch is 0"),
        ({"global_batch": 16, "top": 0}, "top is 0"),
        ({"global_batch": 16, "schedules": ("zb-h1",)}, "legal: 1f1b, interleaved, gpipe"),
    ):
        arguments: dict[str, Any] = said
        with pytest.raises(ShardplanError, match=text):
            sp.search(GPT, BOX, **arguments)


def test_sensitivity_searches_again() -> None:
    found = sp.search(GPT, BOX, 16, top=1)
    told = found.sensitivity(BOX)
    assert told.keys() == {"node", "gpu", "flops", "memory_bandwidth", "memory"}
    for slower, faster in told.values():
        assert faster.seconds <= found.best.seconds * (1 + 1e-12) and found.best.seconds <= slower.seconds * (1 + 1e-12)


def test_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    certified: list[sp.Strategy] = []

    def counted(self: Certifier, strategy: sp.Strategy) -> CertifiedPeak:
        certified.append(strategy)
        return certify(self, strategy)

    certify = Certifier._certified
    monkeypatch.setattr(Certifier, "_certified", counted)
    run = CliRunner()
    arguments = ["plan", "gpt2", "--on", "dgx-a100-80g", "--nodes", "1", "--batch", "16", "--top", "2"]
    found = run.invoke(app, arguments)
    assert found.exit_code == 0, found.output
    assert "strategies" in found.stdout and "priced" in found.stdout
    of_text = [*certified]
    certified.clear()
    said = json.loads(run.invoke(app, [*arguments, "--json"]).stdout)
    assert certified == of_text and 0 < len(certified) < 20, "a JSON certifies what a text does"
    keys = {"best", "pruned", "refused", "counted", "priced", "frames_left"}
    assert keys | {"answer", "tied", "goal", "changes", "notes"} == said.keys() and len(said["answer"]) == 2


def test_a_journal_keeps_what_is_infinite(tmp_path: Path) -> None:
    """Of a strategy that never ends, and of one that no memory holds, as of any other."""
    best = Points(np.array([3, 5, 8]), np.array([0.5, math.inf, 2.0]), np.array([1e9, 2e9, math.inf]))
    found = ranges.RangeResult(best, best.at(np.array([1])), priced=3)
    journal = ranges.Journal(tmp_path / "journal.json", "key")
    journal.write({"0 64": found})
    json.loads(journal.path.read_text(), parse_constant=pytest.fail)  # it is the JSON that any reader takes
    again = journal.read()["0 64"]
    for mine, other in ((found.best, again.best), (found.front, again.front)):
        for field in ("index", "seconds", "nbytes"):
            np.testing.assert_array_equal(getattr(mine, field), getattr(other, field), strict=True)
    assert (again.priced, again.least) == (3, math.inf)


def test_a_search_of_what_never_ends_is_resumed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = ranges._priced

    def endless(*given: Any) -> ranges.RangeResult:
        found = whole(*given)
        priced = (replace(p, seconds=np.full_like(p.seconds, math.inf)) for p in (found.best, found.front))
        return ranges.RangeResult(*priced, found.priced, found.slow, found.large, found.unfit, found.least)

    monkeypatch.setattr(ranges, "_priced", endless)
    first, again = (sp.search(GPT, BOX, 16, resume=tmp_path / "journal.json", certify=False) for _ in range(2))
    assert first.ranked and (again.ranked, again.pareto) == (first.ranked, first.pareto)

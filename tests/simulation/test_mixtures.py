"""Mixtures of experts as they are predicted: where experts are, how many tokens come, over which levels, and how."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from benchmarks.kernel_shapes import CLOCKS, held_out, priced, shapes

import shardplan as sp
from shardplan.errors import LayoutError, ShardplanError
from shardplan.hardware.topology import Topology
from shardplan.simulation.accuracy.step_rows import StepRow, read_steps
from shardplan.simulation.accuracy.subject import model_of, strategies_of
from shardplan.simulation.closed.axis_degrees import deal_degrees
from shardplan.simulation.closed.configurations import Configurations
from shardplan.simulation.closed.dispatch import Routing, expected_nodes, slots_over_mean
from shardplan.simulation.closed.form import ClosedForm
from shardplan.simulation.closed.local_sizes import LocalSizes
from shardplan.simulation.closed.machines import shipped_fit
from shardplan.simulation.closed.move_prices import MovePrices
from shardplan.simulation.closed.numbers import KernelsAsked, seconds_of
from shardplan.simulation.closed.parameters import Parameters
from shardplan.simulation.searching.fit import fit
from shardplan.strategy.held_cuts import EXPERTS_FROM, SHARING
from shardplan.strategy.model import Model
from shardplan.strategy.software import Software
from shardplan.strategy.strategy import Strategy
from shardplan.strategy.strategy_text import parse_strategy, strategy_text

ROWS = Path(__file__).parents[2] / "benchmarks" / "rows" / "open.jsonl"
SIZES: dict[str, Any] = {"layers": 2, "hidden": 512, "heads": 8, "kv_heads": 8, "ffn": 512, "seq": 2048, "vocab": 1000,
                         "experts": 32, "dense_layers": 0}  # fmt: skip
SMALL: dict[str, Any] = {"layers": 2, "hidden": 8, "heads": 4, "kv_heads": 4, "ffn": 8, "seq": 8, "vocab": 16,
                         "experts": 8, "experts_per_token": 2, "dense_layers": 0}  # fmt: skip
FOUR, TWO = Topology.load("dgx-h100", nodes=4), Topology.load("dgx-h100", nodes=2)


def mixture(**more: Any) -> Model:
    fields: dict[str, Any] = {**SIZES, "experts_per_token": 8, **more}
    return Model.load("moe", batch=2, precision="bf16", **fields)


def seconds(model: Model, strategy: Strategy, where: Topology, p: Parameters | None = None) -> tuple[float, float]:
    """Of the microbatches of a step those of movements over axes of experts, and all of them."""
    form = ClosedForm(model, where, p or Parameters(network=0.05, launch=1e-12))
    c = Configurations.of([strategy])
    every, without = (
        float(form.work_seconds(c, keeps)[0])
        for keeps in (lambda move: True, lambda move: not {*SHARING.values()} & {*move.axes})
    )
    return every - without, every


# Where a token's experts are


@pytest.mark.parametrize(
    ("routing", "nodes"),
    [(Routing(32, 8), 4), (Routing(32, 4, 8, 2), 4), (Routing(32, 4, 8, 2), 8), (Routing(32, 4, 8, 2), 16),
     (Routing(30, 3, 5, 2), 3), (Routing(24, 3), 5), (Routing(256, 8, 8, 4), 8), (Routing(16, 2, 4, 1), 1)],
    ids=str,
)  # fmt: skip
def test_how_many_nodes_have_experts_of_a_token(routing: Routing, nodes: int) -> None:
    """By trial: groups are drawn, then experts of theirs."""
    rng = np.random.default_rng(0)
    size, mine = routing.experts // routing.groups, math.ceil(routing.experts / nodes)
    hit = 0
    for _ in range(trials := 4000):
        kept = rng.permutation(routing.groups)[: routing.kept]
        among = (kept[:, None] * size + np.arange(size)).reshape(-1)
        hit += len({*(rng.permutation(among)[: routing.taken] // mine).tolist()})
    assert expected_nodes(routing, nodes) == pytest.approx(hit / trials, rel=0.02)


def test_no_token_goes_to_more_nodes_than_groups_are_kept() -> None:
    """DeepSeek-V3: 256 experts in 8 groups on 8 nodes, of which 4 are kept; without groups 5.3 nodes have one."""
    free, limited = expected_nodes(Routing(256, 8), 8), expected_nodes(Routing(256, 8, 8, 4), 8)
    assert limited < 4 < 5.2 < free < 5.3
    assert expected_nodes(Routing(256, 8, 8, 4), 1) == 1


def test_groups_of_experts_are_read_and_priced() -> None:
    """A config says them; tokens then go to fewer nodes, and exchanges take as much less."""
    found: dict[int, float] = {}
    for kept in (4, 1):
        model = mixture(router="sigmoid", router_groups=4, router_groups_kept=kept)
        one = Strategy(data=32, expert=32, microbatch=8, global_batch=256, dispatch="levels")
        found[kept] = seconds(model, one, FOUR)[0]
    assert found[1] / found[4] == pytest.approx(1 / expected_nodes(Routing(32, 8), 4), rel=0.1)
    deepseek = Model.load("deepseek-v3")
    routing = Routing.of(deepseek.fields, None)
    assert (routing.groups, routing.kept, routing.taken, routing.experts) == (8, 4, 8, 256)


def test_a_dispatch_is_as_it_is_said() -> None:
    """Directly every copy crosses nodes; by default whatever takes less time, over nodes and inside one."""
    plain = Strategy(data=32, expert=32, microbatch=8, global_batch=256)
    said = {kind: seconds(mixture(), replace(plain, dispatch=kind), FOUR)[0] for kind in (None, "direct", "levels")}
    assert said[None] == said["levels"] < 0.6 * said["direct"]
    inside = Strategy(data=8, expert=8, microbatch=8, global_batch=64)
    said = {kind: seconds(mixture(), replace(inside, dispatch=kind), Topology.load("dgx-h100", nodes=1))[0]
            for kind in (None, "direct", "levels")}  # fmt: skip
    assert said[None] == said["direct"] == pytest.approx(said["levels"])


def test_tokens_gathered_instead_of_slots_are_whole_where_slots_are() -> None:
    """Also where the sequence is cut over a tensor axis until it is dealt out to slots."""
    found: list[list[float]] = []
    for cut in (False, True):
        strategy = Strategy(data=4, tensor=2, expert=2, sequence_parallel=cut, global_batch=4)
        form = ClosedForm(mixture(experts_per_token=2), TWO, Parameters())
        (reading, _, _, cost), *_ = form.classes(Configurations.of([strategy]))
        sizes = LocalSizes(cost.degrees, np.array([1.0]), reading.batch, ("data", "expert"))
        moves = [m for m in reading.moves if m.made_of is not None and "expert" in m.axes]
        assert moves
        found.append([float(sizes.bytes(m.made_of)[0]) for m in moves if m.made_of is not None])
        tokens = 2 * SIZES["seq"] * SIZES["hidden"] * 2  # of a sequence on each of two devices, in bf16
        assert max(found[-1]) == tokens
    assert found[0] == found[1]


def test_tokens_of_a_context_go_as_copies_where_few_are_taken() -> None:
    """A job gathers the tokens of its context; frameworks send a copy to each expert, two of them to 8 devices."""
    one, where = Strategy(context=8, expert=8, microbatch=2, global_batch=2), Topology.load("dgx-h100", nodes=1)
    found: dict[int, list[float]] = {}
    for taken in (2, 16):
        form = ClosedForm(mixture(experts_per_token=taken), where, Parameters(launch=1e-12))
        (reading, _, _, cost), *_ = form.classes(Configurations.of([one]))
        sizes = LocalSizes(cost.degrees, np.array([2.0]), reading.batch, ("data", "expert"))
        prices = MovePrices(form.collectives(), sizes, {"expert_context": np.array([1.0])}, Routing(32, taken))
        moved = [m for m in reading.moves if m.summed != m.whole and sizes.bytes(m.value)[0] > 1e6 and m.run >= 0]
        tokens = [m for m in moved if len(m.value.extents) == 3]
        assert [(m.phase, m.summed) for m in tokens] == [(0, False), (0, True), (1, False)] and len(moved) == 4
        found[taken] = [float((prices.seconds(m) / prices.seconds(m._replace(attention=True)))[0]) for m in tokens]
    assert max(found[2]) < 0.5 and min(found[16]) == 1


# On which devices experts are


@pytest.mark.parametrize("first", EXPERTS_FROM)
@pytest.mark.parametrize(
    "said", [{"data": 8, "tensor": 2, "expert": 8}, {"data": 4, "context": 2, "tensor": 2, "expert": 4},
             {"data": 2, "context": 4, "tensor": 4, "expert": 8}, {"data": 4, "tensor": 8, "expert": 16},
             {"data": 8, "shard": 4, "zero": 1, "tensor": 2, "expert": 4}], ids=str
)  # fmt: skip
def test_the_closed_form_has_the_axes_of_the_job(first: Any, said: dict[str, Any]) -> None:
    model = mixture(kv_heads=4)
    strategy = Strategy(**said, expert_from=first)
    degrees = deal_degrees(model, Configurations.of([strategy, Strategy(data=8), strategy]))
    mine = {axis: int(d[2]) for axis, d in degrees.items() if d[2] > 1}
    assert mine == {axis: n for axis, n in strategy.axes(model).items() if axis != "replica"}
    assert all(int(d[1]) == 1 for axis, d in degrees.items() if axis != "data")


@pytest.mark.parametrize(
    ("said", "groups"),
    [
        # Megatron's own groups (`parallel_state.py`, order tp-cp-ep-dp-pp), of 16 devices.
        ({"data": 8, "tensor": 2, "expert": 8, "expert_from": "tensor"}, [[*range(8)], [*range(8, 16)]]),
        ({"data": 2, "context": 4, "tensor": 2, "expert": 8, "expert_from": "tensor"}, [[*range(8)], [*range(8, 16)]]),
        ({"data": 4, "context": 2, "tensor": 2, "expert": 4, "expert_from": "context"},
         [[k, k + 2, k + 4, k + 6] for k in (0, 1, 8, 9)]),
        ({"data": 8, "tensor": 2, "expert": 4}, [[k, k + 2, k + 4, k + 6] for k in (0, 1, 8, 9)]),
    ],
    ids=str,
)  # fmt: skip
def test_experts_are_on_neighbours(said: dict[str, Any], groups: list[list[int]]) -> None:
    model, strategy = mixture(), Strategy(**said)
    sizes = strategy.axes(model)
    ids = np.asarray(strategy.mesh(model).devices).reshape(tuple(sizes.values()))
    axes = [k for k, axis in enumerate(sizes) if axis in SHARING.values()]
    found = np.moveaxis(ids, axes, range(-len(axes), 0)).reshape(-1, said["expert"])
    assert sorted(sorted(row) for row in found.tolist()) == sorted(groups)


def test_neighbours_exchange_inside_a_node() -> None:
    """Of two nodes: experts over data replicas are on both, over neighbours each group is on one."""
    plain = Strategy(data=8, tensor=2, expert=8, microbatch=2, global_batch=16)
    far, near = (seconds(mixture(), replace(plain, expert_from=first), TWO)[0] for first in ("data", "tensor"))
    assert near < 0.5 * far


def test_a_job_with_experts_on_neighbours_computes_what_its_model_does() -> None:
    model = Model.load("moe", batch=2, optimizer="sgd", **SMALL)
    rng = np.random.default_rng(0)
    types = dict(model.program.inputs)
    given = {n: (rng.normal(size=x.shape) * 0.1).astype(np.float32) for n, x in types.items() if x.dtype == "f32"}
    given |= {n: rng.integers(0, 16, x.shape, dtype=np.int32) for n, x in types.items() if x.dtype == "i32"}
    both = Strategy(microbatch=2), Strategy(data=2, tensor=2, expert=2, expert_from="tensor", global_batch=2)
    losses = [float(sp.run(sp.partition(model, one), given)["loss"]) for one in both]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


# How many tokens come


def test_all_wait_for_the_fullest_device() -> None:
    """Products of experts, what they keep and what they exchange grow with it; all else, and the default, stay."""
    model = mixture(capacity_factor=1.0)
    plain = Strategy(data=8, expert=8, microbatch=4, global_batch=64)
    form = ClosedForm(model, Topology.load("dgx-h100", nodes=1), Parameters(launch=1e-12))
    c = Configurations.of([plain, replace(plain, imbalance=1.0), replace(plain, imbalance=1.5)])
    out = form(c)
    assert out.seconds[0] == out.seconds[1] < out.seconds[2]
    assert out.peak_bytes[0] == out.peak_bytes[1] < out.peak_bytes[2]
    (reading, _, _, cost), *_ = form.classes(c)
    assert cost.slots.tolist() == [[1.0, 1.0, 1.0], [1.0, 1.0, 1.5]]
    asked = KernelsAsked(form.topology.device, "bf16", "flash2")
    sizes = LocalSizes(cost.degrees, np.full(3, 4.0), reading.batch, ("data", "expert"), cost.slots)
    ratios = {bool(k.roles[0]): set[float]() for k in reading.kernels if k.roles and k.weighs and k.run >= 0}
    for k in reading.kernels:
        if k.roles and k.weighs and k.run >= 0:
            took = seconds_of(k, sizes, asked)
            ratios[bool(k.roles[0])].add(round(float(took[2] / took[0]), 2))
    assert ratios[False] == {1.0} and all(1.3 < x <= 1.5 for x in ratios[True])
    moved = [m for m in reading.moves if any(e.sharing for e in m.value.extents)]
    assert moved and all(sizes.bytes(m.value)[2] == 1.5 * sizes.bytes(m.value)[0] for m in moved)
    wide = Strategy(data=32, expert=32, microbatch=8, global_batch=256, dispatch="levels")
    exchanged = [seconds(model, replace(wide, imbalance=x), FOUR)[0] for x in (1.0, 1.5)]
    assert exchanged[1] == pytest.approx(1.5 * exchanged[0], rel=0.02)


def test_experts_work_on_slots_or_on_tokens_that_come() -> None:
    """Padded to a capacity all slots are work; a mixture that drops none works on what comes, whatever room it has."""
    one = Strategy(data=8, expert=8, microbatch=4, global_batch=64)
    where = Topology.load("dgx-h100", nodes=1)

    def of(factor: float, imbalance: float | None) -> tuple[float, float]:
        model = mixture(capacity_factor=factor, dropless=factor > 0)
        out = ClosedForm(model, where)(Configurations.of([replace(one, imbalance=imbalance)]))
        return float(out.seconds[0]), float(out.peak_bytes[0])

    assert of(1.25, 1.25) == pytest.approx(of(1.25, None), rel=0.03)
    assert of(1.25, None)[0] > of(1.25, 1.0)[0] == pytest.approx(of(1.0, None)[0], rel=1e-3)
    assert of(0.0, 1.2) == pytest.approx(of(2.0, 1.2), rel=0.02)
    assert slots_over_mean(mixture(capacity_factor=0.0).fields) == 4.0
    assert slots_over_mean(Model.load("gpt2").fields) == 1.0


@pytest.mark.parametrize(
    ("more", "said", "message"),
    [
        ({}, {"imbalance": 1.2}, "strategy: imbalance=1.2 of moe: its experts have slots for capacity_factor=1 of "
         "their even share, and drop the rest; legal is None, or a model with dropless=True or capacity_factor=0"),
        ({"dropless": True, "capacity_factor": 1.1}, {"imbalance": 1.2},
         "strategy: imbalance=1.2 of moe: its experts have slots for capacity_factor=1.1 of their even share, and a "
         "step with more raises; legal is 1 to 1.1, or a model with capacity_factor=0"),
        ({"capacity_factor": 0.0}, {"imbalance": 5.0}, "strategy: imbalance=5.0 of moe: one device has all tokens of "
         "those that share experts; legal is 1 to 4"),
        ({"capacity_factor": 0.0}, {"imbalance": 1.2, "expert": 1}, "strategy: imbalance=1.2 of moe: expert=1, and "
         "every device has all experts; legal is None, or expert of 2 and more"),
        ({}, {"dispatch": "levels", "expert": 1}, "strategy: dispatch='levels' of moe: expert=1, and every device has "
         "all experts; legal is None, or expert of 2 and more"),
        ({}, {"expert_from": "tensor"}, "strategy: expert_from='tensor' of moe: the same devices share experts, "
         "whoever is first; legal is 'data'"),
    ],
    ids=str,
)  # fmt: skip
def test_what_cannot_be_honoured_is_refused(more: dict[str, Any], said: dict[str, Any], message: str) -> None:
    asked: dict[str, Any] = {"data": 4, "expert": 4, **said}
    model, strategy = Model.load("moe", batch=2, **{**SMALL, **more}), Strategy(**asked)
    for fidelity in ("closed", "events", "ops"):
        with pytest.raises(LayoutError) as error:
            sp.simulate(model, strategy, Topology.load("nominal", devices=4), fidelity=fidelity)
        assert str(error.value) == message


def test_ops_have_balanced_experts_and_say_so() -> None:
    model = Model.load("moe", batch=2, capacity_factor=0.0, **SMALL)
    cases: list[tuple[dict[str, Any], str]] = [({"imbalance": 1.2}, "imbalance=1.2"),
                                               ({"dispatch": "levels"}, "dispatch='levels'")]  # fmt: skip
    for said, text in cases:
        with pytest.raises(ShardplanError) as error:
            sp.simulate(model, Strategy(data=4, expert=4, **said), Topology.load("nominal", devices=4), fidelity="ops")
        assert str(error.value) == (
            f"simulate: {text} at the fidelity 'ops', whose experts have as many tokens each, exchanged by the job's "
            "collectives, in one kernel; legal are 'closed' and 'events', or None"
        )


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ({"imbalance": 0.9}, "strategy: imbalance is 0.9; legal is a finite number of 1 or more"),
        ({"dispatch": "deepep"}, "strategy: dispatch 'deepep' is unknown; legal: direct, levels"),
        ({"expert_products": "fast"}, "strategy: expert_products 'fast' is unknown; legal: grouped, loop"),
        ({"expert_from": "pipeline"}, "strategy: expert_from 'pipeline' is unknown; legal: data, context, tensor"),
    ],
)  # fmt: skip
def test_other_values_are_refused(said: dict[str, Any], message: str) -> None:
    with pytest.raises(LayoutError) as error:
        Strategy(**said)
    assert str(error.value) == message


def test_a_line_says_them_all() -> None:
    text = "data=4 tensor=2 expert=4 expert_from=tensor imbalance=1.25 dispatch=levels expert_products=loop"
    one = parse_strategy(text)
    assert (one.expert_from, one.software) == ("tensor", Software(None, False, 0, 1.25, "levels", "loop"))
    assert strategy_text(one) == text
    assert Configurations.of([one]).strategy(0) == one


def test_a_search_takes_what_is_fixed() -> None:
    model = Model.load("moe", batch=2, capacity_factor=0.0, **SMALL)
    where = Topology.load("dgx-h100", nodes=1)
    where = replace(where, levels=(replace(where.levels[-1], size=4),))
    found = sp.search(model, where, global_batch=8, fixed={"imbalance": 1.5})
    assert found.best.strategy.software.imbalance == 1.5 and found.best.strategy.expert > 1
    small = replace(where, device=replace(where.device, memory=5e4))
    near = fit(model, Strategy(data=4, expert=4, global_batch=8, imbalance=1.5), small)
    assert near.changes and all(one.strategy.software.imbalance == 1.5 for one in near.changes)
    with pytest.raises(ShardplanError, match=r"^search: fixed imbalance=1\.5: its experts have slots for .* None, or"):
        sp.search(Model.load("moe", batch=2, **SMALL), where, global_batch=8, fixed={"imbalance": 1.5})


# How their products are issued


def test_products_in_a_loop_are_issued_one_by_one() -> None:
    """Alone, small ones take what their launches do, which a loop says and one kernel does not."""
    model, where = mixture(experts=256, seq=256, ffn=64), Topology.load("dgx-b200", nodes=1)
    one = Strategy(data=2, expert=2, global_batch=2)
    where = replace(where, levels=(replace(where.levels[-1], size=2),))
    form = ClosedForm(model, where, Parameters(launch=1e-5))
    grouped, loop = (form.seconds(Configurations.of([replace(one, expert_products=x)]))[0] for x in (None, "loop"))
    products = 3 * 3 * 128 * SIZES["layers"]  # three of an expert and layer, each once forward and twice back
    assert loop - grouped == pytest.approx(products * 1e-5, rel=0.15)
    measured = [s for s in shapes() if s.group == "grouped" and s.machine == "dgx-b200" and held_out(s.id)]
    launch, off = shipped_fit("dgx-b200").parameters.launch, {"grouped": list[float](), "loop": list[float]()}
    for s in measured:
        m, n, k = (float(x) for x in s.work.sides)
        count, alone = float(s.work.flops) / (2 * m * n * k), priced(s, 0.515, 125.5) + CLOCKS[s.machine]
        off["grouped"].append(abs(alone / s.seconds - 1))
        off["loop"].append(abs(max(alone, count * launch) / s.seconds - 1))
    assert np.mean(off["loop"]) < 0.14 < 0.17 < np.mean(off["grouped"])


# Rows


def test_a_row_says_it_as_frameworks_do() -> None:
    row = next(row for row in read_steps(ROWS) if row.model.name == "deepseek-v3")
    assert strategies_of(row)[0].expert_from == "data"  # alike, and so not said

    def told(**more: Any) -> StepRow:
        strategy = msgspec.structs.replace(row.strategy, data=row.strategy.data // 2, tensor=2, expert=32, **more)
        model = msgspec.structs.replace(row.model, router_groups=8, router_groups_kept=4)
        return msgspec.structs.replace(row, strategy=strategy, model=model)

    plain = strategies_of(told())[0]
    assert (plain.expert_from, plain.software.dispatch, plain.software.imbalance) == ("tensor", None, None)
    nemo = msgspec.structs.replace(told(), id="nemo_0000/0")
    nemo = msgspec.structs.replace(nemo, strategy=msgspec.structs.replace(nemo.strategy, context=2, data=64, expert=2))
    assert strategies_of(nemo)[0].expert_from == "context"
    for word, ours in (("deepep", "levels"), ("alltoall", "direct"), ("levels", "levels")):
        assert strategies_of(told(dispatch=word))[0].software.dispatch == ours
    found = strategies_of(told(imbalance=1.2, expert_from="data"))[0]
    assert (found.expert_from, found.software.imbalance) == ("data", 1.2)
    assert model_of(told().model).fields["router_groups_kept"] == 4
    assert json.loads(msgspec.json.encode(told(imbalance=1.2)))["strategy"]["imbalance"] == 1.2
    with pytest.raises(ShardplanError, match="dispatch 'pigeon' is not told here; legal: levels, deepep"):
        strategies_of(told(dispatch="pigeon"))

"""What moves once a step beside passes: followed by hand, and beside a simulation that folds nothing."""

from functools import cache
from typing import Any

import pytest

import shardplan as sp
from shardplan.core.pattern import Groups, Work
from shardplan.plans.pricing import fabric_of
from shardplan.simulation.jobs.compiled_job import CompiledJob, compile_job, turning_places
from shardplan.simulation.jobs.job_timeline import simulate_job
from shardplan.simulation.jobs.settings import Fold, JobSettings
from shardplan.simulation.jobs.timing import COMPUTE, Node, TimedLoop, TimedOp
from shardplan.strategy.partition.job import Job
from simulation.jobs.job_cases import CLUSTER, SIZES

LAYERS = SIZES["layers"]


@cache
def job(kind: str = "gpt", **said: Any) -> Job:
    return sp.partition(sp.Model.load(kind, precision="bf16", **SIZES), sp.Strategy(precision="bf16", **said))


def on_streams(one: Job) -> CompiledJob:
    return compile_job(one, fabric_of(CLUSTER, one.programs.meshes), JobSettings(launch=0.0), Fold())


def moving(nodes: tuple[Node, ...], times: int = 1) -> dict[str, float]:
    """Bytes of collectives on streams of parameters, by kind."""
    found: dict[str, float] = {}
    for node in nodes:
        inner = moving((*node.early, *node.late), node.times) if isinstance(node, TimedLoop) else {}
        if isinstance(node, TimedOp) and node.issued and ".parameters" in node.cost.stream:
            assert isinstance(node.cost.pattern, Groups)
            inner = {node.cost.kind: float(node.cost.pattern.nbytes.max()) * times}
        for kind, nbytes in inner.items():
            found[kind] = found.get(kind, 0.0) + nbytes
    return found


@pytest.mark.parametrize(("zero", "back"), [(0, "all_reduce"), (1, "reduce_scatter")])
def test_all_that_the_optimizer_moved_goes_beside_passes(zero: int, back: str) -> None:
    one = job(data=4, zero=zero, global_batch=8)
    found = on_streams(one)
    types = one.programs[0, "F"].types
    elements = sum(types[n].local_bytes() // types[n].itemsize for n in one.model.parameters if n in types)
    assert not any(isinstance(n, TimedOp) and n.issued and n.cost.stream != COMPUTE for n in found.maps[0, "OPT"].nodes)
    assert moving(found.ends[0, "B"].nodes) == {back: pytest.approx(4 * elements)}  # sums in f32
    gathered = {"all_gather": pytest.approx(2 * elements / 4)} if zero else {}
    assert moving(found.ends[0, "F"].nodes) == gathered
    assert moving(found.maps[0, "B"].nodes) == moving(found.maps[0, "F"].nodes) == {}


def test_a_layers_gradients_go_once_they_are_made_one_layer_behind_the_other() -> None:
    """Followed by hand: compute in order, and a line of reductions, each behind what it reads and the one before."""
    one = job(data=4, global_batch=8)
    found = on_streams(one)
    clock = line = 0.0
    loops = [node for node in found.ends[0, "B"].nodes if isinstance(node, TimedLoop)]
    assert loops and all(any(op.cost.stream != COMPUTE for op in node.late) for node in loops), "a layer at a time"
    for node in found.ends[0, "B"].nodes:
        runs = [(*node.early, *node.late)] * node.times if isinstance(node, TimedLoop) else [(node,)]
        for ops in runs:
            for op in ops:
                assert isinstance(op, TimedOp)
                if op.issued and op.cost.stream == COMPUTE:
                    clock += op.cost.seconds
                elif op.issued:
                    line = max(line, clock) + op.cost.seconds
    alone = found.maps[0, "B"].matrix.max()
    done = found.ends[0, "B"].matrix[len(found.streams) + 1].max()
    assert done == pytest.approx(max(clock, line), rel=1e-12)
    assert done > alone == pytest.approx(clock, rel=1e-12)


@pytest.mark.parametrize(
    "said", [{"zero": 1, "pipeline": 2, "global_batch": 40}, {"schedule": "zb-h1"}, {"context": 2}]
)
def test_folding_changes_nothing_of_it(said: dict[str, Any]) -> None:
    one = job(data=2, **{"global_batch": 8, **said})
    folded, whole = (simulate_job(one, CLUSTER, fold=f) for f in (True, False))
    assert folded.compiled.ends and folded.seconds == pytest.approx(whole.seconds, rel=1e-11)
    assert sum(i.seconds for i in folded.critical_path) == pytest.approx(folded.seconds)


def test_software_without_fused_attention_moves_it_behind() -> None:
    found = on_streams(job(data=4, zero=1, global_batch=8, attention="unfused"))
    assert not found.ends
    kinds = {n.cost.kind for n in found.maps[0, "OPT"].nodes if isinstance(n, TimedOp) and n.issued}
    assert {"reduce_scatter", "all_gather"} <= kinds


def test_the_first_forward_and_the_last_that_makes_gradients() -> None:
    row = ((0, "F", 0), (0, "F", 1), (0, "I", 0), (0, "B", 1), (0, "W", 0), (1, "B", 0), (1, "B", 1))
    assert turning_places(row) == {(0, "F"): 0, (0, "W"): 4, (1, "B"): 6}


def test_an_update_casts_what_it_makes() -> None:
    """Adam reads and writes three states of 4 bytes, reads a gradient of 4, and writes a parameter of 2."""
    one = job(global_batch=2)
    ops = [n for n in on_streams(one).maps[0, "OPT"].nodes if isinstance(n, TimedOp) and n.issued]
    types = one.programs[0, "F"].types
    elements = sum(types[n].local_bytes() // types[n].itemsize for n in one.model.parameters if n in types)
    nbytes = sum(float(op.cost.pattern.nbytes) for op in ops if isinstance(op.cost.pattern, Work))
    assert nbytes == pytest.approx((6 * 4 + 4 + 2) * elements, rel=1e-3)


def test_checkpoints_but_those_of_fsdp_run_to_the_layers_end() -> None:
    def products(said: dict[str, Any]) -> float:
        (loop,) = (n for n in on_streams(job(**said)).maps[0, "B"].nodes if isinstance(n, TimedLoop))
        works = [op.cost.pattern for op in loop.late if isinstance(op, TimedOp) and op.issued]
        return sum(float(w.flops) for w in works if isinstance(w, Work) and w.kind == "product")

    whole, needed = (
        products({"data": 2, "recompute": "full", "global_batch": 4, **said}) for said in ({}, {"fsdp": True})
    )
    tokens, hidden = SIZES["seq"], SIZES["hidden"]
    assert whole - needed == pytest.approx(2 * tokens * hidden * 4 * hidden)  # the second product of the MLP


def test_what_a_layer_sums_at_its_end_is_summed_again() -> None:
    """As large as what its backward pass sums: what is of cotangents is not of the layer computed again."""

    def sums(recompute: str) -> int:
        (loop,) = (
            n for n in on_streams(job(tensor=2, recompute=recompute)).maps[0, "B"].nodes if isinstance(n, TimedLoop)
        )
        return sum(isinstance(op, TimedOp) and op.cost.stream.startswith("tensor") for op in loop.late)

    assert sums("full") == sums("none") + 2  # behind attention, and behind the MLP


def test_groups_of_two_sizes_over_the_same_devices_stay_apart() -> None:
    """What layers gather over pairs and over fours lists the same devices in the same order: two collectives."""
    model = sp.Model.load(
        "llama", layers=2, hidden=2048, heads=16, kv_heads=16, ffn=8192, seq=2048, vocab=2048, precision="bf16"
    )
    strategy = sp.Strategy(data=8, context=4, zero=2, context_kind="ring", precision="bf16", global_batch=16)
    cluster = sp.Topology.load("dgx-h100", nodes=4)
    found = compile_job(sp.partition(model, strategy, cluster), fabric_of(cluster, []), JobSettings(launch=0.0), Fold())
    layers = next(node for node in found.ends[0, "F"].nodes if isinstance(node, TimedLoop))
    gathers = [n.cost.pattern.members.shape for n in layers.early if isinstance(n, TimedOp) and n.issued
               and ".parameters" in n.cost.stream and isinstance(n.cost.pattern, Groups)]  # fmt: skip
    assert len({groups for groups, _ in gathers}) > 1

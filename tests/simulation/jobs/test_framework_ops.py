"""Ops as frameworks run them, beside the program's order: streams, kernels that are one, and the bytes of a loss."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import pytest

import shardplan as sp
from shardplan.core.nested import as_nested
from shardplan.core.pattern import Work
from shardplan.plans.pricing import fabric_of
from shardplan.simulation.closed.numbers import LOSS_BYTES
from shardplan.simulation.closed.pass_overlap import CHANNELS
from shardplan.simulation.jobs.compiled_job import CompiledJob, compile_job
from shardplan.simulation.jobs.framework_ops import beside_collectives
from shardplan.simulation.jobs.job_timeline import simulate_job
from shardplan.simulation.jobs.settings import Fold, JobSettings
from shardplan.simulation.jobs.timing import COMPUTE, Node, TimedLoop, TimedOp
from shardplan.strategy.partition.job import Job
from simulation.jobs.job_cases import CLUSTER

HIDDEN, LAYERS, SEQ, VOCAB = 64, 4, 32, 96


@cache
def job(kind: str = "gpt", **said: Any) -> Job:
    sizes = {} if kind == "mlp" else {"heads": 8, "seq": SEQ, "vocab": VOCAB}
    return sp.partition(
        sp.Model.load(kind, layers=LAYERS, hidden=HIDDEN, precision="bf16", **sizes), sp.Strategy(**said)
    )


def on_streams(one: Job, *, frameworks: bool) -> CompiledJob:
    return compile_job(one, fabric_of(CLUSTER, one.programs.meshes), JobSettings(frameworks=frameworks), Fold())


def leaves(nodes: Sequence[Node]) -> Iterator[TimedOp]:
    for node in nodes:
        if isinstance(node, TimedLoop):
            yield from leaves((*node.early, *node.late))
        else:
            yield node


def loop_of(one: CompiledJob, kind: str) -> list[TimedOp]:
    """The ops of a layer."""
    (loop,) = (node for node in one.maps[0, kind].nodes if isinstance(node, TimedLoop))
    return list(leaves([loop]))


def work_bytes(op: TimedOp) -> float:
    return float(op.cost.pattern.nbytes) if isinstance(op.cost.pattern, Work) else 0.0


def test_gathers_of_parameters_and_sums_of_gradients_have_a_stream_of_their_own() -> None:
    one = job(data=4, tensor=2, fsdp=True, global_batch=8)
    for frameworks, own in ((False, ""), (True, ".parameters")):
        found = on_streams(one, frameworks=frameworks)
        moving = {op.cost.stream.split(", ")[0] for k in "FB" for op in loop_of(found, k) if op.cost.stream != COMPUTE}
        norms = set[str]() if frameworks else {"data.tensor"}  # their gradients: replicas have one stream
        assert moving == {"tensor", f"data{own}"} | norms  # activations; weights


def test_what_is_added_behind_a_reduction_is_one_kernel_on_its_stream() -> None:
    """Of gradients summed in bf16: cast to f32 and added to the sum, which reads 2 + 4 bytes and writes 4."""
    one = job("mlp", data=4, zero=2, global_batch=8, precision="bf16", reduce_dtype="bf16")
    plain, ours = (on_streams(one, frameworks=f) for f in (False, True))
    (reduced,) = (op for op in loop_of(ours, "B") if op.cost.kind in ("reduce_scatter", "together"))
    behind = [
        op for op in loop_of(ours, "B") if op.issued and op.cost.stream == reduced.cost.stream and op is not reduced
    ]
    elements = one.programs[0, "B"].types["next.gradient.layers.weight"].local_bytes() / 4 / LAYERS
    assert [work_bytes(op) for op in behind] == [10 * elements]
    before = [op for op in loop_of(plain, "B") if op.issued and op.cost.stream == COMPUTE]
    after = [op for op in loop_of(ours, "B") if op.issued and op.cost.stream == COMPUTE]
    assert len(before) - len(after) == 2  # the cast, and the addition


def test_a_bias_is_added_in_its_product() -> None:
    one = job(tensor=2)
    plain, ours = (loop_of(on_streams(one, frameworks=f), "F") for f in (False, True))
    (loop,) = (op for step in one.programs[0, "F"].steps if (op := as_nested(step.op)) is not None)
    biases = [s for s in loop.body.steps if s.operands[-1].endswith("_bias") and len(s.operands) == 2]
    alone = {s.results for s in biases if "a + b" in str(s.op)} - {s.results for s in biases if "gelu" in str(s.op)}
    quiet = {op.results for op in ours if not op.issued} - {op.results for op in plain if not op.issued}
    assert quiet == alone and len(alone) == 3  # of queries, keys and values; gelu(a + b) does more


@pytest.mark.parametrize("tensor", [1, 2])
@pytest.mark.parametrize("kind", ["F", "B"])
def test_a_loss_moves_what_that_of_a_framework_does(tensor: int, kind: str) -> None:
    one = job(tensor=tensor, microbatch=2)
    found = on_streams(one, frameworks=True)
    program = one.programs[0, kind]
    logits = (2, SEQ, VOCAB // tensor)
    ops = [op for op in found.maps[0, kind].nodes if isinstance(op, TimedOp) and op.issued]
    on_logits = [op for op in ops if logits in {program.types[n].local_shape(0) for n in (*op.reads, *op.results)}]
    moved = sum(work_bytes(op) for op in on_logits if getattr(op.cost.pattern, "kind", "") != "product")
    assert moved == pytest.approx(LOSS_BYTES[""][kind == "B"] * math.prod(logits))


def test_our_own_executors_are_simulated_in_the_order_of_programs() -> None:
    one = job(data=4, fsdp=True, global_batch=8)
    assert not simulate_job(one, CLUSTER, rendezvous=True).compiled.settings.frameworks
    assert simulate_job(one, CLUSTER).seconds < simulate_job(one, CLUSTER, rendezvous=True).seconds


def test_a_pass_begins_with_what_it_receives_and_sends_when_its_kernels_are_done() -> None:
    """What a checkpoint computes again comes behind the message; gradients of parameters come before the next one."""
    line = simulate_job(job(pipeline=2, recompute="full", global_batch=4), CLUSTER, launch=0.0)
    compiled, messages = line.compiled, line.opened.messages
    met, left = 0, 0
    for r, run in enumerate(line.swept.ranks):
        for i, (stage, kind, k) in enumerate(run.actions):
            ops = line.opened.ops(r, i)
            if k < 0 or not ops:
                continue
            arrived = [end for place, (_, end, *_) in messages.items()
                       if place.microbatch == k and place.number in compiled.taken[stage, kind]]  # fmt: skip
            sent = [start for start, _, *who in messages.values() if who == [r, i]]
            met += bool(arrived)
            left += bool(sent)
            assert min(op.start for op in ops) >= max(arrived, default=0.0) - line.opened.slack
            assert min(sent, default=1.0) >= max(op.end for op in ops) - line.opened.slack
    assert met > 0 and left > 0


def test_parameters_of_a_rank_that_waits_are_gathered_one_layer_ahead() -> None:
    """Those of its first layer are there when the message comes, those of the second are on their way from then on."""
    line = simulate_job(job(data=2, pipeline=2, fsdp=True, global_batch=4), CLUSTER, launch=0.0)
    arrived = min(end for place, (_, end, _, _) in line.opened.messages.items() if place.microbatch == 0)
    gathers = [op for op in line.opened.ops(1, 0) if ".parameters" in op.op.cost.stream and op.runs]
    first, second = (min(op.start for op in gathers if op.runs == (n,)) for n in range(2))
    assert first < arrived - line.opened.slack and second >= arrived - line.opened.slack


def test_folding_changes_nothing_of_it() -> None:
    one = job(data=2, pipeline=2, fsdp=True, global_batch=8)
    folded, whole = (simulate_job(one, CLUSTER, fold=f).seconds for f in (True, replace(Fold.nothing(), ranks=True)))
    assert folded == pytest.approx(whole, rel=1e-12)


def test_products_beside_moves_of_parameters_lose_the_processors_that_these_keep() -> None:
    found = on_streams(job(data=4, tensor=2, fsdp=True, global_batch=8), frameworks=True)
    nodes, processors, instant = found.maps[0, "F"].nodes, 2 * CHANNELS, 1e-10

    def on_all(op: TimedOp) -> bool:
        return isinstance(op.cost.pattern, Work) and op.cost.pattern.kind in ("product", "scores")

    same = zip(leaves(nodes), leaves(beside_collectives(nodes, 0)), strict=True)
    assert all(one.cost.seconds == two.cost.seconds for one, two in same)
    (before,), (after,) = (
        [node for node in some if isinstance(node, TimedLoop)]
        for some in (nodes, beside_collectives(nodes, processors))
    )
    ops, slower = list(leaves([before])), list(leaves([after]))
    moves = sum(op.cost.seconds for op in ops if ".parameters" in op.cost.stream)
    kernels = [(op.cost.seconds, on_all(op)) for op in ops if op.cost.stream == COMPUTE]
    # All kernels evenly, instant by instant, while the moves last: products at half their speed, the rest at its own.
    half = sum(seconds for seconds, product in kernels if product) / sum(seconds for seconds, _ in kernels) / 2
    taken, left = 0.0, sum(seconds for seconds, _ in kernels)
    while left > 0:
        left -= instant * (1 - half * (taken < moves))
        taken += instant
    assert moves > 0
    assert sum(op.cost.seconds for op in slower if op.cost.stream == COMPUTE) == pytest.approx(taken, rel=1e-3)
    for op, now in zip(ops, slower, strict=True):
        assert (now.cost.seconds > op.cost.seconds) == (on_all(op) and op.cost.seconds > 0)


def spans_of(kind: str, **said: Any) -> list[list[tuple[TimedOp, float, float]]]:
    """The ops that the passes of a microbatch of attention over a context consist of, and when each starts and ends."""
    model = sp.Model.load("gpt", layers=2, hidden=4096, heads=32, seq=4096, vocab=1024, precision="bf16")
    strategy = sp.Strategy(context=4, context_kind=kind, precision="bf16", **said)
    where = sp.Topology.load("dgx-h100", node=1, gpu=4)
    line = simulate_job(sp.partition(model, strategy, where), where)
    return [[(p.op, p.start, p.end) for p in line.opened.ops(0, k)] for k in range(2)]


def in_order(rows: list[tuple[TimedOp, float, float]]) -> Iterator[tuple[str, float, float]]:
    """Products, attention and movements of a context's activations, as they start."""
    for op, start, end in sorted(rows, key=lambda row: row[1]):
        kind = op.cost.pattern.kind if isinstance(op.cost.pattern, Work) else "move"
        if kind in ("product", "scores") or op.cost.stream == "context, gpu":
            yield kind, start, end


@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize(("kind", "into", "out"), [("gather", 2, 2), ("ulysses", 3, 3)])
def test_what_attention_moves_goes_beside_no_product(kind: str, into: int, out: int, recompute: str) -> None:
    """It is issued where attention is called, behind the products of queries, keys and values, and waited for there."""
    forward, back = (list(in_order(rows)) for rows in spans_of(kind, recompute=recompute))
    first = [row[0] for row in forward].index("scores")
    assert [row[0] for row in forward[first - into - 3 : first]] == ["product"] * 3 + ["move"] * into
    assert forward[first - into][1] >= max(end for what, _, end in forward[:first] if what == "product")
    last = len(back) - 1 - [row[0] for row in back][::-1].index("scores")
    assert [row[0] for row in back[last + 1 : last + out + 2]] == ["move"] * out + ["product"]
    assert back[last + out + 1][1] >= max(end for _, _, end in back[last + 1 : last + out + 1])

"""Closed forms of what a job holds and computes: nothing passes by being replicated, and what leaves is gone."""

import dataclasses
from functools import cache
from typing import Any, NamedTuple

import pytest

from shardplan import CertificateError, Job, Model, Strategy, partition
from shardplan.core.accounting import held_inside
from shardplan.core.nested import as_nested
from shardplan.core.ops.compute import computing
from shardplan.core.walk import program_leaves
from shardplan.strategy.partition.memory import certify, moments, saved_bytes, state_bytes

H, F, HEADS, KV, D, V, L, S = 1024, 2816, 16, 8, 64, 512, 8, 512  # hidden, ffn, heads and so on


def llama(**more: Any) -> Model:
    sizes: dict[str, Any] = {"layers": L, "hidden": H, "heads": HEADS, "kv_heads": KV, "ffn": F, "vocab": V,
                             "seq": S, "dtype": "bf16", **more}  # fmt: skip
    return Model.load("llama", **sizes)


@cache
def made(said: tuple[tuple[str, Any], ...]) -> Job:
    return partition(llama(), Strategy(**dict(said)))


def job(**said: Any) -> Job:
    return made(tuple(sorted(said.items())))


LAYER = {"cut": 2 * H * HEADS * D + 2 * H * KV * D + 3 * H * F, "whole": 2 * H}  # elements of a layer's parameters
ENDS = {"cut": 2 * V * H, "whole": H}


def parameters(tensor: int = 1, layers: float = L) -> float:
    return (layers * LAYER["cut"] + ENDS["cut"]) / tensor + layers * LAYER["whole"] + ENDS["whole"]


APART = {"bucket": 1, "prefetch": False}  # a layer's parameters are gathered, and its gradients reduced, one by one


def near(got: float, want: float, by: float = 0.01) -> bool:
    return abs(got - want) <= by * want


@pytest.mark.parametrize(
    ("said", "a_parameter"),
    [  # bytes: parameters and totals in bf16, two moments in f32
        ({"tensor": 4}, 12.0),
        ({"data": 4}, 12.0),
        ({"data": 4, "zero": 1}, 2 + 2 + 8 / 4),
        ({"data": 4, "zero": 2}, 2 + 2 / 4 + 8 / 4),
        ({"data": 4, "zero": 3}, 12 / 4),
        ({"data": 2, "context": 2, "fsdp": True}, 12 / 4),
        ({"data": 4, "shard": 2, "zero": 3}, 12 / 2),
        ({"data": 4, "gradient_dtype": "f32", "zero": 1}, 2 + 4 + 8 / 4),
        ({"tensor": 2, "sequence_parallel": True, "data": 2, "zero": 1}, 2 + 2 + 8 / 2),
    ],
    ids=str,
)
def test_state_is_dealt_out(said: dict[str, Any], a_parameter: float) -> None:
    assert near(state_bytes(job(**said), 0), a_parameter * parameters(said.get("tensor", 1)))


def saved(tensor: int = 1, sequence: bool = False, context: int = 1, microbatch: int = 1) -> float:
    """Bytes of a layer and microbatch: the residual stream, what is behind norms, q k v, attention, the MLP."""
    rows = microbatch * S / context
    stream = 4 * H / (tensor if sequence else 1)
    return 2 * rows * (stream + (2 * HEADS * D + 2 * KV * D + 3 * F) / tensor)


@pytest.mark.parametrize(
    ("said", "more"),
    [
        ({"tensor": 4}, {"tensor": 4}),
        ({"tensor": 4, "sequence_parallel": True}, {"tensor": 4, "sequence": True}),
        ({"context": 4}, {"context": 4}),
        ({"data": 4, "zero": 3, "microbatch": 2}, {"microbatch": 2}),
        ({"tensor": 2, "context": 2}, {"tensor": 2, "context": 2}),
    ],
    ids=str,
)
def test_what_a_microbatch_saves(said: dict[str, Any], more: dict[str, Any]) -> None:
    rows = said.get("microbatch", 1) * S / said.get("context", 1)
    parts = said.get("tensor", 1)
    ends = 2 * rows * (2 * H / (parts if said.get("sequence_parallel") else 1) + V / parts)  # last layer, norm, logits
    assert near(saved_bytes(job(**said), 0), L * saved(**more) + ends, 0.02)


def test_what_is_kept_is_saved() -> None:
    """Of FSDP all parameters but the embedding, which no gradient reads; of a sequence what its layers gather."""
    gathered = 2 * (L * (LAYER["cut"] + LAYER["whole"]) + V * H + H)
    said: dict[str, Any] = {"data": 4, "fsdp": True}
    plain, kept = job(**said), job(**said, zero=2)
    once = sum(kept.programs[0, "F"].types[o].local_bytes() for o in kept.saved_once(0))
    assert near(once, gathered) and not plain.saved_once(0)
    assert near(saved_bytes(kept, 0), L * saved() + 2 * S * (2 * H + V))
    assert state_bytes(kept, 0) == state_bytes(plain, 0)
    assert max(m.after for m in moments(kept, 0)) == state_bytes(kept, 0) + saved_bytes(kept, 0) + once
    more = {"pipeline": 2, "global_batch": 8}
    flight = job(data=4, fsdp=True, zero=2, **more)
    once = sum(flight.programs[0, "F"].types[o].local_bytes() for o in flight.saved_once(0))
    assert near(max(m.after for m in moments(flight, 0)) - state_bytes(flight, 0), 2 * saved_bytes(flight, 0) + once)
    said = {"tensor": 4, "sequence_parallel": True}
    plain, kept = job(**said), job(**said, keep="sequence")
    norms = 2 * (2 * L + 1) * S * H * 3 / 4  # what the norms make, whole and not a quarter of it
    assert near(saved_bytes(kept, 0) - saved_bytes(plain, 0), norms)


def test_a_layer_that_is_gathered_early_is_held() -> None:
    layer = 2 * (LAYER["cut"] + LAYER["whole"])
    plain, early = (job(data=4, fsdp=True, prefetch=on) for on in (False, None))
    for kind in ("F", "B"):
        (op,) = (op for step in early.programs[0, kind].steps if (op := as_nested(step.op)))
        assert held_inside(op.body, op.carried_count, op.ahead) - held_inside(op.body, op.carried_count) == layer
    for less, more in zip(moments(plain, 0), moments(early, 0), strict=True):
        assert less.during <= more.during <= less.during + 2 * layer and less.after == more.after
    assert [m.during for m in moments(early, 0)][1] >= state_bytes(early, 0) + 2 * layer


def test_totals_that_are_replaced_are_there_once() -> None:
    """Of one microbatch: B makes the totals that lie in the state, without reading them."""
    for found in (job(tensor=4), job(tensor=4, global_batch=2)):
        during = {m.action: m.during for m in moments(found, 0)}
        assert during["0B0"] < state_bytes(found, 0) + 1.5 * saved_bytes(found, 0)


def ends(tensor: int = 1, sequence: bool = False, context: int = 1, microbatch: int = 1) -> float:
    """Bytes of what is saved behind the layers: the last one's, the norm's, the logits."""
    return 2 * microbatch * S / context * (2 * H / (tensor if sequence else 1) + V / tensor)


TENSOR, SEQUENCE, CONTEXT = {"tensor": 4}, {"tensor": 4, "sequence": True}, {"context": 4}


@pytest.mark.parametrize(
    ("said", "a_parameter", "more"),
    [
        ({"data": 4, "global_batch": 8}, 12, {}),
        ({"tensor": 4}, 12, TENSOR),
        ({"tensor": 4, "sequence_parallel": True}, 12, SEQUENCE),
        ({"context": 4}, 12, CONTEXT),
        ({"context": 4, "context_kind": "gather"}, 12, CONTEXT),
        ({"data": 4, "zero": 1, "global_batch": 8}, 2 + 2 + 8 / 4, {}),
        ({"data": 4, "zero": 2, "global_batch": 8, "bucket": 1}, 2 + 2 / 4 + 8 / 4, {}),
        ({"data": 4, "zero": 3, "global_batch": 8, **APART}, 12 / 4, {}),
        ({"data": 2, "context": 2, "fsdp": True, **APART}, 12 / 4, {"context": 2}),
        ({"data": 4, "shard": 2, "fsdp": True, **APART}, 12 / 2, {}),
        ({"tensor": 2, "sequence_parallel": True, "data": 2, "zero": 1}, 8, {"tensor": 2, "sequence": True}),
        ({"data": 2, "tensor": 2, "precision": "bf16"}, 2 + 4 + 12, {"tensor": 2}),
    ],
    ids=str,
)  # fmt: skip
def test_the_peak_of_a_stage(said: dict[str, Any], a_parameter: float, more: dict[str, Any]) -> None:
    """State, what a microbatch saves, and one layer's gradients before they go where totals are."""
    tensor = more.get("tensor", 1)
    layer = (4 if "precision" in said else 2) * (LAYER["cut"] / tensor + LAYER["whole"])
    held = a_parameter * parameters(tensor) + L * saved(**more) + ends(**more)
    assert near(max(m.during for m in moments(job(**said), 0)), held + layer)


@pytest.mark.parametrize("name", ["1f1b", "gpipe"])
def test_the_peak_of_every_stage_of_a_pipeline(name: str) -> None:
    found, layer = job(pipeline=4, global_batch=8, schedule=name), 2 * (LAYER["cut"] + LAYER["whole"])
    for rank in range(4):
        first, last = V * H * (rank == 0), (V * H + H) * (rank == 3)
        state = 12 * (L / 4 * (LAYER["cut"] + LAYER["whole"]) + first + last)
        many = min(4 - rank, 8) if name == "1f1b" else 8
        one = L / 4 * saved() + (ends() if rank == 3 else 0)
        assert near(max(m.during for m in moments(found, rank)), state + many * one + layer, 0.012)


@pytest.mark.parametrize(
    ("recompute", "layer"),
    [("full", 2 * S * H), ("selective", saved(2) - 2 * S * HEADS * D / 2)],
)
def test_the_peak_where_layers_are_made_again(recompute: str, layer: float) -> None:
    """Of a layer its input is kept, or all but what attention makes; one layer is there as it was without."""
    most = max(m.during for m in moments(job(tensor=2, recompute=recompute), 0))
    gradients = 2 * (LAYER["cut"] / 2 + LAYER["whole"])
    assert near(most, 12 * parameters(2) + L * layer + ends(2) + gradients)


def test_experts_are_dealt_out_in_peak_and_operations() -> None:
    model = Model.load("moe", layers=4, hidden=512, heads=8, kv_heads=8, ffn=1024, seq=256, vocab=512, experts=8,
                       experts_per_token=2, dtype="bf16")  # fmt: skip
    experts = sum(p.size for name, p in model.parameters.items() if "expert_" in name)
    rest = model.parameter_count - experts
    assert experts > 8 * rest
    for degree in (2, 4):
        found = partition(model, Strategy(data=4, expert=degree))
        assert near(state_bytes(found, 0), 12 * (rest + experts / degree))
        most = max(m.during for m in moments(found, 0))
        assert near(most, 12 * (rest + experts / degree) + saved_bytes(found, 0) + 2 * experts / degree / 4, 0.02)
    one = passes(partition(model.resize(batch=4), Strategy(microbatch=4)))
    assert near(passes(found) * 4, one)


def test_what_is_made_again_is_not_kept() -> None:
    whole, full = job(tensor=2), job(tensor=2, recompute="full")
    ends = 2 * S * (2 * H + V / 2)
    assert near(saved_bytes(full, 0), L * 2 * S * H + ends, 0.02)
    most = [max(m.during for m in moments(j, 0)) - state_bytes(j, 0) for j in (whole, full)]
    assert most[1] < 0.45 * most[0]
    # All of a layer's products are made again but the last one, which nothing reads.
    again = L * (2 * S * (LAYER["cut"] - H * F) + 2 * HEADS * D * S * S) / 2
    assert near(passes(full), passes(whole) + again)


def passes(found: Job) -> float:
    """The operations of a device of every stage, forward and backward."""
    return found.strategy.microbatches * sum(
        times * op.flops(*types)
        for (_, kind), p in found.programs.items()
        for times, one, types in program_leaves(p)
        if kind != "OPT" and (op := computing(one))
    )


@pytest.mark.parametrize(
    "said",
    [{"tensor": 4}, {"data": 4}, {"context": 4}, {"tensor": 2, "data": 2, "zero": 1}, {"data": 4, "fsdp": True},
     {"tensor": 2, "context": 2, "sequence_parallel": True}, {"pipeline": 4, "global_batch": 4},
     {"context": 4, "context_kind": "zigzag"}],
    ids=str,
)  # fmt: skip
def test_operations_are_dealt_out(said: dict[str, Any]) -> None:
    """Products of a step: 6 a parameter and token; attention's of half the pairs, and of its backward once more."""
    found = job(**said)
    sequences = found.strategy.sequences
    products = 6 * (L * LAYER["cut"] + V * H) * S * sequences
    attention = L * (2 + 5) * HEADS * D * S * S * sequences
    share = found.strategy.devices // found.strategy.pipeline
    assert near(passes(found) * share, products + attention, 0.02)


def test_a_ring_holds_two_tiles_and_saves_a_number_a_query() -> None:
    """Of keys and values, in bf16; what is folded and the log-sum-exp are in f32. Its last device has 7 of 16 parts."""
    ring, gathered = (job(context=4, context_kind=kind) for kind in ("ring", "gather"))
    rows = S // 4
    tile, queries = 2 * 2 * KV * D * rows, HEADS * rows
    assert saved_bytes(ring, 0) == saved_bytes(gathered, 0) + L * 4 * queries
    found = {kind: body_of(ring, kind) for kind in "FB"}
    assert found["F"].staging == 2 * tile + 4 * D * queries
    assert found["B"].staging == 2 * tile + 3 * 2 * tile + 4 * D * queries  # sums of cotangents, in f32
    assert found["F"].received == 3 * tile and found["B"].received == 3 * tile + 4 * 2 * tile
    products = 6 * (L * LAYER["cut"] + V * H) * S
    attention = L * (2 + 5) * HEADS * D * S * S
    assert near(passes(ring), products / 4 + attention * 7 / 16, 0.02)


class Round(NamedTuple):
    """Of an op that goes round: bytes."""

    staging: int
    received: int


def body_of(found: Job, kind: str) -> Round:
    """Of the op of a program that computes and receives something."""
    ((op, types),) = [
        (op, types)
        for _, op, types in program_leaves(found.programs[0, kind])
        if computing(op) and op.received_bytes(*types).any()
    ]
    return Round(op.staging(*types), int(op.received_bytes(*types).max()))


@pytest.mark.parametrize("name", ["1f1b", "gpipe"])
def test_a_schedule_says_how_many_microbatches_are_in_flight(name: str) -> None:
    found = job(pipeline=4, global_batch=8, schedule=name)
    for rank in range(4):
        many = 4 - rank if name == "1f1b" else 8
        after = max(m.after for m in moments(found, rank))
        assert after == state_bytes(found, rank) + many * saved_bytes(found, rank)
    assert [m.after for m in moments(found, 3)][-1] == state_bytes(found, 3)


def test_what_is_offloaded_leaves_and_returns() -> None:
    said = {"global_batch": 4, "schedule": "gpipe", "pipeline": 2}
    plain, away = job(**said), job(**said, offload=True)
    one, state = saved_bytes(away, 0), state_bytes(away, 0)
    curve = {m.action: m for m in moments(away, 0)}
    before = [*curve]
    for k in range(3):
        at = before.index(f"0OFFLOAD{k}")
        assert curve[f"0OFFLOAD{k}"].after == curve[before[at - 1]].after - one
        assert curve[f"0RELOAD{k}"].after == curve[before[before.index(f"0RELOAD{k}") - 1]].after + one
    assert max(m.after for m in curve.values()) <= state + 2 * one
    assert max(m.after for m in moments(plain, 0)) == state + 4 * one


def test_a_certificate_is_derived_again() -> None:
    found = certify(job(tensor=2, data=2, zero=1, global_batch=4))
    found.check()
    assert set(found.axis_bytes) == {("tensor",), ("data",)}
    with pytest.raises(CertificateError, match="does not say"):
        dataclasses.replace(found, peak_bytes=(1,)).check()
    with pytest.raises(CertificateError, match="rank 0 of the job holds"):
        certify(found.job, limit=found.peak_bytes[0] - 1).check()

"""The law of strategies: a job computes what the model does, in every step; and what is found and not written."""

from collections import Counter
from typing import Any

import numpy as np
import pytest

from shardplan import (
    Job,
    LayoutError,
    Layouts,
    ScheduleError,
    ShardplanError,
    Strategy,
    Topology,
    TopologyError,
    partition,
)
from shardplan.core.nested import as_nested
from shardplan.core.ops.compute import computing
from shardplan.core.walk import program_leaves, turns
from shardplan.plans.pricing import fabric_of
from shardplan.strategy.partition.memory import certify
from shardplan.strategy.partition.prices import Prices
from strategy.jobs import apart, arrays, by_name, model, stepped, wrong

ALONE: dict[str, dict[str, Any]] = {
    "data": {"data": 2},
    "microbatches": {"data": 2, "global_batch": 6},
    "uneven": {"data": 2, "global_batch": 5},
    "tensor": {"tensor": 2},
    "sequence": {"tensor": 2, "sequence_parallel": True},
    "zero 1": {"data": 2, "zero": 1, "global_batch": 4},
    "zero 2": {"data": 2, "zero": 2, "global_batch": 4},
    "zero 3": {"data": 2, "zero": 3},
    "fsdp": {"data": 2, "context": 2, "fsdp": True},
    "part": {"data": 4, "shard": 2, "fsdp": True},
    "part, kept": {"data": 4, "shard": 2, "fsdp": True, "zero": 2, "recompute": "full", "global_batch": 8},
    "ulysses": {"context": 2},
    "gathered keys": {"context": 2, "context_kind": "gather"},
    "ring": {"context": 2, "context_kind": "ring"},
    "uneven ring": {"context": 3, "context_kind": "ring"},
    "zigzag": {"context": 2, "context_kind": "zigzag", "recompute": "full"},
    "pipeline": {"pipeline": 3, "global_batch": 4},
    "gpipe": {"pipeline": 2, "global_batch": 3, "schedule": "gpipe"},
    "chunks": {"pipeline": 1, "interleave": 1, "global_batch": 2},
    "bucket": {"data": 2, "zero": 1, "bucket": "1 GB", "global_batch": 4},
    "kept": {"data": 2, "fsdp": True, "zero": 2, "global_batch": 4},
    "sequence kept": {"tensor": 2, "sequence_parallel": True, "keep": "sequence"},
    "bucket in layers": {"data": 2, "fsdp": True, "bucket": "1 kB"},
    "prefetch": {"data": 2, "fsdp": True, "prefetch": True},
    "names": {"tensor": 2, "recompute": ("attention", "rms_norm")},
    "full": {"tensor": 2, "recompute": "full"},
    "selective": {"tensor": 2, "recompute": "selective"},
}
THREE: dict[str, dict[str, Any]] = {
    "tensor, data, pipeline": {"tensor": 2, "data": 2, "pipeline": 2, "global_batch": 4},
    "sequence, data, zero 1": {"tensor": 2, "data": 3, "sequence_parallel": True, "zero": 1, "global_batch": 6},
    "context, data, fsdp": {"context": 2, "data": 2, "fsdp": True, "tensor": 2, "context_kind": "gather"},
    "pipeline, zero 2, recompute": {"pipeline": 3, "data": 2, "zero": 2, "recompute": "full", "global_batch": 4},
    "pipeline, sequence, fsdp": {
        "pipeline": 2,
        "tensor": 2,
        "sequence_parallel": True,
        "data": 2,
        "fsdp": True,
        "global_batch": 4,
    },
    "context, tensor, uneven": {"context": 2, "tensor": 2, "context_kind": "gather", "data": 2, "global_batch": 3},
    "tensor, part, microbatches": {"tensor": 3, "data": 4, "shard": 2, "zero": 3, "global_batch": 8},
    "context, pipeline, zero 1": {"context": 2, "pipeline": 2, "data": 2, "zero": 1, "global_batch": 4},
    "ring, data, tensor": {"context": 2, "context_kind": "ring", "data": 2, "tensor": 4},
    "ring, pipeline, zero 1": {
        "context": 2,
        "context_kind": "ring",
        "pipeline": 2,
        "data": 2,
        "zero": 1,
        "global_batch": 4,
    },
    "zigzag, tensor, fsdp": {"context": 3, "context_kind": "zigzag", "tensor": 2, "data": 2, "fsdp": True},
    "pipeline, sequence, fsdp, kept": {
        "pipeline": 2,
        "tensor": 2,
        "sequence_parallel": True,
        "data": 2,
        "fsdp": True,
        "zero": 2,
        "keep": "sequence",
        "global_batch": 4,
    },
    "context, tensor, fsdp, kept": {
        "context": 2,
        "context_kind": "gather",
        "tensor": 2,
        "data": 2,
        "fsdp": True,
        "keep": ("sequence", "head", "layers.[qkv]"),
        "bucket": "1 kB",
        "prefetch": True,
    },
    "pipeline, tensor, fsdp, prefetch": {
        "pipeline": 2,
        "tensor": 2,
        "data": 2,
        "fsdp": True,
        "bucket": "1 kB",
        "prefetch": True,
        "global_batch": 4,
    },
}


@pytest.mark.parametrize("name", ALONE)
def test_a_strategy_alone_computes_what_the_model_does(name: str) -> None:
    assert wrong(model("llama"), Strategy(**ALONE[name])) == []


@pytest.mark.parametrize("name", THREE)
def test_three_together_compute_what_the_model_does(name: str) -> None:
    assert wrong(model("llama"), Strategy(**THREE[name])) == []


OTHERS: list[tuple[str, dict[str, Any]]] = [
    ("odd", {"tensor": 2, "data": 3, "global_batch": 12}),
    ("odd", {"tensor": 2, "data": 3, "sequence_parallel": True, "fsdp": True}),
    ("odd", {"context": 2, "data": 3, "zero": 2, "pipeline": 2, "global_batch": 6}),
    ("odd", {"context": 4, "context_kind": "ring", "data": 2, "global_batch": 3}),
    ("odd", {"context": 3, "context_kind": "zigzag", "tensor": 2, "pipeline": 2, "global_batch": 2}),
    ("gpt", {"context": 4, "context_kind": "ring", "tensor": 2, "sequence_parallel": True}),
    ("gpt", {"context": 2, "context_kind": "zigzag", "pipeline": 2, "data": 2, "zero": 2, "global_batch": 4}),
    ("moe", {"context": 2, "context_kind": "ring", "data": 2, "expert": 2}),
    ("gpt", {"tensor": 2, "data": 2, "zero": 2, "global_batch": 4}),
    ("gpt", {"pipeline": 3, "tensor": 4, "sequence_parallel": True, "global_batch": 4}),
    ("gpt", {"pipeline": 2, "data": 2, "zero": 2, "global_batch": 4}),
    ("moe", {"data": 2, "expert": 2}),
    ("moe", {"data": 4, "expert": 2, "tensor": 2, "sequence_parallel": True, "zero": 1}),
    ("moe", {"data": 4, "expert": 4, "fsdp": True, "recompute": "selective"}),
    ("moe", {"data": 2, "expert": 2, "context": 2, "pipeline": 2, "global_batch": 4}),
    ("moe", {"context": 2, "expert": 2}),
    ("moe", {"tensor": 4, "expert": 4}),
    ("moe", {"data": 2, "tensor": 2, "expert": 4, "sequence_parallel": True, "zero": 1}),
    ("mlp", {"tensor": 2, "data": 2, "microbatch": 2}),
    ("mlp", {"data": 2, "fsdp": True, "pipeline": 2, "global_batch": 8}),
    ("dlrm", {"data": 4, "expert": 4}),
    ("dlrm", {"data": 2, "tensor": 2, "zero": 1}),
    ("dlrm", {"data": 4, "expert": 2, "fsdp": True}),
    ("dlrm", {"data": 2, "tensor": 2, "expert": 4, "zero": 1}),
]


@pytest.mark.parametrize(("name", "said"), OTHERS, ids=str)
def test_every_family_computes_what_its_model_does(name: str, said: dict[str, Any]) -> None:
    assert wrong(model(name), Strategy(**said)) == []


def test_key_value_heads_below_the_degree_leave_no_device_idle() -> None:
    found = model("llama", heads=8, kv_heads=2, hidden=16, head_dim=2)
    strategy = Strategy(tensor=8)
    assert strategy.axes(found) == {"tensor": 2, "group": 4}
    assert wrong(found, strategy) == []
    job = partition(found, strategy)
    for p in job.programs.values():
        for _, op, types in program_leaves(p):
            busy = [x for x in (op.infer(*types)) if "kv_heads" in str(x)]
            assert not busy
    assert str(job.state["layers.q"]) == "f64[3, 16, 2@tensor, 4@group, 2]"
    assert str(job.state["layers.k"]) == "f64[3, 16, 2@tensor, 2]"


@pytest.mark.parametrize(
    ("said", "axes", "expert", "dense"),
    [
        ({"data": 4, "expert": 2}, {"data": 2, "expert": 2}, "[2, 4@expert, 16, 10]", "[1, 16, 10]"),
        ({"context": 2, "expert": 2}, {"expert_context": 2}, "[2, 4@expert_context, 16, 10]", "[1, 16, 10]"),
        (
            {"data": 2, "tensor": 2, "expert": 4},
            {"expert": 2, "expert_tensor": 2},
            "[2, 4@(expert,expert_tensor), 16, 10]",
            "[1, 16, 10@expert_tensor]",
        ),
        (
            {"data": 2, "tensor": 4, "expert": 4},
            {"expert": 2, "expert_tensor": 2, "group": 2},
            "[2, 4@(expert,expert_tensor), 16, 10@group]",
            "[1, 16, 10@(expert_tensor,group)]",
        ),
    ],
    ids=str,
)
def test_experts_take_data_then_context_then_tensor(
    said: dict[str, Any], axes: dict[str, int], expert: str, dense: str
) -> None:
    found, strategy = model("moe"), Strategy(**said)
    assert strategy.axes(found) == axes
    mesh, layouts = strategy.mesh(found), strategy.layouts(found)
    names = {"layers.expert_up": expert, "dense.up": dense}
    for name, text in names.items():
        t = found.program.types[name]
        assert str(t.with_layout(layouts.held_layout(name, found.dims[name], mesh), mesh)) == f"f64{text}"
    assert "expert" not in str(strategy.axes(model("llama")))


def test_the_job_run_by_hand_is_the_models() -> None:
    """One stage, programs in the order that the schedule says."""
    from shardplan.core.reference import collect, distribute, run_reference

    found, strategy = model("mlp"), Strategy(data=2, global_batch=4)
    job, big = partition(found, strategy), found.resize(batch=4)
    given = arrays(big, big.program)
    values = {n: distribute(given[n], t) for n, t in job.state.items() if n in given and n not in job.batch}
    values |= {n: distribute(np.zeros(t.shape), t) for n, t in job.state.items() if n.startswith("gradient.")}
    loss, saved = 0.0, {0: dict[str, Any](), 1: dict[str, Any]()}
    for action in job.schedule.ranks[0]:
        assert action is not None and action.microbatch is not None
        k, p = action.microbatch, job.programs[0, action.kind]
        rows = {n: distribute(given[n][2 * k : 2 * k + 2], dict(p.inputs)[n]) for n in job.batch if n in p.types}
        out = run_reference(p, [(values | saved[k] | rows)[n] for n, _ in p.inputs])
        made = dict(zip(p.outputs, out, strict=True))
        saved[k] |= {n: x for n, x in made.items() if n.startswith("saved.")}
        values |= {n.removeprefix("next."): x for n, x in made.items() if n.startswith("next.")}
        loss += float(made["loss"][0]) if "loss" in made else 0.0
    p = job.programs[0, "OPT"]
    out = dict(zip(p.outputs, run_reference(p, [values[n] for n, _ in p.inputs]), strict=True))
    want, whole = by_name(big.program, given), stepped(job, given)
    got = collect(out["next.layers.weight"], p.types["next.layers.weight"])
    assert apart(np.asarray(loss), want["loss"]) < 1e-12 and apart(got, want["next.layers.weight"]) < 1e-12
    assert np.array_equal(got, whole["layers.weight"])


DECODES = [
    {"tensor": 2},
    {"data": 2},
    {"data": 2, "tensor": 4},
    {"pipeline": 2},
    {"tensor": 2, "pipeline": 3, "data": 2},
    {"data": 2, "fsdp": True},
    {"tensor": 3},
    {"context": 2},
]


@pytest.mark.parametrize("said", DECODES, ids=str)
def test_prefill_and_decode_are_the_whole_sequence(said: dict[str, Any]) -> None:
    strategy, prompt, new = Strategy(**said), 4, 2
    batch = {"training": False, "batch": strategy.sequences}
    prefill, whole = model("llama", cache=prompt + new, **batch, seq=prompt), model("llama", **batch, seq=prompt + new)
    rng = np.random.default_rng(1)
    held = {n: rng.normal(0, 0.3, p.shape) for n, p in prefill.parameters.items()}
    tokens = rng.integers(0, 32, (strategy.sequences, prompt + new)).astype(np.int32)
    want = by_name(whole.program, {**held, "tokens": tokens})["logits"]
    state, got = dict(prefill.state()), list[np.ndarray]()
    for at, one in [(0, prefill), *((prompt + k, prefill.resize(seq=1)) for k in range(new))]:
        part = tokens[:, at : at + (prompt if at == 0 else 1)]
        out = stepped(partition(one, strategy), {**held, **state, "tokens": part})
        state = {n: out[n] for n in state}
        got.append(out["logits"])
    assert apart(np.concatenate(got, 1), want) < 1e-9


def test_a_cache_of_several_microbatches_is_refused() -> None:
    """They would all write into one."""
    found = model("llama", cache=6, training=False, batch=4, seq=4)
    with pytest.raises(LayoutError, match=r"microbatches=4 of a model that keeps layers\.key_cache of its sequences"):
        partition(found, Strategy(pipeline=2, global_batch=4))


@pytest.mark.parametrize(
    ("name", "fields", "kind", "text"),
    [
        (
            "llama",
            {"training": False, "cache": 8, "seq": 4},
            "ring",
            "context_kind='ring': no op of the model goes round; legal are models with attention of a whole sequence "
            "to itself, and no cache; for others ulysses and gather",
        ),
        ("llama", {"training": False}, "zigzag",
         "context_kind='zigzag' of a forward pass, whose results are in order; legal is ring"),
        ("moe", {}, "zigzag", "Model.load: a moe of zigzag=2; legal is 1"),
        ("mlp", {}, "ring", "strategy: context=2 of mlp: it has no positions; legal is 1"),
    ],
)  # fmt: skip
def test_what_cannot_go_round_is_said_in_a_line(name: str, fields: dict[str, Any], kind: Any, text: str) -> None:
    with pytest.raises(ShardplanError) as caught:
        partition(model(name, **fields), Strategy(context=2, context_kind=kind))
    assert str(caught.value) == text


def test_a_forward_pass_goes_round() -> None:
    found, strategy = model("llama", training=False, seq=7), Strategy(context=3, context_kind="ring")
    given = arrays(found, found.program)
    assert apart(stepped(partition(found, strategy), given)["logits"], by_name(found.program, given)["logits"]) < 1e-12


def moves(job: Job, kind: str, layers: bool = True) -> Counter[str]:
    """The tensors that a program moves, in the bodies of layers or outside, by the names of ops."""
    found = Counter[str]()
    for m in job.movements[0, kind]:
        if bool(m.path) == layers:
            for _, op, types in program_leaves(m.plan.program):
                found[op.name] += len(types)
    del found["slice"]
    return found


def around(job: Job, kind: str) -> dict[str, int]:
    """The ops of a program that are no moves and receive something, and how often they run."""
    found = Counter[str]()
    for times, op, types in program_leaves(job.programs[0, kind]):
        if computing(op) is not None and op.received_bytes(*types).any():
            found[op.name] += times
    return found


def test_found_and_not_written() -> None:
    """Counted per layer, of llama: section 3 of arXiv 1909.08053, 4.2 of 2205.05198, 2309.14509, 1910.02054."""
    one = model("llama", layers=2)
    tensor = partition(one, Strategy(tensor=2))
    assert moves(tensor, "F") == moves(tensor, "B") == {"all_reduce": 2}
    assert moves(tensor, "F", layers=False) == {"all_reduce": 4}  # of the embedding, and three of the loss
    sequence = partition(one, Strategy(tensor=2, sequence_parallel=True))
    assert moves(sequence, "F") == {"all_gather": 2, "reduce_scatter": 2}
    assert moves(sequence, "B") == {"all_gather": 4, "reduce_scatter": 2, "all_reduce": 2}  # two gains of norms
    ulysses = partition(one, Strategy(context=2))
    assert moves(ulysses, "F") == moves(ulysses, "B") == {"all_to_all": 4}
    for kind in ("ring", "zigzag"):
        ring = partition(one, Strategy(context=2, context_kind=kind))
        assert not moves(ring, "F") and not moves(ring, "B")
        assert [around(ring, k) for k in "FB"] == [{"ring_attention": 2}, {"ring_attention_backward": 2}]
    expert = partition(model("moe", dense_layers=0), Strategy(data=2, expert=2))
    assert moves(expert, "F") == moves(expert, "B") == {"all_to_all": 2}
    count = len([n for n in one.parameters if n.startswith("layers.")])
    zero = {z: partition(one, Strategy(data=2, zero=z, global_batch=4)) for z in (1, 2, 3)}
    assert not moves(zero[1], "F") and not moves(zero[1], "B") and not moves(zero[1], "B", layers=False)
    assert moves(zero[1], "OPT", layers=False) == {"reduce_scatter": count + 3, "all_gather": count + 3}
    assert moves(zero[2], "B") == {"reduce_scatter": count} and not moves(zero[2], "F")
    assert moves(zero[3], "F") == {"all_gather": count}
    assert moves(zero[3], "B") == {"all_gather": count, "reduce_scatter": count}
    assert moves(zero[3], "B", layers=False) == {"all_gather": 2, "reduce_scatter": 3}  # head and norm


def test_what_is_kept_is_not_moved_again() -> None:
    """Section 3: the reverse body moves a copy again unless `keep` names it; zero 2 of FSDP names all parameters."""
    one = model("llama", layers=2)
    count = len([n for n in one.parameters if n.startswith("layers.")])
    plain = partition(one, Strategy(data=2, fsdp=True, global_batch=4, bucket=1))
    for strategy in (
        Strategy(data=2, fsdp=True, zero=2, global_batch=4, bucket=1),
        Strategy(data=2, zero=3, keep="*", bucket=1),
    ):
        kept = partition(one, strategy)
        assert moves(kept, "F") == moves(plain, "F") == {"all_gather": count}
        assert moves(kept, "B") == {"reduce_scatter": count}
        assert moves(kept, "B", layers=False) == {"reduce_scatter": 3}
        assert not any(name in kept.programs[0, "B"].types for name in one.parameters)  # nothing else is read
    ends = partition(one, Strategy(data=2, fsdp=True, keep=("head", "norm"), bucket=1))
    assert moves(ends, "B") == {"all_gather": count, "reduce_scatter": count}
    assert moves(ends, "B", layers=False) == {"reduce_scatter": 3}
    sequence = partition(one, Strategy(tensor=2, sequence_parallel=True, keep="sequence"))
    assert moves(sequence, "F") == {"all_gather": 2, "reduce_scatter": 2}
    assert moves(sequence, "B") == {"all_gather": 2, "reduce_scatter": 2, "all_reduce": 2}  # of both norms' gradients
    keys = partition(one, Strategy(context=2, context_kind="gather", keep="sequence"))
    assert moves(keys, "F") == {"all_gather": 2} and moves(keys, "B") == {"reduce_scatter": 2}


def test_a_movement_that_is_kept_is_paid_once() -> None:
    """Seconds of a settlement are those of ops and of the movements that were written."""
    found = {}
    for keep in ((), "sequence"):
        job = partition(model("llama"), Strategy(tensor=2, sequence_parallel=True, keep=keep))
        assert job.settled is not None
        prices = Prices(fabric_of(Topology.load("nominal", devices=2), [job.programs.meshes[0]]))
        sides = [m.plan.program for m in job.movements[0, "F"] + job.movements[0, "B"] for _ in range(m.times)]
        moved = [prices.move(p.input_types[0], p.output_types[0]) for p in sides if len(p.inputs) == 1]
        found[keep] = job.settled.seconds - sum(moved)
        assert not any(t.layout.partial for types in job.settled.kept.values() for t in types)
    assert found["sequence"] == pytest.approx(found[()], rel=1e-3)


def test_what_is_gathered_ahead_is_as_much() -> None:
    """The gathers of a layer are the first steps of its body, and run a layer early; none is run beyond the last."""
    strategy = {"data": 2, "fsdp": True, "bucket": "1 kB"}
    sizes = set[int]()
    for layers in (2, 5):
        one = model("llama", layers=layers)
        plain, early = (partition(one, Strategy(**strategy, prefetch=on)) for on in (False, True))
        assert certify(plain).axis_bytes == certify(early).axis_bytes
        for kind in ("F", "B"):
            (op,) = (op for step in early.programs[0, kind].steps if (op := as_nested(step.op)) and not op.at_once)
            run = [visit.step.op.name for _, visit in turns(early.programs[0, kind]) if "gather" in visit.step.op.name]
            assert op.ahead == len([m for m in early.movements[0, kind] if m.path and "gather" in str(m.plan.program)])
            assert {step.op.name for step in op.body.steps[: op.ahead]} <= {"all_gather", "together"}
            assert run == [v.step.op.name for _, v in turns(plain.programs[0, kind]) if "gather" in v.step.op.name]
        sizes.add(sum(len(op.body.steps) for p in early.programs.shared for s in p.steps if (op := as_nested(s.op))))
    assert len(sizes) == 1


def test_totals_of_zero_1_stay_sums_until_the_optimizer() -> None:
    job = partition(model("llama"), Strategy(data=2, zero=1, global_batch=4))
    assert str(job.state["gradient.layers.q"]) == "f64[3, 12, 2, 3, 2]{+data}"
    assert str(job.state["layers.q.m"]) == "f64[3, 12@data, 2, 3, 2]"


def test_tables_are_text_that_partition_takes() -> None:
    found, strategy = model("llama"), Strategy(data=2, tensor=2, zero=1)
    said = strategy.layouts(found)
    assert Layouts.parse(str(said)) == said
    edited = str(said).replace("layers.gate, layers.up, layers.down: ffn@tensor", "layers.gate, layers.up: whole")
    assert edited != str(said)
    assert str(partition(found, strategy).state["layers.down"]) == "f64[3, 20@tensor, 12]"
    assert str(partition(found, strategy, layouts=edited).state["layers.down"]) == "f64[3, 20, 12]"
    assert wrong(found, strategy, steps=1, layouts=edited) == []


@pytest.mark.parametrize("said", [{"data": 2, "tensor": 2}, {"data": 2, "fsdp": True}, {"context": 2}], ids=str)
def test_axes_without_a_line_of_serve_compute_what_the_model_does(said: dict[str, Any]) -> None:
    found, strategy = model("llama", layers=2), Strategy(**said)
    tables = strategy.layouts(found)
    assert wrong(found, strategy, steps=1, layouts=Layouts((), tables.stored, tables.held)) == []


def test_an_axis_that_serves_nothing_is_said() -> None:
    found, strategy = model("llama", layers=2), Strategy(tensor=2)
    text = str(strategy.layouts(found))
    nothing = text.replace("tensor: [kv_heads, ffn, vocab]", "tensor: none")
    assert str(Layouts.parse(nothing)) == nothing
    with pytest.raises(LayoutError, match=r"no dim that the axis tensor serves \(none\)"):
        partition(found, strategy, layouts=nothing)
    partition(found, strategy, layouts=text.replace("  tensor: [kv_heads, ffn, vocab]\n", ""))


def test_stages_that_are_alike_share_a_program_and_size_hangs_on_no_count() -> None:
    sizes = set[int]()
    for layers, devices in ((4, 2), (12, 4)):
        job = partition(model("llama", layers=layers), Strategy(pipeline=4, data=devices, global_batch=4 * devices))
        assert len({job.programs.which[s, "F"] for s in range(job.stages)}) <= 3
        sizes.add(sum(len(p.steps) for p in job.programs.shared))
        for (stage, kind), number in job.programs.which.items():
            for _ in range(2):  # it is remembered
                own = job.programs[stage, kind]
                assert {*own.meshes} == {job.programs.meshes[stage]}
                assert [step.op.name for step in own.steps] == [s.op.name for s in job.programs.shared[number].steps]
    assert len(sizes) == 1


@pytest.mark.parametrize(
    ("said", "text"),
    [
        (
            {"data": 3, "tensor": 3, "expert": 2},
            "strategy: expert=2 does not divide data * context * tensor = 3 * 1 * 3; the nearest legal are [1, 3]",
        ),
        (
            {"context": 2, "expert": 3},
            "strategy: expert=3 does not divide data * context * tensor = 1 * 2 * 1; the nearest legal are [2]",
        ),
        (
            {"data": 4, "global_batch": 3},
            "strategy: global_batch=3 is below data * microbatch = 4 * 1; legal are 4 and more",
        ),
        (
            {"data": 4, "shard": 3},
            "strategy: shard=3 does not divide data=4, or expert=1 does not divide shard * context * tensor; legal are "
            "[1, 2, 4]",
        ),
        ({"data": 2, "fsdp": True, "zero": 1}, "strategy: fsdp with zero=1; legal are 2, and 3, as by default"),
        (
            {"data": 2, "fsdp": True, "keep": "embed"},
            "keep='embed': the forward pass moves nothing of that name which the backward pass reads so; legal are "
            "dims, and parameters that are gathered in both: layers.attention_norm, layers.q, layers.k, layers.v, "
            "layers.o, layers.mlp_norm, layers.gate, layers.up, layers.down, norm, head",
        ),
        (
            {"tensor": 2, "keep": ("sequence",)},
            "keep='sequence': the forward pass moves nothing of that name which the backward pass reads so; legal are "
            "dims, and parameters that are gathered in both: none",
        ),
        (
            {"data": 2, "prefetch": True},
            "prefetch: no layer gathers parameters; legal is it where they are dealt out, as by fsdp",
        ),
        ({"zero": 4}, "strategy: zero is 4; legal is a whole number from 0 to 3"),
        ({"pipeline": 9}, "9 stages of a model of 3 layers; legal are 1 to 3"),
        (
            {"context_kind": "ring"},
            "strategy: context_kind='ring' with context=1; legal are 2 devices of a sequence and more",
        ),
    ],
)
def test_what_is_not_legal_is_said_in_a_line(said: dict[str, Any], text: str) -> None:
    with pytest.raises((LayoutError, ScheduleError)) as caught:
        partition(model("llama"), Strategy(**said))
    assert str(caught.value) == text


def test_what_would_do_nothing_is_refused() -> None:
    for said, text in (
        ({"data": 2, "shard": 2}, "strategy: shard=2 without zero or fsdp; legal is one of them, or no shard"),
    ):
        with pytest.raises(LayoutError) as caught:
            partition(model("llama"), Strategy(**said))
        assert str(caught.value) == text
    for recompute in ("fulll", ("attention", "conv")):
        with pytest.raises(ShardplanError, match="recompute"):
            partition(model("llama"), Strategy(recompute=recompute))
    with pytest.raises(TopologyError, match="device 3"):
        partition(model("llama"), Strategy(pipeline=2, tensor=2), Topology.load("nominal", devices=3))
    with pytest.raises(LayoutError, match="takes a Model and a Strategy"):
        partition("llama", Strategy())  # type: ignore[arg-type]


def test_a_bucket_is_reduced_together() -> None:
    job = partition(model("llama"), Strategy(data=2, zero=1, bucket="1 GB"))
    names = [step.op.name for step in job.programs[0, "OPT"].steps]
    assert names.count("together") == 1 and "reduce_scatter" not in names


def test_a_bucket_of_layers_is_moved_together() -> None:
    """Parameters of a layer are gathered, and their gradients reduced where they are ready, in as many bytes."""
    one = model("llama")
    plain = partition(one, Strategy(data=2, fsdp=True))
    for bucket, many in (("1 GB", 1), (8 * 12 * 20 * 2, 3)):
        job = partition(one, Strategy(data=2, fsdp=True, bucket=bucket))
        assert certify(job).axis_bytes == certify(plain).axis_bytes
        ways = {kind: [m for m in job.movements[0, kind] if m.path] for kind in ("F", "B")}
        assert len(ways["F"]) == many and len(ways["B"]) == 2 * many
        for m in (*ways["F"], *ways["B"]):
            sides = m.plan.program.input_types, m.plan.program.output_types
            larger = [max(t.local_bytes(), u.local_bytes()) for t, u in zip(*sides, strict=True)]
            assert bucket == "1 GB" or sum(larger) <= bucket
    (op,) = (op for step in job.programs[0, "B"].steps if (op := as_nested(step.op)))
    names = [step.op.name for step in op.body.steps]
    first = names.index("reduce_scatter")  # of a bucket, right behind its last gradient: it waits for no other
    assert {*op.body.steps[first - 1].results} & {*op.body.steps[first].operands} and first < len(names) / 2


def test_one_stage_holds_one_microbatch_at_a_time() -> None:
    job = partition(model("llama"), Strategy(global_batch=3))
    assert [str(a) for a in job.schedule.ranks[0]] == ["0F0", "0B0", "0F1", "0B1", "0F2", "0B2"]

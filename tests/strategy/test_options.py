"""Options of a strategy: each does something, or is refused in a line that says what is legal."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

import shardplan as sp
from shardplan.errors import LayoutError, ShardplanError
from shardplan.simulation.closed.configurations import Configurations
from shardplan.simulation.inference.requests import Requests
from shardplan.simulation.searching.fit import fit
from shardplan.strategy.strategy_text import parse_strategy, strategy_text
from strategy.idle_options import MODELS, model, tally


@pytest.mark.parametrize("name", MODELS)
def test_every_option_does_something_or_is_refused(name: str) -> None:
    """More of them: `benchmarks/idle_options.py`."""
    _, idle = tally(name, 0, 20 if name in ("mlp", "dlrm", "gpt, forward") else 4)
    assert idle == []


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("gpt", {"expert": 2, "data": 2}, "expert=2 of gpt: it has no experts; legal is 1"),
    ("moe", {"expert": 8, "data": 8}, "expert=8 of moe: it has 4 experts; legal is 1 to 4"),
    ("gpt", {"tensor": 64}, "tensor=64 of gpt: it has 6 heads; legal is 1 to 6"),
    ("mlp", {"tensor": 16}, "tensor=16 of mlp: it has 8 columns to cut; legal is 1 to 8"),
    ("gpt", {"context": 8, "context_kind": "gather"}, "context=8 of gpt: it has 4 positions; legal is 1 to 4"),
    ("mlp", {"context": 2}, "context=2 of mlp: it has no positions; legal is 1"),
    ("gpt", {"pipeline": 3}, "3 stages of a model of 2 layers; legal are 1 to 2"),
    ("gpt", {"pipeline": 2, "schedule": "interleaved", "global_batch": 2},
     "4 stages of a model of 2 layers; legal are 1 to 2"),
    ("mlp", {"pipeline": 1, "schedule": "interleaved"}, "interleave=2 of mlp: one microbatch goes through all chunks "
     "in turn under 'interleaved', and none hides another's waiting; legal is '1f1b', or 2 microbatches and more"),
    ("llama", {"context": 4}, "context=4 of llama: ulysses gives each its part of the 2 key-value heads, and some get "
     "none; legal is 1 to 2, or context_kind='gather', 'ring' or 'zigzag'"),
    ("llama", {"context": 2, "tensor": 2}, "context=2 of llama: ulysses gives each its part of the 2 key-value heads, "
     "which tensor=2 deals out too, and some get none; legal is 1, or context_kind='gather', 'ring' or 'zigzag'"),
    ("gpt, sgd", {"zero": 1, "data": 2},
     "zero=1 of gpt: no state of an optimizer; legal is 2, 3, or an optimizer that keeps some"),
    ("gpt", {"zero": 2}, "zero=2 of gpt: one replica holds all; legal is data or context of 2 and more"),
    ("gpt", {"zero": 2, "data": 2, "shard": 1},
     "zero=2 of gpt: one replica holds all; legal is data or context of 2 and more"),
    ("gpt", {"fsdp": True}, "fsdp=True of gpt: one replica holds all; legal is data or context of 2 and more"),
    ("gpt", {"sequence_parallel": True},
     "sequence_parallel=True of gpt: no tensor axis; legal is tensor of 2 and more"),
    ("mlp", {"sequence_parallel": True, "tensor": 2},
     "sequence_parallel=True of mlp: no sequence to deal out; legal is False"),
    ("gpt", {"tensor_overlap": True}, "tensor_overlap=True of gpt: no tensor axis; legal is tensor of 2 and more"),
    ("gpt", {"context_kind": "gather"}, "context_kind='gather' of gpt: context=1; legal is context of 2 and more"),
    ("mlp", {"attention": "flash1"}, "attention='flash1' of mlp: no attention; legal is None"),
    ("mlp", {"recompute": "selective"},
     "recompute='selective' of mlp: no attention in a layer; legal is 'none', 'full' or names of ops"),
    ("gpt, forward", {"recompute": "full"},
     "recompute='full' of gpt: no backward pass; legal is 'none', or a model that trains"),
    ("gpt, forward", {"zero": 2, "data": 2}, "zero=2 of gpt: no backward pass; legal is 0, 3, or a model that trains"),
    ("gpt, forward", {"gradient_dtype": "f16"},
     "gradient_dtype='f16' of gpt: no backward pass; legal is None, or a model that trains"),
    ("gpt, forward", {"offload": True},
     "offload=True of gpt: no backward pass; legal is False, or a model that trains"),
    ("gpt", {"offload_layers": 3}, "offload_layers=3 of gpt: the model has 2 layers; legal is 0 to 2"),
    ("gpt", {"pipeline": 2, "schedule": "gpipe"},
     "schedule='gpipe' of gpt: the order of 1 microbatches of 2 stages is that of '1f1b'; legal is '1f1b'"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "said", "message"), REFUSED, ids=lambda x: x if isinstance(x, str) else "")
def test_what_does_nothing_is_refused_everywhere(name: str, said: dict[str, Any], message: str) -> None:
    one, strategy = model(name), sp.Strategy(**said)
    where = replace(sp.Topology.load("dgx-a100-80g", nodes=1))
    *_, inner = where.levels
    where = replace(where, levels=(replace(inner, size=strategy.devices),))
    text = message if "stages of a" in message else f"strategy: {message}"
    asked: list[Callable[[], object]] = [
        lambda: fit(one, strategy, where),
        *(lambda f=f: sp.simulate(one, strategy, where, fidelity=f) for f in ("closed", "events", "ops")),
    ]
    if not {"tensor_overlap", "offload_layers"} & said.keys():  # which no program knows, whatever they are
        asked.append(lambda: sp.partition(one, strategy))
    for ask in asked:
        with pytest.raises(LayoutError) as error:
            ask()
        assert str(error.value) == text


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ({"attention": "unfused"}, "simulate: attention='unfused' at the fidelity 'ops', which has attention as one "
         "kernel; legal are 'closed' and 'events', or another kernel"),
        ({"tensor": 2, "tensor_overlap": True}, "simulate: tensor_overlap=True at the fidelity 'ops', whose jobs have "
         "no such ops; legal are 'closed' and 'events', or False"),
        ({"offload": True}, "strategy: offload with 1 microbatches under the schedule 1f1b: a backward pass comes "
         "next, or next but one; legal are schedules with more between a forward pass and its backward pass"),
        ({"data": 2, "bucket": 1, "global_batch": 4}, "strategy: bucket=1 joins nothing: no gradients that are "
         "reduced, or parameters that are gathered, go together within so many bytes in less time; legal is another, "
         "or None"),
    ],
)  # fmt: skip
def test_what_only_the_ops_know_is_refused_there(said: dict[str, Any], message: str) -> None:
    strategy = sp.Strategy(**said)
    with pytest.raises(ShardplanError) as error:
        sp.simulate(model("gpt"), strategy, sp.Topology.load("nominal", devices=strategy.devices), fidelity="ops")
    assert str(error.value) == message


def test_offload_is_no_word_of_the_closed_form() -> None:
    with pytest.raises(LayoutError, match="many strategies at once: offload=True; legal is False"):
        Configurations.of([sp.Strategy(offload=True)])


def test_a_schedule_has_its_chunks() -> None:
    with pytest.raises(ShardplanError, match=r"^schedule 1f1b has 1 chunks a rank, 3 were asked for$"):
        sp.Strategy(pipeline=2, interleave=3)


def test_what_serves_has_no_backward_pass() -> None:
    box = sp.Topology.load("dgx-a100-80g", nodes=1)
    strategy = sp.Strategy(data=8, gradient_dtype="f16")
    with pytest.raises(LayoutError, match="gradient_dtype='f16' of gpt2: no backward pass; legal is None"):
        sp.simulate(sp.Model.load("gpt2", precision="bf16"), strategy, box, requests=Requests(128, 32, 1))


def test_state_is_dealt_out_and_its_parameter_not() -> None:
    """A name that begins with another's is not that one's state."""
    found = sp.partition(model("dlrm"), sp.Strategy(data=2, zero=1)).state
    assert str(found["top.0.bias"]) == "f32[8]" and str(found["top.0.bias.m"]) == "f32[8@data]"


def test_one_name_has_one_layout() -> None:
    strategy = sp.Strategy(tensor=2)
    text = str(strategy.layouts(model("llama")))
    up = "layers.gate, layers.up, layers.down: ffn@tensor"
    for more in ("layers.up: whole", "*.up: whole"):
        with pytest.raises(LayoutError) as error:
            sp.partition(model("llama"), strategy, layouts=f"{text}\n  {more}")
        said = f"held: of layers.up two lines say different layouts, '{up}' and '{more}'; legal is one"
        assert str(error.value) == said
    sp.partition(model("llama"), strategy, layouts=f"{text}\n  *.up: ffn@tensor")  # the same twice


def test_a_strategy_shows_what_is_not_as_by_default_and_reads_back() -> None:
    rng = random.Random(5)
    assert repr(sp.Strategy()) == "Strategy()"
    for _ in range(200):
        said: dict[str, Any] = {
            "data": rng.choice([1, 4]), "tensor": rng.choice([1, 2]), "pipeline": rng.choice([1, 2]),
            "schedule": rng.choice(["1f1b", "interleaved", "zb-v"]), "recompute": rng.choice(["none", ("einsum",)]),
            "precision": rng.choice([None, "bf16"]), "global_batch": rng.choice([None, 32]),
        }  # fmt: skip
        if said["schedule"] == "interleaved":
            said["interleave"] = rng.choice([None, 1, 2, 3])
        one = sp.Strategy(**said)
        if isinstance(one.recompute, str):
            assert parse_strategy(strategy_text(one), global_batch=one.global_batch) == one
        assert eval(repr(one), {"Strategy": sp.Strategy}) == one
        assert "context_kind" not in repr(one)

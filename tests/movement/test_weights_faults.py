"""Planted faults of every kind: each that does harm is found; `python -m benchmarks.weights_faults` plants 108."""

from __future__ import annotations

import random

import pytest

import shardplan as sp
from movement.weights_faulted import KINDS, drawn
from movement.weights_judged import Fault, alarms, harmful, judged, probed
from shardplan.errors import LayoutError

LLAMA = {
    "hidden_size": 8, "intermediate_size": 12, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 2,
    "num_hidden_layers": 2, "vocab_size": 10, "tie_word_embeddings": False,
}  # fmt: skip
LIVE = ("stale plan", "torn refit")


@pytest.mark.parametrize("kind", KINDS)
def test_a_fault_that_does_harm_is_found(kind: str) -> None:
    if kind in LIVE:
        pytest.importorskip("torch")
    rng = random.Random(f"{kind} tests")
    for _ in range(40):
        s, fault = drawn(kind, rng)
        found = judged(s, fault)
        if found.harm:
            assert found.by, f"{s.names}: {fault.says}"
            assert found.words
            return
    pytest.fail("no fault of 40 did harm")


def test_nothing_is_found_where_there_is_no_fault() -> None:
    for kind in ("wrong degree", "scale off by one block"):
        s, _ = drawn(kind, random.Random(f"{kind} right"))
        assert alarms(s) == []


def test_harm_is_what_the_converters_do_not_hold() -> None:
    s, _ = drawn("wrong degree", random.Random("harm"))
    wanted = s.held[1]
    assert not harmful(wanted, wanted)
    rank = next(iter(wanted))
    name = next(iter(wanted[rank]))
    other = wanted | {rank: wanted[rank] | {name: wanted[rank][name] + 1}}
    assert harmful(wanted, other)
    assert judged(s, Fault("", "", lambda: s.weights, run=lambda plan, source: (other, None))).by == "diff"


def test_a_digit_of_another_tensor_is_refused_where_it_stands() -> None:
    side = sp.Weights.load("hf-llama", {**LLAMA, "num_attention_heads": 8})
    text = str(side).replace('"k = g d, e"', '"k = g r d, e"')
    with pytest.raises(
        LayoutError, match=r'k_proj.weight = "k = g r d, e": r is no digit of it for k = l, g d, e; legal'
    ):
        sp.Weights.parse(text)


def test_scales_and_weights_of_8_bits_are_probed_exactly() -> None:
    s, _ = drawn("scale off by one block", random.Random("f8"))
    while s.kind != "deepseek-fp8":
        s, _ = drawn("scale off by one block", random.Random(repr(s.given)))
    assert probed(s, 1, s.weights[1]) == ""

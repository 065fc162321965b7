"""Descriptors against the reference: a transport that copies bytes by them gives the same parameters."""

import numpy as np
import pytest

from movement.weights_oracle import filled, logical
from shardplan.errors import LayoutError
from shardplan.interop.descriptors import descriptors
from shardplan.movement.weights.refit import refit
from shardplan.movement.weights.weights import Weights

CONFIG = {
    "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2,
    "num_hidden_layers": 3, "vocab_size": 90, "torch_dtype": "float32",
}  # fmt: skip


def test_bytes_moved_by_descriptors_are_those_of_the_reference() -> None:
    a = Weights.load("megatron-llama", CONFIG, tensor=2, divisible=4)
    b = Weights.load("vllm-llama", CONFIG, tensor=4, devices=[1, 2, 3, 4])
    plan = refit(a, b)
    held = filled(a, logical(a))
    want = plan.apply(held)
    made = {r: {n: np.zeros(s, np.float32) for n, s, _ in b.parameters(r)} for r in b.devices}
    sent: list[tuple[int, ...]] = []
    got: list[tuple[int, ...]] = []
    for rank in b.devices:
        for d in descriptors(plan, rank):
            if d.sends:
                sent.append((rank, d.peer, d.offset, d.length, d.peer_offset))
                continue
            taken = held[d.peer][d.peer_name].reshape(-1).view(np.uint8)[d.peer_offset : d.peer_offset + d.length]
            made[rank][d.name].reshape(-1).view(np.uint8)[d.offset : d.offset + d.length] = taken
            if d.peer != rank:
                got.append((d.peer, rank, d.peer_offset, d.length, d.offset))
    sent += [(0, d.peer, d.offset, d.length, d.peer_offset) for d in descriptors(plan, 0)]
    assert sorted(sent) == sorted(got)
    for rank in b.devices:
        assert all(made[rank][n].tobytes() == want[rank][n].tobytes() for n in want[rank])


def test_a_cast_is_refused() -> None:
    a = Weights.load("hf-llama", CONFIG)
    b = Weights.load("vllm-llama", CONFIG, devices=[1], dtype="bf16")
    with pytest.raises(LayoutError) as error:
        next(descriptors(refit(a, b), 1))
    assert str(error.value) == (
        "descriptors of 'model.embed_tokens.weight': f32 becomes bf16, which bytes alone do not say; legal are equal "
        "dtypes and constants, or Refit, which casts"
    )


def test_plans_that_pass_on_are_refused() -> None:
    a = Weights.load("hf-llama", CONFIG)
    b = Weights.load("vllm-llama", CONFIG, tensor=2, replica=2, devices=[8, 9, 10, 11])
    plan = refit(a, b, "dgx-a100", relay=True)
    with pytest.raises(LayoutError) as refused:
        next(descriptors(plan, 8))
    assert str(refused.value) == (
        "descriptors of a plan with relays; legal is one of refit(..., relay=False), where none passes on, or Refit"
    )

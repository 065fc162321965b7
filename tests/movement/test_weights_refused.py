"""What is refused: one line that names the parameter, the element, both expressions and what would be legal."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import shardplan as sp
from movement import weights_frameworks as frameworks
from shardplan.errors import LayoutError
from shardplan.movement.weights.table import WeightTable
from shardplan.movement.weights.weights import Weights, make_weights

FAMILY = {"tensors": {"q": "l, n, e", "k": "l, n, e"}}
SIZES = {"n": 12, "e": 3, "l": 2}
LLAMA: dict[str, Any] = {
    "hidden_size": 8, "intermediate_size": 12, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 2,
    "num_hidden_layers": 2, "vocab_size": 10, "tie_word_embeddings": False, "kind": "llama",
}  # fmt: skip


def side(stored: dict[str, str], more_given: dict[str, Any] | None = None, first: int = 0, **degrees: Any) -> Weights:
    """A table of a few parameters."""
    counts = {k: v for k, v in degrees.items() if isinstance(v, int)}
    data = {
        "mesh": list(counts) or ["one"], "degrees": counts or {"one": 1}, "atoms": {k: f"{k}_size" for k in SIZES},
        "holes": {"l": "l"}, "parameters": [{"name": n, "is": text} for n, text in stored.items()], "of": FAMILY,
    }  # fmt: skip
    table = WeightTable.of(data | (more_given or {}), "a table")
    size = int(np.prod(list(counts.values()) or [1]))
    return make_weights(table, {f"{k}_size": v for k, v in SIZES.items()}, degrees, range(first, first + size), "f32")


def refused(source: Weights, target: Weights) -> str:
    """The one line of a refusal."""
    with pytest.raises(LayoutError) as caught:
        sp.refit(source, target)
    text = str(caught.value)
    assert "\n" not in text
    assert "legal" in text
    return text


def test_an_element_without_an_owner_is_named_with_both_expressions() -> None:
    source = side({"{l}.q": "q = n@t.rows, e"}, t=2, rows=[[0, 1, 2, 3, 4], [6, 7, 8, 9, 10, 11]])
    text = refused(source, side({"{l}.query": "q = e, n"}))
    assert text == (
        '{l}.query = "q = e, n": element [0, 5, 0] of q (l, n, e) has no owner in the source, where it is '
        '{l}.q = "q = n@t.rows, e"; legal is a source that holds it'
    )


def test_a_tensor_that_is_not_stored_is_named() -> None:
    text = refused(side({"{l}.q": "q = n, e"}), side({"{l}.k": "k = n, e"}))
    assert '{l}.k = "k = n, e": the source stores no k' in text


def test_owners_of_two_dtypes_are_refused() -> None:
    parameters = [{"name": "{l}.q", "is": "q = n, e"}, {"name": "{l}.q.master", "is": "q = n, e", "dtype": "bf16"}]
    text = refused(side({}, {"parameters": parameters}), side({"{l}.q": "q = n, e"}))
    assert "q has owners that may differ" in text
    assert 'element [0, 0, 0] is in {l}.q = "q = n, e" as f32 and in {l}.q.master' in text


def test_owners_less_another_constant_are_refused() -> None:
    parameters = [{"name": "{l}.q", "is": "q = n, e"}, {"name": "{l}.less", "is": "q = n, e", "plus": 1}]
    text = refused(side({}, {"parameters": parameters}), side({"{l}.q": "q = n, e"}))
    assert text == (
        'q has owners that may differ in the source: element [0, 0, 0] is in {l}.q = "q = n, e" as f32 and in {l}.less '
        '= "q = n, e" as f32 less 1; legal is one dtype and one constant'
    )


def test_tensors_that_only_the_target_ties_are_refused() -> None:
    source = sp.Weights.load("hf-llama", LLAMA)
    target = sp.Weights.load("vllm-llama", LLAMA | {"tie_word_embeddings": True})
    text = refused(source, target)
    assert "head and embed are one here" in text
    assert "lm_head.weight" in text
    assert "model.embed_tokens.weight" in text
    assert "head" in refused(target, source)  # the other way round nobody owns a head


def test_a_shape_that_does_not_multiply_out_is_refused() -> None:
    sizes = {k: f"{k}_size" for k in SIZES}
    with pytest.raises(LayoutError, match=r"n of q is 12, and its digits a=5 b=2 make 10; legal are digits that make"):
        refused(side({"{l}.q": "q = a b, e"}, {"atoms": sizes | {"a": "5", "b": "2"}, "split": {"n": "a b"}}), side({}))
    longer = side({"{l}.q": "q = n, e"}, {"atoms": sizes | {"n": "n_size + 2"}})
    assert "q is [2, 12, 3] (l, n, e) here and [2, 14, 3] (l, n, e) in" in refused(longer, side({"{l}.q": "q = n, e"}))


def test_a_degree_that_does_not_come_out_names_what_it_is_made_of() -> None:
    with pytest.raises(LayoutError) as caught:
        sp.Weights.load("megatron-mixtral", LLAMA | {"num_local_experts": 8}, tensor=2, data=2, expert=16)
    assert str(caught.value) == (
        "megatron-mixtral: expert = 16: the degree edp = data * tensor / (expert * etp) is 0.25 where data = 2, "
        "tensor = 2, expert = 16, etp = 1; legal is 4, the nearest"
    )


def test_an_axis_that_cuts_two_dims_is_refused() -> None:
    with pytest.raises(LayoutError, match="the axis t cuts two dims of q, n and e; legal is one"):
        side({"{l}.q": "q = n@t, e@t"}, t=3)


@pytest.mark.parametrize("step", ["0", "l - 2"])
def test_a_range_that_stands_still_is_refused(step: str) -> None:
    family = {"tensors": {"q": f"l[0:2:{step}], n, e"}}
    with pytest.raises(LayoutError) as caught:
        side({"{l}.q": "q = n, e"}, {"of": family})
    assert str(caught.value) == f"q: l[0:2:{step}] goes on by 0; legal is a step of at least 1"


@pytest.mark.parametrize("place", [2, -1])
def test_a_place_beyond_an_axis_is_refused(place: int) -> None:
    entry = {"name": "{l}.q", "is": "q = n, e", "on": {"t": place}}
    with pytest.raises(LayoutError) as caught:
        side({}, {"parameters": [entry]}, t=2)
    assert str(caught.value) == (f'{{l}}.q = "q = n, e": on t = {place} of 2; legal are 0 to 1, first and last')
    held = side({}, {"parameters": [entry | {"on": {"t": 1}}]}, t=2)
    assert [held.names(rank) for rank in (0, 1)] == [[], ["0.q", "1.q"]]


LATENT: dict[str, Any] = {
    "hidden_size": 512, "num_attention_heads": 16, "q_lora_rank": 256, "kv_lora_rank": 512, "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128, "v_head_dim": 128, "n_routed_experts": 4, "moe_intermediate_size": 2048,
    "intermediate_size": 4096, "n_shared_experts": 1, "first_k_dense_replace": 1, "num_hidden_layers": 2,
    "vocab_size": 128, "tie_word_embeddings": False,
}  # fmt: skip


def test_a_cut_inside_a_block_is_refused_with_the_nearest_degree() -> None:
    source = sp.Weights.load("hf-deepseek-v3-fp8", LATENT)
    text = refused(source, sp.Weights.load("vllm-deepseek-v3-fp8", LATENT, tensor=16))
    assert "self_attn.q_b_proj.weight" in text
    assert "a device has 0:192 of h qd of qb" in text
    assert "has scales of 0:256, in blocks of 128" in text
    assert text.endswith("legal is tensor = 8, the nearest that cuts between blocks")
    sp.refit(source, sp.Weights.load("vllm-deepseek-v3-fp8", LATENT, tensor=8))


def test_the_nearest_degree_is_that_of_the_axis_that_is_nearest() -> None:
    """Of 6 blocks 12 devices have half of one each; a = 3 is three away, and b = 1 is one."""
    scaled = {"tensors": {"q": "n, e", "s": "m, f"}, "scales": {"s": {"of": "q", "block": ["4", "3"]}}}
    sizes = {"n": "24", "e": "3", "m": "6", "f": "1"}
    more_given = {"of": scaled, "atoms": sizes, "holes": {}}
    cut = side({"q": "q = n@a*b, e", "s": "s = m@a*b~, f"}, more_given, a=6, b=2)
    assert refused(side({"q": "q = n, e", "s": "s = m, f"}, more_given), cut).endswith(
        "legal is b = 1, the nearest that cuts between blocks"
    )


def test_the_last_block_of_a_latent_may_be_partial() -> None:
    found = sp.Weights.load("hf-deepseek-v3-fp8", LATENT)
    assert found.shape("model.layers.0.self_attn.kv_a_proj_with_mqa.weight", 0) == (576, 512)
    assert found.shape("model.layers.0.self_attn.kv_a_proj_with_mqa.weight_scale_inv", 0) == (5, 4)
    assert sp.refit(found, sp.Weights.load("vllm-deepseek-v3-fp8", LATENT, tensor=2, devices=[1, 2])).moves


def test_scales_on_one_side_alone_are_refused() -> None:
    text = refused(sp.Weights.load("hf-deepseek-v3-fp8", LATENT), sp.Weights.load("vllm-deepseek-v3", LATENT))
    assert "qa is f8e4m3 with block scales (qa_s) in hf-deepseek-v3-fp8 and bf16 without in vllm-deepseek-v3" in text


def test_a_cast_is_bit_for_bit_that_of_casting_first() -> None:
    whole = frameworks.checkpoint(LLAMA, np.random.default_rng(0))
    whole = {n: (a / 7 - 3).astype(np.float32) for n, a in whole.items()}
    source = sp.Weights.load("hf-llama", LLAMA, dtype="f32")
    target = sp.Weights.load("vllm-llama", LLAMA, dtype="bf16", tensor=2, devices=[4, 5])
    plan = sp.refit(source, target)
    after = plan.apply({0: whole})
    kind = after[4]["model.norm.weight"].dtype
    wanted = frameworks.served(LLAMA, {n: a.astype(kind) for n, a in whole.items()}, tensor=2)
    for k in range(2):
        for name, array in wanted[k].items():
            assert after[4 + k][name].tobytes() == array.astype(kind).tobytes(), name
    padding = 2 * 54 * LLAMA["hidden_size"]
    assert sum(plan.received_bytes) == 2 * (sum(a.size for w in wanted.values() for a in w.values()) - padding)


def test_zero_centred_norms_are_moved_by_one() -> None:
    source = side({"{l}.q": "q = n, e"})
    target = side({}, {"parameters": [{"name": "{l}.q", "is": "q = n, e", "plus": 1}]}, first=1)
    arrays = {f"{k}.q": np.full((12, 3), 1.5, np.float32) for k in range(2)}
    assert np.all(sp.refit(source, target).apply({0: arrays})[1]["0.q"] == 0.5)


def test_copies_under_two_names_and_twice_on_one_device_are_compared() -> None:
    """A tied tensor in two stored parameters, and a map that gives a device an index twice."""
    two = side({"{l}.q": "q = n, e", "{l}.again": "q = e, n"})
    array = np.arange(1, 37, dtype=np.float32).reshape(12, 3)
    held = {f"{k}.{name}": (a + 100 * k).copy() for k in range(2) for name, a in (("q", array), ("again", array.T))}
    sp.refit(two, side({"{l}.q": "q = n, e"}, first=1)).apply({0: held})
    held["1.again"][2, 4] = 9
    with pytest.raises(LayoutError) as caught:
        sp.refit(two, side({"{l}.q": "q = n, e"}, first=1)).apply({0: held})
    assert str(caught.value) == (
        "copies of q differ in the source: 1.again[2, 4] of rank 0 is 9.0, and 1.q[4, 2] of rank 0 is 115.0; legal are "
        "equal copies"
    )
    rows = [[0, 1, 2, 3, 4, 5, 0], [6, 7, 8, 9, 10, 11, 11]]
    twice = side({"{l}.q": "q = n@t.rows, e"}, t=2, rows=rows)
    shards = {r: {f"{k}.q": array[rows[r]] + 100 * k for k in range(2)} for r in range(2)}
    plan = sp.refit(twice, side({"{l}.q": "q = n, e"}, first=2))
    assert np.array_equal(plan.apply(shards)[2]["1.q"], array + 100)
    shards[1]["0.q"][6, 1] = -1
    with pytest.raises(LayoutError, match=r"0.q\[6, 1\] of rank 1 is -1.0, and 0.q\[5, 1\] of rank 1 is 35.0; legal"):
        plan.apply(shards)

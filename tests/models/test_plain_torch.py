"""The plain models against torch's own functions, and against themselves another way; each law fails where it must."""

from __future__ import annotations

import math
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="the extra `torch` is not installed")
import torch.nn.functional as F  # noqa: E402, N812
from tests.models import plain_decoders, plain_others, plain_parts, plain_torch  # noqa: E402
from tests.models.small import DECODERS, SMALL, batch_of, differ, random, small  # noqa: E402
from torch import Tensor  # noqa: E402

CLOSE = {"rtol": 0, "atol": 1e-12}


def test_norms_and_activations_are_those_of_torch() -> None:
    x, gain, bias = random(2, 3, 7), random(7, seed=1), random(7, seed=2)
    torch.testing.assert_close(
        plain_parts.layer_norm(x, gain, bias, 1e-5), F.layer_norm(x, (7,), gain, bias, 1e-5), **CLOSE
    )
    torch.testing.assert_close(plain_parts.rms_norm(x, gain, 1e-6), F.rms_norm(x, (7,), gain, 1e-6), **CLOSE)
    torch.testing.assert_close(plain_parts.gelu_tanh(x), F.gelu(x, approximate="tanh"), **CLOSE)
    torch.testing.assert_close(plain_parts.silu(x), F.silu(x), **CLOSE)
    assert differ(plain_parts.gelu_tanh(x), F.gelu(x))
    assert differ(plain_parts.rms_norm(x, gain, 1e-6), F.rms_norm(x - x.mean(-1, keepdim=True), (7,), gain, 1e-6))


def test_losses_are_those_of_torch() -> None:
    scores, targets = random(2, 3, 7), torch.tensor([[1, 6, 0], [3, 3, 5]])
    expected = F.cross_entropy(scores.flatten(0, 1), targets.flatten())
    torch.testing.assert_close(plain_parts.cross_entropy(scores, targets), expected, **CLOSE)
    config = small("dlrm-kaggle")
    params, batch = plain_torch.parameters(config, 1), batch_of(config, 2, 7)
    odds = plain_others.click_logits(params, batch, config)
    # As published: a sigmoid, then the binary cross entropy of a probability.
    expected = F.binary_cross_entropy(torch.sigmoid(odds), batch["clicks"])
    torch.testing.assert_close(plain_torch.loss(params, batch, config), expected, **CLOSE)


def sdpa(queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(queries, keys, values, is_causal=True, enable_gqa=True)


def test_attention_is_that_of_torch() -> None:
    queries, keys, values = random(2, 6, 7, 5), random(2, 3, 7, 5, seed=1), random(2, 3, 7, 4, seed=2)
    torch.testing.assert_close(plain_parts.attend(queries, keys, values, 0), sdpa(queries, keys, values), **CLOSE)


def test_grouped_heads_are_repeated_heads() -> None:
    queries, keys, values = random(2, 6, 7, 5), random(2, 3, 7, 5, seed=1), random(2, 3, 7, 4, seed=2)
    grouped = plain_parts.attend(queries, keys, values, 0)
    each = plain_parts.attend(queries, keys.repeat_interleave(2, 1), values.repeat_interleave(2, 1), 0)
    torch.testing.assert_close(grouped, each, **CLOSE)
    # A head's group is h // 2, not h % 3.
    assert differ(grouped, plain_parts.attend(queries, keys.repeat(1, 2, 1, 1), values.repeat(1, 2, 1, 1), 0))


def test_later_keys_are_not_seen() -> None:
    queries, keys, values = random(2, 6, 4, 5), random(2, 3, 9, 5, seed=1), random(2, 3, 9, 4, seed=2)
    whole = plain_parts.attend(queries, keys, values, 2)
    keys[:, :, 6:], values[:, :, 6:] = 1e3, -1e3
    torch.testing.assert_close(plain_parts.attend(queries, keys, values, 2), whole, **CLOSE)
    assert differ(plain_parts.attend(queries, keys, values, 3), whole)


def test_rotary_turns_pairs_as_complex_numbers() -> None:
    x, positions, theta = random(2, 3, 5, 8), torch.tensor([0, 1, 4, 7, 9]), 1e4
    angles = positions[:, None] * theta ** (-torch.arange(0, 8, 2, dtype=torch.float64) / 8)
    turns = torch.polar(torch.ones_like(angles), angles)
    halves = torch.complex(x[..., :4], x[..., 4:]) * turns
    torch.testing.assert_close(
        plain_parts.rotary(x, positions, theta), torch.cat([halves.real, halves.imag], -1), **CLOSE
    )
    pairs = torch.complex(x[..., 0::2], x[..., 1::2]) * turns
    torch.testing.assert_close(
        plain_parts.rotary_pairs(x, positions, theta), torch.cat([pairs.real, pairs.imag], -1), **CLOSE
    )
    assert differ(plain_parts.rotary(x, positions + 1, theta), plain_parts.rotary(x, positions, theta))


def test_only_the_distance_of_positions_counts() -> None:
    queries, keys, positions = random(1, 1, 5, 8), random(1, 1, 5, 8, seed=1), torch.arange(5)

    def products(shift: int) -> Tensor:
        turned = (plain_parts.rotary(x, positions + shift, 1e4) for x in (queries, keys))
        return torch.matmul(next(turned), next(turned).transpose(-1, -2))

    torch.testing.assert_close(products(0), products(13), **CLOSE)


@pytest.mark.parametrize("name", DECODERS)
def test_prefill_then_decode_is_the_whole_sequence(name: str) -> None:
    config = small(name)
    params, tokens = plain_torch.parameters(config, 3), batch_of(config, 4)["tokens"]
    whole = plain_decoders.logits(params, tokens, config)
    cache = plain_decoders.new_cache(config, len(tokens), torch.float64)
    start, cache = plain_decoders.step(params, tokens[:, :5], config, cache, 0)
    pieces = [start]
    for at in range(5, config.seq):
        one, cache = plain_decoders.step(params, tokens[:, at : at + 1], config, cache, at)
        pieces.append(one)
    torch.testing.assert_close(torch.cat(pieces, 1), whole, **CLOSE)
    # A token written one place further, over what came before or beyond, is another sequence.
    astray, _ = plain_decoders.step(params, tokens[:, -1:], config, cache, config.seq - 2)
    assert differ(astray, pieces[-1])


@pytest.mark.parametrize("name", DECODERS)
def test_later_tokens_change_nothing_before_them(name: str) -> None:
    # Also with too few slots: a token's place depends on those before it alone.
    config = small(name, **({"capacity_factor": 0.6} if "experts" in SMALL[name] else {}))
    params, tokens = plain_torch.parameters(config, 5), batch_of(config, 6)["tokens"]
    before = plain_decoders.logits(params, tokens, config)
    tokens[:, 7:] = (tokens[:, 7:] + 1) % config.vocab
    after = plain_decoders.logits(params, tokens, config)
    torch.testing.assert_close(after[:, :7], before[:, :7], **CLOSE)
    assert differ(after[:, 7:], before[:, 7:])


def test_gpt_is_made_of_torchs_layers() -> None:
    config = small("gpt2")
    params, tokens = plain_torch.parameters(config, 23), batch_of(config, 24)["tokens"]

    def activate(x: Tensor) -> Tensor:
        return F.gelu(x, approximate="tanh")

    x = F.embedding(tokens, params["transformer.wte.weight"]) + params["transformer.wpe.weight"]
    mask = torch.nn.Transformer.generate_square_subsequent_mask(config.seq, dtype=torch.float64)
    for i in range(config.layers):
        own = {name: params[f"transformer.h.{i}.{name}"] for name in OF_TORCHS_LAYER.values()}
        layer = torch.nn.TransformerEncoderLayer(15, 3, 60, 0.0, activate, 1e-5, True, True, dtype=torch.float64)
        # In GPT-2's checkpoints a product's weight is stored the other way round.
        layer.load_state_dict({theirs: torch.t(own[ours]) for theirs, ours in OF_TORCHS_LAYER.items()})
        x = layer(x, mask)
    x = F.layer_norm(x, (15,), params["transformer.ln_f.weight"], params["transformer.ln_f.bias"], config.norm_eps)
    expected = F.linear(x, params["transformer.wte.weight"])
    torch.testing.assert_close(plain_decoders.logits(params, tokens, config), expected, **CLOSE)


OF_TORCHS_LAYER = {
    "self_attn.in_proj_weight": "attn.c_attn.weight",
    "self_attn.in_proj_bias": "attn.c_attn.bias",
    "self_attn.out_proj.weight": "attn.c_proj.weight",
    "self_attn.out_proj.bias": "attn.c_proj.bias",
    "linear1.weight": "mlp.c_fc.weight",
    "linear1.bias": "mlp.c_fc.bias",
    "linear2.weight": "mlp.c_proj.weight",
    "linear2.bias": "mlp.c_proj.bias",
    "norm1.weight": "ln_1.weight",
    "norm1.bias": "ln_1.bias",
    "norm2.weight": "ln_2.weight",
    "norm2.bias": "ln_2.bias",
}


@pytest.mark.parametrize("name", ["llama3-8b", "qwen3-4b"])
def test_llama_is_made_of_torchs_functions(name: str) -> None:
    config = small(name)
    params, tokens = plain_torch.parameters(config, 25), batch_of(config, 26)["tokens"]
    width = config.key_width
    angles = torch.arange(11)[:, None] * config.rope_theta ** (-torch.arange(0, width, 2, dtype=torch.float64) / width)

    def norm(key: str, x: Tensor) -> Tensor:
        return F.rms_norm(x, (x.shape[-1],), params[f"model.{key}.weight"], config.norm_eps)

    def turned(x: Tensor) -> Tensor:
        pairs = torch.complex(*x.chunk(2, -1)) * torch.polar(torch.ones_like(angles), angles)
        return torch.cat([pairs.real, pairs.imag], -1)

    x = F.embedding(tokens, params["model.embed_tokens.weight"])
    for i in range(config.layers):

        def weigh(key: str, y: Tensor, i: int = i) -> Tensor:
            return F.linear(y, params[f"model.layers.{i}.{key}_proj.weight"])

        y = norm(f"layers.{i}.input_layernorm", x)
        q, k, v = (weigh(f"self_attn.{key}", y).unflatten(-1, (-1, width)).transpose(1, 2) for key in "qkv")
        if name == "qwen3-4b":
            q, k = norm(f"layers.{i}.self_attn.q_norm", q), norm(f"layers.{i}.self_attn.k_norm", k)
        x = x + weigh("self_attn.o", sdpa(turned(q), turned(k), v).transpose(1, 2).flatten(2))
        y = norm(f"layers.{i}.post_attention_layernorm", x)
        x = x + weigh("mlp.down", F.silu(weigh("mlp.gate", y)) * weigh("mlp.up", y))
    head = {"llama3-8b": "lm_head.weight", "qwen3-4b": "model.embed_tokens.weight"}[name]
    expected = F.linear(norm("norm", x), params[head])
    torch.testing.assert_close(plain_decoders.logits(params, tokens, config), expected, **CLOSE)


def test_latent_attention_is_that_of_torch() -> None:
    """Keys and values made whole, head by head, and torch's attention on them."""
    config = small("deepseek-v3")
    params, x = plain_torch.parameters(config, 7), random(2, 5, config.hidden)
    positions, block = torch.arange(5), "model.layers.0.self_attn"

    def weight(name: str) -> Tensor:
        return params[f"{block}.{name}.weight"]

    def turned(y: Tensor) -> Tensor:
        pairs = torch.view_as_complex(y.unflatten(-1, (-1, 2)).contiguous())
        angles = positions[:, None] * config.rope_theta ** (-torch.arange(0, 4, 2, dtype=torch.float64) / 4)
        return torch.view_as_real(pairs * torch.polar(torch.ones_like(angles), angles)).flatten(-2)

    q = F.rms_norm(F.linear(x, weight("q_a_proj")), (13,), weight("q_a_layernorm"), config.norm_eps)
    kv = F.linear(x, weight("kv_a_proj_with_mqa"))
    latent = F.rms_norm(kv[..., :7], (7,), weight("kv_a_layernorm"), config.norm_eps)
    rows_q, rows_kv = weight("q_b_proj").unflatten(0, (3, 11)), weight("kv_b_proj").unflatten(0, (3, 12))
    mixed = []
    for head in range(3):
        query, wide = q @ rows_q[head].T, latent @ rows_kv[head].T
        queries = torch.cat([query[..., :7], turned(query[..., 7:])], -1)
        keys = torch.cat([wide[..., :7], turned(kv[..., 7:])], -1)
        mixed.append(F.scaled_dot_product_attention(queries, keys, wide[..., 7:], is_causal=True))
    expected = F.linear(torch.cat(mixed, -1), weight("o_proj"))
    found = plain_decoders.latent_attention(params, x, config, 0, positions, lambda _, new: new)
    torch.testing.assert_close(found, expected, **CLOSE)


def bank_of(experts: int, hidden: int, ffn: int) -> list[tuple[Tensor, Tensor, Tensor]]:
    return [
        (random(ffn, hidden, seed=e), random(ffn, hidden, seed=20 + e), random(hidden, ffn, seed=40 + e))
        for e in range(experts)
    ]


def test_a_mixture_is_the_sum_over_each_tokens_choices() -> None:
    x, scores, bank = random(2, 7, 3), random(2, 7, 5, seed=1), bank_of(5, 3, 4)
    chosen, weights = plain_parts.top_weights(scores, 2)
    everything = torch.softmax(scores, -1)
    best, same = torch.topk(everything, 2)
    assert torch.equal(chosen, same)
    torch.testing.assert_close(weights, best / best.sum(-1, keepdim=True), **CLOSE)
    found = plain_parts.mixture(x, chosen, weights, bank)
    for b in range(2):
        for n in range(7):
            pairs = zip(chosen[b, n], weights[b, n], strict=True)
            first, second = (w * plain_parts.gated_mlp(x[b, n], *bank[e]) for e, w in pairs)
            torch.testing.assert_close(found[b, n], first + second, **CLOSE)


def test_slots_enough_drop_nothing() -> None:
    x, scores, bank = random(2, 7, 3), random(2, 7, 5, seed=1), bank_of(5, 3, 4)
    chosen, weights = plain_parts.top_weights(scores, 2)
    dense = plain_parts.mixture(x, chosen, weights, bank)
    found, drops = plain_parts.capacity_mixture(x, chosen, weights, bank, 7)
    assert drops.tolist() == [0, 0]
    torch.testing.assert_close(found, dense, **CLOSE)
    short, drops = plain_parts.capacity_mixture(x, chosen, weights, bank, 1)
    assert min(drops.tolist()) > 0
    assert differ(short, dense)


@pytest.mark.parametrize("capacity", [1, 2, 3, 5])
def test_what_is_dropped_adds_nothing(capacity: int) -> None:
    """Choice by choice, with a count an expert: what has no slot has weight 0 in the mixture without limit."""
    x, scores, bank = random(3, 11, 3), random(3, 11, 4, seed=1), bank_of(4, 3, 5)
    chosen, weights = plain_parts.top_weights(scores, 2)
    expected, lost = weights.clone(), [0, 0, 0]
    for g in range(3):
        used = [0] * 4
        for n in range(11):
            for k, e in enumerate(chosen[g, n].tolist()):
                if used[e] == capacity:
                    expected[g, n, k], lost[g] = 0, lost[g] + 1
                else:
                    used[e] += 1
    found, drops = plain_parts.capacity_mixture(x, chosen, weights, bank, capacity)
    assert drops.tolist() == lost
    torch.testing.assert_close(found, plain_parts.mixture(x, chosen, expected, bank), **CLOSE)
    # One group over all would drop others.
    together = plain_parts.slots(chosen.flatten(0, 1)[None], 4, 3 * capacity)[1]
    assert not torch.equal(together.flatten(), plain_parts.slots(chosen, 4, capacity)[1].flatten())


def test_capacity_is_a_share_rounded_up() -> None:
    assert plain_parts.capacity_of(11, 2, 5, 1.0) == 5
    assert plain_parts.capacity_of(10, 2, 5, 1.25) == 5
    assert plain_parts.capacity_of(10, 2, 5, 100.0) == 10


@pytest.mark.parametrize("name", ["mixtral-8x7b", "deepseek-v3"])
def test_a_model_counts_its_drops(name: str) -> None:
    plain, ample, short = (small(name, capacity_factor=factor) for factor in (0.0, 100.0, 0.6))
    params, tokens = plain_torch.parameters(plain, 9), batch_of(plain, 10)["tokens"]
    whole = plain_decoders.logits(params, tokens, plain)
    torch.testing.assert_close(plain_decoders.logits(params, tokens, ample), whole, **CLOSE)
    assert not plain_decoders.dropped(params, tokens, ample).any()
    assert differ(plain_decoders.logits(params, tokens, short), whole)
    drops = plain_decoders.dropped(params, tokens, short)
    assert drops.shape == (short.layers - short.dense_layers, len(tokens))
    # 0.6 of the choices have a slot, if that many want it.
    assert int(drops.min()) >= 11 * short.experts_per_token - short.experts * short.capacity(11) > 0


def test_group_limited_choice_is_deepseeks() -> None:
    scores, correction = random(40, 12), 0.3 * random(12, seed=1)
    chosen, weights = plain_parts.group_limited(scores, correction, 3, 4, 2, 2.5)
    for token in range(40):
        affinity = [1 / (1 + math.exp(-float(s))) for s in scores[token]]
        corrected = [a + float(c) for a, c in zip(affinity, correction, strict=True)]
        groups = sorted(range(4), key=lambda g: -sum(sorted(corrected[3 * g : 3 * g + 3])[1:]))[:2]
        best = sorted((e for e in range(12) if e // 3 in groups), key=lambda e: -corrected[e])[:3]
        assert chosen[token].tolist() == best
        expected = [2.5 * affinity[e] / sum(affinity[b] for b in best) for e in best]
        assert weights[token].tolist() == pytest.approx(expected, rel=1e-12)
    free = plain_parts.group_limited(scores, correction, 3, 1, 1, 2.5)[0]
    raw = plain_parts.group_limited(scores, torch.zeros(12, dtype=torch.float64), 3, 4, 2, 2.5)[0]
    assert not torch.equal(free, chosen)
    assert not torch.equal(raw, chosen)


def test_dlrm_is_made_of_torchs_modules() -> None:
    config = small("dlrm-kaggle")
    params, batch = plain_torch.parameters(config, 11, spread=1.0), batch_of(config, 12, 5)

    def layers(name: str, count: int) -> Any:
        found: list[Any] = []
        for i in range(count):
            weight, bias = params[f"{name}.{2 * i}.weight"], params[f"{name}.{2 * i}.bias"]
            found += [torch.nn.Linear(weight.shape[1], weight.shape[0], dtype=torch.float64), torch.nn.ReLU()]
            found[-2].load_state_dict({"weight": weight, "bias": bias})
        return torch.nn.Sequential(*found)

    bags = [F.embedding_bag(batch["sparse"][:, t], params[f"emb_l.{t}.weight"], mode="sum") for t in range(3)]
    dense = layers("bot_l", 2)(batch["dense"])
    vectors = [dense, *bags]
    pairs = [(vectors[i] * vectors[j]).sum(1) for i in range(4) for j in range(i)]
    expected = layers("top_l", 3)[:-1](torch.cat([dense, torch.stack(pairs, 1)], 1))[:, 0]
    found = plain_others.click_logits(params, batch, config)
    torch.testing.assert_close(found, expected, **CLOSE)
    assert differ(found, plain_others.click_logits(params, batch | {"sparse": batch["sparse"] * 0}, config))

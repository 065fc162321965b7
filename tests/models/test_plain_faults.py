"""Mistakes planted in the plain models, one at a time: the law beside each must then fail."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import pytest
from tests.planted import Fault, altered, code_of, function_of

pytest.importorskip("torch", reason="the extra `torch` is not installed")
from tests.models import test_plain_torch as laws
from tests.models import test_plain_training as training


class Planted(NamedTuple):
    """A piece of the source of a function, what stands there instead, and the law that sees it."""

    function: str
    old: str
    new: str
    law: Callable[[], None]


def steps(name: str) -> Callable[[], None]:
    return partial(training.test_three_steps_are_those_of_torchs_optimizers, name)


def pieces(name: str) -> Callable[[], None]:
    return partial(laws.test_prefill_then_decode_is_the_whole_sequence, name)


def counts(name: str) -> Callable[[], None]:
    return partial(training.test_every_parameter_counts, name)


def llama(name: str) -> Callable[[], None]:
    return partial(laws.test_llama_is_made_of_torchs_functions, name)


norms = laws.test_norms_and_activations_are_those_of_torch
attention = laws.test_attention_is_that_of_torch
turns = laws.test_rotary_turns_pairs_as_complex_numbers
losses = laws.test_losses_are_those_of_torch
choice = laws.test_group_limited_choice_is_deepseeks
chosen = laws.test_a_mixture_is_the_sum_over_each_tokens_choices
latent = laws.test_latent_attention_is_that_of_torch
gpt = laws.test_gpt_is_made_of_torchs_layers
dlrm = laws.test_dlrm_is_made_of_torchs_modules
drops = partial(laws.test_what_is_dropped_adds_nothing, 2)
causal = partial(laws.test_later_tokens_change_nothing_before_them, "mixtral-8x7b")

FAULTS = [
    Planted("plain_parts.layer_norm", "x - x.mean(-1, keepdim=True)", "x", norms),
    Planted("plain_parts.rms_norm", " + eps", "", norms),
    Planted("plain_parts.gelu_tanh", "0.044715", "0.0447", norms),
    Planted("plain_parts.silu", "x * ", "", norms),
    Planted("plain_parts.rotary", "- b * angles.sin()", "+ b * angles.sin()", turns),
    Planted("plain_parts.rotary", "dtype=x.dtype) / half", "dtype=x.dtype) / x.shape[-1]", turns),
    Planted("plain_parts.rotary_pairs", "x[..., 0::2], x[..., 1::2]", "x", turns),
    Planted("plain_parts.attend", "> first", ">= first", attention),
    Planted("plain_parts.attend", "/ math.sqrt(d)", "/ d", attention),
    Planted("plain_parts.attend", "first + torch.arange(s)", "torch.arange(s)", pieces("gpt2")),
    Planted(
        "plain_parts.attend",
        "queries.reshape(b, groups, heads // groups, s, d)",
        "queries.reshape(b, heads // groups, groups, s, d).transpose(1, 2)",
        laws.test_grouped_heads_are_repeated_heads,
    ),
    Planted(
        "plain_parts.top_weights", "torch.softmax(best, -1)", "torch.softmax(scores, -1).gather(-1, experts)", chosen
    ),
    Planted("plain_parts.group_limited", "affinity.gather", "choice.gather", choice),
    Planted("plain_parts.group_limited", "torch.topk(grouped, 2).values.sum(-1)", "grouped.amax(-1)", choice),
    Planted("plain_parts.group_limited", "torch.sigmoid(scores)", "torch.softmax(scores, -1)", choice),
    Planted("plain_parts.group_limited", "scale * weights", "weights", choice),
    Planted("plain_parts.mixture", "scatter(-1, experts, weights)", "scatter(-1, experts, 0.5)", chosen),
    Planted("plain_parts.capacity_of", "math.ceil", "math.floor", laws.test_capacity_is_a_share_rounded_up),
    Planted("plain_parts.slots", "place < capacity", "place <= capacity", drops),
    Planted("plain_parts.slots", "chosen.cumsum(1) - chosen", "chosen.cumsum(1)", drops),
    Planted("plain_parts.slots", "chosen.cumsum(1) - chosen", "chosen.flip(1).cumsum(1).flip(1) - chosen", causal),
    Planted(
        "plain_parts.capacity_mixture", "torch.where(kept, place, capacity)", "place.clamp(max=capacity - 1)", drops
    ),
    Planted("plain_parts.cross_entropy", ".mean()", ".sum()", losses),
    Planted("plain_decoders.gpt", "chunk(3, -1)", "flip(-1).chunk(3, -1)", gpt),
    Planted("plain_decoders.gpt", "[positions]", "[: len(positions)]", pieces("gpt2")),
    Planted("plain_decoders.grouped_attention", "turn(keys)", "keys", llama("llama3-8b")),
    Planted("plain_decoders.grouped_attention", "if config.qk_norm", "if False", counts("qwen3-4b")),
    Planted("plain_decoders.grouped_attention", "k_norm.weight", "q_norm.weight", llama("qwen3-4b")),
    Planted("plain_decoders.latent_attention", "parts.rotary_pairs", "parts.rotary", latent),
    Planted("plain_decoders.latent_attention", "turn(squeezed[", "(squeezed[", latent),
    Planted("plain_decoders.latent_attention", 'norm("kv_a_layernorm", squeezed[', "(squeezed[", latent),
    Planted("plain_decoders.llama", "if config.tied", "if True", counts("llama3-8b")),
    Planted("plain_decoders.routed_mlp", "if config.shared_ffn", "if False", counts("deepseek-v3")),
    Planted("plain_decoders.routed_mlp", 'config.router == "sigmoid"', "False", counts("deepseek-v3")),
    Planted("plain_decoders.step", "first + torch.arange", "torch.arange", pieces("llama3-8b")),
    Planted("plain_others.interact", "tril_indices(vectors.shape[1], vectors.shape[1], -", "triu_indices(4, 4, ", dlrm),
    Planted("plain_others.click_logits", ".sum(1)", ".mean(1)", dlrm),
    Planted("plain_others.recommender_loss", "odds).mean()", "odds).sum()", losses),
    Planted("plain_others.perceptron_loss", ".sum()", ".mean()", training.test_the_perceptrons_gradient_is_distirs),
    Planted("plain_torch.AdamW.update", "first / (1 - self.beta1**step)", "first", steps("mlp-xs")),
    Planted("plain_torch.AdamW.update", "second / (1 - self.beta2**step)", "second", steps("mlp-xs")),
    Planted("plain_torch.AdamW.update", " + self.eps", "", steps("mlp-xs")),
    Planted("plain_torch.AdamW.update", "self.rate * self.decay", "self.decay", steps("mlp-xs")),
    Planted("plain_torch.AdamW.update", "g.square()", "g", steps("mlp-xs")),
    Planted("plain_torch.Sgd.update", "- self.rate * g", "- g", steps("mlp-xs")),
]


@pytest.mark.parametrize("planted", FAULTS, ids=lambda p: f"{p.function}: {p.old} -> {p.new}")
def test_a_planted_mistake_is_seen(planted: Planted, monkeypatch: pytest.MonkeyPatch) -> None:
    planted.law()
    fault = Fault(f"tests.models.{planted.function}", "", planted.old, planted.new, ())
    function, module = function_of(fault.name)
    monkeypatch.setattr(function, "__code__", code_of(altered(fault), function, module))
    with pytest.raises(AssertionError):
        planted.law()

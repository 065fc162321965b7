"""What the models of a family are made of: sizes by the field names of presets, derived where they are left out."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

from shardplan.core import validation
from shardplan.core.ops.rotary import RotaryScaling
from shardplan.errors import ParseError, ShardplanError


def _check(sizes: DecoderSizes | PerceptronSizes | RecommenderSizes, *positive: str) -> None:
    """Hold every field against its annotation; those named are 1 or more."""
    for f in fields(sizes):
        what, value = f"Model.load: {f.name}", getattr(sizes, f.name)
        if f.type == "int":
            validation.whole_number(what, value, int(f.name in positive), kind=ShardplanError)
        elif f.type == "float":
            validation.number(what, value, ShardplanError)
        elif f.type == "str":
            validation.text(what, value, ShardplanError)
        elif f.type == "bool" or (value is not None and f.type == "bool | None"):
            validation.flag(what, value, ShardplanError)


def _divides(part: str, n: int, whole: str, total: int) -> None:
    if total % n:
        raise ShardplanError(f"Model.load: {part}={n} does not divide {whole}={total}; legal is one that does")


def period_of(letters: str) -> int:
    """Return after how many letters a text first repeats, to its end; its length where it never does.

    >>> period_of("wwfwwfw"), period_of("fww")
    (3, 3)
    """
    kept = [0]  # of each start of the text how much of it ends as it begins (Knuth, Morris and Pratt)
    for c in letters[1:]:
        k = kept[-1]
        while k and letters[k] != c:
            k = kept[k - 1]
        kept.append(k + (letters[k] == c))
    return len(letters) - kept[-1]


_EXPERTS = (
    "experts", "experts_per_token", "dense_layers", "dense_ffn", "shared_ffn", "shared_gate", "router", "router_groups",
    "router_groups_kept", "router_scale", "router_norm", "capacity_factor",
    "balance_loss", "router_z_loss",
)  # fmt: skip
_TURNED = (
    "rope_theta", "rope_scaling", "window_theta", "qk_norm", "qkv_bias", "o_bias", "sinks", "segments", "unit_norms",
    "post_norms", "embed_scale", "q_lora_rank", "kv_lora_rank", "mtp_layers", "mtp_weight",
)  # fmt: skip
ACTIVATIONS = ("silu", "gelu", "clamped")
_WITHOUT = {"gpt": (*_TURNED, *_EXPERTS), "llama": ("positions", *_EXPERTS), "moe": ("positions", "zigzag")}


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderSizes:
    """A GPT, a Llama or a mixture of experts; 0 where a model lacks the thing, or where a size follows from others.

    `seq` tokens a sequence; with `cache`, which is how many positions keys and values are kept for, it is a step of
    inference: prefill, or decode with seq 1. A GPT learns `positions`: the larger of both, unless they are said.
    `rope_scaling` is as `core.ops.rotary.RotaryScaling` reads it: `llama3 factor=8 ...`.
    Tokens and targets are in `zigzag` order over so many tiles: see `core.ops.zigzag`.
    `capacity_factor` is what of its even share of tokens an expert has room for in a sequence, 0: all that come.

    A token of a layer with a `window` sees so many, itself the last. `windows` says which layers have one, by letters
    of a period of layers: `wf` every other; by default all. `window_theta` is their `rope_theta`, without scaling.
    `attention_cap` and `logit_cap` c bend scores and logits x to c tanh(x / c); scores are scaled by `score_scale`.
    With `sinks` every head has a score more, of nothing. With `segments` there is an input of this name, `[batch
    sequence]`: the number of the sequence that a token is of, where several are packed into one.
    To a loss is added, of every layer with experts, `balance_loss` times experts times the sum over them of the part of
    choices that each has by its mean probability (arXiv 2101.03961, 2.2, of a microbatch's tokens), and
    `router_z_loss` times the mean square of the logarithm of the sum of exponentials of scores (arXiv
    2202.08906, 2.2). With `mtp_layers` D modules predict a token further each, by one layer more (arXiv 2412.19437,
    2.2), and `mtp_weight` / D of their losses is added; a config calls them `num_nextn_predict_layers`.
    With `dropless` the slots that `capacity_factor` gives experts are a bound: a job's step in which a choice has none
    raises on every rank, and nothing is dropped.
    In training `dropout` of what attention and MLP of a layer add is zero, and `embed_dropout` of what goes into the
    first, drawn from the input `seeds`, `[batch]`: a number for each sequence, other ones in another step.
    Gains of `unit_norms` are what is stored, and 1; with `post_norms` what a layer adds is normed, too.
    """

    family: str
    layers: int
    hidden: int
    heads: int
    seq: int
    vocab: int
    batch: int = 1
    kv_heads: int = 0
    ffn: int = 0
    gated_mlp: bool | None = None
    tied: bool | None = None
    positions: int = 0
    norm_eps: float = 1e-5
    rope_theta: float = 10000.0
    rope_scaling: str = ""
    head_dim: int = 0
    value_dim: int = 0
    rotary_dim: int = 0
    qk_norm: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    window: int = 0
    windows: str = ""
    window_theta: float = 0.0
    attention_cap: float = 0.0
    logit_cap: float = 0.0
    score_scale: float = 0.0
    sinks: bool = False
    segments: bool = False
    unit_norms: bool = False
    post_norms: bool = False
    embed_scale: float = 0.0
    activation: str = ""
    q_lora_rank: int = 0
    kv_lora_rank: int = 0
    experts: int = 0
    experts_per_token: int = 0
    dense_layers: int = 0
    dense_ffn: int = 0
    shared_ffn: int = 0
    router: str = ""
    router_groups: int = 1
    router_groups_kept: int = 1
    router_scale: float = 1.0
    router_norm: bool = True
    balance_loss: float = 0.0
    router_z_loss: float = 0.0
    mtp_layers: int = 0
    mtp_weight: float = 0.3
    shared_gate: bool = False
    capacity_factor: float = 1.0
    dropless: bool = False
    dropout: float = 0.0
    embed_dropout: float = 0.0
    cache: int = 0
    zigzag: int = 1
    model_type: str = ""
    source: str = ""

    def __post_init__(self) -> None:
        """Derive what is left out, then check."""
        _check(
            self, "layers", "hidden", "heads", "seq", "vocab", "batch", "zigzag", "router_groups", "router_groups_kept"
        )
        gpt, latent = self.family == "gpt", bool(self.kv_lora_rank)
        if not self.head_dim:
            _divides("heads", self.heads, "hidden", self.hidden)
        width = self.head_dim or self.hidden // self.heads
        usual = {
            "kv_heads": self.heads,
            "ffn": 4 * self.hidden if gpt else 0,
            "positions": max(self.seq, self.cache) if gpt else 0,
            "head_dim": width,
            "value_dim": width,
            "rotary_dim": width // 3 if latent else 0,
            "windows": "w" if self.window else "f",
            "activation": "" if gpt else "silu",
            "router": ("sigmoid" if latent else "softmax") if self.experts else "",
            "model_type": "gpt2" if gpt else "llama" if not self.experts else "deepseek_v3" if latent else "qwen3_moe",
        }
        for name, value in usual.items():
            object.__setattr__(self, name, getattr(self, name) or value)
        for name, value in (("gated_mlp", not gpt), ("tied", gpt)):
            if getattr(self, name) is None:
                object.__setattr__(self, name, value)
        self._agree()

    def _agree(self) -> None:
        """Refuse sizes that no model of the family has."""
        gpt, latent, last = self.family == "gpt", bool(self.kv_lora_rank), max(self.seq, self.cache)
        usual = {f.name: f.default for f in fields(self)}
        legal = {name: usual[name] for name in _WITHOUT[self.family]} | {"gated_mlp": not gpt}
        legal |= {"kv_heads": self.heads} if gpt or latent else {}
        legal |= {"activation": ""} if gpt else {}
        legal |= (
            {"qk_norm": False, "qkv_bias": False, "o_bias": False}
            if latent
            else {"value_dim": self.head_dim, "rotary_dim": 0}
        )
        if self.router != "sigmoid":
            legal |= {name: usual[name] for name in ("router_groups", "router_groups_kept", "router_scale")}
        for name, value in legal.items():
            if getattr(self, name) != value:
                self._refuse(name, f"is {value}")
        _check(self, "kv_heads", "ffn", *(("experts", "experts_per_token") if self.family == "moe" else ()))
        if not self.rope_theta:
            self._refuse("rope_theta", "is above 0")
        if not gpt:
            validation.choice("Model.load: activation", self.activation, ACTIVATIONS, ShardplanError)
        if {*self.windows} - {*("wf" if self.window else "f")}:
            self._refuse("windows", "are letters w (of a window) and f (full), and f alone without a window")
        for name in ("balance_loss", "router_z_loss"):
            if getattr(self, name) and self.router != "softmax":
                self._refuse(name, "is 0 where the router is no softmax")
        if self.dropless and not self.capacity_factor:
            self._refuse("dropless", "is False with capacity_factor=0, where nothing is dropped")
        for name in ("mtp_layers", "dropout", "embed_dropout") if self.zigzag > 1 else ():
            if getattr(self, name):
                self._refuse("zigzag", f"is 1 with {name}")
        for name in ("dropout", "embed_dropout"):
            if getattr(self, name) >= 1:
                self._refuse(name, "is a part below 1")
        if self.segments and self.cache:
            self._refuse("segments", "is False with a cache")
        try:
            RotaryScaling.parse(self.rope_scaling)
        except ParseError as error:
            raise ShardplanError(f"Model.load: rope_scaling: {error}") from None
        _divides("kv_heads", self.kv_heads, "heads", self.heads)
        turned = self.rotary_dim if latent else self.head_dim
        if not gpt and (turned % 2 or not 0 < turned <= self.head_dim - latent):
            self._refuse("rotary_dim" if latent else "head_dim", "is an even one" + ", below head_dim" * latent)
        if latent != bool(self.q_lora_rank):
            self._refuse("q_lora_rank", f"is 0 only where kv_lora_rank={self.kv_lora_rank} is")
        if 0 < self.cache < self.seq:
            self._refuse("cache", f"is 0, or seq={self.seq} or more")
        if self.cache and self.zigzag > 1:
            self._refuse("zigzag", "is 1 with a cache")
        if gpt and last > self.positions:
            self._refuse("cache" if self.cache else "seq", f"are up to positions={self.positions}")
        if self.family == "moe":
            validation.choice("Model.load: router", self.router, ("softmax", "sigmoid"), ShardplanError)
            _divides("router_groups", self.router_groups, "experts", self.experts)
            kept = min(self.router_groups_kept, self.router_groups) * (self.experts // self.router_groups)
            if self.router_groups_kept > self.router_groups:
                self._refuse("router_groups_kept", f"are up to router_groups={self.router_groups}")
            if self.experts_per_token > kept:
                self._refuse("experts_per_token", f"are up to {kept}")
            if self.dense_layers >= self.layers:
                self._refuse("dense_layers", f"are fewer than layers={self.layers}")

    def _refuse(self, name: str, legal: str) -> None:
        raise ShardplanError(f"Model.load: a {self.family} of {name}={getattr(self, name)}; legal {legal}")

    @property
    def ratio(self) -> int:
        """Query heads to a key head."""
        return self.heads // self.kv_heads

    def layer_runs(self, first: int, last: int) -> list[tuple[range, int]]:
        """Return layers in runs whose bodies are alike, and how many layers a body of each has: `windows` repeat."""
        letters = len(self.windows)  # what has such a period shows its least one within two of them
        kinds = "".join(self.windows[k % letters] for k in range(first, min(last, first + 2 * letters)))
        period = period_of(kinds)
        whole = (last - first) // period * period
        if period > 1 and whole < 2 * period:  # nothing repeats: runs of layers of one kind
            ends = [k for k in range(first + 1, last) if kinds[k - first] != kinds[k - first - 1]]
            return [(range(a, b), 1) for a, b in zip((first, *ends), (*ends, last), strict=True)]
        rest = self.layer_runs(first + whole, last) if first + whole < last else []
        return [(range(first, first + whole), period), *rest]

    def has_window(self, layer: int) -> bool:
        """Say whether a layer has a window."""
        return self.windows[layer % len(self.windows)] == "w"

    @property
    def capacity(self) -> int:
        """Slots of an expert for a sequence."""
        return expert_slots(self.capacity_factor, self.seq, self.experts_per_token, self.experts)


def expert_slots(factor: float, seq: int, taken: int, experts: int) -> int:
    """Return the slots of an expert for a sequence: its share times a factor, rounded up (arXiv 2101.03961, 2.2).

    With a factor of 0 it has one for every token.
    """
    return min(math.ceil(factor * seq * taken / experts), seq) or seq


@dataclass(frozen=True, slots=True, kw_only=True)
class PerceptronSizes:
    """DistIR's MLP: `layers` square products of width `hidden`."""

    family: str
    layers: int
    hidden: int
    batch: int = 1
    source: str = ""

    def __post_init__(self) -> None:
        """Check."""
        _check(self, "layers", "hidden", "batch")


@dataclass(frozen=True, slots=True, kw_only=True)
class RecommenderSizes:
    """A DLRM (arXiv 1906.00091): `bag` rows a table and sample; `bottom` and `top` are the widths of its MLPs."""

    family: str
    dense_features: int
    embedding_dim: int
    table_rows: tuple[int, ...]
    bottom: tuple[int, ...]
    top: tuple[int, ...]
    bag: int = 1
    batch: int = 1
    source: str = ""

    def __post_init__(self) -> None:
        """Check, and make lists tuples."""
        _check(self, "dense_features", "embedding_dim", "bag", "batch")
        for name in ("table_rows", "bottom", "top"):
            found = validation.items(f"Model.load: {name}", getattr(self, name), "whole numbers", ShardplanError)
            whole = (validation.whole_number(f"Model.load: {name}", n, 1, kind=ShardplanError) for n in found)
            object.__setattr__(self, name, tuple(whole))
        if not self.table_rows or self.bottom[-1:] != (self.embedding_dim,) or self.top[-1:] != (1,):
            raise ShardplanError(
                f"Model.load: bottom={self.bottom} and top={self.top}; legal end in embedding_dim={self.embedding_dim} "
                "and in 1, with at least one table"
            )

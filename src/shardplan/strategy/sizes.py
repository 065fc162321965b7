"""What the models of a family are made of: sizes by the field names of presets, derived where they are left out."""

from __future__ import annotations

import math
from dataclasses import dataclass

from shardplan.core import border
from shardplan.errors import ShardplanError


def _check(sizes: DecoderSizes | PerceptronSizes | RecommenderSizes, *names: str) -> None:
    for name in names:
        border.whole(f"Model.load: {name}", getattr(sizes, name), 1, kind=ShardplanError)


def _divides(part: str, n: int, whole: str, total: int) -> None:
    if total % n:
        raise ShardplanError(f"Model.load: {part}={n} does not divide {whole}={total}; legal is one that does")


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderSizes:
    """A GPT, a Llama or a mixture of experts; 0 where a model lacks the thing, or where a size follows from others.

    `seq` tokens a sequence; `positions`, the rows that a GPT learns, are as many unless they are said. With `cache`,
    which is how many positions keys and values are kept for, it is a step of inference: prefill, or decode with seq 1.
    `capacity_factor` is what of its even share of tokens an expert has room for in a sequence, 0: all that come.
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
    head_dim: int = 0
    value_dim: int = 0
    rotary_dim: int = 0
    qk_norm: bool = False
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
    capacity_factor: float = 1.0
    cache: int = 0
    model_type: str = ""
    source: str = ""

    def __post_init__(self) -> None:
        """Derive what is left out, then check."""
        gpt, latent = self.family == "gpt", bool(self.kv_lora_rank)
        _check(self, "layers", "hidden", "heads", "seq", "vocab", "batch")
        derived: dict[str, object] = {
            "kv_heads": self.kv_heads or self.heads,
            "ffn": self.ffn or (4 * self.hidden if gpt else 0),
            "gated_mlp": not gpt if self.gated_mlp is None else self.gated_mlp,
            "tied": gpt if self.tied is None else self.tied,
            "positions": self.positions or self.seq,
            "router": self.router or ("sigmoid" if latent else "softmax"),
            "model_type": self.model_type
            or ("gpt2" if gpt else "llama" if not self.experts else "deepseek_v3" if latent else "qwen3_moe"),
        }
        if not self.head_dim:
            _divides("heads", self.heads, "hidden", self.hidden)
            derived["head_dim"] = self.hidden // self.heads
        derived["value_dim"] = self.value_dim or derived.get("head_dim", self.head_dim)
        derived["rotary_dim"] = self.rotary_dim or (self.head_dim // 3 if latent else 0)
        for name, value in derived.items():
            object.__setattr__(self, name, value)
        self._agree()

    def _agree(self) -> None:
        """Refuse sizes that no model of the family has."""
        _check(self, "kv_heads", "ffn", "head_dim")
        _divides("kv_heads", self.kv_heads, "heads", self.heads)
        gpt, moe, last = self.family == "gpt", self.family == "moe", max(self.seq, self.cache)
        border.choice("Model.load: router", self.router, ("softmax", "sigmoid"), ShardplanError)
        refused = {
            f"gated_mlp={self.gated_mlp}; legal is {not gpt}": self.gated_mlp is gpt,
            f"experts={self.experts}; legal is {'1 or more' if moe else '0'}": (self.experts > 0) is not moe,
            f"kv_heads={self.kv_heads}; legal is heads={self.heads}": gpt and self.kv_heads != self.heads,
            f"cache={self.cache}; legal is 0, or seq={self.seq} or more": 0 < self.cache < self.seq,
            f"seq or cache {last}; legal are up to positions={self.positions}": gpt and last > self.positions,
            f"q_lora_rank={self.q_lora_rank} with kv_lora_rank={self.kv_lora_rank}; legal are both or none": bool(
                self.q_lora_rank
            )
            != bool(self.kv_lora_rank),
            f"rotary_dim={self.rotary_dim}; legal is an even one below head_dim={self.head_dim}": self.rotary_dim
            >= self.head_dim
            or self.rotary_dim % 2 == 1,
            f"dense_layers={self.dense_layers}; legal are fewer than layers={self.layers}": moe
            and not 0 <= self.dense_layers < self.layers,
        }
        if moe:
            _check(self, "experts_per_token", "router_groups", "router_groups_kept")
            _divides("router_groups", self.router_groups, "experts", self.experts)
            kept = self.router_groups_kept * (self.experts // self.router_groups)
            refused[f"experts_per_token={self.experts_per_token}; legal are up to {kept}"] = (
                self.experts_per_token > kept
            )
            border.number("Model.load: capacity_factor", self.capacity_factor, ShardplanError)
        for said, wrong in refused.items():
            if wrong:
                raise ShardplanError(f"Model.load: a {self.family} of {said}")

    @property
    def ratio(self) -> int:
        """Query heads to a key head."""
        return self.heads // self.kv_heads

    @property
    def capacity(self) -> int:
        """Slots of an expert for a sequence: its share times `capacity_factor`, rounded up (arXiv 2101.03961, 2.2)."""
        share = math.ceil(self.capacity_factor * self.seq * self.experts_per_token / self.experts)
        return min(share, self.seq) or self.seq


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
            found = border.items(f"Model.load: {name}", getattr(self, name), "whole numbers", ShardplanError)
            whole = (border.whole(f"Model.load: {name}", n, 1, kind=ShardplanError) for n in found)
            object.__setattr__(self, name, tuple(whole))
        if not self.table_rows or self.bottom[-1:] != (self.embedding_dim,) or self.top[-1:] != (1,):
            raise ShardplanError(
                f"Model.load: bottom={self.bottom} and top={self.top}; legal end in embedding_dim={self.embedding_dim} "
                "and in 1, with at least one table"
            )

"""Small models to run: every preset's kind with sizes that are unequal, prime where they may be, and random batches."""

from __future__ import annotations

from typing import Any

import torch
from tests.models import plain_torch
from tests.models.plain_parts import Params
from tests.models.published_counts import presets
from torch import Tensor

PRESETS = presets()
DECODERS: dict[str, dict[str, Any]] = {
    "gpt2": {"hidden": 15, "heads": 3, "kv_heads": 3, "ffn": 60},
    "llama3-8b": {"hidden": 24, "heads": 6, "kv_heads": 2, "ffn": 13},
    "qwen3-4b": {"hidden": 23, "heads": 6, "kv_heads": 2, "head_dim": 10, "ffn": 13},
    "mixtral-8x7b": {"hidden": 24, "heads": 6, "kv_heads": 2, "ffn": 7, "experts": 5},
    "qwen3-30b-a3b": {
        "hidden": 23,
        "heads": 6,
        "kv_heads": 3,
        "head_dim": 10,
        "ffn": 7,
        "experts": 7,
        "experts_per_token": 3,
    },
    "deepseek-v3": {
        "layers": 3,
        "hidden": 23,
        "heads": 3,
        "kv_heads": 3,
        "head_dim": 11,
        "rotary_dim": 4,
        "value_dim": 5,
        "q_lora_rank": 13,
        "kv_lora_rank": 7,
        "ffn": 6,
        "dense_layers": 1,
        "dense_ffn": 19,
        "shared_ffn": 6,
        "experts": 12,
        "experts_per_token": 3,
        "router_groups": 4,
        "router_groups_kept": 2,
    },
}
OTHERS: dict[str, dict[str, Any]] = {
    "mlp-xs": {"layers": 3, "hidden": 7},
    "dlrm-kaggle": {
        "dense_features": 5,
        "embedding_dim": 3,
        "table_rows": [7, 11, 2],
        "bag": 2,
        "bottom": [13, 3],
        "top": [11, 5, 1],
    },
}
SMALL = {name: {"layers": 2, "seq": 11, "vocab": 17} | sizes for name, sizes in DECODERS.items()} | OTHERS


def small(name: str, **others: Any) -> Any:
    """The small model of a preset's kind."""
    return plain_torch.config_of(PRESETS[name], **(SMALL[name] | others))


def batch_of(config: Any, seed: int, size: int = 3) -> Params:
    """Random inputs and targets of a model."""
    generator = torch.Generator().manual_seed(seed)

    def whole(high: int, *shape: int) -> Tensor:
        return torch.randint(high, shape, generator=generator)

    def real(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    if config.family == "mlp":
        return {"inputs": real(size, config.hidden), "targets": real(size, config.hidden)}
    if config.family == "dlrm":
        sparse = torch.stack([whole(rows, size, config.bag) for rows in config.table_rows], 1)
        return {"dense": real(size, config.dense_features), "sparse": sparse, "clicks": whole(2, size).double()}
    return {"tokens": whole(config.vocab, size, config.seq), "targets": whole(config.vocab, size, config.seq)}


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def differ(a: Tensor, b: Tensor) -> bool:
    """Whether two results are further apart than the laws allow."""
    return bool((a - b).abs().max() > 1e-6)

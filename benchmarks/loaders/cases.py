"""What a framework's loader is asked: the table it reads, the table it must agree with, sizes and degrees."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

Named = Mapping[str, np.ndarray]

LLAMA: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 4,
    "num_hidden_layers": 3, "vocab_size": 100, "tie_word_embeddings": False, "max_position_embeddings": 64,
}  # fmt: skip
MOE: dict[str, Any] = LLAMA | {"moe_intermediate_size": 16, "num_experts": 4, "num_local_experts": 4,
                               "num_experts_per_tok": 2}  # fmt: skip

LATENT: dict[str, Any] = {
    "hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 4, "q_lora_rank": 12, "kv_lora_rank": 16,
    "qk_rope_head_dim": 4, "qk_nope_head_dim": 8, "v_head_dim": 8, "n_routed_experts": 4, "moe_intermediate_size": 16,
    "intermediate_size": 48, "n_shared_experts": 2, "first_k_dense_replace": 1, "num_hidden_layers": 3,
    "vocab_size": 100, "tie_word_embeddings": False, "n_group": 1, "topk_group": 1, "num_experts_per_tok": 2,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class LoaderCase:
    """One run: `source` is the table of what is loaded, `target` the table of what the ranks then have.

    `sizes` are the model's config; `degrees` the target's, `given` the source's where it has any; `says` names the
    function of the framework that loads, `renamed` what was changed before a comparison, if anything; `fault` is why
    the loader is known to be wrong here, where it is.
    """

    source: str
    target: str
    sizes: Mapping[str, Any]
    says: str
    degrees: Mapping[str, Any] = field(default_factory=dict[str, Any])
    given: Mapping[str, Any] = field(default_factory=dict[str, Any])
    renamed: str = ""
    fault: str = ""

    def degree(self, axis: str) -> int:
        """A degree of the target, 1 where it is not said."""
        return int(self.degrees.get(axis, 1))

    @property
    def ranks(self) -> int:
        """How many ranks the target has by its degrees of meshes."""
        return math.prod(self.degree(axis) for axis in ("replica", "data", "pipeline", "tensor"))

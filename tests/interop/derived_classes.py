"""Two plain classes of one model: what is saved, and what a server holds on the ranks of a group."""

from types import SimpleNamespace

import torch
from torch import nn


class SavedModel(nn.Module):
    """Layers with gate and up apart, a square projection, experts, and a fused weight of unlike parts."""

    def __init__(self, config: SimpleNamespace) -> None:
        super().__init__()
        h, f, n, d = config.hidden_size, config.ffn, config.num_heads, config.head_dim
        self.embed = nn.Embedding(config.vocab_size, h)
        self.layers = nn.ModuleList()
        for _ in range(config.num_layers):
            layer = nn.Module()
            layer.gate, layer.up = nn.Linear(h, f, bias=False), nn.Linear(h, f, bias=False)
            layer.square = nn.Linear(h, h)
            layer.fused = nn.Linear(h, n * d + 2 * d, bias=False)
            layer.experts = nn.ModuleList([nn.Linear(h, f, bias=False) for _ in range(config.num_experts)])
            self.layers.append(layer)
        self.ends = nn.Sequential(nn.Linear(h, 3), nn.ReLU(), nn.Linear(3, h))


class CentredModel(SavedModel):
    """With a buffer that is saved, and one that is worked out."""

    def __init__(self, config: SimpleNamespace) -> None:
        super().__init__(config)
        self.register_buffer("centre", torch.zeros(config.hidden_size))
        self.register_buffer("scales", torch.ones(config.hidden_size), persistent=False)


class ServedModel(nn.Module):
    """Gate and up joined and cut, the vocabulary padded and cut, experts stacked."""

    def __init__(self, config: SimpleNamespace) -> None:
        super().__init__()
        self.config = config
        self.ranks, self.rank = torch.distributed.get_world_size(), torch.distributed.get_rank()
        h, f = config.hidden_size, config.ffn // self.ranks
        rows = -(-config.vocab_size // 16) * 16 // self.ranks
        self.embed = nn.Parameter(torch.zeros(rows, h))
        self.layers = nn.ModuleList()
        for _ in range(config.num_layers):
            layer = nn.Module()
            layer.gate_up = nn.Parameter(torch.zeros(2 * f, h))
            layer.square = nn.Parameter(torch.zeros(h, h // self.ranks))
            layer.w = nn.Parameter(torch.zeros(config.num_experts, f, h))
            self.layers.append(layer)

    def load_weights(self, weights) -> None:
        named = dict(weights)

        def part(x, dim=0):
            return x.chunk(self.ranks, dim)[self.rank]

        whole = named["embed.weight"]
        padded = torch.cat([whole, whole.new_zeros(-len(whole) % 16, whole.shape[1])])
        self.embed.data.copy_(part(padded))
        for n, layer in enumerate(self.layers):
            at = f"layers.{n}."
            layer.gate_up.data.copy_(torch.cat([part(named[at + f"{x}.weight"]) for x in ("gate", "up")]))
            layer.square.data.copy_(part(named[at + "square.weight"], 1))
            experts = [named[at + f"experts.{x}.weight"] for x in range(self.config.num_experts)]
            layer.w.data.copy_(torch.stack([part(e) for e in experts]))

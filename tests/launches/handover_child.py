"""A Llama of two layers in torch, whole and as a plan's own file lays it: one process of a gloo group."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q_proj, self.o_proj = nn.Linear(16, 16, bias=False), nn.Linear(16, 16, bias=False)
        self.k_proj, self.v_proj = nn.Linear(16, 8, bias=False), nn.Linear(16, 8, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (p(x).unflatten(-1, (-1, 4)).transpose(1, 2) for p in (self.q_proj, self.k_proj, self.v_proj))
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.o_proj(y.transpose(1, 2).flatten(-2))


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = nn.Linear(16, 24, bias=False), nn.Linear(16, 24, bias=False)
        self.down_proj = nn.Linear(24, 16, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.input_layernorm, self.post_attention_layernorm = nn.RMSNorm(16), nn.RMSNorm(16)
        self.self_attn, self.mlp = Attention(), Mlp()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.self_attn(self.input_layernorm(x))
        return x + self.mlp(self.post_attention_layernorm(x))


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed_tokens, self.norm = nn.Embedding(32, 16), nn.RMSNorm(16)
        self.layers = nn.ModuleList(Layer() for _ in range(2))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed_tokens(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.norm(x)


class Llama(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.model, self.lm_head = Decoder(), nn.Linear(16, 32, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.lm_head(self.model(tokens))


def train(module: Any, tokens: torch.Tensor) -> list[float]:
    """The losses of three steps."""
    found: list[float] = []
    optimizer = torch.optim.SGD(module.parameters(), lr=0.5)
    for _ in range(3):
        loss = functional.cross_entropy(module(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


def main(rank: int, size: int, store: str, file: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size)
    torch.manual_seed(0)
    whole, mine = Llama(), Llama()
    mine.load_state_dict(whole.state_dict())
    tokens = torch.randint(32, (8, 9))
    space: dict[str, Any] = {}
    exec(Path(file).read_text(), space)
    mesh = space["make_mesh"]("cpu")
    space["apply_plan"](mine, mesh, dtype=None)
    at, parts = mesh["data"].get_local_rank(), mesh["data"].size()
    found = torch.tensor(train(mine, tokens.chunk(parts)[at]))
    dist.all_reduce(found)
    wanted = torch.tensor(train(whole, tokens))
    assert torch.allclose(found / size, wanted, atol=1e-5), (found / size, wanted)
    local = sum(p.to_local().numel() for p in mine.parameters())
    assert local * size < 1.2 * sum(p.numel() for p in whole.parameters()), local
    assert wanted[2] < wanted[0] - 0.1
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4])

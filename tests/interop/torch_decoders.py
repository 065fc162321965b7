"""A GPT-2 and a Llama in plain torch, as one writes them for `torch.export`; none imports the package."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional


class GptBlock(nn.Module):
    def __init__(self, hidden: int, heads: int, ffn: int) -> None:
        super().__init__()
        self.heads = heads
        self.first, self.second = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.fused, self.out = nn.Linear(hidden, 3 * hidden), nn.Linear(hidden, hidden)
        self.up, self.down = nn.Linear(hidden, ffn), nn.Linear(ffn, hidden)

    def forward(self, x: Tensor) -> Tensor:
        b, s, h = x.shape
        parts = self.fused(self.first(x)).split(h, dim=2)
        q, k, v = (part.view(b, s, self.heads, h // self.heads).transpose(1, 2) for part in parts)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).contiguous().view(b, s, h))
        return x + self.down(functional.gelu(self.up(self.second(x)), approximate="tanh"))


class Gpt(nn.Module):
    """`odd` layers have an MLP of another width."""

    def __init__(
        self, layers: int, hidden: int, heads: int, vocab: int, positions: int, odd: Sequence[int] = ()
    ) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(vocab, hidden), nn.Embedding(positions, hidden)
        blocks = (GptBlock(hidden, heads, (4 + (k in odd)) * hidden) for k in range(layers))
        self.blocks, self.norm = nn.ModuleList(blocks), nn.LayerNorm(hidden)

    def forward(self, ids: Tensor, targets: Tensor | None = None) -> Tensor:
        x = self.tokens(ids) + self.places(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x)
        logits = functional.linear(self.norm(x), self.tokens.weight)
        if targets is None:
            return logits
        return functional.cross_entropy(logits.view(-1, logits.shape[-1]), targets.view(-1))


class Gain(nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden))

    def forward(self, x: Tensor) -> Tensor:
        return functional.rms_norm(x, x.shape[-1:], self.weight, 1e-5)


class OpenGain(Gain):
    """The same norm, written out."""

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5))


def turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    return x * cos + torch.cat((-x[..., half:], x[..., :half]), dim=-1) * sin


class LlamaBlock(nn.Module):
    def __init__(self, hidden: int, heads: int, kv_heads: int, ffn: int, norm: type[Gain]) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head = heads, kv_heads, hidden // heads
        self.first, self.second = norm(hidden), norm(hidden)
        self.q, self.o = nn.Linear(hidden, hidden, bias=False), nn.Linear(hidden, hidden, bias=False)
        self.k, self.v = (nn.Linear(hidden, kv_heads * self.head, bias=False) for _ in range(2))
        self.gate, self.up = nn.Linear(hidden, ffn, bias=False), nn.Linear(hidden, ffn, bias=False)
        self.down = nn.Linear(ffn, hidden, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        b, s, _ = x.shape
        y = self.first(x)
        q = self.q(y).view(b, s, self.heads, self.head).transpose(1, 2)
        k, v = (f(y).view(b, s, self.kv_heads, self.head).transpose(1, 2) for f in (self.k, self.v))
        q, k = turned(q, cos, sin), turned(k, cos, sin)
        k, v = (
            z[:, :, None].expand(b, self.kv_heads, self.heads // self.kv_heads, s, self.head).reshape(q.shape)
            for z in (k, v)
        )
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o(mixed.transpose(1, 2).reshape(b, s, -1))
        y = self.second(x)
        return x + self.down(functional.silu(self.gate(y)) * self.up(y))


class Llama(nn.Module):
    def __init__(
        self, layers: int, hidden: int, heads: int, kv_heads: int, ffn: int, vocab: int, norm: type[Gain] = Gain
    ) -> None:
        super().__init__()
        self.tokens, self.head = nn.Embedding(vocab, hidden), nn.Linear(hidden, vocab, bias=False)
        blocks = (LlamaBlock(hidden, heads, kv_heads, ffn, norm) for _ in range(layers))
        self.blocks, self.norm, self.width = nn.ModuleList(blocks), norm(hidden), hidden // heads

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids)
        kind = x.dtype
        rates = 500000.0 ** (-torch.arange(0, self.width, 2, dtype=kind, device=ids.device) / self.width)
        angles = torch.arange(ids.shape[1], dtype=kind, device=ids.device)[:, None] * rates
        angles = torch.cat((angles, angles), dim=-1)
        cos, sin = angles.cos(), angles.sin()
        for block in self.blocks:
            x = block(x, cos, sin)
        return self.head(self.norm(x))

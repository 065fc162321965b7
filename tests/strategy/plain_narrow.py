"""A Llama in plain torch, the batch at once, whose layers multiply in 8 bits: current scaling, e4m3 and e5m2."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, silu

from strategy.plain_llama import Weights, normed, turned

FORMATS = {torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0}


def quantized(x: Tensor, kind: torch.dtype) -> tuple[Tensor, Tensor]:
    """In 8 bits, as torch rounds them, and what to multiply with."""
    whole, most = FORMATS[kind], x.detach().abs().max().float()
    return (x.float() * (whole / most)).clamp(-whole, whole).to(kind).to(x.dtype), (most / whole).to(x.dtype)


class Narrow(torch.autograd.Function):
    """A product of rows with a weight [out in], both in e4m3; back with the cotangent in e5m2."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        (a, s), (b, t) = (quantized(y, torch.float8_e4m3fn) for y in (x, w))
        ctx.save_for_backward(a, s, b, t)
        return (wide(a) @ wide(b).T * wide(s) * wide(t)).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor]:
        a, s, b, t = ctx.saved_tensors
        c, u = quantized(dy, torch.float8_e5m2)
        c, u = wide(c), wide(u)
        return (c @ wide(b) * u * wide(t)).to(dy.dtype), (c.T @ wide(a) * u * wide(s)).to(dy.dtype)


def wide(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()


def linear(x: Tensor, w: Tensor) -> Tensor:
    return Narrow.apply(x.flatten(0, -2), w).unflatten(0, x.shape[:-1])  # type: ignore[no-any-return]


def attention(w: Weights, block: str, x: Tensor, c: dict[str, Any]) -> Tensor:
    n, groups, width = c["heads"], c["kv_heads"], c["hidden"] // c["heads"]
    q, k, v = (linear(x, w[f"{block}.{m}_proj.weight"]).unflatten(-1, (-1, width)).transpose(1, 2) for m in "qkv")
    q, k = (torch.stack([turned(wide(one)) for one in y]).to(x.dtype) for y in (q, k))
    k, v = (y.repeat_interleave(n // groups, 1) for y in (k, v))
    scores = (q @ k.transpose(2, 3) / width**0.5).masked_fill(
        torch.ones(x.shape[1], x.shape[1]).triu(1) > 0, -torch.inf
    )
    return linear((scores.softmax(-1) @ v).transpose(1, 2).flatten(2), w[f"{block}.o_proj.weight"])


def loss(w: Weights, tokens: Tensor, targets: Tensor, c: dict[str, Any]) -> Tensor:
    """The sum of the losses of a batch."""
    x = w["model.embed_tokens.weight"][tokens]
    for number in range(c["layers"]):
        block = f"model.layers.{number}"
        x = x + attention(w, f"{block}.self_attn", normed(x, w[f"{block}.input_layernorm.weight"]), c)
        y = normed(x, w[f"{block}.post_attention_layernorm.weight"])
        gate, up, down = (w[f"{block}.mlp.{name}_proj.weight"] for name in ("gate", "up", "down"))
        x = x + linear(silu(linear(y, gate)) * linear(y, up), down)
    found = normed(x, w["model.norm.weight"]) @ w["lm_head.weight"].T
    return cross_entropy(wide(found).flatten(0, 1), targets.flatten(), reduction="sum")

"""A Llama and its mixture in plain torch, one sequence and one layer at a time, by the tensors of a checkpoint."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, silu

from shardplan import Model

Weights = dict[str, Tensor]


def drawn_weights(model: Model, rng: np.random.Generator) -> tuple[dict[str, np.ndarray], Weights]:
    """Parameters of a model drawn, gains of norms around 1, and the same as leaves of torch, by their names there."""
    types = model.program.types
    drawn = {n: rng.normal(0, 0.4, types[n].shape) + ("norm" in n) for n in model.parameters}
    return drawn, {n: torch.tensor(x, requires_grad=True) for n, x in model.unpack(drawn).items()}


def normed(x: Tensor, gain: Tensor) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * gain


def turned(x: Tensor, theta: float = 1e4) -> Tensor:
    """Rotary positions of x [heads sequence dim], by complex numbers."""
    half = x.shape[-1] // 2
    angle = torch.arange(x.shape[1])[:, None] * theta ** (-torch.arange(half, dtype=x.dtype) / half)
    by = torch.polar(torch.ones_like(angle), angle)
    z = torch.complex(x[..., :half], x[..., half:]) * by
    return torch.cat([z.real, z.imag], -1)


def attention(w: Weights, block: str, x: Tensor, c: dict[str, Any], window: int) -> Tensor:
    n, groups, width = c["heads"], c["kv_heads"], c["hidden"] // c["heads"]
    q, k, v = ((x @ w[f"{block}.{name}_proj.weight"].T).unflatten(-1, (-1, width)).transpose(0, 1) for name in "qkv")
    q, k, v = turned(q), *(y.repeat_interleave(n // groups, 0) for y in (turned(k), v))
    scores = q @ k.transpose(1, 2) / width**0.5
    if cap := c.get("attention_cap"):
        scores = cap * torch.tanh(scores / cap)
    place = torch.arange(len(x))
    ago = place[:, None] - place
    scores = scores.masked_fill((ago < 0) | ((ago >= window) if window else ago < 0), -torch.inf)
    if c.get("sinks"):
        scores = torch.cat([scores, w[f"{block}.sinks"][:, None, None].expand(-1, len(x), 1)], -1)
    mixed = torch.softmax(scores, -1)[..., : len(x)] @ v
    return mixed.transpose(0, 1).flatten(1) @ w[f"{block}.o_proj.weight"].T


def gated(w: Weights, block: str, x: Tensor) -> Tensor:
    gate, up, down = (w[f"{block}.{name}_proj.weight"] for name in ("gate", "up", "down"))
    return (silu(x @ gate.T) * (x @ up.T)) @ down.T


def layer(w: Weights, number: int, x: Tensor, c: dict[str, Any], routed: list[Tensor]) -> Tensor:
    """One layer; scores of a router are added to `routed`. `c["drop"]`, where it is there, masks what is added."""
    block, letters = f"model.layers.{number}", c.get("windows", "w")
    window = c.get("window", 0) if letters[number % len(letters)] == "w" else 0
    drop = c.get("drop", lambda y: y)
    x = x + drop(attention(w, f"{block}.self_attn", normed(x, w[f"{block}.input_layernorm.weight"]), c, window))
    y = normed(x, w[f"{block}.post_attention_layernorm.weight"])
    if not c.get("experts"):
        return x + drop(gated(w, f"{block}.mlp", y))
    scores = y @ w[f"{block}.mlp.gate.weight"].T
    routed.append(scores)
    best, chosen = scores.topk(c["experts_per_token"])
    weights = best.softmax(-1)
    for token in range(len(x)):
        for at, expert in enumerate(chosen[token].tolist()):
            made = gated(w, f"{block}.mlp.experts.{expert}", y[token])
            x = x.index_add(0, torch.tensor([token]), (weights[token, at] * made)[None])
    return x


def loss(w: Weights, tokens: Tensor, targets: Tensor, segments: Tensor, c: dict[str, Any]) -> Tensor:
    """The loss of a batch of rows, of which every segment goes through the model alone."""
    total, further, count, routed = torch.zeros(()).double(), torch.zeros(()).double(), 0, {}
    for row in range(len(tokens)):
        starts = [0, *(k for k in range(1, tokens.shape[1]) if segments[row, k] != segments[row, k - 1])]
        for begin, end in zip(starts, [*starts[1:], tokens.shape[1]], strict=True):
            ids, wanted = tokens[row, begin:end], targets[row, begin:end]
            x = w["model.embed_tokens.weight"][ids]
            for number in range(c["layers"]):
                x = layer(w, number, x, c, routed.setdefault(number, []))
            total = total + cross_entropy(logits(w, x, "model.norm.weight", c), wanted, reduction="sum")
            count += int((wanted != -100).sum())
            for k in range(c.get("mtp_layers", 0)):
                block = f"model.layers.{c['layers'] + k}"
                token = normed(w["model.embed_tokens.weight"][wanted.clamp(0)], w[f"{block}.enorm.weight"])
                x = torch.cat([token, normed(x, w[f"{block}.hnorm.weight"])], -1) @ w[f"{block}.eh_proj.weight"].T
                x = layer(w, c["layers"] + k, x, c, routed.setdefault(c["layers"] + k, []))
                later = torch.cat([wanted[1:], torch.tensor([-100])])
                wanted = torch.where(wanted == -100, -100, later)
                found = logits(w, x, f"{block}.shared_head.norm.weight", c)
                further = further + cross_entropy(found, wanted, reduction="sum")
    loss = total / count
    if c.get("mtp_layers"):
        loss = loss + c["mtp_weight"] / c["mtp_layers"] * further / count
    for parts in routed.values() if c.get("experts") else ():
        scores = torch.cat(parts)
        chosen = torch.zeros_like(scores).scatter(1, scores.topk(c["experts_per_token"])[1], 1.0)
        even = (chosen.mean(0) * scores.softmax(-1).mean(0)).sum()
        loss = loss + c.get("balance_loss", 0) * c["experts"] * even
        loss = loss + c.get("router_z_loss", 0) * scores.logsumexp(-1).square().mean()
    return loss


def logits(w: Weights, x: Tensor, norm: str, c: dict[str, Any]) -> Tensor:
    found = normed(x, w[norm]) @ w["lm_head.weight"].T
    return c["logit_cap"] * torch.tanh(found / c["logit_cap"]) if c.get("logit_cap") else found

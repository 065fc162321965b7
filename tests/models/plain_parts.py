"""The parts of the plain models: norms, rotary turns, causal attention, gated MLPs and routed experts, in torch alone.

Nothing here is fast, and nothing comes from the package: it is what the built models are compared with.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

Params = dict[str, Tensor]


def layer_norm(x: Tensor, gain: Tensor, bias: Tensor, eps: float) -> Tensor:
    centred = x - x.mean(-1, keepdim=True)
    return centred * torch.rsqrt(centred.square().mean(-1, keepdim=True) + eps) * gain + bias


def rms_norm(x: Tensor, gain: Tensor, eps: float) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * gain


def gelu_tanh(x: Tensor) -> Tensor:
    return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def silu(x: Tensor) -> Tensor:
    return x * torch.sigmoid(x)


def rotary(x: Tensor, positions: Tensor, theta: float) -> Tensor:
    """Turn `x [.., s, d]` by its `positions [s]`: dim j with dim j + d/2, as public checkpoints of Llama have it."""
    half = x.shape[-1] // 2
    frequencies = theta ** (-torch.arange(half, dtype=x.dtype) / half)
    angles = positions.to(x.dtype)[:, None] * frequencies
    a, b = x[..., :half], x[..., half:]
    return torch.cat([a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()], -1)


def rotary_pairs(x: Tensor, positions: Tensor, theta: float) -> Tensor:
    """Turn dim 2j with dim 2j + 1, as DeepSeek-V3 does; the result has the first of each pair, then the second.

    Queries and keys come out in one order, so that their products are those of the order in which they came.
    """
    return rotary(torch.cat([x[..., 0::2], x[..., 1::2]], -1), positions, theta)


def attend(queries: Tensor, keys: Tensor, values: Tensor, first: int | Tensor) -> Tensor:
    """Causal attention of `queries [b, heads, s, d]`, the first at position `first`, to `keys [b, groups, t, d]`.

    Head h reads group h // (heads / groups); `values [b, groups, t, v]` may be of another width. Keys after a query
    are not seen, whatever stands there: a cache may be longer than what is written of it.
    """
    b, heads, s, d = queries.shape
    groups, t = keys.shape[1], keys.shape[2]
    grouped = queries.reshape(b, groups, heads // groups, s, d)
    scores = torch.einsum("bgrsd,bgtd->bgrst", grouped, keys) / math.sqrt(d)
    later = torch.arange(t)[None, :] > first + torch.arange(s)[:, None]
    weights = torch.softmax(scores.masked_fill(later, -math.inf), -1)
    return torch.einsum("bgrst,bgtv->bgrsv", weights, values).reshape(b, heads, s, values.shape[-1])


def split_heads(x: Tensor, heads: int) -> Tensor:
    """Bring `[b, s, heads d]` to `[b, heads, s, d]`."""
    return x.unflatten(-1, (heads, -1)).transpose(1, 2)


def join_heads(x: Tensor) -> Tensor:
    """Bring `[b, heads, s, d]` to `[b, s, heads d]`."""
    return x.transpose(1, 2).flatten(-2)


def gated_mlp(x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    return (silu(x @ gate.T) * (x @ up.T)) @ down.T


def top_weights(scores: Tensor, taken: int) -> tuple[Tensor, Tensor]:
    """The `taken` best of softmax scores `[.., experts]`, best first, and their weights, which sum to 1.

    The softmax over all, divided by what the chosen have of it, is the softmax over the chosen (arXiv 2401.04088, 2.1).
    """
    best, experts = torch.topk(scores, taken)
    return experts, torch.softmax(best, -1)


def group_limited(
    scores: Tensor, correction: Tensor, taken: int, groups: int, groups_kept: int, scale: float
) -> tuple[Tensor, Tensor]:
    """DeepSeek-V3's choice (arXiv 2412.19437, 2.1.2): sigmoid affinities, corrected for the choice alone.

    A group of experts counts by the sum of its two best; experts outside the best `groups_kept` groups are not chosen.
    Weights are the affinities without the correction, made to sum to `scale`.
    """
    affinity = torch.sigmoid(scores)
    choice = affinity + correction
    grouped = choice.unflatten(-1, (groups, -1))
    if groups > 1:
        kept = torch.topk(torch.topk(grouped, 2).values.sum(-1), groups_kept).indices
        dropped = torch.ones_like(grouped[..., 0], dtype=torch.bool).scatter(-1, kept, False)
        grouped = grouped.masked_fill(dropped[..., None], -math.inf)
    experts = torch.topk(grouped.flatten(-2), taken).indices
    weights = affinity.gather(-1, experts)
    return experts, scale * weights / weights.sum(-1, keepdim=True)


def mixture(x: Tensor, experts: Tensor, weights: Tensor, bank: list[tuple[Tensor, Tensor, Tensor]]) -> Tensor:
    """Weigh the chosen experts' gated MLPs, without limit on an expert's tokens: each sees all, most at weight 0."""
    table = torch.zeros(*x.shape[:-1], len(bank), dtype=x.dtype).scatter(-1, experts, weights)
    return sum((table[..., e, None] * gated_mlp(x, *bank[e]) for e in range(len(bank))), torch.zeros_like(x))


def capacity_of(tokens: int, taken: int, experts: int, factor: float) -> int:
    """Slots of an expert in a group: its even share times `factor`, rounded up (arXiv 2101.03961, section 2.2).

    More than `tokens` would stay empty, as a token takes an expert once.
    """
    return min(math.ceil(factor * tokens * taken / experts), tokens)


def slots(experts: Tensor, count: int, capacity: int) -> tuple[Tensor, Tensor, Tensor]:
    """Place the choices `experts [g, n, k]` in the slots of `count` experts, each group apart.

    First come, first served: tokens in order, a token's better choice before its worse one, so that no token's place
    depends on later ones. Returns each choice's slot, whether it has one, and the choices dropped in each group.
    """
    flat = experts.flatten(1)
    chosen = torch.nn.functional.one_hot(flat, count)
    place = (chosen.cumsum(1) - chosen).gather(-1, flat[..., None])[..., 0].reshape(experts.shape)
    kept = place < capacity
    return place, kept, (~kept).sum((1, 2))


def capacity_mixture(
    x: Tensor, experts: Tensor, weights: Tensor, bank: list[tuple[Tensor, Tensor, Tensor]], capacity: int
) -> tuple[Tensor, Tensor]:
    """Weigh the chosen experts' gated MLPs of `x [g, n, h]`, at most `capacity` choices an expert and group.

    Tokens go to `[g, expert, capacity, h]` and come back; a dropped choice adds nothing, and the weights of the others
    stay. Returns the result and the choices dropped in each group.
    """
    g, n, h = x.shape
    place, kept, drops = slots(experts, len(bank), capacity)
    # One slot more takes what is dropped, and is cut off.
    at = torch.where(kept, place, capacity)
    row = (experts * (capacity + 1) + at).flatten(1)[..., None].expand(-1, -1, h)
    tokens = x[:, :, None].expand(-1, -1, experts.shape[-1], -1).flatten(1, 2)
    sent = torch.zeros(g, len(bank) * (capacity + 1), h, dtype=x.dtype).scatter(1, row, tokens)
    sent = sent.unflatten(1, (len(bank), capacity + 1))[:, :, :capacity]
    done = torch.stack([gated_mlp(sent[:, e], *bank[e]) for e in range(len(bank))], 1)
    done = torch.nn.functional.pad(done, (0, 0, 0, 1)).flatten(1, 2)
    back = done.gather(1, row).unflatten(1, (n, -1))
    return (weights[..., None] * back).sum(2), drops


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """The mean over all tokens of `-log softmax(logits)[target]`."""
    return (torch.logsumexp(logits, -1) - logits.gather(-1, targets[..., None])[..., 0]).mean()

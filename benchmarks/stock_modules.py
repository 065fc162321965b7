"""29 plain torch modules with one call's arguments, for `stock_models`: what people write, each with weights.

The batch is 4, and sizes along which `tensor=2` may cut are even.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from benchmarks.import_modules import Of, halves, heads, numbers, rotated, whole
from torch import Tensor, nn
from torch._higher_order_ops.scan import scan
from torch.nn import functional


class Called(NamedTuple):
    """A module, one call's arguments by their names, and what their dims are called."""

    module: nn.Module
    example: dict[str, Any] | tuple[Tensor, ...]
    names: dict[str, tuple[str | None, ...]]


class Attention(nn.Module):
    """Attention written out, on queries, keys and values that may be turned, and scores that may be changed."""

    def __init__(
        self,
        turn: Callable[[Tensor], Tensor] = lambda x: x,
        change: Callable[[Tensor], Tensor] = lambda s: s,
        kv_heads: int = 4,
    ) -> None:
        super().__init__()
        self.q, self.o = nn.Linear(16, 16), nn.Linear(16, 16)
        self.k, self.v = nn.Linear(16, 4 * kv_heads), nn.Linear(16, 4 * kv_heads)
        self.turn, self.change, self.kv_heads = turn, change, kv_heads

    def forward(self, x: Tensor) -> Tensor:
        """Causal, by products."""
        q, k, v = heads(self.q(x), 4), heads(self.k(x), self.kv_heads), heads(self.v(x), self.kv_heads)
        k, v = (y.repeat_interleave(4 // self.kv_heads, 1) for y in (k, v))
        n = x.shape[1]
        q, k = (self.turn(y.flatten(0, 1)).unflatten(0, y.shape[:2]) for y in (q, k))
        scores = self.change(q @ k.transpose(-1, -2) * 0.5)
        scores = scores.masked_fill(~torch.ones(n, n, dtype=torch.bool).tril(), float("-inf"))
        return self.o((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))


class Einsums(nn.Module):
    """Attention of three products by letters."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Parameter(torch.empty(3, 16, 4, 4))
        self.out = nn.Parameter(torch.empty(4, 4, 16))

    def forward(self, x: Tensor) -> Tensor:
        """Over all positions."""
        q, k, v = torch.einsum("bsd,cdhe->cbshe", x, self.qkv)
        chances = torch.einsum("bshe,bthe->bhst", q, k).softmax(-1)
        return torch.einsum("bhst,bthe,hed->bsd", chances, v, self.out)


class Mixture(nn.Module):
    """Experts of which two are taken, by one-hot rows; all are computed."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(16, 4)
        self.up, self.down = nn.Parameter(torch.empty(4, 16, 24)), nn.Parameter(torch.empty(4, 24, 16))

    def forward(self, x: Tensor) -> Tensor:
        """The two of the largest weight."""
        weights, ids = self.gate(x).softmax(-1).topk(2)
        by = (functional.one_hot(ids, 4).to(x.dtype) * weights[..., None]).sum(-2)
        made = torch.einsum("bsef,efd->bsed", functional.silu(torch.einsum("bsd,edf->bsef", x, self.up)), self.down)
        return (made * by[..., None]).sum(-2)


class Recurrence(nn.Module):
    """A linear recurrence over positions, by torch's own scan."""

    def __init__(self) -> None:
        super().__init__()
        self.given, self.out, self.decay = nn.Linear(16, 24), nn.Linear(24, 16), nn.Parameter(torch.empty(24))

    def forward(self, x: Tensor) -> Tensor:
        """What is carried decays, and takes what comes."""
        keep = self.decay.sigmoid()

        def step(held: Tensor, new: Tensor) -> tuple[Tensor, Tensor]:
            held = held * keep + new
            return held, held.tanh()

        given = self.given(x)
        _, made = scan(step, torch.zeros_like(given[:, 0]), given, dim=1)
        return self.out(made.movedim(0, 1))


class Chosen(nn.Module):
    """A branch whose predicate is a constant."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.deep = nn.Linear(16, 24), nn.Linear(24, 16), torch.tensor(True)

    def forward(self, x: Tensor) -> Tensor:
        """By torch's `cond`."""
        return self.b(torch.cond(self.deep, lambda y: y.sigmoid(), lambda y: y * 2, (self.a(x),)))


class Conv(nn.Module):
    """Convolutions with batch norm, beside the input."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(4, 8, 3, padding=1), nn.Conv2d(8, 4, 3, padding=1)
        self.c, self.d = nn.BatchNorm2d(8), nn.BatchNorm2d(4)

    def forward(self, x: Tensor) -> Tensor:
        """A ReLU behind each."""
        return functional.relu(x + self.d(self.b(functional.relu(self.c(self.a(x))))))


def _mlp(*between: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Linear(16, 24), *between, nn.Linear(24, 16))


def _between(function: Callable[..., Any]) -> Of:
    """A function of `[batch sequence 24]`, between two products."""
    return Of(lambda x, a, b: b(function(a(x))), nn.Linear(16, 24), nn.Linear(24, 16))


def _put(x: Tensor) -> Tensor:
    x = x.clone()
    x[:, torch.tensor([1, 3])] = 0.25
    return x


def modules() -> dict[str, Callable[[], Called]]:
    """Return the modules by name, each made when it is called."""
    x, image, ids = numbers(4, 6, 16), numbers(4, 4, 8, 8), whole(18, 4, 6)
    words, bias = ("batch", "sequence", None), torch.arange(6).flip(0) * 0.25
    window = torch.ones(6, 6).tril(-3).bool()

    def of(module: nn.Module) -> Called:
        """Of `[batch sequence hidden]`, whatever the argument is called."""
        kinds: dict[type[nn.Module], str] = {Of: "inputs", nn.Sequential: "input", nn.TransformerEncoder: "src"}
        said = kinds.get(type(module), "x")
        if said == "inputs":
            return Called(Of(lambda x, m: m(x), module), (x,), {"inputs_0": words})
        return Called(module, {said: x}, {said: words})

    def seen(module: nn.Module) -> Called:
        return Called(module, {"input": image}, {"input": ("batch", None, None, None)})

    def read(module: nn.Module) -> Called:
        return Called(module, {"input": ids}, {"input": ("batch", "sequence")})

    made: dict[str, Callable[[], Called]] = {
        "convolutions, batch norm, pool, classes": lambda: seen(nn.Sequential(
            nn.Conv2d(4, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(72, 6))),
        "residual convolutions": lambda: seen(nn.Sequential(
            Conv(), Conv(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 6))),
        "depthwise separable convolution": lambda: seen(nn.Sequential(
            nn.Conv2d(4, 4, 3, padding=1, groups=4), nn.ReLU(), nn.Conv2d(4, 8, 1), nn.Flatten(), nn.Linear(512, 6))),
        "causal convolution": lambda: of(nn.Sequential(
            _Turned(), nn.ConstantPad1d((2, 0), 0.0), nn.Conv1d(16, 24, 3), nn.SiLU(), nn.Conv1d(24, 16, 1))),
        "transposed convolution": lambda: seen(nn.Sequential(
            nn.Conv2d(4, 8, 2, stride=2), nn.GELU(), nn.ConvTranspose2d(8, 4, 2, stride=2))),
        "group norm": lambda: seen(nn.Sequential(
            nn.Conv2d(4, 8, 3), nn.GroupNorm(4, 8), nn.SiLU(), nn.Flatten(), nn.Linear(288, 6))),
        "embedding bag": lambda: read(nn.Sequential(nn.EmbeddingBag(18, 16, mode="mean"), _mlp(nn.ReLU()))),
        "attention by einsum": lambda: of(Einsums()),
        "scan": lambda: of(Recurrence()),
        "mixture of experts, topk and one_hot": lambda: of(Mixture()),
        "attention, complex rotary": lambda: of(Attention(rotated)),
        "attention, rotary of halves": lambda: of(Attention(halves)),
        "attention, alibi": lambda: of(Attention(change=lambda s: s - bias)),
        "attention, soft cap": lambda: of(Attention(change=lambda s: 3.0 * torch.tanh(s / 3.0))),
        "attention, window": lambda: of(Attention(change=lambda s: s.masked_fill(window, -1e30))),
        "attention, grouped by repeat_interleave": lambda: of(Attention(kv_heads=2)),
        "encoder": lambda: of(nn.TransformerEncoder(
            nn.TransformerEncoderLayer(16, 4, 24, batch_first=True), 2, enable_nested_tensor=False)),
        "multi-head attention, padded": lambda: Called(
            Of(lambda x, m, f: f(x, x, x, key_padding_mask=m)[0], nn.MultiheadAttention(16, 4, batch_first=True)),
            (x, torch.arange(6) >= torch.tensor([[6], [4], [5], [3]])),
            {"inputs_0": words, "inputs_1": ("batch", "sequence")}),
        "cond of a constant": lambda: of(Chosen()),
        "index_put": lambda: of(_between(_put)),
        "gather": lambda: of(_between(lambda y: y.gather(-1, y.argsort(-1)[..., :1]) + y)),
        "sort": lambda: of(_between(lambda y: y.sort(1).values)),
        "cumsum": lambda: of(_between(lambda y: y.cumsum(1) / torch.arange(1, 7).view(6, 1))),
        "binary cross entropy with logits": lambda: Called(
            Of(lambda x, y, m: functional.binary_cross_entropy_with_logits(m(x), y), _mlp(nn.ReLU())),
            (x, numbers(4, 6, 16, seed=1).sigmoid()), {"inputs_0": words, "inputs_1": words}),
        "cross entropy of words": lambda: Called(
            Of(lambda x, y, m: functional.cross_entropy(m(x).flatten(0, 1), y.flatten()),
               nn.Sequential(nn.Embedding(18, 16), _mlp(nn.GELU()), nn.Linear(16, 18))),
            (ids, whole(18, 4, 6)), {"inputs_0": ("batch", "sequence"), "inputs_1": ("batch", "sequence")}),
        "dropout in eval": lambda: of(_mlp(nn.Dropout(0.3), nn.ReLU(), nn.Dropout(0.1))),
        "softplus, elu, mish": lambda: of(_mlp(nn.Softplus(), nn.ELU(), nn.Mish())),
        "lstm": lambda: of(Of(lambda x, m, o: o(m(x)[0]), nn.LSTM(16, 8, batch_first=True), nn.Linear(8, 16))),
        "gru": lambda: of(Of(lambda x, m, o: o(m(x)[0]), nn.GRU(16, 8, batch_first=True), nn.Linear(8, 16))),
    }  # fmt: skip
    return made


class _Turned(nn.Module):
    """Positions last, as convolutions over them take it."""

    def forward(self, x: Tensor) -> Tensor:
        """Transpose."""
        return x.transpose(1, 2)

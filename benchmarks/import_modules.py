"""Plain torch modules with inputs, for `import_sweep`: what people write, from one layer to small models."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from tests.interop.torch_decoders import Gpt, Llama
from torch import Tensor, nn
from torch.nn import functional

Case = tuple[nn.Module, tuple[Tensor, ...]]


class Of(nn.Module):
    """A function of tensors, with modules that it may read."""

    def __init__(self, function: Callable[..., Any], *parts: nn.Module) -> None:
        super().__init__()
        self.function, self.parts = function, nn.ModuleList(parts)

    def forward(self, *inputs: Tensor) -> Any:
        """Call it with the modules behind the inputs."""
        return self.function(*inputs, *self.parts)


def numbers(*shape: int, seed: int = 0) -> Tensor:
    """Return normal numbers in f64."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def whole(most: int, *shape: int) -> Tensor:
    """Return integers from 0 to before `most`."""
    return torch.randint(most, shape, generator=torch.Generator().manual_seed(1))


def each(function: Callable[..., Any], *parts: nn.Module) -> Case:
    """Return a case of a function of `[3 8]`."""
    return Of(function, *parts), (numbers(3, 8),)


def heads(x: Tensor, n: int) -> Tensor:
    """Return `[batch sequence hidden]` as heads."""
    return x.unflatten(-1, (n, -1)).transpose(1, 2)


class Attends(nn.Module):
    """Attention written out, with what changes scores."""

    def __init__(self, change: Callable[[Tensor], Tensor], by: float = 0.5, causal: bool = True) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(8, 8, bias=False) for _ in range(4))
        self.change, self.by, self.causal = change, by, causal

    def forward(self, x: Tensor) -> Tensor:
        """Softmax of scores."""
        q, k, v = (heads(f(x), 2) for f in (self.q, self.k, self.v))
        scores = self.change(q @ k.transpose(-1, -2) * self.by)
        if self.causal:
            seen = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril()
            scores = scores.masked_fill(~seen, float("-inf"))
        return self.o((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))


class Mixture(nn.Module):
    """Experts of which two are taken, all computed."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.experts = nn.Linear(8, 4), nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        """The two of the largest weight."""
        weights, ids = self.gate(x).softmax(-1).topk(2)
        hot = functional.one_hot(ids, 4).to(x.dtype)
        by = (hot * weights[..., None]).sum(-2)
        return sum((by[..., k : k + 1] * expert(x) for k, expert in enumerate(self.experts)), torch.zeros_like(x))


class Residual(nn.Module):
    """Two convolutions with batch norm, beside the input."""

    def __init__(self, n: int) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(n, n, 3, padding=1), nn.Conv2d(n, n, 3, padding=1)
        self.c, self.d = nn.BatchNorm2d(n), nn.BatchNorm2d(n)

    def forward(self, x: Tensor) -> Tensor:
        """With a ReLU behind each."""
        return functional.relu(x + self.d(self.b(functional.relu(self.c(self.a(x))))))


class Normed(nn.Module):
    """Batch norm in the formula that it is."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(8, 6), nn.BatchNorm1d(6)

    def forward(self, x: Tensor) -> Tensor:
        """Between two others."""
        return functional.relu(self.norm(self.linear(x)))


def rotated(x: Tensor) -> Tensor:
    """Return `[batch sequence head]` turned by complex numbers."""
    n = x.shape[-1] // 2
    angle = torch.outer(torch.arange(x.shape[1]), 10000.0 ** (-torch.arange(n) / n))
    turn = torch.polar(torch.ones_like(angle), angle)
    return torch.view_as_real(torch.view_as_complex(x.unflatten(-1, (n, 2))) * turn).flatten(-2)


def halves(x: Tensor) -> Tensor:
    """Return `[batch sequence head]` turned in halves."""
    n = x.shape[-1] // 2
    angle = torch.outer(torch.arange(x.shape[1]), 1.0 / 10000.0 ** (torch.arange(n) / n))
    angle = torch.cat((angle, angle), -1)
    return x * angle.cos() + torch.cat((-x[..., n:], x[..., :n]), -1) * angle.sin()


def modules() -> dict[str, Callable[[], Case]]:
    """Return the modules by name, each made when it is called."""
    x = numbers(2, 5, 8)
    image = numbers(2, 3, 8, 8)
    ids = whole(17, 2, 7)
    found: dict[str, Callable[[], Case]] = {
        "linear": lambda: (nn.Linear(8, 5), (x,)),
        "mlp gelu": lambda: (nn.Sequential(nn.Linear(8, 12), nn.GELU(), nn.Linear(12, 3)), (x,)),
        "mlp gelu tanh": lambda: (nn.Sequential(nn.Linear(8, 12), nn.GELU("tanh"), nn.Linear(12, 3)), (x,)),
        "mlp dropout": lambda: (nn.Sequential(nn.Linear(8, 12), nn.ReLU(), nn.Dropout(0.3), nn.Linear(12, 3)), (x,)),
        "bilinear": lambda: (nn.Bilinear(8, 8, 3), (numbers(4, 8), numbers(4, 8, seed=1))),
        "gpt": lambda: (Gpt(layers=3, hidden=12, heads=3, vocab=17, positions=7), (ids,)),
        "llama": lambda: (Llama(layers=3, hidden=24, heads=6, kv_heads=2, ffn=20, vocab=19), (ids,)),
        "encoder layer": lambda: (nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True), (x,)),
        "encoder": lambda: (nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True), 2),
                            (x,)),
        "decoder layer": lambda: (nn.TransformerDecoderLayer(8, 2, 16, 0.0, batch_first=True), (x, numbers(2, 4, 8))),
        "multihead": lambda: (Of(lambda x, m: m(x, x, x)[0], nn.MultiheadAttention(8, 2, batch_first=True)), (x,)),
        "soft cap": lambda: (Attends(lambda s: 3.0 * torch.tanh(s / 3.0)), (x,)),
        "alibi": lambda: (Attends(lambda s: s - torch.arange(5).flip(0).to(s.dtype) * 0.25), (x,)),
        "window": lambda: (Attends(lambda s: s.masked_fill(torch.ones(5, 5).tril(-2).bool(), -1e30)), (x,)),
        "attention": lambda: (Attends(lambda s: s), (x,)),
        "attention both ways": lambda: (Attends(lambda s: s, causal=False), (x,)),
        "rotary complex": lambda: (Of(rotated), (x,)),
        "rotary halves": lambda: (Of(halves), (x,)),
        "mixture": lambda: (Mixture(), (x,)),
        "lstm": lambda: (Of(lambda x, m: m(x)[0], nn.LSTM(8, 6, batch_first=True)), (x,)),
        "gru": lambda: (Of(lambda x, m: m(x)[0], nn.GRU(8, 6, batch_first=True)), (x,)),
        "rnn cell": lambda: (nn.RNNCell(8, 8), (numbers(3, 8), numbers(3, 8, seed=1))),
        "lstm cell": lambda: (Of(lambda x, m: m(x)[0], nn.LSTMCell(8, 8)), (numbers(3, 8),)),
        "batch norm mlp": lambda: (Normed(), (numbers(4, 8),)),
        "batch norm cnn": lambda: (nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2),
                                                 nn.Flatten(), nn.Linear(36, 5)), (image,)),
        "batch norm 2d": lambda: (nn.BatchNorm2d(3), (image,)),
        "batch norm plain": lambda: (nn.BatchNorm1d(8, affine=False), (numbers(4, 8),)),
        "residual cnn": lambda: (nn.Sequential(Residual(3), Residual(3), nn.AdaptiveAvgPool2d(1), nn.Flatten()),
                                 (image,)),
        "conv 1d": lambda: (nn.Conv1d(5, 4, 3, padding=1), (x,)),
        "conv transposed": lambda: (nn.ConvTranspose2d(3, 4, 2, stride=2), (image,)),
        "depthwise": lambda: (nn.Conv2d(3, 6, 3, groups=3), (image,)),
        "patches": lambda: (Of(lambda x, m: m(x).flatten(2).transpose(1, 2), nn.Conv2d(3, 8, 4, stride=4)), (image,)),
        "average pool": lambda: (nn.AvgPool2d(2), (image,)),
        "upsample": lambda: (nn.Upsample(scale_factor=2), (image,)),
        "pixel shuffle": lambda: (nn.PixelShuffle(2), (numbers(2, 4, 3, 3),)),
        "layer norm": lambda: (nn.LayerNorm(8, eps=1e-3), (x,)),
        "layer norm 2": lambda: (nn.LayerNorm([5, 8]), (x,)),
        "layer norm plain": lambda: (nn.LayerNorm(8, elementwise_affine=False), (x,)),
        "rms norm": lambda: (nn.RMSNorm(8), (x,)),
        "rms norm 2": lambda: (nn.RMSNorm([5, 8], eps=1e-5), (x,)),
        "group norm": lambda: (nn.GroupNorm(4, 8), (numbers(2, 8, 5),)),
        "instance norm": lambda: (nn.InstanceNorm1d(5), (x,)),
        "response norm": lambda: (nn.LocalResponseNorm(2), (image,)),
        "embedding": lambda: (nn.Embedding(17, 8), (ids,)),
        "embedding padded": lambda: (nn.Embedding(17, 8, padding_idx=0), (ids,)),
        "embedding bag": lambda: (nn.EmbeddingBag(17, 8, mode="sum"), (ids,)),
        "prelu": lambda: (nn.PReLU(), (x,)),
        "cosine": lambda: (nn.CosineSimilarity(-1), (x, numbers(2, 5, 8, seed=1))),
        "cross entropy": lambda: (Of(functional.cross_entropy), (numbers(4, 6), whole(6, 4))),
        "cross entropy sequence": lambda: (Of(functional.cross_entropy), (numbers(2, 6, 5), whole(6, 2, 5))),
        "binary cross entropy": lambda: (nn.BCEWithLogitsLoss(), (numbers(4, 6), numbers(4, 6, seed=1).sigmoid())),
        "squared error": lambda: (nn.MSELoss(), (numbers(4, 6), numbers(4, 6, seed=1))),
        "smooth error": lambda: (nn.SmoothL1Loss(), (numbers(4, 6), numbers(4, 6, seed=1))),
        "divergence": lambda: (nn.KLDivLoss(reduction="batchmean"), (numbers(4, 6), numbers(4, 6, seed=1).softmax(-1))),
        "likelihood": lambda: (nn.NLLLoss(), (numbers(4, 6), whole(6, 4))),
        "triplet": lambda: (nn.TripletMarginLoss(), tuple(numbers(4, 6, seed=k) for k in range(3))),
    }  # fmt: skip
    functions: dict[str, Callable[[Tensor], Any]] = {
        **{name: getattr(functional, name) for name in (
            "relu", "silu", "gelu", "elu", "selu", "celu", "softplus", "softsign", "mish", "hardswish", "hardsigmoid",
            "hardtanh", "leaky_relu", "relu6", "logsigmoid", "tanhshrink", "softshrink")},
        "quick gelu": lambda x: x * torch.sigmoid(1.702 * x),
        "glu": functional.glu,
        "softmax": lambda x: x.softmax(-1),
        "softmax of first": lambda x: x.softmax(0),
        "softmax of 32 bits": lambda x: x.float().softmax(-1).double(),
        "log softmax": lambda x: x.log_softmax(-1),
        "softmin": lambda x: functional.softmin(x, -1),
        "normalize": functional.normalize,
        "l1 norm": lambda x: x.norm(p=1, dim=-1),
        "norm": lambda x: x.norm(),
        "logsumexp": lambda x: x.logsumexp(-1),
        "var": lambda x: x.var(-1),
        "var of all": lambda x: x.var(-1, unbiased=False),
        "std": lambda x: x.std(-1, keepdim=True),
        "prod": lambda x: x.prod(-1),
        "cumsum": lambda x: x.cumsum(-1),
        "cumprod": lambda x: x.cumprod(-1),
        "max": lambda x: x.max(-1).values,
        "max of all": lambda x: x.max(),
        "argmax": lambda x: x.argmax(-1),
        "topk": lambda x: x.topk(2).values,
        "sort": lambda x: x.sort(-1).values,
        "clamp": lambda x: x.clamp(-0.5, 0.7),
        "clamp of tensors": lambda x: torch.clamp(x, x.mean(), x.mean() + 1),
        "power": lambda x: x.abs() ** 1.5,
        "power of three": lambda x: x**3,
        "power of nothing": lambda x: x**0,
        "power of two": lambda x: 2**x,
        "power of itself": lambda x: x.abs() ** x,
        "by zero": lambda x: (x / 0.0).clamp(-1, 1),
        "infinite": lambda x: torch.minimum(x, torch.tensor(float("inf"), dtype=x.dtype)),
        "not a number": torch.nan_to_num,
        "where nan": lambda x: torch.where(x > 100, float("nan"), x),
        "round": torch.round,
        "floor": torch.floor,
        "remainder": lambda x: x % 0.3,
        "floor division": lambda x: x // 0.3,
        "trunc": torch.trunc,
        "sign": torch.sign,
        "expm1": torch.expm1,
        "log1p": lambda x: torch.log1p(x.abs()),
        "log2": lambda x: torch.log2(x.abs()),
        "exp2": torch.exp2,
        "atan2": lambda x: torch.atan2(x, x + 1),
        "erfc": torch.erfc,
        "lerp": lambda x: torch.lerp(x, x.flip(0), 0.3),
        "flip": lambda x: x.flip(-1),
        "roll": lambda x: x.roll(1, -1),
        "repeat": lambda x: x.repeat(2, 1),
        "repeat interleave": lambda x: x.repeat_interleave(2, 0),
        "tile": lambda x: x.tile(2),
        "pad": lambda x: functional.pad(x, (1, 2)),
        "pad reflected": lambda x: functional.pad(x[None], (1, 2), mode="reflect"),
        "unfold": lambda x: x.unfold(-1, 4, 2),
        "gather": lambda x: x.gather(-1, torch.zeros(3, 1, dtype=torch.long)),
        "index": lambda x: x[torch.tensor([2, 0])],
        "index of last": lambda x: x[:, torch.tensor([2, 0])],
        "index select": lambda x: x.index_select(0, torch.tensor([1, 1])),
        "masked": lambda x: x * (x > 0),
        "new ones": lambda x: x + x.new_ones(3, 8),
        "eye": lambda x: torch.eye(3, dtype=x.dtype) @ x,
        "diagonal": lambda x: x[:, :3].diagonal(),
        "outer": lambda x: torch.outer(x[0], x[1]),
        "einsum of one": lambda x: torch.einsum("ij->ji", x),
        "einsum ellipsis": lambda x: torch.einsum("...j,...j->...", x, x),
        "baddbmm": lambda x: torch.baddbmm(x[None], x[None, :, :3], x[None], beta=0.5, alpha=2.0),
        "addmm": lambda x: torch.addmm(x, x[:, :3], x, beta=0.5),
        "vector": lambda x: x @ x[0],
        "kron": lambda x: torch.kron(x[:2, :2], x[:2, :2]),
        "cdist": lambda x: torch.cdist(x, x + 1),
        "in place": lambda x: x.clone().add_(1).mul_(2),
        "put": lambda x: torch.cat((x[:1], x[1:] * 2)),
        "put in place": lambda x: _put(x.clone()),
        "shifted": lambda x: x[:, 1:] - x[:, :-1],
        "every other": lambda x: x[:, ::2] + x[:, 1::2],
        "every third": lambda x: x[:, ::3],
        "empty": lambda x: torch.cat((x[:, :0], x), -1),
        "of size one": lambda x: x[:1].expand(3, 8) * x[:, :1],
        "several": lambda x: (x + 1, x * 2),
        "itself": lambda x: (x, x + 1),
        "twice": _twice,
        "named": lambda x: {"a": x + 1, "b": x.sum()},
        "alone": lambda x: x.sum() * 0 + 3,
        "of no input": lambda x: torch.arange(3.0),
        "bools": lambda x: (x > 0) & (x < 1),
        "any": lambda x: (x > 0).any(-1),
        "all": lambda x: (x > 9).all(),
        "count": lambda x: (x > 0).sum(),
        "complex": lambda x: torch.view_as_real(torch.view_as_complex(x.unflatten(-1, (4, 2))) * 1j),
        "fft": lambda x: torch.fft.rfft(x).abs(),
        "meshgrid": lambda x: torch.meshgrid(x[0], x[1], indexing="ij")[0],
        "histogram": lambda x: torch.bucketize(x, torch.linspace(-1, 1, 4, dtype=x.dtype)),
        "no gradient": _without,
        "half": lambda x: (x.half() * 2).double(),
        "of bf16": lambda x: (x.to(torch.bfloat16) * 2).double(),
        "scaled attention of 3": lambda x: _attends(x[None]),
        "scaled attention of 2": _attends,
        "scaled attention of 5": lambda x: _attends(x[None, None, None], is_causal=True),
        "scaled attention by 0": lambda x: _attends(x[None, None], scale=0.0),
        "scaled attention masked": lambda x: _attends(x[None, None], attn_mask=x[:, :3]),
    }  # fmt: skip
    return found | {name: (lambda f=f: each(f)) for name, f in functions.items()}


def _attends(x: Tensor, **how: Any) -> Tensor:
    return functional.scaled_dot_product_attention(x, x, x, **how)


def _twice(x: Tensor) -> tuple[Tensor, Tensor]:
    y = x + 1
    return y, y


def _put(x: Tensor) -> Tensor:
    x[:, 1] = 0.0
    return x


def _without(x: Tensor) -> Tensor:
    with torch.no_grad():
        y = x * 2
    return x + y

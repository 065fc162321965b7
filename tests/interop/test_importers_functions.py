"""Functions of torch, each by itself: what the import makes of it computes what torch does, where it is not smooth too.

They stand in the tables of shardplan.interop.importers.torch_pointwise and of
shardplan.interop.importers.torch_indexing which is a part of the same. Of the operands every second element is a half
of a whole number, so that what rounds or compares meets its borders.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.interop.test_importers_refusals import Of, imported, numbers
from torch import Tensor
from torch.nn import functional as f


def with_borders(*shape: int) -> Tensor:
    """Of every two elements one is a half of a whole number from -6 to 6."""
    x = 3 * numbers(*shape)
    halves = (2 * x).round().clamp(-12, 12) / 2
    return torch.where(torch.arange(x.numel()).reshape(shape) % 2 == 0, halves, x)


# Weights, gains and biases by their shapes; made here, so that a trace sees constants.
OF = {
    shape: numbers(*shape, seed=1)
    for shape in ((3,), (4,), (6,), (4, 5), (4, 6), (3, 6, 5), (6, 2, 3, 2), (4, 3, 3, 2), (4, 3, 2, 2))
}
SPREAD = OF[4,].abs()


POINTWISE: dict[str, Callable[[Tensor], Any]] = {
    "trunc": torch.trunc,
    "floor": torch.floor,
    "ceil": torch.ceil,
    "round": torch.round,
    "remainder": lambda x: torch.remainder(x, 1.5),
    "remainder by a negative one": lambda x: torch.remainder(x, -2.0),
    "fmod": lambda x: torch.fmod(x, 1.5),
    "floor_divide": lambda x: torch.floor_divide(x, 1.5),
    "div trunc": lambda x: torch.div(x, 1.5, rounding_mode="trunc"),
    "elu": lambda x: f.elu(x, 0.7),
    "celu": lambda x: f.celu(x, 0.7),
    "selu": f.selu,
    "softplus": lambda x: f.softplus(x, 2.0, 3.0),
    "mish": f.mish,
    "logsigmoid": f.logsigmoid,
    "expm1": torch.expm1,
    "log1p": lambda x: torch.log1p(x.abs()),
    "log2": lambda x: torch.log2(x.abs() + 0.1),
    "exp2": torch.exp2,
    "erfc": torch.erfc,
    "sign": torch.sign,
    "tan": torch.tan,
    "sinh": torch.sinh,
    "clamp": lambda x: torch.clamp(x, torch.full_like(x, -1.0), torch.full_like(x, 2.5)),
}
REDUCED: dict[str, Callable[[Tensor], Any]] = {
    "logsumexp": lambda x: torch.logsumexp(x, -1),
    "var": lambda x: torch.var(x, -1),
    "var without correction": lambda x: torch.var(x, (0, 1), correction=0),
    "std": lambda x: torch.std(x, 0, keepdim=True),
    "var_mean": lambda x: torch.var_mean(x, 1),
    "prod": lambda x: torch.prod(x, 1),
    "cumsum": lambda x: torch.cumsum(x, 0),
    "cumprod": lambda x: torch.cumprod(x, 1),
    "max of a dim": lambda x: torch.max(x, 1).values,
    "least of all": torch.min,
    "argmin": lambda x: torch.argmin(x, 0).to(x.dtype),
    "cosine": lambda x: f.cosine_similarity(x, OF[4, 6], 1),
    "cross entropy of bits": lambda x: f.binary_cross_entropy_with_logits(x, OF[4, 6], pos_weight=OF[6,]),
    "bilinear": lambda x: f.bilinear(x, OF[4, 5], OF[3, 6, 5], OF[3,]),
}
AT: dict[str, Callable[[Tensor], Any]] = {
    "gather": lambda x: torch.gather(x, 1, torch.tensor([[0, 5], [2, 2], [1, 0], [3, 4]])),
    "scatter": lambda x: torch.scatter(x, 1, torch.tensor([[0], [5], [2], [2]]), x[:, :1] * 2),
    "scatter_add": lambda x: torch.scatter_add(x, 1, torch.tensor([[0, 0], [5, 1], [2, 2], [2, 3]]), x[:, :2]),
    "index": lambda x: x[torch.tensor([2, 0]), torch.tensor([-1, 3])],
    "index_add": lambda x: torch.index_add(x, 0, torch.tensor([1, 1, 3]), x[:3]),
    "index_put": lambda x: torch.index_put(x, (torch.tensor([1, 2]),), x[:2] + 1, accumulate=True),
    "every third": lambda x: x[:, 1::3],
    "every second of all": lambda x: x[:, 1::2],
    "topk": lambda x: torch.topk(x, 3, 1).values,
    "sort": lambda x: torch.sort(x, 0, descending=True).values,
    "flip": lambda x: torch.flip(x, (0, 1)),
    "roll": lambda x: torch.roll(x, (1, -2), (0, 1)),
    "roll of all": lambda x: torch.roll(x, 3),
    "diagonal above": lambda x: torch.diagonal(x, 2),
    "diagonal below": lambda x: torch.diagonal(x, -1),
    "unfold": lambda x: x.unfold(1, 3, 2),
    "as_strided": lambda x: torch.as_strided(x, (3, 2), (6, 2), 1),
    "repeat_interleave": lambda x: torch.repeat_interleave(x, 2, 1),
    "constant pad": lambda x: f.pad(x, (1, 2, -1, 0), value=3.0),
}
IMAGES: dict[str, Callable[[Tensor], Any]] = {
    "reflection pad": lambda x: f.pad(x, (2, 1, 1, 2), "reflect"),
    "replication pad": lambda x: f.pad(x, (2, 1, 0, 3), "replicate"),
    "convolution": lambda x: f.conv2d(x, OF[6, 2, 3, 2], OF[6,], (2, 1), (1, 0), (1, 2), 2),
    "transposed convolution": lambda x: f.conv_transpose2d(x, OF[4, 3, 3, 2], OF[3,], 2, 1, 1),
    "transposed convolution in groups": lambda x: f.conv_transpose2d(x, OF[4, 3, 2, 2], None, (2, 1), groups=2),
    "max pool": lambda x: f.max_pool2d(x, 3, 2, 1),
    "average pool": lambda x: f.avg_pool2d(x, (2, 3), (1, 2)),
    "group norm": lambda x: f.group_norm(x, 2, OF[4,], OF[4,], 0.1),
    "instance norm": lambda x: f.instance_norm(x, weight=OF[4,], bias=OF[4,], eps=0.1),
    "batch norm": lambda x: f.batch_norm(x, OF[4,], SPREAD, OF[4,], OF[4,], eps=0.1),
}
SHAPES = {**dict.fromkeys((*POINTWISE, *REDUCED, *AT), (4, 6)), **dict.fromkeys(IMAGES, (2, 4, 5, 6))}


@pytest.mark.parametrize("name", SHAPES)
def test_a_function_is_that_of_torch(name: str) -> None:
    imported(Of((POINTWISE | REDUCED | AT | IMAGES)[name]), with_borders(*SHAPES[name]))

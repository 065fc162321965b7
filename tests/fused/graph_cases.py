"""Graphs of torch.fx with the patterns that are fused, and with what blocks each; all for two ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch.fx.experimental.proxy_tensor import make_fx

Tensor = torch.Tensor
c10d = torch.ops._c10d_functional
aten = torch.ops.aten


def sent(x: Tensor, group: str, rows: int = 2) -> Tensor:
    """An all-to-all of equal blocks."""
    return c10d.wait_tensor(c10d.all_to_all_single(x, [rows] * 2, [rows] * 2, group))


def summed(x: Tensor, group: str, how: str = "sum") -> Tensor:
    """An all-reduce."""
    return c10d.wait_tensor(c10d.all_reduce(x, how, group))


class GraphCase(NamedTuple):
    """A function of tensors and a group's name, tensors, what becomes of it, and a node that blocks."""

    run: Callable[..., Any]
    given: Callable[[], list[Tensor]]
    reason: str = "fused"
    blocked: str = ""


def _pair() -> list[Tensor]:
    return [torch.randn(4, 3), torch.randn(3, 6)]


def _vector() -> list[Tensor]:
    return [torch.randn(6, 3), torch.randn(3)]


def _bags() -> list[Tensor]:
    ids = [torch.tensor([1, 2, 3, 4, 0]), torch.tensor([2, 2, 1])]
    return [
        torch.randn(7, 3),
        ids[0],
        torch.tensor([0, 1, 2, 4]),
        torch.randn(5, 3),
        ids[1],
        torch.tensor([0, 0, 1, 2]),
    ]


def _columns(y: Tensor) -> Tensor:
    return y.view(4, 2, 3).permute(1, 0, 2).reshape(8, 3)


def _bag(table: Tensor, ids: Tensor, offsets: Tensor, mode: str = "sum") -> Tensor:
    return torch.nn.functional.embedding_bag(ids, table, offsets, mode=mode)


def _home(x: Tensor) -> Tensor:
    return x.view(2, 2, 2, 3).permute(1, 0, 2, 3).reshape(2, 4, 3)


def _written(a: Tensor, b: Tensor, g: str) -> Tensor:
    y = a @ b
    aten.add_.Tensor(a, 1.0)
    return sent(y, g)


def _twice(a: Tensor, b: Tensor, g: str) -> Tensor:
    y = a @ b
    return sent(y, g) + y


CASES = {
    "mm": GraphCase(lambda a, b, g: sent(a @ b, g), _pair),
    "addmm": GraphCase(lambda a, b, c, g: sent(torch.addmm(c, a, b), g), lambda: [*_pair(), torch.randn(6)]),
    "linear": GraphCase(lambda a, b, g: sent(aten.linear.default(a, b), g),
                        lambda: [torch.randn(4, 3), torch.randn(6, 3)]),
    "silu": GraphCase(lambda a, b, g: sent(torch.nn.functional.silu(a @ b), g), _pair),
    "batch of one": GraphCase(lambda a, b, g: sent(torch.bmm(a[None], b[None])[0], g), _pair),
    "rows as one": GraphCase(lambda a, b, g: sent((a @ b).view(2, 12), g, 1), _pair),
    "columns": GraphCase(lambda a, b, g: sent(_columns(a @ b), g, 4), _pair),
    "columns by split": GraphCase(lambda a, b, g: sent(torch.cat(torch.split(a @ b, 3, 1)), g, 4), _pair),
    "mv": GraphCase(lambda a, b, g: summed(a @ b, g), _vector),
    "thin": GraphCase(lambda a, b, g: summed(a @ b, g), lambda: [torch.randn(40, 3), torch.randn(3, 2)]),
    "thin first": GraphCase(lambda a, b, g: summed((a @ b.t()).view(1, 2, 40), g),
                            lambda: [torch.randn(2, 3), torch.randn(40, 3)]),
    "bags": GraphCase(lambda t, i, o, u, j, p, g: sent(torch.stack([_bag(t, i, o), _bag(u, j, p)], 1), g), _bags),
    "bags home": GraphCase(
        lambda t, i, o, u, j, p, g: _home(sent(torch.stack([_bag(t, i, o), _bag(u, j, p)], 1), g)), _bags),
    "mean bags": GraphCase(
        lambda t, i, o, u, j, p, g: sent(torch.cat([_bag(t, i, o, "mean"), _bag(u, j, p, "mean")], 1), g), _bags),
    "one table": GraphCase(lambda t, i, o, u, j, p, g: sent(_bag(t, i, o), g), _bags),
    "read twice": GraphCase(_twice, _pair, "several_users", "mm"),
    "scaled": GraphCase(lambda a, b, g: sent((a @ b) * 2, g), _pair, "effect_between", "mul"),
    "written": GraphCase(_written, _pair, "effect_between", "add_"),
    "gelu by tanh": GraphCase(lambda a, b, g: sent(torch.nn.functional.gelu(a @ b, approximate="tanh"), g), _pair,
                              "effect_between", "gelu"),
    "columns strewn": GraphCase(lambda a, b, g: sent((a @ b).t().contiguous(), g, 3), _pair, "splits_unknown",
                                "all_to_all_single"),
    "several products": GraphCase(lambda a, b, g: sent(torch.bmm(a.expand(2, 4, 3), b.expand(2, 3, 6)), g, 1), _pair,
                                  "splits_unknown", "bmm"),
    "half rows": GraphCase(lambda a, b, g: sent((a @ b).view(8, 3), g, 1), _pair, "splits_unknown",
                           "all_to_all_single"),
    "largest": GraphCase(lambda a, b, g: summed(a @ b, g, "max"), _vector, "not_sum", "all_reduce"),
    "sum of what is positive": GraphCase(lambda a, b, g: summed((a @ b).relu(), g), _vector, "effect_between", "relu"),
    "sum with others": GraphCase(lambda a, b, g: summed(torch.cat([a @ b, b]), g), _vector, "splits_unknown", "cat"),
    "largest of bags": GraphCase(lambda t, i, o, u, j, p, g: sent(_bag(t, i, o, "max"), g), _bags, "not_sum",
                                 "_embedding_bag_forward_only"),
    "double": GraphCase(lambda a, b, g: sent(a @ b, g), lambda: [x.double() for x in _pair()], "dtype", "mm"),
}  # fmt: skip
BLIND = {  # no candidates
    "no product": GraphCase(lambda a, b, g: sent(a, g), _pair),
    "not thin": GraphCase(lambda a, b, g: summed(a @ b, g), lambda: [torch.randn(20, 3), torch.randn(3, 20)]),
}


def traced(one: GraphCase, group: str, real: bool = False) -> torch.fx.GraphModule:
    """The graph of a case."""
    given = one.given()
    mode = "real" if real else "fake"
    return make_fx(lambda *xs: one.run(*xs, group), tracing_mode=mode)(*given)

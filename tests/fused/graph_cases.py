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


def cut_sum(x: Tensor, group: str, how: str = "sum") -> Tensor:
    """A reduce-scatter of rows."""
    return c10d.wait_tensor(c10d.reduce_scatter_tensor(x, how, 2, group))


def gathered(x: Tensor, group: str) -> Tensor:
    """The rows of both ranks."""
    return c10d.wait_tensor(c10d.all_gather_into_tensor(x, 2, group))


def _hidden(a: Tensor, b: Tensor, g: str) -> Tensor:
    x = c10d.all_gather_into_tensor(a, 2, g)
    y = a @ b
    return c10d.wait_tensor(x) @ b + torch.cat([y, y])


def _strewn(a: Tensor, b: Tensor, g: str) -> Tensor:
    return torch.cat(gathered(a, g).chunk(2), 1).view(8, 3) @ b


def _experts(a: Tensor, b: Tensor, ends: Tensor, g: str) -> Tensor:
    return sent(torch.nn.functional.grouped_mm(a, b, offs=ends), g)


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
    "cut sum": GraphCase(lambda a, b, g: cut_sum(a @ b, g), _pair),
    "cut sum of a linear": GraphCase(lambda a, b, g: cut_sum(aten.linear.default(a, b).view(4, 2, 3), g),
                                     lambda: [torch.randn(4, 3), torch.randn(6, 3)]),
    "gathered": GraphCase(lambda a, b, g: gathered(a, g) @ b, _pair),
    "gathered, with a bias": GraphCase(
        lambda a, b, c, g: torch.addmm(c, gathered(a.view(2, 2, 3), g).view(8, 3), b),
        lambda: [*_pair(), torch.randn(6)]),
    "gathered, a batch of one": GraphCase(lambda a, b, g: torch.bmm(gathered(a, g)[None], b[None]), _pair),
    "largest, cut": GraphCase(lambda a, b, g: cut_sum(a @ b, g, "max"), _pair, "not_sum", "reduce_scatter_tensor"),
    "biases, cut": GraphCase(lambda a, b, c, g: cut_sum(torch.addmm(c, a, b), g), lambda: [*_pair(), torch.randn(6)],
                             "effect_between", "addmm"),
    "columns, cut": GraphCase(lambda a, b, g: cut_sum((a @ b).t().contiguous(), g), _pair, "splits_unknown",
                              "reduce_scatter_tensor"),
    "gathered, then relu": GraphCase(lambda a, b, g: gathered(a, g).relu() @ b, _pair, "effect_between", "relu"),
    "gathered for two": GraphCase(lambda a, b, g: (x := gathered(a, g)) @ b - x @ b, _pair, "several_users",
                                  "wait_tensor"),
    "gathered second": GraphCase(lambda a, b, g: b @ gathered(a, g), lambda: [torch.randn(2, 3), torch.randn(5, 4)],
                                 "splits_unknown", "mm"),
    "gathered along columns": GraphCase(_strewn, lambda: [torch.randn(4, 3), torch.randn(3, 6)], "splits_unknown",
                                        "mm"),
    "hidden": GraphCase(_hidden, _pair, "overlapped", "mm"),
    "experts": GraphCase(_experts, lambda: [torch.randn(4, 8).bfloat16(), torch.randn(2, 8, 8).bfloat16(),
                                            torch.tensor([2, 4], dtype=torch.int32)], "splits_unknown", "_grouped_mm"),
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

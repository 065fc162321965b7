"""`all_gather_gemm` and `gemm_reduce_scatter` as PyTorch's operators; registered when `library` is imported."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from shardplan.errors import optional
from shardplan.fused.calls.groups import bound
from shardplan.fused.operators import tensor_parallel
from shardplan.fused.operators.call_context import CallContext, tile_sizes

if TYPE_CHECKING:
    import torch
else:
    torch = optional("torch", "torch")

Register = Callable[[str, str, Callable[..., Any], Callable[..., Any]], Any]
Request = Callable[[str], CallContext]
_ARGUMENTS = "(Tensor a, Tensor b, str group, SymInt[]? splits=None, Tensor? anchor=None)"
_BACKWARD = "(Tensor g, Tensor x, Tensor b, str group, SymInt[]? splits) -> (Tensor, Tensor, Tensor)"


def register_blocks(register: Register, request: Request) -> None:
    """Register both, and their gradients, which are made of each other."""

    def gather(a: Any, b: Any, group: str, splits: Any = None, anchor: Any = None) -> Any:
        return tensor_parallel.gather_multiply(request(group), a, b, splits)

    def fake_gather(a: Any, b: Any, group: str, splits: Any = None, anchor: Any = None) -> Any:
        rows = sum(splits) if splits is not None else bound(group).ranks * a.shape[0]
        return a.new_empty(rows, b.shape[1]), a.new_empty(rows, a.shape[1])

    def scatter(a: Any, b: Any, group: str, splits: Any = None, anchor: Any = None) -> Any:
        return tensor_parallel.multiply_scatter(request(group), a, b, splits)

    def fake_scatter(a: Any, b: Any, group: str, splits: Any = None, anchor: Any = None) -> Any:
        heap = bound(group)
        size = -(-a.shape[0] // heap.ranks)
        begin, end = (torch.sym_min(a.shape[0], (heap.rank + k) * size) for k in (0, 1))
        return a.new_empty(end - begin if splits is None else splits[heap.rank], b.shape[1])

    def back_of_gather(g: Any, x: Any, b: Any, group: str, splits: Any) -> Any:
        ranks = bound(group).ranks
        parts = [x.shape[0] // ranks] * ranks if splits is None else splits
        found = tensor_parallel.gather_multiply_backward(request(group), g, b, x, parts)
        return *found, torch.zeros((), device="cpu")

    def fake_back_of_gather(g: Any, x: Any, b: Any, group: str, splits: Any) -> Any:
        heap = bound(group)
        rows = x.shape[0] // heap.ranks if splits is None else splits[heap.rank]
        return x.new_empty(rows, x.shape[1]), torch.empty_like(b), torch.empty((), device="cpu")

    def back_of_scatter(g: Any, x: Any, b: Any, group: str, splits: Any) -> Any:
        parts = tile_sizes(x.shape[0], bound(group).ranks) if splits is None else splits
        found = tensor_parallel.multiply_scatter_backward(request(group), g, x, b, parts)
        return *found, torch.zeros((), device="cpu")

    def fake_back_of_scatter(g: Any, x: Any, b: Any, group: str, splits: Any) -> Any:
        return torch.empty_like(x), torch.empty_like(b), torch.empty((), device="cpu")

    backs = {
        tensor_parallel.GATHER: (gather, fake_gather, back_of_gather, fake_back_of_gather, " -> (Tensor, Tensor)"),
        tensor_parallel.SCATTER: (scatter, fake_scatter, back_of_scatter, fake_back_of_scatter, " -> Tensor"),
    }
    for name, (run, fake, back, fake_back, results) in backs.items():
        op_back = register(f"{name}_backward", _BACKWARD, back, fake_back)
        _differentiate(register(name, _ARGUMENTS + results, run, fake), op_back)


def _differentiate(op: Any, op_back: Any) -> None:
    """The rows that a gather saves are a second result, which is not differentiated."""

    def setup(ctx: Any, inputs: Any, output: Any) -> None:
        a, b, ctx.group, ctx.splits, anchor = inputs
        ctx.anchor = anchor is not None
        if isinstance(output, Sequence):
            ctx.mark_non_differentiable(output[1])
            a = output[1]
        ctx.save_for_backward(a, b)

    def gradient(ctx: Any, g: Any, _: Any = None) -> Any:
        da, db, anchored = op_back(g, *ctx.saved_tensors, ctx.group, ctx.splits)
        return da, db, None, None, anchored if ctx.anchor else None

    op.register_autograd(gradient, setup_context=setup)

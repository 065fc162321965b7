"""The operators as PyTorch's: `torch.ops.shardplan.gemm_all_to_all` and so on, with shapes for tracing, and gradients.

They are registered when this module is imported, which needs torch. `..._out` write into a tensor of the heap. A
group's name says which heap serves them: see `calls.groups`. Each gradient is an operator, too, so that a backward
graph can be traced; results of the others never share memory with the heap.

A backward that moves blocks needs all ranks, also one whose own operands need no gradient. Where autograd is on, the
functions here give an operator an `anchor` that needs one then, so that its result does, too. Without it ranks that
differ are refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from shardplan.errors import BackendError, TypingError, excerpt, optional
from shardplan.fused.calls.groups import bind, bound
from shardplan.fused.heap.devices import DEVICES
from shardplan.fused.heap.symmetric import SymmetricHeap
from shardplan.fused.library_operands import product_operands, refuse_tangents
from shardplan.fused.library_spec import OperatorSpec, register_operator
from shardplan.fused.operators import embedding, gemm, gemv, grouped, tensor_parallel
from shardplan.fused.operators.call_context import CallContext
from shardplan.fused.tiles.shapes import tile_sizes

if TYPE_CHECKING:
    import torch
else:
    torch = optional("torch", "torch")


def bind_group(group: Any = None, nbytes: int = 64 << 20, backend: str = "shm", kernels: str = "auto") -> SymmetricHeap:
    """Return a new heap for a torch process group, the default one if None, bound to the group's name; collective.

    `kernels` run its operators: `cpu`, `triton`, or `auto`, which is `triton` for memory of GPUs and `cpu` for others;
    on memory of CPUs those of Triton run in its interpreter, which TRITON_INTERPRET asks for. Close the heap when the
    group is destroyed. Raises `BackendError` where kernels and memory do not fit, and as `SymmetricHeap.create`.
    """
    on_gpu = backend in DEVICES
    legal = (
        ("auto", "triton") if on_gpu else ("auto", "cpu") if backend.startswith("net") else ("auto", "cpu", "triton")
    )
    if kernels not in legal:
        text = f"kernels {excerpt(kernels)} on backend {excerpt(backend)}"
        raise BackendError(f"bind_group: {text}; legal are {', '.join(legal)}")
    serving = optional("shardplan.fused.triton.serving", "triton") if on_gpu or kernels == "triton" else None
    distributed = optional("torch.distributed", "torch")
    group = group or distributed.group.WORLD

    def exchange(mine: bytes) -> list[bytes]:
        said: list[bytes] = [b""] * distributed.get_world_size(group)
        distributed.all_gather_object(said, mine, group)
        return said

    heap = SymmetricHeap.create(nbytes, backend, exchange, group.group_name)
    if serving is not None:
        try:
            heap.kernels = serving.TritonKernels(heap)
        except BackendError:
            heap.close()
            raise
    bind(group.group_name, heap)
    return heap


with torch.inference_mode(False):
    _anchor: torch.Tensor = torch.zeros((), dtype=torch.float32, device="cpu", requires_grad=True)


def _gradient_anchor(group: str, *operands: torch.Tensor | None) -> torch.Tensor | None:
    """What needs a gradient where autograd is on and no operand does; nothing for one rank, whose backward is its own.

    An exported graph is run forward only.
    """
    if not torch.is_grad_enabled() or bound(group).ranks == 1 or torch.compiler.is_exporting():
        return None
    return None if any(x is not None and x.requires_grad for x in operands) else _anchor


def gemm_all_to_all(
    a: torch.Tensor,
    b: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    group: str,
    activation: str = "none",
    scatter: int = 0,
    send_splits: Sequence[int] | None = None,
    recv_splits: Sequence[int] | None = None,
    tiles: int = 0,
) -> torch.Tensor:
    """Return what all ranks computed for this one, of a [M, K] and b [K, N] on each, tile by tile on its way.

    See `operators.gemm.forward`. With `scatter` 1 ranks of different rows say so in `recv_splits`. Where autograd is on
    the result needs a gradient on every rank, since its backward needs all of them.
    """
    splits = (_ints(send_splits), _ints(recv_splits))
    a, b, *some = product_operands(gemm.NAME, a, b, *([] if bias is None else [bias]))
    bias = some[0] if some else None
    given = (a, b, bias, group, activation, scatter, *splits, tiles, _gradient_anchor(group, a, b, bias))
    return torch.ops.shardplan.gemm_all_to_all(*given)


def gemv_all_reduce(a: torch.Tensor, x: torch.Tensor, *, group: str, algorithm: str = "auto") -> torch.Tensor:
    """Return the sum over ranks of a [M, K_r] times x [K_r] or [K_r, C], the same bits on each: `operators.gemv`."""
    a, x = product_operands(gemv.NAME, a, x)
    return torch.ops.shardplan.gemv_all_reduce(a, x, group, algorithm)


def embedding_bag_all_to_all(
    weights: Sequence[torch.Tensor],
    indices: torch.Tensor,
    offsets: torch.Tensor,
    per_sample_weights: torch.Tensor | None = None,
    *,
    group: str,
    mode: str = "sum",
    table_counts: Sequence[int] | None = None,
    batch_splits: Sequence[int] | None = None,
) -> torch.Tensor:
    """Return the bags of all ranks' tables for this rank's part of the batch: [B_r, tables, D].

    See `operators.embedding.forward`. Where `table_counts` are not given all ranks have as many; `batch_splits` are by
    the tiling rule. A rank without tables must give both. Where autograd is on the result needs a gradient on every
    rank, since its backward needs all of them. Raises `TypingError`.
    """
    ranks = bound(group).ranks
    refuse_tangents(embedding.NAME, *weights, per_sample_weights)
    if not weights and (table_counts is None or batch_splits is None):
        raise TypingError(f"{embedding.NAME}: no tables; legal are tables, or table_counts and batch_splits")
    counts = [len(weights)] * ranks if table_counts is None else [int(n) for n in table_counts]
    if batch_splits is None:
        batch_splits = tile_sizes((offsets.shape[0] - 1) // len(weights), ranks)
    op = torch.ops.shardplan.embedding_bag_all_to_all
    anchor = _gradient_anchor(group, *weights, per_sample_weights)
    return op(list(weights), indices, offsets, per_sample_weights, group, mode, counts, list(batch_splits), anchor)


def all_gather_gemm(
    a: torch.Tensor, b: torch.Tensor, *, group: str, splits: Sequence[int] | None = None
) -> torch.Tensor:
    """Return the rows of all ranks, of which this one has a [M_r, K], times b [K, N], multiplied as they come: [M, N].

    `splits` are the rows of all ranks, where they differ. See `operators.tensor_parallel.gather_multiply`.
    """
    a, b = product_operands("all_gather_gemm", a, b)
    return torch.ops.shardplan.all_gather_gemm(a, b, group, _ints(splits), _gradient_anchor(group, a, b))[0]


def gemm_reduce_scatter(
    a: torch.Tensor, b: torch.Tensor, *, group: str, splits: Sequence[int] | None = None
) -> torch.Tensor:
    """Return this rank's rows of the sum over ranks of a [M, K_r] times b [K_r, N]: [M_r, N], cut by `splits`.

    See `operators.tensor_parallel.multiply_scatter`.
    """
    a, b = product_operands("gemm_reduce_scatter", a, b)
    return torch.ops.shardplan.gemm_reduce_scatter(a, b, group, _ints(splits), _gradient_anchor(group, a, b))


def grouped_gemm_all_to_all(
    a: torch.Tensor, b: torch.Tensor, counts: torch.Tensor, *, group: str, capacity: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what the experts of all ranks computed for this one, [capacity, N], and how many rows, int64 [W, E].

    `a` [M, K] are rows by expert and destination, `counts` int64 [E, W] of them, on their device, `b` [E, K, N]. See
    `operators.grouped.grouped_multiply`.
    """
    a, b = product_operands(grouped.NAME, a, b)
    anchor = _gradient_anchor(group, a, b)
    return torch.ops.shardplan.grouped_gemm_all_to_all(a, b, counts, group, capacity, anchor)


_check: Any = getattr(torch, "_check")  # noqa: B009, what fakes must call: no public name


def _ints(sizes: Sequence[int] | None) -> list[int] | None:
    return None if sizes is None else list(sizes)


def _share(n: Any, heap: SymmetricHeap) -> Any:
    """This rank's part of n by the tiling rule, n perhaps a symbol."""
    size = -(-n // heap.ranks)
    return torch.sym_min(n, (heap.rank + 1) * size) - torch.sym_min(n, heap.rank * size)


def _fake_gemm(
    heap: SymmetricHeap,
    a: Any,
    b: Any,
    bias: Any,
    group: str,
    activation: str,
    scatter: int,
    send: Any,
    receive: Any,
    *_: Any,
) -> Any:
    _check(a.dim() == 2 and b.dim() == 2)
    _check(a.shape[1] == b.shape[0])
    if scatter == 0:
        rows = sum(receive) if receive is not None else heap.ranks * _share(a.shape[0], heap)
        return a.new_empty(rows, b.shape[1])
    rows = sum(receive) if receive is not None else heap.ranks * a.shape[0]
    return a.new_empty(rows, send[heap.rank] if send is not None else _share(b.shape[1], heap))


def _fake_gemv(heap: SymmetricHeap, a: Any, x: Any, *_: Any) -> Any:
    _check(a.dim() == 2 and a.shape[1] == x.shape[0])
    return a.new_empty(a.shape[0], *x.shape[1:])


def _fake_gather(heap: SymmetricHeap, a: Any, b: Any, group: str, splits: Any) -> Any:
    rows = sum(splits) if splits is not None else heap.ranks * a.shape[0]
    return a.new_empty(rows, b.shape[1]), a.new_empty(rows, a.shape[1])


def _fake_scatter(heap: SymmetricHeap, a: Any, b: Any, group: str, splits: Any) -> Any:
    return a.new_empty(_share(a.shape[0], heap) if splits is None else splits[heap.rank], b.shape[1])


def _back_of_gather(asked: CallContext, g: Any, rows: Any, b: Any, group: str, splits: Any) -> Any:
    parts = [rows.shape[0] // asked.heap.ranks] * asked.heap.ranks if splits is None else splits
    return tensor_parallel.gather_multiply_backward(asked, g, b, rows, parts)


def _fake_back_of_gather(heap: SymmetricHeap, rows: Any, b: Any, group: str, splits: Any) -> Any:
    mine = rows.shape[0] // heap.ranks if splits is None else splits[heap.rank]
    return rows.new_empty(mine, rows.shape[1]), torch.empty_like(b)


def _back_of_scatter(asked: CallContext, g: Any, a: Any, b: Any, group: str, splits: Any) -> Any:
    parts = tile_sizes(a.shape[0], asked.heap.ranks) if splits is None else splits
    return tensor_parallel.multiply_scatter_backward(asked, g, a, b, parts)


def _fake_grouped(heap: SymmetricHeap, a: Any, b: Any, counts: Any, group: str, capacity: int) -> Any:
    return a.new_empty(capacity, b.shape[2]), counts.new_empty(heap.ranks, b.shape[0])


def _bag_arguments(
    tables: Any, ids: Any, offsets: Any, scale: Any, group: str, mode: str, counts: Any, splits: Any
) -> tuple[Any, ...]:
    return tables, ids, offsets, scale, mode, sum(splits), counts, splits


def _fake_bags(
    heap: SymmetricHeap,
    tables: Any,
    ids: Any,
    offsets: Any,
    scale: Any,
    group: str,
    mode: str,
    counts: Any,
    splits: Any,
) -> Any:
    if not tables:
        raise TypingError(f"{embedding.NAME}: rank {heap.rank} has no tables; legal for tracing are some")
    return tables[0].new_empty(splits[heap.rank], sum(counts), tables[0].shape[1])


def _back_of_bags(asked: CallContext, g: Any, *given: Any) -> Any:
    found, each = embedding.backward(asked, g, *_bag_arguments(*given))
    return found, None if each is None or given[3] is None else each.to(given[3].dtype)


SPECS = (
    OperatorSpec(
        gemm.NAME,
        ("a", "b", "bias?"),
        "str group, str activation='none', int scatter=0, SymInt[]? send_splits=None, SymInt[]? recv_splits=None, "
        "int tiles=0",
        forward=lambda asked, a, b, bias, group, *settings: gemm.forward(asked, a, b, bias, *settings[:4]),
        fake=_fake_gemm,
        backward=lambda asked, g, a, b, bias, group, *settings: gemm.backward(asked, g, a, b, bias, *settings[:4]),
        write=lambda asked, out, a, b, bias, group, *rest: gemm.forward(asked, a, b, bias, *rest[:4], out=out),
    ),
    OperatorSpec(
        gemv.NAME,
        ("A", "x"),
        "str group, str algorithm='auto'",
        forward=lambda asked, a, x, group, algorithm: gemv.forward(asked, a, x, algorithm),
        fake=_fake_gemv,
        local_gradient=gemv.backward,
        write=lambda asked, out, a, x, group, algorithm: gemv.forward(asked, a, x, algorithm, out),
    ),
    OperatorSpec(
        tensor_parallel.GATHER,
        ("a", "b"),
        "str group, SymInt[]? splits=None",
        forward=lambda asked, a, b, group, splits: tensor_parallel.gather_multiply(asked, a, b, splits),
        fake=_fake_gather,
        backward=_back_of_gather,
        saved=lambda inputs, output: (output[1], inputs[1]),
        fake_gradients=_fake_back_of_gather,
        results="(Tensor, Tensor)",
    ),
    OperatorSpec(
        tensor_parallel.SCATTER,
        ("a", "b"),
        "str group, SymInt[]? splits=None",
        forward=lambda asked, a, b, group, splits: tensor_parallel.multiply_scatter(asked, a, b, splits),
        fake=_fake_scatter,
        backward=_back_of_scatter,
    ),
    OperatorSpec(
        grouped.NAME,
        ("a", "b", "counts"),
        "str group, int capacity",
        forward=lambda asked, a, b, counts, group, capacity: grouped.grouped_multiply(asked, a, b, counts, capacity),
        fake=_fake_grouped,
        backward=lambda asked, g, a, b, counts, group, capacity: grouped.grouped_multiply_backward(
            asked, g, a, b, counts, capacity
        ),
        results="(Tensor, Tensor)",
        constants=("counts",),
    ),
    OperatorSpec(
        embedding.NAME,
        ("weights[]", "indices", "offsets", "per_sample_weights?"),
        "str group, str mode, int[] table_counts, SymInt[] batch_splits",
        forward=lambda asked, *given: embedding.forward(asked, *_bag_arguments(*given)),
        fake=_fake_bags,
        backward=_back_of_bags,
        write=lambda asked, out, *given: embedding.forward(asked, *_bag_arguments(*given), out=out),
        constants=("indices", "offsets"),
    ),
)


for _spec in SPECS:
    register_operator(_spec)

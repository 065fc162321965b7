"""`gemm_all_to_all`: a product whose blocks go to their ranks tile by tile (paper, section 3.3), and its gradient.

`scatter` 0 sends blocks of rows, as experts return tokens: rank d gets, from every rank s, the rows that s has for it.
`scatter` 1 sends blocks of columns, as Ulysses does: rank d gets its columns of all rows.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING

from shardplan.errors import TypingError, excerpt, optional
from shardplan.fused.calls.agreement import ALL_BACK, SAME, CallKind, Facts, agree_on_call, check_alike
from shardplan.fused.calls.instance import PutStep
from shardplan.fused.heap.failures import HeapMismatch
from shardplan.fused.kernels.activation import activation_gradient, apply_activation, check_activation
from shardplan.fused.operators.call_context import CallContext
from shardplan.fused.operators.moving import BlockMove
from shardplan.fused.operators.out import find_out_tensor, result_or_out
from shardplan.fused.tiles.shapes import BlockCuts, splits, tile_sizes

if TYPE_CHECKING:
    import torch

NAME = "gemm_all_to_all"
LEAST = 64  # rows of a tile: below, packing b again for every tile costs more than it hides (measured, one core)


_FACTS = ("rows", "N", "scatter", "sends", "receives", "dtype", "tiles", "out", "backward", "even")
_ALIKE = ("N", "dtype", "scatter", "tiles", "out", "even")
_DATA = ("sends", "receives")
KIND = CallKind(NAME, _FACTS, _ALIKE, _DATA)
BACK = CallKind(f"{NAME}_backward", (*_FACTS, "gradient"), (*_ALIKE, "gradient"), _DATA)


def _facts(
    asked: CallContext,
    a: torch.Tensor,
    b: torch.Tensor,
    scatter: int,
    sent: Sequence[int] | None,
    received: Sequence[int] | None,
    offset: int | None = None,
) -> tuple[Hashable, ...]:
    """What this rank says of a call: values of `_FACTS`."""
    splits = (None if sent is None else tuple(sent), None if received is None else tuple(received))
    asks = (asked.tiles, offset, asked.backward, asked.even)
    return a.shape[0], b.shape[1], scatter, *splits, a.dtype, *asks


def cuts_of(said: Sequence[Facts]) -> BlockCuts:
    """Return who sends what, given what all ranks said.

    Raises `HeapMismatch` where a rank's `send_splits` and another's `recv_splits` differ.
    """
    check_alike(NAME, said, "backward", ALL_BACK)
    first, ranks = said[0], len(said)
    scatter, columns = first["scatter"], first["N"]
    if scatter == 0:
        counts = tuple(tuple(each["sends"] or tile_sizes(each["rows"], ranks)) for each in said)
        found = BlockCuts("rows", counts, columns)
    else:
        check_alike(NAME, said, "sends", SAME)
        heights = tuple(each["rows"] for each in said)
        found = BlockCuts("stack", (heights, tuple(first["sends"] or tile_sizes(columns, ranks))))
        if first["even"] and any(each["receives"] is None for each in said):
            check_alike(NAME, said, "rows", "as many on every rank, or recv_splits on all")
    for d, each in enumerate(said):
        for s, wanted in enumerate(each["receives"] or ()):
            if wanted != (sends := found.counts[s][d] if scatter == 0 else found.counts[0][s]):
                raise HeapMismatch(f"{NAME}: rank {d} wants {wanted} rows of rank {s}, which sends {sends}")
    return found


def check_operands(
    asked: CallContext,
    a: torch.Tensor,
    b: torch.Tensor,
    bias: torch.Tensor | None,
    scatter: int,
    send: Sequence[int] | None,
    receive: Sequence[int] | None,
) -> tuple[list[int] | None, list[int] | None]:
    """Return checked splits; raises `TypingError` where operands do not fit."""
    asked.check_product(NAME, a, b, bias)
    if bias is not None and (bias.shape != b.shape[1:] or bias.dtype != a.dtype):
        raise TypingError(f"{NAME}: bias {list(bias.shape)}; legal is [{b.shape[1]}] of the dtype of the operands")
    if scatter not in (0, 1):
        raise TypingError(f"{NAME}: scatter {excerpt(scatter)}; legal are 0, blocks of rows, and 1, blocks of columns")
    n = asked.heap.ranks
    sent = splits(f"{NAME}: send_splits", send, n, a.shape[0] if scatter == 0 else b.shape[1])
    return sent, splits(f"{NAME}: recv_splits", receive, n, None)


def forward(
    asked: CallContext,
    a: torch.Tensor,
    b: torch.Tensor,
    bias: torch.Tensor | None = None,
    activation: str = "none",
    scatter: int = 0,
    send_splits: Sequence[int] | None = None,
    recv_splits: Sequence[int] | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return what all ranks computed for this one: of a [M, K] and b [K, N] the activation of a @ b + bias, in blocks.

    With `scatter` 0 the result is [sum(recv_splits), N], with 1 [rows of all ranks, N of this rank]. Splits are by the
    tiling rule where they are not given. A product is rounded once, at its store. With `out`, in a
    `SymmetricTensor` of the heap, the result is there, uncopied, until the next call that writes it. Collective;
    raises `TypingError` where operands do not fit, `HeapMismatch` where ranks differ, and as `FusedInstance.run`.
    """
    sent, received = check_operands(asked, a, b, bias, scatter, send_splits, recv_splits)
    check_activation(activation)  # before anything is sent
    heap, into = asked.heap, find_out_tensor(NAME, asked.heap, out)

    def make(said: Sequence[Facts], varying: bool) -> BlockMove:
        return BlockMove.of(asked, NAME, cuts_of(said), a.dtype, varying=varying, least=LEAST, out=into)

    facts = _facts(asked, a, b, scatter, sent, received, None if into is None else into.offset)
    found = agree_on_call(heap, KIND, facts, asked.seconds, make)
    if asked.kernels is not None:
        return asked.kernels.gemm(asked.seconds, a, b, bias, activation, found.cuts, found.varying, into, out)
    exact = a.dtype.itemsize >= 4
    torch = optional("torch", "torch")

    def put(step: PutStep) -> None:
        part, across = found.own_rows(step, heap.rank), slice(*found.own[step.to][1])
        if part.start == part.stop:
            return
        rows, columns = a[part], b if scatter == 0 else b[:, across]
        if bias is None and activation == "none":
            torch.mm(rows, columns, out=step.view)
            return
        z = rows @ columns if exact else rows.float() @ columns.float()
        if bias is not None:
            z += bias if scatter == 0 else bias[across]
        step.view.copy_(apply_activation(z, activation))

    return result_or_out(NAME, found.run_tiles(asked, put), out)


def backward(
    asked: CallContext,
    g: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    bias: torch.Tensor | None,
    activation: str,
    scatter: int,
    send_splits: Sequence[int] | None,
    recv_splits: Sequence[int] | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Return the gradients of a, b and bias, given that of the result; collective.

    Blocks of g go back; what an activation saw is computed again. Gradients of b and bias are of this rank's rows.
    """
    sent, received = check_operands(asked, a, b, bias, scatter, send_splits, recv_splits)

    def make(said: Sequence[Facts], varying: bool) -> BlockMove:
        return BlockMove.of(asked, BACK.op, cuts_of(said).reverse(), g.dtype, varying=varying)

    facts = (*_facts(asked, a, b, scatter, sent, received), g.dtype)
    dz = agree_on_call(asked.heap, BACK, facts, asked.seconds, make).run(asked, g)
    if activation != "none":
        z = a.float() @ b.float() if a.dtype.itemsize < 4 else a @ b
        dz = activation_gradient(dz.to(z.dtype), z if bias is None else z + bias, activation).to(a.dtype)
    return dz @ b.t(), a.t() @ dz, None if bias is None else dz.sum(0)

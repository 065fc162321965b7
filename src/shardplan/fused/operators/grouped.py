"""`grouped_gemm_all_to_all`: products of several experts of a rank, whose rows go to their ranks, and its gradient.

How many rows of which expert go to whom is a tensor on the operands' device. Kernels of GPUs read it there; the host
waits for nothing: results have `capacity` rows, of which the first ones are there, the others 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from shardplan.errors import TypingError, optional
from shardplan.fused.calls.agreement import ALL_BACK, CallKind, Facts, agree_on_call, check_alike
from shardplan.fused.calls.instance import PutStep
from shardplan.fused.operators.call_context import CallContext
from shardplan.fused.operators.moving import BlockMove
from shardplan.fused.tiles.shapes import BlockCuts, starts

if TYPE_CHECKING:
    import torch

NAME = "grouped_gemm_all_to_all"
WORDS = 8  # of two bytes, in 16
LEAST = 64  # rows of a tile, as those of `gemm`
_FACTS = ("rows", "K", "N", "experts", "capacity", "dtype", "backward", "counts")
KIND = CallKind(NAME, _FACTS, _FACTS[1:6], ("counts",))
BACK = CallKind(f"{NAME}_backward", _FACTS, _FACTS[1:6], ("counts",))


class GroupedCall(NamedTuple):
    """A call that all ranks agreed upon: the most rows of any rank; where the host knows them, counts and the move."""

    most: int
    counts: list[list[list[int]]]  # by rank, expert and destination
    move: BlockMove | None = None


def _agree(
    asked: CallContext, kind: CallKind, a: torch.Tensor, b: torch.Tensor, counts: torch.Tensor, capacity: int
) -> GroupedCall:
    torch, ranks = optional("torch", "torch"), asked.heap.ranks
    if a.ndim != 2 or b.ndim != 3 or a.shape[1] != b.shape[1] or a.dtype != b.dtype:
        raise TypingError(f"{NAME}: {list(a.shape)} and {list(b.shape)}; legal are [M, K] and [E, K, N] of one dtype")
    if counts.shape != (b.shape[0], ranks) or counts.dtype != torch.int64:
        raise TypingError(f"{NAME}: counts {counts.dtype}{list(counts.shape)}; legal are int64 [{b.shape[0]}, {ranks}]")
    asked.check_operands(NAME, a, b, numbers=(counts,))
    own = None if asked.kernels is not None else tuple(map(tuple, counts.tolist()))
    if own is not None and (min(map(min, own)) < 0 or sum(map(sum, own)) > a.shape[0]):
        raise TypingError(f"{NAME}: counts {own}; legal are integers from 0 that sum to at most {a.shape[0]}")
    facts = (a.shape[0], a.shape[1], b.shape[2], b.shape[0], capacity, a.dtype, asked.backward, own)

    def make(said: Sequence[Facts], varying: bool) -> GroupedCall:
        check_alike(NAME, said, "backward", ALL_BACK)
        most, every = max(each["rows"] for each in said), [each["counts"] for each in said]
        if own is None:
            return GroupedCall(most, every)
        cuts = BlockCuts("rows", tuple(tuple(map(sum, zip(*each, strict=True))) for each in every), b.shape[2])
        if (rows := max(cuts.result(rank)[0] for rank in range(ranks))) > capacity:
            raise TypingError(f"{NAME}: {rows} rows for one rank; legal are at most the capacity, {capacity}")
        there, least = (cuts.reverse(), 0) if kind is BACK else (cuts, LEAST)
        return GroupedCall(most, every, BlockMove.of(asked, kind.op, there, a.dtype, varying=True, least=least))

    return agree_on_call(asked.heap, kind, facts, asked.seconds, make)


def grouped_multiply(
    asked: CallContext, a: torch.Tensor, b: torch.Tensor, counts: torch.Tensor, capacity: int, *_: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what the experts of all ranks computed for this one, [capacity, N], and how many rows, int64 [W, E].

    Rows of a [M, K] are those of expert 0, then 1, of each those for rank 0, then 1: `counts` [E, W]. Those of expert e
    are multiplied by b[e] [K, N]. Results come by source, of each by expert; rows behind them are 0. Collective; raises
    `TypingError` where operands do not fit or more rows than `capacity` come to a rank (by kernels of GPUs at the next
    call), `HeapMismatch` where ranks differ, and as `FusedInstance.run`.
    """
    torch = optional("torch", "torch")
    found, rank = _agree(asked, KIND, a, b, counts, capacity), asked.heap.rank
    if asked.kernels is not None:
        return asked.kernels.grouped_multiply(asked.seconds, a, b, counts, capacity)
    assert found.move is not None
    own, boxes = found.counts[rank], found.move.cuts.shape().boxes[rank]
    first = starts([n for each in own for n in each])  # of a's rows, by expert and destination

    def put(step: PutStep) -> None:
        begin, end = (x - boxes[step.to][0][0] for x in step.box[0])
        ahead = 0
        for expert, each in enumerate(own):
            low, high = max(begin, ahead), min(end, ahead + each[step.to])
            if low < high:
                at = first[expert * len(each) + step.to] - ahead
                torch.mm(a[at + low : at + high], b[expert], out=step.view[low - begin : high - begin])
            ahead += each[step.to]

    came = found.move.run_tiles(asked, put)
    out = a.new_zeros(capacity, b.shape[2])
    out[: len(came)] = came
    return out, torch.tensor([[row[rank] for row in each] for each in found.counts])


def grouped_multiply_backward(
    asked: CallContext, g: torch.Tensor, a: torch.Tensor, b: torch.Tensor, counts: torch.Tensor, capacity: int, *_: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the gradients of a and b, given that of the result; collective. Rows go back to where they came from."""
    torch = optional("torch", "torch")
    found, rank = _agree(asked, BACK, a, b, counts, capacity), asked.heap.rank
    if asked.kernels is not None:
        came = asked.kernels.move_grouped_back(asked.seconds, g, counts, len(a), found.most)
    else:
        assert found.move is not None
        came = found.move.run(asked, g[: found.move.cuts.count_rows(rank)])
    dz = _by_expert(came, counts, len(a))
    ends = counts.sum(1).cumsum(0).to(torch.int32)
    (depth, columns), product, pad = b.shape[1:], torch.nn.functional.grouped_mm, torch.nn.functional.pad
    # torch's grouped products want rows of a multiple of 16 bytes.
    a, b, dz = (pad(x, (0, -x.shape[-1] % WORDS)) for x in (a, b, dz))
    da = product(dz, pad(b, (0, 0, 0, -depth % WORDS)).transpose(1, 2), offs=ends)[:, :depth]
    there = torch.arange(len(a), device=a.device)[:, None] < ends[-1]
    db = product(a.t(), dz, offs=ends)[:, :depth, :columns]
    return torch.where(there, da, torch.zeros_like(da)), db.contiguous()


def _by_expert(came: torch.Tensor, counts: torch.Tensor, rows: int) -> torch.Tensor:
    """Return rows that lie by destination and expert as those of a do, by expert and destination; 0 behind them."""
    torch = optional("torch", "torch")
    sizes, order = counts.reshape(-1), torch.arange(counts.numel(), device=counts.device).view(counts.shape)
    ends = sizes.cumsum(0)
    turned = counts.t().reshape(-1).cumsum(0) - counts.t().reshape(-1)  # begins, by destination and expert
    begins = turned.view(counts.shape[1], counts.shape[0]).t().reshape(-1)
    at = torch.arange(rows, device=counts.device)
    part = torch.searchsorted(ends, at, right=True).clamp(max=order.numel() - 1)
    row = (at - (ends - sizes)[part] + begins[part]).clamp(0, max(0, len(came) - 1))
    there = (at < ends[-1])[:, None]
    found = came[row] if len(came) else came.new_zeros(rows, came.shape[1])
    return torch.where(there, found, torch.zeros_like(found))

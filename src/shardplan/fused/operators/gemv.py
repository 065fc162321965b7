"""`gemv_all_reduce`: a thin product whose addends all ranks sum, in the order of ranks (paper, section 3.4).

In one shot every rank sends all its addends to every other one, and each sums; in two shots the owner of a tile sums
and spreads it. Either way a sum is made of the same addends in the same order, so all ranks get the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from shardplan.core.ops.fused_forms import THIN
from shardplan.errors import TypingError, excerpt, optional
from shardplan.fused.calls.agreement import CallKind, Facts, agree_on_call
from shardplan.fused.calls.instance import (
    SPIN,
    FusedInstance,
    PutStep,
    ReadStep,
    SignalStep,
    TileCall,
    TileStep,
    WaitStep,
    instance,
)
from shardplan.fused.kernels.vectors import LANE, WANT, fits, one_shot, rows_times, sum_dtype, thin
from shardplan.fused.operators.call_context import CallContext, count_tiles
from shardplan.fused.tiles.schedule import TileSchedule
from shardplan.fused.tiles.shapes import RowShape

if TYPE_CHECKING:
    import torch

NAME = "gemv_all_reduce"
ALGORITHMS = ("auto", "one_shot", "two_shot")
ONE_SHOT = 64 << 10  # bytes that a rank sends at most in one shot, where `auto` chooses
_FACTS = ("M", "C", "shots", "tiles", "dtype")
KIND = CallKind(NAME, _FACTS, _FACTS)
LEAST = 256  # rows of a tile


def forward(
    asked: CallContext, a: torch.Tensor, x: torch.Tensor, algorithm: str = "auto", out: torch.Tensor | None = None
) -> torch.Tensor:
    """Return the sum over ranks of a [M, K_r] times x [K_r] or [K_r, C], C at most 16: [M] or [M, C] on every rank.

    K_r may differ between ranks, or be 0. Addends and sums are f32, of f64 that. With `out` the result is there, which
    only this rank writes, so that it need not lie in the heap. Collective; raises `TypingError` where operands do not
    fit, `HeapMismatch` where ranks differ, and as `FusedInstance.run`.
    """
    torch = optional("torch", "torch")
    heap = asked.heap
    if a.ndim != 2 or x.ndim not in (1, 2) or x.shape[0] != a.shape[1] or a.dtype != x.dtype:
        said = f"{list(a.shape)} and {list(x.shape)}"
        raise TypingError(f"{NAME}: {said}; legal are [M, K] and [K] or [K, C] of one dtype")
    if x.ndim == 2 and not 1 <= x.shape[1] <= THIN:
        raise TypingError(f"{NAME}: {x.shape[1]} columns; legal are 1 to {THIN}")
    if algorithm not in ALGORITHMS:
        raise TypingError(f"{NAME}: algorithm {excerpt(algorithm)}; legal are {', '.join(ALGORITHMS)}")
    asked.check_operands(NAME, a, x, out)
    m, columns = a.shape[0], 1 if x.ndim == 1 else x.shape[1]
    shape = (m, *x.shape[1:])
    if out is not None and (out.shape != shape or out.dtype != a.dtype or not out.is_contiguous()):
        said = f"out is {str(out.dtype).removeprefix('torch.')}{list(out.shape)}"
        raise TypingError(f"{NAME}: {said}; legal is a contiguous {list(shape)} of the dtype of the operands")
    one = algorithm == "one_shot" or (algorithm == "auto" and m * columns * 4 * (heap.ranks - 1) < ONE_SHOT)

    def make(said: Sequence[Facts], varying: bool) -> GemvCall:
        return GemvCall.of(asked, m, columns, one, a.dtype, sum_dtype(a))

    facts = (m, columns, 1 if one else 2, asked.tiles, a.dtype)
    known = agree_on_call(heap, KIND, facts, asked.seconds, make)
    result = torch.empty(shape, dtype=a.dtype, device=a.device) if out is None else out
    whole = result.view(m, columns)
    if asked.kernels is not None:
        asked.kernels.gemv(asked.seconds, a, x.reshape(-1, columns), 1 if one else 2, asked.tiles, whole)
        return result
    assert known.made is not None and known.call is not None
    made, call, wide, places = known.made, known.call, thin(x), known.places
    made.seconds = asked.seconds
    addends = torch.empty(m, columns, dtype=sum_dtype(a))
    there: set[tuple[int, int]] = set()
    summed: list[torch.Tensor] = [addends]

    def put(step: PutStep) -> None:
        """A lane of own addends, computed once; or a tile of sums."""
        if step.buffer == "result" and not one:
            step.view.copy_(summed[0])
            return
        rows = step.box[1] if one else places[step.to, step.box[1]]
        if rows not in there:
            there.add(rows)
            rows_times(a[slice(*rows)], wide, addends[slice(*rows)])
        step.view[0].copy_(addends[slice(*rows)])

    def read(step: ReadStep) -> None:
        if step.buffer == "partial":
            summed[0] = in_order(step.view)

    sums: list[torch.Tensor] = []

    def ahead(steps: Sequence[TileStep]) -> int:
        """All of one shot in one call of C++, but for what does not come soon."""
        lanes, wants, begun, came = _lanes(call, made.epoch % len(call.steps), steps)
        total = whole if whole.dtype == torch.float32 else torch.empty(m, columns)
        count = one_shot(a, wide, lanes, wants, made.epoch, SPIN, came, addends, total)
        if count < len(wants):
            return begun[count]
        sums.append(total)
        return len(steps)

    fast = one and m > 0 and heap.net is None and fits(a)
    found = made.run(call, put, read, ahead if fast else None)["result"]
    total = sums[0] if sums else in_order(found) if one else found
    if total is not whole:
        whole.copy_(total)
    return result


@dataclass(frozen=True, slots=True)
class GemvCall:
    """A call that all ranks agreed upon; without instance and steps where the heap has other kernels."""

    made: FusedInstance | None = None
    call: TileCall | None = None
    places: dict[tuple[int, tuple[int, int]], tuple[int, int]] = field(default_factory=dict["Any", "Any"])

    @classmethod
    def of(cls, asked: CallContext, m: int, columns: int, one: bool, dtype: torch.dtype, wide: torch.dtype) -> GemvCall:
        """Return what is to be done; collective."""
        if asked.kernels is not None:
            return cls()
        tiles = 1 if one else count_tiles(asked.tiles, m // asked.heap.ranks, LEAST)
        schedule = TileSchedule(tiles=tiles, shots=1 if one else 2)
        dtypes = {"result": wide} if one else {"partial": wide, "result": dtype}
        made = instance(asked.heap, NAME, schedule, str(dtype), asked.seconds)
        call = made.call(RowShape(m), dtypes, (columns,))
        return cls(made, call, {} if one else _places(m, asked.heap.ranks, tiles))


def _lanes(
    call: TileCall, slot: int, steps: Sequence[TileStep]
) -> tuple[np.ndarray, np.ndarray, list[int], torch.Tensor]:
    """What the C++ kernel is told of a slot: lanes, wants, the places of these among the steps, and the own lanes."""
    known = call.facts.get(slot)
    if known is None:
        puts = [step for step in steps if isinstance(step, PutStep)]
        signals = [step for step in steps if isinstance(step, SignalStep)]
        begun = [k for k, step in enumerate(steps) if isinstance(step, WaitStep)]
        lanes = [(p.view.data_ptr(), s.address, s.first, s.step) for p, s in zip(puts, signals, strict=True)]
        waits = [step for step in steps if isinstance(step, WaitStep)]
        wants = np.array([(w.address, w.want, w.step) for w in waits], WANT)
        known = call.facts[slot] = np.array(lanes, LANE), wants, begun, call.views[slot]["result"]
    return known


def in_order(lanes: torch.Tensor) -> torch.Tensor:
    """Return the sum of lanes [W, ...], added up from the first one on: [...]."""
    total = lanes[0].clone()
    for lane in lanes[1:]:
        total += lane
    return total


def _places(rows: int, ranks: int, tiles: int) -> dict[tuple[int, tuple[int, int]], tuple[int, int]]:
    """Where the rows of an owner's tile lie in the whole: by owner, and place among the owner's own."""
    found: dict[tuple[int, tuple[int, int]], tuple[int, int]] = {}
    for owner, own in enumerate(RowShape(rows).tiles(ranks, tiles)):
        at = 0
        for first, last in own:
            found[owner, (at, at + last - first)] = (first, last)
            at += last - first
    return found


def backward(g: torch.Tensor, a: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the gradients of a and x, given that of the result, which is the same on all ranks: nothing is sent."""
    if x.ndim == 1:
        return g[:, None] * x[None], a.t() @ g
    return g @ x.t(), a.t() @ g

"""Bags of embedding rows: sums or means of rows of several tables, tile by tile, and their gradients.

Bags are table-major: bag k of table t is `indices[offsets[t * B + k] : offsets[t * B + k + 1]]`. Sums are in f32 and
rounded once. An empty bag is 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from shardplan.errors import TypingError, excerpt, optional
from shardplan.fused.kernels.native import Kinds, native
from shardplan.fused.kernels.vectors import dtype_name, sum_dtype

if TYPE_CHECKING:
    import torch

MODES = ("sum", "mean")
TILE = np.dtype([("begin", "i8"), ("end", "i8"), ("out", "u8"), ("flag", "u8"), ("first", "i8"), ("step", "i8")])


class BagCall:
    """The operands of a call, checked: tables [R_t, D], ids [n], offsets [T * B + 1], weights [n] or None."""

    def __init__(
        self,
        tables: Sequence[torch.Tensor],
        indices: torch.Tensor,
        offsets: torch.Tensor,
        weights: torch.Tensor | None,
        mode: str,
        batch: int,
        asking: str,
        as_given: bool = False,
    ) -> None:
        """Take ids and offsets as int64, as kernels of CPUs do, or as they are; raises `TypingError` where none fit."""
        torch = optional("torch", "torch")
        self.tables, self.batch, self.mode = [t.contiguous() for t in tables], batch, mode
        ids = (indices, offsets) if as_given else (indices.to(torch.int64), offsets.to(torch.int64))
        self.indices, self.offsets = (x.contiguous() for x in ids)
        self.weights = None if weights is None else weights.float().contiguous()
        if mode not in MODES:
            raise TypingError(f"{asking}: mode {excerpt(mode)}; legal are {', '.join(MODES)}")
        self.count, n = len(self.tables) * batch, self.indices.numel()
        if self.offsets.numel() != self.count + 1:
            self._refuse_offsets(asking)
        if self.weights is not None and self.weights.numel() != n:
            raise TypingError(f"{asking}: {self.weights.numel()} weights of {n} indices; legal are as many")

    def _refuse_offsets(self, asking: str) -> None:
        legal = f"{self.count + 1} that rise from 0 to {self.indices.numel()}"
        said = f"{self.offsets.numel()} offsets of {len(self.tables)} tables and {self.batch} bags"
        raise TypingError(f"{asking}: {said}; legal are {legal}")

    def check(self, asking: str) -> None:
        """Raise `TypingError` where offsets do not rise, or an index is no row of its table: operands on CPUs."""
        edges = self.offsets.numpy()
        if edges[0] != 0 or edges[-1] != self.indices.numel() or (np.diff(edges) < 0).any():
            self._refuse_offsets(asking)
        for t, table in enumerate(self.tables):
            ids = self.indices.numpy()[edges[t * self.batch] : edges[(t + 1) * self.batch]]
            if len(ids) and (ids.min() < 0 or ids.max() >= len(table)):
                wrong = next(int(i) for i in ids if not 0 <= i < len(table))
                raise TypingError(f"{asking}: index {wrong} of table {t}; legal are 0 to {len(table) - 1}")

    def bag_of(self, t: int, begin: int, end: int) -> tuple[int, int, torch.Tensor]:
        """Return the range of indices of some bags of a table, and the bag of each, counted from `begin`."""
        torch = optional("torch", "torch")
        edges = self.offsets[t * self.batch + begin : t * self.batch + end + 1]
        return (
            int(edges[0]),
            int(edges[-1]),
            torch.repeat_interleave(torch.arange(end - begin, device=edges.device), edges.diff()),
        )

    def lengths(self, t: int, begin: int, end: int) -> torch.Tensor:
        """Return the lengths of bags, f32 [end - begin], at least 1."""
        edges = self.offsets[t * self.batch + begin : t * self.batch + end + 1]
        return edges.diff().clamp(min=1).float()

    def store(self, begin: int, end: int, out: torch.Tensor) -> None:
        """Store bags of all tables in out, [end - begin, T, D], of any strides."""
        torch = optional("torch", "torch")
        for t, table in enumerate(self.tables):
            first, last, bag = self.bag_of(t, begin, end)
            rows = table[self.indices[first:last]].float()
            if self.weights is not None:
                rows = rows * self.weights[first:last, None]
            sums = torch.zeros(end - begin, table.shape[1]).index_add_(0, bag, rows)
            out[:, t].copy_(sums / self.lengths(t, begin, end)[:, None] if self.mode == "mean" else sums)

    def gradients(self, g: torch.Tensor, of_weights: bool) -> tuple[list[torch.Tensor], torch.Tensor | None]:
        """Return the gradients of tables and, where asked for, of weights, given that of the bags, [B, T, D].

        The ids of all tables are sorted once, and rows summed in that order: none is copied for each of its ids.
        """
        torch = optional("torch", "torch")
        sizes, n, width = [len(t) for t in self.tables], self.indices.numel(), g.shape[2]
        if not sizes:
            return [], g.new_zeros(n, dtype=torch.float32) if of_weights else None
        bag = torch.repeat_interleave(
            torch.arange(self.count, device=g.device), self.offsets.diff(), output_size=n
        )  # which its size, known here, keeps from waiting for the device
        came = g.transpose(0, 1).reshape(self.count, width).to(sum_dtype(g))
        if self.mode == "mean":
            came = came / self.offsets.diff().clamp(min=1).to(came.dtype)[:, None]
        begins = torch.tensor([[0, *np.cumsum(sizes[:-1])], sizes], pin_memory=g.is_cuda)
        begin, size = begins.to(g.device, non_blocking=True)[:, bag // max(1, self.batch)]
        each = None
        if of_weights:
            rows = torch.cat(self.tables)[(self.indices + begin).clamp(0, sum(sizes) - 1)]
            each = (came[bag] * rows.to(came.dtype)).sum(1)
        # What is no row, of which kernels of GPUs only make a note, is added to one behind all.
        ids = torch.where((self.indices >= 0) & (self.indices < size), self.indices + begin, sum(sizes))
        if sum(sizes) < (1 << 31) - 1:  # tables may be longer together than int32 reaches
            ids = ids.to(self.indices.dtype)
        none, scale = ids.new_empty(0), None if self.weights is None else self.weights.to(came.dtype)
        add_sorted = torch.ops.aten._embedding_bag_dense_backward  # what torch's own embedding_bag has
        whole = add_sorted(came, ids, bag.to(ids.dtype), none, none, sum(sizes) + 1, False, 0, scale, -1)
        return [x.to(t.dtype, copy=True) for x, t in zip(whole[:-1].split(sizes), self.tables, strict=True)], each


class BagKernel:
    """A call for the C++ kernel: all tiles of a rank, and the signals behind them, without Python between."""

    def __init__(self, call: BagCall, bag_stride: int, table_stride: int) -> None:
        """Take strides of the result in elements; there must be `native`, and a dtype of `Kinds`."""
        self.call = call
        self.pointers = np.array([t.data_ptr() for t in call.tables], np.uint64)
        self.rows = np.array([len(t) for t in call.tables], np.int64)
        weights = 0 if call.weights is None else call.weights.data_ptr()
        given = (self.pointers.ctypes.data, self.rows.ctypes.data, len(call.tables), call.tables[0].shape[1])
        ids = (call.batch, call.indices.data_ptr(), call.offsets.data_ptr(), weights)
        self.struct = np.array([*given, *ids, call.mode == "mean", bag_stride, table_stride], np.int64)
        self.kind = Kinds[dtype_name(call.tables[0])]

    @staticmethod
    def fits(call: BagCall) -> bool:
        """Return whether it can take a call."""
        return native() is not None and bool(call.tables) and dtype_name(call.tables[0]) in Kinds

    def store(self, tiles: np.ndarray, epoch: int) -> None:
        """Store the tiles, rows of `TILE`, and signal behind each that has a flag."""
        kernels = native()
        assert kernels is not None
        kernels.bags(self.kind, self.struct.ctypes.data, tiles.ctypes.data, len(tiles), epoch)

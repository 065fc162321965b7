"""Spreading: the copies that receivers want, laid end to end and cut into equal shares of the owners."""

from __future__ import annotations

import math

import numpy as np

SMALL = 1 << 16  # bytes of a share: a message of 64 kB takes about as long as its latency (nominal: 5 us at 50 GB/s)
_FINE = 8  # a dim is cut into n shares that differ by one index; from 8 n indices on that is little

# Of every share: combination of content and cell, receiver, owner, dim that is cut, first part, last, parts.
Shares = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray]


def spread(
    combos: np.ndarray, to: np.ndarray, by: np.ndarray, length: np.ndarray, size: np.ndarray, turn: int
) -> list[Shares]:
    """Return the shares of combinations of D receivers [combos, D] and S owners [combos, S] each."""
    if not len(combos):
        return []
    d, s = to.shape[1], by.shape[1]
    parts = s // math.gcd(d, s)
    small = size[combos] < parts * SMALL
    if not length.shape[1] or parts == 1:
        small = np.ones(len(combos), dtype=bool)
    found: list[Shares] = []
    for some, pieces in ((small, 1), (~small, parts)):
        if not some.any():
            continue
        j, owner, first, last = _template(d, s, pieces)
        n, k = int(some.sum()), len(j)
        cut = np.repeat(cut_dim(length[combos[some]], pieces), k)
        # In turn, so that the one index that some shares have more does not meet the same owner every time.
        shift = (combos[some] + turn) % s if d % s else np.zeros(n, dtype=np.int64)
        chosen = (owner[None] + shift[:, None]) % s
        sender = np.take_along_axis(by[some], chosen, axis=1).reshape(-1)
        sizes = np.tile(first, n), np.tile(last, n), np.full(n * k, pieces, dtype=np.int64)
        found.append((np.repeat(combos[some], k), to[some][:, j].reshape(-1), sender, cut, *sizes))
    return found


def _template(d: int, s: int, parts: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Of d receivers and s owners, each copy in `parts`: receiver, owner, first part and last of every share."""
    if parts == 1:
        j = np.arange(d, dtype=np.int64)
        owner = j * s // d if d >= s else j
        return j, owner, np.zeros_like(j), np.ones_like(j)
    rows: list[tuple[int, int, int, int]] = []
    each = d * parts // s
    for j in range(d):
        at = j * parts
        while at < (j + 1) * parts:
            end = min((at // each + 1) * each, (j + 1) * parts)
            rows.append((j, at // each, at - j * parts, end - j * parts))
            at = end
    columns = np.array(rows, dtype=np.int64).T
    return columns[0], columns[1], columns[2], columns[3]


def cut_dim(length: np.ndarray, parts: int) -> np.ndarray:
    """Return the dim along which every combination is cut: the first that is cut evenly enough, else the longest."""
    if not length.shape[1]:
        return np.zeros(len(length), dtype=np.int64)
    fine = (length % parts == 0) | (length >= _FINE * parts)
    return np.where(fine.any(axis=1), np.argmax(fine, axis=1), np.argmax(length, axis=1))

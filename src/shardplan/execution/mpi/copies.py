"""The copies and folds of a round on one rank, with numpy, between views of its buffers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from shardplan.core.dtypes import COMBINE, identity
from shardplan.execution.rank_rounds import Piece, PieceCopy


def write(arrays: Mapping[str, np.ndarray], copy: PieceCopy) -> None:
    """Write, fold or fill a piece, in the dtype of its buffer."""
    targets = _views(arrays, copy.target)
    if copy.source is None:
        for target in targets:
            target[...] = identity(copy.fold or "sum", target.dtype)
        return
    sources = _views(arrays, copy.source)
    if [x.shape for x in sources] != [x.shape for x in targets]:
        if _run(targets):
            targets = _cut(targets[0], sources)
        else:
            sources = _cut(sources[0] if _run(sources) else np.concatenate([x.reshape(-1) for x in sources]), targets)
    for source, target in zip(sources, targets, strict=True):
        if copy.fold is None:
            target[...] = source
        else:
            with np.errstate(all="ignore"):
                COMBINE[copy.fold](target, source, out=target)


def _views(arrays: Mapping[str, np.ndarray], piece: Piece) -> list[np.ndarray]:
    whole = arrays[piece.buffer].reshape(piece.shape)
    # Without the ellipsis no view of an array without dims.
    return [whole[(*(slice(lo, hi) for lo, hi in box), ...)] for box in piece.boxes]


def _run(views: Sequence[np.ndarray]) -> bool:
    """Whether the views are one run of elements, which can be cut anywhere."""
    return len(views) == 1 and views[0].flags.c_contiguous


def _cut(run: np.ndarray, like: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Return the elements of a run in order, as views of these shapes."""
    ends = np.cumsum([x.size for x in like])
    return [run.reshape(-1)[end - x.size : end].reshape(x.shape) for x, end in zip(like, ends.tolist(), strict=True)]

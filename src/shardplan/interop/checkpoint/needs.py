"""Which logical tensors a file needs, and what of them: intervals of every dim that it does not need whole."""

from __future__ import annotations

from collections.abc import Collection

import numpy as np

from shardplan.movement.weights.family import StoredFamily
from shardplan.movement.weights.lowering import DimRuns
from shardplan.movement.weights.weights import Weights

_SHOWN = 3  # intervals of a dim


def needed_parts(weights: Weights, rank: int, numbers: Collection[int]) -> dict[str, str]:
    """Return what some parameters of a rank, by their numbers in `names(rank)`, need: per tensor, as text.

    >>> config = {"hidden_size": 8, "intermediate_size": 12, "num_attention_heads": 4, "num_key_value_heads": 2,
    ...           "num_hidden_layers": 3, "vocab_size": 10}
    >>> w = Weights.load("vllm-llama", config, tensor=2)
    >>> [n for n in w.names(1)[9:11]], needed_parts(w, 1, [9, 10])["k"]
    (['model.layers.0.self_attn.qkv_proj.weight', 'model.layers.1.self_attn.qkv_proj.weight'], 'k[l=0:2, g d=2:4]')
    """
    place = weights.place(rank)
    starts = np.array(weights.starts[place])
    chosen = np.array(sorted(numbers), dtype=np.int64)
    owners = np.searchsorted(starts, chosen, side="right") - 1
    spans: dict[str, list[list[tuple[int, int]]]] = {}
    for number in np.unique(owners).tolist():
        family = weights.families[number]
        digits = _digits(family, place, chosen[owners == number] - starts[number])
        for name, dims in family.tensors.items():
            held = spans.setdefault(name, [[] for _ in dims])
            for kept, runs in zip(held, dims, strict=True):
                kept += _spans(family, runs, place, digits)
    return {name: _text(weights, name, held) for name, held in spans.items()}


def _digits(family: StoredFamily, place: int, numbers: np.ndarray) -> list[set[int]]:
    """Return which values of every dim of the name some names of a family have."""
    counts = [len(dim.values[int(family.coordinate(dim.axes)[place])]) for dim in family.names]
    return [set(d.tolist()) for d in np.unravel_index(numbers, counts)] if counts else []


def _spans(family: StoredFamily, runs: DimRuns, place: int, digits: list[set[int]]) -> list[tuple[int, int]]:
    """Return the logical intervals of a dim that are at a place, under the names of these digits."""
    rows = runs.rows(int(family.coordinate(runs.axes)[place]))
    out: list[tuple[int, int]] = []
    columns = (runs.start[rows], runs.length[rows], runs.name[rows], runs.name_step[rows])
    for start, length, name, step in zip(*(c.tolist() for c in columns), strict=True):
        if runs.hole < 0 or not step:
            if runs.hole < 0 or name in digits[runs.hole]:
                out.append((start, start + length))
            continue
        out += [(start + k, start + k + 1) for k in range(length) if name + k * step in digits[runs.hole]]
    return out


def _text(weights: Weights, name: str, spans: list[list[tuple[int, int]]]) -> str:
    tensor = weights.tensors[name]
    said: list[str] = []
    for dim, legal, found in zip(tensor.dims, tensor.ranges, spans, strict=True):
        joined: list[tuple[int, int]] = []
        for low, high in sorted(set(found)):
            if joined and low <= joined[-1][1]:
                joined[-1] = (joined[-1][0], max(high, joined[-1][1]))
            else:
                joined.append((low, high))
        if sum(high - low for low, high in joined) < len(legal):
            texts = [f"{low}:{high}" if high > low + 1 else str(low) for low, high in joined]
            more = [] if len(texts) <= _SHOWN else ["..."]
            said.append(f"{' '.join(dim.atoms)}={'+'.join(texts[:_SHOWN] + more)}")
    return f"{name}[{', '.join(said)}]" if said else name

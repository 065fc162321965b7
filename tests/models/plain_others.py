"""The plain models that are no decoders: DLRM and DistIR's perceptron."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from tests.models.plain_parts import Params
from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Recommender:
    """The sizes of a DLRM (arXiv 1906.00091): `bottom` ends in `embedding_dim`, `top` in 1."""

    family: str
    dense_features: int
    embedding_dim: int
    table_rows: tuple[int, ...]
    bag: int
    bottom: tuple[int, ...]
    top: tuple[int, ...]
    source: str = ""

    @property
    def top_input(self) -> int:
        """The width of what the top MLP takes: the dense vector and one product a pair of vectors."""
        vectors = len(self.table_rows) + 1
        return self.embedding_dim + vectors * (vectors - 1) // 2


def recommender_shapes(config: Recommender) -> dict[str, tuple[int, ...]]:
    """Names as in facebookresearch/dlrm: products stand at even places of a list whose odd places are activations."""
    found: dict[str, tuple[int, ...]] = {
        f"emb_l.{t}.weight": (rows, config.embedding_dim) for t, rows in enumerate(config.table_rows)
    }
    for name, widths in (
        ("bot_l", (config.dense_features, *config.bottom)),
        ("top_l", (config.top_input, *config.top)),
    ):
        for i, (before, after) in enumerate(zip(widths, widths[1:], strict=False)):
            found |= {f"{name}.{2 * i}.weight": (after, before), f"{name}.{2 * i}.bias": (after,)}
    return found


def interact(vectors: Tensor) -> Tensor:
    """The dot products of `vectors [b, n, d]`, each pair once: (1, 0), (2, 0), (2, 1), (3, 0), ..."""
    rows, columns = torch.tril_indices(vectors.shape[1], vectors.shape[1], -1)
    return (vectors @ vectors.transpose(1, 2))[:, rows, columns]


def click_logits(params: Params, batch: Params, config: Recommender) -> Tensor:
    """The log odds `[b]` of a click, from `batch["dense"] [b, features]` rows `batch["sparse"] [b, tables, bag]`."""

    def layers(name: str, count: int, x: Tensor, relu_last: bool) -> Tensor:
        for i in range(count):
            x = x @ params[f"{name}.{2 * i}.weight"].T + params[f"{name}.{2 * i}.bias"]
            x = x.clamp(min=0) if relu_last or i < count - 1 else x
        return x

    dense = layers("bot_l", len(config.bottom), batch["dense"], True)
    bags = [params[f"emb_l.{t}.weight"][batch["sparse"][:, t]].sum(1) for t in range(len(config.table_rows))]
    mixed = torch.cat([dense, interact(torch.stack([dense, *bags], 1))], 1)
    return layers("top_l", len(config.top), mixed, False)[:, 0]


def recommender_loss(params: Params, batch: Params, config: Recommender) -> Tensor:
    """The mean binary cross entropy of `batch["clicks"] [b]`, 0 or 1."""
    odds = click_logits(params, batch, config)
    return (torch.logaddexp(odds, torch.zeros_like(odds)) - batch["clicks"] * odds).mean()


@dataclass(frozen=True, slots=True, kw_only=True)
class Perceptron:
    """The sizes of DistIR's MLP: input, hidden and result are all of width `hidden`."""

    family: str
    layers: int
    hidden: int
    source: str = ""


def perceptron_shapes(config: Perceptron) -> dict[str, tuple[int, ...]]:
    """DistIR calls them wA, wB, ..., and letters end at 26; the numbers are those of a checkpoint."""
    return {f"layers.{i}.weight": (config.hidden, config.hidden) for i in range(config.layers)}


def perceptron(params: Params, x: Tensor, config: Perceptron) -> Tensor:
    """ReLU(x @ W) layer by layer, after the last one, too."""
    for i in range(config.layers):
        x = (x @ params[f"layers.{i}.weight"]).clamp(min=0)
    return x


def perceptron_loss(params: Params, batch: Params, config: Perceptron) -> Tensor:
    """The squared error of `batch["targets"]` after `batch["inputs"]`, summed over features, over the batch's size."""
    return (perceptron(params, batch["inputs"], config) - batch["targets"]).square().sum() / len(batch["inputs"])

"""The models that are no decoders: DistIR's perceptron, and DLRM (arXiv 1906.00091)."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

from shardplan.core.ops import Concat, Crop, EmbeddingBag, Expand, ReduceDims, Reshape
from shardplan.strategy.scope import Scope
from shardplan.strategy.sizes import PerceptronSizes, RecommenderSizes


def perceptron(s: Scope, c: PerceptronSizes, training: bool) -> None:
    """Write the result `loss`, the squared error summed over features, or without training `outputs`."""
    pair = {"batch": c.batch, "hidden": c.hidden}
    x = s.input("inputs", pair)
    if training:
        s.input("targets", pair)

    def layer(s: Scope, x: str, given: Mapping[str, str]) -> str:
        weight = s.parameter("weight", {"hidden": c.hidden, "ffn": c.hidden}, "layers.{layer}.weight")
        return s.elementwise("relu(a)", s.einsum("bh,hf->bf", x, weight))

    x = s.layers("layers", range(c.layers), x, layer, {})
    if training:
        s.mean(s(ReduceDims((1,)), s.elementwise("(a - b) ** 2", x, "targets")))
    else:
        s.results["outputs"] = x


def recommender(s: Scope, c: RecommenderSizes, training: bool) -> None:
    """Write the result `loss`, the binary cross entropy of clicks, or without training `logits`, its log odds.

    Ids of table t are the input `sparse.t`, `[batch bag]`; a bag is the sum of its rows.
    """
    s.input("dense", {"batch": c.batch, "features": c.dense_features})
    for t in range(len(c.table_rows)):
        s.input(f"sparse.{t}", {"batch": c.batch, "bag": c.bag}, "i32")
    if training:
        s.input("clicks", {"batch": c.batch})
    bottom = _mlp_dims(("features", c.dense_features), c.bottom, "embedding")
    dense = _layers(s, "bottom", "bot_l", bottom, "dense", relu_last=True)
    vectors = [dense]
    for t, rows in enumerate(c.table_rows):
        table = s.parameter(f"tables.{t}", {"rows": rows, "embedding": c.embedding_dim}, f"emb_l.{t}.weight")
        vectors.append(s(EmbeddingBag(), table, f"sparse.{t}"))
    n = len(vectors)
    joint = s(Concat(1), *(s(Expand("b d -> b one=1 d"), v) for v in vectors))
    products = s.einsum("bnd,bmd->bnm", joint, joint)
    pairs = [s(Reshape("b one=1 m -> b m"), s(Crop((0, k, 0), (c.batch, k + 1, k)), products)) for k in range(1, n)]
    width = c.embedding_dim + n * (n - 1) // 2
    top = _mlp_dims(("pairs", width), c.top, "click")
    odds = _layers(s, "top", "top_l", top, s(Concat(1), dense, *pairs), relu_last=False)
    odds = s(Reshape("b one=1 -> b"), odds)
    if training:
        s.mean(s.elementwise("maximum(a, 0) + log(1 + exp(-abs(a))) - a * b", odds, "clicks"))
    else:
        s.results["logits"] = odds


def _layers(s: Scope, name: str, file: str, dims: Sequence[tuple[str, int]], x: str, *, relu_last: bool) -> str:
    """Products with biases, each behind a ReLU; in a checkpoint activations have every other number."""
    for i, (before, after) in enumerate(itertools.pairwise(dims)):
        at, into = f"{file}.{2 * i}", dict([after])
        weight = s.parameter(f"{name}.{i}", dict([before, after]), f"{at}.weight", f"{after[0]} {before[0]}")
        bias = s.parameter(f"{name}.{i}.bias", into, f"{at}.bias")
        y = s.einsum("bi,io->bo", x, weight)
        x = s.elementwise("relu(a + b)" if relu_last or i < len(dims) - 2 else "a + b", y, bias)
    return x


def _mlp_dims(first: tuple[str, int], widths: Sequence[int], last: str) -> list[tuple[str, int]]:
    """The dims of an MLP; those inside take turns, so that a product's two are not of one name."""
    return [first, *zip(itertools.cycle(("ffn", "hidden")), widths[:-1], strict=False), (last, widths[-1])]

"""`ModelLimits`: what of a model bounds the degrees of a strategy, and which of its options mean anything to it."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from shardplan.core.nested import as_nested
from shardplan.core.ops.compute import computing
from shardplan.core.walk import program_leaves
from shardplan.strategy.model import Model
from shardplan.strategy.partition.loss import losses_of
from shardplan.strategy.training import OPTIMIZERS, PRECISIONS


@dataclass(frozen=True, slots=True)
class ModelLimits:
    """Of a model its layers, its heads, or where it has none what else `tensor` cuts, its positions and its experts.

    `shared` is what `expert` deals out: experts, or the columns of embedding tables; 1 where there is neither, as
    `sequence` is without a sequence, and `heads` where `tensor` cuts nothing. `kept` says whether an optimizer keeps
    state beside parameters, `scores` whether there is attention; `losses` are those of `Strategy.loss` that it has.
    Experts have slots for `room` times their even share of tokens, infinity where all that come have one; where it
    `drops`, what comes above is dropped.
    """

    layers: int
    heads: int
    key_heads: int
    sequence: int
    experts: int
    shared: int
    training: bool
    kept: bool
    scores: bool
    losses: tuple[str, ...]
    room: float = math.inf
    drops: bool = False

    def forward(self) -> ModelLimits:
        """Return those of the model where it runs forward alone."""
        return replace(self, training=False, kept=False)

    @staticmethod
    def of(model: Model, precision: str | None = None) -> ModelLimits:
        """Read a model's dims, as it is under a precision."""
        sizes: dict[str, int] = {}
        types = model.program.types
        for value, dims in model.dims.items():
            if value in types:
                for dim, n in zip(dims, types[value].shape, strict=True):
                    sizes[dim] = max(sizes.get(dim, 1), n)
        tables = {n for p in model.parameters.values() if [d for d, _ in p.dims] == ["rows", "embedding"]
                  for n in p.shape[1:]}  # fmt: skip
        program = model.forward or model.program
        scores = any(op.kernel_class == "scores" for _, leaf, _ in program_leaves(program) if (op := computing(leaf)))
        heads = sizes.get("kv_heads", 1) * sizes.get("ratio", 1)
        if not scores:
            heads = max(heads, sizes.get("ffn", 1), sizes.get("vocab", 1))
        optimizer, recipe = model.fields["optimizer"], PRECISIONS.get(str(model.fields.get("precision", "")))
        recipe = recipe if precision is None else PRECISIONS.get(precision, PRECISIONS["bf16"])
        kept = bool(optimizer and (OPTIMIZERS[optimizer].state or (recipe is not None and recipe.master)))
        layers = sum(loop.times for step in program.steps if (loop := as_nested(step.op)) is not None)
        return ModelLimits(
            max(layers, 1),
            heads,
            sizes.get("kv_heads", 1),
            max(sizes.get("sequence", 1), int(model.fields.get("cache", 0))),
            sizes.get("experts", 1),
            sizes.get("experts", max(tables, default=1)),
            bool(model.fields["training"]),
            kept,
            scores,
            losses_of(program),
            float(model.fields.get("capacity_factor") or math.inf),
            bool(model.fields.get("capacity_factor")) and not model.fields.get("dropless"),
        )

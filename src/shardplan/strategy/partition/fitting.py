"""The model as a strategy runs it: with the batch of one microbatch, in its precision, in its order of positions."""

from __future__ import annotations

from shardplan.errors import LayoutError
from shardplan.strategy.model import Model
from shardplan.strategy.strategy import Strategy


def fitted(model: Model, strategy: Strategy) -> Model:
    """Return the model of one microbatch; raises `LayoutError` for an order or microbatches that it cannot have."""
    if strategy.precision is not None and model.fields.get("precision") != strategy.precision:
        model = model.with_precision(strategy.precision)
    batch = strategy.data * strategy.microbatch
    kept = [name for name in model.replaced if "batch" in model.dims[name]]
    if kept and strategy.microbatches > 1:
        raise LayoutError(
            f"strategy: microbatches={strategy.microbatches} of a model that keeps {kept[0]} of its sequences from run "
            f"to run, and that microbatches would share; legal is one, as of microbatch={strategy.global_batch}"
        )
    sizes = {
        n
        for name, dims in model.dims.items()
        for d, n in zip(dims, model.program.types[name].shape, strict=True)
        if d == "batch"
    }
    if strategy.context_kind == "zigzag":
        if not model.fields["training"]:
            raise LayoutError("context_kind='zigzag' of a forward pass, whose results are in order; legal is ring")
        return model.resize(batch=batch, zigzag=strategy.context)
    return model if sizes <= {batch} else model.resize(batch=batch)

"""Optimizer state: it has the shape of its parameter and is stored alike, under another name and dtype.

Moments under DTensor (FSDP2, torchtitan, `fsdp_dtensor` of Megatron) and whole tensors in a `fully_reshardable` folder
of Megatron-LM d98e8a6 are stored by the same expressions as the weights. A `dp_reshardable` folder holds flat buckets
whose borders depend on the degrees of the run that wrote it, and is refused by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from shardplan.errors import LayoutError, excerpt
from shardplan.movement.weights.weights import Weights, make_weights

# How names of state are made of a parameter's: `{state}` is exp_avg, exp_avg_sq or param, `{name}` the parameter's.
FORMATS: Mapping[str, str] = {
    "dtensor": "state.{name}.{state}",
    "fsdp_dtensor": "optimizer.state.{state}.{name}",
    "fully_reshardable": "optimizer.state.{state}.{name}",
}


def optimizer_state(weights: Weights, state: str, form: str = "dtensor", dtype: str = "f32") -> Weights:
    """Return a side that stores one state of every parameter of another: `exp_avg`, `exp_avg_sq`, `param`.

    Args:
        weights: how the parameters are stored.
        state: the state's name.
        form: `dtensor` (torch.distributed.checkpoint), `fsdp_dtensor` or `fully_reshardable` (Megatron).
        dtype: of every element, also of those whose parameter has a dtype of its own.

    Raises:
        LayoutError: another form; `dp_reshardable`, whose buckets follow the degrees of the run that wrote them.

    >>> config = {"hidden_size": 8, "intermediate_size": 12, "num_attention_heads": 4, "num_key_value_heads": 2,
    ...           "num_hidden_layers": 1, "vocab_size": 10}
    >>> optimizer_state(Weights.load("fsdp2-llama", config, data=2), "exp_avg").names(0)[0]
    'state.model.embed_tokens.weight.exp_avg'
    """
    if form == "dp_reshardable":
        raise LayoutError(
            "optimizer state as dp_reshardable is flat buckets cut by the data parallelism of the run that wrote it; "
            "legal is to save it with --dist-ckpt-optim-fully-reshardable, and fully_reshardable here"
        )
    if form not in FORMATS:
        raise LayoutError(f"optimizer state as {excerpt(form)}; legal are {', '.join(FORMATS)}")
    table = weights.table
    named = tuple(
        replace(p, name=FORMATS[form].replace("{name}", p.name).replace("{state}", state), dtype=dtype, plus=0)
        for p in table.parameters
    )
    other = replace(table, name=f"{table.name} {state}", parameters=named, dtypes=(), scales=())
    return make_weights(other, dict(weights.config), dict(weights.given), weights.devices, dtype)

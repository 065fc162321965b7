"""What a row measured: its model, its strategy or those that it may have been, and its topology."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from typing import Any

from shardplan.errors import ShardplanError, excerpt
from shardplan.hardware.topology import Topology
from shardplan.simulation.accuracy.step_rows import RowCluster, RowModel, StepRow
from shardplan.simulation.closed.form import ClosedForm
from shardplan.simulation.closed.parameters import Parameters
from shardplan.strategy.limits import ModelLimits
from shardplan.strategy.model import Model
from shardplan.strategy.options import idle
from shardplan.strategy.strategy import Strategy

# What a field that is unpublished may have been.
CHOICES: dict[str, tuple[Any, ...]] = {
    "microbatch": (1, 2, 4, 8),
    "interleave": (1, 2, 3, 4, 5, 6, 8),
    "schedule": ("1f1b", "interleaved"),
    "recompute": ("none", "selective", "full"),
    "sequence_parallel": (False, True),
    "zero": (0, 1),
    "precision": ("bf16",),
}

# What frameworks call what is computed again, and how keys and values get to where queries are.
RECOMPUTED = {
    **dict.fromkeys(("none", "no", "off", "false"), "none"),
    **dict.fromkeys(("full", "uniform", "recompute_granularity=full", "gradient_checkpointing", "mode=full"), "full"),
    **dict.fromkeys(("selective", "core_attn", "recompute_granularity=selective"), "selective"),
    **dict.fromkeys(("selective_op", "op", "mode=selective", "selective_ac_option=op"), "selective_op"),
}
CONTEXT_KINDS = {
    **dict.fromkeys(("ulysses", "a2a"), "ulysses"),
    **dict.fromkeys(("gather", "all_gather", "allgather"), "gather"),
    **dict.fromkeys(("zigzag", "p2p"), "zigzag"),
    "ring": "ring",
}
DISPATCHED = {
    **dict.fromkeys(("levels", "deepep", "hybridep", "flex"), "levels"),
    **dict.fromkeys(("direct", "alltoall"), "direct"),
}
WITHOUT_GATE = 2 / 3  # of its width has a gated MLP that has as many parameters and operations, and saves as much
PIECE = 128  # of a width, so that tensors divide it
RING_FROM = 32 * 1024  # tokens of a sequence above which keys and values go round: heads are too few to deal out
# Schedules that run a forward and a backward together where exchanges with experts overlap, as Megatron-Core has it.
PAIRED = ("1f1b", "interleaved")
# Options that publications say although they do nothing.
HARMLESS = (
    "sequence_parallel", "tensor_overlap", "zero", "fsdp", "recompute", "schedule", "offload_layers", "expert_from",
    "dispatch", "expert_products", "expert_overlap",
)  # fmt: skip


@lru_cache(maxsize=256)
def model_of(row: RowModel) -> Model:
    """Return the model of explicit shape, training in bf16: of two sequences, so that its batch has a factor.

    A Llama without a gate is as one with a gate and two thirds of the width. Raises `ShardplanError` for what no model
    here has.
    """
    said = {"gpt": (False, row.heads), "llama": (None, None), "moe": (True, None)}[row.family]
    for name, legal in zip(("gated_mlp", "kv_heads"), said, strict=True):
        if legal is not None and getattr(row, name) != legal:
            raise ShardplanError(f"a {row.family} of {name}={getattr(row, name)}: legal is {legal}, or family llama")
    fields: dict[str, Any] = {name: getattr(row, name) for name in ("layers", "hidden", "heads", "ffn", "seq", "vocab")}
    if row.family == "gpt":
        fields["positions"] = row.seq
    else:
        fields["kv_heads"] = row.kv_heads
    more = ("head_dim", "value_dim", "q_lora_rank", "kv_lora_rank", "dense_layers", "dense_ffn", "shared_ffn",
            "router_groups", "router_groups_kept")  # fmt: skip
    fields |= {name: getattr(row, name) for name in more if getattr(row, name)}
    if row.family == "llama" and not row.gated_mlp:
        fields["ffn"] = max(PIECE, round(row.ffn * WITHOUT_GATE / PIECE) * PIECE)
    if row.family == "moe":
        fields |= {"experts": row.experts, "experts_per_token": row.experts_per_token}
        fields.setdefault("dense_layers", 0)
    return Model.load(row.family, batch=2, precision="bf16", **fields)


@lru_cache(maxsize=256)
def limits_of(row: RowModel) -> ModelLimits:
    """Return the limits of a row's model."""
    return ModelLimits.of(model_of(row))


@lru_cache(maxsize=256)
def form_of(row: RowModel, cluster: RowCluster) -> ClosedForm:
    """Return the closed form of a model on a row's cluster; what was read of a model is read once for all clusters."""
    return _read_form(row).on(topology_of_row(cluster), Parameters())


@lru_cache(maxsize=256)
def _read_form(row: RowModel) -> ClosedForm:
    return ClosedForm(model_of(row), Topology.load("nominal"))


def strategies_of(row: StepRow) -> list[Strategy]:
    """Return the strategy of a row; several where fields of it are unpublished: those that are legal.

    Options of it that do nothing are left out, as a strategy of one's own may not have them: see `dropped`.

    Raises `ShardplanError` where none is.
    """
    said = row.strategy
    fixed: dict[str, Any] = {name: getattr(said, name) for name in said.__struct_fields__ if name not in row.unknown}
    fixed["context_kind"] = context_kind_of(row)
    fixed["expert_from"] = said.expert_from or _first_experts(row)
    if said.dispatch is not None:
        fixed["dispatch"] = _word_of(row, "dispatch", DISPATCHED)
    if fixed.get("recompute") is not None:
        fixed["recompute"] = _word_of(row, "recompute", RECOMPUTED)
    found: list[Strategy] = []
    refused = "no combination"
    try:
        limits = limits_of(row.model)
    except ShardplanError as error:
        raise ShardplanError(f"{row.id}: {error}") from None
    if row.table.startswith("torchtitan") and fixed.get("recompute") == "selective":  # as torchtitan means it
        fixed["recompute"] = "selective_op"
    if "microbatch" in row.unknown and said.fsdp and said.pipeline > 1:  # PyTorch's default: as many as there are ranks
        fixed["microbatch"] = max(1, said.global_batch // (said.data * said.pipeline))
    if limits.shared == 1:  # of a dense model it may say any number
        fixed["expert"] = 1
    free = [name for name in row.unknown if name not in fixed]
    for chosen in itertools.product(*(CHOICES[name] for name in free)):
        one = fixed | dict(zip(free, chosen, strict=True))
        apart = one["schedule"] == "interleaved"
        if free and (apart != (one["interleave"] > 1) or one["pipeline"] * one["interleave"] > row.model.layers):
            continue
        if said.expert_overlap and one["expert"] > 1 and one["schedule"] in PAIRED:
            one["schedule"] = "combined-1f1b"
        try:
            found.append(_without(Strategy(**one), limits))
        except ShardplanError as error:
            refused = str(error)
    if not found:
        raise ShardplanError(f"{row.id}: {refused}")
    return found


def _first_experts(row: StepRow) -> str:
    """Whose devices share experts first where a row does not say it: neighbours, as frameworks have it.

    Megatron-Bridge's recipes have one device of `tensor` an expert (`recipes/deepseek/deepseek_v3.py`), and torchtitan
    takes the innermost; NeMo's leave it to Megatron, where an expert is cut as the rest (`recipes/mixtral_8x22b.py`).
    """
    return "context" if row.table.startswith("nemo") else "tensor"


def context_kind_of(row: StepRow) -> str:
    """Return how a row's sequences are cut: as it says, else above 32k tokens in a balanced ring, else by heads."""
    if row.strategy.context == 1:
        return "ulysses"
    if row.strategy.context_kind is not None:
        return _word_of(row, "context_kind", CONTEXT_KINDS)
    return "zigzag" if row.model.seq > RING_FROM else "ulysses"


def _word_of(row: StepRow, name: str, words: Mapping[str, str]) -> str:
    """What a field of a row says, in our words."""
    said = str(getattr(row.strategy, name)).lower()
    if said not in words:
        raise ShardplanError(f"{row.id}: {name} {excerpt(said)} is not told here; legal: {', '.join(words)}")
    return words[said]


def dropped(row: StepRow, strategy: Strategy) -> dict[str, object]:
    """Return the published options of a row that do nothing, and without which it is predicted, as they were said."""
    said = {name: getattr(row.strategy, name) for name in row.strategy.__struct_fields__ if name not in row.unknown}
    said.pop("context_kind")  # said, or taken: never dropped
    if strategy.software.expert_overlap:
        said.pop("schedule", None)  # in pairs
    if said.get("dispatch"):
        said["dispatch"] = DISPATCHED.get(str(said["dispatch"]).lower(), said["dispatch"])
    if said.get("recompute"):
        said["recompute"] = RECOMPUTED.get(str(said["recompute"]).lower(), said["recompute"])
    return {name: value for name, value in said.items() if getattr(strategy, name) != value and value is not None}


def _without(strategy: Strategy, limits: ModelLimits) -> Strategy:
    """Return a published strategy as it ran: without options that do nothing."""
    return replace(strategy, **{one.name: one.runs_as for one in idle(limits, strategy) if one.name in HARMLESS})


@lru_cache(maxsize=256)
def topology_of_row(cluster: RowCluster) -> Topology:
    """Return a preset with as many devices, whose inner level has as many as share the fast links.

    Where those do not divide the devices, a node holds the largest number that does.
    """
    whole = Topology.load(cluster.preset)
    inside = min(cluster.devices_per_node, cluster.devices)
    while cluster.devices % inside:
        inside -= 1
    *_, outer, inner = whole.levels
    ports = max(1, round(outer.uplinks * inside / inner.size))
    node = replace(outer, size=cluster.devices // inside, uplinks=ports)
    return replace(whole, levels=(node, replace(inner, size=inside)))

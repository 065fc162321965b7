"""`row_of_plan`: a measured step of a plan that was handed over, as a row that `calibrate` reads."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import msgspec

from shardplan.errors import ParseError, ShardplanError, line
from shardplan.launches.handover.handed_plan import HandedPlan
from shardplan.plans.plan_file import write_atomic
from shardplan.simulation.accuracy.step_rows import RowCluster, RowMeasured, RowModel, RowStrategy, StepRow, read_steps
from shardplan.simulation.accuracy.subject import model_of
from shardplan.strategy.model import Model

SOURCE = "measured by its traces"
SHAPE = ("layers", "hidden", "heads", "kv_heads", "ffn", "gated_mlp", "seq", "vocab", "experts", "experts_per_token")
MORE = ("head_dim", "value_dim", "q_lora_rank", "kv_lora_rank", "dense_layers", "dense_ffn", "shared_ffn",
        "router_groups", "router_groups_kept")  # fmt: skip
CLOSE = 0.005  # relative: parameters of the row's model beside those of the plan's


def row_of_plan(plan: HandedPlan, seconds: float, id: str) -> StepRow:
    """Return a step of a plan that took so many seconds as a row.

    Raises `ShardplanError` for a model and a strategy that a row cannot say.
    """
    model, s = plan.model, plan.strategy
    fields = model.fields
    if any(name not in fields for name in SHAPE[:8]):
        raise ShardplanError(f"a row of {plan.title}: legal are decoders by their sizes, as presets have")
    others = (s.recompute_layers, s.cuts) != (None, None)
    if not isinstance(s.recompute, str) or not isinstance(s.schedule, str) or others:
        raise ShardplanError("a row has no recompute by names of ops or layers, schedule of one's own, or cuts")
    family = "moe" if fields.get("experts") else "llama" if fields["gated_mlp"] else "gpt"
    shape: dict[str, Any] = {name: fields.get(name) or 0 for name in SHAPE}
    shape |= {name: fields.get(name) or None for name in MORE} | {"gated_mlp": bool(fields["gated_mlp"])}
    row_model = RowModel(family=family, name=plan.title, **shape)
    mine, its = (_count_parameters(one) for one in (model_of(row_model), model))
    if abs(mine - its) > CLOSE * its:
        raise ShardplanError(f"a row of {plan.title} would be a {family} of {mine:,} parameters, and it has {its:,}")
    inner = plan.topology.levels[-1].size if len(plan.topology.levels) > 1 else plan.topology.size
    asked = {name: getattr(s, name) for name in RowStrategy.__struct_fields__ if hasattr(s, name)}
    asked |= {"interleave": s.interleave or 1, "global_batch": s.sequences,
              "precision": s.precision or fields.get("precision") or "bf16",
              "context_kind": s.context_kind if s.context > 1 else None}  # fmt: skip
    return StepRow(
        id=id,
        source=SOURCE,
        status="verified",
        model=row_model,
        cluster=RowCluster(preset=plan.topology.name, devices=s.devices, devices_per_node=min(inner, s.devices)),
        strategy=RowStrategy(**asked),
        measured=RowMeasured(seconds_per_step=seconds),
    )


def add_row(path: Path, plan: HandedPlan, seconds: float) -> StepRow:
    """Add a measured step to a file of rows, which is made where there is none, and return its row.

    Raises `ParseError` for a file of something else, which is left as it was.
    """
    old = path.read_bytes() if path.exists() else b""
    if old.strip():
        try:
            rows = read_steps(path)
        except ParseError as error:
            raise ParseError(f"{error}; legal is a file of measured steps, or a new one") from None
    else:
        rows = []
    taken = {row.id for row in rows}
    number = next(k for k in range(len(rows) + 1, 2 * len(rows) + 3) if f"measured/{k}" not in taken)
    row = row_of_plan(plan, seconds, f"measured/{number}")
    text = old if not old or old.endswith(b"\n") else old + b"\n"
    write_atomic(path, text + msgspec.json.encode(row) + b"\n")
    return row


def _count_parameters(model: Model) -> int:
    return sum(math.prod(model.program.types[name].shape) for name in model.parameters)


def row_told(row: StepRow, path: Path, topology: str) -> str:
    """Return what is said of a row that was added."""
    return f"{row.id} added to {line(path)}: shardplan calibrate --steps {line(path)} --on {line(topology)} --out FILE"

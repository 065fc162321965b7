"""`ScaledPlan`: a plan with small sizes and the same kinds of parallelism, to be run here beside the whole model.

Degrees shrink only where there are more devices than may be, the widest first, and none of 2 and more below 2; dims
stay wide enough that each axis cuts what it cuts in the plan. It computes in f64, so that what differs is an error and
no rounding; what only predictions know (kernels of attention, overlap of products) is left out. All that is otherwise
than in the plan is said.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from shardplan.errors import ShardplanError
from shardplan.launches.handover.handed_plan import HandedPlan
from shardplan.strategy.limits import ModelLimits
from shardplan.strategy.model import Model
from shardplan.strategy.options import idle
from shardplan.strategy.schedules.schedule import Schedule
from shardplan.strategy.schedules.table import GENERATORS
from shardplan.strategy.software import Software
from shardplan.strategy.strategy import Strategy
from shardplan.strategy.strategy_text import strategy_text

MOST = 32  # devices: as many as the reference runs in some seconds
DEGREES = ("data", "tensor", "pipeline", "context")
HEAD = 4  # width of a head
MOST_MICROBATCHES = 32  # of a schedule of one's own, which is followed as it is


@dataclass(frozen=True, slots=True)
class ScaledPlan:
    """A small model and the strategy on it; `lines` say what is otherwise than in the plan."""

    model: Model
    strategy: Strategy
    lines: tuple[str, ...]


def scale_plan(plan: HandedPlan, most: int = MOST) -> ScaledPlan:
    """Return a plan scaled down to at most so many devices.

    Raises `ShardplanError` where its kinds of parallelism, 2 devices each, are more.

    >>> from shardplan.hardware.topology import Topology
    >>> plan = HandedPlan("", "llama3-8b", {}, Topology.load("dgx-h100", nodes=4), Strategy(data=4, tensor=8))
    >>> found = scale_plan(plan, 8)
    >>> found.strategy.data, found.strategy.tensor, found.model.fields["heads"], found.model.fields["kv_heads"]
    (2, 4, 16, 4)
    """
    s = plan.strategy
    degrees = _shrunk({name: getattr(s, name) for name in DEGREES}, most)
    fields = plan.model.fields
    model = _small_model(plan, fields, s, degrees)
    found, lines = _small_strategy(s, degrees, model)
    said = [f"{name} {getattr(s, name)} as {n}" for name, n in degrees.items() if n != getattr(s, name)]
    head = [f"degrees: {', '.join(said)}"] if said else []
    sizes = ", ".join(f"{k} {fields[k]} as {v}" for k, v in model.fields.items()
                      if k in fields and fields[k] != v and isinstance(v, (int, tuple)))  # fmt: skip
    return ScaledPlan(model, found, (*head, f"sizes: {sizes}; computed in f64", *lines))


def _shrunk(degrees: dict[str, int], most: int) -> dict[str, int]:
    """Degrees of at most so many devices: the widest becomes its largest part of 2 and more, again and again."""
    found = dict(degrees)
    while math.prod(found.values()) > most:
        widest = max(found, key=lambda name: found[name])
        n = found[widest]
        if n <= 2:
            kinds = ", ".join(f"{name}={k}" for name, k in degrees.items() if k > 1)
            need = math.prod(found.values())
            raise ShardplanError(f"{kinds} on {most} devices; legal are {need} and more, 2 for each kind")
        found[widest] = max((k for k in range(2, n) if n % k == 0), default=2)
    return found


def _small_model(plan: HandedPlan, fields: Mapping[str, Any], s: Strategy, degrees: Mapping[str, int]) -> Model:
    """The model with small sizes; SGD, whose update shows a wrong gradient as it is."""
    chunks = _chunks(s, degrees["pipeline"])
    small: dict[str, Any] = {"dtype": "f64", "optimizer": _optimizer(s, fields)}
    name = plan.model.name
    if "layers" in fields:
        dense = 1 if fields.get("dense_layers") else 0
        small["layers"] = max(2, chunks) + dense + (1 if int(fields["layers"]) % chunks else 0)
    if "table_rows" in fields:
        wide = 2 * degrees["tensor"] * s.expert
        bottom, top = (tuple(min(n, wide) for n in fields[key]) for key in ("bottom", "top"))
        small |= {"table_rows": tuple(min(n, 8 * wide + k) for k, n in enumerate(fields["table_rows"][:4])),
                  "embedding_dim": wide, "bottom": (*bottom[:-1], wide), "top": (*top[:-1], 1)}  # fmt: skip
    elif "heads" in fields:
        small |= _decoder_sizes(fields, s, degrees)
    else:
        small["hidden"] = 4 * degrees["tensor"]
    whole: dict[str, Any] = _model_fields(plan) | small
    return Model.load(name, **whole)


def _model_fields(plan: HandedPlan) -> dict[str, Any]:
    """What the plan says of its model, but for what it computes in."""
    return {k: v for k, v in plan.fields.items() if k not in ("precision", "dtype", "optimizer", "batch")}


def _optimizer(s: Strategy, fields: Mapping[str, Any]) -> str | None:
    """SGD; where state of an optimizer is dealt out alone the model's own, which keeps some."""
    return fields.get("optimizer") if s.zero == 1 or fields.get("optimizer") is None else "sgd"


def _decoder_sizes(fields: Mapping[str, Any], s: Strategy, degrees: Mapping[str, int]) -> dict[str, Any]:
    """The sizes of a decoder, whose heads are as many to a device as in the plan, or fewer."""
    heads, keys = int(fields["heads"]), int(fields["kv_heads"])
    ratio = heads // keys
    kind = s.context if s.context_kind == "ulysses" else 1
    fewer = max(1, (s.tensor * kind) // (degrees["tensor"] * (degrees["context"] if kind > 1 else 1)))
    keys = max(1, keys // fewer) if keys % fewer == 0 else keys
    least = degrees["tensor"] * (degrees["context"] if kind > 1 else 1)
    while keys % 2 == 0 and keys // 2 >= max(2, least):
        keys //= 2
    heads = keys * ratio
    wide, latent = degrees["tensor"], bool(fields.get("kv_lora_rank"))
    hidden = heads * HEAD
    seq = max(8, 4 * degrees["context"] * (wide if s.sequence_parallel else 1))
    found: dict[str, Any] = {
        "heads": heads, "kv_heads": keys, "head_dim": HEAD * 2 if latent else HEAD, "hidden": hidden,
        "ffn": 4 * wide, "vocab": 16 * wide, "seq": seq,
    }  # fmt: skip
    if fields.get("positions"):
        found["positions"] = seq
    if latent:
        found |= {"q_lora_rank": 8, "kv_lora_rank": 8, "rotary_dim": HEAD, "value_dim": HEAD}
    else:
        found |= {"value_dim": HEAD}
    if experts := int(fields.get("experts") or 0):
        groups = int(fields["router_groups"])
        each = math.lcm(groups, _expert_devices(s, degrees))
        taken = int(fields["experts_per_token"])
        kept = int(fields["router_groups_kept"]) / groups
        found["experts"] = min(experts, each * max(1, math.ceil(taken / kept / each), 2 if each == 1 else 1))
        found |= {"dense_layers": 1 if fields["dense_layers"] else 0}
        found |= {key: 4 * wide for key in ("dense_ffn", "shared_ffn") if fields.get(key)}
    return found


def _expert_devices(s: Strategy, degrees: Mapping[str, int]) -> int:
    """How many devices share experts."""
    return math.gcd(s.expert, degrees["data"] * degrees["context"] * degrees["tensor"])


def _chunks(s: Strategy, pipeline: int) -> int:
    """Stages of layers."""
    copies = s.schedule.copies if isinstance(s.schedule, Schedule) else GENERATORS[str(s.schedule)].copies
    return pipeline * (s.interleave or 1) // copies


def _small_strategy(s: Strategy, degrees: Mapping[str, int], model: Model) -> tuple[Strategy, list[str]]:
    """The strategy with other degrees, fewer microbatches, and without what does nothing then; what that changes."""
    lines: list[str] = []
    order, count = s.schedule, s.microbatches
    own = isinstance(order, Schedule)
    if isinstance(order, Schedule) and (degrees["pipeline"] != s.pipeline or count > MOST_MICROBATCHES):
        order, own = ("interleaved" if (s.interleave or 1) > 1 else "1f1b"), False
        lines.append(f"a schedule of one's own as {order}")
    if not own:
        count = min(count, 2 * degrees["pipeline"] if s.pipeline > 1 else 2)
    microbatch, uneven = min(2, s.microbatch), s.sequences % (s.data * s.microbatch) != 0
    shard = None if s.shard is None else math.gcd(s.shard, degrees["data"])
    changes: dict[str, Any] = {
        **degrees, "schedule": order, "microbatch": microbatch, "shard": shard,
        "expert": math.gcd(s.expert, (shard or degrees["data"]) * degrees["context"] * degrees["tensor"]),
        "global_batch": degrees["data"] * microbatch * count - (1 if uneven and count > 1 else 0),
        "precision": None, "gradient_dtype": None, "reduce_dtype": None, **asdict(Software()),
        "cuts": None, "loss_chunks": min(2, s.loss_chunks),
    }  # fmt: skip
    found = replace(s, **changes)
    limits = ModelLimits.of(model)
    for one in idle(limits, found):
        found = replace(found, **{one.name: one.runs_as})
    for name in (*Software.__slots__, "cuts", "gradient_dtype", "reduce_dtype", "loss_chunks", "expert", "shard",
                 "zero", "fsdp", "schedule", "sequence_parallel"):  # fmt: skip
        before, after = getattr(s, name), getattr(found, name)
        if before != after and not isinstance(before, Schedule):
            lines.append(f"{name}={before} as {after}")
    return found, [*lines, f"runs {strategy_text(found)}, a step of {found.sequences} sequences"]

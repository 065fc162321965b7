"""torchtitan 0.3: a function that sets `parallelism`, `training` and `activation_checkpoint` of a config; overrides.

Source: pytorch/torchtitan 0.3.0, `torchtitan/config/configs.py`, `distributed/parallel_dims.py` (the mesh is pp,
dp_replicate, dp_shard, cp, tp, outermost first; ep takes the innermost of dp_shard x cp x tp).
"""

from __future__ import annotations

from dataclasses import replace

from shardplan.launches.handover.handed_plan import ORDER, HandedPlan, WrittenFiles, comment_lines
from shardplan.strategy.schedules.schedule import Schedule
from shardplan.strategy.schedules.table import schedule
from shardplan.strategy.strategy import Strategy

NAMES = {"1f1b": "1F1B", "gpipe": "GPipe", "interleaved": "Interleaved1F1B", "looped-bfs": "LoopedBFS",
         "zb-v": "ZBVZeroBubble", "dualpipev": "DualPipeV"}  # fmt: skip
CHECKPOINTS = {"full": "FullAC", "selective_op": "SelectiveAC"}


def write_torchtitan(plan: HandedPlan) -> WrittenFiles:
    """Return `torchtitan/` of a plan: `plan_config.py`, `overrides.txt`, and a schedule that has no name as CSV.

    >>> from shardplan.hardware.topology import Topology
    >>> box = Topology.load("dgx-a100", nodes=1)
    >>> made = write_torchtitan(HandedPlan("", "gpt2", {}, box, Strategy(data=8, fsdp=True, global_batch=16)))
    >>> made.files["overrides.txt"].split()[0], made.lines[0][:19]
    ('--parallelism.data_parallel_shard_degree=8', 'parameters are kept')
    """
    s, lines = _runs(plan)
    sharded = s.shard or s.data if s.fsdp else 1
    parallelism: dict[str, object] = {
        "data_parallel_replicate_degree": s.data // sharded,
        "data_parallel_shard_degree": sharded,
        "fsdp_reshard_after_forward": ("never" if s.zero == 2 else "always") if s.fsdp else "default",
        "tensor_parallel_degree": s.tensor,
        "enable_sequence_parallel": s.sequence_parallel or s.tensor == 1,
        "context_parallel_degree": s.context,
        "context_parallel_load_balancer": "headtail" if s.context_kind == "zigzag" else None,
        "expert_parallel_degree": s.expert,
        "pipeline_parallel_degree": s.pipeline,
    }
    files: dict[str, str] = {}
    if s.pipeline > 1:
        parallelism |= {"pipeline_parallel_schedule": NAMES.get(str(s.schedule), "_PipelineScheduleRuntime"),
                        "pipeline_parallel_microbatch_size": s.microbatch,
                        "module_fqns_per_model_part": _parts(plan)}  # fmt: skip
        if str(s.schedule) not in NAMES:
            files["schedule.csv"] = _schedule(s).csv_text()
            parallelism["pipeline_parallel_schedule_csv"] = "torchtitan/schedule.csv"
    local = s.sequences // s.data if s.pipeline > 1 else s.microbatch
    sizes: dict[str, object] = {
        "local_batch_size": local,
        "global_batch_size": s.sequences,
        "seq_len": plan.model.fields.get("seq"),
        "mixed_precision_param": "float32" if s.precision == "fp32" else "bfloat16",
    }
    training = {k: v for k, v in sizes.items() if v is not None}
    checkpoint = CHECKPOINTS.get(str(s.recompute))
    files["plan_config.py"] = _config_text(plan, parallelism, training, checkpoint, lines)
    files["overrides.txt"] = _overrides(parallelism, training)
    return WrittenFiles("torchtitan", files, lines, s)


def _runs(plan: HandedPlan) -> tuple[Strategy, tuple[str, ...]]:
    """The strategy that torchtitan runs for a plan's, and what of that one it cannot say."""
    s, lines = plan.strategy, list[str]()
    lines.append("parameters are kept and updated in f32, and cast to the precision where they are used")
    if (s.zero or s.context > 1) and not s.fsdp:
        near = 3 if s.zero == 3 else 2
        lines.append(f"zero={s.zero} without fsdp; it runs as fsdp=true zero={near}, over data and context")
        s = replace(s, fsdp=True, zero=near)
    if s.context > 1 and s.context_kind == "ulysses":
        lines.append("context_kind=ulysses; it runs as context_kind=gather")
        s = replace(s, context_kind="gather")
    if not isinstance(s.recompute, str) or s.recompute == "selective":
        lines.append(f"recompute={s.recompute}; it runs as recompute=selective_op, every second product")
        s = replace(s, recompute="selective_op")
    if s.recompute_layers is not None:
        lines.append(f"recompute_layers={s.recompute_layers}; it runs as recompute={s.recompute} of all layers")
        s = replace(s, recompute_layers=None)
    if s.expert > 1 and s.tensor * s.context > 1 and s.expert_from != "tensor":
        lines.append(
            f"experts over devices of {s.expert_from} first; they are over the innermost of data, context and tensor"
        )
    if plan.order != ORDER and len([n for n in ORDER if getattr(s, n) > 1]) > 1:
        lines.append(f"the order {', '.join(plan.order)} of axes; the mesh is pp, dp, cp, tp, outermost first")
    for name, plain in (("bucket", None), ("offload", False), ("tensor_overlap", False), ("offload_layers", 0),
                        ("keep", ()), ("gradient_dtype", None), ("reduce_dtype", None),
                        ("prefetch", None), ("dispatch", None), ("expert_products", None),
                        ("expert_overlap", False)):  # fmt: skip
        if getattr(s, name) != plain:
            lines.append(f"{name}={getattr(s, name)}")
            s = replace(s, **{name: plain})
    if s.loss != "whole":
        lines.append(f"loss={s.loss}; it runs as loss=whole, whose logits are copied in f32")
        s = replace(s, loss="whole", loss_chunks=1)
    if s.precision in ("fp16", "fp8", "nvfp4"):
        lines.append(f"precision={s.precision}, which is a converter of the model's spec; written is bf16")
        s = replace(s, precision="bf16")
    if s.sequences % s.data or (s.sequences // s.data) % s.microbatch:
        lines.append(f"a global batch of {s.sequences} that {s.data} replicas and {s.microbatch} do not divide")
    return s, tuple(lines)


def _schedule(s: Strategy) -> Schedule:
    if isinstance(s.schedule, Schedule):
        return s.schedule.compute_only()
    return schedule(str(s.schedule), s.pipeline, s.microbatches, s.interleave).compute_only()


def _parts(plan: HandedPlan) -> list[list[str]]:
    """The modules of every stage: the plan's cuts."""
    parts = [[f"layers.{k}" for k in layers] for layers in plan.stage_layers()]
    return [["tok_embeddings", *parts[0]], *parts[1:-1], [*parts[-1], "norm", "lm_head"]]


def _config_text(
    plan: HandedPlan, parallelism: dict[str, object], training: dict[str, object], checkpoint: str | None,
    lines: tuple[str, ...],
) -> str:  # fmt: skip
    imported = f"from torchtitan.distributed.activation_checkpoint import {checkpoint}\n" if checkpoint else ""
    said = ",\n".join(f"        {k}={v!r}" for k, v in parallelism.items())
    sizes = "".join(f"    config.training.{k} = {v!r}\n" for k, v in training.items())
    return (
        f'"""{plan.title}: `plan_config(config)` of a torchtitan 0.3 `Trainer.Config` of this model."""\n\n'
        f"{comment_lines(lines)}from torchtitan.config import ParallelismConfig\n{imported}\n\n"
        f"def plan_config(config):\n    config.parallelism = ParallelismConfig(\n{said},\n    )\n{sizes}"
        f"    config.activation_checkpoint = {checkpoint + '.Config()' if checkpoint else None}\n    return config\n"
    )


def _overrides(parallelism: dict[str, object], training: dict[str, object]) -> str:
    """The same as options of its command line, one a line; what has a list or is as by default is left out."""
    pairs = [("parallelism", k, v) for k, v in parallelism.items()] + [("training", k, v) for k, v in training.items()]
    found: list[str] = []
    for table, name, value in pairs:
        if isinstance(value, bool):
            found.append(f"--{table}.{'' if value else 'no-'}{name}")
        elif value is not None and not isinstance(value, list) and (value != 1 or table == "training"):
            found.append(f"--{table}.{name}={value}")
    return "\n".join(found) + "\n"

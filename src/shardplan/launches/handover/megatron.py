"""Megatron-LM: the arguments of a plan, and of its model.

Source: NVIDIA/Megatron-LM core 0.16.1, `parallel_state.py` (ranks are numbered tp-cp-ep-dp-pp, fastest first, and
tp-cp-ep-pp-dp with `--use-tp-pp-dp-mapping`), `model_parallel_config.py`, `transformer_config.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from shardplan.launches.handover.handed_plan import ORDER, HandedPlan, WrittenFiles, comment_lines
from shardplan.strategy.held_cuts import deal_experts
from shardplan.strategy.strategy import Strategy

SWAPPED = ("data", "pipeline", "context", "tensor")  # outermost first: `--use-tp-pp-dp-mapping`
SHARDING = {1: "optim", 2: "optim_grads", 3: "optim_grads_params"}
KINDS = {"ulysses": "a2a", "gather": "all_gather", "ring": "p2p", "zigzag": "p2p"}
COMBINED = "combined-1f1b"
DISPATCHERS = {"levels": "flex --moe-enable-deepep", "direct": "alltoall"}


def write_megatron(plan: HandedPlan) -> WrittenFiles:
    """Return `megatron/` of a plan: `arguments.txt`, an argument a line."""
    s, lines = _runs(plan)
    said = [*_degrees(plan, s), *_model(plan)]
    return WrittenFiles("megatron", {"arguments.txt": comment_lines(lines) + "\n".join(said) + "\n"}, lines, s)


def mapping_of(plan: HandedPlan) -> str | None:
    """Return the order string that numbers ranks as a plan's axes lie, the fastest first; None where none does.

    Of axes of one device the place says nothing.
    """
    wide = [axis for axis in plan.order if getattr(plan.strategy, axis) > 1]
    for order, text in ((ORDER, "tp-cp-ep-dp-pp"), (SWAPPED, "tp-cp-ep-pp-dp")):
        if [axis for axis in order if axis in wide] == wide:
            return text
    return None


def _runs(plan: HandedPlan) -> tuple[Strategy, tuple[str, ...]]:
    s, lines = plan.strategy, list[str]()
    if s.fsdp and s.zero == 2:
        lines.append("fsdp=true zero=2; it runs as zero=3, parameters gathered again backward")
        s = replace(s, fsdp=True, zero=3)
    if s.zero >= 2 or s.fsdp:
        lines.append("state dealt out by stock DDP: it needs Megatron-FSDP, which wraps each layer as fsdp=true zero=3"
                     " does")  # fmt: skip
    if s.zero == 1 and s.shard:
        lines.append(f"zero=1 in groups of {s.shard} replicas, but by --num-distributed-optimizer-instances")
    if s.software.expert_overlap and (why := _refused_overlap(s)):
        lines.append(f"expert_overlap=True with {why}, which it refuses")
        s = replace(s, expert_overlap=False)
    near = _near_schedule(s)
    if str(s.schedule) != near and (s.pipeline > 1 or COMBINED in (s.schedule, near)):
        lines.append(f"schedule={s.schedule if isinstance(s.schedule, str) else 'a list'}; it runs as {near}")
        s = replace(s, schedule=near, interleave=1 if near == "1f1b" or s.pipeline == 1 else s.interleave)
    if s.recompute == "selective_op" or not isinstance(s.recompute, str):
        lines.append(f"recompute={s.recompute}; it runs as recompute=selective, attention alone")
        s = replace(s, recompute="selective")
    if s.recompute_layers is not None and s.recompute != "full":
        lines.append(f"recompute_layers={s.recompute_layers} with recompute=selective; it runs in all layers")
        s = replace(s, recompute_layers=None)
    if mapping_of(plan) is None:
        lines.append(f"the order {', '.join(plan.order)} of axes; shardplan audit --fix megatron writes a rankfile")
    if s.expert > 1 and s.expert_from == "data" and s.tensor > 1:
        lines.append("experts over devices of data first: set --expert-tensor-parallel-size 1, whose groups are others")
    elif s.expert > 1 and s.expert_from != "data" and _expert_tensor(s) is None:
        lines.append(f"expert={s.expert} expert_from={s.expert_from} takes a part of tensor={s.tensor}")
    for name, plain in (("offload", False), ("keep", ()), ("offload_layers", 0), ("prefetch", None),
                        ("reduce_dtype", None)):  # fmt: skip
        if getattr(s, name) != plain:
            lines.append(f"{name}={getattr(s, name)}")
            s = replace(s, **{name: plain})
    if s.loss == "chunked":
        lines.append(f"loss=chunked loss_chunks={s.loss_chunks}; it runs as loss=fused")
        s = replace(s, loss="fused", loss_chunks=1)
    return s, tuple(lines)


def _refused_overlap(s: Strategy) -> str:
    """With what of a strategy Megatron refuses to overlap exchanges of experts with another microbatch; else nothing.

    It wants chunks where there are stages, and no whole layer computed again (`transformer_config.py`).
    """
    if s.pipeline > 1 and s.interleave == 1:
        return f"interleave=1 of {s.pipeline} stages"
    return "recompute=full" if s.recompute == "full" else ""


def _near_schedule(s: Strategy) -> str:
    """The order in which Megatron runs a strategy: with one more forward ahead where exchanges overlap."""
    if s.software.expert_overlap:
        return COMBINED
    return "interleaved" if s.pipeline > 1 and (s.interleave or 1) > 1 else "1f1b"


def _degrees(plan: HandedPlan, s: Strategy) -> Iterator[str]:
    """What a strategy says."""
    sizes = {"tensor-model-parallel": s.tensor, "pipeline-model-parallel": s.pipeline, "context-parallel": s.context,
             "expert-model-parallel": s.expert}  # fmt: skip
    yield from (f"--{name}-size {n}" for name, n in sizes.items())
    if s.expert > 1 and s.expert_from != "data" and (inside := _expert_tensor(s)) is not None:
        yield f"--expert-tensor-parallel-size {inside}"
    overlaps, dispatch = s.software.expert_overlap, s.software.dispatch
    if (dispatch is not None or overlaps) and s.expert > 1:  # by default tokens are gathered, which does not overlap
        yield f"--moe-token-dispatcher-type {DISPATCHERS[dispatch or 'direct']}"
    if overlaps:
        yield "--overlap-moe-expert-parallel-comm"
    yield f"--micro-batch-size {s.microbatch}"
    yield f"--global-batch-size {s.sequences}"
    if s.sequence_parallel and s.tensor > 1:
        yield "--sequence-parallel"
    if s.context > 1:
        yield f"--cp-comm-type {KINDS[s.context_kind]}"
    layers, stages = int(plan.model.fields.get("layers", 1)), s.pipeline * (s.interleave or 1)
    if s.pipeline > 1 and layers % stages:
        yield f"--pipeline-model-parallel-layout {_layout(plan)}"
    elif (s.interleave or 1) > 1:
        yield f"--num-layers-per-virtual-pipeline-stage {layers // stages}"
    if s.fsdp or s.zero >= 2:
        yield "--use-megatron-fsdp"
        yield f"--data-parallel-sharding-strategy {SHARDING[3 if s.fsdp else s.zero]}"
    if s.zero or s.fsdp:
        yield "--use-distributed-optimizer"
    if s.zero == 1 and s.shard and s.shard < s.data:
        yield f"--num-distributed-optimizer-instances {s.data // s.shard}"
    if s.data > 1 or s.context > 1:
        yield "--overlap-grad-reduce"
    if mapping_of(plan) == "tp-cp-ep-pp-dp":
        yield "--use-tp-pp-dp-mapping"
    if s.recompute == "full":
        method = "uniform" if s.recompute_layers is None else "block"
        yield f"--recompute-granularity full --recompute-method {method}"
        yield f"--recompute-num-layers {s.recompute_layers or 1}"
    elif s.recompute == "selective":
        yield "--recompute-granularity selective"
    yield from {"bf16": ["--bf16"], "fp16": ["--fp16"], "fp8": ["--bf16", "--fp8-format hybrid"]}.get(
        s.precision or "", []
    )
    if s.gradient_dtype == "bf16":
        yield "--grad-reduce-in-bf16"
    if s.loss == "fused":
        yield from ("--cross-entropy-loss-fusion", "--cross-entropy-fusion-impl te")
    if s.software.tensor_overlap:
        yield "--tp-comm-overlap"


def _expert_tensor(s: Strategy) -> int | None:
    """How many devices of `tensor` an expert is cut over: one, or all; None where that is neither."""
    parts = deal_experts(s.stage_degrees(), s.expert, s.expert_from)
    return {1: s.tensor, s.tensor: 1}.get(parts["tensor"])


def _layout(plan: HandedPlan) -> str:
    """The plan's cuts as a layout: E the embedding, t a layer, L the loss, | between stages."""
    parts = ["t" * len(layers) for layers in plan.stage_layers()]
    return f"'{'|'.join(['E' + parts[0], *parts[1:-1], parts[-1] + 'L'])}'"


def _model(plan: HandedPlan) -> Iterator[str]:
    """What a decoder's sizes say; nothing for other models."""
    f = plan.model.fields
    if "heads" not in f:
        return
    gpt, moe = "gated_mlp" in f and not f["gated_mlp"], bool(f.get("experts"))
    wide = f["dense_ffn"] if moe and f.get("dense_ffn") else f["ffn"]
    yield f"--num-layers {f['layers']}"
    yield f"--hidden-size {f['hidden']}"
    yield f"--ffn-hidden-size {wide}"
    yield f"--num-attention-heads {f['heads']}"
    yield f"--seq-length {f['seq']}"
    yield f"--max-position-embeddings {max(f['seq'], f.get('positions') or 0)}"
    if f["kv_heads"] != f["heads"]:
        yield from ("--group-query-attention", f"--num-query-groups {f['kv_heads']}")
    if not f.get("kv_lora_rank"):
        yield f"--kv-channels {f['head_dim']}"
    if not gpt:
        yield from ("--swiglu", "--normalization RMSNorm", "--disable-bias-linear", "--position-embedding-type rope",
                    f"--rotary-base {f['rope_theta']:.0f}")  # fmt: skip
    yield f"--norm-epsilon {f['norm_eps']}"
    if not f["tied"]:
        yield "--untie-embeddings-and-output-weights"
    if f.get("qk_norm"):
        yield "--qk-layernorm"
    if f.get("kv_lora_rank"):
        yield "--multi-latent-attention"
        plain, turned = f["head_dim"] - f["rotary_dim"], f["rotary_dim"]
        yield f"--q-lora-rank {f['q_lora_rank']}"
        yield f"--kv-lora-rank {f['kv_lora_rank']}"
        yield f"--qk-head-dim {plain}"
        yield f"--qk-pos-emb-head-dim {turned}"
        yield f"--v-head-dim {f['value_dim']}"
    if moe:
        yield from (f"--num-experts {f['experts']}", f"--moe-router-topk {f['experts_per_token']}",
                    f"--moe-ffn-hidden-size {f['ffn']}", f"--moe-router-score-function {f['router']}",
                    *["--moe-grouped-gemm"] * (plan.strategy.software.expert_products != "loop"))  # fmt: skip
        if f.get("shared_ffn"):
            yield f"--moe-shared-expert-intermediate-size {f['shared_ffn']}"
        if f.get("dense_layers"):
            yield f"--moe-layer-freq '([0]*{f['dense_layers']}+[1]*{f['layers'] - f['dense_layers']})'"

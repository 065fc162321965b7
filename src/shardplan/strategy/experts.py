"""The MLP of a layer: gated, and experts that a router chooses for each token, of which some are shared by all."""

from __future__ import annotations

from shardplan.core.ops import Combine, Dispatch, Expand, OneHot, ReduceDims, Reshape, Softmax, TopK
from shardplan.core.ops.ring_rounds import MASKED
from shardplan.strategy.scope import Scope
from shardplan.strategy.sizes import DecoderSizes

MIXTRAL = {"gate": "w1", "up": "w3", "down": "w2"}


def gated_mlp(s: Scope, x: str, hidden: int, ffn: int, block: str, opens: str = "") -> str:
    """Llama's: the SiLU of one product times another, and back; names of parameters begin with `opens`."""
    wide = {"hidden": hidden, "ffn": ffn}
    gate, up = (
        s.parameter(f"{opens}{name}", wide, f"{block}.{name}_proj.weight", "ffn hidden") for name in ("gate", "up")
    )
    down = s.parameter(f"{opens}down", {"ffn": ffn, "hidden": hidden}, f"{block}.down_proj.weight", "hidden ffn")
    inside = s.elementwise("silu(a) * b", s.einsum("bsh,hf->bsf", x, gate), s.einsum("bsh,hf->bsf", x, up))
    return s.einsum("bsf,fh->bsh", inside, down)


def routed_mlp(s: Scope, c: DecoderSizes, x: str, layer: str) -> str:
    """The weighted sum of the experts that each token takes, and of those shared; a sequence is a group of slots.

    Choices behind an expert's last slot are dropped; how many in each sequence is the result `dropped`.
    """
    mixtral = c.model_type == "mixtral"
    block = f"{layer}.block_sparse_moe" if mixtral else f"{layer}.mlp"
    router = s.parameter("router", {"hidden": c.hidden, "experts": c.experts}, f"{block}.gate.weight", "experts hidden")
    scores = s.einsum("bsh,hn->bsn", x, router)
    chosen, weights = (_group_limited if c.router == "sigmoid" else _softmax)(s, c, scores, block)
    slots, s.results["dropped"] = s.draft.write_step(Dispatch(c.experts, c.capacity), x, chosen)
    wide = {"experts": c.experts, "hidden": c.hidden, "ffn": c.ffn}
    names = MIXTRAL if mixtral else {name: f"{name}_proj" for name in MIXTRAL}
    one = f"{block}.experts.{{experts}}"
    gate, up = (s.parameter(f"expert_{n}", wide, f"{one}.{names[n]}.weight", "ffn hidden") for n in ("gate", "up"))
    back = {"experts": c.experts, "ffn": c.ffn, "hidden": c.hidden}
    down = s.parameter("expert_down", back, f"{one}.{names['down']}.weight", "hidden ffn")
    inside = s.elementwise(
        "silu(a) * b", s.einsum("bech,ehf->becf", slots, gate), s.einsum("bech,ehf->becf", slots, up)
    )
    y = s(Combine(), s.einsum("becf,efh->bech", inside, down), chosen, weights)
    if c.shared_ffn:
        y = s.elementwise("a + b", y, gated_mlp(s, x, c.hidden, c.shared_ffn, f"{block}.shared_experts", "shared_"))
    return y


def _softmax(s: Scope, c: DecoderSizes, scores: str, block: str) -> tuple[str, str]:
    """The experts of the best scores, and the softmax of these alone (arXiv 2401.04088, 2.1)."""
    best, chosen = s.draft.write_step(TopK(c.experts_per_token), scores)
    return chosen, s(Softmax(2), best)


def _group_limited(s: Scope, c: DecoderSizes, scores: str, block: str) -> tuple[str, str]:
    """DeepSeek-V3's choice (arXiv 2412.19437, 2.1.2): sigmoid affinities, corrected for the choice alone.

    Of groups of experts those are kept whose two best sum to the most. Weights are affinities, made to sum to
    `router_scale`.
    """
    correction = s.parameter(
        "correction", {"experts": c.experts}, f"{block}.gate.e_score_correction_bias", trained=False
    )
    affinity = s.elementwise("sigmoid(a)", scores)
    choice = s.elementwise("a + b", affinity, correction)
    if c.router_groups > 1:
        grouped = s(Reshape(f"b s (g={c.router_groups} n) -> b s g n"), choice)
        best, _ = s.draft.write_step(TopK(min(2, c.experts // c.router_groups)), grouped)
        _, kept = s.draft.write_step(TopK(c.router_groups_kept), s(ReduceDims((3,)), best))
        inside = s(ReduceDims((2,)), s(OneHot(c.router_groups, s.dtype), kept))
        allowed = s.elementwise(f"where(a > 0, b, {MASKED})", s(Expand("b s g -> b s g one=1"), inside), grouped)
        choice = s(Reshape("b s g n -> b s (g n)"), allowed)
    _, chosen = s.draft.write_step(TopK(c.experts_per_token), choice)
    taken = s.einsum("bsn,bskn->bsk", affinity, s(OneHot(c.experts, s.dtype), chosen))
    return chosen, s.elementwise(f"{c.router_scale} * a / b", taken, s(ReduceDims((2,), keep=True), taken))

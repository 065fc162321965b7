"""GPT-2 and GPT-3; Llama 3, Qwen3, Mixtral and DeepSeek-V3: decoders, trained or stepping through a cache."""

from __future__ import annotations

from collections.abc import Callable

from shardplan.core.layout import Layout
from shardplan.core.ops import (
    Combine,
    Constant,
    Crop,
    CrossEntropy,
    Dispatch,
    Dropout,
    Elementwise,
    Expand,
    Gather,
    LayerNorm,
    OneHot,
    Pad,
    ReduceDims,
    Reshape,
    Softmax,
    TopK,
)
from shardplan.core.ops.placing import widened
from shardplan.core.ops.ring_rounds import MASKED
from shardplan.core.ops.zigzag import Zigzag
from shardplan.errors import ShardplanError
from shardplan.strategy.attention import Given, gpt_attention, grouped_attention, latent_attention, norm
from shardplan.strategy.parameter import FactorPart
from shardplan.strategy.scope import ONE, Scope
from shardplan.strategy.sizes import DecoderSizes

WIDE = {"f64": "f64"}  # by dtype that of losses, else f32
STRIDE = 0x61C88647  # between the keys of one dropout and the next: seeds that lie close give no key twice
Layer = Callable[[Scope, str, Given, int], str]  # of a value, what is the same for all layers, a layer's number


def decoder(s: Scope, c: DecoderSizes, training: bool) -> None:
    """Write the result `loss`, the mean cross entropy of the targets but -100, or without training `logits`."""
    if training and c.cache:
        raise ShardplanError(f"Model.load: training with cache={c.cache}; legal is a cache with training=False")
    pair = {"batch": c.batch, "sequence": c.seq}
    tokens = s.input("tokens", pair, "i32")
    if training:
        s.input("targets", pair, "i32")
    given: dict[str, str] = {"positions": Zigzag(c.seq, c.zigzag).write_positions(s, ONE)}
    if c.cache:
        given["position"] = s.input("position", {}, "i32")
        given["positions"] = s.elementwise("a + b", given["positions"], given["position"])
        s.replaced["position"] = s.elementwise(f"a + {c.seq}", given["position"])
    embed = "transformer.wte" if c.family == "gpt" else "model.embed_tokens"
    if c.segments:
        given["segments"] = s.input("segments", pair, "i32")
    table = s.parameter("embed", {"vocab": c.vocab, "hidden": c.hidden}, f"{embed}.weight")
    x = s(Gather(), table, tokens)
    x = s.elementwise(f"a * {c.embed_scale}", x) if c.embed_scale else x
    if training and (c.balance_loss or c.router_z_loss):
        s.carried["routing"] = s(Constant(0, WIDE.get(s.dtype, "f32"), (), Layout(()), ONE))
    if training and (c.dropout or c.embed_dropout):
        s.carried["seeds"] = s.input("seeds", {"batch": c.batch}, "i32")
    x = _gpt(s, c, x, given) if c.family == "gpt" else _llama(s, c, x, given)
    states = x
    if c.family != "gpt":
        x = norm(s, c, "norm", {"hidden": c.hidden}, "model.norm.weight", x)
    head = table if c.tied else s.parameter("head", {"vocab": c.vocab, "hidden": c.hidden}, "lm_head.weight")
    if not training:
        s.results["logits"] = _logits(s, c, x, head)
        return
    losses = s(CrossEntropy(), _logits(s, c, x, head), "targets")
    beside = _further(s, c, states, table, head, given) if c.mtp_layers else None
    s.counted_mean(losses, "targets", s.carried.get("routing"), beside)


def drop(s: Scope, x: str, rate: float) -> str:
    """Write a dropout, where there are any: of what was the next one's key, which all layers hand on."""
    if not rate or "seeds" not in s.carried:
        return x
    s.carried["seeds"] = s.elementwise(f"a + {STRIDE}", s.carried["seeds"])
    return s(Dropout(rate), x, s.carried["seeds"])


def _logits(s: Scope, c: DecoderSizes, x: str, head: str) -> str:
    found = s.einsum("bsh,vh->bsv", x, head)
    return s.elementwise(f"{c.logit_cap} * tanh(a / {c.logit_cap})", found) if c.logit_cap else found


def _further(s: Scope, c: DecoderSizes, x: str, table: str, head: str, given: Given) -> str:
    """The weighed sum of the losses of modules that predict further tokens, each from the states of the one before it.

    A module reads the embedding of the token that was predicted before; a position without one predicts nothing.
    """
    targets, totals, hidden = "targets", list[str](), {"hidden": c.hidden}
    for k in range(c.mtp_layers):
        file, name = f"model.layers.{c.layers + k}", f"mtp_{k}"
        token = s(Gather(), table, s.elementwise("where(a == -100, 0, a)", targets))
        made: list[str] = []
        for at, (part, y) in enumerate((("e", token), ("h", x))):
            y = norm(s, c, f"{name}.{part}_norm", hidden, f"{file}.{part}norm.weight", y)
            weight = s.parameter(f"{name}.{part}", {**hidden, "features": c.hidden}, f"{file}.eh_proj.weight",
                                 "features (part hidden)", FactorPart("part", 2, at))  # fmt: skip
            made.append(s.einsum("bsh,hg->bsg", y, weight))
        x = s.elementwise("a + b", *made)
        number = c.layers + k
        x = _runs(s, c, name, range(number, number + 1), x, lambda s, x, given, at: _layer(s, c, x, given, at), given)
        y = norm(s, c, f"{name}.norm", hidden, f"{file}.shared_head.norm.weight", x)
        moved = s(Pad((0, 0), (0, 1)), s(Crop((0, 1), (c.batch, c.seq)), s.elementwise("a + 100", targets)))
        targets = s.elementwise("where(a == -100, -100, b - 100)", targets, moved)
        totals.append(s.sum_all(s(CrossEntropy(), _logits(s, c, y, head), targets)))
    for other in totals[1:]:
        totals[0] = s.elementwise("a + b", totals[0], other)
    return s.elementwise(f"a * {c.mtp_weight / c.mtp_layers}", totals[0])


def _gpt(s: Scope, c: DecoderSizes, x: str, given: Given) -> str:
    rows = s.parameter("positions", {"position": c.positions, "hidden": c.hidden}, "transformer.wpe.weight")
    x = drop(s, s.elementwise("a + b", x, s(Gather(), rows, given["positions"])), c.embed_dropout)
    hidden, wide, block = {"hidden": c.hidden}, {"ffn": c.ffn}, "transformer.h.{layer}"

    def norm(s: Scope, name: str, file: str, x: str) -> str:
        gain, bias = (s.parameter(f"{name}{end}", hidden, f"{file}.{kind}")
                      for end, kind in (("", "weight"), ("_bias", "bias")))  # fmt: skip
        return s(LayerNorm(c.norm_eps), x, gain, bias)

    def add(s: Scope, x: str, y: str, bias: str) -> str:
        if not c.dropout:
            return s.elementwise("a + b + c", x, y, bias)
        return s.elementwise("a + b", x, drop(s, s.elementwise("a + b", y, bias), c.dropout))

    def layer(s: Scope, x: str, given: Given, number: int) -> str:
        mixed = gpt_attention(s, c, given, norm(s, "attention_norm", f"{block}.ln_1", x), f"{block}.attn",
                              window=c.has_window(number))  # fmt: skip
        x = add(s, x, mixed, s.parameter("o_bias", hidden, f"{block}.attn.c_proj.bias"))
        y = norm(s, "mlp_norm", f"{block}.ln_2", x)
        inside = s.einsum("bsh,hf->bsf", y, s.parameter("up", {**hidden, **wide}, f"{block}.mlp.c_fc.weight"))
        inside = s.elementwise("gelu(a + b)", inside, s.parameter("up_bias", wide, f"{block}.mlp.c_fc.bias"))
        down = s.parameter("down", {**wide, **hidden}, f"{block}.mlp.c_proj.weight")
        bias = s.parameter("down_bias", hidden, f"{block}.mlp.c_proj.bias")
        return add(s, x, s.einsum("bsf,fh->bsh", inside, down), bias)

    x = _runs(s, c, "layers", range(c.layers), x, layer, given if c.cache else {})
    return norm(s, "norm", "transformer.ln_f", x)


def _runs(s: Scope, c: DecoderSizes, name: str, numbers: range, x: str, layer: Layer, given: Given) -> str:
    """Layers in runs, called by a name; of several runs those behind the first are named after their first layer."""
    for some, period in c.layer_runs(numbers.start, numbers.stop):
        called = name if some.start == numbers.start else f"{name}_{some.start}"

        def one(s: Scope, x: str, given: Given, start: int = some.start) -> str:
            return layer(s, x, given, start + s.place)

        x = s.layers(called, some, x, one, given, period)
    return x


def _llama(s: Scope, c: DecoderSizes, x: str, given: Given) -> str:
    x = drop(s, x, c.embed_dropout)
    if c.dense_layers:
        wide = c.dense_ffn or c.ffn
        first = range(c.dense_layers)
        x = _runs(s, c, "dense", first, x, lambda s, x, given, k: _layer(s, c, x, given, k, wide), given)
    rest = range(c.dense_layers, c.layers)
    return _runs(s, c, "layers", rest, x, lambda s, x, given, k: _layer(s, c, x, given, k), given)


def _layer(s: Scope, c: DecoderSizes, x: str, given: Given, number: int, dense: int = 0) -> str:
    """A layer; of a model with experts its MLP is routed, but where it is `dense`, of that width."""
    hidden, block = {"hidden": c.hidden}, "model.layers.{layer}"
    ffn = dense or (0 if c.experts else c.ffn)

    def normed(s: Scope, name: str, file: str, x: str) -> str:
        return norm(s, c, name, hidden, f"{block}.{file}_layernorm.weight", x)

    y = normed(s, "attention_norm", "input", x)
    attention = latent_attention if c.kv_lora_rank else grouped_attention
    y = attention(s, c, given, y, f"{block}.self_attn", window=c.has_window(number))
    y = normed(s, "attention_post_norm", "post_attention", y) if c.post_norms else y
    x = s.elementwise("a + b", x, drop(s, y, c.dropout))
    y = normed(s, "mlp_norm", "pre_feedforward" if c.post_norms else "post_attention", x)
    y = gated_mlp(s, c, y, ffn, f"{block}.mlp") if ffn else routed_mlp(s, c, y, block)
    y = normed(s, "mlp_post_norm", "post_feedforward", y) if c.post_norms else y
    return s.elementwise("a + b", x, drop(s, y, c.dropout))


# The MLP of a layer: gated, and experts that a router chooses for each token, of which some are shared by all.


MIXTRAL = {"gate": "w1", "up": "w3", "down": "w2"}


LIMIT, SLOPE = 7.0, 1.702  # of gpt-oss's MLP: how large what goes in may be, and how steep its gate is
GATED = {  # by activation what is made of the gate's product and the other one
    "silu": "silu(a) * b",
    "gelu": "gelu(a) * b",
    "clamped": f"(maximum(minimum(b, {LIMIT}), -{LIMIT}) + 1) * minimum(a, {LIMIT}) "
    f"* sigmoid({SLOPE} * minimum(a, {LIMIT}))",
}


def gated_mlp(s: Scope, c: DecoderSizes, x: str, ffn: int, block: str, opens: str = "") -> str:
    """Llama's: the activation of one product times another, and back; names of parameters begin with `opens`.

    Phi 3 stores both as rows of one product.
    """
    wide, gate_up = {"hidden": c.hidden, "ffn": ffn}, []
    for k, name in enumerate(("gate", "up")):
        stored, file, part = "ffn hidden", f"{name}_proj", None
        if c.model_type == "phi3":
            stored, file, part = "(part ffn) hidden", "gate_up_proj", FactorPart("part", 2, k)
        weight = s.parameter(f"{opens}{name}", wide, f"{block}.{file}.weight", stored, part)
        gate_up.append(s.einsum("bsh,hf->bsf", x, weight))
    down = s.parameter(f"{opens}down", {"ffn": ffn, "hidden": c.hidden}, f"{block}.down_proj.weight", "hidden ffn")
    return s.einsum("bsf,fh->bsh", s.elementwise(GATED[c.activation], *gate_up), down)


def routed_mlp(s: Scope, c: DecoderSizes, x: str, layer: str) -> str:
    """The weighted sum of the experts that each token takes, and of those shared; a sequence is a group of slots.

    Choices behind an expert's last slot are dropped; how many in each sequence is the result `dropped`.
    """
    mixtral, oss = c.model_type == "mixtral", c.model_type == "gpt_oss"
    block = f"{layer}.block_sparse_moe" if mixtral else f"{layer}.mlp"
    gate = f"{block}.{'router' if oss else 'gate'}"
    router = s.parameter("router", {"hidden": c.hidden, "experts": c.experts}, f"{gate}.weight", "experts hidden")
    scores = s.einsum("bsh,hn->bsn", x, router)
    if oss:
        scores = s.elementwise("a + b", scores, s.parameter("router_bias", {"experts": c.experts}, f"{gate}.bias"))
    if "routing" in s.carried:
        s.carried["routing"] = s.elementwise("a + b", s.carried["routing"], _routing_loss(s, c, scores))
    chosen, weights = (_group_limited if c.router == "sigmoid" else _softmax)(s, c, scores, block)
    slots, dropped = s.builder.write_step(Dispatch(c.experts, c.capacity), x, chosen)
    s.add_result("dropped", dropped)
    made = (_biased_experts if oss else _experts)(s, c, slots, f"{block}.experts")
    y = s(Combine(), made, chosen, weights)
    if c.shared_ffn:
        file = f"{block}.shared_expert{'' if c.shared_gate else 's'}"
        shared = gated_mlp(s, c, x, c.shared_ffn, file, "shared_")
        if c.shared_gate:
            gate = s.parameter("shared_scale", {"hidden": c.hidden, "one": 1}, f"{file}_gate.weight", "one hidden")
            shared = s.elementwise("a * sigmoid(b)", shared, s.einsum("bsh,ho->bso", x, gate))
        y = s.elementwise("a + b", y, shared)
    return y


def _experts(s: Scope, c: DecoderSizes, slots: str, file: str) -> str:
    """Of every slot what its expert makes; a checkpoint has the experts one by one."""
    wide = {"experts": c.experts, "hidden": c.hidden, "ffn": c.ffn}
    names = MIXTRAL if c.model_type == "mixtral" else {name: f"{name}_proj" for name in MIXTRAL}
    one = f"{file}.{{experts}}"
    gate, up = (s.parameter(f"expert_{n}", wide, f"{one}.{names[n]}.weight", "ffn hidden") for n in ("gate", "up"))
    back = {"experts": c.experts, "ffn": c.ffn, "hidden": c.hidden}
    down = s.parameter("expert_down", back, f"{one}.{names['down']}.weight", "hidden ffn")
    inside = s.elementwise(
        GATED[c.activation], s.einsum("bech,ehf->becf", slots, gate), s.einsum("bech,ehf->becf", slots, up)
    )
    return s.einsum("becf,efh->bech", inside, down)


def _biased_experts(s: Scope, c: DecoderSizes, slots: str, file: str) -> str:
    """Those of gpt-oss: with biases; a checkpoint has all of them as one, gates and the other rows by turns."""
    many = {"experts": c.experts}

    def product(name: str, sides: tuple[str, str], file: str, x: str, spec: str, part: FactorPart | None = None) -> str:
        """Of a weight `sides`, features in and out, of which a checkpoint has `part`."""
        width = {"hidden": c.hidden, "ffn": c.ffn}
        dims, out = ({**many, **{side: width[side] for side in some}} for some in (sides, sides[1:]))
        last = f"({sides[1]} part)" if part else sides[1]
        y = s.einsum(spec, x, s.parameter(f"expert_{name}", dims, file, f"experts {sides[0]} {last}", part))
        bias = s.parameter(f"expert_{name}_bias", out, f"{file}_bias", f"experts {last}", part)
        return s.elementwise("a + b", y, s(Reshape("e f -> e one=1 f"), bias))

    gate, up = (
        product(name, ("hidden", "ffn"), f"{file}.gate_up_proj", slots, "bech,ehf->becf", FactorPart("part", 2, k))
        for k, name in enumerate(("gate", "up"))
    )
    inside = s.elementwise(GATED[c.activation], gate, up)
    return product("down", ("ffn", "hidden"), f"{file}.down_proj", inside, "becf,efh->bech")


def _routing_loss(s: Scope, c: DecoderSizes, scores: str) -> str:
    """What a layer's router adds to the loss: for choices that are not even, and for scores that are large."""
    x = widened(s.builder, scores)
    _, chosen = s.builder.write_step(TopK(c.experts_per_token), scores)
    tokens = c.batch * c.seq
    top = s(ReduceDims((2,), "max", keep=True), x)
    powers = s.builder(Elementwise("exp(a - b)"), x, top, stopped=(1,))
    total = s(ReduceDims((2,), keep=True), powers)
    square = s.sum_all(s.builder(Elementwise("(log(a) + b) ** 2"), total, top, stopped=(1,)))
    hot = s(ReduceDims((0, 1, 2)), s(OneHot(c.experts, s.builder.types[x].dtype), chosen))
    share = s(ReduceDims((0, 1)), s.elementwise("a / b", powers, total))
    even = s.sum_all(s.elementwise("a * b", hot, share))
    factor = c.balance_loss * c.experts / tokens**2
    return s.elementwise(f"{factor} * a + {c.router_z_loss / tokens} * b", even, square)


def _softmax(s: Scope, c: DecoderSizes, scores: str, block: str) -> tuple[str, str]:
    """The experts of the best scores, and the softmax of these alone (arXiv 2401.04088, 2.1).

    Without `router_norm` weights are of the softmax of all scores, and do not sum to 1.
    """
    given = scores if c.router_norm else s(Softmax(2), scores)
    best, chosen = s.builder.write_step(TopK(c.experts_per_token), given)
    return chosen, s(Softmax(2), best) if c.router_norm else best


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
        best, _ = s.builder.write_step(TopK(min(2, c.experts // c.router_groups)), grouped)
        _, kept = s.builder.write_step(TopK(c.router_groups_kept), s(ReduceDims((3,)), best))
        inside = s(ReduceDims((2,)), s(OneHot(c.router_groups, s.dtype), kept))
        allowed = s.elementwise(f"where(a > 0, b, {MASKED})", s(Expand("b s g -> b s g one=1"), inside), grouped)
        choice = s(Reshape("b s g n -> b s (g n)"), allowed)
    _, chosen = s.builder.write_step(TopK(c.experts_per_token), choice)
    taken = s.einsum("bsn,bskn->bsk", affinity, s(OneHot(c.experts, s.dtype), chosen))
    return chosen, s.elementwise(f"{c.router_scale} * a / b", taken, s(ReduceDims((2,), keep=True), taken))

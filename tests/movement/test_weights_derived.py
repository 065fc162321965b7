"""Tables derived from loaders: beside the shipped ones, at sizes and degrees that no trial had, and what is refused."""

from __future__ import annotations

import tomllib
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import shardplan as sp
from movement import weights_frameworks as frameworks
from movement import weights_more as more
from movement.weights_cases import served_by_sglang
from shardplan.errors import LayoutError
from shardplan.movement.weights.derive import LoaderTrial, derive_table
from shardplan.movement.weights.derive.cuts import RankDim, fits
from shardplan.movement.weights.derive.holes import RankHole, hole_of
from shardplan.movement.weights.derive.sides import SeenTrials
from shardplan.movement.weights.derive.wholes import AtomNames, atoms_of, digits_of
from shardplan.movement.weights.form import StoredForm
from shardplan.movement.weights.pieces import FormContext
from shardplan.movement.weights.probe import probe
from shardplan.movement.weights.table import WeightTable
from shardplan.movement.weights.weights import Weights, make_weights

Config = dict[str, Any]
Run = tuple[Config, dict[str, int], dict[str, Any]]  # config, mesh, what the converter is given
LLAMA: Config = {
    "kind": "llama", "hidden_size": 10, "intermediate_size": 16, "num_attention_heads": 8, "num_key_value_heads": 4,
    "head_dim": 4, "num_hidden_layers": 2, "vocab_size": 70, "tie_word_embeddings": False, "moe_intermediate_size": 8,
    "num_experts": 4, "num_local_experts": 4,
}  # fmt: skip
FEW = LLAMA | {"num_key_value_heads": 2, "vocab_size": 300, "num_hidden_layers": 4, "num_experts": 6}
OTHER = LLAMA | {"hidden_size": 9, "intermediate_size": 24, "vocab_size": 140, "num_hidden_layers": 6, "head_dim": 6}
UNEVEN = LLAMA | {"intermediate_size": 15, "vocab_size": 75}
MOE, FEW_MOE, OTHER_MOE = ({**c, "kind": "qwen3-moe"} for c in (LLAMA, FEW, OTHER))
MIXTRAL = LLAMA | {"kind": "mixtral"}
GPT2: Config = {"kind": "gpt2", "n_embd": 16, "n_head": 4, "n_layer": 2, "n_positions": 6, "vocab_size": 70,
                "tie_word_embeddings": True}  # fmt: skip
MAMBA: Config = {
    "kind": "mamba2", "hidden_size": 8, "num_hidden_layers": 2, "num_heads": 4, "head_dim": 4, "n_groups": 2,
    "state_size": 3, "conv_kernel": 4, "vocab_size": 70, "tie_word_embeddings": False,
}  # fmt: skip
LATENT: Config = {
    "kind": "deepseek", "hidden_size": 8, "num_attention_heads": 4, "q_lora_rank": 12, "kv_lora_rank": 8,
    "qk_rope_head_dim": 2, "qk_nope_head_dim": 4, "v_head_dim": 4, "n_routed_experts": 4, "moe_intermediate_size": 16,
    "intermediate_size": 32, "n_shared_experts": 1, "first_k_dense_replace": 2, "num_hidden_layers": 4,
    "vocab_size": 70, "tie_word_embeddings": False, "fp8": False, "weight_block_size": 4,
}  # fmt: skip


def run_of(make: Callable[..., Any], disk: str, run: Run, meshes: dict[str, Any] | None = None) -> LoaderTrial:
    c, mesh, given = run
    return LoaderTrial(
        Weights.load(disk, c, dtype="f32"), lambda named: make(c, dict(named), **given), mesh, meshes or {}
    )


def forms(table: WeightTable) -> dict[str, str]:
    return {p.name: str(p.form) for p in table.parameters}


def tp(n: int, **more_given: int) -> tuple[dict[str, int], dict[str, Any]]:
    mesh = {**more_given, "tensor": n}
    return mesh, dict(mesh)


CASES: dict[str, tuple[Callable[..., Any], str, list[Run], Run]] = {
    "vllm-llama": (
        frameworks.served, "hf-llama",
        [(LLAMA, {}, {}), (LLAMA, *tp(2, pipeline=2)), (FEW, *tp(4, pipeline=1))], (OTHER, *tp(8, pipeline=3)),
    ),
    "megatron-llama": (
        frameworks.megatron, "hf-llama",
        [(LLAMA, {}, {}), (LLAMA, *tp(2, pipeline=2, data=1)), (FEW, *tp(8, pipeline=1, data=1))],
        (OTHER, *tp(4, pipeline=3, data=2)),
    ),
    "fsdp2-llama": (
        frameworks.fsdp2, "hf-llama", [(LLAMA, {}, {}), (UNEVEN, *tp(2, data=3))],
        (OTHER, *tp(4, data=5)),
    ),
    "torchtitan-llama-split": (
        lambda c, w, **given: frameworks.fsdp2(c, w, meta="split", **given), "hf-llama",
        [(LLAMA, {}, {}), (UNEVEN, *tp(2, data=7)), (OTHER, *tp(2, data=5))],
        (OTHER, *tp(4, data=3)),
    ),
    "hf5-qwen3-moe": (frameworks.hugging_face_5, "hf-qwen3-moe", [(MOE, {}, {})], (OTHER_MOE, {}, {})),
    "hf5-mixtral": (
        more.hugging_face_5_mixtral, "hf-mixtral", [(MIXTRAL, {}, {})], (MIXTRAL | {"head_dim": 6}, {}, {}),
    ),
    "vllm-qwen3-moe": (
        frameworks.served, "hf-qwen3-moe",
        [(MOE, {}, {}), (MOE, *tp(2, data=2, pipeline=1)), (FEW_MOE, *tp(4, data=1, pipeline=2))],
        (OTHER_MOE, *tp(4, data=2, pipeline=3)),
    ),
    "vllm-qwen3-moe-ep": (
        lambda c, w, **given: frameworks.served(c, w, ep=True, **given), "hf-qwen3-moe",
        [(MOE, {}, {}), (FEW_MOE, *tp(4, data=1, pipeline=2)), (FEW_MOE, *tp(2, data=2, pipeline=1))],
        (OTHER_MOE | {"num_experts": 7}, *tp(4, data=1, pipeline=1)),
    ),
    "vllm-gpt2": (more.gpt2_served, "hf-gpt2", [(GPT2, {}, {}), (GPT2, *tp(2))], (GPT2 | {"n_embd": 24}, *tp(4))),
    "megatron-mamba2": (
        more.mamba2_megatron, "hf-mamba2", [(MAMBA, {}, {}), (MAMBA, *tp(2))], (MAMBA | {"state_size": 5}, *tp(2)),
    ),
    "vllm-deepseek-v3": (
        more.deepseek_served, "hf-deepseek-v3", [(LATENT, {}, {}), (LATENT, *tp(2, pipeline=2))],
        (LATENT | {"hidden_size": 10, "n_shared_experts": 2}, *tp(4, pipeline=1)),
    ),
    "hf5-deepseek-v3": (more.deepseek_5, "hf-deepseek-v3", [(LATENT, {}, {})], (LATENT | {"kv_lora_rank": 6}, {}, {})),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_a_derived_table_is_the_shipped_one_at_sizes_of_no_trial(name: str) -> None:
    make, disk, runs, (c, mesh, given) = CASES[name]
    table = derive_table([run_of(make, disk, run) for run in runs])
    assert WeightTable.of(tomllib.loads(table.toml()), "the text") == table
    source = Weights.load(disk, c, dtype="f32")
    mine = make_weights(table, c, mesh, None, "f32")
    assert Weights.parse(str(mine)) == mine
    probe(source, lambda named: make(c, dict(named), **given), mine).require()
    shipped = Weights.load(name, c, dtype="f32", **mesh)
    whole = {n: np.random.default_rng(0).random(s).astype(np.float32) for n, s, _ in source.parameters(0)}
    a, b = (sp.refit(source, side).apply({0: whole}) for side in (mine, shipped))
    for rank, named in b.items():
        assert set(a[rank]) == set(named)
        assert all(np.array_equal(a[rank][n], x) for n, x in named.items())


def test_expressions_are_those_that_are_shipped() -> None:
    parts = {"vllm-llama": "qkv_proj", "megatron-llama": "linear_qkv.weight", "vllm-gpt2": "c_attn.weight",
             "hf5-qwen3-moe": "gate_up_proj", "vllm-qwen3-moe-ep": "w13"}  # fmt: skip
    for name, cut in parts.items():
        make, disk, runs, _ = CASES[name]
        mine = forms(derive_table([run_of(make, disk, run) for run in runs]))
        said = {n.replace("{c}", "0"): str(p) for n, p in forms(WeightTable.read(name)).items()}
        (key,) = [n for n in mine if cut in n]
        if name == "vllm-gpt2":  # at tensor = 2 and 4 of 4 heads
            assert mine[key] == "(q: h@tensor d | k: h@tensor d | v_: h@tensor d), e"
        else:
            assert mine[key] == said[key]


def test_experts_have_a_mesh_of_their_own() -> None:
    make = frameworks.megatron
    whole = {"expert": {"pipeline": 1, "edp": 1, "expert": 1, "etp": 1}}
    other = {"expert": {"pipeline": 2, "edp": 2, "expert": 2, "etp": 2}}
    config = MOE | {"num_experts": 8}
    trials = [
        run_of(make, "hf-qwen3-moe", (config, {"pipeline": 1, "data": 1, "tensor": 1}, {}), whole),
        run_of(make, "hf-qwen3-moe", (config, *tp(2, pipeline=2, data=4)), other),
    ]
    given = {"tensor": 2, "pipeline": 2, "data": 4, "expert": 2, "etp": 2}
    trials[1] = LoaderTrial(trials[1].source, lambda named: make(config, dict(named), **given), trials[1].mesh, other)
    table = derive_table(trials)
    found = {p.name: p for p in table.parameters}["0.decoder.layers.{l.local}.mlp.experts.linear_fc1.weight{x.local}"]
    assert (str(found.form), found.mesh) == ("(gate: f@etp | up: f@etp), e", "expert")
    assert dict(table.holes) == {"l": "l@pipeline", "x": "x@expert"}
    sglang = {"expert": {"ep": 2, "moe": 2}}
    c = MOE | {"kind": "qwen3-moe"}
    one = run_of(served_by_sglang, "hf-qwen3-moe", (c, {}, {}))
    more_runs = LoaderTrial(one.source, lambda n: served_by_sglang(c, dict(n), tensor=4, ep=2), {"tensor": 4}, sglang)
    said = forms(derive_table([one, more_runs]))
    assert said["model.layers.{l}.mlp.experts.w13_weight"] == "x@ep, (gate: f@moe | up: f@moe), e"


def test_a_file_of_a_derived_table_is_loaded(tmp_path: Path) -> None:
    make, disk, runs, _ = CASES["hf5-qwen3-moe"]
    path = tmp_path / "mine.toml"
    path.write_text(derive_table([run_of(make, disk, run) for run in runs], "mine").toml())
    side = Weights.load(path, OTHER_MOE)
    assert side.table.name == "mine"
    assert side.shape("model.layers.5.mlp.experts.gate_up_proj", 0) == (4, 16, 9)


def test_an_order_is_read_as_digits() -> None:
    assert digits_of(np.arange(12)) == [(12, 1)]
    assert digits_of(np.arange(12).reshape(3, 4).T.reshape(-1)) == [(4, 1), (3, 4)]
    assert digits_of(np.array([0, 2, 1, 3, 5, 4])) == []
    assert digits_of(np.array([3, 2, 1, 0])) == []
    assert digits_of(np.array([0, 1, 2, 3, 4, 5, 7, 6])) == []
    assert atoms_of(np.arange(6), [("a", 2), ("b", 3)], AtomNames()) == [("a", 2), ("b", 3)]
    assert atoms_of(np.array([0, 1, 1, 2]), [("a", 4)], AtomNames()) is None  # an element twice


def changed(
    change: Callable[[dict[str, np.ndarray]], dict[str, np.ndarray]], ranks: int = 1, **mesh: int
) -> LoaderTrial:
    source = Weights.load("hf-llama", LLAMA, dtype="f32")
    return LoaderTrial(source, lambda named: {r: change(dict(named)) for r in range(ranks)}, mesh)


Q = "model.layers.0.self_attn.q_proj.weight"
NORM = "model.norm.weight"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda w: w | {Q: w[Q] + 300}, rf"{Q} of rank 0 has \d+, no element of the checkpoint; legal is a copy"),
        (lambda w: w | {Q: w[Q][np.random.default_rng(0).permutation(32)]},
         rf"{Q}: dim 0 has g r d of q in an order that no product of its digits gives; legal is each digit once"),
        (lambda w: w | {Q: w[Q].reshape(-1)}, rf"{Q}: dim 0 joins several dims of q; legal is one"),
        (lambda w: w | {Q: w[Q][:-1]}, rf"{Q}: dim 0 has g r d of q in an order that no product"),
        (lambda w: w | {NORM: np.repeat(w[NORM][:1], 5)}, rf"{NORM}: e is 0 throughout, as no number of the name"),
        (lambda w: w | {"bias": np.zeros(3)}, r"bias holds no element of the checkpoint; legal is a parameter that is"),
        (lambda w: {n.replace("layers.1.", "layers.7."): a for n, a in w.items()},
         r"layers\.7\.\S+: the number 7 in it is the index of no dim; legal is a whole dim"),
        (lambda w: w | {NORM: np.concatenate([w[NORM], np.zeros(3)])},
         rf"{NORM}: dim 0, \(norm: e \| 0: pad\), is cut or padded by no rule; legal are even"),
        (lambda w: w | {NORM: np.concatenate([w[NORM], w["model.layers.0.input_layernorm.weight"], w[NORM]])},
         rf"{NORM}: \S+ is \d throughout|{NORM}: a tensor stands in several|{NORM}: dim 0 has e of norm"),
    ],
)  # fmt: skip
def test_what_cannot_be_derived_is_refused_in_one_line(change: Any, message: str) -> None:
    with pytest.raises(LayoutError, match=message) as caught:
        derive_table([changed(change)])
    assert "\n" not in str(caught.value)


def test_ranks_that_no_rule_gives_are_refused() -> None:
    def load(cut: Callable[[int, np.ndarray], np.ndarray]) -> LoaderTrial:
        source = Weights.load("hf-llama", LLAMA, dtype="f32")
        return LoaderTrial(source, lambda w: {r: dict(w) | {Q: cut(r, w[Q])} for r in range(2)}, {"tensor": 2})

    one = changed(lambda w: w)
    with pytest.raises(LayoutError, match=r"q_proj\.weight: dim 0, g r d, is cut or padded by no rule; legal are even"):
        derive_table([one, load(lambda r, a: a[16:] if r == 0 else a[:16])])
    with pytest.raises(LayoutError, match=r"no trial on one rank; legal is one, before those on several"):
        derive_table([load(lambda r, a: a)])
    extra = LoaderTrial(one.source, lambda w: {0: {**w, "other": w[Q]}, 1: dict(w)}, {"tensor": 2})
    with pytest.raises(LayoutError, match="other of rank 0 is as none of the first trial's parameters; legal are the"):
        derive_table([one, extra])

    def without(r: int, w: Any) -> dict[str, np.ndarray]:
        return {n: a for n, a in w.items() if n != NORM or r == 1}

    middle = LoaderTrial(one.source, lambda w: {r: without(r, w) for r in range(3)}, {"stage": 3})
    with pytest.raises(
        LayoutError, match=r"model\.norm\.weight is at 1 of 3 of stage; legal is the first, or the last"
    ):
        derive_table([one, middle])
    with pytest.raises(LayoutError, match="the loader gave nothing for rank 1; legal are"):
        derive_table([one, LoaderTrial(one.source, lambda w: {0: dict(w)}, {"tensor": 2})])


def test_trials_that_contradict_each_other_are_refused() -> None:
    one = changed(lambda w: w)
    up = "model.layers.1.mlp.up_proj.weight"
    gate = "model.layers.1.mlp.gate_proj.weight"
    other = changed(lambda w: w | {NORM: w[NORM][::-1].copy()})
    with pytest.raises(LayoutError, match=r"model\.norm\.weight: dim 0, e, is cut or padded by no rule"):
        derive_table([one, other])
    second = changed(lambda w: w | {up: w[gate], gate: w[up]})
    with pytest.raises(LayoutError, match=r"up_proj|gate_proj"):
        derive_table([one, second])
    q = Q.replace("layers.0", "layers.1")
    third = changed(lambda w: w | {q: w[q][::-1].copy()})  # one layer is stored as the others are not
    with pytest.raises(
        LayoutError, match=r"layers\.1\S+q_proj\.weight\[0, 0\] of rank 0 is \S+\[31, 0\], and what is der"
    ):
        derive_table([third])


def test_padding_to_a_degree_that_cuts_nothing_is_no_rule() -> None:
    """70 rows to 72 on one rank and to 80 on two, each of which has all: no multiple of any number but of ranks."""
    name = "model.embed_tokens.weight"

    def padded(rows: int) -> Callable[[dict[str, np.ndarray]], dict[str, np.ndarray]]:
        return lambda w: w | {name: np.concatenate([w[name], np.zeros((rows - len(w[name]), w[name].shape[1]))])}

    runs = [changed(padded(72)), changed(padded(80), 2, tensor=2)]
    with pytest.raises(
        LayoutError, match=r"embed_tokens\.weight: dim 0, \(embed: v \| 0: pad\), is cut or padded by no"
    ):
        derive_table(runs)


def test_names_fit_an_expression_where_every_rank_has_just_those() -> None:
    def ranks(*values: set[int]) -> list[RankHole]:
        axes = {"stage": len(values)}
        return [RankHole(0, frozenset(v), FormContext({"l": 4}, axes, {}, {"stage": r})) for r, v in enumerate(values)]

    assert hole_of("l", ranks({0, 1}, {2, 3}), ["stage"]) == "l@stage"
    assert hole_of("l", ranks({0, 2}, {1, 3}), ["stage"]) == "l@stage.robin"
    assert hole_of("l", ranks({0, 1, 2}, {2, 3}), ["stage"]) is None  # one of them has one more
    assert hole_of("l", ranks({0, 1, 2, 3}, {0, 1, 2, 3}), []) == "l"


def test_axes_along_which_ranks_differ_come_in_order_of_the_mesh() -> None:
    """Of two trials on a mesh of x and y the first differs along y alone, the second along both."""

    def trial(**sizes: int) -> Any:
        every = [dict(zip(sizes, at, strict=True)) for at in np.ndindex(*sizes.values())]
        own = SimpleNamespace(
            meshes=(), ranks=len(every), axes=lambda mesh: list(sizes), mesh_coordinate=lambda r, mesh: every[r]
        )
        return SimpleNamespace(trial=own)

    keys = [(0, r, (0, r % 2)) for r in range(4)] + [(1, r, (0, r)) for r in range(4)]
    seen: Any = SimpleNamespace(every=[trial(x=2, y=2), trial(x=2, y=2)])
    assert SeenTrials.differing(seen, keys[:4], "") == ["y"]
    assert SeenTrials.differing(seen, keys, "") == ["x", "y"]


def test_a_rank_without_elements_has_the_shape_of_its_cut() -> None:
    (factors,) = StoredForm.parse("f@t.ceil").dims

    def has(size: int, owner: int) -> RankDim:
        return RankDim(size, None, FormContext({"f": 6}, {"t": 4}, {}, {"t": owner}), {}, {"q": 0})

    assert fits(factors, [has(2, 0), has(2, 1), has(2, 2), has(0, 3)], "q", among=False)
    for size, owner in ((1, 0), (3, 0), (0, 2), (1, 3)):
        assert not fits(factors, [has(size, owner)], "q", among=False)

"""Styles of parameters, ours and torch's, come to the tables that say the same, and jobs compute what models do."""

from __future__ import annotations

import warnings

import numpy as np
import pytest

from shardplan import Layouts, Strategy, partition
from shardplan.errors import LayoutError, ReplicationWarning
from shardplan.strategy.partition.parallel_styles import ParallelStyles
from shardplan.strategy.partition.style_tables import parameter_dims, read_layouts
from strategy.jobs import by_name, model, stepped
from strategy.test_shares import capped

PLANS = pytest.importorskip("torch.distributed.tensor.parallel")


def held(layouts: Layouts) -> dict[str, str]:
    return {n: str(line).partition(": ")[2] for line in layouts.held for n in line.patterns}


def test_the_strategys_own_tables_are_what_megatron_calls_its_styles() -> None:
    found, strategy = model("llama"), Strategy(tensor=2)
    own = strategy.layouts(found)
    styles = Layouts.column("*.q", "*.k", "*.v", "*.gate", "*.up").row("*.o", "*.down").vocab("embed", "head")
    assert held(read_layouts(styles, found, strategy)) == held(own)
    assert dict(read_layouts(styles, found, strategy).serve) == dict(own.serve)


def test_names_of_the_checkpoint_and_torchs_plan_say_the_same() -> None:
    found, strategy = model("llama"), Strategy(tensor=2)
    column, row = PLANS.ColwiseParallel(), PLANS.RowwiseParallel()
    plan = {
        "model.embed_tokens": PLANS.RowwiseParallel(),
        **{f"self_attn.{n}_proj": column for n in "qkv"},
        "self_attn.o_proj": row,
        "mlp.gate_proj": column,
        "mlp.up_proj": column,
        "mlp.down_proj": row,
        "mlp": PLANS.PrepareModuleInput(),
        "input_layernorm": PLANS.SequenceParallel(),
        "lm_head": PLANS.ColwiseParallel(),
    }
    tables = read_layouts(Layouts.of_torch(plan), found, strategy)
    assert held(tables) | {"layers.attention_norm": "whole"} == held(strategy.layouts(found)) | {
        "layers.attention_norm": "whole"
    }
    assert dict(tables.serve) == dict(Strategy(tensor=2, sequence_parallel=True).layouts(found).serve)


def test_grouped_heads_are_cut_as_the_strategy_cuts_them() -> None:
    found, strategy = model("llama"), Strategy(tensor=6)  # 2 key heads, 3 query heads each
    styles = Layouts.column("*.q", "*.k", "*.v").row("*.o")
    assert held(read_layouts(styles, found, strategy)) == held(strategy.layouts(found))


def test_columns_of_what_tables_do_not_name_are_dealt_out_and_compute_the_same() -> None:
    found, strategy = capped(), Strategy(tensor=2, microbatch=2)
    with warnings.catch_warnings():
        warnings.simplefilter("error", ReplicationWarning)
        job = partition(found, strategy, layouts=Layouts.column("q", "k", "v").row("o"))
    assert job.shares()[0].operations == 0.5
    assert held(job.layouts) == dict.fromkeys("qkvo", "head_count@tensor") | dict.fromkeys(("up", "down"), "ffn@tensor")
    given = {n: np.random.default_rng(k).normal(size=t.shape) for k, (n, t) in enumerate(found.program.inputs)}
    want, got = by_name(found.program, given), stepped(job, given)
    for name, new in {"loss": "loss", **found.replaced}.items():
        np.testing.assert_allclose(got[name], want[new], rtol=1e-12, atol=1e-12)


def test_what_is_whole_is_held_whole_and_the_rest_as_it_was() -> None:
    found, strategy = model("llama"), Strategy(tensor=2)
    said = held(read_layouts(ParallelStyles().whole("mlp.*"), found, strategy))
    assert {n: said.pop(n) for n in ("layers.gate", "layers.up", "layers.down")} == dict.fromkeys(
        ("layers.gate", "layers.up", "layers.down"), "whole"
    )
    assert said == {n: t for n, t in held(strategy.layouts(found)).items() if n in said}


def test_biases_go_with_what_they_are_added_to() -> None:
    found = model("gpt")
    dims = parameter_dims(found.forward or found.program, found)
    assert dims["layers.up_bias"].cut("column") == ("ffn",) and dims["layers.q_bias"].cut("column")[0] == "kv_heads"
    assert dims["embed"].cut("vocab") == ("vocab",) == dims["embed"].cut("row")
    styles = Layouts.column("up", "up_bias").row("down", "down_bias")
    said = held(read_layouts(styles, found, Strategy(tensor=2)))
    assert said["layers.up_bias"] == said["layers.up"] == said["layers.down"] == "ffn@tensor"
    assert said["layers.down_bias"] == "whole"


REFUSED = (
    (lambda: Layouts.column("*.gates"), "column('*.gates'): no parameter is called '*.gates'; legal are embed, "),
    (lambda: Layouts.column("layers.0.mlp.up_proj"), "legal are all"),
    (lambda: Layouts.column("*.up", axis="row"), "column('*.up'): there is no axis 'row'; legal are tensor"),
    (Layouts.column, "layouts: column of no names; legal are patterns such as '*.gate'"),
    (lambda: Layouts.of_torch({"mlp": object()}), "a plan of parallelize_module: 'mlp' is object; legal are Colwise"),
    (lambda: Layouts.row("layers.mlp_norm").vocab("layers.mlp_norm"), "layers.mlp_norm has no such dim by any op"),
)


@pytest.mark.parametrize("made, text", REFUSED, ids=[text for _, text in REFUSED])
def test_what_says_nothing_is_refused(made: object, text: str) -> None:
    with pytest.raises(LayoutError) as error:
        read_layouts(made(), model("llama"), Strategy(tensor=2))  # type: ignore[operator]
    assert text in str(error.value)

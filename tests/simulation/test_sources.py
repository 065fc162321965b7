"""Machines and sources that nobody fitted to: what a chip's machines have in common, and intervals that know it."""

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from typer.testing import CliRunner

from shardplan.cli import app
from shardplan.errors import ShardplanError
from shardplan.hardware.topology import Topology
from shardplan.simulation.accuracy.calibration import fit_machine, near_bounds
from shardplan.simulation.accuracy.forecast import OPEN, RESIDUAL, forecast
from shardplan.simulation.accuracy.step_fitting import LIMITS
from shardplan.simulation.accuracy.step_rows import StepRow, read_steps
from shardplan.simulation.accuracy.subject import context_kind_of, model_of, strategies_of
from shardplan.simulation.closed.chips import APART, CHIPS, FREE, chip_of, common
from shardplan.simulation.closed.configurations import Configurations
from shardplan.simulation.closed.form import ClosedForm
from shardplan.simulation.closed.machines import (
    MachineFit,
    like_fit,
    machine_fit,
    machine_of,
    parse_fit,
    shipped,
    shipped_fit,
)
from shardplan.simulation.closed.parameters import Parameters
from shardplan.strategy.model import Model
from shardplan.strategy.strategy import Strategy

HERE = Path(__file__).parent.parent
STEPS = HERE / "data" / "steps.jsonl"
PUBLISHED = HERE.parent / "benchmarks" / "rows"
TWO = Topology.load("dgx-h100", nodes=2)


def vtrain() -> list[StepRow]:
    return [row for row in read_steps(STEPS) if row.table == "vtrain_single"]


def on(row: StepRow, preset: str, **more: Any) -> StepRow:
    changed = msgspec.structs.replace(row, cluster=msgspec.structs.replace(row.cluster, preset=preset))
    return msgspec.structs.replace(changed, **more)


def test_a_machine_without_rows_is_as_those_with_its_chip() -> None:
    found = machine_fit("p5-efa")
    assert not found.is_measured and found.taken == ("dgx-h100", "dgx-h200", "grand-teton-h100")
    for name in FREE:
        values = [getattr(shipped_fit(mate).parameters, name) for mate in found.taken]
        values.append(getattr(CHIPS[1].kernels, name))
        assert 0.999 * min(values) <= getattr(found.parameters, name) <= 1.001 * max(values), name
    for mate in found.taken:
        assert (np.diag(found.covariance) >= np.diag(shipped_fit(mate).covariance)).all()
    widths: list[float] = []
    for known in (found, *(shipped_fit(mate) for mate in found.taken)):
        same = dataclasses.replace(known, parameters=found.parameters)
        (one,), _ = forecast([on(vtrain()[0], "p5-efa")], lambda preset, same=same: same)
        widths.append(one.seconds_interval[1] / one.seconds_interval[0])
    assert widths[0] > max(widths[1:])


def test_a_topology_of_ones_own_is_known_by_its_chip() -> None:
    mine = dataclasses.replace(TWO, name="mine")
    assert machine_of(mine).parameters == like_fit(TWO, {m: shipped_fit(m) for m in shipped()}).parameters
    slow = dataclasses.replace(mine, device=dataclasses.replace(mine.device, flops=(("bf16", 5e13),)))
    assert chip_of(slow) is None
    wide, narrow = (np.diag(machine_of(t).covariance) for t in (slow, mine))
    assert (wide > narrow).all()


def test_what_machines_have_in_common_is_the_mean_of_two_levels() -> None:
    """One mate with nothing open of it, by hand: the precisions of the table and of the mate weigh the logarithms."""
    chip = CHIPS[0]
    mate = dataclasses.replace(chip.kernels, product=chip.kernels.product / 2)
    found, variances = common(chip, {"one": (mate, np.zeros(len(FREE)))})
    a, b = 1 / 0.1**2, 1 / 0.1**2
    assert np.log(found.product) == pytest.approx(np.log(chip.kernels.product) - b / (a + b) * np.log(2))
    assert variances[0] == pytest.approx(1 / (a + b) + 0.1**2)


def test_rows_that_say_nothing_leave_what_the_chip_says() -> None:
    """One row on one device: the network, of which it has none, stays where the others with the chip have it."""
    one = [row for row in vtrain() if row.cluster.devices <= 8][:1]
    row = on(one[0], "dgx-h100")
    others = {"grand-teton-h100": shipped_fit("grand-teton-h100")}
    like = like_fit(Topology.load("dgx-h100"), others, "dgx-h100")
    found = fit_machine([row], "dgx-h100", others)
    assert found.parameters.network == pytest.approx(like.parameters.network, rel=1e-3)


def test_machines_with_one_chip_are_near_each_other_but_where_something_says_why() -> None:
    fits = {m: shipped_fit(m) for m in ("dgx-h100", "dgx-h200", "grand-teton-h100", "dgx-a100-80g")}
    far = {m: dataclasses.replace(fit, parameters=dataclasses.replace(fit.parameters, product=x))
           for (m, fit), x in zip(fits.items(), (0.5, 0.7, 0.3, 0.75), strict=True)}  # fmt: skip
    for apart in ({}, {("grand-teton-h100", "product"): "500 W"}):
        found = near_bounds(far, apart)
        low, high = found["dgx-h100"]["product"]
        assert found["dgx-h200"]["product"] == (low, high) and high / low == pytest.approx(1.15)
        assert 0.3 < low < high < 0.75
        assert (found["grand-teton-h100"]["product"] == LIMITS["product"]) == bool(apart)
        # One machine of its chip, and the network, which is no chip's.
        assert found["dgx-a100-80g"] == dict(LIMITS) and found["dgx-h100"]["network"] == LIMITS["network"]


def test_what_a_source_leaves_open_widens_an_interval() -> None:
    row = vtrain()[0]
    widths = [
        one.seconds_interval[1] / one.seconds_interval[0]
        for told in ((), ("recompute",))
        for one in forecast([msgspec.structs.replace(row, assumed=told)])[0]
    ]
    assert widths[0] < widths[1]


def test_the_host_is_that_of_the_software() -> None:
    """Attention in steps is of software that issues kernels more slowly: each has its own seconds of a kernel."""
    model = Model.load("gpt", layers=2, hidden=256, heads=4, seq=128, vocab=1000, precision="bf16")
    columns = Configurations.of([Strategy(global_batch=2, attention=kind) for kind in ("unfused", "flash2")])  # pyright: ignore[reportArgumentType]
    usual = ClosedForm(model, TWO, Parameters()).seconds(columns)
    for name, slower in (("eager", 0), ("launch", 1)):
        found = ClosedForm(model, TWO, dataclasses.replace(Parameters(), **{name: 1e-3})).seconds(columns)
        assert found[slower] > 2 * usual[slower] and found[1 - slower] == usual[1 - slower]


def test_keys_and_values_go_round_beside_attention() -> None:
    model = Model.load("llama", layers=4, hidden=1024, heads=8, kv_heads=8, ffn=2816, seq=65536, vocab=32000, batch=1)
    kinds = ("gather", "ring", "zigzag")
    many = [Strategy(context=16, context_kind=kind, global_batch=1) for kind in kinds]  # pyright: ignore[reportArgumentType]
    gather, ring, zigzag = np.array(
        [
            ClosedForm(model, TWO, Parameters(network=n)).seconds(Configurations.of(many))
            for n in (1.0, 0.9, 0.02, 0.01, 0.005)
        ]
    ).T
    assert zigzag[0] < gather[0] < ring[0]  # in the order of the sequence the last device has most pairs
    assert zigzag[1] - zigzag[0] < 0.7 * (gather[1] - gather[0])  # attention hides all but the last cotangents
    # A ring leaves a node over one link, a gather over all; where that is slow it takes what the link does.
    assert zigzag[3] > 5 * gather[3]
    assert zigzag[4] - zigzag[3] == pytest.approx(2 * (zigzag[3] - zigzag[2]), rel=1e-6)


def test_what_runs_beside_products_is_not_hidden_again() -> None:
    """Narrow products have movements beside them: a step is never shorter than without any movement."""
    model = Model.load("llama", layers=4, hidden=1024, heads=8, kv_heads=8, ffn=2816, seq=65536, vocab=32000, batch=1)
    form = ClosedForm(model, TWO, Parameters(network=0.2))
    c = Configurations.of([Strategy(context=16, context_kind="zigzag", global_batch=1, precision="fp8")])
    assert form.work_seconds(c, lambda move: True)[0] >= form.work_seconds(c, lambda move: False)[0]


def test_sequences_above_32k_go_round_where_a_row_does_not_say() -> None:
    row = vtrain()[0]
    cut = msgspec.structs.replace(row.strategy, context=2)
    for seq, said, want in ((8192, None, "ulysses"), (65536, None, "zigzag"), (65536, "gather", "gather")):
        one = msgspec.structs.replace(
            row,
            model=msgspec.structs.replace(row.model, seq=seq),
            strategy=msgspec.structs.replace(cut, context_kind=said),
        )
        assert context_kind_of(one) == want


def test_tokens_go_once_to_each_node() -> None:
    """Over nodes a token goes to those that have experts of its: as many of 4 as 8 of 32 hit, by trial."""
    fields = {
        "layers": 2,
        "hidden": 512,
        "heads": 8,
        "kv_heads": 8,
        "ffn": 512,
        "seq": 2048,
        "vocab": 1000,
        "experts": 32,
    }
    four = Topology.load("dgx-h100", nodes=4)
    seconds: dict[int, float] = {}
    for copies in (1, 8):
        model = Model.load("moe", batch=2, precision="bf16", experts_per_token=copies, dense_layers=0, **fields)
        form = ClosedForm(model, four, Parameters(network=0.05, launch=1e-12))
        c = Configurations.of([Strategy(data=32, expert=32, microbatch=8, global_batch=256)])
        with_them = form.work_seconds(c, lambda move: True)
        seconds[copies] = float((with_them - form.work_seconds(c, lambda move: not {"expert"} & {*move.axes}))[0])
    rng = np.random.default_rng(0)
    hit = np.mean([len({*(rng.permutation(32)[:8] // 8).tolist()}) for _ in range(4000)])
    assert seconds[8] / seconds[1] == pytest.approx(hit / 1.0, rel=0.15)


def test_locked_rows_have_no_measurement_that_a_fit_could_read() -> None:
    locked = read_steps(PUBLISHED / "locked.jsonl")
    told = [json.loads(text) for text in (PUBLISHED / "locked_measured.jsonl").read_text().splitlines()]
    assert [row.id for row in locked] == [one["id"] for one in told]
    assert all(row.measured.seconds_per_step is None and row.measured.oom is None for row in locked)
    known = read_steps(PUBLISHED / "open.jsonl")
    assert not {row.table for row in known} & {row.table for row in locked}
    assert all(row.source and row.notes for row in (*known, *locked))


def test_two_commands_calibrate_a_cluster_of_ones_own(tmp_path: Path) -> None:
    mine, rows, out = tmp_path / "mine.toml", tmp_path / "rows.jsonl", tmp_path / "params.toml"
    mine.write_text(str(dataclasses.replace(Topology.load("dgx-a100-80g"), name="mine")))
    rows.write_bytes(b"\n".join(msgspec.json.encode(on(row, "whatever")) for row in vtrain()[:4]))
    done = CliRunner().invoke(app, ["calibrate", "--steps", str(rows), "--on", str(mine), "--out", str(out)])
    assert done.exit_code == 0, done.output
    assert set(FREE) <= set(parse_fit(out.read_text()).names)
    refused = CliRunner().invoke(app, ["calibrate", "--on", str(mine)])
    assert refused.exit_code and "no file of measurements" in str(refused.exception or refused.output)


def told(row: StepRow, **said: Any) -> StepRow:
    """A row that says other things of its model or strategy."""
    for part in ("model", "strategy"):
        mine = {k: v for k, v in said.items() if hasattr(getattr(row, part), k)}
        row = msgspec.structs.replace(row, **{part: msgspec.structs.replace(getattr(row, part), **mine)})
    return row


def test_rows_say_it_as_frameworks_do() -> None:
    row = msgspec.structs.replace(vtrain()[0], id="ours/1")
    for word, ours in (("recompute_granularity=full", "full"), ("core_attn", "selective"), ("off", "none")):
        assert strategies_of(told(row, recompute=word))[0].recompute == ours
    long = told(row, tensor=1, data=row.strategy.data * row.strategy.tensor // 2, context=2)
    for word, ours in (("a2a", "ulysses"), ("p2p", "zigzag"), ("all_gather", "gather"), ("ring", "ring")):
        assert strategies_of(told(long, context_kind=word))[0].context_kind == ours


@pytest.mark.parametrize(
    ("said", "text"),
    [
        ({"recompute": "mlp"}, "ours/1: recompute 'mlp' is not told here; legal: none, "),
        (
            {"context": 2, "context_kind": "a2a+p2p"},
            r"ours/1: context_kind 'a2a\+p2p' is not told here; legal: ulysses",
        ),
        ({"gated_mlp": True}, "ours/1: a gpt of gated_mlp=True: legal is False, or family llama"),
        ({"kv_heads": 2}, "ours/1: a gpt of kv_heads=2: legal is "),
        ({"family": "moe", "experts": 4, "experts_per_token": 2}, "ours/1: a moe of gated_mlp=False: legal is True"),
    ],
)
def test_what_cannot_be_honoured_is_named(said: dict[str, Any], text: str, tmp_path: Path) -> None:
    """By the rows' reader, and so by the command, which then writes nothing."""
    row = told(msgspec.structs.replace(vtrain()[0], id="ours/1"), **said)
    with pytest.raises(ShardplanError, match=text):
        strategies_of(row)
    rows, out = tmp_path / "rows.jsonl", tmp_path / "params.toml"
    rows.write_bytes(msgspec.json.encode(row))
    done = CliRunner().invoke(app, ["calibrate", "--steps", str(rows), "--on", "dgx-a100-80g", "--out", str(out)])
    assert isinstance(done.exception, ShardplanError) and not out.exists()


def test_a_llama_without_a_gate_has_as_many_parameters() -> None:
    """Two matrices of a width, or three of two thirds of it: parameters, and so operations, are the same."""
    row = on(told(vtrain()[0], family="llama", gated_mlp=False, hidden=1024, heads=16, ffn=6144), "dgx-a100-80g").model
    one = model_of(row)
    gated = model_of(msgspec.structs.replace(row, gated_mlp=True))
    three = ("layers.gate", "layers.up", "layers.down")
    sizes = [sum(math.prod(m.program.types[n].shape) for n in three) for m in (one, gated)]
    assert sizes[0] == row.layers * 2 * 1024 * 6144 and sizes[1] == row.layers * 3 * 1024 * 6144


def test_an_interval_is_no_narrower_than_a_source_is_off() -> None:
    """Of parameters that are known exactly: rows differ by 5 %, and sources by what machines with a chip differ in."""
    fit = shipped_fit("dgx-a100-80g")
    names = (*FREE, *OPEN)
    half: list[float] = []
    for measured in (False, True):
        known = MachineFit(fit.parameters, names, np.zeros((len(names), len(names))), is_measured=measured)
        (one,), _ = forecast([vtrain()[0]], lambda preset, known=known: known)
        half.append(np.log(one.seconds_interval[1] / one.seconds_interval[0]) / 2)
    assert half[0] == pytest.approx(1.645 * RESIDUAL)
    assert half[1] > 1.645 * np.hypot(RESIDUAL, min(APART.values()) / 2)

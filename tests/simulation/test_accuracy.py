"""Rows of measured steps: read strictly, predicted, compared; parameters recovered from rows made with them."""

import dataclasses
import itertools
import json
import math
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import kendalltau
from typer.testing import CliRunner

from shardplan.cli import app
from shardplan.errors import ParseError, ShardplanError
from shardplan.simulation.accuracy.forecast import NORMAL_90, forecast
from shardplan.simulation.accuracy.metrics import coverage, errors, kendall_tau, ranks, regret
from shardplan.simulation.accuracy.step_fitting import Bench, fit_steps, held_out, usable
from shardplan.simulation.accuracy.step_rows import StepRow, read_steps
from shardplan.simulation.accuracy.step_validation import validate_steps
from shardplan.simulation.accuracy.subject import strategies_of, topology_of_row
from shardplan.simulation.closed.chips import APART
from shardplan.simulation.closed.machines import MachineFit, fit_text, machine_fit, parse_fit
from shardplan.simulation.closed.parameters import Parameters

ROWS = Path(__file__).parent.parent / "data" / "steps.jsonl"  # of arXiv 2205.05198 and 2312.12391, as published


def rows() -> list[StepRow]:
    return read_steps(ROWS)


def changed(row: StepRow, part: str, **fields: Any) -> str:
    raw = json.loads(json.dumps(as_object(row)))
    raw[part] |= fields
    return json.dumps(raw)


def as_object(row: StepRow) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(msgspec.json.encode(row))
    return found


def test_a_row_is_read_strictly(tmp_path: Path) -> None:
    first = rows()[0]
    for text, said in (
        (changed(first, "strategy", speed=3), "line 2: Object contains unknown field `speed`"),
        (changed(first, "model", layers="many"), "line 2: Expected `int`, got `str`"),
        ("{", "line 2: Input data was truncated"),
    ):
        path = tmp_path / "rows.jsonl"
        path.write_text(json.dumps(as_object(first)) + "\n" + text + "\n")
        with pytest.raises(ParseError, match=said):
            read_steps(path)
    (tmp_path / "none.jsonl").write_text("\n")
    with pytest.raises(ParseError, match="has no rows"):
        read_steps(tmp_path / "none.jsonl")


def test_the_published_activations_come_out_to_the_digit() -> None:
    """arXiv 2205.05198, figure 1: what layers keep, and 18 bytes a parameter of theirs."""
    figure = [row for row in rows() if row.table == "korthikanti_fig1"]
    found, _ = forecast(figure)
    assert len(figure) == 4
    for row, one in zip(figure, found, strict=True):
        assert one.activation_bytes == pytest.approx(row.measured.activation_bytes, rel=1e-3)
        assert one.parameter_and_optimizer_bytes == pytest.approx(row.measured.parameter_and_optimizer_bytes, rel=2e-3)


def test_nodes_hold_what_divides_the_devices() -> None:
    row = rows()[0].cluster
    for devices, inside, want in ((256, 72, (4, 64)), (4, 8, (1, 4)), (24, 8, (3, 8))):
        one = msgspec.structs.replace(row, preset="gb200-nvl72", devices=devices, devices_per_node=inside)
        assert tuple(level.size for level in topology_of_row(one).levels) == want


def test_unpublished_fields_are_searched_and_told() -> None:
    row = next(row for row in rows() if row.table == "vtrain_single")
    free = msgspec.structs.replace(row, strategy=msgspec.structs.replace(row.strategy, recompute=None, zero=None))
    assert free.unknown == ("recompute", "zero")
    assert len(strategies_of(free)) == 6
    (one,), _ = forecast([free])
    every, _ = forecast(
        [
            msgspec.structs.replace(row, strategy=msgspec.structs.replace(row.strategy, recompute=r, zero=z))
            for r, z in itertools.product(("none", "selective", "full"), (0, 1))
        ]
    )
    assert one.seconds_per_step == pytest.approx(min(f.seconds_per_step for f in every if f.fits))
    assert set(one.assumed) == {"recompute", "zero"}
    verdict = validate_steps([free])
    assert [s.gate for s in verdict.sources] == [False]


@given(st.lists(st.tuples(st.integers(1, 5), st.integers(1, 5)), min_size=2, max_size=9))
@settings(max_examples=100, deadline=None)
def test_tau_is_that_of_scipy(pairs: list[tuple[int, int]]) -> None:
    a, b = np.array(pairs, dtype=float).T
    want = kendalltau(a, b).statistic
    found = kendall_tau(a, b)
    assert (np.isnan(found) and np.isnan(want)) or found == pytest.approx(want)


def test_metrics_by_hand() -> None:
    predicted, measured = np.array([1.1, 2.0, 2.7]), np.array([1.0, 2.0, 3.0])
    found = errors(predicted, measured)
    assert found["mean_error_percent"] == pytest.approx(20 / 3)
    assert found["signed_mean_error_percent"] == pytest.approx(0.0)
    assert found["max_error_percent"] == pytest.approx(10.0)
    assert regret(np.array([3.0, 1.0]), np.array([1.0, 1.5])) == pytest.approx(50.0)
    told = ranks(np.array([1.0, 2.0, 3.0, 9.0]), np.array([2.0, 1.0, 3.0, 1.0]), ["a", "a", "a", "b"])
    assert told["top1_regret_percent"] == pytest.approx(100.0)
    assert told["top2_percent"] == 100.0
    assert told["kendall_tau"] == pytest.approx(1 / 3)
    inside = coverage(np.array([0.9, 1.9]), np.array([1.1, 2.0]), np.array([1.0, 2.1]))
    assert inside["interval_coverage_percent"] == 50.0
    assert inside["interval_half_width_percent"] == pytest.approx((10 + 100 * 0.1 / 3.9) / 2)


def test_a_fit_recovers_what_rows_were_made_with() -> None:
    """Seconds of other parameters, with a spread of 2 %: within three of the deviations that the fit states."""
    mine = [row for row in rows() if row.table.startswith("vtrain")]
    true = Parameters(product=0.6, stream=0.5, launch=4e-5, network=0.5)
    seconds = Bench(mine).seconds(true) * np.exp(np.random.default_rng(3).normal(0, 0.02, len(mine)))
    made = [
        msgspec.structs.replace(row, measured=msgspec.structs.replace(row.measured, seconds_per_step=float(s)))
        for row, s in zip(mine, seconds, strict=True)
    ]
    free = ("product", "stream", "launch")
    found = fit_steps(made, free, dataclasses.replace(Parameters(), network=0.5))
    wide = np.sqrt(np.diag(found.machine.covariance))
    for name, deviation in zip(free, wide, strict=True):
        got, want = getattr(found.machine.parameters, name), getattr(true, name)
        assert abs(np.log(got / want)) < 3 * deviation + 0.05, name
    assert found.residual < 0.03
    with pytest.raises(ShardplanError, match="no row to fit to"):
        fit_steps([])
    with pytest.raises(ShardplanError, match="free=speed; legal are at most six"):
        fit_steps(made, ("speed",))


def test_groups_are_held_out_whole() -> None:
    found: dict[Any, set[bool]] = {}
    for row in rows():
        found.setdefault(row.group, set()).add(held_out(row, 1, 2))
    assert all(len(said) == 1 for said in found.values())
    assert {*itertools.chain(*found.values())} == {True, False}


def test_what_does_nothing_in_a_row_is_left_out_and_named() -> None:
    """And the prediction is that of a row which does not say it; what does something stays."""
    row = next(row for row in rows() if row.table == "vtrain_single" and row.strategy.data == 1 < row.strategy.tensor)
    fields: dict[str, Any] = {"data": 1, "tensor": 1, "pipeline": 1, "global_batch": 8, "microbatch": 1}
    cluster = {"devices": 1, "devices_per_node": 1}

    def told(**more: Any) -> StepRow:
        raw = json.loads(changed(row, "strategy", **fields, **more))
        return msgspec.json.decode(json.dumps(raw | {"cluster": raw["cluster"] | cluster}), type=StepRow)

    idle = {"sequence_parallel": True, "zero": 1, "expert": 4, "tensor_overlap": True}
    plain = {"sequence_parallel": False, "zero": 0, "expert": 1, "tensor_overlap": False}
    (with_them, without), skipped = forecast([told(**idle), told(**plain)])
    assert not skipped
    assert with_them.dropped == idle and without.dropped == {}
    assert with_them == dataclasses.replace(without, dropped=idle)


def test_an_interval_is_wider_where_a_parameter_is_open() -> None:
    row = next(row for row in rows() if row.table == "vtrain_single")
    shipped = machine_fit("dgx-a100-80g")
    sure = MachineFit(shipped.parameters)
    open_ = MachineFit(shipped.parameters, ("product",), np.array([[0.04]]))
    widths: list[float] = []
    for fit in (sure, open_):
        (one,), _ = forecast([row], lambda preset, fit=fit: fit)
        low, high = one.seconds_interval
        assert low < one.seconds_per_step < high
        widths.append(high / low)
    assert widths[0] < widths[1]


def test_a_source_that_nobody_fitted_to_is_another_machine_with_the_chip() -> None:
    """Its variance is above that of a machine like others by what each parameter's difference makes of the seconds."""
    row = next(row for row in rows() if row.table == "vtrain_single")
    parameters = machine_fit("dgx-a100-80g").parameters

    def predicted(fit: MachineFit) -> tuple[float, float]:
        (one,), _ = forecast([row], lambda preset: fit)
        return one.seconds_per_step, math.log(one.seconds_interval[1] / one.seconds_per_step) / NORMAL_90

    variances = [predicted(MachineFit(parameters, is_measured=known))[1] ** 2 for known in (True, False)]
    more = 0.0
    for name, apart in APART.items():
        ends = [predicted(MachineFit(dataclasses.replace(parameters, **{name: getattr(parameters, name) * factor})))[0]
                for factor in (math.exp(1e-3), math.exp(-1e-3))]  # fmt: skip
        more += (math.log(ends[0] / ends[1]) / 2e-3 * apart) ** 2
    assert more > 1e-3
    assert variances[0] - variances[1] == pytest.approx(more, rel=0.02)


def test_a_file_of_parameters_parses_back() -> None:
    shipped = machine_fit("dgx-a100-80g")
    text = fit_text("dgx-a100-80g", "rows", shipped, {"rows": 3})
    again = parse_fit(text)
    assert again.parameters == shipped.parameters and again.names == shipped.names
    assert np.allclose(again.covariance, shipped.covariance, rtol=1e-3)


@pytest.mark.parametrize(
    ("fit", "message"),
    [
        ("fit = 1", "parameters: fit is 1; legal is a table"),
        ("[fit]\nnames = 3", "parameters: fit.names is 3; legal are some of product, "),
        (
            '[fit]\nnames = ["product"]\ncovariance = []',
            "parameters: fit.covariance has 0 rows; legal are 1, one a name",
        ),
        (
            '[fit]\nnames = ["product"]\ncovariance = [[1.0, 2.0]]',
            "parameters: fit.covariance is [[1.0, 2.0]]; legal are",
        ),
        ('[fit]\nnames = ["product"]\ncovariance = [["x"]]', "parameters: fit.covariance has 'x'; legal are finite"),
        ('[fit]\nnames = ["product"]\ncovariance = [[nan]]', "parameters: fit.covariance has nan; legal are finite"),
    ],
)
def test_fits_that_are_refused(fit: str, message: str) -> None:
    with pytest.raises(ShardplanError) as error:
        parse_fit(f"parameters = {{}}\n{fit}\n")
    assert str(error.value).startswith(message)


def test_the_commands() -> None:
    run = CliRunner()
    found = run.invoke(app, ["validate", str(ROWS), "--json"])
    assert found.exit_code == 0, found.output
    said = json.loads(found.stdout)
    assert {"rows", "sources", "skipped", "predicted_not_to_fit", "assumed", "predictions"} == said.keys()
    assert said["rows"] == len(said["predictions"]) == len(rows())
    first = said["predictions"][0]
    assert first["seconds_interval"][0] < first["seconds_per_step"] < first["seconds_interval"][1]
    assert run.invoke(app, ["validate", str(ROWS), "--gate", "0.01"]).exit_code == 1
    assert run.invoke(app, ["validate", str(ROWS), "--gate", "90"]).exit_code == 0
    told = run.invoke(app, ["validate", str(ROWS), "--explain", rows()[0].id])
    assert told.exit_code == 0 and "90 % between" in told.stdout
    for option in ("--explain", "--source"):
        assert isinstance(run.invoke(app, ["validate", str(ROWS), option, "nothing"]).exception, ShardplanError)


def test_calibrate_writes_what_validate_reads(tmp_path: Path) -> None:
    run, out = CliRunner(), tmp_path / "machine.toml"
    found = run.invoke(app, ["calibrate", str(ROWS), "--machine", "dgx-a100-80g", "--out", str(out)])
    assert found.exit_code == 0, found.output
    assert "parameters of dgx-a100-80g" in found.stdout
    assert run.invoke(app, ["validate", str(ROWS), "--params", str(out)]).exit_code == 0
    assert isinstance(run.invoke(app, ["calibrate", str(ROWS), "--machine", "abacus"]).exception, ShardplanError)
    assert all(usable(row) for row in rows() if row.table == "vtrain_single")

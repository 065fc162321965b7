"""What a step's price has of kernels, rings, cuts and memory, in cases where it is known; fits, bases, open numbers."""

import dataclasses
from pathlib import Path

import msgspec
import numpy as np
import pytest
from benchmarks.step_accuracy import intervals, left_out, memory_said, predicted
from benchmarks.step_numbers import number_table, unlisted

from shardplan import Model, Strategy, Topology
from shardplan.simulation.accuracy.calibration import fit_machines
from shardplan.simulation.accuracy.forecast import OPEN, spread
from shardplan.simulation.accuracy.step_fitting import PRIOR, Bench, minimized
from shardplan.simulation.accuracy.step_rows import read_steps
from shardplan.simulation.closed.chunk_kinds import layers_of
from shardplan.simulation.closed.configurations import Configurations
from shardplan.simulation.closed.form import ClosedForm
from shardplan.simulation.closed.machines import MachineFit, fit_text, machine_fit, parse_fit
from shardplan.simulation.closed.parameters import Parameters

BOX = Topology.load("dgx-a100-80g", nodes=2)
ROWS = Path(__file__).parent.parent / "data" / "steps.jsonl"


def gpt(heads: int = 16, hidden: int = 1024, **fields: int) -> Model:
    said = {"layers": 4, "seq": 1024, "vocab": 4096} | fields
    return Model.load("gpt", heads=heads, hidden=hidden, batch=2, precision="bf16", **said)


def seconds(model: Model, parameters: Parameters | None = None, **fields: object) -> float:
    one = Strategy(**({"attention": "unfused", "recompute": "full"} | fields))  # pyright: ignore[reportArgumentType]
    return float(ClosedForm(model, BOX, parameters or Parameters()).seconds(Configurations.of([one]))[0])


def test_what_is_before_and_behind_counts_as_layers_where_that_divides() -> None:
    assert layers_of((70,), 12)[0].tolist() == [5, *[6] * 10, 5]
    assert layers_of((126,), 16)[0].tolist() == [7, *[8] * 14, 7]
    assert layers_of((78,), 12)[0].tolist() == [*[7] * 11, 1]
    assert layers_of((72,), 12)[0].tolist() == [6] * 12
    assert layers_of((3, 67), 12).sum(axis=1).tolist() == [3, 67, 1, 1]


def test_a_step_is_longer_where_a_heads_size_is_no_multiple_of_8() -> None:
    """Sizes 56, 64 and 72 follow one line; 60 and 68, between them, are far above it."""
    at = {d: seconds(gpt(hidden=16 * d)) for d in (56, 60, 64, 68, 72)}
    assert at[64] == pytest.approx((at[56] + at[72]) / 2, rel=0.01)
    assert at[60] > 1.1 * (at[56] + at[64]) / 2 and at[68] > 1.1 * (at[64] + at[72]) / 2
    fused = {d: seconds(gpt(hidden=16 * d), attention="flash2") for d in (60, 64)}
    assert fused[60] < fused[64]


def test_a_softmax_in_steps_costs_the_host_more_kernels() -> None:
    """On eight devices a microbatch of one has two heads, no block of the fused softmax; two of them have."""
    slow = Parameters(eager=1e-3, stream=1.0)
    apart, fused = (
        seconds(gpt(), slow, tensor=8, microbatch=m, global_batch=16) * m for m in (1, 2)
    )  # as many kernels each, twice as many microbatches
    extra = (4 + 4 + 4) * 1e-3 * 4 * 16  # forward, repeated and back, of 4 layers and 16 microbatches
    assert apart - fused == pytest.approx(extra, rel=0.05)


def test_offloaded_layers_hold_nothing() -> None:
    form = ClosedForm(gpt(layers=8), BOX, Parameters())
    columns = Configurations.of([Strategy(attention="flash2", offload_layers=n) for n in (0, 4, 8)])
    none, half, every = form(columns).peak_bytes
    assert none - half == pytest.approx(half - every) and none > half
    assert (form(columns).floor_bytes <= form(columns).peak_bytes).all()


def test_where_state_alone_is_dealt_out_gradients_were_summed_whole() -> None:
    """An all-reduce and a gather of parameters as wide: half as much again as the all-reduce; nothing else counts."""
    box = dataclasses.replace(BOX, library="ring", device=dataclasses.replace(BOX.device, launch=0.0))
    form = ClosedForm(gpt(), box, Parameters(stream=1e9))
    several = [
        Strategy(data=8, global_batch=8, attention="unfused", zero=z, precision="bf16", gradient_dtype="bf16")
        for z in (0, 1)
    ]
    whole, dealt = form(Configurations.of(several)).parts["once"]
    assert dealt == pytest.approx(1.5 * whole, rel=1e-6)


def test_a_fit_stays_within_bounds_and_goes_on_along_them() -> None:
    """Residuals x + y - 3 and y - 2 x: with x at most 0.5 the least is at y = 1.75, which naive clipping misses."""

    def residuals(x: np.ndarray) -> np.ndarray:
        return np.array([x[0] + x[1] - 3, x[1] - 2 * x[0]]) * 1e-3

    low, high = np.array([-5.0, -5.0]), np.array([0.5, 5.0])
    x, _ = minimized(residuals, np.ones(2) * 1e6, np.zeros(2), np.zeros(2), low, high, np.full(2, PRIOR))
    assert x[0] == 0.5 and x[1] == pytest.approx(1.75, abs=1e-3)


def test_a_machine_with_a_base_has_its_network_alone() -> None:
    before, base = machine_fit("jean-zay-a100-80g-before"), machine_fit("jean-zay-a100-80g")
    assert before.base == "jean-zay-a100-80g"
    assert dataclasses.replace(before.parameters, network=base.parameters.network) == base.parameters
    assert before.parameters.network < base.parameters.network
    assert parse_fit(fit_text("x", "rows", before, {})).base == before.base


def test_a_machine_with_a_base_keeps_all_but_its_network() -> None:
    """Rows of another machine under the name of one that has a base: fitted are the base and one number."""
    rows = [row for row in read_steps(ROWS) if row.table == "vtrain_single"][:6]
    moved = [
        msgspec.structs.replace(row, cluster=msgspec.structs.replace(row.cluster, preset="jean-zay-a100-80g-before"))
        for row in rows
    ]
    found = fit_machines(moved)["jean-zay-a100-80g-before"]
    base = machine_fit("jean-zay-a100-80g")
    assert dataclasses.replace(found.parameters, network=base.parameters.network) == base.parameters
    assert found.names == base.names and found.base == "jean-zay-a100-80g"


def test_an_interval_holds_what_is_open_of_all_machines() -> None:
    form = ClosedForm(gpt(hidden=256), BOX, Parameters())
    columns = Configurations.of([Strategy(microbatch=m, global_batch=8, attention="unfused") for m in (1, 8)])
    sure = spread(form, columns, MachineFit(Parameters()))
    known = spread(form, columns, MachineFit(Parameters(), tuple(OPEN), np.zeros((2, 2))))
    assert (sure > 0.001).all() and (known == 0).all()


def test_the_benchmark_on_the_rows_that_ship() -> None:
    rows = [row for row in read_steps(ROWS) if row.table != "korthikanti_fig1"]
    fits = fit_machines(rows)
    pairs = predicted(rows, fits)
    assert len(pairs) == len(rows)
    each, together = intervals(pairs)
    assert (
        sum(one["count"] for one in each) == together["count"] == len([r for r in rows if r.measured.seconds_per_step])
    )
    assert -1 <= together["spearman of width and error"] <= 1
    assert memory_said(pairs)["falsely said not to fit"] == []
    groups = left_out(rows, 1)
    assert all(group["regret"] >= 0 and -1 <= group["tau"] <= 1 for group in groups)
    measured = Bench(rows).measured
    assert np.isfinite(measured).all()


def test_every_number_of_the_cost_is_in_the_table() -> None:
    assert unlisted() == []
    assert {"product", "half", "order", "EXPOSED", "RESIDUAL"} <= {row["name"] for row in number_table()}
    assert all(row["origin"] for row in number_table())

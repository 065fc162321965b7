"""The pass: what is fused, what is not and why, in programs and in jobs; and what the simulator makes of it."""

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import shardplan as sp
from core.test_fused import BAGS, EXPERTS, GATHER, GEMV, LAYERS, REFUSED, SCATTER, ULYSSES, assert_alike
from execution.fused_cases import EAGER, box, recommender
from shardplan.core.fusing import decompose_fused
from shardplan.core.nested import as_nested
from shardplan.core.program import Program
from shardplan.core.step import Step
from shardplan.errors import BackendError, ShardplanError, TopologyError
from shardplan.fused.deciding.calibrate import LEARNT, choose_clock, fit_constants, pair_work
from shardplan.fused.deciding.fuse import fuse
from shardplan.fused.deciding.rows import REASONS, Fusion, FusionRow
from shardplan.fused.deciding.trials import Shape, measure_trials, shape_work, slower_rank
from shardplan.hardware.prices.fused import FusedConstants, variant_seconds, variants
from shardplan.hardware.prices.fused_kernels import KernelConstants, KernelRates
from strategy.jobs import arrays, model, stepped

# Compute-bound on a fast network: nothing pays.
SLOW_TILES = FusedConstants("shm", 0, 1e15, 1e15, 1e-3, ((1, 1.0), (2, 2.0)), source="made up")
NODES = sp.Topology.parse(
    'name = "two nodes"\n[device]\nmemory = "1 kB"\n'
    '[[levels]]\nname = "node"\nsize = 2\nlink = "switch"\nbandwidth = "1 GB/s"\nlatency = "5 us"\n'
    '[[levels]]\nname = "gpu"\nsize = 4\nlink = "switch"\nbandwidth = "9 GB/s"\nlatency = "1 us"\n'
)


def one_row(text: str, where: sp.Topology | None = None, constants: FusedConstants | None = EAGER) -> FusionRow:
    program = Program.parse(text)
    found = fuse(program, where or box(max(program.devices) + 1), constants)
    (row,) = found.rows
    assert (found.program == program) is not row.is_fused
    return row


@pytest.mark.parametrize("text", [EXPERTS, ULYSSES, GEMV, BAGS, LAYERS, GATHER, SCATTER])
def test_what_pays_is_fused_and_means_the_same(text: str) -> None:
    program = Program.parse(text)
    found = fuse(program, box(program.devices[-1] + 1), EAGER)
    (row,) = found.rows
    assert row.is_fused and row.choice != "unfused" and row.best_seconds == row.seconds[row.choice]
    assert row.best_seconds is not None and row.unfused_seconds is not None
    assert row.best_seconds <= 0.95 * row.unfused_seconds
    assert_alike(program, found.program)
    assert_alike(program, decompose_fused(found.program))
    assert fuse(found.program, box(program.devices[-1] + 1), EAGER).rows == ()


# A product of what is gathered, whose sum is cut: of two pairs one takes the product.
BOTH = """program
  mesh x=2, t=2
  input %a: f32[8@x, 6@t]
  input %b: f32[6@t, 2]
  %g = all_gather(%a; dim=0, axes=(x)): f32[8, 6@t]
  %z = einsum(%g, %b; spec="mk,kn->mn"): f32[8, 2]{+t}
  %y = reduce_scatter(%z; dim=0, axes=(t)): f32[8@t, 2]
  output %y"""


def test_of_two_pairs_with_one_product_that_which_saves_more_is_fused() -> None:
    program = Program.parse(BOTH)
    found = fuse(program, box(4), EAGER)
    assert [(row.place, row.op, row.reason) for row in found.rows] == [
        ("1", "all_gather_gemm", "fused"),
        ("2", "gemm_reduce_scatter", "taken"),
    ]
    assert found.rows[1].blocked == "step 1" and found.rows[1].choice == "unfused"
    assert_alike(program, found.program)
    # The sum is the larger one of wide columns.
    wide = Program.parse(BOTH.replace(", 2]", ", 50]"))
    found = fuse(wide, box(4), EAGER)
    assert [row.reason for row in found.rows] == ["taken", "fused"]
    assert_alike(wide, found.program)


def test_addends_of_half_precision_are_priced_as_they_are_sent() -> None:
    """A sum of bf16 sends f32: twice the bytes of the collective, in which half the gain is lost."""
    whole = SCATTER.replace("f32[6, 9@x]", "f32[600, 9@x]").replace("f32[6, 2]", "f32[600, 2]").replace("6@x", "600@x")
    rows = [one_row(whole.replace("f32", dtype)) for dtype in ("f32", "bf16")]
    unfused, fused = ([getattr(row, f"{way}_seconds") for row in rows] for way in ("unfused", "best"))
    assert unfused[1] == pytest.approx(unfused[0] / 2, rel=1e-2)
    assert fused[1] == pytest.approx(fused[0], rel=1e-2)


def reasons() -> dict[str, FusionRow]:
    """A row of each reason that programs have."""
    found = {reason: one_row(text) for reason, (text, _, _) in REFUSED.items()}
    found["fused"] = one_row(EXPERTS)
    found["not_faster"] = one_row(EXPERTS, constants=SLOW_TILES)
    across = Program.parse(EXPERTS)
    mesh = sp.Mesh({"x": 2}, devices=(0, 4))
    moved = Program.parse(str(across).replace("mesh x=2", f"mesh {mesh}"))
    found["no_peer_access"] = one_row(str(moved), NODES)
    found["unknown_group"] = one_row(GEMV, box(2))
    found["taken"] = fuse(Program.parse(BOTH), box(4), EAGER).rows[1]
    found["memory"] = one_row(EXPERTS.replace("4,", "40,").replace("4@x", "40@x"), NODES)
    return found


def test_every_reason_is_given_and_names_what_blocks() -> None:
    found = reasons()
    assert set(found) == set(REASONS)
    for reason, row in found.items():
        assert row.reason == reason, str(row)
        assert (row.choice == "unfused") == (reason != "fused")
        assert bool(row.blocked) == (reason not in ("fused", "not_faster")), str(row)
        assert row.nbytes > 0 and row.types and row.source
    assert found["no_peer_access"].text.startswith("its groups cross the level node")
    assert found["several_users"].blocked.startswith("step 0 (einsum(%a, %b;")
    assert found["effect_between"].blocked.startswith("step 1 (elementwise(%z;")


def test_slots_lie_beside_what_the_program_holds() -> None:
    def with_memory(nbytes: int) -> FusionRow:
        where = box(2)
        return one_row(EXPERTS, replace(where, device=replace(where.device, memory=nbytes)))

    need, held = (int(n) for n in re.findall(r"(\d+) B ", with_memory(1).text)[:2])
    assert held > 0
    assert with_memory(need + held).is_fused
    said = with_memory(need + held - 1)
    assert said.text == f"{need} B for 2 slots beside {held} B of the program; the device has {need + held - 1} B"
    assert (said.reason, said.choice) == ("memory", "unfused")


def test_what_is_saved_is_the_sum_over_what_was_fused() -> None:
    program = Program.parse(LAYERS)
    found = fuse(program, box(program.devices[-1] + 1), EAGER)
    (row,) = found.rows
    assert row.unfused_seconds is not None and row.best_seconds is not None
    assert found.saved_seconds == row.unfused_seconds - row.best_seconds > 0
    other = replace(row, reason="not_faster", choice="unfused")
    assert Fusion(program, (row, other, row), "").saved_seconds == 2 * found.saved_seconds


# What a made-up machine takes: the pings, and of each kind its kernels and what the transport has of its own.
PINGS = [(64, 2e-6), (1 << 20, 2e-6 + (1 << 20) / 5e9), (1 << 22, 2e-6 + (1 << 22) / 5e9)]
OWN = (4e10, 5e9, 1e10)  # bandwidth, of copies, of results
TAX = ((1, 1.0), (2, 1.01))
MACHINE = FusedConstants(
    "shm", 2e-6, 5e9, 8e9, 2e-6,
    kernels=(
        KernelConstants("product", KernelRates(1e-5, 1e11), None, 2e-5, *OWN, 1e-5, TAX),
        KernelConstants("vector", KernelRates(0.0, reads=2e10), KernelRates(1e-5, reads=1e10), 3e-5, *OWN, 2e-5, TAX),
        KernelConstants("bags", KernelRates(1e-5, reads=1e10), KernelRates(0.0, reads=8e9), 1e-4, *OWN, 1e-6, TAX),
    ),
)  # fmt: skip


def machine_seconds(shape: Shape) -> dict[str, float]:
    """What the made-up machine takes for the variants of a shape."""
    kernel = MACHINE.kernel(shape[0])
    assert kernel is not None
    library, own = kernel.seconds(*shape_work(shape))
    work, constants = pair_work(shape, (library, own)), MACHINE.of_kind(shape[0])
    found = {str(way): float(variant_seconds(work, way, constants)) for way in variants(shape[0] == "vector")}
    return found | {"kernel": own} | ({} if kernel.library is None else {"library": library})


def test_a_calibration_finds_what_times_were_made_of() -> None:
    """Of times that the price itself gives, the seconds of other shapes are those of the true constants."""
    found = fit_constants([(shape, machine_seconds(shape)) for shape in LEARNT], PINGS, "made up (")
    assert found.latency == pytest.approx(2e-6)
    assert found.bandwidth == pytest.approx(5e9, rel=1e-3)
    for shape in (("product", (512, 1024, 128)), ("bags", (4, 2048, 3, 96)), ("vector", (4096, 640))):
        kernel, wanted = found.kernel(shape[0]), machine_seconds(shape)
        assert kernel is not None
        work, constants = pair_work(shape, kernel.seconds(*shape_work(shape))), found.of_kind(shape[0])
        for way in variants(shape[0] == "vector"):
            assert float(variant_seconds(work, way, constants)) == pytest.approx(wanted[str(way)], rel=0.1), (
                shape,
                way,
            )
    # Of the product there is one kernel, and it is as fast as itself.
    assert found.source.startswith("made up (; efficiency against the library: product 1.00, vector ")


def test_where_neighbours_stretch_the_wall_the_thread_counts() -> None:
    alone = [{"kernel": [(1.0, 0.99)], "unfused": [(2.0, 1.9)]}]
    beside = [{"kernel": [(1.0, 0.99)], "unfused": [(9.0, 1.9)], "fused n=1": [(8.0, 1.9)]}]
    assert choose_clock(alone) == (0, "wall time")
    assert choose_clock(beside) == (1, "thread time")


def test_a_failed_process_of_a_calibration_is_said() -> None:
    with pytest.raises(BackendError, match=r"calibrate: a process ended: ValueError: \('products', "):
        measure_trials([("products", (1, 1, 1))], 1)


def test_a_transport_between_nodes_may_cross_them() -> None:
    mesh = sp.Mesh({"x": 2}, devices=(0, 4))
    text = EXPERTS.replace("mesh x=2", f"mesh {mesh}")
    assert one_row(text, NODES, replace(EAGER, backend="net")).is_fused


def test_nothing_to_fuse_is_said() -> None:
    program = Program.parse("program\n  mesh x=2\n  input %a: f32[4@x]\n  output %a")
    found = fuse(program, box(2))
    assert found.rows == () and found.program is program
    assert str(found).startswith("no candidates: nowhere does an all-to-all or a sum follow a product")


def test_without_a_calibration_the_rows_say_so() -> None:
    found = fuse(Program.parse(EXPERTS), box(2))
    assert found.rows[0].source == found.source == "the topology's figures (one box), not calibrated"
    assert fuse(Program.parse(EXPERTS), box(2), EAGER).source == "made up"


def test_rows_are_printed_and_are_json(tmp_path: Path) -> None:
    (tmp_path / "c.toml").write_text(str(EAGER))
    found = fuse(Program.parse(EXPERTS), box(2), tmp_path / "c.toml")
    said = json.loads(json.dumps(found.to_dict()))
    assert said["rows"][0]["seconds"]["unfused"] == pytest.approx(0.44, rel=1e-3)
    assert said["saved_seconds"] == pytest.approx(0.4, rel=1e-3)
    assert "40 B  440 ms unfused, 40 ms fused  fused n=1 (fused)" in str(found)
    assert found.summary == "1 candidate: 1 fused; constants: made up"


def test_other_values_are_refused() -> None:
    program = Program.parse(EXPERTS)
    with pytest.raises(ShardplanError, match="the placement is None; legal are a placement, a topology"):
        fuse(program, None)  # type: ignore[arg-type]
    with pytest.raises(ShardplanError, match="fuse of 3; legal is a Program"):
        fuse(3, box(2))  # type: ignore[type-var]
    with pytest.raises(TopologyError, match="calibration is 3; legal are FusedConstants, the path of a file, or None"):
        fuse(program, box(2), 3)  # type: ignore[arg-type]


def test_the_simulator_prices_a_fused_op_as_the_row_says() -> None:
    for text in (EXPERTS, GEMV, BAGS, GATHER, SCATTER):
        program, where = Program.parse(text.replace("f32", "bf16")), sp.Topology.load("dgx-a100", nodes=1)
        big = Program.parse(str(program).replace("4, 3", "4, 3"))
        found = fuse(big, where)
        row = found.rows[0]
        forced = fuse(big, where, EAGER)
        assert forced.rows[0].is_fused
        line = sp.simulate(forced.program, where)
        assert line.seconds > 0
        assert min(s for way, s in row.seconds.items() if way != "unfused") <= line.seconds * (1 + 1e-9)


def test_large_products_are_overlapped_in_the_simulator() -> None:
    text = EXPERTS.replace("4, 3]", "8192, 1024]").replace("3, 5]", "1024, 4096]").replace("4, 5]", "8192, 4096]")
    program = Program.parse(text.replace("4@x, 5]", "8192@x, 4096]").replace("f32", "bf16"))
    where = sp.Topology.load("dgx-a100", nodes=1)
    found = fuse(program, where)
    (row,) = found.rows
    assert row.is_fused and row.unfused_seconds is not None and row.best_seconds is not None
    before, after = (sp.simulate(p, where).seconds for p in (program, found.program))
    assert after == pytest.approx(row.best_seconds)
    assert after < 0.95 * before
    assert sp.simulate(found.program, where).peak_bytes > 0


def test_jobs_are_fused_program_by_program_and_simulated() -> None:
    strategy = sp.Strategy(data=2, expert=2, global_batch=4)
    job = sp.partition(model("moe", optimizer="sgd", dtype="f32"), strategy)
    found = fuse(job, box(2), EAGER)
    assert isinstance(found, Fusion)
    assert [(row.place, row.reason) for row in found.rows] == [("0F 3.19", "fused"), ("0B 10.12", "effect_between")]
    names = {step.op.name for program in found.program.programs.values() for step in _steps(program)}
    assert "gemm_all_to_all" in names
    assert fuse(job, box(2), SLOW_TILES).program.programs[0, "F"] == job.programs[0, "F"]
    times = [sp.simulate(one, box(2)).seconds for one in (job, found.program)]
    # Without work to hide the move of 384 bytes, each of the four runs takes a signal of 1 us more.
    assert times[1] - times[0] == pytest.approx(4e-6, rel=0.1)


def test_a_step_of_the_recommender_of_partition_is_fused() -> None:
    """Bags and their all-to-all: nothing of them is saved for the way back, which reads the joint value alone."""
    strategy = sp.Strategy(data=2, expert=2, global_batch=4)
    job = sp.partition(model("dlrm", optimizer="sgd", dtype="f32"), strategy)
    found = fuse(job, box(2), EAGER)
    assert [(row.op, row.reason) for row in found.rows] == [
        ("gemm_all_to_all", "several_users"),  # what a ReLU and its gradient read
        ("embedding_bag_all_to_all", "fused"),
        ("gemm_all_to_all", "effect_between"),
    ]
    assert not [t for t in job.programs[0, "F"].output_types if t.shape[1:] == (1, 8)]
    for key, program in found.program.programs.items():
        apart = decompose_fused(program)
        assert apart.output_types == job.programs[key].output_types
        assert len(apart.steps) == len(job.programs[key].steps)
    big = job.model.resize(batch=4)
    given = {n: x.astype(np.float32) if x.dtype == np.float64 else x for n, x in arrays(big, big.program).items()}
    want, got = stepped(job, given), stepped(found.program, given)
    assert want.keys() == got.keys() and {"gradient.tables.0", "loss"} < {*want}
    for name, x in want.items():
        np.testing.assert_array_equal(got[name], x)


def _steps(program: Program) -> Iterator[Step]:
    for step in program.steps:
        yield step
        op = as_nested(step.op)
        if op is not None:
            yield from _steps(op.body)


@settings(deadline=None, max_examples=20)
@given(st.integers(1, 3), st.sampled_from([EXPERTS, ULYSSES, GEMV, BAGS, LAYERS, GATHER]), st.booleans())
def test_fusing_a_program_of_several_keeps_its_results(copies: int, text: str, eager: bool) -> None:
    """Copies of a program one after another in one: some fused, or none."""
    one = Program.parse(text)
    steps: list[Step] = []
    for k in range(copies):
        names = {n: n for n, _ in one.inputs}
        for step in one.steps:
            names |= {r: f"{r}.{k}" for r in step.results}
            given, made = (tuple(names[n] for n in side) for side in (step.operands, step.results))
            steps.append(replace(step, operands=given, results=made))
    program = Program(one.inputs, steps, [f"{o}.{k}" for k in range(copies) for o in one.outputs])
    found = fuse(program, box(program.devices[-1] + 1), EAGER if eager else SLOW_TILES)
    assert [row.is_fused for row in found.rows] == [eager] * copies
    assert_alike(program, found.program)
    assert decompose_fused(found.program).output_types == program.output_types


def test_a_step_of_a_recommender_is_fused_forward() -> None:
    program = recommender()
    found = fuse(program, box(2), EAGER)
    assert [row.reason for row in found.rows] == ["fused", "effect_between"]
    assert_alike(program, found.program)


def test_of_two_ranks_the_slower_counts_and_operands_are_read_once() -> None:
    found = slower_rank([{"a": [(1.0, 5.0), (4.0, 4.0)]}, {"a": [(2.0, 3.0), (1.0, 1.0)]}])
    assert found == {"a": [(2.0, 5.0), (4.0, 4.0)]}
    assert shape_work(("product", (2, 3, 5))) == (2.0 * 2 * 3 * 5, 4.0 * (2 * 5 + 5 * 3), 4.0 * 2 * 3)

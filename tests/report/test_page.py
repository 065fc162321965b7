"""Reports: one file with nothing loaded from elsewhere, whose figures plotly takes and a browser draws."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

import shardplan as sp
from shardplan.cli import app
from shardplan.launches.handover.handed_plan import HandedPlan
from shardplan.report.page.figures import STEPS, alternatives_figure, drawn_ranks, exposed_shares, timeline_figure
from shardplan.report.page.page import PagePart, render_page
from shardplan.report.page.plan_page import placed_markup
from shardplan.simulation.jobs.job_timeline import simulate_job
from shardplan.simulation.jobs.spans import joined, length, uncovered_stretches
from shardplan.simulation.jobs.timing import COMPUTE
from shardplan.simulation.searching.plans import RankedPlan
from shardplan.simulation.simulate import simulate
from simulation.jobs.job_cases import CLUSTER, job

pytest.importorskip("plotly")
MOST = 6_000_000  # bytes of a report
CHROMIUM = next((p for p in map(shutil.which, ("chromium", "chromium-browser", "google-chrome")) if p), None)
RUNNER = CliRunner()


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A report of every command that writes one, by name."""
    folder = tmp_path_factory.mktemp("reports")
    config = {"model_type": "llama", "num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 4,
              "num_key_value_heads": 4, "intermediate_size": 48, "vocab_size": 64, "max_position_embeddings": 64,
              "rms_norm_eps": 1e-5, "rope_theta": 1e4, "tie_word_embeddings": False}  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    kinds = {
        "search": ["plan", "gpt2", "--on", "dgx-h100", "--nodes", "1", "--batch", "16"],
        "wide": ["plan", "llama3-8b,layers=8", "--on", "dgx-h100", "--nodes", "64", "--batch", "512", "--fit",
                 "tp=8 pp=8 sp zero=1"],
        "move": ["redistribute", "f32[64@data, 48@tensor]", "f32[64@tensor, 48]", "--mesh", "data=4,tensor=2"],
        "audit": ["audit", "--mesh", "data=4,tensor=8", "--topology", "dgx-h100", "--nodes", "4", "--rank-order",
                  "cyclic"],
        "refit": ["refit", "megatron-llama,tensor=4", "vllm-llama,tensor=2", "--config", str(folder / "config.json")],
    }  # fmt: skip
    found: dict[str, Path] = {}
    for name, asked in kinds.items():
        found[name] = folder / f"{name}.html"
        told = RUNNER.invoke(app, [*asked, "--report", str(found[name])])
        assert told.exit_code == 0, (told.output, told.exception)
    return found


def figures(page: str) -> list[dict[str, Any]]:
    return [json.loads(x.replace("<\\/", "</")) for x in
            re.findall(r'<script type="application/json"[^>]*>(.*?)</script>', page, re.S)]  # fmt: skip


def test_nothing_is_loaded_from_elsewhere_and_plotly_takes_the_figures(reports: dict[str, Path]) -> None:
    import plotly.graph_objects as go  # pyright: ignore

    for name, path in reports.items():
        page = path.read_text()
        assert len(page.encode()) < MOST, name
        own = re.sub(r"<script>.*?</script>", "", page, flags=re.S)  # plotly's own text names addresses
        assert not re.search(r"""(?:src|href)\s*=\s*["'](?!#|data:)|@import|url\((?!#)""", own), name
        assert page.count("<script>") in (0, 2), name
        for spec in figures(page):
            go.Figure(spec)
    assert re.findall(r"<h2>(.*?)</h2>", reports["refit"].read_text()) == ["Plan", "Bytes by rank", "Parameters"]
    (by_rank,) = figures(reports["refit"].read_text())
    sent, received = ([float(n) for n in one["y"]] for one in by_rank["data"])
    assert sum(sent) == pytest.approx(sum(received), rel=0.01) and sum(sent) > 0
    titles = re.findall(r"<h2>(.*?)</h2>", reports["search"].read_text())
    assert titles == ["Answer", "Placement on dgx-h100", "Timeline", "Memory over time", "Memory at the peak",
                      "Bytes by level", "Alternatives", "Sensitivity", "Movements"]  # fmt: skip


@pytest.mark.skipif(CHROMIUM is None, reason="no chromium")
@pytest.mark.parametrize("name", ["search", "wide", "move", "audit", "refit"])
@pytest.mark.parametrize("dark", [False, True])
def test_a_browser_draws_it_without_a_word(reports: dict[str, Path], name: str, dark: bool, tmp_path: Path) -> None:
    """Every figure is drawn, in the colours that are asked for, and the console says nothing."""
    look = ["--blink-settings=preferredColorScheme=0"] if dark else []
    asked = [str(CHROMIUM), "--headless=new", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr",
             f"--user-data-dir={tmp_path}", "--virtual-time-budget=10000", *look, "--dump-dom",
             f"file://{reports[name]}"]  # fmt: skip
    found = subprocess.run(asked, capture_output=True, text=True, timeout=120, check=True)
    assert "CONSOLE" not in found.stderr, found.stderr[-2000:]
    page = reports[name].read_text()
    for number, spec in enumerate(figures(page), 1):
        assert spec["layout"]["height"] > 0, number
    drawn = len(re.findall(r'class="main-svg"[^>]*style="background: (?:rgb|#)', found.stdout))
    assert drawn == len(figures(page))
    if drawn:
        paper = "rgb(18, 23, 29)" if dark else "rgb(255, 255, 255)"
        assert found.stdout.count(f"background: {paper}") == drawn


def test_the_timeline_has_every_action_and_what_is_exposed() -> None:
    box = sp.Topology.load("dgx-h100", nodes=1)
    model = sp.Model.load("llama", layers=4, hidden=256, heads=8, kv_heads=4, ffn=512, seq=128, vocab=512)
    job = sp.partition(model, sp.Strategy(pipeline=2, tensor=4, global_batch=4), box)
    line = simulate(job, box)
    shown = timeline_figure(line)
    actions = [bar for bar in shown["data"] if not bar["name"].startswith("exposed")]
    assert sum(len(bar["x"]) for bar in actions) == sum(len(run.actions) for run in line.swept.ranks)
    for rank in drawn_ranks(line):
        ops = [op for i in range(len(line.swept.ranks[rank].actions)) for op in line.opened.ops(rank, i)]
        talks = joined((op.start, op.end) for op in ops if op.op.cost.stream != COMPUTE)
        computes = joined((op.start, op.end) for op in ops if op.op.cost.stream == COMPUTE)
        bare = length(joined([*talks, *computes])) - length(computes)
        told = sum((b - a) * share for a, b, share in exposed_shares(line, rank))
        assert told == pytest.approx(bare, abs=0.05 * line.seconds)
        assert len(exposed_shares(line, rank)) <= STEPS


@settings(max_examples=100, deadline=None)
@given(*(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30)), max_size=6) for _ in range(2)))
def test_what_others_do_not_cover(spans: list[tuple[int, int]], others: list[tuple[int, int]]) -> None:
    a, b = (joined((float(min(x)), float(max(x))) for x in found) for found in (spans, others))
    at = np.arange(0, 30) + 0.5
    covers = [np.array([any(s <= t < e for s, e in found) for t in at]) for found in (a, b, uncovered_stretches(a, b))]
    assert (covers[2] == (covers[0] & ~covers[1])).all()


@pytest.mark.parametrize("name", ["prefetch", "fsdp", "bucket"])
def test_what_is_exposed_is_as_much_as_the_timeline_says(name: str) -> None:
    """But for shares that are rounded: of what is under way beside computation nothing."""
    line = simulate_job(job(name), CLUSTER, launch=0.0)
    drawn = sum((end - start) * share for start, end, share in exposed_shares(line, 0))
    assert drawn == pytest.approx(sum(line.exposed_of(0).values()), rel=0.02)


def test_the_last_group_of_alternatives_has_the_star() -> None:
    rows = [("others", RankedPlan(sp.Strategy(), k, 1e9)) for k in (2.0, 3.0)]
    drawn = alternatives_figure([*rows, ("the best", RankedPlan(sp.Strategy(), 1.0, 2e9))], 8e9)["data"]
    assert [(d["name"], d["marker"]["symbol"], d["x"], d["y"]) for d in drawn] == [
        ("others", "circle", [2.0, 3.0], [1.0, 1.0]), ("the best", "star", [1.0], [2.0])]  # fmt: skip


def test_nodes_that_do_the_same_are_one_box() -> None:
    topology = sp.Topology.load("dgx-h100", nodes=64)
    strategy = sp.Strategy(tensor=8, pipeline=4, data=16, global_batch=64)
    made = placed_markup(HandedPlan("", "llama3-8b", {}, topology, strategy))
    assert made.count('class="node"') == 4 and made.count("and 15 alike") == 4 and made.count('class="device"') == 32


def test_text_is_text() -> None:
    page = render_page("<b>", [PagePart("a & b", rows=[["x"], ["<script>alert(1)</script>"]])])
    assert "<script>alert" not in page and "&lt;script&gt;alert" in page and "<title>&lt;b&gt;</title>" in page
    figure = {"data": [{"name": "</script><b>"}], "layout": {}}
    assert "</script><b>" not in render_page("x", [PagePart("y", figure=figure)])


def test_a_report_that_cannot_be_written_is_refused_before_any_work(tmp_path: Path) -> None:
    for asked in (["plan", "gpt2", "--on", "dgx-h100", "--batch", "8"],
                  ["redistribute", "f32[4]", "f32[4]", "--mesh", "x=2"]):  # fmt: skip
        told = RUNNER.invoke(app, [*asked, "--report", str(tmp_path / "no" / "x.html")])
        assert "there is no folder" in str(told.exception)

"""What a notebook shows of a value: small, without a script, well formed, and with the numbers of its text."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from typing import Any

import pytest

import shardplan as sp
from shardplan import notebook
from shardplan.errors import MissingExtra
from shardplan.hardware.units import format_bytes, format_seconds
from shardplan.plans.pricing import network_name
from shardplan.report import notebook as drawn
from shardplan.report.audit import audit_text
from shardplan.report.page.page import PagePart
from shardplan.report.place import ranking_text
from shardplan.report.plan import answer_text
from shardplan.report.timeline import timeline_text
from shardplan.report.weights import refit_text
from shardplan.report.why import why_object
from shardplan.simulation.closed.machines import machine_of
from shardplan.simulation.interval import Interval
from shardplan.simulation.searching.answer import Judge, answer_plan
from shardplan.simulation.searching.fit import fit

pytest.importorskip("jinja2")
VOID = {"br", "img", "link", "meta", "hr", "input"}
LLAMA = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 8, "num_key_value_heads": 4,
         "num_hidden_layers": 2, "vocab_size": 128, "model_type": "llama", "rms_norm_eps": 1e-5}  # fmt: skip


class Reader(HTMLParser):
    """Takes HTML whose tags close in the order in which they opened, and keeps its text outside of styles."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: set[str] = set()
        self.texts: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        names = [name for name, _ in attrs]
        assert len(names) == len(set(names)), (tag, names)
        assert not [name for name in names if name.startswith("on") or name in ("src", "href")], (tag, names)
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open and self.open.pop() == tag, (tag, self.open[-3:])

    def handle_data(self, data: str) -> None:
        if "style" not in self.open:
            self.texts.append(data)


def read(value: object) -> Reader:
    """What a notebook shows of a value, read; the laws of all values hold."""
    html: str | None = value._repr_html_()  # type: ignore[attr-defined]  # pyright: ignore
    assert isinstance(html, str)
    assert len(html.encode()) <= drawn.MOST_BYTES, len(html.encode())
    reader = Reader()
    reader.feed(html)
    reader.close()
    assert reader.open == []
    assert "script" not in reader.tags
    own = re.sub(r"<svg.*?</svg>", "", html, flags=re.S)
    colours = re.findall(r"(?:color|background)\s*:\s*([^;]+);", own)
    assert colours and {c.strip() for c in colours} <= {"inherit", "transparent", "#ffffff"}  # white behind pictures
    return reader


def holds(value: object, *texts: str) -> None:
    """The HTML has every line of these texts that is not cut."""
    shown = "\n".join(read(value).texts)
    for text in texts:
        for line in text.splitlines():
            assert line in shown, line


@pytest.fixture(scope="module")
def job() -> sp.Job:
    model = sp.Model.load("llama", layers=4, hidden=32, heads=4, kv_heads=2, ffn=48, seq=16, vocab=64)
    return sp.partition(model, sp.Strategy(data=2, tensor=2, pipeline=2, global_batch=8, zero=1),
                        sp.Topology.load("dgx-a100", nodes=1))  # fmt: skip


def test_a_plan_and_its_certificate() -> None:
    plan = sp.redistribute("i32[6@(data,tensor), 6]", "i32[6, 6@tensor]", mesh="data=2,tensor=3")
    holds(plan, str(plan), format_seconds(plan.seconds), plan.certificate.status, "What each device holds")
    assert "svg" in read(plan).tags
    c = plan.certificate
    holds(c, c.summary, *map(format_bytes, (*c.received_bytes, *c.sent_bytes, c.peak_bytes, c.bound_bytes)))
    holds(plan.program, str(plan.program))
    holds(plan.program.input_types[0], "i32[6@(data,tensor), 6]", "(1, 6)")


def test_placements_and_an_audit() -> None:
    topology = sp.Topology.load("dgx-h100", nodes=2)
    mesh = sp.Mesh(data=2, tensor=8)
    found = sp.place(mesh, topology, {("data",): 2e9, ("tensor",): 5e8})
    holds(found, ranking_text(found))
    holds(found[0], found[0].placement.describe(), format_seconds(found[0].seconds))
    holds(found[0].placement, found[0].placement.describe())
    (first, *_) = sp.reductions(found[0].placement, "data", 2**20)
    holds(first, str(first), format_seconds(first.seconds))
    for ids in ([*range(16)], [*range(0, 16, 2), *range(1, 16, 2)]):
        audit = sp.audit(ids, mesh, topology, {("data",): 2e9, ("tensor",): 5e8})
        assert audit.ratio is not None
        holds(audit, audit_text(audit), f"{audit.ratio:.2f}")


def test_weights_and_their_refit() -> None:
    source = sp.Weights.load("megatron-llama", LLAMA, tensor=4)
    target = sp.Weights.load("vllm-llama", LLAMA, tensor=2)
    plan = sp.refit(source, target)
    holds(plan, refit_text(plan), format_seconds(plan.bound_seconds))
    assert refit_text(plan).endswith(f"{format_seconds(plan.seconds)} predicted on {network_name(plan.topology)}")
    shapes = [" x ".join(map(str, target.shape(name, 0))) for name in target.names(0)]
    holds(target, *target.names(0), *shapes)


def test_a_job_its_step_and_why_it_moves(job: sp.Job) -> None:
    moved = {step.op.name for ms in job.movements.values() for m in ms for step in m.plan.program.steps}
    assert moved
    shown = "\n".join(read(job).texts)
    assert all(re.search(rf"\b{name} \d", shown) for name in moved)
    holds(job, str(job.layouts))
    found = sp.why(job)
    holds(found.timeline, format_seconds(found.timeline.seconds), *map(format_seconds, found.timeline.exposed.values()))
    shown = "\n".join(read(found).texts)
    rows = why_object(found)["movements"]
    assert len(rows) > 5
    for row in rows:
        assert row["asks"] in shown and format_bytes(row["received_bytes"]) in shown and row["made"] in shown
    holds(found.timeline.timeline, timeline_text(found.timeline.timeline).splitlines()[0])


def test_a_search_its_answer_and_a_fit() -> None:
    topology = sp.Topology.load("dgx-a100-80g", nodes=1)
    model = sp.Model.load("gpt", layers=8, hidden=512, heads=8, seq=256, vocab=4096, precision="bf16")
    found = sp.search(model, topology, 32, top=3)
    shown = "\n".join(read(found).texts)
    for one in found.ranked:
        assert format_seconds(one.seconds) in shown and format_bytes(one.peak_bytes) in shown
    assert f"{found.priced:,} priced" in shown
    assert found.certifier is not None
    answer = answer_plan(found, Judge(model, topology, machine_of(topology), found.certifier), 3, "step", "a model")
    holds(answer, answer_text(answer))
    told = fit(model, found.best.strategy, topology)
    holds(told, str(told))
    served = sp.search(model, topology, objective="latency", prompt=64, output=32, concurrency=8, top=3)
    holds(served, str(served))


def test_timelines() -> None:
    intervals = [Interval(d, "comm", 0.0, 2e-6, "all_gather(%0)", "all_gather", 0, 4096) for d in range(4)]
    line = sp.Timeline(tuple(intervals), source="measured")
    holds(line, timeline_text(line))


def test_the_largest_are_cut_and_say_so() -> None:
    """On thousands of devices, of thousands of lines, and with a line of any length."""
    wide = sp.redistribute("f32[8192@(a,b,c), 4096]", "f32[8192, 4096@(c,a,b)]", mesh="a=16,b=16,c=16")
    assert "more rows are not shown" in "\n".join(read(wide.certificate).texts)
    read(wide)
    read(wide.program.input_types[0])
    steps = "\n".join(f"  %{k + 1} = all_gather(%{k}; dim=0, axes=(x)): f32[{4 * 2 ** 2}]" if k == 0 else
                      f"  %{k + 1} = slice(%{k}; dim=0, axes=(x)): f32[16@x]" if k % 2 else
                      f"  %{k + 1} = all_gather(%{k}; dim=0, axes=(x)): f32[16]" for k in range(4000))  # fmt: skip
    long = sp.Program.parse(f"program\n  mesh x=4\n  input %0: f32[16@x]\n{steps}\n  output %4000\n")
    assert "more lines are not shown" in "\n".join(read(long).texts)
    line = sp.Timeline(tuple(Interval(0, "comm", k * 1e-6, (k + 1) * 1e-6, "<&" * 400, "x", k) for k in range(5000)),
                       source="measured")  # fmt: skip
    assert "more lines are not shown" in "\n".join(read(line).texts)
    model = sp.Model.load("llama3-405b")
    strategy = sp.Strategy(data=128, tensor=8, pipeline=16, global_batch=1024, schedule="interleaved", interleave=2)
    many = sp.partition(model, strategy)
    read(many)
    assert f"{many.strategy.devices:,}" in "\n".join(read(many).texts)


@pytest.mark.parametrize("text", ["<script>alert(1)</script>", "é" * 400, "&" * 400])
def test_what_is_cut_stays_within_the_limit(text: str) -> None:
    rows = [["what"], *([text] for _ in range(5000))]
    part = PagePart(text, note=text, text="\n".join([text] * 5000), rows=rows, cards=[(text, text)] * 4,
                    markup="<p>" + "x" * 200_000 + "</p>")  # fmt: skip
    found = drawn.shortened_parts(iter([part, part, part]))
    html = drawn.page_template("notebook.html.jinja").render(parts=found)
    assert len(html.encode()) <= drawn.MOST_BYTES and "<script>" not in html
    assert "The picture is too large for a notebook." in html and "more rows are not shown" in html


def test_without_jinja_a_notebook_shows_the_text(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> Any:
        raise MissingExtra(f"no {name}")

    monkeypatch.setattr(drawn, "page_template", missing)
    assert sp.TensorType.parse("f32[4@x]", sp.Mesh(x=2))._repr_html_() is None  # type: ignore[attr-defined]


def test_every_value_with_parts_has_the_method_and_no_other() -> None:
    for kind in drawn.PARTS:
        assert kind.__dict__["_repr_html_"] is notebook.notebook_html, kind
    assert drawn.notebook_markup(3) is None

"""A profiler's own trace as a timeline, and a prediction beside a measurement."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from shardplan.errors import ParseError, ShardplanError
from shardplan.report.timeline_comparison import compared_text
from shardplan.simulation.interval import Interval
from shardplan.simulation.jobs.compare import compare
from shardplan.simulation.jobs.job_timeline import simulate_job
from shardplan.simulation.jobs.kineto import read_kineto
from shardplan.simulation.timeline import Timeline
from simulation.jobs.job_cases import CLUSTER, job

PROFILED = """
import os, sys
import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile
folder, rank = sys.argv[1], int(sys.argv[2])
dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
x = torch.randn(64, 64)
with profile(activities=[ProfilerActivity.CPU]) as found:
    for _ in range(3):
        y = torch.mm(x, x).relu()
        dist.all_reduce(y)
        found.step()
found.export_chrome_trace(f"{folder}/rank{rank}.json")
store = dist.FileStore(f"{folder}/ends", 2)
store.set(str(rank), "")
store.wait([str(1 - rank)])
os._exit(0)  # gloo's threads abort a process whose peer ends first
"""


def test_a_trace_that_the_profiler_wrote(tmp_path: Path) -> None:
    """Two ranks over gloo: a product, an activation and an all-reduce, three times."""
    pytest.importorskip("torch")
    runs = [subprocess.Popen([sys.executable, "-c", PROFILED, str(tmp_path), str(rank)], stderr=subprocess.DEVNULL)
            for rank in range(2)]  # fmt: skip
    for run in runs:
        assert run.wait(120) == 0
    files = [tmp_path / f"rank{rank}.json" for rank in range(2)]
    line = read_kineto(files)
    assert line.source == "measured" and line.devices == (0, 1)
    for rank in range(2):
        mine = [i for i in line.intervals if i.device == rank]
        assert [i.kind for i in mine if i.kind in ("einsum", "all_reduce")].count("einsum") == 3
        reduced = [i for i in mine if i.kind == "all_reduce"]
        assert len(reduced) == 3 and all(i.stream.startswith("comm") for i in reduced)
        assert all(i.seconds > 0 for i in reduced)
    assert len(read_kineto(files[0]).devices) == 1
    written = json.loads(files[0].read_text())
    total = sum(e["dur"] for e in written["traceEvents"] if e.get("name") == "aten::mm") * 1e-6
    read = sum(i.seconds for i in read_kineto(files[0]).intervals if i.kind == "einsum")
    assert abs(total - read) < 1e-6
    found = compare(read_kineto(files[0]), read_kineto(files[1]))
    assert found.matched >= 6
    assert "all_reduce" in compared_text(found)


def kernel(name: str, ts: float, dur: float, stream: int = 7, cat: str = "kernel") -> dict[str, Any]:
    return {"ph": "X", "cat": cat, "name": name, "pid": 0, "tid": stream, "ts": ts, "dur": dur, "args": {}}


GPU = {
    "distributedInfo": {"rank": 3},
    "traceEvents": [
        {"ph": "M", "name": "process_name", "pid": 0, "tid": 0, "args": {"name": "python"}},
        kernel("aten::mm", 900.0, 4.0, 1, "cpu_op"),
        kernel("ProfilerStep#4", 1000.0, 50.0, 1, "user_annotation"),
        kernel("ProfilerStep#5", 1050.0, 50.0, 1, "user_annotation"),
        kernel("sm80_xmma_gemm_bf16", 1000.0, 10.0),
        kernel("ncclDevKernel_AllReduce_Sum_bf16_RING_LL", 1005.0, 20.0, 20),
        kernel("void at::native::vectorized_elementwise_kernel", 1012.0, 3.0),
        kernel("Memcpy DtoH", 1016.0, 2.0, 7, "gpu_memcpy"),
        kernel("flash_fwd_kernel", 1060.0, 5.0),
    ],
}


def test_kernels_of_a_gpu_are_the_intervals(tmp_path: Path) -> None:
    path = tmp_path / "gpu.json.gz"
    path.write_bytes(gzip.compress(json.dumps(GPU).encode()))
    line = read_kineto(path)
    told = [(i.device, i.stream, round(i.start * 1e6, 3), round(i.seconds * 1e6, 3), i.kind) for i in line.intervals]
    assert told == [
        (3, "compute 0", 0.0, 10.0, "einsum"),
        (3, "comm 0", 5.0, 20.0, "all_reduce"),
        (3, "compute 0", 12.0, 3.0, "elementwise"),
        (3, "compute 0", 16.0, 2.0, "copy"),
        (3, "compute 0", 60.0, 5.0, "attention"),
    ]
    assert [i.kind for i in read_kineto(path, step=5).intervals] == ["attention"]
    assert line.critical_path[-1].end == line.seconds


def test_what_is_no_trace_is_said(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    with pytest.raises(ParseError, match=r"^cannot read the trace file .*x\.json: No such file"):
        read_kineto(path)
    path.write_text("[1]")
    with pytest.raises(ParseError, match=r"x\.json is no trace of a profiler: it has no traceEvents$"):
        read_kineto(path)
    path.write_text(json.dumps(GPU))
    with pytest.raises(ParseError, match=r"it has no step 9; it has 4, 5$"):
        read_kineto(path, step=9)


ZIPPED = gzip.compress(b"{}", mtime=0)  # tests are named by it: workers that collect them at two seconds must agree


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (ZIPPED[:-9], "it is no whole gzip: Compressed file ended before the end-of-stream marker was"),
        (ZIPPED[:12] + b"\xff" * 20, "it is no whole gzip: "),
        (gzip.compress(bytes(2**26), mtime=0), " bytes of gzip hold more than "),
        (b'{"traceEvents": [' * 100_000, "its values are nested too deep"),
        (b'{"traceEvents": [], "x": "\xff"}', "it is no UTF-8 text"),
    ],
)
def test_a_trace_that_is_damaged_is_said_so(data: bytes, reason: str, tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    path.write_bytes(data)
    with pytest.raises(ParseError) as error:
        read_kineto(path)
    said = str(error.value)
    assert said.startswith(f"{path} is no trace of a profiler: ") and reason in said and "\n" not in said


def line_of(kinds: str, source: str = "predicted") -> Timeline:
    """A timeline of one device, an interval of a second for each letter."""
    intervals = [
        Interval(0, "compute", float(k), k + 1.0, c, c, causes=(k - 1,) if k else ()) for k, c in enumerate(kinds)
    ]
    return Timeline(tuple(intervals), source=source)


def test_steps_lie_beside_each_other() -> None:
    found = compare(line_of("abcab"), line_of("abxcab", "measured"))
    assert [s.kind for s in found.steps] == list("abxcab")
    assert found.matched == 5
    assert [s.predicted is None for s in found.steps] == [False, False, True, False, False, False]
    assert found.kinds[0].kind == "x" and found.kinds[0].measured_count == 1
    text = compared_text(found, most=1)
    assert text.splitlines()[0] == "step: predicted 5 s, measured 6 s"
    assert "5 of 6 steps are on both sides; the 1 that differ most:" in text
    with pytest.raises(ShardplanError, match=r"^compare: the measured timeline has no device 7; it has 0$"):
        compare(line_of("a"), line_of("a", "measured"), (0, 7))


def test_numbered_steps_are_matched_by_number() -> None:
    a = Timeline((Interval(0, "comm", 0.0, 1.0, "x", "x", 0), Interval(0, "comm", 1.0, 2.0, "y", "y", 1, causes=(0,))))
    b = Timeline((Interval(0, "comm", 0.0, 3.0, "z", "y", 1),), source="measured")
    assert [(s.predicted and s.predicted.name, s.measured and s.measured.name) for s in compare(a, b).steps] == [
        ("x", None),
        ("y", "z"),
    ]


def test_a_job_beside_a_measurement() -> None:
    line = simulate_job(job("tensor"), CLUSTER)
    found = compare(line, line)
    assert found.matched == len(found.steps) > 0
    assert all(kind.ratio in (1.0, None) for kind in found.kinds)

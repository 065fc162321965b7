"""The readers of files from elsewhere, for `reader_faults`: what writes seed files of each, and what reads one.

Seeds are what the package itself writes, what tests carry, and small files of the formats of others.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.common import ROOT
from benchmarks.reader_mutations import (
    Reader,
    Structure,
    gzip_structure,
    json_structure,
    no_structure,
    toml_structure,
    xml_structure,
)
from benchmarks.reader_mutations_binary import onnx_structure

import shardplan as sp
from shardplan.cli.audit import read_launch
from shardplan.cli.plans import load_plan
from shardplan.core.decoding import read_text
from shardplan.core.layout import Layout
from shardplan.execution.lab.results import Sweep
from shardplan.execution.verify import verify
from shardplan.fused.tiles.schedule import TileSchedule
from shardplan.hardware.measured.nccl_log import LogFacts, parse_log
from shardplan.hardware.measured.samples import parse_rows
from shardplan.hardware.placement import Placement, placements
from shardplan.hardware.prices.fused import FusedConstants
from shardplan.hardware.prices.library import library
from shardplan.interop.exports.msccl_schema import parse as parse_msccl
from shardplan.interop.hlo_trace import HloTrace
from shardplan.movement.placing.traffic import parse_traffic
from shardplan.simulation.accuracy.step_rows import read_steps
from shardplan.simulation.closed.machines import parse_fit
from shardplan.simulation.jobs.kineto import read_kineto
from shardplan.simulation.timeline import load_timelines
from shardplan.strategy.partition.tables import Layouts
from shardplan.strategy.strategy_text import parse_strategy

SOURCE = ROOT / "src" / "shardplan"
TESTS = ROOT / "tests"
Said = str | bytes


def written(ending: str, *texts: Said) -> Callable[[Path], Sequence[Path]]:
    """Return what writes these texts as seed files."""

    def write(folder: Path) -> list[Path]:
        paths = [folder / f"seed{k}{ending}" for k in range(len(texts))]
        for path, text in zip(paths, texts, strict=True):
            path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return paths

    return write


def copied(*paths: Path) -> Callable[[Path], Sequence[Path]]:
    """Return what writes these files as seeds."""
    return written(paths[0].suffix, *(path.read_bytes() for path in paths))


def text_of(parse: Callable[[str], object]) -> Callable[[Path], object]:
    """Return what reads a file for a parser of texts, which come as somebody typed them."""

    def read(path: Path) -> object:
        return parse(path.read_bytes().decode(errors="replace").strip("\n")) if path.is_file() else None

    return read


# Plans and programs


def plan_files(folder: Path) -> list[Path]:
    """Plans of all kinds: alone, a batch, between meshes, with and without a topology, within a limit, of a table."""
    from shardplan.core.box_table import BoxTable

    topology = sp.Topology.load("dgx-a100", nodes=2)
    mesh = sp.Mesh(a=2, b=8)
    placed = next(iter(placements(mesh, topology)))
    flat = BoxTable([(0, ((0, 1), (0, 3)), 0, (3, 1)), (1, ((1, 4), (0, 3)), 0, (3, 1))])
    plans = [
        sp.redistribute("f32[8@(a,b)]", "f32[8]", mesh="a=2,b=2"),
        sp.redistribute(["f32[8@a, 8]", "f32[8@(a,b)]"], ["f32[8, 8@a]", "f32[8@b]"], mesh="a=2,b=2"),
        sp.redistribute(
            sp.TensorType.parse("i32[7@x]", sp.Mesh(x=4)),
            sp.TensorType.parse("i32[7@y]", sp.Mesh({"y": 3}, devices=[5, 0, 2])),
        ),
        sp.redistribute("bf16[64@a, 64@b]", "bf16[64@b, 64@a]", topology=topology, mesh=mesh),
        sp.redistribute("f32[64]{+a,+b}", "f32[64]", topology=topology, mesh=mesh),
        sp.redistribute("f32[16@a, 16@b]", "f32[16@b, 16@a]", topology=placed, mesh=mesh),
        sp.redistribute("f32[16@x, 16]", "f32[16, 16@x]", memory_limit="600 B", mesh="x=4"),
        sp.reduce(placed, ("a",), nbytes=4096),
        sp.redistribute(sp.TensorType("i32", (4, 3), flat, "x=2"), sp.TensorType.parse("i32[4@x, 3]", "x=2")),
    ]
    paths = [folder / f"plan{k}.json" for k in range(len(plans))]
    for plan, path in zip(plans, paths, strict=True):
        plan.save(path)
    return paths


def program_files(folder: Path) -> Sequence[Path]:
    """Programs: of a redistribution, of a reduction with a table, and of a small model with a `repeat`."""
    model = sp.Model.load("gpt", layers=3, hidden=16, heads=2, seq=8, vocab=32, positions=8)
    plans = [sp.Plan.load(path).program for path in plan_files(folder)[1::3]]
    return written(".txt", *(str(program) for program in (*plans, model.program)))(folder)


# Clusters

NCCL_XML = """<system version="1"><cpu numaid="0" affinity="ffff" arch="x86_64">
<pci busid="0000:00:00.0" class="0x030200" link_speed="16.0 GT/s PCIe" link_width="16">
<gpu dev="0" sm="80" rank="0" gdr="1"><nvlink target="0000:c0:00.0" count="6" tclass="0x068000"/></gpu></pci>
<pci busid="0000:01:00.0" class="0x030200" link_speed="16.0 GT/s PCIe" link_width="16">
<gpu dev="1" sm="80" rank="1" gdr="1"><nvlink target="0000:c0:00.0" count="6" tclass="0x068000"/></gpu></pci>
<pci busid="0000:a0:00.0" class="0x020700"><nic>
<net name="mlx5_0" dev="0" speed="200000" port="1" latency="0.000000" gdr="1"/></nic></pci></cpu></system>"""
NCCL_LOG = """# nccl-tests version 2.17.1 nccl-headers=22803 nccl-library=22907
# Collective test starting: all_gather_perf
# nThread 1 nGpus 1 minBytes 8 maxBytes 4194304 step: 8(factor) warmup iters: 1 iters: 20 agg iters: 1 validation: 1
#  Rank  0 Group  0 Pid   4711 on    alpha-1 device  0 [0000:0a:00] NVIDIA H100 80GB HBM3
#  Rank  1 Group  0 Pid   8120 on    alpha-2 device  0 [0000:0a:00] NVIDIA H100 80GB HBM3
#       size         count      type   redop    root     time   algbw   busbw  #wrong     time   algbw   busbw  #wrong
           0             0     float    none      -1     0.21    0.00    0.00       0     0.20    0.00    0.00       0
       32768          2048     float    none      -1    31.25    1.05    0.79       0    30.50    1.07    0.81       0
     4194304        262144     float    none      -1   104.10   40.29   30.22       0   101.00   41.53   31.15     N/A
"""
HOSTFILES = (
    "h0 slots=8\nh1 slots=8\n",
    "h1:8\nh0:8\n",
    "h1  # first\nh0\n",
    "h[0-1] slots=8 max_slots=8\n",
    "\n".join(["a:1", "b:1"] * 8),
)
RANKFILES = (
    "".join(f"rank {r}=h{r % 2} slot={r // 2}\n" for r in range(16)),
    "".join(f"{r} h{r // 8} {r % 8}\n" for r in range(16)),
    "".join(f"rank {r}=h{r // 8} slot={r % 2}:{r % 8}\n" for r in range(16)),
)
ORDERS = ("block", "cyclic", ",".join(map(str, reversed(range(16)))), "0, 1, " + ", ".join(map(str, range(2, 16))))
PLACED = "mesh data=4,tensor=4\nplacement data=[2, 2], tensor=[1, 4]; order gpu=(data, tensor)\n"


def placement_files(folder: Path) -> Sequence[Path]:
    """Placements as text."""
    topology = sp.Topology.load("dgx-a100", nodes=2)
    found = list(placements(sp.Mesh(data=4, tensor=4), topology))
    return written(".txt", *map(str, found[:2]), PLACED + str(topology))(folder)


def launched(option: str) -> Callable[[Path], object]:
    """Return what reads a file for an option of `audit`."""

    def read(path: Path) -> object:
        more: dict[str, Any] = {option: path}
        return read_launch("dgx-a100", "data=2,tensor=8", nodes=2, **more)

    return read


def ordered(text: str) -> object:
    """Read the text of `--rank-order`."""
    return read_launch("dgx-a100", "data=2,tensor=8", nodes=2, rank_order=text)


def msccl_files(folder: Path) -> Sequence[Path]:
    """What the exporter to MSCCL writes."""
    from shardplan.interop.exports.export import export_text

    programs = [sp.redistribute("f32[64]{+x}", "f32[64]", mesh=mesh).program for mesh in ("x=2", "x=4")]
    return written(".xml", *(export_text("msccl", program) for program in programs))(folder)


def library_of(path: Path) -> object:
    """Read a library's table anew."""
    library.cache_clear()
    return library(str(path))


# Measurements and times


def timelines(folder: Path) -> list[Path]:
    """A simulated program, and a simulated step."""
    plan = sp.redistribute("bf16[64@a, 64@b]", "bf16[64@b, 64@a]", topology="dgx-a100", mesh="a=2,b=4")
    model = sp.Model.load("gpt", layers=2, hidden=16, heads=2, seq=8, vocab=32, positions=8)
    topology = sp.Topology.load("dgx-a100", nodes=1)
    found = [
        sp.simulate(plan.program, topology),
        sp.simulate(model, sp.Strategy(pipeline=2, data=4, microbatch=1, global_batch=8), topology, fidelity="events"),
    ]
    paths = [folder / f"trace{k}.json" for k in range(len(found))]
    for timeline, path in zip(found, paths, strict=True):
        timeline.save(path)
    return paths


def profiled() -> bytes:
    """A trace as a profiler of torch writes it."""

    def event(name: str, ts: float, dur: float, tid: int = 7, cat: str = "kernel") -> dict[str, Any]:
        return {"ph": "X", "cat": cat, "name": name, "pid": 0, "tid": tid, "ts": ts, "dur": dur, "args": {}}

    events = [
        {"ph": "M", "name": "process_name", "pid": 0, "tid": 0, "args": {"name": "python"}},
        event("aten::mm", 900.0, 4.0, 1, "cpu_op"),
        event("ProfilerStep#5", 1000.0, 50.0, 1, "user_annotation"),
        event("sm80_xmma_gemm_bf16", 1000.0, 10.0),
        event("ncclDevKernel_AllReduce_Sum_bf16_RING_LL", 1005.0, 20.0, 20),
    ]
    return json.dumps({"distributedInfo": {"rank": 3}, "traceEvents": events}).encode()


def lines_of(name: str, most: int) -> bytes:
    """The first lines of a file of the tests' data."""
    return b"\n".join((TESTS / "data" / name).read_bytes().split(b"\n")[:most])


def journal(path: Path) -> object:
    """Read the journal of a search, whichever it is of."""
    from shardplan.simulation.searching.ranges import Journal

    return Journal(path, "key").read()


def journals(folder: Path) -> Sequence[Path]:
    """A journal with two ranges."""
    points = {"index": [0, 3], "seconds": [0.5, 0.25], "nbytes": [1.0, 2.0]}
    found = {"best": points, "front": points, "priced": 2, "slow": 0, "large": 1, "unfit": 0, "least": None}
    return written(".json", json.dumps({"search": "key", "ranges": {"0 64": found, "64 128": found}}))(folder)


# Models


def onnx_files(folder: Path) -> Sequence[Path]:
    """Two small models: products with weights, and shapes that are worked out."""
    import numpy as np
    from onnx import TensorProto, helper, numpy_helper

    def model(nodes: list[Any], held: dict[str, Any]) -> bytes:
        given = [helper.make_tensor_value_info("x", TensorProto.FLOAT, [4, 6])]
        made = [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)]
        graph = helper.make_graph(nodes, "g", given, made, [numpy_helper.from_array(a, n) for n, a in held.items()])
        return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 14)]).SerializeToString()

    w = np.arange(36, dtype=np.float32).reshape(6, 6)
    products = [helper.make_node("MatMul", ["x", "w"], ["a"]), helper.make_node("Relu", ["a"], ["b"]),
                helper.make_node("MatMul", ["b", "v"], ["c"]),
                helper.make_node("Softmax", ["c"], ["y"], axis=-1)]  # fmt: skip
    shapes = [helper.make_node("Slice", ["x", "a", "b", "d"], ["s"]), helper.make_node("Reshape", ["s", "r"], ["t"]),
              helper.make_node("Transpose", ["t"], ["u"], perm=[1, 0, 2]),
              helper.make_node("ReduceSum", ["u", "k"], ["y"], keepdims=0)]  # fmt: skip
    ends = {n: np.asarray(v) for n, v in {"a": [0], "b": [3], "d": [0], "r": [3, 2, 3], "k": [1]}.items()}
    return written(".onnx", model(products, {"w": w, "v": w}), model(shapes, ends))(folder)


TRAFFIC = ("data=2GB, tensor=500MB", "data+tensor=all_gather:64MB*24, data=2GB behind 90%", "tensor=1MB behind 120ms")
STRATEGIES = ("data=2 tensor=4 recompute=full sequence_parallel=true", "pipeline=4 schedule=1f1b zero=1 fsdp=false")
LAYOUTS = (
    "serve\n  data: batch\n  tensor: [kv_heads, ffn] > sequence\nstored\n"
    "  tokens: batch@data\nheld\n  up, down: ffn@tensor\n"
)
SCHEDULES = (
    "0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n",
    "0F0,,0I0,0W0\n,1F0,1I0,1W0\n",
    "0F0,0SEND_F0,,0RECV_B0,0B0\n1RECV_F0,1F0,1B0,1SEND_B0\n",
)
SCHEDULE_TEXTS = ("schedule 1f1b, 2 microbatches\n0: 0F0 0F1 0B0 0B1\n1: 1F0 1B0 1F1 1B1",)
TILES = ("order=remote_first waits=second_launch slice=2", "order=1,0 programs=4 slots=2 acks=1")
FUSED = (
    'backend = "here"\nlatency = "2 us"\nsignal = "1 us"\nbandwidth = "10 GB/s"\ncopy_bandwidth = "40 GB/s"\n'
    "tile_tax = { 1 = 1.0, 8 = 1.25 }\n"
)
TYPES = ("f32[64@data, 48@tensor]", "bf16[8@(data,tensor), 7]{+seq}", "i32[]", "f8e4m3[4, 4@data]{root:tensor}")
MESHES = ("data=4,tensor=2", "a=2,b=3 devices=[5,4,3,2,1,0]", "data=(node=2,gpu=4), tensor=2")


def row(seeds: Callable[[Path], Sequence[Path]], read: Callable[[Path], object], structure: Structure = no_structure,
        text: bool = True) -> Reader:  # fmt: skip
    """Return a reader."""
    return Reader(seeds, read, structure, text)


def typed(text: str) -> object:
    """Read a type on a mesh."""
    return sp.TensorType.parse(text, "data=4,tensor=2,seq=2")


_HLO = TESTS / "interop" / "hlo"
_LIBRARIES = SOURCE / "hardware" / "prices" / "libraries"
_PRESETS = SOURCE / "hardware" / "presets"
_MACHINES = SOURCE / "simulation" / "closed" / "machines"
SEEDED: dict[str, Reader] = {
    "plan": row(plan_files, lambda path: verify(sp.Plan.load(path)), json_structure),
    "plan or program": row(program_files, lambda path: load_plan(str(path))),
    "type text": row(written(".txt", *TYPES), text_of(typed)),
    "layout text": row(written(".txt", "[@data, @(tensor,seq)]{+x}", "[]{root:a}"), text_of(Layout.parse)),
    "mesh text": row(written(".txt", *MESHES), text_of(sp.Mesh.parse)),
    "placement text": row(placement_files, text_of(Placement.parse)),
    "topology TOML": row(
        copied(*(_PRESETS / f"{name}.toml" for name in ("dgx-a100", "tpu-v5p", "gcp-v100x8"))),
        sp.Topology.load,
        toml_structure,
    ),
    "NCCL XML": row(written(".xml", NCCL_XML), sp.Topology.load, xml_structure),
    "library TOML": row(copied(_LIBRARIES / "ring.toml", _LIBRARIES / "nccl.toml"), library_of, toml_structure),
    "fused TOML": row(written(".toml", FUSED), FusedConstants.load, toml_structure),
    "machine TOML": row(
        copied(*sorted(_MACHINES.glob("*.toml"))[:2]),
        lambda p: parse_fit(read_text(p), str(p)),
        toml_structure,
    ),
    "hostfile": row(written(".txt", *HOSTFILES), launched("hostfile")),
    "rank order": row(written(".txt", *RANKFILES), launched("rank_order")),
    "rank order text": row(written(".txt", *ORDERS), text_of(ordered)),
    "MSCCL XML": row(msccl_files, text_of(parse_msccl), xml_structure),
    "NCCL log": row(
        written(".log", NCCL_LOG), text_of(lambda t: parse_log(t, LogFacts("s", nics=(8, 400.0)))), no_structure
    ),
    "collective rows": row(
        written(".jsonl", lines_of("collectives_sample.jsonl", 4)), text_of(parse_rows), json_structure
    ),
    "step rows": row(written(".jsonl", lines_of("steps.jsonl", 4)), read_steps, json_structure),
    "timelines": row(timelines, load_timelines, json_structure),
    "kineto": row(written(".json", profiled(), gzip.compress(profiled())), read_kineto, gzip_structure),
    "lab results": row(copied(TESTS / "execution" / "lab_results" / "small.json"), Sweep.load, json_structure),
    "search journal": row(journals, journal, json_structure),
    "HLO": row(copied(*sorted(_HLO.glob("*.txt")), _HLO / "mlp_step.hlo"), lambda p: HloTrace.read(p).script),
    "ONNX": row(onnx_files, sp.load, onnx_structure, False),
    "schedule CSV": row(written(".csv", *SCHEDULES), sp.Schedule.from_csv),
    "schedule text": row(written(".txt", *SCHEDULE_TEXTS), text_of(sp.Schedule.parse)),
    "tile schedule text": row(written(".txt", *TILES), text_of(TileSchedule.parse)),
    "strategy text": row(written(".txt", *STRATEGIES), text_of(parse_strategy)),
    "layouts text": row(written(".txt", LAYOUTS), text_of(Layouts.parse)),
    "traffic text": row(written(".txt", *TRAFFIC), text_of(parse_traffic)),
}

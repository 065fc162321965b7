"""Planning times, ours and the peers', on the same problems in one process, interleaved.

`python -m benchmarks.planning_time [--count 60] [--seed 0]`: `--count` problems of 3 and 4 dims for each number of
devices, even and multiples of the device count or of what the layouts need. Ours is the whole call, certificate
included, of a request never made before: state graphs and the like may be warm, as in a process that plans a model.
Also the first request of a fresh process (imports not counted), and a request made again. Peers where they go:
Shardy's pass and DTensor's planners on 8 and 16 devices, XLA's compilation of the resharding identity on 8, 16 and 32.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

from benchmarks.common import ROOT, Progress, arguments, record, spread, table, timed, to_peer, told, write
from benchmarks.peers import dtensor, shardy, xla
from benchmarks.peers.problem import Moves, Problem

import shardplan as sp
from benchmarks import suites

MESHES: dict[int, tuple[tuple[int, ...], ...]] = {
    8: ((2, 2, 2), (4, 2), (2, 4)),
    16: ((4, 2, 2), (2, 2, 2, 2), (4, 4), (8, 2)),
    32: ((4, 8), (4, 4, 2), (2, 2, 8)),
    256: ((16, 16), (32, 8), (8, 4, 8)),
    1024: ((32, 8, 4), (32, 32), (128, 8), (16, 8, 8)),
    65536: ((64, 32, 32), (256, 256), (128, 64, 8), (2048, 8, 4)),
}
PEERS: dict[str, tuple[tuple[int, ...], Callable[[Problem], Moves | None]]] = {
    "shardy pass": ((8, 16), shardy.plan),
    "dtensor greedy": ((8, 16), lambda p: dtensor.plan(p, "greedy")),
    "dtensor min-cost": ((8, 16), lambda p: dtensor.plan(p, "min-cost")),
    "xla compile": ((8, 16, 32), xla.plan),
}
OURS = ("default", "portable")
TARGETS = {16: 5e-3, 1024: 50e-3, 65536: 500e-3}
CACHED_TARGET = 50e-6
AGAIN = 200  # repeats of a request made again
FIRST = """
import time, shardplan as sp
plan = sp.redistribute  # the import is measured elsewhere
mesh = sp.Mesh({mesh!r})
s, t = (sp.TensorType.parse(text, mesh) for text in ({source!r}, {target!r}))
started = time.perf_counter()
plan(s, t, portable={portable})
print(time.perf_counter() - started)
"""
Pair = tuple[sp.TensorType, sp.TensorType]


def problems(devices: int, seed: int, count: int) -> list[Pair]:
    """Even problems of 3 and 4 dims on meshes of so many devices, no two alike."""
    rng = random.Random(f"planning {devices} {seed}")
    found: dict[Pair, None] = {}
    while len(found) < count:
        mesh = suites.make_mesh(rng.choice(MESHES[devices]))
        s, t = suites.even_pair(rng, mesh, rng.choice((3, 4)), dtype="bf16", keep=suites.KEEP)
        if s != t:
            found[s, t] = None
    return list(found)


def measure(devices: int, pairs: Sequence[Pair]) -> tuple[dict[str, list[float]], list[dict[str, Any]]]:
    """The seconds of everybody, problem by problem; the peers' first use is not counted."""
    peers = {name: plan for name, (where, plan) in PEERS.items() if devices in where}
    seconds: dict[str, list[float]] = {name: [] for name in (*OURS, "cached", *peers)}
    rows: list[dict[str, Any]] = []
    progress = Progress(f"{devices} devices", len(pairs))
    for k, (s, t) in enumerate(pairs):
        row: dict[str, Any] = {"problem": told(s, t)} | ours(s, t, OURS if k % 2 == 0 else OURS[::-1])
        for name, plan in peers.items():
            problem = to_peer(s, t)
            if problem is None:
                continue
            if k == 0:
                plan(problem)
            moves = plan(problem)
            if moves is not None and moves.correct:
                row[name] = moves.seconds_planning
        for name, values in seconds.items():
            if name in row:
                values.append(row[name])
        rows.append(row)
        progress.add()
    return seconds, rows


def ours(s: sp.TensorType, t: sp.TensorType, modes: Sequence[str]) -> dict[str, Any]:
    """The seconds of a request never made before in each mode, in this order, and of the default made again.

    The second mode finds the state graph of the first: hence the order alternates.
    """
    out: dict[str, Any] = {}
    for name in modes:
        try:
            plan, out[name] = timed(lambda name=name: sp.redistribute(s, t, portable=name == "portable"))
            out[f"{name} status"] = plan.certificate.status
        except sp.Infeasible:
            out[f"{name} status"] = "infeasible"
    if out["default status"] != "infeasible":
        started = time.perf_counter()
        for _ in range(AGAIN):
            sp.redistribute(s, t)
        out["cached"] = (time.perf_counter() - started) / AGAIN
    return out


def first_requests(devices: int, pairs: Sequence[Pair], portable: bool) -> list[float]:
    """The seconds of the very first request of a process, one process a problem."""
    out: list[float] = []
    for s, t in pairs:
        program = FIRST.format(mesh=s.mesh.shape, source=str(s), target=str(t), portable=portable)
        environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)])}
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment)
        if done.returncode == 0:
            out.append(float(done.stdout))
        else:
            print(f"first request on {devices} devices fails: {told(s, t)}", file=sys.stderr)
    return out


def main() -> None:
    parser = arguments("planning_time", "Planning times, ours and the peers'.", 60, of="problems a number of devices")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--devices", type=int, nargs="+", default=list(MESHES), choices=list(MESHES))
    parser.add_argument("--processes", type=int, default=7, help="fresh processes a number of devices and mode")
    options = parser.parse_args()
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=32".strip()
    os.environ |= {"JAX_PLATFORMS": "cpu", "TF_CPP_MIN_LOG_LEVEL": "1"}  # read when JAX is imported
    result: dict[str, Any] = {"seconds": {}, "first request of a process": {}, "rows": {}}
    lines: list[list[Any]] = []
    for devices in options.devices:
        pairs = problems(devices, options.seed, options.count)
        seconds, rows = measure(devices, pairs)
        first = {name: spread(first_requests(devices, pairs[: options.processes], name == "portable")) for name in OURS}
        result["rows"][devices] = rows
        result["first request of a process"][devices] = first
        result["seconds"][devices] = {name: spread(values) for name, values in seconds.items()}
        result["seconds"][devices]["refused"] = sum("infeasible" in r.values() for r in rows)
        for name, values in (*seconds.items(), *((f"first, {n}", None) for n in first)):
            one = spread(values) if values is not None else first[name.removeprefix("first, ")]
            scale = 1e6 if name == "cached" else 1e3
            target = CACHED_TARGET if name == "cached" else TARGETS.get(devices) if name == "default" else None
            lines.append([f"{devices} {name}", one["count"], *(scale * one[k] for k in ("median", "p90", "max")),
                          None if target is None else scale * target, "us" if name == "cached" else "ms"])  # fmt: skip
    heads = ("devices, planner", "problems", "median", "p90", "max", "target", "unit")
    print(table(heads, lines, "planning times"))
    parameters = {"count": options.count, "seed": options.seed, "processes": options.processes, "meshes": MESHES,
                  "dims": [3, 4], "repeats of a cached request": AGAIN}  # fmt: skip
    write(options.out, record(parameters, result))


if __name__ == "__main__":
    main()

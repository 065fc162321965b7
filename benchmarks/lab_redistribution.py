"""Our redistribution programs and XLA's, on the same real links of the lab.

`python -m benchmarks.lab_redistribution [--count 56] [--count16 36] [--seed 0] [--repetitions 5] [--fresh]`. Runs on
Linux with the privileges that `shardplan lab` needs, about 12 minutes on a quiet machine; the file is written after
every problem, and a run that was interrupted goes on where it stopped. Problems of the suites s8 (on 2x4 at 200/1000
Mbit/s) and s16 (on 4x4 at 100/500), scaled so that the larger local shard is about 1 MiB; device k is rank k for both.

XLA's side: `jit(lambda x: x)` between the shardings, compiled for forced CPU devices, run once and compared; the
collectives of its scheduled HLO are replayed in order. Ours: the program planned for the cluster (default, and with
`portable=True`), run once as a program and verified on every rank, then replayed too. Movement only on both sides:
local copies and adding are left out. All of a problem take turns; XLA's is replayed a second time for every fourth
problem: that is the noise. *Full rematerialisation* is where XLA warns of it, or has a collective whose result is the
whole array while neither end is. Published for other hardware and problems: geomean 1.22x, at most 5.7x (arXiv
2112.01075).
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from benchmarks.common import ROOT, arguments, geomean, record, table, told, write
from benchmarks.processes import jax_environment
from benchmarks.reshard_vs_xla import scaled

from benchmarks import suites
from shardplan.core.program import Program
from shardplan.core.tensor import TensorType
from shardplan.errors import BackendError, Infeasible, TimedOut
from shardplan.execution.lab import CONSTANTS, Cluster, Lab, Measurement, Task, missing
from shardplan.execution.lab.experiments import emulated_topology
from shardplan.execution.lab.item import WrongResult
from shardplan.hardware.placement import Placement, placements
from shardplan.interop.hlo import hlo_script, parse_hlo
from shardplan.movement.redistribute import redistribute
from shardplan.simulation.replay import replayed
from shardplan.simulation.script import Script
from shardplan.simulation.scripts import script_of

CLUSTERS = {"s8": ("2x4", (200.0, 1000.0)), "s16": ("4x4", (100.0, 500.0))}
DEVICES = {"s8": 8, "s16": 16}
CONTROL = 4  # of so many problems one has XLA's side replayed twice
PUBLISHED = {"geomean": 1.22, "max": 5.7, "source": "arXiv 2112.01075; other hardware, problems and baseline version"}
FLOOR = 0.03  # where no control has been measured
OURS = ("default", "portable")


# XLA's side, in a process with forced devices.


def compile_child(suite: str, count: int, seed: int, folder: Path) -> None:
    """Compile and check every problem that is not in the folder yet."""
    import jax
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    for k, (s, t) in enumerate(problems(suite, count, seed)):
        path = folder / f"{suite}_{seed}_{k}.json"
        name = told(s, t)
        if path.exists() and json.loads(path.read_text(encoding="utf-8"))["problem"] == name:
            continue
        devices = np.array(jax.devices()[: s.mesh.size]).reshape(s.mesh.sizes)
        before, after = (NamedSharding(Mesh(devices, x.mesh.axes), PartitionSpec(*x.layout.spec)) for x in (s, t))
        move = jax.jit(lambda x: x, in_shardings=before, out_shardings=after)
        with tempfile.TemporaryFile() as said:  # XLA warns on the file descriptor
            kept = os.dup(2)
            os.dup2(said.fileno(), 2)
            try:
                compiled = move.lower(jax.ShapeDtypeStruct(s.shape, np.float32, sharding=before)).compile()
            finally:
                os.dup2(kept, 2)
                os.close(kept)
            said.seek(0)
            warned = b"full rematerialization" in said.read()
        values = np.arange(int(np.prod(s.shape)), dtype=np.float32).reshape(s.shape)
        equal = bool(np.array_equal(np.asarray(compiled(jax.device_put(values, before))), values))
        builder = path.with_suffix(".part")
        found = {"problem": name, "equal": equal, "warned": warned, "text": compiled.as_text()}
        builder.write_text(json.dumps(found), encoding="utf-8")
        builder.replace(path)


def compiled(suite: str, count: int, seed: int, folder: Path) -> list[dict[str, Any]]:
    """The compiled texts of a suite's problems, in order."""
    folder.mkdir(parents=True, exist_ok=True)
    environment = jax_environment(DEVICES[suite]) | {"TF_CPP_MIN_LOG_LEVEL": "1"}
    command = [sys.executable, "-m", "benchmarks.lab_redistribution", "--child", suite, "--seed", str(seed)]
    command += ["--count", str(count), "--cache", str(folder)]
    subprocess.run(command, env=environment, cwd=ROOT, check=True, timeout=3600)
    paths = (folder / f"{suite}_{seed}_{k}.json" for k in range(count))
    return [json.loads(path.read_text(encoding="utf-8")) for path in paths]


def problems(suite: str, count: int, seed: int) -> list[tuple[TensorType, TensorType]]:
    """The problems, scaled."""
    return [
        scaled(s, t)
        for s, t, _ in suites.problems(suite, seed, count)
        if isinstance(s, TensorType) and isinstance(t, TensorType)
    ]


# Both sides on the links.


def in_order(s: TensorType, cluster: Cluster) -> Placement:
    """The placement in which device k is rank k."""
    for found in placements(s.mesh, emulated_topology(cluster.topology)):
        if np.array_equal(found.position(), np.arange(s.mesh.size)):
            return found
    raise AssertionError(f"no placement of {s.mesh} has its devices in order")


def plan(s: TensorType, t: TensorType, place: Placement, portable: bool) -> tuple[Program | None, float]:
    """Our program, None where there is no portable one, and the seconds it took."""
    started = time.perf_counter()
    try:
        program = redistribute(s, t, topology=place, portable=portable).program
    except Infeasible:
        program = None
    return program, time.perf_counter() - started


def facts(script: Script, place: Placement, cluster: Cluster, program: Program | None = None) -> dict[str, Any]:
    """What a side moves, and its prediction."""
    payload = script.payload()
    received: dict[int, int] = {}
    for (_, to), n in payload.items():
        received[to] = received.get(to, 0) + n
    return {
        "steps": list(script.kinds) if program is None else [s.op.name for s in program.steps],
        "total bytes": sum(payload.values()),
        "received bytes": max(received.values(), default=0),
        "link bytes": max(cluster.tree.edge_bytes(payload), default=0),
        "predicted": replayed(script, place, constants=CONSTANTS).seconds if payload else 0.0,
    }


def measured(m: Measurement) -> dict[str, Any]:
    """The numbers of a measurement that are kept."""
    return {
        "seconds": m.seconds,
        "repetitions": [r.seconds for r in m.repetitions],
        "repeated": m.repeated,
        "voided": m.voided,
        "lateness": m.lateness,
        "cpu share": m.cpu_share,
        "drops": m.drops,
        "load": m.load,
        "bytes as predicted": m.payload == m.predicted_payload,
    }


def problem(
    lab: Lab, s: TensorType, t: TensorType, hlo: dict[str, Any], number: int, repetitions: int
) -> dict[str, Any]:
    """One problem, on both sides."""
    cluster = lab.cluster
    place = in_order(s, cluster)
    assert hlo["problem"] == told(s, t), "the cache is of other problems; remove it"
    collectives = parse_hlo(hlo["text"], s.mesh.size)
    scripts = {"xla": hlo_script(collectives, "xla")}
    moved = sum(c.moved_bytes for c in collectives)
    assert sum(scripts["xla"].payload().values()) == moved, "the replay's bytes are not the HLO's"
    whole = math.prod(s.shape) * s.itemsize
    row: dict[str, Any] = {
        "problem": hlo["problem"],
        "suite": f"s{s.mesh.size}",
        "xla equal": hlo["equal"],
        "full rematerialisation": hlo["warned"]
        or (any(c.output_bytes >= whole for c in collectives) and max(s.local_bytes(), t.local_bytes()) < whole),
        "xla warns of full rematerialisation": hlo["warned"],
        "xla": facts(scripts["xla"], place, cluster),
    }
    programs: dict[str, Program] = {}
    for side in OURS:
        program, seconds = plan(s, t, place, side == "portable")
        if program is None:
            row[side] = None
            continue
        programs[side], scripts[side] = program, script_of(program, side)
        row[side] = facts(scripts[side], place, cluster, program) | {"planning seconds": seconds}
    if "portable" in programs and programs["portable"] == programs["default"]:
        del programs["portable"], scripts["portable"]
    checks = lab.measure([Task(p, place, side) for side, p in programs.items() if p.steps], 1)
    row["verified"] = all(m.verified and m.payload == m.predicted_payload for m in checks)
    moving = {side: script for side, script in scripts.items() if script.payload()}
    tasks = [Task(script, place, side) for side, script in moving.items()]
    if number % CONTROL == 0 and "xla" in moving:
        tasks.append(Task(moving["xla"], place, "control"))
    for m in lab.measure(tasks, repetitions) if tasks else []:
        row[m.title] = row.get(m.title, {}) | measured(m)
    for side in scripts:
        row[side].setdefault("seconds", 0.0)
    if "portable" not in scripts and row["portable"] is not None:
        row["portable"] = row["default"] | {"as default": True}
    return row


# What the rows come to.


def ratios(rows: list[dict[str, Any]], side: str, key: str) -> list[tuple[float, str]]:
    """XLA's number over ours and the problem, where both move something."""
    return [
        (r["xla"][key] / r[side][key], r["problem"])
        for r in rows
        if r[side] is not None and r["xla"][key] > 0 and r[side][key] > 0
    ]


def compared(rows: list[dict[str, Any]], side: str) -> dict[str, Any]:
    """Geomean, median, least and most of XLA over ours."""
    out: dict[str, Any] = {}
    for name, key in (("measured seconds", "seconds"), ("predicted seconds", "predicted"),
                      ("total bytes", "total bytes"), ("received bytes, worst device", "received bytes"),
                      ("bytes, busiest link", "link bytes")):  # fmt: skip
        found = [x for x, _ in ratios(rows, side, key)]
        if found:
            out[name] = {
                "count": len(found),
                "geomean": geomean(found),
                "median": statistics.median(found),
                "min": min(found),
                "max": max(found),
            }
    return out


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """What the rows come to."""
    controls = [abs(math.log(r["control"]["seconds"] / r["xla"]["seconds"])) for r in rows if "control" in r]
    floor = statistics.median(controls) if controls else FLOOR
    calm = sorted(controls)[math.ceil(0.9 * len(controls)) - 1] if controls else FLOOR
    moving = [r for r in rows if r["xla"]["total bytes"] or r["default"]["total bytes"]]
    kept = [r for r in moving if not r["full rematerialisation"]]
    result: dict[str, Any] = {
        "problems": len(rows),
        "nothing to move on either side": len(rows) - len(moving),
        "only xla moves": [r["problem"] for r in moving if not r["default"]["total bytes"]],
        "only ours moves": [r["problem"] for r in moving if not r["xla"]["total bytes"]],
        "xla unequal results": sum(not r["xla equal"] for r in rows),
        "ours not verified": sum(not r["verified"] for r in rows),
        "bytes not as predicted": sum(
            not r[side].get("bytes as predicted", True) for r in rows for side in ("xla", *OURS) if r[side]
        ),
        "no portable plan": [r["problem"] for r in rows if r["portable"] is None],
        "full rematerialisation": len(moving) - len(kept),
        "published": PUBLISHED,
        "control, same script twice": {
            "count": len(controls),
            "median log ratio": floor,
            "p90 log ratio": calm,
            "max log ratio": max(controls, default=math.nan),
        },
    }
    for side in OURS:
        same = [r for r in moving if r[side] and r[side]["total bytes"] == r["xla"]["total bytes"]
                and r[side]["link bytes"] == r["xla"]["link bytes"]]  # fmt: skip
        result[side] = {
            "all": compared(moving, side),
            "s8": compared([r for r in moving if r["suite"] == "s8"], side),
            "s16": compared([r for r in moving if r["suite"] == "s16"], side),
            "without full rematerialisation": compared(kept, side),
            "as many bytes in all and on the busiest link": compared(same, side),
            "slower than xla beyond the floor": _losses(moving, side, floor),
            "slower than xla beyond the p90 of the controls": _losses(moving, side, calm),
        }
    return result


def _losses(rows: list[dict[str, Any]], side: str, floor: float) -> list[dict[str, Any]]:
    """The problems on which a side takes longer than XLA by more than the noise floor, the worst first."""
    lost = [(x, name) for x, name in ratios(rows, side, "seconds") if x < math.exp(-floor)]
    predicted = {name: x for x, name in ratios(rows, side, "predicted")}
    return [{"xla over ours": x, "predicted": predicted[name], "problem": name} for x, name in sorted(lost)]


def shown(result: dict[str, Any]) -> str:
    """The tables that are printed."""
    lines: list[list[Any]] = []
    for side in OURS:
        for part in ("all", "s8", "s16", "without full rematerialisation"):
            for name, v in result[side][part].items():
                lines.append([f"{side}, {part}: {name}", v["count"], v["geomean"], v["median"], v["min"], v["max"]])
    flat = [[k, str(v)] for k, v in result.items() if k not in OURS and not isinstance(v, list)]
    for side in OURS:
        beyond = result[side]["slower than xla beyond the p90 of the controls"]
        flat += [[f"{side} slower: {x['problem']}", f"{x['xla over ours']:.3f}"] for x in beyond]
    headers = ("XLA over ours", "count", "geomean", "median", "min", "max")
    return table(headers, lines) + table(("", ""), flat)


def main() -> None:
    parser = arguments("lab_redistribution", "Our redistribution and XLA's on real links.", 56, of="problems of s8")
    parser.add_argument("--count16", type=int, default=36, help="problems of s16 (default %(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--repetitions", type=int, default=5, help="timed runs of each (default %(default)s)")
    parser.add_argument("--most-late", type=float, default=0.01, help="seconds a rank may start late")
    parser.add_argument("--fresh", action="store_true", help="do not go on from the result file")
    parser.add_argument("--cache", type=Path, default=Path(tempfile.gettempdir()) / "shardplan_lab_hlo")
    parser.add_argument("--child", choices=tuple(DEVICES), help="compile a suite's problems into --cache, and end")
    options = parser.parse_args()
    if options.child:
        compile_child(options.child, options.count, options.seed, options.cache)
        return
    if lacking := missing():
        raise SystemExit(lacking)
    run(options)


def run(options: argparse.Namespace) -> None:
    """Both suites."""
    counts = {"s8": options.count, "s16": options.count16}
    parameters = {**counts, "seed": options.seed, "repetitions": options.repetitions,
                  "clusters": {k: f"{c} at {r} Mbit/s" for k, (c, r) in CLUSTERS.items()}}  # fmt: skip
    rows: dict[str, dict[str, Any]] = {}
    if options.out.exists() and not options.fresh:
        rows = {r["problem"]: r for r in json.loads(options.out.read_text(encoding="utf-8"))["rows"]}
    texts = {suite: compiled(suite, n, options.seed, options.cache) for suite, n in counts.items() if n}
    kept: list[dict[str, Any]] = []
    for suite, hlo in texts.items():
        cluster = Cluster.of(*CLUSTERS[suite])
        own = problems(suite, counts[suite], options.seed)
        lab: Lab | None = None
        try:
            for k, ((s, t), text) in enumerate(zip(own, hlo, strict=True)):
                row = rows.get(text["problem"])
                if row is None:
                    started = time.monotonic()
                    for attempt in range(2):
                        try:
                            lab = lab or Lab(cluster, most_late=options.most_late).__enter__()
                            row = problem(lab, s, t, text, k, options.repetitions)
                            break
                        except WrongResult:
                            raise
                        except (BackendError, TimedOut) as error:
                            print(f"  {'failed' if attempt else 'again'}: {error}", flush=True)
                            if lab is not None:
                                lab.close()
                                lab = None
                    if row is None:
                        continue
                    seconds = [row[side]["seconds"] if row[side] else math.nan for side in ("xla", *OURS)]
                    print(f"{time.monotonic() - started:5.1f} s  {suite} {k + 1} of {len(own)}  "
                          + "  ".join(f"{1e3 * x:.0f}" for x in seconds) + f" ms  {row['problem']}",
                          flush=True)  # fmt: skip
                kept.append(row)
                rows.pop(row["problem"], None)
                so_far = [*kept, *rows.values()]  # what an earlier run found must not be lost
                write(options.out, record(parameters, summary(so_far) | {"rows": so_far}), quiet=True)
        finally:
            if lab is not None:
                lab.close()
    result = summary(kept)
    print(shown(result))
    write(options.out, record(parameters, result | {"rows": kept}))


if __name__ == "__main__":
    main()

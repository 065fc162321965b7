"""Planning cold: every request that the project states a time for, each case in a process of its own.

`python -m benchmarks.planning_cases [--count 200] [--random 10000] [--types 3000] [--only NAME ...]`.

| case | requests |
|---|---|
| 16, 1,024, 65,536 devices | seeded problems of `planning_time`, no topology |
| placement, topology | on 256 devices of dgx-h100: a drawn placement each, and the topology over its placements |
| ..., calls | the same again, with the calls of functions of the package counted (target 30,000) |
| ... with a limit | a quarter of them with a limit of 1.1, 1.5 or 2 times source and destination, refusals included |
| random | problems of the suites U, N, V and M on drawn meshes of up to 4,096 devices: the worst |
| batch | 3,000 tensors of six types, and of 3,000, on 64 devices and three axes, without and with a limit |
| placements | all 297 of (32, 16, 16) on 64 x 4 x 4 x 8, the best reduction of each, and all their programs |

A time is of the processor (other work on the machine is not counted; the clock's is beside it) and of a call,
certificate included, of a request that the process has not made before; what it keeps from
other requests (graphs of types) it may use. The peak is the process's, imports included. `--types` makes the batch of
as many types smaller: the time of 3,000 is then that of a line through the origin, and the row says so.
"""

from __future__ import annotations

import math
import multiprocessing
import random
import resource
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from benchmarks.common import Progress, arguments, record, spread, table, told, write
from benchmarks.placement_set import place_large
from benchmarks.planning_time import problems

import shardplan as sp
from benchmarks import suites

TENSORS = 3000
SHARES = (1.1, 1.5, 2.0)  # limits, over source and destination
MOST = 4096
TARGETS = {  # seconds: of the median, or of the one request; with a limit twice that
    "16 devices": 3e-3, "1024 devices": 10e-3, "65536 devices": 0.1, "placement of 256": 50e-3, "topology of 256": 0.1,
    "random up to 4096": 1.0, "3000 tensors of 6 types": 0.5, "3000 tensors of 3000 types": 5.0, "297 placements": 3.0,
}  # fmt: skip
SLOWEST = 10  # requests that a row lists
CALLS = ", calls"  # what the name of a case ends in that counts them
PACKAGE = str(Path(sp.__file__).parent)
Request = tuple[Any, Any, dict[str, Any]]


def limited(requests: Iterator[Request], seed: int) -> Iterator[Request]:
    """The requests with a limit."""
    rng = random.Random(f"limits {seed}")
    for s, t, keywords in requests:
        both = [sum(x.local_bytes() for x in (end if isinstance(end, list) else [end])) for end in (s, t)]
        yield s, t, keywords | {"memory_limit": math.ceil(rng.choice(SHARES) * sum(both))}


def seeded(devices: int, where: str, seed: int, count: int) -> Iterator[Request]:
    """Problems of so many devices, on no topology, on dgx-h100, or on a drawn placement of it."""
    rng = random.Random(f"placements {seed}")
    topology = sp.Topology.load("dgx-h100", nodes=devices // 8) if where else None
    for s, t in problems(devices, seed, count):
        if topology is None:
            yield s, t, {}
        elif where == "topology":
            yield s, t, {"topology": topology}
        else:
            yield s, t, {"topology": rng.choice(list(sp.placements(s.mesh, topology)))}


def anything(seed: int, count: int) -> Iterator[Request]:
    """Problems of any kind on meshes of 1 to 4 axes, of any sizes, of up to 4,096 devices."""
    rng, found = random.Random(f"anything {seed}"), 0
    while found < count:
        sizes: list[int] = []
        room = int(2 ** rng.uniform(1, math.log2(MOST)))
        for _ in range(rng.randint(1, 4)):
            sizes.append(rng.randint(1, max(1, room // math.prod(sizes))))
        mesh, ndim = suites.make_mesh(sizes), rng.randint(1, 4)
        try:
            match rng.choice(("U", "U", "P", "N", "V", "M")):
                case "U":
                    s, t = suites.even_pair(rng, mesh, ndim)
                case "P":
                    s, t = suites.even_pair(rng, mesh, ndim, axes=suites.atoms(mesh))
                case "N":
                    s, t = suites.uneven_pair(rng, mesh, min(ndim, 3))
                case "V":
                    s, t = suites.partial_pair(rng, mesh, min(ndim, 3))
                case _:
                    s, t = suites.cross_pair(rng, mesh, suites.other_mesh(rng, mesh, MOST), min(ndim, 3))
        except sp.LayoutError:
            continue
        both = set(s.layout.partial) & set(t.layout.partial) if s.mesh == t.mesh else set[str]()
        if s != t and not (both and s.layout.reduction != t.layout.reduction):
            found += 1
            yield s, t, {}


def batch(kinds: int, tensors: int, seed: int) -> Iterator[Request]:
    """One batch on 64 devices and three axes, of so many types of tensors, one after another."""
    rng, mesh, pool = random.Random(f"batch {kinds} {seed}"), suites.make_mesh((4, 4, 4)), dict[Any, None]()
    while len(pool) < kinds:
        s, t = suites.even_pair(rng, mesh, rng.choice((2, 3)), dtype="bf16", most_multiple=16, least=64)
        if s != t:
            pool[s, t] = None
    pairs = [list(pool)[k % kinds] for k in range(tensors)]
    yield [s for s, _ in pairs], [t for _, t in pairs], {}


def placements(library: str) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Rank all placements of 8,192 devices with the best reduction each, then make all their programs."""
    ranking: list[Any] = []
    yield f"rank, {library}", lambda: ranking.extend(place_large(library))
    yield f"programs, {library}", lambda: [row.plans for row in ranking]


def cases(count: int, anyhow: int, types: int, seed: int) -> dict[str, Callable[[], Iterator[Any]]]:
    """Every case by name: its requests, or pieces of work."""
    out: dict[str, Callable[[], Iterator[Any]]] = {}

    def add(name: str, make: Callable[[int], Iterator[Request]]) -> None:
        out[name] = lambda: make(count)
        out[f"{name}, limit"] = lambda: limited(make(max(1, count // 4)), seed)

    for devices in (16, 1024, 65536):
        add(f"{devices} devices", lambda n, devices=devices: seeded(devices, "", seed, n))
    for where in ("placement", "topology"):
        add(f"{where} of 256", lambda n, where=where: seeded(256, where, seed, n))
    out[f"topology of 256{CALLS}"] = lambda: seeded(256, "topology", seed, count)
    out[f"random up to {MOST}"] = lambda: anything(seed, anyhow)
    add(f"{TENSORS} tensors of 6 types", lambda n: batch(6, TENSORS, seed))
    add(f"{TENSORS} tensors of {TENSORS} types", lambda n: batch(types, types, seed))
    out["297 placements"] = lambda: (work for library in ("ring", "nccl") for work in placements(library))
    return out


def measured(name: str, options: tuple[int, int, int, int]) -> dict[str, Any]:
    """Make every request of a case, in this process."""
    rows: list[tuple[float, float, str]] = []
    calls: list[int] = []
    refused = 0
    for number, request in enumerate(cases(*options)[name]()):
        if len(request) == 2:
            text, work = request
        else:
            s, t, keywords = request
            shown = {k: v for k, v in keywords.items() if k != "topology"}
            text, work = told(s, t, **shown), lambda s=s, t=t, keywords=keywords: sp.redistribute(s, t, **keywords)
        clock, processor = time.perf_counter(), time.process_time()
        try:
            if name.endswith(CALLS):
                calls.append(calls_of(work))
            else:
                work()
        except sp.Infeasible:
            refused += 1
        rows.append((time.process_time() - processor, time.perf_counter() - clock, f"{number}: {text}"))
    slowest = [{"seconds": s, "clock": c, "request": text} for s, c, text in sorted(rows, reverse=True)[:SLOWEST]]
    return {
        "seconds": spread([s for s, _, _ in rows]),
        "clock": spread([c for _, c, _ in rows]),
        "refused": refused,
        "peak MB": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        "slowest": slowest,
    } | ({"calls": spread(calls)} if calls else {})


def calls_of(work: Callable[[], Any]) -> int:
    """How many calls of functions of the package a piece of work makes."""
    count = 0

    def see(frame: Any, event: str, _: Any) -> None:
        nonlocal count
        count += event == "call" and PACKAGE in frame.f_code.co_filename

    sys.setprofile(see)
    try:
        work()
    finally:
        sys.setprofile(None)
    return count


def main() -> None:
    parser = arguments("planning_cases", "Planning times, cold.", 200, of="problems of a number of devices")
    parser.add_argument("--random", type=int, default=10_000, help="random problems (default %(default)s)")
    parser.add_argument(
        "--types", type=int, default=TENSORS, help="of the batch of as many types (default %(default)s)"
    )
    parser.add_argument("--only", nargs="+", help="cases, by the start of their names")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    asked = options.count, options.random, options.types, options.seed
    names = [n for n in cases(*asked) if not options.only or n.startswith(tuple(options.only))]
    progress, found = Progress("cases", len(names)), dict[str, dict[str, Any]]()
    for name in names:
        # A process of its own: nothing is warm, and the peak is the case's.
        with multiprocessing.get_context("spawn").Pool(1) as alone:
            found[name] = alone.apply(measured, (name, asked))
        base, _, limit = name.partition(", ")
        target = TARGETS[base] * (2 if limit and f", {limit}" != CALLS else 1)
        found[name]["target seconds"] = target
        if base.endswith(f"of {TENSORS} types") and options.types < TENSORS:
            found[name]["extrapolated"] = found[name]["seconds"]["max"] * TENSORS / options.types
        progress.add(1, name)
    heads = ("case", "requests", "refused", "median ms", "p90 ms", "max ms", "target ms", "clock, median ms", "peak MB",
             "3,000 types ms")  # fmt: skip
    lines = []
    for name, one in found.items():
        row = [*(one["seconds"][k] for k in ("median", "p90", "max")), one["target seconds"], one["clock"]["median"]]
        whole = 1e3 * one["extrapolated"] if "extrapolated" in one else None
        lines.append([name, one["seconds"]["count"], one["refused"], *(1e3 * x for x in row), one["peak MB"], whole])
    print(table(heads, lines, "planning, cold (targets: of the median; of random, batches and placements of the max)"))
    for name, one in found.items():
        if "calls" in one:
            print(f"{name}: median {one['calls']['median']:.0f}, p90 {one['calls']['p90']:.0f}, at most "
                  f"{one['calls']['max']:.0f}")  # fmt: skip
    parameters = {"count": options.count, "random": options.random, "types": options.types, "seed": options.seed,
                  "limits over both ends": SHARES, "most devices": MOST}  # fmt: skip
    write(options.out, record(parameters, {"cases": found}))


if __name__ == "__main__":
    main()

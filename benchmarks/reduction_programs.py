"""Every enumerated reduction program run on integers: as instructions, on the numpy reference, and some on gloo.

`python -m benchmarks.reduction_programs [--count 40]`: all programs of at most five instructions over factors of
(2, 2), (2, 4), (3, 2) and (2, 2, 2). Each is run in the interpreter of instructions, which knows neither the checker's
bitmasks nor types; where it types, as a typed program on the numpy reference, its certificate checked and its price
compared with the enumeration's; and `--count` of each, evenly drawn, on as many gloo processes as there are members.
Data are random integers: sums must be equal bit for bit. Also how many programs type at four and five instructions,
and the graphs over unequal sizes.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from benchmarks.common import Progress, arguments, record, table, use_tests, write
from benchmarks.processes import be_rank, launch, of_all_ranks

import shardplan as sp
from shardplan.hardware.level import Level
from shardplan.movement.reductions.enumeration import Reduction
from shardplan.movement.reductions.state_graph import explore, state_graph
from shardplan.movement.reductions.state_matrix import check

SIZES = ((2, 2), (2, 4), (3, 2), (2, 2, 2))
LIMITS = (3, 4, 5, 6, 7)
UNEQUAL = ((2, 2, 2), (3, 2, 2), (2, 3, 2), (2, 2, 3), (4, 2, 2))
NBYTES = 4 * 24  # a device; every product of sizes divides its 24 elements
PINNED = {(1, 4): (3, 3), (1, 5): (3, 3), (2, 4): (71, 71), (2, 5): (93, 93), (3, 4): (385, 378), (3, 5): (1635, 1533)}


def placed(sizes: Sequence[int]) -> sp.Placement:
    """One axis over as many levels of switches, each slower than the next."""
    levels = tuple(Level(f"l{k}", n, "switch", 1e9 * 10**k, 1e-6) for k, n in enumerate(sizes))
    return next(sp.placements(sp.Mesh(a=math.prod(sizes)), sp.Topology("test", levels)))


def programs(sizes: Sequence[int]) -> list[Reduction]:
    """All programs of at most five instructions."""
    return sp.reductions(placed(sizes), "a", NBYTES, limit=5)


def data(program: sp.Program) -> list[np.ndarray]:
    """A shard of random integers for every device, in the program's dtype, which holds their sums."""
    source = program.input_types[0]
    rng = np.random.default_rng(source.mesh.size)
    return [rng.integers(-1000, 1000, source.local_shape(k)).astype(np.float32) for k in range(source.mesh.size)]


def instructions_wrong(sizes: Sequence[int], every: Sequence[Reduction]) -> int:
    """How many programs give other sums than numpy's in the interpreter, or leave rows out."""
    count = math.prod(sizes)
    addends = np.random.default_rng(count).integers(-(10**6), 10**6, (count, count))
    wrong = 0
    for one in every:
        values, rows = use_tests("instruction_oracle").run_instructions(sizes, one.instructions, addends)
        wrong += not ((values == addends.sum(axis=0)).all() and all(len(r) == count for r in rows))
    return wrong


def checker_refuses(sizes: Sequence[int], every: Sequence[Reduction]) -> int:
    """How many programs the state-matrix checker refuses at their true sizes."""
    refused = 0
    for one in every:
        try:
            check(sizes, one.instructions, "U" * len(sizes))
        except sp.TypingError:
            refused += 1
    return refused


def run_reference(sizes: Sequence[int], every: Sequence[Reduction]) -> dict[str, int]:
    """Run what types on the reference, check the certificates, and compare prices."""
    typed = wrong = certificates = prices = 0
    progress = Progress(f"reference {sizes}", len(every))
    for one in every:
        progress.add()
        plan = one.plan
        if plan is None:
            continue
        typed += 1
        shards = data(plan.program)
        total = np.sum(shards, axis=0)
        wrong += not all(np.array_equal(x, total) for x in sp.run(plan.program, shards))
        try:
            plan.certificate.check()
        except sp.CertificateError:
            certificates += 1
        prices += not math.isclose(plan.certificate.seconds, one.seconds, rel_tol=1e-9)
    return {"typed": typed, "reference wrong": wrong, "certificates failing": certificates, "prices off": prices}


def sample(every: Sequence[Reduction], count: int) -> list[Reduction]:
    """Typed programs, drawn evenly over the order of their prices."""
    typed = [one for one in every if one.program is not None]
    return typed[:: max(1, len(typed) // count)][:count] if count else []


def child(sizes: tuple[int, ...], count: int) -> dict[str, int]:
    """Run a sample on this rank; what was wrong on any."""
    import torch
    import torch.distributed as dist

    rank, wrong = dist.get_rank(), 0
    chosen = sample(programs(sizes), count)
    for one in chosen:
        program = one.program
        assert program is not None
        shards = data(program)
        out = sp.run(program, [torch.from_numpy(shards[rank])], backend="torch", timeout=60.0)
        wrong += not np.array_equal(out[0].numpy(), np.sum(shards, axis=0))
    return {"programs": len(chosen), "wrong": sum(of_all_ranks(wrong))}


def typing() -> list[dict[str, Any]]:
    """How many programs type, by the number of factors and the limit, and whether that is as pinned."""
    rows: list[dict[str, Any]] = []
    for depth in (1, 2, 3):
        place = placed((2,) * depth)
        for limit in (4, 5):
            every = sp.reductions(place, "a", NBYTES, limit=limit)
            typed = sum(one.path is not None for one in every)
            rows.append({"factors": depth, "limit": limit, "programs": len(every), "type": typed,
                         "do not": len(every) - typed,
                         "as pinned": PINNED[depth, limit] == (len(every), typed)})  # fmt: skip
    return rows


def unequal() -> list[dict[str, Any]]:
    """States and programs of three factors of other sizes, and the programs of (2, 2, 2) that are wrong there."""
    rows: list[dict[str, Any]] = []
    count = use_tests("instruction_oracle").count_programs
    for sizes in UNEQUAL:
        found = explore(sizes)
        rows.append({"sizes": sizes, "states": found.count, "live": int(found.live().sum())}
                    | {f"programs <= {n}": count(found, n) for n in LIMITS})  # fmt: skip
    return rows


def lost(sizes: tuple[int, ...], limit: int) -> list[str]:
    """Programs of the graph over (2, .., 2) that the checker refuses at other sizes."""
    graph = state_graph(len(sizes))
    out: list[str] = []
    for path in graph.programs(limit):
        program = graph.instructions(path)
        if len(program) < limit:
            continue
        try:
            check(sizes, program, "U" * len(sizes))
        except sp.TypingError:
            out.append("; ".join(step.form(len(sizes)) for step in program))
    return out


def main() -> None:
    parser = arguments("reduction_programs", "Reduction programs on integers.", 40, of="programs on gloo, of each size")
    parser.add_argument("--inside", type=int, nargs="+", help="sizes; in a process that was launched")
    options = parser.parse_args()
    if options.inside:
        be_rank(lambda: child(tuple(options.inside), options.count))
        return
    started = time.perf_counter()
    rows: list[dict[str, Any]] = []
    for sizes in SIZES:
        every = programs(sizes)
        row: dict[str, Any] = {"sizes": sizes, "programs": len(every), "checker refuses": checker_refuses(sizes, every),
                               "instructions wrong": instructions_wrong(sizes, every)}  # fmt: skip
        row |= run_reference(sizes, every)
        if options.count:
            found, _ = launch(Path(__file__), math.prod(sizes), "--inside", *sizes, "--count", options.count)
            row |= {"on gloo": found["programs"], "gloo wrong": found["wrong"]}
        rows.append(row)
        print(row, file=sys.stderr, flush=True)
    heads = tuple(rows[0])
    print(table(heads, [[r[h] for h in heads] for r in rows], "programs of at most 5 instructions, on integers"))
    types = typing()
    print(table(tuple(types[0]), [list(r.values()) for r in types], "programs that type"))
    graphs = unequal()
    print(table(tuple(graphs[0]), [list(r.values()) for r in graphs], "the graph over three factors"))
    away = lost((3, 2, 2), 7)
    print("wrong at (3, 2, 2) though valid at (2, 2, 2):", *away, sep="\n  ")
    zero = (
        "checker refuses",
        "instructions wrong",
        "reference wrong",
        "certificates failing",
        "prices off",
        "gloo wrong",
    )
    total = sum(row.get(k, 0) for row in rows for k in zero)
    result = {"wrong": total, "pass": not total and all(r["as pinned"] for r in types), "sizes": rows, "typing": types,
              "three factors": graphs, "lost at (3, 2, 2)": away, "seconds": time.perf_counter() - started}  # fmt: skip
    write(options.out, record({"count": options.count, "limit": 5, "bytes": NBYTES}, result))


if __name__ == "__main__":
    main()

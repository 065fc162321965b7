"""Our redistribution of torch tensors beside its peers, on real processes over gloo, interleaved in one launch.

`python -m benchmarks.torch_vs_dtensor [--count 30] [--repeats 7] [--seed 0]` launches 8 processes. Problems are those
of suite s8, scaled to shards of about 1 MiB. Each repetition runs every way once, in turn; the time of a run is that of
its slowest rank. Ways: `ours` (the drop-in, as a user calls it), `portable` (our plan of MPI-style collectives,
composed of messages), `native` (the same plan by gloo's own collectives, where it has them), DTensor `greedy` and
`min-cost` as they are and with a real all-to-all in place of the all-gather that torch has on
CPU (`greedy*`, `min-cost*`: the fair peer), `one-shot` (a single all_to_all_single on box intersections). Beside the
time: payload that the kernel counted on the sockets of the worst rank, the largest storage and the most live storage of
any rank, source included. Then each collective alone, native and composed. What a call costs is in `dtensor_calls`.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

from benchmarks.common import ROOT, arguments, geomean, record, single, table, told, use_tests, write
from benchmarks.processes import be_rank, launch

from benchmarks import suites

WAYS = ("ours", "portable", "native", "greedy", "min-cost", "greedy*", "min-cost*", "one-shot")
SHARD = 2**20  # bytes
COLLECTIVES = {  # on 8 ranks, the larger shard 1 MiB
    "all_gather": ("f32[262144@x]", "all_gather(%0; dim=0, axes=(x))"),
    "reduce_scatter": ("f32[262144]{+x}", "reduce_scatter(%0; dim=0, axes=(x))"),
    "all_reduce": ("f32[262144]{+x}", "all_reduce(%0; axes=(x))"),
    "all_to_all": ("f32[2048@x, 1024]", "all_to_all(%0; src_dim=0, dst_dim=1, axes=(x))"),
}


def scaled(s: Any, t: Any) -> tuple[Any, Any]:
    """The problem with its dims multiplied until the larger shard has about `SHARD` bytes."""
    from shardplan.core.tensor import TensorType

    shape = list(s.shape)
    k = 0
    while max(TensorType(s.dtype, shape, x.layout, x.mesh).local_bytes() for x in (s, t)) * 2 <= SHARD:
        shape[k % len(shape)] *= 2
        k += 1
    return tuple(TensorType(s.dtype, shape, x.layout, x.mesh) for x in (s, t))  # type: ignore[return-value]


def child(count: int, repeats: int, seed: int) -> dict[str, Any]:
    """Run the problems on this rank."""
    return {"rows": [_problem(*scaled(s, t), repeats) for s, t in single(suites.problems("s8", seed, count))]}


def _problem(s: Any, t: Any, repeats: int) -> dict[str, Any]:
    """Time one move every way, interleaved, on the ranks of this launch."""
    import torch
    import torch.distributed as dist
    from benchmarks.peers.dtensor_run import cached_by, dtensor, one_shot, placements_of, real_all_to_all
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor

    import shardplan as sp
    from shardplan.interop.torch import redistribute

    rank = dist.get_rank()
    mesh = DeviceMesh("cpu", torch.arange(s.mesh.size).reshape(s.mesh.sizes), mesh_dim_names=s.mesh.axes)
    full = torch.arange(s.nbytes // 4, dtype=torch.float32).reshape(s.shape)
    cut = [full[tuple(slice(a, b) for a, b in x.box(rank))].clone() for x in (s, t)]
    source, target = placements_of(s, mesh), placements_of(t, mesh)
    x = DTensor.from_local(cut[0], mesh, source, run_check=False, shape=full.shape, stride=full.stride())
    portable = sp.redistribute(s, t, portable=True)
    shot = one_shot(s, t, rank)

    def stock(min_cost: bool, real: bool) -> Callable[[], torch.Tensor]:
        def run() -> torch.Tensor:
            with cached_by(str(min_cost), min_cost), real_all_to_all(real):
                return dtensor(x, target)

        return run

    ways: dict[str, Callable[[], torch.Tensor]] = {
        "ours": lambda: redistribute(x, target).to_local(),
        "portable": lambda: _direct(portable.program, cut[0]),
        "native": lambda: _natively(portable.program, cut[0]),
        "greedy": stock(False, False),
        "min-cost": stock(True, False),
        "greedy*": stock(False, True),
        "min-cost*": stock(True, True),
        "one-shot": lambda: shot(cut[0]),
    }
    row: dict[str, Any] = {"problem": told(s, t), "bound": sp.redistribute(s, t).certificate.bound_bytes}
    row["lower bound"] = max(sp.redistribute(s, t).certificate.lower_bound_bytes)
    return row | _timed(ways, cut[0], cut[1], repeats)


def _timed(ways: dict[str, Callable[[], Any]], source: Any, expected: Any, repeats: int) -> dict[str, Any]:
    """Time every way, interleaved: the slowest rank's medians, and the facts of the worst rank."""
    import torch
    import torch.distributed as dist

    found = {name: _facts(run, source, expected) for name, run in ways.items()}
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(repeats):
        for name, run in ways.items():
            dist.barrier()
            started = time.perf_counter()
            run()
            seconds[name].append(time.perf_counter() - started)
    row: dict[str, Any] = {}
    for name in ways:
        mine = torch.tensor([*seconds[name], *found[name]], dtype=torch.float64)
        everyone = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
        dist.all_gather(everyone, mine)
        worst = torch.stack(everyone).max(dim=0).values.tolist()
        row[name] = {
            "seconds": statistics.median(worst[:repeats]),
            "wire": int(worst[repeats]),
            "largest": int(worst[repeats + 1]),
            "peak": int(worst[repeats + 2]),
            "wrong": int(worst[repeats + 3]),
        }
    return row


def _direct(program: Any, local: Any) -> Any:
    """The plan on this rank; its first run compares the programs of the ranks, as the drop-in's does."""
    from shardplan.execution.async_executor import finish
    from shardplan.execution.torch.run import executable, launch

    bound = executable(program, _rank())
    return finish(launch(bound, {bound.input_name: local}, 300.0))[0]


def _natively(program: Any, local: Any) -> Any:
    """The plan on this rank, by gloo's own collectives."""
    os.environ["SHARDPLAN_NATIVE"] = "gloo"
    try:
        return _direct(program, local)
    finally:
        del os.environ["SHARDPLAN_NATIVE"]


def collectives(repeats: int, world: int) -> dict[str, Any]:
    """Run every collective alone, composed of messages and by gloo's own."""
    import numpy as np
    import torch

    import shardplan as sp
    from shardplan.core.reference import run_reference

    rows = []
    for name, (source, op) in COLLECTIVES.items():
        program = sp.Program.parse(f"program\nmesh x={world}\ninput %0: {source}\n%1 = {op}\noutput %1")
        (t,) = program.input_types
        whole = np.arange(np.prod(t.shape), dtype=np.float32).reshape(t.shape) % 1000  # whose sums are exact
        shards = sp.distribute(whole, t)
        (wanted,) = run_reference(program, [shards])
        mine, want = torch.from_numpy(shards[_rank()].copy()), torch.from_numpy(wanted[_rank()])
        ways = {
            "composed": lambda p=program, x=mine: _direct(p, x),
            "native": lambda p=program, x=mine: _natively(p, x),
        }
        rows.append({"collective": name, **_timed(ways, mine, want, repeats)})
    return {"rows": rows}


def _rank() -> int:
    import torch.distributed as dist

    return dist.get_rank()


def _facts(run: Callable[[], Any], source: Any, expected: Any) -> tuple[int, int, int, int]:
    """Bytes received on sockets, the largest storage, the most live storage, and whether the result is wrong."""
    import torch
    import torch.distributed as dist

    storages = use_tests("execution.storages")
    sockets = use_tests("sockets")
    run()  # plans, connections
    dist.barrier()
    before = sockets.on_the_wire()[1]
    with storages.Storages(source) as tally:
        out = run()
        wrong = not torch.equal(out, expected)
    dist.barrier()
    received = sockets.on_the_wire()[1] - before
    return received, tally.largest, tally.peak, int(wrong)


def main() -> None:
    parser = arguments("torch_vs_dtensor", "Redistribution of torch tensors beside its peers.", 30, of="problems")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    me = ROOT / "benchmarks" / "torch_vs_dtensor.py"
    found, _ = launch(me, 8, options.count, options.repeats, options.seed)
    alone, _ = launch(me, 8, 3 * options.repeats, 8)
    rows = found["rows"]
    summary: dict[str, Any] = {}
    for name in WAYS:
        ratios = [row[name]["seconds"] / row["ours"]["seconds"] for row in rows]
        summary[name] = {
            "time / ours, geomean": geomean(ratios),
            "max": max(ratios),
            "min": min(ratios),
            "wire / lower bound": geomean(r[name]["wire"] / r["lower bound"] for r in rows if r["lower bound"]),
            "largest / bound": geomean(r[name]["largest"] / r["bound"] for r in rows),
            "largest / bound, max": max(r[name]["largest"] / r["bound"] for r in rows),
            "peak / bound": geomean(r[name]["peak"] / r["bound"] for r in rows),
            "wrong": sum(r[name]["wrong"] for r in rows),
        }
    heads = list(summary["ours"])
    print(table(("way", *heads), [[n, *(v[h] for h in heads)] for n, v in summary.items()], f"{len(rows)} problems"))
    shown = [
        [r["collective"], r["native"]["seconds"] / r["composed"]["seconds"], r["composed"]["wire"], r["native"]["wire"]]
        for r in alone["rows"]
    ]
    heads = ("1 MiB on 8 ranks", "native / composed, time", "composed, bytes on sockets", "native, bytes")
    print(table(heads, shown, "gloo's own collectives"))
    parameters = {
        "count": options.count,
        "repeats": options.repeats,
        "seed": options.seed,
        "suite": "s8",
        "shard": SHARD,
    }
    result = {"summary": summary, "rows": rows, "collectives": alone["rows"]}
    write(options.out, record(parameters, result))


if __name__ == "__main__":
    if "RANK" in os.environ:
        sys.path[:0] = [str(ROOT), str(ROOT / "src")]
        be_rank(lambda: (collectives, child)[len(sys.argv) - 3](*map(int, sys.argv[1:])))
    else:
        main()

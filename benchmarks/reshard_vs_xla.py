"""`interop.jax.reshard` beside XLA's own resharding, in one process of eight forced CPU devices.

`python -m benchmarks.reshard_vs_xla [--count 40] [--seed 0] [--repeats 9]`. Problems of the suite s8, scaled so that
the larger of the two local shards is about 1 MiB. Ours is `reshard` inside `jit`, XLA's is `jit(lambda x: x)` with
`in_shardings` and `out_shardings` (`jax.device_put` between shardings of one mesh is that, too); both are compiled
ahead, then timed in turn, the order changing each time. Reported of each problem: the bytes that the worst device
receives and the largest array, read off the compiled HLO; the compiler's temporary bytes; compile time; the medians.

Caveat: eight devices share the cores of one machine, and a collective is a copy in memory. The times say how many
copies there are, nothing about links: they support no claim of speed on accelerators. Bytes do not depend on that.
"""

from __future__ import annotations

import json
import statistics
import time
from typing import Any

import numpy as np
from benchmarks.common import Progress, arguments, geomean, record, spread, table, write
from benchmarks.peers.hlo import collective_text, largest_bytes, received_bytes
from benchmarks.processes import with_devices

from benchmarks import suites
from shardplan.core.tensor import TensorType
from shardplan.interop.hlo import parse_hlo

DEVICES = 8
LOCAL_BYTES = 2**20


def scaled(s: TensorType, t: TensorType) -> tuple[TensorType, TensorType]:
    """The problem with its first dim enlarged until the larger local shard has about `LOCAL_BYTES`."""
    factor = max(1, LOCAL_BYTES // max(s.local_bytes(), t.local_bytes()))
    shape = (s.shape[0] * factor, *s.shape[1:])
    return TensorType(s.dtype, shape, s.layout, s.mesh), TensorType(t.dtype, shape, t.layout, t.mesh)


def compile_one(f: Any, s: TensorType, sharding: Any) -> tuple[Any, dict[str, Any]]:
    """The executable and what can be read off it."""
    import jax

    started = time.perf_counter()
    executable = f.lower(jax.ShapeDtypeStruct(s.shape, np.float32, sharding=sharding)).compile()
    seconds = time.perf_counter() - started
    text = executable.as_text()
    collectives = parse_hlo(text, s.mesh.size)
    received = np.sum([received_bytes(c, s.mesh.size) for c in collectives], axis=0) if collectives else np.zeros(1)
    return executable, {
        "received": int(np.max(received)),
        "largest": largest_bytes(text),
        "temporary": int(executable.memory_analysis().temp_size_in_bytes),
        "compile seconds": seconds,
        "collectives": [collective_text(c) for c in collectives],
    }


def problem(s: TensorType, t: TensorType, repeats: int) -> dict[str, Any]:
    """One problem, both ways."""
    import jax
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    from shardplan.interop.jax import plan_of, reshard

    devices = np.array(jax.devices()[: s.mesh.size]).reshape(s.mesh.sizes)
    before, after = (NamedSharding(Mesh(devices, x.mesh.axes), PartitionSpec(*x.layout.spec)) for x in (s, t))
    ours = jax.jit(lambda x: reshard(x, after, source=before), in_shardings=before, out_shardings=after)
    theirs = jax.jit(lambda x: x, in_shardings=before, out_shardings=after)
    started = time.perf_counter()
    plan = plan_of(s, t)
    planning = time.perf_counter() - started
    runs = {"ours": compile_one(ours, s, before), "xla": compile_one(theirs, s, before)}
    array = jax.device_put(np.arange(int(np.prod(s.shape)), dtype=np.float32).reshape(s.shape), before)
    results = {name: run(array) for name, (run, _) in runs.items()}
    equal = bool(np.array_equal(np.asarray(results["ours"]), np.asarray(results["xla"])))
    samples: dict[str, list[float]] = {name: [] for name in runs}
    for k in range(repeats):
        for name in sorted(runs, reverse=bool(k % 2)):
            started = time.perf_counter()
            runs[name][0](array).block_until_ready()
            samples[name].append(time.perf_counter() - started)
    c = plan.certificate
    return {
        "problem": f"{s.mesh}: {s} -> {t}",
        "equal": equal,
        "bound": c.bound_bytes,
        "lower bound": max(c.lower_bound_bytes),
        "workspace": c.workspace_bytes,
        "operand and result": s.local_bytes() + t.local_bytes(),
        "planning seconds": planning,
        "program": [step.op.name for step in plan.program.steps],
        **{name: facts | {"seconds": statistics.median(samples[name])} for name, (_, facts) in runs.items()},
    }


def rows(count: int, seed: int, repeats: int) -> list[dict[str, Any]]:
    """All problems, in this process, which has eight devices."""
    out: list[dict[str, Any]] = []
    progress = Progress("problems", count)
    for s, t, _ in suites.problems("s8", seed, count):
        assert isinstance(s, TensorType) and isinstance(t, TensorType)
        out.append(problem(*scaled(s, t), repeats))
        progress.add()
    return out


def ratios(found: list[dict[str, Any]], key: str) -> list[float]:
    """XLA's number over ours, of the problems where both are more than 0."""
    return [r["xla"][key] / r["ours"][key] for r in found if r["ours"][key] and r["xla"][key]]


def summary(found: list[dict[str, Any]]) -> dict[str, Any]:
    """What the rows come to."""
    memory = [(r["operand and result"] + r["ours"]["temporary"]) / r["workspace"] for r in found]
    bounded = [r for r in found if r["lower bound"]]
    return {
        "problems": len(found),
        "unequal results": sum(not r["equal"] for r in found),
        "xla over ours": {
            name: spread(ratios(found, key)) | {"geomean": geomean(ratios(found, key))}
            for name, key in (("bytes received", "received"), ("largest array", "largest"), ("seconds", "seconds"),
                              ("temporary bytes", "temporary"), ("compile seconds", "compile seconds"))
        },
        "ours moves more": sum(r["ours"]["received"] > r["xla"]["received"] for r in found),
        "ours slower by a tenth": sum(r["ours"]["seconds"] > 1.1 * r["xla"]["seconds"] for r in found),
        "xla slower by a tenth": sum(r["xla"]["seconds"] > 1.1 * r["ours"]["seconds"] for r in found),
        "over the bound": {n: sum(r[n]["largest"] > r["bound"] for r in found) for n in ("ours", "xla")},
        "bytes over lower bound, geomean": {
            n: geomean(r[n]["received"] / r["lower bound"] for r in bounded if r[n]["received"])
            for n in ("ours", "xla")
        },
        "compiled memory over workspace_bytes": spread(memory),
        "planning seconds": spread([r["planning seconds"] for r in found]),
    }  # fmt: skip


def main() -> None:
    parser = arguments("reshard_vs_xla", "Our reshard beside XLA's.", 40, of="problems")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--repeats", type=int, default=9, help="timed runs of each (default %(default)s)")
    parser.add_argument("--child", action="store_true", help="run in this process, and print JSON")
    options = parser.parse_args()
    if options.child:
        print(json.dumps(rows(options.count, options.seed, options.repeats)))
        return
    asked = ("--count", options.count, "--seed", options.seed, "--repeats", options.repeats)
    found = with_devices(DEVICES, "reshard_vs_xla", "--child", *asked)
    result = summary(found)
    shown = [[k, v["median"], v["geomean"], v["max"]] for k, v in result["xla over ours"].items()]
    print(
        table(("XLA / ours", "median", "geomean", "max"), shown, f"{len(found)} problems of s8, shards of about 1 MiB")
    )
    print(table(("", ""), [[k, str(v)] for k, v in result.items() if k != "xla over ours"]))
    parameters = {"count": options.count, "seed": options.seed, "repeats": options.repeats, "local bytes": LOCAL_BYTES}
    write(options.out, record(parameters, result | {"rows": found}))


if __name__ == "__main__":
    main()

"""What `interop.jax.reshard` costs beside `jax.device_put` and a jitted identity, in one process of eight CPU devices.

`python -m benchmarks.reshard_overhead [--count 300]`. Moves of f32[n,n] of 256 bytes, 1, 4 and 16 MiB: on one mesh,
to other axes, to another order of the devices, to fewer, from and to one device. Each is timed in turn with device_put,
and, where both ends list the devices in one order, with the identity jitted to the destination, the order changing each
time; reported are medians of the call (until it returns), of the result (until it is there) and of the processor time
of all threads until then, and their ratios. `fresh` makes the array anew for each timing, as a program does: of an
array that was put before, device_put finds the copy that it once made on the host, and is twice as fast as it is at
first.

As shipped, what device_put moves best on CPU devices is handed to it (`LEAVES_TO_HOST`); `planned` rows are timed with
that switched off, and `limit` rows with a memory_limit, which asks for a plan. Arrays of a mebibyte and more are timed
fresh, a third as often.
"""

from __future__ import annotations

import itertools
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from benchmarks.common import arguments, record, spread, table, write
from benchmarks.processes import with_devices

DEVICES = 8
SIZES = (8, 512, 1024, 2048)  # of both dims
MEASURES = ("call", "result", "processor")


def moves() -> dict[str, tuple[Any, Any]]:
    """An array's sharding before and after, by name."""
    import jax
    from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

    grid = np.array(jax.devices())
    mesh = Mesh(grid.reshape(2, 4), ("x", "y"))
    named = lambda *spec, on=mesh: NamedSharding(on, PartitionSpec(*spec))  # noqa: E731
    start = named("x", "y")
    return {
        "swap": (start, named("y", "x")),
        "gather": (start, named()),
        "slice": (named(), start),
        "other axes": (start, named(("q", "p"), on=Mesh(grid.reshape(4, 2), ("p", "q")))),
        "other order": (start, named("z", on=Mesh(grid[::-1], ("z",)))),
        "fewer devices": (start, named("w", on=Mesh(grid[[6, 2, 5, 1]], ("w",)))),
        "from one device": (SingleDeviceSharding(grid[3]), start),
        "to one device": (start, SingleDeviceSharding(grid[3])),
        "gather of rows": (start, named("x")),
        "slice of rows": (named("x"), start),
        "rows to columns": (named(("x", "y")), named(None, ("x", "y"))),
        "order of axes": (named(("x", "y")), named(("y", "x"))),
    }


def identity(source: Any, end: Any) -> Callable[[Any], Any] | None:
    """The identity jitted to a destination; None where a jit has no list of devices for both ends."""
    import jax

    lists = [[d.id for d in x.mesh.devices.flat] if hasattr(x, "mesh") else None for x in (source, end)]
    return None if None in lists or lists[0] != lists[1] else jax.jit(lambda x: x, out_shardings=end)


def timed(runs: dict[str, Callable[[Any], Any]], fresh: Callable[[], Any], count: int) -> dict[str, Any]:
    """Medians in seconds of all `runs`, in turn, and the ratios of ours to each."""
    samples: dict[str, dict[str, list[float]]] = {n: {what: [] for what in MEASURES} for n in runs}
    for run in runs.values():
        run(fresh()).block_until_ready()
    names = sorted(runs)
    for k in range(count):
        for name in names[k % len(names) :] + names[: k % len(names)]:
            array = fresh()
            started, busy = time.perf_counter(), time.process_time()
            found = runs[name](array)
            samples[name]["call"].append(time.perf_counter() - started)
            found.block_until_ready()
            samples[name]["result"].append(time.perf_counter() - started)
            samples[name]["processor"].append(time.process_time() - busy)
    found = {n: {what: statistics.median(x) for what, x in each.items()} for n, each in samples.items()}
    ratios = {n: {what: found["ours"][what] / found[n][what] for what in MEASURES} for n in names if n != "ours"}
    return found | {"ratio": ratios}


def rows(count: int) -> list[dict[str, Any]]:
    """All moves, in this process, which has eight devices."""
    import jax

    from shardplan.interop.jax import eager_move, reshard

    again = jax.jit(lambda x: x + 0)
    out: list[dict[str, Any]] = []
    for size, (kind, limit, handed) in itertools.product(
        SIZES, (("shipped", None, True), ("planned", None, False), ("limit", 10**9, True))
    ):
        if size > SIZES[0] and kind == "limit":
            continue  # a plan, as without the limit
        values = np.arange(size * size, dtype=np.float32).reshape(size, size)
        eager_move.LEAVES_TO_HOST = handed
        eager_move._choose_way.cache_clear()
        for name, (source, end) in moves().items():
            held = jax.device_put(values, source)
            runs = {
                "ours": lambda x, end=end, limit=limit: reshard(x, end, memory_limit=limit),
                "device_put": lambda x, end=end: jax.device_put(x, end),
                "jit": identity(source, end),
            }
            runs = {n: run for n, run in runs.items() if run is not None}
            arrays = {"fresh": lambda held=held: again(held).block_until_ready(), "same": lambda held=held: held}
            for array, fresh in list(arrays.items())[: 2 if size == SIZES[0] else 1]:
                found = timed(runs, fresh, count if size == SIZES[0] else max(5, count // 3))
                out.append({"size": size, "kind": kind, "move": name, "array": array} | found)
    return out


def summary(found: list[dict[str, Any]]) -> dict[str, Any]:
    """Ratios of each kind and size to each peer, over the moves."""
    out: dict[str, Any] = {}
    for size, kind, array, peer, what in itertools.product(
        SIZES, ("shipped", "planned", "limit"), ("fresh", "same"), ("device_put", "jit"), MEASURES
    ):
        own = [r for r in found if (r["size"], r["kind"], r["array"]) == (size, kind, array) and peer in r["ratio"]]
        if own:
            out[f"f32[{size},{size}], {kind}, {array} array, over {peer}: {what}"] = spread(
                [r["ratio"][peer][what] for r in own]
            )
    return out


def main() -> None:
    parser = arguments("reshard_overhead", "A reshard beside device_put and jit.", 300, of="timings of each")
    parser.add_argument("--child", action="store_true", help="run in this process, and print JSON")
    options = parser.parse_args()
    if options.child:
        print(json.dumps(rows(options.count)))
        return
    found = with_devices(DEVICES, "reshard_overhead", "--child", "--count", options.count)
    result = summary(found)
    shown = [[name, v["median"], v["p90"], v["max"]] for name, v in result.items()]
    print(table(("ours / a peer's", "median", "p90", "max"), shown, f"{DEVICES} devices, one process"))
    write(options.out, record({"count": options.count}, {"ours over a peer": result, "rows": found}))


if __name__ == "__main__":
    main()

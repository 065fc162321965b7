"""What a tiny `interop.jax.reshard` costs beside `jax.device_put`, in one process of eight forced CPU devices.

`python -m benchmarks.reshard_overhead [--count 300] [--size 8]`. Moves of f32[8,8]: on one mesh, to other axes, to
another order of the devices, to fewer, from and to one device. Each is timed in turn with
device_put, the order changing each time; reported are medians of the call (until it returns) and of the result (until
it is there), and their ratios. `fresh` makes the array anew for each timing, as a program does: of an array that was
put before, device_put finds the copy that it once made on the host, and is twice as fast as it is at first.

As shipped, arrays of up to `SMALL_BYTES` on CPU devices are handed to device_put; `planned` rows are timed with that
switched off, and `limit` rows with a memory_limit, which asks for a plan.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from benchmarks.common import ROOT, arguments, record, spread, table, write

DEVICES = 8
TIMEOUT = 3600.0


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
    }


def timed(ours: Callable[[Any], Any], fresh: Callable[[], Any], end: Any, count: int) -> dict[str, Any]:
    """Medians in seconds of ours and of device_put, in turn."""
    import jax

    runs = {"ours": ours, "device_put": lambda x: jax.device_put(x, end)}
    samples: dict[str, dict[str, list[float]]] = {name: {"call": [], "result": []} for name in runs}
    for run in runs.values():
        run(fresh()).block_until_ready()
    for k in range(count):
        for name in sorted(runs, reverse=bool(k % 2)):
            array = fresh()
            started = time.perf_counter()
            found = runs[name](array)
            samples[name]["call"].append(time.perf_counter() - started)
            found.block_until_ready()
            samples[name]["result"].append(time.perf_counter() - started)
    found = {name: {what: statistics.median(x) for what, x in both.items()} for name, both in samples.items()}
    ratios = {what: found["ours"][what] / found["device_put"][what] for what in ("call", "result")}
    return found | {"ratio": ratios}


def rows(size: int, count: int) -> list[dict[str, Any]]:
    """All moves, in this process, which has eight devices."""
    import jax

    from shardplan.interop.jax import outside, reshard

    values = np.arange(size * size, dtype=np.float32).reshape(size, size)
    again = jax.jit(lambda x: x + 0)
    shipped = outside.SMALL_BYTES
    out: list[dict[str, Any]] = []
    for kind, limit, small in (("shipped", None, shipped), ("planned", None, 0), ("limit", 10**9, shipped)):
        outside.SMALL_BYTES = small
        outside._choose_way.cache_clear()
        for name, (source, end) in moves().items():
            held = jax.device_put(values, source)
            ours = lambda x, end=end, limit=limit: reshard(x, end, memory_limit=limit)  # noqa: E731
            for array, fresh in (
                ("fresh", lambda held=held: again(held).block_until_ready()),
                ("same", lambda held=held: held),
            ):
                out.append({"kind": kind, "move": name, "array": array} | timed(ours, fresh, end, count))
    return out


def summary(found: list[dict[str, Any]]) -> dict[str, Any]:
    """Ratios of each kind, over its moves."""
    return {
        f"{kind}, {array} array, {what}": spread(
            [r["ratio"][what] for r in found if (r["kind"], r["array"]) == (kind, array)]
        )
        for kind in ("shipped", "planned", "limit")
        for array in ("fresh", "same")
        for what in ("call", "result")
    }


def child(options: Any) -> list[dict[str, Any]]:
    """The rows, from a process with eight devices."""
    flags = f"--xla_force_host_platform_device_count={DEVICES}"
    environment = os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-m", "benchmarks.reshard_overhead", "--child", "--count", str(options.count),
               "--size", str(options.size)]  # fmt: skip
    done = subprocess.run(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True, check=True, timeout=TIMEOUT
    )
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    parser = arguments("reshard_overhead", "A tiny reshard beside device_put.", 300, of="timings of each")
    parser.add_argument("--size", type=int, default=8, help="the array is f32[size, size] (default %(default)s)")
    parser.add_argument("--child", action="store_true", help="run in this process, and print JSON")
    options = parser.parse_args()
    if options.child:
        print(json.dumps(rows(options.size, options.count)))
        return
    found = child(options)
    result = summary(found)
    shown = [[name, v["median"], v["p90"], v["max"]] for name, v in result.items()]
    print(table(("ours / device_put", "median", "p90", "max"), shown, f"f32[{options.size},{options.size}], 8 moves"))
    parameters = {"count": options.count, "size": options.size}
    write(options.out, record(parameters, {"ours over device_put": result, "rows": found}))


if __name__ == "__main__":
    main()

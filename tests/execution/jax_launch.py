"""Two processes under JAX's own launcher, four CPU devices each; prints what both saw as JSON. See `test_jax.py`."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from typing import Any

import numpy as np

import shardplan as sp
from shardplan.core.ops import AllGather, AllToAll, Elementwise
from shardplan.core.program import Program
from shardplan.core.step import Step
from shardplan.core.tensor import TensorType
from shardplan.errors import ShardplanError


def process(rank: int, port: str) -> None:
    import jax

    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(f"localhost:{port}", 2, rank)
    ids = sorted(d.id for d in jax.devices())
    mesh = sp.Mesh({"a": 2, "b": 4}, devices=ids)
    local = [mesh.devices.index(d.id) for d in jax.local_devices()]
    t = TensorType("f32", (8, 8), ("a", "b"), mesh)
    array = np.arange(64, dtype=np.float32).reshape(8, 8)
    shards = [x for k, x in enumerate(sp.distribute(array, t)) if k in local]
    ops: list[Any] = [AllToAll(0, 1, ("a",)), AllGather(0, ("a",)), AllGather(1, ("b",)), AllToAll(1, 0, ("b",))]
    programs = [Program({"0": t}, [Step(op, ("0",), ("1",))], ("1",)) for op in ops]
    out: dict[str, Any] = {}
    got = sp.run(programs[0], shards, backend="jax", timeout=240)
    expected = sp.distribute(array, programs[0].output_types[0])
    out["equal"] = all(np.array_equal(np.asarray(x), expected[k]) for x, k in zip(got, local, strict=True))
    again = sp.run(programs[0], shards, backend="jax", timeout=240)  # agreed upon before
    out["equal"] &= all(np.array_equal(np.asarray(x), expected[k]) for x, k in zip(again, local, strict=True))
    out["order"] = order(t, array, shards, local, rank)
    out["moves"] = moves(rank)
    out["other"] = told(lambda: sp.run(programs[1 + rank], shards, backend="jax", timeout=240))
    steps = [Step(AllGather(0, ("a",)), ("0",), ("1",)), Step(AllGather(1, ("b",)), ("1",), ("2",))]
    new = Program({"0": t}, steps, ("2",))
    out["shards"] = told(lambda: sp.run(new, shards if rank else 5, backend="jax", timeout=240))
    out["limit"] = limited(rank)
    if rank == 0:
        out["late"] = told(lambda: sp.run(programs[3], shards, backend="jax", timeout=0.5))
    print(json.dumps(out), flush=True)
    jax.distributed.shutdown()


def order(t: TensorType, array: np.ndarray, shards: list[Any], local: list[int], rank: int) -> list[Any]:
    """Programs agreed upon, then run by the processes in two orders, then in one: what each run said or gave.

    The second has the collectives of the first and the third others: without a header the first two hand out each
    other's bytes, and the third waits for ever.
    """
    gather, other = AllGather((0, 1), ("a", "b")), AllToAll(0, 1, ("a",))
    steps = [[gather], [gather, Elementwise("a + 1")], [other, Elementwise("-a")]]
    programs = [
        Program({"0": t}, [Step(o, (str(k),), (str(k + 1),)) for k, o in enumerate(ops)], (str(len(ops)),))
        for ops in steps
    ]
    wanted = [array, array + 1, -array]

    def run(k: int) -> Any:
        def call() -> None:
            nonlocal equal
            got = [np.asarray(x) for x in sp.run(programs[k], shards, backend="jax", timeout=240)]
            expected = sp.distribute(wanted[k], programs[k].output_types[0])
            equal = all(np.array_equal(x, expected[i]) for x, i in zip(got, local, strict=True))

        equal = False
        said = told(call)
        return equal if said == "no error" else said

    both = [(0, 1, 0, 2), (1, 0, 2, 0)][rank]
    return [[run(k) for k in range(3)], [run(k) for k in both], [run(k) for k in range(3)]]


def moves(rank: int) -> list[Any]:
    """The same of `reshard`: two moves whose collectives look alike."""
    import jax

    from shardplan.interop.jax import reshard

    mesh = jax.make_mesh((2, 4), ("x", "y"))
    named = lambda *spec: jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*spec))  # noqa: E731
    ends = [named(None, "y"), named(None, None, "y")]
    whole = [np.arange(64, dtype=np.float32).reshape(8, 8), -np.arange(64, dtype=np.float32).reshape(8, 1, 8)]
    starts = [named("x", "y"), named("x", None, "y")]
    arrays = [jax.make_array_from_callback(w.shape, s, lambda i, w=w: w[i]) for w, s in zip(whole, starts, strict=True)]

    def run(k: int) -> Any:
        def call() -> None:
            nonlocal equal
            got = reshard(arrays[k], ends[k])
            equal = all(np.array_equal(np.asarray(s.data), whole[k][s.index]) for s in got.addressable_shards)

        equal = False
        said = told(call)
        return equal if said == "no error" else said

    return [[run(0), run(1)], [run(k) for k in ((0, 1), (1, 0))[rank]], [run(0), run(1)]]


def limited(rank: int) -> str:
    """A `reshard` for which one process finds no plan."""
    import jax

    from shardplan.interop.jax import reshard

    mesh = jax.make_mesh((2, 4), ("x", "y"))
    one, two = (jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*s)) for s in ((("x", "y"),), ()))
    whole = np.arange(64, dtype=np.float32)
    array = jax.make_array_from_callback(whole.shape, one, lambda i: whole[i])
    return told(lambda: reshard(array, two, memory_limit=None if rank else 1))


def told(call: Any) -> str:
    """The error of a call, of one that the runtime passes on the line that raised it."""
    import jax

    try:
        call()
    except ShardplanError as error:
        text = f"{type(error).__name__}: {error}"
    except jax.errors.JaxRuntimeError as error:
        text = f"{error}"
    else:
        return "no error"
    return next((x for x in text.splitlines() if x.startswith("BackendError: jax: this")), text)


def main() -> None:
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = str(free.getsockname()[1])
    environment = os.environ | {"XLA_FLAGS": "--xla_force_host_platform_device_count=4", "JAX_PLATFORMS": "cpu"}
    children = [
        subprocess.Popen(
            [sys.executable, __file__, str(rank), port],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment,
        )
        for rank in (0, 1)
    ]  # fmt: skip
    answers = [c.communicate(timeout=300) for c in children]
    found = []
    for c, (said, errors) in zip(children, answers, strict=True):
        if c.returncode or not said.strip():
            raise SystemExit(f"a process ended with {c.returncode}:\n{errors[-3000:]}")
        found.append(json.loads(said.strip().splitlines()[-1]))
    print(json.dumps({k: [f[k] for f in found] for k in ("equal", "order", "moves", "other", "shards", "limit")}
                     | {"late": found[0]["late"]}))  # fmt: skip


if __name__ == "__main__":
    if len(sys.argv) > 1:
        process(int(sys.argv[1]), sys.argv[2])
    else:
        main()

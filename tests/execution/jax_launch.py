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
from shardplan.core.ops import AllGather, AllToAll
from shardplan.core.program import Program, Step
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
    ops: list[Any] = [AllToAll(0, 1, ("a",)), AllGather(0, ("a",)), AllGather(1, ("b",)), Slice(0, ("b",))]
    programs = [Program({"0": t}, [Step(op, ("0",), ("1",))], ("1",)) for op in ops]
    out: dict[str, Any] = {}
    got = sp.run(programs[0], shards, backend="jax", timeout=60)
    expected = sp.distribute(array, programs[0].output_types[0])
    out["equal"] = all(np.array_equal(np.asarray(x), expected[k]) for x, k in zip(got, local, strict=True))
    out["other"] = told(lambda: sp.run(programs[rank], shards, backend="jax", timeout=60))
    if rank == 0:
        out["late"] = told(lambda: sp.run(programs[0], shards, backend="jax", timeout=0.5))
    print(json.dumps(out), flush=True)
    jax.distributed.shutdown()


def told(call: Any) -> str:
    try:
        call()
    except ShardplanError as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


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
    answers = [c.communicate(timeout=120) for c in children]
    found = []
    for c, (said, errors) in zip(children, answers, strict=True):
        if c.returncode or not said.strip():
            raise SystemExit(f"a process ended with {c.returncode}:\n{errors[-3000:]}")
        found.append(json.loads(said.strip().splitlines()[-1]))
    print(json.dumps({"equal": [f["equal"] for f in found], "other": [f["other"] for f in found],
                      "late": found[0]["late"]}))  # fmt: skip


if __name__ == "__main__":
    if len(sys.argv) > 1:
        process(int(sys.argv[1]), sys.argv[2])
    else:
        main()

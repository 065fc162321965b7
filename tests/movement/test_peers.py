"""T11: agreement with JAX `device_put` and DTensor, shard by shard, where they accept the types."""

import json
import random
import subprocess
import sys

import numpy as np
import pytest

import oracle
import shardplan as sp
from benchmarks import suites

CHILD = """
import json, sys, jax, numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
out = []
for sizes, shape, *specs in json.load(sys.stdin):
    names = tuple("abcdefgh"[:len(sizes)])
    n = int(np.prod(sizes))
    mesh = Mesh(np.array(jax.devices()[:n]).reshape(sizes), names)
    x = np.arange(int(np.prod(shape)), dtype=np.int32).reshape(shape)
    for spec in specs:
        sharding = NamedSharding(mesh, P(*(tuple(d) or None for d in spec)))
        x = jax.device_put(x, sharding)
    shards = {s.device.id: np.asarray(s.data).tolist() for s in x.addressable_shards}
    out.append([shards[k] for k in range(n)])
json.dump(out, sys.stdout)
"""


def test_jax_device_put_agrees() -> None:
    pytest.importorskip("jax")
    rng = random.Random(0)
    asked: list[object] = []
    plans: list[tuple[sp.Plan, sp.TensorType]] = []
    for _ in range(40):
        mesh = suites.pick_mesh(rng, 12)
        s, t = suites.even_pair(rng, mesh, rng.randint(1, 3), dtype="i32", most_multiple=1)
        if s == t:
            continue
        asked.append((mesh.sizes, s.shape, s.layout.dims, t.layout.dims))
        plans.append((sp.redistribute(s, t), t))
    child = subprocess.run(
        [sys.executable, "-c", CHILD], input=json.dumps(asked), capture_output=True, text=True, check=True,
        env={"XLA_FLAGS": "--xla_force_host_platform_device_count=12", "JAX_PLATFORMS": "cpu"},
    )  # fmt: skip
    for (plan, t), theirs in zip(plans, json.loads(child.stdout), strict=True):
        array = np.arange(int(np.prod(t.shape)), dtype=np.int32).reshape(t.shape)
        ours = sp.run(plan.program, sp.distribute(array, plan.program.input_types[0]))
        for x, y in zip(ours, theirs, strict=True):
            assert np.array_equal(x, np.asarray(y, dtype=np.int32).reshape(x.shape))


def test_dtensor_boxes_agree_on_uneven_dims() -> None:
    torch = pytest.importorskip("torch")
    from torch.distributed.tensor import Shard
    from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset

    del torch
    rng = random.Random(1)
    seen = 0
    for _ in range(300):
        sizes = rng.choice(((2, 2), (3, 2), (2, 3, 2), (5, 2), (7,), (2, 4)))
        mesh = suites.make_mesh(sizes)
        ndim = rng.randint(1, 2)
        placed = [rng.randrange(ndim) for _ in sizes]  # DTensor nests shards of a dim in mesh order
        dims = [tuple(a for a, d in zip(mesh.axes, placed, strict=True) if d == k) for k in range(ndim)]
        shape = [rng.randint(1, 14) for _ in range(ndim)]
        t = sp.TensorType("f32", shape, dims, mesh)
        for k in range(mesh.size):
            local, offset = _compute_local_shape_and_global_offset(
                tuple(shape), sizes, list(mesh.coordinates(k)), [Shard(d) for d in placed]
            )
            box = oracle.box(t, k)
            assert tuple(local) == tuple(hi - lo for lo, hi in box) == t.local_shape(k)
            if all(local):
                assert tuple(offset) == tuple(lo for lo, _ in box)
            seen += 1
    assert seen > 1000

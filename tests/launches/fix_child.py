"""Executes the fixes that stand on stdin, one JSON object a line, with torch (a fake process group) or JAX.

Prints for each the array of ranks or device ids of the `mesh` it makes, and its names; for torch also the members of
the groups of rank 0 as torch orders them.
"""

import json
import sys


def with_torch(case):
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=case["size"])
    scope = {}
    exec(case["text"], scope)
    mesh = scope["mesh"]
    groups = [dist.get_process_group_ranks(mesh.get_group(k)) for k in range(mesh.ndim)]
    out = {"ids": mesh.mesh.tolist(), "names": list(mesh.mesh_dim_names), "groups": groups}
    dist.destroy_process_group()
    return out


def with_jax(case):
    import jax
    import numpy as np
    from jax._src import mesh_utils

    # The cluster has as many devices as the launch.
    devices = jax.devices()[: case["size"]]
    mesh_utils.xb.devices = lambda: devices
    scope = {}
    exec(case["text"], scope)
    mesh = scope["mesh"]
    ids = np.vectorize(lambda d: d.id)(mesh.devices)
    return {"ids": ids.tolist(), "names": list(mesh.axis_names)}


if __name__ == "__main__":
    run = {"torch": with_torch, "jax": with_jax}[sys.argv[1]]
    print(json.dumps([run(json.loads(line)) for line in sys.stdin]))

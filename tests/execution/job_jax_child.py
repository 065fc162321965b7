"""Jobs on eight CPU devices of JAX, in one process; prints JSON."""

import json
import os

from execution.jax_child import QUICK

os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count=8 {QUICK}"
os.environ["JAX_PLATFORMS"] = "cpu"

import shardplan as sp
from execution.job_cases import JAX, case, wrong
from strategy.jobs import arrays, model


def refused() -> str:
    """What it is told of a job whose types are uneven."""
    try:
        small = model("odd")
        sp.run(sp.partition(small, sp.Strategy(tensor=2)), arrays(small, small.program), backend="jax")
    except sp.BackendError as error:
        return str(error)
    return ""


out = {name: wrong(case(name), "jax", set(range(8)))[0] for name in JAX}
print(json.dumps({"wrong": out, "refused": refused()}))

"""Processes of a benchmark's own: gloo ranks of a launch by torchrun, and one in which JAX has many CPU devices."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.common import ROOT

PATHS = os.pathsep.join(map(str, (ROOT / "src", ROOT, ROOT / "tests")))


def launch(script: Path, world: int, *parameters: Any) -> tuple[Any, float]:
    """What rank 0 of a launch printed, an object of JSON, and the seconds it took."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(world)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": PATHS}
    started = time.perf_counter()
    done = subprocess.run(
        [*command, str(script), *map(str, parameters)], capture_output=True, text=True, env=environment, timeout=3000
    )
    if done.returncode:
        raise SystemExit(f"{script.name} on {world} processes failed:\n{done.stderr[:6000]}")
    return json.loads(done.stdout[done.stdout.index("{") :]), time.perf_counter() - started


def be_rank(work: Callable[[], dict[str, Any]]) -> None:
    """Be a rank of such a launch, on one thread; what the work gives of rank 0 is printed."""
    import torch
    import torch.distributed as dist

    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    found = work()
    if dist.get_rank() == 0:
        print(json.dumps(found), flush=True)
    dist.destroy_process_group()


def of_all_ranks(own: Any) -> list[Any]:
    """What each rank gives, by rank."""
    import torch.distributed as dist

    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, own)
    return every


def jax_environment(devices: int) -> dict[str, str]:
    """This process's variables, and those by which JAX sees so many CPU devices."""
    flags = [f for f in os.environ.get("XLA_FLAGS", "").split() if "force_host_platform_device_count" not in f]
    flags.append(f"--xla_force_host_platform_device_count={devices}")
    return os.environ | {"XLA_FLAGS": " ".join(flags), "JAX_PLATFORMS": "cpu", "PYTHONPATH": PATHS}


def with_devices(devices: int, module: str, *arguments: Any, seconds: float = 3600.0) -> Any:
    """What a module prints as its last line, JSON, in a process in which JAX has so many CPU devices."""
    command = [sys.executable, "-m", f"benchmarks.{module}", *map(str, arguments)]
    done = subprocess.run(
        command, stdout=subprocess.PIPE, text=True, env=jax_environment(devices), timeout=seconds, cwd=ROOT
    )
    if done.returncode:
        raise SystemExit(f"the process with {devices} devices ended with {done.returncode}")
    return json.loads(done.stdout.splitlines()[-1])

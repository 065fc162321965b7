"""What the torch executor does on a GPU: every compute op beside the whole, and programs alone on nccl.

nccl refuses two ranks on one GPU, so that its collectives have one rank here: which calls are made, on which stream,
and what they return, not how fast they are; ranks that only receive need a second GPU.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Generator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import torch
import torch.distributed as dist
from benchmarks.common import ROOT

import shardplan as sp
from shardplan.execution.torch.group_state import group_state
from shardplan.execution.torch.wire import TorchWire


def compute_ops(dry: bool) -> dict[str, Any]:
    """Every compute op's meaning on one device, on CUDA tensors, shard by shard, against numpy's on the whole."""
    import oracle
    from compute_examples import EXAMPLES, UNEQUAL
    from shardplan.execution.torch.compute import bind_compute
    from shardplan.execution.torch.dtypes import to_numpy, to_torch

    torch.set_float32_matmul_precision("highest")
    where = "cpu" if dry else "cuda"
    wire: Any = SimpleNamespace(device=torch.device(where))
    wrong: list[str] = []
    cases = 0
    for example in EXAMPLES:
        rng = np.random.default_rng(1)
        arrays = example.arrays(UNEQUAL, rng)
        whole = np.asarray(example.whole(UNEQUAL, *arrays))
        ones = list(example.legal_ones(UNEQUAL))
        for op, types in ones[:: max(1, len(ones) // (2 if dry else 8))]:
            results = op.infer(*types)
            shards = [oracle.spread(a, t, rng) for a, t in zip(arrays, types, strict=True)]
            found: list[np.ndarray] = []
            try:
                for k in range(results[0].mesh.size):
                    given = [to_torch(x[k].copy()).to(where) for x in shards]
                    run = bind_compute(op, types, results, k)(given, wire)
                    try:
                        while True:
                            next(run)
                    except StopIteration as done:
                        found.append(to_numpy(done.value[0]))
                said = oracle.wrong(found, results[0], whole)
            except Exception as error:
                said = f"{type(error).__name__}: {error}".splitlines()[0]
            cases += 1
            if said is not None:
                wrong.append(f"{op} of {', '.join(map(str, types))}: {said}"[:300])
    return {"ops": len(EXAMPLES), "cases": cases, "wrong": wrong[:20], "wrong cases": len(wrong), "good": not wrong}


def _launched(script: str, *arguments: str) -> dict[str, Any]:
    """A script of the tests as one rank of a launch; what it prints."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    path = os.pathsep.join(str(ROOT / part) for part in ("src", ".", "tests"))
    here = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANK": "0", "LOCAL_RANK": "0"}
    environment = os.environ | here | {"WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1", "PYTHONPATH": path}
    command = [sys.executable, str(ROOT / "tests" / "execution" / script), *arguments]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=100)
    if done.returncode != 0:
        return {"good": False, "why": done.stderr[-900:]}
    found = json.loads(done.stdout[done.stdout.index("{") :])
    return found | {"good": not found["wrong"]}


def programs_on_nccl(dry: bool) -> dict[str, Any]:
    """The conformance programs of one device, on nccl: values, and bytes received beside what the ops say."""
    return _launched("torch_child.py", "7", "20" if dry else "100", "gloo" if dry else "nccl")


def _stream_order(products: int) -> dict[str, Any]:
    """Whether a program whose input is still being computed returns before the device ends, with the right result."""
    mesh = sp.Mesh(a=1)
    source, target = (sp.TensorType.parse(t, mesh) for t in ("f32[4096, 4096]{+a}", "f32[4096, 4096]"))
    program = sp.redistribute(source, target).program
    matrix = torch.randn(8192, 8192, device="cuda")
    returned = ended = 0.0
    equal = True
    for _ in range(2):  # the first one loads kernels, for which the host waits
        torch.cuda.synchronize()
        began = time.perf_counter()
        busy = matrix
        for _ in range(products):
            busy = matrix @ busy
        queued = busy[:4096, :4096].sign()
        got = sp.run(program, [[queued]], backend="torch")
        returned = time.perf_counter() - began
        torch.cuda.synchronize()
        ended = time.perf_counter() - began
        one = got[0][0] if isinstance(got[0], list) else got[0]
        equal &= bool(torch.equal(torch.as_tensor(one), queued))
    return {"returned": returned, "device ended": ended, "equal": equal, "host waited": returned > 0.9 * ended}


def stream_order(dry: bool) -> dict[str, Any]:
    """One rank under nccl, default initialisation and `cuda:nccl,cpu:gloo`: results, and whether the host waited."""
    if dry:
        return {"good": True, "why": "there are no streams here"}
    found: dict[str, Any] = {}
    for backend in ("nccl", "cuda:nccl,cpu:gloo", None):
        with _one_rank(backend):
            try:
                found[str(backend)] = _stream_order(20)
            except Exception as error:
                found[str(backend)] = {"equal": False, "host waited": True, "why": _said(error)}
    return found | {"good": all(one["equal"] and not one["host waited"] for one in found.values())}


@contextmanager
def _one_rank(backend: str | None) -> Generator[None]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    dist.init_process_group(backend, rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def _said(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"[:300]


def _summed(given: torch.Tensor) -> torch.Tensor:
    """The sum over one rank of a tensor [64, 64], by a program."""
    mesh = sp.Mesh(a=1)
    source, target = (sp.TensorType.parse(t, mesh) for t in ("f32[64, 64]{+a}", "f32[64, 64]"))
    (found,) = sp.run(sp.redistribute(source, target).program, [[given]], backend="torch")
    return torch.as_tensor(found[0] if isinstance(found, list) else found)


def graph_capture(dry: bool) -> dict[str, Any]:
    """A program's run in a CUDA graph: replayed on another input it gives that one's result; dry: called again."""
    where = "cpu" if dry else "cuda"
    given = torch.ones(64, 64, device=where)
    with _one_rank("gloo" if dry else "cuda:nccl,cpu:gloo"):
        _summed(given)  # communicators are made, and kernels loaded
        try:
            graph = None if dry else torch.cuda.CUDAGraph()
            with nullcontext() if graph is None else torch.cuda.graph(graph):
                got = _summed(given)
            given.fill_(3.0)
            if graph is None:
                got = _summed(given)
            else:
                graph.replay()
                torch.cuda.synchronize()
        except Exception as error:
            return {"good": False, "why": _said(error)}
        return {"good": bool((got == 3.0).all()), "captured": not dry}


def abort(dry: bool) -> dict[str, Any]:
    """Our end of a failed move's communicators (nccl has one, gloo has none): bounded, and what a next move says."""
    if dry:
        return {"good": True, "why": "gloo's groups have no abort"}
    given = torch.ones(64, 64, device="cuda")
    with _one_rank("cuda:nccl,cpu:gloo"):
        _summed(given)
        state: Any = group_state()
        began = time.perf_counter()
        TorchWire.abort(cast(Any, SimpleNamespace(group=state.group, watch=SimpleNamespace(state=state))))
        seconds = time.perf_counter() - began
        try:
            _summed(given)
            then = "no error: a rank alone calls nobody"
        except Exception as error:
            then = _said(error)
    return {"good": seconds < 10, "seconds": seconds, "next move": then}

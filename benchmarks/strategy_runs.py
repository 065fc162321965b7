"""Every named strategy alone and eight compositions of three, of five models, on real processes and on JAX devices.

`python -m benchmarks.strategy_runs [--backends torch mpi jax] [--models gpt llama moe mlp dlrm]`: as many gloo or MPI
processes as a strategy has devices, or eight host devices of JAX. Three training steps (adamw, f64) of small models,
with as many layers as there are chunks of stages, two at least. A row has the largest difference from the whole model
on the reference, in losses, gradients, parameters and moments, relative to the largest element of each; and the bytes
that were received in a step, which on processes are counted at every collective and equal what its op says, program by
program. JAX refuses what is uneven. Rows that are not run stay as they are in the result file.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.common import ROOT, Progress, arguments, record, table, use_tests, write

DEVICES = 8  # of JAX
PATIENCE = 600.0  # seconds that a rank waits for another, on however busy a machine
BACKENDS = ("torch", "mpi", "jax")
# adamw divides a gradient that is zero but for rounding by eps: by 1e-8 that is seen.
ADAM = {"optimizer": "adamw", "eps": 1e-3}
MODELS: dict[str, dict[str, Any]] = {
    "gpt": {"hidden": 16, "heads": 4, "seq": 8, "vocab": 16},
    "llama": {"hidden": 16, "heads": 4, "kv_heads": 2, "ffn": 16, "seq": 8, "vocab": 16},
    "moe": {"hidden": 16, "heads": 4, "kv_heads": 2, "ffn": 8, "seq": 8, "vocab": 16, "dense_layers": 0},
    "mlp": {"hidden": 16},
    "dlrm": {"table_rows": (32, 48, 8), "dense_features": 8, "top": (8, 1)},
}
ALONE: dict[str, dict[str, Any]] = {
    "data": {"data": 4},
    "microbatches": {"data": 2, "global_batch": 8},
    "microbatches, uneven": {"data": 2, "global_batch": 7},
    "tensor": {"tensor": 2},
    "tensor, uneven": {"tensor": 3},
    "sequence": {"tensor": 2, "sequence_parallel": True},
    "context, ulysses": {"context": 2},
    "context, gather": {"context": 2, "context_kind": "gather"},
    "expert": {"data": 4, "expert": 4},
    "zero 1": {"data": 2, "zero": 1, "global_batch": 4},
    "zero 2": {"data": 2, "zero": 2, "global_batch": 4},
    "zero 3": {"data": 2, "zero": 3, "global_batch": 4},
    "fsdp": {"data": 4, "fsdp": True},
    "shard": {"data": 4, "shard": 2, "fsdp": True},
    "bucket": {"data": 2, "bucket": "1 GB", "global_batch": 4},
    "pipeline, 1f1b": {"pipeline": 2, "global_batch": 4},
    "pipeline, gpipe": {"pipeline": 4, "global_batch": 4, "schedule": "gpipe"},
    "pipeline, interleaved": {"pipeline": 2, "interleave": 2, "global_batch": 4, "schedule": "interleaved"},
    "recompute, full": {"tensor": 2, "recompute": "full"},
    "recompute, selective": {"tensor": 2, "recompute": "selective"},
}
THREE: dict[str, dict[str, Any]] = {
    "tensor, data, pipeline": {"tensor": 2, "data": 2, "pipeline": 2, "global_batch": 4},
    "sequence, data, zero 1": {"tensor": 2, "sequence_parallel": True, "data": 2, "zero": 1, "global_batch": 4},
    "context, data, fsdp": {"context": 2, "data": 2, "fsdp": True, "global_batch": 4},
    "pipeline, zero 2, recompute": {"pipeline": 2, "data": 2, "zero": 2, "recompute": "full", "global_batch": 4},
    "pipeline, sequence, fsdp": {
        "pipeline": 2, "tensor": 2, "sequence_parallel": True, "data": 2, "fsdp": True, "global_batch": 4,
    },
    "gather, tensor, data": {"context": 2, "context_kind": "gather", "tensor": 2, "data": 2, "global_batch": 4},
    "tensor, shard, microbatches": {"tensor": 2, "data": 4, "shard": 2, "zero": 3, "global_batch": 8},
    "expert, tensor, data": {"data": 4, "expert": 2, "tensor": 2, "global_batch": 4},
}  # fmt: skip
MORE: dict[str, dict[str, dict[str, Any]]] = {  # so that each model has eight
    "mlp": {
        "tensor, data, zero 1": {"tensor": 2, "data": 2, "zero": 1, "global_batch": 4},
        "tensor, data, recompute": {"tensor": 2, "data": 2, "recompute": "full", "global_batch": 4},
        "tensor, pipeline, interleaved": {
            "tensor": 2, "pipeline": 2, "interleave": 2, "global_batch": 4, "schedule": "interleaved",
        },
        "pipeline, gpipe, fsdp": {
            "pipeline": 2, "data": 2, "fsdp": True, "global_batch": 4, "schedule": "gpipe",
        },
        "pipeline, data, bucket": {"pipeline": 2, "data": 2, "bucket": "1 GB", "global_batch": 4},
    },
    "dlrm": {
        "tensor, data, zero 1": {"tensor": 2, "data": 2, "zero": 1, "global_batch": 4},
        "tensor, data, fsdp": {"tensor": 2, "data": 4, "fsdp": True, "global_batch": 4},
        "tensor, zero 2, microbatches": {"tensor": 2, "data": 2, "zero": 2, "global_batch": 8},
        "tensor, data, bucket": {"tensor": 2, "data": 2, "bucket": "1 GB", "global_batch": 4},
        "expert, data, zero 1": {"data": 4, "expert": 2, "zero": 1, "global_batch": 4},
        "expert, shard, fsdp": {"data": 8, "expert": 2, "shard": 4, "fsdp": True, "global_batch": 8},
    },
}  # fmt: skip
WITHOUT = {  # strategies that a model has nothing for
    "gpt": ("expert",),
    "llama": ("expert",),
    "mlp": ("expert", "context", "sequence", "gather", "selective"),
    "dlrm": ("pipeline", "recompute", "context", "sequence", "gather"),
}


def named() -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Models, names of strategies, and these."""
    for family in MODELS:
        for name, said in (ALONE | THREE | MORE.get(family, {})).items():
            if not any(word in name for word in WITHOUT.get(family, ())):
                yield family, name, said


def layers(family: str, said: dict[str, Any]) -> dict[str, int]:
    """As many as a strategy needs."""
    many = said.get("pipeline", 1) * said.get("interleave", 1)
    return {} if family == "dlrm" else {"layers": max(2, many)}


def child(backend: str, path: str) -> None:
    """Be a process: run the cases, and print from rank 0 what all of them found."""
    if backend == "torch":
        import torch.distributed as dist

        dist.init_process_group("gloo")
        every: Any = [None] * dist.get_world_size()
        dist.all_gather_object(every, ran(backend, path, {dist.get_rank()}))
        first = dist.get_rank() == 0
        dist.destroy_process_group()
    elif backend == "mpi":
        from mpi4py import MPI

        every = MPI.COMM_WORLD.gather(ran(backend, path, {MPI.COMM_WORLD.Get_rank()}), root=0)
        first = every is not None
    else:
        every, first = [ran(backend, path, set(range(DEVICES)))], True
    if first:
        print(json.dumps(every))


def ran(backend: str, path: str, here: set[int]) -> dict[str, Any]:
    """What was found of each case on the devices that are here; JAX refuses what is uneven."""
    cases = use_tests("execution.job_cases")
    found: dict[str, Any] = {}
    for one in cases.read(path):
        try:
            found[one.name] = cases.ran(one, backend, here, PATIENCE)
        except Exception as error:
            text = f"{type(error).__name__}: {error}"
            found[one.name] = ([] if backend == "jax" and "unevenly tiled" in text else [text], 0, None)
        if min(here) == 0:
            print(f"{backend}: {one.name}: {found[one.name][0] or found[one.name][2]}", file=sys.stderr, flush=True)
    return found


def on(backend: str, ranks: int, path: Path) -> list[dict[str, Any]]:
    """What every process of a backend found; none of them has nothing to do, since waiting takes a core, too."""
    paths = os.pathsep.join(map(str, (ROOT / "src", ROOT, ROOT / "tests")))
    environment = os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, __file__, "--child", backend, str(path)]
    if backend == "torch":
        launch = use_tests("execution.torch_launch")
        return launch.printed(ranks, Path(__file__), "--child", backend, path, seconds=3600)
    if backend == "mpi":
        command = [str(Path(sys.executable).parent / "mpiexec"), "-n", str(ranks), *command]
    else:
        quick = use_tests("execution.jax_child").QUICK
        flags = f"--xla_force_host_platform_device_count={DEVICES} {quick}"
        environment |= {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, env=environment, check=True, timeout=3600)
    return json.loads(done.stdout.splitlines()[-1])


def rows_of(family: str, backend: str, made: list[tuple[str, dict[str, Any], Any]]) -> Iterator[dict[str, Any]]:
    """The rows of a model on a backend: jobs of as many devices run on as many processes."""
    cases = use_tests("execution.job_cases")
    count = {one.name: DEVICES if backend == "jax" else one.job.strategy.devices for _, _, one in made}
    every: dict[str, list[Any]] = {}
    for ranks in sorted(set(count.values())):
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "cases"
            cases.write(path, [one for _, _, one in made if count[one.name] == ranks])
            for found in on(backend, ranks, path):
                for name, mine in found.items():
                    every.setdefault(name, []).append(mine)
    for name, said, one in made:
        mine = every[one.name]
        aparts = [apart for _, _, apart in mine if apart is not None]
        yield {
            "model": family,
            "strategy": name,
            "fields": said,
            "devices": one.job.strategy.devices,
            "backend": backend,
            "difference": max(aparts) if aparts else None,
            "received_bytes": None if backend == "jax" else sum(received for _, received, _ in mine),
            "wrong": [line for lines, _, _ in mine for line in lines][:5],
        }


def main() -> None:
    if sys.argv[1:2] == ["--child"]:
        return child(*sys.argv[2:4])
    parser = arguments("strategy_runs", "Strategies of five models on real processes.", 3, of="steps (not to change)")
    parser.add_argument("--backends", nargs="+", choices=BACKENDS, default=BACKENDS)
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS))
    options = parser.parse_args()
    cases = use_tests("execution.job_cases")
    parameters = {"steps": cases.STEPS, "models": MODELS, "optimizer": ADAM}
    rows = json.loads(options.out.read_text())["rows"] if options.out.exists() else []
    for family in options.models:
        mine = [(name, said) for of, name, said in named() if of == family]
        progress, made = Progress(f"{family}: cases", len(mine)), list[tuple[str, dict[str, Any], Any]]()
        for name, said in mine:
            fields = ADAM | MODELS[family] | layers(family, said)
            made.append((name, said, cases.made(f"{family}: {name}", family, fields, said)))
            progress.add()
        for backend in options.backends:
            rows = [row for row in rows if (row["model"], row["backend"]) != (family, backend)]
            rows += rows_of(family, backend, made)
            write(options.out, record(parameters, {"rows": rows}), quiet=True)
    print(table(["backend", "cases", "uneven", "wrong", "largest difference"], [_told(rows, b) for b in BACKENDS]))
    if any(row["wrong"] for row in rows):
        sys.exit(1)


def _told(rows: list[dict[str, Any]], backend: str) -> list[Any]:
    mine = [row for row in rows if row["backend"] == backend]
    ran = [row["difference"] for row in mine if row["difference"] is not None]
    bad = sum(bool(row["wrong"]) for row in mine)
    return [backend, len(ran), len(mine) - len(ran) - bad, bad, max(ran, default=None)]


if __name__ == "__main__":
    if importlib.util.find_spec("benchmarks") is None:
        sys.path.insert(0, str(ROOT))
    main()

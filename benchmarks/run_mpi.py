"""Random programs on MPI processes: every result equal to the reference, every step's received bytes equal to its op's.

`python -m benchmarks.run_mpi [--count 2000] [--ranks 4] [--seed 0]` launches `tests/execution/mpi_child.py` under the
mpiexec of this Python's environment. Nothing is timed but the whole, since MPICH polls busily and cores may be few.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.common import ROOT, arguments, record, table, write

CHILD = ROOT / "tests" / "execution" / "mpi_child.py"


def launch(count: int, ranks: int, seed: int) -> dict[str, Any]:
    """Run the cases, and return what rank 0 reports; exits with the status of the job where it fails."""
    mpiexec = Path(sys.executable).parent / "mpiexec"
    if not mpiexec.exists():
        sys.exit(f"run_mpi needs mpiexec beside {Path(sys.executable).name}, as the extra mpi installs it")
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
    command = [str(mpiexec), "-n", str(ranks), sys.executable, str(CHILD), "cases", str(seed), str(count)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, cwd=ROOT, env=environment)
    if done.returncode:
        sys.exit(done.returncode)
    return json.loads(done.stdout)


def main() -> None:
    parser = arguments("run_mpi", "Random programs on MPI against the reference.", 2000, of="programs")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    started = time.perf_counter()
    told = launch(options.count, options.ranks, options.seed)
    seconds = time.perf_counter() - started
    print(table(("steps", "count"), told["ops"].items(), f"{told['cases']} programs on {told['ranks']} ranks"))
    print(f"differences from the reference or from the ops' bytes: {len(told['wrong'])}")
    for line in told["wrong"][:20]:
        print(f"  {line}")
    result = {
        "programs": told["cases"],
        "wrong": len(told["wrong"]),
        "failures": told["wrong"][:50],
        "steps": sum(told["ops"].values()),
        "steps of each op": told["ops"],
        "bytes received, all ranks": told["received"],
        "communicators": told["communicators"],
        "seconds of the whole": seconds,
        "mpi": {"mpi4py": importlib.metadata.version("mpi4py"), "library": told["library"]},
    }
    write(
        options.out,
        record({"count": options.count, "ranks": options.ranks, "seed": options.seed}, result),
    )


if __name__ == "__main__":
    main()

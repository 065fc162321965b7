"""What is run on one GPU: kernels by shape beside their price, the torch executor, and the fused kernels.

All ranks are virtual ranks in one launch, or two processes on one GPU. Every case has a process and a deadline of its
own, and the result file is written after each. `--dry` runs the same code in Triton's interpreter on tiny shapes. What
may be concluded: results, costs of flags, order and occupancy, fused / unfused on the same processors, and overlap with
an emulated link. Nothing about an interconnect or several GPUs: a store to a peer goes to the same memory.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.common import RESULTS, ROOT, record, write

NAMES = (
    "kernels by shape", "compute ops", "programs on nccl", "stream order on nccl", "graph capture on nccl",
    "abort on nccl", "correct gemm", "correct gemv", "correct embedding", "two processes, cuda_ipc",
    "two processes, torch_symm", "assembly",
    "times of gemm", "times of embedding", "times of gemv",
)  # fmt: skip
SECONDS = {
    "kernels": 120,
    "compute": 60,
    "programs": 60,
    "stream": 60,
    "graph": 40,
    "abort": 40,
    "correct": 60,
    "two": 60,
    "assembly": 30,
    "times": 70,
}  # deadlines, by a name's first word
ALL = 540  # seconds of everything


def hardware(dry: bool) -> dict[str, Any]:
    """The device with its clocks, and the versions of torch, Triton and CUDA."""
    import torch
    import triton

    found: dict[str, Any] = {"torch": torch.__version__, "triton": triton.__version__, "cuda": torch.version.cuda}
    if not dry:
        properties = torch.cuda.get_device_properties(0)
        found |= {"device": properties.name, "processors": properties.multi_processor_count}
        asked = ["nvidia-smi", "--query-gpu=driver_version,clocks.sm,clocks.mem,clocks.max.sm", "--format=csv,noheader"]
        try:
            found["driver and clocks"] = subprocess.run(
                asked, capture_output=True, text=True, timeout=20
            ).stdout.strip()
        except (OSError, subprocess.TimeoutExpired) as error:
            found["driver and clocks"] = type(error).__name__
    return found


def case(name: str, dry: bool, seconds: float) -> dict[str, Any]:
    """Run a case in a process group of its own, which is ended at its deadline."""
    path = os.pathsep.join(str(ROOT / part) for part in ("src", ".", "tests"))
    environment = os.environ | {"PYTHONPATH": path}
    environment.pop("TRITON_INTERPRET", None)
    if dry:
        environment["TRITON_INTERPRET"] = "1"
    command = [sys.executable, "-m", "benchmarks.gpu", "--case", name, *["--dry"] * dry]
    started = time.monotonic()
    child = subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        start_new_session=True,
    )  # fmt: skip
    try:
        out, errors = child.communicate(timeout=seconds)
        found = (
            json.loads(out.splitlines()[-1]) if child.returncode == 0 and out else {"good": False, "why": errors[-900:]}
        )
    except subprocess.TimeoutExpired:
        os.killpg(child.pid, signal.SIGKILL)
        child.communicate()
        found = {"good": False, "why": f"not ended after {seconds:.0f} s"}
    return {"case": name, "took": round(time.monotonic() - started, 1)} | found


def one(name: str, dry: bool) -> dict[str, Any]:
    """Run a case here."""
    if name == "hardware":
        return hardware(dry)
    from benchmarks.gpu_cases import CASES

    found = CASES[name](dry)
    return {"good": all(row.get("good", True) for row in found.get("rows", []))} | found


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__)
    parser.add_argument("--dry", action="store_true", help="in the interpreter, on tiny shapes")
    parser.add_argument("--case", help="run this one here, and print what it found")
    parser.add_argument("--only", default="", help="only cases whose name holds this")
    parser.add_argument("--out", type=Path, default=RESULTS / "gpu.json", help="the result file")
    options = parser.parse_args()
    if options.case:
        print(json.dumps(one(options.case, options.dry)))
        return
    started = time.monotonic()
    device = case("hardware", options.dry, 60)
    rows: list[dict[str, Any]] = []
    # Dry runs of two processes share memory of CPUs, one way.
    names = [n for n in NAMES if options.only in n and not (options.dry and n == "two processes, torch_symm")]
    for name in names:
        left = ALL - (time.monotonic() - started)
        limit = min(left, SECONDS[name.partition(" ")[0].rstrip(",")])
        row = case(name, options.dry, limit) if left > 5 else {"case": name, "good": False, "why": "no time was left"}
        rows.append(row)
        print(f"{name:26s} {'right' if row['good'] else 'NOT RIGHT: ' + row.get('why', '')[-300:]}", flush=True)
        result = {"device": device, "seconds": time.monotonic() - started, "cases": rows}
        write(options.out, record({"dry": options.dry}, result), quiet=True)
    sys.exit(not all(row["good"] for row in rows))


if __name__ == "__main__":
    main()

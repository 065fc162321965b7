"""Launching a child script under torchrun, with a bounded wait; what its rank 0 printed as JSON."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]


def torchrun(processes: int, *command: str, timeout: float = 300) -> subprocess.CompletedProcess[str]:
    """Run a command on so many processes of this machine."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    paths = os.pathsep.join(map(str, (ROOT / "src", ROOT, ROOT / "tests")))
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": paths}
    return subprocess.run([*launcher, *command], capture_output=True, text=True, env=environment, timeout=timeout)


def printed(processes: int, child: Path, *parameters: Any, timeout: float = 300) -> Any:
    """Run a child script and return the JSON that its rank 0 printed."""
    done = torchrun(processes, str(child), *map(str, parameters), timeout=timeout)
    assert done.returncode == 0, done.stderr[:4000]
    start = min(k for k in (done.stdout.find("{"), done.stdout.find("[")) if k >= 0)
    return json.loads(done.stdout[start:])

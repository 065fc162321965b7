"""Runs the fixes of torch and JAX in a child process, and reads nccl-tests' setting."""

import json
import os
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parents[1]


def executed(framework, cases, timeout=120):
    """What `fix_child.py` found for each case (`text`, `size`)."""
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src"), "JAX_PLATFORMS": "cpu"}
    environment["XLA_FLAGS"] = "--xla_force_host_platform_device_count=64"
    done = subprocess.run(
        [sys.executable, str(HERE / "fix_child.py"), framework],
        input="\n".join(map(json.dumps, cases)),
        capture_output=True,
        text=True,
        env=environment,
        timeout=timeout,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def split_by(setting, size):
    """The groups that nccl-tests makes of its ranks (its README: a rank's colour is rank OP number)."""
    name, _, quoted = setting.partition("=")
    assert name == "NCCL_TESTS_SPLIT" and quoted[0] == quoted[-1] == '"'
    word, number = quoted[1:-1].split(" ")
    n = int(number, 0)
    colour = {"DIV": lambda r: r // n, "MOD": lambda r: r % n, "AND": lambda r: r & n}[word]
    groups = {}
    for rank in range(size):
        groups.setdefault(colour(rank), set()).add(rank)
    return sorted(map(sorted, groups.values()))

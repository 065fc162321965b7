"""Checks on eight CPU devices of JAX: how a test asks for them, and how the child runs them."""

from __future__ import annotations

import inspect
import json
import os
import re
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
# What is compiled here runs once, on a few bytes: the time is the compiler's.
QUICK = (
    "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true --xla_cpu_use_fusion_emitters=false"
)


def said(script: str, *arguments: str) -> dict[str, Any]:
    """The JSON that a script of the tests prints."""
    paths = os.pathsep.join(map(str, (ROOT / "src", ROOT, ROOT / "tests")))
    environment = os.environ | {"PYTHONPATH": paths, "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, str(ROOT / "tests" / script), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def said_to_tests(request: Any, script: str) -> dict[str, Any]:
    """What the checks of a script say which the run's tests in the module that asks read, by name or parameter."""
    here = [i for i in request.session.items if hasattr(i, "function") and i.path == request.path]
    named = {x for i in here if hasattr(i, "callspec") for x in i.callspec.params.values() if isinstance(x, str)}
    return said(script, *sorted(named | checks_read({i.function for i in here})))


def checks_read(tests: Iterable[Callable[..., None]]) -> set[str]:
    """The checks that tests read, as `seen["..."]`."""
    return {name for test in tests for name in re.findall(r'seen\["(\w+)"\]', inspect.getsource(test))}


def told(call: Callable[[], Any]) -> str:
    """The package's error that a call raises, as text."""
    from shardplan.errors import ShardplanError

    try:
        call()
    except ShardplanError as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def main(checks: Sequence[Callable[..., Any]], make: Callable[[], tuple[Any, ...]] = tuple) -> None:
    """Print what the checks return, of those named as arguments or of all, called with what `make` makes.

    One that raises is reported by its text.
    """
    os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count=8 {QUICK}"
    os.environ["JAX_PLATFORMS"] = "cpu"
    names, given, out = sys.argv[1:], make(), dict[str, Any]()
    for check in checks:
        if names and check.__name__ not in names:
            continue
        try:
            out[check.__name__] = check(*given)
        except Exception:
            out[check.__name__] = {"raised": traceback.format_exc()[-3000:]}
    print(json.dumps(out))

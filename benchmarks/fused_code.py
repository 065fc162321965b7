"""The fused kernels compiled ahead of time for sm_90 and gfx942, by Triton 3.9 and 3.6, and what their text says.

3.9 is the one that is installed; 3.6, with numpy 2.3, is put into an environment of its own below `build/`. Of each
kernel: a release add at system scope, a barrier of the program before it, an acquire at system scope, and wide words.
Altered kernels, without the hint of alignment, the barrier, or the scope, must fail just that.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.common import RESULTS, ROOT, record, table, write

OTHER = ROOT / "build" / "triton36"
NEEDS = ("triton==3.6.*", "numpy==2.3.*", "ml_dtypes>=0.5", "msgspec>=0.19")


def _python(own: Path) -> Path:
    """The interpreter of an environment with Triton 3.6, made where there is none."""
    python = own / "bin" / "python"
    if not (own / ".stamp").exists():
        subprocess.run([sys.executable, "-m", "venv", str(own)], check=True)
        quiet = ["--quiet", "--disable-pip-version-check"]
        subprocess.run([str(python), "-m", "pip", "install", *quiet, *NEEDS], check=True)
        (own / ".stamp").touch()
    return python


def _said(python: Path) -> dict[str, Any]:
    """What an environment's Triton makes of the kernels, nothing taken from its cache."""
    with tempfile.TemporaryDirectory() as cache:
        path = os.pathsep.join(str(ROOT / part) for part in ("src", "."))
        environment = os.environ | {"TRITON_CACHE_DIR": cache, "PYTHONPATH": path}
        environment.pop("TRITON_INTERPRET", None)
        done = subprocess.run(
            [str(python), "-m", "benchmarks.fused_text"], cwd=ROOT, env=environment, capture_output=True, text=True
        )
    if done.returncode:
        raise SystemExit(done.stderr[-3000:])
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.fused_code", description=__doc__)
    parser.add_argument("--out", type=Path, default=RESULTS / "fused_code.json", help="the result file")
    parser.add_argument("--python", type=Path, default=None, help="an interpreter that has Triton 3.6")
    options = parser.parse_args()
    found = [_said(Path(sys.executable)), _said(options.python or _python(OTHER))]
    keys = ("kernel", "target", "source", "signal", "barrier", "wait", "wide", "resources")
    rows = [{"triton": each["triton"]} | row for each in found for row in each["rows"]]
    controls = [{"triton": each["triton"]} | row for each in found for row in each["controls"]]
    print(table(("triton", *keys), [[row.get(key, "") for key in ("triton", *keys)] for row in rows]))
    print(table(tuple(controls[0]), [[str(value) for value in row.values()] for row in controls]))
    good = all(row.get(key, True) for row in rows for key in keys[3:-1])
    good &= not any(row["resources"].get("spilled") for row in rows)
    good &= all(row["fails"] == sorted(row["must"].split()) for row in controls)
    print("all hold, and altered kernels fail what they must" if good else "NOT all hold")
    write(
        options.out,
        record({"triton": [each["triton"] for each in found]}, {"good": good, "rows": rows, "controls": controls}),
    )
    sys.exit(not good)


if __name__ == "__main__":
    main()

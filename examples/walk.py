"""Print the functions of shardplan that a command or a script calls, in order of first calls: `docs/walk.md`.

    python examples/walk.py redistribute "i32[6@(data,tensor), 6]" "i32[6, 6@tensor]" --mesh data=2,tensor=3
    torchrun --standalone --nproc-per-node 6 examples/walk.py run plan.json --backend torch
    torchrun --standalone --nproc-per-node 4 examples/walk.py examples/job.py

What these print themselves goes to stderr. Under a launcher rank 0 is walked.
"""

import contextlib
import os
import sys
from inspect import CO_OPTIMIZED
from pathlib import Path
from runpy import run_path
from types import FrameType
from typing import Any

import shardplan.cli

FIRST = os.environ.get("RANK", "0") == "0"
PACKAGE = str(Path(shardplan.cli.__file__).parents[1]) + os.sep


def called(arguments: list[str]) -> tuple[int, list[tuple[str, str]]]:
    """Return the exit status, 0 of a script, and the file and the qualified name of every function called, once."""
    found: dict[tuple[str, str], None] = {}

    def note(frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if event != "call" or not code.co_filename.startswith(PACKAGE):
            return
        # Bodies of classes and modules run once, at import; lambdas and the like have no name to look for.
        if code.co_flags & CO_OPTIMIZED and "<" not in code.co_qualname:
            found.setdefault((Path(code.co_filename.removeprefix(PACKAGE)).as_posix(), code.co_qualname))

    if FIRST:
        sys.setprofile(note)
    try:
        with contextlib.redirect_stdout(sys.stderr):
            if arguments[0].endswith(".py"):
                run_path(arguments[0], run_name="__main__")
                status = 0
            else:
                status = shardplan.cli.run_command(arguments)
    finally:
        sys.setprofile(None)
    return status, list(found)


if __name__ == "__main__":
    status, functions = called(sys.argv[1:])
    if FIRST:
        print("\n".join(f"{path} {name}" for path, name in functions))
    sys.exit(status)

"""Print the functions of shardplan that a command calls, in the order of their first calls: `docs/walk.md` names some.

    python examples/walk.py redistribute "i32[6@(data,tensor), 6]" "i32[6, 6@tensor]" --mesh data=2,tensor=3
    torchrun --standalone --nproc-per-node 6 examples/walk.py run plan.json --backend torch

What the command itself prints goes to stderr. Under a launcher only rank 0 prints.
"""

import contextlib
import os
import sys
from inspect import CO_OPTIMIZED
from pathlib import Path
from types import FrameType
from typing import Any

import shardplan.cli

PACKAGE = str(Path(shardplan.cli.__file__).parents[1]) + os.sep


def called(arguments: list[str]) -> tuple[int, list[tuple[str, str]]]:
    """Return a command's exit status, and the file and the qualified name of every function it calls, once."""
    found: dict[tuple[str, str], None] = {}

    def note(frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if event != "call" or not code.co_filename.startswith(PACKAGE):
            return
        # Bodies of classes and modules run once, at import; lambdas and the like have no name to look for.
        if code.co_flags & CO_OPTIMIZED and "<" not in code.co_qualname:
            found.setdefault((Path(code.co_filename.removeprefix(PACKAGE)).as_posix(), code.co_qualname))

    sys.setprofile(note)
    try:
        with contextlib.redirect_stdout(sys.stderr):
            status = shardplan.cli.run_command(arguments)
    finally:
        sys.setprofile(None)
    return status, list(found)


if __name__ == "__main__":
    status, functions = called(sys.argv[1:])
    if os.environ.get("RANK", "0") == "0":
        print("\n".join(f"{path} {name}" for path, name in functions))
    sys.exit(status)

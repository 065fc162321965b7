"""The exit statuses, and how an error becomes one: a line on stderr, and an object on stdout under `--json`.

The one table of statuses; the help shows it, and `docs/cli.md` has it word for word.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence

from shardplan.errors import Infeasible

DONE, VERDICT, MISTAKE, IMPOSSIBLE, FAILED = range(5)
INTERRUPTED, BROKEN_PIPE = 130, 141  # what a shell says of a process that SIGINT or SIGPIPE ended: 128 and the signal
STATUSES = {
    DONE: "done",
    VERDICT: "a verdict: diff found a difference, a --gate or --fail-above more",
    MISTAKE: "a mistake in what was asked: one line; of a text two more point at it",
    IMPOSSIBLE: "impossible: nothing fits the limit; memory, a device, a package lacks",
    FAILED: "a failure while running, such as a timeout or a rank that is gone",
    INTERRUPTED: "interrupted with Ctrl-C",
    BROKEN_PIPE: "the reader of the output left",
}
# \b keeps the lines of a paragraph apart.
EPILOGUE = "\b\nExit status:\n" + "\n".join(f"  {status:<4} {meaning}" for status, meaning in STATUSES.items())


def complain(error: object, status: int, arguments: Sequence[str] = (), kind: str = "", default: str = "failed") -> int:
    """Say an error on stderr, `default` where it has no text, and as an object where the arguments ask for JSON.

    `kind` names the error, by default its class. Returns the status.
    """
    message = str(error) or default
    print(f"shardplan: {message}", file=sys.stderr)
    if asks_json(arguments):
        said: dict[str, object] = {"error": kind or type(error).__name__, "message": message, "status": status}
        if isinstance(error, Infeasible) and error.least_bytes is not None:
            said |= {"least_bytes": error.least_bytes, "absolute_least_bytes": error.absolute_least_bytes}
        print(json.dumps(said), flush=True)
    return status


def asks_json(arguments: Sequence[str]) -> bool:
    """Say whether a command line asks for JSON, also one that is wrong otherwise.

    >>> asks_json(["check", "--json"]), asks_json(["check", "--", "--json"])
    (True, False)
    """
    words = list(arguments)
    return "--json" in words[: words.index("--") if "--" in words else len(words)]

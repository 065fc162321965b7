"""Before the first step, the processes of a JAX launch compare what they are about to run.

A hash of the program's text goes through the key-value store of `jax.distributed`, which every launch has. Unequal
programs would wait for each other for ever, or mix up their bytes.
"""

from __future__ import annotations

import hashlib
import itertools
import time

from shardplan.core.program import Program
from shardplan.errors import BackendError, TimedOut

_runs = itertools.count()


def agree(program: Program, timeout: float) -> None:
    """Return when all processes have come with this program, at most `timeout` seconds later.

    Raises `BackendError` naming the processes that run another program, `TimedOut` naming those that did not come.
    """
    import jax  # pyright: ignore[reportMissingImports]
    from jax._src.distributed import global_state  # pyright: ignore[reportMissingImports]

    client = global_state.client
    if client is None:
        raise BackendError("jax: several processes without jax.distributed.initialize(), so nothing can be compared")
    run, me = next(_runs), jax.process_index()
    text = str(program)
    digest = hashlib.sha256(text.encode()).hexdigest()
    client.key_value_set(f"shardplan/{run}/{me}", digest)
    deadline = time.monotonic() + timeout
    found: dict[int, str] = {me: digest}
    late: list[int] = []
    for process in range(jax.process_count()):
        if process == me:
            continue
        left = max(1, int(1000 * (deadline - time.monotonic())))
        try:
            found[process] = client.blocking_key_value_get(f"shardplan/{run}/{process}", left)
        except jax.errors.JaxRuntimeError:
            late.append(process)
    what = f"a program of {len(program.steps)} steps"
    if late:
        raise TimedOut(
            f"jax: process {me} came to run {run}, {what}, but after {timeout:g} s these had not: "
            f"{', '.join(map(str, late))}"
        )
    others = [p for p, d in sorted(found.items()) if d != digest]
    if others:
        raise BackendError(
            f"jax: process {me} runs {what} (hash {digest[:12]}), but another is run by process "
            f"{', '.join(f'{p} ({found[p][:12]})' for p in others)}; nothing was sent"
        )

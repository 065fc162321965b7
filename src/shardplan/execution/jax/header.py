"""The identity of a program, which travels ahead of its data wherever several processes run it.

The processes have agreed on every program before its first run (`agree`), but one may then run them in another
order, and XLA compares nothing: collectives of one form would hand one program's bytes out as the other's. So an
executable opens with a maximum of `WORDS` numbers over all its devices, which tells each whether all run the same. Its
steps are the branch of a condition that waits for it, and where programs differ the other branch raises, on every
process: nothing else is sent, and the processes can go on. The host waits for nothing; the error is that of the result.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Any

import jax  # pyright: ignore[reportMissingImports]
import jax.numpy as jnp  # pyright: ignore[reportMissingImports]
import numpy as np
from jax import lax  # pyright: ignore[reportMissingImports]

from shardplan.core.dtypes import numpy_dtype
from shardplan.core.program import Program
from shardplan.errors import BackendError
from shardplan.execution.jax.wire import JaxWire

WORDS = 4  # int32: two of the digest, and their complements, whose maximum tells the minimum
Run = Callable[..., tuple[Any, ...]]


def guard_with_header(run: Run, program: Program, outputs: Sequence[str], wire: JaxWire) -> Run:
    """Return what one device does for some steps of a program, only where all devices do the same.

    `run` is the steps, inside a `shard_map` over `wire.axes`, which are all devices that run them; it returns the
    values `outputs` of the program. What is returned takes and gives what `run` does.
    """
    mine = digest_words(program, outputs)

    def body(*shards: Any) -> tuple[Any, ...]:
        most = lax.pmax(wire.varying(jnp.asarray(np.concatenate([mine, ~mine]))), wire.axes)
        high, low = most[: mine.size], ~most[mine.size :]

        def other(*_: Any) -> tuple[Any, ...]:
            kind = jax.ShapeDtypeStruct((), np.int32)  # of what never comes back, but keeps the call in the program
            never = wire.varying(jax.pure_callback(lambda *found: refuse(program, mine, found), kind, high, low))
            types = (program.types[n] for n in outputs)
            return tuple(jnp.full(t.local_shape() or (1,), never).astype(numpy_dtype(t.dtype)) for t in types)

        def same(*held: Any) -> tuple[Any, ...]:
            return tuple(wire.varying(x) for x in run(*held))

        return lax.cond((high == low).all(), same, other, *shards)

    return body


def digest_words(program: Program, outputs: Sequence[str]) -> np.ndarray:
    """Return the digest of the part of a program that makes `outputs`, int32 [WORDS / 2]."""
    text = f"{program}\n{' '.join(outputs)}"
    return np.frombuffer(hashlib.sha256(text.encode()).digest(), np.int32, WORDS // 2)


def refuse(program: Program, mine: np.ndarray, found: Sequence[Any]) -> None:
    """Raise the error of a run whose devices run several programs; `found` are the largest and the least digest word.

    Each is int32 [WORDS / 2], of all devices word by word.
    """
    here, *others = (x.tobytes().hex() for x in (mine, *map(np.asarray, found)))
    raise BackendError(
        f"jax: this process runs the program {here} ({' '.join(s.op.name for s in program.steps)}), another process "
        f"{' or '.join(sorted({*others} - {here}))}; nothing was moved: all must run their programs in one order"
    )

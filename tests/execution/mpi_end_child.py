"""Run under mpiexec on four ranks, of which rank 2 raises outside of any call; the others print what they are told.

Argument: when it raises. `before` its first call, of the backend it has then imported nothing; `between` two calls;
`done` when all that it takes part in is done, while the others go on without it.
"""

import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

import numpy as np  # noqa: E402
from mpi4py import MPI  # noqa: E402

import shardplan as sp  # noqa: E402

RANK, ODD, LONG = MPI.COMM_WORLD.Get_rank(), 2, 90.0


def gather(ranks: list[int]) -> None:
    mesh = sp.Mesh({"x": len(ranks)}, devices=ranks)
    program = sp.redistribute(f"i32[{2 * len(ranks)}@x, 4]", f"i32[{2 * len(ranks)}, 4]", mesh=mesh).program
    (found,) = sp.run(program, [np.full((2, 4), RANK, np.int32)], "mpi", LONG)
    assert np.array_equal(found[:, 0], np.repeat(ranks, 2))


def main(how: str) -> None:
    if how != "before":
        gather([0, 1, 2, 3])
    if RANK == ODD:
        raise ValueError("in a script of its own")
    if how == "done":
        time.sleep(0.3)  # rank 2 has ended
        for _ in range(3):
            gather([0, 1, 3])
        print(f"rank {RANK} has done all\n", end="", file=sys.stderr, flush=True)
        return
    try:
        gather([0, 1, 2, 3])
    except sp.ShardplanError as error:
        print(f"rank {RANK} was told {type(error).__name__}: {error}\n", end="", file=sys.stderr, flush=True)
        raise


if __name__ == "__main__":
    main(sys.argv[1])

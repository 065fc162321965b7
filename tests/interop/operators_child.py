"""`benchmarks.operators` with a fault in our moves: which (none if empty), then its own arguments."""

import gc
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks import operator_ways as ways
from benchmarks import operators


def element(rank, result):
    return result + 1 if rank == 1 else result


def refusal(rank, result):
    raise ValueError("not today")


def refusal_on_one_rank(rank, result):
    if rank == 2:
        raise ValueError("not here")
    return result


def lost_process(rank, result):
    if rank == 3:
        os._exit(7)
    return result


FAULTS = {
    "an element": element,
    "a refusal": refusal,
    "a refusal on one rank": refusal_on_one_rank,
    "a lost process": lost_process,
}

if __name__ == "__main__":
    name = sys.argv.pop(1)
    if name:
        right, fault = ways.moves.move_shard, FAULTS[name]
        ways.moves.move_shard = lambda *arguments: fault(ways.dist.get_rank(), right(*arguments))
        operators.GRACE /= 16  # ranks that wait for one that has failed wait in vain
    operators.database()
    gc.freeze()  # the ranks are forked, and a collection would copy every page they share
    operators.main()

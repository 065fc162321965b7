"""Run under mpiexec on eight ranks: exports of every case beside the reference; rank 0 prints one JSON object."""

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import numpy as np
from export_cases import RANKS, cases
from mpi4py import MPI

from shardplan.interop.exports.mpi import bind_reduction, mpi_text
from shardplan.interop.exports.recipe import recipe


def main() -> None:
    world = MPI.COMM_WORLD
    rank = world.Get_rank()
    assert world.Get_size() == RANKS
    wrong: list[str] = []
    for case in cases():
        text: dict = {}
        exec(compile(mpi_text(case.program, case.placement), "<exported>", "exec"), text)
        groups = text["make_groups"](text["MOVES"], text["SIZES"], text["RANKS"], world)
        bound = bind_reduction(case.program)
        placed = recipe(case.program, case.placement)
        for way, found, made, run in (
            ("bound", bound.recipe, bound.groups, bound),
            ("text", placed, groups, lambda x, text=text, groups=groups: text["reduce_payload"](x, groups)),
        ):
            mine = {m.label for m in found.moves for group in found.groups(m) if rank in group}
            if mine != set(made):
                wrong.append(f"{case.name}, {way}: takes part in {set(made)}, not {mine}")
            if rank not in found.ranks:
                continue
            place = found.ranks.index(rank)
            payload, want = case.payloads()[place], case.expected()[place]
            before = payload.copy()
            got = run(payload)
            if want is not None and not np.array_equal(got, want):
                wrong.append(f"{case.name}, {way}: {got[:6].tolist()} for {want[:6].tolist()}")
            if not np.array_equal(payload, before):
                wrong.append(f"{case.name}, {way}: the payload was written to")
        for group in groups.values():
            group.Free()
        bound.free_communicators()
    gathered = world.gather(wrong, root=0)
    if gathered is not None:
        print(json.dumps({"wrong": [x for part in gathered for x in part]}))


if __name__ == "__main__":
    main()

"""Run on eight gloo ranks: exports of every case beside the reference; rank 0 prints one JSON object."""

import inspect
import json
import sys
import warnings
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import torch
import torch.distributed as dist
from export_cases import RANKS, cases

from shardplan.interop.exports.recipe import recipe
from shardplan.interop.exports.torch import bind_reduction, torch_text


class Older:
    """torch.distributed as older releases have it: groups are sorted, the newer names of collectives are missing."""

    def __init__(self) -> None:
        self.new_group = lambda ranks=None: dist.new_group(sorted(ranks))

    def __getattr__(self, name: str):
        if name.endswith("_single"):
            raise AttributeError(name)
        return getattr(dist, name)


def mine(case, ranks, rank):
    """The payload of a rank and its result; zeros and nothing where it takes no part."""
    if rank not in ranks:
        return torch.zeros(case.size, dtype=torch.int32), None
    place = list(ranks).index(rank)
    return torch.from_numpy(case.payloads()[place].copy()), case.expected()[place]


def main() -> None:
    warnings.simplefilter("ignore", FutureWarning)  # the older names of collectives
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    assert dist.get_world_size() == RANKS
    wrong: list[str] = []
    made: dict = {}
    older: dict = {}
    for case in cases():
        payload, want = mine(case, case.input_type.mesh.devices, rank)
        before = payload.clone()
        text: dict = {}
        exec(compile(torch_text(case.program, case.placement), "<exported>", "exec"), text)
        text_groups = text["make_groups"](text["GROUPS"], made)
        bound = bind_reduction(case.program, made)
        place = rank in case.input_type.mesh.devices
        if place:
            wrong += differs(f"{case.name}, bound", bound(payload), want)
        ranks = recipe(case.program, case.placement).ranks
        if rank in ranks:
            other, other_want = mine(case, ranks, rank)
            wrong += differs(f"{case.name}, text", text["reduce_payload"](other, text_groups), other_want)
        try:
            torch.distributed = Older()
            bound = bind_reduction(case.program, older)
            assert isinstance(bound.reduce_payload.__globals__["dist"], Older)
        finally:
            torch.distributed = dist
        if place:
            wrong += differs(f"{case.name}, older", bound(payload), want)
        if not torch.equal(payload, before):
            wrong.append(f"{case.name}: the payload was written to")
    orders = [dist.get_process_group_ranks(group) == list(members) for members, group in made.items()
              if rank in members]  # fmt: skip
    gathered: list = [None] * RANKS
    dist.all_gather_object(gathered, (wrong, all(orders)))
    if rank == 0:
        unsorted = sum(list(members) != sorted(members) for members in made)
        print(json.dumps({
            "wrong": [x for part, _ in gathered for x in part], "kept order": all(x for _, x in gathered),
            "groups": len(made), "distinct": len(set(made)), "unsorted": unsorted, "sorts": "sort_ranks"
            in inspect.signature(dist.new_group).parameters,
        }))  # fmt: skip
    dist.destroy_process_group()


def differs(what: str, got: torch.Tensor, want) -> list[str]:
    if want is None or torch.equal(got, torch.from_numpy(want)):
        return []
    return [f"{what}: {got.tolist()[:6]} for {want.tolist()[:6]}"]


if __name__ == "__main__":
    main()

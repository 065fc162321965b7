"""Live refits of several hops, whose ranks are threads of this process, where planted faults reach them."""

import threading

import pytest
import torch

from interop.refit_child import Model, relaying
from shardplan.interop.torch.refit.handle import Refit
from shardplan.movement.weights.refit import RefitPlan


def refitted(plan: RefitPlan, seeds: range) -> list[BaseException]:
    """Refit on one thread a rank, compare with the reference after every call, and return what was raised."""
    store, wrong = torch.distributed.HashStore(), list[BaseException]()

    def rank(me: int) -> None:
        try:
            model = Model(plan, me)
            with Refit(plan, model.source or model.target, rank=me, store=store, timeout=20) as sync:
                for seed in seeds:
                    model.set(seed)
                    sync()
                    model.check(seed)
                assert plan.memory_limit is None or sync.staging_bytes <= plan.memory_limit
        except BaseException as error:
            wrong.append(error)

    threads = [threading.Thread(target=rank, args=(me,)) for me in plan.ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return wrong


@pytest.mark.parametrize(("wide", "narrow"), [("f32", "bf16"), ("bf16", "f32")])
@pytest.mark.parametrize("limit", [None, 2_000])
def test_receivers_pass_on_what_one_of_them_got(limit: int | None, wide: str, narrow: str) -> None:
    assert refitted(relaying(limit, wide, narrow), range(2)) == []

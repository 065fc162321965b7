"""Live refits of several hops, whose ranks are threads of this process, where planted faults reach them."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from interop.refit_child import Model, relaying, sides, tensors
from rank_threads import in_threads
from shardplan.errors import LayoutError
from shardplan.interop.torch.refit.handle import Refit
from shardplan.movement.weights.refit import RefitPlan, refit


def on_threads(plan: RefitPlan, work: Callable[[Model, Refit], None], **given: Any) -> None:
    """Do some work on one thread a rank, each with its model and its handle; raises what the first of them raised."""
    store = torch.distributed.HashStore()

    def rank(me: int) -> None:
        model = Model(plan, me)
        with Refit(plan, model.source or model.target, rank=me, store=store, timeout=20, **given) as sync:
            work(model, sync)

    in_threads(plan.ranks, rank)


@pytest.mark.parametrize(("wide", "narrow"), [("f32", "bf16"), ("bf16", "f32")])
@pytest.mark.parametrize("limit", [None, 2_000])
def test_receivers_pass_on_what_one_of_them_got(limit: int | None, wide: str, narrow: str) -> None:
    def work(model: Model, sync: Refit) -> None:
        for seed in range(2):
            model.set(seed)
            sync()
            model.check(seed)
        assert limit is None or sync.staging_bytes <= limit

    on_threads(relaying(limit, wide, narrow), work)


def altered(model: Model, name: str) -> dict[int, dict[str, np.ndarray]]:
    """The values of seed 0 with those of one parameter doubled on every rank of the source, and set here."""
    values = model.values(0)
    for named in values.values():
        named[name] = (named[name] * 2).astype(named[name].dtype)
    for key, x in tensors(values[model.rank]).items() if model.source else ():
        model.source[key].copy_(x)
    return values


@pytest.mark.parametrize("relay", [False, True])
def test_only_what_has_changed_travels(relay: bool) -> None:
    """A call without a change says so in a byte a message; with one, what travels is as long as that parameter."""
    limit, kinds = 3_000, ("f32", "bf16")
    plan = relaying(limit, *kinds) if relay else refit(*sides(False, *kinds), memory_limit=limit)
    name = "0.decoder.layers.1.mlp.linear_fc2.weight"

    def work(model: Model, sync: Refit) -> None:
        model.set(0)
        sync()
        whole = sync.sent_bytes
        sync()
        said = sync.sent_bytes
        gives = bool(model.source) or relay
        assert said < 300 and (whole > 1000) == gives, (said, whole)
        model.check(0)
        values = altered(model, name)
        sync()
        assert (said < sync.sent_bytes < whole / 4) == gives, (said, sync.sent_bytes, whole)
        model.check_is(values)
        if sync.target is not None:  # another handle has been there
            sync._served.begin()
            for x in model.target.values():
                x.zero_()
        sync()
        assert sync.sent_bytes == whole
        model.check_is(values)

    on_threads(plan, work, changed_only=True)


def test_after_a_failed_call_everything_travels() -> None:
    plan = refit(*sides(False, "f32", "f32"))

    def work(model: Model, sync: Refit) -> None:
        model.set(1)
        sync()
        whole = sync.sent_bytes
        with pytest.raises(LayoutError, match="versions from 20 to 23"):
            sync(version=20 + model.rank)
        for x in (model.target or {}).values():
            x.zero_()
        sync()
        assert sync.sent_bytes == whole
        model.check(1)

    on_threads(plan, work, changed_only=True)


def test_ranks_that_differ_in_what_they_send_again_are_told() -> None:
    plan = refit(*sides(False, "f32", "f32"))
    store, said = torch.distributed.HashStore(), set[str]()

    def rank(me: int) -> None:
        model = Model(plan, me)
        try:
            Refit(plan, model.source or model.target, rank=me, store=store, timeout=20, changed_only=me == 2)
        except LayoutError as error:
            said.add(str(error))

    in_threads(plan.ranks, rank)
    assert said == {
        "refit megatron-llama to vllm-llama: rank 2 of 4 ranks came with another plan: its changed_only is True, on "
        "rank 0 it is False; legal is one plan on all ranks, and nothing was sent"
    }

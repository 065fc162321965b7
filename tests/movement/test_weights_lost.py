"""Planted losses of every kind: each is refused in every way and named; `benchmarks.weights_losses` plants 105."""

from __future__ import annotations

import random

import pytest

from movement.weights_lost import KINDS, alarm, allowed, planted

pytest.importorskip("torch.distributed")


@pytest.mark.parametrize("kind", KINDS)
def test_a_loss_is_refused_in_every_way_and_named(kind: str) -> None:
    loss = planted(kind, random.Random(f"{kind} tests"))
    assert all(loss.found.values()), f"{loss.says}: {loss.found}"
    assert alarm(loss.session) == ""
    if loss.drop or loss.differ:
        assert allowed(loss) == ""

"""Memory limits: the least that works, and plans between it and no limit."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import oracle
import shardplan as sp
import strategies as some

Pair = tuple[sp.TensorType, sp.TensorType]
ANY = st.one_of(some.pairs(("even", "uneven", "partial", "rooted"), most=12), some.cross_pairs(most=8))


def least(s: sp.TensorType, t: sp.TensorType, portable: bool = False) -> int:
    """The least limit that works, as `Infeasible` names it."""
    if sp.same(s, t) or max(x.local_bytes() for x in (s, t)) <= 1:
        return max(1, sp.redistribute(s, t, portable=portable).certificate.workspace_bytes)
    with pytest.raises(sp.Infeasible) as error:
        sp.redistribute(s, t, memory_limit=1, portable=portable)
    if error.value.least_bytes is None:
        assert portable
        pytest.skip("no portable plan at all")
    text = f"within 1 bytes a device: no plan; the least that works is {error.value.least_bytes} bytes"
    assert str(error.value).endswith(text)
    return error.value.least_bytes


@settings(max_examples=150, deadline=None)
@given(ANY)
def test_the_least_limit_works_and_one_byte_less_does_not(pair: Pair) -> None:
    s, t = pair
    low = least(s, t)
    plan = sp.redistribute(s, t, memory_limit=low)
    plan.certificate.check()
    assert plan.certificate.workspace_bytes <= low
    assert plan.certificate.memory_limit == low
    assert oracle.unsound(plan.program, [t]) is None
    if low > 1 and not sp.same(s, t):
        with pytest.raises(sp.Infeasible) as error:
            sp.redistribute(s, t, memory_limit=low - 1)
        assert error.value.least_bytes == low


@settings(max_examples=100, deadline=None)
@given(ANY, st.lists(st.floats(0, 1), min_size=2, max_size=4))
def test_t13_more_memory_is_never_costlier(pair: Pair, shares: list[float]) -> None:
    s, t = pair
    low = least(s, t)
    free = sp.redistribute(s, t)
    top = max(free.certificate.workspace_bytes, low)
    bound = oracle.bound(s, t)
    costs: list[float] = []
    for limit in sorted({low, top, *(round(low + x * (top - low)) for x in shares)}):
        plan = sp.redistribute(s, t, memory_limit=limit)
        assert plan.certificate.workspace_bytes <= limit
        assert plan.certificate.peak_bytes <= bound
        costs.append(oracle.cost(plan.program, bound))
    costs.append(oracle.cost(free.program, bound))
    assert all(b <= a * (1 + 1e-9) for a, b in zip(costs, costs[1:], strict=False)), costs


@settings(max_examples=60, deadline=None)
@given(some.pairs(("even", "uneven"), most=12))
def test_a_device_never_holds_more_than_the_workspace(pair: Pair) -> None:
    """T3': input and output of a step together, counted on real arrays, with the buffers that the op declares."""
    s, t = pair
    plan = sp.redistribute(s, t)
    values = {"0": oracle.spread(oracle.content(s), s, np.random.default_rng(0))}
    for step in plan.program.steps:
        types = [plan.program.types[o] for o in step.operands]
        (after,) = step.op.reference([values[step.operands[0]]], types)
        used = max(a.nbytes + b.nbytes for a, b in zip(values[step.operands[0]], after, strict=True))
        assert used + step.op.staging(*types) <= plan.certificate.workspace_bytes
        values[step.results[0]] = after


def test_staging_is_one_buffer_each_way() -> None:
    mesh = sp.Mesh(a=4)
    s, t = (sp.TensorType.parse(x, mesh) for x in ("f32[64@a, 64]", "f32[64, 64@a]"))
    shard = 64 * 64 * 4 // 4
    free = sp.redistribute(s, t).certificate
    assert (free.peak_bytes, free.bound_bytes) == (shard, shard)
    assert 2 * shard <= free.workspace_bytes <= 4 * shard
    low = least(s, t)
    assert 2 * shard < low < free.workspace_bytes
    plan = sp.redistribute(s, t, memory_limit=low + 16)  # below it a detour over narrower tiles stages a bit less
    assert any(getattr(step.op, "chunks", 1) > 1 for step in plan.program.steps)
    assert [step.op.name for step in plan.program.steps] == ["all_to_all"]


def test_limits_are_positive() -> None:
    t = sp.TensorType("f32", (4,), (None,), sp.Mesh(a=2))
    with pytest.raises(sp.LayoutError) as error:
        sp.redistribute(t, t, memory_limit=0)
    assert str(error.value) == "the memory limit is 0 bytes; it must be at least 1"

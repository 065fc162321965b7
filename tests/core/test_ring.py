"""Ring attention and its gradient: what they mean, what every device receives, stages and computes, and their price."""

from typing import Any

import numpy as np
import pytest

import oracle
from compute_examples import UNEQUAL
from core import test_gradients as law
from gradient_examples import Lettered, _torch, back
from shardplan.core.accounting import account
from shardplan.core.dtypes import numpy_dtype
from shardplan.core.layout import Layout
from shardplan.core.ops import Attention, RingAttention, RingAttentionBackward
from shardplan.core.ops.overlapped import Overlapped
from shardplan.core.ops.zigzag import Zigzag
from shardplan.core.pattern import AtOnce, InTurn, Messages, StepPattern, Work
from shardplan.core.program import Program
from shardplan.core.reference import collect, distribute, run_reference
from shardplan.core.step import Step
from shardplan.core.tensor import TensorType
from shardplan.errors import LayoutError, TypingError
from shardplan.hardware.prices.cost import price, seconds
from shardplan.hardware.prices.fabric import Fabric
from shardplan.hardware.topology import Topology
from shardplan.simulation.events import simulate


def attended(q: Any, k: Any, v: Any, order: np.ndarray | None, window: int = 0, cap: float = 0.0) -> Any:
    """By torch's own functions; with an order a query sees keys up to its own position, so many with a window."""
    torch = _torch()
    x = torch.einsum("bsgrd,btgd->bsgrt", q, k) * q.shape[-1] ** -0.5
    x = cap * (x / cap).tanh() if cap else x
    if order is not None:
        apart = order[:, None] - order[None, :]
        seen = torch.from_numpy((apart >= 0) & ((apart < window) | (window == 0)))
        x = x.masked_fill(~seen[None, :, None, None], -torch.inf)
    return torch.einsum("bsgrt,btge->bsgre", x.softmax(-1), v), x.logsumexp(-1)


def example(op: RingAttention, order: np.ndarray | None) -> Lettered:
    return Lettered(lambda s, layout: op, ("f64 biako", "f64 biao", "f64 biap"),
                    lambda s, q, k, v: attended(q, k, v, order, op.window, op.cap), 29)  # fmt: skip


S = UNEQUAL["i"]
EXAMPLES = [
    example(RingAttention(), np.arange(S)),
    example(RingAttention(False), None),
    example(RingAttention(zigzag=3), Zigzag(S, 3).order()),
    example(RingAttention(zigzag=3, window=2, cap=0.7), Zigzag(S, 3).order()),
]
LAWS = [
    law.test_every_legal_assignment_has_torchs_gradients,
    law.test_central_differences,
    law.test_a_gradient_lies_as_its_value_does,
    law.test_a_gradient_is_text_that_parses_back,
]


@pytest.mark.parametrize("holds", LAWS, ids=lambda f: f.__name__)
@pytest.mark.parametrize("one", EXAMPLES, ids=["causal", "whole", "zigzag", "window"])
def test_the_laws_of_ops_and_gradients(holds: Any, one: Lettered) -> None:
    holds(one)


def types(s: int, mesh: str, cut: str, dtype: str = "f64") -> tuple[TensorType, TensorType, TensorType]:
    """Of queries, keys and values."""
    q, k, v = (f"{dtype}[2, {s}{cut}, 4, {rest}]" for rest in ("3, 8", "8", "5"))
    first = TensorType.parse(q, mesh)
    return first, TensorType.parse(k, first.mesh), TensorType.parse(v, first.mesh)


CUTS: list[tuple[Any, ...]] = [
    (12, "c=3", "@c"),
    (11, "c=4", "@c"),
    (5, "c=4", "@c"),  # the last device has nothing
    (12, "d=2,c=2", "@(d,c)"),
    (12, "d=2,c=2", "@c"),
    (9, "c=1", ""),
    (12, "c=3", "@c", "bf16"),
]


def both(op: RingAttention, given: tuple[TensorType, ...]) -> list[tuple[Overlapped, tuple[TensorType, ...]]]:
    """The op and its gradient, with the types of their operands."""
    steps = [s for p in (back(op, given),) for s in p.steps if isinstance(s.op, Overlapped)]
    return [(s.op, back(op, given).step_types(s)[0]) for s in steps if isinstance(s.op, Overlapped)]


@pytest.mark.parametrize("zigzag", [1, 4])
@pytest.mark.parametrize("cut", CUTS, ids=str)
def test_it_is_its_decomposition(cut: tuple[Any, ...], zigzag: int) -> None:
    rng = np.random.default_rng(0)
    for op, given in both(RingAttention(zigzag=zigzag), types(*cut)):
        arrays = [rng.normal(size=t.shape).astype(numpy_dtype(t.dtype)) for t in given]
        shards = [distribute(x, t) for x, t in zip(arrays, given, strict=True)]
        steps = op.decomposition(*given)
        assert steps is not None
        whole = Program({str(k): t for k, t in enumerate(given)}, steps.steps, steps.results)
        least = 0.02 if "bf16" in cut else 1e-12
        found, results = op.reference(shards, given), op.infer(*given)
        assert whole.output_types == results
        for x, y, t in zip(found, run_reference(whole, shards), results, strict=True):
            a, b = (collect(z, t).astype(float) for z in (x, y))
            assert np.abs(a - b).max() <= least * np.abs(b).max()


@pytest.mark.parametrize("cut", CUTS, ids=str)
def test_every_other_tile_comes_once_and_two_are_staged(cut: tuple[Any, ...]) -> None:
    """Forward; backward as well, all cotangents behind them, wide, and home at last."""
    (op, given), (rear, more) = both(RingAttention(), types(*cut))
    k, v = given[1:]
    places, wide = k.mesh.group_places(op.members(k)), max(4, k.itemsize)
    tiles = k.elements() + v.elements()
    group = np.zeros_like(tiles)
    for members in places:
        group[members] = tiles[members].sum()
    assert op.received_bytes(*given).tolist() == ((group - tiles) * k.itemsize).tolist()
    cotangents = group * wide * (places.shape[1] > 1)
    assert rear.received_bytes(*more).tolist() == ((group - tiles) * k.itemsize + cotangents).tolist()
    assert op.sent_bytes(*given)[1].sum() == op.received_bytes(*given).sum()
    rounds = places.shape[1] - 1
    assert (op.rounds(*given), rear.rounds(*more)) == (rounds, rounds + 2 * (rounds > 0))
    sums = 0 if k.itemsize >= 4 else given[0].elements().max() // 8 * 5 * wide  # of the result, where it is narrow
    assert op.staging(*given) == 2 * tiles.max() * k.itemsize * (rounds > 0) + sums
    assert (
        account(
            Program({"q": given[0], "k": k, "v": v}, [Step(op, ("q", "k", "v"), ("y", "l"))], ("y",))
        ).received.tolist()
        == op.received_bytes(*given).tolist()
    )


def test_it_holds_two_tiles_where_gathering_holds_all() -> None:
    """Bytes of a program: operands, results, and what is staged; keys and values gathered are 16 tiles."""
    given = types(4096, "c=16", "@c")
    held = sum(t.local_bytes() for t in given)
    op = RingAttention()
    made = sum(t.local_bytes() for t in op.infer(*given))
    inputs = dict(zip("qkv", given, strict=True))
    ring = account(Program(inputs, [Step(op, tuple("qkv"), ("y", "lse"))], ("y",)))
    tile = given[1].local_bytes() + given[2].local_bytes()
    assert ring.workspace_bytes == pytest.approx(held + made + 2 * tile, rel=0.01)
    steps = op.decomposition(*given)
    assert steps is not None
    whole = account(Program({str(k): t for k, t in enumerate(given)}, steps.steps, steps.results))
    assert whole.workspace_bytes > held + 16 * tile


@pytest.mark.parametrize("size", [24, 4096])
def test_operations_are_those_of_attention_and_zigzag_deals_them_out_evenly(size: int) -> None:
    given = types(size, "c=4", "@c")
    one = [t.with_layout(Layout(())) for t in given]
    for causal in (True, False):
        whole = Attention(causal).flops(*one)
        work = [_work(RingAttention(causal, 0.0, z), given) for z in (1, 4)]
        for found in work:
            assert sum(found) == pytest.approx(whole, rel=0.01)
        assert max(work[1]) == min(work[1])
        assert max(work[0]) / sum(work[0]) == pytest.approx(7 / 16 if causal else 1 / 4)
    forward, rear = both(RingAttention(zigzag=4), given)
    assert rear[0].flops(*rear[1]) / forward[0].flops(*forward[1]) == pytest.approx(
        (6 * 8 + 4 * 5 + 7) / (2 * 8 + 2 * 5 + 7)
    )
    uneven = types(size + 1, "c=4", "@c")
    most, all_of = RingAttention(zigzag=4).flops(*uneven), RingAttention().flops(*uneven)
    assert most < 0.8 * all_of


def _work(op: RingAttention, given: tuple[TensorType, ...]) -> list[float]:
    """Operations by device."""
    found = np.zeros(given[0].mesh.size)
    for one in op.lowering(given, given[0].mesh.ids).rounds():
        for kernel in one.kernels:
            found += np.where(kernel.live, kernel.flops, 0)
    assert op.flops(*given) == found.max()
    return found.tolist()


def test_masked_tiles_are_passed_on_and_not_computed() -> None:
    given = types(12, "c=3", "@c")
    rounds = list(RingAttention().lowering(given, given[0].mesh.ids).rounds())
    assert [[k.live.tolist() for k in one.kernels] for one in rounds[1:]] == [
        [[True, True, True]], [[False, True, True]], [[False, False, True]],
    ]  # fmt: skip
    assert [sum(int((p.source.elements() > 0).sum()) for p in one.puts) for one in rounds[1:]] == [3, 3, 0]


def test_a_round_takes_what_takes_longer() -> None:
    """Of its kernel and its messages."""
    given = types(4096, "c=4", "@c", "bf16")
    fabric = Fabric(Topology.load("dgx-h100"))
    pattern = RingAttention(False).pattern(*given)
    assert isinstance(pattern, InTurn)
    total = 0.0
    for step in pattern.steps:
        parts = step.pattern.steps if isinstance(step.pattern, AtOnce) else (step,)
        total += max(seconds(part.pattern, fabric) for part in parts)
    assert price(pattern, fabric).seconds == pytest.approx(total)
    ids = given[0].mesh.ids
    slow, fast = (StepPattern(Work(flops, "bf16", 0.0), ids) for flops in (1e12, 1.0))
    message = StepPattern(Messages(ids[:1], ids[1:2], np.array([1e8])), ids[:2])
    alone = [price(step.pattern, fabric) for step in (slow, fast, message)]
    assert price(AtOnce((slow, message)), fabric).seconds == alone[0].seconds > alone[2].seconds
    found = price(AtOnce((fast, message)), fabric)
    assert (found.alpha, found.transfer) == (alone[2].alpha, alone[2].transfer)
    assert found.level_bytes == alone[2].level_bytes == price(AtOnce((slow, message)), fabric).level_bytes


def test_events_take_the_price_and_zigzag_is_faster() -> None:
    """Event by event, as priced; at this size what a device computes is what takes time."""
    given, found = types(32768, "c=4", "@c", "bf16"), list[float]()
    inputs = dict(zip("qkv", given, strict=True))
    for op in (RingAttention(), RingAttention(zigzag=4)):
        program = Program(inputs, [Step(op, tuple("qkv"), ("y", "lse"))], ("y", "lse"))
        found.append(max(one.end for one in simulate(program, "dgx-h100").intervals))
        assert found[-1] == pytest.approx(price(op.pattern(*given), Fabric(Topology.load("dgx-h100"))).seconds)
    assert found[1] < 0.7 * found[0]


@pytest.mark.parametrize("n", range(1, 20))
def test_zigzag_is_an_order(n: int) -> None:
    from shardplan.core.namespace import NUMPY

    for tiles in range(1, 8):
        order = Zigzag(n, tiles).order()
        assert sorted(order.tolist()) == list(range(n))
        assert Zigzag(n, tiles).positions(NUMPY, np.arange(n)).tolist() == order.tolist()
    assert Zigzag(n, 1).order().tolist() == list(range(n))


def test_what_cannot_go_round_is_said() -> None:
    q, k, v = types(12, "c=3", "@c")
    whole = k.with_layout(Layout(()))
    with pytest.raises(LayoutError, match="the factor s=12 does not meet"):
        RingAttention().infer(q, whole, v)
    with pytest.raises(TypingError, match="ring_attention goes from device to device"):
        RingAttention().bind((q, k, v), lambda t: ((), ()))
    assert Attention().in_rounds(q, k, v) == RingAttention()
    longer = TensorType("f64", (2, 24, 4, 8), (), q.mesh)
    scalar = TensorType("i32", (), (), q.mesh)
    assert Attention().in_rounds(q, longer, longer) is None
    assert Attention().in_rounds(q, k, v, scalar) is None
    for op in (RingAttention, RingAttentionBackward):
        with pytest.raises(TypingError, match=f"{op.name}: zigzag is 0; legal is a whole number of at least 1"):
            op(zigzag=0)
    with pytest.raises(TypingError, match=r"zigzag=2 of .* with keys .*; legal is 1, or a sequence and itself"):
        Attention(zigzag=2).infer(q.with_layout(Layout(())), longer, longer)


def test_the_oracle_sees_a_wrong_result() -> None:
    """Of what the laws hold results against."""
    given = types(12, "c=3", "@c")
    rng = np.random.default_rng(0)
    arrays = [rng.normal(size=t.shape) for t in given]
    found = RingAttention().reference([distribute(x, t) for x, t in zip(arrays, given, strict=True)], given)
    found[0][1] = found[0][1] * 1.001
    want = attended(*map(_torch().from_numpy, arrays), np.arange(12))[0].numpy()
    assert oracle.wrong(found[0], RingAttention().infer(*given)[0], want, 1e-9) is not None

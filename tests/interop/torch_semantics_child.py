"""Run on 4 ranks: what a DTensor means, as `torch_dropin_child`; here beside DTensor wherever it can."""

# ruff: noqa: I001
import random

from torch_dropin_child import (
    DTensor, DTensorSpec, Infeasible, LayoutError, P, Partial, R, S0, S1, Shard, Storages, _StridedShard, local_of,
    main, numbers, raises, redistribute, torch,
)  # fmt: skip
from torch.distributed.tensor import distribute_tensor
from torch.distributed.tensor._dtensor_spec import TensorMeta
from torch.distributed.tensor._redistribute import redistribute_local_tensor
from torch.distributed.tensor.placement_types import _MaskPartial

FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
KINDS = {
    "sum": (*FLOATS, torch.int64, torch.int8, torch.complex64),
    "avg": (*FLOATS, torch.complex64),
    "product": (*FLOATS, torch.int64, torch.uint8, torch.bool),
    "max": (*FLOATS, torch.int32),
    "min": (*FLOATS, torch.int8),
    "band": (torch.int64, torch.uint8, torch.bool),
    "bor": (torch.int64, torch.int32, torch.bool),
    "bxor": (torch.int64, torch.int8, torch.bool),
}


def own(x, mesh, places):
    """`x`, another on every rank, as this rank's shard."""
    return DTensor.from_local(x, mesh, places, run_check=False)


def mine(here, *shape, dtype=torch.float32, seed=0):
    """Small numbers that differ between ranks; products of four of them are exact in every dtype."""
    g = torch.Generator().manual_seed(seed * 7 + here.rank)
    return torch.randint(1, 4, shape, generator=g).to(dtype)


def close(a, b):
    """Equal where sums are exact, else up to the rounding of a sum of four."""
    exact = not (a.is_floating_point() or a.is_complex())
    return a.dtype == b.dtype and a.shape == b.shape and (torch.equal(a, b) if exact else torch.allclose(a, b))


def every_reduction_equals_dtensors(here):
    for op, dtypes in KINDS.items():
        for k, dtype in enumerate(dtypes):
            for mesh, source, goals in (
                (here.line, [Partial(op)], ([R], [S0], [S1])),
                (here.square, [Partial(op), Partial(op)], ([R, R], [S0, S1], [S0, S0], [R, Partial(op)])),
                (here.square, [S0, Partial(op)], ([R, R], [S0, S1], [S1, Partial(op)])),
            ):
                x = own(mine(here, 5, 6, dtype=dtype, seed=k), mesh, source)
                before = x._local_tensor.clone()
                for goal in goals:
                    ours = redistribute(x, goal)
                    theirs = x.redistribute(placements=goal)
                    what = f"{op} of {dtype}: {source} -> {goal}"
                    assert ours._spec == theirs._spec, f"{what}: {ours._spec} {theirs._spec}"
                    assert close(ours._local_tensor, theirs._local_tensor), f"{what}:\n{ours}\n{theirs}"
                    assert torch.equal(x._local_tensor, before), f"{what}: the source changed"


def sums_and_averages_mixed(here):
    for source in ([Partial("sum"), Partial("avg")], [Partial("avg"), Partial("sum")]):
        x = own(mine(here, 4, 6), here.square, source)
        for goal in ([R, R], [source[0], R], [R, source[1]], [S1, S1]):
            assert close(redistribute(x, goal)._local_tensor, x.redistribute(placements=goal)._local_tensor), goal


def average_over_one_rank_is_the_source(here):
    x = own(mine(here, 4), here.column, [S0, Partial("avg")])
    y = redistribute(x, [S0, R])
    assert torch.equal(y._local_tensor, x._local_tensor) and y.placements == (S0, R)


def becomes_partial_as_inside_dtensor(here):
    """What DTensor does inside its ops, bit for bit; a shard, which it refuses, is gathered first."""
    for dtype in (*FLOATS, torch.complex64):
        full = numbers(6, 8, dtype=dtype) / 3
        meta = TensorMeta(full.shape, full.stride(), dtype)
        for op in ("sum", "avg", "max", "min"):
            if dtype.is_complex and op in ("max", "min"):
                continue
            for mesh, source, goal in (
                (here.line, [R], [Partial(op)]),
                (here.square, [R, R], [Partial(op), R]),
                (here.square, [R, R], [Partial(op), Partial(op)]),
                (here.square, [S0, R], [S0, Partial(op)]),
                (here.square, [S0, R], [S1, Partial(op)]),
            ):
                x = here.tensor(full, mesh, source)
                target = DTensorSpec(mesh, tuple(goal), tensor_meta=meta)
                theirs = redistribute_local_tensor(x._local_tensor, x._spec, target)
                ours = redistribute(x, goal)
                assert ours._spec == target and torch.equal(ours._local_tensor, theirs), (op, dtype, source, goal)
                assert torch.equal(x._local_tensor, local_of(full, mesh, source, here.rank, None))
            y = redistribute(here.tensor(full, here.square, [S0, R]), [Partial(op), S1])
            assert y.placements == (Partial(op), S1)
            assert close(redistribute(y, [R, R])._local_tensor, full), (op, dtype)


def becomes_partial_exactly_where_nothing_divides(here):
    full = numbers(4, 6, dtype=torch.int64)
    for op in ("sum", "max", "min", "product", "band", "bor", "bxor"):
        for source in ([R, R], [S0, R], [S1, S0]):
            for goal in ([Partial(op), R], [Partial(op), Partial(op)], [S1, Partial(op)]):
                y = redistribute(here.tensor(full, here.square, source), goal)
                assert y.dtype == y._local_tensor.dtype == torch.int64
                assert torch.equal(redistribute(y, [R, R])._local_tensor, full), (op, source, goal)


def partial_to_partial_elsewhere(here):
    x = own(numbers(4, 6, seed=here.square.get_coordinate()[0]), here.square, [P, R])
    for goal in ([R, P], [R, Partial("avg")], [S0, Partial("max")]):
        assert close(redistribute(redistribute(x, goal), [R, R])._local_tensor, x.full_tensor()), goal
    y = redistribute(x, [Partial("avg")], here.back)  # on another mesh
    assert y.placements == (Partial("avg"),) and close(redistribute(y, [R])._local_tensor, x.full_tensor())


def gradients_of_what_becomes_partial(here):
    """A partial value is the sum of its addends, each the value by n: its gradient is that of the value."""
    for goal in ([P, R], [Partial("avg"), R], [P, P]):
        x = here.tensor(numbers(4, 6), here.square, [R, S0], grad=True)
        y = redistribute(redistribute(x, goal), [R, R])
        (y * 3).sum().backward()
        assert x.grad.placements == (R, S0) and torch.equal(x.grad.full_tensor(), torch.full((4, 6), 3.0)), goal
    for op in ("avg", "product"):
        x = own(mine(here, 4, 6), here.line, [Partial(op)]).requires_grad_()
        theirs = x.detach().clone().requires_grad_()
        redistribute(x, [S0]).sum().backward()
        theirs.redistribute(placements=[S0]).sum().backward()
        assert x.grad._spec == theirs.grad._spec and torch.equal(x.grad._local_tensor, theirs.grad._local_tensor)


def masks_of_embeddings(here):
    weight, index = numbers(10, 6), torch.arange(15).reshape(3, 5) % 10
    want, compared = weight[index], 0
    for mesh, cut, goals in (
        (here.line, [S0], ([R], [S0], [S1], [Shard(2)])),
        (here.square, [R, S0], ([R, R], [S0, S0], [S1, R])),
        (here.square, [S0, R], ([R, R], [S1, Shard(2)])),
    ):
        for goal in goals:
            found = []
            for f in (redistribute, lambda x, t: x.redistribute(placements=t)):
                w = distribute_tensor(weight, mesh, cut).requires_grad_()
                x = torch.nn.functional.embedding(distribute_tensor(index, mesh, [R] * mesh.ndim), w)
                assert any(isinstance(p, _MaskPartial) for p in x.placements), x.placements
                try:
                    y = f(x, goal)
                except IndexError:  # where DTensor masks after another dim was cut
                    assert f is not redistribute
                    continue
                y.backward(here.tensor(numbers(3, 5, 6, seed=2), mesh, goal))
                found.append((y.detach(), w.grad))
            ours, a = found[0]
            assert torch.equal(ours._local_tensor, local_of(want, mesh, goal, here.rank, None)), goal
            for theirs, b in found[1:]:
                compared += 1
                assert ours._spec == theirs._spec and torch.equal(ours._local_tensor, theirs._local_tensor), goal
                assert a._spec == b._spec and torch.equal(a._local_tensor, b._local_tensor)
    assert compared >= 6, compared
    # the same plan, another mask
    w = distribute_tensor(weight, here.line, [S0])
    for shift in range(3):
        x = torch.nn.functional.embedding(distribute_tensor((index + shift) % 10, here.line, [R]), w)
        here.expect(redistribute(x, [R]), weight[(index + shift) % 10], here.line, [R])
    try:
        redistribute(x, [R])
    except LayoutError as error:
        assert "its mask was used by an earlier redistribution; legal is one" in str(error)
    else:
        raise AssertionError("a mask was used twice")


def dtypes_of_both_directions(here):
    rng = random.Random(3)
    full, g = numbers(6, 8) / 3, numbers(6, 8, seed=1) / 7
    ends = ([S0, R], [S0, S1], [R, R], [P, S1], [Partial("avg"), R], [S0, S0])
    for number in range(24):
        source, target = rng.choice(ends), rng.choice(ends[:3])
        there, back = (rng.choice((None, torch.bfloat16, torch.float64, torch.float32)) for _ in range(2))
        found = []
        for f in (redistribute, lambda x, t, **k: x.redistribute(placements=t, **k)):
            x = here.tensor(full, here.square, source, grad=True)
            y = f(x, target, forward_dtype=there, backward_dtype=back)
            incoming = here.tensor(g.to(y.dtype), here.square, rng.choice(ends[:3]) if number % 2 else target)
            y.backward(incoming)
            found.append((y.detach(), x.grad))
            rng = random.Random(number + 1)
        for ours, theirs in zip(*found, strict=True):
            what = f"{source} -> {target}, {there}, {back}: {ours._spec} {theirs._spec}"
            assert ours._spec == theirs._spec, what
            assert ours._local_tensor.dtype == ours.dtype and close(ours._local_tensor, theirs._local_tensor), what


def dtypes_twice_differentiable(here):
    found = []
    for f in (redistribute, lambda x, t, **k: x.redistribute(placements=t, **k)):
        x = here.tensor(numbers(6, 8) / 3, here.square, [S0, S1], grad=True)
        y = f(x, [R, R], forward_dtype=torch.float64, backward_dtype=torch.float64)
        (first,) = torch.autograd.grad((y * y * y).sum(), x, create_graph=True)
        (first * first).sum().backward()
        found.append((first, x.grad))
    for ours, theirs in zip(*found, strict=True):
        assert ours.dtype == theirs.dtype and torch.equal(ours.full_tensor(), theirs.full_tensor())


EXOTIC = (
    torch.float8_e8m0fnu, torch.float4_e2m1fn_x2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz, torch.complex32,
    torch.uint16, torch.uint32, torch.uint64, torch.bool, torch.complex64, torch.complex128, torch.float8_e4m3fn,
)  # fmt: skip


def every_dtype_moves(here):
    """Bit for bit, by all that only moves; DTensor itself cannot gather most of them."""
    for dtype in EXOTIC:
        bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32}.get(dtype.itemsize)
        for k, (mesh, source, goal, target) in enumerate((
            (here.line, [S0], here.line, [S1]),
            (here.line, [S1], here.line, [R]),
            (here.square, [S0, S1], here.square, [S1, S0]),
            (here.square, [S0, R], here.back, [S1]),
            (here.square, [_StridedShard(0, split_factor=2), S0], here.square, [R, S1]),
        )):  # fmt: skip
            if dtype == torch.bool:
                full = numbers(7, 5, seed=k) > 0
            else:
                full = numbers(7, 5, dtype=bits, seed=k).view(dtype) if bits else numbers(7, 5).to(dtype)
            raw = full.view(bits) if bits else full
            x = here.tensor(raw, mesh, source)
            meta = x._spec.tensor_meta._replace(dtype=dtype)
            spec = DTensorSpec(mesh, x._spec.placements, tensor_meta=meta)
            y = redistribute(DTensor(x._local_tensor.view(dtype), spec, requires_grad=False), target, goal)
            want = local_of(raw, goal, target, here.rank, None)
            got = y._local_tensor
            assert y.dtype == got.dtype == dtype and torch.equal(got.view(bits) if bits else got, want), (dtype, k)
    scalar = DTensor.from_local(torch.tensor(3, dtype=torch.uint8).view(EXOTIC[0]), here.line, [R], run_check=False)
    assert redistribute(scalar, [R], here.back)._local_tensor.view(torch.uint8) == 3


def lazily_conjugated_and_negated(here):
    """torch keeps a bit for these; a message does not."""
    full = torch.complex(numbers(8, 6), numbers(8, 6, seed=1))
    local = local_of(full, here.line, [S0], here.rank, None)
    x = own(local.conj(), here.line, [S0])
    assert x._local_tensor.is_conj()
    assert torch.equal(redistribute(x, [S1])._local_tensor, local_of(full.conj(), here.line, [S1], here.rank, None))
    assert torch.equal(redistribute(x, [R])._local_tensor, full.conj())
    y = own(local.conj().imag, here.line, [S0])
    assert y._local_tensor.is_neg() and torch.equal(redistribute(y, [R])._local_tensor, -full.imag)
    assert torch.equal(redistribute(y, [S0], here.back)._local_tensor.resolve_neg(),
                       local_of(-full.imag, here.back, [S0], here.rank, None))  # fmt: skip


def locals_of_every_kind(here):
    """Sliced, transposed, expanded, with an offset, of inference mode, views of a flat buffer as FSDP's."""
    full = numbers(8, 12)
    local = local_of(full, here.line, [S0], here.rank, None)
    flat = torch.cat([torch.full((5,), -1.0), local.reshape(-1), torch.full((3,), -1.0)])
    wide = torch.full((2, 20), -1.0)
    wide[:, 3:15] = local
    with torch.inference_mode():
        inferred = local.clone()
    kinds = {
        "offset": flat[5:29].view(2, 12),
        "slice": wide[:, 3:15],
        "transposed": local.t().contiguous().t(),
        "inference": inferred,
        "parameter": torch.nn.Parameter(local.clone()),
        "steps": torch.stack([local, -local], -1)[..., 0],
    }
    for name, x in kinds.items():
        for goal in ([S1], [R]):
            y = DTensor.from_local(x, here.line, [S0], run_check=False, shape=full.shape, stride=full.stride())
            got = redistribute(y, goal)
            assert torch.equal(got.to_local().detach(), local_of(full, here.line, goal, here.rank, None)), name
            with torch.inference_mode():
                again = redistribute(y, goal)
                assert torch.equal(again._local_tensor, got._local_tensor), name
    row = torch.arange(6.0) + here.rank
    y = own(row.expand(3, 6), here.line, [P])
    assert torch.equal(redistribute(y, [R])._local_tensor, (4 * torch.arange(6.0) + 6).expand(3, 6))
    scalar = own(torch.tensor(2.0 + here.rank), here.line, [P]).requires_grad_()
    total = redistribute(scalar, [R])
    total.backward()
    assert total.item() == 14 and scalar.grad.placements == (R,) and scalar.grad.full_tensor().item() == 1


# Limits: the caller's own shard counts to the end


def _live(x, goal, limit, first=True, **options):
    """The most bytes of storages while a move runs, the source's own among them."""
    if first:
        redistribute(x, goal, memory_limit=limit, **options)  # what is made once only is no workspace
    with Storages(x._local_tensor) as book:
        redistribute(x, goal, memory_limit=limit, **options)
    return book.peak


def _refused(x, goal, limit, **options):
    try:
        redistribute(x, goal, memory_limit=limit, **options)
    except Infeasible as error:
        assert str(error.least_bytes) in str(error), str(error)
        return error
    raise AssertionError(f"{limit} bytes were enough")


def _least(x, goal, **options):
    return _refused(x, goal, 1, **options).least_bytes


def limits_count_the_source(here):
    full = numbers(64, 64)
    cases = (
        (here.line, [S0], [S1]), (here.line, [P], [R]), (here.line, [S0], [R]), (here.square, [S0, S1], [S1, S0]),
        (here.square, [P, S0], [S0, R]), (here.square, [S0, S0], [R, S1]), (here.square, [Partial("avg"), S1], [S0, R]),
    )  # fmt: skip
    for mesh, source, goal in cases:
        for kind in ("plain", "parameter", "no grad", "transposed"):
            data = here.tensor(full.t().contiguous().t() if kind == "transposed" else full, mesh, source)
            if kind == "transposed":
                turned = data._local_tensor.t().contiguous().t()
                data = DTensor.from_local(turned, mesh, source, run_check=False)
                assert not data._local_tensor.is_contiguous()
            x = torch.nn.Parameter(data) if kind == "parameter" else data.requires_grad_(kind == "plain")
            with torch.set_grad_enabled(kind != "no grad"):
                least = _least(x, goal)
                for limit in (least, least + 64, least * 5 // 4, least * 2):
                    peak = _live(x, goal, limit, first=kind in ("plain", "transposed"))  # moves of their own
                    assert peak <= limit, (source, goal, kind, limit, peak)
                y = redistribute(x, goal, memory_limit=least)
            want = local_of(full, mesh, goal, here.rank, None)
            assert torch.equal(y._local_tensor, want) or isinstance(source[0], Partial)
            below = _refused(x, goal, 1).absolute_least_bytes - 1
            assert below < least and _refused(x, goal, below).absolute_least_bytes == below + 1


def limits_count_casts_and_what_is_made_partial(here):
    full = numbers(64, 64)
    x = here.tensor(full, here.line, [S0])
    for options in ({"forward_dtype": torch.bfloat16}, {"forward_dtype": torch.float64}):
        for goal in ([S1], [R], [P]):
            least = _least(x, goal, **options)
            for limit in (least, least * 3 // 2):
                assert (peak := _live(x, goal, limit, **options)) <= limit, (goal, options, limit, peak)
            below = _refused(x, goal, 1, **options).absolute_least_bytes - 1
            assert below < least and _refused(x, goal, below, **options).absolute_least_bytes == below + 1
    whole = here.tensor(full, here.line, [R])
    least = _least(whole, [P])
    assert least == 2 * 64 * 64 * 4 and _live(whole, [P], least) <= least
    raises(
        Infeasible,
        "move torch.float32 (64, 64) from (Replicate(),) to (Replicate(),) within 32767 bytes a device: no plan; the "
        "least that works is 32768 bytes",
        lambda: redistribute(whole, [P], memory_limit=least - 1),
    )


# torch.compile


def compiled_second_batch(here):
    """Dynamo marks a size that changed as any; the move takes the one at hand, and every size is right."""
    torch._dynamo.reset()
    weight = numbers(6, 6, seed=4)

    def model(x, w):
        h = redistribute(x * 2, [R]) @ w
        return redistribute(h, [S1], memory_limit=10**6) + 1

    for backend in ("eager", "aot_eager"):
        compiled = torch.compile(model, fullgraph=True, backend=backend)
        for n in (8, 12, 20, 8):
            found = []
            for f in (compiled, model):
                x = here.tensor(numbers(n, 6), here.line, [S0], grad=True)
                w = here.tensor(weight, here.line, [R], grad=True)
                y = f(x, w)
                (y * y).sum().backward()
                found.append((y.detach(), x.grad, w.grad))
            for a, b in zip(*found, strict=True):
                assert a._spec == b._spec and torch.equal(a._local_tensor, b._local_tensor), (backend, n)


def compiled_with_dynamic_sizes(here):
    torch._dynamo.reset()
    compiled = torch.compile(lambda x: redistribute(x * 2, [S1]), fullgraph=True, backend="aot_eager", dynamic=True)
    for n in (4, 9, 12):
        here.expect(compiled(here.tensor(numbers(n, 5), here.line, [S0])), numbers(n, 5) * 2, here.line, [S1])


def compiled_orders_masks_and_dtypes(here):
    torch._dynamo.reset()
    full = numbers(7, 6)
    order = ((0, (1, 0)),)
    x = here.tensor(full, here.square, [S1, S0])
    compiled = torch.compile(
        lambda x: redistribute(x * 2, [S0, S0], shard_order=[(0, [1, 0])]), fullgraph=True, backend="aot_eager"
    )
    eager = redistribute(x, [S0, S0], shard_order=order)
    y = compiled(x)
    assert y._spec == eager._spec and y._spec.shard_order == order
    assert torch.equal(y._local_tensor, eager._local_tensor * 2)
    back = torch.compile(lambda x: redistribute(x, [R, S1]), fullgraph=True, backend="aot_eager")(eager)
    here.expect(back, full, here.square, [R, S1])

    def cast(x):
        return redistribute(x * 2, [R, R], forward_dtype=torch.bfloat16, backward_dtype=torch.float64)

    found = []
    for f in (torch.compile(cast, fullgraph=True, backend="aot_eager"), cast):
        x = here.tensor(full, here.square, [S0, Partial("avg")], grad=True)
        y = f(x)
        (y * y).sum().backward()
        found.append((y.detach(), x.grad))
    for a, b in zip(*found, strict=True):
        assert a._spec == b._spec and torch.equal(a._local_tensor, b._local_tensor)


CHECKS = [
    compiled_second_batch, compiled_with_dynamic_sizes, compiled_orders_masks_and_dtypes,
    every_reduction_equals_dtensors, sums_and_averages_mixed, average_over_one_rank_is_the_source,
    becomes_partial_as_inside_dtensor, becomes_partial_exactly_where_nothing_divides, partial_to_partial_elsewhere,
    gradients_of_what_becomes_partial, masks_of_embeddings, dtypes_of_both_directions, dtypes_twice_differentiable,
    every_dtype_moves, lazily_conjugated_and_negated, locals_of_every_kind, limits_count_the_source,
    limits_count_casts_and_what_is_made_partial,
]  # fmt: skip


if __name__ == "__main__":
    main(CHECKS)

"""Run on 4 ranks: rare placements and wrong shards, as `torch_dropin_child`; beside DTensor itself."""

# ruff: noqa: I001
from torch_dropin_child import (
    DTensor, DTensorSpec, Infeasible, LayoutError, P, Partial, R, S0, S1, Storages, _StridedShard, local_of, main,
    numbers, raises, raises_least, redistribute, torch,
)  # fmt: skip
import torch._dynamo.testing
import torch.distributed as dist
from torch.distributed.tensor import distribute_tensor
from torch.distributed.tensor._dtensor_spec import TensorMeta
from torch.distributed.tensor._ops._math_ops import _NormPartial
from torch.distributed.tensor._redistribute import redistribute_local_tensor
from torch.distributed.tensor.placement_types import Placement, _MaskPartial

from shardplan.core.accounting import account
from shardplan.interop.torch.moves import move_between, move_shard, plan_dtensor_move
from torch_semantics_child import close, mine, own


def strided(d):
    return _StridedShard(d, split_factor=2)


def spec(mesh, full, places, order=None):
    return DTensorSpec(mesh, tuple(places), tensor_meta=TensorMeta(full.shape, full.stride(), full.dtype),
                       shard_order=order)  # fmt: skip


# torch.compile: one size of a shard may be that of several tensors


def compiled_sizes_of_equal_shards(here):
    """On rank 0 the shards of 9 and 12 rows are alike: it must compile anew with the others."""
    for dynamic in (None, True, False):
        torch._dynamo.reset()

        def model(x):
            return redistribute(redistribute(x * 2, [S1]) + 1, [S0])

        compiled = torch.compile(model, fullgraph=True, backend="aot_eager", dynamic=dynamic)
        for n in (9, 12, 4, 9, 11):
            found = []
            for f in (compiled, model):
                x = here.tensor(numbers(n, 5), here.line, [S0], grad=True)
                y = f(x)
                (y * y).sum().backward()
                found.append((y.detach(), x.grad))
            for a, b in zip(*found, strict=True):
                assert a._spec == b._spec and a.shape == (n, 5), (dynamic, n, a._spec)
                assert torch.equal(a._local_tensor, b._local_tensor), (dynamic, n)


def compiled_other_inputs_stay_dynamic(here):
    """Only what the move fixes is guarded: another batch size of a tensor that does not move is no new graph."""
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")

    @torch.compile(fullgraph=True, backend=counter, dynamic=True)
    def model(x, y):
        return redistribute(x * 2, [S1]), y + 1

    x = here.tensor(numbers(12, 8), here.line, [S0])
    for n in (20, 28, 36, 44):
        a, b = model(x, here.tensor(numbers(n, 6), here.line, [S0]))
        here.expect(a, numbers(12, 8) * 2, here.line, [S1])
        here.expect(b, numbers(n, 6) + 1, here.line, [S0])
    assert counter.frame_count <= 2, counter.frame_count  # dynamo itself may need a second look at the first change


# Shards that are not what their spec says


def wrong_shards_are_refused_on_every_rank(here):
    """First and later calls, plans and boxes, casts, norms: never a crash, never other values.

    In a later call those refuse that wait for the culprit: here all of them do.
    """
    full = numbers(10, 8)
    cases = {
        "plan": (here.square, [S0, S0], [R, R], {}),
        "cast": (here.line, [S0], [S1], {"forward_dtype": torch.float64}),
        "order": (here.square, [S0, S0], [S1, S1], {"shard_order": ((1, (1, 0)),)}),
        "boxes": (here.square, [strided(0), S0], [S1, S1], {}),
        "into boxes": (here.square, [P, P], [strided(0), S0], {}),
        "norm": (here.line, [_NormPartial(2)], [R], {}),
        "average": (here.line, [Partial("avg")], [S0], {}),
        "limit": (here.line, [S0], [S1], {"memory_limit": 10**6}),
        "becomes partial": (here.line, [S0], [P], {}),
    }
    for name, (mesh, source, goal, options) in cases.items():
        for cached in (False, True):
            for culprit, change in ((2, 1), (1, -1)):
                good = own(mine(here, *local_of(full, mesh, source, here.rank, None).shape), mesh, source)
                have = spec(mesh, full, source)
                options = options | {"timeout": 20.0 + culprit + (5 if cached else 0) + (change > 0)}
                if cached:
                    redistribute(DTensor(good._local_tensor, have, requires_grad=False), goal, **options)
                x = good._local_tensor
                if here.rank == culprit:
                    x = torch.ones(max(x.shape[0] + change, 0), *x.shape[1:])
                dist.barrier()
                try:
                    redistribute(DTensor(x, have, requires_grad=False), goal, **options)
                except LayoutError as error:
                    assert f"rank {culprit}: a shard of dtype torch.float32 and shape" in str(error), error
                    assert len(str(error).splitlines()) == 1
                else:
                    raise AssertionError(f"{name}: nothing was refused, cached {cached}, rank {culprit}")
                dist.barrier()


def wrong_shards_under_a_mask_are_refused(here):
    weight, index = numbers(10, 6), torch.arange(8) % 10
    x = torch.nn.functional.embedding(
        distribute_tensor(index, here.line, [R]), distribute_tensor(weight, here.line, [S0])
    )
    local = x._local_tensor[:5] if here.rank == 1 else x._local_tensor
    try:
        redistribute(DTensor(local, x._spec, requires_grad=False), [R])
    except LayoutError as error:
        assert "rank 1: a shard of dtype torch.float32 and shape (5, 6)" in str(error), error
    else:
        raise AssertionError("nothing was refused")


# _MaskPartial as a target


def indices_become_masked(here):
    """What DTensor's dispatcher does to the indices of an embedding: the mask goes into the target's own buffer."""
    index = torch.randint(0, 10, (6, 4), generator=torch.Generator().manual_seed(1))
    compared = 0
    for mesh, source, goal in (
        (here.line, [R], lambda p: [p]),
        (here.line, [S0], lambda p: [p]),
        (here.square, [R, S0], lambda p: [p, R]),
        (here.square, [R, S0], lambda p: [p, S0]),
        (here.square, [S1, S0], lambda p: [S0, p]),
    ):
        for again in range(2):  # the plan is kept; the mask is of this call
            x = here.tensor(index + again, mesh, source)
            found = []
            for way in ("ours", "whole", "theirs"):
                p = _MaskPartial(offset_shape=torch.Size((11, 6)), offset_dim=0)
                target = DTensorSpec(mesh, tuple(goal(p)), tensor_meta=x._spec.tensor_meta)
                if way == "theirs":
                    try:
                        local = redistribute_local_tensor(x._local_tensor, x._spec, target)
                    except RuntimeError:  # from a shard
                        whole = tuple(R if isinstance(q, _MaskPartial) else q for q in target.placements)
                        middle = DTensorSpec(mesh, whole, tensor_meta=x._spec.tensor_meta)
                        local = redistribute_local_tensor(x._local_tensor, x._spec, middle)
                        local = redistribute_local_tensor(local, middle, target)
                elif way == "whole":
                    local = redistribute(x, goal(p))._local_tensor
                else:
                    local = move_shard(x._local_tensor, move_between(x._spec, target, None, (None, None, 60.0)), False)
                found.append((local, p.mask_buffer.data, p.mask_buffer.refcount))
            for a, b in ((found[0], found[2]), (found[1], found[2])):
                assert torch.equal(a[0], b[0]) and torch.equal(a[1], b[1]) and a[2] == b[2] == 1, (source, found)
                compared += 1
            assert torch.equal(x._local_tensor, local_of(index + again, mesh, source, here.rank, None))
    assert compared == 20


# Norms


def norms_equal_dtensors(here):
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        for p in (2, 3, 1.5, 0.5, -1):
            n = _NormPartial(p)
            for mesh, source, goals in (
                (here.line, [n], ([R], [S0], [S1])),
                (here.square, [n, n], ([R, R], [S0, S1], [R, n], [n, S0])),
                (here.square, [S0, n], ([R, R], [S0, R], [S1, n])),
                (here.column, [S0, n], ([S0, R],)),
            ):
                x = own(mine(here, 4, 6, dtype=dtype), mesh, source)
                before = x._local_tensor.clone()
                for goal in goals:
                    ours, theirs = redistribute(x, goal), x.redistribute(placements=goal)
                    what = f"{p} {dtype} {source} -> {goal}"
                    assert ours._spec == theirs._spec, f"{what}: {ours._spec} {theirs._spec}"
                    rough = {torch.bfloat16: 0.05, torch.float32: 1e-5}.get(dtype, 1e-12)
                    assert torch.allclose(ours._local_tensor, theirs._local_tensor, rtol=rough), (what, ours, theirs)
                    assert torch.equal(x._local_tensor, before), what
            full = numbers(4, 6).to(dtype).abs() + 1
            x = here.tensor(full, here.square, [R, S0])
            target = spec(here.square, full, [n, S0])
            theirs = redistribute_local_tensor(x._local_tensor, x._spec, target)
            assert torch.equal(redistribute(x, [n, S0])._local_tensor, theirs), (p, dtype)


def norms_within_limits_and_gradients(here):
    n = _NormPartial(2)
    x = own(mine(here, 64, 64), here.line, [n])
    for options in ({}, {"forward_dtype": torch.float64}):
        try:
            redistribute(x, [R], memory_limit=1, **options)
        except Infeasible as error:
            least = error.least_bytes
        redistribute(x, [R], memory_limit=least, **options)
        with Storages(x._local_tensor) as book:
            redistribute(x, [R], memory_limit=least, **options)
        assert book.peak <= least, (options, book.peak, least)
    out = []
    for f in (redistribute, lambda x, t: x.redistribute(placements=t)):
        y = x.detach().clone().requires_grad_()
        f(y, [S0]).sum().backward()
        out.append(y.grad)
    assert out[0]._spec == out[1]._spec and torch.equal(out[0]._local_tensor, out[1]._local_tensor)
    raises(
        LayoutError, "(_NormPartial(2), _NormPartial(3)) has partial placements of several kinds; legal is one kind",
        lambda: redistribute(own(mine(here, 4), here.square, [n, _NormPartial(3)]), [R, R]),
    )  # fmt: skip
    raises(
        LayoutError, "_NormPartial(2) is not defined for torch.int64; legal are floats of 16 bits and more, and "
        "complex numbers", lambda: redistribute(own(mine(here, 4, dtype=torch.int64), here.line, [n]), [R]),
    )  # fmt: skip


class Tripled(Partial):
    """A placement of a class of its own, reduced in its own way."""

    def _reduce_value(self, tensor, mesh, mesh_dim):
        return super()._reduce_value(tensor * 3, mesh, mesh_dim)


class Named(Partial):
    """A placement of a class of its own that changes nothing."""


def other_classes_of_partial(here):
    legal = ", ".join(f"Partial({r})" for r in ("sum", "max", "min", "product", "band", "bor", "bxor", "avg"))
    x = own(mine(here, 4, 6), here.line, [Tripled("sum")])
    raises(LayoutError, f"Partial(sum) is not supported; legal are {legal}", lambda: redistribute(x, [R]))
    for op in ("sum", "avg", "max"):
        y, z = (own(mine(here, 4, 6), here.line, [kind(op)]) for kind in (Named, Partial))
        assert torch.equal(redistribute(y, [R])._local_tensor, redistribute(z, [R])._local_tensor)


class Ragged(Placement):
    """A placement that nobody here knows."""

    def __eq__(self, other):
        return isinstance(other, Ragged)

    def __hash__(self):
        return 1

    def __repr__(self):
        return "Ragged()"


def unknown_placements_are_refused(here):
    """At either end; taken for `Replicate` they would give wrong values."""
    text = "placement 1 is Ragged(); legal are Shard(dim), Replicate() and Partial(op)"
    x = here.tensor(numbers(4, 6), here.square, [S0, R])
    raises(LayoutError, text, lambda: redistribute(x, [S0, Ragged()]))
    have = DTensorSpec(here.square, (S0, Ragged()), tensor_meta=x._spec.tensor_meta, shard_order=x._spec.shard_order)
    raises(LayoutError, text, lambda: move_between(have, x._spec, None, (None, None, 60.0)))


# A partial source beside, or into, what no layout describes


def partial_into_uneven_strided(here):
    compared = 0
    for op, dtype in (
        ("sum", torch.float32), ("avg", torch.float64), ("product", torch.float32), ("max", torch.int32),
        ("min", torch.float32), ("bxor", torch.int64), ("norm", torch.float64),
    ):  # fmt: skip
        p = _NormPartial(2) if op == "norm" else Partial(op)
        for shape, source, goals in (
            ((5, 5), [p, p], ([strided(0), S0], [strided(1), S1])),
            ((10, 5), [p, S1], ([strided(1), S1], [strided(0), S0])),
            ((2,), [p, p], ([strided(0), S0],)),
            ((7, 5), [S0, p], ([strided(0), S0], [strided(0), R], [strided(0), S1])),
            ((7, 5), [strided(0), p], ([strided(0), S0], [S1, S1], [R, R])),
            ((1, 5), [strided(0), p], ([R, R],)),  # some groups have nothing to reduce
            ((3, 3), [strided(0), p], ([R, p], [S1, p])),
        ):
            full = torch.zeros(shape, dtype=dtype)
            cut = [R if q is p else q for q in source]
            x = own(
                mine(here, *local_of(full, here.square, cut, here.rank, None).shape, dtype=dtype), here.square, source
            )
            x = DTensor(x._local_tensor, spec(here.square, full, source), requires_grad=False)
            # the addends of one shard differ, the copies of one addend do not
            held = [None] * 4
            dist.all_gather_object(held, x._local_tensor)
            for goal in goals:
                ours = redistribute(x, goal)
                want = _reduced(here, held, source, p, full)
                want = local_of(want, here.square, [R if isinstance(q, Partial) else q for q in goal], here.rank, None)
                if any(isinstance(q, Partial) for q in goal):
                    ours = redistribute(ours, [R if isinstance(q, Partial) else q for q in goal])
                assert ours.shape == full.shape and close(ours._local_tensor, want), (op, shape, source, goal)
                compared += 1
    assert compared == 7 * 14


def _reduced(here, held, source, p, full):
    """The value, from what every rank holds: the shards of DTensor's index function, addends reduced one by one."""
    out = full.clone()
    slots = torch.arange(full.numel()).reshape(full.shape)
    cut = [R if isinstance(q, Partial) else q for q in source]
    parts = {}
    for rank in range(4):
        place = tuple(rank // 2 if k == 0 else rank % 2 for k in range(2))
        group = tuple(c for c, q in zip(place, source, strict=True) if not isinstance(q, Partial))
        parts.setdefault(group, []).append(rank)
    where = [None] * 4
    dist.all_gather_object(where, local_of(slots, here.square, cut, here.rank, None))
    for ranks in parts.values():
        addends = torch.stack([held[r] for r in ranks])
        match p:
            case _NormPartial():
                value = (addends**2).sum(0).sqrt()
            case _:
                value = {
                    "sum": lambda a: a.sum(0), "avg": lambda a: a.mean(0), "product": lambda a: a.prod(0),
                    "max": lambda a: a.amax(0), "min": lambda a: a.amin(0), "bxor": lambda a: a[0] ^ a[1] if len(a) == 2
                    else a[0] ^ a[1] ^ a[2] ^ a[3],
                }[p.reduce_op](addends)  # fmt: skip
        out.view(-1)[where[ranks[0]].reshape(-1)] = value.reshape(-1).to(out.dtype)
    return out


def partial_into_uneven_strided_as_dtensor(here):
    """The cases that DTensor's own operators make."""
    for shape, source, goal in (
        ((5, 5), [Partial("product")] * 2, [strided(0), S0]),
        ((10, 5), [Partial("avg"), S1], [strided(1), S1]),
        ((5,), [S0, P], [strided(0), S0]),
    ):
        full = torch.zeros(shape)
        cut = [R if isinstance(q, Partial) else q for q in source]
        local = mine(here, *local_of(full, here.square, cut, here.rank, None).shape)
        out = []
        for f in (redistribute, lambda x, t: x.redistribute(placements=t)):
            x = DTensor(local.clone(), spec(here.square, full, source), requires_grad=True)
            y = f(x, goal)
            y.backward(DTensor(torch.ones_like(y._local_tensor), y._spec, requires_grad=False))
            out.append((y.detach(), x.grad))
        for a, b in zip(*out, strict=True):
            assert a._spec == b._spec and close(a._local_tensor, b._local_tensor), (shape, source, goal, a, b)


def partial_into_uneven_strided_within_limits(here):
    full = torch.zeros(37, 40)
    for source, goal in (([P, P], [strided(0), S0]), ([strided(0), P], [R, S1])):
        cut = [R if q is P else q for q in source]
        local = mine(here, *local_of(full, here.square, cut, here.rank, None).shape)
        x = DTensor(local, spec(here.square, full, source), requires_grad=False)
        try:
            redistribute(x, goal, memory_limit=1)
        except Infeasible as error:
            least, absolute = error.least_bytes, error.absolute_least_bytes
            assert str(least) in str(error) and (absolute == least or str(absolute) in str(error))
        for limit in (absolute, least, least + 999):
            redistribute(x, goal, memory_limit=limit)
            with Storages(x._local_tensor) as book:
                redistribute(x, goal, memory_limit=limit)
            assert book.peak <= limit, (source, goal, limit, book.peak)
        try:
            redistribute(x, goal, memory_limit=absolute - 1)
        except Infeasible as error:
            assert (error.least_bytes, error.absolute_least_bytes) == (least, absolute)
        else:
            raise AssertionError("less was enough")


def boxes_that_move_nothing(here):
    """Tensors without elements, and two texts of one table: the shard itself, of which a compiled op makes a copy."""
    for shape in ((0, 5), (5, 0), (0,)):
        full = torch.zeros(shape)
        for source, goal in (([strided(0), S0], [R, R]), ([S0, P], [strided(0), S0])):
            for options in ({}, {"memory_limit": 8}, {"async_op": True}):
                x = here.tensor(full, here.square, source)
                here.expect(redistribute(x, goal, **options), full, here.square, goal)
    goal = [_StridedShard(0, split_factor=3), S0]
    x = here.tensor(numbers(1, 4), here.square, [strided(0), S0])
    y = redistribute(x, goal)
    assert y._local_tensor.data_ptr() == x._local_tensor.data_ptr()
    here.expect(y, numbers(1, 4), here.square, goal)
    torch._dynamo.reset()
    y = torch.compile(lambda x: redistribute(x, goal) + 1, fullgraph=True, backend="aot_eager")(x)
    here.expect(y, numbers(1, 4) + 1, here.square, goal)


def boxes_go_to_other_meshes(here):
    """Over a topology, in another dtype, waited for later, within a limit."""
    full = numbers(37, 5)
    x = here.tensor(full, here.square, [strided(0), S0])
    for mesh, goal in (
        (here.back, [S0]),
        (here.high, [R]),
        (here.three, [S1]),
        (here.overlap, [S0]),
        (here.line, [S1]),
    ):
        for options in ({}, {"topology": "dgx-h100"}, {"async_op": True}, {"memory_limit": 2500}):
            for dtype in (torch.float32, torch.float64):
                y = redistribute(x, goal, mesh, forward_dtype=dtype, **options)
                if mesh.get_coordinate() is not None:
                    here.expect(y, full.to(dtype), mesh, goal)


def boxes_hold_what_their_account_says(here):
    """No rank more, and under a limit, where nothing lies idle, the busiest nearly all of it."""
    full = numbers(37, 40)
    for source, goal in (
        ([strided(0), S0], [S1, R]), ([S0, S1], [strided(1), S1]), ([strided(0), S0], [strided(1), S1]),
        ([strided(0), R], [R, R]),
    ):  # fmt: skip
        x = here.tensor(full, here.square, source)
        least = raises_least(lambda: redistribute(x, goal, memory_limit=1))  # noqa: B023
        for limit in (None, least):
            options = (limit, None, 10.0)
            redistribute(x, goal, memory_limit=limit)
            (bound,) = plan_dtensor_move(x, goal, None, None, None, options).bound.programs
            says = account(bound.program).workspace_bytes
            with Storages(x._local_tensor) as book:
                y = redistribute(x, goal, memory_limit=limit)
            here.expect(y, full, here.square, goal)
            peaks = [None] * 4
            dist.all_gather_object(peaks, book.peak)
            assert max(peaks) <= says, (source, goal, limit, peaks, says)
            assert limit is None or (says <= limit and max(peaks) > 0.98 * says), (source, goal, limit, peaks, says)


CHECKS = [
    compiled_sizes_of_equal_shards, compiled_other_inputs_stay_dynamic, indices_become_masked, norms_equal_dtensors,
    norms_within_limits_and_gradients, other_classes_of_partial, unknown_placements_are_refused,
    partial_into_uneven_strided, partial_into_uneven_strided_as_dtensor, partial_into_uneven_strided_within_limits,
    boxes_that_move_nothing, boxes_go_to_other_meshes, boxes_hold_what_their_account_says,
    wrong_shards_are_refused_on_every_rank, wrong_shards_under_a_mask_are_refused,
]  # fmt: skip


if __name__ == "__main__":
    main(CHECKS)

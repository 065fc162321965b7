"""Run on 4 ranks: the drop-in's checks by name; rank 0 prints what went wrong as a JSON object."""

import copy
import functools
import gc
import io
import json
import random
import shutil
import sys
import time
import traceback
import warnings
import weakref
from datetime import timedelta
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "tests" / "execution"), str(Path(__file__).parent)]
warnings.filterwarnings("ignore")

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from dtensor_child import compare, local_of, placements  # noqa: E402
from storages import Storages  # noqa: E402
from torch.distributed._functional_collectives import AsyncCollectiveTensor  # noqa: E402
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh  # noqa: E402
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard  # noqa: E402
from torch.distributed.tensor._dtensor_spec import DTensorSpec  # noqa: E402
from torch.distributed.tensor.placement_types import _StridedShard  # noqa: E402

import shardplan as sp  # noqa: E402
from shardplan.errors import Infeasible, LayoutError  # noqa: E402
from shardplan.interop import torch as drop_in  # noqa: E402
from shardplan.interop.torch.pending_moves import under_way  # noqa: E402

R, S0, S1, P = Replicate(), Shard(0), Shard(1), Partial()
redistribute = functools.partial(drop_in.redistribute, timeout=10.0)
redistribute_state = functools.partial(drop_in.redistribute_state, timeout=10.0)


class Here:
    """This rank, and the meshes of the checks (made once, by all ranks in one order)."""

    def __init__(self):
        self.rank = dist.get_rank()
        self.line = init_device_mesh("cpu", (4,))
        self.square = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
        self.back = DeviceMesh("cpu", [3, 1, 0, 2])
        self.low, self.high = DeviceMesh("cpu", [0, 1]), DeviceMesh("cpu", [2, 3])
        self.overlap, self.three = DeviceMesh("cpu", [1, 2]), DeviceMesh("cpu", [0, 1, 3])
        self.column = DeviceMesh("cpu", [[3], [0], [2], [1]])

    def tensor(self, full, mesh, places, grad=False):
        """`full` (the same on all ranks) as a DTensor."""
        mine = mesh.get_coordinate() is not None
        kind = next((p.reduce_op for p in places if isinstance(p, Partial)), None)
        local = local_of(full, mesh, places, self.rank, kind) if mine else torch.empty(0, dtype=full.dtype)
        x = DTensor.from_local(local.clone(), mesh, places, run_check=False, shape=full.shape, stride=full.stride())
        return x.detach().requires_grad_() if grad else x.detach()

    def expect(self, x, full, mesh, places):
        """That `x` is `full` under these placements, where this rank is on the mesh."""
        places = tuple(places)
        assert x.device_mesh == mesh and x.placements == places, (x.device_mesh, x.placements)
        assert x.shape == full.shape and x.stride() == full.stride()
        if mesh.get_coordinate() is None:
            assert x._local_tensor.numel() == 0
            return
        got, want = x.to_local(), local_of(full, mesh, places, self.rank, None)
        assert torch.equal(got, want), f"\n{got}\n{want}"


def numbers(*shape, dtype=torch.float32, seed=0):
    return torch.randint(-99, 99, shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def raises(kind, text, call):
    try:
        call()
    except kind as error:
        assert str(error) == text, f"says {error}"
        return error
    raise AssertionError(f"nothing raised; expected {text}")


# async_op


def async_result_is_dtensors_own_kind(here):
    full = numbers(8, 6)
    x = here.tensor(full, here.line, [S0])
    y = redistribute(x, [S1], async_op=True)
    assert isinstance(y._local_tensor, AsyncCollectiveTensor) and not y._local_tensor.completed and under_way
    local = y.to_local()  # a view: still under way
    assert isinstance(local, AsyncCollectiveTensor) and under_way and not y._local_tensor.completed
    want = local_of(full, here.line, [S1], here.rank, None)
    assert torch.equal(local + 1, want + 1) and not under_way and y._local_tensor.completed
    assert torch.equal(y.to_local(), want) and torch.equal(y.full_tensor(), full)


def meta_tensors_have_meta_results(here):
    """Shapes and specs as on the CPU, uneven and onto another mesh too; nothing is sent: the last rank comes late."""
    for full, mesh, places, goal, wanted in (
        (numbers(8, 6), here.line, [S0], None, [S1]), (numbers(7, 5), here.square, [S0, S1], None, [R, S0]),
        (numbers(8, 6), here.line, [P], here.square, [S0, R]),
    ):  # fmt: skip
        x = here.tensor(full, mesh, places)
        shell = DTensor.from_local(
            x.to_local().to("meta"), mesh, places, run_check=False, shape=full.shape, stride=full.stride()
        )
        y, want = redistribute(shell, wanted, goal), redistribute(x, wanted, goal)
        assert y._local_tensor.is_meta and y._spec == want._spec and y.to_local().shape == want.to_local().shape
        assert y.dtype == want.dtype
    if here.rank == 0:  # alone
        redistribute(shell, [R, R], here.square)


def async_every_way_to_wait(here):
    full = numbers(8, 8)
    want = local_of(full, here.line, [S1], here.rank, None)

    def fresh():
        return redistribute(here.tensor(full, here.line, [S0]), [S1], async_op=True)

    def pickled(local):
        file = io.BytesIO()
        torch.save(local, file)
        file.seek(0)
        return torch.load(file)

    ways = {
        "wait": lambda y: y.to_local().wait(),
        "trigger_wait": lambda y: y._local_tensor.trigger_wait(),
        "numpy": lambda y: torch.from_numpy(y.to_local().numpy()),
        "tolist": lambda y: torch.tensor(y.to_local().tolist()),
        "transpose": lambda y: y.to_local().t().t(),
        "chain of views": lambda y: y.to_local().view(-1)[2:].clone().new_tensor(want.tolist()),
        "save": lambda y: pickled(y.to_local()),
        "deepcopy": lambda y: copy.deepcopy(y.to_local()),
        "item": lambda y: want if y.to_local().sum().item() == want.sum() else None,
        "repr": lambda y: want if "tensor(" in repr(y.to_local()) else None,
        "dtensor op": lambda y: (y + 1).to_local() - 1,
        "full_tensor": lambda y: local_of(y.full_tensor(), here.line, [S1], here.rank, None),
        "DTensor's redistribute": lambda y: y.redistribute(placements=[R]).redistribute(placements=[S1]).to_local(),
        "a second move": lambda y: redistribute(redistribute(y, [R]), [S1]).to_local(),
        "a second move that sends its input as it lies": lambda y: redistribute(
            redistribute(redistribute(y, [S0], async_op=True), [R]), [S1]
        ).to_local(),
        "a second async move": lambda y: redistribute(
            redistribute(y, [R], async_op=True), [S1], async_op=True
        ).to_local(),
        "a state": lambda y: redistribute_state({"y": y}, {"y": [S1]})["y"].to_local(),
        "out of place, twice": lambda y: y.to_local() + 0 if torch.equal(y.to_local(), want) else None,
        "in place": lambda y: y.to_local().add_(1).sub_(1),
        "all_gather": lambda y: _reduced(y.to_local()) / 4,
    }
    for name, way in ways.items():
        got = way(fresh())
        assert got is not None and torch.equal(got, want), name
    assert not under_way


def _reduced(x):
    """Four times the tensor, over a collective that is given the async result itself."""
    parts = [torch.empty(x.shape) for _ in range(4)]
    dist.all_gather(parts, x)
    return parts[dist.get_rank()] * 4


def async_waited_in_any_order(here):
    fulls = [numbers(8, 6, seed=k) for k in range(5)]
    moves = [(P,), (S0,), (P,), (S1,), (P,)]  # sums take two rounds, so one rank cannot finish alone
    goals = [[R], [S1], [S0], [R], [R]]
    for turn in range(3):
        started = [
            redistribute(here.tensor(f, here.line, s), t, async_op=True)
            for f, s, t in zip(fulls, moves, goals, strict=True)
        ]
        order = list(range(5))
        random.Random(here.rank * 10 + turn).shuffle(order)
        for k in order:
            here.expect(started[k], fulls[k], here.line, goals[k])
    assert not under_way


def async_dropped(here):
    full, sums = numbers(8, 6), numbers(8, 6, seed=1)
    x, y = here.tensor(full, here.line, [S0]), here.tensor(sums, here.line, [P])
    for droppers in ((0, 1, 2, 3), (1,), (0, 2)):
        a = redistribute(y, [R], async_op=True)
        b = redistribute(x, [S1], async_op=True)
        if here.rank in droppers:
            del a, b
            gc.collect()
        else:
            here.expect(b, full, here.line, [S1])
            here.expect(a, sums, here.line, [R])
        here.expect(redistribute(x, [R]), full, here.line, [R])
        assert not under_way


def async_first_move_of_its_kind(here):
    """Programs are compared on their first run: even then a rank may wait early for an older move."""
    full = numbers(12, 20, seed=3)
    a = redistribute(here.tensor(full, here.line, [P]), [R], async_op=True)
    if here.rank % 2:
        here.expect(a, full, here.line, [R])
    b = redistribute(here.tensor(full, here.line, [S1]), [S0], async_op=True)
    here.expect(a, full, here.line, [R])
    here.expect(b, full, here.line, [S0])


def async_memory(here):
    x = here.tensor(numbers(256, 256), here.line, [S0])
    redistribute(x, [R])

    class Real(Storages):
        def count(self, tensor):
            if not isinstance(tensor, AsyncCollectiveTensor) and tensor.device.type != "meta":
                super().count(tensor)

    with Real(x._local_tensor) as book:
        start = book.live
        y = redistribute(x, [R], async_op=True)
        y.to_local()
        y._local_tensor.wait()
    assert book.peak - start == 256 * 256 * 4, book.peak - start


def async_gradient(here):
    full, weights = numbers(8, 6), numbers(8, 6, seed=1)
    x = here.tensor(full, here.square, [S0, P], grad=True)
    y = redistribute(x * 1, [R, S1], async_op=True)
    y.backward(here.tensor(weights, here.square, [R, S1]))
    here.expect(x.grad, weights, here.square, [S0, R])


# torch.compile; these come before anything eager could have planned their moves


def _compiled(here, backend):
    full, weight = numbers(8, 4), numbers(4, 4, seed=1)

    def model(x, w):
        h = redistribute(torch.relu(redistribute(x * 2, [Replicate()]) @ w), [Shard(-1)], memory_limit=10**6)
        return redistribute(h * 3, [Shard(0)], here.back) * 2

    def run(f):
        x, w = here.tensor(full, here.line, [S0], grad=True), here.tensor(weight, here.line, [R], grad=True)
        y = f(x, w)
        y.sum().backward()
        return y.detach(), x.grad, w.grad

    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend=backend, dynamic=False)
    first, again, eager = run(compiled), run(compiled), run(model)
    for kind, a, b, c in zip(("result", "x.grad", "w.grad"), first, again, eager, strict=True):
        assert a._spec == c._spec, (kind, a._spec, c._spec)
        assert torch.equal(a.to_local(), c.to_local()) and torch.equal(a.to_local(), b.to_local()), kind


def compiled_aot_eager(here):
    _compiled(here, "aot_eager")


def compiled_inductor(here):
    _compiled(here, "inductor")


def compiled_on_a_topology(here):
    full = numbers(12, 8, seed=5)
    topology = sp.Topology.load("nominal").resize(devices=4)

    def move(x):
        return redistribute(redistribute(x, [S0]), [S1], topology=topology)  # the inner one changes nothing

    torch._dynamo.reset()
    y = torch.compile(move, fullgraph=True, backend="eager")(here.tensor(full, here.line, [S0]))
    here.expect(y, full, here.line, [S1])


def compiled_sizes(here):
    move = torch.compile(lambda x: redistribute(x * 2, [S1]), fullgraph=True, backend="eager", dynamic=False)
    torch._dynamo.reset()
    for n in (20, 24, 30):
        here.expect(move(here.tensor(numbers(n, 5), here.line, [S0])), numbers(n, 5) * 2, here.line, [S1])


def compiled_errors(here):
    x = here.tensor(numbers(28, 4), here.line, [S0])
    cases = {
        "Shard(dim=3) as placement 0 of a tensor of 2 dims; legal are dims -2 to 1": [Shard(3)],
        "redistribute takes a DTensor, not a Tensor; legal is what DTensor.from_local makes of it": None,
    }
    for text, goal in cases.items():

        def move(x, goal=goal):
            return redistribute(x, goal) if goal else redistribute(x.to_local(), [S1])

        torch._dynamo.reset()
        try:
            torch.compile(move, fullgraph=True, dynamic=False, backend="eager")(x)
        except Exception as error:
            assert text in str(error), str(error)[:700]
        else:
            raise AssertionError(f"nothing raised; expected {text}")


# Gradients


def gradients_equal_dtensors(here):
    rng = random.Random(5)
    done = 0
    while done < 40:
        mesh = rng.choice((here.line, here.square))
        shape = [rng.randint(1, 9) for _ in range(rng.randint(1, 3))]
        source = placements(rng, mesh, len(shape), rng.choice(("sum", "max", None)), rng.random() < 0.2)
        target = placements(rng, mesh, len(shape), None, False)
        full, g = numbers(*shape, seed=done), numbers(*shape, seed=99)
        incoming = placements(rng, mesh, len(shape), rng.choice(("sum", None, None)), False)
        if source == target:  # ours is the input itself, whose gradient comes as it is
            continue
        if any(isinstance(p, _StridedShard) for p in source):
            full = numbers(*(n * 4 for n in shape))
            g = numbers(*full.shape, seed=99)
        out = []
        for f in (redistribute, lambda x, t: x.redistribute(placements=t)):
            x = here.tensor(full, mesh, source, grad=True)
            try:
                y = f(x, target)
                y.backward(here.tensor(g, mesh, incoming))
            except Exception as error:
                out.append(error)
            else:
                out.append((y, x.grad))
        what = f"{source} -> {target}, gradient {incoming}"
        if isinstance(out[1], Exception):  # a partial gradient of a source of another kind
            assert isinstance(out[0], LayoutError), f"{what}: {out}"
            continue
        assert not isinstance(out[0], Exception), f"{what}: {out[0]}"
        done += 1
        for ours, theirs in zip(*out, strict=True):
            assert ours._spec == theirs._spec, f"{what}: {ours._spec} {theirs._spec}"
            a, b = ours.to_local(), theirs.to_local()
            assert a.shape == b.shape and torch.equal(a, b), f"{what}:\n{a}\n{b}"


def double_backward_equals_dtensors(here):
    full, g = numbers(6, 8, dtype=torch.float64), numbers(6, 8, dtype=torch.float64, seed=1)
    for source, target in (([S0, S1], [S1, R]), ([P, S0], [S0, R]), ([S0, S0], [R, S1])):
        out = []
        for f in (redistribute, lambda x, t: x.redistribute(placements=t)):
            x = here.tensor(full, here.square, source, grad=True)
            w = here.tensor(g, here.square, target, grad=True)
            y = f(x, target)
            (first,) = torch.autograd.grad((y * y * w).sum(), x, create_graph=True)
            (first * first).sum().backward()
            out.append((first, x.grad, w.grad))
        for name, ours, theirs in zip(("first", "x", "w"), *out, strict=True):
            # DTensor leaves the second gradient of what was moved where the first one went
            assert ours._spec == theirs._spec or name == "w", (source, target, ours._spec, theirs._spec)
            assert torch.equal(ours.full_tensor(), theirs.full_tensor()), (name, source, target)


def gradcheck_in_double_precision(here):
    """All ranks check the same function of a replicated array, in step and with the same random vectors."""
    torch.manual_seed(1)
    for mesh, source, target, goal in (
        (here.line, [S0], [S1], here.line),
        (here.square, [S0, S1], [S1, S0], here.square),
        (here.square, [R, S0], [S1, S1], here.back),
    ):
        there = target if goal is mesh else [S1]

        def move(x, mesh=mesh, source=source, there=there, goal=goal):
            y = redistribute(DTensor.from_local(x, mesh, [R] * mesh.ndim, run_check=False), source)
            z = redistribute(y * y * y, there, goal)
            return redistribute(z, [R] * mesh.ndim, mesh).to_local()

        x = torch.rand(3, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(3), requires_grad=True)
        assert torch.autograd.gradcheck(move, (x,), fast_mode=False)
        assert torch.autograd.gradgradcheck(move, (x,), fast_mode=True)


def gradient_of_partial_numerically(here):
    """d loss / d addend of one rank, by central differences, is what that rank's gradient says."""
    weights = numbers(3, 4, dtype=torch.float64)
    addends = numbers(3, 4, dtype=torch.float64, seed=here.rank) / 10

    def loss(local):
        x = DTensor.from_local(local, here.line, [P], run_check=False)
        y = redistribute(redistribute(x, [S1]) ** 2, [R])
        return (y.to_local() * weights).sum()

    local = addends.clone().requires_grad_()
    loss(local).backward()
    for of in range(4):
        for k in (0, 5, 11):
            step = torch.zeros(12, dtype=torch.float64)
            step[k] = 1e-5 * (here.rank == of)
            with torch.no_grad():
                slope = (loss(addends + step.view(3, 4)) - loss(addends - step.view(3, 4))) / 2e-5
            if here.rank == of:
                assert abs(slope - local.grad.view(-1)[k]) < 1e-6, (slope, local.grad)


def gradient_across_meshes(here):
    full, g = numbers(6, 5), numbers(6, 5, seed=1)
    for mesh, source, goal, target in (
        (here.low, [S0], here.high, [S1]),
        (here.square, [P, S0], here.overlap, [S0]),
        (here.line, [S1], here.back, [S1]),
    ):
        x = here.tensor(full, mesh, source, grad=True)
        y = redistribute(x, target, goal)
        here.expect(y.detach(), full, goal, target)
        y.backward(here.tensor(g, goal, target))
        here.expect(x.grad, g, mesh, [R if isinstance(p, Partial) else p for p in source])


# Across meshes


def across_meshes(here):
    ends = [
        (here.line, [[S0], [S1], [R], [P]]), (here.square, [[S0, S0], [S1, S0], [R, P], [P, P]]),
        (here.back, [[S0], [R]]),
        (here.low, [[S0], [R], [P]]), (here.high, [[S1], [R]]), (here.overlap, [[S0], [R]]), (here.three, [[S0], [S1]]),
        (here.column, [[S1, R], [S0, S1]]),
    ]  # fmt: skip
    rng = random.Random(1)
    for number in range(60):
        (mesh, sources), (goal, targets) = rng.choice(ends), rng.choice(ends)
        source, target = rng.choice(sources), rng.choice([t for t in targets if P not in t])
        full = numbers(rng.randint(1, 9), rng.randint(1, 9), seed=number)
        y = redistribute(here.tensor(full, mesh, source), target, goal)
        here.expect(y, full, goal, target)


def ranks_on_neither_mesh(here):
    full = numbers(5, 6)
    x = here.tensor(full, here.low, [S0])
    here.expect(redistribute(x, [S1], here.overlap), full, here.overlap, [S1])
    here.expect(redistribute(x, [S1], here.overlap, async_op=True), full, here.overlap, [S1])


# redistribute_state


def _state(here, mesh=None):
    mesh = mesh or here.square
    return {
        "step": 7,
        "layers.0.weight": here.tensor(numbers(16, 24), mesh, [S0, R]),
        "layers.0.bias": here.tensor(numbers(16, seed=1), mesh, [S0, R]),
        "layers.1.weight": here.tensor(numbers(16, 24, seed=2), mesh, [S0, R]),
        "scale": torch.ones(3),
        "layers.1.bias": here.tensor(numbers(15, seed=3), mesh, [S0, R]),
        "norm": here.tensor(numbers(9, dtype=torch.bfloat16), mesh, [S0, S0]),
        "odd": here.tensor(numbers(7, 3), mesh, [_StridedShard(0, split_factor=2), S0]),
        "kept": here.tensor(numbers(6), mesh, [R, R]),
    }


LAYOUTS = {
    "layers.0.weight": [S1, R], "*.weight": [R, S1], "layers.*": [R, S0], "odd": [S1, R], "l*": [S0, S0],
}  # fmt: skip


def _wanted(name):
    return {
        "layers.0.weight": [S1, R], "layers.1.weight": [R, S1], "layers.0.bias": [R, S0], "layers.1.bias": [R, S0],
        "odd": [S1, R],
    }.get(name, [R, R])  # fmt: skip


def state_equals_one_by_one(here):
    state = _state(here)
    out = redistribute_state(state, LAYOUTS)
    assert list(out) == list(state)
    assert out["step"] == 7 and out["scale"] is state["scale"] and out["kept"] is state["kept"]
    for name, value in state.items():
        if isinstance(value, DTensor):
            alone = redistribute(value, _wanted(name))
            assert out[name]._spec == alone._spec, name
            assert torch.equal(out[name].to_local(), alone.to_local()), name


def state_on_another_mesh(here):
    for mesh, goal, layout in ((here.square, here.back, [S0]), (here.square, here.overlap, [R])):
        state = _state(here, mesh)
        out = redistribute_state(state, {"*": layout}, goal)
        for name, value in state.items():
            if isinstance(value, DTensor):
                alone = redistribute(value, layout, goal)
                assert out[name]._spec == alone._spec, name
                assert torch.equal(out[name].to_local(), alone.to_local()), name


def _big(here):
    return {f"w{k}": here.tensor(numbers(64, 64, seed=k), here.line, [S0]) for k in range(6)}


def state_within_memory(here):
    least = raises_least(lambda: redistribute_state(_big(here), {"*": [S1]}, memory_limit=1))
    redistribute_state(_big(here), {"*": [S1]}, memory_limit=least)  # what is made once only is no workspace
    peaks = []
    for limit in (least, None):
        state = _big(here)
        with Storages(*(x._local_tensor for x in state.values())) as book:
            out = redistribute_state(state, {"*": [S1]}, memory_limit=limit)
        peaks.append(book.peak)
        assert limit is None or book.peak <= limit, (limit, book.peak)
        for k in range(6):
            here.expect(out[f"w{k}"], numbers(64, 64, seed=k), here.line, [S1])
    assert peaks[0] < peaks[1], peaks  # the limit made a difference


def raises_least(call):
    try:
        call()
    except Infeasible as error:
        assert error.least_bytes and str(error.least_bytes) in str(error), str(error)
        return error.least_bytes
    raise AssertionError("no limit was too small")


def state_donated_is_freed(here):
    state = _big(here) | {
        "plain": 1,
        "odd": here.tensor(numbers(7, 3), here.square, [_StridedShard(0, split_factor=2), S0]),
    }
    tensors = [weakref.ref(x) for x in state.values() if isinstance(x, DTensor)]
    storages = [weakref.ref(r()._local_tensor.untyped_storage()) for r in tensors]
    out = redistribute_state(state, {"odd": [S1, R], "*": [S1]}, donate=True)
    gc.collect()
    assert state == {"plain": 1} and out["plain"] == 1 and len(out) == 8
    assert not any(r() is not None for r in tensors) and not any(r() is not None for r in storages)


LEGAL = (
    "is not supported; legal are Partial(sum), Partial(max), Partial(min), Partial(product), Partial(band), "
    "Partial(bor), Partial(bxor), Partial(avg)"
)


def state_errors(here):
    state = {"a.weight": here.tensor(numbers(8, 4), here.line, [S0]), "b": 3}
    raises(
        LayoutError, "a.weight: Shard(dim=2) as placement 0 of a tensor of 2 dims; legal are dims -2 to 1",
        lambda: redistribute_state(state, {"*": [Shard(2)]}),
    )  # fmt: skip
    raises(
        LayoutError, "a.weight: 2 placements, (Shard(dim=0), Replicate()), for a mesh of shape (4,); legal is one for "
        "each mesh dim",
        lambda: redistribute_state(state, {"a*": [S0, R]}),
    )  # fmt: skip
    raises(
        LayoutError, "a.weight: cannot move a tensor of a state to Partial(sum); legal are Shard and Replicate",
        lambda: redistribute_state(state, {"a*": [P]}),
    )  # fmt: skip
    norm = DTensor.from_local(torch.ones(3), here.line, [Partial("norm")], run_check=False)
    raises(
        LayoutError, f"c: Partial(norm) {LEGAL}", lambda: redistribute_state(state | {"c": norm}, {}),
    )  # fmt: skip
    raises(
        LayoutError, "donate=True empties the state on the way, a tuple; legal is a dict",
        lambda: redistribute_state((), {}, donate=True),
    )  # fmt: skip


# One tensor: what is refused, and what is no move


def errors_word_for_word(here):
    x = here.tensor(numbers(8, 4), here.line, [S0])
    scalar = here.tensor(numbers()[None].sum(), here.line, [R])
    square = here.tensor(numbers(8, 4), here.square, [S0, P])

    def partial(kind, dtype=torch.float32):
        return DTensor.from_local(torch.ones(3).to(dtype), here.line, [Partial(kind)], run_check=False)

    mixed = DTensorSpec(here.square, (Partial("sum"), Partial("max")), tensor_meta=square._spec.tensor_meta)
    cases = [
        ("2 placements, (Shard(dim=0), Replicate()), for a mesh of shape (4,); legal is one for each mesh dim",
         lambda: redistribute(x, [S0, R])),
        ("0 placements, (), for a mesh of shape (2, 2); legal is one for each mesh dim",
         lambda: redistribute(square, [])),
        ("placements=Shard(dim=1); legal is a list of 1, one for each mesh dim", lambda: redistribute(x, S1)),
        ("placements=None; legal is a list of 1, one for each mesh dim", lambda: redistribute(x, None)),
        ("placement 0 is 'x'; legal are Shard(dim), Replicate() and Partial(op)", lambda: redistribute(x, ["x"])),
        ("Shard(dim=2) as placement 0 of a tensor of 2 dims; legal are dims -2 to 1",
         lambda: redistribute(x, [Shard(2)])),
        ("Shard(dim=-3) as placement 1 of a tensor of 2 dims; legal are dims -2 to 1",
         lambda: redistribute(square, [R, Shard(-3)])),
        ("Shard(dim=0) as placement 0 of a tensor of 0 dims; legal are Replicate()",
         lambda: redistribute(scalar, [S0])),
        (f"Partial(norm) {LEGAL}", lambda: redistribute(partial("norm"), [R])),
        (f"Partial(norm) {LEGAL}", lambda: redistribute(x, [Partial("norm")])),
        ("Partial(avg) is not defined for torch.int64; legal are floats of 16 bits and more, and complex numbers",
         lambda: redistribute(partial("avg", torch.int64), [R])),
        ("Partial(bxor) is not defined for torch.float32; legal are integers and bool",
         lambda: redistribute(partial("bxor"), [R])),
        ("Partial(max) is not defined for torch.complex64; legal are numbers that have an order",
         lambda: redistribute(partial("max", torch.complex64), [R])),
        ("Partial(sum) is not defined for torch.float8_e4m3fnuz; legal are Shard and Replicate",
         lambda: redistribute(partial("sum", torch.float8_e4m3fnuz), [R])),
        ("(Partial(sum), Partial(max)) has partial placements of several kinds; legal is one kind",
         lambda: redistribute(DTensor(torch.ones(8, 4), mixed, requires_grad=False), [R, R])),
        ("(Partial(sum), Partial(max)) has partial placements of several kinds; legal is one kind",
         lambda: redistribute(square, [P, Partial("max")])),
        ("shard_order=((0, (1, 0)),) for the placements (Shard(dim=0), Replicate()); legal are the orders of the mesh "
         "dims in [(0, (0,))]", lambda: redistribute(square, [S0, R], shard_order=((0, (1, 0)),))),
        ("shard_order=((0, (1, 1)),) for the placements (Shard(dim=0), Shard(dim=0)); legal are the orders of the mesh "
         "dims in [(0, (0, 1))]", lambda: redistribute(square, [S0, S0], shard_order=((0, (1, 1)),))),
        ("shard_order=7 for the placements (Shard(dim=0), Shard(dim=1)); legal are the orders of the mesh dims in "
         "[(0, (0,)), (1, (1,))]", lambda: redistribute(square, [S0, S1], shard_order=7)),
        ("shard_order=((0, (0, 1)),) beside (_StridedShard(dim=0, sf=2), Shard(dim=0)); legal beside it is Shard",
         lambda: redistribute(square, [_StridedShard(0, split_factor=2), S0], shard_order=((0, (0, 1)),))),
        ("cannot redistribute from Partial(sum) to Partial(max), mesh dim 1 of (Shard(dim=0), Partial(max)); legal are "
         "Shard, Replicate and the Partial that the tensor has there already",
         lambda: redistribute(square, [S0, Partial("max")])),
        ("redistribute takes a DTensor, not a Tensor; legal is what DTensor.from_local makes of it",
         lambda: redistribute(torch.ones(3), [R])),
        ("redistribute takes a DTensor, not a list; legal is what DTensor.from_local makes of it",
         lambda: redistribute([1], [R])),
        ("the memory limit is 0 bytes; it must be at least 1", lambda: redistribute(x, [R], memory_limit=0)),
    ]  # fmt: skip
    for text, call in cases:
        raises(LayoutError, text, call)


def limits_too_small(here):
    x = here.tensor(numbers(8, 4), here.line, [S0])
    error = raises(
        Infeasible, "redistribute f32[8@d0, 4] to f32[8, 4] within 10 bytes a device: no plan; the least that works is "
        "160 bytes", lambda: redistribute(x, [R], memory_limit=10),
    )  # fmt: skip
    here.expect(redistribute(x, [R], memory_limit=error.least_bytes), numbers(8, 4), here.line, [R])
    odd = here.tensor(numbers(7, 3), here.square, [_StridedShard(0, split_factor=2), S0])
    least = raises_least(lambda: redistribute(odd, [S1, R], memory_limit=10))
    book = Storages(odd.to_local())
    raises_least(lambda: redistribute(odd, [S1, R], memory_limit=least - 1))
    redistribute(odd, [S1, R], memory_limit=least)
    with book:
        redistribute(odd, [S1, R], memory_limit=least)
    assert book.peak <= least, (book.peak, least)


def equals_dtensor_on_random_pairs(here):
    found = compare(7, 60)
    assert not found["wrong"] and {"strided", "plain", "sum"} <= found["kinds"].keys(), found


def nothing_changes(here):
    x = here.tensor(numbers(8, 4), here.square, [S1, P])
    for goal in ([S1, P], (S1, P), [Shard(-1), P]):
        assert redistribute(x, goal) is x and redistribute(x, goal, here.square) is x
        assert redistribute(x, goal, async_op=True) is x


def gradient_where_nothing_changes(here):
    """A partial gradient is reduced to the placements of the tensor, as DTensor does it."""
    grads = []
    for call in (redistribute, lambda x, goal: x.redistribute(placements=goal)):
        x = here.tensor(numbers(8, 4), here.line, [R], grad=True)
        y = call(x, [R])
        assert torch.equal(y.to_local(), x.to_local())
        (y.to_local(grad_placements=[P]) * (here.rank + 1)).sum().backward()
        grads.append(x.grad)
    ours, theirs = grads
    assert ours.placements == theirs.placements == (R,) and torch.equal(ours.to_local(), theirs.to_local())
    assert float(ours.to_local()[0, 0]) == 10.0


def empty_arrays(here):
    for shape in ((0,), (0, 4), (4, 0)):
        full = numbers(*shape)
        for source, target in (([S0, R], [R, S0]), ([P, R], [R, R]), ([P, S0], [S0, R])):
            y = redistribute(here.tensor(full, here.square, source), target)
            assert y.shape == full.shape and y.placements == tuple(target)


def not_contiguous_and_views(here):
    full = numbers(8, 12)
    local = local_of(full, here.line, [S0], here.rank, None)
    x = DTensor.from_local(local.t().contiguous().t(), here.line, [S0], run_check=False)
    ours, theirs = redistribute(x, [S1]), x.redistribute(placements=[S1])
    assert ours._spec == theirs._spec and torch.equal(ours.to_local(), theirs.to_local())
    y = here.tensor(full, here.line, [S1])[:, 4:]  # whatever DTensor makes of the slice
    assert torch.equal(redistribute(y, [R]).to_local(), full[:, 4:])


CHECKS = [
    compiled_aot_eager, compiled_inductor, compiled_on_a_topology, compiled_sizes, compiled_errors,
    meta_tensors_have_meta_results,
    async_result_is_dtensors_own_kind, async_every_way_to_wait, async_waited_in_any_order, async_dropped,
    async_first_move_of_its_kind, async_memory, async_gradient,
    gradients_equal_dtensors, double_backward_equals_dtensors, gradcheck_in_double_precision,
    gradient_of_partial_numerically, gradient_across_meshes,
    equals_dtensor_on_random_pairs, across_meshes, ranks_on_neither_mesh,
    state_equals_one_by_one, state_on_another_mesh, state_within_memory, state_donated_is_freed, state_errors,
    errors_word_for_word, limits_too_small, nothing_changes, gradient_where_nothing_changes, empty_arrays,
    not_contiguous_and_views,
]  # fmt: skip


# inductor writes C++ for the CPU
SKIPPED = {} if shutil.which("g++") or shutil.which("clang++") else {"compiled_inductor": "there is no C++ compiler"}


def main(checks=CHECKS, skipped=SKIPPED):
    """Run the checks by name (all without one), and print what went wrong and how long each took."""
    dist.init_process_group("gloo")
    here = Here()
    store = dist.distributed_c10d._get_default_store()
    chosen = [c for c in checks if c.__name__ in (sys.argv[1:] or [c.__name__]) and c.__name__ not in skipped]
    for check in chosen:
        started = time.monotonic()
        try:
            check(here)
            told = ""
        except Exception:
            told = traceback.format_exc()[-1500:]
            print(f"rank {here.rank}, {check.__name__}: {told}", file=sys.stderr, flush=True)
        # no collective: after a failure the ranks may be anywhere, so that was the last check
        store.set(f"{check.__name__}/{here.rank}", f"{time.monotonic() - started:.2f} {told}")
        if told:
            break
    store.set(f"done/{here.rank}", "")
    store.wait([f"done/{rank}" for rank in range(4)], timedelta(seconds=60))
    if here.rank == 0:
        wrong, seconds = {}, {}
        for name in (c.__name__ for c in chosen):
            keys = {r: f"{name}/{r}" for r in range(4)}
            told = {r: store.get(key).decode() if store.check([key]) else "0 not reached" for r, key in keys.items()}
            wrong[name] = [f"rank {r}: {t.partition(' ')[2]}" for r, t in told.items() if t.partition(" ")[2]]
            seconds[name] = float(told[0].split()[0])
        print(json.dumps({"wrong": wrong, "seconds": seconds, "skipped": skipped}), flush=True)
        store.set("printed", "")
    store.wait(["printed"], timedelta(seconds=60))
    # one more that nobody uses: the rank finishes it when the process exits
    redistribute(here.tensor(numbers(8, 6), here.line, [P]), [R], async_op=True)


if __name__ == "__main__":
    main()

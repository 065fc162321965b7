"""Run on 4 ranks, collectives being gloo's own: what frameworks see of moves, and reductions inside training."""

import os
import re
import tempfile

from torch.distributed import checkpoint as dcp
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.debug import CommDebugMode
from torch.nn.parallel import DistributedDataParallel
from torch_dropin_child import ROOT, S0, S1, P, R, dist, main, numbers, redistribute, redistribute_state, torch

import shardplan as sp
from shardplan.errors import LayoutError, ShardplanError, TimedOut
from shardplan.interop.torch import ddp_hook, fsdp_hook, moves, process_group

COMMON = {  # ten moves that models make: mesh, from, to
    "gather a weight": ("line", [S0], [R]),
    "gather columns": ("line", [S1], [R]),
    "rows to columns": ("line", [S0], [S1]),
    "cut": ("line", [R], [S0]),
    "sum": ("line", [P], [R]),
    "sum to rows": ("line", [P], [S0]),
    "gather over one of two": ("square", [S0, S1], [R, S1]),
    "gather over both": ("square", [S0, S0], [R, R]),
    "sum over one of two": ("square", [S0, P], [S0, R]),
    "to another order": ("square", [S0, S1], [S1, S0]),
}


def calls_of(call):
    """What a call sends by collectives, as torch's own mode counts it."""
    with CommDebugMode() as mode:
        y = call()
    return {str(op).rsplit(".", 1)[-1]: n for op, n in mode.get_comm_counts().items()}, y


def a_cached_move_is_what_its_plan_says(here):
    """`CommDebugMode` counts no header, nothing but collectives; the table of `docs/execution.md` has them."""
    lines = []
    for name, (mesh, places, goal) in COMMON.items():
        full = numbers(8, 8)
        x = here.tensor(full, getattr(here, mesh), places)
        redistribute(x, goal)
        ours, y = calls_of(lambda x=x, goal=goal: redistribute(x, goal))
        here.expect(y, full, getattr(here, mesh), goal)
        theirs, _ = calls_of(lambda x=x, goal=goal: x.redistribute(placements=goal))
        axes = "4" if mesh == "line" else "2 x 2"
        lines.append(f"| {name} | {axes} | {_text(places)} | {_text(goal)} | {_counts(ours)} | {_counts(theirs)} |")
    page = (ROOT / "docs" / "execution.md").read_text(encoding="utf-8")
    assert "\n".join(lines) in page, "\n" + "\n".join(lines)


def _text(places):
    return ", ".join("R" if p == R else "P" if p == P else f"S({p.dim})" for p in places)


CALLED = {  # what torch's mode counts of a process group, and of DTensor's functional collectives
    "allgather_base": "all_gather", "all_gather_into_tensor": "all_gather", "alltoall_base": "all_to_all",
    "allreduce": "all_reduce", "reduce_scatter_base": "reduce_scatter", "reduce_scatter_tensor": "reduce_scatter",
}  # fmt: skip


def _counts(counts):
    return ", ".join(f"{n} {CALLED.get(op.strip('_'), op)}" for op, n in sorted(counts.items())) or "none"


def async_save_of_a_state_that_moved(here):
    state = {f"w{k}": here.tensor(numbers(8, 6, seed=k), here.line, [S0]) for k in range(3)}
    later = {n: redistribute(x, [S1], async_op=True) for n, x in state.items()}
    out = redistribute_state(state, {"w0": [Shard(1)], "*": [Replicate()]})
    names = [tempfile.mkdtemp() if here.rank == 0 else None]
    dist.broadcast_object_list(names)
    for k, saved in enumerate((out, later)):
        dcp.async_save(saved, checkpoint_id=f"{names[0]}/{k}").result()
        into = {n: redistribute(x, [S0]) for n, x in out.items()}
        for x in into.values():
            x.to_local().fill_(-1)
        dcp.load(into, checkpoint_id=f"{names[0]}/{k}")
        for k2, x in enumerate(into.values()):
            here.expect(x, numbers(8, 6, seed=k2), here.line, [S0])


def strided_shards_of_fsdp2_compiled(here):
    """A weight of tensor parallelism under FSDP2 is a `_StridedShard`."""
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 12, bias=False))
    whole = model[0].weight.detach().clone()
    parallelize_module(model, here.square["b"], {"0": ColwiseParallel()})
    fully_shard(model, mesh=here.square["a"])
    weight = model.state_dict()["0.weight"]
    assert type(weight.placements[0]).__name__ == "_StridedShard"
    torch._dynamo.reset()
    for goal in ([R, R], [S0, S1], [S1, R]):
        move = torch.compile(lambda x, goal=goal: redistribute(x * 1, goal), fullgraph=True, backend="aot_eager")
        here.expect(move(weight), whole, here.square, goal)
        here.expect(redistribute(weight, goal), whole, here.square, goal)


def a_rank_that_waits_without_a_group_is_told(here):
    with process_group():  # in which ranks count their runs unlike from then on
        if here.rank > 1:
            return
        state = {"w": here.tensor(numbers(6, 4), here.low, [S0])}
        try:
            redistribute_state(state, {"*": [S0]}, here.line, timeout=1.0)
        except TimedOut as error:
            text = str(error)
        assert "ranks [2, 3] of [0, 1, 2, 3] did not arrive within 1 s; without group= rank" in text, text
        assert text.endswith("where ranks come to unlike answers, each passes group="), text


def _model():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Tanh(), torch.nn.Linear(7, 3))


def _trained(model, rank, steps=3):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for step in range(steps):
        optimizer.zero_grad()
        torch.manual_seed(10 * step + rank)
        loss = model(torch.randn(4, 5)).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return torch.stack(losses)


def _reduction(mesh, axes, matrix):
    topology = sp.Topology.load("nominal")
    node = sp.Topology.load("gcp-v100x8", nodes=2).resize(gpu=2) if len(matrix[0]) == 2 else topology
    return sp.reduce(sp.Placement(mesh, node, matrix), axes, 2**26, algorithm="ring")


def gradients_of_ddp_by_a_plan(here):
    """Losses as with DDP's own all-reduce, to rounding; three collectives a bucket, as the plan has them."""
    plan = _reduction(sp.Mesh(data=4), "data", ((2, 2),))
    steps = [s.op.name for s in plan.program.steps]
    assert steps == ["reduce_scatter", "all_reduce", "all_gather"], steps
    want = _trained(DistributedDataParallel(_model()), here.rank)
    model = DistributedDataParallel(_model())
    model.register_comm_hook(None, ddp_hook(plan))
    assert torch.allclose(_trained(model, here.rank), want, rtol=1e-5, atol=1e-7)
    counts, _ = calls_of(lambda: _trained(model, here.rank, 1))
    assert sum(counts.values()) == 3, counts  # one bucket


def gradients_of_fsdp2_replicas_by_a_plan(here):
    """As HSDP, whose all-reduce over replicas is the plan's."""
    hsdp, ours = _model(), _model()
    fully_shard(hsdp, mesh=here.square)
    want = _trained(hsdp, here.rank)
    fully_shard(ours, mesh=here.square["b"])
    mesh = sp.Mesh(a=2, b=2)
    ours.set_all_reduce_hook(fsdp_hook(sp.redistribute("f32[64]{+a}", "f32[64]", mesh=mesh)))
    assert torch.allclose(_trained(ours, here.rank), want, rtol=1e-5, atol=1e-7)
    counts, _ = calls_of(lambda: _trained(ours, here.rank, 1))
    theirs, _ = calls_of(lambda: _trained(hsdp, here.rank, 1))
    assert sum(counts.values()) == sum(theirs.values()), (counts, theirs)


def what_is_no_reduction_is_refused(here):
    mesh = sp.Mesh(a=4)
    for plan, text in (
        (sp.redistribute("f32[8@a]", "f32[8]", mesh=mesh), "sums one payload to all its members; this one has inputs"),
        (3, "asked for a plan of sp.reduce or a program, not 3"),
    ):
        try:
            ddp_hook(plan)
        except LayoutError as error:
            assert text in str(error), error
        else:
            raise AssertionError(plan)


def unlike_moves_are_told_by_name(here):
    """Two moves of equal sizes, known to all, one rank in another order; last, since the process group is of no use."""
    x, y = (here.tensor(numbers(8, 8, dtype=d), here.line, [S0]) for d in (torch.float32, torch.int32))
    for _ in range(2):
        redistribute(x, [R]), redistribute(y, [R])
    texts = []
    for z in (y, x) if here.rank == 1 else (x, y):
        try:
            redistribute(z, [R])
        except ShardplanError as error:
            texts.append(str(error))
    assert texts and ("rank 1" in texts[0] or here.rank == 1), texts
    names = {redistribute_program(z) for z in (x, y)}
    assert names <= set(re.findall(r"program \w{8}", texts[0])), (names, texts)


def redistribute_program(x):
    """The name by which errors call the gather of a tensor."""
    return moves.plan_dtensor_move(x, [R], None, None, None, (None, None, 10.0)).bound.name


CHECKS = [
    a_cached_move_is_what_its_plan_says, async_save_of_a_state_that_moved, strided_shards_of_fsdp2_compiled,
    gradients_of_ddp_by_a_plan, gradients_of_fsdp2_replicas_by_a_plan, what_is_no_reduction_is_refused,
    a_rank_that_waits_without_a_group_is_told, unlike_moves_are_told_by_name,
]  # fmt: skip

if __name__ == "__main__":
    os.environ["SHARDPLAN_NATIVE"] = "gloo"
    main(CHECKS, {})

"""What a library has no collective for: plans name the algorithm of the messages that run, and it is the cheapest."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import replay
import shardplan as sp
import strategies as some
from shardplan.core.ops import AllGather, AllReduce, ReduceScatter
from shardplan.core.ops.grouped import Grouped
from shardplan.core.pattern import Groups
from shardplan.core.program import Program
from shardplan.core.step import Step
from shardplan.core.tensor import TensorType
from shardplan.hardware import Level, Topology
from shardplan.hardware.level import DeviceSpec
from shardplan.hardware.placement import Placement
from shardplan.hardware.prices.fabric import Fabric
from shardplan.hardware.prices.library import library
from shardplan.movement.redistribution.choice import chain
from shardplan.plans.pricing import fabric_of, price_program, step_prices

DEVICE = DeviceSpec(flops=(("*", 1e12),), memory_bandwidth=1e11, launch=3e-6)
TOPOLOGIES = [  # slow, so that few bytes weigh as many do elsewhere
    Topology("nics", (Level("node", 4, "switch", 1e5, 5e-6), Level("gpu", 8, "switch", 1e7, 1e-6)), DEVICE, "nccl"),
    Topology("rails", (Level("node", 8, "switch", 3e5, 9e-6, 4), Level("gpu", 4, "switch", 4e6, 1e-6)), DEVICE, "rccl"),
    Topology(
        "swift", (Level("node", 4, "switch", 5e10, 9e-6, 8), Level("gpu", 8, "switch", 4e11, 1e-6)), DEVICE, "nccl"
    ),
]


def alone(op: Grouped, operands: tuple[TensorType, ...]) -> Program:
    names = tuple(map(str, range(len(operands))))
    results = tuple(f"r{name}" for name in names)
    return Program(dict(zip(names, operands, strict=True)), [Step(op, names, results)], results)


@st.composite
def gathered(draw: st.DrawFn) -> tuple[TensorType, TensorType]:
    """A dim that is gathered over some of its axes, or over which is reduced and scattered; most often uneven."""
    mesh = draw(some.meshes(24, split=False, least=2))
    axes = draw(st.permutations(mesh.axes))
    used = tuple(axes[: draw(st.integers(1, len(axes)))])
    shape = (draw(st.integers(1, 60)), draw(st.integers(1, 9)))
    kind, dtype = draw(st.sampled_from(("sum", "bor", "max"))), draw(st.sampled_from(("i32", "u16", "i8")))
    apart = TensorType(dtype, shape, (used, None), mesh)
    if draw(st.booleans()):
        return apart, TensorType(dtype, shape, (used[: draw(st.integers(0, len(used) - 1))], None), mesh)
    whole = TensorType(dtype, shape, (None, None), mesh)
    partial = TensorType(dtype, shape, (None, None), mesh, partial=dict.fromkeys(used, kind))
    return partial, draw(st.sampled_from((apart, whole)))


@settings(max_examples=150, deadline=None)
@given(st.one_of(gathered(), some.pairs(most=24)), st.sampled_from(TOPOLOGIES))
def test_every_step_of_a_plan_costs_what_will_run(ends: tuple[TensorType, TensorType], topology: Topology) -> None:
    """Natively where the executor finds a collective, else by the algorithm that is named, the cheapest of all."""
    native = pytest.importorskip("shardplan.execution.torch.native")
    plan = sp.redistribute(*ends, topology=topology)
    where = plan.certificate.where
    place = where.position() if isinstance(where, Placement) else np.arange(topology.size)
    prices = step_prices(plan.program, fabric_of(where, plan.program.meshes))
    assert Program.parse(str(plan.program)) == plan.program
    for step, cost in zip(plan.program.steps, prices, strict=True):
        operands, results = plan.program.step_types(step)
        pattern = step.op.pattern(*operands)
        assert cost.seconds == pytest.approx(replay.replayed(alone(step.op, operands), topology, place), rel=1e-9)
        if not isinstance(step.op, Grouped) or operands[0].mesh.size < 2:
            continue
        runs = native.bind_native(step.op, operands, results, operands[0].mesh.devices[0]) is not None
        assert runs == (step.op.algorithm in ("", "padded")) == isinstance(pattern, Groups), step
        if step.op.algorithm:
            known = reduced_everywhere(operands[0], results[0])
            others = (replace(step.op, algorithm=name) for name in step.op.algorithms if known or name != "padded")
            replays = (
                replay.replayed(alone(one, operands), topology, place)
                for one in others
                if one.name != "all_to_all" or one.algorithm != "padded"
            )
            assert cost.seconds == pytest.approx(min(replays), rel=1e-9), step
            assert (cost.algorithm.startswith("p2p") or runs) and cost.algorithm in str(plan)


def reduced_everywhere(t: TensorType, u: TensorType) -> bool:
    """Whether every library reduces as the step does."""
    return t.layout.partial == u.layout.partial or (
        t.layout.reduction in ("sum", "product", "min", "max") and t.dtype not in ("u16", "bool")
    )


NODE, WIDTH = 2, 8
CLUSTERS = [sp.Topology.load("dgx-h100", nodes=NODE), Topology("one", (
    Level("node", NODE, "switch", 2e10, 5e-6), Level("gpu", WIDTH, "switch", 3e11, 1e-6)), DEVICE, "nccl")]  # fmt: skip


@pytest.mark.parametrize("how", ["gather", "scatter"])
def test_no_more_enters_a_node_than_in_a_ring(how: str) -> None:
    """Every element that a node lacks enters it, of a gather, eight times by a direct exchange, once in a ring."""
    mesh = sp.Mesh(x=NODE * WIDTH)
    texts = ("[100003@x, 4096]", "[100003, 4096]") if how == "gather" else ("[100003, 4096]{+x}", "[100003@x, 4096]")
    ends = [sp.TensorType.parse(f"bf16{text}", mesh) for text in texts]
    plan = sp.redistribute(*ends, topology=CLUSTERS[1])
    (step,) = plan.program.steps
    assert isinstance(step.op, AllGather | ReduceScatter)

    def entering(algorithm: str) -> list[int]:
        found = [0] * NODE
        sent = replay.messages_of(replace(step.op, algorithm=algorithm), [ends[0]], [ends[1]])
        for (a, b), n in sent.items():
            found[b // WIDTH] += n * (a // WIDTH != b // WIDTH)
        return found

    here, ring, direct = map(entering, (step.op.algorithm, "ring", "direct"))
    assert sum(here) == plan.certificate.level_bytes[0]
    assert max(here) <= max(ring) and 7 * max(here) < max(direct), (here, ring, direct)


def test_a_gather_of_uneven_parts_is_the_librarys_padded() -> None:
    """It costs what that of the next even size does; padding is among the bytes received, and said."""
    ends = [sp.TensorType.parse(f"bf16{text}", sp.Mesh(x=16)) for text in ("[100003@x, 4096]", "[100003, 4096]")]
    even = [sp.TensorType.parse(f"bf16{text}", sp.Mesh(x=16)) for text in ("[100016@x, 4096]", "[100016, 4096]")]
    plan, other = (sp.redistribute(*types, topology=CLUSTERS[0]) for types in (ends, even))
    assert [step.op for step in plan.program.steps] == [AllGather(0, ("x",), algorithm="padded")]
    assert plan.seconds == pytest.approx(other.seconds)
    row = 4096 * 2
    assert plan.certificate.received_bytes == (15 * 6251 * row,) * 16
    # All parts are full but the last, which lacks 13 rows: what lies behind the result. That device holds them twice.
    slot = 6251 * row
    assert plan.certificate.padding == (13 * row, 2 * slot, 13 * row)
    assert plan.certificate.workspace_bytes == slot + 100003 * row + 2 * slot + 13 * row
    plan.certificate.check()
    assert "padding    106 kB of those received; slots of 102 MB staged, 106 kB behind a result" in str(plan)
    for algorithm in ("ring", "direct", "doubling"):
        alone = chain([AllGather(0, ("x",), algorithm=algorithm)], ends[0])
        assert 1.3 * plan.seconds < price_program(alone, Fabric(CLUSTERS[0])).seconds


def test_a_limit_is_kept_by_an_algorithm_that_stages_less() -> None:
    mesh = sp.Mesh(x=16)
    s, t = (sp.TensorType.parse(text, mesh) for text in ("bf16[100003@x, 4096]", "bf16[100003, 4096]"))
    free = sp.redistribute(s, t, topology=CLUSTERS[0])
    ends = s.local_bytes() + t.local_bytes()
    assert free.certificate.workspace_bytes > ends
    tight = sp.redistribute(s, t, topology=CLUSTERS[0], memory_limit=ends)
    (step,) = tight.program.steps
    assert tight.certificate.workspace_bytes <= ends and step.op.algorithm in ("direct", "ring")
    tight.certificate.check()


def test_reductions_that_no_library_has_are_messages() -> None:
    mesh = sp.Mesh(x=16)
    for reduction, dtype in (("bor", "i32"), ("max", "bool"), ("sum", "u16")):
        ends = f"{dtype}[4096]{{{'+' if reduction == 'sum' else reduction + ':'}x}}", f"{dtype}[4096]"
        s, t = (sp.TensorType.parse(text, mesh) for text in ends)
        plan = sp.redistribute(s, t, topology=CLUSTERS[0])
        assert all(step.op.algorithm for step in plan.program.steps if isinstance(step.op, Grouped)), plan
        assert not any(isinstance(p, Groups) for p in patterns(plan)), plan


def patterns(plan: sp.Plan) -> list[object]:
    return [step.op.pattern(*plan.program.step_types(step)[0]) for step in plan.program.steps]


def test_libraries_that_take_any_parts_are_priced_as_ever() -> None:
    """The lab's engine runs rings of any parts, and XLA has no uneven ones."""
    assert {name for name in ("nccl", "rccl", "gloo", "ring", "xla") if library(name).even_only} == {
        "nccl",
        "rccl",
        "gloo",
    }
    mesh = sp.Mesh(x=4)
    plan = sp.redistribute(
        "f32[7@x]", "f32[7]", mesh=mesh, topology=Topology("", (Level("d", 4, "switch", 1e9, 1e-6),))
    )
    assert "algorithm" not in str(plan.program)


def test_more_messages_than_can_be_listed_cost_what_the_collective_would() -> None:
    mesh = sp.Mesh(x=2048)
    t = sp.TensorType("f32", (2049,), ("x",), mesh)
    pattern = AllGather(0, ("x",)).pattern(t)
    assert isinstance(pattern, Groups) and pattern.composed is not None and isinstance(pattern.composed(), Groups)
    # In slots its parts are the collective's.
    assert [op.algorithm for op in AllGather(0, ("x",)).compositions(t)] == ["padded"]


@pytest.mark.parametrize("op", [AllGather(0, ("x",), algorithm="tree"), AllReduce(("x",), algorithm="chain")])
def test_an_algorithm_that_an_op_does_not_have_is_refused(op: Grouped) -> None:
    with pytest.raises(sp.TypingError, match=rf"^{op.name}: algorithm='{op.algorithm}'; legal are direct, ring, "):
        op.infer(sp.TensorType("f32", (8,), ("x",), sp.Mesh(x=4)))

"""Certificates: every plan's passes, every seeded mutation is rejected, also through a plan file."""

import dataclasses
import json
import math
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import oracle
import replay
import shardplan as sp
import strategies as some
from benchmarks import suites
from shardplan.core.accounting import account, books_of, lower_bound
from shardplan.core.ops import AllGather, AllToAll, Exchange, Permute, Slice
from shardplan.core.step import Step
from shardplan.errors import CertificateError, ParseError, ShardplanError
from shardplan.execution.verify import verify
from shardplan.movement.redistribute import plan_kept

Pair = tuple[sp.TensorType, sp.TensorType]
# `exact` is the planner's word, and a larger limit or a weaker status is no false claim
UNCHECKED = {"status": {"exact", "heuristic"}}


def plans(count: int, seed: int = 11) -> list[sp.Plan]:
    """Seeded plans of all kinds that move something."""
    out: list[sp.Plan] = []
    for suite in ("s8", "s16", "P", "N", "V", "M", "B", "L"):
        for s, t, how in suites.problems(suite, seed, count, most_devices=16, most_multiple=1, most_tensors=4):
            try:
                plan = sp.redistribute(s, t, **how)
            except sp.Infeasible as error:
                plan = sp.redistribute(s, t, memory_limit=error.least_bytes)
            out.append(plan)
    topology = sp.Topology.load("dgx-a100", nodes=2)
    mesh = sp.Mesh(a=2, b=8)
    for a, b in (("f32[64@a, 64@b]", "f32[64@b, 64@a]"), ("f32[64@(a,b), 64]", "f32[64, 64@b]")):
        out.append(sp.redistribute(sp.TensorType.parse(a, mesh), sp.TensorType.parse(b, mesh), topology=topology))
    return out


PLANS = plans(6)


def mutations(rng: random.Random, c: sp.Certificate) -> list[tuple[str, Any]]:
    """A wrong value of every field."""
    out: list[tuple[str, Any]] = []
    for name in ("peak_bytes", "bound_bytes", "workspace_bytes", "total_lower_bound_bytes", "rounds"):
        out += [(name, getattr(c, name) + d) for d in (1, -1)]
    for name in ("sent_bytes", "received_bytes", "lower_bound_bytes"):
        value: tuple[int, ...] = getattr(c, name)
        k = rng.randrange(len(value))
        out += [(name, (*value[:k], value[k] + 1, *value[k + 1 :])), (name, value[1:]), (name, (*value, 0))]
        if len(set(value)) > 1:
            out.append((name, value[::-1] if value[::-1] != value else tuple(sorted(value))))
    for name in ("seconds", "lower_bound_seconds"):
        out += [(name, getattr(c, name) * 1.001 + 1e-9), (name, -1.0), (name, math.nan)]
    out += [("least_seconds", c.seconds * 1.001 + 1e-9), ("least_seconds", -1.0), ("least_seconds", math.nan)]
    out.append(("level_bytes", (*c.level_bytes, 1.0)))
    if c.types:
        k = rng.randrange(len(c.types))
        other = sp.TensorType(c.types[k].dtype, c.types[k].shape, [None] * c.types[k].ndim, c.types[k].mesh)
        wider = sp.TensorType("f64", c.types[k].shape, c.types[k].layout, c.types[k].mesh)
        out += [("types", c.types[:-1]), ("types", (*c.types, c.types[-1]))]
        out += [("types", (*c.types[:k], x, *c.types[k + 1 :])) for x in (other, wider) if x != c.types[k]]
    for name in ("sources", "destinations"):
        ends: tuple[sp.TensorType, ...] = getattr(c, name)
        out.append((name, ends[1:]))
        out.append((name, (sp.TensorType("f64", ends[0].shape, ends[0].layout, ends[0].mesh), *ends[1:])))
        free = sp.TensorType(ends[0].dtype, ends[0].shape, [None] * ends[0].ndim, ends[0].mesh)
        if not sp.same(free, ends[0]):
            out.append((name, (free, *ends[1:])))
    if c.workspace_bytes > 0:
        out.append(("memory_limit", c.workspace_bytes - 1))
    out += [("status", "proved"), ("status", ""), ("algorithm", "magic"), ("algorithm", "")]
    if c.where is None:
        out.append(("algorithm", "ring"))
    if c.status != "floor":
        out.append(("status", "floor"))
    topology = None if c.where is not None else sp.Topology.load("dgx-a100", nodes=8)
    out.append(("where", topology))
    return out


@pytest.mark.parametrize("k", range(len(PLANS)))
def test_every_mutation_of_a_field_is_rejected(k: int) -> None:
    c = PLANS[k].certificate
    c.check()
    tried = set()
    for name, value in mutations(random.Random(k), c):
        if name == "where" and not c.program.steps:
            continue  # nothing moves: no seconds to be wrong
        tampered = dataclasses.replace(c, **{name: value})
        with pytest.raises(CertificateError):
            tampered.check()
            pytest.fail(f"{name} = {value!r} passes for\n{PLANS[k]}")
        tried.add(name)
    left = {f.name for f in dataclasses.fields(c)} - tried - {"program"}
    assert left <= {"types", "memory_limit", "where"}, left


def tampered_ops(rng: random.Random, program: sp.Program) -> list[sp.Program]:
    """Programs with one step dropped, doubled, or changed; those that still type."""
    out: list[sp.Program] = []
    for k, step in enumerate(program.steps):
        t = program.types[step.operands[0]]
        ops: list[Any] = [Exchange(t.layout), Permute(t.layout)] if len(step.operands) == 1 else []
        match step.op:
            case AllToAll(src, dst, axes, order):
                ops += [AllToAll(src, dst, axes, tuple(reversed(order or axes))), AllToAll(dst, src, axes)]
            case AllGather(dim, axes):
                ops += [AllGather(dim, axes[1:]), AllGather(dim, axes[:-1])]
            case Slice(dim, axes):
                ops += [Slice(dim, tuple(reversed(axes))), Slice((dim + 1) % t.ndim, axes)]
            case _:
                pass
        if step.op.cuttable:
            ops.append(step.op.in_chunks(step.op.chunks + 1))
        for op in ops:
            if op == step.op:
                continue
            steps = [*program.steps[:k], Step(op, step.operands, step.results), *program.steps[k + 1 :]]
            out += typed(program.inputs, steps, program.outputs)
        alias = dict(zip(step.results, step.operands, strict=True))
        rest = [Step(x.op, tuple(alias.get(o, o) for o in x.operands), x.results) for x in program.steps[k + 1 :]]
        out += typed(program.inputs, [*program.steps[:k], *rest], tuple(alias.get(o, o) for o in program.outputs))
    rng.shuffle(out)
    return out


def typed(inputs: Any, steps: Any, outputs: Any) -> list[sp.Program]:
    try:
        return [sp.Program(inputs, steps, outputs)]
    except ShardplanError:
        return []


def test_every_tampered_step_is_rejected() -> None:
    rng = random.Random(3)
    tried = 0
    for plan in PLANS:
        c = plan.certificate
        for program in tampered_ops(rng, plan.program):
            try:
                dataclasses.replace(c, program=program).check()
            except CertificateError:
                tried += 1
                continue
            # what passes is no other claim: the same types, bytes, rounds and workspace follow from it
            assert [str(t) for t in program.types.values()] == [str(t) for t in plan.program.types.values()], program
    assert tried > 100


def edits(plan: sp.Plan) -> list[tuple[str, Any]]:
    """Edits of a plan file: (what, changed object)."""
    text = json.dumps(plan_object(plan))
    out: list[tuple[str, Any]] = []
    certificate = plan_object(plan)["certificate"]
    for key, value in certificate.items():
        changed = json.loads(text)
        if key in ("where", "memory_limit") or (key == "status" and value in UNCHECKED["status"]):
            continue
        if isinstance(value, bool) or value is None:
            continue
        if isinstance(value, (int, float)):
            changed["certificate"][key] = value * 2 + 1
        elif isinstance(value, str):
            changed["certificate"][key] = "proved"
        elif value:
            changed["certificate"][key] = value[:-1]
        else:
            changed["certificate"][key] = [1]
        out.append((key, changed))
    return out


def plan_object(plan: sp.Plan) -> dict[str, Any]:
    from shardplan.plans.plan_file import plan_dict

    return plan_dict(plan.certificate)


@pytest.mark.parametrize("k", range(0, len(PLANS), 3))
def test_plan_files(k: int, tmp_path: Path) -> None:
    plan, path = PLANS[k], tmp_path / "plan.json"
    plan.save(path)
    again = sp.Plan.load(path)
    assert again == plan and str(again) == str(plan)
    again.certificate.check()
    assert [p.name for p in tmp_path.iterdir()] == ["plan.json"]
    for key, changed in edits(plan):
        path.write_text(json.dumps(changed))
        with pytest.raises((CertificateError, ParseError)):
            sp.Plan.load(path).certificate.check()
            pytest.fail(f"the edit of {key} passes")


def test_an_edited_program_in_a_plan_file_is_rejected(tmp_path: Path) -> None:
    mesh = sp.Mesh(x=2, y=2)
    s, t = (sp.TensorType.parse(x, mesh) for x in ("f32[8@(x,y), 8]", "f32[8@x, 8@y]"))
    plan, path = sp.redistribute(s, t), tmp_path / "plan.json"
    raw = plan_object(plan)
    assert "src_dim=0, dst_dim=1" in raw["program"]
    for old, new in (("dst_dim=1", "dst_dim=0"), ("axes=(y)", "axes=(x)"), ("8@x, 8@y]", "8@y, 8@x]"), ("f32", "f64"),
                     ("%0: f32[8@(x,y)", "%0: f32[8@(y,x)"), ("y=2", "y=4"), ("output %1", "output %0")):  # fmt: skip
        edited = raw["program"].replace(old, new)
        assert edited != raw["program"], old
        path.write_text(json.dumps({**raw, "program": edited}))
        with pytest.raises((CertificateError, ParseError)):
            sp.Plan.load(path).certificate.check()
            pytest.fail(f"{old} -> {new} passes")


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("{", "it is no JSON: Input data was truncated"),
        ("[]", "it is []; legal is an object"),
        ('{"format": 1}', "format 1; this version reads format 2"),
        ('{"format": 2}', "program is missing; legal is the text of a program"),
    ],
)
def test_broken_plan_files(content: str, reason: str, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_text(content)
    with pytest.raises(ParseError) as error:
        sp.Plan.load(path)
    assert str(error.value) == f"{path} is not a plan file: {reason}"
    with pytest.raises(ParseError, match="cannot read the plan file"):
        sp.Plan.load(tmp_path / "missing.json")


# One device holds all of which each of four wants a part, by the shape, or as a root; two what fifteen want, one eight.
SQUARE = sp.Mesh(x=2, y=2)
ONE_HOLDER = sp.TensorType.parse("i8[1@(x,y), 4]", SQUARE), sp.TensorType.parse("i8[1, 4@(x,y)]", SQUARE)
ROOT_HOLDER = sp.TensorType.parse("i8[8]{root:x}", sp.Mesh(x=4)), sp.TensorType.parse("i8[8@x]", sp.Mesh(x=4))
TWO_HOLDERS = (
    sp.TensorType.parse("i8[15]", sp.Mesh(a=2)),
    sp.TensorType.parse("i8[15@y]", sp.Mesh({"y": 15}, devices=range(2, 17))),
)


@settings(max_examples=100, deadline=None)
@given(st.one_of(some.pairs(("even", "uneven", "partial", "rooted")), some.cross_pairs()))
@example(ONE_HOLDER)
@example(ROOT_HOLDER)
@example(TWO_HOLDERS)
def test_the_floor_is_claimed_exactly_where_it_is_reached(pair: Pair) -> None:
    c = sp.redistribute(*pair).certificate
    ops = [(s.op, [c.program.types[o] for o in s.operands]) for s in c.program.steps]
    moved = [max(int(op.sent_bytes(*t)[1].max()), int(op.received_bytes(*t).max())) for op, t in ops]
    assert c.level_bytes == ()
    nominal = sp.Topology.load("nominal", devices=1 + max(d for t in pair for d in t.mesh.devices))
    assert c.seconds == pytest.approx(replay.replayed(c.program, nominal), rel=1e-9)
    least = least_bytes(*pair)
    assert (c.status == "floor") == (sum(moved) <= 1.001 * least)
    assert c.lower_bound_seconds == pytest.approx(least / 50e9 + 5e-6 * (least > 0))
    assert max(c.received_bytes) <= sum(moved) and max(c.sent_bytes) <= sum(moved)


def least_bytes(s: sp.TensorType, t: sp.TensorType) -> float:
    """What the worst device, or the devices that hold one box, or all that hold any, must send or receive: by element.

    Senders only where neither end is partial; nobody where the end is, as addends may be added up first.
    """
    if t.layout.partial:
        return 0.0
    devices = tuple(sorted({*s.mesh.devices, *t.mesh.devices}))
    most = float(lower_bound(s, t, devices).max(initial=0))
    if s.layout.partial:
        return most
    held: dict[oracle.Box, set[int]] = {}
    for k, d in enumerate(s.mesh.devices):
        if oracle.at_root(s, k) and oracle.volume(oracle.box(s, k)):
            held.setdefault(oracle.box(s, k), set()).add(d)
    everyone = {d for holders in held.values() for d in holders}
    for box, holders in [*held.items(), (tuple((0, n) for n in s.shape), everyone)]:
        wanted = np.zeros(s.shape, dtype=bool)
        for k, d in enumerate(t.mesh.devices):
            if d not in holders and oracle.at_root(t, k):
                wanted[oracle.index(oracle.box(t, k))] = True
        most = max(most, float(wanted[oracle.index(box)].sum()) * s.itemsize / len(holders))
    return most


def test_senders_count_to_the_floor() -> None:
    """Two hold what eight want: nobody can receive it faster than they send it."""
    here, there = sp.Mesh(x=2), sp.Mesh({"y": 8}, devices=range(2, 10))
    plan = sp.redistribute(sp.TensorType.parse("i8[32@x]", here), sp.TensorType.parse("i8[32@y]", there))
    assert books_of(plan.program).step_moved == (16,)
    c = plan.certificate
    assert c.sent_bytes == (16, 16, *[0] * 8) and c.received_bytes == (0, 0, *[4] * 8) and c.status == "floor"
    # Each sends four messages, one after another; that one is the least is all that the bound says of starts.
    assert c.seconds == pytest.approx(16 / 50e9 + 4 * 5e-6) and c.lower_bound_seconds == 16 / 50e9 + 5e-6


@pytest.mark.parametrize("k", [2, 3, 5])
@pytest.mark.parametrize("where", ["", "@a", "{root:a}"])
def test_a_reduction_attains_its_bound_on_the_bytes_of_all_devices(k: int, where: str) -> None:
    """Of every element k addends are merged in k - 1 messages, and each further copy is one more."""
    dims, root = (where, "") if where.startswith("@") else ("", where)
    c = sp.redistribute("f32[30]{+a}", f"f32[30{dims}]{root}", mesh=sp.Mesh(a=k)).certificate
    copies = 1 if where else k
    assert c.total_lower_bound_bytes == sum(c.received_bytes) == (k - 1 + copies - 1) * 30 * 4


def test_a_claim_is_named_in_the_message() -> None:
    mesh = sp.Mesh(x=2)
    c = sp.redistribute(*(sp.TensorType.parse(x, mesh) for x in ("f32[8@x]", "f32[8]"))).certificate
    for change, message in (
        ({"peak_bytes": 1}, "peak_bytes is claimed to be 1, but follows to be 32"),
        ({"received_bytes": (0, 16)}, "received_bytes is claimed to be (0, 16), but follows to be (16, 16)"),
        ({"status": "best"}, "unknown status 'best'; legal are floor, exact, heuristic"),
        ({"memory_limit": 40}, "workspace_bytes 48 exceeds the limit 40"),
        ({"destinations": c.sources}, "the program ends in f32[8], which is not f32[8@x]"),
        ({"sources": c.destinations}, "the program starts from (f32[8@x]), not from (f32[8])"),
        ({"sources": ()}, "the program starts from (f32[8@x]), not from ()"),
    ):
        with pytest.raises(CertificateError) as error:
            dataclasses.replace(c, **change).check()  # type: ignore[arg-type]
        assert str(error.value) == message


def test_outputs_behind_the_destinations_are_kept_inputs() -> None:
    mesh = sp.Mesh(x=2)
    s, t = (sp.TensorType.parse(x, mesh) for x in ("f32[8@x]", "f32[8]"))
    plan = plan_kept(s, t, memory_limit=64)
    c = plan.certificate
    c.check()
    assert (c.kept_inputs, c.workspace_bytes) == (("0",), 48)
    for outputs, message in (
        (("1", "1"), "the program has 2 outputs, not 1"),
        ((), "the program has 0 outputs, not 1"),
        (("1", "0", "0"), "the program keeps an input twice: %0, %0"),
    ):
        with pytest.raises(CertificateError) as error:
            dataclasses.replace(c, program=sp.Program(c.program.inputs, c.program.steps, outputs)).check()
        assert str(error.value) == message


def test_a_kept_source_is_a_claim_that_follows(tmp_path: Path) -> None:
    """A plan file of a kept plan is the plan; a smaller workspace, as if the source were freed, does not follow."""
    a, b = sp.Mesh(x=4), sp.Mesh({"y": 2, "z": 2}, devices=(2, 3, 0, 1))
    s, t = sp.TensorType.parse("f32[64@x, 48]", a), sp.TensorType.parse("f32[64, 48@(z,y)]", b)
    with pytest.raises(sp.Infeasible) as refusal:
        plan_kept([s, s], [t, t], memory_limit=1)
    plan = plan_kept([s, s], [t, t], memory_limit=refusal.value.least_bytes)
    plan.save(tmp_path / "plan.json")
    loaded = sp.Plan.load(tmp_path / "plan.json")
    assert loaded == plan and loaded.certificate.kept_inputs == ("in0", "in1")
    assert "with 2 kept" in str(plan)
    verdict = verify(loaded)
    assert verdict.shards == 8
    moves = plan.program
    freed = account(sp.Program(moves.inputs, moves.steps, moves.outputs[:2])).workspace_bytes
    assert freed < plan.certificate.workspace_bytes
    with pytest.raises(CertificateError, match="workspace_bytes is claimed to be"):
        dataclasses.replace(plan.certificate, workspace_bytes=freed).check()


def test_a_plan_and_its_certificate_are_a_line() -> None:
    plan = sp.redistribute("f32[8@x, 8]", "f32[8, 8@x]", mesh="x=4")
    assert repr(plan) == "<Plan f32[8@x, 8] to f32[8, 8@x]: 1 step, 48 B received, 15 us>"
    assert repr(plan.certificate) == ("<Certificate f32[8@x, 8] to f32[8, 8@x]: 1 step, 48 B received, 15 us, floor>")
    t, u = plan.certificate.sources[0], plan.certificate.destinations[0]
    assert repr(sp.redistribute([t, t], [u, u])).startswith("<Plan of 2 tensors: ")

"""Laws of stored weights: text, lowering against an oracle that lists elements, and refits of random tables."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from movement import weights_oracle as oracle
from shardplan.errors import LayoutError
from shardplan.movement.weights.drops import left_out
from shardplan.movement.weights.form import StoredForm
from shardplan.movement.weights.refit import refit
from shardplan.movement.weights.table import WeightTable
from shardplan.movement.weights.weights import Weights, make_weights

AXES = ("a", "b", "c")
SIZES = ("l", "g", "r", "d", "e", "f", "x", "v", "h", "i")
FAMILY = {
    "tensors": {
        "q": "l, g r d, e", "k": "l, g d, e", "gate": "l, x, f, e", "up": "l, x, f, e", "embed": "v, e",
        "norm": "l, e", "router": "l[lo:], x, e",
    }
}  # fmt: skip
# Slots <0>, <1>, <2> take cuts. Every axis goes to at most one of: the hole l, the hole x, slot 0, slot 1.
VARIANTS: dict[str, list[dict[str, str]]] = {
    "attention": [
        {"{l}.q": "q = (g r d)<0>, e<1>", "{l}.k": "k = (g d)<0>, e<1>"},
        {"{l}.q": "q = e<1>, g<0> r d", "{l}.k": "k = e<1>, g<0> d"},
        {"{l}.qk": "(q: g r d | k: g d)<0>, e<1>"},
        {"{l}.qk": "(q: (g r)<0> d | k: g<0> d), e<1>"},
        {"{l}.qk": "(g (q: r d | k: d))<0>, e<1>"},
        {"{l}.q": "q = (g r (i p))<0>, e<1>", "{l}.k": "k = g<0> (i p), e<1>"},
        {"q": "q = l, e<1>, g<0>, r, d", "k": "k = e<1>, l, (g d)<0>"},
    ],
    "experts": [
        {"{l}.{x}.gate": "gate = f<0>, e<1>", "{l}.{x}.up": "up = e<1>, f<0>"},
        {"{l}.gu": "x<2>, (gate: f<0> | up: f<0>), e<1>"},
        {"{l}.gu": "x<2>, e<1>, (f (gate: | up: ))<0>"},
        {"{l}.gu": "(gate: | up: ), x<2>, f<0>, e<1>"},
        {"{l}.{x}.gu": "(n (gate: j | up: j))<0>, e<1>"},
    ],
    "rest": [
        {"embed": "(embed: v | 0: pad)<0>, e<1>", "{l}.norm": "norm = e<0>", "{l}.router": "router = x<0>, e<1>"},
        {
            "embed": "embed = e<1>, (0: 2 | v | 0: pad)<0>",
            "{l}.norm": "norm = 1, e<0>",
            "{l}.router": "router = e<0>, x<1>",
        },
    ],
}


@st.composite
def cuts(draw: st.DrawFn, axes: list[str]) -> str:
    """Text of cuts over some axes: nested, or at once."""
    rule = st.sampled_from(["", ".ceil", ".first", ".last", ".robin", "~"])
    if not axes:
        return ""
    if draw(st.booleans()):
        return f"@{'*'.join(axes)}{draw(rule)}"
    return "".join(f"@{a}{draw(rule)}" for a in axes)


@st.composite
def sides(draw: st.DrawFn, devices: int) -> dict[str, Any]:
    """The data of a table over the family, and its degrees."""
    holes: dict[str, list[str]] = {"l": [], "x": []}
    order = draw(st.permutations(AXES))
    rest: list[str] = []
    for axis in order:
        place = draw(st.sampled_from(["l", "x", "", "", ""]))
        (holes[place] if place else rest).append(axis)
    parameters: list[dict[str, Any]] = []
    for group in VARIANTS.values():
        for name, text in draw(st.sampled_from(group)).items():
            free = list(rest) + (holes["x"] if "{x}" not in name and "router" not in name and "x" in text else [])
            free += holes["l"] if "{l}" not in name and "l" in text.split("=")[-1].replace(",", " ").split() else []
            slots: list[list[str]] = [[], [], []]
            for axis in free:
                k = draw(st.sampled_from([0, 1, 2, 3]))
                if k < 3:
                    slots[k].append(axis)
            for k in range(3):
                said = draw(cuts(slots[k]))
                text = text.replace(f"<{k}>", said)
            parameters.append({"name": name, "is": text})
    degrees = {axis: draw(st.integers(1, 3)) for axis in AXES}
    return {
        "mesh": list(order),
        "degrees": degrees,
        "atoms": {"p": "d // i", "n": "f // j", "pad": draw(st.integers(0, 3)), "j": "h"},
        "split": {"d": "p i", "f": "n j"},
        "holes": {h: h + draw(cuts(axes)) for h, axes in holes.items()},
        "parameters": parameters,
    }


@st.composite
def problems(draw: st.DrawFn) -> tuple[Weights, Weights]:
    """Two sides of one family at random sizes."""
    config: dict[str, int] = {s: draw(st.integers(1, 4)) for s in SIZES}
    config["d"] = config["i"] * draw(st.integers(1, 3))
    config["f"] = config["h"] * draw(st.integers(1, 3))
    config["lo"] = draw(st.integers(0, config["l"]))
    found: list[Weights] = []
    for _ in range(2):
        data = draw(sides(8))
        atoms = {s: f"{s}_size" for s in SIZES} | {"lo": "lo_size"}
        table = WeightTable.of(data | {"atoms": atoms | data["atoms"], "of": FAMILY}, "random")
        sized = {f"{k}_size": v for k, v in config.items()}
        count = np.prod(list(data["degrees"].values()))
        apart = draw(st.booleans())
        first = 0 if not found or not apart else max(found[0].devices) + 1
        try:
            found.append(make_weights(table, sized, {}, range(first, first + int(count)), "f32"))
        except LayoutError as error:
            assume("cannot be cut" not in str(error))
            raise
    return found[0], found[1]


@given(problems())
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much])
def test_a_random_refit_is_what_the_oracle_says(problem: tuple[Weights, Weights]) -> None:
    source, target = problem
    values = oracle.logical(source)
    before, wanted = oracle.filled(source, values), oracle.filled(target, values)
    for side, arrays in ((source, before), (target, wanted)):
        for rank in side.devices:
            assert {n: a.shape for n, a in arrays[rank].items()} == {n: s for n, s, _ in side.parameters(rank)}
        assert Weights.parse(str(side)) == side
        for p in side.table.parameters:
            assert StoredForm.parse(str(p.form)) == p.form
    try:
        plan = refit(source, target)
    except LayoutError as error:
        assert "has no owner" in str(error)
        raise
    after = plan.apply(before)
    for rank in target.devices:
        for name, array in wanted[rank].items():
            np.testing.assert_array_equal(after[rank][name], array, err_msg=f"{rank} {name}")


@given(problems(), st.data())
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much])
def test_what_a_target_does_not_take_is_what_the_oracle_does_not_find_there(
    problem: tuple[Weights, Weights], data: st.DataObject
) -> None:
    """A target without some parameters, or some layers of them: values are distinct, so that what is absent is lost."""
    source, target = problem
    chosen = data.draw(st.lists(st.sampled_from(target.table.parameters), min_size=1, unique=True))
    tensors = dict(target.table.tensors)
    if data.draw(st.booleans()) and all("{l}" in p.name for p in chosen if "l" in str(p.form) or "{l}" in p.name):
        tensors |= {
            n: "l[1:]" + text.removeprefix("l").removeprefix("[lo:]") for n, text in tensors.items() if n != "embed"
        }
    table = replace(target.table, parameters=tuple(chosen), tensors=tuple(tensors.items()))
    try:
        other = make_weights(table, dict(target.config), dict(target.given), target.devices, "f32")
    except LayoutError as error:
        assume("has a range and stands in memory" not in str(error))
        raise
    values = oracle.logical(source)
    before = {v for named in oracle.filled(source, values).values() for a in named.values() for v in a.reshape(-1) if v}
    there = {v for named in oracle.filled(other, values).values() for a in named.values() for v in a.reshape(-1) if v}
    lost = before - there
    want = [t for t, own in values.items() if lost & set(own.tolist())]
    found = left_out(source, other)
    assert [f.tensor for f in found] == want
    for f in found:
        sizes = source.tensors[f.tensor].sizes
        first = [v in lost for v in values[f.tensor].tolist()].index(True)
        assert f.element == tuple(int(i) for i in np.unravel_index(first, sizes))


@given(problems())
@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much])
def test_regions_one_by_one_say_every_element(problem: tuple[Weights, Weights]) -> None:
    """As a transport of others would: element by element, from what a region says of both ends."""
    source, target = problem
    plan = refit(source, target)
    before = oracle.filled(source, oracle.logical(source))
    after = plan.apply(before)
    for rank in target.devices:
        own = {n: np.zeros(int(np.prod(s)), np.float32) for n, s, _ in target.parameters(rank)}
        for r in plan.regions(rank):
            if r.target != rank:
                continue
            there = before[r.source][source.names(r.source)[r.source_parameter]].reshape(-1)
            here = own[target.names(rank)[r.target_parameter]]
            for at in np.ndindex(*r.sizes):
                start = r.target_offset + np.dot(at, r.target_strides)
                here[start] = there[r.source_offset + np.dot(at, r.source_strides)]
        for name, array in own.items():
            np.testing.assert_array_equal(array, after[rank][name].reshape(-1), err_msg=f"{rank} {name}")


@given(problems(), st.data())
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much])
def test_a_copy_that_differs_is_seen_and_nothing_else_is(problem: tuple[Weights, Weights], data: st.DataObject) -> None:
    """Values are distinct, so that the places of a value are the copies of an element."""
    source, target = problem
    values = oracle.logical(source)
    before = oracle.filled(source, values)
    flat = {(r, n): a.reshape(-1) for r, named in before.items() for n, a in named.items()}
    places: dict[float, list[tuple[int, str, int]]] = {}
    for (rank, name), array in flat.items():
        for k in np.flatnonzero(array).tolist():
            places.setdefault(float(array[k]), []).append((rank, name, k))
    plan = refit(source, target)
    plan.apply(before)
    held = sum(len(at) - 1 for at in places.values())
    assert sum(int(m.elements.sum()) for m in plan.replicas.moves) == held
    several = {v: at for v, at in places.items() if len(at) > 1}
    for value, at in (
        (v, data.draw(st.sampled_from(a))) for v, a in several.items() if data.draw(st.integers(0, 40)) == 0
    ):
        rank, name, k = at
        flat[rank, name][k] = -value
        with pytest.raises(LayoutError) as caught:
            plan.apply(before)
        said = str(caught.value)
        assert f" is {-value}" in said and f" is {value}" in said
        shape = before[rank][name].shape
        assert f"{name}{[int(i) for i in np.unravel_index(k, shape)]} of rank {rank} is {-value}" in said, said
        plan.apply(before, compare_replicas=False)
        flat[rank, name][k] = value
    for value, at in places.items():
        if len(at) == 1:
            rank, name, k = at[0]
            flat[rank, name][k] = -value
            plan.apply(before)
            break

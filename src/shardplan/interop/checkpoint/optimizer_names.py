"""Optimizer states in a checkpoint: found by their names, and named as a destination's framework does.

torch has `optim.state.NAME.exp_avg`, whatever stands before `state` (distributed/checkpoint/state_dict.py; torchtitan
has `optimizer.state`), with the model at the top or under `model.`; Megatron has `optimizer.state.exp_avg.NAME`, and
`param` or `fp32_param` for the parameter in f32 (megatron-core 0.16.1, optimizer/distrib_optimizer.py, optimizer.py).
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import replace

from shardplan.errors import LayoutError
from shardplan.movement.weights.state import (
    MASTER,
    ROUNDED,
    STEP,
    STEPS,
    ParameterState,
    add_states,
    buckets_error,
    part_masters,
    states_of,
    step_tensor,
)
from shardplan.movement.weights.table import WeightTable
from shardplan.movement.weights.weights import Weights, make_weights

_LAST = re.compile(r"((?:\w+\.)*?state\.)(.+)\.(\w+)\Z")
_FIRST = re.compile(r"((?:\w+\.)*?state\.)(\w+)\.(.+)\Z")
_BUCKETS = re.compile(r"optimizer\.distributed\.dp_group_idx_\d+\.")
_MOMENT = "exp_avg"
UNDER = ("", "model.")  # where the model stands, beside the optimizer
_TORCH, _MEGATRON = "optimizer.state.{name}.{state}", "optimizer.state.{state}.{name}"
_FORMS = dict.fromkeys(("megatron-dist", "megatron-stacked"), _MEGATRON) | dict.fromkeys(
    ("fsdp2", "torchtitan", "hf", "hf5", "fsdp2-peft"), _TORCH
)
_SHARED = "optimizer."  # what stands before the name of a count of steps that all parameters share
SHARED_STEPS = f"{_SHARED}{step_tensor('')}"  # how the names of such counts begin
_MASTERS = {"param": MASTER, "fp32_param": MASTER}


def state_names(names: Iterable[str]) -> dict[str, ParameterState]:
    """Return the names that are states of others, each with whose, and how the name is made.

    Raises `LayoutError` for flat buckets.

    >>> found = state_names(["model.a.weight", "optim.state.a.weight.exp_avg", "optimizer.state.exp_avg.a.weight"])
    >>> each = found["optim.state.a.weight.exp_avg"]
    >>> each.parameter, each.state, each.form
    ('model.a.weight', 'exp_avg', 'optim.state.{name}.exp_avg')
    """
    known = set(names)
    if any(_BUCKETS.match(name) for name in known):
        raise buckets_error()
    out: dict[str, ParameterState] = {}
    for name in known:
        for pattern, order in ((_LAST, (2, 3)), (_FIRST, (3, 2))):
            match = pattern.match(name)
            own, state = match.group(*order) if match else ("", "")
            under = next((u for u in UNDER if match and u + own in known), None)
            if match and under is not None:
                tail = f"{{name}}.{state}" if order == (2, 3) else f"{state}.{{name}}"
                out[name] = ParameterState(under + own, _MASTERS.get(state, state), match.group(1) + tail, under=under)
                break
    return out


def with_found_states(table: WeightTable, found: Iterable[ParameterState]) -> WeightTable:
    """Return a table of a checkpoint's model with the optimizer states that were found beside it."""
    patterns = [(p.name, re.compile(re.sub(r"\\\{[\w.\\]+\\\}", r"\\d+", re.escape(p.name)))) for p in table.parameters]
    whose: dict[str, list[str]] = {}
    states: dict[ParameterState, None] = {}
    found = tuple(found)
    shared = any(not s.parameter for s in found)
    counted = any(s.state == STEP for s in found)
    for each in sorted((s for s in found if s.parameter), key=lambda s: (s.parameter, s.state)):
        of = each.parameter
        if of not in whose:
            whose[of] = [name for name, pattern in patterns if pattern.fullmatch(of)]
        states |= dict.fromkeys(replace(each, parameter=name) for name in whose[of])
        if each.state == _MOMENT and (shared or not counted):
            when = "" if shared else STEPS
            states |= dict.fromkeys(ParameterState(name, STEP, _SHARED, "f32", when=when) for name in whose[of])
    return part_masters(add_states(table, states))


def pass_states(source: Weights, target: Weights, head: str) -> Weights:
    """Return a target that also stores the optimizer states of a source, as its framework names them.

    Megatron's has every parameter in f32, too, and one count of steps for all, which is in `common.pt`. Raises
    `LayoutError` for a framework without an optimizer.
    """
    held = states_of(source)
    if not held:
        return target
    if head not in _FORMS:
        raise LayoutError(
            f"{source.table.name} has optimizer states, and {head} stores none; legal is --ignore 'optim*', or "
            "megatron, fsdp2, torchtitan or dcp"
        )
    form, megatron = _FORMS[head], _FORMS[head] == _MEGATRON
    states: list[ParameterState] = []
    steps = any(t.startswith(step_tensor("")) for f in source.families for t in f.tensors)
    if not megatron and not steps and any(_MOMENT in s for s in held.values()):
        raise LayoutError(
            f"{source.table.name} has optimizer states and no count of steps, which Megatron has in common.pt; legal "
            f"is --set {STEPS}=1000, that of the run, or --ignore 'optim*'"
        )
    for p in target.table.parameters:
        own = [set(held.get(t, ())) - {ROUNDED} for t in p.form.tensors]
        some = set.intersection(*own) if own else set[str]()
        if not some:
            continue
        wide = {s: held[p.form.tensors[0]][s] for s in some}
        states += [ParameterState(p.name, s, form, wide[s]) for s in sorted(some)]
        if megatron:
            states.append(ParameterState(p.name, MASTER, form, "f32"))
        if megatron and steps:
            states.append(ParameterState(p.name, STEP, _SHARED, "f32"))
        elif steps:
            states.append(ParameterState(p.name, STEP, form, "f32"))
    table = add_states(target.table, states)
    return make_weights(
        table, dict(source.config) | dict(target.config), dict(target.given), target.devices, target.dtype
    )

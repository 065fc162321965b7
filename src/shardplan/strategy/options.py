"""What of a strategy does nothing for a model, or gives devices nothing: `check_options` refuses it, and says why.

An option that is not its default changes programs, their order, what is kept where, or what is predicted; else whoever
said it believes in something that there is not. That `cuts`, `keep`, `prefetch`, `bucket` and `offload` do something,
`partition` sees by itself; the rest is said here.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

from shardplan.errors import LayoutError
from shardplan.strategy.held_cuts import deal_experts
from shardplan.strategy.limits import ModelLimits
from shardplan.strategy.model import Model
from shardplan.strategy.schedules.schedule import Schedule
from shardplan.strategy.schedules.table import GENERATORS, overlapping_schedules
from shardplan.strategy.strategy import Strategy

IN_ROUNDS = ("interleaved", "combined-1f1b", "looped-bfs")  # schedules of microbatches through all chunks in turn
TRAINED = ("no backward pass", "a model that trains")


class IdleOption(NamedTuple):
    """A field of a strategy that does nothing, why, what is legal, and the value as which it runs."""

    name: str
    why: str
    legal: str
    runs_as: object


def check_options(model: Model, strategy: Strategy, *, serves: bool = False, tables: bool = True) -> None:
    """Refuse a strategy of which a field does nothing for a model, or gives some devices nothing.

    Args:
        model: What is trained, or runs forward.
        strategy: How.
        serves: Whether the model answers requests, and does not train even if it could.
        tables: Whether axes serve what the strategy says; else degrees are not held against the model's dims.

    Raises `LayoutError` naming the field, its value and what is legal.
    """
    limits = ModelLimits.of(model, strategy.precision)
    if serves:
        limits = limits.forward()
    check_stages(limits, strategy)
    if limits.sequence % strategy.loss_chunks:
        raise LayoutError(
            f"strategy: loss_chunks={strategy.loss_chunks} of {model.name}, a sequence of {limits.sequence}; legal are "
            f"divisors of {limits.sequence}"
        )
    found = [*(excess_degrees(limits, strategy) if tables else ()), *idle(limits, strategy)]
    if serves and strategy.software.expert_overlap and strategy.expert > 1 < limits.experts:
        found = [one for one in found if one.name != "expert_overlap"]
        if strategy.microbatches == 1:  # of prompts two groups go in turn
            legal = "False, or a microbatch of half of what is in flight, and less"
            found.append(IdleOption("expert_overlap", "one group has all sequences in flight", legal, False))
    for one in found[:1]:
        value = getattr(strategy, one.name)
        raise LayoutError(f"strategy: {one.name}={value!r} of {model.name}: {one.why}; legal is {one.legal}")


def stage_count(s: Strategy) -> int:
    """Return how many stages layers are cut into."""
    if isinstance(s.schedule, Schedule):
        return s.schedule.stages // s.schedule.copies
    return s.pipeline * (s.interleave or 1) // GENERATORS[str(s.schedule)].copies


def check_stages(limits: ModelLimits, s: Strategy) -> None:
    """Raise `LayoutError` for more stages than there are layers."""
    stages = stage_count(s)
    if stages > limits.layers:
        most = limits.layers
        raise LayoutError(f"{stages} stages of a model of {most} layers; legal are {up_to(most)}")


def excess_degrees(limits: ModelLimits, s: Strategy) -> Iterator[IdleOption]:
    """Yield degrees that are larger than what they deal out: some devices had nothing to do."""
    said = {"tensor": limits.heads, "expert": limits.shared, "context": limits.sequence}
    of = {"tensor": "heads" if limits.scores else "columns to cut", "expert": "experts", "context": "positions"}
    for name, most in said.items():
        if getattr(s, name) > most:
            yield IdleOption(name, f"it has {most if most > 1 else 'no'} {of[name]}", up_to(most), most)
    most = ulysses(limits, s.tensor)
    if s.context > most and s.context_kind == "ulysses":
        also = f", which tensor={s.tensor} deals out too" if s.tensor > 1 else ""
        why = f"ulysses gives each its part of the {limits.key_heads} key-value heads{also}, and some get none"
        yield IdleOption("context", why, f"{up_to(most)}, or context_kind='gather', 'ring' or 'zigzag'", most)


def ulysses(limits: ModelLimits, tensor: int) -> int:
    """Return how many devices of a context have key-value heads each, where `tensor` deals them out too."""
    heads = limits.key_heads
    return max(heads // (math.gcd(tensor, heads) if heads < tensor else tensor), 1)


def idle(limits: ModelLimits, s: Strategy) -> Iterator[IdleOption]:
    """Yield options without which all would be the same."""
    cut = [name for name in ("sequence_parallel", "tensor_overlap") if getattr(s, name)]
    for name in cut if s.tensor == 1 else ():
        yield IdleOption(name, "no tensor axis", "tensor of 2 and more", False)
    if s.sequence_parallel and s.tensor > 1 and limits.sequence == 1:
        yield IdleOption("sequence_parallel", "no sequence to deal out", "False", False)
    if s.context_kind != "ulysses" and s.context == 1:
        yield IdleOption("context_kind", "context=1", "context of 2 and more", "ulysses")
    yield from idle_experts(limits, s)
    group = s.shard or s.data
    if s.fsdp and group * s.context == 1:
        yield IdleOption("fsdp", "one replica holds all", "data or context of 2 and more", False)
    elif s.zero and group * s.context == 1:
        yield IdleOption("zero", "one replica holds all", "data or context of 2 and more", 0)
    elif s.zero == 1 and not limits.kept:
        yield IdleOption("zero", "no state of an optimizer", "2, 3, or an optimizer that keeps some", 0)
    elif s.zero in (1, 2) and not limits.training:
        yield IdleOption("zero", TRAINED[0], f"0, 3, or {TRAINED[1]}", 3 if s.fsdp else 0)
    if s.software.attention is not None and not limits.scores:
        yield IdleOption("attention", "no attention", "None", None)
    if s.recompute in ("selective", "selective_op") and not limits.scores:
        yield IdleOption("recompute", "no attention in a layer", "'none', 'full' or names of ops", "none")
    most = limits.layers - stage_count(s)  # that a stage can have, and one more not
    if s.recompute_layers is not None and limits.training and s.recompute_layers > most:
        legal = f"{up_to(most)}, or None" if most > 0 else "None"
        yield IdleOption("recompute_layers", "no stage has more layers", legal, None)
    if s.reduce_dtype is not None and limits.training and s.data * s.context == 1:
        yield IdleOption("reduce_dtype", "one replica has all gradients", "data or context of 2 and more", None)
    for name, plain in (("recompute", "none"), ("gradient_dtype", None), ("reduce_dtype", None), ("offload", False),
                        ("offload_layers", 0), ("loss", "whole")):  # fmt: skip
        if getattr(s, name) != plain and not limits.training:
            yield IdleOption(name, TRAINED[0], f"{plain!r}, or {TRAINED[1]}", plain)
    if s.loss not in limits.losses and limits.training:
        yield IdleOption("loss", "no product alone makes logits of classes", " or ".join(limits.losses), "whole")
    if s.software.offload_layers > limits.layers:
        why = f"the model has {limits.layers} layers"
        yield IdleOption("offload_layers", why, f"0 to {limits.layers}", limits.layers)
    if s.schedule in IN_ROUNDS and s.microbatches == 1 and s.interleave != 1:
        why = f"one microbatch goes through all chunks in turn under {s.schedule!r}, and none hides another's waiting"
        yield IdleOption("interleave", why, "'1f1b', or 2 microbatches and more", 1)
    if limits.training and same_order(s):
        passes = f"the order of {s.microbatches} microbatches of {s.pipeline} stages is that of '1f1b'"
        yield IdleOption("schedule", passes, "'1f1b'", "1f1b")


def idle_experts(limits: ModelLimits, s: Strategy) -> Iterator[IdleOption]:
    """Yield options of experts without which all would be the same, or which what the model is has no room for."""
    if s.expert_from != "data":
        sizes = s.stage_degrees((limits.key_heads,))
        shared = s.expert if limits.shared > 1 else 1
        if deal_experts(sizes, shared, s.expert_from) == deal_experts(sizes, shared, "data"):
            yield IdleOption("expert_from", "the same devices share experts, whoever is first", "'data'", "data")
    for name in ("expert_products", "dispatch", "imbalance"):
        alone = s.expert == 1 and name != "expert_products"
        if getattr(s.software, name) is not None and (limits.experts == 1 or alone):
            why = "it has no experts" if limits.experts == 1 else "expert=1, and every device has all experts"
            yield IdleOption(name, why, "None" + ", or expert of 2 and more" * (limits.experts > 1), None)
    if s.software.expert_overlap:
        yield from unpaired_experts(limits, s)
    if s.software.imbalance is not None:
        yield from excess_imbalance(limits, s.software.imbalance, s.expert)


def unpaired_experts(limits: ModelLimits, s: Strategy) -> Iterator[IdleOption]:
    """Yield an overlap of experts' exchanges with another microbatch where there is none of one of them."""
    if s.expert == 1 or limits.experts == 1:
        why = "it has no experts" if limits.experts == 1 else "expert=1, and no token goes to another device"
        yield IdleOption("expert_overlap", why, "False" + ", or expert of 2 and more" * (limits.experts > 1), False)
    elif not limits.training:
        yield IdleOption("expert_overlap", TRAINED[0], f"False, or {TRAINED[1]}", False)
    elif not runs_together(s):
        called = s.schedule.label if isinstance(s.schedule, Schedule) else repr(s.schedule)
        many = f"of {s.microbatches} microbatch{'es' * (s.microbatches > 1)}"
        why = f"the schedule {called} {many} runs no forward and backward together"
        names = ", ".join(map(repr, overlapping_schedules()))
        yield IdleOption("expert_overlap", why, f"False, or one of {names}, and 2 microbatches and more", False)


def runs_together(s: Strategy) -> bool:
    """Say whether a schedule runs forwards and backwards of two microbatches together."""
    if isinstance(s.schedule, Schedule):
        return any(a.is_pair for row in s.schedule.ranks for a in row if a)
    return s.schedule in overlapping_schedules() and s.microbatches > 1


def excess_imbalance(limits: ModelLimits, imbalance: float, expert: int) -> Iterator[IdleOption]:
    """Yield an imbalance that experts on so many devices have no slots for, or that is more than all tokens on one."""
    slots = f"its experts have slots for capacity_factor={limits.room:g} of their even share"
    if limits.drops:
        legal = "None, or a model with dropless=True or capacity_factor=0"
        yield IdleOption("imbalance", f"{slots}, and drop the rest", legal, None)
    elif imbalance > limits.room:
        legal = f"1 to {limits.room:g}, or a model with capacity_factor=0"
        yield IdleOption("imbalance", f"{slots}, and a step with more raises", legal, None)
    elif imbalance > expert:
        yield IdleOption("imbalance", "one device has all tokens of those that share experts", up_to(expert), None)


def same_order(s: Strategy) -> bool:
    """Say whether a schedule that is not 1F1B, called by its name, has its order nevertheless."""
    alike = s.microbatches == 1 or (s.schedule == "interleaved" and s.pipeline == 1)
    return s.interleave == 1 and s.schedule in ("gpipe", *IN_ROUNDS) and alike


def up_to(most: int) -> str:
    """Return numbers from 1 as a message has them."""
    return "1" if most == 1 else f"1 to {most}"

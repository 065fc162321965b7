"""What the layers of a model weigh as they are settled: seconds, operations, and the bytes that they hold."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from shardplan.core.tensor import TensorType
from shardplan.strategy.partition.balance import balanced, in_flight_of_stages
from shardplan.strategy.partition.flow import Line, LineBlock, Loop
from shardplan.strategy.partition.microbatch import Microbatch
from shardplan.strategy.partition.prices import Prices
from shardplan.strategy.partition.settle import Settled
from shardplan.strategy.partition.stages import PipelineStage
from shardplan.strategy.schedules.schedule import Schedule


class Weight(NamedTuple):
    """Seconds and operations of a microbatch, forward and backward, and the bytes of state and of what is saved."""

    seconds: float = 0.0
    flops: float = 0.0
    state: float = 0.0
    saved: float = 0.0

    def and_(self, other: Weight, times: int = 1) -> Weight:
        """Return the sum, the other so many times."""
        return Weight(*(a + times * b for a, b in zip(self, other, strict=True)))


StateBytes = Callable[[str, bool], float]  # of an input by its name, or of a row of it: with what is kept of it


def weighed(
    micro: Microbatch, stages: Sequence[PipelineStage], settled: Settled, prices: Prices, state: StateBytes
) -> list[Weight]:
    """Return what each layer weighs, with all that is before the first, or behind the last, on these two."""
    rows = {line.number: Weight() for line in micro.block.lines if isinstance(line, Loop) and line.number < micro.count}
    parts = {line.number for line in micro.block.lines if isinstance(line, Loop) and not line.op.carried_count}
    ends: list[Weight] = []
    for stage in stages:
        named: dict[str, None] = {}
        inputs = dict(micro.block.inputs).keys() & {o for line in _lines(stage) for o in line.operands}
        weight = Weight(saved=sum(_saved(settled, v) for v in (*_alone(stage), *inputs)))
        weight = weight.and_(_block(micro.block, _lines(stage), settled, prices))
        for line in _lines(stage):
            named |= dict.fromkeys(line.operands)
        ends.append(weight._replace(state=sum(state(name, False) for name in named)))
    for line in micro.block.lines:
        if isinstance(line, Loop):
            number = line.number
            if number >= micro.count:
                origin = micro.origins[number]
                number = number if origin is None or origin.forward is None else origin.forward
            found = _block(line.block, line.block.lines, settled, prices)
            if line.number < micro.count:
                kept = {v for stage in stages for v in stage.saved} & set(line.results[line.op.carried_count :])
                sliced = line.operands[len(line.operands) - line.op.cut :]
                saved = sum(_saved(settled, v) for v in (*kept, *sliced)) / line.op.times
                found = found._replace(saved=saved, state=sum(state(name, True) for name in sliced))
            rows[number] = rows[number].and_(found)
    times = {line.number: line.op.times for line in micro.block.lines if isinstance(line, Loop)}
    for first, second in micro.cuts.behind.items():  # of each stage some, wherever it is cut: a layer weighs their mean
        both = Weight().and_(rows[first], times[first]).and_(rows[second], times[second])
        rows[first] = rows[second] = Weight(*(x / (times[first] + times[second]) for x in both))
    layers = [rows[k] for k, n in times.items() if k in rows and k not in parts for _ in range(n)]
    for k in sorted(parts & rows.keys()):
        ends[-1] = ends[-1].and_(rows[k], times[k])
    layers[0], layers[-1] = layers[0].and_(ends[0]), layers[-1].and_(ends[-1] if len(ends) > 1 else Weight())
    return layers


def lightest(
    micro: Microbatch,
    stages: Sequence[PipelineStage],
    settled: Settled,
    prices: Prices,
    state: StateBytes,
    schedule: Schedule,
) -> tuple[int, ...]:
    """Return the layers that later stages begin with: the cut whose heaviest stage is lightest, within memory.

    By seconds, and by operations where the device has no speeds.
    """
    layers, device, count = weighed(micro, stages, settled, prices, state), prices.fabric.topology.device, len(stages)
    weights = [w.seconds if device.flops else w.flops for w in layers]
    if math.isinf(device.memory):
        return balanced(weights, count)
    flights, owners = in_flight_of_stages(schedule), schedule.owners
    most = [max(flights[s::count]) for s in range(count)]
    held = np.array([[w.state + n * w.saved for w in layers] for n in most])
    return balanced(weights, count, held, [device.memory / owners.count(rank) for rank in owners[:count]])


def _saved(settled: Settled, name: str) -> float:
    """The bytes in which a value is saved, and of a parameter those in which it is kept."""
    key = (), name
    types = (*settled.saved(key), *settled.saved_rows(key, settled.type_of(key)))
    return sum(t.local_bytes() for t in types)


def _alone(stage: PipelineStage) -> Iterator[str]:
    """What is saved outside of loops."""
    made = {r for line in stage.forward if isinstance(line, Line) for r in line.results}
    return (v for v in stage.saved if v in made)


def _lines(stage: PipelineStage) -> list[Line]:
    return [line for line in (*stage.forward, *stage.backward) if isinstance(line, Line)]


def _block(block: LineBlock, lines: Sequence[Line | Loop], settled: Settled, prices: Prices) -> Weight:
    """The seconds and operations of lines, once, and of the movements that they want, each once."""
    out = Weight()
    wanted: dict[tuple[str, TensorType], None] = {}
    for line in lines:
        if isinstance(line, Loop):
            out = out.and_(_block(line.block, line.block.lines, settled, prices), line.op.times)
            continue
        laid = settled.laid(line)
        out = out.and_(Weight(prices.op(laid.op, laid.operands), laid.op.flops(*laid.operands)))
        wanted |= dict.fromkeys(zip(line.operands, laid.operands, strict=True))
    if lines is block.lines and block.path:
        wanted |= {(o, settled.wanted[block.path, o]): None for o in block.outputs if (block.path, o) in settled.wanted}
    moves = [prices.move(settled.type_of((block.path, name)), t) for name, t in wanted]
    return out.and_(Weight(sum(s for s in moves if math.isfinite(s))))

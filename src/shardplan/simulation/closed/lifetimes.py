"""When which values of a layer are there while it runs: what `core.accounting` says of programs, for any sizes.

Storage is shared as there; parameters, and what leads to their gradients alone, is the runtime's affair and not
counted. A value that steps want otherwise than it was made has a copy from the first of them to the last.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

import numpy as np

from shardplan.core.accounting import storages
from shardplan.core.nested import Nested
from shardplan.core.tensor import TensorType
from shardplan.simulation.closed.read_block import ReadBlock
from shardplan.simulation.closed.work import LayerLife, LocalValue
from shardplan.strategy.partition.axis_propagation import State

Floats = np.ndarray
Local = Callable[[str, TensorType, State], LocalValue]


class ValueSizes(Protocol):
    """Says what values take on a device."""

    def bytes(self, value: LocalValue) -> Floats:
        """Return the bytes of a value, [n]."""
        ...


def layer_life(block: ReadBlock, op: Nested, rows: Mapping[str, str], local: Local) -> LayerLife:
    """Return the values of a body of layers, and when they are there.

    Args:
        block: The body, read.
        op: The op that it is of; it runs back where that is `backwards`.
        rows: Its inputs that the forward pass left, and what each is.
        local: What a device has of a value in a state.
    """
    body, types, end = op.body, op.body.types, len(op.body.steps)
    inputs = [name for name, _ in body.inputs]
    if op.backwards:
        passing = {*body.outputs[: op.carried_count]}  # what leads to what is carried
        for step in reversed(body.steps):
            passing |= {*step.operands} if passing & {*step.results} else set()
    else:
        passing = types.keys() - {*body.outputs[op.carried_count :]}  # what is saved is there anyhow
    of, ended = storages(body, {name: t.local_bytes() for name, t in types.items()}, inputs[op.carried_count :])
    begins = dict.fromkeys(inputs, 0)
    begins |= {r: k for k, step in enumerate(body.steps) for r in step.results}
    ends = {name: k for k, names in enumerate(ended) for name in names}
    found: list[LocalValue] = []
    spans: list[tuple[int, int]] = []
    row_kinds: dict[int, str] = {}
    early: list[int] = []  # copies of rows, which are there from the start where the rows are made again
    for name in dict.fromkeys(of.values()):
        counted = name in rows or name in inputs[: op.carried_count] or (name not in inputs and name in passing)
        if not counted or name in block.held:
            continue
        if name in rows:
            row_kinds[len(found)] = rows[name]
        found.append(local(name, types[name], block.state.get(name, {})))
        spans.append((begins[name], ends.get(name, end)))
    for (name, state), (first, last) in block.copies.items():
        if name not in block.held and (name in passing or name in rows or name in inputs[: op.carried_count]):
            early += [len(found)] if name in rows else []
            found.append(local(name, types[name], dict(state)))
            spans.append((first, last))
    alive = np.zeros((max(end, 1), len(found)), dtype=np.int8)
    for k, (first, last) in enumerate(spans):
        alive[first : last + 1, k] = 1
    carried = [local(name, types[name], block.state.get(name, {})) for name in body.outputs[: op.carried_count]]
    for value in carried:  # they are among what the op leaves
        alive = np.concatenate([alive, -np.ones((len(alive), 1), dtype=np.int8)], axis=1)
        found.append(value)
    again = alive.copy()
    for k in early:
        again[: spans[k][1] + 1, k] = 1
    late = {
        o: local(o, types[o], block.state.get(o, {}))
        for step in body.steps
        if not passing & {*step.results}
        for o in step.operands
        if (o in passing or o in rows or o in inputs[: op.carried_count]) and o not in block.held
    }
    return LayerLife(block.run, op.backwards, tuple(found), alive, again, row_kinds, tuple(late.values()))


def life_bytes(life: LayerLife, sizes: ValueSizes, n: int) -> dict[str, Floats]:
    """Return what a layer has at work: forward; back, by what of it is computed again; and what W is made of.

    By `work forward`, `work none`, `work full` and so on, and `late`: bytes on a device, [n].
    """
    nbytes = np.stack([sizes.bytes(v) + np.zeros(n) for v in life.values]) if life.values else np.zeros((0, n))
    kinds = [life.rows.get(k) for k in range(len(life.values))]  # None where it is no row
    again = {
        "none": lambda kind: kind == "opened",
        "full": lambda kind: kind != "input",
        "selective": lambda kind: kind in ("scores", "opened"),
        "selective_op": lambda kind: kind not in ("input", "scores", "second product"),
    }
    if not life.back:
        return {"work forward": np.maximum((life.alive @ nbytes).max(axis=0, initial=0.0), 0.0)}
    found: dict[str, Floats] = {}
    for name, made in again.items():
        counted = np.array([kind is None or made(kind) for kind in kinds], dtype=bool)
        alive = life.again if name in ("full", "selective_op") else life.alive
        found[f"work {name}"] = np.maximum((alive @ (nbytes * counted[:, None])).max(axis=0, initial=0.0), 0.0)
    found["late"] = sum((sizes.bytes(v) for v in life.late), np.zeros(n))
    return found

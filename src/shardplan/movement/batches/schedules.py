"""When the steps of packs run: one after another, side by side in one `together`, or in waves; and the program of it.

In waves the second steps of one run beside the first of the next, where one loads the links between nodes and the other
those inside.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from shardplan.core.ops import Together
from shardplan.core.ops.collective import moving
from shardplan.core.ops.compute import computing
from shardplan.core.program import Program
from shardplan.core.step import Step
from shardplan.core.tensor import TensorType
from shardplan.hardware.prices.fabric import Fabric
from shardplan.movement.batches.packing import BatchItem, Group, Pack, Slot, first_fit
from shardplan.movement.redistribution.choice import keeping

# In how many waves packs may run: beside the last of them runs nothing, which of eight is an eighth. Each number is a
# program to price.
_WAVES = (2, 4, 8, 16)
# Packs of which every schedule, and other tiles, are priced: more are posted together where they share devices.
FEW_PACKS = 64


def schedules(packs: Sequence[Pack]) -> Iterator[list[Slot]]:
    """Yield when the steps of packs may run, the simplest first: of equal prices the first is taken."""
    yield _one_after_another(packs)
    if len(packs) > FEW_PACKS:
        return
    if len(packs) > 1:
        yield side_by_side([packs])
    lengths = first_fit(packs, None, lambda pack: len(pack[0].ops), len)
    if len(lengths) > 1:
        yield side_by_side([packs], late=True)
    for groups in (lengths, sharing(packs)):
        if 1 < len(groups) < len(packs):
            yield side_by_side(groups)


def waves(packs: Sequence[Pack], fabric: Fabric | None) -> Iterator[list[Slot]]:
    """Yield ever more waves, where steps of one tensor may load links of several levels."""
    if fabric is not None and len(fabric.wires) > 1 and any(len(pack[0].ops) > 1 for pack in packs):
        longest = max(map(len, packs))
        yield from (_in_waves(packs, count) for count in _WAVES if count <= longest)


def sharing(packs: Sequence[Pack]) -> list[list[Pack]]:
    """Group packs that share devices, also by way of others: the groups do not wait for each other."""
    groups: list[tuple[set[int], list[Pack]]] = []
    for pack in packs:
        devices, mine = {d for t in (pack[0].source, pack[0].target) for d in t.mesh.devices}, [pack]
        for other in [g for g in groups if not devices.isdisjoint(g[0])]:
            groups.remove(other)
            devices, mine = devices | other[0], [*other[1], *mine]
        groups.append((devices, mine))
    return [mine for _, mine in groups]


def _one_after_another(packs: Iterable[Pack]) -> list[Slot]:
    return side_by_side([[pack] for pack in packs])


def side_by_side(groups: Iterable[Group], *, late: bool = False) -> list[Slot]:
    """Group after group, the first steps of its packs in one slot, then the second ones; `late`: the last in one."""
    slots: list[Slot] = []
    for group in groups:
        longest = max(len(pack[0].ops) for pack in group)
        starts = [longest - len(pack[0].ops) if late else 0 for pack in group]
        for k in range(longest):
            here = zip(group, starts, strict=True)
            slots.append([(pack, k - start) for pack, start in here if 0 <= k - start < len(pack[0].ops)])
    return slots


def _in_waves(packs: Sequence[Pack], count: int) -> list[Slot]:
    """Every pack in so many parts, each of which starts a slot after the one before."""
    slots: list[list[tuple[Pack, int]]] = [[] for _ in range(count + max(len(pack[0].ops) for pack in packs) - 1)]
    for pack in packs:
        for wave in range(count):
            if part := pack[wave * len(pack) // count : (wave + 1) * len(pack) // count]:
                for k in range(len(pack[0].ops)):
                    slots[wave + k].append((part, k))
    return [slot for slot in slots if slot]


def assemble_program(slots: Iterable[Slot], items: Sequence[BatchItem]) -> Program:
    """One program: in every slot each pack runs one of its ops on all of its tensors.

    What computes takes a tensor each; it sends nothing, so that it stands before what the slot sends.
    """
    current = {i.index: f"in{i.index}" for i in items}
    types = {f"in{i.index}": i.source for i in items}
    steps: list[Step] = []
    slots = list(slots)
    several = any(len(slot) > 1 for slot in slots)
    for slot in slots:
        found: list[Step] = []
        for pack, number in slot:
            op, apart = pack[0].ops[number], computing(pack[0].ops[number]) is not None
            for part in [[i] for i in pack] if apart else [pack]:
                results = tuple(f"t{i.index}.{number}" for i in part)
                step = Step(op, tuple(current[i.index] for i in part), results)
                (steps if apart else found).append(step)
                if several:
                    types |= zip(results, op.infer(*(types[o] for o in step.operands)), strict=True)
                current |= zip((i.index for i in part), results, strict=True)
        steps += found if len(found) == 1 else _merge_sends(found, types)
    order = sorted(items, key=lambda i: i.index)
    program = Program([(f"in{i.index}", i.source) for i in order], steps, [current[i.index] for i in order])
    return keeping(program, (f"in{i.index}" for i in order if i.keep))


def _merge_sends(steps: list[Step], types: dict[str, TensorType]) -> list[Step]:
    """Steps that do not depend on each other, those that send in one."""
    sending = [s for s in steps if moving(s.op) is not None and s.op.rounds(*(types[o] for o in s.operands))]
    if len(sending) < 2:
        return steps
    given = tuple(o for s in sending for o in s.operands)
    made = tuple(r for s in sending for r in s.results)
    body = Program([(o, types[o]) for o in given], sending, made)
    return [*(s for s in steps if s not in sending), Step(Together(body), given, made)]

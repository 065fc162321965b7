"""What a compiled HLO module moves and holds, counted as the peers are: the library reads its text (`interop.hlo`).

Caveats: those of the reader; a device of a group receives the whole bytes of the bandwidth-optimal algorithm, rounded
down.
"""

from __future__ import annotations

from benchmarks.peers.problem import rounds_of

from shardplan.interop.hlo import HloCollective, HloModule, array_bytes, called_computations

PERMUTE = "collective-permute"


def largest_group(one: HloCollective) -> int:
    """The devices of the largest group (2 for a permute that moves anything, else 1)."""
    if one.kind == PERMUTE:
        return 2 if any(a != b for a, b in one.pairs) else 1
    return max((len(group) for group in one.groups), default=1)


def received_bytes(one: HloCollective, devices: int) -> tuple[int, ...]:
    """The bytes that each device receives."""
    got = [0] * devices
    for source, target in one.pairs:
        got[target] = one.output_bytes if source != target else 0
    for group in one.groups:
        for place, device in enumerate(group):
            got[device] = _received_in_group(one, len(group), place)
    return tuple(got)


def _received_in_group(one: HloCollective, q: int, place: int) -> int:
    match one.kind:
        case "all-gather":
            return one.output_bytes - one.operand_bytes if q > 1 else 0
        case "all-to-all" | "reduce-scatter":
            return one.operand_bytes * (q - 1) // q
        case "all-reduce":
            return 2 * one.operand_bytes * (q - 1) // q
        case _:  # a broadcast; the reader refuses others
            return one.output_bytes if place > 0 else 0


def rounds_taken(one: HloCollective) -> int:
    """The rounds it takes (see `problem.rounds_of`)."""
    q = largest_group(one)
    return rounds_of("permute" if one.kind == PERMUTE else one.kind, q, moved=q > 1)


def collective_text(one: HloCollective) -> str:
    """The kind, the size of its largest group, and the dim where it is printed."""
    where = "" if one.dim is None else f" dim={one.dim}"
    return one.kind if one.kind == PERMUTE else f"{one.kind} q={largest_group(one)}{where}"


def largest_bytes(text: str) -> int:
    """The largest array, in bytes, that an instruction of the module outputs; of a tuple, its largest element.

    Instructions inside fusions are left out: they are not buffers. (XLA may reuse buffers; this is a logical size.)
    """
    computations = HloModule.parse(text).computations
    fused = {
        name
        for instructions in computations.values()
        for instruction in instructions
        if instruction.opcode == "fusion"
        for name in called_computations(instruction)
    }
    kept = (instructions for name, instructions in computations.items() if name not in fused)
    return max((max(array_bytes(i.shape), default=0) for instructions in kept for i in instructions), default=0)

"""Twelve movements as trainers and servers make them: our plan beside what an expert writes by hand.

    python -m benchmarks.twelve_movements [--out FILE]

A movement is its types, its meshes and a cluster. The programs written by hand stand beside it in the project's own
text (`by_hand`); they were committed before the planner ran on any of the movements. `by_hand_later` are stronger ones,
written when ours were known. Of all of them the one of fewest predicted seconds is what ours is held against. Both
sides are priced by one function on one fabric, and their bytes counted alike.

A program by hand must type, go from the sources to the destinations, and deliver what the reference says, on the same
types with fewer elements (`small`). It may pass through devices of neither end, which a certificate refuses; a later
one may store dims longer than they are, as FSDP2 does.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from benchmarks.common import arguments, record, use_tests, write

import shardplan as sp
from shardplan.core.accounting import account
from shardplan.hardware.units import format_bytes
from shardplan.plans.pricing import fabric_of, price_program

TypeOnMesh = tuple[str, str]  # the text of a type, and that of its mesh


@dataclass(frozen=True, slots=True)
class Movement:
    """What is moved where, and how an expert would."""

    name: str
    cluster: str
    nodes: int
    sources: tuple[TypeOnMesh, ...]
    destinations: tuple[TypeOnMesh, ...]
    small: dict[int, int]  # sizes of dims, and those that the reference runs on
    by_hand: dict[str, str]  # in words, and the program
    by_hand_later: dict[str, str] = field(default_factory=dict[str, str])

    @property
    def topology(self) -> sp.Topology:
        """The cluster."""
        return sp.Topology.load(self.cluster, nodes=self.nodes)

    def types(self, ends: Sequence[TypeOnMesh], small: bool = False) -> list[sp.TensorType]:
        """The types of the sources or the destinations."""
        shown = self.shrink if small else str
        return [sp.TensorType.parse(shown(text), sp.Mesh.parse(mesh)) for text, mesh in ends]

    def shrink(self, text: str) -> str:
        """The same text with the sizes of `small`."""
        return re.sub(r"\b\d+\b", lambda m: str(self.small.get(int(m[0]), m[0])), text)

    def check(self) -> None:
        """Hold the programs by hand against the ends and the reference; raises `ValueError`."""
        unsound = use_tests("oracle").unsound
        for words, text in (self.by_hand | self.by_hand_later).items():
            for small in (False, True):
                program = sp.Program.parse(self.shrink(text) if small else text)
                ends = [*self.types(self.sources, small), *self.types(self.destinations, small)]
                found = [*program.input_types, *program.output_types]
                if found != ends and not (words in self.by_hand_later and _is_padded(found, ends)):
                    raise ValueError(f"{self.name}, {words}: the program has other ends than the movement")
                if small and (reason := unsound(program, program.output_types)):
                    raise ValueError(f"{self.name}, {words}: {reason}")

    def plan(self) -> sp.Plan:
        """Our plan."""
        sources, destinations = self.types(self.sources), self.types(self.destinations)
        if len(sources) == 1:
            return sp.redistribute(sources[0], destinations[0], self.topology)
        return sp.redistribute(sources, destinations, self.topology)


def _is_padded(found: Sequence[sp.TensorType], wanted: Sequence[sp.TensorType]) -> bool:
    """Whether types are others but for dims that are longer, by less than one row a device."""
    return len(found) == len(wanted) and all(
        (x.dtype, x.mesh, x.layout) == (y.dtype, y.mesh, y.layout)
        and all(0 <= n - m < y.mesh.size for n, m in zip(x.shape, y.shape, strict=True))
        for x, y in zip(found, wanted, strict=True)
    )


STAGE = "bf16[28672@tp, 8192]"  # an MLP weight of a 70B model; each stage of the pipeline has one like it
STAGES = tuple((STAGE, f"tp=8 devices={8 * k}:{8 * k + 8}") for k in range(4))


def _stages_to(mesh: str, together: bool = False) -> str:
    """Every stage sent shard to shard: by itself, or all of them in one batch of sends and receives."""
    sent = ", ".join(f"%s{k}" for k in range(4))
    meshes = [f"  mesh m{k}: {text}" for k, (_, text) in enumerate(STAGES)] + [f"  mesh m4: {mesh}"]
    inputs = [f"  input %{k}: {STAGE} on m{k}" for k in range(4)]
    sends = [f"  %s{k} = send(%{k}; layout=[@tp, ], mesh=m4): {STAGE} on m4" for k in range(4)]
    if together:
        body = ["  " + line for line in (*inputs, *sends, f"  output {sent}")]
        sends = [f"  {sent} = together(%0, %1, %2, %3) {{", *body, "  }: " + "; ".join([f"{STAGE} on m4"] * 4)]
    return "\n".join(["program", *meshes, *inputs, *sends, f"  output {sent}"])


MOVEMENTS = (
    Movement(
        "FSDP to TP on two nodes",
        "dgx-h100",
        2,
        (("bf16[8192@(dp,tp), 28672]", "dp=2,tp=8"),),
        (("bf16[8192, 28672@tp]", "dp=2,tp=8"),),
        {8192: 32, 28672: 16},
        {
            "all-to-all inside the node, then all-gather over the rails": """program
  mesh dp=2, tp=8
  input %0: bf16[8192@(dp,tp), 28672]
  %1 = all_to_all(%0; src_dim=0, dst_dim=1, axes=(tp)): bf16[8192@dp, 28672@tp]
  %2 = all_gather(%1; dim=0, axes=(dp)): bf16[8192, 28672@tp]
  output %2""",
            "all-gather of the whole, then a cut": """program
  mesh dp=2, tp=8
  input %0: bf16[8192@(dp,tp), 28672]
  %1 = all_gather(%0; dim=0, axes=(dp,tp)): bf16[8192, 28672]
  %2 = slice(%1; dim=1, axes=(tp)): bf16[8192, 28672@tp]
  output %2""",
        },
    ),
    Movement(
        "TP8 to TP4 x DP2",
        "dgx-h100",
        1,
        (("bf16[28672@(dp,tp), 8192]", "dp=2,tp=4"),),
        (("bf16[28672@tp, 8192]", "dp=2,tp=4"),),
        {28672: 32, 8192: 4},
        {
            "a permute to where shards are neighbours, then all-gather of pairs": """program
  mesh dp=2, tp=4
  input %0: bf16[28672@(dp,tp), 8192]
  %1 = permute(%0; layout=[@(tp,dp), ]): bf16[28672@(tp,dp), 8192]
  %2 = all_gather(%1; dim=0, axes=(dp)): bf16[28672@tp, 8192]
  output %2""",
            "one batch of sends and receives": """program
  mesh dp=2, tp=4
  input %0: bf16[28672@(dp,tp), 8192]
  %1 = exchange(%0; layout=[@tp, ]): bf16[28672@tp, 8192]
  output %1""",
        },
    ),
    Movement(
        "PP4 to a server",
        "dgx-h100",
        5,
        STAGES,
        ((STAGE, "tp=8 devices=32:40"),) * 4,
        {28672: 16, 8192: 4},
        {"every stage sends shard to shard": _stages_to("tp=8 devices=32:40")},
        {"the sends of all stages in one batch": _stages_to("tp=8 devices=32:40", together=True)},
    ),
    Movement(
        "experts moved",
        "dgx-h100",
        2,
        (("bf16[64@(node,gpu), 4096, 14336]", "node=2,gpu=8"),),
        (("bf16[64@(gpu,node), 4096, 14336]", "node=2,gpu=8"),),
        {4096: 2, 14336: 3},
        {
            "every device sends its experts to one other": """program
  mesh node=2, gpu=8
  input %0: bf16[64@(node,gpu), 4096, 14336]
  %1 = permute(%0; layout=[@(gpu,node), , ]): bf16[64@(gpu,node), 4096, 14336]
  output %1""",
        },
    ),
    Movement(
        "Ulysses",
        "dgx-h100",
        1,
        (("bf16[131072@sp, 64, 128]", "sp=8"),),
        (("bf16[131072, 64@sp, 128]", "sp=8"),),
        {131072: 16, 128: 2},
        {
            "one all-to-all": """program
  mesh sp=8
  input %0: bf16[131072@sp, 64, 128]
  %1 = all_to_all(%0; src_dim=0, dst_dim=1, axes=(sp)): bf16[131072, 64@sp, 128]
  output %1""",
        },
    ),
    Movement(
        "ZeRO gather on NVL72",
        "nvl72",
        1,
        (("bf16[28800@dp, 8192]", "dp=72"),),
        (("bf16[28800, 8192]", "dp=72"),),
        {28800: 72, 8192: 2},
        {
            "one all-gather": """program
  mesh dp=72
  input %0: bf16[28800@dp, 8192]
  %1 = all_gather(%0; dim=0, axes=(dp)): bf16[28800, 8192]
  output %1""",
        },
    ),
    Movement(
        "uneven vocabulary",
        "dgx-h100",
        2,
        (("bf16[50257@dp, 8192]", "dp=16"),),
        (("bf16[50257, 8192]", "dp=16"),),
        {50257: 33, 50272: 48, 8192: 2},
        {
            "one all-gather, its last part shorter": """program
  mesh dp=16
  input %0: bf16[50257@dp, 8192]
  %1 = all_gather(%0; dim=0, axes=(dp)): bf16[50257, 8192]
  output %1""",
        },
        {
            "parts stored with padding to 50,272 rows, gathered with it": """program
  mesh dp=16
  input %0: bf16[50272@dp, 8192]
  %1 = all_gather(%0; dim=0, axes=(dp)): bf16[50272, 8192]
  output %1""",
        },
    ),
    Movement(
        "64 to 48 devices",
        "dgx-h100",
        8,
        (("bf16[27648@fsdp, 8192]", "fsdp=64"),),
        (("bf16[27648@fsdp, 8192]", "fsdp=48"),),
        {27648: 192, 8192: 2},
        {
            "every device fetches the rows that it lacks": """program
  mesh m0: fsdp=64
  mesh m1: fsdp=48
  input %0: bf16[27648@fsdp, 8192] on m0
  %1 = send(%0; layout=[@fsdp, ], mesh=m1): bf16[27648@fsdp, 8192] on m1
  output %1""",
        },
    ),
    Movement(
        "a hot spare",  # for device 15, which is drained, and of which 7 is the replica
        "dgx-h100",
        4,
        (("bf16[8192, 28672@tp]", "dp=2,tp=8"),),
        (("bf16[8192, 28672@tp]", "dp=2,tp=8 devices=[0,1,2,3,4,5,6,7,8,9,10,11,12,13,14,16]"),),
        {8192: 4, 28672: 16},
        {
            "the spare fetches its shard": """program
  mesh m0: dp=2, tp=8
  mesh m1: dp=2, tp=8 devices=[0,1,2,3,4,5,6,7,8,9,10,11,12,13,14,16]
  input %0: bf16[8192, 28672@tp] on m0
  %1 = send(%0; layout=[, @tp], mesh=m1): bf16[8192, 28672@tp] on m1
  output %1""",
        },
    ),
    Movement(
        "HSDP shrinking",  # four replicas of 8 shards on four nodes; two of 12 on the three that stay
        "dgx-h100",
        4,
        (("bf16[27648@shard, 8192]", "replica=4,shard=8"),),
        (("bf16[27648@shard, 8192]", "replica=2,shard=12"),),
        {27648: 48, 8192: 2},
        {
            "every device fetches its rows inside its node": """program
  mesh m0: replica=4, shard=8
  mesh m1: replica=2, shard=12
  input %0: bf16[27648@shard, 8192] on m0
  %1 = send(%0; layout=[@shard, ], mesh=m1, near=(8)): bf16[27648@shard, 8192] on m1
  output %1""",
        },
    ),
    Movement(
        "prefill to decode",  # a cache of [layers, tokens, heads, head]: prefill by 8, one replica of decode by 4
        "dgx-h100",
        2,
        (("bf16[80, 32768, 8@tp, 128]", "tp=8"),),
        (("bf16[80, 32768, 8@tp, 128]", "tp=4 devices=8:12"),),
        {80: 2, 32768: 3, 128: 2},
        {
            "every pair of shards goes to its receiver": """program
  mesh m0: tp=8
  mesh m1: tp=4 devices=8:12
  input %0: bf16[80, 32768, 8@tp, 128] on m0
  %1 = send(%0; layout=[, , @tp, ], mesh=m1): bf16[80, 32768, 8@tp, 128] on m1
  output %1""",
            "over all NICs of the receiving node, then inside it": """program
  mesh m0: tp=8
  mesh m1: tp=8 devices=8:16
  mesh m2: tp=4 devices=8:12
  input %0: bf16[80, 32768, 8@tp, 128] on m0
  %1 = send(%0; layout=[, , @tp, ], mesh=m1): bf16[80, 32768, 8@tp, 128] on m1
  %2 = send(%1; layout=[, , @tp, ], mesh=m2): bf16[80, 32768, 8@tp, 128] on m2
  output %2""",
        },
    ),
    Movement(
        "PP4 to two replicas",
        "dgx-h100",
        6,
        STAGES,
        ((STAGE, "replica=2,tp=8 devices=32:48"),) * 4,
        {28672: 16, 8192: 4},
        {"every stage sends shard to shard, to both": _stages_to("replica=2,tp=8 devices=32:48")},
        {"the sends of all stages, to both, in one batch": _stages_to("replica=2,tp=8 devices=32:48", together=True)},
    ),
)


def facts_of(program: sp.Program, topology: sp.Topology) -> dict[str, Any]:
    """What is compared of two programs."""
    priced = price_program(program, fabric_of(topology, program.meshes))
    return {
        "microseconds": round(priced.seconds * 1e6, 1),
        "worst_device_bytes": int(account(program).received.max(initial=0)),
        "level_bytes": [int(n) for n in priced.level_bytes],
        "steps": [step.op.name for step in program.steps],
    }


def row_of(movement: Movement) -> dict[str, Any]:
    """A row of the result: ours beside the programs by hand, the fastest first."""
    topology = movement.topology
    hands = [
        {"words": words, "later": words in movement.by_hand_later} | facts_of(sp.Program.parse(text), topology)
        for words, text in (movement.by_hand | movement.by_hand_later).items()
    ]
    hands.sort(key=lambda hand: hand["microseconds"])
    plan = movement.plan()
    ours = facts_of(plan.program, topology)
    return {
        "movement": movement.name,
        "cluster": f"{movement.cluster} x {movement.nodes}",
        "levels": [level.name for level in topology.levels],
        "by_hand": hands,
        "ours": ours | {"status": plan.certificate.status},
        "ours_over_hand": ours["microseconds"] / hands[0]["microseconds"],
        "better": plan.better,  # the line under the print-out: another placement, or a stop on idle devices
    }


def page_table(rows: Sequence[dict[str, Any]]) -> str:
    """The rows as `docs/movements.md` has them; of two numbers the first is that of the program by hand."""
    lines = [
        "| movement | the best by hand | predicted | at the worst device | between nodes | inside nodes | our steps |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        hand, ours = row["by_hand"][0], row["ours"]
        later = " (later)" if hand["later"] else ""
        pairs = [
            ", ".join(shown(x[key]) for x in (hand, ours))
            for shown, key in ((_milliseconds, "microseconds"), (format_bytes, "worst_device_bytes"))
        ]
        pairs += [", ".join(format_bytes(x["level_bytes"][k]) for x in (hand, ours)) for k in (0, 1)]
        cells = f"{row['movement']} ({row['cluster']})", hand["words"] + later, *pairs, ", ".join(ours["steps"])
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _milliseconds(microseconds: float) -> str:
    return f"{microseconds / 1e3:.3g} ms"


def main() -> None:
    """Check, plan, print and write."""
    given = arguments("twelve_movements", __doc__ or "", len(MOVEMENTS), of="how many movements").parse_args()
    rows = list[dict[str, Any]]()
    for movement in MOVEMENTS[: given.count]:
        movement.check()
        rows.append(row_of(movement))
    print(page_table(rows))
    write(given.out, record({"count": given.count}, {"movements": rows}))


if __name__ == "__main__":
    main()

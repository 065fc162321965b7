"""What goes between the stages of a job: values of passes, and what parameters that several stages have need."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from shardplan.core.mesh import Mesh
from shardplan.core.rebase import rebased_type
from shardplan.hardware.placement import Placement
from shardplan.hardware.topology import Topology
from shardplan.strategy.partition.job import Transfer
from shardplan.strategy.partition.programs import RECEIVED, TOTAL, StageProgram, Types
from shardplan.strategy.partition.stages import Boundary
from shardplan.strategy.partition.updates import clip_transfers


class SharedParameter(NamedTuple):
    """A parameter that a stage has besides the one whose optimizer updates it.

    `name` is its name on the stage, `called` what it is called where it is updated, `parameter` its name there.
    """

    stage: int
    name: str
    called: str
    parameter: str


def list_transfers(
    written: Mapping[tuple[int, str], StageProgram],
    first: Mesh,
    meshes: Sequence[Mesh],
    types: Sequence[Types],
    boundaries: Sequence[Boundary],
    shared: Iterable[SharedParameter],
    count: int,
    where: Topology | Placement | None,
) -> Iterator[Transfer]:
    """Yield what goes between stages.

    Args:
        written: Programs by stage and kind, on the mesh of stage 0.
        first: That mesh.
        meshes: Those of all stages, of a second chain behind those of the first.
        types: By stage those of all that lives there between programs.
        boundaries: Values of passes between the stages of a chain.
        shared: Parameters whose totals go to the stage that updates them, and come back, around the optimizer.
        count: Stages of a chain.
        where: What movements are planned on.
    """
    for b, chain in [(b, chain) for chain in range(0, len(meshes), count) for b in boundaries]:
        (s, value), (t, local) = (b.source[0] + chain, b.source[1]), (b.target[0] + chain, b.target[1])
        sent = written[s, b.kind].sent[value]
        source, target = (rebased_type(written[s, b.kind].program.types[sent], {first: meshes[k]}) for k in (s, t))
        yield Transfer(b.kind, (s, sent), (t, RECEIVED + local), (source, target), where)
    for away, copy, called, name in shared:
        home = away % count
        home = home if name in types[home] else next(s for s, mine in enumerate(types) if name in mine)
        for kind, s, t, n, m in (
            ("total", away, home, TOTAL + copy, TOTAL + called),
            ("OPT", home, away, name, copy),
        ):
            u = types[home][TOTAL + name] if kind == "total" else types[home][name]
            source, target = (rebased_type(u, {first: meshes[k]}) for k in (s, t))
            yield Transfer(kind, (s, n), (t, m), (source, target), where)
    yield from clip_transfers(written, first, meshes, where)

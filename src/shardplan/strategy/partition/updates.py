"""The programs of optimizers, and what goes between stages for a norm over all of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

from shardplan.core.mesh import Mesh
from shardplan.core.rebase import rebased_type
from shardplan.hardware.placement import Placement
from shardplan.hardware.topology import Topology
from shardplan.strategy.partition.job import Transfer
from shardplan.strategy.partition.programs import FACTOR, NORM, StageProgram, Types, Writers

Once = Callable[[object, Callable[[], StageProgram]], StageProgram]
Written = dict[tuple[int, str], StageProgram]


def write_updates(
    writers: Writers,
    gradients: Mapping[int, Mapping[str, Sequence[str]]],
    types: Sequence[Types],
    once: Once,
) -> Written:
    """Return by stage and kind the programs of optimizers; `once` has those of stages that are alike written once.

    `gradients` has by stage its parameters with their copies; what all are multiplied with is one over stages.
    """
    written: Written = {}
    keys = {
        stage: tuple((n, types[stage][n].shape, *copies) for n, copies in mine.items())
        for stage, mine in gradients.items()
    }
    reduced: dict[int, Types] = {}
    if writers.has_factor and len(gradients) > 1:
        for s, mine in gradients.items():
            written[s, "NORM"] = once(("NORM", *keys[s]), lambda m=mine, t=types[s]: writers.norm(m, t))
        norms = {s: written[s, "NORM"].program.types for s in gradients}
        clip = written[0, "CLIP"] = writers.clip([of[NORM] for of in norms.values()], types[0])
        reduced = {s: {**of, FACTOR: clip.program.types[FACTOR]} for s, of in norms.items()}
    for s, mine in gradients.items():
        found = reduced.get(s)
        written[s, "OPT"] = once(("OPT", *keys[s]), lambda m=mine, t=types[s], r=found: writers.optimizer(m, t, r))
    return written


def clip_transfers(
    written: Mapping[tuple[int, str], StageProgram],
    first: Mesh,
    meshes: Sequence[Mesh],
    where: Topology | Placement | None,
) -> Iterator[Transfer]:
    """Yield what goes for a norm over stages: sums of squares to stage 0, and its factor back; `first` is its mesh."""
    for k, s in enumerate(s for s, kind in written if kind == "NORM"):
        ends = ("norm", s, 0, NORM, f"{NORM}.{k}"), ("clip", 0, s, FACTOR, FACTOR)
        for kind, a, b, name, called in ends:
            t = written[a, kind.upper()].program.types[name]
            source, target = (rebased_type(t, {first: meshes[at]}) for at in (a, b))
            yield Transfer(kind, (a, name), (b, called), (source, target), where)

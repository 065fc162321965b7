"""Refuses what a strategy asks for and a job does not do: values to keep that do not move, and gradients not joined."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase

from shardplan.core import validation
from shardplan.core.layout import Layout
from shardplan.core.tensor import TensorType
from shardplan.errors import LayoutError
from shardplan.strategy.partition.microbatch import Microbatch
from shardplan.strategy.partition.programs import StageProgram
from shardplan.strategy.partition.recomputed_layers import model_name
from shardplan.strategy.partition.settle import Settled
from shardplan.strategy.strategy import Strategy


def check_kept(
    strategy: Strategy, micro: Microbatch, settled: Settled, held: Mapping[str, Layout], state: Mapping[str, TensorType]
) -> None:
    """Refuse to keep what the forward pass does not move, or the backward pass does not read as it was moved."""
    blocks = {block.path: block for block in micro.block.every()}
    moved = [
        key
        for key, source in settled.sources.items()
        if not (made := settled.type_of(key)).layout.partial  # else none could be saved as it was made
        and any(t != made for t in settled.kept.get(source, ()))
    ]
    sources = (settled.sources[key].name for key in moved)
    names = {model_name(name) for name in sources}
    dims = {dim for path, name in moved for of in blocks[path].dims[name] for dim in of}
    for said in validation.names("keep", strategy.keep):
        if said not in dims and not any(fnmatchcase(name, said) for name in names):
            later = [line for line in micro.block.lines if line.number >= micro.count]
            read = {o for line in later for o in line.operands}
            dealt = [n for n, layout in held.items() if n in read and layout.dims != state[n].layout.dims]
            raise LayoutError(
                f"keep={said!r}: the forward pass moves nothing of that name which the backward pass reads so; "
                f"legal are dims, and parameters that are gathered in both: {', '.join(dealt) or 'none'}"
            )


def check_bucket(strategy: Strategy, written: Iterable[StageProgram]) -> None:
    """Refuse a bucket in which nothing is moved together, and without which nothing would be."""
    if strategy.bucket is None:
        return
    if not any(one.joins or any(m.together for m in one.movements) for one in written):
        raise LayoutError(
            f"strategy: bucket={strategy.bucket:g} joins nothing: no gradients that are reduced, or parameters "
            "that are gathered, go together within so many bytes in less time; legal is another, or None"
        )

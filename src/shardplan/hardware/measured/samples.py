"""Samples: collectives that somebody measured, one a row, and how a file of rows is read.

A file has one JSON object a line: `id`, `library` (`nccl-2.29.2`), `op` as nccl-tests names it (`all_reduce`,
`all_gather`, `reduce_scatter`, `alltoall`, `sendrecv`, `broadcast`, `reduce`), `gpu` (`H100`), `nodes`, `gpus_per_node`
that took part, `nics_per_node` and `nic_gbps` (0 where one node ran), `bytes` as nccl-tests counts, the larger buffer,
and `seconds`; also `groups`, the communicators that ran at once, `in_place`, `system` and `source`. What else stands
there is left alone.
"""

from __future__ import annotations

from hashlib import sha256
from typing import Annotated

import msgspec

from shardplan.core.decoding import decode_json
from shardplan.errors import ParseError

Count = Annotated[int, msgspec.Meta(ge=1)]
_TRAINING = {"model", "strategy", "measured"}  # fields of a row of the other form, of a training step


class Sample(msgspec.Struct, frozen=True, kw_only=True, rename={"nbytes": "bytes"}):
    """One measured point of a collective; counts are of a node, or of one communicator."""

    id: str
    library: str  # with its version after a dash, where that is known
    op: str  # as nccl-tests names it
    gpu: str
    nodes: Count
    gpus_per_node: Count  # members of one group
    nics_per_node: Annotated[int, msgspec.Meta(ge=0)] = 0
    nic_gbps: Annotated[float, msgspec.Meta(ge=0)] = 0.0  # Gbit/s of one NIC
    groups: Count = 1  # communicators that ran at once
    nbytes: Count  # as nccl-tests counts: the larger buffer of a member
    seconds: Annotated[float, msgspec.Meta(gt=0)]
    in_place: bool = False
    system: str = ""  # the cluster, whose latency and delivered NIC rate may be known
    source: str = ""

    def __post_init__(self) -> None:
        if self.nodes > 1 and not (self.nics_per_node and self.nic_gbps):
            raise ValueError("several nodes need nics_per_node and nic_gbps above 0")

    @property
    def library_name(self) -> str:
        """The library without its version."""
        return self.library.partition("-")[0]

    @property
    def node_scope(self) -> str:
        """Whether it ran on `one` node or on `several`."""
        return "one" if self.nodes == 1 else "several"

    @property
    def members(self) -> int:
        """Members of one group."""
        return self.nodes * self.gpus_per_node

    @property
    def curve(self) -> tuple[str, ...]:
        """What names the curve that this is a point of."""
        return self.gpu, self.op, self.node_scope, self.system

    @property
    def held_out(self) -> bool:
        """Whether a fit leaves it out to be judged on: a third of the curves, by their hash."""
        return int(sha256("|".join(("shardplan", *self.curve)).encode()).hexdigest(), 16) % 3 == 0


def parse_rows(text: str, what: str = "the file") -> list[Sample]:
    """Read the text of a file of rows; raises `ParseError` with the number of the first line that is none.

    >>> line = '{"id": "x/1x8/all_reduce/1024", "library": "nccl-2.27", "op": "all_reduce", "gpu": "H100", '
    >>> line += '"nodes": 1, "gpus_per_node": 8, "bytes": 1024, "seconds": 2e-5}'
    >>> parse_rows(line)[0].nbytes
    1024
    """
    samples: list[Sample] = []
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        try:
            samples.append(decode_json(line, Sample))
        except ParseError as error:
            reason = _other_form(line, samples) or f"{error}; legal is a row of a measured collective, as one object"
            raise ParseError(f"{what}, line {number}: {reason}") from None
    if not samples:
        raise ParseError(f"{what} has no rows; legal is one JSON object a line")
    return samples


def _other_form(line: str, samples: list[Sample]) -> str:
    """What is wrong with a line that is a row of measured training; empty where it is none."""
    try:
        fields = decode_json(line, dict[str, msgspec.Raw])
    except ParseError:
        return ""
    if not _TRAINING & fields.keys():
        return ""
    if samples:
        return "a row of measured training after rows of measured collectives; a file holds one of the two forms"
    return "rows of measured training are not read yet; legal are rows of measured collectives"

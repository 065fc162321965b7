"""The logs of nccl-tests and rccl-tests as samples: what `all_reduce_perf` and its siblings print.

Of a log are read the test's name, the lines `#  Rank  0 Group  0 Pid ... on HOST device 0 [...] GPU`, the library's
version, and the rows of the table, out of place and in place. Columns differ between versions (older ones have no
group, no root, and `error` where newer ones have `#wrong`), and launchers put a rank before each line. A log may hold
several tests. What it does not say, such as the NICs of a node, is given beside it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from shardplan.errors import ParseError
from shardplan.hardware.measured.sample_setup import GPUS
from shardplan.hardware.measured.samples import Sample

_TEST = re.compile(r"\b([a-z_]*[a-z])_perf(?:_mpi)?\b")
_START = re.compile(r"# nThread\s+\d+")
_RANK = re.compile(
    r"#\s+Rank\s+\d+\s+(?:Group\s+(?P<group>\d+)\s+)?Pid\s+\d+\s+on\s+(?P<host>\S+)\s+device\s+\d+\s+"
    r"\[[^\]]*\]\s+(?P<gpu>\S.*?)\s*$"
)
_VERSION = re.compile(r"[NR]CCL version\s*:?\s*(?P<dotted>\d+(?:\.\d+)+)|nccl-library=(?P<code>\d{1,9})")
_TIMES = r"\s+(?P<{0}>\d+(?:\.\d*)?(?:e\+\d\d?)?|N/A)\s+\S+\s+\S+\s+\S+"
_ROW = re.compile(
    r"(?<!\S)(?P<size>\d{1,18})\s+\d+\s+[a-z]\w*(?:\s+[a-z]\w*)?(?:\s+-?\d+)?"
    + _TIMES.format("fresh")
    + _TIMES.format("in_place")
)
_CARDS = {"PCIE", "NVL"}  # of a GPU's name: cards without the links of the preset that the GPU stands for


@dataclass(frozen=True, slots=True)
class LogFacts:
    """What is said beside a log; None where the log is believed."""

    system: str = ""  # the cluster's name
    op: str | None = None
    gpu: str | None = None
    gpus_per_node: int | None = None  # where a host is not a node, such as a tray of an NVLink domain
    nics: tuple[int, float] = (0, 0.0)  # NICs of a node, and Gbit/s of each


@dataclass(frozen=True, slots=True)
class _Rank:
    """A rank as a log names it."""

    group: str
    host: str
    gpu: str


def parse_log(text: str, facts: LogFacts, what: str = "the log") -> list[Sample]:
    """Read the text of a log; raises `ParseError` where there is no table of times, or something is not said.

    Rows of 0 bytes, which small sizes of a gather are, say nothing and are left out.
    """
    op, version, ranks = facts.op or "", "", list[_Rank]()
    samples: list[Sample] = []
    for line in text.splitlines():
        if (found := _TEST.search(line)) and not facts.op:
            op = found[1]
        if found := _VERSION.search(line):
            version = "-" + (found["dotted"] or _version_text(int(found["code"])))
        if _START.search(line):
            ranks = []
        elif found := _RANK.search(line):
            ranks.append(_Rank(found["group"] or "0", found["host"], found["gpu"]))
        elif (found := _ROW.search(line)) and (size := int(found["size"])):
            if not op:
                raise ParseError(f"{what} does not name its test; say which it was, such as all_reduce")
            setup = _setup(ranks, facts, what)
            library = "rccl" if setup["gpu"].startswith("MI") else "nccl"
            at = f"{facts.system}/{setup['nodes']}x{setup['gpus_per_node']}/{op}/{size}"
            for in_place, time in ((False, found["fresh"]), (True, found["in_place"])):
                if time == "N/A" or not float(time):
                    continue
                samples.append(
                    Sample(
                        id=at + ("-in-place" if in_place else ""),
                        library=library + version,
                        op=op,
                        nbytes=size,
                        seconds=float(time) * 1e-6,
                        in_place=in_place,
                        system=facts.system,
                        source=what,
                        **setup,
                    )
                )
    if not samples:
        raise ParseError(f"{what} has no table of times; legal is the output of nccl-tests or rccl-tests")
    return samples


def _version_text(code: int) -> str:
    """A version of NCCL as it prints one, of its number: 22907 is 2.29.7."""
    return f"{code // 10000}.{code % 10000 // 100}.{code % 100}"


def _setup(ranks: list[_Rank], facts: LogFacts, what: str) -> dict[str, Any]:
    """The fields of a sample that ranks say: GPU, nodes, members of a node, groups on the same nodes, NICs."""
    if not ranks:
        raise ParseError(f"{what} has a table but no lines '#  Rank  0 ... on HOST device 0 [..] GPU' before it")
    hosts: dict[str, set[str]] = {}
    for rank in ranks:
        hosts.setdefault(rank.group, set()).add(rank.host)
    first = ranks[0].group
    members = sum(rank.group == first for rank in ranks)
    per_node = facts.gpus_per_node or members // len(hosts[first])
    nodes = members // per_node
    if nodes * per_node != members:
        raise ParseError(f"{what}: {members} ranks do not fill nodes of {per_node} GPUs")
    nics, gbps = facts.nics if nodes > 1 else (0, 0.0)
    if nodes > 1 and not (nics and gbps):
        raise ParseError(f"{what} ran on {nodes} nodes; say the NICs of a node and their Gbit/s, such as 8x400")
    return {
        "gpu": facts.gpu or _gpu(ranks[0].gpu),
        "nodes": nodes,
        "gpus_per_node": per_node,
        "groups": sum(where == hosts[first] for where in hosts.values()),
        "nics_per_node": nics,
        "nic_gbps": gbps,
    }


def _gpu(name: str) -> str:
    """The GPU of a name such as `NVIDIA A100-SXM4-80GB`; the name itself where it is none that is known."""
    words = re.split(r"[^A-Z0-9]+", name.upper())
    if _CARDS & set(words):
        return name
    return next((word for word in words if word in GPUS), name)

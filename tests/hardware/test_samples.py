"""Samples: rows are read and refused with their line, and what they ran on and did is said in our terms."""

import json
import re
from pathlib import Path

import msgspec
import numpy as np
import pytest

from shardplan.core.pattern import Groups, Messages
from shardplan.errors import ParseError, TopologyError
from shardplan.hardware import Topology
from shardplan.hardware.measured.sample_setup import (
    GPUS,
    pattern_of_sample,
    systems,
    topology_of_sample,
    unknown_systems,
)
from shardplan.hardware.measured.samples import Sample, parse_rows
from shardplan.hardware.prices.library import libraries

ROWS = Path(__file__).parents[1] / "data" / "collectives_sample.jsonl"
ROW = {
    "id": "mine/2x8/all_reduce/1024", "library": "nccl-2.29.2", "op": "all_reduce", "gpu": "H100", "nodes": 2,
    "gpus_per_node": 8, "nics_per_node": 8, "nic_gbps": 400, "bytes": 1024, "seconds": 2e-5,
}  # fmt: skip


def row(**changed: object) -> str:
    return json.dumps(ROW | changed)


def sample(**changed: object) -> Sample:
    return parse_rows(row(**changed))[0]


def test_published_rows_are_read() -> None:
    found = parse_rows(ROWS.read_text())
    for line, one in zip(ROWS.read_text().splitlines(), found, strict=True):
        fields = json.loads(line)
        assert {key: fields[key] for key in msgspec.to_builtins(one)} == msgspec.to_builtins(one)
    assert {one.library_name for one in found} == {"nccl", "rccl"}
    assert {one.source for one in found} and all(one.source for one in found)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "rows, line 2: Input data was truncated; legal is a row of a measured collective, as one object"),
        ("[1]", "rows, line 2: Expected `object`, got `array`; legal is a row of a measured collective, as one object"),
        (row(nodes=0), "rows, line 2: Expected `int` >= 1 - at `$.nodes`; legal is a row of a measured collective, as "
         "one object"),
        (row(bytes=1.5), "rows, line 2: Expected `int`, got `float` - at `$.bytes`; legal is a row of a measured "
         "collective, as one object"),
        (row(seconds=0), "rows, line 2: Expected `float` > 0.0 - at `$.seconds`; legal is a row of a measured "
         "collective, as one object"),
        (json.dumps({"id": "a"}), "rows, line 2: Object missing required field `library`; legal is a row of a measured "
         "collective, as one object"),
        (row(nics_per_node=0), "rows, line 2: several nodes need nics_per_node and nic_gbps above 0; legal is a row of "
         "a measured collective, as one object"),
        ('{"id": "a", "model": {}, "strategy": {}}', "rows, line 2: a row of measured training after rows of measured "
         "collectives; a file holds one of the two forms"),
    ],
)  # fmt: skip
def test_a_malformed_row_is_one_line(line: str, message: str) -> None:
    with pytest.raises(ParseError) as error:
        parse_rows(f"{row()}\n{line}\n", "rows")
    assert str(error.value) == message


def test_a_file_of_the_other_form_and_an_empty_one() -> None:
    with pytest.raises(ParseError) as error:
        parse_rows('{"id": "a", "measured": {}}\n' + row(), "rows")
    message = "rows, line 1: rows of measured training are not read yet; legal are rows of measured collectives"
    assert str(error.value) == message
    with pytest.raises(ParseError, match=r"^rows has no rows; legal is one JSON object a line$"):
        parse_rows("\n \n", "rows")


def test_a_topology_has_the_rows_nodes_and_nics() -> None:
    preset = Topology.load("dgx-h100")
    found = topology_of_sample(sample(nodes=3, nics_per_node=32, nic_gbps=100, gpus_per_node=2))
    node = found.levels[0]
    assert (found.describe(), found.library, found.device) == ("node=3 x gpu=8", "nccl", preset.device)
    assert (node.uplinks, node.bandwidth) == (32, 12.5e9)
    assert (node.latency, node.efficiency) == systems()["default"]
    assert found.levels[1:] == preset.levels[1:]
    # One node: its NICs are of no account, and the row may name none.
    alone = topology_of_sample(sample(nodes=1, nics_per_node=0, nic_gbps=0))
    assert alone.levels == (Topology.load("dgx-h100", nodes=1)).levels


def test_a_rack_is_a_node() -> None:
    found = topology_of_sample(sample(gpu="GB200", gpus_per_node=72, nics_per_node=72))
    assert found.describe() == "node=2 x gpu=72"


def test_a_known_system_has_its_own_fabric(monkeypatch: pytest.MonkeyPatch) -> None:
    name = next(name for name in systems() if name != "default")
    monkeypatch.setitem(systems(), name, systems()["default"]._replace(latency=7e-5, efficiency=0.5))
    node = topology_of_sample(sample(system=name)).levels[0]
    assert (node.latency, node.bandwidth * node.efficiency) == (7e-5, 25e9)
    found = [sample(system=name), sample(system="b"), sample(system="a"), sample(system="b")]
    alone = sample(system="c", nodes=1, nics_per_node=0, nic_gbps=0)
    assert unknown_systems([*found, alone]) == ["a", "b"]


def test_every_system_of_the_table_is_positive() -> None:
    assert "default" in systems()
    assert all(0 < s.latency < 1e-3 and 0 < s.efficiency <= 1 for s in systems().values())


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"gpu": "H1000"}, f"GPU 'H1000' is unknown; legal: {', '.join(GPUS)}"),
        ({"library": "mine-1"}, f"library 'mine' is unknown; legal: {', '.join(libraries())}"),
        ({"gpus_per_node": 9}, "9 GPUs of a node take part; a node of 'dgx-h100' has 8"),
        ({"gpus_per_node": 4, "groups": 3}, "12 GPUs of a node take part; a node of 'dgx-h100' has 8"),
        ({"op": "hypercube"}, "op 'hypercube' is unknown; legal: all_reduce, all_gather, reduce_scatter, alltoall, "
         "broadcast, reduce, sendrecv"),
        ({"nodes": 1, "gpus_per_node": 1}, "a group of one GPU sends nothing"),
    ],
)  # fmt: skip
def test_what_cannot_be_priced_says_why(changed: dict[str, object], message: str) -> None:
    one = sample(**changed)
    with pytest.raises(TopologyError, match=f"^{re.escape(message)}$"):
        pattern_of_sample(one, topology_of_sample(one))


@pytest.mark.parametrize(
    ("op", "kind", "held"),
    [
        ("all_reduce", "all_reduce", 1 << 20),
        ("all_gather", "all_gather", (1 << 20) / 8),
        ("reduce_scatter", "reduce_scatter", 1 << 20),
        ("alltoall", "all_to_all", 1 << 20),
        ("broadcast", "broadcast", 1 << 20),
        ("reduce", "reduce", 1 << 20),
    ],
)
def test_bytes_are_those_before_the_op(op: str, kind: str, held: float) -> None:
    """Two groups of four GPUs on each of two nodes: the first four of a node, and the next four."""
    one = sample(op=op, groups=2, gpus_per_node=4, bytes=1 << 20)
    pattern = pattern_of_sample(one, topology_of_sample(one))
    assert isinstance(pattern, Groups) and pattern.kind == kind
    assert pattern.members.tolist() == [[0, 1, 2, 3, 8, 9, 10, 11], [4, 5, 6, 7, 12, 13, 14, 15]]
    assert pattern.nbytes.tolist() == [held, held]


def test_sendrecv_is_a_ring_of_messages() -> None:
    one = sample(op="sendrecv", gpus_per_node=2, bytes=100)
    pattern = pattern_of_sample(one, topology_of_sample(one))
    assert isinstance(pattern, Messages)
    assert pattern.sender.tolist() == [0, 1, 8, 9] and pattern.receiver.tolist() == [1, 8, 9, 0]
    assert np.array_equal(pattern.nbytes, [100.0] * 4)

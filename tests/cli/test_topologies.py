"""The command topologies: the list, one as a file, and one line for a mistake."""

import json

import pytest

import shardplan as sp
from cli.command_call import call
from shardplan.hardware import presets


def test_the_list_names_each_with_its_library(capsys):
    status, out, err = call(capsys, "topologies")
    assert (status, err) == (0, "")
    head, *lines = out.splitlines()
    assert head.split() == ["topology", "levels", "library", "prices", "fitted", "on"]
    assert [line.split()[0] for line in lines] == list(presets())
    row = next(line for line in lines if line.startswith("tpu-v6e "))
    assert row.split(maxsplit=3) == ["tpu-v6e", "chip=256", "xla", "nothing measured"]
    found = json.loads(call(capsys, "topologies", "--json")[1])["topologies"]
    assert [one["name"] for one in found] == list(presets())
    h100 = next(one for one in found if one["name"] == "dgx-h100")
    assert (h100["levels"], h100["size"], h100["library"]) == ("node=4 x gpu=8", 32, "nccl")
    assert h100["measured"] and sp.Topology.parse(h100["text"]) == sp.Topology.load("dgx-h100")


def test_one_is_printed_as_a_file(capsys):
    status, out, err = call(capsys, "topologies", "p5-efa", "--nodes", "2")
    assert (status, err) == (0, "")
    assert sp.Topology.parse(out) == sp.Topology.load("p5-efa", nodes=2)
    (one,) = json.loads(call(capsys, "topologies", "nominal", "--json")[1])["topologies"]
    assert one["name"] == "nominal"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [(("dgx-h1",), "topology 'dgx-h1' is no preset"), (("--nodes", "2"), "--nodes sets a size of a topology")],
)
def test_mistakes(capsys, arguments, message):
    status, out, err = call(capsys, "topologies", *arguments)
    assert (status, out) == (2, "")
    assert message in err and err.count("\n") == 1

"""Mutated files: what is made of a seed, and that every outcome is told from the others."""

import json
import os
import random
import signal
import sys
from pathlib import Path

import pytest
from benchmarks.reader_faults import batch
from benchmarks.reader_mutations import (
    FOLDER,
    WRONG,
    Mutant,
    bomb,
    header_structure,
    json_structure,
    mutations,
    replaced,
    toml_structure,
    xml_structure,
)

from benchmarks import reader_faults
from shardplan.errors import ParseError

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the bounds are Linux's")


def read(path: Path) -> object:
    """Do what a file says."""
    match path.read_text():
        case "line":
            raise ParseError("one line")
        case "pointing":
            raise ParseError("one line", "text", 2)
        case "two lines":
            raise ParseError("one line\nand another")
        case "raw":
            raise KeyError("raw")
        case "long":
            while True:
                pass
        case "big":
            return bytearray(2 * reader_faults.MOST_BYTES)
        case "died":
            os.kill(os.getpid(), signal.SIGTERM)
        case _:
            return None


def test_every_outcome_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What ends its child is the last of the batch; the next one goes on behind it."""
    monkeypatch.setattr(reader_faults, "MOST_SECONDS", 0)
    monkeypatch.setattr(reader_faults, "MOST_BYTES", 2**29)
    words = ("answer", "line", "pointing", "two lines", "raw", "big", "long", "line", "died", "line")
    wanted = ["answer", "line", "line", "raw", "raw", "big", "long", "line", "died", "line"]
    path = tmp_path / "file"
    path.write_text("seed")
    left = [Mutant(0, "", word.encode()) for word in words]
    outcomes: list[str] = []
    while left:
        found = batch(read, left, [path])
        assert path.read_text() == "seed"
        outcomes += [one.outcome for one in found]
        left = left[len(found) :]
    assert outcomes == wanted


def test_every_value_is_replaced_by_every_wrong_one() -> None:
    value = {"a": [1, {"b": "x"}], "c": None}
    found = [new for _, new in replaced(value)]
    places, left_out = 6, 5
    assert len(found) == places * len(WRONG) + left_out
    assert {"a": [1, {"b": {}}], "c": None} in found and {"a": [{"b": "x"}], "c": None} in found
    assert value == {"a": [1, {"b": "x"}], "c": None}


def test_mutants_are_seeded_and_as_many_as_asked() -> None:
    files = [json.dumps({"a": [1, 2], "b": "text"}).encode(), b"no json, but words", b""]
    found = [list(mutations(random.Random(3), files, 200, True)) for _ in range(2)]
    assert found[0] == found[1] and len(found[0]) == 200
    assert {m.seed for m in found[0]} == {0, 1, 2}


def test_a_folder_takes_the_place_of_a_file_and_gives_it_back(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("seed")
    found = batch(Path.read_text, [Mutant(0, "", FOLDER), Mutant(0, "", b"other")], [path])
    assert [one.outcome for one in found] == ["raw", "answer"] and "IsADirectoryError" in found[0].message
    assert path.read_text() == "seed"


def test_structures_know_their_formats() -> None:
    """Each replaces values of its own format, says so, and has nothing to say of others."""
    made = {
        json_structure: b'{"a": 1}',
        toml_structure: b"a = 1",
        xml_structure: b'<a b="1"><c/></a>',
        header_structure: (8).to_bytes(8, "little") + b'{"a": 1}',
    }
    for structure, data in made.items():
        found = dict(structure(data))
        assert len(found) > 20 and data not in found.values()
        assert not list(structure(b"\0" if structure is not header_structure else data[:9]))
    assert dict(json_structure(b'{"a": 1}'))["['a'] = -1"] == b'{"a": -1}'
    assert dict(toml_structure(b"a = 1"))["['a'] = -1"] == b'"a" = -1\n'
    assert dict(xml_structure(b'<a b="1"/>'))["a b='-1'"] == b'<a b="-1"></a>'
    assert len(bomb()) < 2**22


@pytest.mark.parametrize("name", ["plan", "NCCL XML", "topology TOML", "kineto", "HLO", "hostfile", "search journal"])
def test_files_are_read_or_refused(name: str) -> None:
    """A few here; `benchmarks.reader_faults` reads thousands, of every reader."""
    row = reader_faults.tried(reader_faults.READERS[name], 60, 1, name)
    assert row["files"] == 60 == row["counts"]["answer"] + row["counts"]["line"], row["examples"]

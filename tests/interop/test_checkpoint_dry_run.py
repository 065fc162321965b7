"""What `reshard` says before it writes anything: every file, and what of the logical tensors it needs."""

import json
import math
import random
import re
from pathlib import Path

import numpy as np
import pytest

from interop.checkpoint_cases import CONFIG, plain
from movement import weights_cases as cases
from shardplan.cli import run_command
from shardplan.interop.checkpoint import reshard
from shardplan.interop.checkpoint.compare import logical_place
from shardplan.interop.checkpoint.jobs import needed_parts
from shardplan.movement.weights.table import WeightTable
from shardplan.movement.weights.weights import Weights, make_weights

HF = Weights.load("hf-llama", CONFIG)


def test_every_file_says_what_it_needs(tmp_path: Path) -> None:
    to = Weights.load("megatron-llama", CONFIG, divisible=4, tensor=2, pipeline=3)
    done = reshard(plain(tmp_path / "hf"), tmp_path / "out", from_=HF, to=to, dry_run=True)
    assert not (tmp_path / "out").exists()
    assert done.files[1].parts == (
        "embed[v=48:90]", "norm1[l=0]", "q[l=0, g r d=16:32]", "k[l=0, g d=8:16]", "v_[l=0, g d=8:16]",
        "o[l=0, g r d=16:32]", "norm2[l=0]", "gate[l=0, f=24:48]", "up[l=0, f=24:48]", "down[l=0, f=24:48]",
    )  # fmt: skip
    assert [f.parts[0] for f in done.files[2:]] == ["norm1[l=1]", "norm1[l=1]", "head[v=0:48]", "head[v=48:90]"]
    assert done.nbytes == sum(to.nbytes(r) for r in to.devices) == sum(f.nbytes for f in done.files)
    assert done.least_memory_bytes <= done.memory_bytes <= 1_000_000_000 and done.read_bytes == 0
    assert all(tuple(p.partition("[")[0] for p in f.parts) == f.tensors for f in done.files)


def test_files_of_a_plain_checkpoint_name_their_layers(tmp_path: Path) -> None:
    done = reshard(plain(tmp_path / "hf"), tmp_path / "out", from_=HF, to=HF, dry_run=True, largest_file=10_000)
    names = [p.name for p in (tmp_path).iterdir()]
    assert names == ["hf"] and len(done.files) > 3
    layers = [p for f in done.files for p in f.parts if p.startswith("down")]
    assert layers == ["down[l=0]", "down[l=1]", "down[l=2]"]


def test_the_command_says_it_and_writes_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, out = str(plain(tmp_path / "hf")), str(tmp_path / "out")
    arguments = ["reshard", source, out, "--from", "hf-llama", "--to", "vllm-llama,tensor=2", "--dry-run"]
    assert run_command(arguments) == 0
    said = capsys.readouterr().out
    assert re.search(
        r"  model-00002-of-00002.safetensors  \S+ kB\n      needs embed\[v=64:90\], head\[v=64:90\], norm, ", said
    )
    assert re.search(r"parameters  \S+ kB\n", said) and re.search(r"memory      \S+ MB at most; the least ", said)
    assert said.endswith("nothing was written\n")
    assert run_command([*arguments, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["files"][1]["parts"][0] == "embed[v=64:90]" and found["files"][1]["tensors"][0] == "embed"
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("kind", ["llama", "mixtral", "deepseek", "llama4", "mamba2"])
def test_what_is_needed_is_where_elements_stand(kind: str) -> None:
    """Of every table, what some parameters need holds the logical places of their elements."""
    rng = random.Random(5)
    c = cases.made(kind, rng)
    arrays = cases.checkpoint(kind, c, np.random.default_rng(0))
    for name in cases.TABLES[kind]:
        w, _ = cases.side(kind, name, c, arrays, rng, 0)
        rank = rng.choice(w.devices)
        legal = w.parameters(rank)
        for number in rng.sample(range(len(legal)), min(3, len(legal))):
            size = math.prod(legal[number][1])
            place = logical_place(w, rank, number, rng.randrange(size)) if size else None
            if place is None:
                continue
            text = needed_parts(w, rank, [number])[place[0]]
            for dim in w.tensors[place[0]].dims:
                said = next((t for t in text.rstrip("]").partition("[")[2].split(", ")
                             if t.startswith(f"{' '.join(dim.atoms)}=")), None)  # fmt: skip
                if said is None or "..." in said:
                    continue
                index = dict(place[1])
                at = 0
                for atom in dim.atoms:
                    at = at * w.sizing[atom] + index[atom]
                spans = [s.split(":") for s in said.partition("=")[2].split("+")]
                assert any(int(s[0]) <= at < int(s[-1]) + (len(s) == 1) for s in spans), (name, text, place)


def test_names_that_a_rank_has_in_several_runs_say_their_own_layers() -> None:
    data = {
        "mesh": ["stage"], "degrees": {"stage": 2}, "atoms": {"l": "8", "n": "2"}, "holes": {"l": "l@stage.rows"},
        "parameters": [{"name": "{l}.q", "is": "q = n"}], "of": {"tensors": {"q": "l, n"}},
    }  # fmt: skip
    table = [[0, 1, 4, 5], [2, 3, 6, 7]]
    w = make_weights(WeightTable.of(data, "a table"), {}, {"stage": 2, "rows": table}, None, "f32")
    for rank, layers in enumerate(table):
        assert w.names(rank) == [f"{layer}.q" for layer in layers]
        assert [needed_parts(w, rank, [k])["q"] for k in range(4)] == [f"q[l={layer}]" for layer in layers]

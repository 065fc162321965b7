"""Folders of torch.distributed.checkpoint whose tensors are sharded, saved and loaded by torch in two processes."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from interop.checkpoint_cases import CONFIG, plain, read, same_tensors, served, whole
from interop.test_checkpoint_pickled import same_as_torch
from movement import weights_frameworks as frameworks
from movement.weights_more import torch_dist
from shardplan.errors import LayoutError
from shardplan.interop.checkpoint import diff, reshard
from shardplan.interop.checkpoint.boxes import held_boxes, whole_of
from shardplan.interop.checkpoint.sources import open_checkpoint
from shardplan.movement.weights.weights import Weights

pytest.importorskip("torch.distributed.checkpoint")
CHILD = Path(__file__).parent / "checkpoint_dcp_child.py"
HF = Weights.load("hf-llama", CONFIG)
LEAST = "14 MB"


def in_two(tmp_path: Path, kind: str, folder: Path) -> None:
    """Run the child in two processes; what it says where it fails."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "OMP_NUM_THREADS": "1"}
    store = tmp_path / f"store-{kind}-{folder.name}"
    every = [
        subprocess.Popen([sys.executable, str(CHILD), str(r), str(store), kind, str(folder)], env=environment,
                         stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        for r in range(2)
    ]  # fmt: skip
    try:
        said = [p.communicate(timeout=120)[0] for p in every]
    finally:
        for p in every:
            p.kill()
    assert [p.returncode for p in every] == [0, 0], said


def same(found: list[dict[str, np.ndarray]], want: Any) -> None:
    for f, w in zip(found, want, strict=True):
        assert set(f) == set(w)
        assert all(f[n].tobytes() == w[n].tobytes() and f[n].shape == w[n].shape for n in w)


def test_what_torch_saved_in_two_processes_is_read(tmp_path: Path) -> None:
    in_two(tmp_path, "save", tmp_path / "dcp")
    same_as_torch(tmp_path / "dcp")
    to = Weights.load("vllm-llama", CONFIG, tensor=2)
    reshard(tmp_path / "dcp", tmp_path / "vllm", from_=HF, to=to, memory_limit=LEAST)
    same(read(tmp_path / "vllm"), served(CONFIG, whole(), tensor=2).values())
    # a side of several devices says the same: such a folder has whole tensors
    sides = Weights.load("fsdp2-llama", CONFIG, data=2, tensor=2)
    reshard(tmp_path / "dcp", tmp_path / "again", from_=sides, to=HF, memory_limit=LEAST)
    same(read(tmp_path / "again"), [whole()])
    assert diff(tmp_path / "dcp", tmp_path / "vllm", weights=sides).equal
    assert diff(tmp_path / "vllm", tmp_path / "dcp", other=sides).equal


@pytest.mark.parametrize("degrees", [{"data": 2, "tensor": 2}, {"data": 3, "replica": 2}])
def test_what_is_written_for_several_devices_torch_loads_in_two(tmp_path: Path, degrees: dict[str, Any]) -> None:
    source = plain(tmp_path / "hf")
    to = Weights.load("fsdp2-llama", CONFIG, **degrees)
    done = reshard(source, tmp_path / "dcp", from_=HF, to=to, form="distributed", memory_limit=LEAST)
    assert {f.name for f in done.files} == {f"__{k}_0.distcp" for k in range(len(to.devices))}
    in_two(tmp_path, "load", tmp_path / "dcp")
    with open_checkpoint(tmp_path / "dcp") as held:  # every device's own shard is a chunk
        tensor: Any = held.first_tensors["model.embed_tokens.weight"]
        cuts = frameworks.fsdp2(
            CONFIG, whole(), data=degrees["data"], tensor=degrees.get("tensor", 1), replica=degrees.get("replica", 1)
        )
        shapes = sorted({c["model.embed_tokens.weight"].shape for c in cuts.values()})
        assert sorted({c.sizes for c in tensor.chunks}) == shapes
    reshard(tmp_path / "dcp", tmp_path / "back", to=HF, memory_limit=LEAST)  # the folder says how it is stored
    same(read(tmp_path / "back"), [whole()])
    assert diff(source, tmp_path / "dcp", weights=HF).equal


def test_several_processes_write_the_folder_of_one(tmp_path: Path) -> None:
    source = plain(tmp_path / "hf")
    to = Weights.load("fsdp2-llama", CONFIG, data=2, tensor=2)
    reshard(source, tmp_path / "one", from_=HF, to=to, form="distributed")
    code = (
        "import sys; from interop.checkpoint_cases import CONFIG; from shardplan.interop.checkpoint import reshard\n"
        "from shardplan.movement.weights.weights import Weights as W\n"
        "reshard(sys.argv[1], sys.argv[2], from_=W.load('hf-llama', CONFIG), form='distributed',\n"
        "        to=W.load('fsdp2-llama', CONFIG, data=2, tensor=2), timeout=60)\n"
    )
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "PMI_SIZE": "2"}
    command = [sys.executable, "-c", code, str(source), str(tmp_path / "two")]
    every = [subprocess.Popen(command, env=environment | {"PMI_RANK": str(r)}) for r in range(2)]
    assert [p.wait(120) for p in every] == [0, 0]
    one, two = ({p.name: p.read_bytes() for p in (tmp_path / f).iterdir()} for f in ("one", "two"))
    assert one == two


def test_small_files_and_windows_are_the_same_tensors(tmp_path: Path) -> None:
    source = plain(tmp_path / "hf")
    to = Weights.load("torchtitan-llama-split", CONFIG, data=2, tensor=2)
    done = reshard(source, tmp_path / "dcp", from_=HF, to=to, form="distributed", largest_file=9_000)
    assert len(done.files) > 8
    assert diff(tmp_path / "dcp", source, other=HF).equal


def test_a_torch_dist_folder_of_a_trainer_is_read_and_written(tmp_path: Path) -> None:
    in_two(tmp_path, "megatron", tmp_path / "dist")
    same_as_torch(tmp_path / "dist")
    side = Weights.load("megatron-dist-llama", CONFIG, tensor=2, divisible=4)
    with pytest.raises(LayoutError, match=r"additional \(optimizer.state.exp_avg."):
        reshard(tmp_path / "dist", tmp_path / "hf", from_=side, to=HF)
    reshard(tmp_path / "dist", tmp_path / "hf", from_=side, to=HF, ignore=["optimizer.*"], memory_limit=LEAST)
    same(read(tmp_path / "hf"), [whole()])
    reshard(tmp_path / "hf", tmp_path / "again", from_=HF, to=side, form="distributed", memory_limit=LEAST)
    same_tensors(tmp_path / "again", torch_dist(CONFIG, whole(), tensor=2, divisible=4)[0])
    assert diff(tmp_path / "dist", tmp_path / "again", weights=side, ignore=["optimizer.*"]).equal


def test_what_is_no_box_of_a_whole_tensor_is_refused_and_named(tmp_path: Path) -> None:
    to = Weights.load("vllm-llama", CONFIG, tensor=2)
    with pytest.raises(LayoutError) as error:
        reshard(plain(tmp_path / "hf"), tmp_path / "out", from_=HF, to=to, form="distributed")
    assert str(error.value) == (
        "form = 'distributed' for vllm-llama: model.layers.0.self_attn.qkv_proj.weight of rank 0 is no box of "
        "model.layers.0.self_attn.qkv_proj.weight; legal are devices and ranks, or a table whose cuts are the last "
        "thing done to a dim"
    )
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("degrees", [{"tensor": 8}, {"tensor": 2, "pipeline": 3}])
def test_boxes_cover_every_whole_tensor_once(degrees: dict[str, Any], tmp_path: Path) -> None:
    """Vocabularies of which a device holds padding alone, and layers of stages under their global numbers."""
    table = tmp_path / "boxes.toml"
    table.write_text(
        'version = 1\nname = "boxes"\nfamily = "llama.family.toml"\nmesh = ["pipeline", "tensor"]\n'
        '[degrees]\npipeline = 1\ntensor = 1\n[atoms]\npad = "ceil(v / 256) * 256 - v"\n'
        '[holes]\nl = "l@pipeline.stages"\n'
        '[[parameters]]\nname = "embed"\nis = "(embed: v | 0: pad)@tensor, e"\n'
        '[[parameters]]\nname = "up.{l}"\nis = "up = f@tensor.ceil, e"\n'
        '[[parameters]]\nname = "down.{l.local}"\nis = "down = e, f@tensor.ceil"\n'.replace("{l.local}", "{l}")
    )
    w = Weights.load(table, CONFIG, **degrees)
    whole_shapes = {name: shape for name, shape, _ in whole_of(w).parameters(0)}
    count = {name: np.zeros(shape, dtype=np.int64) for name, shape in whole_shapes.items()}
    for boxes in held_boxes(w).values():
        for b in boxes:
            assert b.whole == whole_shapes[b.name]
            count[b.name][tuple(slice(o, o + n) for o, n in zip(b.offsets, b.sizes, strict=True))] += 1
    assert all((c == 1).all() for c in count.values())

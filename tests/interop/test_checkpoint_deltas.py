"""Deltas: only what changed is written, applied to its base alone, and never by half."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from interop.checkpoint_cases import plain, read
from interop.test_checkpoint_towers import parts
from shardplan.errors import LayoutError, ParseError, ShardplanError
from shardplan.interop import safetensors
from shardplan.interop.checkpoint import apply_delta, apply_live_delta, reshard
from shardplan.interop.checkpoint.manifest import CheckpointManifest

WORD = "vllm-llama,tensor=2"
CHANGED = "model.layers.1.mlp.down_proj.weight", "model.layers.2.self_attn.k_proj.weight"
JOINED = "model.layers.1.mlp.down_proj.weight", "model.layers.2.self_attn.qkv_proj.weight"


def trained(folder: Path, to: Path, names: tuple[str, ...] = CHANGED) -> Path:
    """A checkpoint in which some tensors have one other element."""
    shutil.copytree(folder, to)
    with safetensors.open(folder / "model.safetensors") as file:
        named = {n: file.read(n).copy() for n in file.names}
    for name in names:
        named[name].flat[-1] += 1  # of the second rank alone where it is cut
    safetensors.write(to / "model.safetensors", named, {"format": "pt"})
    return to


@pytest.fixture
def folders(tmp_path: Path) -> Path:
    """A base and a newer checkpoint, the base as a server has it, what it would have of the newer, and the delta."""
    newer = trained(plain(tmp_path / "hf"), tmp_path / "newer")
    for source, to in (("hf", "v1"), ("newer", "v2")):
        reshard(tmp_path / source, tmp_path / to, from_="hf-llama", to=WORD, form="parts")
    reshard(newer, tmp_path / "delta", from_="hf-llama", to=WORD, form="parts", changed_since=tmp_path / "v1")
    return tmp_path


def test_only_what_changed_is_written_and_applied_it_is_the_newer(folders: Path) -> None:
    (held,) = read(folders / "delta")  # both lie on the second rank
    assert set(held) == set(JOINED)
    before = parts(folders / "v1")
    done = apply_delta(folders / "delta", folders / "v1", folders / "applied")
    assert parts(folders / "applied") == parts(folders / "v2") != before == parts(folders / "v1")
    assert (done.changed, done.tensors) == (2, sum(map(len, before)))
    assert (folders / "applied/config.json").read_bytes() == (folders / "v1/config.json").read_bytes()
    manifest = CheckpointManifest.of(folders / "applied")
    assert manifest is not None and manifest.complete
    manifest.verify()
    first = "model-rank-0-part-0.safetensors"  # of a rank without a change: the same file
    assert os.stat(folders / "applied" / first).st_ino == os.stat(folders / "v1" / first).st_ino
    reshard(folders / "applied", folders / "back", to="hf-llama")
    assert parts(folders / "back") == parts(folders / "newer")


def test_nothing_changed_is_a_delta_of_no_tensor(folders: Path) -> None:
    source = folders / "hf"
    done = reshard(source, folders / "none", from_="hf-llama", to=WORD, form="parts", changed_since=folders / "v1")
    assert not done.files
    assert apply_delta(folders / "none", folders / "v1", folders / "applied").changed == 0
    assert parts(folders / "applied") == parts(folders / "v1")


def test_another_base_is_refused_with_the_first_tensor_that_differs(folders: Path) -> None:
    with pytest.raises(LayoutError, match=r"weight of place 1 .* and is of the delta's own version"):
        apply_delta(folders / "delta", folders / "v2", folders / "applied")
    other = trained(folders / "hf", folders / "other", ("model.norm.weight",))
    reshard(other, folders / "v3", from_="hf-llama", to=WORD, form="parts")
    with pytest.raises(LayoutError, match=r"model.norm.weight of place 0 is f32\[32\] .*legal is the base"):
        apply_delta(folders / "delta", folders / "v3", folders / "applied")
    reshard(folders / "hf", folders / "four", from_="hf-llama", to="vllm-llama,tensor=4", form="parts")
    with pytest.raises((LayoutError, ParseError)):
        apply_delta(folders / "delta", folders / "four", folders / "applied")
    assert not list(folders.glob("applied*"))


@pytest.mark.parametrize("where", ["tensor", "hash", "version", "cut", "gone", "unfinished", "index"])
def test_a_delta_that_was_altered_is_refused(where: str, folders: Path) -> None:
    (path,) = (folders / "delta").glob("*.safetensors")
    said = folders / "delta/delta.json"
    data = json.loads(said.read_text())
    if where in ("tensor", "cut"):
        raw = bytearray(path.read_bytes())
        raw[-1] ^= 1
        path.write_bytes(raw if where == "tensor" else raw[:-8])
    elif where in ("gone", "unfinished"):
        manifest = folders / "delta/shardplan.json"
        path.unlink() if where == "gone" else manifest.write_text(manifest.read_text().replace("true", "false"))
    elif where == "index":
        said.unlink()
    else:
        entry = data["places"][1][JOINED[0]]
        entry[1] = entry[1][:-1] + ("0" if entry[1][-1] != "0" else "1")
        if where == "version":
            data["version"] = "0" * 64
        said.write_text(json.dumps(data))
    with pytest.raises(ShardplanError) as caught:
        apply_delta(folders / "delta", folders / "v1", folders / "applied")
    assert "\n" not in str(caught.value)
    assert not list(folders.glob("applied*"))


def test_a_destination_that_is_there_and_a_base_of_other_shapes_are_refused(folders: Path) -> None:
    (folders / "applied").mkdir()
    with pytest.raises(LayoutError, match="legal is a new folder"):
        apply_delta(folders / "delta", folders / "v1", folders / "applied")
    with pytest.raises(LayoutError, match=r"missing|places|devices"):
        reshard(folders / "newer", folders / "x", from_="hf-llama", to=WORD, form="parts", changed_since=folders / "hf")
    with pytest.raises(LayoutError, match="the forms of safetensors"):
        reshard(folders / "newer", folders / "y", from_="hf-llama", to="fsdp2-llama", form="distributed",
                changed_since=folders / "v1")  # fmt: skip


def test_a_resumed_delta_of_another_base_is_another_request(folders: Path) -> None:
    other = trained(folders / "hf", folders / "other", ("model.layers.0.mlp.down_proj.weight", CHANGED[1]))
    reshard(other, folders / "v3", from_="hf-llama", to=WORD, form="parts")
    with pytest.raises(LayoutError, match="of another request"):
        reshard(folders / "newer", folders / "delta", from_="hf-llama", to=WORD, form="parts",
                changed_since=folders / "v3")  # fmt: skip


@pytest.mark.parametrize("torch_side", [False, True])
def test_tensors_in_memory_become_the_newer_or_stay(torch_side: bool, folders: Path) -> None:
    torch = pytest.importorskip("torch") if torch_side else None
    old, new = read(folders / "v1")[1], read(folders / "v2")[1]

    def live() -> dict[str, object]:
        return {n: torch.from_numpy(a.copy()) if torch else a.copy() for n, a in old.items()}

    own = live()
    done = apply_live_delta(folders / "delta", own, place=1)
    assert done.changed == 2
    assert all(np.array_equal(np.asarray(own[n]), new[n]) for n in new)
    with pytest.raises(LayoutError, match="of the delta's own version"):  # a second time
        apply_live_delta(folders / "delta", own, place=1)
    torn = live()
    torn["model.norm.weight"][0] += 1  # pyright: ignore
    kept = {n: np.asarray(x).copy() for n, x in torn.items()}
    with pytest.raises(LayoutError, match=r"model\.norm\.weight"):
        apply_live_delta(folders / "delta", torn, place=1)
    assert all(np.array_equal(np.asarray(torn[n]), kept[n]) for n in kept)
    assert apply_live_delta(folders / "delta", dict(read(folders / "v1")[0])).changed == 0


def test_killed_at_any_point_nothing_is_half_applied(folders: Path) -> None:
    """SIGKILL at one write, link or rename of a call after another: the folder is not there, or whole."""
    script = """
import os, signal, sys
from shardplan.interop.checkpoint import apply_delta
left = int(sys.argv[4])
def count(event, arguments):
    global left
    if event in ("open", "os.rename", "os.link", "os.mkdir", "shutil.copyfile") and "applied" in str(arguments):
        left -= 1
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
sys.addaudithook(count)
apply_delta(*sys.argv[1:4])
"""
    want, base, statuses = parts(folders / "v2"), parts(folders / "v1"), []
    for point in (1, 2, 3, 5, 7, 9, 11, 13, 15, 17, 1000):
        command = [sys.executable, "-c", script, *(str(folders / n) for n in ("delta", "v1", "applied")), str(point)]
        status = subprocess.run(command, timeout=120, check=False).returncode
        statuses.append(status)
        assert parts(folders / "v1") == base
        assert status in (0, -signal.SIGKILL)
        if (folders / "applied").exists():
            assert parts(folders / "applied") == want
            shutil.rmtree(folders / "applied")
    assert statuses.count(-signal.SIGKILL) >= 8 and statuses[-1] == 0
    assert not list(folders.glob("*.partial"))


def test_the_commands(folders: Path) -> None:
    head = [sys.executable, "-m", "shardplan"]
    config = ["--from", "hf-llama", "--to", WORD, "--form", "parts"]
    newer, delta = str(folders / "newer"), str(folders / "second")
    subprocess.run([*head, "convert", newer, delta, *config, "--changed-since", str(folders / "v1")], check=True)
    said = subprocess.run([*head, "apply", delta, str(folders / "v1"), str(folders / "applied"), "--json"],
                          check=True, capture_output=True, text=True)  # fmt: skip
    assert json.loads(said.stdout)["changed"] == 2
    assert parts(folders / "applied") == parts(folders / "v2")

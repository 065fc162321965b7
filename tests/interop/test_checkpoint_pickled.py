"""What a folder of torch.distributed.checkpoint pickles is read as data: payloads are refused, and nothing has run."""

from __future__ import annotations

import io
import os
import pickle
import pickletools
import tracemalloc
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from interop.checkpoint_cases import CONFIG, plain, read, whole
from shardplan.cli import run_command
from shardplan.errors import ParseError
from shardplan.interop.checkpoint import diff, reshard
from shardplan.interop.checkpoint.folders import ADMITTED, saved_tensors
from shardplan.interop.checkpoint.pickle_reader import read_pickle
from shardplan.interop.checkpoint.sources import open_checkpoint
from shardplan.movement.weights.weights import Weights

pytest.importorskip("torch.distributed.checkpoint")
HF = Weights.load("hf-llama", CONFIG)
Payload = Callable[[Path], bytes]


def text(value: str) -> bytes:
    return b"\x8c" + bytes([len(value)]) + value.encode()


def of(module: str, name: str) -> bytes:
    """The instructions that import a name."""
    return text(module) + text(name) + b"\x93"


def touch(mark: Path) -> bytes:
    return text(f"touch {mark}")


class Reduced:
    """Runs a command where it is loaded."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.mark}",)


def inside(mark: Path) -> bytes:
    """A pickle within a pickle, whose loads runs it."""
    return (
        b"\x80\x04" + of("pickle", "loads") + b"C" + bytes([len(raw := pickle.dumps(Reduced(mark)))]) + raw + b"\x85R."
    )


def deep(mark: Path) -> bytes:
    return b"\x80\x04" + b")" + b"\x85" * 200_000 + b"N\x86" + b"."


def doubled(mark: Path) -> bytes:
    """A tuple of itself twice, 100 deep, as the key of a dict: whoever hashes it never ends."""
    body = b"\x80\x04})\x94" + b"".join(b"h" + bytes([k]) + b"h" + bytes([k]) + b"\x86\x94" for k in range(100))
    return body + b"Ns."


PAYLOADS: dict[str, Payload] = {
    "__reduce__": lambda mark: pickle.dumps(Reduced(mark)),
    "__reduce__, protocol 0": lambda mark: pickle.dumps(Reduced(mark), protocol=0),
    "__reduce__, protocol 2": lambda mark: pickle.dumps(Reduced(mark), protocol=2),
    "within real metadata": lambda mark: pickle.dumps({"planner_data": [Reduced(mark)]}),
    "builtins.eval": lambda mark: b"\x80\x04" + of("builtins", "eval") + text(f"open({str(mark)!r}, 'w')") + b"\x85R.",
    "builtins.getattr": lambda mark: b"\x80\x04" + of("builtins", "getattr") + of("torch", "Size") + b"N\x86R.",
    "a dotted name": lambda mark: b"\x80\x04" + of("torch", "serialization.os.system") + touch(mark) + b"\x85R.",
    "a dotted name in lines": lambda mark: b"\x80\x02ctorch\nserialization.os.system\n" + b"X\x04\0\0\0true\x85R.",
    "an admitted module, another name": lambda mark: b"\x80\x04" + of("torch", "load") + touch(mark) + b"\x85R.",
    "an admitted name, another module": lambda mark: b"\x80\x04" + of("torch.storage", "Size") + b")R.",
    "a name that is no text": lambda mark: b"\x80\x04NN\x93.",
    "a module of a list": lambda mark: b"\x80\x04]" + text("x") + b"\x93.",
    "a pickle within a pickle": inside,
    "INST": lambda mark: b"\x80\x02(" + b"X\x04\0\0\0true" + b"ios\nsystem\n.",
    "OBJ": lambda mark: b"\x80\x04(" + of("torch", "Size") + b"o.",
    "EXT1": lambda mark: b"\x80\x04\x82\x01)R.",
    "EXT4": lambda mark: b"\x80\x04\x84\x01\0\0\0)R.",
    "a persistent id": lambda mark: b"\x80\x04" + text("storage") + b"Q.",
    "a persistent id in a line": lambda mark: b"\x80\x04Pstorage\n.",
    "BUILD of what is no instance": lambda mark: b"\x80\x04}" + text("__setstate__") + b"Ns}b.",
    "BUILD of a name": lambda mark: b"\x80\x04" + of("torch", "Size") + b"}" + text("__setstate__") + b"Nsb.",
    "NEWOBJ_EX": lambda mark: b"\x80\x04" + of("torch", "Size") + b")}\x92.",
    "a call of what is no name": lambda mark: b"\x80\x04" + text("os.system") + touch(mark) + b"\x85R.",
    "a call of a call": lambda mark: b"\x80\x04" + of("torch", "Size") + b")R)R.",
    "a memo beyond all memory": lambda mark: b"\x80\x04Nr\xff\xff\xff\x7f0N.",
    "a text beyond the file": lambda mark: b"\x80\x04\x8d" + (2**60).to_bytes(8, "little") + b"x.",
    "bytes beyond the file": lambda mark: b"\x80\x04\x8e" + (2**60).to_bytes(8, "little") + b"x.",
    "a text of 2 GB": lambda mark: b"\x80\x04X" + (2**31).to_bytes(4, "little") + b"x.",
    "an integer of 100,000 digits": lambda mark: b"\x80\x04I" + b"9" * 100_000 + b"\n.",
    "an integer of 100,000 bytes": lambda mark: b"\x80\x04\x8b\xa0\x86\x01\0" + b"\xff" * 100_000 + b".",
    "an integer of 255 bytes": lambda mark: b"\x80\x04\x8a\xff" + b"\x01" * 255 + b".",
    "lists beyond the file": lambda mark: b"\x80\x04(" + b"]" * 1_500_000 + b"t.",
    "a deep tuple": deep,
    "a tuple doubled 100 times": doubled,
    "a list in itself": lambda mark: b"\x80\x04]\x94h\0a.",
    "a name of 1 MB": lambda mark: b"\x80\x02c" + b"x" * 2**20 + b"\ny\n.",
    "a text that is none": lambda mark: b"\x80\x04\x8c\x02\xff\xfe.",
    "nothing on the stack": lambda mark: b"\x80\x04R.",
    "no end": lambda mark: b"\x80\x04NNN",
    "a mark that is not there": lambda mark: b"\x80\x04NNt.",
    "another protocol": lambda mark: b"\x80\x06N.",
    "nothing": lambda mark: b"",
}  # fmt: skip


def stored(folder: Path) -> Path:
    """A folder as torch saves one."""
    import torch
    import torch.distributed.checkpoint as dcp

    dcp.save({n: torch.from_numpy(a.copy()) for n, a in whole().items()}, checkpoint_id=folder)
    return folder


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return stored(tmp_path_factory.mktemp("torch") / "saved")


@pytest.mark.parametrize("kind", PAYLOADS)
def test_metadata_that_say_anything_else_are_refused_and_nothing_runs(kind: str, tmp_path: Path) -> None:
    mark = tmp_path / "ran"
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad" / ".metadata").write_bytes(PAYLOADS[kind](mark))
    tracemalloc.start()
    try:
        for work in (
            lambda: reshard(tmp_path / "bad", tmp_path / "out", from_=HF, to=HF),
            lambda: diff(tmp_path / "bad", tmp_path / "bad", weights=HF, other=HF),
        ):
            with pytest.raises(ParseError) as caught:
                work()
            said = str(caught.value)
            assert "\n" not in said and len(said) < 700 and said.startswith(str(tmp_path / "bad" / ".metadata")), said
            assert "; legal is " in said, said
        assert tracemalloc.get_traced_memory()[1] < 40e6
    finally:
        tracemalloc.stop()
    assert not mark.exists() and not (tmp_path / "out").exists()


@pytest.mark.parametrize("kind", [k for k in PAYLOADS if "persistent id" not in k])
def test_a_tensor_that_says_anything_else_is_refused_and_nothing_runs(kind: str, saved: Path, tmp_path: Path) -> None:
    """`data.pkl` within a chunk, in place of what torch.save says of it."""
    import torch

    mark, payload = tmp_path / "ran", PAYLOADS[kind](tmp_path / "ran")
    _, places = saved_tensors(saved)
    place = places["model.norm.weight", (0,)]
    raw = (saved / place.file).read_bytes()
    out = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(raw[place.offset : place.offset + place.length])) as old:
        with zipfile.ZipFile(out, "w") as new:
            for entry in old.infolist():
                new.writestr(entry.filename, payload if entry.filename.endswith("data.pkl") else old.read(entry))
    metadata = torch.distributed.checkpoint.FileSystemReader(saved).read_metadata()
    info = next(i for k, i in metadata.storage_data.items() if k.fqn == "model.norm.weight")
    info.offset, info.length, info.relative_path = 0, len(out.getvalue()), "bad.distcp"
    (tmp_path / "bad").mkdir()
    for file in saved.iterdir():
        (tmp_path / "bad" / file.name).write_bytes(file.read_bytes())
    (tmp_path / "bad" / "bad.distcp").write_bytes(out.getvalue())
    (tmp_path / "bad" / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(ParseError) as caught:
        open_checkpoint(tmp_path / "bad")
    assert "\n" not in str(caught.value) and "the chunk of 'model.norm.weight' at byte 0" in str(caught.value)
    assert not mark.exists()


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("a memo beyond all memory", "the pickle keeps its value 0 as 2147483647 at byte 8; legal is in order"),
        ("a persistent id", "the pickle refers to what lies beside it at byte 12; legal is what torch writes"),
        ("lists beyond the file", "the pickle has more values than its bytes allow at byte 376005; legal is one in 4"),
        ("EXT1", "the pickle has the instruction 0x82 at byte 3; legal is what torch writes"),
        ("INST", "the pickle has the instruction 0x69 at byte 13; legal is what torch writes"),
        ("BUILD of a name", "the pickle has a PickledName where a PickledCall must be at byte"),
        ("an integer of 255 bytes", "the pickle has an integer of 255 bytes at byte 4; legal is at most 8"),
        ("a text of 2 GB", "the pickle ends within 2147483648 bytes at byte 7; legal is a whole pickle"),
        ("another protocol", "the pickle is of protocol 6 at byte 2; legal is 2 to 5"),
    ],
)  # fmt: skip
def test_what_is_refused_is_said_and_where(kind: str, said: str, tmp_path: Path) -> None:
    with pytest.raises(ParseError) as caught:
        read_pickle(PAYLOADS[kind](tmp_path), ADMITTED)
    assert str(caught.value).startswith(said), caught.value


def test_the_commands_say_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "bad").mkdir()
    path = tmp_path / "bad" / ".metadata"
    path.write_bytes(PAYLOADS["__reduce__"](tmp_path / "ran"))
    for command in (
        ["reshard", tmp_path / "bad", tmp_path / "out", "--to", "hf-llama"],
        ["diff"] + 2 * [tmp_path / "bad"],
    ):
        assert run_command([str(a) for a in command]) == 2
        said = capsys.readouterr().err
        wanted = f"{path}: the pickle names posix.system at byte 29; legal is what torch writes there"
        assert said.count("\n") == 1 and wanted in said, said
    assert not (tmp_path / "ran").exists()


def test_exactly_the_names_that_torch_writes_are_admitted(saved: Path) -> None:
    """Compared with what pickletools finds in real metadata, and with that each of them taken away is missed."""
    raw = (saved / ".metadata").read_bytes()
    found: set[tuple[str, str]] = set()
    memo: list[Any] = []
    texts: list[Any] = []
    for op, value, _ in pickletools.genops(raw):
        if op.name == "STACK_GLOBAL":
            found.add((texts[-2], texts[-1]))
        elif "UNICODE" in op.name:
            texts.append(value)
        elif op.name == "MEMOIZE":
            memo.append(texts[-1] if texts else None)
        elif op.name in ("BINGET", "LONG_BINGET"):
            texts.append(memo[value])
    found &= ADMITTED
    assert ("torch", "Size") in found and len(found) > 6
    for name in found:
        with pytest.raises(ParseError, match=f"names {name[0]}.{name[1]} at byte"):
            read_pickle(raw, ADMITTED - {name})
    assert not {(m, n) for m, n in ADMITTED if m in ("builtins", "os", "posix", "copyreg", "functools", "operator")}


def test_metadata_are_what_torchs_own_reader_says(saved: Path) -> None:
    same_as_torch(saved)


def same_as_torch(folder: Path) -> None:
    """Compare with the reader of torch, which runs what a file says."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    want = dcp.FileSystemReader(folder).read_metadata()
    tensors, places = saved_tensors(folder)
    assert want.storage_data is not None
    state = {n: t for n, t in want.state_dict_metadata.items() if isinstance(t, TensorStorageMetadata)}
    assert {n: (f"torch.{t.dtype}", t.shape, t.chunks) for n, t in tensors.items()} == {
        n: (str(t.properties.dtype), tuple(t.size), tuple((tuple(c.offsets), tuple(c.sizes)) for c in t.chunks))
        for n, t in state.items()
    }
    assert {k: (p.file, p.offset, p.length) for k, p in places.items()} == {
        (k.fqn, tuple(k.offset or ())): (i.relative_path, i.offset, i.length) for k, i in want.storage_data.items()
    }


def test_every_dtype_nested_states_paths_and_asynchronous_folders_are_read(tmp_path: Path) -> None:
    import torch
    import torch.distributed.checkpoint as dcp

    base = torch.arange(24.0).reshape(4, 6)
    kinds = [
        "bool",
        "int8",
        "int64",
        "uint8",
        "float16",
        "bfloat16",
        "float32",
        "float64",
        "float8_e4m3fn",
        "float8_e5m2",
    ]
    state: dict[str, Any] = {k: base.to(getattr(torch, k)) for k in kinds}
    state |= {"n": {"p": torch.nn.Parameter(base + 1), "step": 3, "none": None}, "scalar": torch.tensor(2.5)}
    state |= {"complex": torch.view_as_complex(base.reshape(12, 2).clone()), "extra": io.BytesIO(b"state")}
    dcp.save(dict(state), checkpoint_id=tmp_path / "plain")
    dcp.async_save(dict(state), checkpoint_id=str(tmp_path / "async")).result()
    for folder in (tmp_path / "plain", tmp_path / "async"):
        same_as_torch(folder)
        with open_checkpoint(folder) as held:
            assert set(held.first_tensors) == {*kinds, "n.p", "scalar", "complex"}
            for name, tensor in held.first_tensors.items():
                want = state["n"]["p"].detach() if name == "n.p" else state[name]
                raw = want.reshape(-1).contiguous().view(torch.uint8).numpy().tobytes()
                out = bytearray(len(raw))
                tensor.read_into(memoryview(out), 0)
                assert bytes(out) == raw, name


def test_a_folder_is_read_without_torch(saved: Path, tmp_path: Path) -> None:
    import subprocess
    import sys

    code = (
        "import sys; sys.modules['torch'] = None\n"
        "from interop.checkpoint_cases import CONFIG; from shardplan.interop.checkpoint import reshard\n"
        "from shardplan.movement.weights.weights import Weights as W\n"
        "reshard(sys.argv[1], sys.argv[2], from_=W.load('hf-llama', CONFIG), to=W.load('hf-llama', CONFIG))\n"
    )
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    subprocess.run([sys.executable, "-c", code, saved, tmp_path / "out"], env=environment, check=True, timeout=120)
    (again,) = read(tmp_path / "out")
    assert all(again[n].tobytes() == a.tobytes() for n, a in whole().items())


def changed(saved: Path, folder: Path, change: Callable[[Any], None]) -> Path:
    """A copy of a folder with other metadata."""
    import torch.distributed.checkpoint as dcp

    folder.mkdir()
    for file in saved.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    metadata = dcp.FileSystemReader(saved).read_metadata()
    change(metadata)
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    return folder


def test_files_outside_the_folder_are_not_read(saved: Path, tmp_path: Path) -> None:
    for k, name in enumerate(
        ("../saved/__0_0.distcp", str(saved / "__0_0.distcp"), "x\0y", "", "absent", "../../pipe")
    ):

        def moved(metadata: Any, name: str = name) -> None:
            next(iter(metadata.storage_data.values())).relative_path = name

        folder = changed(saved, tmp_path / f"bad{k}", moved)
        with pytest.raises(ParseError, match=r"lies in '.*; legal "):
            open_checkpoint(folder)


def test_chunks_that_do_not_cover_a_tensor_once_are_refused(saved: Path, tmp_path: Path) -> None:
    import torch
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata as Chunk

    def beyond(metadata: Any) -> None:  # as many elements as the tensor has, and a row of them outside
        found = metadata.state_dict_metadata["model.embed_tokens.weight"]
        found.size = torch.Size((45, 64))

    with pytest.raises(ParseError, match=r"has chunks of 2880 elements that do not cover it once"):
        open_checkpoint(changed(saved, tmp_path / "beyond", beyond))

    def strange(metadata: Any) -> None:
        found = metadata.state_dict_metadata["model.embed_tokens.weight"]
        found.chunks = [Chunk(torch.Size((0, 0)), torch.Size((90, -32)))]

    with pytest.raises(ParseError, match=r"has a size or a place of -32; legal is what torch writes there"):
        open_checkpoint(changed(saved, tmp_path / "negative", strange))


def test_chunks_of_grids_are_compared_in_time_and_overlaps_are_seen() -> None:
    from shardplan.interop.checkpoint.distributed import DistributedChunk, DistributedTensor

    def grid(rows: int, columns: int) -> list[Any]:
        return [DistributedChunk((2 * r, 3 * c), (2, 3), Path("x"), 0) for r in range(rows) for c in range(columns)]

    for rows, columns in ((1, 20_000), (20_000, 1), (64, 64)):
        DistributedTensor("w", (2 * rows, 3 * columns), "f32", grid(rows, columns))
    twice = grid(64, 64)
    twice[70] = DistributedChunk(twice[71].offsets, (2, 3), Path("x"), 0)
    with pytest.raises(ParseError, match="do not cover it once"):
        DistributedTensor("w", (128, 192), "f32", twice)
    many = [DistributedChunk((0, 0), (1, 1), Path("x"), 0)] * 20_000
    with pytest.raises(ParseError, match=r"20000 chunks, 199990000 pairs of which may overlap; legal are 100000000"):
        DistributedTensor("w", (100, 200), "f32", many)


def test_what_is_written_is_read_by_torch_and_by_us_alike(tmp_path: Path) -> None:
    to = Weights.load("fsdp2-llama", CONFIG, data=3)
    reshard(plain(tmp_path / "hf"), tmp_path / "dcp", from_=HF, to=to, form="distributed")
    same_as_torch(tmp_path / "dcp")
    assert diff(tmp_path / "hf", tmp_path / "dcp", weights=HF).equal

"""A synthetic checkpoint through four storages on disk, beside a copy that also checksums, syncs and reads again.

`python -m benchmarks.weights_disk [--full] [--kills 40]` writes a Qwen3-MoE checkpoint of random bf16 bits in
transformers' storage (8 GB with `--full`, 1.2 GB without), whose experts are so narrow that a rank's rows of the second
weight are 48 bytes. `checkpoint.reshard` then writes it as Megatron-Core stores it (TP2, PP2, ETP2), that as vLLM does
(TP4), and that as transformers again, each in a process of its own within 512 MB. The last must equal the first byte
for byte. Each step's seconds stand beside those of a copy of the same bytes, which is one loop: read, SHA-256, write,
sync, drop from the cache, read again and compare; so do processor
seconds, of all threads. Where the source has recorded checksums, both verify them first.
Then a smaller one goes the same way with SIGKILL at random points until `--kills` runs were killed, and must end in the
same bytes.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from benchmarks.common import ROOT, arguments, record, table, write

from shardplan.interop.checkpoint import reshard
from shardplan.interop.checkpoint.manifest import MANIFEST, CheckpointManifest
from shardplan.interop.checkpoint.targets import target_files
from shardplan.interop.safetensors import read_header
from shardplan.movement.weights.weights import Weights

LIMIT = 512_000_000
BLOCK = 4 * 2**20
SMALL, FULL = 7, 50  # layers


def config(layers: int) -> dict[str, Any]:
    """A Qwen3-MoE whose experts are narrow: 96 / 4 columns of 2 bytes are 48 bytes."""
    return {
        "hidden_size": 2048, "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 64, "vocab_size": 32000,
        "num_hidden_layers": layers, "moe_intermediate_size": 96, "num_experts": 128, "torch_dtype": "bfloat16",
        "tie_word_embeddings": False, "intermediate_size": 6144,
    }  # fmt: skip


def sides(layers: int) -> dict[str, Weights]:
    """How each step's folder is stored."""
    c = config(layers)
    stages = [layers // 2, layers - layers // 2]
    megatron: dict[str, Any] = {"tensor": 2, "pipeline": 2, "expert": 1, "etp": 2, "stages": stages}
    return {
        "transformers": Weights.load("hf-qwen3-moe", c),
        "megatron": Weights.load("megatron-qwen3-moe", c, **megatron),
        "vllm": Weights.load("vllm-qwen3-moe", c, tensor=4),
        "again": Weights.load("hf-qwen3-moe", c),
    }


def make(folder: Path, layers: int, largest: int) -> None:
    """Write random bits as transformers stores them, block by block."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config(layers)))
    rng = np.random.default_rng(layers)
    for file in target_files(sides(layers)["transformers"], "plain", largest):
        with (folder / file.name).open("wb") as out:
            out.write(file.header(folder))
            left = file.nbytes
            while left:
                part = min(left, BLOCK)
                out.write(rng.integers(0, 2**63, -(-part // 8), dtype=np.int64).tobytes()[:part])
                left -= part


def copied(source: Path, into: Path) -> None:
    """The baseline: every file copied with a checksum, synced, read again and compared."""
    recorded = CheckpointManifest.of(source)
    if recorded is not None:
        recorded.verify()
    buffer = memoryview(bytearray(BLOCK))
    for path in sorted(source.rglob("*.safetensors")):
        to = into / path.relative_to(source)
        to.parent.mkdir(parents=True, exist_ok=True)
        found = hashlib.sha256()
        with path.open("rb", buffering=0) as a, to.open("wb", buffering=0) as b:
            while count := a.readinto(buffer):
                found.update(buffer[:count])
                b.write(buffer[:count])
            os.fsync(b.fileno())
            os.posix_fadvise(b.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        again = hashlib.sha256()
        with to.open("rb", buffering=0) as b:
            while count := b.readinto(buffer):
                again.update(buffer[:count])
        assert again.digest() == found.digest()


def child(kind: str, source: Path, into: Path, largest: int, texts: list[str]) -> None:
    """Be one process: print seconds, and the peak of resident memory above that of the interpreter with its imports."""
    sides = [Weights.parse(Path(t).read_text()) for t in texts]
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    begun, spent = time.perf_counter(), time.process_time()
    if kind == "copy":
        copied(source, into)
    else:
        reshard(source, into, memory_limit=LIMIT, from_=sides[0], to=sides[1], largest_file=largest)
    found = {"seconds": time.perf_counter() - begun, "processor": time.process_time() - spent}
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    print(json.dumps(found | {"megabytes": (peak - before) * 1024 / 1e6}))


def started(kind: str, source: Path, into: Path, largest: int, texts: list[Path]) -> subprocess.Popen[str]:
    """Start a child."""
    given = map(str, (kind, source, into, largest, *texts))
    command = [sys.executable, "-m", "benchmarks.weights_disk", "--child", *given]
    environment = os.environ | {"PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}"}
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)


def done(kind: str, source: Path, into: Path, largest: int, texts: list[Path]) -> dict[str, float]:
    """Run a child to its end; what it printed."""
    process = started(kind, source, into, largest, texts)
    out, _ = process.communicate()
    if process.returncode:
        raise SystemExit(f"{kind} of {source.name} failed")
    return json.loads(out)


def sums(folder: Path) -> dict[str, str]:
    """The checksum of every file of tensors."""
    found: dict[str, str] = {}
    for path in sorted(folder.rglob("*.safetensors")):
        with path.open("rb") as file:
            found[str(path.relative_to(folder))] = hashlib.file_digest(file, "sha256").hexdigest()
    return found


def texts_of(place: Path, layers: int) -> dict[str, Path]:
    """Each side's text in a file."""
    out: dict[str, Path] = {}
    for name, weights in sides(layers).items():
        out[name] = place / f"{name}.toml"
        out[name].write_text(str(weights))
    return out


def chain(place: Path, layers: int, largest: int) -> list[dict[str, Any]]:
    """The three steps, each beside a copy."""
    make(place / "transformers", layers, largest)
    want = sums(place / "transformers")
    texts = texts_of(place, layers)
    rows: list[dict[str, Any]] = []
    names = list(texts)
    for a, b in zip(names, names[1:], strict=False):
        peer = done("copy", place / a, place / "copy", largest, [])
        shutil.rmtree(place / "copy")
        ours = done("reshard", place / a, place / b, largest, [texts[a], texts[b]])
        size = sum(p.stat().st_size for p in (place / b).rglob("*.safetensors"))
        rows.append(
            {
                "load": round(os.getloadavg()[0], 2),  # of the last minute, this step's own process among it
                "step": f"{a} to {b}",
                "gigabytes": size / 1e9,
                "seconds": ours["seconds"],
                "copy seconds": peer["seconds"],
                "rate over copy": peer["seconds"] / ours["seconds"],
                "processor seconds": ours["processor"],
                "processor over copy": ours["processor"] / peer["processor"],
                "megabytes above the interpreter": ours["megabytes"],
            }
        )
        print(rows[-1], file=sys.stderr, flush=True)
        if a != "transformers":
            shutil.rmtree(place / a)
    assert sums(place / "again") == want, "the last checkpoint is not the first"
    return rows


def killed(place: Path, layers: int, largest: int, count: int) -> dict[str, Any]:
    """The same steps with SIGKILL at random points; the bytes at the end are those of runs that nobody killed."""
    rng = random.Random(0)
    texts = texts_of(place, layers)
    make(place / "transformers", layers, largest)
    want = sums(place / "transformers")
    names = list(texts)
    kills = finished = 0
    while kills < count:
        for a, b in zip(names, names[1:], strict=False):
            seconds = 6.0
            while (
                not (place / b / MANIFEST).is_file() or not json.loads((place / b / MANIFEST).read_text())["complete"]
            ):
                process = started("reshard", place / a, place / b, largest, [texts[a], texts[b]])
                begun = time.perf_counter()
                wait = rng.uniform(0.3, seconds) if kills < count else None
                try:
                    process.wait(wait)
                    assert process.returncode == 0
                    seconds = min(seconds, time.perf_counter() - begun)
                    finished += 1
                except subprocess.TimeoutExpired:
                    process.send_signal(signal.SIGKILL)
                    process.wait()
                    kills += 1
                for path in (place / b).rglob("*.safetensors"):  # no incomplete file under a final name
                    read_header(path)  # which compares it with the size
        assert sums(place / "again") == want
        assert not list(place.rglob("*.partial"))
        for name in names[1:]:
            shutil.rmtree(place / name)
    return {"kills": kills, "runs that ended": finished, "wrong": 0}


def main() -> None:
    parser = arguments("weights_disk", __doc__.splitlines()[0] if __doc__ else "", 1, of="repetitions")
    parser.add_argument("--full", action="store_true", help="8 GB")
    parser.add_argument("--kills", type=int, default=40)
    parser.add_argument("--place", type=Path, default=None, help="a folder on the disk to measure")
    parser.add_argument("--child", nargs="+", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        kind, source, into, largest, *texts = options.child
        child(kind, Path(source), Path(into), int(largest), texts)
        return
    layers = FULL if options.full else SMALL
    largest = 10**9 if options.full else 2 * 10**8
    with tempfile.TemporaryDirectory(dir=options.place) as folder:
        rows = chain(Path(folder), layers, largest)
    with tempfile.TemporaryDirectory(dir=options.place) as folder:
        kills = killed(Path(folder), 2, 10**8, options.kills)
    total = sum(r["copy seconds"] for r in rows) / sum(r["seconds"] for r in rows)
    shown = [k for k in rows[0] if k != "load"]
    print(table(shown, [[r[k] for k in shown] for r in rows], "reshard on disk beside a copy"))
    print(f"all steps: {total:.2f} of the copy's rate; {kills['kills']} kills")
    parameters = {"layers": layers, "largest file": largest, "limit": LIMIT, "kills": options.kills}
    write(
        options.out,
        record(parameters, {"steps": rows, "rate over copy": total, "byte-identical": True, "killed": kills}),
    )


if __name__ == "__main__":
    main()

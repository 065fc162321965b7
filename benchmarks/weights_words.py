"""Every ordered pair of frameworks' words, on disk: what is written is opened by a loader of the framework, and equal.

`python -m benchmarks.weights_words`, with transformers, safetensors and megatron-core beside torch (as of
`weights_loaders`). A tiny Llama and a tiny Qwen3-MoE of transformers are saved, converted to one framework's storage,
from there to another's, and that is opened: by `from_pretrained` of transformers, whose logits must be those of the
first model; by `dist_checkpointing.load_plain_tensors` of Megatron-Core; by torch.distributed.checkpoint (FSDP2,
torchtitan, dcp); or, of the parts of a server's `sharded_state`, by the library of safetensors that its loader calls.
Of the last three every tensor must be what the conversion straight from transformers gives, which `weights_loaders`
compares with the frameworks' models; and what comes back to transformers must have the first logits. No table is named.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Any

from benchmarks.common import arguments, record, table, write
from benchmarks.weights_models import logits, tiny_model

from shardplan.interop.checkpoint import reshard

WORDS = ("hf", "vllm,tp=2", "sglang,tp=2", "megatron,tp=2", "torchtitan", "fsdp2,dp=2", "dcp")
KINDS = ("llama", "qwen3_moe")
LACKS = {"qwen3_moe": ("torchtitan",)}  # for which no table ships


def parts(folder: Path) -> dict[str, Any]:
    """A server's parts, by the library of safetensors."""
    load = import_module("safetensors.torch").load_file
    paths = sorted(folder.glob("model-rank-*-part-*.safetensors"))
    return {f"{p.name.split('-part-')[0]} {n}": t for p in paths for n, t in load(p).items()}


def plain_tensors(folder: Path) -> dict[str, Any]:
    """A torch_dist folder, by Megatron-Core; the folder is the one that its tracker file names."""
    saved = import_module("megatron.core.dist_checkpointing")
    named = (folder / "latest_checkpointed_iteration.txt").read_text().strip()
    return {n: t for n, t in saved.load_plain_tensors(str(folder / named)).items() if hasattr(t, "shape")}


def chunks(folder: Path) -> dict[str, Any]:
    """A folder of torch.distributed.checkpoint, by torch."""
    torch, dcp = import_module("torch"), import_module("torch.distributed.checkpoint")
    reader = dcp.FileSystemReader(folder)
    meta = reader.read_metadata().state_dict_metadata
    state = {n: torch.empty(m.size, dtype=m.properties.dtype) for n, m in meta.items()}
    dcp.load(state, storage_reader=reader, no_dist=True)
    return state


LOADERS: dict[str, tuple[str, Callable[[Path], dict[str, Any]]]] = {
    "vllm": ("safetensors load_file, parts of sharded_state", parts),
    "sglang": ("safetensors load_file, parts of sharded_state", parts),
    "megatron": ("megatron-core load_plain_tensors", plain_tensors),
    "torchtitan": ("torch.distributed.checkpoint.load", chunks),
    "fsdp2": ("torch.distributed.checkpoint.load", chunks),
    "dcp": ("torch.distributed.checkpoint.load", chunks),
}


def judge(kind: str, place: Path) -> list[dict[str, Any]]:
    """A row for every ordered pair of words."""
    torch = import_module("torch")
    model = tiny_model(kind)
    model.save_pretrained(place / "saved")
    wanted = logits(model)
    words = [w for w in WORDS if w.partition(",")[0] not in LACKS.get(kind, ())]
    for word in words:
        reshard(place / "saved", place / word, to=word)
    rows: list[dict[str, Any]] = []
    for a in words:
        for b in words:
            to, name = place / f"{a} to {b}", b.partition(",")[0]
            reshard(place / a, to, to=b)
            if name == "hf":
                loader = "transformers from_pretrained"
                found = bool((logits(type(model).from_pretrained(to)) == wanted).all())
                tensors = len(model.state_dict())
            else:
                loader, load = LOADERS[name]
                got, straight = load(to), load(place / b)
                tensors = len(got)
                found = got.keys() == straight.keys() and all(torch.equal(t, straight[n]) for n, t in got.items())
                reshard(to, place / f"{to.name} back", to="hf")
                again = type(model).from_pretrained(place / f"{to.name} back")
                found = found and bool((logits(again) == wanted).all())
            rows.append({"model": kind, "from": a, "to": b, "loader": loader, "tensors": tensors, "equal": found})
    return rows


def page_table(found: dict[str, Any]) -> str:
    """Return the table of a result as `docs/weights.md` has it: a row for what was read."""
    said: dict[tuple[str, str], list[bool]] = {}
    for row in found["rows"]:
        said.setdefault((row["from"], row["to"]), []).append(row["equal"])
    lines = [f"| from \\ to | {' | '.join(f'`{w}`' for w in WORDS)} |", "|---" * (len(WORDS) + 1) + "|"]
    for a in WORDS:
        cells = [f"{sum(said[a, b])} of {len(said[a, b])}" for b in WORDS]
        lines.append(f"| `{a}` | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Judge every pair, and write the result."""
    given = arguments("weights_words", "Every pair of frameworks' words.", len(KINDS)).parse_args()
    rows: list[dict[str, Any]] = []
    store = Path(tempfile.mkdtemp()) / "store"  # Megatron-Core asks for a group, of one rank here
    import_module("torch.distributed").init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
    for kind in KINDS:
        with tempfile.TemporaryDirectory() as folder:
            rows += judge(kind, Path(folder))
    import_module("torch.distributed").destroy_process_group()
    shutil.rmtree(store.parent)
    print(table(list(rows[0]), [[str(x) for x in r.values()] for r in rows]))
    installed = {p: version(p) for p in ("torch", "transformers", "megatron-core", "safetensors")}
    found = {"pairs": len(rows), "equal": sum(r["equal"] for r in rows), "rows": rows}
    write(given.out, record({"installed": installed}, found))


if __name__ == "__main__":
    main()

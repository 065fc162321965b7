"""Tables of models that no shipped table knows, derived by `shardplan derive` from transformers' own classes.

`python -m benchmarks.weights_derived`, with transformers beside torch. Of each class a table is derived without a
config; it is compared with `from_pretrained` at sizes that no trial had. A model of random weights at those sizes is
then converted by the derived tables to what the class holds in memory, and back, and must be the same bytes.
"""

from __future__ import annotations

import tempfile
from importlib import import_module
from pathlib import Path
from typing import Any

from benchmarks.common import arguments, record, table, write

from shardplan.errors import LayoutError, ParseError
from shardplan.interop.checkpoint import diff, reshard
from shardplan.interop.derivation import derive_class_table
from shardplan.interop.derivation.model_class import ModelClass
from shardplan.movement.weights.weights import Weights

CLASSES = (
    "BertModel", "RobertaForMaskedLM", "DistilBertModel", "OPTForCausalLM", "GPTNeoXForCausalLM", "BloomForCausalLM",
    "GPTJForCausalLM", "ViTModel", "T5ForConditionalGeneration", "WhisperModel", "MptForCausalLM",
    "XGLMForCausalLM", "CodeGenForCausalLM", "ElectraModel", "LlamaForCausalLM", "MixtralForCausalLM",
    "FalconForCausalLM", "CLIPModel",
)  # fmt: skip
COLUMNS = ("class", "checkpoint", "parameters", "elements", "seconds", "found")


def judge(name: str, place: Path) -> dict[str, Any]:
    """Derive one class; convert a checkpoint of its own there and back."""
    row: dict[str, Any] = {"class": name}
    try:
        found = derive_class_table(name)
    except (LayoutError, ParseError) as error:
        return row | {"found": f"refused: {str(error).splitlines()[0][:200]}"}
    row |= {
        "checkpoint": found.disk.name,
        "parameters": len(found.memory.parameters),
        "elements": found.elements,
        "seconds": round(found.seconds, 1),
    }
    one = ModelClass.find(name)
    one.model(one.config({})).save_pretrained(place / "saved")
    (place / "disk.toml").write_text(found.disk.toml())
    (place / "memory.toml").write_text(found.memory.toml())
    config = one.config({})
    disk, memory = (Weights.load(place / f"{x}.toml", config, dtype="f32") for x in ("disk", "memory"))
    reshard(place / "saved", place / "memory", from_=disk, to=memory)
    reshard(place / "memory", place / "back", from_=memory, to=disk)
    equal = diff(place / "saved", place / "back", weights=disk, other=disk).equal
    return row | {"found": "equal" if equal else "differs"}


def main() -> None:
    """Judge every class, and write the result."""
    given = arguments("weights_derived", "Tables derived of model classes.", len(CLASSES)).parse_args()
    rows: list[dict[str, Any]] = []
    for name in CLASSES:
        with tempfile.TemporaryDirectory() as folder:
            rows.append(judge(name, Path(folder)))
        print(rows[-1], flush=True)
    print(table(COLUMNS, [[str(r.get(c, ""))[:40] for c in COLUMNS] for r in rows]))
    equal = sum(r["found"] == "equal" for r in rows)
    version = import_module("transformers").__version__
    write(given.out, record({"transformers": version}, {"classes": len(rows), "equal": equal, "rows": rows}))


if __name__ == "__main__":
    main()

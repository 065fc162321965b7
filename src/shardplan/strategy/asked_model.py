"""`AskedModel`: what a text names, a preset with changes or a Hugging Face config, as what `Model.load` takes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from shardplan.errors import ParseError, excerpt, line
from shardplan.movement.weights.configs import model_config
from shardplan.strategy.model import Model, presets
from shardplan.strategy.model_config import is_config, read_config


@dataclass(frozen=True, slots=True)
class AskedModel:
    """A model that was asked for: a preset or a family, and its fields; `notes` say what of it is otherwise."""

    title: str
    name: str
    fields: Mapping[str, Any]
    notes: tuple[str, ...] = ()

    def load(self, **more: Any) -> Model:
        """Build it, with more fields of `Model.load`, which win."""
        return Model.load(self.name, **{**self.fields, **more})


def parse_model(text: str, seq: int | None = None) -> AskedModel:
    """Return the model that a text names: a preset or a family, or the path of a config.json or of its folder.

    Changes follow with commas between, `llama3-70b,seq=4096,layers=40`; `seq` is one more.

    Raises `ShardplanError` for a type of model that no builder writes, `ParseError` for a text or file that is none.

    >>> parse_model("llama3-70b,seq=4096,layers=40").fields
    {'seq': 4096, 'layers': 40}
    """
    first, *words = (part.strip() for part in text.split(","))
    changes: dict[str, Any] = {} if seq is None else {"seq": seq}
    for word in words:
        name, equals, value = word.partition("=")
        if not equals or name in changes:
            raise ParseError(f"model {excerpt(text)}: {excerpt(word)}; legal is a preset, then field=value, each once")
        changes[name] = _value(value)
    if first in presets() or not is_config(first):
        return AskedModel(first, first, changes)
    asked = read_config(model_config(first), line(first))
    fields = {**asked.fields, **changes}
    said = () if "seq" in changes else (f"seq={fields['seq']}: a config says how long sequences may be; --seq sets it",)
    return AskedModel(asked.title, asked.family, fields, (*asked.notes, *said))


def _value(text: str) -> int | float | bool | str:
    """A field's value: a whole number, a number, true or false, else the text."""
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text

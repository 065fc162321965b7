"""A model's config as one mapping, whichever way it says the same.

Of a model that also sees it is the text model's. Rotary embeddings are said in two ways, `rope_theta` beside
`rope_scaling`, and both in `rope_parameters`: here they are `rope_theta`, and `rope_scaling` as one text.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shardplan.errors import ParseError, excerpt, line

_OUTER = {"tie_word_embeddings"}  # of which the whole model's has the last word: the head is its own
PLAIN = "default"  # rotary embeddings that nothing scales


def model_config(config: Mapping[str, Any] | str | Path) -> Mapping[str, Any]:
    """Return a config, given as a mapping or as the path of config.json or its folder, with that of its text model.

    Raises `ParseError`.

    >>> model_config({"rope_parameters": {"rope_theta": 1e6, "type": "linear", "factor": 8.0}})["rope_scaling"]
    'linear factor=8'
    """
    if isinstance(config, Mapping):
        inner = config.get("text_config")  # of models that also see
        found = (
            config
            if not isinstance(inner, Mapping)
            else {**config, **inner, **{k: config[k] for k in _OUTER & config.keys()}}
        )
        return {**found, **_rotary(found)}
    path = Path(config)
    path = path / "config.json" if path.is_dir() else path
    try:
        data = json.loads(path.read_text(encoding="utf-8"))  # which takes the Infinity that transformers writes
    except (OSError, ValueError, RecursionError) as error:
        raise ParseError(f"{line(path)}: {line(error)}; legal is a model's config.json") from None
    if not isinstance(data, dict):
        raise ParseError(f"{line(path)}: {excerpt(data)}; legal is a model's config.json, an object")
    return model_config(data)


def _rotary(config: Mapping[str, Any]) -> dict[str, Any]:
    """The base of rotary embeddings, and how they are scaled, as one text; nothing where a config says neither."""
    if isinstance(config.get("rope_scaling"), str) or not {"rope_theta", "rope_scaling", "rope_parameters"} & {*config}:
        return {}
    said = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(said, Mapping):
        return {"rope_scaling": excerpt(said)}
    base = config.get("rope_theta")
    kind = said.get("rope_type") or said.get("type") or PLAIN
    more = {k: v for k, v in said.items() if k not in ("rope_theta", "rope_type", "type") and v is not None}
    if kind == PLAIN and not any(isinstance(v, Mapping) for v in more.values()):  # of kinds of layers, each its own
        more = {}
    text = " ".join(
        [str(kind), *(f"{k}={json.dumps(_normalize_numbers(more[k]), sort_keys=True)}" for k in sorted(more))]
    )
    return {"rope_theta": said.get("rope_theta") if base is None else base, "rope_scaling": text}


def _normalize_numbers(value: Any) -> Any:
    """A value with whole numbers as such: 8.0 is 8."""
    if isinstance(value, Mapping):
        return {str(k): _normalize_numbers(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_normalize_numbers(v) for v in value]
    whole = isinstance(value, float) and value.is_integer()
    return int(value) if whole else value if isinstance(value, str | int | float | bool) else str(value)

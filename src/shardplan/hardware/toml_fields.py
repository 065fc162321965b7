"""What the files of topologies and of library models share: keys that are known, quantities, strings."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from shardplan.errors import ParseError, TopologyError, near_text


def check_keys(where: str, data: dict[str, Any], legal: tuple[str, ...]) -> None:
    """Refuse a key that is not legal; raises `TopologyError`."""
    for key in data:
        if key not in legal:
            raise TopologyError(f"{where}: unknown key {key!r}{near_text(key, legal)}; legal: {', '.join(legal)}")


def parse_quantity(where: str, text: str, parser: Callable[[str], float]) -> float:
    """Return a quantity with its unit; raises `ParseError`, which says where it stands."""
    try:
        return parser(text)
    except ParseError as error:
        raise ParseError(f"{where}: {str(error).splitlines()[0]}", error.text, error.position) from error


def basic_string(text: str) -> str:
    """Return a string as TOML writes it."""
    # A JSON string is a TOML basic string once DEL is escaped.
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007F")

"""The fields of a plan file: what stands in each, and what is said where something else does.

A file is read by this schema before any of it is used, so that a malformed field is one line that names it.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal, get_type_hints

import msgspec
from msgspec import Meta

from shardplan.core.decoding import decode_json
from shardplan.errors import LONGEST, ParseError, line

FORMAT = 2  # of the file; another one is refused

Count = Annotated[int, Meta(ge=0, description="a whole number of at least 0")]
Counts = Annotated[tuple[Count, ...], Meta(description="a list of whole numbers of at least 0, one a device")]
Limit = Annotated[Annotated[int, Meta(ge=1)] | None, Meta(description="a whole number of bytes of at least 1, or null")]
Number = Annotated[float, Meta(ge=0, description="a number of at least 0")]
Numbers = Annotated[tuple[Number, ...], Meta(description="a list of numbers of at least 0, one a level")]
LeastSeconds = Annotated[Annotated[float, Meta(ge=0)] | None, Meta(description="a number of at least 0, or null")]
Text = Annotated[str, Meta(description="a text")]
TypeTexts = Annotated[tuple[str, ...], Meta(description="a list of texts such as 'f32[8@x] on x=2'")]
_Laid = Annotated[dict[Literal["topology", "placement"], str], Meta(min_length=1, max_length=1)]
WhereText = Annotated[
    _Laid | None, Meta(description="an object with the text of a 'topology' or a 'placement', or null")
]


class ClaimFields(msgspec.Struct, forbid_unknown_fields=True, frozen=True, kw_only=True):
    """The claims of a certificate as a file has them: types and where it runs as text, lists as tuples."""

    sources: TypeTexts
    destinations: TypeTexts
    where: WhereText
    memory_limit: Limit
    status: Text
    types: TypeTexts
    peak_bytes: Count
    bound_bytes: Count
    workspace_bytes: Count
    sent_bytes: Counts
    received_bytes: Counts
    lower_bound_bytes: Counts
    total_lower_bound_bytes: Count
    rounds: Count
    level_bytes: Numbers
    seconds: Number
    lower_bound_seconds: Number
    algorithm: Text = "auto"
    least_seconds: LeastSeconds = None


class PlanFields(msgspec.Struct, forbid_unknown_fields=True, frozen=True, kw_only=True):
    """A plan file: a program's text, and what is claimed of it."""

    format: Annotated[int, Meta(description=f"{FORMAT}")]
    program: Annotated[str, Meta(description="the text of a program")]
    certificate: Annotated[ClaimFields, Meta(description="an object with the claims")]
    seconds: Number


def read_fields(data: bytes) -> PlanFields:
    """Return the fields of a plan file; raises `ParseError` naming the field, what stands there and what is legal."""
    try:
        raw = decode_json(data)
    except ParseError as error:
        raise ParseError(f"it is no JSON: {error}") from None
    if not isinstance(raw, dict):
        raise ParseError(f"it is {_json(raw)}; legal is an object")
    if raw.get("format") != FORMAT:  # pyright: ignore[reportUnknownMemberType]
        raise ParseError(f"format {_json(raw.get('format'))}; this version reads format {FORMAT}")  # pyright: ignore[reportUnknownMemberType]
    try:
        fields = msgspec.convert(raw, PlanFields)
    except msgspec.ValidationError as error:
        raise ParseError(_reason(str(error), raw)) from None
    if fields.seconds != fields.certificate.seconds:
        raise ParseError(f"seconds is {fields.seconds}, but certificate.seconds {fields.certificate.seconds}")
    return fields


def _reason(message: str, raw: object) -> str:
    """Say of msgspec's message which field is wrong, what stands there, and what is legal."""
    path = re.search(r"`\$\.?([^`]*)`$", message)
    names = [] if path is None else re.findall(r"\w+", path[1])
    schema: Any = ClaimFields if names[:1] == ["certificate"] and len(names) > 1 else PlanFields
    if field := re.match(r"Object (?:missing required|contains unknown) field `([^`]*)`", message):
        struct, of = (ClaimFields, "certificate.") if names else (PlanFields, "")
        if "unknown" in field[0]:
            return f"unknown field {of}{line(field[1])}; legal there are {', '.join(struct.__struct_fields__)}"
        return f"{of}{field[1]} is missing; legal is {_legal(struct, field[1])}"
    value, here, whole = raw, "", ""
    for name in names:
        if isinstance(value, dict) and name in value:
            value, here = value[name], f"{here}.{name}".lstrip(".")  # pyright: ignore[reportUnknownVariableType]
        elif isinstance(value, list):
            value, here, whole = value[int(name)], f"{here}[{name}]", f" in {here}"  # pyright: ignore[reportUnknownVariableType]
    return f"{here} is {_json(value)}; legal{whole} is {_legal(schema, names[schema is ClaimFields])}"


def _legal(schema: type[msgspec.Struct], name: str) -> str:
    """What is legal in a field."""
    return get_type_hints(schema, include_extras=True)[name].__metadata__[-1].description


def _json(value: object) -> str:
    """Return a value as the file has it, cut where it is long."""
    text = msgspec.json.encode(value).decode()
    return text if len(text) <= LONGEST else text[: LONGEST - 3] + "..."

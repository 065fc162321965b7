"""Plan files by their schema: a malformed field is one line with the field, what stands there, and what is legal."""

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import shardplan as sp
from shardplan.errors import CertificateError, ParseError
from shardplan.plans.certificate import CLAIMS
from shardplan.plans.plan_fields import ClaimFields

PLAN = sp.redistribute("f32[8@(a,b)]", "f32[8]", mesh="a=2,b=2", topology="dgx-a100")
Edit = Callable[[dict[str, Any], dict[str, Any]], object]  # of the file, and of its certificate
MALFORMED: list[tuple[Edit, str]] = [
    (
        lambda f, c: c.update(memory_limit={}),
        "certificate.memory_limit is {}; legal is a whole number of bytes of at least 1, or null",
    ),
    (lambda f, c: c.update(lower_bound_seconds=[]), "certificate.lower_bound_seconds is []; legal is a number of at "
     "least 0"),
    (
        lambda f, c: c["level_bytes"].__setitem__(1, None),
        "certificate.level_bytes[1] is null; legal in certificate.level_bytes is a list of numbers of at least 0, one "
        "a level",
    ),
    (lambda f, c: c.update(peak_bytes=1.5), "certificate.peak_bytes is 1.5; legal is a whole number of at least 0"),
    (lambda f, c: c.update(rounds=True), "certificate.rounds is true; legal is a whole number of at least 0"),
    (lambda f, c: c.update(sent_bytes="x" * 99), f'certificate.sent_bytes is "{"x" * 76}...; legal is a list of whole '
     "numbers of at least 0, one a device"),
    (
        lambda f, c: c.update(where={"place": "x"}),
        'certificate.where is {"place":"x"}; legal is an object with the text of a \'topology\' or a \'placement\', or '
        "null",
    ),
    (lambda f, c: c.update(where={"topology": "a"}), "certificate.where.topology: topology is no TOML: "),
    (lambda f, c: c.update(types=["f32"]), "certificate.types: expected '[' in a type"),
    (lambda f, c: c.pop("rounds"), "certificate.rounds is missing; legal is a whole number of at least 0"),
    (lambda f, c: c.update(round=1), "unknown field certificate.round; legal there are sources, destinations, where, "),
    (lambda f, c: f.update(more=1), "unknown field more; legal there are format, program, certificate, seconds"),
    (lambda f, c: f.update(certificate=None), "certificate is null; legal is an object with the claims"),
    (lambda f, c: f.update(program=[]), "program is []; legal is the text of a program"),
    (lambda f, c: f.update(program="x"), "program: expected 'program' in a program's first line"),
    (lambda f, c: f.update(format=True), "format true; this version reads format 2"),
    (lambda f, c: f.update(format=2.0), "format is 2.0; legal is 2"),
    (lambda f, c: f.update(seconds=1.0), "seconds is 1.0, but certificate.seconds "),
]  # fmt: skip


def refusal(path: Path) -> str:
    """What is said of a file, behind its name."""
    with pytest.raises(ParseError) as error:
        sp.Plan.load(path)
    said = str(error.value)
    assert said.startswith(f"{path} is not a plan file: ") and "\n" not in said
    return said.removeprefix(f"{path} is not a plan file: ")


@pytest.mark.parametrize("k", range(len(MALFORMED)))
def test_a_malformed_field_is_one_line(k: int, tmp_path: Path) -> None:
    edit, message = MALFORMED[k]
    path = tmp_path / "plan.json"
    PLAN.save(path)
    raw = json.loads(path.read_text())
    edit(raw, raw["certificate"])
    path.write_text(json.dumps(raw))
    said = refusal(path)
    assert said.startswith(message) if message.endswith((" ", ": ")) else said == message


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'["\xff"]', "it is no JSON: it is no UTF-8 text"),
        (b"[" * 9999, "it is no JSON: its values are nested too deep"),
        (b'{"format": 1e999}', "it is no JSON: Number out of range"),
        (b"7", "it is 7; legal is an object"),
    ],
)
def test_what_is_no_json_is_one_line(content: bytes, message: str, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_bytes(content)
    assert refusal(path).startswith(message)


def test_the_schema_has_every_claim() -> None:
    """And the program, which stands beside them."""
    assert {*ClaimFields.__struct_fields__, "program"} == set(CLAIMS)


WRONG: list[Any] = [True, -1, 1.5, "", "x", [], {}, [None], (None,), (1.0, "x"), object(), float("nan")]


@pytest.mark.parametrize("name", [name for name in CLAIMS if name != "program"])
def test_a_claim_of_another_kind_is_refused(name: str) -> None:
    """No file can have brought it, but `dataclasses.replace` can."""
    for value in WRONG:
        with pytest.raises(CertificateError) as error:
            dataclasses.replace(PLAN.certificate, **{name: value}).check()
            pytest.fail(f"{name}={value!r} passes")
        assert "\n" not in str(error.value)

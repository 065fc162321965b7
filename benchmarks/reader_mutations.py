"""Mutated files for `reader_faults`: values replaced within a format, and bytes and words damaged without one.

A *structure* takes the bytes of a file to (what was done, other bytes) of each of its values: replaced by each of
`WRONG`, left out, doubled, nested deep. A file that is not of the format has none.
"""

from __future__ import annotations

import gzip
import json
import math
import random
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple
from xml.etree import ElementTree

WRONG: tuple[Any, ...] = (None, True, -1, 0, 1.5, 1e300, 2**70, "", "x", [], {}, [None], {"x": 1}, [[[[0]]]])
NOT_FINITE = (math.nan, math.inf, -math.inf)  # a TOML file, and a JSON file of Python, may hold these
DEEP = 100_000  # brackets around nothing
LONG = 5_000  # digits of a number, more than Python converts
NUMBERS = (b"0", b"-1", b"1", b"999999999999999999999", b"99999999", b"1e999", b"1.5", b"nan", b"inf", b"-0.0")
WORDS = (b"x", b"", b"\xff", b"\0", "\u0663".encode(), "\ufeff".encode(), b"\n", b"=", b"[", b"{", b'"')
TEXTS = ("", "x", "-1", "0", "1e999", "nan", "1.5", "9" * 25, "99999999", "\u0663", "9" * LONG)
FOLDER = b"folder\0"  # in a mutant's `data`: a folder stands in the place of the file
BOMB = 2**31  # bytes of zeros, as a few of gzip
Structure = Callable[[bytes], Iterator[tuple[str, bytes]]]


class Mutant(NamedTuple):
    """A mutated file: which seed, what was done, and the bytes."""

    seed: int
    what: str
    data: bytes


@dataclass(frozen=True, slots=True)
class Reader:
    """A reader: `seeds` writes whole files into a folder and returns them, `read` reads one as its users do.

    The seeds may be the files of one folder: then `read` reads that, and a mutant is one wrong file of it.
    """

    seeds: Callable[[Path], Sequence[Path]]
    read: Callable[[Path], object]
    structure: Structure
    text: bool = True  # words of it may be replaced


def replaced(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[str, Any]]:
    """Yield a JSON value with each value inside it, itself too, replaced by each wrong one, or left out."""
    for wrong in WRONG:
        yield f"{list(path)} = {json.dumps(wrong)}", wrong
    pairs: Any = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in pairs:
        for what, new in replaced(inner, (*path, key)):
            whole = value.copy()
            whole[key] = new
            yield what, whole
        rest = value.copy()
        del rest[key]
        yield f"{[*path, key]} left out", rest


def json_structure(data: bytes) -> Iterator[tuple[str, bytes]]:
    """Yield a JSON file, or one of a JSON value a line, with values replaced."""
    try:
        whole = json.loads(data)
    except ValueError:
        lines = data.split(b"\n")
        for k, line in enumerate(lines):
            for what, new in _json(line):
                yield f"line {k + 1}: {what}", b"\n".join([*lines[:k], new, *lines[k + 1 :]])
        return
    yield from _json(data)
    for value in NOT_FINITE:
        yield f"[] = {value}", json.dumps(value).encode()
    if isinstance(whole, dict):
        for key in whole:
            yield f"{key} doubled", data.rstrip()[:-1] + b", " + json.dumps({key: 0}).encode()[1:]


def _json(data: bytes) -> Iterator[tuple[str, bytes]]:
    try:
        value = json.loads(data)
    except ValueError:
        return
    for what, new in replaced(value):
        yield what, json.dumps(new).encode()
    yield "nested deep", b"[" * DEEP + b"]" * DEEP
    yield "nested deep objects", b'{"x":' * DEEP + b"0" + b"}" * DEEP
    for key in value if isinstance(value, dict) else ():
        name = json.dumps(key).encode()
        deep = b"[" * DEEP + b"]" * DEEP
        yield f"{key} nested deep", b"{" + b", ".join(
            json.dumps(k).encode() + b": " + (deep if k == key else json.dumps(v).encode()) for k, v in value.items()
        ) + b"}"  # fmt: skip
        yield f"{key} of {LONG} digits", data.rstrip()[:-1] + b", " + name + b": " + b"9" * LONG + b"}"


def toml_text(value: Any) -> str:
    """Return a value of TOML on one line; None, which TOML has not, as text."""
    match value:
        case bool():
            return str(value).lower()
        case float() if not math.isfinite(value):
            return str(value)
        case str() | int() | float():
            return json.dumps(value)
        case list():
            return f"[{', '.join(map(toml_text, value))}]"
        case dict():
            return f"{{ {', '.join(f'{json.dumps(k)} = {toml_text(v)}' for k, v in value.items())} }}"
        case _:
            return '"none"'


def toml_structure(data: bytes) -> Iterator[tuple[str, bytes]]:
    """Yield a TOML file with values replaced; tables become values on one line."""
    try:
        whole = tomllib.loads(data.decode())
    except ValueError:
        return
    for what, new in replaced(whole):
        if isinstance(new, dict):
            yield what, _toml(new)
    for key in whole:
        for value in NOT_FINITE:
            yield f"{key} = {value}", _toml(whole | {key: value})
        for what, value in (("nested deep", "[" * DEEP + "]" * DEEP), (f"of {LONG} digits", "9" * LONG)):
            rest = {k: v for k, v in whole.items() if k != key}
            yield f"{key} {what}", _toml(rest) + f"{json.dumps(key)} = {value}\n".encode()


def _toml(value: Mapping[str, Any]) -> bytes:
    return "".join(f"{json.dumps(k)} = {toml_text(v)}\n" for k, v in value.items()).encode()


def xml_structure(data: bytes) -> Iterator[tuple[str, bytes]]:
    """Yield an XML file with attributes replaced, elements left out, doubled and nested, and entities that expand."""
    try:
        root = ElementTree.fromstring(data)
    except ElementTree.ParseError:
        return
    for element in list(root.iter()):
        for key in list(element.attrib):
            old = element.attrib[key]
            for text in TEXTS:
                element.attrib[key] = text
                yield f"{element.tag} {key}={text[:20]!r}", ElementTree.tostring(root, short_empty_elements=False)
            del element.attrib[key]
            yield f"{element.tag} without {key}", ElementTree.tostring(root)
            element.attrib[key] = old
        for k, child in enumerate(list(element)):
            element.remove(child)
            yield f"{element.tag} without its {child.tag} {k}", ElementTree.tostring(root)
            element.insert(k, child)
            element.insert(k, child)
            yield f"{child.tag} twice", ElementTree.tostring(root)
            element.remove(child)
            tag, child.tag = child.tag, "other"
            yield f"{tag} is other", ElementTree.tostring(root)
            child.tag = tag
    name, body = root.tag.encode(), ElementTree.tostring(root)
    laughs = b"".join(b'<!ENTITY l%d "%s">' % (k, b"&l%d;" % (k - 1) * 10) for k in range(1, 12))
    for what, entities in (
        ("entities that expand", b'<!ENTITY l0 "lol">' + laughs),
        ("an entity of itself", b'<!ENTITY l11 "&l11;">'),
        ("an entity from a file", b'<!ENTITY l11 SYSTEM "file:///etc/passwd">'),
        ("a long entity, often", b'<!ENTITY l0 "%s"><!ENTITY l11 "%s">' % (b"x" * 100_000, b"&l0;" * 20_000)),
    ):
        yield what, b"<!DOCTYPE x [" + entities + b"]><" + name + b' version="&l11;">&l11;</' + name + b">"
        yield f"{what}, before", b"<!DOCTYPE x [" + entities + b"]>" + body.replace(b"</", b"&l11;</", 1)
    yield "nested deep", b"<x>" * DEEP + b"</x>" * DEEP
    yield "nested deep within", body.replace(b">", b">" + b"<pci>" * DEEP + b"</pci>" * DEEP, 1)
    for encoding in ("utf-16", "utf-7", "latin-1", "x"):
        yield f"says {encoding}", b'<?xml version="1.0" encoding="%s"?>' % encoding.encode() + body


def header_structure(data: bytes) -> Iterator[tuple[str, bytes]]:
    """Yield a file that begins with the length of a JSON header, in 8 bytes, with its values and length replaced."""
    length = int.from_bytes(data[:8], "little")
    head, rest = data[8 : 8 + length], data[8 + length :]
    if len(head) < length:
        return
    for what, new in _json(head.rstrip()):
        yield what, len(new).to_bytes(8, "little") + new + rest
    for wrong in (0, 1, length - 1, length + 1, len(data), len(data) - 8, 2**31, 2**40, 2**63 - 1, 2**63, 2**64 - 1):
        if wrong != length:
            yield f"length {wrong}", wrong.to_bytes(8, "little") + head + rest


def gzip_structure(data: bytes) -> Iterator[tuple[str, bytes]]:
    """Yield the file compressed, as it is and with values replaced, in several parts, and as a bomb."""
    for k, (what, new) in enumerate(json_structure(data)):
        yield (f"compressed, {what}", gzip.compress(new, 1)) if k % 4 == 0 else (what, new)
    whole = gzip.compress(data)
    yield "two members", whole + gzip.compress(b"")
    yield "cut short", whole[:-5]
    yield "a wrong checksum", whole[:-8] + bytes(8)
    yield "compressed twice", gzip.compress(whole)
    yield "a bomb", bomb()


def bomb() -> bytes:
    """Return blanks that gzip makes small: `BOMB` bytes of them."""
    piece = gzip.compress(b" " * 2**24, 9)
    return piece * (BOMB // 2**24)


def no_structure(data: bytes) -> Iterator[tuple[str, bytes]]:
    """Yield nothing."""
    return iter(())


# Without a format


def damaged(rng: random.Random, data: bytes, text: bool) -> tuple[str, bytes]:
    """Return what is done to the bytes of a file, and what comes of it."""
    words = ["word", "word", "line", "encoding"] if text else []
    how = rng.choice(("flip", "flip", "cut short", "cut out", "doubled", "put in", *words))
    at = rng.randrange(max(1, len(data)))
    end = min(len(data), at + rng.choice((1, 2, 4, 8, 64)))
    match how:
        case "flip":
            flipped = bytearray(data)
            for _ in range(rng.choice((1, 1, 2, 8))):
                k = rng.randrange(max(1, len(data)))
                flipped[k : k + 1] = bytes([flipped[k] ^ 1 << rng.randrange(8)]) if data else b""
            return f"{how} at {at}", bytes(flipped)
        case "cut short":
            return f"{how} at {at}", data[:at]
        case "cut out":
            return f"{how} {at} to {end}", data[:at] + data[end:]
        case "doubled":
            return f"{how} {at} to {end}", data[:end] + data[at:]
        case "put in":
            return f"{how} at {at}", data[:at] + rng.randbytes(end - at) + data[at:]
        case "line":
            return damaged_line(rng, data)
        case "encoding":
            name = rng.choice(("utf-16", "utf-8-sig", "utf-32-be", "cp500"))
            return f"in {name}", data.decode(errors="replace").encode(name, errors="replace")
        case _:
            return replaced_word(rng, data)


def damaged_line(rng: random.Random, data: bytes) -> tuple[str, bytes]:
    """Return a text with a line left out, doubled, or in the place of another."""
    lines = data.split(b"\n")
    k, other = rng.randrange(len(lines)), rng.randrange(len(lines))
    how = rng.choice(("left out", "doubled", "swapped", "long"))
    match how:
        case "left out":
            del lines[k]
        case "doubled":
            lines.insert(other, lines[k])
        case "swapped":
            lines[k], lines[other] = lines[other], lines[k]
        case _:
            lines[k] = lines[k] * 2000
    return f"line {k + 1} {how}", b"\n".join(lines)


def replaced_word(rng: random.Random, data: bytes) -> tuple[str, bytes]:
    """Return a text with a number, or a word, in the place of another."""
    words = data.translate(bytes.maketrans(b'",[](){}=<>:@+', b" " * 14)).split()
    if not words:
        return "empty", data
    old = rng.choice(words)
    new = rng.choice((*NUMBERS, *WORDS, b"9" * LONG, rng.choice(words)))
    return f"{old[:20]!r} becomes {new[:20]!r}", data.replace(old, new, 1)


def mutations(
    rng: random.Random, files: Sequence[bytes], count: int, text: bool, structure: Structure = json_structure
) -> Iterator[Mutant]:
    """Yield `count` mutants: up to half of them with values replaced; an empty file and a folder of each; the rest."""
    made: list[Mutant] = []  # chosen among all by chance, without holding all
    every = (Mutant(k, *one) for k, data in enumerate(files) for one in structure(data))
    for number, one in enumerate(every):
        if number < count // 2:
            made.append(one)
        elif (place := rng.randrange(number + 1)) < count // 2:
            made[place] = one
    for k in range(len(files)):
        made += [Mutant(k, "empty", b""), Mutant(k, "a folder", FOLDER)]
    yield from made[:count]
    for _ in range(count - len(made)):
        k = rng.randrange(len(files))
        yield Mutant(k, *damaged(rng, files[k], text))

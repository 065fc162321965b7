"""Structures of `reader_mutations` for files that are no text: pickles, archives, and models as protobuf."""

from __future__ import annotations

import io
import zipfile
from collections.abc import Iterator
from typing import Any

from benchmarks.reader_mutations import DEEP, LONG

MODEL_WRONG: tuple[Any, ...] = (
    *(-(2**63), -(2**31), -1, 0, 1, 2, 3, 7, 999, 2**31 - 1, 2**40, 2**62),
    *("", "x", "nothing", "y", "w", "s", "Loop"),
    *("Conv", "Reshape", "Gather", "Concat", "Einsum", "Constant", "Split", "Softmax", "perm", "axis", "\0"),
    *(b"", b"\0", bytes(7), bytes(2**16), b"\xff" * 8),
)  # fmt: skip


def pickle_structure(data: bytes) -> Iterator[tuple[str, bytes]]:
    """Yield payloads that call, build, refer to themselves, or are huge; a pickle with them before, and numbers other.

    None of them does harm where it is run: what is called is `os.getpid`.
    """
    calls = {
        "a call": b"cos\ngetpid\n(tR.", "a builtin": b"cbuiltins\nexec\n(S'0'\ntR.", "an instance": b"(ios\ngetpid\n.",
        "dotted": b"\x80\x04\x8c\x02os\x8c\x0bpath.exists\x93).", "built": b"ccollections\nOrderedDict\n)R}b.",
        "itself": b"]q\x00h\x00a.", "deep": b"(" * DEEP + b"l" * DEEP + b".",
        "deep tuples": b"N" + b"\x85" * DEEP + b".",
        "a persistent id": b"Pstorage\n.", "an extension": b"\x82\x01.",
        "a huge length": b"\x8d" + b"\xff" * 7 + b"\x7fx.",
        "a huge put": b"Nr\xff\xff\xff\xff.", "nothing": b".",
        "a frame": b"\x80\x04\x95\xff\xff\xff\xff\xff\xff\xff\x7f.",
        "doubling": b"]" + b"(2l" * 200 + b".", "a number": b"I" + b"9" * LONG + b"\n.",
        "a long": b"\x8b\xff\xff\xff\x7f.",
    }  # fmt: skip
    for what, payload in calls.items():
        yield what, payload
        yield f"{what}, before", payload[:-1] + b"0" + data
    for k, byte in enumerate(data):
        if byte in b"KMJ":  # numbers of 1, 2 and 4 bytes
            width = {b"K": 1, b"M": 2, b"J": 4}[bytes([byte])]
            for wrong in (b"\0", b"\xff", b"\x7f"):
                yield f"number at {k}", data[: k + 1] + wrong * width + data[k + 1 + width :]
        if byte in b"N)(]}.0R\x85\x86\x87b":
            for wrong in b"N)(]}.0R\x85\x86\x87b":
                yield f"opcode at {k}", data[:k] + bytes([wrong]) + data[k + 1 :]


def zip_structure(data: bytes) -> Iterator[tuple[str, bytes]]:
    """Yield a file with archives in it, their pickles wrong, their members left out, doubled, compressed or bombs."""
    starts = [k for k in range(len(data)) if data.startswith(b"PK\x03\x04", k)]
    for k, at in enumerate(starts):
        for field, width in ((4, 2), (6, 2), (8, 2), (14, 4), (18, 4), (22, 4), (26, 2), (28, 2)):
            for wrong in (b"\0", b"\xff", b"\x7f", b"\x08"):
                start = at + field
                yield f"local header {k}, {field}", data[:start] + wrong * width + data[start + width :]
    for mark, fields in ((b"PK\x01\x02", (8, 10, 16, 20, 24, 28, 30, 32, 42)), (b"PK\x05\x06", (4, 8, 10, 12, 16, 20))):
        for at in (k for k in range(len(data)) if data.startswith(mark, k)):
            for field in fields:
                for wrong in (b"\0\0\0\0", b"\xff\xff\xff\xff", b"\xff\0\0\0", b"\x08\0\0\0"):
                    start = at + field
                    yield f"directory at {at}, {field}", data[:start] + wrong + data[start + 4 :]
    pickles = [k for k in range(len(data)) if data.startswith(b"\x80\x02", k)]
    for at in pickles:
        for what, payload in pickle_structure(b""):
            yield f"pickle at {at}: {what}", data[:at] + payload[:64] + data[at + len(payload[:64]) :]
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data.pkl", bytes(2**26))
        archive.writestr("archive/data/0", bytes(2**26))
    yield "a bomb", made.getvalue()


def onnx_structure(data: bytes) -> Iterator[tuple[str, bytes]]:
    """Yield an ONNX model with each number, name and text replaced, and each item of a list left out or doubled."""
    import onnx

    model: Any = onnx.load_model_from_string(data)
    for message, name, k, where in list(_fields(model)):
        old = getattr(message, name) if k is None else getattr(message, name)[k]
        for wrong in (*MODEL_WRONG, *(() if isinstance(old, int) else (old * 2, old[:-1]))):
            if type(wrong) is not type(old):
                continue
            try:
                _set(message, name, k, wrong)
            except (TypeError, ValueError):  # protobuf takes no such value
                continue
            yield f"{where} = {str(wrong)[:20]!r}", model.SerializeToString()
        _set(message, name, k, old)
    for values, where in list(_lists(model)):
        kept = list(values)
        for k, item in enumerate(kept):
            for what, new in (("left out", []), ("twice", [item, item]), ("last", [])):
                other = [*kept[:k], *new, *kept[k + 1 :], *([item] if what == "last" else [])]
                copies = [
                    type(x).FromString(x.SerializeToString()) if hasattr(x, "SerializeToString") else x for x in other
                ]
                before = [
                    type(x).FromString(x.SerializeToString()) if hasattr(x, "SerializeToString") else x for x in values
                ]
                del values[:]
                values.extend(copies)
                yield f"{where} {k} {what}", model.SerializeToString()
                del values[:]
                values.extend(before)


def _set(message: Any, name: str, k: int | None, value: Any) -> None:
    if k is None:
        setattr(message, name, value)
    else:
        getattr(message, name)[k] = value


def _several(value: Any) -> bool:
    return not isinstance(value, (int, float, str, bytes)) and not hasattr(value, "ListFields")


def _fields(message: Any, where: str = "") -> Iterator[tuple[Any, str, int | None, str]]:
    """Yield every number, text and bytes within a message of protobuf: in which, by what name, at which place."""
    for field, value in message.ListFields():
        for k, item in enumerate(value) if _several(value) else [(None, value)]:
            here = f"{where}.{field.name}" + ("" if k is None else f"[{k}]")
            if hasattr(item, "ListFields"):
                yield from _fields(item, here)
            elif not isinstance(item, float):
                yield message, field.name, k, here


def _lists(message: Any, where: str = "") -> Iterator[tuple[Any, str]]:
    """Yield every list within a message of protobuf, the inner ones first."""
    for field, value in message.ListFields():
        for k, item in enumerate(value) if _several(value) else [(0, value)]:
            if hasattr(item, "ListFields"):
                yield from _lists(item, f"{where}.{field.name}[{k}]")
        if _several(value):
            yield value, f"{where}.{field.name}"

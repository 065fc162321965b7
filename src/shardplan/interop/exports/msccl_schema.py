"""MSCCL XML, read and checked: `algo` > `gpu` > `tb` > `step`, as the executors' parsers and interpreter take it.

What is checked, and where the facts are from (public sources; no code of theirs is here):

- attributes and types of every element, the names of collectives, protocols, buffers (i, o, s) and step types, ids of
  thread blocks without gaps, peers that are not the GPU itself, a peer for every send and receive, offsets within the
  buffers, counts below 72, dependencies that name a step which says `hasdep`, a `nop` only before a step that waits
  too: the executor's parser (Azure/msccl-executor-nccl, `msccl_parser.cc`, `msccl_struct.h`);
- at most 64 steps a block, 32 channels, ids that fit 8 bits, 4,096 nodes a GPU, no XML declaration, no single quotes:
  the same, whose reader is a small one of its own;
- one thread block for each connection's end (peer and channel), and a block at its other end: the interpreter, whose
  blocks own their connections (`msccl_interpreter.h`);
- steps numbered 0, 1, ... and `nchunksperloop` no less than the chunks of input and output: the compiler
  (microsoft/msccl-tools, `ir_to_xml`).
"""

from __future__ import annotations

import re
import xml.etree.ElementTree as Tree
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from shardplan.errors import ParseError

# Bounds of the executor; see the module.
MOST_STEPS = 64  # of a thread block
MOST_CHANNELS = 32
MOST_BLOCKS = 128  # of a GPU: the number of one that is waited for has 8 bits, and a sign
MOST_NODES = 4096  # that the parser keeps for one GPU: its own, and the other gpu elements
MOST_COUNT = 71  # chunks of a step

COLLECTIVES = (
    "reduce", "broadcast", "allreduce", "reducescatter", "allgather", "send", "recv", "gather", "scatter", "alltoall",
    "alltoallv",
)  # fmt: skip
PROTOCOLS = ("Simple", "LL", "LL128")
BUFFERS = ("i", "o", "s")
SENDS = ("s", "rcs", "rrs", "rrcs")
RECEIVES = ("r", "rcs", "rrs", "rrc", "rrcs")
READS = ("s", "rrs", "rrc", "rrcs", "cpy", "re")  # at the source
WRITES = ("r", "rcs", "rrc", "rrcs", "cpy", "re")  # at the destination
TYPES = ("s", "r", "rcs", "rrs", "rrc", "rrcs", "cpy", "re", "nop")

_ALGO = {
    "name": str, "proto": str, "nchannels": int, "nchunksperloop": int, "ngpus": int, "coll": str, "inplace": int,
    "outofplace": int, "minBytes": int, "maxBytes": int,
}  # fmt: skip
_GPU = {"id": int, "i_chunks": int, "o_chunks": int, "s_chunks": int}
_BLOCK = {"id": int, "send": int, "recv": int, "chan": int}
_STEP = {
    "s": int, "type": str, "srcbuf": str, "srcoff": int, "dstbuf": str, "dstoff": int, "cnt": int, "depid": int,
    "deps": int, "hasdep": int,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class MscclInstruction:
    """A `step`."""

    kind: str
    source: tuple[str, int]  # buffer and chunk
    target: tuple[str, int]
    count: int  # of chunks
    wait: tuple[int, int] | None  # the thread block and the step that it waits for
    awaited: bool  # whether others wait for it


@dataclass(frozen=True, slots=True)
class Block:
    """A `tb`: peers (-1 for none), channel, steps."""

    send: int
    recv: int
    channel: int
    steps: tuple[MscclInstruction, ...]


@dataclass(frozen=True, slots=True)
class Gpu:
    """A `gpu`: chunks of its buffers by name, and its thread blocks by id."""

    chunks: dict[str, int]
    blocks: tuple[Block, ...]


@dataclass(frozen=True, slots=True)
class Algorithm:
    """An `algo` that has been checked."""

    collective: str
    channels: int
    chunks: int  # of the payload: `nchunksperloop`
    in_place: bool
    out_of_place: bool
    gpus: tuple[Gpu, ...]


def parse(text: str) -> Algorithm:
    """Return what MSCCL XML says, checked.

    Raises `ParseError`, which names the element, for malformed XML, or a broken rule of the module's list.

    >>> parse('<algo name="x"></algo>')
    Traceback (most recent call last):
    shardplan.errors.ParseError: algo: attribute 'proto' is missing; legal are name, proto, nchannels, nchunksperloop, \
ngpus, coll, inplace, outofplace, minBytes, maxBytes
    """
    _characters(text)
    try:
        root = Tree.fromstring(text)
    except Tree.ParseError as error:
        raise ParseError(f"not XML: {error}") from None
    if root.tag != "algo":
        raise ParseError(f"the root is {root.tag}; legal is algo")
    a = _attributes(root, "algo", _ALGO)
    _one_of("algo", "proto", a["proto"], PROTOCOLS)
    _one_of("algo", "coll", a["coll"], COLLECTIVES)
    for flag in ("inplace", "outofplace"):
        _one_of("algo", flag, a[flag], (0, 1))
    _check_range("algo", "nchannels", a["nchannels"], 1, MOST_CHANNELS)
    _check_range("algo", "nchunksperloop", a["nchunksperloop"], 1, None)
    _check_range("algo", "minBytes", a["minBytes"], 0, None)
    if a["maxBytes"]:  # 0 is no limit
        _check_range("algo", "maxBytes", a["maxBytes"], a["minBytes"], None)
    gpus: dict[int, Gpu] = {}
    for child in _children(root, "algo", "gpu"):
        number, gpu = _gpu(child, a)
        if number in gpus:
            raise ParseError(f"gpu {number} is there twice; legal are ids 0 to {a['ngpus'] - 1}, once each")
        gpus[number] = gpu
    if len(gpus) != a["ngpus"] or sorted(gpus) != list(range(len(gpus))):
        raise ParseError(f"algo: gpus {sorted(gpus)} for ngpus={a['ngpus']}; legal are ids 0 to {a['ngpus'] - 1}")
    found = tuple(gpus[k] for k in range(a["ngpus"]))
    for number, gpu in enumerate(found):
        nodes = 1 + len(found) + len(gpu.blocks) + sum(len(b.steps) for b in gpu.blocks)
        if nodes > MOST_NODES:
            raise ParseError(f"gpu {number} has {nodes} nodes; a parser keeps {MOST_NODES}")
    _connections(found)
    return Algorithm(a["coll"], a["nchannels"], a["nchunksperloop"], bool(a["inplace"]), bool(a["outofplace"]), found)


def _characters(text: str) -> None:
    """What the executors' reader stumbles over: it ends values at double quotes, names at single blanks."""
    for bad, name in (("<?", "an XML declaration"), ("'", "a single quote"), ("\t", "a tab")):
        outside = text if bad != "'" else re.sub(r"<!--.*?(-->|\Z)", "", text, flags=re.DOTALL)
        if bad in outside:
            raise ParseError(f"{name}; the executors' reader takes none", text, text.index(bad))


def _children(element: Tree.Element, where: str, tag: str) -> list[Tree.Element]:
    for child in element:
        if child.tag != tag:
            raise ParseError(f"{where}: an element {child.tag}; legal is {tag}")
    return list(element)


def _attributes(element: Tree.Element, where: str, kinds: Mapping[str, type]) -> dict[str, Any]:
    given = dict(element.attrib)
    legal = ", ".join(kinds)
    out: dict[str, Any] = {}
    for name, kind in kinds.items():
        if name not in given:
            raise ParseError(f"{where}: attribute {name!r} is missing; legal are {legal}")
        value = given.pop(name)
        if kind is int:
            try:
                out[name] = int(value)
            except ValueError:
                raise ParseError(f"{where}: {name}={value!r} is no integer") from None
        else:
            out[name] = value
    if given:
        raise ParseError(f"{where}: unknown attribute {next(iter(given))!r}; legal are {legal}")
    return out


def _one_of(where: str, name: str, value: object, legal: tuple[object, ...]) -> None:
    if value not in legal:
        raise ParseError(f"{where}: {name}={value!r}; legal are {', '.join(map(str, legal))}")


def _check_range(where: str, name: str, value: int, low: int, high: int | None) -> None:
    if value < low or (high is not None and value > high):
        raise ParseError(f"{where}: {name}={value}; legal are {low} {'and more' if high is None else f'to {high}'}")


def _gpu(element: Tree.Element, algo: dict[str, Any]) -> tuple[int, Gpu]:
    a = _attributes(element, "gpu", _GPU)
    number = a["id"]
    where = f"gpu {number}"
    chunks = {name: a[f"{name}_chunks"] for name in BUFFERS}
    for name, count in chunks.items():
        _check_range(where, f"{name}_chunks", count, 0, None)
    if max(chunks["i"], chunks["o"]) > algo["nchunksperloop"]:
        raise ParseError(
            f"{where}: {max(chunks['i'], chunks['o'])} chunks of input or output, but nchunksperloop is "
            f"{algo['nchunksperloop']}; legal is no more"
        )
    blocks: list[Block] = []
    for child in _children(element, where, "tb"):
        b = _attributes(child, f"{where}, tb", _BLOCK)
        here = f"{where}, tb {b['id']}"
        if b["id"] != len(blocks) or b["id"] >= MOST_BLOCKS:
            raise ParseError(f"{here}: legal is the id {len(blocks)}, the next one, below {MOST_BLOCKS}")
        for peer in ("send", "recv"):
            _check_range(here, peer, b[peer], -1, algo["ngpus"] - 1)
            if b[peer] == number:
                raise ParseError(f"{here}: {peer}={number} is the GPU itself; legal is another, or -1")
        _check_range(here, "chan", b["chan"], 0, algo["nchannels"] - 1)
        blocks.append(_block(child, here, b, chunks))
    _waits(where, blocks)
    return number, Gpu(chunks, tuple(blocks))


def _block(element: Tree.Element, where: str, b: dict[str, Any], chunks: dict[str, int]) -> Block:
    steps: list[MscclInstruction] = []
    for child in _children(element, where, "step"):
        s = _attributes(child, f"{where}, step", _STEP)
        here = f"{where}, step {s['s']}"
        if s["s"] != len(steps) or s["s"] >= MOST_STEPS:
            raise ParseError(f"{here}: legal is the number {len(steps)}, the next one, below {MOST_STEPS}")
        kind = s["type"]
        _one_of(here, "type", kind, TYPES)
        _one_of(here, "hasdep", s["hasdep"], (0, 1))
        if kind in SENDS and b["send"] < 0:
            raise ParseError(f"{here}: {kind} sends, but the thread block has no send peer")
        if kind in RECEIVES and b["recv"] < 0:
            raise ParseError(f"{here}: {kind} receives, but the thread block has no recv peer")
        _check_range(here, "cnt", s["cnt"], 0 if kind == "nop" else 1, MOST_COUNT)
        for end, kinds in (("src", READS), ("dst", WRITES)):
            _one_of(here, f"{end}buf", s[f"{end}buf"], BUFFERS)
            if kind in kinds:
                _check_range(here, f"{end}off", s[f"{end}off"], 0, chunks[s[f"{end}buf"]] - s["cnt"])
        if (s["depid"] < 0) != (s["deps"] < 0) or min(s["depid"], s["deps"]) < -1:
            raise ParseError(
                f"{here}: depid={s['depid']} and deps={s['deps']}; legal are both -1, or a block and a step"
            )
        if kind == "nop" and s["depid"] < 0:
            raise ParseError(f"{here}: a nop that waits for nothing; legal is one that waits")
        if steps and steps[-1].kind == "nop" and s["depid"] < 0:
            raise ParseError(
                f"{here}: it comes after a nop and waits for nothing; the last of several waits is its own"
            )
        wait = None if s["depid"] < 0 else (s["depid"], s["deps"])
        ends = ((s["srcbuf"], s["srcoff"]), (s["dstbuf"], s["dstoff"]))
        steps.append(MscclInstruction(kind, *ends, s["cnt"], wait, bool(s["hasdep"])))
    if steps and steps[-1].kind == "nop":
        raise ParseError(f"{where}: it ends with a nop, whose wait no step takes over")
    return Block(b["send"], b["recv"], b["chan"], tuple(steps))


def _waits(where: str, blocks: list[Block]) -> None:
    """Every wait names a step of another block of the GPU, which tells that it is done."""
    for number, block in enumerate(blocks):
        for k, step in enumerate(block.steps):
            if step.wait is None:
                continue
            other, at = step.wait
            here = f"{where}, tb {number}, step {k}"
            if other == number or other >= len(blocks) or at >= len(blocks[other].steps):
                raise ParseError(
                    f"{here} waits for step {at} of tb {other}; legal are steps of other blocks of the GPU"
                )
            if not blocks[other].steps[at].awaited:
                raise ParseError(f"{here} waits for step {at} of tb {other}, which has hasdep=0; legal is hasdep=1")


def _connections(gpus: tuple[Gpu, ...]) -> None:
    """Each end of a connection is one block's, and a connection has both ends."""
    ends: dict[str, dict[tuple[int, int, int], str]] = {"send": {}, "recv": {}}
    for number, gpu in enumerate(gpus):
        for k, block in enumerate(gpu.blocks):
            for end, key in (("send", (number, block.send)), ("recv", (block.recv, number))):
                if min(key) < 0:
                    continue
                edge = (*key, block.channel)
                here = f"gpu {number}, tb {k}"
                if edge in ends[end]:
                    raise ParseError(
                        f"{here}: {ends[end][edge]} has the same {end} peer on channel {block.channel}; legal is one "
                        f"thread block for each end of a connection"
                    )
                ends[end][edge] = here
    for end, other in (("send", "recv"), ("recv", "send")):
        for edge, here in ends[end].items():
            if edge not in ends[other]:
                peer = edge[1] if end == "send" else edge[0]
                raise ParseError(f"{here}: {end}={peer} on channel {edge[2]}, but gpu {peer} has no such {other}")

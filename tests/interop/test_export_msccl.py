"""MSCCL XML of reduction programs: against the reference, its rules, and mutations that must be caught."""

import re
from collections import Counter
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given, reject, settings
from hypothesis import strategies as st

from interop.export_cases import Case, cases, chain, place, random_case, topology
from shardplan.core.ops import AllGather, AllReduce, Broadcast, Reduce, ReduceScatter
from shardplan.errors import BackendError, LayoutError, ParseError, ScheduleError, ShardplanError
from shardplan.interop.exports.msccl import msccl_text
from shardplan.interop.exports.msccl_interpreter import run, verify
from shardplan.interop.exports.msccl_schema import MOST_CHANNELS, MOST_STEPS, TYPES, parse

ENDS_WHOLE = [case for case in cases() if not case.program.output_types[0].layout.used_axes]
BY_NAME = {case.name: case for case in ENDS_WHOLE}
TWO = BY_NAME["two levels, uneven"]


def group_of(case: Case, number: int = 0) -> list[int]:
    """The places of a group of the reduction, as its communicator orders them: by rank."""
    t = case.input_type
    return sorted(t.mesh.group_places(t.layout.partial)[number].tolist(), key=lambda p: t.mesh.devices[p])


@pytest.mark.parametrize("case", ENDS_WHOLE, ids=lambda c: c.name)
@pytest.mark.parametrize("in_place", [False, True])
def test_agrees_with_the_reference(case: Case, in_place: bool) -> None:
    text = msccl_text(case.program, case.placement)
    members = group_of(case)
    chunks = parse(text).chunks
    payloads = case.payloads()[members].astype(np.int64)
    padded = np.pad(payloads, ((0, 0), (0, -case.size % chunks)))
    got = run(text, padded, in_place=in_place, loops=1)[:, : case.size]
    want = [case.expected()[p] for p in members]
    assert np.array_equal(got, np.stack([w for w in want if w is not None]))


@given(st.integers(0, 10**6), st.integers(1, 3), st.integers(1, 3))
@settings(max_examples=40)
def test_random_programs(seed: int, parts: int, channels: int) -> None:
    case = random_case(seed)
    try:
        text = msccl_text(case.program, parts=parts, channels=channels)
    except BackendError as error:
        # More steps than an executor has are refused, which other tests look at.
        assert "an executor has" in str(error)
        reject()
    found = verify(text, seed)
    assert len(found.gpus) == case.input_type.mesh.size
    assert found.chunks == parts * np.prod(case.input_type.shape[:-1])


def test_messages_are_those_of_rings() -> None:
    """Bytes: 2 (k - 1) / k of a payload for an all-reduce, the same in two levels, each over its own edges."""

    def sent(case: Case) -> dict[tuple[int, int], int]:
        found = parse(msccl_text(case.program))
        out: Counter[tuple[int, int]] = Counter()
        for g, gpu in enumerate(found.gpus):
            for block in gpu.blocks:
                out[g, block.send] += sum(s.kind in ("s", "rcs", "rrs", "rrcs") for s in block.steps)
        return dict(out)

    assert sent(BY_NAME["one all-reduce"]) == {(g, (g + 1) % 8): 2 * 7 for g in range(8)}
    inside = {(g, g // 4 * 4 + (g + 1) % 4): 2 * 3 * 2 for g in range(8)}
    across = {(g, (g + 4) % 8): 2 for g in range(8)}
    assert sent(TWO) == inside | across
    # Rings go level by level, which is 0, 2, 1, 3, ... by rank; a GPU's number is its rank.
    assert {(0, 2), (2, 1), (1, 3), (7, 0)} < sent(BY_NAME["level order is not mesh order"]).keys()
    # Places 0 to 3 are ranks 5, 0, 3, 6, and so are the GPUs of their ring.
    assert {(5, 0), (0, 3), (3, 6), (6, 5)} < sent(BY_NAME["ranks out of order"]).keys()
    # Master form: only the first GPU of a node crosses.
    assert {edge for edge in sent(BY_NAME["master"]) if edge[0] // 4 != edge[1] // 4} == {(0, 4), (4, 0)}


def test_every_group_of_a_reduction_has_the_same_xml() -> None:
    case = BY_NAME["beside another axis"]
    plain = [re.sub(r"GPU k is rank .*", "", msccl_text(case.program, group=k)) for k in (0, 1)]
    assert plain[0] == plain[1]
    assert "GPU k is rank [0, 2, 4, 6] [k]" in msccl_text(case.program)
    assert "GPU k is rank [1, 3, 5, 7] [k]" in msccl_text(case.program, group=1)


def test_channels_are_added_when_blocks_grow_too_long() -> None:
    found = verify(msccl_text(TWO.program, parts=10))
    assert max(len(b.steps) for g in found.gpus for b in g.blocks) <= MOST_STEPS
    assert 2 < found.channels < MOST_CHANNELS
    with pytest.raises(BackendError) as caught:
        msccl_text(TWO.program, parts=10, channels=1)
    assert str(caught.value) == (
        "msccl: 2 sets of groups need 2 channels, 2 thread blocks of up to 160 steps; an executor has 32, 128 and 64: "
        "fewer parts, or a program with fewer steps, would do"
    )
    with pytest.raises(BackendError, match="fewer parts"):
        msccl_text(TWO.program, parts=400)
    # One ring of 40 has blocks of 79 steps: its parts go on two channels.
    long = chain(place([[40]], topology(gpu=40)), ["data"], (40,), 40, AllReduce(("data",)))
    found = verify(msccl_text(long))
    assert (found.channels, max(len(b.steps) for g in found.gpus for b in g.blocks)) == (2, 40)


def test_a_block_may_have_as_many_steps_as_an_executor_takes() -> None:
    """A part takes 16 steps of the inner ring's block, so four parts take the 64 that a block may have."""
    found = verify(msccl_text(TWO.program, parts=4))
    assert (found.channels, max(len(b.steps) for g in found.gpus for b in g.blocks)) == (2, MOST_STEPS)


def test_a_write_waits_for_those_that_read() -> None:
    """What the first ring still sends of a chunk, the second must not overwrite: nothing else holds it back."""
    gather = (ReduceScatter(1, ("data.gpu",)), AllGather(1, ("data.gpu",)))
    program = chain(TWO.placement, ["data"], (2, 4), 64, *gather, AllReduce(("data.node",)))
    verify(msccl_text(program))


def test_a_group_of_one_copies() -> None:
    placement = place([[2], [1]], topology(node=2))
    program = chain(placement, ["tensor"], (1,), 8)
    text = msccl_text(program)
    found = parse(text)
    assert [s.kind for s in found.gpus[0].blocks[0].steps] == ["cpy"]
    assert run(text, np.arange(4)[None], loops=1).tolist() == [[0, 1, 2, 3]]


def test_the_text_is_what_the_small_reader_takes() -> None:
    text = msccl_text(TWO.program, TWO.placement, proto="LL128", name="hierarchy", min_bytes=2**20, max_bytes=0)
    assert text.startswith('<algo name="hierarchy" proto="LL128" nchannels="2" nchunksperloop="8" ngpus="8" ')
    assert 'coll="allreduce" inplace="1" outofplace="1" minBytes="1048576" maxBytes="0">\n' in text
    body = re.sub(r"<!--.*?-->", "", text, flags=re.S)
    assert "'" not in body and "\t" not in text and "<?" not in text
    assert all(re.fullmatch(r'\s*</?\w+( \w+="[^"]*")*/?>', line) for line in body.split("\n") if line.strip())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"parts": 0}, "msccl: parts=0, channels=None; legal are 1 and more"),
        ({"channels": 0}, "msccl: parts=1, channels=0; legal are 1 and more"),
        ({"group": 1}, "msccl: there is no group 1; the reduction has 1, 0 to 0"),
    ],
)
def test_options(options: dict, message: str) -> None:
    with pytest.raises(BackendError) as caught:
        msccl_text(TWO.program, **options)
    assert str(caught.value) == message


def test_only_all_reduces_are_exported() -> None:
    for name in ("ends in shards", "ends at a root"):
        (case,) = [c for c in cases() if c.name == name]
        with pytest.raises(BackendError, match=r"legal is the whole payload on every device"):
            msccl_text(case.program)
    beside = BY_NAME["beside another axis"].placement
    wider = chain(
        beside, ["data"], (2, 2), 8, Reduce(("data.gpu",)), AllReduce(("data.node",)),
        Broadcast(("data.gpu", "tensor")),
    )  # fmt: skip
    with pytest.raises(BackendError) as caught:
        msccl_text(wider)
    assert str(caught.value) == (
        "msccl: a broadcast over data.gpu, tensor leaves the group that is reduced, over data.node, data.gpu"
    )


# Deadlocks, races, wrong sums


def test_a_ring_needs_two_slots() -> None:
    """All members send before they receive and send on: with room for one chunk nobody can."""
    text = msccl_text(BY_NAME["one all-reduce"].program)
    verify(text, slots=2)
    with pytest.raises(ScheduleError) as caught:
        verify(text, slots=1)
    assert str(caught.value).startswith(
        "deadlock: 8 of 8 thread blocks cannot go on: gpu 0, tb 0, step 1 (rrs) waits for room towards gpu 1; gpu 1, tb"
    )


STEP = re.compile(r"      <step .*/>\n")
KINDS = {"s": "nop", "rrc": "r", "rrcs": "rcs", "rcs": "r", "r": "rrc", "rrs": "r"}


def mutants(text: str) -> Iterator[tuple[str, str]]:
    """Texts with one thing wrong, by the kind of the wrong."""
    for match in STEP.finditer(text):
        line = match.group()
        a, b = match.span()

        def swapped(new: str, a: int = a, b: int = b) -> str:
            return text[:a] + new + text[b:]

        kind = re.search(r'type="(\w+)"', line)
        assert kind is not None
        if 'depid="-1"' not in line and kind[1] != "nop":
            yield "wait dropped", swapped(re.sub(r'depid="\d+" deps="\d+"', 'depid="-1" deps="-1"', line))
        if 'hasdep="1"' in line:
            yield "flag dropped", swapped(line.replace('hasdep="1"', 'hasdep="0"'))
        if kind[1] in KINDS and KINDS[kind[1]] != "nop":
            new = line.replace(f'type="{kind[1]}"', f'type="{KINDS[kind[1]]}"').replace('off="-1"', 'off="0"')
            yield "other type", swapped(new)
        for end in ("src", "dst"):
            offset = re.search(rf'{end}off="(\d+)"', line)
            if offset is not None:
                yield "other chunk", swapped(line.replace(offset[0], f'{end}off="{int(offset[1]) ^ 1}"'))
        other = re.search(r'srcbuf="o" srcoff="\d', line)
        if other is not None:
            yield "other buffer", swapped(line.replace('srcbuf="o"', 'srcbuf="i"'))
    for match in re.finditer(r'<tb id="(\d+)" send="(\d+)" recv="(\d+)" chan="(\d+)">', text):
        line = f'<tb id="{match[1]}" send="{match[3]}" recv="{match[2]}" chan="{match[4]}">'
        if match[2] != match[3]:
            yield "peers swapped", text[: match.start()] + line + text[match.end() :]


@pytest.mark.parametrize("name", ["two levels, uneven", "master", "three levels", "level order is not mesh order"])
def test_mutants_are_caught(name: str) -> None:
    text = msccl_text(BY_NAME[name].program)
    made: Counter[str] = Counter()
    missed: Counter[str] = Counter()
    for number, (kind, mutant) in enumerate(mutants(text)):
        if number % 3 and kind in ("other type", "other chunk", "other buffer"):  # a third of these is enough
            continue
        made[kind] += 1
        try:
            verify(mutant)
        except ShardplanError:
            continue
        missed[kind] += 1
    assert made["wait dropped"] > 0 or name == "level order is not mesh order"
    assert made["other type"] and made["other chunk"]
    assert made["peers swapped"] or name == "three levels"  # there all rings are of two
    # In place input and output are one; but then the chunk of the other buffer is caught out of place. A wait may be
    # implied by another chain of waits and messages: those are the only mutants that may pass.
    assert set(missed) <= {"wait dropped"}
    assert missed["wait dropped"] <= made["wait dropped"] // 10


SMALL = """<algo name="x" proto="Simple" nchannels="2" nchunksperloop="2" ngpus="2" coll="allreduce" inplace="1" \
outofplace="0" minBytes="0" maxBytes="0">
  <gpu id="0" i_chunks="2" o_chunks="0" s_chunks="1">
    <tb id="0" send="1" recv="1" chan="0">
      <step s="0" type="s" srcbuf="i" srcoff="0" dstbuf="s" dstoff="0" cnt="2" depid="-1" deps="-1" hasdep="1"/>
      <step s="1" type="rrc" srcbuf="i" srcoff="0" dstbuf="i" dstoff="0" cnt="2" depid="-1" deps="-1" hasdep="0"/>
    </tb>
  </gpu>
  <gpu id="1" i_chunks="2" o_chunks="0" s_chunks="2">
    <tb id="0" send="0" recv="0" chan="0">
      <step s="0" type="s" srcbuf="i" srcoff="0" dstbuf="s" dstoff="0" cnt="2" depid="-1" deps="-1" hasdep="1"/>
      <step s="1" type="r" srcbuf="i" srcoff="-1" dstbuf="s" dstoff="0" cnt="2" depid="-1" deps="-1" hasdep="1"/>
    </tb>
    <tb id="1" send="-1" recv="-1" chan="0">
      <step s="0" type="nop" srcbuf="i" srcoff="-1" dstbuf="o" dstoff="-1" cnt="0" depid="0" deps="0" hasdep="0"/>
      <step s="1" type="re" srcbuf="s" srcoff="0" dstbuf="i" dstoff="0" cnt="1" depid="0" deps="1" hasdep="0"/>
      <step s="2" type="re" srcbuf="s" srcoff="1" dstbuf="i" dstoff="1" cnt="1" depid="-1" deps="-1" hasdep="0"/>
    </tb>
  </gpu>
</algo>
"""


def test_a_hand_written_algorithm_runs() -> None:
    """Counts above 1, scratch, local reductions, a nop, in place only: none of it comes from our expansion."""
    found = verify(SMALL)
    assert (found.in_place, found.out_of_place, found.chunks) == (True, False, 2)
    inputs = np.array([[1, 2, 3, 4], [10, 20, 30, 40]])
    assert run(SMALL, inputs, in_place=True).tolist() == [[11, 22, 33, 44]] * 2
    assert inputs.tolist() == [[1, 2, 3, 4], [10, 20, 30, 40]]
    with pytest.raises(LayoutError, match=r"^inputs of shape \(2, 3\) for 2 GPUs and 2 chunks in 2 loops"):
        run(SMALL, np.zeros((2, 3), int))
    with pytest.raises(ScheduleError, match="is never written"):
        run(SMALL, inputs)  # out of place, for which it is not made


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('name="x" ', "", "algo: attribute 'name' is missing"),
        ('name="x"', 'name="x" colour="red"', "algo: unknown attribute 'colour'"),
        ('proto="Simple"', 'proto="Fast"', "algo: proto='Fast'; legal are Simple, LL, LL128"),
        ('coll="allreduce"', 'coll="sum"', "algo: coll='sum'; legal are reduce,"),
        ('inplace="1"', 'inplace="2"', "algo: inplace=2; legal are 0, 1"),
        ('nchannels="2"', 'nchannels="33"', "algo: nchannels=33; legal are 1 to 32"),
        ('nchunksperloop="2"', 'nchunksperloop="1"', "gpu 0: 2 chunks of input or output, but nchunksperloop is 1"),
        ('minBytes="0" maxBytes="0"', 'minBytes="9" maxBytes="8"', "algo: maxBytes=8; legal are 9 and more"),
        ('ngpus="2"', 'ngpus="3"', "algo: gpus [0, 1] for ngpus=3; legal are ids 0 to 2"),
        ('<gpu id="1"', '<gpu id="0"', "gpu 0, tb 0: send=0 is the GPU itself"),
        ('s_chunks="1"', 's_chunks="-1"', "gpu 0: s_chunks=-1; legal are 0 and more"),
        ('s_chunks="1"', 's_chunks="one"', "gpu: s_chunks='one' is no integer"),
        ('<tb id="1"', '<tb id="2"', "gpu 1, tb 2: legal is the id 1, the next one, below 128"),
        ('send="1" recv="1"', 'send="2" recv="1"', "gpu 0, tb 0: send=2; legal are -1 to 1"),
        ('send="1" recv="1"', 'send="-1" recv="1"', "gpu 0, tb 0, step 0: s sends, but the thread block has no send"),
        ('send="0" recv="0"', 'send="0" recv="-1"', "gpu 1, tb 0, step 1: r receives, but the thread block has no"),
        ('recv="1" chan="0"', 'recv="1" chan="1"', "gpu 0, tb 0: send=1 on channel 1, but gpu 1 has no such recv"),
        ('recv="1" chan="0"', 'recv="1" chan="2"', "gpu 0, tb 0: chan=2; legal are 0 to 1"),
        ('send="-1" recv="-1"', 'send="0" recv="-1"', "gpu 1, tb 1: gpu 1, tb 0 has the same send peer on channel 0"),
        ('s="2" type', 's="3" type', "gpu 1, tb 1, step 3: legal is the number 2, the next one, below 64"),
        ('type="rrc"', 'type="red"', f"gpu 0, tb 0, step 1: type='red'; legal are {', '.join(TYPES)}"),
        ('srcbuf="s" srcoff="1"', 'srcbuf="x" srcoff="1"', "gpu 1, tb 1, step 2: srcbuf='x'; legal are i, o, s"),
        ('srcbuf="s" srcoff="1"', 'srcbuf="s" srcoff="2"', "gpu 1, tb 1, step 2: srcoff=2; legal are 0 to 1"),
        ('dstoff="0" cnt="2" depid="-1" deps="-1" hasdep="0"', 'dstoff="1" cnt="2" depid="-1" deps="-1" hasdep="0"',
         "gpu 0, tb 0, step 1: dstoff=1; legal are 0 to 0"),
        ('cnt="1"', 'cnt="72"', "gpu 1, tb 1, step 1: cnt=72; legal are 1 to 71"),
        ('cnt="1"', 'cnt="0"', "gpu 1, tb 1, step 1: cnt=0; legal are 1 to 71"),
        ('depid="0" deps="1"', 'depid="0" deps="-1"', "gpu 1, tb 1, step 1: depid=0 and deps=-1; legal are both -1"),
        ('depid="0" deps="1"', 'depid="0" deps="2"', "gpu 1, tb 1, step 1 waits for step 2 of tb 0; legal are steps"),
        ('depid="0" deps="1"', 'depid="1" deps="0"', "gpu 1, tb 1, step 1 waits for step 0 of tb 1; legal are steps"),
        ('depid="0" deps="1"', 'depid="-1" deps="-1"', "gpu 1, tb 1, step 1: it comes after a nop and waits for"),
        ('depid="0" deps="0"', 'depid="-1" deps="-1"', "gpu 1, tb 1, step 0: a nop that waits for nothing"),
        ('type="re" srcbuf="s" srcoff="1" dstbuf="i" dstoff="1" cnt="1" depid="-1" deps="-1"',
         'type="nop" srcbuf="s" srcoff="1" dstbuf="i" dstoff="1" cnt="1" depid="0" deps="1"',
         "gpu 1, tb 1: it ends with a nop"),
        ('cnt="2" depid="-1" deps="-1" hasdep="1"/>\n    </tb>', 'cnt="2" depid="-1" deps="-1" hasdep="0"/>\n    </tb>',
         "gpu 1, tb 1, step 1 waits for step 1 of tb 0, which has hasdep=0"),
        ('hasdep="0"', 'hasdep="2"', "gpu 0, tb 0, step 1: hasdep=2; legal are 0, 1"),
        ("<algo ", "<plan ", "not XML: mismatched tag"),
        ("<gpu ", "<cpu/><gpu ", "algo: an element cpu; legal is gpu"),
        ("<algo ", "<?xml version=\"1.0\"?><algo ", "an XML declaration; the executors' reader takes none"),
        ('name="x"', "name='x'", "a single quote; the executors' reader takes none"),
    ],
)  # fmt: skip
def test_rules(old: str, new: str, message: str) -> None:
    assert old in SMALL
    with pytest.raises(ParseError) as caught:
        parse(SMALL.replace(old, new, 1))
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('type="re" srcbuf="s" srcoff="1"', 'type="cpy" srcbuf="s" srcoff="1"',
         r"gpu 1: chunk 1 of the output is not the sum of the inputs \(in place\)"),
        ('<step s="1" type="r" srcbuf="i" srcoff="-1"', '<step s="1" type="rrc" srcbuf="i" srcoff="0"',
         "gpu 1: chunk 0 of the output is not the sum"),
        ('srcbuf="s" srcoff="1" dstbuf="i"', 'srcbuf="o" srcoff="1" dstbuf="i"', "srcoff=1; legal are 0 to -1"),
        ('dstoff="0" cnt="2" depid="-1" deps="-1" hasdep="0"', 'dstoff="0" cnt="1" depid="-1" deps="-1" hasdep="0"',
         "gpu 0, tb 0: rrc of 1 chunks receives a message of another number: 2 of its chunks are left where 1 are"),
        ('depid="0" deps="1"', 'depid="0" deps="0"', "race on gpu 1, chunk 0 of buffer s"),
    ],
)  # fmt: skip
def test_wrong_algorithms(old: str, new: str, message: str) -> None:
    assert old in SMALL
    with pytest.raises(ShardplanError, match=message):
        verify(SMALL.replace(old, new, 1))


THERE_AND_BACK = """<algo name="x" proto="LL" nchannels="2" nchunksperloop="1" ngpus="2" coll="allreduce" inplace="1" \
outofplace="0" minBytes="0" maxBytes="0">
  <gpu id="0" i_chunks="1" o_chunks="0" s_chunks="0">
    <tb id="0" send="1" recv="-1" chan="0">
      <step s="0" type="s" srcbuf="i" srcoff="0" dstbuf="i" dstoff="0" cnt="1" depid="-1" deps="-1" hasdep="0"/>
    </tb>
    <tb id="1" send="-1" recv="1" chan="1">
      <step s="0" type="r" srcbuf="i" srcoff="0" dstbuf="i" dstoff="0" cnt="1" depid="-1" deps="-1" hasdep="0"/>
    </tb>
  </gpu>
  <gpu id="1" i_chunks="1" o_chunks="0" s_chunks="0">
    <tb id="0" send="-1" recv="0" chan="0">
      <step s="0" type="rrc" srcbuf="i" srcoff="0" dstbuf="i" dstoff="0" cnt="1" depid="-1" deps="-1" hasdep="1"/>
    </tb>
    <tb id="1" send="0" recv="-1" chan="1">
      <step s="0" type="s" srcbuf="i" srcoff="0" dstbuf="i" dstoff="0" cnt="1" depid="0" deps="0" hasdep="0"/>
    </tb>
  </gpu>
</algo>
"""


def test_messages_order_accesses() -> None:
    """On GPU 0 the write comes after the read by the way of GPU 1 alone; without the wait there it does not."""
    verify(THERE_AND_BACK)
    with pytest.raises(ScheduleError) as caught:
        verify(THERE_AND_BACK.replace('depid="0" deps="0"', 'depid="-1" deps="-1"'))
    assert re.match(r"race on gpu [01], chunk 0 of buffer i: tb [01] \w+ it, and nothing puts that", str(caught.value))
    apart = THERE_AND_BACK.replace('depid="0" deps="0"', 'depid="-1" deps="-1"').replace(
        'type="rrc" srcbuf="i" srcoff="0" dstbuf="i"', 'type="rrc" srcbuf="i" srcoff="0" dstbuf="s"'
    )
    with pytest.raises(ScheduleError) as caught:
        verify(apart.replace('s_chunks="0"', 's_chunks="1"'))
    assert str(caught.value) == (
        "race on gpu 0, chunk 0 of buffer i: tb 1 writes it, and nothing puts that after an access of tb 0"
    )


def test_a_message_that_nobody_takes() -> None:
    text = re.sub(r'      <step s="1" type="rrc".*/>\n', "", SMALL)
    with pytest.raises(ScheduleError, match=r"^4 chunks that gpu 1 sent to gpu 0 on channel 0 were never received$"):
        verify(text, slots=8)


def test_a_read_of_what_nothing_wrote() -> None:
    first = 'type="s" srcbuf="{}" srcoff="0" dstbuf="s" dstoff="0" cnt="{}"'
    text = SMALL.replace(first.format("i", 2), first.format("s", 1), 1)
    with pytest.raises(ScheduleError, match=r"^gpu 0, tb 0 reads chunk 0 of s, which nothing wrote$"):
        verify(text)


def test_only_all_reduces_are_verified() -> None:
    with pytest.raises(ScheduleError, match=r"^coll is allgather; only allreduce is verified$"):
        verify(SMALL.replace("allreduce", "allgather"))

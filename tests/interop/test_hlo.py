"""The collectives of XLA's compiled text, from stored modules (jax 0.10.2, mesh a=2 x b=4), and their script.

`mixed` is a reshard from (a, b) to (b, a), `uneven` one that XLA does by gathering all and cutting; the lists of groups
and pairs below are worked out by hand from the meshes.
"""

from pathlib import Path

import pytest

from shardplan.errors import ParseError
from shardplan.interop.hlo import HloCollective, hlo_script, parse_hlo
from shardplan.interop.hlo_groups import parse_groups

TEXTS = Path(__file__).parent / "hlo"
A = ((0, 4), (1, 5), (2, 6), (3, 7))
B = ((0, 1, 2, 3), (4, 5, 6, 7))

EXPECTED = {
    "all_gather": [HloCollective("all-gather", A, (), 2048, 4096, "all-gather")],
    "all_to_all": [HloCollective("all-to-all", B, (), 4096, 4096, "all-to-all.1")],
    "all_reduce": [HloCollective("all-reduce", B, (), 8192, 8192, "all-reduce")],
    "reduce_scatter": [HloCollective("reduce-scatter", B, (), 16384, 4096, "reduce_scatter.7")],
    "uneven": [HloCollective("all-gather", (tuple(range(8)),), (), 2048, 16384, "all-gather")],
    "permute": [
        HloCollective(
            "collective-permute",
            (),
            ((0, 0), (1, 4), (2, 1), (3, 5), (4, 2), (5, 6), (6, 3), (7, 7)),
            2048,
            2048,
            "collective-permute",
        )
    ],
}


def read(name: str) -> list[HloCollective]:
    return parse_hlo((TEXTS / f"{name}.txt").read_text(), 8)


@pytest.mark.parametrize("name", sorted(EXPECTED))
def test_one_collective(name: str) -> None:
    assert read(name) == EXPECTED[name]


def test_two_collectives_in_scheduled_order() -> None:
    exchange, permute = read("mixed")
    assert (exchange.kind, exchange.operand_bytes, exchange.output_bytes) == ("all-to-all", 2048, 2048)
    assert sorted(exchange.groups) == [(0, 1), (2, 3), (4, 5), (6, 7)]
    assert (permute.kind, permute.operand_bytes) == ("collective-permute", 2048)


@pytest.mark.parametrize("name", [*sorted(EXPECTED), "mixed"])
def test_the_script_moves_the_bytes_of_the_text(name: str) -> None:
    found = read(name)
    script = hlo_script(found)
    assert sum(script.payload().values()) == sum(c.moved_bytes for c in found) > 0


def test_bytes_by_hand() -> None:
    """Devices times what each receives; of the ring all-reduce 2 x 3 x 8192 in each of two groups."""
    moved = {name: sum(c.moved_bytes for c in read(name)) for name in (*EXPECTED, "mixed")}
    assert moved == {
        "all_gather": 8 * 2048,
        "all_to_all": 8 * 3 * 1024,
        "all_reduce": 2 * 2 * 3 * 8192,
        "reduce_scatter": 2 * 3 * 16384,
        "uneven": 8 * 7 * 2048,
        "permute": 6 * 2048,
        "mixed": 8 * 1024 + 4 * 2048,
    }


STARTED = """HloModule started, is_scheduled=true, num_partitions=4

%add (x: f32[], y: f32[]) -> f32[] {
  %x = f32[] parameter(0)
  %y = f32[] parameter(1)
  ROOT %sum = f32[] add(%x, %y)
}

%wrapped (p: bf16[6]) -> bf16[6] {
  %p = bf16[6]{0} parameter(0)
  ROOT %inner = bf16[6]{0} all-to-all(%p), replica_groups={{0,1},{2,3}}, dimensions={0}
}

%body (t: f32[5]) -> f32[5] {
  %t = f32[5]{0} parameter(0)
  ROOT %again = f32[5]{0} all-reduce(%t), replica_groups=[2,2]<=[2,2]T(1,0), to_apply=%add
}

%condition (t: f32[5]) -> pred[] {
  %t = f32[5]{0} parameter(0)
  ROOT %less = pred[] constant(true)
}

ENTRY %main (a: f32[8], b: f32[5], c: bf16[6]) -> f32[32] {
  %a = f32[8]{0} parameter(0)
  %b = f32[5]{0} parameter(1)
  %c = bf16[6]{0} parameter(2)
  %gs = (f32[8]{0}, f32[32]{0}) all-gather-start(%a), replica_groups={}, dimensions={0}
  %ps = (f32[8]{0}, f32[8]{0}, u32[], u32[]) collective-permute-start(%a), source_target_pairs={{0,1},{1,0}}
  %pd = f32[8]{0} collective-permute-done(%ps)
  %as = ((bf16[6]{0}), bf16[6]{0}, u32[]) async-start(%c), calls=%wrapped
  %ad = bf16[6]{0} async-done(%as), calls=%wrapped
  %rs = f32[5]{0} all-reduce-start(%b), replica_groups={{0,1,2,3}}, to_apply=%add
  %rd = f32[5]{0} all-reduce-done(%rs)
  %w = f32[5]{0} while(%rd), condition=%condition, body=%body, backend_config={"known_trip_count":{"n":"2"}}
  %bc = f32[5]{0} collective-broadcast(%w), replica_groups={{2,0,1}}
  ROOT %gd = f32[32]{0} all-gather-done(%gs)
}
"""


def test_started_called_and_repeated() -> None:
    """Each once: the start, not the done; a called computation where it starts; a loop once a trip."""
    found = parse_hlo(STARTED, 4)
    assert [(c.kind, c.groups or c.pairs, c.operand_bytes, c.output_bytes) for c in found] == [
        ("all-gather", ((0, 1, 2, 3),), 32, 128),
        ("collective-permute", ((0, 1), (1, 0)), 32, 32),
        ("all-to-all", ((0, 1), (2, 3)), 12, 12),
        ("all-reduce", ((0, 1, 2, 3),), 20, 20),
        ("all-reduce", ((0, 2), (1, 3)), 20, 20),
        ("all-reduce", ((0, 2), (1, 3)), 20, 20),
        ("collective-broadcast", ((2, 0, 1),), 20, 20),
    ]
    moved = [c.moved_bytes for c in found]
    assert moved == [4 * 96, 64, 4 * 6, 2 * 3 * 20, 2 * 2 * 20, 2 * 2 * 20, 2 * 20]
    script = hlo_script(found)
    by_step = [sum(n for (_, s), n in script.received().items() if s == k) for k in range(len(found))]
    assert by_step == moved


@pytest.mark.parametrize(
    ("text", "groups"),
    [
        ("replica_groups={{3,1},{0,2}}", ((3, 1), (0, 2))),
        ("replica_groups=[2,2]<=[4]", ((0, 1), (2, 3))),
        ("replica_groups=[2,2]<=[2,2]T(1,0)", ((0, 2), (1, 3))),
        ("replica_groups=mesh['x'=2,'y'=2] {'x'}", ((0, 2), (1, 3))),
        ("replica_groups=mesh['x'=4], device_ids=([2,2]T(1,0)) {'x':(2)2}", ((0, 2), (1, 3))),
        ("channel_id=1", ((0, 1, 2, 3),)),
    ],
)
def test_spellings_of_groups(text: str, groups: tuple[tuple[int, ...], ...]) -> None:
    assert parse_groups(text, 4) == groups


MIDDLE = ((0, 2), (1, 3), (4, 6), (5, 7))  # of eight devices as 2 x 2 x 2: neither the halves nor neighbours


@pytest.mark.parametrize(
    ("spelling", "groups"),
    [
        ("{}", (tuple(range(8)),)),
        ("[2,4]<=[8]", ((0, 1, 2, 3), (4, 5, 6, 7))),
        ("[2,4]<=[2,2,2]T(1,0,2)", ((0, 1, 4, 5), (2, 3, 6, 7))),
        ("mesh[x=2,y=4] {y}", ((0, 1, 2, 3), (4, 5, 6, 7))),
        ("mesh['x'=2,'y'=4] {'y','x'}", ((0, 4, 1, 5, 2, 6, 3, 7),)),
        ("mesh['x'=2,'y'=4] {'y':(1)2}", MIDDLE),
        ("mesh['x'=8]{'x':(2)2}", MIDDLE),
        ("mesh['x'=8], device_ids=([8]) {'x':(2)2}", MIDDLE),
        ("mesh['x'=2,'y'=4], device_ids=([2,2,2]T(0,2,1)) {'y':(2)2}", MIDDLE),
        ("mesh['x'=2,'y'=4], device_ids=(7,6,5,4,3,2,1,0) {'x'}", ((7, 3), (6, 2), (5, 1), (4, 0))),
        ("mesh['x'=8] {'x':(4)2,'x':(1)2}", ((0, 4, 1, 5), (2, 6, 3, 7))),
    ],
)
def test_groups_of_eight(spelling: str, groups: tuple[tuple[int, ...], ...]) -> None:
    assert parse_groups(f", channel_id=1, replica_groups={spelling}, dimensions={{0}}", 8) == groups


@pytest.mark.parametrize(("dtype", "nbytes"), [("pred", 24), ("s4", 12), ("bf16", 48), ("c64", 192), ("f8e4m3fn", 24)])
def test_bytes_of_elements(dtype: str, nbytes: int) -> None:
    """Of 24 elements: a pred is a byte, though it has one bit of value."""
    (one,) = parse_hlo(f"ENTRY %main () -> x {{\n  %g = {dtype}[4,6]{{1,0}} all-reduce({dtype}[4,6] %a)\n}}\n", 2)
    assert (one.operand_bytes, one.output_bytes) == (nbytes, nbytes)


def test_messages() -> None:
    with pytest.raises(ParseError, match=r"^not the text of an HLO module: it has no ENTRY computation$"):
        parse_hlo("HloModule nothing", 4)
    with pytest.raises(ParseError, match=r"^instruction 's': no byte count is known for 'send'; known are all-gather"):
        parse_hlo("ENTRY %main () -> token[] {\n  %s = (f32[2]{0}, u32[], token[]) send(%x, %t), channel_id=1\n}\n", 4)
    with pytest.raises(ParseError, match=r"^replica_groups in an unknown spelling\n  replica_groups=3\n  \^$"):
        parse_groups("replica_groups=3", 4)


def module(*lines: str, more: str = "") -> str:
    """A module with an entry of these lines."""
    return f"HloModule m, num_partitions=8\n{more}ENTRY %main (x: f32[4]) -> f32[4] {{\n" + "".join(
        f"  {line}\n" for line in ("%x = f32[4]{0} parameter(0)", *lines)
    ) + "}\n"  # fmt: skip


LOOP = '%w = f32[4]{0} while(%x), body=%body, backend_config={"known_trip_count":{"n":"TRIPS"}}'
BODY = "%body (x: f32[4]) -> f32[4] {\n  %x = f32[4]{0} parameter(0)\nINNER}\n\n"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (module(LOOP), "a computation 'body' is called, which the HLO module does not have"),
        (
            module(LOOP, more=BODY.replace("INNER", f"  {LOOP}\n")),
            "the computation 'body' calls itself; legal are calls of others, at most so deep",
        ),
        (
            module(LOOP.replace("TRIPS", "2097152"), more=BODY.replace("INNER", "  %r = f32[4]{0} all-reduce(%x)\n")),
            "instruction 'w': 1 collectives in 2097152 trips; legal are at most 1048576 in a module",
        ),
        (
            module(f"%r = f32[{'9' * 19}]{{0}} all-reduce(%x)"),
            "a number of 19 digits in HLO text; legal are at most 18",
        ),
        (
            module(f"%r = f32[{'9' * 18},99]{{0}} all-reduce(%x)"),
            f"the shape 'f32[{'9' * 18},99]{{0}}' has 3.96e+20 bytes; legal are at most 4.61e+18",
        ),
        (
            module("%r = f999[4]{0} all-reduce(%x)"),
            "unknown HLO element type 'f999'; legal are pred and letters with a",
        ),
        (module("%r = f32[4]"), "'%r = f32[4]' is no HLO instruction; legal is name = shape opcode(operands)"),
        (module("%r = f32[4]{0} all-reduce(%y)"), "the operand '%y' of a collective is no instruction before it"),
        (module("%r = f32[4]{0} all-gather-start(%x)"), "instruction 'r' has the shape 'f32[4]{0}'; legal is a tuple"),
    ],
)
def test_modules_that_are_refused(text: str, message: str) -> None:
    with pytest.raises(ParseError) as error:
        parse_hlo(text, 8)
    assert str(error.value).startswith(message) and "\n" not in str(error.value)


def test_a_loop_without_collectives_is_not_run() -> None:
    text = module(LOOP.replace("TRIPS", "9" * 18), more=BODY.replace("INNER", ""))
    assert parse_hlo(text, 8) == []


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        ("[4]<=[4]", "replica_groups=[4]<=[4] is a list of 1 dims; legal are two, as [4,2]<=[8]"),
        ("[2,4]<=[2,4]T(0,0)", "'[2,4]<=[2,4]T(0,0)' does not permute its dims, or has two numbers of devices"),
        ("[2,4]<=[9]", "'[2,4]<=[9]' does not permute its dims, or has two numbers of devices"),
        ("[1,99999999]<=[99999999]", "'[1,99999999]<=[99999999]' has 1e+08 devices in 1 dims; legal are 1 to 1048576"),
        ("mesh['x'=4] {'y'}", "replica_groups over the axis 'y'; the mesh has x"),
        ("mesh['x'=4] {'x':(3)2}", "replica_groups over parts of the axis 'x' of size 4; legal divide it"),
        ("mesh['x'=4], device_ids=(0,1) {'x'}", "device_ids '0,1' has 2 devices; the mesh has 4"),
    ],
)
def test_groups_that_are_refused(groups: str, message: str) -> None:
    with pytest.raises(ParseError) as error:
        parse_groups(f"replica_groups={groups}", 8)
    assert str(error.value) == message

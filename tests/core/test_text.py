"""Programs as text: round trips and errors that point."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import shardplan as sp
import strategies as some
from shardplan.core.ops import AllGather, Together
from shardplan.core.step import Step
from shardplan.errors import ParseError, ShardplanError
from shardplan.hardware.units import format_bytes


@settings(max_examples=150, deadline=None)
@given(st.one_of(some.pairs(("even", "uneven", "partial", "rooted")), some.cross_pairs()))
def test_plans_go_round(pair: tuple[sp.TensorType, sp.TensorType]) -> None:
    plan = sp.redistribute(*pair)
    text = str(plan.program)
    again = sp.Program.parse(text)
    assert again == plan.program and str(again) == text
    # the print-out of a plan adds comments and claims: its program part parses to the same
    printed = str(plan).split("\nreceived ")[0]
    assert sp.Program.parse(printed) == plan.program


@settings(max_examples=80, deadline=None)
@given(some.batches())
def test_batches_go_round(batch: tuple[list[sp.TensorType], list[sp.TensorType]]) -> None:
    program = sp.redistribute(*batch).program
    assert sp.Program.parse(str(program)) == program


GOOD = """program
  mesh data=4, tensor=2
  input %0: f32[64@data, 48@tensor]
  %1 = all_gather(%0; dim=0, axes=(data)): f32[64, 48@tensor]
  output %1"""


def test_the_text_of_the_docstring() -> None:
    program = sp.Program.parse(GOOD)
    assert str(program) == GOOD
    assert sp.Program.parse("# a comment\n" + GOOD.replace("output", "# another\n\n  output")) == program
    unclaimed = GOOD.replace(": f32[64, 48@tensor]", "")
    assert sp.Program.parse(unclaimed) == program


def test_axes_named_like_words_stay_names() -> None:
    mesh = sp.Mesh({"None": 2, "True": 2})
    program = sp.redistribute("f32[8@(None,True)]", "f32[8]", mesh=mesh).program
    assert 'axes=("None","True")' in str(program)
    assert sp.Program.parse(str(program)) == program


@pytest.mark.parametrize(
    ("old", "new", "message", "at"),
    [
        ("program\n", "programme\n", "unexpected text at the end of the line", "me"),
        ("all_gather", "collect", "unknown op 'collect'; legal are ", "collect"),
        ("dim=0", "dims=0", "all_gather has no attribute 'dims'; legal are dim, axes, chunks", "dims"),
        ("%0; dim", "%0 dim", "expected ')' in the op all_gather", "dim=0"),
        ("48@tensor]\n  output", "48]\n  output", "%1 has the type f32[64, 48@tensor], not f32[64, 48]", None),
        ("input %0:", "input 0:", "expected a value, as in %0", "0: f32"),
        ("output", "outputs", "expected 'mesh', 'input', 'output' or a step (%name = op(...))", "outputs"),
    ],
)
def test_what_the_parser_refuses(old: str, new: str, message: str, at: str | None) -> None:
    text = GOOD.replace(old, new, 1)
    with pytest.raises(ParseError) as error:
        sp.Program.parse(text)
    assert str(error.value).startswith(message)
    if at is not None:
        _, line, caret = str(error.value).rsplit("\n", 2)
        assert line[caret.index("^") :].startswith(at)


@pytest.mark.parametrize(
    ("old", "new"),
    [("output %1", "output %2"), ("all_gather(%0", "all_gather(%7"), ("%1 = all", "%0 = all"),
     ("axes=(data)", "axes=(tensor)"), ("data=4", "data=0"), ("dim=0", "dim=5"), ("dim=0, ", "")],
)  # fmt: skip
def test_what_does_not_type_is_refused(old: str, new: str) -> None:
    with pytest.raises(ShardplanError):
        sp.Program.parse(GOOD.replace(old, new, 1))


def test_a_program_of_nothing_goes_round() -> None:
    program = sp.redistribute([], []).program
    assert str(program) == "program"
    assert sp.Program.parse(str(program)) == program


def test_what_is_printed_of_many_arrays_is_folded() -> None:
    """Sixteen in three sizes are a line each way, with what a device holds; the program itself lists all of them."""
    rows = [4096 + 64 * (k % 3) for k in range(16)]
    plan = sp.redistribute(
        [f"bf16[{n}@fsdp, 4096]" for n in rows], [f"bf16[{n}, 4096@tp]" for n in rows], "dgx-h100", mesh="fsdp=4,tp=2"
    )
    held = sum(t.local_bytes() for _, t in plan.program.inputs)
    kinds = "6 x bf16[4096@fsdp, 4096]; 5 x bf16[4160@fsdp, 4096]; 5 x bf16[4224@fsdp, 4096]"
    assert f"  input %in0 ... %in15: {kinds}  # {format_bytes(held)} a device" in str(plan).splitlines()
    assert len(str(plan).splitlines()) < 12 and len(str(plan.program).splitlines()) > 20
    assert sp.Program.parse(str(plan.program)) == plan.program


def test_many_moves_at_once_are_folded() -> None:
    t = sp.TensorType.parse("f32[16@x]", "x=2")
    given_, made = tuple(f"a{k}" for k in range(9)), tuple(f"b{k}" for k in range(9))
    moves = [Step(AllGather(0, ("x",)), (a,), (b,)) for a, b in zip(given_, made, strict=True)]
    body = sp.Program(dict.fromkeys(given_, t), moves, made)
    program = sp.Program(dict.fromkeys(given_, t), [Step(Together(body), given_, made)], made)
    folded = program.text(lambda number, step: "noted", format_bytes).splitlines()[2:]
    assert folded == [
        "  input %a0 ... %a8: 9 x f32[16@x]  # 288 B a device",
        "  %b0 ... %b8 = together(%a0 ... %a8) { 9 x all_gather }: 9 x f32[16]  # noted",
        "  output %b0 ... %b8",
    ]

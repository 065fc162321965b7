"""What a user is told when a request is wrong: exact texts (those of the nouns and ops are tested beside them)."""

import pytest

import shardplan as sp
from shardplan.core.ops import AllGather
from shardplan.core.step import Step

MESH = sp.Mesh(x=2, y=2)


def T(text: str, mesh: sp.Mesh = MESH) -> sp.TensorType:
    return sp.TensorType.parse(text, mesh)


@pytest.mark.parametrize(
    ("call", "kind", "message"),
    [
        (lambda: sp.redistribute(T("f32[8]"), T("f32[9]")), sp.LayoutError,
         "cannot redistribute f32[8] to f32[9]: dtype and global shape must be equal"),
        (lambda: sp.redistribute(T("f32[8]"), T("bf16[8]")), sp.LayoutError,
         "cannot redistribute f32[8] to bf16[8]: dtype and global shape must be equal"),
        (lambda: sp.redistribute(T("f32[8]"), [T("f32[8]")]), sp.LayoutError,
         "redistribute takes two types, or two lists of types of equal length"),
        (lambda: sp.redistribute([T("f32[8]")], []), sp.LayoutError,
         "a batch of 1 sources and 0 destinations; give as many of each"),
        (lambda: sp.redistribute(T("f32[8]{+x}"), T("f32[8]{max:x}")), sp.LayoutError,
         "cannot redistribute f32[8]{+x} to f32[8]{max:x}: an axis is partial with two different reductions"),
        (lambda: sp.redistribute(T("f32[8]"), T("f32[8@x]"), memory_limit=-1), sp.LayoutError,
         "the memory limit is -1 bytes; it must be at least 1"),
        (lambda: sp.redistribute(T("f32[8]"), T("f32[8@(x,y)]"), memory_limit=39), sp.Infeasible,
         "redistribute f32[8] to f32[8@(x,y)] within 39 bytes a device: no plan; the least that works is 40 bytes"),
        (lambda: sp.redistribute([T("f32[8]")], [T("f32[8@(x,y)]")], memory_limit=39), sp.Infeasible,
         "redistribute f32[8] to f32[8@(x,y)] within 39 bytes a device: no plan; the least that works is 40 bytes"),
    ],
)  # fmt: skip
def test_redistribute(call: object, kind: type[Exception], message: str) -> None:
    with pytest.raises(kind) as error:
        call()  # type: ignore[operator]
    assert str(error.value) == message


def test_programs() -> None:
    t = T("f32[8@x]")
    gather = AllGather(0, ("x",))
    cases = [
        (([("0", t), ("0", t)], [], []), "input %0 is defined twice"),
        (({"0": t}, [Step(gather, ("1",), ("2",))], ["2"]), "step 0 (all_gather): %1 is not defined before it"),
        (({"0": t}, [Step(gather, ("0",), ("0",))], ["0"]), "step 0 (all_gather): %0 is defined twice"),
        (({"0": t}, [Step(gather, ("0",), ("1", "2"))], ["1"]), "step 0 (all_gather): 1 results, but 2 names"),
        (({"0": t}, [], ["1"]), "output %1 is not defined"),
        (({"0": t}, [Step(AllGather(0, ("y",)), ("0",), ("1",))], ["1"]),
         "step 0 (all_gather): all_gather: y is not a suffix of dim 0 of f32[8@x]; legal are minor runs of x"),
    ]  # fmt: skip
    for arguments, message in cases:
        with pytest.raises(sp.TypingError) as error:
            sp.Program(*arguments)  # type: ignore[arg-type]
        assert str(error.value) == message


def test_every_error_is_a_shardplan_error() -> None:
    names = ("ParseError", "LayoutError", "TypingError", "TopologyError", "Infeasible", "CertificateError",
             "ScheduleError", "TimedOut", "BackendError")  # fmt: skip
    for name in names:
        assert issubclass(getattr(sp, name), sp.ShardplanError)
    with pytest.raises(sp.Infeasible) as error:
        sp.redistribute(T("f32[8@(x,y)]"), T("f32[8]"), memory_limit=1)
    assert error.value.least_bytes == 40

"""Of a compiled module every collective is told once, with the operation that asks and where that is."""

from __future__ import annotations

from pathlib import Path

import pytest

from shardplan.interop.hlo import SourcePlaces
from shardplan.interop.hlo_trace import HloTrace, hlo_movements, hlo_why_text

STORED = Path(__file__).with_name("hlo") / "mlp_step.hlo"
MODULE = """HloModule jit_f, num_partitions=8

FileNames
1 "model.py"

FunctionNames
1 "<module>"
2 "f"

FileLocations
1 {file_name_id=1 function_name_id=1 line=12 end_line=12 column=2 end_column=2}
2 {file_name_id=1 function_name_id=2 line=8 end_line=8 column=6 end_column=6}

StackFrames
1 {file_location_id=1 parent_frame_id=1}
2 {file_location_id=2 parent_frame_id=2}


ENTRY %main (param: f32[8,16,4]) -> f32[16,16,16] {
  %param = f32[8,16,4]{2,1,0} parameter(0), sharding={devices=[2,1,4]<=[4,2]T(1,0)}, metadata={op_name="a"}
  %all-gather = f32[8,16,16]{1,0,2} all-gather(%param), channel_id=1, replica_groups={{0,2,4,6},{1,3,5,7}}, dimensions={2}, use_global_device_ids=true, metadata={op_name="jit(f)/add" stack_frame_id=2}
  %all-gather-start.1 = (f32[8,16,16]{2,1,0}, f32[16,16,16]{2,1,0}) all-gather-start(%all-gather), channel_id=2, replica_groups={{0,1},{2,3},{4,5},{6,7}}, dimensions={0}, use_global_device_ids=true, metadata={op_name="jit(f)/mul" source_file="old.py" source_line=3}
  ROOT %all-gather-done = f32[16,16,16]{2,1,0} all-gather-done(%all-gather-start.1)
}
"""  # noqa: E501


def test_who_asks_and_where() -> None:
    first, second = HloTrace.parse(MODULE).collectives
    assert (first.op, first.place, first.is_async) == ("jit(f)/add", "model.py:8 (f)", False)
    assert first.shapes == ("f32[8,16,4]", "f32[8,16,16]")
    assert (second.op, second.place, second.is_async) == ("jit(f)/mul", "old.py:3", True)
    assert second.shapes == ("f32[8,16,16]", "f32[16,16,16]")


def test_tables_of_frames() -> None:
    places = SourcePlaces.parse(MODULE)
    assert dict(places.frames) == {1: "model.py:12 (<module>)", 2: "model.py:8 (f)"}
    assert places.place("stack_frame_id=7") == ("", "") and SourcePlaces.parse("HloModule x").frames == {}


@pytest.mark.parametrize("text", [MODULE, STORED.read_text()])
def test_all_that_is_moved_is_told_once(text: str) -> None:
    trace = HloTrace.parse(text)
    found = hlo_movements(trace, "dgx-h100")
    assert sum(m.runs for m in found) == len(trace.collectives)
    assert sum(m.seconds for m in found) == pytest.approx(trace.seconds("dgx-h100"))
    assert sum(m.received_bytes for m in found) == pytest.approx(trace.moved_bytes / trace.devices, abs=len(found))
    assert [m.seconds for m in found] == sorted((m.seconds for m in found), reverse=True)
    told = hlo_why_text(found, top=1)
    assert f"movements {len(found)}: " in told and (len(found) == 1 or f"{len(found) - 1} more, " in told)
    assert found[0].kind in told and found[0].asks in told


def test_what_may_be_hidden_is_said() -> None:
    told = hlo_why_text(hlo_movements(HloTrace.parse(MODULE), "dgx-h100"))
    assert told.count("XLA may hide it") == 1 and told.count("nothing hides it") == 1
    assert "where    model.py:8 (f)" in told and "asked    jit(f)/add" in told


def test_those_that_are_alike_are_one() -> None:
    gather = next(line for line in MODULE.splitlines() if "%all-gather = " in line)
    again = gather.replace("%all-gather = ", "%again = ")
    trace = HloTrace.parse(MODULE.replace(gather, f"{gather}\n{again}"))
    (twice,) = (m for m in hlo_movements(trace, "dgx-h100") if m.runs == 2)
    (once,) = (m for m in hlo_movements(HloTrace.parse(MODULE), "dgx-h100") if m.kind == twice.kind and not m.hidden)
    assert (twice.seconds, twice.received_bytes) == (2 * once.seconds, 2 * once.received_bytes)

"""The pictures against the boxes: what is drawn as held, kept or received is what types and messages say."""

import re
import xml.etree.ElementTree as ET

import numpy as np
import pytest

import shardplan as sp
from shardplan.core.messages import overlap_elements
from shardplan.core.ops import AllReduce, Slice, ToPartial
from shardplan.core.step import Step
from shardplan.report.contents import frames
from shardplan.report.picture import text_picture
from shardplan.report.placement_picture import text_placement
from shardplan.report.svg import svg_picture

MESH = sp.Mesh(data=2, tensor=3)
PAIRS = [
    ("f32[4@data, 6@tensor]", "f32[4, 6@data]"),
    ("f32[6@data]{+tensor}", "f32[6@tensor]"),
    ("f32[5@data, 7@tensor]", "f32[5@tensor, 7@data]"),
    ("f32[64@data, 33@tensor, 3]", "f32[64@tensor, 33, 3@data]"),
    ("f32[6]", "f32[6@(data,tensor)]"),
    ("f32[2@tensor, 4]", "f32[2, 4]{root:data}"),
    ("f32[4096@data, 4096@tensor]", "f32[4096@tensor, 4096]"),
]


def parse(text, mesh=MESH):
    return sp.TensorType.parse(text, mesh)


def program(source, destination, mesh=MESH, target=None):
    return sp.redistribute(parse(source, mesh), parse(destination, target or mesh)).program


def volume(box):
    return int(np.prod([b - a for a, b in box])) if box is not None else 0


@pytest.mark.parametrize(("source", "destination"), PAIRS)
def test_frames_follow_the_types(source, destination):
    p = program(source, destination)
    drawn = frames(p)
    assert [f.title for f in drawn] == ["before", *(f"step {k + 1}" for k in range(len(p.steps)))]
    for frame in drawn:
        for place, held in enumerate(frame.held):
            box = frame.type.box(place)
            assert held.box in (box, None) and (held.box is not None or volume(box) == 0 or frame.type.layout.root)
    for frame, step in zip(drawn[1:], p.steps, strict=True):
        received = step.op.received_bytes(*p.step_types(step)[0])
        before, after = p.types[step.operands[0]], p.types[step.results[0]]
        if frame.how == "received" and not (before.layout.root or after.layout.root):
            lacking = [(volume(h.box) - volume(h.kept)) * 4 for h in frame.held]
            assert lacking == received.tolist()
            if step.op.name != "permute":
                assert [volume(h.kept) for h in frame.held] == overlap_elements(before, after).tolist()


@pytest.mark.parametrize(("source", "destination"), PAIRS)
def test_drawings_are_complete(source, destination):
    p = program(source, destination)
    text, svg = text_picture(p), svg_picture(p, "a <title> & more")
    root = ET.fromstring(svg)
    assert root.find("{http://www.w3.org/2000/svg}title").text == "a <title> & more"
    for device in range(6):
        assert len(re.findall(rf"^.*device {device}\b", text, re.M)) >= 1 + len(p.steps)
        assert svg.count(f">device {device}<") == 1 + len(p.steps)
    assert all(len(line) <= 160 for line in text.splitlines())


def test_the_grid_numbers_what_a_device_holds():
    text = text_picture(parse("f32[2@data, 3@tensor]"))
    assert text.splitlines()[:6] == [
        "f32[2@data, 3@tensor]",
        "  device 0 (0, 0)  device 1 (0, 1)  device 2 (0, 2)",
        "  0 . .            . 1 .            . . 2",
        "  . . .            . . .            . . .",
        "",
        "  device 3 (1, 0)  device 4 (1, 1)  device 5 (1, 2)",
    ]


def test_what_devices_hold_stays_within_eighty_columns():
    """And one device is named as in a picture of a placement."""
    lines = text_picture(parse("f32[4@x, 8]", sp.Mesh(x=4))).splitlines()
    assert max(map(len, lines)) <= 80 and lines[1].endswith("device 2 (2)") and lines[7] == "  device 3 (3)"
    placed = sp.Placement(sp.Mesh(x=4), sp.Topology.load("nominal", devices=4), ((4,),))
    assert "  3 (3) |" in text_placement(placed)


def test_received_elements_partial_and_root_are_marked():
    x = sp.Mesh(x=2)
    received = text_picture(program("f32[2@x]", "f32[2]", x))
    assert re.search(r"^   0 >1 +>0  1$", received, re.M) and "received in the step" in received
    partial = text_picture(program("f32[2]{+x}", "f32[2]", x))
    assert "0+ 1+" in partial and "reduced in the step" in partial
    assert "0* 1*" in text_picture(parse("f32[2]{root:x}", x))


def test_local_steps_receive_nothing():
    t = parse("f32[4]", sp.Mesh(x=2))
    p = sp.Program(
        {"a": t},
        [
            Step(Slice(0, ("x",)), ("a",), ("b",)),
            Step(ToPartial(("x",)), ("b",), ("c",)),
            Step(AllReduce(("x",)), ("c",), ("d",)),
        ],
        ("d",),
    )
    before, cut, filled, reduced = frames(p)
    assert all(h.kept == h.box for f in (before, cut) for h in f.held)
    assert filled.how == "filled" and [h.kept for h in filled.held] == [((0, 2),), ((2, 4),)]
    assert reduced.how == "reduced" and all(h.kept is None for h in reduced.held)


def test_devices_of_another_mesh_hold_nothing():
    p = program("f32[4@x]", "f32[4@y]", sp.Mesh(x=2), sp.Mesh(y=2, devices=[1, 7]))
    first, *_, last = frames(p)
    assert [h.device for h in first.held] == [0, 1, 7]
    assert [h.box is None for h in first.held] == [False, False, True]
    assert [h.box for h in last.held] == [None, ((0, 2),), ((2, 4),)]
    assert ">nothing<" in svg_picture(p)


def test_large_meshes_and_batches_are_cut_short_and_say_so():
    big = sp.Mesh(x=64)
    text = text_picture(parse("f32[128@x]", big))
    assert "... and 32 more devices" in text
    assert "32 more devices are not drawn" in svg_picture(parse("f32[128@x]", big))
    many = sp.redistribute([parse("f32[6@data]")] * 7, [parse("f32[6]")] * 7).program
    assert "... and 3 more tensors" in text_picture(many)
    assert "... and 3 more tensors" in svg_picture(many)


def test_more_than_two_dims_say_which_are_drawn():
    assert "two largest" in svg_picture(parse("f32[2, 64@data, 33]"))
    assert "[0:2, 0:32, 0:33]" in text_picture(parse("f32[2, 64@data, 33]"))


def test_a_scalar_is_drawn():
    assert "device 5 (1, 2)" in text_picture(parse("f32[]"))
    ET.fromstring(svg_picture(parse("f32[]")))


def elements(svg):
    """The numbers of the elements of every panel, by device."""
    found, device = {}, None
    for text in re.findall(r">([^<>]+)</text>", svg):
        if name := re.fullmatch(r"device (\d+)", text):
            device = int(name[1])
        elif device is not None and text.isdigit():
            found.setdefault(device, []).append(int(text))
    return found


@pytest.mark.parametrize("text", ["i32[2@data, 3@tensor, 4]", "i32[2@data, 4, 3@tensor]", "i32[6@tensor, 4@data]"])
def test_numbers_in_the_svg_are_those_of_the_elements(text):
    """Devices on different planes show different numbers: the places of their elements in the whole array."""
    t = parse(text)
    whole = np.arange(int(np.prod(t.shape))).reshape(t.shape)
    found = elements(svg_picture(t))
    assert found == {k: shard.ravel().tolist() for k, shard in enumerate(sp.distribute(whole, sp.TensorType(
        "i64", t.shape, t.layout, t.mesh)))}  # fmt: skip


def test_several_planes_are_not_numbered_but_named():
    svg = svg_picture(parse("i32[4@data, 6@tensor, 3]"))
    assert elements(svg) == {}
    assert svg.count(">at [:, :, 0:3]<") == 6


def test_every_shard_has_its_grid_line_or_a_line_says_that_it_has_none():
    """Of 20 shards the lines between all; of 64 none, which would hide what is held, and that is said."""
    svg = svg_picture(parse("f32[160@x]", sp.Mesh(x=20)))
    vertical = re.findall(r'<line x1="([\d.]+)" y1="[\d.]+" x2="\1" ', svg)
    assert len([x for x in vertical if x != "0"]) == 20 * 19 and "not drawn" not in svg
    many = svg_picture(parse("f32[128@x]", sp.Mesh(x=64)))
    assert "dim 0 is cut into 64 parts, whose lines are not drawn" in many
    assert set(re.findall(r'<line x1="([\d.]+)" y1="[\d.]+" x2="\1" ', many)) == {"0"}
    held = [float(w) for w in re.findall(r'width="([\d.]+)" height="[\d.]+" fill="#3f7fb5"/>', many)]
    assert len(held) == 32 and min(held) >= 1 and len(many) < 40_000


def test_rows_are_drawn_from_the_top():
    """Of two devices the second one's half lies below the first one's, in panels side by side."""
    text = svg_picture(sp.TensorType.parse("f32[8@x, 8]", "x=2"))
    held = [float(y) for y in re.findall(r'<rect x="[^"]*" y="([^"]*)"[^>]*fill="#a9cdea"', text)][-2:]
    assert held[0] < held[1]

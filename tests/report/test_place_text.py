"""What `place` prints, worked out by hand."""

import shardplan as sp
from shardplan.hardware.topology import Level, Topology
from shardplan.report.place import ranking_text


def test_a_ranking() -> None:
    """A GB in a ring of two is one over each link: 0.1 s inside a node; across, two groups share a node's link, 2 s."""
    levels = (Level("node", 2, "switch", 1e9, 0.0), Level("gpu", 2, "switch", 1e10, 0.0))
    found = sp.place(sp.Mesh(a=2, b=2), Topology("small", levels), {"a": 1e9}, programs="stock", algorithm="ring")
    rows = [(line.split()[1:4], line.split("  ")[-1]) for line in ranking_text(found).splitlines()[1:3]]
    assert rows == [(["100", "ms", "1.00"], "a=[1, 2], b=[2, 1]"), (["2", "s", "20.00"], "a=[2, 1], b=[1, 2]")]

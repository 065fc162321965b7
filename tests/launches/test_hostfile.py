"""Hostfiles and rankfiles: forms, round trips, errors with file and line."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hardware.topologies import switches
from shardplan.core.mesh import Mesh
from shardplan.errors import ParseError, TopologyError
from shardplan.hardware import Topology
from shardplan.launches.fixes import hostfile_text
from shardplan.launches.hostfile import (
    devices_of,
    host_level,
    host_names,
    hosts_of,
    launch_of,
    parse_hostfile,
    parse_rankfile,
    rankfile_text,
)

SMALL = Topology.load("dgx-a100").resize(nodes=2, gpus=2)


@pytest.mark.parametrize(
    ("text", "names", "ids"),
    [
        ("b slots=2\na slots=2 max_slots=4  # as it comes\n", ("b", "a"), (0, 1, 2, 3)),
        # Open MPI adds up lines of one host.
        ("a slots=1\nb slots=2\na slots=1", ("a", "b"), (0, 1, 2, 3)),
        # MPICH takes lines in their order.
        ("a:1\nb:2\na:1", ("a", "b"), (0, 2, 3, 1)),
        ("a\nb\na\nb\n", ("a", "b"), (0, 2, 1, 3)),
        # Hosts alone: each takes as many ranks as it has devices.
        ("\n# two hosts\nuser@n-1.example\nn-2.example\n", ("user@n-1.example", "n-2.example"), (0, 1, 2, 3)),
    ],
)
def test_hostfiles(text, names, ids):
    hosts = parse_hostfile(text)
    assert hosts.names == names
    assert devices_of(hosts, SMALL) == ids


@given(st.permutations(range(12)), st.sampled_from([(1, 12), (2, 6), (3, 4), (6, 2), (12, 1)]))
@settings(max_examples=60)
def test_what_is_written_is_read(devices, shape):
    topology = switches(*shape)
    names = tuple(f"host{k}" for k in range(shape[0]))
    table = dict(enumerate(devices))
    order = parse_rankfile(rankfile_text(table, names), hosts=parse_hostfile("\n".join(names)))
    assert devices_of(order, topology) == tuple(devices)
    text = hostfile_text(table, names)
    slots = [[d % shape[1] for d in devices if d // shape[1] == h] for h in range(shape[0])]
    assert (text is None) == any(s != sorted(s) for s in slots)
    if text is not None:
        # Alone, the file also gives the order of the units; beside another, that of the ranks only.
        hosts = parse_hostfile(text)
        ranks = devices_of(hosts, topology)
        assert [hosts.names[d // shape[1]] for d in ranks] == [names[d // shape[1]] for d in devices]
        assert [d % shape[1] for d in ranks] == [d % shape[1] for d in devices]
        assert devices_of(parse_hostfile(text, hosts=parse_hostfile("\n".join(names))), topology) == tuple(devices)


def test_rank_orders():
    rows = "# rank host local_rank\n0 a 1\n1 a 0\n2 b 0\n3 b 1\n"
    assert devices_of(parse_rankfile(rows), SMALL) == (1, 0, 2, 3)
    # The hostfile gives the order of hosts, and counts them for +n.
    hosts = parse_hostfile("b\na")
    assert devices_of(parse_rankfile(rows, hosts=hosts), SMALL) == (3, 2, 0, 1)
    relative = "rank 0=+n1 slot=0\nrank 1=+n1 slot=1\nrank 2 = +n0 slots = 0\nrank 3=b slot=1"
    assert devices_of(parse_rankfile(relative, hosts=hosts), SMALL) == (2, 3, 0, 1)


def test_a_hostfile_orders_ranks_on_the_units_of_another():
    units = parse_hostfile("a\nb", "units")
    assert devices_of(parse_hostfile("b\na", hosts=units), SMALL) == (2, 3, 0, 1)
    assert devices_of(parse_hostfile("b slots=2\na slots=2", hosts=units), SMALL) == (2, 3, 0, 1)
    with pytest.raises(ParseError) as caught:
        parse_hostfile("b\nc", "hosts", units)
    assert str(caught.value) == "hosts, line 2: host 'c' is not in units; legal: a, b"
    with pytest.raises(TopologyError, match="order names 1 of the 2 hosts of units"):
        devices_of(parse_hostfile("b", "order", units), SMALL)


def test_hosts_are_the_units_of_a_level():
    assert host_level(Topology.load("dgx-a100")) == 0
    assert host_level(switches(2, 4, 8)) == 1
    assert host_level(Topology.load("nominal")) == -1
    assert host_level(Topology.load("nominal"), 8) == 0
    assert host_level(switches(2, 4, 8), 2) == 0
    with pytest.raises(TopologyError) as caught:
        host_level(SMALL, 3)
    assert str(caught.value) == (
        "3 hosts, but topology 'dgx-a100' has 2 nodes (node=2 x gpu=2); legal is a host for each: give the topology "
        "its size, as nodes=3"
    )
    launch = launch_of(Mesh(a=2, b=2), SMALL)
    assert (host_names(launch), launch.ids) == (("node0", "node1"), (0, 1, 2, 3))
    assert host_names(launch_of(Mesh(a=4), SMALL, parse_hostfile("x\ny"))) == ("x", "y")


def test_hosts_are_the_innermost_units_that_are_as_many():
    """The second level cuts nothing: its 2 units are those of the first, and the 4 of the third are too many."""
    assert host_level(switches(2, 1, 2, 2), 2) == 1


def test_a_host_has_slots_up_to_its_greatest():
    assert parse_rankfile("0 a 3\n1 b 0\n2 a 1\n").slots == (4, 1)


def test_the_mesh_says_which_rank_has_which_coordinates():
    launch = launch_of(Mesh({"a": 4}, devices=[0, 2, 1, 3]), SMALL, parse_hostfile("x:1\ny:1\nx:1\ny:1"))
    assert launch.ids == (0, 1, 2, 3)
    with pytest.raises(TopologyError, match=r"rank 5 of mesh a=4 devices=2:6 runs nowhere.*legal are the ranks 0 to 3"):
        launch_of(Mesh({"a": 4}, devices=range(2, 6)), SMALL)


FORMS = "'host slots=n' (Open MPI), 'host:n' (MPICH) or 'host'"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a slots=2\n???\n", f"hosts, line 2: '???' is no host; legal: {FORMS}"),
        ("a slots=two", "hosts, line 1: 'a' has 'two' slots; legal is a number of 1 or more"),
        ("\na:0", "hosts, line 2: 'a' has '0' slots; legal is a number of 1 or more"),
        ("a gpus=2", "hosts, line 1: 'gpus' is unknown; legal: slots, max_slots, port"),
        ("a slots=2\nb:2", "hosts, line 2: 'b:2' is of the form ':n', line 1 of the form 'slots='; legal is one "
         f"form in a file: {FORMS}"),
        (f"a slots={'9' * 5000}", f"hosts, line 1: 'a' has '{'9' * 76}... slots; legal is a number of 1 or more"),
        (f"a:{'9' * 5000}", f"hosts, line 1: 'a:{'9' * 74}... is no host; legal: {FORMS}"),
        ("a:4194305", "hosts: has 4194305 slots; legal are at most 4194304"),
        ("# nobody\n", f"hosts: names no host; legal are lines {FORMS}"),
    ],
)  # fmt: skip
def test_hostfile_errors(text, message):
    with pytest.raises(ParseError) as caught:
        parse_hostfile(text, "hosts")
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("rank 0=a", "ranks, line 1: 'rank 0=a' places no rank; legal: 'rank 0=host slot=0' or '0 host 0', slot a "
         "device's number on its host"),
        ("rank 0=a slot=0:x", "ranks, line 1: slot '0:x' is no number; legal is one, the device's number on 'a', or "
         "socket:core"),
        ("rank 0=a slot=0:1\nrank 1=a slot=1", "ranks, line 2: slot '1' is of another form than those before; legal is "
         "one in a file"),
        ("rank 0=a slot=0:1\nrank 1=a slot=0:1", "ranks, line 2: slot 0:1 of 'a' holds rank 0 (line 1) already; legal "
         "is one rank a slot"),
        ("0 a 0\n0 a 1", "ranks, line 2: rank 0 stands in line 1 already; each rank stands once"),
        ("0 a 0\n1 a 0", "ranks, line 2: slot 0 of 'a' holds rank 0 (line 1) already; legal is one rank a slot"),
        ("0 a 0\n2 a 1", "ranks: rank 1 is missing of 2; legal are the ranks 0 to n - 1"),
        ("0 c 0", "ranks, line 1: host 'c' is not in hosts; legal: a, b"),
        ("rank 0=+n2 slot=0", "ranks, line 1: '+n2' counts hosts of the hostfile, which has 2 hosts; legal is a "
         "host's name"),
        (f"{'9' * 5000} a 0", f"ranks, line 1: '{'9' * 76}... places no rank; legal: 'rank 0=host slot=0' or '0 host "
         "0', slot a device's number on its host"),
        (f"rank 0=a slot={'9' * 5000}", f"ranks, line 1: slot '{'9' * 76}... is no number; legal is one, the device's "
         "number on 'a', or socket:core"),
        ("", "ranks: places no rank; legal: 'rank 0=host slot=0' or '0 host 0', slot a device's number on its host"),
    ],
)  # fmt: skip
def test_rankfile_errors(text, message):
    with pytest.raises(ParseError) as caught:
        parse_rankfile(text, "ranks", parse_hostfile("a\nb", "hosts"))
    assert str(caught.value) == message


def test_what_does_not_fit_the_topology():
    with pytest.raises(TopologyError) as caught:
        devices_of(parse_hostfile("a slots=2\nb slots=1", "hosts"), SMALL)
    assert str(caught.value) == (
        "hosts places 3 ranks, topology 'dgx-a100' has 4 devices (node=2 x gpu=2); legal is a rank for each"
    )
    with pytest.raises(TopologyError) as caught:
        devices_of(parse_hostfile("a slots=3\nb slots=1", "hosts"), SMALL)
    assert str(caught.value) == ("hosts puts rank 2 on device 2 of 'a', which has 2 (node=2 x gpu=2); legal are 0 to 1")


def test_lists_as_slurm_writes_them():
    """A line of several hosts is as many lines of one, with the numbers as wide as they are written."""
    assert hosts_of("h[00-03]") == ["h00", "h01", "h02", "h03"]
    assert hosts_of("r[1-2]n[09-10],login,x[7,9-10]") == [
        "r1n09", "r1n10", "r2n09", "r2n10", "login", "x7", "x9", "x10"
    ]  # fmt: skip
    for listed, lines in (
        ("h[00-03]", "h00\nh01\nh02\nh03"),
        ("h[00-01],g1 slots=4", "h00 slots=4\nh01 slots=4\ng1 slots=4"),
        ("h[1-2]:2\nh[1-2]:2", "h1:2\nh2:2\nh1:2\nh2:2"),
    ):
        assert parse_hostfile(listed) == parse_hostfile(lines)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("h[03-00]", "hosts, line 1: 'h[03-00]': '03-00' is no range of numbers; legal is such as 00-03"),
        ("h[a]", "hosts, line 1: 'h[a]': 'a' is no range of numbers"),
        ("h[0-1", "hosts, line 1: 'h[0-1' names 'h[0-1', which is no host; legal is such as h[00-03,07],g1"),
        ("h[0-999999999]", "hosts, line 1: 'h[0-999999999]': '0-999999999' is no range of numbers"),
        ("h[0-999]n[0-999]", "hosts, line 1: 'h[0-999]n[0-999]' is more than 65536 hosts"),
        ("a,,b", "hosts, line 1: 'a,,b' names '', which is no host"),
    ],
)
def test_malformed_lists(text, message):
    with pytest.raises(ParseError) as caught:
        parse_hostfile(text, "hosts")
    assert str(caught.value).startswith(message)


def test_slots_of_sockets_and_cores_number_the_devices_in_their_order():
    """Two sockets of two: ranks on sockets 0, 1, 0, 1 are on devices 0, 2, 1, 3; of several cores the first counts."""
    text = "rank 0=a slot=0:0-3\nrank 1=a slot=1:0-3\nrank 2=a slot=0:4\nrank 3=a slot=1:10\n"
    found = parse_rankfile(text)
    assert found.ranks == ((0, 0), (0, 2), (0, 1), (0, 3)) and found.slots == (4,)
    assert devices_of(found, Topology.load("dgx-a100").resize(nodes=1, gpus=4)) == (0, 2, 1, 3)

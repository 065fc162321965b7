"""Logs of nccl-tests and rccl-tests: new and old columns, several tests, ranks' prefixes, and what is missing."""

import re

import pytest

from shardplan.errors import ParseError
from shardplan.hardware.measured.nccl_log import LogFacts, parse_log

# Written for this test in the form that nccl-tests 2.17 and later print.
NEW = """\
# nccl-tests version 2.17.1 nccl-headers=22803 nccl-library=22907
# Collective test starting: all_gather_perf
# nThread 1 nGpus 1 minBytes 8 maxBytes 4194304 step: 8(factor) warmup iters: 1 iters: 20 agg iters: 1 validation: 1
#
# Using devices
#  Rank  0 Group  0 Pid   4711 on    alpha-1 device  0 [0000:0a:00] NVIDIA H100 80GB HBM3
#  Rank  1 Group  0 Pid   4712 on    alpha-1 device  1 [0000:18:00] NVIDIA H100 80GB HBM3
#  Rank  2 Group  0 Pid   8120 on    alpha-2 device  0 [0000:0a:00] NVIDIA H100 80GB HBM3
#  Rank  3 Group  0 Pid   8121 on    alpha-2 device  1 [0000:18:00] NVIDIA H100 80GB HBM3
#
#                                                              out-of-place                       in-place
#       size         count      type   redop    root     time   algbw   busbw  #wrong     time   algbw   busbw  #wrong
#        (B)    (elements)                               (us)  (GB/s)  (GB/s)             (us)  (GB/s)  (GB/s)
           0             0     float    none      -1     0.21    0.00    0.00       0     0.20    0.00    0.00       0
       32768          2048     float    none      -1    31.25    1.05    0.79       0    30.50    1.07    0.81       0
     4194304        262144     float    none      -1   104.10   40.29   30.22       0   101.00   41.53   31.15     N/A
# Out of bounds values : 0 OK
# Avg bus bandwidth    : 10.495
#
# Collective test concluded: all_gather_perf
"""
# In the form of the versions before 2.13, which print no group and no root, as a launcher labels ranks; the library
# says its version itself.
OLD = """\
0: RCCL version 2.22.3+hip6.3
0: # nThread 1 nGpus 4 minBytes 8 maxBytes 1024 step: 2(factor) warmup iters: 5 iters: 20 validation: 0
0: #
0: # Using devices
0: #   Rank  0 Pid   9100 on node-b-0 device  0 [0x00] AMD Instinct MI300X
0: #   Rank  1 Pid   9100 on node-b-0 device  1 [0x03] AMD Instinct MI300X
0: #   Rank  2 Pid   9100 on node-b-0 device  2 [0x16] AMD Instinct MI300X
0: #   Rank  3 Pid   9100 on node-b-0 device  3 [0x84] AMD Instinct MI300X
0: #
0: #                                                     out-of-place                       in-place
0: #       size         count    type   redop     time   algbw   busbw  error     time   algbw   busbw  error
0: #        (B)    (elements)                     (us)  (GB/s)  (GB/s)            (us)  (GB/s)  (GB/s)
0:          512           128   float     sum    20.50    0.02    0.04  4e-07    21.00    0.02    0.04  1e-07
0:   1073741824     268435456   float     sum    29896   35.92   71.55    N/A    29411   36.51   72.73    N/A
0: # Out of bounds values : 0 OK
"""


def test_a_new_log_on_two_nodes() -> None:
    found = parse_log(NEW, LogFacts("alpha", nics=(8, 400.0)), "new.log")
    assert [(s.nbytes, s.in_place, round(s.seconds * 1e6, 6)) for s in found] == [
        (32768, False, 31.25), (32768, True, 30.5), (4194304, False, 104.1), (4194304, True, 101.0),
    ]  # fmt: skip
    first, second = found[:2]
    assert (first.id, second.id) == ("alpha/2x2/all_gather/32768", "alpha/2x2/all_gather/32768-in-place")
    assert (first.op, first.gpu, first.library, first.system) == ("all_gather", "H100", "nccl-2.29.7", "alpha")
    assert (first.nodes, first.gpus_per_node, first.groups) == (2, 2, 1)
    assert (first.nics_per_node, first.nic_gbps, first.source) == (8, 400.0, "new.log")


def test_an_old_log_with_prefixes_on_one_node() -> None:
    found = parse_log(OLD, LogFacts("b", op="all_reduce"))
    assert [(s.nbytes, s.in_place, round(s.seconds * 1e6, 6)) for s in found] == [
        (512, False, 20.5), (512, True, 21.0), (2**30, False, 29896.0), (2**30, True, 29411.0),
    ]  # fmt: skip
    one = found[0]
    assert (one.library, one.gpu, one.nodes, one.gpus_per_node, one.op) == (
        "rccl-2.22.3", "MI300X", 1, 4, "all_reduce",
    )  # fmt: skip


def test_several_tests_of_one_log() -> None:
    both = NEW + OLD.replace("0: # nThread", "srun ./build/reduce_scatter_perf_mpi -b 8\n0: # nThread")
    found = parse_log(both, LogFacts("a", nics=(8, 400.0)))
    assert [(s.op, s.nodes, s.gpu) for s in found[3:5]] == [("all_gather", 2, "H100"), ("reduce_scatter", 1, "MI300X")]


def test_groups_that_share_nodes_run_at_once() -> None:
    """Ranks 0 and 2 are group 0, ranks 1 and 3 group 1; a third group on other nodes is none of theirs."""
    log = NEW.replace("Rank  1 Group  0", "Rank  1 Group  1").replace("Rank  3 Group  0", "Rank  3 Group  1")
    apart = log.replace(
        "#  Rank  3", "#  Rank  4 Group  2 Pid 1 on alpha-3 device 0 [0x1] NVIDIA H100 80GB HBM3\n#  Rank  3"
    )
    for text in (log, apart):
        one = parse_log(text, LogFacts("a", nics=(8, 400.0)))[0]
        assert (one.nodes, one.gpus_per_node, one.groups) == (2, 1, 2)


def test_what_is_said_beside_a_log_wins() -> None:
    one = parse_log(NEW, LogFacts("rack", op="alltoall", gpu="GB200", gpus_per_node=4))[0]
    assert (one.op, one.gpu, one.nodes, one.gpus_per_node, one.nics_per_node) == ("alltoall", "GB200", 1, 4, 0)


@pytest.mark.parametrize(
    ("name", "gpu"),
    [
        ("NVIDIA A100-SXM4-80GB", "A100"),
        ("Tesla V100-SXM2-16GB", "V100"),
        ("NVIDIA B300 SXM6 AC", "B300"),
        ("AMD Instinct MI250X", "MI250X"),
        ("NVIDIA H100 NVL", "NVIDIA H100 NVL"),  # pairs of cards have not the links of an H100 of a DGX
        ("Tesla V100-PCIE-16GB", "Tesla V100-PCIE-16GB"),
        ("NVIDIA Graphics Device", "NVIDIA Graphics Device"),
    ],
)
def test_names_of_gpus(name: str, gpu: str) -> None:
    found = parse_log(NEW.replace("NVIDIA H100 80GB HBM3", name), LogFacts("a", nics=(8, 400.0)))
    assert found[0].gpu == gpu


@pytest.mark.parametrize(
    ("text", "facts", "message"),
    [
        ("nothing\n", LogFacts("a"),
         "log has no table of times; legal is the output of nccl-tests or rccl-tests"),
        (OLD, LogFacts("a"), "log does not name its test; say which it was, such as all_reduce"),
        (NEW, LogFacts("a"), "log ran on 2 nodes; say the NICs of a node and their Gbit/s, such as 8x400"),
        (NEW, LogFacts("a", gpus_per_node=3), "log: 4 ranks do not fill nodes of 3 GPUs"),
        (NEW[NEW.index("#       size") :], LogFacts("a", op="all_gather"),
         "log has a table but no lines '#  Rank  0 ... on HOST device 0 [..] GPU' before it"),
    ],
)  # fmt: skip
def test_what_a_log_lacks(text: str, facts: LogFacts, message: str) -> None:
    with pytest.raises(ParseError) as error:
        parse_log(text, facts, "log")
    assert str(error.value) == message


def test_a_time_that_is_no_number_is_no_row() -> None:
    with pytest.raises(ParseError, match=r"^the log has no table of times; legal is the output of nccl-tests"):
        parse_log(re.sub(r"(31\.25|104\.10)", r"\1.7", NEW), LogFacts(nics=(1, 100.0)))
    with pytest.raises(ParseError, match=r"^the log has no table of times"):
        parse_log(re.sub(r"(32768|4194304) ", "9" * 5000 + " ", NEW), LogFacts(nics=(1, 100.0)))

"""srun and torchrun put ranks where they are to be, by what their manuals say, read apart from the code."""

from __future__ import annotations

import random
import re

from shardplan.launches.fixes import ORDER, srun_text, torchrun_text


def run_srun(text: str, hosts: tuple[str, ...]) -> list[str] | None:
    """The host of every rank, as Slurm's manual has it: hosts of an allocation are sorted, a list is as it is."""
    if text.startswith("not"):
        return None
    if "arbitrary" in text:
        return re.findall(r"END'\n(.*)END\n", text, re.S)[0].split()
    each = int(re.findall(r"per-node=(\d+)", text)[0])
    nodes = sorted(re.findall(r"nodelist=(\S+)", text)[0].split(","))
    assert sorted(hosts) == nodes
    if "cyclic" in text:
        return [nodes[r % len(nodes)] for r in range(each * len(nodes))]
    return [nodes[r // each] for r in range(each * len(nodes))]


def run_torchrun(text: str) -> list[str] | None:
    if text.startswith("not"):
        return None
    rows = re.findall(r"# on (\S+)\ntorchrun .*per-node=(\d+) --node-rank=(\d+) --master-addr=(\S+)", text)
    by_rank = sorted(rows, key=lambda row: int(row[2]))
    assert {row[3] for row in rows} == {by_rank[0][0]}  # all meet at the host of rank 0
    return [host for host, each, _, _ in by_rank for _ in range(int(each))]


def test_ranks_run_where_they_are_to() -> None:
    drawn = random.Random(5)
    said = {"srun": 0, "torchrun": 0, "list": 0}
    for _ in range(300):
        hosts = tuple(drawn.sample(["a", "b", "c", "d"], drawn.randint(1, 4)))
        room = drawn.randint(1, 3)
        of = [h for h in range(len(hosts)) for _ in range(room)]
        way = drawn.randrange(4)
        if way == 0:
            drawn.shuffle(of)
        elif way == 1:
            of = [r % len(hosts) for r in range(len(of))]
        elif way == 2:
            order = drawn.sample(range(len(hosts)), len(hosts))
            of = [h for h in order for _ in range(room)]
        used = [0] * len(hosts)
        table: dict[int, int] = {}
        for rank, host in enumerate(of):
            table[rank] = host * room + used[host]
            used[host] += 1
        wanted = [hosts[h] for h in of]
        text = srun_text(table, hosts)
        assert run_srun(text, hosts) == wanted
        said["srun"] += 1
        said["list"] += "arbitrary" in text
        if (found := run_torchrun(torchrun_text(table, hosts))) is not None:
            assert found == wanted
            said["torchrun"] += 1
        else:
            assert wanted != [h for k in range(0, len(of), room) for h in [wanted[k]] * room]
    assert said["torchrun"] > 100 and 50 < said["list"] < 250


def test_devices_out_of_order_take_a_rankfile() -> None:
    assert srun_text({0: 1, 1: 0}, ("a",)) == torchrun_text({0: 1, 1: 0}, ("a",)) == ORDER + "\n"

"""Where ranks run as Slurm's `srun` and `torchrun` say it, for programs whose ranks have fixed coordinates.

Both give a host's devices to its ranks in ascending order, which is all that they can say of devices; `srun` spreads
ranks in blocks, in turn, or as a list of hosts says, `torchrun` in blocks by the hosts' node ranks. So do programs that
number their mesh themselves, such as torchtitan's, in which order of ranks is all that moves an axis.

Source: SchedMD/slurm `srun --distribution` and SLURM_HOSTFILE; PyTorch `torchrun --node-rank`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

ORDER = "not expressible: on a host devices go to ranks in ascending order; use the rankfile"


def srun_text(device_of_rank: Mapping[int, int], hosts: Sequence[str]) -> str:
    r"""Return how `srun` places ranks so, as shell.

    `device_of_rank` has topology ids; the hosts are in the order of the units, all of one size.

    >>> srun_text({0: 0, 1: 2, 2: 1, 3: 3}, ("a", "b"))
    'srun --nodelist=a,b --ntasks-per-node=2 --distribution=cyclic ...\n'
    """
    of = _hosts_of_ranks(device_of_rank, len(hosts))
    if of is None:
        return ORDER + "\n"
    room = len(of) // len(hosts)
    start = f"srun --nodelist={','.join(hosts)} --ntasks-per-node={room}"
    # Slurm sorts the hosts of an allocation; those of another order only a list can say.
    if list(hosts) == sorted(hosts):
        for way, spread in (
            ("block", [r // room for r in range(len(of))]),
            ("cyclic", [r % len(hosts) for r in range(len(of))]),
        ):
            if of == spread:
                return f"{start} --distribution={way} ...\n"
    lines = "".join(f"{hosts[host]}\n" for host in of)
    return f"cat > ranks.txt <<'END'\n{lines}END\nSLURM_HOSTFILE=ranks.txt srun --distribution=arbitrary ...\n"


def torchrun_text(device_of_rank: Mapping[int, int], hosts: Sequence[str]) -> str:
    """Return which node rank each host has under `torchrun`, as shell; arguments as for `srun_text`.

    >>> print(torchrun_text({0: 2, 1: 3, 2: 0, 3: 1}, ("a", "b")), end="")
    # on b
    torchrun --nnodes=2 --nproc-per-node=2 --node-rank=0 --master-addr=b ...
    # on a
    torchrun --nnodes=2 --nproc-per-node=2 --node-rank=1 --master-addr=b ...
    """
    of = _hosts_of_ranks(device_of_rank, len(hosts))
    if of is None:
        return ORDER + "\n"
    room = len(of) // len(hosts)
    nodes = of[::room]
    if of != [host for host in nodes for _ in range(room)]:
        return "not expressible: torchrun gives a host ranks in a row; use the mesh for torch or jax, or srun\n"
    head = f"torchrun --nnodes={len(hosts)} --nproc-per-node={room}"
    return "".join(
        f"# on {hosts[host]}\n{head} --node-rank={k} --master-addr={hosts[nodes[0]]} ...\n"
        for k, host in enumerate(nodes)
    )


def _hosts_of_ranks(device_of_rank: Mapping[int, int], count: int) -> list[int] | None:
    """The host of every rank; None where some host's devices are not in the order of its ranks."""
    room = len(device_of_rank) // count
    used = [0] * count
    found: list[int] = []
    for _, device in sorted(device_of_rank.items()):
        host, slot = divmod(device, room)
        if slot != used[host]:
            return None
        used[host] += 1
        found.append(host)
    return found

"""Fixes: how to launch a placement, as text that runs, for torch, JAX, Megatron, launchers and nccl-tests.

torch and JAX keep where ranks run and renumber the mesh. MPI, Slurm and torchrun keep what rank has what coordinate and
move ranks, which is all that helps a program that makes its own mesh, such as torchtitan.
Megatron numbers ranks by an order string, which is given where one fits where ranks run, else a rankfile for its
default order. nccl-tests split the ranks of a launch host by host into the groups of the placement.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from shardplan.core.mesh import Mesh
from shardplan.errors import ParseError
from shardplan.hardware.placement import Placement, divisors
from shardplan.launches.hostfile import host_names, rankfile_text
from shardplan.launches.launch import Launch, ring_of
from shardplan.launches.megatron import (
    DEFAULT,
    MAPPING,
    MAPPING_OPTION,
    fastest_first,
    name_of,
    order_ranks,
    orders_of,
    takes_order,
)
from shardplan.launches.verdict import analyse

Ints = NDArray[np.int64]
_LITERAL = 16  # numbers of an array that is written out, in a line; longer ones as an expression where there is one
# The parameter of `initialize_model_parallel` for each of Megatron's names; the data degree is what is left.
_ARGUMENTS = {
    "tp": "tensor_model_parallel_size",
    "pp": "pipeline_model_parallel_size",
    "cp": "context_parallel_size",
    "ep": "expert_model_parallel_size",
}


@dataclass(frozen=True, slots=True)
class Fix:
    """How to launch a placement."""

    placement: Placement
    torch: str  # Python that makes `mesh`, a `DeviceMesh`; the process group exists
    torch_note: str  # where torch needs more than that; else empty
    jax: str  # Python that makes `mesh`, a `jax.sharding.Mesh`
    megatron: str  # a call of `initialize_model_parallel`, or "not expressible" and why
    megatron_order: str | None  # the order string of the call, None where there is none
    megatron_rankfile: str | None  # Open MPI's rankfile that places Megatron's default order, where no string does
    rankfile: str  # Open MPI's rankfile, for a program whose ranks have the coordinates they have now
    srun: str  # how Slurm's srun places ranks so, as shell, or "not expressible" and why
    torchrun: str  # the node rank of each host, as shell, or "not expressible" and why
    hostfile: str | None  # the same as a hostfile, None where the order of hosts is not enough
    nccl_tests: tuple[tuple[tuple[str, ...], str], ...]  # by axes the setting that makes nccl-tests run in their groups

    @property
    def use(self) -> str:
        """The fix in a few words: an option where Megatron-LM has one, else which text says it."""
        if self.megatron_order == MAPPING:
            return f"`{MAPPING_OPTION}`"
        return "the call for megatron" if self.megatron_order else "the mesh for torch or jax, or the rankfile"

    def texts(self) -> dict[str, str]:
        """Return the fix by framework or launcher: torch, jax, megatron, torchrun, slurm, mpi and nccl-tests."""
        mpi = "# rankfile; a slot is the device's number on its host\n" + self.rankfile
        # Of the two forms Open MPI reads only this one in the order of its lines.
        if self.hostfile is not None and " slots=" in self.hostfile:
            mpi = "# hostfile, its order is enough\n" + self.hostfile
        return {
            "torch": self.torch + (f"# {self.torch_note}\n" if self.torch_note else ""),
            "jax": self.jax,
            "megatron": self.megatron + "\n" + (self.megatron_rankfile or ""),
            "torchrun": self.torchrun,
            "slurm": self.srun,
            "mpi": mpi,
            "nccl-tests": "".join(f"{', '.join(axes)}: {split}\n" for axes, split in self.nccl_tests),
        }


def fix(launch: Launch, placement: Placement, together: Sequence[tuple[str, ...]] = (), device: str = "cuda") -> Fix:
    """Return how to launch a placement instead of what is launched now, as text.

    `launch` says where ranks run and which coordinates they have; the placement is of the same axes on the same
    topology. `together` are further tuples of axes that nccl-tests should run over; `device` is torch's device type.
    """
    order, call, default_ranks = _megatron(launch, placement)
    ids = placement.device_mesh()
    hosts = host_names(launch)
    stay = dict(zip(launch.mesh.devices, ids.reshape(-1).tolist(), strict=True))
    rankfile = None
    if default_ranks is not None:
        table = zip(default_ranks.reshape(-1).tolist(), ids.reshape(-1).tolist(), strict=True)
        rankfile = rankfile_text(dict(table), hosts)
    ranks = ranks_by_coordinate(launch, placement)
    text, note = _torch(launch, ranks, device)
    wide = [(axis,) for axis in launch.mesh.axes if launch.mesh.shape[axis] > 1]
    canonical = Launch.of(placement)
    splits = {axes: nccl_split(canonical.groups(axes)) for axes in [*wide, *together]}
    return Fix(
        placement,
        text,
        note,
        _jax(placement, ranks),
        call,
        order,
        rankfile,
        rankfile_text(stay, hosts),
        srun_text(stay, hosts),
        torchrun_text(stay, hosts),
        hostfile_text(stay, hosts),
        tuple((axes, s or "not expressible") for axes, s in splits.items()),
    )


def ranks_by_coordinate(launch: Launch, placement: Placement) -> Ints:
    """Return the ranks that stand where a placement wants each coordinate, int64 in the mesh's shape.

    They are 0, 1, ... in row-major order where that is the placement up to renaming equal units.
    """
    natural = np.arange(launch.mesh.size).reshape(launch.mesh.sizes)
    if _gives(launch, natural, placement):
        return natural
    rank_at = np.empty(launch.mesh.size, dtype=np.int64)
    rank_at[list(launch.ids)] = launch.mesh.devices
    return rank_at[placement.device_mesh()]


def _gives(launch: Launch, ranks: Ints, placement: Placement) -> bool:
    """Say whether these ranks, where they run now, are the placement."""
    table = launch.device_of_rank()
    flat: list[int] = ranks.reshape(-1).tolist()
    if any(r not in table for r in flat):
        return False
    if any(level != level.sound() for level in launch.topology.levels):
        # Its units are not equal: another name is another placement.
        return [table[r] for r in flat] == placement.device_mesh().reshape(-1).tolist()
    mesh = Mesh(launch.mesh.shape, devices=flat)
    found = analyse(Launch(mesh, launch.topology, tuple(table[r] for r in flat)))
    return (found.matrix, found.order) == (placement.matrix, placement.order) and not found.felt


def strided_text(ids: Ints, arange: str, permute: str) -> str | None:
    """Return an expression for a permutation of 0, 1, ... of any shape: a range with its digits in another order.

    `arange` is the name of the function that counts, `permute` that of the method that orders dims. None where there is
    no such expression.

    >>> strided_text(np.arange(6).reshape(2, 3).T, "np.arange", "transpose")
    'np.arange(6).reshape(2, 3).transpose(1, 0).reshape(3, 2)'
    """
    flat = ids.reshape(-1)
    digits: list[tuple[int, int]] = []  # size and step of the value, the fastest first
    stride = 1  # of the digit in the row
    for size in reversed(ids.shape):
        left = size
        while left > 1:
            step = int(flat[stride] - flat[0])
            run = max(
                r for r in divisors(left) if np.array_equal(flat[: r * stride : stride], flat[0] + step * np.arange(r))
            )
            if run == 1:
                return None
            digits.append((run, step))
            stride *= run
            left //= run
    digits.reverse()
    order = sorted(range(len(digits)), key=lambda k: -digits[k][1])
    shape = [digits[k][0] for k in order]
    axes = [order.index(k) for k in range(len(digits))]
    if not digits or not np.array_equal(np.arange(ids.size).reshape(shape).transpose(axes).reshape(ids.shape), ids):
        return None
    sizes, turn, last = (", ".join(map(str, x)) for x in (shape, axes, ids.shape))
    return f"{arange}({ids.size}).reshape({sizes}).{permute}({turn}).reshape({last})"


def _array_text(ids: Ints, arange: str, permute: str, literal: str) -> str:
    """An array of numbers as text, a long one as an expression where there is one."""
    text = strided_text(ids, arange, permute) if ids.size > _LITERAL else None
    return text or f"{literal}({ids.tolist()})"


def _names(mesh: Mesh) -> str:
    """The axes as a tuple of Python."""
    return f"({', '.join(repr(a) for a in mesh.axes)}{',' if len(mesh.axes) == 1 else ''})"


def _torch(launch: Launch, ranks: Ints, device: str) -> tuple[str, str]:
    """Python that makes the mesh, and a note where its groups' rings come out wrong all the same."""
    names, sizes = _names(launch.mesh), tuple(launch.mesh.sizes)
    if np.array_equal(ranks.reshape(-1), np.arange(ranks.size)):
        text = (
            "from torch.distributed.device_mesh import init_device_mesh\n"
            f'mesh = init_device_mesh("{device}", {sizes}, mesh_dim_names={names})\n'
        )
    else:
        array = _array_text(ranks, "torch.arange", "permute", "torch.tensor")
        text = (
            "import torch\nfrom torch.distributed.device_mesh import DeviceMesh\n"
            f'mesh = DeviceMesh("{device}", {array}, mesh_dim_names={names})\n'
        )
    table = launch.device_of_rank()
    flat: list[int] = ranks.reshape(-1).tolist()
    mesh = Mesh(launch.mesh.shape, devices=flat)
    sorted_ranks = Launch(mesh, launch.topology, tuple(table[r] for r in flat), by_rank=True)
    lost = [axis for axis in mesh.axes if any(ring_of(sorted_ranks, (axis,)).detours)]
    note = ""
    if lost:
        note = (
            f"torch sorts the ranks of a group, which interleaves the rings over {', '.join(lost)}: make their groups "
            "with new_group(ranks, sort_ranks=False) in the order of mesh.mesh (pytorch#176126, #193224)"
        )
    return text, note


def _jax(placement: Placement, ranks: Ints) -> str:
    """Python that makes the mesh: by `create_device_mesh` where that keeps the order of the ranks, as off a torus."""
    names, torus = _names(placement.mesh), any(level.link == "torus" for level in placement.topology.levels)
    if not torus and np.array_equal(ranks.reshape(-1), np.arange(ranks.size)):
        return (
            "from jax.experimental.mesh_utils import create_device_mesh\nfrom jax.sharding import Mesh\n"
            f"mesh = Mesh(create_device_mesh({tuple(placement.mesh.sizes)}), {names})\n"
        )
    array = _array_text(ranks, "np.arange", "transpose", "np.array")
    return (
        "import jax\nimport numpy as np\nfrom jax.sharding import Mesh\n"
        f"mesh = Mesh(np.array(jax.devices())[{array}], {names})\n"
    )


def _megatron(launch: Launch, placement: Placement) -> tuple[str | None, str, Ints | None]:
    """The order string, the call or why there is none, and then the ranks of the default order."""
    mesh = launch.mesh
    try:
        default = order_ranks(mesh, fastest_first(DEFAULT, mesh))
    except ParseError as error:
        return None, f"not expressible: {str(error).split(': ', 1)[1]}", None
    for order in _orders(launch, placement):
        if takes_order(order, mesh) and _gives(launch, order_ranks(mesh, fastest_first(order, mesh)), placement):
            sizes = {name_of(axis): size for axis, size in mesh.shape.items()}
            degrees = "".join(f"{word}={sizes[name]}, " for name, word in _ARGUMENTS.items() if name in sizes)
            option = {DEFAULT: "Megatron-LM's default", MAPPING: f"Megatron-LM's option {MAPPING_OPTION}"}.get(order)
            note = f"  # {option}" if option else "  # no option of Megatron-LM says this order"
            return order, f'parallel_state.initialize_model_parallel({degrees}order="{order}"){note}', None
    return None, "not expressible as an order that Megatron takes; with the default order use this rankfile", default


def _orders(launch: Launch, placement: Placement) -> Iterator[str]:
    """Yield candidates: those that give the matrix host by host, then, where ranks do not stand so, all others."""
    first = orders_of(placement)
    yield from first
    if any(rank != device for rank, device in launch.device_of_rank().items()):
        yield from (order for order in _distinct_orders(launch.mesh) if order not in first)


def _distinct_orders(mesh: Mesh) -> Iterator[str]:
    """Yield all order strings in the order of permutations, those that differ only in degrees of 1 once."""
    seen: set[tuple[str, ...]] = set()
    for names in itertools.permutations(DEFAULT.split("-")):
        text = "-".join(names)
        wide = tuple(axis for axis in fastest_first(text, mesh) if mesh.shape[axis] > 1)
        if wide not in seen:
            seen.add(wide)
            yield text


def nccl_split(groups: Ints) -> str | None:
    """Return the setting that makes nccl-tests split its ranks into groups, `NCCL_TESTS_SPLIT="..."`.

    `groups` are ranks, int64 [groups, k], every rank once, numbered host by host. None where neither a division, nor a
    modulus, nor a mask splits so.

    Source: NVIDIA/nccl-tests README: a rank's group is `rank / v`, `rank % v` or `rank & mask`.

    >>> nccl_split(np.array([[0, 2], [1, 3]]))
    'NCCL_TESTS_SPLIT="MOD 2"'
    """
    size, k = groups.size, groups.shape[1]
    colour = np.empty(size, dtype=np.int64)
    colour[groups] = np.arange(len(groups))[:, None]
    ranks = np.arange(size)
    varied = int(np.bitwise_or.reduce((groups ^ groups[:, :1]).reshape(-1)))
    mask = ((1 << max(size - 1, 1).bit_length()) - 1) & ~varied
    offers = [(f"DIV {k}", ranks // k), (f"MOD {size // k}", ranks % (size // k)), (f"AND {mask:#x}", ranks & mask)]
    for text, split in offers:
        if _same_partition(split, colour):
            return f'NCCL_TESTS_SPLIT="{text}"'
    return None


def _same_partition(a: Ints, b: Ints) -> bool:
    """Say whether two colourings part the same ranks."""
    return len(np.unique(a)) == len(np.unique(b)) == len(np.unique(np.stack([a, b]), axis=1).T)


# Where ranks run as Slurm's `srun` and `torchrun` say it, for programs whose ranks have fixed coordinates.
#
# Both give a host's devices to its ranks in ascending order, which is all that they can say of devices; `srun` spreads
# ranks in blocks, in turn, or as a list of hosts says, `torchrun` in blocks by the hosts' node ranks. So do programs
# that
# number their mesh themselves, such as torchtitan's, in which order of ranks is all that moves an axis.
#
# Source: SchedMD/slurm `srun --distribution` and SLURM_HOSTFILE; PyTorch `torchrun --node-rank`.


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


def hostfile_text(device_of_rank: Mapping[int, int], hosts: Sequence[str]) -> str | None:
    """Return a hostfile that gives ranks their hosts, where its order alone can; arguments as for `rankfile_text`.

    That is `host slots=n` where every host is one run of ranks, else MPICH's `host:n`, a line for every run. None where
    some host's devices are not in the order of its ranks: that takes a rankfile, or a map of devices on the host.

    >>> print(hostfile_text({0: 2, 1: 3, 2: 0, 3: 1}, ("a", "b")), end="")
    b slots=2
    a slots=2
    """
    found = _hosts_of_ranks(device_of_rank, len(hosts))
    if found is None:
        return None
    runs = [(host, len(list(ranks))) for host, ranks in itertools.groupby(found)]
    form = " slots={}" if len(runs) == len(hosts) else ":{}"
    return "".join(f"{hosts[host]}{form.format(n)}\n" for host, n in runs)


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

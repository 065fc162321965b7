"""DTensor's placements as types, without a process group: a type says what DTensor's own index function says, or none.

`DeviceMesh` is made without its backend, so nothing here communicates.
"""

import itertools
import math

import pytest

torch = pytest.importorskip("torch")
from torch.distributed.device_mesh import DeviceMesh  # noqa: E402
from torch.distributed.tensor import Replicate, Shard  # noqa: E402
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta  # noqa: E402
from torch.distributed.tensor.placement_types import _StridedShard  # noqa: E402

from shardplan.interop.torch.layout import holdings, type_of  # noqa: E402

CUTS = (Replicate(), Shard(0), *(_StridedShard(0, split_factor=k) for k in (2, 3, 4)))


def spec(sizes: tuple[int, ...], n: int, placements) -> DTensorSpec:
    """Of `n` elements on a mesh without processes."""
    mesh = DeviceMesh("cpu", torch.arange(math.prod(sizes)).reshape(sizes), _init_backend=False, _rank=0)
    return DTensorSpec(mesh, tuple(placements), tensor_meta=TensorMeta(torch.Size((n,)), (1,), torch.float32))


@pytest.mark.parametrize("sizes", [(3, 2), (2, 2, 2)])
def test_a_type_is_what_devices_hold(sizes: tuple[int, ...]) -> None:
    typed = 0
    for n, cuts in itertools.product((*range(1, 9), 12, 13), itertools.product(CUTS, repeat=len(sizes))):
        asked = spec(sizes, n, cuts)
        t = type_of(asked)
        if t is None:
            continue
        typed += any(isinstance(p, _StridedShard) for p in cuts)
        held = holdings(asked.shape, asked.placements, asked.mesh, asked.shard_order)
        for ((start, stop),), device in zip(t.boxes().tolist(), t.mesh.devices, strict=True):
            assert held[device].runs == (((start, 0, stop - start),) if stop > start else (),), (t, device)
    assert typed


def test_on_an_uneven_dim_a_strided_shard_is_no_type() -> None:
    """Of 13 elements device 4 holds the 7th and the 12th, which no box does; of 12 two neighbours."""
    cuts = (_StridedShard(0, split_factor=2), Shard(0))
    assert str(type_of(spec((3, 2), 12, cuts))) == "f32[12@(d1,d0)]"
    odd = spec((3, 2), 13, cuts)
    assert type_of(odd) is None
    assert holdings(odd.shape, odd.placements, odd.mesh, odd.shard_order)[4].runs == (((6, 0, 1), (11, 1, 1)),)

"""The reference semantics: every device's array in one process, with numpy. The only oracle of meaning."""

from __future__ import annotations

import math
from collections.abc import Container, Sequence
from typing import Any

import numpy as np

from shardplan.core import validation
from shardplan.core.dtypes import COMBINE, identity, numpy_dtype
from shardplan.core.mesh import Mesh
from shardplan.core.messages import at_root
from shardplan.core.op import Array, Shards, base_array, own_array, poison
from shardplan.core.program import Program
from shardplan.core.tensor import TensorType, type_of
from shardplan.core.walk import walk
from shardplan.errors import LayoutError, excerpt


def _index(box: np.ndarray) -> tuple[slice, ...]:
    return tuple(slice(int(a), int(b)) for a, b in box)


def distribute(array: Array, t: TensorType | str, *, mesh: Mesh | str | None = None) -> list[Array]:
    """Return the shard of every device, in mesh order; with `mesh` the type may be text.

    Partial types get addends that reduce to the array exactly: every element has one owner along the partial axes
    (its flat index modulo their product), the others hold the identity, or, for sums of integers, pseudo-random values
    that the owner's addend cancels. Away from the root axes the shards are poison.

    >>> from shardplan.core.mesh import Mesh
    >>> distribute(np.arange(4), TensorType("i64", (4,), ("x",), Mesh(x=2)))
    [array([0, 1]), array([2, 3])]
    """
    t = type_of("the type", t, mesh)
    dtype = numpy_dtype(t.dtype)
    if not isinstance(array, np.ndarray):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise LayoutError(f"distribute takes a numpy array, got {excerpt(array)}")
    if tuple(array.shape) != t.shape or array.dtype != dtype:
        raise LayoutError(f"an array of dtype {array.dtype} and shape {array.shape} is not of type {t}")
    if t.layout.boxes is not None:
        stored = [np.empty(t.local_shape(k), dtype) for k in range(t.mesh.size)]
        for device, storage in zip(t.mesh.devices, stored, strict=True):
            for where, view in t.layout.boxes.views(device, storage):
                view[...] = array[where]
        return stored
    return spread_addends(array, t, t.boxes(), np.arange(array.size).reshape(array.shape))


def spread_addends(array: Array, t: TensorType, boxes: np.ndarray, flat: Array) -> list[Array]:
    """Return what every device holds of an array in its box, int64 [devices, ndim, 2].

    `flat` numbers the elements of the whole value; only their remainders by the number of addends count.
    """
    dtype, held = numpy_dtype(t.dtype), at_root(t)
    addends = math.prod(t.mesh.span(name).size for name in t.layout.partial)
    index = t.mesh.index(t.layout.partial)
    owner = flat % addends if addends > 1 else flat
    shards: list[Array] = []
    for k in range(t.mesh.size):
        where = _index(boxes[k])
        part = array[where]
        if not held[k]:
            shards.append(poison(part.shape, dtype))
        elif addends > 1:
            shards.append(_addend(part, owner[where], int(index[k]), addends, t.layout.reduction or "sum"))
        else:
            shards.append(part.copy())
    return shards


def _addend(part: Array, owner: Array, index: int, addends: int, reduction: str) -> Array:
    """The addend of one device: the values it owns, and identities or cancelling noise elsewhere."""
    dtype = part.dtype
    if reduction != "sum" or dtype.kind not in "iu":
        return np.where(owner == index, part, identity(reduction, dtype)).astype(dtype)
    flat = np.arange(part.size, dtype=np.int64).reshape(part.shape)
    # Small numbers that differ between neighbours and between addends (11 is prime, and divides neither 7 nor 13): an
    # addend that is dropped, doubled or taken from elsewhere then shows in the sum, as identities would not.
    noise = [((flat * 7 + k * 13) % 11).astype(dtype) for k in range(addends)]
    rest = sum((np.where(owner == k, dtype.type(0), noise[k]) for k in range(addends)), np.zeros_like(part))
    with np.errstate(over="ignore"):  # integers wrap
        return np.where(owner == index, part - rest, noise[index]).astype(dtype)


def collect(shards: Shards, t: TensorType | str, *, mesh: Mesh | str | None = None) -> Array:
    """Return the global array of shards in mesh order; addends are reduced, replicas must be equal.

    With `mesh` the type may be text.

    Raises `LayoutError` naming the first device whose shard has a wrong shape or differs from its replica.
    """
    t = type_of("the type", t, mesh)
    shards = validation.items("shards", shards, "arrays, one a device")
    if len(shards) != t.mesh.size:
        raise LayoutError(f"{len(shards)} shards for the {t.mesh.size} devices of {t!r}")
    if t.layout.boxes is None:
        return gather(shards, t, t.boxes(), t.shape)
    joint = _Joint(t, t.shape)
    for k, (device, shard) in enumerate(zip(t.mesh.devices, shards, strict=True)):
        storage = _shard(k, shard, t.local_shape(k), t)
        for where, view in t.layout.boxes.views(device, np.ascontiguousarray(storage)):
            joint.write(k, where, view)
    return joint.array


class _Joint:
    """An array that is put together of what devices hold; replicas must be equal."""

    def __init__(self, t: TensorType, shape: tuple[int, ...]) -> None:
        self.type = t
        self.array = np.zeros(shape, dtype=numpy_dtype(t.dtype))
        self.written = np.zeros(shape, dtype=bool)

    def write(self, device: int, where: tuple[slice, ...], part: Array) -> None:
        """Take what a device, given by its place, holds."""
        written = self.written[where]
        if written.any():
            known = np.where(written, self.array[where], part)
            if not np.array_equal(known, part, equal_nan=self.array.dtype.kind in "fcV"):
                raise LayoutError(f"device {device} holds other values than its replica, under {self.type}")
        self.array[where] = part
        self.written[where] = True


def _shard(device: int, value: object, legal: tuple[int, ...], t: TensorType) -> Array:
    """Return the shard of a device, given by its place; raises `LayoutError` for another shape or dtype."""
    shard = _array(f"device {device}", value)
    if shard.shape != legal:
        raise LayoutError(f"device {device}: shard of shape {shard.shape}, but {t} has {legal}")
    if shard.dtype != numpy_dtype(t.dtype) and not np.can_cast(shard.dtype, numpy_dtype(t.dtype), "same_kind"):
        raise LayoutError(f"device {device}: a shard of dtype {shard.dtype}, but {t} has {t.dtype}")
    return shard


def gather(shards: Shards, t: TensorType, boxes: np.ndarray, shape: tuple[int, ...]) -> Array:
    """Return the array of `shape` of which every device holds its box; errors as of `collect`."""
    dtype, held = numpy_dtype(t.dtype), at_root(t)
    joint = _Joint(t, shape)
    for group in t.mesh.group_places(t.layout.partial):
        if not held[group].all():
            continue
        total = None
        for m in group:
            shard = _shard(m, shards[m], tuple((boxes[m][:, 1] - boxes[m][:, 0]).tolist()), t)
            total = shard if total is None else COMBINE[t.layout.reduction or "sum"](total, shard).astype(dtype)
        assert total is not None
        joint.write(group[0], _index(boxes[group[0]]), total)
    return joint.array


def _array(what: str, value: object) -> Array:
    try:
        return np.asarray(value)
    except (TypeError, ValueError, RuntimeError):  # lists of unequal lengths, objects that refuse
        raise LayoutError(f"{what}: the shard {excerpt(value)} is no array") from None


def run_reference(program: Program, inputs: Sequence[Shards]) -> list[list[Array]]:
    """Return the shards of every output, given those of every input (all devices, in mesh order).

    Raises `LayoutError` when an input has the wrong number or shape of shards.
    """
    if len(inputs) != len(program.inputs):
        raise LayoutError(f"{len(inputs)} inputs given, but the program has {len(program.inputs)}")
    return run_values(program, {
        name: check_shards(name, t, shards) for (name, t), shards in zip(program.inputs, inputs, strict=True)
    })  # fmt: skip


def run_values(program: Program, values: dict[str, list[Array]]) -> list[list[Array]]:
    """Return the shards of every output, given by name those of the inputs, as `check_shards` returns them.

    The values are emptied on the way: each is let go with its last use, if nobody else has it. On the way a view is in
    its operand's memory; what is returned shares its memory with nothing.
    """
    others = {id(base_array(x)) for shards in values.values() for x in shards}
    for visit in walk(program):
        step = visit.step
        results = step.op.reference(take_values(values, step.operands, visit.freed), visit.operands)
        values.update(zip(step.results, results, strict=True))
        del results  # else they would live to the end of the next step
        for name in visit.freed:
            values.pop(name, None)
    return [[own_array(x, others) for x in values[name]] for name in program.outputs]


def take_values(values: dict[str, Any], names: Sequence[str], freed: Container[str]) -> list[Any]:
    """Return what a step reads; what is freed with it is from then on in the list alone, which may drop it."""
    found = [values[name] for name in names]
    for name in names:
        if name in freed:
            values.pop(name, None)
    return found


def check_shards(name: str, t: TensorType, shards: Shards) -> list[Array]:
    """Return the shards as arrays after checking their number, shapes and dtype against the type of input `name`."""
    shards = validation.items(f"input %{name}", shards, "shards, one a device")
    if len(shards) != t.mesh.size:
        raise LayoutError(f"input %{name}: {len(shards)} shards for the {t.mesh.size} devices of {t}")
    arrays = [_array(f"input %{name}, device {k}", x) for k, x in enumerate(shards)]
    for k, x in enumerate(arrays):
        if x.shape != t.local_shape(k) or x.dtype != numpy_dtype(t.dtype):
            raise LayoutError(
                f"input %{name}, device {k}: a shard of dtype {x.dtype} and shape {x.shape}, but {t} needs "
                f"{t.dtype} and {t.local_shape(k)}"
            )
    return arrays

"""`PartitionSpec`s of types: `spec_of`. The other way is `core.shardings`.

What a type has and JAX has not (uneven dims, roots, other reductions than sums) is refused.
"""

from __future__ import annotations

from typing import Any

from jax.sharding import PartitionSpec  # pyright: ignore[reportMissingImports]

from shardplan.core.tensor import TensorType
from shardplan.errors import LayoutError


def spec_of(t: TensorType) -> Any:
    """Return the `PartitionSpec` of a type's dims; raises `LayoutError` for what JAX has no words for.

    >>> from shardplan.core.mesh import Mesh
    >>> tuple(spec_of(TensorType("f32", (8, 4), (("data", "model"), None), Mesh(data=2, model=2))))
    (('data', 'model'), None)
    """
    parts = [a for a in t.layout.used_axes if not t.mesh.span(a).whole]
    if parts or t.layout.root or not t.all_even or t.layout.reduction not in (None, "sum"):
        what = f"the sub-axis {parts[0]!r}" if parts else "an uneven dim" if not t.all_even else t.layout.suffix()
        raise LayoutError(f"{t}: a PartitionSpec cannot say {what}; legal are whole axes of even dims, and {{+axis}}")
    return PartitionSpec(*t.layout.spec, unreduced=frozenset(t.layout.partial))

"""`JaxWire`: how the collectives of a lowered program address the devices of a mesh.

On a jax mesh with one named axis per prime sub-axis they take tuples of axis names; on a mesh of the caller's own axes,
a group that is no run of whole axes is given by `axis_index_groups`, with which `psum` needs `check_vma=False`. Groups
are ordered major to minor either way.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax  # pyright: ignore[reportMissingImports]
import jax.numpy as jnp  # pyright: ignore[reportMissingImports]
import numpy as np
from jax import lax  # pyright: ignore[reportMissingImports]

from shardplan.core.mesh import Mesh

Atoms = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class JaxWire:
    """How the devices of a mesh are addressed."""

    mesh: Mesh
    axes: tuple[str, ...]  # of the jax mesh, in mesh order
    by_atom: bool  # whether there is one axis an atom; else they are the mesh's own
    checked: bool  # whether `check_vma` is on: a value is then marked as varying before a collective takes it

    def group(self, atoms: Atoms) -> dict[str, Any]:
        """Return `axis_name` and, where names do not say it, `axis_index_groups` of a collective over `atoms`."""
        if self.by_atom:
            return {"axis_name": tuple(self.axes[a] for a in atoms)}
        names = self.mesh.fold(atoms)
        if all(self.mesh.span(n).whole for n in names):
            return {"axis_name": names}
        return {"axis_name": self.axes, "axis_index_groups": self.mesh.group_places(names).tolist()}

    def place(self) -> Any:
        """Return the place in mesh order of the device that runs this."""
        return lax.axis_index(self.axes)

    def index(self, atoms: Atoms) -> Any:
        """Return the mixed-radix index of this device over `atoms`, major first."""
        place, out = self.place(), 0
        for a in atoms:
            atom = self.mesh.atoms[a]
            out = out * atom.size + place // atom.stride % atom.size
        return out

    def own_row(self, table: np.ndarray) -> Any:
        """Return this device's row of a table [places, ...], int32."""
        return jnp.asarray(np.asarray(table, dtype=np.int32))[self.place()]

    def varying(self, x: Any) -> Any:
        """Return `x` marked as different on every device, where `check_vma` keeps count."""
        if not self.checked:
            return x
        held = jax.typeof(x).manual_axis_type.varying
        missing = tuple(a for a in self.axes if a not in held)
        return jax.lax.pcast(x, missing, to="varying") if missing else x
